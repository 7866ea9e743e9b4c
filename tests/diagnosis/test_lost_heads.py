"""An output head that config.json demands and the file lacks is lost: no embedding stands for it.

Seen red: the head of the file without one was said to be a copy of the embedding, and the command
that was proposed ties the head, which hides the loss; a bias lost with its layer was counted apart.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.run import aprfmt as command
from tests.conversion.folders import tensors_of
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder

TIED, HEAD, TABLE = "tie_word_embeddings", "lm_head.weight", "model.embed_tokens.weight"


def lost(arch: str, name: str, edit: Callable[[files.Rows], None]) -> tuple[Path, Path]:
    """Return a folder whose head is not tied, and its copy after an edit of its tensors."""
    a = files.copy(tiny_folder(arch), f"lost-{name}-a", config={TIED: False})
    return a, files.copy(a, f"lost-{name}-b", tensors=edit)


def dropped_layer(layer: int, *more: str) -> Callable[[files.Rows], None]:
    """Return the edit that leaves out a layer of qwen3_5 and the tensors of these names."""

    def edit(rows: files.Rows) -> None:
        for name in list(rows):
            if f"layers.{layer}." in name or name.endswith(more):
                del rows[name]

    return edit


@pytest.mark.parametrize("against", ["folder", "gguf"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_lost_head_is_missing(against: str, swapped: bool, tmp_path: Path) -> None:
    a, b = lost("llama", f"head-{against}-{swapped}", files.drop(HEAD))
    if against == "gguf":
        assert command("convert", a, tmp_path / "a.gguf").code == 0
        a = tmp_path / "a.gguf"
    sides = (b, a) if swapped else (a, b)
    told = command("diff", *sides, "--json")
    rows = [row for row in told.json["tensors"] if row["key"] == "output.weight"]
    assert told.code == 1 and not told.json["causes"] and not told.json["hyperparameters"]
    assert [row["verdict"] for row in rows] == [f"ONLY_IN_{'B' if swapped else 'A'}"]
    answer = command("diagnose", *sides, "--json")
    (cause,) = answer.json["causes"]
    assert (answer.code, cause["cause"]) == (1, "missing_tensors")
    assert cause["says"].startswith("A lacks" if swapped else "B lacks")
    for one in (told, answer):
        assert not any(TIED in line for line in one.json["next"])


def test_a_layer_lost_with_the_head_is_one_loss() -> None:
    """Of a layer of a delta net, whose dt_bias has no weight of its own."""
    a, b = lost("qwen3_5", "layer", dropped_layer(0, HEAD))
    found = command("diagnose", a, b, "--json")
    (cause,) = found.json["causes"]
    lost_rows = len(tensors_of(a)) - len(tensors_of(b))
    assert cause["cause"] == "missing_tensors" and cause["where"][0] == HEAD
    assert f"lacks {lost_rows} of the tensors" in cause["says"]


def test_a_bias_lost_alone_is_a_bias() -> None:
    a, b = lost("qwen3_5", "bias", files.drop("layers.0.linear_attn.dt_bias"))
    causes = command("diagnose", a, b, "--json").json["causes"]
    assert [one["cause"] for one in causes] == ["missing_bias"]


def test_a_copy_of_the_embedding_may_be_left_out() -> None:
    """The innocent: nothing is lost with a head that every reader of the embedding has."""

    def copied(rows: files.Rows) -> None:
        rows[HEAD] = rows[TABLE]

    a = files.copy(tiny_folder("llama"), "copied-head-a", tensors=copied, config={TIED: False})
    b = files.copy(a, "copied-head-b", tensors=files.drop(HEAD), config={TIED: True})
    assert command("diff", a, b).code == command("diagnose", a, b).code == 0
    c = files.copy(a, "copied-head-c", tensors=files.drop(HEAD))
    causes = command("diagnose", a, c, "--json").json["causes"]  # the flag of the copy is wrong
    assert [one["cause"] for one in causes] == ["tied_embedding"]
