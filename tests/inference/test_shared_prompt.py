"""Prompts that are masked by column in rows with padding before the text.

The batches are made here; the losses are torch's cross-entropy of the rows' own logits. Seen red:
labels of first tokens counted as scored; rows with padding after the text not left out; labels
compared by column alone; masked columns counted from where the text begins.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.batch import ScoredSample, SharedPrompt, find_shared_prompt, read_batch
from aprfmt.inference.reported_loss import explain_loss
from tests.cli.run import aprfmt

VOCAB, TOKENS, PAD = 97, 16, 0
PROMPT = [11, 45, 90, 3, 13, 77]
RNG = np.random.default_rng(5)


def made(
    texts: list[tuple[list[int], list[int]]], masked: list[int] | None = None, right: bool = False
) -> dict[str, Any]:
    """Return ids, labels and mask of rows (prompt, answer) with padding before them.

    `masked` are the columns of each row whose labels are masked; None for those of the prompt.
    `right` puts the padding after the text.
    """
    ids = np.full((len(texts), TOKENS), PAD)
    mask, labels = np.zeros_like(ids), np.full_like(ids, -100)
    for i, (prompt, answer) in enumerate(texts):
        start = 0 if right else TOKENS - len(prompt + answer)
        stop = start + len(prompt + answer)
        ids[i, start:stop], mask[i, start:stop] = prompt + answer, 1
        first = start + len(prompt) if masked is None else max(start, masked[i])
        labels[i, first:stop] = ids[i, first:stop]
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def answers(*lengths: int) -> list[list[int]]:
    """Return answers of random tokens, of these lengths."""
    return [[int(i) for i in RNG.integers(3, VOCAB, n)] for n in lengths]


def found(folder: Path, arrays: dict[str, Any]) -> SharedPrompt | None:
    """Return what rows share by the batch of these arrays."""
    np.savez(folder / "b.npz", **arrays)
    return find_shared_prompt(read_batch(folder / "b.npz", VOCAB))


def shifted(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays with the labels shifted in the file."""
    labels = np.pad(arrays["labels"][:, 1:], ((0, 0), (0, 1)), constant_values=-100)
    return arrays | {"labels": labels}


def flagged(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays with flags of the tokens in place of labels."""
    kept = {name: each for name, each in arrays.items() if name != "labels"}
    return kept | {"completion_mask": arrays["labels"] >= 0}


SAME = [(PROMPT, each) for each in answers(10, 8, 9, 6)]
FAR = [(PROMPT, each) for each in answers(10, 3, 9)]  # one row has more padding than prompt
SHORT = [(PROMPT, each) for each in answers(8, 7, 5)]  # every row has padding
OTHERS = [(PROMPT, answers(10)[0]), (PROMPT, answers(7)[0]), ([8, 9, 7], answers(9)[0])]
BY_COLUMN: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "all labels in one column": (made(SAME, [6] * 4), (0, 6, 3, 6, 7, 3, 3)),
    "shifted in the file": (shifted(made(SAME, [6] * 4)), (0, 6, 3, 6, 7, 3, 3)),
    "flags of tokens": (flagged(made(SAME, [6] * 4)), (0, 6, 3, 6, 7, 3, 3)),
    "more padding than prompt": (made(FAR, [6] * 3), (0, 6, 2, 6, 6, 2, 2)),
    "no row without padding": (made(SHORT, [6] * 3), (0, 4, 2, 6, 4, 2, 2)),
    "another prompt beside it": (made(OTHERS, [6] * 3), (0, 6, 1, 6, 3, 1, 1)),
}


@pytest.mark.parametrize("name", BY_COLUMN)
def test_prompts_masked_by_column_are_counted(name: str, tmp_path: Path) -> None:
    arrays, expected = BY_COLUMN[name]
    assert found(tmp_path, arrays) == SharedPrompt(*expected)


TURN, NEXT = [21, 22, 23], [31, 32]
SOUND: dict[str, tuple[dict[str, Any], bool]] = {
    "masked by token": (made(SAME), True),
    "masked by token, no row without padding": (made(SHORT), True),
    "masked by token, shifted in the file": (shifted(made(SAME)), True),
    "all of the text is scored": (made([([], p + a) for p, a in SAME]), True),
    "padding after the text": (made(SAME, right=True), False),
    "prompts of unlike lengths": (
        made([([*PROMPT, *[n] * n], each) for n, each in enumerate(answers(9, 8, 5, 6))]), True
    ),
    "other prompts, answers in one column": (
        made([([5, 6, 7, 8], answers(8)[0]), ([6, 8], answers(8)[0])]), False
    ),
    "a system prompt before unlike questions": (
        made([([*PROMPT, 7, 8, 9], answers(7)[0]), ([*PROMPT, 9], answers(7)[0])]), False
    ),
    "turns of a chat, each a row": (
        made([(PROMPT + TURN + NEXT, answers(5)[0]), (PROMPT, [*TURN, 2])]), False
    ),
    "prompts that the answers of others begin with": (
        made([(PROMPT + TURN, [4] * 7), (PROMPT, [*TURN, 4, 5]), (PROMPT, [*TURN, 6])]), False
    ),
    "one row": (made(SAME[:1]), False),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_sound_batches_have_no_scored_prompt(name: str, tmp_path: Path) -> None:
    arrays, told = SOUND[name]
    shared = found(tmp_path, arrays)
    assert (shared is not None) == told
    assert shared is None or not shared.scored


def test_answers_that_begin_in_one_column_are_no_prompts(tmp_path: Path) -> None:
    """Prompts are padded before them and answers after them, as samplers write a batch."""
    rows = [PROMPT + TURN, PROMPT, PROMPT + TURN[:2]]
    arrays = made([(each, (PROMPT + TURN + [4] * 7)[len(each) :][:7]) for each in rows])
    shared = found(tmp_path, arrays)
    assert shared is not None and shared.paddings == 2
    for name, fill in (("input_ids", PAD), ("labels", -100), ("attention_mask", 0)):
        arrays[name][1, -1] = fill
    assert found(tmp_path, arrays) is None


def test_a_file_without_labels_or_with_packed_rows_tells_no_prompt(tmp_path: Path) -> None:
    arrays = made(SAME, [6] * 4)
    assert found(tmp_path, {k: v for k, v in arrays.items() if k != "labels"}) is None
    numbers = np.where(np.arange(TOKENS) < 12, 0, 1) + np.zeros_like(arrays["input_ids"])
    assert found(tmp_path, arrays | {"document_ids": numbers}) is None


def test_the_command_fails_where_columns_are_masked(tmp_path: Path) -> None:
    aprfmt("demo", "--into", tmp_path / "m")
    for name, arrays, outcome in (
        ("column", made(FAR, [6] * 3), "FAIL"),
        ("token", made(FAR), "PASS"),
        ("one padding", made(OTHERS, [6] * 3), "NOT_RUN"),
        ("right", made(FAR, right=True), None),
    ):
        np.savez(tmp_path / f"{name}.npz", **arrays)
        done = aprfmt("eval", tmp_path / "m", "--batch", tmp_path / f"{name}.npz", "--json")
        checks = {row["name"]: row for row in done.json["gate"]["checks"]}
        check = checks.get("prompt-masked")
        assert (check["outcome"] if check else None) == outcome
        if outcome == "FAIL":
            assert check is not None and "6 are scored in 2 of 2 rows" in check["found"]
            assert "labels begin in column 6" in check["found"]
            assert "which padding predicts: 1" in check["found"]


def test_a_loss_of_labels_by_column_is_named_where_the_file_is_right(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    arrays, wrong = made(SAME), made(SAME, [6] * 4)
    np.savez(tmp_path / "b.npz", **arrays)
    batch = read_batch(tmp_path / "b.npz", VOCAB)
    logits = torch.tensor(np.random.default_rng(2).normal(0, 2, (len(SAME), TOKENS, VOCAB)))
    ids = torch.tensor(arrays["input_ids"])

    def mean(labels: Any) -> float:
        """Return torch's mean loss of labels that the rows before them predict."""
        rows = logits[:, :-1].reshape(-1, VOCAB)
        given = torch.tensor(labels)[:, 1:].reshape(-1)
        return float(torch.nn.functional.cross_entropy(rows, given, ignore_index=-100))

    losses = np.full((len(SAME), 3, TOKENS), np.nan)
    logs = torch.log_softmax(logits, -1)
    losses[:, 1, :-1] = -logs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].numpy()
    scored = [ScoredSample(each, each) for each in losses]
    assert explain_loss(batch, scored, mean(arrays["labels"])).says == "agrees"
    answer = explain_loss(batch, scored, mean(wrong["labels"]))
    assert answer.says == "named" and answer.distinct_mistakes == (("prompt_scored",),)
    assert "column 0" in answer.guesses[0].detail
