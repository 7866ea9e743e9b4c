"""Whole answers that somebody has read and approved, kept as text beside the tests.

A test holds what its author thought of; an answer has many more words and numbers. `check` compares
all of them with a file of the repository, so that a change of any is seen by a test and in `git
diff`. The files are written by running the tests with APRFMT_APPROVE=1: read what changed before it
is committed. Nothing here says that an answer is right: other tests do. Every case of the default
run has a file; of a family's others, those have one that somebody approved.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.scope import SAMPLED, SCOPE

WRITE = "APRFMT_APPROVE"
ROOT = Path(__file__).resolve().parent.parent
NEAR, SMALL = 0.05, 1e-4  # of a number that was computed; below the second it is rounding
_FOLDER = re.compile(r"(?:/[\w.-]+)*/(?:aprfmt-[a-z-]+-|tmp)\w{8}(?=/)")
_TIME = re.compile(r"(?<![\w.])[\d.,]+ *(?:ms|s|min)\b|[\d.,]+ *(?:[KMG]i?)?B/s|[\d.]+ tokens/s")
_NUMBER = re.compile(r"(?<![\w.])(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.]*[A-Za-z_])")


def check(file: Path, text: str, paths: Mapping[str, str] | None = None) -> None:
    """Hold `text` against an approved file: each word, and each number as near as rounding allows.

    `paths` gives words for folders of this run. Whole numbers and words have to be equal.
    """
    found = settled(text, paths or {})
    if os.environ.get(WRITE):
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or differences(file.read_text("utf-8"), found):
            file.write_text(found, "utf-8")
        return
    if not file.exists() and os.environ.get(SCOPE) != SAMPLED:
        return
    assert file.exists(), f"{file.name} is not approved yet: run this with {WRITE}=1 and read it"
    wrong = differences(file.read_text("utf-8"), found)
    assert not wrong, f"{file.name} says something else:\n" + "\n".join(wrong)


def settled(text: str, paths: Mapping[str, str]) -> str:
    """Return a text without what differs in each run: folders, times, widths of columns."""
    paths = {str(ROOT): "ROOT", **paths}
    for path, word in sorted(paths.items(), key=lambda item: -len(item[0])):
        text = text.replace(path, word)
    text = _TIME.sub("TIME", _FOLDER.sub("TMP", text))
    return "\n".join(" ".join(line.split()) for line in text.strip().splitlines()) + "\n"


def differences(approved: str, found: str) -> list[str]:
    """Return pairs of lines that differ, the approved one first."""
    ours, theirs = approved.splitlines(), found.splitlines()
    wrong = []
    for at in range(max(len(ours), len(theirs))):
        a = ours[at] if at < len(ours) else "(no line)"
        b = theirs[at] if at < len(theirs) else "(no line)"
        if not same_line(a, b):
            wrong += [f"- {a}", f"+ {b}"]
    return wrong[:20]


def leaves(value: Any, path: str = "", most: int = 12) -> Iterator[str]:
    """Yield a line for each value of a JSON object, and of long lists those at both ends."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}", most)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield f"{path}: {len(value)}"
        for at, item in enumerate(value):
            if at < most // 2 or at >= len(value) - most // 2:
                yield from leaves(item, f"{path}/{at}", most)
    elif isinstance(value, float):
        yield f"{path}: {value:.6g}"
    else:
        yield f"{path}: {value!r}"


def same_line(a: str, b: str) -> bool:
    """Say whether two lines are equal but for rounding of the numbers in them."""
    if a == b:
        return True
    words, others = _NUMBER.split(a), _NUMBER.split(b)
    if len(words) != len(others) or words[::2] != others[::2]:
        return False
    return all(map(near, words[1::2], others[1::2]))


def near(a: str, b: str) -> bool:
    """Say whether two written numbers are equal but for rounding; whole ones have to be equal."""
    x, y = float(a), float(b)
    if a.lstrip("-").isdigit() and b.lstrip("-").isdigit():
        return x == y
    return abs(x - y) <= SMALL + NEAR * max(abs(x), abs(y))
