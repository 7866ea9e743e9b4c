r"""Ordered hashes: SHA-256 of files, of a tensor's stored bytes, and of its decoded values.

The decoded hash is over `shape\n` and the little-endian float32 values (float64 for F64, int64
for integers) of the logical tensor with all layout steps undone, so that it is equal across
formats.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import LazyTensor
from aprfmt.errors import AprfmtError
from aprfmt.tensors.runs import WINDOW, all_runs, windows

if TYPE_CHECKING:
    from numpy.typing import NDArray


def file_sha256(path: Path, stop: Sequence[bool] = ()) -> str:
    """Return the hex SHA-256 of a file; gives up early once `stop` is not empty."""
    from aprfmt.formats.mapped import MappedFile

    digest = hashlib.sha256()
    file = MappedFile(path)
    try:
        for start in range(0, file.size, WINDOW):
            if stop:
                raise AprfmtError(f"{path}: hashing was stopped")
            end = min(start + WINDOW, file.size)
            digest.update(file.view[start:end])
            file.drop(start, end)
    finally:
        file.close()
    return digest.hexdigest()


def raw_sha256(tensor: LazyTensor) -> str:
    """Return the hex SHA-256 of the stored bytes; companions follow in suffix order."""
    digest = hashlib.sha256()
    for window in windows(all_runs(tensor)):
        digest.update(window)
    return digest.hexdigest()


def decoded_sha256(values: "NDArray[Any]") -> str:
    """Return the hex SHA-256 of a decoded array as the module's docstring defines it.

    NaN payloads count: equal hashes mean equal bits of the widened values.
    """
    import numpy as np

    kind, size = values.dtype.kind, values.dtype.itemsize
    if kind in "biu":
        wide = values.astype("<i8")
    elif kind == "c":
        wide = values.astype("<c8")
    else:
        wide = values.astype("<f8" if size == 8 else "<f4")
    digest = hashlib.sha256(f"{','.join(map(str, values.shape))}\n".encode())
    digest.update(np.ascontiguousarray(wide).data.cast("B") if wide.size else b"")
    return digest.hexdigest()
