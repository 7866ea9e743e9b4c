"""The base of an adapter's step: one that does not have the adapter's modules is refused.

Seen red, each alone: modules that the base does not have passed over; shapes of joined weights not
compared.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from aprfmt.adapters.pair_placement import with_base_names
from aprfmt.errors import UsageError
from aprfmt.model import open_model
from aprfmt.model.adapter_reading import read_adapter
from aprfmt.training.step import explain_step
from tests.adapters.test_trained_pairs import written
from tests.models import save_tiny

LLAMA = "model.layers.1.self_attn"
RECIPE = "sgd:lr=0.1"


def step(folder: Path, kind: str, modules: dict[str, tuple[int, int]]) -> str:
    """Write a right step of SGD of an adapter; return what is said of it beside a tiny base."""
    save_tiny(kind, folder / "base")
    before = written(folder / "before", "llama", modules)
    after = written(folder / "after", "llama", modules)
    values = load_file(before / "adapter_model.safetensors")
    rng = np.random.default_rng(2)
    grads = {name: rng.normal(size=w.shape).astype(np.float32) for name, w in values.items()}
    moved = {name: w - np.float32(0.1) * grads[name] for name, w in values.items()}
    save_file(moved, after / "adapter_model.safetensors")
    save_file(grads, folder / "grads.safetensors")
    report = explain_step(
        folder / "base", adapter=before, after=after, grads=[folder / "grads.safetensors"],
        optimizer=RECIPE,
    )  # fmt: skip
    return report.pronounced.says


@pytest.mark.parametrize(
    ("kind", "modules", "says"),
    [
        ("gpt2", {f"{LLAMA}.q_proj": (64, 48)}, "has no"),
        ("mamba2", {f"{LLAMA}.q_proj": (64, 48)}, "has no"),
        ("llama", {"transformer.h.1.attn.c_attn": (144, 48)}, "has no"),
        ("llama", {"model.layers.0.linear_attn.in_proj_qkv": (96, 48)}, "has no"),
        ("llama", {"model.layers.7.self_attn.q_proj": (64, 48)}, "has no"),
        ("qwen3_5", {"model.layers.0.self_attn.q_proj": (64, 48)}, "has no"),
        ("qwen3_5", {f"{LLAMA}.q_proj": (64, 48)}, "and model.layers.1.self_attn.q_proj"),
        ("phi3", {f"{LLAMA}.qkv_proj": (64, 64)}, "and model.layers.1.self_attn.qkv_proj"),
        ("llama", {f"{LLAMA}.q_proj": (48, 48)}, "expected 64 in place of 48"),
    ],
)
def test_another_base_is_refused(
    kind: str, modules: dict[str, tuple[int, int]], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="is an adapter of another base") as caught:
        step(tmp_path, kind, modules)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("llama", {f"{LLAMA}.q_proj": (64, 48)}),
        ("phi3", {f"{LLAMA}.qkv_proj": (128, 64), "model.layers.0.mlp.gate_up_proj": (144, 64)}),
        ("gpt2", {"transformer.h.1.mlp.c_fc": (192, 48)}),
        ("llama", {"layers.1.mlp.up_proj": (72, 48)}),
        ("mamba2", {"backbone.layers.1.mixer.out_proj": (45, 90)}),
    ],
)
def test_a_base_that_has_the_modules_is_right(
    kind: str, modules: dict[str, tuple[int, int]], tmp_path: Path
) -> None:
    assert step(tmp_path, kind, modules).startswith("agrees")


def test_no_pair_is_renamed_to_another_layer(tmp_path: Path) -> None:
    """Seen red: the pairs of layer 7 taken for those of layer 1, as a change of prefix."""
    save_tiny("llama", tmp_path / "base")
    module = "model.layers.7.self_attn.q_proj"
    opened, adapter = read_adapter(written(tmp_path / "adapter", "llama", {module: (64, 48)}))
    with opened, open_model(tmp_path / "base") as base:
        found, relation = with_base_names(adapter, base)
    assert [*found.pairs] == [module] and relation is None
