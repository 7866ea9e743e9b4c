"""What `aprfmt template` renders: the messages, and the text and ids that the template makes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Value
from aprfmt.errors import AprfmtError, FormatError, UsageError

if TYPE_CHECKING:
    from aprfmt.model import Model


def render_template(
    opened: "Model", messages: Sequence[Mapping[str, Value]], open_turn: bool
) -> dict[str, object]:
    """Return the text, its ids, and the tokenizer's origin; `no_ids` says why there are none."""
    from aprfmt.tokenizer import render_alone

    try:
        tokenizer = opened.tokenizer
    except AprfmtError as error:
        text = render_alone(opened, messages, add_generation_prompt=open_turn)
        if text is None:
            raise
        return {"tokenizer": None, "text": text, "ids": None, "no_ids": str(error)}
    text, ids = tokenizer.chat(messages, add_generation_prompt=open_turn)
    return {"tokenizer": tokenizer.origin, "text": text, "ids": ids}


def messages_from_options(user: str | None, system: str | None) -> list[dict[str, str]]:
    """Return the messages of --system and --user; UsageError without a user's."""
    if user is None:
        raise UsageError("template: no message; give --user TEXT or --messages FILE.json")
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": user}]


def read_messages(path: Path) -> list[dict[str, object]]:
    """Return the messages of a JSON file. Raises FormatError where it holds anything else."""
    from aprfmt.formats.bounded_json import load_file

    found = load_file(path, max_bytes=4 << 20)
    if not isinstance(found, list) or not all(
        isinstance(row, Mapping) and isinstance(row.get("role"), str) for row in found
    ):
        raise FormatError(f"{path}: expected a list of objects with role and content")
    return [dict(row) for row in found]
