"""A LoRA whose pairs were merged into other layers than their own.

The models are transformers', the sums numpy's. Seen red: only neighbouring layers were tried, so
that pairs that went on from the last layer to the first, or two layers off, were "otherwise", and
nothing said that all were equally far off.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import save_file

import aprfmt
from aprfmt.adapters import AdapterAnswer, answer_merge

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

LAYERS, RANK, ALPHA = 12, 2, 4
MODULES = {"self_attn.q_proj": "attn_q", "mlp.up_proj": "ffn_up"}
UP = "the pairs were merged {} too far up: that of layer N into layer N{}"


@cache
def base_state(kind: str) -> dict[str, Any]:
    """Return the tensors of a tiny Llama, in torch's type of this name."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(config()).to(getattr(torch, kind))
    return {name: value.clone() for name, value in model.state_dict().items()}


def config() -> Any:
    """Return the configuration of a Llama of twelve layers."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=LAYERS, vocab_size=64, tie_word_embeddings=False,
    )  # fmt: skip


def write(folder: Path, state: dict[str, Any]) -> Path:
    """Write a model's folder."""
    folder.mkdir()
    config().save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"architectures": ["LlamaForCausalLM"]}))
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def answered(tmp_path: Path, kind: str, source: Callable[[int], int | None]) -> AdapterAnswer:
    """Return what is said of a merge in which layer N has the pair of layer `source(N)`."""
    rng = np.random.default_rng(5)
    state = base_state(kind)
    pairs: dict[str, Any] = {}
    changes: dict[tuple[int, str], Any] = {}
    for layer in range(LAYERS):
        for module in MODULES:
            name = f"model.layers.{layer}.{module}"
            rows, columns = state[f"{name}.weight"].shape
            down, up = (
                torch.tensor(rng.normal(0, 0.1, shape), dtype=torch.float32)
                for shape in ((RANK, columns), (rows, RANK))
            )
            pairs |= {f"base_model.model.{name}.lora_{end}.weight": one
                      for end, one in (("A", down), ("B", up))}  # fmt: skip
            changes[layer, module] = ALPHA / RANK * up.double() @ down.double()
    merged = dict(state)
    for layer in range(LAYERS):
        for module in MODULES:
            name, whose = f"model.layers.{layer}.{module}.weight", source(layer)
            if whose is not None:
                total = merged[name].double() + changes[whose, module]
                merged[name] = total.to(merged[name].dtype)
    a, b = write(tmp_path / "a", state), write(tmp_path / "b", merged)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    said = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
            "target_modules": [one.rpartition(".")[2] for one in MODULES]}  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(said))
    save_file(pairs, adapter / "adapter_model.safetensors")
    with aprfmt.open(a) as one, aprfmt.open(b) as other:
        return answer_merge(one, other, adapter)[0]


def as_text(layer: int) -> int:
    """Return the layer that stands at this place where numbers are sorted as text."""
    return sorted(range(LAYERS), key=str)[layer]


# which pair layer N got -> the sentence on all of them ("" for none)
OFF: dict[str, tuple[Callable[[int], int | None], str]] = {
    "next": (lambda n: (n - 1) % LAYERS, UP.format("1 layer", "+1") + ", counted on"),
    "next, the last nowhere": (lambda n: n - 1 if n else None, UP.format("1 layer", "+1")),
    "before": (
        lambda n: (n + 1) % LAYERS,
        "merged 1 layer too far down: that of layer N into layer N-1",
    ),
    "three on": (lambda n: (n - 3) % LAYERS, UP.format("3 layers", "+3")),
    "sorted as text": (as_text, ""),
    "backwards": (lambda n: LAYERS - 1 - n, ""),
}


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", OFF)
def test_pairs_in_other_layers_are_named(case: str, kind: str, tmp_path: Path) -> None:
    source, says = OFF[case]
    found = answered(tmp_path, kind, source)
    assert found.differs
    for one in found.weights:
        layer = int(one.key[1:].partition(".")[0])
        whose = source(layer)
        role = one.key.partition(".")[2]
        if whose is None:
            assert one.found == "not at all"
        elif whose == layer:
            assert one.found == "once"
        else:
            assert (one.found, one.source) == ("another weight's change", f"L{whose}.{role}")
    together = [text for text in found.says if "too far" in text]
    assert bool(together) == bool(says) and says in "".join(together), together


def test_a_sound_merge_is_once(tmp_path: Path) -> None:
    found = answered(tmp_path, "bfloat16", lambda layer: layer)
    assert found.is_merged_once and not found.says
