"""The Python code that a model's folder names, which transformers runs with trust_remote_code.

Source: transformers' `dynamic_module_utils`. A reference is MODULE.Class, or
OWNER/REPOSITORY--MODULE.Class of another repository; a module's relative imports are files of the
same folder.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from aprfmt.errors import FormatError
from aprfmt.formats.bounded_json import load_file
from aprfmt.model.hf_folder import MAX_CONFIG, HFFolder, read_text
from aprfmt.remote.paths import is_remote

FILES = (
    "config.json",
    "tokenizer_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
KEY = "auto_map"
_IMPORT = re.compile(r"^\s*(?:from|import)\s+\.(\w+)", re.M)
_MOST = 256  # modules of one folder: a chain of imports ends there
_MAX_CODE = 4 << 20  # bytes of a module that are read for its imports


def named_code(folder: HFFolder | None) -> dict[str, str]:
    """Return {file name: what names it} of the Python modules that a local folder's files ask for.

    They are named in `auto_map` or imported relatively by modules that are there. Code of other
    repositories is left out. {} for a remote folder, which is not searched.
    """
    if folder is None or is_remote(folder.path):
        return {}
    found = {
        f"{module}.py": f"{name}: {KEY}" for name in FILES for module in _modules_of(folder, name)
    }
    left = list(found)
    while left and len(found) < _MOST:
        name = left.pop()
        for module in _IMPORT.findall(_text_of(folder.path / name)):
            if f"{module}.py" not in found and not (folder.path / module).is_dir():
                found[f"{module}.py"] = name
                left.append(f"{module}.py")
    return found


def code_texts(folder: HFFolder | None) -> dict[str, str]:
    """Return {file name: text} of the named modules that are in a folder."""
    return {
        name: read_text(folder.path / name)
        for name in named_code(folder)
        if folder is not None and (folder.path / name).is_file()
    }


def _modules_of(folder: HFFolder, name: str) -> Iterator[str]:
    """Yield the modules that the `auto_map` of the folder's file `name` asks for."""
    held: Any = folder.config
    if name != "config.json":
        path = folder.path / name
        try:
            held = load_file(path, max_bytes=MAX_CONFIG) if path.is_file() else None
        except FormatError:
            return  # other checks say what is wrong with it
    stated = held.get(KEY) if isinstance(held, Mapping) else None
    for value in stated.values() if isinstance(stated, Mapping) else ():
        for one in value if isinstance(value, list) else [value]:  # a slow and a fast tokenizer
            if isinstance(one, str) and re.fullmatch(r"\w+\.\w+", one):
                yield one.partition(".")[0]


def _text_of(path: Path) -> str:
    """Return the text of a Python module; "" for one that is not there or too large."""
    try:
        return read_text(path, _MAX_CODE) if path.is_file() else ""
    except FormatError:
        return ""
