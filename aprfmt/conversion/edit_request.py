"""Parse the changes of metadata that a user asks for, each placed where readers look for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import TypedValue
from aprfmt.conversion import edits
from aprfmt.conversion.embedded_edits import EmbeddedEdits
from aprfmt.conversion.folder_edits import FolderEdits, has_text_files
from aprfmt.conversion.key_names import file_key
from aprfmt.conversion.output_format import NoFormatError, resolve_format
from aprfmt.errors import UsageError
from aprfmt.formats import FORMATS

if TYPE_CHECKING:
    from aprfmt.model import Model

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
