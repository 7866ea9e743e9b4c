"""Steps of an adapter beside another base than the one given, or whose factors are exchanged.

A fifth set: gradients that peft and bitsandbytes computed with the adapter merged into the base as
well, with A and B exchanged, and beside bases of 4 bits. What is right stands in each row, written
before the row was first run.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models import tiny
from tests.training.judged_steps import (
    Grads,
    JudgedStep,
    backward,
    batch_of,
    lora,
    with_gradients,
    written,
)

# bitsandbytes' CPU kernel decodes rows that are shorter than a block wrongly.
WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
SQUARE = 128  # rows and columns of q and o


def adapter_grads(model: Any, batch: dict[str, torch.Tensor]) -> Grads:
    """Return the gradients of the adapter's factors alone."""
    return {n: g for n, g in backward(model, batch).items() if "lora_" in n}


@cache
def base_of(dtype: torch.dtype = torch.float32) -> Any:
    """Return a tiny llama whose rows are no shorter than a block of bitsandbytes."""
    return tiny("llama", tied=False, **WIDE).to(dtype)


def beside(
    trained: Callable[[Any], Any] = lambda model: model,
    given: Callable[[Any], Any] = lambda model: model,
    change: Callable[[Any], Any] = lambda adapted: adapted,
    dtype: torch.dtype = torch.float32,
    size: float = 0.1,
) -> Callable[[Path], dict[str, Any]]:
    """Return what makes the files of an adapter's gradients beside the base `trained` makes.

    `given` makes the base that is saved, both of the same one. `change` is made of the adapted
    model before its backward, after it was saved.
    """

    def make(folder: Path) -> dict[str, Any]:
        batch = batch_of()
        adapted = lora(deepcopy(base_of(dtype)), size=size)
        adapted.save_pretrained(str(folder / "adapter"))
        files = written(folder, given(deepcopy(base_of(dtype))), batch)
        model = lora(trained(deepcopy(base_of(dtype))), size=size)
        grads = adapter_grads(change(model), batch)
        return files | with_gradients(folder, grads) | {"adapter": folder / "adapter"}

    return make


def merged(times: float) -> Callable[[Any], Any]:
    """Return what adds the adapter's product to a base, so many times by its scale."""

    def change(model: Any) -> Any:
        adapted = lora(deepcopy(model))
        deltas = {
            name.removeprefix("base_model.model."): module.get_delta_weight("default")
            for name, module in adapted.named_modules()
            if hasattr(module, "get_delta_weight")
        }
        with torch.no_grad():
            for name, delta in deltas.items():
                model.get_submodule(name).weight += times * delta
        return model

    return change


def square_pairs(change: str) -> Callable[[Path], dict[str, Any]]:
    """Return what makes the files of square pairs, q and o, whose factors are taken otherwise.

    `product`: A @ B is added. `file`: the saved values are exchanged. `gradients`: the gradients
    stand under each other's names. `transposed`: (B @ A).T is added, of rank 4. "": all is right.
    """

    def make(folder: Path) -> dict[str, Any]:
        batch, rank = batch_of(), 4 if change == "transposed" else SQUARE
        base = deepcopy(base_of())
        files = written(folder, base, batch)
        model = lora(base, ("q_proj", "o_proj"), rank=rank, size=0.02)
        model.save_pretrained(str(folder / "adapter"))
        path = folder / "adapter" / "adapter_model.safetensors"
        if change == "file":
            save_file({other(n): w for n, w in load_file(path).items()}, path)
        for module in model.modules():
            if change in ("product", "transposed") and hasattr(module, "lora_A"):
                module.forward = taken_otherwise(module, change)
        grads = adapter_grads(model, batch)
        if change == "gradients":
            grads = {other(name): g for name, g in grads.items()}
        return files | with_gradients(folder, grads) | {"adapter": folder / "adapter"}

    return make


def other(name: str) -> str:
    """Return the name of the other factor of a pair."""
    return name.replace("lora_A", "lora_C").replace("lora_B", "lora_A").replace("lora_C", "lora_B")


def taken_otherwise(module: Any, change: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a forward of peft's linear layer that adds A @ B, or (B @ A).T."""
    a, b = (getattr(module, f"lora_{each}").default.weight for each in "AB")

    def forward(x: torch.Tensor) -> torch.Tensor:
        delta = a @ b if change == "product" else (b @ a).T
        y: torch.Tensor = module.base_layer(x) + module.scaling["default"] * (x @ delta.T)
        return y

    return forward


def quantized(kind: str = "nf4", block: int = 64, nested: bool = True) -> Callable[[Any], Any]:
    """Return what puts bitsandbytes' quantized and decoded weights in a model's linear layers."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    def change(model: Any) -> Any:
        with torch.no_grad():
            for name, module in model.named_modules():
                if isinstance(module, torch.nn.Linear) and name != "lm_head":
                    w = module.weight
                    held = quantize_4bit(
                        w.data, blocksize=block, compress_statistics=nested, quant_type=kind
                    )
                    w.copy_(dequantize_4bit(*held).to(w.dtype))
        return model

    return change


ADAPTER_FAULTS = (
    JudgedStep(
        "adapter_counted_twice",
        "the adapter is merged into the base and applied in addition",
        beside(merged(1.0)),
        cause="adapter_merged",
        named="adapter_merged.*counts twice",
        where="lora",
    ),
    JudgedStep(
        "adapter_in_the_given_base",
        "the base that is given has the adapter merged, the trainer's had not",
        beside(given=merged(1.0)),
        cause="adapter_merged",
        named="adapter_merged.*given has the adapter merged",
        where="lora",
    ),
    JudgedStep(
        "adapter_merged_by_alpha",
        "the adapter is merged by alpha, not alpha/r, and applied in addition",
        beside(merged(4.0)),
        cause="adapter_merged",
        named="adapter_merged.*applied in addition; merged by the factor 8: .*times r",
        where="lora",
    ),
    JudgedStep(
        "adapter_merged_by_the_root",
        "the base that is given has the adapter merged by alpha/sqrt(r)",
        beside(given=merged(2.0)),
        cause="adapter_merged",
        named="adapter_merged.*given .*by the factor 4: .*root of r",
        where="lora",
    ),
    JudgedStep(
        "factors_multiplied_in_turn",
        "A @ B is added, not B @ A, of square factors",
        square_pairs("product"),
        cause="adapter_exchanged",
        named="adapter_exchanged.*A is taken for B",
        where="lora",
    ),
    JudgedStep(
        "factors_exchanged_in_the_file",
        "the values of A and B stand under each other's names in the adapter",
        square_pairs("file"),
        cause="adapter_exchanged",
        named="adapter_exchanged.*in the file",
        where="lora",
    ),
    JudgedStep(
        "factor_gradients_exchanged",
        "the gradients of A and B stand under each other's names",
        square_pairs("gradients"),
        cause="gradient_exchanged",
        named="gradient_exchanged",
        where="lora",
    ),
    JudgedStep(
        "product_transposed",
        "(B @ A).T is added, of square weights",
        square_pairs("transposed"),
        cause="adapter_exchanged",
        named="adapter_exchanged.*transposed",
        where="lora",
    ),
    JudgedStep(
        "base_in_nf4",
        "the trainer's base is quantized to NF4 with double quantization, the given one is not",
        beside(quantized()),
        cause="base_quantized",
        named="base_quantized.*NF4 in blocks of 64, scales quantized too",
        where="lora",
    ),
    JudgedStep(
        "base_in_nf4_of_plain_scales",
        "the trainer's base is quantized to NF4 without double quantization",
        beside(quantized(nested=False)),
        cause="base_quantized",
        named="base_quantized.*NF4 in blocks of 64, scales in float32",
        where="lora",
    ),
    JudgedStep(
        "base_in_nf4_of_128",
        "the trainer's base is quantized to NF4 in blocks of 128",
        beside(quantized(block=128)),
        cause="base_quantized",
        named="base_quantized.*NF4 in blocks of 128, scales quantized too",
        where="lora",
    ),
    JudgedStep(
        "base_in_fp4",
        "the trainer's base is quantized to FP4",
        beside(quantized("fp4")),
        cause="base_quantized",
        named="base_quantized.*FP4 in blocks of 64, scales quantized too",
        where="lora",
    ),
    JudgedStep(
        "base_in_nf4_of_bfloat16",
        "the trainer's base is a bfloat16 one quantized to NF4, and it computes in bfloat16",
        beside(quantized(), dtype=torch.bfloat16),
        cause="base_quantized",
        named="base_quantized.*NF4 in blocks of 64",
        where="lora",
    ),
)
ADAPTER_INNOCENTS = (
    JudgedStep("square_factors", "all gradients of square pairs", square_pairs("")),
    JudgedStep("beside", "all gradients beside the base that is given", beside()),
    JudgedStep(
        "merged_base",
        "both bases have the adapter merged, as before a second round of training",
        beside(merged(1.0), merged(1.0)),
    ),
    JudgedStep("decoded_base", "both bases are NF4, decoded", beside(quantized(), quantized())),
    JudgedStep("new_adapter", "B is zero, and the adapter adds nothing", beside(size=0.0)),
)
