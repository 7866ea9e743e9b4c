"""Reads the golden file: prompts with expected answers, and texts with expected losses.

A JSON object, at most 16 MB. `greedy` is a list of prompts, each with

- `name`, and either `prompt` (a text) or `messages` (a chat; `prompt` is then the rendered text);
- what is expected, any of: `output_ids` (the stop token included), `output_text`, `contains`
  (a text or several), `parses` ("python", with `defines`: names of functions);
- `prompt_ids`, `max_tokens` (64 without `output_ids`), and `smallest_lead`: by how many logits
  the expected tokens won at least; below bounds.LEAD another answer is no verdict.

`losses` is a list of texts with `name`, `text` (or `ids`), `nats_per_token` and `tolerance`, the
last two optional. Without a file every model gets DEFAULT: nothing is expected of its answers but
that they are no gibberish.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.errors import FormatError
from aprfmt.formats.bounded_json import load_file
from aprfmt.model import Model

NAME = "golden.json"  # in the folder of the weights
FORMAT = 1
MAX_BYTES = 16 << 20
MAX_TOKENS = 64
MOST = 1e9  # of any number here
MOST_TOKENS = 1 << 20  # longer than any context in use
# Written for this purpose: ordinary English that is in no training set.
TEXT = (
    "The harbour master counted nineteen boats before breakfast, and wrote the number on a slate "
    "that hung beside the stove. It had rained in the night; the planks were dark, and two gulls "
    "walked along them as if they had been hired. Nobody expected the ferry until noon, so he put "
    "the kettle on, moved his chair towards the window, and began to mend the strap of his bag "
    "with a needle that was much too small for the leather."
)


@dataclass(frozen=True)
class GoldenPrompt:
    """One prompt of the golden file, and what is expected of the model's answer.

    `prompt` is a text, or None with a chat's `messages`. The other fields are keys of the file that
    the module's text explains.
    """

    name: str
    prompt: str | None
    messages: tuple[Mapping[str, str], ...] = ()
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    output_text: str | None = None
    contains: tuple[str, ...] = ()
    parses: str | None = None
    defines: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS
    smallest_lead: float | None = None

    @property
    def form(self) -> str:
        """The form of the prompt: "chat" for messages, "direct" for a text."""
        return "chat" if self.messages else "direct"

    @property
    def expects(self) -> bool:
        """Whether the file prescribes anything of the answer's content."""
        given = (self.output_ids, self.output_text, self.parses)
        return any(item is not None for item in given) or bool(self.contains)


@dataclass(frozen=True)
class GoldenText:
    """A text, or its token ids, and the loss it should have in nats.

    `nats` is None for a text whose loss only has to be one of usual text.
    """

    name: str
    text: str | None
    ids: tuple[int, ...] | None = None
    nats: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class GoldenFile:
    """The prompts and texts for a model; `origin` is the file's path, or words for DEFAULT."""

    origin: str
    prompts: tuple[GoldenPrompt, ...]
    texts: tuple[GoldenText, ...]


DEFAULT = GoldenFile(
    "the built-in prompts",
    (
        GoldenPrompt("direct", "The three primary colours are"),
        GoldenPrompt(
            "chat", None, ({"role": "user", "content": "What is the capital of France?"},)
        ),
    ),
    (GoldenText("harbour", TEXT),),
)


def find_golden(model: Model, file: Path | None) -> GoldenFile:
    """Return the golden file `file`, else golden.json of the model's folder, else DEFAULT."""
    if file is not None:
        return read_golden(file)
    if model.folder is not None and (model.folder.path / NAME).is_file():
        return read_golden(model.folder.path / NAME)
    return DEFAULT


def read_golden(path: Path) -> GoldenFile:
    """Return a golden file's prompts and texts; FormatError names the entry and key at fault."""
    return parse_golden(load_file(path, max_bytes=MAX_BYTES), path)


def parse_golden(data: Any, path: Path) -> GoldenFile:
    """Return the prompts and texts in a golden file's JSON value; FormatError for another.

    `path` begins the messages.
    """
    if not isinstance(data, Mapping) or data.get("format", FORMAT) != FORMAT:
        raise FormatError(f'{path}: expected an object with "format": {FORMAT}')
    prompts = [_parse_prompt(row, path) for row in _named_entries(data, "greedy", path)]
    texts = [_parse_text(row, path) for row in _named_entries(data, "losses", path)]
    if not prompts and not texts:
        raise FormatError(f'{path}: holds neither "greedy" prompts nor "losses"')
    return GoldenFile(str(path), tuple(prompts), tuple(texts))


def _named_entries(data: Mapping[str, Any], key: str, path: Path) -> list[Mapping[str, Any]]:
    """Return the list of entries under a key; FormatError for a name that is missing or twice.

    `path` is for the error.
    """
    rows = data.get(key, [])
    if not isinstance(rows, list) or not all(
        isinstance(row, Mapping) and isinstance(row.get("name"), str) for row in rows
    ):
        raise FormatError(f'{path}: "{key}" is no list of objects with a name')
    names = [row["name"] for row in rows]
    if len(set(names)) != len(names):
        raise FormatError(f'{path}: "{key}" names one entry twice')
    return rows


def _parse_prompt(row: Mapping[str, Any], path: Path) -> GoldenPrompt:
    """Return an entry of `greedy` as a prompt; FormatError names the key at fault.

    `path` is for the error.
    """
    where = f"{path}: {row['name']:.80}"
    # Check each key before it is used: the file is written by hand.
    messages = row.get("messages", [])
    if not isinstance(messages, list) or not all(
        isinstance(m, Mapping) and all(isinstance(m.get(k), str) for k in ("role", "content"))
        for m in messages
    ):
        raise FormatError(f"{where}: messages are no list of objects with role and content")
    prompt = _optional_value(row, "prompt", str, where)
    if prompt is None and not messages:
        raise FormatError(f"{where}: has neither prompt nor messages")
    contains = row.get("contains", [])
    contains = [contains] if isinstance(contains, str) else contains
    output_ids = _optional_ids(row, "output_ids", where)
    parses = _optional_value(row, "parses", str, where)
    if parses not in (None, "python"):
        raise FormatError(f"{where}: parses is {parses!r:.40}; expected python")
    limit = _optional_value(row, "max_tokens", int, where)
    if limit is not None and not 0 < limit <= MOST_TOKENS:
        raise FormatError(f"{where}: max_tokens is {limit!r:.40}; expected 1 to {MOST_TOKENS}")
    return GoldenPrompt(
        row["name"],
        prompt,
        tuple(dict(message) for message in messages),
        _optional_ids(row, "prompt_ids", where),
        output_ids,
        _optional_value(row, "output_text", str, where),
        _string_tuple(contains, "contains", where),
        parses,
        _string_tuple(row.get("defines", []), "defines", where),
        limit if limit is not None else len(output_ids) if output_ids else MAX_TOKENS,
        _optional_value(row, "smallest_lead", (int, float), where),
    )


def _parse_text(row: Mapping[str, Any], path: Path) -> GoldenText:
    """Return an entry of `losses` as a text; FormatError where it has neither text nor ids.

    `path` is for the error.
    """
    where = f"{path}: {row['name']:.80}"
    text, ids = _optional_value(row, "text", str, where), _optional_ids(row, "ids", where)
    if text is None and ids is None:
        raise FormatError(f"{where}: has neither text nor ids")
    numbers = (int, float)
    return GoldenText(
        row["name"],
        text,
        ids,
        _optional_value(row, "nats_per_token", numbers, where),
        _optional_value(row, "tolerance", numbers, where),
    )


def _optional_value(row: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    """Return row[key], None where it is missing; FormatError for another type or a huge number.

    `kind` is a type or a tuple of types.
    """
    value = row.get(key)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        words = {int: "a whole number", str: "text"}
        raise FormatError(
            f"{where}: {key} is {value!r:.80}; expected {words.get(kind, 'a number')}"
        )
    if isinstance(value, (int, float)) and not -MOST <= value <= MOST:
        raise FormatError(f"{where}: {key} is {value!r:.40}; expected at most {MOST:g}")
    return value


def _optional_ids(row: Mapping[str, Any], key: str, where: str) -> tuple[int, ...] | None:
    """Return row[key] as token ids, None where it is missing; FormatError for anything else."""
    value = row.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(i) is int and i >= 0 for i in value):
        raise FormatError(f"{where}: {key} is no list of token ids")
    return tuple(value)


def _string_tuple(value: Any, key: str, where: str) -> tuple[str, ...]:
    """Return a list of texts as a tuple; FormatError for anything else.

    `key` and `where`, which says where the file has it, are for the error.
    """
    if not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise FormatError(f"{where}: {key} is no list of texts")
    return tuple(value)
