"""The traced copy's text: each block of a file begins by naming its number."""

import ast

from tests.mutations.source import Block, Source

CALL = "_seen_"
IMPORT = "import aprfmt._seen\n"  # the first line of the package: it defines the call

# A file that is run as a script may not have the package yet; what it does before is not seen.
LATER = f"""\
try:
    {CALL}  # type: ignore[name-defined]
except NameError:
    import builtins
    builtins.{CALL} = lambda number: None
"""


def instrumented(source: Source) -> str:
    """Return the text of a file whose blocks say their numbers."""
    edits: list[tuple[int, str]] = []
    for block in source.blocks:
        edits += _edits(source, block)
    if source.path == "aprfmt/__init__.py":
        edits.append((_top(source), IMPORT))
    elif "__main__" in source.text:
        edits.append((_top(source), LATER))
    text = source.text
    for place, added in sorted(edits, reverse=True):
        text = text[:place] + added + text[place:]
    return text


def _edits(source: Source, block: Block) -> list[tuple[int, str]]:
    call = f"{CALL}({block.number})"
    if block.expression:
        return [(block.start, f"{call} or ("), (block.stop, ")")]
    line = source.text.rfind("\n", 0, block.start) + 1
    indent = source.text[line : block.start]
    if indent.strip():  # behind a colon: what stands there is a simple statement
        return [(block.start, f"{call}; ")]
    return [(line, f"{indent}{call}\n")]


def _top(source: Source) -> int:
    """Return where the first statement stands that may follow others."""
    for statement in source.tree.body:
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not (future or text):
            return source.span(statement)[0]
    return len(source.text)
