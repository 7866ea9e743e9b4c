"""The operators of the generator: what a small mistake in one expression or statement looks like.

An operator gives (what to replace, its new text). The replaced part is an expression, a statement
or the text between two expressions, so that everything else of the file stays as it is.
"""

import ast
from collections.abc import Callable, Iterator, Mapping

from tests.mutations.source import Source

Edit = tuple[int, int, str]  # start and end in the text, what stands there then
Operator = Callable[[Source, ast.AST], Iterator[Edit]]

_FLIPPED: Mapping[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=", ast.LtE: ">",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
_SHIFTED: Mapping[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_OTHER: Mapping[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//",
    ast.LShift: ">>", ast.RShift: "<<", ast.BitAnd: "|", ast.BitOr: "&", ast.BitXor: "|",
    ast.Pow: "*",
}  # fmt: skip
# Called with two arguments in the other order they say the same, or fail at once.
_EITHER_WAY = {
    "min", "max", "minimum", "maximum", "isinstance", "array_equal", "isclose", "allclose", "gcd",
    "equal", "issubclass", "getattr", "hasattr", "setattr", "print", "zip", "field", "fma",
    "multiply_add",
}  # fmt: skip
_TALK = {"debug", "info", "warning", "log"}
_ANY = {"default_rng", "Random", "shorten"}  # another seed or length of a text is as good
_COSMETIC = {
    "indent",
    "stacklevel",
    "maxsize",
    "width",
    "timeout",
    "min_width",
    "max_width",
    "strict",
}


def _between(source: Source, left: ast.expr, right: ast.expr, new: str) -> Iterator[Edit]:
    """Replace an operator; operators next to brackets or comments are skipped."""
    start, stop = source.span(left)[1], source.span(right)[0]
    written = source.text[start:stop]
    if written.strip() and not set(written) & set("()#\\[]"):
        lead = written[: len(written) - len(written.lstrip())]
        tail = written[len(written.rstrip()) :]
        yield start, stop, f"{lead}{new}{tail}"


def _compares(table: Mapping[type[ast.cmpop], str]) -> Operator:
    def operator(source: Source, node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, ast.Compare):
            lefts = [node.left, *node.comparators]
            for left, op, right in zip(lefts, node.ops, node.comparators, strict=False):
                if type(op) in table:
                    yield from _between(source, left, right, table[type(op)])

    return operator


def _arithmetic(source: Source, node: ast.AST) -> Iterator[Edit]:
    text = (ast.JoinedStr, ast.List, ast.Tuple)
    if isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
        for side in (node.left, node.right):
            words = isinstance(side, ast.Constant) and isinstance(side.value, str | bytes | None)
            if words or isinstance(side, text):
                return
        yield from _between(source, node.left, node.right, _OTHER[type(node.op)])


def _and_or(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BoolOp):
        new = "or" if isinstance(node.op, ast.And) else "and"
        for left, right in zip(node.values, node.values[1:], strict=False):
            yield from _between(source, left, right, new)


def _negation(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Drop a `not`, or negate a condition that is not a comparison."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield (*source.span(node), source.of(node.operand))
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        test = node.test
        plain = (ast.Name, ast.Attribute, ast.Call, ast.BoolOp)
        if isinstance(test, plain) and "TYPE_CHECKING" not in source.of(test):
            yield (*source.span(test), f"not ({source.of(test)})")


def _constant(source: Source, node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Constant):
        return
    value, span = node.value, source.span(node)
    if isinstance(value, bool):
        yield (*span, str(not value))
    elif isinstance(value, int):
        yield (*span, str(value + 1))
        yield (*span, str(value - 1) if value else "(-1)")
    elif isinstance(value, float) and value:
        yield (*span, repr(value * 2))


def _returned(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Return) and node.value is not None:
        if not isinstance(node.value, ast.Constant):
            yield (*source.span(node.value), "None")


def _removed(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Remove a call for its effect, a check that raises, a change in place."""
    if isinstance(node, (ast.Raise, ast.AugAssign)):
        yield (*source.span(node), "pass")
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if not (isinstance(function, ast.Attribute) and function.attr in _TALK):
            yield (*source.span(node), "pass")


def _swapped(source: Source, node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else source.of(node.func)
    first, second = node.args[:2]
    if name in _EITHER_WAY or isinstance(first, ast.Starred) or isinstance(second, ast.Starred):
        return
    a, b = source.of(first), source.of(second)
    start, stop = source.span(first)[0], source.span(second)[1]
    middle = source.text[source.span(first)[1] : source.span(second)[0]]
    if a != b and middle.strip() == ",":
        yield start, stop, f"{b}{middle}{a}"


_SIDES = {"a": "b", "left": "right", "first": "second", "mine": "other", "low": "high", "x": "y",
          "A": "B", "source": "target", "before": "after"}  # fmt: skip
_OTHER_SIDE = {**_SIDES, **{other: one for one, other in _SIDES.items()}}


def _sides(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Take the other side of a pair, where both are there."""
    if isinstance(node, ast.Attribute) and node.attr in _OTHER_SIDE:
        stop = source.span(node)[1]
        yield stop - len(node.attr), stop, _OTHER_SIDE[node.attr]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and len(node.id) > 1:
        if node.id in _OTHER_SIDE:  # single letters are names of everything
            yield (*source.span(node), _OTHER_SIDE[node.id])


def _tolerance(source: Source, node: ast.AST) -> Iterator[Edit]:
    """Loosen what looks like a tolerance by four orders of magnitude."""
    if isinstance(node, ast.Constant) and isinstance(node.value, float) and 0 < node.value < 0.5:
        yield (*source.span(node), repr(node.value * 1e4))


def _left_early(source: Source, node: ast.AST) -> Iterator[Edit]:
    """End a loop at what should be passed over, or a function before its condition's body."""
    if isinstance(node, ast.Continue):
        yield (*source.span(node), "break")
    if isinstance(node, ast.If) and not node.orelse and len(node.body) > 1:
        yield (*source.span(node.body[0]), "return")


def _sliced(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None and not isinstance(bound, ast.Constant):
                yield (*source.span(bound), f"({source.of(bound)}) + 1")


OPERATORS: Mapping[str, tuple[float, Operator]] = {
    "comparison the other way": (1.0, _compares(_FLIPPED)),
    "bound moved by one": (3.0, _compares(_SHIFTED)),
    "other arithmetic": (1.0, _arithmetic),
    "and for or": (1.0, _and_or),
    "condition negated": (0.7, _negation),
    "constant changed": (0.35, _constant),
    "result dropped": (0.3, _returned),
    "statement removed": (1.0, _removed),
    "arguments swapped": (0.4, _swapped),
    "slice moved": (2.0, _sliced),
    "other side": (0.4, _sides),
    "tolerance loosened": (1.0, _tolerance),
    "left early": (0.6, _left_early),
}
"""Name -> how often it is drawn beside the others, and where it applies."""


def idle(node: ast.AST) -> bool:
    """Say whether an argument or a call decides how something looks, and nothing else."""
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
        return (name if isinstance(name, str) else getattr(name, "id", "")) in _ANY
    return isinstance(node, ast.keyword) and node.arg in _COSMETIC
