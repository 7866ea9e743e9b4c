"""Small text files of a model folder, carried in the metadata of our GGUF and APR files."""

from typing import TYPE_CHECKING, Any

from aprfmt.errors import FormatError
from aprfmt.model.hf_folder import COMPANION_FILES

if TYPE_CHECKING:
    from aprfmt.model import Model

FILES_KEY = "aprfmt.files"  # JSON {file name: text}: the folder's small files, verbatim


def read_texts(model: "Model") -> dict[str, str]:
    """Return the folder files a GGUF or APR of ours carries; `model.carried.texts` keeps them."""
    text = model.metadata.get(FILES_KEY)
    if not isinstance(text, str):
        return {}
    found = json_object(text, f"{model.path}: {FILES_KEY}")
    allowed = {"config.json", *COMPANION_FILES}
    return {name: text for name, text in found.items() if name in allowed and type(text) is str}


def json_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a carried text; FormatError if the JSON is not an object."""
    from aprfmt.formats.jsonio import loads

    found = loads(text, where, max_bytes=256 << 20)
    if not isinstance(found, dict):
        raise FormatError(f"{where}: holds a JSON {type(found).__name__}; expected an object")
    return found
