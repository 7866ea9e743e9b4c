"""Metadata that aprfmt embeds when it converts: the source's text files and its metadata keys."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aprfmt.errors import FormatError
from aprfmt.model.hf_folder import COMPANION_FILES

if TYPE_CHECKING:
    from aprfmt.model import Model

FILES_KEY = "aprfmt.files"  # JSON {file name: text}: the folder's small files, verbatim

FOREIGN = "aprfmt.gguf.metadata"  # JSON {key: [type, value]} of a GGUF, in other formats
FOREIGN_TOKENIZER = "aprfmt.gguf.tokenizer"  # likewise, of its tokenizer
SAFETENSORS = "aprfmt.source.metadata"  # JSON: the `__metadata__` of a file that was converted
BARE = "aprfmt.metadata"  # JSON {key: value}: values without a type in the target


def foreign_gguf_keys(model: "Model") -> Mapping[str, Any]:
    """Return {key: [type, value]} of a source GGUF's keys, as another format embeds them.

    {} where the file records none.
    """
    text = model.metadata.get(FOREIGN)
    return json_object(text, f"{model.path}: {FOREIGN}") if isinstance(text, str) else {}


def foreign_keys(model: "Model") -> Mapping[str, Any]:
    """Return {key: value} of all keys of the source's format that the file embeds.

    Raises FormatError for a record that is not a JSON object.
    """
    found = {
        key: row[1] if isinstance(row, list) and len(row) == 2 else row
        for record in (FOREIGN, FOREIGN_TOKENIZER)
        for key, row in _foreign_record(model, record).items()
    }
    return {**found, **_foreign_record(model, SAFETENSORS), **_foreign_record(model, BARE)}


def _foreign_record(model: "Model", key: str) -> Mapping[str, Any]:
    """Return the JSON object embedded under a metadata key; {} if the key is absent."""
    text = model.metadata.get(key)
    return json_object(text, f"{model.path}: {key}") if isinstance(text, str) else {}


def parse_embedded_files(metadata: Mapping[str, Any], path: Any) -> dict[str, Any]:
    """Return {file name: content} of the source's files that the metadata of a GGUF or APR embed.

    Contents are texts; in a damaged file they may be other values. Raises FormatError where the
    metadata key that holds them is no JSON object.
    """
    text = metadata.get(FILES_KEY)
    return json_object(text, f"{path}: {FILES_KEY}") if isinstance(text, str) else {}


def read_embedded_files(model: "Model") -> dict[str, str]:
    """Return {file name: text} of the folder files that a GGUF or APR of aprfmt embeds.

    Only config.json and known companion files are returned.
    """
    allowed = {"config.json", *COMPANION_FILES}
    found = model.embedded_files
    return {name: text for name, text in found.items() if name in allowed and type(text) is str}


def json_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a metadata text. Raises FormatError if it is not an object."""
    from aprfmt.formats.bounded_json import loads

    found = loads(text, where, max_bytes=256 << 20)
    if not isinstance(found, dict):
        raise FormatError(f"{where}: holds a JSON {type(found).__name__}; expected an object")
    return found
