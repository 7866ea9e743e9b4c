"""CRC-32 is zlib's for every length and every beginning, compiled or not.

Seen red: a wrong constant, the tail left out, the value before ignored.
"""

import random
import zlib

import pytest

from aprfmt.base.crc import crc32

LENGTHS = (*range(200), 255, 256, 257, 4095, 4096, 99_999, 1 << 20)


def test_it_is_zlibs() -> None:
    seed = random.Random(1)
    for length in LENGTHS:
        data, before = seed.randbytes(length), seed.getrandbits(32)
        assert crc32(data) == zlib.crc32(data), length
        assert crc32(data, before) == zlib.crc32(data, before), length
        assert crc32(memoryview(data)[length // 3 :]) == zlib.crc32(data[length // 3 :]), length


def test_what_holds_no_bytes_is_refused() -> None:
    for wrong in ("text", 1, memoryview(b"abcd")[::2]):
        with pytest.raises((TypeError, BufferError)):
            crc32(wrong)


def test_here_it_is_the_compiled_one() -> None:
    compiled = pytest.importorskip("aprfmt.base._crc", reason="NOT-RUN: not built here")
    assert crc32 is compiled.crc32
