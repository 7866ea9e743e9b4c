"""The loader of the C kernels, and the functions that are not codecs."""

import math
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest

from aprfmt import codecs
from aprfmt.base.encodings import ENCODINGS
from aprfmt.conversion.change_counts import ChangeCounts, is_block_encoding
from aprfmt.errors import CodecError
from tests.codecs.levels import golden, level, misaligned, moments, native
from tests.patience import PATIENCE

__all__ = ["level"]

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "", **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_no_numpy() -> None:
    code = "import aprfmt.codecs.native as n, sys; print(n.CPU, 'numpy' in sys.modules)"
    assert run(code) in [f"{level} False" for level in ("avx512", "avx2", "generic")]


def test_without_the_extension_numpy_decodes() -> None:
    code = (
        "import sys; sys.modules['aprfmt.codecs.native._kernels'] = None\n"
        "from aprfmt import codecs\n"
        "try:\n    import aprfmt.codecs.native\n"
        "except ImportError as error: print('_kernels' in str(error), end=' ')\n"
        "print(codecs.decode('Q8_0', bytes(34), (32,)).sum())"
    )
    assert run(code) == "True 0.0"


@pytest.mark.usefixtures("level")
def test_every_kernel_passes_its_check() -> None:
    assert dict(native.check()) == {}
    assert len(native.KERNELS) == len(golden.DECODED)
    assert len(native.ENCODERS) == len(golden.ENCODED)


@pytest.mark.parametrize("name", golden.DECODED)
def test_golden_digests_are_what_numpy_decodes(name: str) -> None:
    row = ENCODINGS[name]
    blocks = golden.block_count(row.block_size)
    raw = golden.raw_bytes(row.header + blocks * row.type_size)
    out = np.empty(blocks * row.block_size, np.float32)
    codecs.codec(name).decode({"": raw}, out)
    assert golden.digest(out) == golden.DECODED[name]
    assert not np.isnan(out).any()


@pytest.mark.parametrize("fma", ["fused", "strict"])
@pytest.mark.parametrize("name", sorted({name for name, _ in golden.ENCODED}))
def test_golden_digests_are_what_numpy_encodes(name: str, fma: str) -> None:
    x = np.array(golden.sample_values(), np.float32).reshape(golden.ROWS, golden.COLUMNS)
    weights = np.array(golden.sample_importance(), np.float32)
    for each, expected in zip((None, weights), golden.ENCODED[name, fma], strict=True):
        made = codecs.codec(name).encode(x, fma=fma, importance=each)[""]  # type: ignore[arg-type]
        assert golden.digest(made) == expected


def test_a_kernel_that_fails_its_check_is_left_out_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(golden.DECODED, "Q4_K", 1)
    monkeypatch.setitem(golden.ENCODED, ("Q6_K", "fused"), (1, 2))
    native.force("best")
    try:
        assert native.KERNELS.get("Q4_K") is None
        assert "Q4_K" not in native.KERNELS
        assert "Q5_K" in native.KERNELS
        assert native.ENCODERS.get(("Q6_K", "fused")) is None
        assert dict(native.check()) == {
            "Q4_K": "the golden blocks come out wrong",
            "encode Q6_K fused": "the golden blocks come out wrong",
        }
        out = np.empty(256, np.float32)
        codecs.decode_into("Q4_K", bytes(144), out)  # by numpy
        assert not out.any()
        with pytest.raises(KeyError):
            native.stats_of("Q4_K", bytes(144), 256)
    finally:
        monkeypatch.undo()
        native.force("best")
    assert dict(native.check()) == {}


def test_block_sizes_are_those_of_the_encoding_table() -> None:
    for name, block_size, type_size in native._kernels.decoders() + native._kernels.encoders():
        assert (ENCODINGS[name].block_size, ENCODINGS[name].type_size) == (block_size, type_size)


def test_unknown_levels_indices_and_grids_are_refused() -> None:
    with pytest.raises(CodecError, match="level 'neon' is not to be had"):
        native.force("neon")
    for index in (-1, 999):
        with pytest.raises(CodecError, match="does not exist"):
            native._kernels.decode(index, b"", bytearray())
        with pytest.raises(CodecError, match="does not exist"):
            native._kernels.encode(index, b"", bytearray(), 32)
    with pytest.raises(CodecError, match="grid 'IQ1' of 3 bytes"):
        native._kernels.set_grid("IQ1", b"abc")


def strings(lengths: list[int], order: str) -> bytes:
    return b"".join(struct.pack(f"{order}Q", n) + b"x" * n for n in lengths)


@pytest.mark.parametrize("order", ["<", ">"])
def test_strings_are_walked_to_their_end(order: str) -> None:
    lengths = [0, 3, 1, 200, 0, 65536, 7]
    data = b"head" + strings(lengths, order) + b"tail"
    starts, end = native.walk_strings(data, 4, len(lengths), order == ">")
    expected = [4 + sum(lengths[:i]) + 8 * i for i in range(len(lengths))]
    assert list(array("Q", starts)) == expected
    assert end == len(data) - 4
    assert native.walk_strings(data, 4, 0, False) == (b"", 4)
    assert native.walk_strings(memoryview(data)[4:], 0, 1, order == ">")[1] == 8


def test_strings_beyond_the_end_are_refused() -> None:
    data = strings([5, 6], "<")
    cases = ((data[:-1], 0, 2), (data, 0, 3), (data, 1, 2), (data[:12], 0, 1), (b"", 0, 1))
    for bad, offset, count in cases:
        with pytest.raises(ValueError, match=r"passes the end|bytes remain"):
            native.walk_strings(bad, offset, count, False)
    for offset, count in ((-1, 1), (len(data) + 1, 0), (0, -1), (0, 1 << 62)):
        with pytest.raises(ValueError, match="bytes remain"):
            native.walk_strings(data, offset, count, False)
    for length in (2**64 - 1, 2**64 - 8, 2**63, 2**32):
        with pytest.raises(ValueError, match="string 0 of 1 passes the end"):
            native.walk_strings(struct.pack("<Q", length) + b"abc", 0, 1, False)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4095, 4096, 4097, 20_001])
def test_moments_are_those_of_float64(count: int) -> None:
    rng = np.random.default_rng(count)
    x = (rng.normal(size=count) * 3 + 20).astype(np.float32)
    if count > 8:
        x[[1, 4]] = 0, -0.0
        x[[2, count // 2, count - 1]] = np.nan, np.inf, -np.inf
    found = native.stats(x)
    finite = x[np.isfinite(x)].astype(np.float64)
    assert (found.elements, found.finite) == (count, finite.size)
    assert found.nan == np.isnan(x).sum()
    assert found.inf == np.isinf(x).sum()
    assert found.zeros == (finite == 0).sum()
    if finite.size == 0:
        assert math.isnan(found.mean) and math.isnan(found.std) and found.l2 == 0
        return
    assert (found.least, found.most) == (finite.min(), finite.max())
    assert found.absmax == np.abs(finite).max()
    assert found.mean == pytest.approx(finite.mean(), rel=1e-13)
    assert found.std == pytest.approx(finite.std(), rel=1e-11, abs=1e-13)
    assert found.l2 == pytest.approx(math.sqrt(math.fsum(finite * finite)), rel=1e-13)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("at", [0, 7, 8, 4096, 4098])
def test_every_pattern_of_a_nan_is_told_from_an_infinity(at: int) -> None:
    """The NaN closest to an infinity has only its lowest mantissa bit set."""
    for sign in (0, 0x80000000):
        for bits in (0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF):
            x = np.ones(4099, np.float32)
            x.view(np.uint32)[at] = bits | sign
            found = native.stats(x)
            assert (found.finite, found.nan, found.inf) == (4098, 1, 0), hex(bits | sign)
            assert (found.least, found.most, found.total) == (1, 1, 4098)
            assert native.first_not_finite(x) == at
        x.view(np.uint32)[at] = 0x7F800000 | sign
        found = native.stats(x)
        assert (found.finite, found.nan, found.inf) == (4098, 0, 1)


def test_moments_do_not_depend_on_threads_or_level() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=3 * (1 << 20) + 12345).astype(np.float32)
    x[1 << 20] = np.nan
    alone = native.stats(x)
    assert native.stats(x, threads=3) == alone
    assert native.stats(misaligned(x, 4).view(np.float32)) == alone
    native.force("generic")
    try:
        assert native.stats(x, threads=2) == alone
    finally:
        native.force("best")


def test_a_constant_has_no_deviation() -> None:
    for value in (0.1, -3e-5, 1e30):
        found = native.stats(np.full(100_003, value, np.float32))
        assert found.std == 0
        assert found.mean == np.float32(value)


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "IQ4_XS", "F16", "BF16", "F32", "TQ1_0"])
def test_moments_of_encoded_bytes_are_those_of_the_decoded(name: str) -> None:
    row = ENCODINGS[name]
    count = (1 << 20) + 7 * 256 if row.block_size > 1 else (1 << 20) + 333
    raw = np.tile(np.frombuffer(golden.raw_bytes(7 * row.type_size), np.uint8), count // 7 + 7)
    raw = raw[: -(-count // row.block_size) * row.type_size]
    decoded = codecs.decode(name, raw.tobytes(), (count,))
    assert native.stats_of(name, raw, count, threads=2) == native.stats(decoded)
    with pytest.raises(CodecError, match=f"{name}: found"):
        native.stats_of(name, raw, count + row.block_size)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    "rows, cuts, skip",
    [
        (1, [(5, 0, 5)], 0),
        (7, [(300, 20, 280), (9, 0, 9), (4100, 1, 4097)], 290),
        (2000, [(70, 0, 70), (70, 69, 1), (3, 0, 0), (70, 10, 50)], 3),
        (2, [((1 << 17) + 9, 2, 1 << 17)], 11),
    ],
)
def test_moments_of_rows_in_pieces_are_those_of_the_rows(
    name: str, rows: int, cuts: list[tuple[int, int, int]], skip: int
) -> None:
    rng = np.random.default_rng(rows)
    pieces, columns = [], []
    for wide, first, taken in cuts:
        values = rng.normal(size=(rows, wide)).astype(np.float32)
        values[rows // 2, wide // 2] = np.nan
        raw = codecs.encode(name, values)[""]
        pieces.append((name, raw, wide, first, taken))
        columns.append(codecs.decode(name, raw, (rows, wide))[:, first : first + taken])
    whole = np.ascontiguousarray(np.hstack(columns))
    part = moments.PART
    for count in {whole.size - skip, max(whole.size - skip - 5, 1)}:
        flat = whole.reshape(-1)[skip : skip + count]
        here = pieces
        if (last := -(-(skip + count) // whole.shape[1])) < rows:  # rows behind are not given
            size = len(pieces[0][1]) // rows // pieces[0][2]
            here = [(n, raw[: last * w * size], w, at, m) for n, raw, w, at, m in pieces]
        found = native.stats_of_rows(here, whole.shape[1], skip, count)
        assert found == [native.stats(flat[at : at + part]) for at in range(0, count, part)]
        side = (native.number_pieces(here), whole.shape[1], skip)
        other = np.nan_to_num(flat, nan=1.0) * np.float32(1.01)
        theirs = ((native.number("F32"), other.view(np.uint8), count, 0, count),)
        assert native.apart is not None and native.apart_rows is not None
        apart = native.apart_rows(side, (theirs, count, 0), count)
        assert apart == native.apart(flat, other)[:6]
        swapped = native.apart_rows((theirs, count, 0), side, count)
        assert swapped == native.apart(other, flat)[:6]
        for given in (side, (side[0], side[1], -1)):  # more elements than there are, and before
            with pytest.raises(CodecError, match="found"):
                native.apart_rows(given, (theirs, count, 0), count + rows * whole.shape[1])
    with pytest.raises(CodecError, match=f"{name}: found"):
        native.stats_of_rows(pieces, whole.shape[1], skip, whole.size - skip + whole.shape[1])
    with pytest.raises(CodecError, match="columns; expected"):
        native.stats_of_rows(pieces[:-1], whole.shape[1], skip, whole.size - skip)


def test_moments_of_rows_of_blocks_are_left_to_others() -> None:
    assert native.stats_of_rows([("Q8_0", bytes(34), 32, 0, 32)], 32, 0, 32) is None


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 4095, 4099, 20_000])
def test_changes_are_counted_as_numpy_does(count: int) -> None:
    rng = np.random.default_rng(count)
    special = np.array(
        [0, -0.0, 1, 1 + 2.0**-23, np.nan, -np.nan, np.inf, -np.inf, 1e-45, 3e38], np.float32
    )
    before, after = (rng.choice(special, count) for _ in range(2))
    with np.errstate(all="ignore"):
        differ = (before != after) & ~(np.isnan(before) & np.isnan(after))
    over = np.isfinite(before) & ~np.isfinite(after)
    under = (before != 0) & (after == 0)
    assert native.changes(before, after) == (differ.sum(), over.sum(), under.sum())
    for kind in (np.float32, np.float64):  # by the kernel, and by numpy
        counts = ChangeCounts()
        with np.errstate(all="ignore"):
            counts.add(before.astype(kind), after.astype(kind))
        assert counts == ChangeCounts(int(differ.sum()), int(over.sum()), int(under.sum()))
    if count > 1:
        with pytest.raises(CodecError, match="changes: found"):
            native.changes(before[1:], after)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("name", sorted(native._DECODERS))
def test_changes_of_blocks_are_those_of_their_values(name: str) -> None:
    row = ENCODINGS[name]
    count = (1 << 21) + 5 * row.block_size  # more than one thread's part, no whole segment
    raw = np.tile(np.frombuffer(golden.raw_bytes(7 * row.type_size), np.uint8), count // 7 + 7)
    raw = raw[: count // row.block_size * row.type_size]
    after = codecs.decode(name, raw.tobytes(), (count,))
    before = after.copy()
    before[::97] += 1
    before[5::1009], before[-1] = 3e38, np.inf
    with np.errstate(all="ignore"):
        expected = native.changes(before, after)
    assert native.changes_of(name, before, raw) == expected
    for threads in (1, 3):
        counts = ChangeCounts()
        done = counts.add_encoded(before, name, raw.tobytes(), row.block_size, threads)
        assert done == is_block_encoding(name)
        assert counts == (ChangeCounts(*expected) if done else ChangeCounts())
    with pytest.raises(CodecError, match=f"bytes of {name}, expected"):
        native.changes_of(name, before[: -row.block_size], raw)


@pytest.mark.usefixtures("level")
def test_the_first_nan_or_infinity_is_found() -> None:
    x = np.ones(10_000, np.float32)
    assert native.first_not_finite(x) == -1
    assert native.first_not_finite(x[:0]) == -1
    for value in (np.nan, np.inf, -np.inf):
        for at in (9999, 4097, 4096, 4095, 9, 8, 0):
            x[at] = value
            assert native.first_not_finite(x) == at
        x[:] = 1


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("encoding", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("first, count", [(0, 37), (0, 5), (31, 6), (9, 17), (36, 1), (3, 0)])
def test_columns_of_rows_are_decoded_into_rows_apart(encoding: str, first: int, count: int) -> None:
    rows, columns = 5, 37
    size = ENCODINGS[encoding].type_size
    raw = np.random.default_rng(3).integers(0, 256, rows * columns * size, np.uint8).tobytes()
    whole = codecs.decode(encoding, raw, (rows, columns))
    place = np.full((rows, count + 8), 7, np.float32)
    assert native.decode_rows(encoding, raw, columns, first, place[:, 3 : 3 + count])
    wanted = np.full_like(place, 7)
    wanted[:, 3 : 3 + count] = whole[:, first : first + count]
    assert place.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    "columns, first, shape, bytes_of_raw",
    [
        (4, 0, (2, 4), 15), (4, 0, (2, 4), 17), (4, 1, (2, 4), 16), (4, -1, (2, 2), 16),
        (4, 5, (2, 0), 16), (-4, 0, (2, 4), 16), (4, 0, (3, 4), 16), (1 << 62, 0, (4, 4), 16),
        (4, 0, (8,), 16), (4, 0, (1, 2, 4), 16),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(
    columns: int, first: int, shape: tuple[int, ...], bytes_of_raw: int
) -> None:
    out = np.zeros(shape, np.float32)
    with pytest.raises(CodecError, match="BF16: "):
        native.decode_rows("BF16", bytes(bytes_of_raw), columns, first, out)
    assert not out.any()


def test_rows_of_blocks_and_of_other_outputs_are_refused() -> None:
    assert not native.decode_rows("Q8_0", bytes(34), 32, 0, np.zeros((1, 32), np.float32))
    for out in (np.zeros((2, 4), np.float64), np.zeros((4, 2), np.float32).T):
        with pytest.raises(CodecError, match="rows of float32"):
            native.decode_rows("BF16", bytes(16), 4, 0, out)
    held = np.zeros((2, 4), np.float32)
    held.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        native.decode_rows("BF16", bytes(16), 4, 0, held)
