"""Make streams print a substitute for characters that their encoding lacks (cp1252, ASCII).

Python's own answer for stdout is an exception in the middle of a result.
"""

import codecs
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from aprfmt.base.text_escape import ELLIPSIS, spell_character

HANDLER = "aprfmt.spelled"
# Characters that this package prints of its own, by what stands for them.
OURS: Mapping[str, str] = {"├": "|", "└": "`", "─": "-", "│": "|", ELLIPSIS: "..."}


def _substitute_missing(error: UnicodeError) -> tuple[str, int]:
    """Return (substitute text, position after it) for characters that cannot be encoded.

    It is a handler for `codecs.register_error`. Raises the error for anything but encoding.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(
        OURS.get(character) or spell_character(character) for character in missing
    ), error.end


def fill_closed_streams() -> bool:
    """Open the null device for stdin, stdout and stderr where they are closed.

    Else the first file that is opened takes such a number, and what a library prints goes into it.
    Returns whether stdout was closed.
    """
    closed = []
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            got = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            if got != number:
                os.dup2(got, number)
                os.close(got)
            closed.append(name)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))
    return "stdout" in closed


def spell_missing(*streams: TextIO) -> None:
    """Make streams print escapes for the characters that their encoding lacks.

    The escapes are those of `text_escape`. A stream that already replaces such characters, or that
    is no text over bytes, is not changed.
    """
    codecs.register_error(HANDLER, _substitute_missing)
    for stream in streams:
        if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=HANDLER)
