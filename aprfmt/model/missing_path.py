"""The message for a path that does not exist, with what the user may have meant."""

import errno
import os
import re
from pathlib import Path

from aprfmt.formats import FORMATS
from aprfmt.model.hf_folder import model_candidates
from aprfmt.model.patterns import close_names

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
_HOST = re.compile(r"(?:www\.|huggingface\.co/|hf\.co/)")
_MOST = 3
CONFIG = "config.json"
_HEAD = 1 << 16  # bytes in which a model's file has the name of a parameter
_PARAMETERS = (b'.weight"', b'.bias"')


def missing_path_message(path: Path) -> str:
    """Return the error message for a path that names no model, with near names or other guesses."""
    text = str(path)
    sentence = f"{text}: no such file or folder"
    if path.is_symlink():
        return f"{text}: is a link to {os.readlink(path)}, which {_dead_end(path)}"
    if text == "-":
        return "-: a model is read from a file, not from standard input; give its path"
    if _HOST.match(text):
        return f"{sentence}; an address begins with https:// or hf://"
    folder = path.parent
    if not folder.is_dir():
        if _looks_like_repository(text):
            return (
                f"{sentence} here or in the local hub cache; on the Hugging Face hub: hf://{text}"
            )
        return f"{sentence}: there is no folder {folder}"
    near = _similar_paths(path)
    if near:
        return f"{sentence}; near names: {', '.join(near)}"
    models = [str(each) for each in likely_models(folder)[:_MOST]]
    return f"{sentence}; models there: {', '.join(models)}" if models else sentence


def likely_models(folder: Path) -> list[Path]:
    """Return a folder's files and then its folders that look like models, to be offered to a user.

    Of .safetensors files those are left out that name no parameter: traces, batches, captures.
    A folder is a model's if it has a config.json and a file of weights. [] where `folder` cannot be
    listed.
    """
    try:
        files = [each for each in model_candidates(folder) if names_parameters(each)]
        below = sorted(each for each in folder.iterdir() if (each / CONFIG).is_file())
        return files + [each for each in below if model_candidates(each)]
    except OSError:
        return []


def names_parameters(path: Path) -> bool:
    """Return whether a model file's first bytes name a parameter, as `x.weight` or `x.bias`.

    True for a file of another format than safetensors: GGUF and APR files hold models alone.
    """
    if path.suffix != ".safetensors":
        return True
    with path.open("rb") as file:
        head = file.read(_HEAD)
    return any(name in head for name in _PARAMETERS)


def _dead_end(link: Path) -> str:
    """Return why a link that cannot be followed leads nowhere."""
    try:
        os.stat(link)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "leads back to it: a loop of links; remove it"
    return "is not there (no such file)"


def _looks_like_repository(text: str) -> bool:
    """Return whether a text is spelled OWNER/NAME, without a model file's extension."""
    every = [extension for spec in FORMATS.values() for extension in spec.extensions]
    return bool(_REPOSITORY.fullmatch(text)) and not text.endswith(tuple(every))


def _similar_paths(path: Path) -> list[str]:
    """Return up to three paths in the same folder that are spelled like this one.

    [] where the folder cannot be listed.
    """
    try:
        names = {name.lower(): name for name in os.listdir(path.parent) if name[:1] != "."}
    except OSError:
        return []
    return [str(path.parent / names[each]) for each in close_names(path.name.lower(), names, _MOST)]
