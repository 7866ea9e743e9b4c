"""Sizes that config.json lost, where a default is not the model's: the tensors say them.

Seen red: every shape was said to be wrong, and no key.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.cli.run import aprfmt

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
LOST = {
    "head-dim": ("llama", {"head_dim": 32}, "head_dim", 32),
    "smaller-heads": ("llama", {"head_dim": 8}, "head_dim", 8),
    "kv-heads": ("llama", {}, "num_key_value_heads", 2),
    "head-dim-of-another-default": ("qwen3", {"head_dim": 32}, "head_dim", 32),
}


@pytest.mark.parametrize("case", LOST)
def test_a_lost_size_is_found_and_can_be_set(case: str, tmp_path: Path) -> None:
    kind, more, key, value = LOST[case]
    make, model = MODELS[kind]
    torch.manual_seed(0)
    model(make(**SIZES | more)).save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config.pop(key) == value
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    said = aprfmt("validate", tmp_path / "b")
    assert said.code == 1
    line, last = [line for line in said.out.splitlines() if "aprfmt set" in line]
    assert f"{key} is not there, the tensors say {value}" in line
    command = line[line.index("aprfmt set") :]
    assert last == f"next: {command}"
    words = shlex.split(command)
    assert aprfmt(*words[1:]).code == 0
    assert aprfmt("diff", tmp_path / "a", tmp_path / "b").code == 0
    assert aprfmt("validate", tmp_path / "b").code == 0
