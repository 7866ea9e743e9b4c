"""Padding that a recorded mask hides, and that an encoder attends to or pools.

Seen red: a mean over padding was "not what no operation makes of token ids", and tokens that saw
the padding behind them had no cause. Without the mask over the rows of padding their mean was
another one.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis.records import Diagnosis
from tests.inference.encoders import encoded, write_pooling

TEXT, PAD = [1, 17, 30, 41, 8, 50, 2], 4
Pool = Callable[[Any, Any], Any]


def encoder(folder: Path, kind: str) -> Path:
    """Return a copy of the tiny BERT whose folder states a pooling."""
    shutil.copytree(encoded("bert").folder, folder)
    write_pooling(folder, kind)
    return folder


def judged(
    folder: Path, kind: str, pool: Pool, *, sees: bool = False, left: bool = False
) -> Diagnosis:
    """Return the answer on a run with padding; `pool` makes the embedding of rows and mask."""
    model = encoder(folder / "model", kind)
    padding = [0] * PAD
    ids = torch.tensor([padding + TEXT if left else TEXT + padding])
    mask = torch.tensor([[0] * PAD + [1] * len(TEXT) if left else [1] * len(TEXT) + [0] * PAD])
    at = (mask.cumsum(1) - 1).clamp(min=0)
    torch_model = AutoModel.from_pretrained(model).eval()
    with torch.no_grad():
        rows = torch_model(
            ids, attention_mask=None if sees else mask, position_ids=at if left else None
        ).last_hidden_state[0]
    arrays = {
        "input_ids": ids[0],
        "attention_mask": mask[0],
        "last_hidden_state": rows,
        "sentence_embedding": pool(rows, mask[0] > 0)[None],
    }
    run = folder / "run.safetensors"
    save_file({name: x.clone() for name, x in arrays.items()}, run)
    return diagnose(str(model), str(run))


def mean(rows: Any, text: Any) -> Any:
    """Return the mean of the text's rows."""
    return rows[text].mean(0)


@pytest.mark.parametrize(
    ("kind", "pool", "says"),
    [
        ("mean", lambda rows, text: rows.mean(0), "the mean is of 11 rows"),
        ("mean", lambda rows, text: rows[text].sum(0) / len(rows), "divided by 11"),
        ("last", lambda rows, text: rows[-1], "the last row is one of padding"),
    ],
)
def test_rows_of_padding_in_an_embedding(kind: str, pool: Pool, says: str, tmp_path: Path) -> None:
    found = judged(tmp_path, kind, pool)
    assert (found.cause, found.confidence, found.exit_code) == ("pooling", "confirmed", 1)
    assert found.complete and says in found.sentence, found.sentence


def test_tokens_that_see_padding_behind_them(tmp_path: Path) -> None:
    found = judged(tmp_path, "mean", mean, sees=True)
    assert (found.cause, found.confidence, found.exit_code) == ("visible_padding", "confirmed", 1)
    assert "see the 4 tokens of padding behind them" in found.sentence, found.sentence


@pytest.mark.parametrize("left", [False, True])
def test_a_right_encoder_is_not_accused(left: bool, tmp_path: Path) -> None:
    found = judged(tmp_path, "mean", mean, left=left)
    assert (found.kind, found.exit_code) == ("precision", 0), found.sentence


def test_another_embedding_is_located_only(tmp_path: Path) -> None:
    found = judged(tmp_path, "mean", lambda rows, text: rows[text][1:].mean(0))
    assert found.confidence != "confirmed" and found.exit_code == 1
    assert "no operation makes" not in found.sentence
