"""Special tokens that stand twice around the texts of a trainer's batch.

The demo's tokenizer puts nothing before a text; its template begins with `<|im_start|>`. With a
post-processor it puts `<|endoftext|>`, an end, there.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.batch import count_turn_ends, read_batch
from tests.cli.run import aprfmt

TEXT, START, END, TURN = 1533, 1534, 1535, [258, 1168, 302, 611]
LENGTHS = (5, 3, 4)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "framed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo; framed, with a tokenizer that puts `<|endoftext|>` before a text."""
    folder = tmp_path_factory.mktemp("frames") / "m"
    aprfmt("demo", "--into", folder)
    if request.param:
        path = folder / "tokenizer.json"
        stored, text = json.loads(path.read_text()), "<|endoftext|>"
        begins: list[Any] = [{"SpecialToken": {"id": text, "type_id": 0}}]
        one, two = ({"Sequence": {"id": of, "type_id": 0}} for of in "AB")
        stored["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [*begins, one],
            "pair": [*begins, one, two],
            "special_tokens": {text: {"id": text, "ids": [TEXT], "tokens": [text]}},
        }
        path.write_text(json.dumps(stored))
    return folder


def rows(before: list[int], after: list[int]) -> list[list[int]]:
    """Return texts of unlike lengths with these ids around them."""
    return [[*before, *(TURN * 2)[:length], *after] for length in LENGTHS]


def checked(folder: Path, model: Path, texts: list[list[int]], *, masked: bool = True) -> Any:
    """Return the outcome of `eval --batch` on special tokens, and what was found; None for none."""
    width = max(map(len, texts))
    ids = np.array([[*text, *[END] * (width - len(text))] for text in texts])
    mask = np.array([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    labels = np.where(mask, ids, -100)
    arrays: Any = {"ids": ids, "labels": labels} | ({"mask": mask} if masked else {})
    np.savez(folder / "b.npz", **arrays)
    done = aprfmt("eval", model, "--batch", folder / "b.npz", "--json").json
    found = [row for row in done["gate"]["checks"] if row["name"] == "frame-once"]
    return next(((row["outcome"], row["found"]) for row in found), None)


def test_a_beginning_that_stands_twice_is_found(model: Path, tmp_path: Path) -> None:
    processor = json.loads((model / "tokenizer.json").read_text()).get("post_processor") or {}
    framed = processor.get("type") == "TemplateProcessing"
    first, spelled = (TEXT, "<|endoftext|>") if framed else (START, "<|im_start|>")
    right = checked(tmp_path, model, rows([first], [END]))
    assert right is None or right[0] == "PASS"
    for many, times in ((2, "twice"), (3, "3 times")):
        found = checked(tmp_path, model, rows([first] * many, [END]))
        assert found == ("FAIL", f"3 of 3 texts begin with {first} '{spelled}' {times}")
    # One of them: a row may begin between two texts, whose end and beginning have one id.
    some = [*rows([first], [END])[:2], rows([first] * 2, [END])[2]]
    found = checked(tmp_path, model, some)
    assert (found is not None and found[0] == "FAIL") == (not framed)
    # Padding of unlike lengths that the mask takes for text.
    padded = [[first] * (2 + at) + text for at, text in enumerate(rows([], [END]))]
    found = checked(tmp_path, model, padded)
    assert found is None or found[0] == "PASS"


def test_an_end_that_stands_twice_is_found(model: Path, tmp_path: Path) -> None:
    found = checked(tmp_path, model, rows([START], [END, END]))
    assert found == ("FAIL", f"3 of 3 texts end with {END} '<|im_end|>' twice")
    for texts, masked in (
        ([[START, *TURN, END, END]] * 3, False),  # one may be padding
        ([*rows([START], [END])[:2], rows([START], [END, END])[2]], True),
        (rows([START], [END, 9, END]), True),
    ):
        found = checked(tmp_path, model, texts, masked=masked)
        assert found is None or found[0] == "PASS"


def test_what_begins_a_text_ends_none(tmp_path: Path) -> None:
    for before in ([TEXT], [TEXT] * 3):
        ids = np.array([[*before, *TURN, END]])
        np.savez(tmp_path / "b.npz", ids=ids, labels=ids, document_ids=np.zeros_like(ids))
        batch = read_batch(tmp_path / "b.npz", 2000, {TEXT, END})
        assert [(each.id, each.places) for each in count_turn_ends(batch)] == [(END, 1)]
