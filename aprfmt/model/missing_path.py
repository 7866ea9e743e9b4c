"""What is said of a path where nothing is: what it may have been meant for."""

import os
import re
from pathlib import Path

from aprfmt.formats import FORMATS
from aprfmt.model.hf_folder import model_candidates
from aprfmt.model.patterns import close_names

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_HOST = re.compile(r"(?:www\.|huggingface\.co/|hf\.co/)")
_MOST = 3


def missing_path_message(path: Path) -> str:
    """Return why a path names no model, as one line: near names, a repository, a missing folder."""
    text = str(path)
    said = f"{text}: no such file or folder"
    if path.is_symlink():
        return f"{text}: is a link to {os.readlink(path)}, which is not there (no such file)"
    if _HOST.match(text):
        return f"{said}; an address begins with https:// or hf://"
    folder = path.parent
    if not folder.is_dir():
        if _is_repository(text):
            return f"{said} here or in the local hub cache; on the Hugging Face hub: hf://{text}"
        return f"{said}: there is no folder {folder}"
    near = _near_names(path)
    if near:
        return f"{said}; near names: {', '.join(near)}"
    models = [str(each) for each in model_candidates(folder)[:_MOST]]
    return f"{said}; models there: {', '.join(models)}" if models else said


def _is_repository(text: str) -> bool:
    """Say whether a text is spelled as OWNER/NAME of a hub, and not as a model file in a folder."""
    every = [extension for spec in FORMATS.values() for extension in spec.extensions]
    return bool(_REPOSITORY.fullmatch(text)) and not text.endswith(tuple(every))


def _near_names(path: Path) -> list[str]:
    """Return the names in the folder that are spelled like a path's."""
    try:
        names = {name.lower(): name for name in os.listdir(path.parent) if name[:1] != "."}
    except OSError:
        return []
    return [str(path.parent / names[each]) for each in close_names(path.name.lower(), names, _MOST)]
