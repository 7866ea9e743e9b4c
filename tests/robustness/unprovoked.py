"""List the errors of the product whose message no test holds.

It runs as `python -m tests.robustness.unprovoked`.

A message counts as held where some three words of it in a row stand in a test file. That is a hint
and no proof: a short message may stand there by chance, and a test may reach an error without a
word of it. What is listed is where to look first.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("aprfmt", "cli", "inference")
WORDS = 3
LEAST = 8  # characters of a text of one word that is sought


def join_literals(text: str) -> str:
    """Return a test's text with texts that go on in the next line joined, without backslashes."""
    return re.sub(r"[\"']\s*\n?\s*[rf]*[\"']", "", text).replace("\\", "")


def message_parts(error: ast.expr) -> list[str]:
    """Return the literal parts of what an error is made with."""
    return [
        node.value
        for node in ast.walk(error)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.strip()
    ]


def is_held(parts: list[str], held: str) -> bool:
    """Return whether some words in a row of a message stand in the joined text of the tests."""
    for part in parts:
        for clause in re.split(r"[;:,]", part):
            words = clause.split()
            size = min(WORDS, len(words))
            if size < 2 and len(clause.strip()) < LEAST:
                continue
            if any(" ".join(words[at : at + size]) in held for at in range(len(words) - size + 1)):
                return True
    return False


def unprovoked_errors(source: str, held: str) -> Iterator[tuple[int, str]]:
    """Yield (line, message) of the errors of a source whose message is not held; none without one.

    `held` is the joined text of the tests.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            parts = message_parts(node.exc)
            if parts and not is_held(parts, held):
                yield node.lineno, " ... ".join(part.strip() for part in parts)


def main() -> int:
    """Print a line an error, and how many there are."""
    held = "\n".join(join_literals(path.read_text()) for path in (ROOT / "tests").rglob("*.py"))
    count = 0
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.relative_to(ROOT).parts[:2] in (("aprfmt", "cli"), ("aprfmt", "inference")):
                continue  # links to the other rooms
            for line, message in unprovoked_errors(path.read_text(), held):
                print(f"{path.relative_to(ROOT)}:{line}: {message[:120]}")
                count += 1
    print(f"{count} errors whose message no test holds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
