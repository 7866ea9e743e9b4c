"""A tensor that the other file's format has no name for, and that no pass reads, is not lost.

Seen red: a sound GGUF of an encoder was a bug, "missing_tensors" of the pooling layer, though
llama.cpp's converter and `convert --drop` leave it out.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.run import aprfmt as command

KINDS = {"bert": "pooler*", "siglip": "head.*"}  # what is left out


def saved(kind: str, there: Path) -> Path:
    """Return a folder with a tiny random encoder that has what a GGUF has no name for."""
    import transformers

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 48,
    }  # fmt: skip
    if kind == "bert":
        words = transformers.BertConfig(vocab_size=96, max_position_embeddings=66, **sizes)
        transformers.BertModel(words).save_pretrained(there)
    else:
        images = transformers.SiglipVisionConfig(image_size=32, patch_size=8, **sizes)
        transformers.SiglipVisionModel(images).save_pretrained(there)
    return there


@pytest.mark.parametrize("kind", KINDS)
def test_a_gguf_without_what_its_format_cannot_name_is_sound(kind: str, tmp_path: Path) -> None:
    good, made = saved(kind, tmp_path / "good"), tmp_path / "made.gguf"
    assert command("convert", good, made, "--drop", KINDS[kind]).code == 0
    for pair in ((good, made), (made, good)):
        done = command("diagnose", *pair, "--json")
        assert done.code == 0, done.json["causes"]
        assert {row["state"] for row in done.json["not_compared"]} >= {"no counterpart"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_without_it_has_lost_it(kind: str, tmp_path: Path) -> None:
    good, bad = saved(kind, tmp_path / "good"), saved(kind, tmp_path / "bad")
    held = load_file(bad / "model.safetensors")
    gone = KINDS[kind].rstrip("*.")
    kept = {name: tensor for name, tensor in held.items() if gone not in name}
    save_file(kept, bad / "model.safetensors", {"format": "pt"})
    done = command("diagnose", good, bad, "--json")
    assert done.code == 1
    assert "missing_tensors" in [one["cause"] for one in done.json["causes"]]
