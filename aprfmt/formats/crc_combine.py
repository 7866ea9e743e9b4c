"""CRC-32 of a file that is written piece by piece, some by other threads in any order.

A *piece* is the bytes of one write, or of one range that other threads write.

The checksum of A + B follows from those of A and of B and the length of B.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from aprfmt.base.crc import crc32

_ASIDE = 1 << 20  # from this size on, the checksum is computed in parallel with the write


@dataclass(slots=True)
class ChecksumPiece:
    """Some bytes and their CRC-32; None while other threads still write them."""

    nbytes: int = 0
    crc: int | None = 0


class RunningChecksum:
    """CRC-32 of a file whose first bytes (the head) may still change."""

    def __init__(self, head: bytes) -> None:
        """Start after the file's first bytes `head`.

        They are given to `digest` again, as a header may change until the end.
        """
        self._head_bytes = len(head)
        self._pieces = [ChecksumPiece()]

    def add(self, data: bytes | memoryview, write: Callable[[bytes | memoryview], None]) -> None:
        """Write `data` with `write` and add it to the CRC-32; for large pieces both run at once."""
        size, piece = memoryview(data).nbytes, self._pieces[-1]
        before = piece.crc or 0
        if size < _ASIDE:
            write(data)
            piece.crc = crc32(data, before)
        else:

            def compute_crc() -> None:
                """Store the CRC-32 of all bytes up to the end of `data` in the piece's record.

                It runs in another thread during the write.
                """
                piece.crc = crc32(data, before)

            worker = threading.Thread(target=compute_crc)
            worker.start()
            try:
                write(data)
            finally:
                worker.join()  # the caller may reuse the buffer
        piece.nbytes += size

    def join(self, crc: int, nbytes: int) -> None:
        """Add the next `nbytes`, which are in the file already, by their CRC-32 `crc`."""
        piece = self._pieces[-1]
        piece.crc = combine_crcs(piece.crc or 0, crc, nbytes)
        piece.nbytes += nbytes

    def reserve(self, nbytes: int) -> ChecksumPiece:
        """Add `nbytes` that other threads write; return the piece whose CRC-32 is to be set."""
        reserved = ChecksumPiece(nbytes, None)
        self._pieces += [reserved, ChecksumPiece()]
        return reserved

    def copy(self) -> "RunningChecksum":
        """Return a copy of the checksum so far.

        Pieces whose CRC-32 another thread will set are shared with the original.
        """
        made = RunningChecksum(b"")
        made._head_bytes = self._head_bytes
        made._pieces = [*self._pieces[:-1], replace(self._pieces[-1])]
        return made

    def digest(self, head: bytes) -> bytes:
        """Return the CRC-32 of `head` and all bytes after it, four bytes little-endian."""
        assert len(head) == self._head_bytes
        value = crc32(head)
        for piece in self._pieces:
            assert piece.crc is not None
            value = combine_crcs(value, piece.crc, piece.nbytes)
        return value.to_bytes(4, "little")


def combine_crcs(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A + B from A's (`first`), B's (`second`) and the bytes of B (`length`).

    Appending zeros is linear over GF(2): A's CRC goes through the operators for 2^n zero bytes, for
    every bit n of `length`. The method is that of zlib's crc32_combine.
    """
    return _apply_operator(_append_zeros_operator(length), first) ^ second


@lru_cache(256)
def _append_zeros_operator(length: int) -> Sequence[int]:
    """Return the GF(2) operator (32 rows) on a CRC that appends `length` zero bytes.

    Results are cached: pieces of files have few lengths.
    """
    operator: Sequence[int] = [1 << bit for bit in range(32)]
    for power in range(length.bit_length()):
        if length >> power & 1:
            operator = [_apply_operator(_append_power_operator(power), row) for row in operator]
    return operator


@cache
def _append_power_operator(power: int) -> Sequence[int]:
    """Return the GF(2) operator on a CRC that appends 2^`power` zero bytes.

    It is the operator for half as many zeros, applied twice.
    """
    if power:
        operator = _append_power_operator(power - 1)
        return [_apply_operator(operator, row) for row in operator]
    operator = [0xEDB88320, *(1 << bit for bit in range(31))]  # one zero bit
    for _ in range(3):
        operator = [_apply_operator(operator, row) for row in operator]
    return operator


def _apply_operator(operator: Sequence[int], vector: int) -> int:
    """Return the product over GF(2) of an operator (32 rows) and a 32-bit vector."""
    result = 0
    for row in operator:
        if vector & 1:
            result ^= row
        vector >>= 1
    return result
