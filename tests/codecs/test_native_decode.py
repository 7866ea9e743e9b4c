"""The C decoders against the numpy codecs, gguf and libgguf, on every level of kernels."""

from array import array

import numpy as np
import pytest

from aprfmt import codecs
from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import bnb4
from aprfmt.errors import CodecError
from tests.codecs.levels import guards_hold, level, misaligned, native, out_at, same_bits

__all__ = ["level"]

KERNELS = [name for name, _, _ in native._kernels.decoders()]
BLOCKS = [name for name in KERNELS if ENCODINGS[name].block_size > 1]
PLAIN = [name for name in KERNELS if ENCODINGS[name].block_size == 1]


def random_bytes(name: str, blocks: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(blocks * ENCODINGS[name].type_size)


def reference(name: str, raw: bytes, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    out = np.empty(count, np.float32)
    codecs.codec(name).decode({"": raw}, out)
    return out


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", KERNELS)
def test_random_bytes_decode_as_by_numpy(name: str) -> None:
    blocks = 300 if ENCODINGS[name].block_size > 1 else 5000
    raw = random_bytes(name, blocks)
    expected = reference(name, raw, blocks * ENCODINGS[name].block_size)
    out = np.empty_like(expected)
    native.KERNELS[name](raw, out)
    same_bits(out, expected)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", ["F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_every_pattern_keeps_its_bits(name: str) -> None:
    width = ENCODINGS[name].type_size
    raw = np.arange(256**width, dtype=f"<u{width}").tobytes()
    expected = reference(name, raw, 256**width)
    for start in (0, 1):  # whole vectors, and each pattern in another lane
        out = np.empty(256**width - start, np.float32)
        native.KERNELS[name](raw[start * width :], out)
        assert out.tobytes() == expected[start:].tobytes()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("stream", [0, 1])
@pytest.mark.parametrize("name", KERNELS)
def test_any_count_and_any_alignment(name: str, stream: int) -> None:
    size = ENCODINGS[name].block_size
    for blocks in (1, 2, 7) if size > 1 else (1, 7, 8, 31, 33, 64, 101):
        raw = random_bytes(name, blocks, seed=blocks)
        expected = reference(name, raw, blocks * size)
        for raw_by, out_by in ((0, 0), (1, 4), (3, 8), (13, 1), (7, 2), (63, 12)):
            out = out_at(blocks * size, out_by)
            native.KERNELS[name](misaligned(raw, raw_by), out, stream)
            same_bits(out, expected)
            assert guards_hold(out)


@pytest.mark.usefixtures("level")
def test_nothing_decodes_to_nothing() -> None:
    """No bytes and no room: nothing is written, and one missing byte is refused as always."""
    for name in native.KERNELS:
        out = out_at(0, 3)
        native.KERNELS[name](b"", out)
        assert guards_hold(out), name
        with pytest.raises(CodecError):
            native.KERNELS[name](b"", out_at(1, 3))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", BLOCKS)
def test_the_last_block_may_be_used_in_part(name: str) -> None:
    size = ENCODINGS[name].block_size
    raw = random_bytes(name, 3)
    whole = reference(name, raw, 3 * size)
    out = out_at(2 * size + 5, 0)
    native.KERNELS[name](raw, out)
    same_bits(out, whole[: 2 * size + 5])
    assert guards_hold(out)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("count", [0, 1, 8, 77])
def test_apr_q8_scales_by_its_first_four_bytes(count: int) -> None:
    raw = np.float32(0.03).tobytes() * (count > 0) + random_bytes("I8", count)
    out = out_at(count, 3)
    native.KERNELS["APR_Q8"](raw, out)
    same_bits(out, reference("APR_Q8", raw, count))
    assert guards_hold(out)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("to", [0, 1, 2], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("block", [64, 4096, 5, 7])
def test_codes_of_four_bits_decode_as_by_numpy(block: int, to: int) -> None:
    rng = np.random.default_rng(block)
    for count in (1, 2, 63, 64, 129, 1000, 5001):
        packed = rng.integers(0, 256, (count + 1) // 2, np.uint8)
        absmax = rng.random(-(-count // block), np.float32)
        code = rng.normal(size=16).astype(np.float32)
        expected = np.empty(count, np.float32)
        bnb4.decode_coded(packed, absmax, code, block, expected, 0, to)
        for by in (0, 4, 1):
            out = out_at(count, by)
            native.decode_coded(packed, absmax, code, block, out, 0, to, 1)
            same_bits(out, expected)
            assert guards_hold(out)
        first = count // 3
        part = np.empty(count - first, np.float32)
        native.decode_coded(packed, absmax, code, block, part, first, to)
        same_bits(part, expected[first:])


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", BLOCKS)
def test_decodes_as_gguf_does(name: str) -> None:
    gguf = pytest.importorskip("gguf", reason="NOT-RUN: gguf is not installed")
    kind = getattr(gguf.GGMLQuantizationType, name, None)
    raw = np.frombuffer(random_bytes(name, 64), np.uint8)
    try:
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(raw, kind)
    except (NotImplementedError, KeyError, AttributeError, TypeError):
        pytest.skip(f"NOT-RUN: gguf cannot decode {name}")
    out = np.empty(64 * ENCODINGS[name].block_size, np.float32)
    native.KERNELS[name](raw, out)
    same_bits(out, np.ascontiguousarray(expected, np.float32).reshape(-1))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", BLOCKS)
def test_decodes_as_libgguf_does(name: str) -> None:
    libgguf = pytest.importorskip("libgguf", reason="NOT-RUN: libgguf is not installed")
    kind, size = ENCODINGS[name].ggml, ENCODINGS[name].block_size
    raw = np.frombuffer(random_bytes(name, 64, seed=1), np.uint8).reshape(64, -1)
    try:
        expected = libgguf.dequantize_rows(raw, kind, n_per_row=size)
    except (ValueError, TypeError):
        pytest.skip(f"NOT-RUN: libgguf cannot decode {name}")
    out = np.empty(64 * size, np.float32)
    native.KERNELS[name](raw, out)
    same_bits(out, np.ascontiguousarray(expected, np.float32).reshape(-1))


@pytest.mark.parametrize("name", [*KERNELS, "APR_Q8"])
def test_lengths_that_do_not_fit_are_refused(name: str) -> None:
    row = ENCODINGS[name]
    raw = b"\0" * (row.header + 2 * row.type_size)
    for wrong in (raw[:-1], raw + b"\0", b""):
        with pytest.raises(CodecError, match=f"{name}: found {len(wrong)} bytes, expected"):
            native.KERNELS[name](wrong, np.empty(2 * row.block_size, np.float32))


def test_outputs_that_cannot_be_filled_are_refused() -> None:
    kernel = native.KERNELS["Q8_0"]
    with pytest.raises(CodecError, match="aligned to 4"):
        kernel(bytes(34), misaligned(bytes(128), 1).view())
    with pytest.raises(CodecError, match="float32"):
        kernel(bytes(34), bytearray(127))
    read_only = np.zeros(32, np.float32)
    read_only.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        kernel(bytes(34), read_only)
    with pytest.raises((ValueError, BufferError)):
        kernel(bytes(34), np.zeros(64, np.float32)[::2])
    out = array("f", bytes(128))
    kernel(bytes(34), out)  # any writable buffer of the right length is fine


def test_wrong_companions_of_four_bit_codes_are_refused() -> None:
    packed, absmax = np.zeros(32, np.uint8), np.ones(1, np.float32)
    code, out = np.zeros(16, np.float32), np.empty(64, np.float32)
    native.decode_coded(packed, absmax, code, 64, out)
    wrong = (
        (packed[:31], absmax, code, 64, 0, 0), (packed, absmax[:0], code, 64, 0, 0),
        (packed, absmax, code[:15], 64, 0, 0), (packed, absmax, code, 0, 0, 0),
        (packed, absmax, code, -64, 0, 0), (packed, absmax, code, 64, 1, 0),
        (packed, absmax, code, 64, -1, 0), (packed, absmax, code, 64, 0, 3),
        (packed, absmax, code, 32, 0, 0), (packed, absmax, code, 64, 1 << 62, 0),
    )  # fmt: skip
    for a, b, c, block, first, to in wrong:
        with pytest.raises(CodecError, match="4-bit code"):
            native.decode_coded(a, b, c, block, out, first, to)
    native.decode_coded(packed, absmax, code, 64, out[:63])
    with pytest.raises(CodecError, match="63 elements in blocks of 64 need 32 bytes"):
        native.decode_coded(packed[:31], absmax, code, 64, out[:63])
