"""Gradients and the update made of them are two questions: one may be right and one wrong.

Seen red: of a right update of wrong gradients nothing was said, and the whole step was blamed.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.training.test_factors import Tensors, trained

RULE, RULED = "sgd:lr=0.1", "the updates are what sgd makes of the given gradients"
RIGHT = "the given gradients are those of the batch"
GUESSES = "the given gradients are of weights that guess, as untrained ones do"


def drawn(grads: Tensors) -> Tensors:
    """Return gradients of no relation to the right ones, as of weights that were never loaded."""
    made = torch.Generator().manual_seed(3)
    return {key: 0.01 * torch.randn(value.shape, generator=made) for key, value in grads.items()}


def stepped(
    folder: Path, given: Callable[[Tensors], Tensors], rate: Callable[[str], float]
) -> StepReport:
    """Return the answer for a step with `given` gradients, each tensor with its own rate."""
    model, batch, right = trained("llama", "float32")
    grads = given(right)
    after = folder / "after"
    shutil.copytree(model, after)
    held = load_file(after / "model.safetensors")
    moved = {key: value - rate(key) * grads.get(key, 0) for key, value in held.items()}
    save_file(moved, after / "model.safetensors", metadata={"format": "pt"})
    save_file(grads, folder / "grads.safetensors")
    return explain_step(
        model, after=after, grads=[folder / "grads.safetensors"], optimizer=RULE, batch=batch
    )


def test_a_right_update_of_wrong_gradients_is_said_to_be_right(tmp_path: Path) -> None:
    found = stepped(tmp_path, drawn, lambda key: 0.1)
    assert found.exit_code == 1 and len(found.causes) == 1
    count = len(found.tensors)
    assert f"the gradients of all {count} parameters are other ones" in found.causes[0].says
    assert "of other weights than this checkpoint's" in found.causes[0].says
    assert not any(GUESSES in note for note in found.notes)
    assert any(f"{RULED}, in all {count} tensors" in note for note in found.notes)


def untrained(size: float) -> Tensors:
    """Return transformers' gradients of the batch by weights drawn anew, of one standard deviation.

    They are those of a model into which no checkpoint was loaded.
    """
    model, batch, _ = trained("llama", "float32")
    other = LlamaForCausalLM.from_pretrained(model)
    made = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for key, value in other.named_parameters():
            if "norm" not in key:
                value.copy_(size * torch.randn(value.shape, generator=made))
    held = {key: torch.from_numpy(value) for key, value in np.load(batch).items()}
    ids, mask, labels = (held[key] for key in ("input_ids", "attention_mask", "labels"))
    logits = other(ids, attention_mask=mask).logits[:, :-1].float()
    loss: Any = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    return {key: p.grad for key, p in other.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("size", "guesses"), [(0.02, True), (0.6, False)])
def test_gradients_of_weights_that_were_not_loaded(
    size: float, guesses: bool, tmp_path: Path
) -> None:
    """Seen red: "what happened is not known", of a head whose rows are one row. Sure ones are not.

    Weights of a large standard deviation give unlike probabilities.
    """
    found = stepped(tmp_path, lambda right: untrained(size), lambda key: 0.1)
    assert "of other weights than this checkpoint's, or of another batch" in found.causes[0].says
    assert any(GUESSES in note for note in found.notes) == guesses


def test_where_some_gradients_are_right_nothing_is_said_of_other_weights(tmp_path: Path) -> None:
    def some(right: Tensors) -> Tensors:
        return {key: value if "norm" in key else drawn(right)[key] for key, value in right.items()}

    found = stepped(tmp_path, some, lambda key: 0.1)
    assert found.exit_code == 1
    assert not any("other weights" in cause.says for cause in found.causes)


def test_gradients_of_another_factor_and_their_right_update(tmp_path: Path) -> None:
    """A relative: the cause of the gradients is known, and the update is still the rule's."""
    found = stepped(tmp_path, lambda grads: {k: 2 * v for k, v in grads.items()}, lambda key: 0.1)
    assert [row.cause for row in found.causes] == ["gradient_factor"]
    assert any(RULED in note for note in found.notes)


def test_a_wrong_update_of_right_gradients_is_said_so(tmp_path: Path) -> None:
    found = stepped(tmp_path, lambda grads: grads, lambda key: 0.1 if "norm" in key else 0.05)
    assert {row.cause for row in found.causes} == {"step_factor"}
    assert any(RIGHT in note for note in found.notes)
    assert not any(RULED in note for note in found.notes)


def test_wrong_gradients_and_a_wrong_update_are_both_wrong(tmp_path: Path) -> None:
    found = stepped(tmp_path, drawn, lambda key: 0.1 if "norm" in key else 0.03)
    ruled = [note for note in found.notes if RULED in note]
    norms = sum("norm" in row.key for row in found.tensors)
    assert len(ruled) == 1 and f"in {norms} of {len(found.tensors)} tensors" in ruled[0]
    assert not any(RIGHT in note for note in found.notes)


@pytest.mark.parametrize("words", [RULED, RIGHT])
def test_a_right_step_needs_neither_sentence(tmp_path: Path, words: str) -> None:
    found = stepped(tmp_path, lambda grads: grads, lambda key: 0.1)
    assert found.exit_code == 0 and not any(words in note for note in found.notes)
