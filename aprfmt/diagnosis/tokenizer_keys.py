"""Finds the GGUF keys that repair B's tokenizer: those that a conversion of A would write."""

import json
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from aprfmt.base.protocols import TypedValue, Value
from aprfmt.errors import AprfmtError
from aprfmt.model import Model
from aprfmt.tokenizer import to_gguf

_TEMPLATE = "tokenizer.chat_template"
_FILE = "chat_template.jinja"
_LONGEST = 120  # characters of a text in a command


def tokenizer_set_arguments(a: Model, b: Model, where: Sequence[str]) -> list[str] | None:
    """Return the arguments of `aprfmt set` that give B A's tokenizer keys in `where`, or None.

    [] where one of the keys holds a list, or B is no GGUF: a command cannot hold that. None where
    GGUF cannot express A's tokenizer.
    """
    if b.key_style != "gguf":
        return []
    try:
        return list(_set_arguments(a, b, to_gguf(a), dict.fromkeys(where)))
    except LookupError:
        return []
    except AprfmtError:
        return None


def _set_arguments(
    a: Model, b: Model, written: dict[str, Value | TypedValue], where: Iterable[str]
) -> Iterator[str]:
    """Yield an argument per key; raises LookupError for a value that does not fit a command.

    `written` are the keys that a conversion of A writes.
    """
    for key in where:
        if key not in written and key not in b.metadata:
            continue
        if key not in written:
            yield f"--remove {shlex.quote(key)}"
            continue
        held = written[key]
        value = held.value if isinstance(held, TypedValue) else held
        file = None if a.folder is None else a.folder.path / _FILE
        if key == _TEMPLATE and file is not None and _file_has_text(file, value):
            yield shlex.quote(f"{key}=@{file}")
        elif isinstance(value, str) and len(value) <= _LONGEST and value.isprintable():
            yield shlex.quote(f"{key}={value}")
        elif isinstance(value, bool | int | float):
            yield shlex.quote(f"{key}={json.dumps(value)}")
        else:
            raise LookupError(key)


def _file_has_text(file: Path, value: Value) -> bool:
    """Return whether a file exists and has exactly this text."""
    return file.is_file() and file.read_text(encoding="utf-8") == value


def has_more_tokens(a: Model, b: Model) -> bool:
    """Return whether B's tokenizer has more tokens than A's; True if a tokenizer is missing."""
    try:
        return b.tokenizer.vocab_size > a.tokenizer.vocab_size
    except AprfmtError:
        return True
