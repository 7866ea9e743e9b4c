"""A GGUF of Gemma 2 without the keys of its caps, as converters wrote it before June 2024.

llama.cpp takes 50 and 30 then, so that the model is the same there; other programs cap nothing.

Seen red: the defaults were taken without a word.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

import aprfmt as api
from aprfmt.model.carried_files import FILES_KEY
from tests.cli.run import aprfmt

SCORES, LOGITS = "gemma2.attn_logit_softcapping", "gemma2.final_logit_softcapping"


def source(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        query_pre_attn_scalar=16,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("gone", [(), (SCORES,), (LOGITS,), (SCORES, LOGITS)])
def test_a_missing_cap_is_said_and_can_be_set(gone: Sequence[str], tmp_path: Path) -> None:
    a, full, b = source(tmp_path / "a"), tmp_path / "full.gguf", tmp_path / "b.gguf"
    api.convert(a, full)
    if gone:
        words = [
            word for key in (*gone, FILES_KEY, "aprfmt.hf_config") for word in ("--remove", key)
        ]
        assert aprfmt("set", full, *words, "-o", b).code == 0
    path = b if gone else full
    checked = aprfmt("validate", path)
    for key in (SCORES, LOGITS):
        assert (f"{key} is not there" in checked.out) is (key in gone)
    assert aprfmt("diagnose", a, path, "--json").json["verdict"] in ("same", "precision")
    words = re.findall(r"aprfmt set FILE (\S+=\S+)", checked.out)
    assert len(words) == len(gone)
    if words:
        assert aprfmt("set", b, *words, "-o", tmp_path / "mended.gguf").code == 0
        assert "is not there" not in aprfmt("validate", tmp_path / "mended.gguf").out
