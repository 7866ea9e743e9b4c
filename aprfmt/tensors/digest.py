r"""Ordered hashes: SHA-256 of files, of a tensor's stored bytes, and of its decoded values.

The decoded hash is over `shape\n` and the little-endian float32 values (float64 for F64, int64
for integers) of the logical tensor with all layout steps undone, so that it is equal across
formats.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.protocols import ByteSource, LazyTensor
from aprfmt.errors import AprfmtError
from aprfmt.formats.mapped import Buffer, open_bytes
from aprfmt.tensors.runs import all_runs, windows


def sha256(pieces: Iterable[Buffer]) -> str:
    """Return the hex SHA-256 of bytes that come in pieces."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def file_sha256(path: Path, stop: Sequence[bool] = ()) -> str:
    """Return the hex SHA-256 of a file; gives up early once `stop` is not empty."""

    def pieces(file: ByteSource) -> Iterator[memoryview]:
        for window in file.windows(0, file.size):
            if stop:
                raise AprfmtError(f"{path}: hashing was stopped")
            yield window

    with closing(open_bytes(path)) as file:
        return sha256(pieces(file))


def raw_sha256(tensor: LazyTensor) -> str:
    """Return the hex SHA-256 of the stored bytes; companions follow in suffix order."""
    return sha256(windows(all_runs(tensor)))


def decoded_sha256(values: NDArray[Any]) -> str:
    """Return the hex SHA-256 of a decoded array as the module's docstring defines it.

    NaN payloads count: equal hashes mean equal bits of the widened values.
    """
    kind, size = values.dtype.kind, values.dtype.itemsize
    if kind in "biu":
        wide = values.astype("<i8")
    elif kind == "c":
        wide = values.astype("<c8")
    else:
        wide = values.astype("<f8" if size == 8 else "<f4")
    shape = f"{','.join(map(str, values.shape))}\n".encode()
    return sha256([shape, np.ascontiguousarray(wide).data.cast("B") if wide.size else b""])
