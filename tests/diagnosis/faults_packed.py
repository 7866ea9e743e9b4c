"""Seeded faults of packed encodings, and right copies in every one of them.

The packed folders are written by `packing`, after the public code of the tools named there; tests
of the codecs hold our reading of these layouts to the libraries.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from aprfmt.codecs import nf4
from tests.diagnosis import files, packing
from tests.diagnosis.engines import broken, place, tiny_folder, trace
from tests.diagnosis.fault import Fault
from tests.diagnosis.packing import Packed, Rows

Array = Any
# Three heads, so that nothing is a power of two; inputs are whole groups of 32 only.
SIZES = {
    "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 2,
}  # fmt: skip
WIDE = SIZES | {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
ONE = "L1.ffn_up.weight"
ALL = "L0.attn_q.weight"
GPTQ = packing.gptq_section()
ROW = packing.compressed_section(
    "float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True
)
WHOLE = packing.compressed_section(
    "float-quantized", num_bits=8, type="float", strategy="tensor", symmetric=True
)
INT4 = packing.compressed_section(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=True
)
TILES = {"quant_method": "fp8", "weight_block_size": [32, 32]}

Write = Callable[[str, Array], Rows]
gptq, awq, mlx, packed = packing.gptq, packing.awq, packing.mlx, packing.compressed


def source(base: str, sizes: Mapping[str, Any] = SIZES) -> Path:
    """Return a tiny model in BF16, made once."""
    return tiny_folder(base, "bfloat16", **sizes)


def copied(
    name: str,
    base: str,
    says: str,
    section: Mapping[str, Any] | None,
    make: Write,
    cause: str | tuple[str, ...] = "quantisation",
    *,
    sizes: Mapping[str, Any] = SIZES,
    key: str = "",
    where: str = "",
) -> Fault:
    """Return the fault, or the control, of a packed copy of a whole model."""

    def pair() -> tuple[Path, Path]:
        original = source(base, sizes)
        return original, packing.folder(
            original, f"packed-{name}", section, make, key=key or "quantization_config"
        )

    right, causes = cause == "quantisation", (cause,) if isinstance(cause, str) else cause
    return Fault(name, base, says, pair, causes, (where or ALL,), "precision" if right else "bug")


def nearest(
    write: Callable[..., Rows], fault: packing.Fault | None = None, *, only: str = "", **how: Any
) -> Write:
    """Return a maker of weights rounded to the nearest, with a fault in all or in those named."""

    def make(name: str, x: Array) -> Rows:
        p = packing.nearest(x, **how)
        return write(name, fault(p) if fault is not None and only in name else p)

    return make


def fed_back(write: Callable[..., Rows], fault: packing.Fault | None = None, **how: Any) -> Write:
    """Return a maker of weights quantized as GPTQ does."""

    def make(name: str, x: Array) -> Rows:
        p = packing.fed_back(x, **how)
        return write(name, fault(p) if fault is not None else p)

    return make


def fp8(**how: Any) -> Write:
    """Return a maker of FP8 weights."""
    return lambda name, x: packing.fp8(name, x, **how)


def fp8_decoded(read: Any = ml_dtypes.float8_e4m3fn, **how: Any) -> Write:
    """Return a maker of FP8 weights whose bytes are read as `read` and decoded to BF16."""

    def make(name: str, x: Array) -> Rows:
        made = packing.fp8(name, x, per="row", **how)
        codes = np.frombuffer(made[f"{name}.weight"][2], read).reshape(x.shape)
        scale = packing.number(made[f"{name}.weight_scale"]).reshape(-1, 1)
        values = codes.astype(np.float32) * scale
        return {f"{name}.weight": packing.row(values.astype(ml_dtypes.bfloat16))}

    return make


def offset_lost(name: str, x: Array) -> Rows:
    """Return NF4 by blocks of 64 decoded to BF16, its absmax without their mean, as nested ones."""
    code = nf4.CODEC.code.astype(np.float32)
    blocks = x.reshape(-1, 64)
    absmax = np.abs(blocks).max(1, keepdims=True)
    near = np.abs(blocks[..., None] / absmax[..., None] - code).argmin(-1)
    values = (code[near] * (absmax - absmax.mean())).reshape(x.shape)
    return {f"{name}.weight": packing.row(values.astype(ml_dtypes.bfloat16))}


def plus(zeros: int) -> packing.Fault:
    """Return a fault of zero points."""
    return lambda p: replace(p, zeros=p.zeros + zeros)


def unlike(scales: Array) -> Array:
    """Return scales times a factor of each group's own."""
    return scales * np.random.default_rng(5).uniform(0.4, 2.5, scales.shape).astype(scales.dtype)


def order_lost(p: Packed) -> Packed:
    """Forget the order of activation."""
    return replace(p, group=np.sort(p.group))


def turned(p: Packed) -> Packed:
    """Store scales by columns where they are read by rows."""
    return replace(p, scales=np.ascontiguousarray(p.scales.T).reshape(p.scales.shape))


def zeros_in_order(p: Packed) -> Packed:
    """Return zero points that AWQ's order leaves in plain order."""
    back = np.argsort(packing.ORDER)
    words = p.zeros.T.reshape(p.zeros.shape[1], -1, 8)[:, :, back]
    return replace(p, zeros=np.ascontiguousarray(words.reshape(p.zeros.shape[1], -1).T))


def scales_late(name: str, p: Packed) -> Rows:
    """Return MLX's tensors with scales one group late beside right biases."""
    late = mlx(name, replace(p, scales=np.roll(p.scales, 1, 1)))
    return mlx(name, p) | {f"{name}.scales": late[f"{name}.scales"]}


def block_of_fields(change: Callable[[Array], None], encoding: str) -> Callable[[Path], None]:
    """Return an editor of the blocks of one tensor of a GGUF file."""

    def run(path: Path) -> None:
        from gguf import GGUFReader

        reader = GGUFReader(path, "r+")
        for tensor in reader.tensors:
            if tensor.name == "blk.0.ffn_up.weight":
                assert tensor.tensor_type.name == encoding
                change(tensor.data.reshape(-1))
        reader.data.flush()

    return run


def gguf(
    name: str, scheme: str, encoding: str, says: str, cause: str, change: Callable[[Array], None]
) -> Fault:
    """Return the fault of one tensor of a quantized GGUF file, against its source."""

    def pair() -> tuple[Path, Path]:
        original = source("llama", WIDE)
        path = place(f"packed-{name}.gguf")
        path.unlink(missing_ok=True)
        made = files.quantized(original, f"packed-{name}.gguf", scheme)
        block_of_fields(change, encoding)(made)
        return original, made

    return Fault(name, "llama", says, pair, (cause, "quantisation"), ("L0.ffn_up.weight",))


def exchanged(size: int, first: int, second: int) -> Callable[[Array], None]:
    """Return an editor that exchanges two float16 fields of blocks of `size` bytes."""

    def change(data: Array) -> None:
        blocks = data.reshape(-1, size)
        one, other = (blocks[:, at : at + 2].copy() for at in (first, second))
        blocks[:, first : first + 2], blocks[:, second : second + 2] = other, one

    return change


def negated(size: int, at: int) -> Callable[[Array], None]:
    """Return an editor that turns the sign of a float16 field of blocks of `size` bytes."""

    def change(data: Array) -> None:
        data.reshape(-1, size)[:, at + 1] ^= 0x80

    return change


def header_between(data: Array) -> None:
    """Store Q4_1's codes before its minimum."""
    blocks = data.reshape(-1, 20)
    blocks[:, 2:] = np.concatenate([blocks[:, 4:], blocks[:, 2:4]], 1)


def rolled(size: int) -> Callable[[Array], None]:
    """Return an editor that writes all bytes `size` places late, the last ones first."""

    def change(data: Array) -> None:
        data[:] = np.roll(data, size)

    return change


def cut_short(data: Array) -> None:
    """Leave zeros behind 70 % of the data, as a short download does."""
    data[int(0.7 * data.size) :] = 0


def bit_flipped(at: int, bit: int) -> Callable[[Array], None]:
    """Return an editor that flips one bit."""

    def change(data: Array) -> None:
        data[at] ^= 1 << bit

    return change


def high_first(size: int, at: int) -> Callable[[Array], None]:
    """Return an editor that exchanges the halves of every byte from `at` on."""

    def change(data: Array) -> None:
        blocks = data.reshape(-1, size)
        blocks[:, at:] = blocks[:, at:] >> 4 | blocks[:, at:] << 4

    return change


scales = packing.with_scales
decoded = packing.decoded

PACKED_FAULTS: tuple[Fault, ...] = (
    copied("gptq-v1-as-v2", "llama", "GPTQ v2's zero points in a file that says v1", GPTQ,
           fed_back(partial(gptq, offset=0)), "zero_point"),
    copied("gptq-zero-decoded", "qwen2", "GPTQ decoded to BF16 with zero points less one", None,
           fed_back(decoded, plus(-1)), "zero_point"),
    copied("awq-zero", "llama", "AWQ with zero points plus one", packing.awq_section(),
           nearest(awq, plus(1)), "zero_point"),
    copied("zero-of-one", "llama", "zero points of one tensor", GPTQ,
           nearest(gptq, plus(1), only="1.mlp.up"), ("zero_point", "quantisation"), where=ONE),
    copied("mlx-bias", "llama", "MLX's biases a step too low",
           {"group_size": 32, "bits": 8}, nearest(mlx, plus(1), bits=8), "zero_point",
           key="quantization"),
    copied("signed-codes", "llama", "codes stored signed, read with an offset", INT4,
           nearest(packed, lambda p: replace(p, codes=p.codes ^ 8), symmetric=True,
                   dtype=ml_dtypes.bfloat16), "zero_point"),
    copied("awq-in-order", "llama", "AWQ's words hold their codes in GPTQ's order",
           packing.awq_section(), nearest(partial(awq, order=tuple(range(8)))), "packing_order"),
    copied("awq-order-decoded", "llama", "AWQ decoded to BF16 with GPTQ's order of codes", None,
           nearest(decoded, lambda p: replace(
               p, codes=p.codes.reshape(-1, 8, p.codes.shape[1])[:, list(packing.ORDER)]
               .reshape(p.codes.shape)), symmetric=True), "packing_order"),
    copied("nibbles", "llama", "the high nibble first", INT4,
           nearest(packed, lambda p: replace(
               p, codes=p.codes.reshape(len(p.codes), -1, 2)[..., ::-1].reshape(p.codes.shape)),
               symmetric=True, dtype=ml_dtypes.bfloat16), "packing_order"),
    copied("fp8-inverted", "llama", "FP8 with 1/s for s in every row", ROW,
           fp8(per="row", stored=lambda s: 1 / s), "quant_scale"),
    copied("fp8-tensor-inverted", "llama", "FP8 with 1/s for the scale of every tensor",
           WHOLE, fp8(stored=lambda s: 1 / s), "quant_scale"),
    copied("fp8-ignored", "qwen2", "FP8 with scales of 1", ROW,
           fp8(per="row", stored=np.ones_like), "quant_scale"),
    copied("fp8-tiles-turned", "llama", "FP8 by tiles, its scales by columns", TILES,
           fp8(per="tile", suffix=".weight_scale_inv",
               stored=lambda s: np.ascontiguousarray(s.T).reshape(s.shape)),
           ("quant_scale", "quantisation")),
    copied("scales-shifted", "llama", "every group has the scale of the one before", GPTQ,
           nearest(gptq, scales(lambda s: np.roll(s, 1, 1))), "quant_scale"),
    copied("scales-of-others", "llama", "scales that go with the right ones in no way", GPTQ,
           nearest(gptq, scales(unlike)), "quant_scale"),
    copied("scales-shared", "llama", "the first row's scales for all rows", INT4,
           nearest(packed, scales(lambda s: np.repeat(s[:1], len(s), 0)), symmetric=True,
                   dtype=ml_dtypes.bfloat16), "quant_scale"),
    copied("scales-ignored-decoded", "llama", "decoded to BF16 without scales", None,
           nearest(decoded, scales(np.ones_like)), "quant_scale"),
    copied("scales-inverted-decoded", "llama", "decoded to BF16 with 1/s for s", None,
           nearest(decoded, scales(lambda s: 1 / s)), "quant_scale"),
    copied("offset-lost", "llama", "NF4 decoded to BF16 without the offset of nested absmax", None,
           offset_lost, "nested_offset"),
    copied("order-ignored", "llama", "an order of activation that is not in the file", GPTQ,
           fed_back(partial(gptq, order=False), order_lost, act_order=True), "group_index"),
    copied("order-ignored-decoded", "llama", "decoded to BF16 without the order of activation",
           None, fed_back(decoded, order_lost, act_order=True, symmetric=True), "group_index"),
    copied("e4m3-as-e5m2", "llama", "E4M3 under the label of E5M2", ROW,
           lambda name, x: packing.relabelled(packing.fp8(name, x, per="row"), "F8_E5M2"),
           "fp8_variant"),
    copied("e4m3-as-e5m2-decoded", "llama", "E4M3 read as E5M2 and decoded to BF16", None,
           fp8_decoded(ml_dtypes.float8_e5m2, top=224.0), "fp8_variant"),
    copied("awq-zeros-in-order", "llama", "AWQ's zero points in plain order, its codes not",
           packing.awq_section(), nearest(awq, zeros_in_order), "packing_order"),
    copied("zeros-in-order-decoded", "llama", "the same decoded to BF16", None,
           nearest(decoded, zeros_in_order), "zero_point"),
    copied("mlx-scales-late", "llama", "MLX's scales a group late, its biases not",
           {"group_size": 32, "bits": 4}, nearest(scales_late), "quant_scale", key="quantization"),
    gguf("q4-1-fields", "Q4_1", "Q4_1", "the codes before the minimum", "packing_order",
         header_between),
    gguf("q8-0-late", "Q8_0", "Q8_0", "every block one place late", "byte_offset", rolled(34)),
    gguf("q4-0-bytes-late", "Q4_0", "Q4_0", "every block two bytes late", "byte_offset",
         rolled(2)),
    gguf("q4-0-cut", "Q4_0", "Q4_0", "zeros behind 70 % of the data", "bit_rot", cut_short),
    gguf("q4k-bit", "Q4_K_S", "Q4_K", "a bit of a block's d", "bit_rot", bit_flipped(721, 4)),
    gguf("q4k-exchanged", "Q4_K_S", "Q4_K", "d and dmin exchanged", "quant_min",
         exchanged(144, 0, 2)),
    gguf("q4k-sign", "Q4_K_S", "Q4_K", "dmin with the other sign", "quant_min", negated(144, 2)),
    gguf("q4-0-nibbles", "Q4_0", "Q4_0", "the high nibble first", "packing_order",
         high_first(18, 2)),
)  # fmt: skip


def narrow(x: Array, bits: int) -> Array:
    """Return float32 values rounded to the nearest with `bits` bits of fraction."""
    low = np.uint32(23 - bits)
    found = np.ascontiguousarray(x, np.float32).copy()
    seen = found.view(np.uint32)
    seen += (np.uint32(1) << low - np.uint32(1)) - np.uint32(1) + (seen >> low & np.uint32(1))
    seen &= np.uint32(0xFFFFFFFF) << low
    return found


def products(name: str, says: str, change: Callable[..., Any]) -> Fault:
    """Return the control of a run whose products are in a coarser arithmetic than its records."""

    def pair() -> tuple[Path, Path]:
        folder = tiny_folder("llama")
        return folder, trace(folder, f"products-{name}", backend=lambda: broken("linear", change))

    return Fault(name, "llama", says, pair, ("rounding",), (), "precision")


def tf32(op: Any, x: Array, weight: Any, *more: Any, **named: Any) -> Any:
    """Multiply values of ten bits of fraction."""
    return op(narrow(x, 10), weight, *more, **named)


def halves(dtype: Any) -> Callable[..., Any]:
    """Return a product that is rounded to a 16-bit type."""
    return lambda op, *args, **named: op(*args, **named).astype(dtype).astype(np.float32)


PACKED_CONTROLS: tuple[Fault, ...] = (
    products("tf32-products", "products in TF32, recorded in float32", tf32),
    products("bf16-products", "products in BF16, recorded in float32", halves(ml_dtypes.bfloat16)),
    products("f16-products", "products in F16, recorded in float32", halves(np.float16)),
    *(copied(f"gptq-{bits}", "llama", f"GPTQ, {bits} bits", packing.gptq_section(bits),
             fed_back(gptq, bits=bits)) for bits in (2, 3, 4, 8)),
    copied("gptq-act-order", "qwen2", "GPTQ with an order of activation",
           packing.gptq_section(desc_act=True), fed_back(gptq, act_order=True)),
    copied("gptq-v2", "llama", "GPTQ's second format",
           packing.gptq_section(checkpoint_format="gptq_v2"), fed_back(partial(gptq, offset=0))),
    copied("awq-clipped", "llama", "AWQ, clipped", packing.awq_section(), nearest(awq, clip=0.8)),
    *(copied(f"mlx-{bits}", "llama", f"MLX, {bits} bits", {"group_size": 32, "bits": bits},
             nearest(mlx, bits=bits), key="quantization") for bits in (4, 8)),
    copied("int4", "llama", "compressed-tensors in 4 bits", INT4,
           nearest(packed, symmetric=True, dtype=ml_dtypes.bfloat16)),
    copied("fp8-rows", "qwen2", "FP8 by rows", ROW, fp8(per="row", dtype=ml_dtypes.bfloat16)),
    copied("fp8-tiles", "llama", "FP8 by tiles", TILES,
           fp8(per="tile", suffix=".weight_scale_inv")),
    copied("gptq-decoded", "llama", "GPTQ decoded to BF16", None, fed_back(decoded)),
    copied("int8-decoded", "llama", "8 bits by rows decoded to BF16", None,
           nearest(decoded, bits=8, size=32, symmetric=True)),
    copied("awq-decoded-f16", "llama", "AWQ decoded to F16", None,
           nearest(partial(decoded, dtype=np.float16), clip=0.8)),
    copied("fp8-decoded", "llama", "FP8 decoded to BF16", None, fp8_decoded()),
)  # fmt: skip
