r"""Ordered hashes: SHA-256 of files, of a tensor's stored bytes, and of its decoded values.

A *piece* is bytes of a file that are read together.

The decoded hash is over `shape\n` and the little-endian float32 values (float64 for F64, int64 for
integers) of the logical tensor with all layout steps undone, so that it is equal across formats.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.background_iterator import iterate_ahead
from aprfmt.base.budget import end_where_time_is_over
from aprfmt.base.protocols import ByteSource, LazyTensor
from aprfmt.errors import AprfmtError, FormatError
from aprfmt.formats.mapped_file import Buffer, MappedFile, open_bytes, truncation_line
from aprfmt.tensors.runs import all_runs, byte_windows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aprfmt.tensors.view import View

PIECE = 2 << 20  # bytes read at a time: they stay in the processor's cache
BAND = 1 << 20  # elements decoded at a time


def sha256_of_pieces(pieces: Iterable[Buffer]) -> str:
    """Return the hex SHA-256 of bytes that are given piece by piece, in order."""
    digest = hashlib.sha256()
    for piece in pieces:
        end_where_time_is_over()
        digest.update(piece)
    return digest.hexdigest()


def file_sha256(path: Path, stop: Sequence[bool] = ()) -> str:
    """Return the hex SHA-256 of a file; AprfmtError once `stop` is not empty."""

    def read_pieces(file: ByteSource) -> Iterator[memoryview]:
        """Yield the file's bytes in order, some at a time; AprfmtError once `stop` is not empty."""
        for window in _file_pieces(file):
            if stop:
                raise AprfmtError(f"{path}: hashing was stopped")
            yield window

    with closing(open_bytes(path)) as file:
        return sha256_of_pieces(read_pieces(file))


def _file_pieces(file: ByteSource) -> Iterator[memoryview]:
    """Yield all bytes of a file in order; each piece is valid until the next one is asked for.

    A large local file is read by another thread: alternating with SHA-256, or through mapped pages,
    it would take a fifth longer. Raises FormatError where the disk fails, or the file ends early.
    """
    fd = file.descriptor() if isinstance(file, MappedFile) else None
    if fd is None or not hasattr(os, "preadv"):
        yield from file.windows(0, file.size)
    elif file.size <= PIECE:
        yield from _read_pieces(file, fd)
    else:
        with closing(iterate_ahead(_read_pieces(file, fd))) as pieces:
            yield from pieces


def _read_pieces(file: ByteSource, fd: int) -> Iterator[memoryview]:
    """Yield all bytes of an open file; each piece is valid until the next but one is asked for.

    `fd` is its descriptor. Raises FormatError where the disk fails, or the file ends early.
    """
    two, at = [memoryview(bytearray(min(PIECE, file.size))) for _ in range(2)], 0
    while at < file.size:
        buffer, other = two
        two = [other, buffer]
        try:
            count = os.preadv(fd, [buffer[: file.size - at]], at)
        except OSError as error:
            said = f"{file.path}: cannot be read at byte {at}: {error.strerror}"
            raise FormatError(said) from error
        if not count:
            raise FormatError(truncation_line(file.path, file.size, at))
        yield buffer[:count]
        at += count


def raw_sha256(tensor: LazyTensor) -> str:
    """Return the hex SHA-256 of a tensor's stored bytes; companions follow in suffix order."""
    return sha256_of_pieces(byte_windows(all_runs(tensor)))


def decoded_sha256(values: "NDArray[Any]") -> str:
    """Return the hex SHA-256 of an array's shape and its values, widened and little-endian.

    The shape is hashed as a line of the sizes with commas. Values are widened to float32, float64,
    int64 or complex64. NaN payloads count: equal hashes mean equal bits of the widened values.
    """
    return sha256_of_pieces([_shape_line(values.shape), _widened_bytes(values)])


def view_sha256(view: "View") -> str:
    """Return `decoded_sha256` of a view's values, decoded a band of rows at a time.

    Mapped pages are released afterwards.
    """

    def value_pieces() -> Iterator[Buffer]:
        """Yield what the digest is of: a line with the shape, then the values' bytes by bands."""
        yield _shape_line(view.shape)
        for _, _, values in view.chunks(BAND):
            yield _widened_bytes(values)
            for tensor in view.stored:
                tensor.drop()

    return sha256_of_pieces(iterate_ahead(value_pieces()))


def _shape_line(shape: Sequence[int]) -> bytes:
    r"""Return the line of sizes that the decoded hash begins with, such as b"2,3\n"."""
    return f"{','.join(map(str, shape))}\n".encode()


def _widened_bytes(values: "NDArray[Any]") -> Buffer:
    """Return values as little-endian bytes of float32, float64, int64 or complex64."""
    import numpy as np

    kind, size = values.dtype.kind, values.dtype.itemsize
    if kind in "biu":
        wide = values.astype("<i8")
    elif kind == "c":
        wide = values.astype("<c8")
    else:
        wide = values.astype("<f8" if size == 8 else "<f4")
    return np.ascontiguousarray(wide).data.cast("B") if wide.size else b""
