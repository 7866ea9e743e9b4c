"""The parts of a model's tokenizer as stored in its files or metadata, parsed once.

A Hugging Face folder has files; our GGUF and APR embed the same files in their metadata. Any
GGUF and APR has metadata keys, too; where both give a value the keys win (a user may have set
them).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import Value
from aprfmt.errors import AprfmtError, FormatError
from aprfmt.model.carried_files import read_embedded_files
from aprfmt.model.hf_folder import read_text
from aprfmt.remote.paths import is_remote
from aprfmt.tokenizer.keys import (
    APR_CHAT_TEMPLATE,
    CHAT_TEMPLATE,
    FLAGS,
    HF_JSON,
    IDS,
    READ_CONFIG_KEYS,
    READ_FILES,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    TOKENIZER_JSON,
    Key,
)
from aprfmt.tokenizer.tokenizer_cost import refuse_long_frame

if TYPE_CHECKING:
    from aprfmt.model import Model

MAX_JSON = 64 << 20  # the largest real tokenizer.json is about 35 MB
MAX_TEMPLATE = 1 << 20  # the largest real chat template has about 100 kB
MAX_TOKENS = 1 << 24
DEFAULT_TEMPLATE = "default"  # of several by name, the one that is taken

# format -> the name a Key has there; Hugging Face folders have files instead.
_SPELLING: Mapping[str, Callable[[Key], str]] = {
    "gguf": lambda key: key.gguf,
    "apr": lambda key: key.apr,
}


def _first_template(stored: Iterator[tuple[Value, str]]) -> tuple[Value, str]:
    """Return the first (chat template, or several by name; file or key); (None, "") without one."""
    return next(((text, at) for text, at in stored if text), (None, ""))


def gguf_template_name(name: str) -> str:
    """Return the name of a chat template as gguf-py writes it into a key."""
    return re.sub("[^A-Za-z0-9]", "_", name)


def templates_by_name(stored: Sequence[Any] | Mapping[str, Any]) -> dict[str, str]:
    """Return {name: text} of a list of named chat templates, or of an object of them."""
    rows = (
        stored.items()
        if isinstance(stored, Mapping)
        else [(row.get("name"), row.get("template")) for row in stored if isinstance(row, Mapping)]
    )
    return {
        gguf_template_name(name): text
        for name, text in rows
        if isinstance(name, str) and isinstance(text, str)
    }


@dataclass(frozen=True)
class Carried:
    """The stored tokenizer parts of one open model.

    Every file is parsed on first use and only once. `cache` is a cache for other modules.
    """

    model: "Model"
    cache: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    _parsed: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    _tokenizer_json_keys: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def where(self) -> str:
        """The path of the model, with which messages begin."""
        return str(self.model.path)

    def metadata_value(self, key: Key) -> Value:
        """Return the metadata value of a Key, by this format's spelling; None if it is absent."""
        spell = _SPELLING.get(self.model.key_style)
        return None if spell is None else self.model.metadata.get(spell(key))

    def key_text(self, key: Key) -> str:
        """Return `PATH: KEY` for messages, the key as this format spells it."""
        spell = _SPELLING.get(self.model.key_style)
        return f"{self.where}: {key.gguf if spell is None else spell(key)}"

    def list_length(self, key: Key) -> int | None:
        """Return the length of a list value without reading its elements; None without a list."""
        value = self.metadata_value(key)
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        return len(value) if is_list else None

    def list_value(self, key: Key, kind: type | tuple[type, ...]) -> list[Any] | None:
        """Return the list value of a key; None if absent.

        Raises FormatError if it is no list, is too long, or has elements that are not of `kind`.
        """
        value = self.metadata_value(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise FormatError(f"{self.key_text(key)}: is {type(value).__name__}; expected a list")
        if len(value) > MAX_TOKENS:
            raise FormatError(
                f"{self.key_text(key)}: {len(value)} elements, the limit is {MAX_TOKENS}"
            )
        found = value.tolist() if hasattr(value, "tolist") else list(value)
        kinds = set(map(type, found))
        allowed = set(kind) if isinstance(kind, tuple) else {kind}
        if not kinds <= allowed:
            names = ", ".join(sorted(k.__name__ for k in kinds - allowed))
            raise FormatError(f"{self.key_text(key)}: holds {names}; the file is damaged")
        return found

    def text_value(self, key: Key) -> str | None:
        """Return the string value of a key; None if absent. FormatError for another type."""
        value = self.metadata_value(key)
        if value is not None and not isinstance(value, str):
            raise FormatError(f"{self.key_text(key)}: is {type(value).__name__}; expected a string")
        return value

    def flag_value(self, name: str) -> bool | None:
        """Return the value of one of FLAGS; None if it is absent or not a boolean."""
        value = self.metadata_value(FLAGS[name])
        return value if isinstance(value, bool) else None

    def token_ids(self) -> dict[str, int]:
        """Return {role: token id} from the metadata; FormatError if one is not a whole number."""
        found = {}
        for role, key in IDS.items():
            value = self.metadata_value(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise FormatError(f"{self.key_text(key)}: is {value!r}; expected a token id")
            found[role] = value
        return found

    # --- Hugging Face's files, in a folder or carried ------------------------------------------

    @cached_property
    def files(self) -> Mapping[str, str]:
        """{name: text} of the text files in the folder or embedded, without tokenizer.json."""
        return self.embedded_texts if self.model.folder is None else self.model.folder.texts

    @cached_property
    def embedded_texts(self) -> Mapping[str, str]:
        """{name: text} of the small files that a GGUF or APR of aprfmt embeds."""
        return read_embedded_files(self.model)

    def unread_files(self) -> list[str]:
        """Return the names of tokenizer files in the folder that aprfmt does not read."""
        folder = self.model.folder
        names = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
        return [n for n in names if folder is not None and (folder.path / n).is_file()]

    @cached_property
    def origin(self) -> str:
        """The path or key of tokenizer.json, for messages; "" without one."""
        if self.model.folder is not None and TOKENIZER_JSON in self.model.folder.texts:
            return str(self.model.folder.path / TOKENIZER_JSON)
        return f"{self.where}: {HF_JSON}" if HF_JSON in self.model.metadata else ""

    def tokenizer_json(self) -> str | None:
        """Return the text of tokenizer.json; None without one.

        Raises FormatError if the metadata has another type.
        """
        if not self.origin:
            return None
        folder = self.model.folder
        if folder is not None and TOKENIZER_JSON in folder.texts:
            return folder.texts[TOKENIZER_JSON]
        text = self.model.metadata[HF_JSON]
        if not isinstance(text, str):
            raise FormatError(f"{self.origin}: is {type(text).__name__}; expected a string")
        return text

    def parse_file(self, name: str) -> Mapping[str, Any]:
        """Return the object in one of the small JSON files, parsed once; {} without the file.

        Raises FormatError for damaged JSON.
        """
        if name not in self._parsed:
            text = self.files.get(name)
            where = f"{self.where}: {name}"
            self._parsed[name] = {} if text is None else self._parse_object(text, where, 16 << 20)
        return self._parsed[name]

    def parse_tokenizer_json(self) -> Mapping[str, Any] | None:
        """Return tokenizer.json parsed; None without one. FormatError for damaged JSON.

        It is parsed at each call, as 262,144 tokens take some 150 MB. What is made from it is
        cached: `model.tokenizer` and the tokenizer's facts.
        """
        text = self.tokenizer_json()
        if text is None:
            return None
        found = self._parse_object(text, self.origin, MAX_JSON)
        refuse_long_frame(found, self.origin)
        for key, value in found.items():
            self._tokenizer_json_keys[key] = None if key in ("model", "added_tokens") else value
        return found

    def tokenizer_json_keys(self) -> Mapping[str, Any]:
        """Return {key: value} of tokenizer.json; {} without the file.

        The vocabulary's keys have the value None. The file is parsed once for this. Raises
        FormatError.
        """
        if not self._tokenizer_json_keys:
            self.parse_tokenizer_json()
        return self._tokenizer_json_keys

    def _parse_object(self, text: str, where: str, limit: int) -> Mapping[str, Any]:
        """Return the JSON object in a text; FormatError if it is none or longer than `limit`."""
        from aprfmt.formats.bounded_json import loads

        value = loads(text, where, max_bytes=limit, nonfinite=True)
        if not isinstance(value, Mapping):
            raise FormatError(f"{where}: holds a JSON {type(value).__name__}; expected an object")
        return value

    @cached_property
    def tokenizer_config(self) -> Mapping[str, Any]:
        """The keys of tokenizer_config.json; {} without the file."""
        return self.parse_file("tokenizer_config.json")

    def chat_template(self) -> str | None:
        """Return the chat template, None without one. FormatError if it is no text or too long.

        It is read from the metadata, chat_template.jinja or tokenizer_config.json. Of several named
        templates it is `default`, else the first.
        """
        return self.template_and_origin()[0]

    def readable_template(self) -> str | None:
        """Return the chat template, None without one or if it cannot be read."""
        try:
            return self.chat_template()
        except AprfmtError:
            return None

    def _stored_templates(self) -> Iterator[tuple[Value, str]]:
        """Yield (chat template or None, file or key it is from), in order of precedence."""
        if self.model.key_style in _SPELLING:
            for key in (CHAT_TEMPLATE, APR_CHAT_TEMPLATE):
                yield self.model.metadata.get(key), key
        name = TEMPLATE_FILE
        yield self.files[name] if name in self.files else None, name
        yield self.tokenizer_config.get("chat_template"), "tokenizer_config.json"
        yield self.parse_file("chat_template.json").get("chat_template"), "chat_template.json"

    def template_and_origin(self) -> tuple[str | None, str]:
        """Return (chat template, `PATH: PLACE`); (None, "") without one.

        Raises FormatError if it is not a text, or is too long.
        """
        found, place = _first_template(self._stored_templates())
        where = f"{self.where}: {place}"
        if isinstance(found, (list, Mapping)):
            named = templates_by_name(found)
            found = named.get(DEFAULT_TEMPLATE) or next(iter(named.values()), None)
        if found is None or found == "":
            return None, ""
        if not isinstance(found, str):
            raise FormatError(
                f"{where}: the chat template is {type(found).__name__}; expected a string"
            )
        if len(found) > MAX_TEMPLATE:
            raise FormatError(
                f"{where}: the chat template has {len(found)} characters; "
                f"the limit is {MAX_TEMPLATE}"
            )
        return found, where

    def named_templates(self) -> Mapping[str, str]:
        """Return {name: text} of the chat templates besides the default one.

        They are the metadata keys `tokenizer.chat_template.NAME`, else a folder's files in
        additional_chat_templates/, else the list of templates that also holds the default one.
        Raises FormatError for a file that cannot be read, or is too long.
        """
        start, metadata = f"{CHAT_TEMPLATE}.", self.model.metadata
        keyed = {
            key.removeprefix(start): metadata[key] for key in metadata if key.startswith(start)
        }
        if keyed:
            return {name: text for name, text in keyed.items() if isinstance(text, str)}
        found: dict[str, str] = {}
        folder = self.model.folder
        if folder is not None and not is_remote(folder.path):
            for path in sorted((folder.path / TEMPLATE_FOLDER).glob("*.jinja")):
                found[gguf_template_name(path.stem)] = read_text(path, MAX_TEMPLATE)
        first, _ = _first_template(self._stored_templates())
        if isinstance(first, str) and self.model.key_style in _SPELLING:
            first = self.tokenizer_config.get("chat_template")  # a key has one text alone
        if isinstance(first, (list, Mapping)) and not found:
            found = templates_by_name(first)
        found.pop(DEFAULT_TEMPLATE, None)
        return found

    def vocab_size(self) -> int | None:
        """Return the vocabulary size that the configuration gives; None if it gives none.

        Where the tensors contradict the key they are believed, as in every hyperparameter.
        """
        config = self.model.config or {}
        text_config = config.get("text_config")
        for source in (config, text_config, self.model.metadata):
            value = source.get("vocab_size") if isinstance(source, Mapping) else None
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_TOKENS:
                return self._believed_size(value)
        return None

    def _believed_size(self, stated: int) -> int:
        """Return the vocabulary size of the tensors if they contradict `stated`, else `stated`."""
        try:
            resolution = self.model.resolution
        except AprfmtError:
            return stated
        overruled = "vocab_size" in resolution.report.overruled
        return int(resolution.hyper["vocab_size"]) if overruled else stated


def are_read_from_equal_texts(a: Carried, b: Carried) -> bool:
    """Return whether equal files and equal keys of config.json state two folders' tokenizers.

    Nothing of such tokenizers can differ. False where a side has no tokenizer.json, or where keys
    of a GGUF or APR state parts. Raises FormatError for a file that cannot be read.
    """
    if any(not _has_files_alone(side) for side in (a, b)) or a.vocab_size() != b.vocab_size():
        return False
    stated = [_config_text(side.model.config) for side in (a, b)]
    return stated[0] == stated[1] and all(
        a.files.get(name) == b.files.get(name) for name in READ_FILES
    )


def _has_files_alone(side: Carried) -> bool:
    """Return whether a tokenizer is stated by a folder's files alone, tokenizer.json among them."""
    model, folder = side.model, side.model.folder
    keyed = model.key_style in _SPELLING or HF_JSON in model.metadata
    return folder is not None and TOKENIZER_JSON in folder.texts and not keyed


def _config_text(config: Mapping[str, Any] | None) -> str:
    """Return what a config.json states for the tokenizer, as JSON; "null" without the file."""
    stated = config and {key: config[key] for key in READ_CONFIG_KEYS if key in config}
    return json.dumps(stated, sort_keys=True)
