"""Labels of padding in a trainer's batch, and arrays that say which labels are scored.

The losses are torch's cross-entropy of transformers' logits under the batch's attention mask.
Seen red: labels behind the mask that nobody counts; padding that attends to padding; flags moved to
the wrong token.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import FormatError
from aprfmt.inference.batch import Batch, read_batch
from tests.cli.run import aprfmt

torch = pytest.importorskip("torch")
tiny = pytest.importorskip("tests.models")

VOCAB, TOKENS, PAD = 97, 24, 0
LENGTHS, PROMPTS = np.array([24, 15, 19])[:, None], np.array([5, 4, 7])[:, None]
AT = np.arange(TOKENS)
MASK, ANSWER = AT < LENGTHS, AT >= PROMPTS
IDS = np.where(MASK, np.random.default_rng(7).integers(3, VOCAB, MASK.shape), PAD)
RIGHT = np.where(MASK & ANSWER, IDS, -100)


@dataclass(frozen=True)
class Model:
    """A tiny llama of transformers and the folder it was saved in."""

    folder: Path
    module: Any

    def loss(self, labels: Any) -> float:
        """Return transformers' loss of the batch under its attention mask."""
        given = (torch.tensor(each) for each in (IDS, MASK.astype(int), labels))
        ids, mask, wanted = given
        with torch.no_grad():
            return float(self.module(ids, attention_mask=mask, labels=wanted).loss)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("padding")
    yield Model(folder, tiny.save_tiny("llama", folder))


def saved(folder: Path, **arrays: Any) -> Path:
    """Write a batch of the ids, the mask and further arrays."""
    path = folder / "batch.npz"
    np.savez(path, **({"input_ids": IDS, "attention_mask": MASK.astype(np.int8)} | arrays))
    return path


def checks(model: Model, path: Path, *words: object) -> dict[str, Any]:
    """Return `eval`'s checks of a batch by their names."""
    done = aprfmt("eval", model.folder, "--batch", path, *words, "--json").json
    return {row["name"]: row for row in done["gate"]["checks"]}


SCORED_PADDING: dict[str, tuple[Any, int]] = {
    "all of it": (np.where(ANSWER, IDS, -100), int((~MASK).sum())),
    "shifted in the file": (
        np.pad(np.where(ANSWER, IDS, -100)[:, 1:], ((0, 0), (0, 1)), constant_values=-100),
        int((~MASK).sum()),
    ),
    "one row's": (np.where(ANSWER & (MASK | (LENGTHS == 15)), IDS, -100), 9),
}


@pytest.mark.parametrize("name", SCORED_PADDING)
def test_labels_behind_the_mask_are_counted(name: str, model: Model, tmp_path: Path) -> None:
    labels, count = SCORED_PADDING[name]
    found = checks(model, saved(tmp_path, labels=labels))["padding-unscored"]
    assert found["outcome"] == "FAIL" and found["found"].startswith(f"{count} labels of tokens")


@pytest.mark.parametrize(
    ("name", "stated"), [("all of it", True), ("one row's", True), ("all of it", False)]
)
def test_a_loss_of_padding_that_sees_the_text_alone_is_named(
    name: str, stated: bool, model: Model, tmp_path: Path
) -> None:
    """Also where the file's labels are right, and the trainer put others in their place."""
    labels, _ = SCORED_PADDING[name]
    path = saved(tmp_path, labels=labels if stated else RIGHT)
    found = checks(model, path, "--reported", f"{model.loss(labels):.6f}")["loss-reported"]
    assert found["outcome"] == "FAIL" and "attend to the text alone" in found["found"]
    right = checks(model, path, "--reported", f"{model.loss(RIGHT):.6f}")["loss-reported"]
    assert right["outcome"] == "PASS"


def test_batches_whose_padding_is_not_scored_pass(model: Model, tmp_path: Path) -> None:
    found = checks(model, saved(tmp_path, labels=RIGHT), "--reported", f"{model.loss(RIGHT):.6f}")
    assert found["padding-unscored"]["outcome"] == found["loss-reported"]["outcome"] == "PASS"
    assert "padding-unscored" not in checks(model, saved(tmp_path))  # all of the mask is scored
    whole = saved(tmp_path, labels=IDS, attention_mask=np.ones_like(MASK))
    assert "padding-unscored" not in checks(model, whole)


FIRST = MASK | (AT == LENGTHS)  # the first token of the padding as well


@pytest.mark.parametrize("ends", [(), (PAD,)])
@pytest.mark.parametrize("shift", [0, 1])
def test_the_end_of_a_text_may_have_the_id_of_padding(
    ends: tuple[int, ...], shift: int, tmp_path: Path
) -> None:
    """The mask is made of the id: the end is a label wherever the file has its label."""
    labels = np.where(FIRST & ANSWER, IDS, -100)
    moved = np.pad(labels[:, shift:], ((0, 0), (0, shift)), constant_values=-100)
    batch = read_batch(saved(tmp_path, labels=moved), VOCAB, ends)
    assert batch.padding_labels == (0 if ends else 2)
    if ends:
        assert np.array_equal(batch.label[:, :-1], FIRST & ANSWER)


@pytest.mark.parametrize("name", ["more padding is scored", "the text has an end already"])
def test_padding_is_no_end(name: str, tmp_path: Path) -> None:
    ids, kept = IDS.copy(), FIRST & ANSWER
    if name == "more padding is scored":
        kept = kept | (AT == LENGTHS + 1)
    else:
        ids[AT == LENGTHS - 1] = PAD
    batch = read_batch(
        saved(tmp_path, input_ids=ids, labels=np.where(kept, ids, -100)), VOCAB, {PAD}
    )
    assert batch.padding_labels == int((kept & ~MASK).sum()) and np.array_equal(batch.mask, MASK)


@pytest.fixture(scope="module")
def ending(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return the model with the id of padding as the end of a text."""
    folder = tmp_path_factory.mktemp("ending") / "m"
    shutil.copytree(model.folder, folder)
    for path in folder.glob("*config.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": PAD}))
    return Model(folder, model.module)


def test_the_loss_of_padding_that_is_an_end_is_named(ending: Model, tmp_path: Path) -> None:
    """Seen red: with the first token of all padding left out of it, as the end of a text."""
    labels, count = SCORED_PADDING["all of it"]
    path = saved(tmp_path, labels=labels)
    found = checks(ending, path, "--reported", f"{ending.loss(labels):.6f}")
    assert found["padding-unscored"]["found"].startswith(f"{count} labels of tokens")
    assert "attend to the text alone" in found["loss-reported"]["found"]


def test_the_loss_of_ends_behind_the_mask_is_right(ending: Model, tmp_path: Path) -> None:
    labels = np.where(FIRST & ANSWER, IDS, -100)
    path = saved(tmp_path, labels=labels)
    found = checks(ending, path, "--reported", f"{ending.loss(labels):.6f}")
    assert found["padding-unscored"]["outcome"] == found["loss-reported"]["outcome"] == "PASS"
    assert "ends a scored text 2 times, 2 are labels" in found["ends-scored"]["found"]


# --- arrays of 0 and 1 ---------------------------------------------------------------------------


def scored(path: Path) -> tuple[Batch, set[tuple[int, int]]]:
    """Return a batch and the places of its labels."""
    batch = read_batch(path, VOCAB)
    return batch, {(int(row), int(at)) for row, at in np.argwhere(batch.label)}


WANTED = {(int(row), int(at)) for row, at in np.argwhere(RIGHT >= 0)}
NEXT = np.pad((MASK & ANSWER)[:, 1:], ((0, 0), (0, 1)))  # the flag of the token after each row
NEXT_IDS = np.pad(IDS[:, 1:], ((0, 0), (0, 1)), constant_values=PAD)
FLAGGED: dict[str, dict[str, Any]] = {
    "labels of all tokens": {"labels": np.where(MASK, IDS, -100), "loss_mask": MASK & ANSWER},
    "labels shifted in the file": {"labels": NEXT_IDS, "loss_mask": NEXT},
    "no labels, of rows": {"loss_mask": NEXT},
    "no labels, of tokens": {"completion_mask": MASK & ANSWER},
    "as floats": {"assistant_masks": (MASK & ANSWER).astype(np.float32)},
}


@pytest.mark.parametrize("name", FLAGGED)
def test_an_array_says_which_labels_are_scored(name: str, tmp_path: Path) -> None:
    batch, places = scored(saved(tmp_path, **FLAGGED[name]))
    assert places == WANTED and not batch.unread and batch.padding_labels == 0


def test_flags_of_padding_are_counted(tmp_path: Path) -> None:
    batch, places = scored(saved(tmp_path, labels=IDS, loss_mask=ANSWER))
    assert places == WANTED and batch.padding_labels == int((~MASK).sum())


@pytest.mark.parametrize("flags", [MASK * 0.5, MASK[:, 1:], MASK.astype(int) * 2])
def test_weights_of_labels_are_refused(flags: Any, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="expected 0 and 1"):
        read_batch(saved(tmp_path, labels=RIGHT, loss_mask=flags), VOCAB)
