"""Every pair of the table of repacks: codes kept, values equal, what is not equal counted."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from aprfmt.codecs import native, repack_sources
from aprfmt.codecs.dialect import StoredPart
from aprfmt.codecs.lattice import PackedWeight
from aprfmt.codecs.repacks import REPACKS, GroupCounts, Repack, Repacked, repack
from aprfmt.errors import CodecError
from tests.codecs.data import Array, by_gguf
from tests.codecs.packing import pack
from tests.codecs.weights import packed
from tests.conversion.dialect_floats import pairs

E4M3 = ml_dtypes.float8_e4m3fn
ROWS, COLUMNS = 8, 128
_NAMES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}


def gptq(codes: Array, scale: Array, zeros: Array) -> PackedWeight:
    """Return GPTQ v2 of codes [out, in], numbers [out, groups]."""
    return packed(
        "gptq",
        {"quant_method": "gptq", "bits": 4, "group_size": COLUMNS // scale.shape[1],
         "checkpoint_format": "gptq_v2"},
        {".qweight": pack(codes, 4).T, ".qzeros": pack(zeros.T, 4), ".scales": scale.T},
    )  # fmt: skip


def awq(codes: Array, scale: Array, zeros: Array) -> PackedWeight:
    """Return AWQ's gemm layout of the same."""

    def mixed(x: Array) -> Array:
        turned = x.reshape(len(x), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return pack(turned.reshape(len(x), -1), 4)

    return packed(
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": COLUMNS // scale.shape[1]},
        {".qweight": mixed(codes.T), ".qzeros": mixed(zeros.T), ".scales": scale.T},
    )


def integers(codes: Array, scale: Array, zeros: Array) -> PackedWeight:
    """Return compressed-tensors' pack-quantized; zero points of 8 are left out."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": COLUMNS // scale.shape[1],
    }
    parts = {
        ".weight_packed": pack(codes, 4),
        ".weight_scale": scale,
        ".weight_shape": np.array(codes.shape, np.int64),
    }
    if (zeros != 8).any():
        parts[".weight_zero_point"] = pack(zeros.T, 4).T
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    return packed("compressed_packed", config, parts)


INTEGERS = {"GPTQ": gptq, "AWQ": awq, "COMPRESSED_PACKED": integers}


def _scales(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> Array:
    """Draw finite scales over all bit patterns of a dtype, as far as F16's largest."""
    kind = np.dtype(_NAMES[dtype])
    bits = arrays.arrays(np.dtype(f"u{kind.itemsize}"), shape)
    held = draw(bits).view(kind)
    with np.errstate(all="ignore"):  # patterns that are no numbers
        wide = held.astype(np.float64)
    fit = np.isfinite(wide) & (np.abs(wide) <= 65504 / 16)
    found: Array = np.where(fit, held, kind.type(1))
    return found


@st.composite
def grids(draw: st.DrawFn) -> tuple[Array, Array, Array, str]:
    """Draw codes, scales over a whole range, and zero points, in groups of 32 to 128."""
    size = draw(st.sampled_from((32, 64, 128)))
    dtype = draw(st.sampled_from(sorted(_NAMES)))
    seed = draw(st.integers(0, 2**32 - 1))
    codes = np.random.default_rng(seed).integers(0, 16, (ROWS, COLUMNS))
    shape = (ROWS, COLUMNS // size)
    some = st.integers(0, 15) if draw(st.booleans()) else st.just(8)
    zeros = draw(arrays.arrays(np.int64, shape, elements=some))
    return codes, _scales(draw, dtype, shape), zeros, dtype


def lost(weight: PackedWeight, row: Repack, scale: Array) -> bool:
    """Say whether scales are 0 everywhere, and hold that to be refused."""
    if scale.any():
        return False
    with pytest.raises(CodecError, match="is 0 everywhere, and the codes in"):
        Repacked(row, weight)
    return True


def held(weight: PackedWeight, row: Repack) -> Repacked:
    """Return the weight repacked by a row of the table, its blocks read by gguf-py as by us."""
    made = Repacked(row, weight)
    blocks = made.blocks(0, made.rows)
    assert np.array_equal(made.blocks(1, 3), blocks[1:3])
    if made.whole is None:
        found = by_gguf(row.target, blocks)
        assert found is not None
        np.testing.assert_array_equal(found.reshape(made.shape), made.values())
    return made


def check(weight: PackedWeight, made: Repacked) -> None:
    """Hold what is said of a repack to the values of both sides, by kernels and by numpy."""
    before, after = weight.decode(), made.values()
    every = [judged_by(level, made) for level in (*native.LEVELS, None)]
    for said in every:
        off = np.abs(before.astype(np.float64) - after).reshape(said.groups, -1)
        assert said.inexact == int((off > 0).any(axis=1).sum())
        assert said.largest == off.max()


def judged_by(level: str | None, made: Repacked) -> GroupCounts:
    """Return what the kernels of a level say of a repack, or numpy."""
    with pytest.MonkeyPatch.context() as patch:
        if level is None:
            patch.setenv("APRFMT_NATIVE", "0")
            return made.judged()
        native.force(level)
        try:
            return made.judged(threads=2)
        finally:
            native.force("best")


def rows_of(source: str, *targets: str) -> list[Repack]:
    return [row for row in REPACKS if row.source == source and row.target in targets]


@pytest.mark.parametrize("source", INTEGERS)
@settings(max_examples=60, deadline=None)
@given(grid=grids())
def test_integers(source: str, grid: tuple[Array, Array, Array, str]) -> None:
    codes, scale, zeros, dtype = grid
    weight = INTEGERS[source](codes, scale, zeros)
    symmetric = bool((zeros == 8).all())
    q4_0, q4_1 = rows_of(source, "Q4_0", "Q4_1")
    if lost(weight, q4_0 if symmetric else q4_1, scale):
        return
    if not symmetric:
        with pytest.raises(CodecError, match="zero points are"):
            Repacked(q4_0, weight)
    made = held(weight, q4_0 if symmetric else q4_1)
    check(weight, made)
    if dtype == "F16" and symmetric:
        assert made.judged().inexact == 0


@settings(max_examples=60, deadline=None)
@given(grid=grids())
def test_mlx_affine(grid: tuple[Array, Array, Array, str]) -> None:
    codes, scale, _, dtype = grid
    biases = scale[::-1].copy()
    config = {"bits": 4, "group_size": COLUMNS // scale.shape[1]}
    parts = {".weight": pack(codes, 4).view(np.uint32), ".scales": scale, ".biases": biases}
    weight = packed("mlx", config, parts)
    [row] = rows_of("MLX", "Q4_1")
    if lost(weight, row, scale):
        return
    made = held(weight, row)
    check(weight, made)
    if dtype == "F16":
        assert made.judged().inexact == 0


def powers(codes: Array, scale: Array) -> list[tuple[str, PackedWeight]]:
    """Return E2M1 codes under powers of two in every container of the table."""
    halves = pairs(codes)
    group = (ROWS, COLUMNS // 32)
    compressed = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    return [
        ("GPT_OSS", packed("gpt_oss", {"quant_method": "mxfp4"}, {
            "_blocks": halves.reshape(2, ROWS // 2, COLUMNS // 32, 16),
            "_scales": scale.reshape(2, ROWS // 2, COLUMNS // 32)})),
        ("COMPRESSED_PACKED_FLOAT", packed("compressed_packed_float", compressed, {
            ".weight_packed": halves, ".weight_scale": scale.reshape(group)})),
        ("MODELOPT", packed("modelopt", {
            "quant_method": "modelopt", "quant_algo": "W4A8_MXFP4_FP8"}, {
            ".weight": halves, ".weight_scale": scale.reshape(group)})),
        ("FP8_BLOCK", packed("fp8_block", {
            "quant_method": "fp8", "weight_block_size": [128, 128]}, {
            ".weight": halves.view(np.int8),
            ".weight_scale_inv": scale.view(ml_dtypes.float8_e8m0fnu).reshape(group)})),
        ("MLX", packed("mlx", {"bits": 4, "group_size": 32, "mode": "mxfp4"}, {
            ".weight": halves.view(np.uint32), ".scales": scale.reshape(group)})),
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_mxfp4_of_every_container_is_exact(seed: int) -> None:
    """Over all exponents but the one that is no number."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (ROWS, COLUMNS), np.uint8)
    scale = rng.integers(0, 255, (ROWS, COLUMNS // 32), np.uint8)
    weights = powers(codes, scale)
    assert {name for name, _ in weights} == {r.source for r in REPACKS if r.target == "MXFP4"}
    for source, weight in weights:
        made = held(weight, *rows_of(source, "MXFP4"))
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(made.values(), weight.decode())
        assert made.judged()[1:] == (0, 0.0)


def test_exponents_of_another_shape_are_refused() -> None:
    weight = packed(
        "gpt_oss",
        {"quant_method": "mxfp4"},
        {"_blocks": np.zeros((2, 4, 2, 16), np.uint8), "_scales": np.zeros((2, 4, 3), np.uint8)},
    )
    with pytest.raises(CodecError, match="_scales"):
        repack_sources.read_gpt_oss(weight, "MXFP4")


def small(codes: Array, scale: Array, whole: Array) -> list[tuple[str, PackedWeight]]:
    """Return NVFP4 in every container that has a scale of its own, or none (MLX)."""
    halves = pairs(codes)
    compressed = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    nvidia = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    experts = (2, ROWS // 2)
    return [
        ("MODELOPT", packed("modelopt", nvidia, {
            ".weight": halves, ".weight_scale": scale, ".weight_scale_2": whole[0]})),
        ("MODELOPT_EXPERTS", packed("modelopt_experts", nvidia, {
            "": halves.reshape(*experts, -1).swapaxes(1, 2),
            "_weight_scale": scale.reshape(*experts, -1).swapaxes(1, 2),
            "_weight_scale_2": whole})),
        ("COMPRESSED_PACKED_FLOAT", packed("compressed_packed_float", compressed, {
            ".weight_packed": halves, ".weight_scale": scale,
            ".weight_global_scale": 1 / whole[:1]})),
        ("MLX", packed("mlx", {"bits": 4, "group_size": 16, "mode": "nvfp4"}, {
            ".weight": halves.view(np.uint32), ".scales": scale.view(np.uint8)})),
    ]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    arrays.arrays(np.float32, 2, elements=st.floats(2.0**-60, 2.0**20, width=32)),
)
def test_nvfp4_keeps_its_global_scale(seed: int, whole: Array) -> None:
    """ModelOpt's is the number that GGUF has; compressed-tensors' is the one to divide by."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (ROWS, COLUMNS), np.uint8)
    scale = rng.integers(0, 0x7F, (ROWS, COLUMNS // 16), np.uint8).view(E4M3)
    weights = small(codes, scale, whole)
    assert {name for name, _ in weights} == {r.source for r in REPACKS if r.target == "NVFP4"}
    for source, weight in weights:
        made = held(weight, *rows_of(source, "NVFP4"))
        check(weight, made)
        if source != "COMPRESSED_PACKED_FLOAT":
            assert made.judged().inexact == 0
        else:
            said = made.judged()
            assert said.largest <= np.abs(weight.decode()).max() * 2.0**-22


def test_a_global_scale_that_is_a_power_of_two_divides_as_it_multiplies() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (ROWS, COLUMNS), np.uint8)
    scale = rng.integers(0, 0x7F, (ROWS, COLUMNS // 16), np.uint8).view(E4M3)
    for number, inexact in ((2.0**-7, False), (1 / 3, True)):
        whole = np.array([number, number], np.float32)
        weight = dict(small(codes, scale, whole))["COMPRESSED_PACKED_FLOAT"]
        said = held(weight, *rows_of("COMPRESSED_PACKED_FLOAT", "NVFP4")).judged()
        assert (said.inexact > 0) == inexact


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("size", [2, 6, 16, 32, 48, 128])
def test_groups_are_told_by_the_codes_they_have(level: str, size: int) -> None:
    """Numbers of which few codes differ: which of them a group has decides."""
    rng = np.random.default_rng(size)
    rows, groups = 5, 7
    values = np.arange(16, dtype=np.float32)
    few = rng.choice([*range(16)], (rows, groups, 1, 4))
    codes = np.take_along_axis(few, rng.integers(0, 4, (rows, groups, 1, size)), -1).reshape(
        rows, -1
    )
    held = (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    scale = rng.random((rows, groups), np.float32) + 1
    zero = np.full((rows, groups), 3, np.float32)
    offset = -3 * scale  # some codes come to the same, some do not
    native.force(level)
    try:
        found = native.regroup(held, size, values, (scale, zero, None), (scale, None, offset), 0.0)
        most = native.regroup(held, size, values, (scale, zero, None), (scale, None, offset), 9.0)
    finally:
        native.force("best")
    each = codes.reshape(rows, groups, size).astype(np.float32)
    a = (each - zero[..., None]) * scale[..., None]
    b = each * scale[..., None] + offset[..., None]
    off = np.abs(a.astype(np.float64) - b)
    changed = int(off.any(axis=-1).sum())
    assert 0 < changed < rows * groups
    assert found == (changed, off.max()) and most == (changed, 9.0)


def test_groups_of_no_such_shape_are_refused() -> None:
    """Every number that a kernel would read is there."""
    held, values = np.zeros((2, 32), np.uint8), np.arange(16, dtype=np.float32)
    none = (None, None, None)
    for size in (0, 1, 7, 10, -4):
        with pytest.raises(CodecError):
            native.regroup(held, size, values, none, none, 0.0)
    with pytest.raises(CodecError):
        native.regroup(held, 32, values[:8], none, none, 0.0)
    short = np.zeros((2, 1), np.float32)
    for numbers in ((short, None, None), (None, short, None), (None, None, short)):
        for pair in ((numbers, none), (none, numbers)):
            with pytest.raises(CodecError, match="expected 2 x 2"):
                native.regroup(held, 32, values, pair[0], pair[1], 0.0)


def test_every_pair_is_tried_here() -> None:
    tried = {(name, t) for name in INTEGERS for t in ("Q4_0", "Q4_1")} | {("MLX", "Q4_1")}
    codes = np.zeros((ROWS, COLUMNS), np.uint8)
    tried |= {(s, "MXFP4") for s, _ in powers(codes, np.zeros((ROWS, COLUMNS // 32), np.uint8))}
    scale = np.zeros((ROWS, COLUMNS // 16), E4M3)
    tried |= {(s, "NVFP4") for s, _ in small(codes, scale, np.ones(2, np.float32))}
    assert tried == {(row.source, row.target) for row in REPACKS}


def test_what_is_no_such_grid_is_said() -> None:
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 16, (ROWS, COLUMNS)), np.full((ROWS, 4), 8)
    good = np.ones((ROWS, 4), np.float32)
    for scale, why in (
        (np.full((ROWS, 4), 1e6, np.float32), r"Q4_0: scale 1000000.0 at \[0, 0\] is beyond"),
        (np.where(good == 1, np.float32(np.nan), good), r"'.scales' holds nan at \[0, 0\]"),
    ):
        found = repack(gptq(codes, scale, zeros), "GPTQ", {"Q4_0"})
        assert isinstance(found, str)
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(found)
    weight = gptq(codes, good, zeros)
    order = rng.permutation(np.arange(COLUMNS) // 32).astype(np.int32)
    mixed = weight.replace_parts({".g_idx": StoredPart(order.tobytes(), "I32", (COLUMNS,))})
    assert "another order" in str(repack(mixed, "GPTQ", {"Q4_0"}))
    assert repack(weight, "GPTQ", {"MXFP4"}) == ""
    assert isinstance(repack(weight, "GPTQ", {"Q4_0"}), Repacked)
    three = np.ones((ROWS, 3), E4M3)  # groups of 16, of which a block has four
    for source, short in small(codes[:, :48].astype(np.uint8), three, np.ones(2, np.float32)):
        told = repack(short, source, {"NVFP4"})
        assert told == "NVFP4: rows of 48 are no whole number of NVFP4 blocks", source


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("source", ["GPTQ", "COMPRESSED_PACKED"])
def test_inputs_that_are_said_to_be_in_order_are_in_order(source: str, groups: int) -> None:
    """An index of the groups that says what is so without one, and one that says another thing."""
    rng = np.random.default_rng(groups)
    codes, zeros = rng.integers(0, 16, (ROWS, COLUMNS)), np.full((ROWS, groups), 8)
    scale = rng.uniform(0.5, 2, (ROWS, groups)).astype(np.float16)
    make, name = {"GPTQ": (gptq, ".g_idx"), "COMPRESSED_PACKED": (integers, ".weight_g_idx")}[
        source
    ]
    weight = make(codes, scale, zeros)
    plain = repack(weight, source, {"Q4_0"})
    assert isinstance(plain, Repacked), plain
    order = np.arange(COLUMNS) // (COLUMNS // groups)

    def indexed(index: Array) -> Repacked | str:
        part = StoredPart(index.astype(np.int32).tobytes(), "I32", (COLUMNS,))
        return repack(weight.replace_parts({name: part}), source, {"Q4_0"})

    same = indexed(order)
    assert isinstance(same, Repacked), same
    assert np.array_equal(same.blocks(0, ROWS), plain.blocks(0, ROWS))
    if groups > 1:
        for other in (order[::-1], np.zeros(COLUMNS), np.roll(order, 1)):
            assert "another order" in str(indexed(other))
