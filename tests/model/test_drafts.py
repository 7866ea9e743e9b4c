"""Drafts of speculative decoding are called so, and lack no tensor of the model that they serve.

Seen red: "10 tensors are missing, get the file again" of a whole draft, since its config.json has
the model_type of its target.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.run import aprfmt

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 16,
    "vocab_size": 64, "draft_vocab_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
DRAFT: dict[str, tuple[int, ...]] = {
    "fc.weight": (16, 48), "norm.weight": (16,), "lm_head.weight": (24, 16),
    "midlayer.hidden_norm.weight": (16,), "midlayer.self_attn.q_proj.weight": (16, 32),
}  # fmt: skip


def draft(folder: Path, left_out: str = "") -> Path:
    """Write an EAGLE-3 draft of random numbers, without one tensor."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    held: dict[str, Any] = {name: rng.normal(size=DRAFT[name]).astype("f4") for name in DRAFT}
    chosen = np.sort(rng.choice(64, 24, replace=False))
    held |= {"d2t": chosen - np.arange(24), "t2d": np.isin(np.arange(64), chosen)}
    held.pop(left_out, None)
    save_file(held, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_a_draft_is_called_one_and_no_damaged_model(tmp_path: Path) -> None:
    said = aprfmt("inspect", draft(tmp_path / "draft")).out
    assert "is a draft of speculative decoding (EAGLE)" in said and "nothing says" not in said
    checked = aprfmt("validate", tmp_path / "draft")
    assert checked.code == 2 and "missing" not in checked.out and "get the file" not in checked.out


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_draft_without_a_map_of_its_ids_is_named(name: str, tmp_path: Path) -> None:
    said = aprfmt("inspect", draft(tmp_path / "draft", name)).out
    assert f"it has 24 of 64 tokens and no {name}, so that nothing says" in said


def test_a_model_with_a_product_of_that_name_is_no_draft(demo_model: Path) -> None:
    assert "draft" not in aprfmt("inspect", demo_model).out
