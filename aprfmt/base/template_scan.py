"""Find suspicious parts of a chat template by reading its syntax tree.

Constant strings are joined first, so that `'__cl' ~ 'ass__'` is found. A chat template joins
strings and loops over messages; it needs no Python internals, no other templates and no huge
counts. Runs in the child process (`tokenizer/render_child.py`), whose start every `inspect` waits
for: it stands here because importing it imports nothing else of ours.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

LONG = 10_000  # counts beyond any message list; jinja2's own limit for range() is 100,000
MOST = 40  # findings shown
# Names that lead from an object to the interpreter without an underscore in front.
INTERNALS = frozenset(
    "mro func_globals func_code im_func im_self gi_frame gi_code cr_frame cr_code ag_frame ag_code "
    "f_globals f_locals f_builtins f_back tb_frame tb_next".split()
)
RUNNERS = frozenset(
    "system popen exec eval execfile compile spawn check_output import_module load_module "
    "subclasses builtins globals locals getattr setattr delattr open fdopen".split()
)
GLOBALS = frozenset("lipsum cycler joiner self request config url_for get_flashed_messages".split())
OFFERED = frozenset(
    "range dict namespace raise_exception strftime_now caller super loop cycler joiner".split()
)
ATTRIBUTE_FILTERS = frozenset("map selectattr rejectattr groupby sort unique sum min max".split())
_DUNDER = re.compile(r"__[A-Za-z]\w*__")
_FIELD = re.compile(r"\{[^{}]*[.\[][^{}]*\}")


def find_suspicious(template: str, environment: Any) -> list[str]:
    """Return a sentence for each suspicious expression, beginning with its line; [] if none.

    `environment` is the jinja2 environment that parses the template.
    """
    from jinja2 import nodes
    from jinja2.exceptions import TemplateSyntaxError

    try:
        tree = environment.parse(template)
    except TemplateSyntaxError as error:
        return [f"line {error.lineno}: does not parse: {error.message}"]
    except RecursionError:
        return ["line 1: nested too deeply to be read"]
    tree.set_environment(environment)
    defined = {n.name for n in tree.find_all(nodes.Name) if n.ctx in ("store", "param")}
    defined |= {n.name for n in tree.find_all(nodes.Macro)}
    found: dict[str, None] = {}
    stack = [tree]
    while stack:
        node = stack.pop()
        check = CHECKS.get(type(node).__name__)
        if check is not None:
            for text in check(node, defined):
                found[f"line {node.lineno}: {' '.join(text.split())}"] = None
        stack.extend(reversed(list(node.iter_child_nodes())))
    return list(found)[:MOST]


def constant_value(node: Any) -> Any:
    """Return the value of a constant expression; None if the expression is not constant."""
    try:
        return node.as_const()
    except MemoryError:
        raise
    except Exception:  # jinja2's Impossible, or any error of the operation itself
        return None


def _is_internal(name: Any) -> bool:
    """Return whether a name leads to Python's internals: an underscore in front, or a known one."""
    return isinstance(name, str) and (name.startswith("_") or name in INTERNALS)


def _check_getattr(node: Any, defined: set[str]) -> Iterator[str]:
    """Yield a sentence if an attribute access `x.name` reads one of Python's internals.

    `defined` (names that the template sets) is not used.
    """
    if _is_internal(node.attr):
        yield f"reads .{node.attr}, one of Python's internals"


def _check_getitem(node: Any, defined: set[str]) -> Iterator[str]:
    """Yield a sentence if `x[...]` reads one of Python's internals, or a name made at run time.

    `defined` (names that the template sets) is not used.
    """
    name = constant_value(node.arg)
    if _is_internal(name):
        yield f"reads [{name!r}], one of Python's internals"
    elif name is None and type(node.arg).__name__ in ("Concat", "Add", "Mod", "Filter", "Call"):
        if _has_underscores(node.arg):
            yield "reads a member whose name is put together at run time"


def _has_underscores(node: Any) -> bool:
    """Return whether an expression, or a constant in it, is a text with an underscore."""
    from jinja2 import nodes

    texts = [constant_value(part) for part in (node, *node.find_all(nodes.Const))]
    return any(isinstance(text, str) and "_" in text for text in texts)


def _check_filter(node: Any, defined: set[str]) -> Iterator[str]:
    """Yield sentences for filters that read members by name.

    `defined` (names that the template sets) is not used.
    """
    if node.name == "attr":
        yield "uses the filter attr, which reads members by name"
    if node.name in ATTRIBUTE_FILTERS:
        given = [*node.args, *(pair.value for pair in node.kwargs)]
        for value in map(constant_value, given):
            parts = value.split(".") if isinstance(value, str) else ()
            if any(map(_is_internal, parts)):
                yield f"uses the filter {node.name} on {value!r}, one of Python's internals"
            if value == "attr":
                yield f"uses the filter {node.name} with attr, which reads members by name"


def _check_call(node: Any, defined: set[str]) -> Iterator[str]:
    """Yield sentences for calls of unknown functions, of methods that run code, or of huge ranges.

    `defined` are the names that the template sets.
    """
    callee = node.node
    kind = type(callee).__name__
    if kind == "Name" and callee.name not in OFFERED | defined:
        yield f"calls {callee.name}(), which chat templates do not have"
    if kind == "Name" and callee.name == "range":
        if any(isinstance(n, int) and abs(n) > LONG for n in map(constant_value, node.args)):
            yield f"counts beyond {LONG} in range()"
    if kind == "Getattr" and callee.attr in RUNNERS:
        yield f"calls .{callee.attr}(), which runs code or opens files in Python"
    if kind == "Getattr" and callee.attr in ("format", "format_map"):
        text = constant_value(callee.node)
        if not isinstance(text, str) or _FIELD.search(text):
            yield f"calls .{callee.attr}() in a way that can read members by name"


def _check_name(node: Any, defined: set[str]) -> Iterator[str]:
    """Yield sentences for names of jinja2's own functions and of Python's internals.

    `defined` are the names that the template sets.
    """
    if node.ctx == "load" and node.name in GLOBALS - defined:
        yield f"uses {node.name}, which leads to jinja2's own functions and not to the messages"
    if _is_internal(node.name):
        yield f"uses the name {node.name}, one of Python's internals"


def _check_text(node: Any, defined: set[str]) -> Iterator[str]:
    """Yield a sentence if a constant text holds a name like `__class__`.

    `defined` (names that the template sets) is not used.
    """
    value = constant_value(node)
    match = _DUNDER.search(value) if isinstance(value, str) else None
    if match:
        yield f"holds the string {match[0]!r}, one of Python's internals"


def _check_multiplication(node: Any, defined: set[str]) -> Iterator[str]:
    """Yield a sentence if a multiplication has a factor beyond LONG.

    `defined` (names that the template sets) is not used.
    """
    sides = [constant_value(node.left), constant_value(node.right)]
    if any(isinstance(n, int) and abs(n) > LONG for n in sides):
        yield f"multiplies by more than {LONG}"


def _check_power(node: Any, defined: set[str]) -> Iterator[str]:
    """Yield a sentence if an exponent is above 64 or not constant.

    `defined` (names that the template sets) is not used.
    """
    power = constant_value(node.right)
    if not isinstance(power, int) or abs(power) > 64:
        yield "raises to a large or unknown power"


def _check_import(node: Any, defined: set[str]) -> Iterator[str]:
    """Yield a sentence: the node loads another template.

    `defined` (names that the template sets) is not used.
    """
    yield f"loads another template ({type(node).__name__.lower()})"


NodeCheck = Callable[[Any, set[str]], Iterator[str]]
CHECKS: Mapping[str, NodeCheck] = {
    "Getattr": _check_getattr,
    "Getitem": _check_getitem,
    "Filter": _check_filter,
    "Call": _check_call,
    "Name": _check_name,
    "Const": _check_text,
    "Concat": _check_text,
    "Add": _check_text,
    "Mul": _check_multiplication,
    "Pow": _check_power,
    "Include": _check_import,
    "Import": _check_import,
    "FromImport": _check_import,
    "Extends": _check_import,
}
