"""The page's hook saves a step that is read back: our gradients of its batch are the trainer's."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from aprfmt.training.saved_step import SavedStep
from tests.docs.examples import DOCS, blocks
from tests.models import IDS, tiny

PAGE = DOCS / "how-to" / "save_a_training_step.md"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the page's files into a folder that is imported from."""
    for block in blocks(PAGE):
        if block.title:
            (tmp_path / block.title).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("loop", "callback", "own_gradients"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["loop.py", "callback.py"])
def test_a_hook_has_fifteen_lines_at_most(name: str) -> None:
    """With what it imports of the page itself, and empty ones. Seen red: the one of 16 lines."""
    texts = {block.title: block.text for block in blocks(PAGE) if block.title}
    needed = [
        text
        for title, text in texts.items()
        if title == name or f"from {Path(title).stem} import" in texts[name]
    ]
    lines = [line for text in needed for line in text.splitlines()]
    assert 5 < len(lines) <= 15


def check(folder: Path, scale: float = 1.0) -> None:
    """Hold the saved gradients against ours, and the update against SGD's."""
    from own_gradients import own_gradients  # type: ignore[import-not-found]

    _, mine = own_gradients(folder)
    theirs = load_file(folder / "grads.safetensors")
    before, after = (load_file(folder / side / "model.safetensors") for side in ("before", "after"))
    assert theirs.keys() == mine.keys() == before.keys() and len(theirs) > 10
    for name, gradient in theirs.items():
        size = np.linalg.norm(mine[name])
        assert np.linalg.norm(gradient * scale - mine[name]) < 1e-4 * size + 1e-9, name
        moved = before[name].astype(np.float64) - after[name]
        assert np.allclose(moved, 0.5 * gradient, atol=1e-6), name


def test_every_array_of_the_pass_is_in_the_batch(tmp_path: Path) -> None:
    """Also two that are one tensor, as labels and ids are. Seen red: arrays of four names only."""
    model = tiny("llama")
    ids = torch.tensor([IDS, IDS[::-1]])
    places = torch.arange(len(IDS)).expand(2, -1)
    saved = SavedStep(model, tmp_path)
    more = {"position_ids": places, "document_ids": torch.zeros_like(ids)}
    model(ids, labels=ids, use_cache=False, num_items_in_batch=torch.tensor(9), **more)
    assert not saved.saved
    held = load_file(tmp_path / "batch.safetensors")
    assert held.keys() == {"input_ids", "labels", *more}
    np.testing.assert_array_equal(held["position_ids"], places.numpy())
    np.testing.assert_array_equal(held["labels"], ids.numpy())


def test_a_loops_step_is_saved_and_its_gradients_are_ours(page: Path) -> None:
    from loop import train_one  # type: ignore[import-not-found]

    model = tiny("qwen2", tied=False)
    ids = torch.tensor([IDS, IDS[::-1]])
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    loss = train_one(model, torch.optim.SGD(model.parameters(), 0.5), batch, page / "step")
    from own_gradients import own_gradients

    assert abs(own_gradients(page / "step")[0] - loss) < 1e-5
    check(page / "step")


def test_the_trainers_first_step_is_saved(page: Path) -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("NOT-RUN: accelerate is not installed, which transformers' Trainer needs")
    from callback import SaveFirstStep  # type: ignore[import-not-found]
    from transformers import Trainer, TrainingArguments

    rows: Any = [{"input_ids": IDS, "labels": IDS}, {"input_ids": IDS[::-1], "labels": IDS[::-1]}]
    model = tiny("llama")
    first = model.get_input_embeddings().weight.detach().numpy().copy()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(page / "out"), max_steps=3, per_device_train_batch_size=2, optim="sgd",
            learning_rate=0.5, lr_scheduler_type="constant", max_grad_norm=0.0, report_to=[],
            use_cpu=True, save_strategy="no", disable_tqdm=True, logging_strategy="no",
        ),
        train_dataset=rows,
        callbacks=[SaveFirstStep],  # into the folder "step" of the working directory
    )  # fmt: skip
    trainer.train()
    check(page / "step")
    before = load_file(page / "step" / "before" / "model.safetensors")  # seen red: that of step 3
    np.testing.assert_array_equal(before["model.embed_tokens.weight"], first)
