"""Mutations drawn by a seed. A site's luck depends on its own text and on the name of its file.

A file that moves, or an edit elsewhere, therefore leaves most of what is drawn.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import PurePosixPath

from tests.mutations.mutation import Mutation
from tests.mutations.operators import OPERATORS, idle
from tests.mutations.source import Definition, Function, Source

SEED = 19
COUNT = 120

WEIGHTS: tuple[tuple[str, float], ...] = (
    # Only a GPU, or a library that few have, runs these: no test of most machines could see it.
    ("cupy_backend", 0), ("torch_cuda", 0), ("graphs", 0), ("torch_pass_statistics", 0),
    ("pass_statistics", 0), ("cuda_driver", 0), ("gemm", 0), ("llama_cpp", 0),
    ("llama_text", 0), ("memory", 0), ("torch_products", 0), ("torch_weights", 0),
    ("torch_graphs", 0), ("graph_maker", 0), ("cublas", 0),
    # Words and pages: their tests are of what they say, not of every space.
    ("points_page", 0.2), ("arch/docs_page", 0.2), ("render", 0.2), ("image", 0.2),
    ("trace/page", 0.2), ("parity/page", 0.2),
    ("html", 0.2), ("doctor", 0.5), ("cli", 1), ("testing", 1), ("schemas", 1),
    # A wrong answer here is believed.
    ("formats", 4), ("codecs", 4), ("conversion", 5), ("compare", 5), ("diagnosis", 4),
    ("causes", 4),
    ("checks", 5), ("qa", 5), ("inference", 4), ("arch", 3), ("tokenizer", 3),
)  # fmt: skip
"""Folder or file -> how often its sites are drawn; the first that fits. All else is 3."""
OTHERS = 3.0

_LEFT_OUT = {"__repr__", "__str__", "__all__", "__slots__"}
_TYPES = {"Literal", "Union", "Optional", "Callable", "Mapping", "Sequence", "Annotated", "TypeVar",
          "Protocol", "TypedDict", "NewType"}  # fmt: skip


def weight(path: str) -> float:
    """Return how often the sites of a file are drawn."""
    parts = {*PurePosixPath(path).parts, PurePosixPath(path).stem}
    return next((each for name, each in WEIGHTS if name in parts), OTHERS)


def drawn(sources: Collection[Source], count: int = COUNT, seed: int = SEED) -> list[Mutation]:
    """Return `count` mutations in the order of their luck.

    At most one is of a function, and one of what stands outside of them in a file.
    """
    found = [row for each in sources if weight(each.path) for row in sites(each, seed)]
    found.sort(key=lambda row: -row[1])
    texts = {source.path: source.text for source in sources}
    taken: dict[tuple[str, str], Mutation] = {}
    for function, _, mutation in found:
        key = mutation.path, function
        if key not in taken and _parses(mutation.applied(texts[mutation.path])):
            taken[key] = mutation
        if len(taken) == count:
            break
    return list(taken.values())


def one_of_each(sources: Collection[Source], count: int, seed: int) -> list[Mutation]:
    """Return one mutation in each of `count` functions, in the order they were drawn.

    A function is as likely to be drawn as it has lines, in whatever room it stands; only those that
    a GPU or a rare library alone runs are left out. No list is kept: another seed, other functions.
    """
    rows: dict[tuple[str, str], list[tuple[float, Mutation]]] = {}
    lines: Counter[tuple[str, str]] = Counter()
    for source in sources:
        if not weight(source.path):
            continue
        for block in source.blocks:
            here = source.text.count("\n", block.start, block.stop) + 1
            lines[source.path, block.function] += here
        for function, luck, mutation in sites(source, seed):
            rows.setdefault((source.path, function), []).append((luck, mutation))

    def toss(key: tuple[str, str]) -> float:
        digest = hashlib.sha256(f"{seed}\0{key[0]}\0{key[1]}".encode()).digest()
        return float(((int.from_bytes(digest[:6], "big") + 1) / (1 << 48)) ** (1 / lines[key]))

    texts = {source.path: source.text for source in sources}
    found: list[Mutation] = []
    for key in sorted((key for key in rows if lines[key]), key=toss, reverse=True):
        ranked = sorted(rows[key], key=lambda row: -row[0])
        made = (row for _, row in ranked if _parses(row.applied(texts[key[0]])))
        found += [first] if (first := next(made, None)) is not None else []
        if len(found) == count:
            break
    return found


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def sites(source: Source, seed: int = SEED) -> Iterator[tuple[str, float, Mutation]]:
    """Give every mutation of a file with its function and its luck, which is between 0 and 1."""
    times: Counter[str] = Counter()
    name = PurePosixPath(source.path).name
    for function, node in _mutable(source.tree, ""):
        for what, (share, operator) in OPERATORS.items():
            for start, stop, new in operator(source, node):
                old = source.text[start:stop]
                around = " ".join(_line(source.text, start, stop).split())
                key = f"{name}\0{function}\0{what}\0{around}\0{new}"
                times[key] += 1
                ident = hashlib.sha256(f"{key}\0{times[key]}".encode()).hexdigest()
                toss = hashlib.sha256(f"{seed}\0{ident}".encode()).digest()
                even = (int.from_bytes(toss[:6], "big") + 1) / (1 << 48)
                luck = even ** (1 / (weight(source.path) * share))
                means = f"{what} in {function or 'the module'}"
                if old != new:
                    ident = f"drawn-{ident[:10]}"
                    yield function, luck, Mutation(ident, source.path, start, old, new, means)


def _line(text: str, start: int, stop: int) -> str:
    """Return the whole lines of a place."""
    end = text.find("\n", stop)
    return text[text.rfind("\n", 0, start) + 1 : end if end >= 0 else len(text)]


def _mutable(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.AST]]:
    """Give every node that says something at run time, with the function around it."""
    for child in _children(node):
        name = inside
        if isinstance(child, Definition):
            name = f"{inside}.{child.name}" if inside else child.name
        if _skipped(child):
            continue
        yield name, child
        if not isinstance(child, ast.Raise):  # the words of an error are not mutated
            yield from _mutable(child, name)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Give the parts of a node without annotations, decorators and base classes."""
    if isinstance(node, Function):
        yield from (each for each in (*node.args.defaults, *node.args.kw_defaults) if each)
        yield from node.body
    elif isinstance(node, ast.ClassDef):
        yield from node.body
    elif isinstance(node, ast.AnnAssign):
        yield from (node.value,) if node.value else ()
    elif isinstance(node, ast.Lambda):
        yield from (*node.args.defaults, node.body)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        yield from node.orelse
    else:
        yield from ast.iter_child_nodes(node)


def _skipped(node: ast.AST) -> bool:
    if isinstance(node, (ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)) or idle(node):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, Definition):
        marks = (*node.decorator_list, *getattr(node, "bases", ()))
        typing_only = any(_name(mark) in {"overload", *_TYPES} for mark in marks)
        return node.name in _LEFT_OUT or typing_only
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return any(_name(each) in _LEFT_OUT for each in targets) or _is_type(node.value)
    return False


def _is_type(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return _name(value.func) in _TYPES
    return isinstance(value, ast.Subscript) and _name(value.value) in _TYPES


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
