"""Weights written in dialects: the bytes that their libraries make, and what is laid out anew.

The libraries' bytes are in fixtures/oracles, whose cases with `<` have the weight they were made
of. Seen red: a scale rounded after its codes, AWQ's order of outputs, a zero point not less one.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import codec, decode, repack_blocks
from aprfmt.codecs.bits import halves_to_pairs, pairs_to_halves
from aprfmt.codecs.dialects import DIALECTS, dialects_at
from aprfmt.codecs.grids import GridWeight, Groups
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.codecs.repack_blocks import BLOCKS, grid_of_blocks
from aprfmt.codecs.scale_checks import check_scales
from aprfmt.codecs.writer import Settings, Writer
from aprfmt.codecs.writers import PAIRS, READS, WRITERS
from aprfmt.errors import CodecError
from aprfmt.quantizing.mixture import SCHEMES
from tests.codecs.data import Array, by_gguf
from tests.codecs.test_oracles import FILES, header, rows_of
from tests.codecs.test_repacks import INTEGERS, grids, powers, small

FLOATS: Mapping[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
ROWS, COLUMNS = 8, 128


def sources() -> Iterator[tuple[str, str]]:
    """Yield the cases that have the weight they were made of."""
    for library in FILES:
        held = rows_of(library)
        for name in header(library)["__metadata__"]:
            if f"{name}|<" in held:
                yield library, name


def facts(said: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells one section from another: its method, its format, its mode."""
    section = next(iter(said.values()))
    return tuple(section.get(key) for key in ("quant_method", "format", "mode"))


def writer_for(section: Mapping[str, Any]) -> tuple[Writer, Settings]:
    """Return the writer of a section, and how it writes; its scales are F32 where they may be."""
    writer = next(
        writer
        for writer in (WRITERS[name] for name in WRITERS)
        if facts(writer.section(Settings(1, "F32"), [])) == facts({"": section})
    )
    weights = section.get("config_groups", {}).get("group_0", {}).get("weights", {})
    size = weights.get("group_size") or section.get("group_size") or 64
    return writer, Settings(size, writer.scales or "F32")


@pytest.mark.parametrize(("library", "case"), list(sources()))
def test_the_bytes_that_the_library_makes(library: str, case: str) -> None:
    held = rows_of(library)
    writer, how = writer_for(json.loads(header(library)["__metadata__"][case]))
    encoding, shape, raw = held[f"{case}|<"]
    weight = np.frombuffer(raw, FLOATS[encoding]).reshape(shape).astype(np.float32)
    if not writer.scales:
        how = how._replace(scales=encoding)
    source = writer.quantize(weight, how)
    theirs = {n.partition("|")[2]: row for n, row in held.items() if n.startswith(f"{case}|")}
    stored = writer.stored(shape, how)
    assert set(stored) == set(theirs) - {"<", "="}
    for suffix, part in stored.items():
        kind, dims, expected = theirs[suffix]
        assert (kind, dims) == (part.encoding, part.shape), suffix
        assert writer.part(source, suffix, how) == expected, suffix


def test_every_writer_is_held_to_a_library() -> None:
    held = [
        writer_for(json.loads(header(library)["__metadata__"][case]))[0]
        for library, case in sources()
    ]
    every = [WRITERS[name] for name in WRITERS]
    assert all(writer in held for writer in every if not writer.stacked)  # that: test_repacked


def stored(writer: Writer, source: GridWeight, how: Settings) -> PackedWeight:
    """Return what a writer stores of a grid, with what config.json says of it.

    One for stacks stores it as two experts.
    """
    shape = (2, ROWS // 2, COLUMNS) if writer.stacked else source.shape
    parts = {
        suffix: part._replace(raw=writer.part(source, suffix, how))
        for suffix, part in writer.stored(shape, how).items()
    }
    for part in parts.values():
        assert len(part.raw) == ENCODINGS[part.encoding].nbytes(part.shape)
    section = writer.section(how, ["lm_head"])
    said = dialects_at(section.get("quantization") or section["quantization_config"], "a.up_proj")
    assert said is not None
    dialect = DIALECTS[writer.encoding.lower()]
    assert dialect in said[0]
    return PackedWeight(dialect, parts, said[1])


@pytest.mark.parametrize("scheme", [name for name, row in SCHEMES.items() if row.dialect])
@pytest.mark.parametrize("scales", FLOATS)
def test_what_is_stored_decodes_to_the_grid(scheme: str, scales: str) -> None:
    row = SCHEMES[scheme].options
    writer = WRITERS[row["writer"]]
    how = Settings(row["size"] or COLUMNS, writer.scales or scales, row["version"])
    weight = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    weight[3] = 0
    source = writer.quantize(weight, how)
    packed = stored(writer, source, how)
    values = source.values(0, ROWS)
    np.testing.assert_array_equal(packed.decode().reshape(values.shape), values)
    np.testing.assert_array_equal(source.values(2, 5), values[2:5])
    np.testing.assert_array_equal(source.codes(2, 5), source.codes(0, ROWS)[2:5])
    lattice = packed.lattice(packed.decode())
    assert lattice is not None and np.allclose(values[3], 0, atol=1e-6)
    weight = weight.reshape(lattice.low.shape)
    inside = (weight >= lattice.low) & (weight <= lattice.high)
    off = np.abs(weight - values.reshape(weight.shape))[inside]
    most = 0.55 if scheme.startswith("MLX") else 0.5001  # MLX's codes are those of other scales
    assert (off <= lattice.step[inside] * most + 1e-7).all()  # the nearest code


@pytest.mark.parametrize("scheme", [name for name, row in SCHEMES.items() if row.dialect])
@pytest.mark.parametrize("scales", FLOATS)
@pytest.mark.parametrize("size", [1e-6, 1e-12, 1e-25, 1e-42])
def test_what_small_values_become_is_read(scheme: str, scales: str, size: float) -> None:
    row = SCHEMES[scheme].options
    writer = WRITERS[row["writer"]]
    how = Settings(row["size"] or COLUMNS, writer.scales or scales, row["version"])
    weight = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)) * size
    source = writer.quantize(weight.astype(np.float32), how)
    packed = stored(writer, source, how)
    laid = packed.laid_out()
    assert laid is not None
    check_scales("a", writer.main, packed.parts, laid)
    np.testing.assert_array_equal(packed.decode().reshape(ROWS, COLUMNS), source.values(0, ROWS))


def test_a_scale_that_f16_rounds_to_nothing_is_its_smallest() -> None:
    writer, how = WRITERS["GPTQ"], Settings(32, "F16")
    weight = np.random.default_rng(0).uniform(-2e-7, 2e-7, (ROWS, COLUMNS)).astype(np.float32)
    source = writer.quantize(weight, how)
    assert (source.groups.scale == 2.0**-24).all()
    assert np.abs(source.values(0, ROWS) - weight).max() <= 2.0**-25


def blocks_of(encoding: str, codes: Array, numbers: Mapping[str, Array]) -> bytes:
    """Return blocks of codes [rows, columns] 0 to 15, their numbers by member."""
    kind = codec(encoding)
    assert kind.layout is not None
    made = np.zeros((ROWS, COLUMNS // kind.block_size), kind.layout)
    held = codes[:, ::2] | codes[:, 1::2] << 4
    made["qs"] = pairs_to_halves(held.astype(np.uint8).reshape(-1, BLOCKS[encoding].half)).reshape(
        made["qs"].shape
    )
    for name, number in numbers.items():
        made[name] = number.reshape(made[name].shape)
    return made.tobytes()


def halves(draw: st.DrawFn, shape: tuple[int, ...]) -> Array:
    """Draw float16 numbers over all bit patterns, but those that are none."""
    held = draw(arrays.arrays(np.uint16, shape)).view(np.float16)
    return np.where(np.isfinite(held) & (np.abs(held) <= 8000), held, np.float16(1))


@st.composite
def blocks(draw: st.DrawFn, encoding: str) -> tuple[bytes, Array, Array | None]:
    """Draw blocks over the whole range of their scales, and the values they have."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    codes = rng.integers(0, 16, (ROWS, COLUMNS))
    whole = None
    if encoding == "NVFP4":
        numbers = {
            "d": draw(arrays.arrays(np.uint8, (ROWS, COLUMNS // 16), elements=st.integers(0, 0x7E)))
        }
        number = draw(st.floats(2.0**-60, 2.0**20, width=32))
        whole = np.array([number], np.float32)
    elif encoding == "MXFP4":
        numbers = {
            "e": draw(arrays.arrays(np.uint8, (ROWS, COLUMNS // 32), elements=st.integers(0, 254)))
        }
    else:
        shape = (ROWS, COLUMNS // 32)
        numbers = {"d": halves(draw, shape)}
        if encoding == "Q4_1":
            numbers["m"] = halves(draw, shape)
    raw = blocks_of(encoding, codes, numbers)
    parts: dict[str, bytes] = {"": raw}
    if whole is not None:
        parts["scale"] = whole.tobytes()
    return raw, decode(encoding, parts, (ROWS, COLUMNS)), whole


def anew(read: GridWeight, target: str) -> Iterator[tuple[GridWeight, Any, PackedWeight]]:
    """Yield a grid as every writer of an encoding takes and stores it."""
    for name in WRITERS:
        writer = WRITERS[name]
        if writer.encoding != target:
            continue
        if read.groups.codes == "e2m1" and (read.groups.size == 32) != ("MXFP4" in name):
            with pytest.raises(CodecError, match="no E2M1 in groups of"):
                writer.repack(read, Settings(read.groups.size, "F16"))
            continue
        for version in (1, 2) if target == "GPTQ" else (1,):
            how = Settings(read.groups.size, writer.scales or "F16", version)
            try:
                held, said = writer.repack(read, how)
            except CodecError as error:
                if "would all be 0 in F16" not in str(error):
                    raise
                with np.errstate(under="ignore"):
                    assert not read.groups.scale.astype(np.float16).any()
                continue
            yield held, said, stored(writer, held, how)


@pytest.mark.parametrize("encoding", BLOCKS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_blocks_are_laid_out_anew(encoding: str, data: st.DataObject) -> None:
    """Exact, over all scales; compressed-tensors' reciprocal of a global scale is counted."""
    raw, values, whole = data.draw(blocks(encoding))
    if whole is None:
        theirs = by_gguf(encoding, np.frombuffer(raw, np.uint8).reshape(ROWS, -1))
        assert theirs is not None
        np.testing.assert_array_equal(theirs.reshape(values.shape), values)
    row = ENCODINGS[encoding].row_bytes((ROWS, COLUMNS)) or 0
    read = grid_of_blocks(encoding, (ROWS, COLUMNS), lambda a, b: raw[a * row : b * row], whole)
    np.testing.assert_array_equal(read.values(0, ROWS), values)
    with pytest.MonkeyPatch.context() as without:
        made = read.codes(1, ROWS)
        without.setattr(repack_blocks, "native_kernels", lambda: None)
        np.testing.assert_array_equal(read.codes(1, ROWS), made)
    for target in PAIRS[encoding]:
        for _, said, packed in anew(read, target):
            if not lost(packed, 0xFF if encoding == "MXFP4" else 0x7F):
                check(values, packed.decode(), said)
            if (encoding, target) != ("NVFP4", "COMPRESSED_PACKED_FLOAT"):
                assert said.inexact == 0, target


# Bits of a scale that are no sign, by its encoding; of others those of a byte.
MAGNITUDE = {"F16": 0x7FFF, "BF16": 0x7FFF, "F32": 0x7FFFFFFF}


def lost(packed: PackedWeight, mask: int = 0x7F) -> bool:
    """Say whether scales are 0 everywhere, be it that they underflow; held to be refused.

    `mask` are the bits that tell of scales of one byte: an E8M0 scale has no sign.
    """
    for suffix, part in packed.parts.items():
        bits = MAGNITUDE.get(part.encoding, mask)
        numbers = np.frombuffer(part.raw, f"<u{(bits.bit_length() + 7) // 8}")
        if "scale" in suffix and not (numbers & bits).any():
            break
    else:
        return False
    with pytest.raises(CodecError, match="is 0 everywhere"):
        packed.decode()
    return True


def check(before: Array, after: Array, said: Any) -> None:
    """Hold what is said of a repack to the values of both sides."""
    with np.errstate(all="ignore"):
        after = after.reshape(before.shape)
        off = np.abs(before.astype(np.float64) - after)
    off = np.where(before == after, 0, off).reshape(said.groups, -1)  # infinities too
    assert said.inexact == int((off > 0).any(axis=1).sum())
    assert said.largest == off.max()


@pytest.mark.parametrize("source", [name for name in PAIRS if name in INTEGERS])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_integers_of_a_dialect_are_laid_out_anew(source: str, data: st.DataObject) -> None:
    codes, scale, zeros, _ = data.draw(grids())
    weight = INTEGERS[source](codes, scale, zeros)
    if lost(weight):
        return
    read = READS[source](weight, "")
    symmetric = bool((zeros == 8).all())
    for target in PAIRS[source]:
        if target == "COMPRESSED_PACKED" and not symmetric:
            with pytest.raises(CodecError, match="symmetric"):
                list(anew(read, target))
            continue
        if target == "GPTQ" and (zeros == 0).any():
            with pytest.raises(CodecError, match="write version 2"):
                list(anew(read, target))
            continue
        for _, said, packed in anew(read, target):
            if not lost(packed):
                check(weight.decode(), packed.decode(), said)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    arrays.arrays(np.float32, 2, elements=st.floats(2.0**-60, 2.0**20, width=32)),
)
def test_nvfp4_of_one_dialect_as_the_other(seed: int, whole: Array) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (ROWS, COLUMNS), np.uint8)
    scale = rng.integers(0, 0x7F, (ROWS, COLUMNS // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
    for source, weight in small(codes, scale, whole):
        for target in PAIRS.get(source, ()):
            for _, said, packed in anew(READS[source](weight, "NVFP4"), target):
                check(weight.decode(), packed.decode(), said)
                assert said.largest <= np.abs(weight.decode()).max() * 2.0**-22


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_mxfp4_of_a_dialect_is_laid_out_anew(seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (ROWS, COLUMNS), np.uint8)
    scale = rng.integers(0, 255, (ROWS, COLUMNS // 32), np.uint8)
    tried = set()
    for source, weight in powers(codes, scale):
        if "COMPRESSED_PACKED_FLOAT" not in PAIRS.get(source, ()):
            continue
        tried.add(source)
        ((_, said, packed),) = anew(READS[source](weight, "MXFP4"), "COMPRESSED_PACKED_FLOAT")
        assert said[1:] == (0, 0.0)
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(packed.decode(), weight.decode())
    assert tried == {"MODELOPT", "FP8_BLOCK"}


def test_there_and_back_are_the_same_bytes() -> None:
    """A global scale that is a power of two: ModelOpt to compressed-tensors to ModelOpt."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (ROWS, COLUMNS), np.uint8)
    scale = rng.integers(0, 0x7F, (ROWS, COLUMNS // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
    first = dict(small(codes, scale, np.array([2.0**-9] * 2, np.float32)))["MODELOPT"]
    ((_, said, there),) = anew(READS["MODELOPT"](first, "NVFP4"), "COMPRESSED_PACKED_FLOAT")
    assert said.inexact == 0
    ((_, said, back),) = anew(READS["COMPRESSED_PACKED_FLOAT"](there, "NVFP4"), "MODELOPT")
    assert said.inexact == 0
    for suffix, part in first.parts.items():
        assert bytes(back.parts[suffix].raw) == bytes(part.raw), suffix


def test_every_pair_is_tried_here() -> None:
    assert set(PAIRS) == {*BLOCKS, *READS}
    assert set(READS) == {*INTEGERS, "MODELOPT", "COMPRESSED_PACKED_FLOAT", "FP8_BLOCK"}


def test_nibbles_go_both_ways() -> None:
    held = np.random.default_rng(0).integers(0, 256, (99, 16), np.uint8)
    for width in (8, 16):
        cut = np.ascontiguousarray(held[:, :width])
        assert (halves_to_pairs(pairs_to_halves(cut)) == cut).all()
        assert (pairs_to_halves(halves_to_pairs(cut)) == cut).all()


def test_what_cannot_be_written_is_said() -> None:
    writer, weight = WRITERS["GPTQ"], np.ones((8, 64), np.float32)
    with pytest.raises(CodecError, match="rows of 64 are no whole number of groups of 48"):
        writer.quantize(weight, Settings(48, "F16"))
    weight[2, 3] = np.inf
    with pytest.raises(CodecError, match=r"holds inf at \[2, 3\]"):
        writer.quantize(weight, Settings(32, "F16"))
    weight[2, 3] = 1e30
    with pytest.raises(CodecError, match=r"scale .* at \[2, 0\] is beyond F16"):
        writer.quantize(weight, Settings(32, "F16"))
    read = GridWeight(
        (8, 64), Groups(32, np.ones((8, 2), np.float32)), lambda a, b: np.zeros((0, 32), np.uint8)
    )
    with pytest.raises(CodecError, match="groups are of 32 inputs, expected 64"):
        writer.repack(read, Settings(64, "F16"))
    tiny = replace(read, groups=Groups(32, np.full((8, 2), 1e-9, np.float32)))
    with pytest.raises(CodecError, match="up to 1e-09, would all be 0 in F16"):
        writer.repack(tiny, Settings(32, "F16"))
    with pytest.raises(CodecError, match="no E2M1 in groups of 16"):
        WRITERS["MODELOPT-NVFP4"].repack(read, Settings(32, "F16"))


@pytest.mark.parametrize("encoding", ["Q4_0", "Q4_1", "MXFP4"])
def test_the_first_wrong_block_is_named(encoding: str) -> None:
    layout = codec(encoding).layout
    assert layout is not None
    held = np.zeros((ROWS, COLUMNS // 32), layout)
    number = "d" if "d" in (layout.names or ()) else "e"
    for at in ((2, 1), (5, 3)):
        held[number][at] = 255 if number == "e" else np.frombuffer(b"\0\x7e", "<f2")[0]
    raw, row = held.tobytes(), held[0].nbytes
    with pytest.raises(CodecError, match=r"its block \[2, 1"):
        grid_of_blocks(encoding, (ROWS, COLUMNS), lambda a, b: raw[a * row : b * row], None)
