"""Tokens under other ids, with their rows or without them.

Seen red: both halves were causes of their own, confirmed, of one and the same model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from tests.cli import run
from tests.diagnosis.faults import DEMO
from tests.field import hf

VOCAB = 1536
TABLE = "model.embed_tokens.weight"


def numbering(first: int, last: int = VOCAB) -> list[int]:
    """Return the new id of each token: those from `first` to `last` are shuffled."""
    order = np.arange(VOCAB)
    order[first:last] = np.random.default_rng(first).permutation(order[first:last])
    return [int(i) for i in order]


def rows(order: list[int], wrong: int = 0) -> Callable[[hf.State], None]:
    """Return an editor that puts every row where its token is now; the first `wrong` are scaled."""

    def edit(state: hf.State) -> None:
        old = state[TABLE].clone()
        state[TABLE][order] = old
        state[TABLE][:wrong] *= 2

    return edit


def ids(order: list[int]) -> dict[str, Callable[[str], str]]:
    """Return editors of the files that state ids."""

    def pieces(values: Any) -> None:
        vocab = values["model"]["vocab"]
        values["model"]["vocab"] = {text: order[i] for text, i in vocab.items()}
        for token in values["added_tokens"]:
            token["id"] = order[token["id"]]

    def settings(values: Any) -> None:
        for key, value in values.items():
            if key.endswith("_token_id"):
                values[key] = [order[i] for i in value] if isinstance(value, list) else order[value]

    return {
        "tokenizer.json": hf.json_edit(pieces),
        "generation_config.json": hf.json_edit(settings),
        "config.json": hf.json_edit(settings),
    }


def renumbered(name: str, order: list[int], *, tables: bool = True, texts: bool = True,
               wrong: int = 0) -> Path:  # fmt: skip
    """Return the demo model with other ids; `tables` and `texts` say what follows the numbering."""
    files = ids(order) if texts else {}
    config = files.pop("config.json", None)
    there = hf.copy(
        DEMO, f"numbered-{name}", rows(order, wrong) if tables or wrong else None, files=files
    )
    if config is not None:
        path = there / "config.json"
        path.write_text(config(path.read_text()))
    return there


@pytest.mark.parametrize("first", [300, 1200, 1500])
def test_another_numbering_of_tokens_is_the_same_model(first: int) -> None:
    """From 1500 on marks, ends and padding move too, and the settings with them."""
    order = numbering(first)
    there = renumbered(f"both-{first}", order)
    moved = sum(i != j for i, j in enumerate(order))
    for pair in ((DEMO, there), (there, DEMO)):
        found = diagnose(*map(str, pair))
        assert (found.kind, found.cause, found.exit_code) == ("same", "token_numbering", 0)
        assert f"{moved} of {VOCAB} tokens have other ids" in found.sentence
        assert len(found.findings) == 1 and not found.next
        said = "forward pass: not needed, all that it reads is equal by the tokens' texts"
        assert found.checked[-1] == said


@pytest.mark.parametrize(
    ("kind", "cause"),
    [({"tables": False}, "tokenizer_pieces"), ({"texts": False}, "row_offset"), ({"wrong": 1}, "")],
    ids=["ids-alone", "rows-alone", "one-row-wrong"],
)
def test_half_a_numbering_is_a_fault(kind: dict[str, Any], cause: str) -> None:
    there = renumbered("half-" + "-".join(kind), numbering(300, 1500), **kind)
    found = diagnose(str(DEMO), str(there))
    assert found.exit_code == 1
    assert not cause or found.cause == cause
    assert "token_numbering" not in {one.cause for one in found.findings}


def test_ids_that_stand_still_in_the_settings_are_a_fault() -> None:
    """The end is another token then, though the tokenizer and its rows agree."""
    there = renumbered("settings", numbering(1500))
    (there / "generation_config.json").write_text((DEMO / "generation_config.json").read_text())
    assert diagnose(str(DEMO), str(there)).kind == "bug"


def test_a_run_is_not_compared_under_another_numbering(tmp_path: Path) -> None:
    there, path = renumbered("run", numbering(300)), tmp_path / "run.safetensors"
    assert run.aprfmt("trace", there, "--payload", "--ids", "1,2,3", "-o", path).code == 0
    found = diagnose(str(DEMO), str(path), model=str(there))
    assert found.exit_code == 2 and "ids of the two mean other tokens" in found.sentence
