"""Parse the changes of metadata that a user asks for, each placed where readers look for it.

A *place* is where readers look for a value: a key of a file's metadata, or "FILE:KEY" of a JSON
file.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import TypedValue, Value
from aprfmt.conversion import edits
from aprfmt.conversion.edits import KeyChange, parse_typed
from aprfmt.conversion.folder_edits import GENERATES, TOKENIZER, FolderEdits, has_text_files
from aprfmt.conversion.key_names import file_key
from aprfmt.conversion.output_format import NoFormatError, resolve_format
from aprfmt.errors import UsageError
from aprfmt.formats import FORMATS
from aprfmt.model.carried_files import FILES_KEY, FOREIGN, foreign_gguf_keys, read_embedded_files
from aprfmt.tokenizer.generation import stated_settings
from aprfmt.tokenizer.keys import GENERATION, GENERATION_KEYS

if TYPE_CHECKING:
    from aprfmt.model import Model

_FILES = (GENERATES, TOKENIZER)
_NAMES: Mapping[str, str] = {row.gguf: name for name, row in GENERATION_KEYS.items()}


class EmbeddedEdits:
    """The changes of one request to what a GGUF or APR embeds, made in memory."""

    def __init__(self, model: "Model") -> None:
        """Read what the file embeds; nothing is changed yet. FormatError for a damaged record."""
        self._model = model
        self._texts = read_embedded_files(model)
        self._files = FolderEdits(model, self._texts)
        self._apr = model.key_style == "apr"
        self._record = dict(foreign_gguf_keys(model)) if self._apr else {}
        self._by_keys = bool(stated_settings(model.carried)) if self._apr else False
        self._changed: dict[str, tuple[Value, str]] = {}  # place -> (value before, file or record)

    def own_key(self, key: str) -> str | None:
        """Return the key of the file's own metadata that a user's key names.

        None where it names a value of an embedded file, or of an embedded key.
        """
        if key in self._model.metadata:
            return key
        file, colon, rest = key.partition(":")
        name = rest if colon and file == GENERATES else _NAMES.get(key, key)
        if name in GENERATION_KEYS and not self._apr:
            return GENERATION_KEYS[name].gguf
        if colon and file in _FILES:
            return None if file in self._texts or (self._apr and file == GENERATES) else key
        generates = name in GENERATION_KEYS or name in GENERATION
        return None if generates and (self._apr or GENERATES in self._texts) else key

    def set(self, key: str, text: str) -> None:
        """Set a setting in a JSON file that the metadata embed, and in the metadata key of it.

        `key` is a setting's name, such as `temperature`, or FILE:KEY, such as
        `generation_config.json:temperature`. A setting that has a metadata key is set there, and in
        the file only if that is embedded. `text` is the value, as JSON or plain text. Raises
        UsageError if it does not fit.
        """
        place, name = self._embedded_setting(key)
        kept = self._setting_key(name)
        if kept is not None:
            kind = GENERATION_KEYS[name].type
            self._note(FOREIGN, kept, self._record.get(kept, [kind, None])[1])
            self._record[kept] = [kind, parse_typed(text, kind, key, False)]
        if kept is None or place.partition(":")[0] in self._texts:
            self._change(place, lambda: self._files.set(place, text))

    def remove(self, key: str) -> None:
        """Remove a setting from an embedded file and the metadata key that repeats it.

        Raises UsageError if neither has it.
        """
        place, name = self._embedded_setting(key)
        kept = self._setting_key(name)
        if kept in self._record:
            self._note(FOREIGN, kept, self._record.pop(kept)[1])
            if _value(self._texts, place) is None:
                return
        self._change(place, lambda: self._files.remove(place))

    def metadata(self) -> dict[str, Value | TypedValue]:
        """Return {metadata key: new value} of the keys to write; {} if nothing changes.

        They are the key that embeds the text files and the key that records another GGUF's keys.
        """
        made: dict[str, Value | TypedValue] = {}
        records = {record for _, record in self._changed.values()}
        if FILES_KEY in records:
            whole = {**self._model.embedded_files, **self._files.texts()}
            made[FILES_KEY] = self._as_metadata(whole)
        if FOREIGN in records:
            made[FOREIGN] = self._as_metadata(self._record)
        return made

    def changes(self, written: "Model") -> list[KeyChange]:
        """Return what changed, with the new values read back from the file `written`."""
        if not self._changed:
            return []
        texts, record = read_embedded_files(written), foreign_gguf_keys(written)
        found = []
        for place, (old, where) in self._changed.items():
            new = record.get(place, [None, None])[1] if where == FOREIGN else _value(texts, place)
            how: Any = "set" if old is not None else "added"
            shown = place.replace(":", ": ") if where == FILES_KEY else f"{FOREIGN}: {place}"
            found.append(KeyChange(shown, "removed" if new is None else how, old, new, "", ""))
        return found

    def _embedded_setting(self, key: str) -> tuple[str, str]:
        """Return ("FILE:KEY" in an embedded file, name of the setting) for a user's key."""
        file, colon, rest = key.partition(":")
        if colon and file in _FILES:
            return key, rest if file == GENERATES else ""
        name = _NAMES.get(key, key)
        return f"{GENERATES}:{name}", name

    def _setting_key(self, name: str) -> str | None:
        """Return the GGUF key for a generation setting if the file stores settings as keys.

        None for other names, and for files that have settings only in embedded files.
        """
        return GENERATION_KEYS[name].gguf if self._by_keys and name in GENERATION_KEYS else None

    def _change(self, place: str, act: Callable[[], None]) -> None:
        """Change an embedded file by calling `act`, and note the change.

        `place` is "FILE:KEY" of the value.
        """
        act()
        self._note(FILES_KEY, place, _value(self._texts, place))

    def _note(self, record: str, place: str, old: Value) -> None:
        """Store the old value at `place`, "FILE:KEY", and the metadata key of its record.

        Raises UsageError where the request changes the same place twice.
        """
        if place in self._changed:
            raise UsageError(f"{place}: is named twice; give one change of a key")
        self._changed[place] = old, record

    def _as_metadata(self, value: Mapping[str, Any]) -> Value | TypedValue:
        """Return an object as JSON text, with its type where the format's metadata have types."""
        text = json.dumps(value, ensure_ascii=False)
        return TypedValue(text, "string") if FORMATS[self._model.format].values.types else text


def _value(texts: Mapping[str, str], place: str) -> Value:
    """Return the value of "FILE:KEY" in {file name: text}; None where there is none."""
    file, _, rest = place.partition(":")
    value: Any = json.loads(texts.get(file, "{}"))
    for part in (rest,) if rest in value else rest.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


TEMPLATE = "chat_template"


@dataclass
class EditRequest:
    """The requested changes: keys of the file's metadata, and values of the folder's text files.

    `unknown` has similar names for each key that is neither in the file nor known.
    """

    values: dict[str, Any]
    remove: list[str]
    unknown: dict[str, list[str]]
    files: FolderEdits | None = None
    embedded: EmbeddedEdits | None = None

    @property
    def keys(self) -> list[str]:
        """The keys of the file's metadata that change or are removed."""
        return [*self.values, *self.remove]

    @property
    def template(self) -> bool:
        """Whether a chat template changes."""
        places = self.files.places if self.files is not None else ()
        return any(TEMPLATE in str(each) for each in (*self.keys, *places))

    @property
    def texts(self) -> dict[str, str]:
        """{file name: new content} of the text files that change; {} if none does."""
        return self.files.texts() if self.files is not None and self.files.changed else {}


def parse_edits(
    opened: "Model", changes: Sequence[tuple[str, str]], remove: Sequence[str], output: Path
) -> EditRequest:
    """Return the requested changes, each at the place where readers look for it.

    `changes` are (KEY or KEY:TYPE, VALUE as JSON or text), `remove` are keys. `output` is the file
    to write, whose format has to be that of `opened`. Raises UsageError for what cannot be changed
    so.
    """
    if not changes and not remove:
        raise UsageError("nothing to change; give KEY=VALUE, or --remove KEY")
    if not FORMATS[opened.format].writes:
        raise UsageError(
            f"{opened.path}: files of {opened.format} are read here, not written; convert it to "
            "safetensors, and set the value there"
        )
    # The output must have the same format.
    try:
        target = resolve_format(opened, output, None).name
    except NoFormatError:
        target = ""
    if target != opened.format:
        wanted = " or ".join(FORMATS[opened.format].extensions)
        raise UsageError(f"{output}: set keeps the format {opened.format}; expected {wanted}")
    # Values of a folder's text files are changed there, all others in the metadata.
    files = FolderEdits(opened) if has_text_files(opened) else None
    embedded = EmbeddedEdits(opened) if files is None else None
    texts = files or embedded
    assert texts is not None
    request = EditRequest({}, [], {}, files, embedded)
    for key in remove:
        own = texts.own_key(key)
        if own is None:
            texts.remove(key)
            continue
        named = file_key(opened, own)
        if named in request.remove:
            raise UsageError(f"--remove {key}: is named twice; give one change of a key")
        request.remove.append(named)
    # New values: split off the type, and parse the text by it.
    for left, text in changes:
        own = texts.own_key(left)
        key, kind = (left, "") if own is None else edits.split_type(own, opened)
        key = file_key(opened, key)
        if key in request.keys:
            raise UsageError(f"{key}: is named twice; give one change of a key")
        if not text:
            empty = f"{key}:TYPE" if not kind else left
            array = empty if empty.endswith("[]") else f"{empty}[]"
            raise UsageError(
                f'{left}: has no value; give {key}="" for empty text, {array}=[] for '
                "an empty array, or --remove"
            )
        if own is None:
            texts.set(left, text)
        else:
            request.values[key] = edits.parse_value(opened, key, kind, text)
    # Check what is removed, and find names that may be misspelled.
    edits.check_present(opened, request.remove)
    arch = request.values.get("general.architecture")
    also = [str(arch.value if isinstance(arch, TypedValue) else arch)] if arch is not None else []
    request.unknown = edits.unknown_keys(opened, list(request.values), also)
    if embedded is not None:
        request.values.update(embedded.metadata())
    return request
