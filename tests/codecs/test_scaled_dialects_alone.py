"""Weights of FP8 in tiles, ModelOpt and AWQ: packed here with numpy, and what is refused."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.codecs import awq, fp8_block, modelopt
from aprfmt.codecs.dialect import Dialect, StoredPart
from aprfmt.errors import CodecError, UnsupportedError

RNG = np.random.default_rng(6)
E4M3 = ml_dtypes.float8_e4m3fn
Parts = dict[str, StoredPart]


def part(values: Any, encoding: str) -> StoredPart:
    """Return a stored part of an array's bytes."""
    held = np.ascontiguousarray(values)
    return StoredPart(held.tobytes(), encoding, held.shape)


def floats(shape: tuple[int, ...], seed: int = 0) -> Any:
    """Return scales that float32, BF16 and F16 all hold."""
    return (1 + np.random.default_rng(seed).integers(0, 64, shape) / 64).astype(np.float32)


def decoded(dialect: Dialect, parts: Parts, config: Any) -> Any:
    """Return the decoded weight in its shape."""
    shape = dialect.shape_of(parts, config)
    return dialect.laid_out(parts, config, shape).decode().reshape(shape)


def fp8_codes(*shape: int) -> tuple[Any, StoredPart]:
    """Return (values, the part of their FP8 codes)."""
    codes = RNG.normal(size=shape).astype(E4M3)
    return codes.astype(np.float32), part(codes.view(np.uint8), "F8_E4M3")


def spread(scales: Any, rows: int, columns: int, shape: Any) -> Any:
    """Return each tile's scale at each of its elements, cut at the ends."""
    return scales.repeat(rows, -2).repeat(columns, -1)[..., : shape[-2], : shape[-1]]


MAIN, INVERSE = ".weight", ".weight_scale_inv"


@pytest.mark.parametrize(
    ("config", "grid", "tile"),
    [
        ({"weight_block_size": [4, 8]}, (2, 3), (4, 8)),  # short tiles at both ends
        ({"weight_block_size": [6, 5]}, (1, 4), (6, 5)),
        ({}, (3, 2), (2, 10)),
        ({}, (6, 20), (1, 1)),
        ({}, (1, 1), (6, 20)),
        ({"weight_block_size": [4, 8]}, (1, 1), (6, 20)),  # one number, whatever is said
    ],
)
def test_a_tile_of_fp8_has_its_scale(config: Any, grid: Any, tile: Any) -> None:
    values, main = fp8_codes(6, 20)
    scales = floats(grid)
    parts = {MAIN: main, INVERSE: part(scales, "F32")}
    found = decoded(fp8_block.DIALECT, parts, {"quant_method": "fp8", **config})
    assert np.array_equal(found, values * spread(scales, tile[0], tile[1], (6, 20)))


def test_experts_rows_and_one_number_have_their_scales() -> None:
    values, main = fp8_codes(2, 6, 20)
    scales = floats((2, 3, 2))
    parts = {MAIN: main, INVERSE: part(scales, "F32")}
    wide = spread(scales, 2, 10, (6, 20))
    assert np.array_equal(decoded(fp8_block.DIALECT, parts, {}), values * wide)
    rows = floats((2, 6))
    parts[INVERSE] = part(rows, "F32")
    assert np.array_equal(decoded(fp8_block.DIALECT, parts, {}), values * rows[..., None])
    parts[INVERSE] = part(np.array([1.5], np.float32), "F32")
    assert np.array_equal(decoded(fp8_block.DIALECT, parts, {}), values * np.float32(1.5))


def test_packed_codes_and_mxfp8_have_powers_for_32_inputs() -> None:
    powers = np.array([[126, 128, 127], [127, 125, 129]], np.uint8)
    scale = spread(np.ldexp(np.float32(1), powers.astype(int) - 127), 1, 32, (2, 96))
    values, main = fp8_codes(2, 96)
    parts = {MAIN: main, INVERSE: part(powers, "U8")}
    for config in ({"quant_method": "mxfp8"}, {"weight_block_size": [128, 128]}):
        assert np.array_equal(decoded(fp8_block.DIALECT, parts, config), values * scale)
    codes = RNG.integers(0, 16, (2, 96)).astype(np.uint8)
    numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    pairs = part(codes[:, ::2] | codes[:, 1::2] << 4, "I8")
    parts = {MAIN: pairs, INVERSE: part(powers, "F8_E8M0")}
    for config in ({}, {"weight_block_size": [128, 128]}):
        found = decoded(fp8_block.DIALECT, parts, config)
        assert found.shape == (2, 96) and np.array_equal(found, numbers * scale)


@pytest.mark.parametrize(
    ("config", "grid", "says"),
    [
        ({}, (4, 2), "config says no weight_block_size, and part '.weight_scale_inv' of [4, 2]"),
        ({}, (3, 3), "config says no weight_block_size"),
        ({}, (0, 2), "config says no weight_block_size"),
        ({}, (2, 3, 2), "has shape [2, 3, 2] for a weight of [6, 20]"),
        ({"weight_block_size": [4, 8]}, (6,), "has shape [6] for a weight of [6, 20]"),
        ({"weight_block_size": [4, 8]}, (2, 2), "expected [2, 3] for tiles of 4 x 8"),
        ({"quant_method": "mxfp8"}, (6, 2), "expected [6, 1] for tiles of 1 x 32"),
        ({"weight_block_size": [4]}, (2, 3), "weight_block_size [4], expected two numbers"),
        ({"weight_block_size": 4}, (2, 3), "weight_block_size 4, expected two numbers"),
        ({"weight_block_size": [4, 0]}, (2, 3), "weight_block_size [4, 0], expected two"),
        ({"weight_block_size": [4, True]}, (2, 3), "weight_block_size [4, True], expected"),
        ({"weight_block_size": [1 << 31, 8]}, (1, 3), "weight_block_size [2147483648, 8]"),
    ],
)
def test_scales_that_are_those_of_no_tile_are_refused(config: Any, grid: Any, says: str) -> None:
    _, main = fp8_codes(6, 20)
    parts = {MAIN: main, INVERSE: part(floats(grid), "F32")}
    with pytest.raises(CodecError) as error:
        fp8_block.DIALECT.shape_of(parts, config)
    assert says in str(error.value)


def test_the_largest_tile_is_one_less_than_two_to_the_31() -> None:
    _, main = fp8_codes(6, 20)
    parts = {MAIN: main, INVERSE: part(floats((1, 20)), "F32")}
    config = {"weight_block_size": [(1 << 31) - 1, 1]}
    assert fp8_block.DIALECT.shape_of(parts, config) == (6, 20)


def test_experts_of_other_leading_axes_and_codes_of_other_types_are_refused() -> None:
    _, main = fp8_codes(2, 6, 20)
    with pytest.raises(CodecError, match=r"has shape \[3\], expected \[2\]"):
        fp8_block.DIALECT.shape_of({MAIN: main, INVERSE: part(floats((3, 3, 2)), "F32")}, {})
    plain = part(floats((6, 20)), "F32")
    with pytest.raises(CodecError, match="is F32, expected FP8, or E2M1"):
        fp8_block.DIALECT.shape_of({MAIN: plain, INVERSE: plain}, {})


@pytest.mark.parametrize(
    ("scales", "multiplies"), [([0.5, 1.0, 1.0], True), ([0.5, 1.01, 2.0], False), ([], False)]
)
def test_scales_of_at_most_one_multiply(scales: Any, multiplies: bool) -> None:
    _, main = fp8_codes(3, 4)
    held = part(np.float32(scales), "F32")
    assert fp8_block.has_multiplying_scale({MAIN: main, INVERSE: held}) == multiplies
    assert fp8_block.has_multiplying_scale({"": main, "_scale_inv": held}) == multiplies
    assert not fp8_block.has_multiplying_scale({MAIN: main})
    assert not fp8_block.has_multiplying_scale({INVERSE: held})
    assert not fp8_block.has_multiplying_scale({MAIN: part(floats((3, 4)), "F32"), INVERSE: held})
    powers = part(np.array([[1]], np.uint8), "U8")
    assert not fp8_block.has_multiplying_scale({MAIN: main, INVERSE: powers})


SCALE, SECOND, SMOOTH = ".weight_scale", ".weight_scale_2", ".pre_quant_scale"


def opt(name: str, **more: Any) -> Any:
    return {"quant_method": "modelopt", "quant_algo": name, **more}


@pytest.mark.parametrize("shape", [(), (1,), (6,), (6, 1)])
def test_fp8_of_modelopt_has_one_scale_or_one_a_row(shape: Any) -> None:
    values, main = fp8_codes(6, 20)
    scales = floats(shape)
    parts = {MAIN: main, SCALE: part(scales, "F32")}
    parts[SCALE] = parts[SCALE]._replace(shape=shape)
    found = decoded(modelopt.DIALECT, parts, opt("FP8"))
    assert np.array_equal(found, values * (scales.reshape(-1, 1)))


def test_experts_of_modelopt_have_scales_by_expert_or_row() -> None:
    values, main = fp8_codes(2, 6, 20)
    for shape, wide in (((2,), (2, 1, 1)), ((2, 1), (2, 1, 1)), ((2, 6), (2, 6, 1))):
        scales = floats(shape)
        parts = {MAIN: main, SCALE: part(scales, "F32")}
        found = decoded(modelopt.DIALECT, parts, opt("FP8"))
        assert np.array_equal(found, values * scales.reshape(wide))
    parts = {MAIN: main, SCALE: part(floats((6,)), "F32")}
    with pytest.raises(CodecError, match="is no scale of the whole or of the rows"):
        decoded(modelopt.DIALECT, parts, opt("FP8"))


def test_tiles_of_modelopt_are_128_squares() -> None:
    values, main = fp8_codes(130, 200)
    scales = floats((2, 2))
    for held in (scales, scales.reshape(2, 1, 2, 1)):
        parts = {MAIN: main, SCALE: part(held, "F32")}
        found = decoded(modelopt.DIALECT, parts, opt("FP8_PB_WO"))
        assert np.array_equal(found, values * spread(scales, 128, 128, (130, 200)))
    parts = {MAIN: main, SCALE: part(floats((1, 2)), "F32")}
    with pytest.raises(CodecError, match=r"has shape \[1, 2\], expected \[2, 2\]"):
        decoded(modelopt.DIALECT, parts, opt("FP8_PB_WO"))


def fp4(*shape: int) -> tuple[Any, Any]:
    """Return (values, pairs of codes with the first low) of E2M1."""
    codes = RNG.integers(0, 16, shape).astype(np.uint8)
    values = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return values, codes[..., ::2] | codes[..., 1::2] << 4


@pytest.mark.parametrize("experts", [(), (3,)])
def test_nvfp4_has_scales_of_16_and_a_scale_of_scales(experts: tuple[int, ...]) -> None:
    values, pairs = fp4(*experts, 4, 32)
    small = floats((*experts, 4, 2)).astype(E4M3)
    for count in {1, *experts}:
        second = floats((count,), seed=3)
        parts = {
            MAIN: part(pairs, "U8"), SCALE: part(small.view(np.uint8), "F8_E4M3"),
            SECOND: part(second, "F32"),
        }  # fmt: skip
        wide = small.astype(np.float32).repeat(16, -1)
        factor = second.reshape(-1, 1, 1) if experts else second
        found = decoded(modelopt.DIALECT, parts, opt("NVFP4"))
        assert np.array_equal(found, values * (wide * factor))
        assert not np.signbit(found[values == 0]).any()
    smooth = floats((32,), seed=4)
    found = decoded(modelopt.DIALECT, {**parts, SMOOTH: part(smooth, "F32")}, opt("NVFP4_AWQ"))
    assert np.allclose(found, values * (wide * factor) * smooth, rtol=1e-6)
    with pytest.raises(CodecError, match=r"pre_quant_scale' has shape \[31\], expected \[32\]"):
        decoded(modelopt.DIALECT, {**parts, SMOOTH: part(smooth[:31], "F32")}, opt("NVFP4"))
    with pytest.raises(CodecError, match=r"weight_scale_2' has shape \[2\], expected \[[13]\]"):
        decoded(modelopt.DIALECT, {**parts, SECOND: part(smooth[:2], "F32")}, opt("NVFP4"))
    del parts[SECOND]
    with pytest.raises(CodecError, match=r"'\.weight_scale_2' is missing"):
        modelopt.DIALECT.shape_of(parts, opt("NVFP4"))


def test_int4_of_modelopt_is_packed_along_the_output() -> None:
    codes = RNG.integers(-8, 8, (6, 12))
    pairs = (codes[::2] & 15 | (codes[1::2] & 15) << 4).astype(np.uint8)
    scales = floats((6, 3))
    parts = {MAIN: part(pairs, "U8"), SCALE: part(scales, "F32")}
    found = decoded(modelopt.DIALECT, parts, opt("W4A16_AWQ", group_size=4))
    assert np.array_equal(found, codes * scales.repeat(4, 1))
    with pytest.raises(CodecError, match="config says group_size None"):
        modelopt.DIALECT.shape_of(parts, opt("W4A16_AWQ"))
    with pytest.raises(CodecError, match="has rows of 12, no whole groups"):
        modelopt.DIALECT.shape_of(parts, opt("W4A16_AWQ", group_size=5))
    with pytest.raises(CodecError, match=r"has shape \[6, 3\], expected \[6, 2\]"):
        modelopt.DIALECT.shape_of(parts, opt("W4A16_AWQ", group_size=6))


def test_int8_and_powers_of_modelopt() -> None:
    codes = RNG.integers(-128, 128, (5, 64)).astype(np.int8)
    rows = floats((5,))
    parts = {MAIN: part(codes, "I8"), SCALE: part(rows, "F32")}
    assert np.array_equal(decoded(modelopt.DIALECT, parts, opt("W8A16")), codes * rows[:, None])
    powers = np.uint8(RNG.integers(120, 134, (5, 2)))
    wide = np.ldexp(np.float32(1), powers.astype(int) - 127).repeat(32, 1)
    values, main = fp8_codes(5, 64)
    found = decoded(modelopt.DIALECT, {MAIN: main, SCALE: part(powers, "U8")}, opt("MXFP8"))
    assert np.array_equal(found, values * wide)
    values, pairs = fp4(5, 64)
    parts = {MAIN: part(pairs, "U8"), SCALE: part(powers, "U8")}
    assert np.array_equal(decoded(modelopt.DIALECT, parts, opt("W4A8_MXFP4_FP8")), values * wide)


def test_what_modelopt_does_not_say_or_store_is_refused() -> None:
    _, main = fp8_codes(4, 32)
    parts = {MAIN: main, SCALE: part(floats((1,)), "F32")}
    with pytest.raises(UnsupportedError, match="quant_algo 'INT3' is not one we decode: FP8, "):
        modelopt.DIALECT.shape_of(parts, opt("INT3"))
    with pytest.raises(CodecError, match=r"says NVFP4, part '\.weight' is F8_E4M3, expected U8"):
        modelopt.DIALECT.shape_of(parts, opt("NVFP4"))
    with pytest.raises(CodecError, match="config says group_size 32, expected 16"):
        modelopt.DIALECT.shape_of(parts, opt("NVFP4", group_size=32))
    line = {MAIN: main._replace(shape=(128,)), SCALE: parts[SCALE]}
    with pytest.raises(CodecError, match=r"has shape \[128\], expected \[out, in\]"):
        modelopt.DIALECT.shape_of(line, opt("FP8"))


def test_stacked_experts_of_modelopt_are_turned() -> None:
    """Stored [experts, in, out], with bytes along in; the weight is [experts, out, in]."""
    values, pairs = fp4(2, 6, 64)
    powers = RNG.integers(120, 134, (2, 6, 2)).astype(np.uint8)
    wide = np.ldexp(np.float32(1), powers.astype(int) - 127).repeat(32, -1)
    parts = {
        "": part(pairs.swapaxes(1, 2), "U8"), "_weight_scale": part(powers.swapaxes(1, 2), "U8")
    }  # fmt: skip
    found = decoded(modelopt.EXPERTS, parts, opt("W4A8_MXFP4_FP8"))
    assert np.array_equal(found, values * wide)
    whole, main = fp8_codes(2, 20, 6)
    parts = {"_weight_scale": part(floats((2,)), "F32"), "": main}
    found = decoded(modelopt.EXPERTS, parts, opt("FP8"))
    assert np.array_equal(found, whole.swapaxes(1, 2) * floats((2,)).reshape(2, 1, 1))


ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: Any) -> StoredPart:
    """Return codes [rows, outputs] as AWQ packs eight of a row in a word."""
    eights = codes.reshape(len(codes), -1, 8)[..., list(ORDER)].astype(np.uint32)
    return part((eights << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1).astype("<u4"), "I32")


def test_awq_takes_zero_points_away_group_by_group() -> None:
    codes, zeros = RNG.integers(0, 16, (12, 16)), RNG.integers(0, 16, (3, 16))
    scales = floats((3, 16))
    parts = {".qweight": words(codes), ".qzeros": words(zeros), ".scales": part(scales, "F32")}
    config = {"quant_method": "awq", "bits": 4, "group_size": 4}
    expected = (codes - zeros.repeat(4, 0)) * scales.repeat(4, 0)
    assert awq.DIALECT.shape_of(parts, config) == (16, 12)
    assert np.array_equal(decoded(awq.DIALECT, parts, config), expected.T)
    assert decoded(awq.DIALECT, parts, {**config, "version": "GEMM"}).shape == (16, 12)
    one = {**parts, ".qzeros": words(zeros[:1]), ".scales": part(scales[:1], "F32")}
    found = decoded(awq.DIALECT, one, {**config, "group_size": -1})
    assert np.array_equal(found, ((codes - zeros[:1]) * scales[:1]).T)
    for size, says in ((5, "12 inputs; expected whole groups"), (6, r"\[3, 16\], expected \[2,")):
        with pytest.raises(CodecError, match=says):
            decoded(awq.DIALECT, parts, {**config, "group_size": size})
    with pytest.raises(CodecError, match=r"qzeros' has shape \[3, 1\], expected \[3, 2\]"):
        decoded(awq.DIALECT, {**parts, ".qzeros": words(zeros[:, :8])}, config)
    with pytest.raises(UnsupportedError, match="the layout 'gemv' is not one we decode"):
        awq.DIALECT.shape_of(parts, {**config, "version": "gemv"})
    with pytest.raises(CodecError, match="config says bits 8, expected 4"):
        awq.DIALECT.shape_of(parts, {**config, "bits": 8})
    line = parts[".qweight"]._replace(shape=(24,))
    with pytest.raises(CodecError, match=r"has shape \[24\], expected \[in, out/8\]"):
        awq.DIALECT.shape_of({**parts, ".qweight": line}, config)


def test_a_section_is_of_the_dialect_that_it_names() -> None:
    names = {"fp8": fp8_block, "mxfp8": fp8_block, "modelopt": modelopt, "awq": awq, "gptq": None}
    for name, owner in names.items():
        for module in (fp8_block, modelopt, awq):
            found = module.DIALECT.recognises({"quant_method": name})
            assert found is (module is owner), (name, module.NAME)
            assert not module.DIALECT.recognises({})


def test_codes_are_the_numbers_that_they_stand_for() -> None:
    assert awq.DIALECT.codes is not None and modelopt.DIALECT.codes is not None
    found = awq.DIALECT.codes({}, {})
    assert found.bits == 4 and np.array_equal(found.values, np.arange(16))
    found = modelopt.DIALECT.codes({}, opt("W8A16"))
    assert found.bits == 8 and {-128.0, 0.0, 127.0} <= set(found.values.tolist())
    assert fp8_block.DIALECT.codes is not None
    every = np.arange(256, dtype=np.uint8)
    for name, kind in (("F8_E4M3", E4M3), ("F8_E5M2", ml_dtypes.float8_e5m2)):
        found = fp8_block.DIALECT.codes({MAIN: part(every, name)}, {})
        wanted = every.view(kind).astype(np.float32)
        assert found.bits == 8 and np.array_equal(found.values, wanted, equal_nan=True)
    found = fp8_block.DIALECT.codes({MAIN: part(every, "I8")}, {})
    wanted = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert found.bits == 4 and np.array_equal(found.values, wanted)


def test_stacked_experts_of_int4_are_turned_with_their_bytes() -> None:
    codes = RNG.integers(-8, 8, (2, 6, 12))
    pairs = (codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4).astype(np.uint8)
    scales = floats((2, 6, 3))
    parts = {"": part(pairs.swapaxes(1, 2), "U8"), "_weight_scale": part(scales, "F32")}
    found = decoded(modelopt.EXPERTS, parts, opt("W4A16_AWQ", group_size=4))
    assert np.array_equal(found, codes * scales.repeat(4, 2))
    parts["_weight_scale"] = part(scales[..., :2], "F32")
    says = r"^modelopt: config says W4A16_AWQ, group_size 4: part '\.weight_scale' has shape"
    with pytest.raises(CodecError, match=says):
        modelopt.EXPERTS.shape_of(parts, opt("W4A16_AWQ", group_size=4))
