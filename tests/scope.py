"""What `python -m tests` takes of large families of parametrized tests, and what it leaves out.

A family is one file whose tests try every combination. The whole of each runs in
`python -m tests --everything` and whenever pytest is called by itself; `python -m tests` takes the
first of each function, every test that a requirement names, and one in so many of the rest, chosen
by the hash of its name, so that the same tests run everywhere. What is left out is counted.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCOPE = "APRFMT_TESTS"  # "sampled" takes the part, anything else the whole
SAMPLED = "sampled"


def cause(name: str) -> str:
    """Return what a seeded fault's row stands for: its first cause and its verdict."""
    from tests.diagnose.faults import FAULTS

    fault = FAULTS[name]
    return f"{fault.causes[0] if fault.causes else ''} {fault.verdict}"


def architecture(name: str) -> str:
    """Return the longest name of an architecture that a test's name contains, or ""."""
    from tests.models import MAKERS

    return max((key for key in MAKERS if key in name), key=len, default="")


@dataclass(frozen=True)
class Family:
    """One in `every` tests is taken, and the first of each kind where `kind` says a test's."""

    every: int
    kind: Callable[[str], str] | None = None


FAMILIES: Mapping[str, Family] = {
    "tests/arch/test_find.py": Family(4),
    "tests/arch/test_required.py": Family(5),
    "tests/cli/test_damage.py": Family(4),
    "tests/cli/test_missing.py": Family(4),
    "tests/codecs/test_encode_ggml.py": Family(4),
    "tests/codecs/test_native_encode.py": Family(3),
    "tests/codecs/test_oracles_made.py": Family(1 << 64),
    "tests/compare/test_nonfinite.py": Family(3),
    "tests/diagnose/test_faults.py": Family(6, cause),
    "tests/formats/test_atomic_kills.py": Family(3),
    "tests/formats/test_atomic_writers.py": Family(3),
    "tests/field/test_answers.py": Family(6),
    "tests/fuzz/test_fuzz.py": Family(3),
    "tests/fuzz/test_planted.py": Family(4),
    "tests/inference/gpu/test_cupy_backend.py": Family(2),
    "tests/inference/test_cache.py": Family(3),
    "tests/inference/test_dry_run.py": Family(3, architecture),
    "tests/inference/test_formats.py": Family(3, architecture),
    "tests/inference/test_ignored_keys.py": Family(3, architecture),
    "tests/inference/test_nonfinite.py": Family(3),
    "tests/inference/test_parity_text.py": Family(3),
    "tests/inference/test_rounding.py": Family(3, architecture),
    "tests/tokenizer/test_hostile.py": Family(2),
    "tests/tokenizer/test_template.py": Family(3),
}
_PARTS = re.compile(r"^(?P<file>[^:]+)::(?P<test>[^\[]+)\[(?P<name>.*)\]$", re.S)


def left_out(ids: Sequence[str], named: frozenset[str] = frozenset()) -> set[str]:
    """Return which tests of `ids` are not in the sample; `named` are always in it.

    Tests without parameters are always in it, and so are files that are no family.
    """
    out: set[str] = set()
    kinds: set[tuple[str, str, str]] = set()
    for node in ids:
        found = _PARTS.match(node)
        family = FAMILIES.get(found["file"]) if found else None
        if found is None or family is None:
            continue
        kind = family.kind(found["name"]) if family.kind else ""
        first = (found["file"], found["test"], kind) not in kinds
        kinds.add((found["file"], found["test"], kind))
        if not (first or node in named or chosen(node, family.every)):
            out.add(node)
    return out


def chosen(node: str, every: int) -> bool:
    """Say whether a test is the one in `every`, by the hash of its name."""
    return int.from_bytes(hashlib.sha256(node.encode()).digest()[:4], "big") % every == 0


def sample(config: Any, items: list[Any]) -> None:
    """Deselect what is left out of this run, in place; pytest counts it as deselected."""
    if os.environ.get(SCOPE) != SAMPLED:
        return
    from tests.requirements import PAGE, rows

    named = frozenset(test for row in rows(PAGE.read_text()) for test in row.tests)
    out = left_out([item.nodeid for item in items], named)
    if out:
        gone = [item for item in items if item.nodeid in out]
        items[:] = [item for item in items if item.nodeid not in out]
        config.hook.pytest_deselected(items=gone)
