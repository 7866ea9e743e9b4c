"""A GGUF whose own key names another architecture than the config.json it carries.

Other programs read that key alone. Seen red: equal and same, with exit 0.
"""

from pathlib import Path

import pytest

from tests.cli.run import aprfmt as command

KEY = "general.architecture"
CHANGES = {
    "another known one": (f"{KEY}=llama",),
    "another that runs with other steps": (f"{KEY}=gemma2",),
    "an unknown one": (f"{KEY}=mystery",),
    "none": ("--remove", KEY),
}


@pytest.fixture(scope="module")
def whole(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo as a GGUF that carries its config.json."""
    there = tmp_path_factory.mktemp("architecture") / "whole.gguf"
    assert command("convert", demo_model, there).code == 0
    return there


@pytest.mark.parametrize("against", ["the gguf", "the folder"])
@pytest.mark.parametrize("change", CHANGES)
def test_the_files_own_key_counts(
    change: str, against: str, whole: Path, demo_model: Path, tmp_path: Path
) -> None:
    """It differs on either side, and the printed command mends the file."""
    a, b = whole if against == "the gguf" else demo_model, tmp_path / "b.gguf"
    assert command("set", whole, *CHANGES[change], "-o", b).code == 0
    done = command("diff", a, b, "--json")
    assert done.code == command("diff", b, a).code == command("validate", b).code == 1
    (row,) = done.json["hyperparameters"]
    stated = "none stated" if change == "none" else CHANGES[change][0].partition("=")[2]
    assert (row["name"], row["b"]) == ("architecture", stated) and row["a"] not in ("", stated)
    done = command("diagnose", a, b, "--json")
    (cause,) = done.json["causes"]
    assert (done.code, cause["cause"], cause["level"]) == (1, "architecture_key", "confirmed")
    words = cause["remedy"]["command"].split()
    mended = tmp_path / "mended.gguf"
    assert command(*words[1:-1], mended).code == 0
    assert command("diagnose", a, mended).code == command("diff", a, mended).code == 0


@pytest.mark.parametrize(
    "change",
    [
        "rope.freq_base=5.0", "attention.layer_norm_rms_epsilon=0.1", "attention.head_count=8",
        "attention.key_length=32", "block_count=3", "feed_forward_length=77",
        "embedding_length=77",
    ],
)  # fmt: skip
def test_every_other_key_of_its_own_counts_too(change: str, whole: Path, tmp_path: Path) -> None:
    b = tmp_path / "b.gguf"
    assert command("set", whole, f"qwen2.{change}", "-o", b).code == 0
    assert command("diff", whole, b).code == 1
    assert command("diagnose", whole, b).code == 1
