"""Steps of a LoRA adapter: the pair that has no gradient yet, and factors that do not move."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.conversion.folders import float_bytes, write_safetensors
from tests.training.steps import LAYERS, LR, Values, save, weights

RANK = 4
MODULES = tuple(
    f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(LAYERS) for name in "qv"
)


def adapter(zero: bool) -> Values:
    """Return the factors of four pairs by PEFT's names; `zero`: each B is, as before training."""
    rng = np.random.default_rng(3)
    made = {}
    for module in MODULES:
        size = {name: w.shape[0] for name, w in weights().items()}[f"{module}.weight"]
        b = np.zeros((size, RANK)) if zero else rng.normal(0, 0.02, (size, RANK))
        name = f"base_model.model.{module}"
        made[f"{name}.lora_A.weight"] = rng.normal(0, 0.1, (RANK, 64)).astype(np.float32)
        made[f"{name}.lora_B.weight"] = b.astype(np.float32)
    return made


def gradients(before: Values) -> Values:
    """Return gradients of the factors, of one size."""
    rng = np.random.default_rng(4)
    return {
        name: np.sign(rng.normal(size=w.shape)).astype(np.float32) for name, w in before.items()
    }


def stepped(before: Values, still: Callable[[str], bool]) -> Values:
    """Return the factors after a first step of Adam; `still` says which do not move."""
    return {
        name: w if still(name) else (w - LR * gradients(before)[name]).astype(np.float32)
        for name, w in before.items()
    }


def write(folder: Path, values: Values) -> Path:
    """Write an adapter as PEFT does."""
    folder.mkdir()
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "base", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(
        folder / "adapter_model.safetensors", {n: w.shape for n, w in values.items()},
        {n: float_bytes(w, "F32") for n, w in values.items()}, "F32",
    )  # fmt: skip
    return folder


def report_of(folder: Path, zero: bool, still: Callable[[str], bool]) -> StepReport:
    """Return what is said of a first step of an adapter."""
    before = adapter(zero)
    return explain_step(
        save(folder / "base", weights(), "BF16"), adapter=write(folder / "before", before),
        after=write(folder / "after", stepped(before, still)), optimizer=f"adam:lr={LR},step=1",
    )  # fmt: skip
