"""The sentence about a norm's offset says what the engine multiplies by, in the file's weights."""

from pathlib import Path

import pytest

import aprfmt
from aprfmt.causes.forward.norm import norm_offset_changes
from aprfmt.inference.replay.patched_model import PatchedModel
from tests.models import save_tiny

# The architecture, whether a GGUF is asked -> what is meant, then the two wrong weights.
WORDS = (
    ("gemma", False, "1 + w", ("2 + w", "w")),
    ("gemma", True, "w", ("1 + w", "w - 1")),
    ("nemotron", False, "1 + w", ("2 + w", "w")),
    ("nemotron", True, "w", ("1 + w", "w - 1")),
    ("qwen3_5", False, "1 + w", ("2 + w", "w")),
    ("qwen3_5", True, "w", ("1 + w", "w - 1")),
    ("llama", False, "w", ("1 + w", "w - 1")),
    ("llama", True, "w", ("1 + w", "w - 1")),
)


@pytest.mark.parametrize(("arch", "gguf", "meant", "wrong"), WORDS)
def test_a_norms_weights_are_those_of_the_file(
    arch: str, gguf: bool, meant: str, wrong: tuple[str, str], tmp_path: Path
) -> None:
    save_tiny(arch, tmp_path / "a")
    path = tmp_path / "a"
    if gguf:
        path = tmp_path / "a.gguf"
        aprfmt.convert(tmp_path / "a", path, source_hash=False)
    with aprfmt.open(path) as model:
        patched = PatchedModel.unpatched(model, [1, 2, 3], "float32")
        says = [change.says for change in norm_offset_changes(patched)]
    assert says == [
        f"the norms multiply by {got}, where {meant} is meant (w is their weight in the file)"
        for got in wrong
    ]
