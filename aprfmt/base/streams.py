"""What a stream whose encoding lacks a character prints in its place (cp1252, latin-1, ASCII).

Python's own answer for stdout is an exception in the middle of a result.
"""

import codecs
from collections.abc import Mapping
from typing import TextIO

from aprfmt.base.text_escape import ELLIPSIS, spell_character

HANDLER = "aprfmt.spelled"
# Characters that this package prints of its own, by what stands for them.
OURS: Mapping[str, str] = {"├": "|", "└": "`", "─": "-", "│": "|", ELLIPSIS: "..."}


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(
        OURS.get(character) or spell_character(character) for character in missing
    ), error.end


def spell_missing(*streams: TextIO) -> None:
    """Make streams print what their encoding lacks as `text_escape.escape` would spell it.

    A stream that replaces such characters already, and one that is no text over bytes, stays.
    """
    codecs.register_error(HANDLER, _spelled)
    for stream in streams:
        if getattr(stream, "errors", "") == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=HANDLER)
