"""Hashes that identify the model and the prompt of a saved trace."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.protocols import Value
from aprfmt.tensors.digest import file_sha256

if TYPE_CHECKING:
    from aprfmt.model import Model


def trace_identity(model: "Model", ids: Sequence[int]) -> dict[str, Value]:
    """Return {"prompt_sha256": hash, "model_sha256": {file name: hash}} of a saved trace.

    Reads every file of the model once. The prompt's hash is over its token ids as little-endian
    int64; the model's are of its weights and of the config.json used with them.
    """
    files = list(model.source.files)
    if model.folder is not None and model.folder.config is not None:
        files.append(model.folder.path / "config.json")
    return {
        "prompt_sha256": hashlib.sha256(np.asarray(ids, "<i8").tobytes()).hexdigest(),
        "model_sha256": {path.name: file_sha256(path) for path in files},
    }
