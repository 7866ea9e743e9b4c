"""Engines in short arithmetic of which few points are known: right ones, and ones with a fault.

torch computes in the dtype itself, or with products rounded and everything else in float32 (then
nothing in the dump says so). All dumps are saved as float32, as people do.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import Diagnosis, diagnose
from tests.diagnosis.engines import place
from tests.field.captures import rounded
from tests.field.foreign import Keep, Patch, dump, dumped, every, layers_only
from tests.field.hf import base, copy
from tests.models import IDS

Tensor = Any


def logits_only(key: str) -> bool:
    """Keep the logits."""
    return key == "logits"


def _products(kind: str) -> Patch:
    """Return a patch: products in TF32, in a 16-bit type, or with sums in bfloat16 as well."""
    import torch

    def made(module: Any, x: Tensor) -> Tensor:
        w = module.weight.data
        if kind == "tf32":
            y = rounded(x, 10) @ rounded(w, 10).T
        elif kind == "sums":
            y = torch.zeros(*x.shape[:-1], w.shape[0])
            for k in range(w.shape[1]):
                y = (y + x[..., k : k + 1] * w[:, k]).bfloat16().float()
        else:
            dtype = getattr(torch, kind)
            y = (x.to(dtype).float() @ w.to(dtype).float().T).to(dtype).float()
        return y if module.bias is None else y + module.bias

    def patch(module: Any) -> None:
        module.forward = lambda x: made(module, x)

    return every("Linear", patch)


def _ask(
    arch: str,
    name: str,
    keep: Keep,
    how: str,
    config: dict[str, Any] | None = None,
    ids: Sequence[int] = IDS,
) -> Diagnosis:
    """Diagnose an engine that reads `config` for the model's own values, and rounds by `how`."""
    name = f"rounded-{arch}-{name}-{keep.__name__}-{how}"
    folder = base(arch)
    short = how in ("bfloat16", "float16")
    patches = () if short or how == "float32" else (_products(how.removeprefix("products-")),)
    if config is None:
        made = dump(arch, name, *patches, ids=ids, keep=keep, dtype=how if short else "float32")
        return diagnose(*(str(side) for side in made()))
    other, path = copy(folder, f"{name}-config", config=config), place(f"field-{name}.npz")
    dumped(other, path, patches, ids, keep, how if short else "float32")
    return diagnose(str(folder), str(path))


HOW = ("bfloat16", "float16", "products-tf32", "products-bfloat16")
RIGHT = (
    *[(arch, layers_only, how) for arch in ("llama", "qwen2_moe") for how in HOW],
    ("gemma2", logits_only, "bfloat16"), ("gemma2", layers_only, "float16"),
    ("llama", logits_only, "products-tf32"), ("llama", logits_only, "float16"),
)  # fmt: skip
FOUND = (
    *[("norm_eps", logits_only, how) for how in HOW], ("softcap", layers_only, "products-tf32"),
    ("softcap", logits_only, "bfloat16"), ("sliding_window", layers_only, "products-bfloat16"),
    ("sliding_window", logits_only, "float16"),
)  # fmt: skip


@pytest.mark.parametrize(("arch", "keep", "how"), RIGHT)
def test_a_right_engine_in_short_arithmetic_is_precision(arch: str, keep: Keep, how: str) -> None:
    found = _ask(arch, "right", keep, how)
    assert found.verdict == "precision", found.findings
    assert [finding.cause for finding in found.findings] == ["rounding"]
    # What only the size of the differences shows is not confirmed.
    assert found.confidence == ("confirmed" if how in HOW[:2] or _tells(found) else "unconfirmed")


def _tells(found: Diagnosis) -> bool:
    """Say whether the recorded values are all of a 16-bit type."""
    with np.load(found.b) as arrays:
        return all(
            np.array_equal(rounded_numpy(arrays[key]), arrays[key])
            for key in arrays.files
            if key != "input_ids"
        )


def rounded_numpy(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return values as bfloat16 holds them, by torch."""
    import torch

    return torch.from_numpy(x).bfloat16().float().numpy()


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_sums_held_in_bfloat16_are_precision(arch: str) -> None:
    assert _ask(arch, "right", layers_only, "products-sums").verdict == "precision"


@pytest.mark.parametrize("ids", [IDS[:3], IDS[:1], (7,) * 12], ids=["three", "one", "repeated"])
def test_short_and_repeating_prompts_too(ids: tuple[int, ...]) -> None:
    found = _ask("qwen3", f"right{len(ids)}", layers_only, "bfloat16", ids=ids)
    assert found.verdict == "precision", found.findings


FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "norm_eps": ("llama", {"rms_norm_eps": 1e-5}),
    "softcap": ("gemma2", {"attn_logit_softcapping": None}),
    "sliding_window": ("mistral", {"sliding_window": 9}),
}


@pytest.mark.parametrize(("cause", "keep", "how"), FOUND)
def test_a_fault_beyond_the_rounding_is_found(cause: str, keep: Keep, how: str) -> None:
    arch, config = FAULTS[cause]
    found = _ask(arch, cause, keep, how, config)
    assert found.verdict == "bug"
    sure = {finding.cause for finding in found.findings if finding.confirmed}
    assert sure <= {cause}
    assert cause in {finding.cause for finding in found.findings}


def test_a_fault_inside_the_rounding_is_named_where_it_has_a_direction() -> None:
    found = _ask("qwen3", "faint", layers_only, "bfloat16", {"rms_norm_eps": 1e-6})
    assert (found.verdict, found.cause, found.confidence) == ("bug", "norm_eps", "unconfirmed")


def test_what_cannot_be_told_from_rounding_is_said() -> None:
    """Gelu by erf for gelu by tanh: 1e-4, in a run whose rounding is 1e-2."""
    config = {"hidden_activation": "gelu"}
    found = _ask("gemma2", "gelu", layers_only, "bfloat16", config)
    assert found.verdict == "precision"
    assert any("cannot be told from rounding" in line for line in found.not_checked)
    seen = _ask("gemma2", "gelu", layers_only, "float32", config)
    assert (seen.verdict, seen.cause) == ("bug", "activation")


def test_a_wrong_number_in_float32_is_not_taken_for_rounding() -> None:
    """What a layer adds is 2 % too large: as far off as bfloat16, and in a direction."""
    told = json.loads((Path(base("granite")) / "config.json").read_text())["residual_multiplier"]
    found = _ask("granite", "scaled", logits_only, "float32", {"residual_multiplier": told * 1.02})
    assert found.verdict == "bug"
