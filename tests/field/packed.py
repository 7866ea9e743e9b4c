"""Folders in encodings of few bits, made by torch, bitsandbytes, compressed-tensors and numpy.

Every `Scheme` is the right encoding of one weight [out, in] as its tools write it; a fault changes
the stored tensors of every weight (`damage`), the section of config.json, or both.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from tests.codecs.packing import pack
from tests.field import hf
from tests.field.row import Pair

Tensor = Any
Parts = dict[str, Tensor]
GROUP = 32
BLOCK = 128
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Scheme:
    """`encode` gives the stored tensors of a weight by suffix; `section` of config.json."""

    encode: Callable[[Tensor], Parts]
    section: Mapping[str, Any]
    key: str = "quantization_config"


def affine(weight: Tensor, bits: int = 4) -> tuple[Any, Any, Any]:
    """Return codes [out, in], zero points and scales [in / GROUP, out], rounded to nearest."""
    x = weight.float().numpy().reshape(len(weight), -1, GROUP)
    low, high = np.minimum(x.min(-1), 0), np.maximum(x.max(-1), 0)
    top = (1 << bits) - 1
    scale = np.maximum((high - low) / top, 1e-8).astype(np.float16).astype(np.float32)
    zero = np.clip(np.rint(-low / scale), 0, top)
    codes = np.clip(np.rint(x / scale[..., None]) + zero[..., None], 0, top)
    return codes.reshape(len(weight), -1).astype(np.int64), zero.T.astype(np.int64), scale.T


def _torch(x: Any) -> Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(x))


def gptq(weight: Tensor, *, minus: int = 1) -> Parts:
    """GPTQ, 4 bits, rounded to nearest; the first format stores zero points less 1."""
    codes, zeros, scales = affine(weight)
    zeros = np.maximum(zeros, 1)  # the first format cannot say 0
    wide = np.repeat(zeros, GROUP, 0).T
    again = np.rint(weight.float().numpy() / np.repeat(scales, GROUP, 0).T) + wide
    codes = np.clip(again, 0, 15).astype(np.int64)
    return {
        "qweight": _torch(pack(codes, 4).T),
        "qzeros": _torch(pack(zeros - minus, 4)),
        "scales": _torch(scales.astype(np.float16)),
        "g_idx": _torch((np.arange(codes.shape[1]) // GROUP).astype(np.int32)),
    }


def awq(weight: Tensor, *, order: Any = AWQ_ORDER, zero_order: Any = AWQ_ORDER) -> Parts:
    """AWQ's GEMM layout: eight columns of a word in the order 0 2 4 6 1 3 5 7."""
    codes, zeros, scales = affine(weight)

    def mixed(x: Any, by: Any) -> Any:
        return pack(x.reshape(len(x), -1, 8)[:, :, list(by)].reshape(len(x), -1), 4)

    return {
        "qweight": _torch(mixed(codes.T, order)),
        "qzeros": _torch(mixed(zeros, zero_order)),
        "scales": _torch(scales.astype(np.float16)),
    }


def mlx(weight: Tensor) -> Parts:
    """MLX affine, 4 bits: value = code * scale + bias."""
    codes, zeros, scales = affine(weight)
    return {
        "weight": _torch(pack(codes, 4).view(np.uint32)),
        "scales": _torch(scales.T.astype(np.float16)),
        "biases": _torch((-(zeros * scales)).T.astype(np.float16)),
    }


def fp8_blocks(weight: Tensor) -> Parts:
    """FP8 in blocks of 128 x 128, the last ones cut, each with its multiplier."""
    import torch

    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // BLOCK), -(-columns // BLOCK))
    stored = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            part = weight[at].float()
            scale[i, j] = part.abs().max() / 448
            stored[at] = (part / scale[i, j]).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scale}


def fp8_whole(weight: Tensor) -> Parts:
    """FP8 with one multiplier a tensor."""
    import torch

    scale = weight.float().abs().max() / 448
    return {
        "weight": (weight.float() / scale).to(torch.float8_e4m3fn),
        "weight_scale": scale.reshape(1).float(),
    }


def fp8_rows(weight: Tensor) -> Parts:
    """FP8 with one multiplier a row."""
    import torch

    scale = weight.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (weight.float() / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def packed(weight: Tensor) -> Parts:
    """Symmetric integers of 4 bits in groups, packed by compressed-tensors itself."""
    import torch

    library: Any = import_module("compressed_tensors.compressors.pack_quantized.helpers")
    x = weight.float().reshape(len(weight), -1, GROUP)
    scale = (x.abs().amax(-1) / 7.5).clamp_min(1e-8).to(torch.bfloat16)
    codes = (x / scale.float()[..., None]).round().clamp(-8, 7).to(torch.int8)
    return {
        "weight_packed": library.pack_to_int32(codes.reshape(weight.shape), 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def nf4(weight: Tensor, *, nested: bool = False) -> Parts:
    """NF4 by bitsandbytes, its state as transformers saves it."""
    import bitsandbytes.functional as bnb
    import torch

    data, state = bnb.quantize_4bit(
        weight.to(torch.bfloat16), quant_type="nf4", compress_statistics=nested, blocksize=64
    )
    found = {"weight": data}
    for key, value in state.as_dict(packed=True).items():
        found[f"weight.{key}"] = value
    return found


def _compressed(form: str, **weights: Any) -> Mapping[str, Any]:
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "symmetric": True, **weights,
        }}},
    }  # fmt: skip


def _bnb(nested: bool) -> Mapping[str, Any]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": "bfloat16",
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
SCHEMES: Mapping[str, Scheme] = {
    "gptq": Scheme(gptq, _GPTQ),
    "gptq-v2": Scheme(lambda w: gptq(w, minus=0), _GPTQ | {"checkpoint_format": "gptq_v2"}),
    "awq": Scheme(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm",
                        "zero_point": True}),
    "mlx": Scheme(mlx, {"group_size": GROUP, "bits": 4}, "quantization"),
    "fp8-block": Scheme(fp8_blocks, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "fp8-tensor": Scheme(fp8_whole, _compressed(
        "float-quantized", num_bits=8, type="float", strategy="tensor")),
    "fp8-row": Scheme(fp8_rows, _compressed(
        "float-quantized", num_bits=8, type="float", strategy="channel")),
    "packed": Scheme(packed, _compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP)),
    "nf4": Scheme(nf4, _bnb(False)),
    "nf4-nested": Scheme(lambda w: nf4(w, nested=True), _bnb(True)),
}  # fmt: skip


def encoded(
    scheme: str,
    name: str,
    damage: Callable[[str, Parts], Parts] | None = None,
    *,
    arch: str = "llama",
    section: Mapping[str, Any] | None = None,
    encode: Callable[[Tensor], Parts] | None = None,
    dtype: str = "float32",
    **options: Any,
) -> Callable[[], Pair]:
    """Return a maker of a folder and its copy in a scheme.

    `damage(module, parts)` returns other parts; `section` replaces keys of the config's section;
    `encode` stands in for the scheme's own encoding.
    """

    def make() -> Pair:
        how = SCHEMES[scheme]
        source = hf.base(arch, dtype, **options)

        def change(state: hf.State) -> hf.State:
            found: hf.State = {}
            for key, value in state.items():
                if not key.endswith("_proj.weight"):
                    found[key] = value
                    continue
                module = key.removesuffix(".weight")
                parts = (encode or how.encode)(value)
                parts = parts if damage is None else damage(module, parts)
                found.update({f"{module}.{suffix}": part for suffix, part in parts.items()})
            return found

        said = {how.key: dict(how.section) | dict(section or {})}
        return source, hf.copy(source, f"field-{name}", change, config=said)

    return make


def decoded(scheme: str, name: str, **options: Any) -> Callable[[], Pair]:
    """Return a maker of a folder and its AWQ or GPTQ copy decoded to BF16 by numpy."""

    def make() -> Pair:
        import torch

        source = hf.base("llama", "float32", **options)

        def change(state: hf.State) -> None:
            for key, value in state.items():
                if key.endswith("_proj.weight"):
                    codes, zeros, scales = affine(value)
                    wide = [np.repeat(x, GROUP, 0).T for x in (zeros, scales)]
                    value = torch.from_numpy(((codes - wide[0]) * wide[1]).astype(np.float32))
                state[key] = value.to(torch.bfloat16)

        return source, hf.copy(source, f"field-{name}", change, config={"dtype": "bfloat16"})

    return make
