"""Change single values of a Hugging Face folder, in the file that readers take them from.

transformers reads the model from config.json, sampling and stop tokens from generation_config.json,
the tokenizer's flags from tokenizer_config.json, and the chat template from chat_template.jinja
before tokenizer_config.json. Nothing but a library's own mark is read from `__metadata__` of the
weights, so no key is put there unless it is named: `__metadata__:KEY`.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.arch.other_keys import IGNORED
from aprfmt.arch.rope_hf import ROPE_OBJECTS
from aprfmt.base.protocols import Value
from aprfmt.base.text_escape import shorten
from aprfmt.conversion.edits import KeyChange, parse_json_value
from aprfmt.conversion.key_names import TEMPLATE_KEYS, format_keys
from aprfmt.errors import OutputError, UsageError
from aprfmt.formats import FORMATS
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.bounded_json import loads
from aprfmt.formats.safetensors.layout import METADATA
from aprfmt.model.config_paths import path_of_name
from aprfmt.model.hf_folder import MAX_TEXT, HFFolder, read_text
from aprfmt.model.packing import MODELOPT_FILE, OLDER_FILES
from aprfmt.model.patterns import close_names
from aprfmt.model.sidecar_files import ADAPTER_CONFIG
from aprfmt.remote.paths import is_remote
from aprfmt.tokenizer.keys import FLAGS, GENERATION, GENERATION_KEYS, TEMPLATE_FILE

if TYPE_CHECKING:
    from aprfmt.model import Model

CONFIG, GENERATES, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
FILES = (CONFIG, GENERATES, TOKENIZER)
# Where these are, a key of theirs is set by FILE:KEY, and never by its name alone.
_OWN_KEYS_ONLY = {ADAPTER_CONFIG, MODELOPT_FILE, *OLDER_FILES}
# Keys of tokenizer_config.json that PreTrainedTokenizerBase reads, besides its flags.
_TOKENIZES = (
    "model_max_length", "padding_side", "truncation_side", "tokenizer_class", "bos_token",
    "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
    "clean_up_tokenization_spaces", "add_prefix_space", "legacy", "split_special_tokens",
    *FLAGS,
)  # fmt: skip
# What other formats call a key of config.json.
_OTHER_NAMES: Mapping[str, str] = {
    "general.architecture": "model_type", "architecture": "model_type",
    "hf_model_type": "model_type",
}  # fmt: skip
_ABSENT = object()


@dataclass(frozen=True)
class ValueLocation:
    """Where a value of a folder is: a file, and the keys that lead to it (() for all of it)."""

    file: str
    path: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the file name and the dotted keys."""
        return f"{self.file}: {'.'.join(self.path)}" if self.path else self.file


def has_text_files(model: "Model") -> bool:
    """Return whether the model's format keeps values in text files next to the weights."""
    return bool(FORMATS[model.format].weights_name)


class FolderEdits:
    """The changes of one request to the text files of a folder, made in memory."""

    def __init__(self, model: "Model", texts: Mapping[str, str] | None = None) -> None:
        """Load the texts of the model's folder, or take `texts`; nothing is changed yet."""
        folder = model.folder or HFFolder(model.path.parent, None, {})
        self._model = model
        self.folder = folder.path
        found = {**folder.texts, **_adapter_texts(folder.path)} if texts is None else texts
        self._texts = dict(found)
        self._held: dict[str, Any] = {}
        self._whole: dict[str, str | None] = {}
        self._changed: dict[ValueLocation, tuple[Any, Any]] = {}

    @property
    def changed(self) -> bool:
        """Whether any text file changes."""
        return bool(self._changed)

    @property
    def places(self) -> tuple[ValueLocation, ...]:
        """The locations that change so far, in the order of the request."""
        return tuple(self._changed)

    def own_key(self, key: str) -> str | None:
        """Return the key in the weights' `__metadata__` that a user's key names.

        None where it names a value in one of the text files.
        """
        file, colon, rest = key.partition(":")
        if colon and file == METADATA:
            return rest
        return (
            key if key in self._model.metadata and not list(self._existing_locations(key)) else None
        )

    def set(self, key: str, text: str) -> None:
        """Set a key to a new value in every file that readers take it from.

        `text` is JSON or text, or `@FILE` for the content of a file. Raises UsageError if it does
        not fit.
        """
        whole = text.startswith("@")
        if whole:
            text = read_text(Path(text[1:]))
        for place in self._locations(key):
            old = self._value(place)
            present = None if old is _ABSENT else old
            if place.file == TEMPLATE_FILE or place.path[-1:] == ("chat_template",):
                new: Any = parse_json_value(key, "", text, whole)
            else:
                new = _parse_like(key, present, text, whole)
            self._set_location(place, new)

    def remove(self, key: str) -> None:
        """Remove a key from every file that has it; UsageError where none has."""
        found = [place for place in self._locations(key) if self._value(place) is not _ABSENT]
        if not found:
            raise UsageError(f"{self.folder}: has no key {key!r} to remove; {self._near_keys(key)}")
        for place in found:
            self._set_location(place, _ABSENT)

    def texts(self) -> dict[str, str]:
        """Return {file name: new content} of every file that changes."""
        made: dict[str, str] = {}
        for file in dict.fromkeys(place.file for place in self._changed):
            if file == TEMPLATE_FILE:
                made[file] = self._whole[file] or ""
            else:
                made[file] = _dump_like(self._json(file), self._texts.get(file, ""))
        return made

    def changes(self, read: Path) -> list[KeyChange]:
        """Return what changed, with the new values read back from the written folder `read`."""
        after = _Reading(read)
        found = []
        for place, (old, _) in self._changed.items():
            new = after.value(place)
            how: Any = "set" if old is not _ABSENT else "added"
            found.append(
                KeyChange(
                    str(place),
                    how if new is not _ABSENT else "removed",
                    _report_value(old),
                    _report_value(new),
                    "",
                    "",
                )
            )
        return found

    # --- where ------------------------------------------------------------------------------

    def _locations(self, key: str) -> list[ValueLocation]:
        """Return the locations that a user's key names: where it exists, else where it belongs.

        Raises UsageError for a key that is in no file and that no reader is known to take.
        """
        file, colon, rest = key.partition(":")
        if colon and file in (*FILES, *self._texts.keys() & _OWN_KEYS_ONLY):
            return [ValueLocation(file, path_of_name(self._json(file), rest))]
        if CONFIG not in self._texts:
            raise UsageError(
                f"{key}: belongs in a file next to the weights, and {self.folder} has no {CONFIG}; "
                f"{METADATA}:{key}=VALUE writes it into the weights, where no loader looks"
            )
        if key in TEMPLATE_KEYS:
            return [self._template()]
        found = list(self._existing_locations(key))
        if found:
            return found
        home = self._location_of_new_key(key)
        if home is None:
            raise UsageError(
                f"{key}: stands in no file of {self.folder}, and is no key that their readers are "
                f"known to take; {self._near_keys(key)}; {CONFIG}:{key}=VALUE adds it all the same"
            )
        return [home]

    def _spellings(self, key: str) -> list[str]:
        """Return the names that a key may have in these files, first the one given."""
        names = [key, *format_keys(self._model, key, "hf")]
        if key in _OTHER_NAMES:
            names.append(_OTHER_NAMES[key])
        return list(dict.fromkeys(names))

    def _existing_locations(self, key: str) -> Iterator[ValueLocation]:
        """Yield the locations where a key exists: by its first spelling that any file has.

        One file may have it again, in an object of rope parameters.
        """
        for name in self._spellings(key):
            found = [place for file in FILES for place in self._in_file(file, name)]
            if found:
                yield from found
                return

    def _in_file(self, file: str, name: str) -> list[ValueLocation]:
        """Return the locations of a name in one file, at its top level or nested once.

        A name at the top level may be there again in an object of rope parameters. Raises
        UsageError where only nested objects have it, and several of them.
        """
        content = self._json(file)
        path = path_of_name(content, name)
        if _value_at(content, path) is not _ABSENT:
            copies = [
                (part, name)
                for part in ROPE_OBJECTS
                if len(path) == 1 and _value_at(content, (part, name)) is not _ABSENT
            ]
            return [ValueLocation(file, each) for each in (path, *copies)]
        paths = [each for each in _paths(content) if each[-1] == name]
        if len(paths) > 1:
            places = ", ".join(".".join(each) for each in paths)
            raise UsageError(f"{name}: stands in {file} several times ({places}); name one of them")
        return [ValueLocation(file, each) for each in paths]

    def _location_of_new_key(self, key: str) -> ValueLocation | None:
        """Return the location where a new key belongs; None for one that no reader knows."""
        for name in self._spellings(key):
            if name in GENERATION or name in GENERATION_KEYS:
                return ValueLocation(GENERATES, (name,))
        if key in _TOKENIZES:
            return ValueLocation(TOKENIZER, (key,))
        for name in self._spellings(key)[::-1]:
            known = name in IGNORED["hf"] or bool(format_keys(self._model, name, "hf"))
            if known and "." not in name:
                return ValueLocation(CONFIG, (name,))
        return None

    def _template(self) -> ValueLocation:
        """Return the location of the chat template, existing or new."""
        inside = "chat_template" in self._json(TOKENIZER)
        if TEMPLATE_FILE in self._texts or not inside:
            return ValueLocation(TEMPLATE_FILE)
        return ValueLocation(TOKENIZER, ("chat_template",))

    def _near_keys(self, key: str) -> str:
        """Return "near names: ..." with the existing keys similar to `key`, for a message."""
        names = {path[-1] for file in FILES for path in _paths(self._json(file))}
        near = close_names(key.rpartition(".")[2], sorted(names))
        return f"near names: {', '.join(near) or 'none'}"

    # --- values -----------------------------------------------------------------------------

    def _json(self, file: str) -> Any:
        """Return the parsed content of a text file with the changes so far, {} if it is missing."""
        if file not in self._held:
            text = self._texts.get(file)
            self._held[file] = {} if text is None else _parse_object(text, str(self.folder / file))
        return self._held[file]

    def _value(self, place: ValueLocation) -> Any:
        """Return the value at a location, with the changes so far; _ABSENT where there is none."""
        if place.file != TEMPLATE_FILE:
            return _value_at(self._json(place.file), place.path)
        if place.file not in self._whole:
            self._whole[place.file] = self._texts.get(place.file)
        found = self._whole[place.file]
        return _ABSENT if found is None else found

    def _set_location(self, place: ValueLocation, new: Any) -> None:
        """Set a location to a new value, or remove it for _ABSENT, and record the change.

        Raises UsageError for a location that is changed twice or that cannot hold keys.
        """
        if place in self._changed:
            raise UsageError(f"{place}: is named twice; give one change of a key")
        self._changed[place] = (self._value(place), new)
        if place.file == TEMPLATE_FILE:
            if new is _ABSENT:
                raise UsageError(
                    f"{place}: a file is not removed by set; delete it, or give chat_template=TEXT"
                )
            self._whole[place.file] = new
            return
        *outer, last = place.path
        content = self._json(place.file)
        for part in outer:
            content = content.setdefault(part, {})
            if not isinstance(content, dict):
                raise UsageError(f"{place}: {part} holds no keys; it is {_short_repr(content)}")
        if new is _ABSENT:
            del content[last]
        else:
            content[last] = new


def _adapter_texts(folder: Path) -> dict[str, str]:
    """Return {file name: text} of PEFT's configuration next to an adapter's weights; {} without."""
    path = folder / ADAPTER_CONFIG
    return {} if is_remote(path) or not path.is_file() else {ADAPTER_CONFIG: read_text(path)}


class _Reading:
    """The text files of a folder as they are on disk."""

    def __init__(self, folder: Path) -> None:
        """Set the folder whose files are read."""
        self._folder = folder

    def value(self, place: ValueLocation) -> Any:
        """Return the value at a location; _ABSENT where file or key does not exist."""
        path = self._folder / place.file
        if not path.is_file():
            return _ABSENT
        text = read_text(path)
        return _value_at(_parse_object(text, str(path)), place.path) if place.path else text


def _parse_object(text: str, where: str) -> Any:
    """Return the JSON object of a text; UsageError for another kind of value."""
    value = loads(text, where, max_bytes=MAX_TEXT, nonfinite=True)
    if not isinstance(value, dict):
        raise UsageError(f"{where}: holds a JSON {type(value).__name__}; expected an object")
    return value


def _dump_like(value: Any, before: str) -> str:
    """Return JSON text with the indentation, escapes and final newline of the text `before`."""
    indent = re.search(r"\n([ \t]+)\"", before)
    flat = bool(before) and indent is None
    width: int | str | None = None if flat else 2
    if indent is not None:
        width = indent[1] if "\t" in indent[1] else len(indent[1])
    text = json.dumps(value, indent=width, ensure_ascii=before.isascii())
    return text + ("\n" if before.endswith("\n") or not before else "")


def _value_at(value: Any, path: Sequence[str]) -> Any:
    """Return the value that the keys `path` lead to in nested objects; _ABSENT if there is none."""
    for part in path:
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return value


def _paths(held: Any, outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of keys, a tuple, to every value of nested objects."""
    if isinstance(held, dict):
        for key, value in held.items():
            yield (*outer, key)
            yield from _paths(value, (*outer, key))


def _parse_like(key: str, present: Value, text: str, from_file: bool) -> Value:
    """Return `text` as a value of the same kind as `present`; else UsageError.

    null is accepted for any key (the value is None then), and a number or a list for keys of token
    ids. `from_file` is True where the text is a file's content.
    """
    if text == "null" and not from_file:
        return None
    if key.endswith("_token_id") and isinstance(present, (int, list)):
        either = parse_json_value(key, None, text, from_file)
        if isinstance(either, (int, list)) and not isinstance(either, bool):
            return either
    return parse_json_value(key, present, text, from_file)


def _report_value(value: Any) -> Value:
    """Return a value for a report: None for _ABSENT, a text with its length for a long list."""
    if value is _ABSENT:
        return None
    return f"array of {len(value)}" if isinstance(value, list) and len(value) > 16 else value


def _short_repr(value: Any) -> str:
    """Return a value's repr, shortened for a message."""
    return shorten(repr(value), 60)


def write_in_place(folder: Path, texts: Mapping[str, str]) -> int:
    """Replace text files of a folder, all or none, and return the number of bytes written.

    Raises OutputError for a remote folder, and for a link, whose target may belong to others.
    """
    if is_remote(folder):
        raise OutputError(
            f"{folder}: is an address; files are changed on this machine: write a copy with -o"
        )
    for name in texts:
        path = folder / name
        if path.is_symlink() or (path.exists() and os.stat(path).st_nlink > 1):
            raise OutputError(
                f"{path}: is a link, and what it leads to may belong to others (a hub cache?); "
                "write a copy with -o"
            )
    with FileSet(force=True) as files:
        for name, text in texts.items():
            files.create(folder / name).write(text.encode("utf-8"))
    return sum(len(text.encode()) for text in texts.values())
