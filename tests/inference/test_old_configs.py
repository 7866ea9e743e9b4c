"""Configs as older transformers wrote them give the logits transformers gives them.

`rope_theta`, `rope_scaling` (`type` or `rope_type`), `partial_rotary_factor` and gemma3's local
base at the top level, no `layer_types`. Both sides read the very same config.json.

Seen red: `rope_local_base_freq` and `sliding_window_pattern` not looked at, a `type` for a
`rope_type` taken as no scaling, the partial factor left at 1.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.inference.judge import backend, everything_float64, rel
from tests.models import IDS, save_tiny

# transformers 5 reads gemma3's scaling by its new name only, and loses olmo3's base on the way.
NAMES = (
    "llama", "llama-linear", "llama-dynamic", "llama-yarn-factor", "llama-llama3", "qwen2",
    "qwen2-yarn", "gemma2", "phi2", "phi3-short", "phi3-long", "gpt_oss", "stablelm", "cohere",
    "smollm3", "qwen2_moe", "deepseek_v3-yarn",
)  # fmt: skip
CASES = [*((name, word) for name in NAMES for word in ("type", "rope_type")),
         ("gemma3", "rope_type")]  # fmt: skip


def old(config: dict[str, Any], word: str) -> dict[str, Any]:
    """Return a new config as an older transformers would have written it."""
    found = dict(config)
    found["torch_dtype"] = found.pop("dtype")
    rope = found.pop("rope_parameters")
    if "full_attention" in rope:
        found["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        found["sliding_window_pattern"] = 3
        rope = rope["full_attention"]
    top = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling: dict[str, Any] | None = {k: v for k, v in rope.items() if k not in top}
    assert scaling is not None
    name = scaling.pop("rope_type")
    if config["model_type"] == "phi3":
        scaling.pop("original_max_position_embeddings", None)  # at the top level there
    if name == "default":
        scaling = None
    else:
        scaling[word] = name
    found.pop("layer_types", None)
    return found | top | {"rope_scaling": scaling}


@pytest.mark.parametrize(("name", "word"), CASES)
def test_an_old_config_is_read_as_transformers_reads_it(
    name: str, word: str, tmp_path: Path
) -> None:
    import transformers

    save_tiny(name, tmp_path)
    path = tmp_path / "config.json"
    config = old(json.loads(path.read_text()), word)
    assert not {"rope_parameters", "layer_types", "dtype"} & config.keys()
    path.write_text(json.dumps(config))
    loader: Any = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        model.set_experts_implementation("eager")
    model, ids = model.double().eval(), torch.tensor([IDS])
    with torch.no_grad():
        model(ids)  # settles frequencies that depend on the length, in float32
        with everything_float64(model):
            expected = model(ids).logits[0].numpy()
    with open_model(tmp_path) as opened:
        with Session.open(opened, backend("numpy:float64")) as session:
            found = session.logits(IDS)
    assert rel(found, expected) < 1e-12
    assert np.isfinite(found).all()


# Keys of the files that MiniMax published -> those of transformers.
PUBLISHED = {
    f"layernorm_{part}_{kind}": f"{name}_{kind}_factor"
    for part, name in (
        ("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"),
    )
    for kind in ("alpha", "beta")
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["minimax_text_01", "minimax_m1"])
def test_minimaxs_own_config_is_read_as_transformers_one(model_type: str, tmp_path: Path) -> None:
    """The keys of MiniMax-Text-01's config.json, on the same weights.

    Seen red: `attn_type_list` and the factors not looked at.
    """
    save_tiny("minimax", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    with open_model(tmp_path) as opened, Session.open(opened, backend("numpy:float64")) as session:
        expected = session.logits(IDS)
    kinds = config.pop("layer_types")
    config |= {key: config.pop(name) for key, name in PUBLISHED.items()}
    config |= {
        "model_type": model_type,
        "architectures": ["MiniMaxText01ForCausalLM"],
        "attn_type_list": [int(kind == "full_attention") for kind in kinds],
        "rope_theta": config.pop("rope_parameters")["rope_theta"],
        "postnorm": True,
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
    }
    path.write_text(json.dumps(config))
    with open_model(tmp_path) as opened, Session.open(opened, backend("numpy:float64")) as session:
        np.testing.assert_array_equal(session.logits(IDS), expected)
        assert opened.resolution.report.unknown == ()
    path.write_text(json.dumps(config | {"rotary_dim": 6}))
    with open_model(tmp_path) as opened:
        assert opened.hyper["rope_dim"] == 6
