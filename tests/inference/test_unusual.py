"""Valid models and prompts of unusual sizes give transformers' logits, in every format.

Seen red: a window of one position that saw two, rope where no layer rotates, GQA groups of another
size, listed windows left out because a switch is off, a gate that took the MLP's activation, one
expert where transformers always takes two.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import aprfmt
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.inference.judge import backend, everything_float64, rel
from tests.inference.odd import ODD_IDS, SIZES, changes
from tests.models import IDS, MAKERS, save_tiny

ONE_HEAD = {"num_attention_heads": 1, "num_key_value_heads": 1}
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama", {"num_hidden_layers": 1, "vocab_size": 131}),
    ("llama", ONE_HEAD | {"head_dim": 6}),
    ("qwen2", {"num_hidden_layers": 1, "use_sliding_window": False, "sliding_window": None}),
    ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}),
    ("mistral", {"sliding_window": 1}),
    ("mistral", {"sliding_window": len(IDS)}),
    ("gemma", {"num_hidden_layers": 1, "num_key_value_heads": 4}),
    ("gemma2", {"sliding_window": 1, "num_hidden_layers": 1}),
    ("gemma3", {"sliding_window": 1, "num_key_value_heads": 1}),
    ("gpt_oss", {"sliding_window": 1, "num_experts_per_tok": 6}),
    ("gpt2", {"n_head": 1, "n_layer": 1, "n_positions": len(IDS)}),
    ("olmo3", {"sliding_window": 2, "num_key_value_heads": 4}),
    ("smollm3", {"no_rope_layers": [0] * 5}),
    ("smollm3", {
        "layer_types": [*["full_attention", "sliding_attention"] * 2, "full_attention"],
        "sliding_window": 5,
    }),
    ("cohere2", {"head_dim": 20}),
    ("phimoe", {"num_experts_per_tok": 1}),
    ("qwen3_5", {"hidden_act": "gelu"}),
    ("phi3", {"sliding_window": 1}),
    ("starcoder2", {"sliding_window": 2, "num_hidden_layers": 1}),
    ("mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    ("mixtral", {"num_experts_per_tok": 6}),
    ("qwen2_moe", {"num_experts": 1, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("deepseek_v2", {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    ("deepseek_v3", {"first_k_dense_replace": 0, "num_hidden_layers": 1, "n_shared_experts": 1}),
    ("deepseek_v3", {"first_k_dense_replace": 3, "n_group": 1, "topk_group": 1}),
)  # fmt: skip


@pytest.mark.parametrize("arch", MAKERS)
def test_odd_sizes(arch: str, tmp_path: Path) -> None:
    """The sizes that GPU kernels are tried with: their reference is transformers' too."""
    model = save_tiny(arch, tmp_path, **changes(arch, SIZES["50"])).double()
    ids = torch.tensor([ODD_IDS])
    with torch.no_grad():
        model(ids)
        with everything_float64(model):
            expected = model(ids).logits[0].numpy()
    with open_model(tmp_path) as opened:
        with Session.open(opened, backend("numpy:float64")) as session:
            assert rel(session.logits(ODD_IDS), expected) < 1e-12
        with Session.open(opened, backend("numpy:float32")) as session:
            assert rel(session.logits(ODD_IDS), expected) < 5e-6


@pytest.mark.parametrize(("name", "changed"), CASES, ids=lambda part: str(part)[:60])
def test_unusual_sizes(name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = save_tiny(name, folder, **changed).double()
    ids = torch.tensor([IDS])
    with torch.no_grad():
        model(ids)
        with everything_float64(model):
            expected = model(ids).logits[0].numpy()
    b = backend("numpy:float64")
    with open_model(folder) as opened, Session.open(opened, b) as session:
        found = session.logits(IDS)
        assert rel(found, expected) < 1e-12
        assert rel(session.logits(IDS[:1]), expected[:1]) < 1e-12
        steps = np.stack([session.prefill(IDS[:1])[0], *(session.step(i) for i in IDS[1:])])
        assert rel(steps, expected) < 1e-12
    with open_model(folder) as opened, Session.open(opened, backend("torch:float32")) as session:
        assert rel(session.logits(IDS), expected) < 5e-6
    dense = name == "qwen3_moe"  # GGUF has no name for its dense layers
    for extension in ("apr",) if dense else ("apr", "gguf"):
        aprfmt.convert(folder, tmp_path / f"m.{extension}")
        with open_model(tmp_path / f"m.{extension}") as opened:
            with Session.open(opened, b) as session:
                np.testing.assert_array_equal(session.logits(IDS), found)
