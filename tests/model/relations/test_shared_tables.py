"""A tied model whose one table is stored under the head's name, and not the embedding's.

transformers 5 ties it back; llama.cpp, vLLM and older versions find no embedding.

Seen red: "B lacks 1 of the tensors", and `set tie_word_embeddings=false`.
"""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.cli.run import aprfmt

LLAMA = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "gpt2": (GPT2Config, GPT2LMHeadModel, GPT2, "transformer.wte.weight"),
    "llama": (LlamaConfig, LlamaForCausalLM, LLAMA, "model.embed_tokens.weight"),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, LLAMA, "model.embed_tokens.weight"),
}


@pytest.mark.parametrize("case", MODELS)
def test_the_head_is_read_as_the_embedding(case: str, tmp_path: Path) -> None:
    config, model, sizes, table = MODELS[case]
    torch.manual_seed(0)
    model(config(**sizes)).save_pretrained(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    file = tmp_path / "b" / "model.safetensors"
    rows = load_file(file)
    rows["lm_head.weight"] = rows.pop(table)
    save_file(rows, file, metadata={"format": "pt"})
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / side) for side in "ab")
    ids = torch.arange(8)[None]
    assert torch.equal(one(ids).logits, other(ids).logits)
    told = aprfmt("diagnose", tmp_path / "a", tmp_path / "b", "--json").json
    (cause,) = told["causes"]
    assert cause["cause"] == "tensor_names"
    said = aprfmt("validate", tmp_path / "b").out
    assert f"lm_head.weight stands for {table}" in said
    assert "missing" not in said and "tie_word_embeddings" not in said
    words = shlex.split(cause["remedy"]["command"])
    words = [str(tmp_path / "out") if word == "OUT" else word for word in words]
    assert aprfmt(*words[1:], "--to", "safetensors").code == 0
    assert aprfmt("diff", tmp_path / "a", tmp_path / "out").code == 0


def test_an_untied_model_without_its_embedding_lacks_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA | {"tie_word_embeddings": False})).save_pretrained(
        tmp_path
    )
    file = tmp_path / "model.safetensors"
    rows = load_file(file)
    del rows["model.embed_tokens.weight"]
    save_file(rows, file, metadata={"format": "pt"})
    said = aprfmt("validate", tmp_path)
    assert said.code == 1 and "token_embd.weight: missing" in said.out
