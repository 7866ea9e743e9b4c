"""An adapter merged into a base in 4 bits, and quantized again by bitsandbytes itself."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.adapters.merge_answers import AdapterAnswer, answer_merge
from tests.diagnosis.engines import place
from tests.models import save_tiny

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
pytest.importorskip("bitsandbytes", reason="NOT-RUN: bitsandbytes is not installed")

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
RANK, ALPHA = 4, 8
KINDS = ("nf4", "fp4")


@cache
def merged(kind: str, size: float, times: int, dtype: str) -> tuple[Path, Path, Path]:
    """Return (base in 4 bits, merge quantized again, adapter); the change is added `times`."""
    import bitsandbytes.functional as functional
    from bitsandbytes.nn import modules
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.manual_seed(12)
    folder = place(f"packed-merge-{kind}-{size:g}-{times}-{dtype}")
    plain, base, made, adapter = (folder / name for name in ("plain", "a", "b", "adapter"))
    save_tiny("llama", plain, **SIZES)
    auto: Any = AutoModelForCausalLM
    wide = getattr(torch, dtype)
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=wide
    )
    model = auto.from_pretrained(plain, quantization_config=how, dtype=wide)
    model.save_pretrained(base)
    factors: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not isinstance(module, modules.Linear4bit) or not name.endswith(("q_proj", "v_proj")):
            continue
        held: Any = module.weight
        values = functional.dequantize_4bit(held.data, held.quant_state).float()
        rows, columns = values.shape
        a, b = torch.randn(RANK, columns) / columns**0.5, torch.randn(rows, RANK) * size
        factors[f"base_model.model.{name}.lora_A.weight"] = a
        factors[f"base_model.model.{name}.lora_B.weight"] = b
        full = (values + times * ALPHA / RANK * (b @ a)).to(wide).contiguous()
        packed: Any = modules.Params4bit(
            full, requires_grad=False, quant_type=kind, compress_statistics=False, blocksize=64
        )
        module.weight = packed.to("cpu")
    model.save_pretrained(made)
    adapter.mkdir(parents=True)
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA,
        "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "v_proj"],
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return base, made, adapter


def answered(kind: str, size: float, times: int, dtype: str) -> AdapterAnswer:
    """Return the answer about base, merge and adapter."""
    base, made, adapter = merged(kind, size, times, dtype)
    with aprfmt.open(base) as a, aprfmt.open(made) as b:
        return answer_merge(a, b, adapter)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1e-3, 5e-3, 3e-2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_merge_that_was_quantized_again_is_reproduced(kind: str, size: float, dtype: str) -> None:
    """Seen red: "once or not at all" of small changes, "otherwise" of larger ones."""
    found = answered(kind, size, 1, dtype)
    assert {one.found for one in found.weights} == {"once"}, found.text
    assert not found.differs and not found.undecided


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("times", "word"), [(0, "not at all"), (2, "once")])
def test_other_merges_are_not_taken_for_it(kind: str, times: int, word: str) -> None:
    found = answered(kind, 3e-2, times, "bfloat16")
    words = {one.found for one in found.weights}
    assert (words == {word}) == (times == 0), found.text
    assert times == 0 or word not in words, found.text
