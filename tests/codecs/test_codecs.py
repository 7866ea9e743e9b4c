"""What holds for every codec of the table: lengths, parts, dtypes, refusals, chunks, rows."""

import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

import aprfmt.codecs as codecs
from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import CODECS, codec, decode, decode_chunked, decode_into, encode
from aprfmt.codecs.bnb4 import Bnb4Codec
from aprfmt.errors import CodecError, UnsupportedError
from tests.codecs.data import ENCODERS, Array, decoded

SELF_CONTAINED = [name for name in CODECS if not isinstance(CODECS[name], Bnb4Codec)]
LOSSLESS = [name for name in CODECS if ENCODINGS[name].numpy == CODECS[name].dtype]
REMOVED = [name for name, row in ENCODINGS.items() if row.removed]


@pytest.fixture(params=["numpy", "native"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The verbs with and without the native kernels."""
    codecs.native_kernels.cache_clear()
    if request.param == "numpy":
        monkeypatch.setenv("APRFMT_NATIVE", "0")
    elif codecs.native_kernels() is None:
        pytest.skip("NOT-RUN: the native extension is not built")
    request.addfinalizer(codecs.native_kernels.cache_clear)
    return str(request.param)


def sample(name: str, count: int, seed: int = 0) -> bytes:
    """Return raw bytes of `count` elements; no float among them is a NaN."""
    row = ENCODINGS[name]
    headers = (row.header + row.row_header) * (count > 0)
    size = headers + -(-count // row.block_size) * row.type_size
    return np.random.default_rng(seed).integers(0, 64, size, dtype=np.uint8).tobytes()


def test_every_encoding_with_a_layout_has_a_codec() -> None:
    assert set(CODECS) == {name for name, row in ENCODINGS.items() if row.known}


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_says_what_the_table_says(name: str) -> None:
    row, found = ENCODINGS[name], CODECS[name]
    assert (found.name, found.block_size, found.type_size) == (name, row.block_size, row.type_size)
    assert found.parts[0] == ""
    assert np.dtype(found.dtype).name == found.dtype


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_refuses_another_number_of_bytes(name: str) -> None:
    count = 2 * CODECS[name].block_size
    raw = sample(name, count)
    for wrong in (raw[:-1], raw + b"\0", b"", raw + raw):
        with pytest.raises(CodecError, match=rf"{name}: found {len(wrong)} bytes, expected"):
            decoded(CODECS[name], {"": wrong}, count)


@pytest.mark.parametrize("name", CODECS)
def test_refuses_a_missing_main_part(name: str) -> None:
    with pytest.raises(CodecError, match=f"{name}: part .* is missing"):
        decoded(CODECS[name], {"other": b""}, CODECS[name].block_size)


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_refuses_an_output_it_cannot_fill(name: str) -> None:
    count, found = 2 * CODECS[name].block_size, CODECS[name]
    raw, kind = {"": sample(name, count)}, np.dtype(found.dtype)
    read_only = np.zeros(count, kind)
    read_only.flags.writeable = False
    other = np.dtype("float64" if found.dtype != "float64" else "float32")
    flat: Array = np.zeros(2 * count, kind)
    for out in (flat.reshape(1, -1), flat[::2], read_only, np.zeros(count, other)):
        with pytest.raises(CodecError, match=name):
            found.decode(raw, out)


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_nothing_decodes_to_nothing(name: str, road: str) -> None:
    assert decode(name, b"", (0, 32)).shape == (0, 32)
    assert list(decode_chunked(name, b"", (0,), np.empty(512, CODECS[name].dtype))) == []


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_takes_any_buffer(kind: type, road: str) -> None:
    raw = sample("Q4_0", 64)
    assert np.array_equal(decode("Q4_0", kind(raw), (2, 32)), decode("Q4_0", {"": raw}, (2, 32)))


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_native_and_numpy_agree_on_any_count(name: str, road: str) -> None:
    """Whole blocks and a last one in part, into the caller's buffer."""
    block = CODECS[name].block_size
    for count in (block, 5 * block, 5 * block - block // 2):
        raw = sample(name, count, seed=3)
        out: Array = np.full(count, 7, CODECS[name].dtype)
        decode_into(name, raw, out)
        assert out.tobytes() == decoded(CODECS[name], {"": raw}, count).tobytes()


@pytest.mark.parametrize("name", SELF_CONTAINED)
def test_chunks_give_the_whole(name: str, road: str) -> None:
    found = CODECS[name]
    count = 7 * found.block_size
    raw = sample(name, count, seed=4)
    room = count if found.row.row_header else 3 * found.block_size  # rows are not cut
    out: Array = np.empty(room, found.dtype)
    pieces = [piece.copy() for piece in decode_chunked(name, raw, (count,), out)]
    sizes = [room] * (count // room) + [count % room] * (count % room > 0)
    assert [piece.size for piece in pieces] == sizes
    assert np.concatenate(pieces).tobytes() == decode(name, raw, (count,)).tobytes()


def test_chunks_need_room_for_a_block() -> None:
    with pytest.raises(CodecError, match=r"holds 255 elements, expected 256"):
        list(decode_chunked("Q4_K", sample("Q4_K", 256), (256,), np.empty(255, np.float32)))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_padded_rows_are_cut(name: str, road: str) -> None:
    """APR's K-quants: each row of 300 starts a block of its own and takes two."""
    raw = sample(name, 3 * 512, seed=5)
    whole = decode(name, raw, (3, 512))
    row_bytes = 2 * CODECS[name].type_size
    found = decode(name, raw, (3, 300), row_bytes=row_bytes)
    assert found.flags.c_contiguous
    assert np.array_equal(found, whole[:, :300])
    out: Array = np.empty(1100, np.float32)
    chunks = decode_chunked(name, raw, (3, 300), out, row_bytes=row_bytes)
    assert np.array_equal(np.concatenate([piece.copy() for piece in chunks]), found.reshape(-1))


def test_padded_rows_of_another_length_are_refused() -> None:
    raw, out = sample("Q4_K", 512), np.empty(1024, np.float32)
    for row_bytes in (143, 145, 0):
        with pytest.raises(CodecError, match="Q4_K"):
            decode("Q4_K", raw, (2, 200), row_bytes=row_bytes)
        with pytest.raises(CodecError, match="Q4_K"):
            list(decode_chunked("Q4_K", raw, (2, 200), out, row_bytes=row_bytes))
    with pytest.raises(CodecError, match="3 rows"):
        decode("Q4_K", raw, (3, 200), row_bytes=144)


@pytest.mark.parametrize("name", LOSSLESS)
def test_plain_encodings_keep_every_bit(name: str, road: str) -> None:
    raw = np.random.default_rng(6).integers(0, 256, 48, dtype=np.uint8).tobytes()
    if name == "BOOL":
        raw = bytes([0, 1] * 24)
    x = decode(name, raw, (48 // ENCODINGS[name].type_size,))
    assert encode(name, x) == {"": raw}


def test_a_bool_is_true_whatever_its_byte() -> None:
    assert decode("BOOL", bytes([0, 1, 2, 255]), (4,)).tolist() == [False, True, True, True]


@pytest.mark.parametrize("name", [*ENCODERS, "F16", "BF16", "APR_Q4", "APR_Q8", "NF4", "FP4"])
def test_encoders_refuse_a_silent_cast(name: str, road: str) -> None:
    with pytest.raises(CodecError, match=f"{name}: encodes float32, found float64"):
        encode(name, np.zeros((2, 256)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [*ENCODERS, "APR_Q4", "APR_Q8", "NF4", "FP4"])
def test_blocks_refuse_nan_and_infinity(name: str, bad: float, road: str) -> None:
    x = np.ones((2, 256), np.float32)
    x[1, 7] = bad
    with pytest.raises(CodecError, match=f"{name}.*: element 263 is"):
        encode(name, x)


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_must_be_whole_blocks(name: str, road: str) -> None:
    block = CODECS[name].block_size
    with pytest.raises(CodecError, match=f"multiple of {block} elements, found {block - 16}"):
        encode(name, np.zeros((2, block - 16), np.float32))


@pytest.mark.parametrize("name", ENCODERS)
def test_no_rows_encode_to_no_bytes(name: str, road: str) -> None:
    assert encode(name, np.zeros((0, 256), np.float32)) == {"": b""}


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "IQ4_XS"])
def test_importance_must_fit_the_columns(name: str, road: str) -> None:
    x = np.ones((2, 256), np.float32)
    with pytest.raises(CodecError, match="255 columns, the tensor 256"):
        encode(name, x, importance=np.ones(255, np.float32))
    with pytest.raises(CodecError, match="importance matrix: element 3"):
        encode(name, x, importance=np.where(np.arange(256) == 3, np.nan, 1).astype(np.float32))


def test_arithmetic_is_fused_or_strict(road: str) -> None:
    for name in ("Q4_K", "Q8_0", "F32", "BF16", "F16", "APR_Q8", "NF4"):
        for made in (CODECS[name].encode, partial(encode, name)):
            with pytest.raises(CodecError, match="expected 'fused' or 'strict'"):
                made(np.zeros((1, 256), np.float32), fma="fast")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "IQ2_XXS", "IQ1_M", "F8_E4M3", "F4"])
def test_codecs_without_encoder_say_so(name: str) -> None:
    with pytest.raises(CodecError, match=f"{name}: there is no encoder"):
        encode(name, np.zeros((1, 256), np.float32))


@pytest.mark.parametrize("name", REMOVED)
def test_removed_types_are_refused_with_what_helps(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"repack|convert again|ik_llama\.cpp"):
        codec(name)
    with pytest.raises(UnsupportedError, match=name):
        decode(name, b"", (0,))


def test_unknown_types_can_only_be_copied() -> None:
    with pytest.raises(UnsupportedError, match="type#200: its layout is not known"):
        codec("type#200")
    with pytest.raises(UnsupportedError, match=r"type#142: forks use it for IQ2_TN .* or PQ2_0"):
        codec("type#142")
    with pytest.raises(CodecError, match="is not one we know"):
        codec("Q9_Z")


def test_options_are_the_codecs_own() -> None:
    x: Any = np.ones((2, 64), np.float32)
    with pytest.raises(CodecError, match="takes no options, found blocksize"):
        encode("Q4_0", x, options={"blocksize": 32})
    with pytest.raises(CodecError, match="speed"):
        encode("NF4", x, options={"speed": 3})
    with pytest.raises(CodecError, match="blocks of 48"):
        encode("NF4", x, options={"blocksize": 48})
    with pytest.raises(CodecError, match="float8"):
        encode("NF4", x, options={"dtype": "float8"})


def test_importing_the_table_imports_no_numpy() -> None:
    code = "import sys, aprfmt.codecs as c; list(c.CODECS); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
