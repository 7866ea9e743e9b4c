"""Quantized weights of several tensors, against the libraries that write them, and by hand."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs.dialect import StoredPart
from aprfmt.codecs.dialects import DIALECTS, decode_weight, dialect_of
from aprfmt.codecs.weight_layout import unpack_codes
from aprfmt.errors import CodecError, UnsupportedError
from tests.codecs.data import Array
from tests.codecs.packing import pack as pack

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")

ENCODING = {
    "int32": "I32", "uint32": "U32", "int64": "I64", "uint8": "U8", "int8": "I8",
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
}  # fmt: skip


def part(x: Any) -> StoredPart:
    """Return a numpy array or a torch tensor as a stored part."""
    if isinstance(x, np.ndarray):
        return StoredPart(np.ascontiguousarray(x).tobytes(), ENCODING[x.dtype.name], x.shape)
    raw = x.reshape(-1).clone().view(torch.uint8).numpy().tobytes()
    return StoredPart(raw, ENCODING[str(x.dtype)[6:]], tuple(x.shape))


def parts(**tensors: Any) -> dict[str, StoredPart]:
    return {"." + name: part(x) for name, x in tensors.items()}


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_stream_of_words_unpacks(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 32 + 7))
    assert np.array_equal(
        unpack_codes(pack(codes, bits).view(np.uint8), bits, codes.shape[1]), codes
    )


def gptq_case(bits: int, act_order: bool, v2: bool) -> tuple[dict[str, StoredPart], Array]:
    """Return parts and the expected weight [out, in], each element by its definition."""
    rng = np.random.default_rng(bits)
    outputs, inputs, size = 32, 64, 16
    codes = rng.integers(0, 1 << bits, (outputs, inputs))
    zeros = rng.integers(1, 1 << bits, (inputs // size, outputs))
    scales = rng.standard_normal((inputs // size, outputs)).astype(np.float16)
    group = np.arange(inputs) // size
    group = rng.permutation(group) if act_order else group
    tensors = {
        "qweight": pack(codes, bits).T,
        "qzeros": pack(zeros - (0 if v2 else 1), bits),
        "scales": scales,
    }
    if act_order:
        tensors["g_idx"] = group.astype(np.int32)
    expected = np.empty((outputs, inputs), np.float32)
    for o, i in np.ndindex(outputs, inputs):
        g = group[i]
        expected[o, i] = np.float32(scales[g, o]) * np.float32(codes[o, i] - zeros[g, o])
    return parts(**tensors), expected


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("act_order", [False, True], ids=["in_order", "act_order"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_gptq_by_definition(bits: int, act_order: bool, v2: bool) -> None:
    stored, expected = gptq_case(bits, act_order, v2)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 16,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    assert np.array_equal(decode_weight(dialect_of(config), stored, config), expected)


def test_gptq_refuses_groups_without_a_scale() -> None:
    stored, _ = gptq_case(4, True, False)
    wrong = np.full(64, 4, np.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    with pytest.raises(CodecError, match=r"groups go from 4 to 4, but there are 4 scales"):
        decode_weight(DIALECTS["gptq"], stored | {".g_idx": part(wrong)}, config)


def test_awq_by_its_library_or_by_definition() -> None:
    rng = np.random.default_rng(0)
    inputs, outputs, size = 64, 32, 16
    codes = rng.integers(0, 16, (inputs, outputs))
    zeros = rng.integers(0, 16, (inputs // size, outputs))
    scales = rng.standard_normal((inputs // size, outputs)).astype(np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def mixed(x: Array) -> Array:
        return pack(x.reshape(len(x), -1, 8)[:, :, order].reshape(len(x), -1), 4)

    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}
    stored = {"qweight": mixed(codes), "qzeros": mixed(zeros), "scales": scales}
    found = decode_weight(dialect_of(config), parts(**stored), config)
    wide = np.repeat(scales.astype(np.float32), size, axis=0)
    expected = ((codes - np.repeat(zeros, size, axis=0)) * wide).T
    assert np.array_equal(found, expected.astype(np.float32))

    spec = importlib.util.find_spec("awq")  # AutoAWQ; its own import needs more than we do
    if spec is None or spec.origin is None:
        return
    path = Path(spec.origin).parent / "utils" / "packing_utils.py"
    module_spec = importlib.util.spec_from_file_location("packing_utils", path)
    assert module_spec is not None and module_spec.loader is not None
    library: Any = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(library)
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in stored.values()]
    judged = library.dequantize_gemm(*tensors, 4, size).numpy().T
    assert np.array_equal(found.astype(np.float16), judged)


def test_awq_refuses_another_layout() -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemv"}
    stored = parts(
        qweight=np.zeros((8, 1), np.int32),
        qzeros=np.zeros((1, 1), np.int32),
        scales=np.zeros((1, 8), np.float16),
    )
    with pytest.raises(UnsupportedError, match="gemv"):
        decode_weight(dialect_of(config), stored, config)


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (2, 130, 129)])
def test_fp8_blocks_as_transformers(shape: tuple[int, ...]) -> None:
    library = pytest.importorskip(
        "transformers.integrations.finegrained_fp8", reason="NOT-RUN: transformers is not installed"
    )
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    tiles = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scale = torch.rand(tiles, generator=generator)
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    stored = parts(weight=weight, weight_scale_inv=scale)
    found = decode_weight(dialect_of(config), stored, config)
    judged = library._dequantize_fp8_weight(weight, scale, [128, 128], torch.float32)
    assert np.array_equal(found, judged.numpy())
    one = parts(weight=weight, weight_scale_inv=torch.tensor(0.3))
    whole = decode_weight(dialect_of(config), one, config)
    assert np.array_equal(whole, (weight.float() * torch.tensor(0.3)).numpy())


def test_gpt_oss_experts_as_transformers() -> None:
    library = pytest.importorskip(
        "transformers.integrations.mxfp4", reason="NOT-RUN: transformers is not installed"
    )
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 5, 3, 16), dtype=np.uint8)
    scales = rng.integers(0, 255, (2, 5, 3), dtype=np.uint8)
    scales[:, :, 1] = rng.integers(100, 140, (2, 5))
    config = {"quant_method": "mxfp4"}
    found = decode_weight(
        dialect_of(config), {"_blocks": part(blocks), "_scales": part(scales)}, config
    )
    tensors = torch.from_numpy(blocks), torch.from_numpy(scales)
    judged = library.convert_moe_packed_tensors(*tensors, dtype=torch.float32)
    assert found.shape == (2, 5, 96)
    assert np.array_equal(found.swapaxes(1, 2), judged.numpy())  # theirs is [experts, in, out]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_affine_by_definition(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (6, 128))
    scales, biases = (rng.standard_normal((6, 4)).astype(np.float32) for _ in range(2))
    config = {"bits": bits, "group_size": 32}
    stored = parts(weight=pack(codes, bits).view(np.uint32), scales=scales, biases=biases)
    expected = codes * np.repeat(scales, 32, axis=1) + np.repeat(biases, 32, axis=1)
    found = decode_weight(dialect_of(config), stored, config)
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-6)


MLX = [("affine", 32, b) for b in (2, 3, 4, 5, 6, 8)] + [
    ("affine", 64, 4), ("affine", 128, 8), ("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "size", "bits"), MLX)
def test_mlx_as_mlx(mode: str, size: int, bits: int) -> None:
    mx = pytest.importorskip(
        "mlx.core", reason="NOT-RUN: mlx is not installed", exc_type=ImportError
    )
    weight = mx.array(np.random.default_rng(0).standard_normal((6, 256)).astype(np.float32))
    names = ("weight", "scales", "biases")
    made = mx.quantize(weight, group_size=size, bits=bits, mode=mode, stream=mx.cpu)
    stored = parts(**{name: np.array(x) for name, x in zip(names, made, strict=False)})
    config = {"bits": bits, "group_size": size, "mode": mode}
    found = decode_weight(DIALECTS["mlx"], stored, config)
    judged = mx.dequantize(
        *made, group_size=size, bits=bits, mode=mode, dtype=mx.float32, stream=mx.cpu
    )
    assert np.array_equal(found, np.array(judged))


def refusals() -> list[tuple[str, Mapping[str, Any], dict[str, StoredPart], str]]:
    gptq, _ = gptq_case(4, False, False)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 16}
    short = StoredPart(gptq[".scales"].raw[:-2], "F16", gptq[".scales"].shape)
    return [
        ("gptq", config | {"bits": 9}, gptq, "bits 9"),
        ("gptq", config | {"bits": True}, gptq, "bits True"),
        ("gptq", config | {"group_size": 0}, gptq, "group_size 0"),
        ("gptq", config | {"checkpoint_format": "marlin"}, gptq, "marlin"),
        ("gptq", config, {".qweight": gptq[".qweight"]}, r"'\.qzeros' is missing"),
        ("gptq", config, gptq | {".scales": short}, "bytes, expected"),
        ("gptq", config, gptq | {".scales": gptq[".qzeros"]}, "is I32, expected F16"),
        ("mlx", {"bits": 4, "group_size": 3}, parts(weight=np.zeros((2, 4), np.uint32),
         scales=np.zeros((2, 1), np.float16), biases=np.zeros((2, 1), np.float16)),
         "says bits 4, group_size 3: part .* rows of 32"),
        ("mlx", {"bits": 4, "group_size": 32, "mode": "nf4"}, parts(
            weight=np.zeros((2, 4), np.uint32), scales=np.zeros((2, 1), np.float16)), "nf4"),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "config", "stored", "says"), refusals())
def test_refusals_say_what_was_found(
    name: str, config: Mapping[str, Any], stored: dict[str, StoredPart], says: str
) -> None:
    with pytest.raises(CodecError, match=f"{name}.*{says}"):
        decode_weight(DIALECTS[name], stored, config)


@pytest.mark.parametrize("grid", [(3, 2), (2, 3), (1, 4), (4, 4)])
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_a_grid_of_scales_that_is_of_no_allowed_tile_is_refused(
    grid: tuple[int, int], dtype: str
) -> None:
    """A weight of 256 x 256 has 2 x 2 scales of tiles of 128, and 256 x 8 of tiles of 1 x 32."""
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    weight = torch.zeros((256, 256)).to(torch.float8_e4m3fn)
    stored = parts(weight=weight, weight_scale_inv=np.ones(grid, dtype))
    says = rf"has shape \[{grid[0]}, {grid[1]}\], expected \[2, 2\] for tiles of 128 x 128"
    with pytest.raises(CodecError, match=says):
        decode_weight(dialect_of(config), stored, config)


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(UnsupportedError, match="'hqq'"):
        dialect_of({"quant_method": "hqq"})


def test_an_unknown_algorithm_of_modelopt_is_named() -> None:
    config = {"quant_method": "modelopt", "quant_algo": "W2A2_INT"}
    stored = {
        ".weight": part(np.zeros((8, 8), np.uint8)),
        ".weight_scale": part(np.ones((), np.float32)),
    }
    with pytest.raises(UnsupportedError, match="'W2A2_INT' is not one we decode: FP8"):
        decode_weight(DIALECTS["modelopt"], stored, config)
