"""Keys of config.json that transformers does not compute with: the logits are its own.

Seen red: the rotated part of a head taken in llama, gemma3's scores capped, one of two equal keys
called unknown.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.arch import ARCHS
from aprfmt.arch.hyperparameters import expected_losses, read_hyper
from aprfmt.arch.spec import Facts
from aprfmt.errors import ArchError
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.inference.judge import backend, rel
from tests.models import IDS, MAKERS, NO_ROPE, save_tiny

# What reads it; phi3's is its maker's.
PARTIAL = {
    "phi2": 0.5, "phi3": 0.75, "stablelm": 0.5, "nemotron": 0.5, "glm": 0.5, "glm4": 0.5,
    "glm4_moe": 0.5, "minimax_m2": 0.5, "gpt_neox": 0.5, "qwen3_next": 0.5, "qwen3_5": 0.5,
    "qwen3_5_moe": 0.5, "bamba": 0.5, "deepseek_v4": 0.5,
    "minimax_m3_vl": 0.5,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0}
# Read from an object for each type of layers only.
NESTED = ("gemma4", "gemma4_unified", "lfm3")
# An object a layer type, or longrope only.
OTHERWISE_SCALED = ("gemma3", "olmo3", "phi3", "phimoe", *NESTED)


def theirs(model: Any) -> np.ndarray | None:
    """Return transformers' logits, None where it fails on a size of its own."""
    try:
        with torch.no_grad():
            logits: np.ndarray = model(torch.tensor([IDS])).logits[0].double().numpy()
    except RuntimeError as error:
        assert "must match the size" in str(error) or "sum exactly to" in str(error)
        return None
    return logits


def ours(folder: Path) -> tuple[np.ndarray, Any, Any]:
    """Return logits, hyperparameters and the key report."""
    with open_model(folder) as opened:
        with Session.open(opened, backend("numpy:float64")) as session:
            return session.logits(IDS), opened.hyper, opened.resolution.report


@pytest.mark.parametrize(
    ("arch", "scaled"),
    [
        (arch, scaled)
        for arch in MAKERS
        for scaled in (False, True)
        if arch not in (*NO_ROPE, "gptj") and not (scaled and arch in OTHERWISE_SCALED)
    ],
)
def test_a_rotated_part_counts_where_transformers_reads_it(
    arch: str, scaled: bool, tmp_path: Path
) -> None:
    """Most rotate whole heads; where a scaling is there too, transformers fails and we refuse."""
    options: dict[str, Any] = {} if arch == "phi3" else {"partial_rotary_factor": 0.5}
    if scaled:
        options["rope_parameters"] = dict(LINEAR)
    expected = theirs(save_tiny(arch, tmp_path, **options))
    if expected is None:
        with pytest.raises(ArchError, match=r"partial_rotary_factor is 0\.5.* and fails"):
            ours(tmp_path)
        return
    found, hp, report = ours(tmp_path)
    assert rel(found, expected) < 1e-4
    said = [one for one in report.conflicts if "partial_rotary_factor is 0.5" in one.text]
    if arch in PARTIAL:
        assert hp["rope_dim"] == hp["head_dim"] * PARTIAL[arch] and not said
    else:
        part = "in layers with a window" if arch in NESTED else "of this architecture"
        assert len(said) == 1 and f"rotates whole heads {part}: ignored" in said[0].text
    assert not [key for key in report.unknown if "partial" in key]


@pytest.mark.parametrize("arch", ["phi3", "llama", "gemma3"])
def test_the_same_key_twice_is_not_unknown(arch: str, tmp_path: Path) -> None:
    save_tiny(arch, tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    part = 0.75 if arch == "phi3" else 1.0
    config["partial_rotary_factor"] = part
    rope = config["rope_parameters"]
    for inner in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        inner["partial_rotary_factor"] = part
    path.write_text(json.dumps(config))
    _, hp, report = ours(tmp_path)
    assert hp["rope_dim"] == hp["head_dim"] * part
    assert (report.unknown, report.conflicts) == ((), ())


def test_a_gguf_that_rotates_a_part_is_a_loss_in_config_json() -> None:
    keys = {
        "llama.embedding_length": 24,
        "llama.block_count": 2,
        "llama.attention.head_count": 3,
        "llama.feed_forward_length": 40,
        "llama.vocab_size": 11,
        "llama.context_length": 64,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 4,
    }
    for dim, lost in ((4, ["rope_dim"]), (8, [])):
        facts = Facts("gguf", keys | {"llama.rope.dimension_count": dim}, {}, "llama")
        hp, _ = read_hyper(ARCHS["llama"], facts, "m.gguf")
        assert hp["rope_dim"] == dim
        assert [loss.name for loss in expected_losses(ARCHS["llama"], hp, "hf")] == lost


def test_gemma3s_scores_are_not_capped(tmp_path: Path) -> None:
    expected = theirs(save_tiny("gemma3", tmp_path, attn_logit_softcapping=0.5))
    assert expected is not None
    assert json.loads((tmp_path / "config.json").read_text())["attn_logit_softcapping"] == 0.5
    found, hp, report = ours(tmp_path)
    assert rel(found, expected) < 1e-4 and hp["attn_softcap"] is None
    assert tuple(map(str, report.conflicts)) == (
        "attn_logit_softcapping is 0.5; transformers and llama.cpp do not cap gemma3's scores: "
        "ignored",
    )
