"""The promise of every parser for every input: one clean error, or content that reads back equal.

Any other exception, or an error text that a terminal could not show, ends the run with a traceback
that the fuzzing engine keeps together with the input; so does too much processor time, which the
tests give freely and `python -m tests.fuzz` holds to `SECONDS`.
"""

import time
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from aprfmt.base.text_escape import escape
from aprfmt.errors import AprfmtError
from aprfmt.tokenizer import template
from tests.patience import PATIENCE

SECONDS = 2.0  # of processor time for one input: what is promised
LONGEST = 2000  # characters of one error message
_HARMFUL = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
MEMORY = 1 << 30  # bytes of a fuzzing process, instrumentation and engine included


class BrokenPromiseError(AssertionError):
    """An input for which a parser did not keep its promise."""


@dataclass(frozen=True)
class Target:
    """One parser. `use` reads a buffer in every way there is; `seeds` are small inputs."""

    name: str
    use: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    mend: Callable[[bytes], bytes] | None = None  # makes checksums and lengths true again
    aside: bool = False  # no parser of a file by itself: a short run will do where time is short


def judge(target: Target, data: bytes, seconds: float = PATIENCE) -> bool:
    """Use the input, mended too; say whether it was accepted as it stands."""
    accepted = _judge(target, data, seconds)
    if target.mend is not None:
        mended = target.mend(data)
        if mended != data:
            _judge(target, mended, seconds)
    return accepted


def _judge(target: Target, data: bytes, seconds: float) -> bool:
    began = time.process_time()
    scan = template.scan_template
    try:
        # Scanning starts a process; hostile templates have tests of their own.
        template.scan_template = lambda template: []
        target.use(data)
    except AprfmtError as error:
        _check_text(error)
        accepted = False
    else:
        accepted = True
    finally:
        template.scan_template = scan
    spent = time.process_time() - began
    if spent > seconds:
        raise BrokenPromiseError(f"{target.name}: {len(data)} bytes took {spent:.1f} s of CPU")
    return accepted


def _check_text(error: AprfmtError) -> None:
    text = str(error)
    if not text or len(text) > LONGEST:
        raise BrokenPromiseError(f"a message of {len(text)} characters: {text[:200]}")
    check_shown(escape(text))


def check_shown(text: str) -> None:
    """Raise for characters that move a cursor, change the reading direction or break a line.

    Unassigned code points are harmless, and which ones those are depends on Python's version.
    """
    if not text.isprintable() and not _HARMFUL.isdisjoint(map(unicodedata.category, text)):
        raise BrokenPromiseError(f"not fit to be shown: {text[:200]!r}")


def same(before: object, after: object, what: str) -> None:
    """Raise BrokenPromiseError unless what was read twice is equal."""
    if before != after:
        raise BrokenPromiseError(f"{what}: read {before!r:.500}, then {after!r:.500}")
