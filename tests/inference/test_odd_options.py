"""Options that a config.json may have: transformers' numbers, or one line that says why not.

The cases are those that a sweep over every field of every architecture's configuration found to
give other numbers without a word. Seen red: every case of REFUSED and mpnet's without its check;
nomic's epsilon and its refused `prenorm`, jina's base without their keys.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from aprfmt.errors import ArchError
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.inference.encoders import ENCODERS, IDS, encoded, made, write_pooling
from tests.inference.judge import backend, everything_float64, rel
from tests.models import IDS as TOKENS
from tests.models import save_tiny

# architecture, changed options, what is said
REFUSED: tuple[tuple[str, Mapping[str, Any], str], ...] = (
    ("deepseek_v3", {"num_experts_per_tok": 6}, "which have 4 experts; expected at least the 6"),
    ("glm4_moe", {"topk_group": 1}, "1 of 4 groups of experts are kept, which have 2 experts"),
    ("ernie4_5_moe", {"moe_norm_min": 1.0}, "moe_norm_min: is 1.0; expected at most 1e-09"),
    ("dots1", {"topk_group": 1}, "1 of 4 groups of experts are kept, which have 2 experts"),
)


@pytest.mark.parametrize(("arch", "changed", "says"), REFUSED)
def test_what_is_not_known_is_one_line(
    arch: str, changed: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    save_tiny(arch, tmp_path, **changed)
    with pytest.raises(ArchError, match=says) as caught, open_model(tmp_path) as model:
        Session.open(model, backend("numpy:float64"))
    assert "\n" not in str(caught.value)


def embedding(folder: Path) -> tuple[np.ndarray, Any]:
    """Return a folder's embedding in float64, and how its keys were used."""
    with open_model(folder) as model, Session.open(model, backend("numpy:float64")) as session:
        return session.embedding(IDS), model.resolution.report


def test_groups_that_are_not_looked_at_may_be_small(tmp_path: Path) -> None:
    changed: Mapping[str, Any] = {"topk_method": "greedy", "topk_group": 1}
    model = save_tiny("deepseek_v2", tmp_path, **changed).double()
    with torch.no_grad(), everything_float64(model):
        expected = model(torch.tensor([TOKENS])).logits[0].numpy()
    with open_model(tmp_path) as opened, Session.open(opened, backend("numpy:float64")) as session:
        assert rel(session.logits(TOKENS), expected) < 1e-12


def test_mpnets_buckets_are_transformers_own(tmp_path: Path) -> None:
    made("mpnet", tmp_path, relative_attention_num_buckets=31)
    with pytest.raises(ArchError, match="num_buckets: is 31; expected 32"):
        embedding(tmp_path)


def test_heads_of_nomic_bert_may_have_a_size_of_their_own(tmp_path: Path) -> None:
    expected = made("nomic_bert", tmp_path, head_dim=10)
    found, report = embedding(tmp_path)
    assert rel(found, expected) < 1e-12 and report.unknown == ()


@pytest.mark.parametrize("name", ENCODERS)
def test_no_key_of_an_encoder_is_unknown(name: str) -> None:
    assert embedding(encoded(name).folder)[1].unknown == ()


# As nomic-embed-text-v1.5 and jina-embeddings-v3 are published, with code of their own.
NOMIC = {
    "activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0,
    "causal": False, "dense_seq_output": True, "embd_pdrop": 0.0, "fused_bias_fc": True,
    "fused_dropout_add_ln": True, "layer_norm_epsilon": 3e-4, "max_trained_positions": 40,
    "mlp_fc1_bias": False, "mlp_fc2_bias": False, "model_type": "nomic_bert", "n_embd": 36,
    "n_head": 3, "n_inner": 50, "n_layer": 4, "n_positions": 61, "pad_vocab_size_multiple": 64,
    "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False,
    "qkv_proj_bias": False, "reorder_and_upcast_attn": False, "resid_pdrop": 0.0,
    "rotary_emb_base": 500, "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None, "rotary_scaling_factor": None, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "summary_activation": None,
    "summary_first_dropout": 0.0, "summary_proj_to_labels": True, "summary_type": "cls_index",
    "summary_use_proj": True, "type_vocab_size": 3, "use_cache": True, "use_flash_attn": True,
    "use_rms_norm": False, "use_xentropy": True, "vocab_size": 57,
}  # fmt: skip
JINA = {
    "architectures": ["XLMRobertaModel"], "attention_probs_dropout_prob": 0.1, "emb_pooler": None,
    "hidden_act": "gelu", "hidden_size": 36, "intermediate_size": 50, "layer_norm_eps": 3e-4,
    "load_trained_adapters": True, "lora_adaptations": ["retrieval.query", "text-matching"],
    "lora_alpha": 1, "lora_dropout_p": 0.0, "lora_main_params_trainable": False, "lora_rank": 4,
    "matryoshka_dimensions": [8, 16], "max_position_embeddings": 61, "model_type": "xlm-roberta",
    "num_attention_heads": 3, "num_hidden_layers": 4, "output_past": True, "pad_token_id": 1,
    "position_embedding_type": "rotary", "rotary_emb_base": 500.0, "task_instructions": {},
    "truncate_dim": None, "type_vocab_size": 3, "use_flash_attn": True, "use_reentrant": False,
    "vocab_size": 57,
}  # fmt: skip


def published(name: str, config: Mapping[str, Any], folder: Path) -> dict[str, np.ndarray]:
    """Write a tiny encoder's configuration under published keys; return its tensors."""
    write_pooling(folder, "mean")
    (folder / "config.json").write_text(json.dumps(config))
    return load_file(encoded(name).folder / "model.safetensors")


def test_nomics_published_keys_are_read(tmp_path: Path) -> None:
    tensors = published("nomic_bert", NOMIC, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found, report = embedding(tmp_path)
    assert rel(found, encoded("nomic_bert").embedding) < 1e-12
    assert report.unknown == () and report.conflicts == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [("prenorm", True), ("rotary_emb_fraction", 0.5), ("num_experts", 8),
     ("activation_function", "gelu")],
)  # fmt: skip
def test_other_blocks_of_nomics_code_are_refused(key: str, value: Any, tmp_path: Path) -> None:
    tensors = published("nomic_bert", {**NOMIC, key: value}, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArchError, match=f"{key}: is "):
        embedding(tmp_path)


def test_jinas_published_matrices_are_originals_beside_adapters(tmp_path: Path) -> None:
    """Without a task the published code adds none of the adapters."""
    stored = {}
    for name, values in published("jina_embeddings_v3", JINA, tmp_path).items():
        if values.ndim == 1:
            stored[f"roberta.{name}"] = values
            continue
        base = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        stored[f"{base}.original"] = values
        for part, axis in (("lora_A", 1), ("lora_B", 0)):
            stored[f"{base}.0.{part}"] = np.ones((2, 4, values.shape[axis]), np.float32)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    found, report = embedding(tmp_path)
    assert rel(found, encoded("jina_embeddings_v3").embedding) < 1e-12
    assert report.unknown == ()
    assert "adapters for retrieval.query, text-matching; the model runs" in report.conflicts[0].text
    with open_model(tmp_path) as model:
        assert model.spec.name == "jina_embeddings_v3" and model.resolution.missing == ()
        assert all("lora_" in name for name in model.resolution.unbound)
