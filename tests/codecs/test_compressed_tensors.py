"""compressed-tensors formats against the library, where it is installed, and by definition."""

from typing import Any

import numpy as np
import pytest

from aprfmt.codecs.dialects import decode_weight, dialect_of
from aprfmt.errors import CodecError, UnsupportedError
from tests.codecs.test_dialects import pack, part, parts

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")


def config_of(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_packed_integers_by_definition(bits: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 1 << bits, (20, 96))
    zeros = rng.integers(0, 1 << bits, (20, 3))
    scale = rng.standard_normal((20, 3)).astype(np.float32)
    stored = parts(
        weight_packed=pack(codes, bits),
        weight_scale=scale,
        weight_shape=np.array([20, 96]),
        weight_zero_point=np.ascontiguousarray(pack(zeros.T, bits).T),
    )
    config = config_of("pack-quantized", num_bits=bits, strategy="group", group_size=32)
    found = decode_weight(dialect_of(config), stored, config)
    wide = np.repeat(scale, 32, axis=1)
    assert np.array_equal(found, ((codes - np.repeat(zeros, 32, axis=1)) * wide).astype(np.float32))


def test_packed_integers_follow_the_group_index() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (4, 64))
    scale = rng.standard_normal((4, 2)).astype(np.float32)
    index = rng.permutation(np.repeat([0, 1], 32)).astype(np.int32)
    stored = parts(
        weight_packed=pack(codes, 4),
        weight_scale=scale,
        weight_shape=np.array([4, 64]),
        weight_g_idx=index,
    )
    config = config_of("pack-quantized", num_bits=4, strategy="group", group_size=32)
    found = decode_weight(dialect_of(config), stored, config)
    assert np.array_equal(found, ((codes - 8) * scale[:, index]).astype(np.float32))


def library_case(form: str, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return the compressed state, our configuration, and the library's own weight."""
    why = "NOT-RUN: compressed-tensors is not installed"
    compressors = pytest.importorskip("compressed_tensors.compressors", reason=why)
    quantization = pytest.importorskip("compressed_tensors.quantization", reason=why)
    arguments_type, scheme_type = quantization.QuantizationArgs, quantization.QuantizationScheme
    scheme = scheme_type(targets=["Linear"], weights=arguments_type(**arguments))
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 96, generator=generator)
    state: dict[str, Any] = {"weight": weight}
    strategy, bits = arguments["strategy"], arguments["num_bits"]
    size = arguments.get("group_size") or 96
    shape = {
        "tensor": (1,),
        "channel": (48, 1),
        "group": (48, 96 // size),
        "tensor_group": (48, 96 // size),
        "block": (3, 6),
    }[strategy]
    scale = torch.rand(shape, generator=generator) * 0.3 + 0.1
    if "mx" in form:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    if strategy == "tensor_group":
        state["weight_global_scale"] = torch.tensor([1234.0])
        scale = (scale * 1234).to(torch.float8_e4m3fn).float()
    state["weight_scale"] = scale
    if not arguments.get("symmetric", True):
        low = -(1 << bits - 1)
        state["weight_zero_point"] = torch.randint(
            low, -low, shape, generator=generator, dtype=torch.int8
        )
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress(state, scheme)
    judged = compressor.decompress(dict(packed), scheme)["weight"]
    return packed, config_of(form, **arguments), judged


CASES: list[tuple[str, dict[str, Any]]] = [
    *(
        ("pack-quantized", {"num_bits": bits, "type": "int", "strategy": strategy,
                            "group_size": 32 if strategy == "group" else None,
                            "symmetric": symmetric})
        for bits in (2, 3, 4, 8)
        for strategy in ("channel", "group")
        for symmetric in (True, False)
    ),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}),
    ("naive-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block",
                         "block_structure": [16, 16]}),
    ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32,
                         "scale_dtype": "torch.uint8"}),
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group",
                              "group_size": 16}),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group",
                              "group_size": 32}),
    ("mxfp6-pack-quantized", {"num_bits": 6, "type": "float", "strategy": "group",
                              "group_size": 32}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "arguments"), CASES, ids=[f"{f}-{'-'.join(map(str, a.values()))}" for f, a in CASES]
)
def test_as_the_library_decompresses(form: str, arguments: dict[str, Any]) -> None:
    packed, config, judged = library_case(form, **arguments)
    stored = {"." + name: part(x) for name, x in packed.items() if isinstance(x, torch.Tensor)}
    found = decode_weight(dialect_of(config), stored, config)
    rounded = torch.from_numpy(found).to(judged.dtype)
    assert torch.equal(rounded, judged)


def test_groups_with_different_weights_are_refused() -> None:
    config = config_of("int-quantized", num_bits=8, strategy="channel")
    config["config_groups"]["group_1"] = {"weights": {"num_bits": 4}}
    stored = parts(weight=np.zeros((2, 4), np.int8), weight_scale=np.ones((2, 1), np.float32))
    with pytest.raises(UnsupportedError, match="2 groups of weights"):
        decode_weight(dialect_of(config), stored, config)


@pytest.mark.parametrize(
    ("shape", "scale", "says"),
    [([2, 5], (2, 1), "expected"), ([-1, 8], (2, 1), "says"), ([2, 8], (3, 1), "shape"),
     ([2, 8], (2, 3), "strategy .channel.")],
)  # fmt: skip
def test_shapes_must_fit(shape: list[int], scale: tuple[int, ...], says: str) -> None:
    stored = parts(
        weight_packed=np.zeros((2, 1), np.int32),
        weight_scale=np.ones(scale, np.float32),
        weight_shape=np.array(shape),
    )
    config = config_of("pack-quantized", num_bits=4, strategy="channel")
    if shape == [2, 5]:  # five codes of 4 bits fit a word as eight do: nothing to refuse
        assert decode_weight(dialect_of(config), stored, config).shape == (2, 5)
        return
    with pytest.raises(CodecError, match=f"compressed-tensors.*{says}"):
        decode_weight(dialect_of(config), stored, config)
