"""Decoding kernels equal the codecs bit for bit, over random raw bytes and every kind of length.

Outputs are poisoned before and checked behind their end. Seen red, each alone: a scale's index off
by one, the order of a byte's two nibbles, a tail written past its end, bytes read as if blocks were
aligned.
"""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import codec, decode_into
from aprfmt.errors import CodecError
from aprfmt.inference.fast.cuda import DECODED, decode, decode_coded
from tests.inference.gpu.machine import on

OUTPUTS = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
TILE = 4096  # the largest of the kernels'; the others divide it
# Around a warp, a block of 32, a superblock and a tile; then several tiles and a tail.
LENGTHS = (
    1, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 513, 2047, 2049,
    TILE - 1, TILE, TILE + 1, TILE + 37, 3 * TILE + 259,
)  # fmt: skip
FEW_LENGTHS = (1, 7, 33, 257, TILE - 1, TILE + 37)
GUARD = 64


def lengths(machine: Any) -> tuple[int, ...]:
    """Return all lengths on a GPU, few where a processor has to play one."""
    return LENGTHS if machine.name == "gpu" else FEW_LENGTHS


def raw_bytes(encoding: str, count: int, seed: int = 0) -> np.ndarray:
    row = ENCODINGS[encoding]
    size = -(-count // row.block_size) * row.type_size
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def expected(encoding: str, raw: np.ndarray, count: int, dtype: str) -> np.ndarray:
    out = np.empty(count, codec(encoding).dtype)
    decode_into(encoding, raw.tobytes(), out)
    with np.errstate(all="ignore"):
        return out.astype(OUTPUTS[dtype])


def assert_same(found: np.ndarray, wanted: np.ndarray, keeps_nan: bool) -> None:
    """Compare bits; a NaN that arithmetic made may have any."""
    bits = f"u{found.itemsize}"
    same = found.view(bits) == wanted.view(bits)
    if not keeps_nan:
        same |= np.isnan(found) & np.isnan(wanted)
    assert same.all(), (int(np.argmin(same)), found[~same][:4], wanted[~same][:4])


SOME = [("Q4_K", "bfloat16"), ("Q6_K", "bfloat16"), ("Q8_0", "float16"), ("Q5_1", "float64")]
ALL = [(encoding, dtype) for encoding in DECODED for dtype in OUTPUTS]


@on("case", [case for case in ALL if case[1] == "float32" or case in SOME], ALL)
def test_bits_equal_the_codec(machine: Any, case: tuple[str, str]) -> None:
    encoding, dtype = case
    m, to = machine, OUTPUTS[dtype]
    for count in lengths(machine):
        raw = raw_bytes(encoding, count, count)
        data = m.put(raw)
        out = m.put(np.full(count + GUARD, 0xA5, f"u{to.itemsize}"))
        decode(encoding, m.flat(data), m.flat(out, dtype, 0, count))
        found = m.get(out)
        assert (found[count:] == 0xA5).all(), count
        keeps = dtype == "float32" and encoding in ("F32", "F16", "BF16")
        assert_same(found[:count].view(to), expected(encoding, raw, count, dtype), keeps)


@pytest.mark.parametrize("encoding", DECODED)
def test_places_that_are_not_aligned(machine: Any, encoding: str) -> None:
    """Bytes that begin anywhere a block may, outputs that begin at any element."""
    m = machine
    starts = range(0, 16, DECODED[encoding])
    for start in starts if m.name == "gpu" else starts[-1:]:
        for lead in (1, 3):
            count = 613
            raw = raw_bytes(encoding, count, start)
            data = m.put(np.concatenate([np.zeros(start, np.uint8), raw]))
            out = m.put(np.full(count + lead + GUARD, 0xA5A5A5A5, np.uint32))
            decode(encoding, m.flat(data, None, start), m.flat(out, "float32", lead, count))
            found = m.get(out)
            assert (found[:lead] == 0xA5A5A5A5).all() and (
                found[lead + count :] == 0xA5A5A5A5
            ).all()
            wanted = expected(encoding, raw, count, "float32")
            assert_same(found[lead : lead + count].view(np.float32), wanted, False)


CODED = [
    (name, saved, blocksize)
    for name in ("NF4", "FP4")
    for saved in ("float32", "bfloat16", "float16")
    for blocksize in (32, 64, 4096)
]


@on("case", [("NF4", "float32", 64), ("FP4", "float16", 32), ("NF4", "bfloat16", 4096)], CODED)
def test_coded_weights_equal_the_codec(machine: Any, case: tuple[str, str, int]) -> None:
    name, saved, blocksize = case
    m, random = machine, np.random.default_rng(5)
    reference: Any = codec(name)
    for count in lengths(machine):
        x = random.standard_normal(count).astype(np.float32)
        parts = reference.with_options(blocksize=blocksize, dtype=saved).encode(x)
        coded = reference.coded(parts, count)
        wanted = np.empty(count, np.float32)
        reference.decode(parts, wanted)
        packed, absmax, code = m.put(coded.packed), m.put(coded.absmax), m.put(coded.code)
        for dtype, to in OUTPUTS.items():
            out = m.put(np.full(count + GUARD, 0xA5, f"u{to.itemsize}"))
            decode_coded(
                m.flat(packed),
                m.flat(absmax),
                m.flat(code),
                m.flat(out, dtype, 0, count),
                blocksize=blocksize,
                saved=saved,
            )
            found = m.get(out)
            assert (found[count:] == 0xA5).all()
            assert_same(found[:count].view(to), wanted.astype(to), False)


def test_lengths_that_do_not_fit_are_refused(machine: Any) -> None:
    m = machine
    data, out = m.put(np.zeros(144, np.uint8)), m.put(np.zeros(512, np.float32))
    with pytest.raises(CodecError, match="found 144 bytes, expected 288 for 512 elements"):
        decode("Q4_K", m.flat(data), m.flat(out))
    with pytest.raises(CodecError, match="expected a multiple of 16"):
        decode(
            "Q4_K", m.flat(m.put(np.zeros(160, np.uint8)), None, 2, 144), m.flat(out, None, 0, 256)
        )
    with pytest.raises(CodecError, match="no GPU kernel"):
        decode("IQ2_XS", m.flat(data), m.flat(out))
    with pytest.raises(CodecError, match="decodes to one of"):
        decode("Q4_K", m.flat(data), m.flat(m.put(np.zeros(256, np.int32))))
