"""Token ids that a run recorded, against what the tokenizer puts around a text.

The runs are transformers' own. Seen red: such ids were taken as given, and every one of these runs
was called rounding.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from aprfmt.model import open_model
from tests.cli import run
from tests.diagnosis.engines import place
from tests.diagnosis.faults import DEMO
from tests.field import hf

BOS, PAD, END = 1533, 1534, 1535
TEXT = "Hello world, this is a test of 7 numbers."


def beginning(values: Any) -> None:
    """Let the tokenizer put BOS before every text."""
    special = {"id": "<|endoftext|>", "ids": [BOS], "tokens": ["<|endoftext|>"]}
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": special},
    }


def roles(values: Any) -> None:
    """Name BOS and padding."""
    values |= {"bos_token": "<|endoftext|>", "pad_token": "<|im_start|>", "add_bos_token": True}


def framed() -> Path:
    """Return the demo model with a tokenizer that puts BOS before a text."""
    files = {
        "tokenizer.json": hf.json_edit(beginning),
        "tokenizer_config.json": hf.json_edit(roles),
    }
    return hf.copy(DEMO, "ids-framed", files=files)


def text_ids() -> list[int]:
    """Return the ids of a text, without any before it."""
    with open_model(DEMO) as model:
        return model.tokenizer.encode(TEXT, add_special=False)


def recorded(
    folder: Path, ids: Sequence[int], name: str, hidden: int = 0, said: int | None = None
) -> Path:
    """Return a .npz of transformers' pass: ids, outputs of layers, logits.

    The attention mask hides the first `hidden` tokens, and positions begin behind them. The mask
    that is recorded hides `said` of them; None: none is recorded.
    """
    import torch

    mask = torch.ones(1, len(ids), dtype=torch.long)
    mask[:, :hidden] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        made = hf.loaded(folder)(
            torch.tensor([list(ids)]), attention_mask=mask, position_ids=positions,
            output_hidden_states=True,
        )  # fmt: skip
    arrays = {"input_ids": np.array([ids]), "logits": made.logits.numpy()}
    for layer, values in enumerate(made.hidden_states[1:-1]):
        arrays[f"model.layers.{layer}"] = values.numpy()
    if said is not None:
        arrays["attention_mask"] = (np.arange(len(ids)) >= said)[None].astype(np.int64)
    path = place(f"ids-{name}.npz")
    np.savez(path, **arrays)
    return path


# ids before a text -> (cause, words of the answer); None: nothing is wrong.
BEFORE: dict[str, tuple[list[int], tuple[str, str] | None]] = {
    "right": ([BOS], None),
    "twice": ([BOS, BOS], ("add_bos", "begin with 1533 (<|endoftext|>) twice")),
    "three-times": ([BOS] * 3, ("add_bos", "begin with 1533 (<|endoftext|>) 3 times")),
    "missing": ([], ("add_bos", "those of a text without 1533 (<|endoftext|>)")),
    "another": ([END], ("frame", "begin with 1535 (<|im_end|>) where the tokenizer puts 1533")),
    "padded": ([PAD] * 3 + [BOS], ("visible_padding", "begin with 3 ids of padding, 1534")),
    "padded-once": ([PAD, BOS], ("visible_padding", "begin with an id of padding, 1534")),
}


@pytest.mark.parametrize("kind", BEFORE)
def test_what_stands_before_a_text_is_judged(kind: str) -> None:
    before, wanted = BEFORE[kind]
    folder, text = framed(), text_ids()
    found = diagnose(str(folder), str(recorded(folder, [*before, *text], kind)))
    if wanted is None:
        assert (found.kind, found.exit_code) == ("precision", 0), found.sentence
        return
    assert (found.kind, found.cause, found.exit_code) == ("bug", wanted[0], 1), found.sentence
    assert wanted[1] in found.sentence and found.lead is not None
    assert found.lead.certainty == ("explained" if kind in ("missing", "another") else "confirmed")
    right = [BOS, *text]
    assert found.lead.values["ids"] == {"right": right, "b": [*before, *text]}
    assert found.next[0].endswith(f"--ids {','.join(map(str, right))}")


@pytest.mark.parametrize("frame", [[BOS], []])
def test_ids_that_are_no_text_lack_nothing(frame: list[int]) -> None:
    """Ids that somebody chose, and those of a chat, whose template writes all marks."""
    folder = framed()
    for name, ids in (
        ("chosen", [*range(65, 75), 5, 300, 65, 66]),
        ("chat", [PAD, *text_ids(), END]),
        ("short", text_ids()[:4]),
    ):
        path = recorded(folder, [*frame, *ids], f"{name}-{len(frame)}")
        found = diagnose(str(folder), str(path))
        causes = {one.cause for one in found.findings if one.verdict == "bug"}
        assert not causes, name


@pytest.mark.parametrize("count", [1, 2, 5])
def test_padding_that_is_hidden_is_no_difference(count: int) -> None:
    folder = framed()
    ids = [PAD] * count + [BOS, *text_ids()]
    found = diagnose(str(folder), str(recorded(folder, ids, f"hidden-{count}", count)))
    assert (found.kind, found.exit_code) == ("precision", 0), found.sentence
    (one,) = [one for one in found.findings if one.cause == "capture_rows"]
    assert f"{len(ids) - count} rows are those of a pass without it" in one.says


@pytest.mark.parametrize("seen", [True, False])
def test_padding_that_a_recorded_mask_hides_is_seen_or_not(seen: bool) -> None:
    folder, ids = framed(), [PAD] * 3 + [BOS, *text_ids()]
    run = recorded(folder, ids, f"said-{seen}", 0 if seen else 3, said=3)
    found = diagnose(str(folder), str(run))
    if not seen:
        assert (found.kind, found.exit_code) == ("precision", 0), found.sentence
        return
    assert (found.cause, found.confidence, found.exit_code) == ("visible_padding", "confirmed", 1)
    assert found.complete and "see the 3 tokens of padding" in found.sentence


def test_ids_given_to_a_trace_of_ours_lack_nothing(tmp_path: Path) -> None:
    folder, text = framed(), text_ids()
    for before, kind in (([], "same"), ([BOS, BOS], "bug")):
        path, ids = tmp_path / f"{kind}.safetensors", [*before, *text]
        given = ",".join(map(str, ids))
        assert run.aprfmt("trace", folder, "--payload", "--ids", given, "-o", path).code == 0
        assert diagnose(str(folder), str(path)).kind == kind


@pytest.mark.parametrize("beside", [(), ("config.json", "tokenizer.json")])
def test_a_folder_with_one_npz_is_the_run(beside: tuple[str, ...], tmp_path: Path) -> None:
    """Seen red: the folder was a model without weights, for every command."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(recorded(DEMO, text_ids(), "held"), folder / "run.npz")
    for name in beside:
        shutil.copy(DEMO / name, folder / name)
    found = diagnose(str(DEMO), str(folder))
    assert found.kind == "precision" and found.points
    assert run.aprfmt("trace", DEMO, "--load", folder).code == 0
    says = "captures of a run (run.npz); compare them with the model that ran: aprfmt diagnose"
    for command in ("inspect", "validate"):
        done = run.aprfmt(command, folder)
        assert done.code == 2 and f"{says} MODEL {folder / 'run.npz'}" in done.err
    # Of several nobody knows which; a model's own folder stays one.
    shutil.copy(folder / "run.npz", folder / "again.npz")
    done = run.aprfmt("diagnose", DEMO, folder)
    assert done.code == 2 and "captures of a run (again.npz, run.npz)" in done.err
    (folder / "again.npz").rename(folder / "weights.npz")
    assert diagnose(str(DEMO), str(folder)).kind == "precision"
    shutil.copy(DEMO / "model.safetensors", folder)
    shutil.copy(DEMO / "config.json", folder)
    assert diagnose(str(DEMO), str(folder)).checked[0] != found.checked[0]
