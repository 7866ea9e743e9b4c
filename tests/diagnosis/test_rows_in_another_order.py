"""Captured rows in another order, and one wrong row: one cause, and only what is known of it.

Seen red: two exchanged rows of every array were wrong token ids, wrong positions and two unknown
causes; one wrong row of an array was "taken at another point".
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from aprfmt import diagnose
from aprfmt.diagnosis.records import Diagnosis
from tests.cli.run import aprfmt
from tests.models import save_tiny

Arrays = dict[str, Any]
IDS = (5, 17, 33, 4, 91, 12, 70, 8)
COARSE = ("embd", "L0.out", "L1.out", "final_norm", "logits")
POSITIONS = ",".join(map(str, range(len(IDS))))


def dumped(model: Path, ids: tuple[int, ...], into: Path) -> tuple[Arrays, Mapping[str, str]]:
    """Return the arrays of a pass at all points with logits of every row, and the file's text."""
    done = aprfmt("trace", model, "--ids", ",".join(map(str, ids)), "--payload", "--points", "all",
                  "--positions", POSITIONS, "--save", into)  # fmt: skip
    assert done.code == 0, done.err
    with safe_open(into, "np") as file:
        return load_file(into), file.metadata()


def ordered(order: list[int], scores: int = 0) -> Callable[[Arrays], Arrays]:
    """Return a change of the order of rows; `scores`: how many of the axes of scores it moves."""

    def change(arrays: Arrays) -> Arrays:
        made = {}
        for key, values in arrays.items():
            inner = key.endswith((".scores", ".probs"))
            for axis in range(1, 1 + scores) if inner else (0,):
                values = np.take(values, order, axis)
            made[key] = np.ascontiguousarray(values)
        return made

    return change


def coarse(change: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {key: x for key, x in change(arrays).items() if key in COARSE}


PAIR, REVERSED, TURNED = [0, 1, 6, 3, 4, 5, 2, 7], [*range(7, -1, -1)], [*range(1, 8), 0]
ORDERS: Mapping[str, tuple[list[int], Callable[[Arrays], Arrays]]] = {
    "pair": (PAIR, ordered(PAIR)),
    "pair-and-scores": (PAIR, ordered(PAIR, 1)),
    "pair-and-keys": (PAIR, ordered(PAIR, 2)),
    "reversed": (REVERSED, ordered(REVERSED)),
    "turned": (TURNED, ordered(TURNED)),
    "pair-of-layers": (PAIR, coarse(ordered(PAIR))),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows") / "llama"
    save_tiny("llama", folder)
    return folder


def told(model: Path, folder: Path, arrays: Arrays, text: Mapping[str, str]) -> Diagnosis:
    save_file(arrays, folder / "changed.safetensors", dict(text))
    return diagnose(str(model), str(folder / "changed.safetensors"))


@pytest.mark.parametrize("name", ORDERS)
def test_rows_in_another_order_are_one_cause(name: str, model: Path, tmp_path: Path) -> None:
    order, change = ORDERS[name]
    arrays, text = dumped(model, IDS, tmp_path / "plain.safetensors")
    found = told(model, tmp_path, change(arrays), text)
    assert [one.cause for one in found.findings] == ["capture_rows"], found.sentence
    (one,) = found.findings
    assert (one.certainty, one.values["rows"]) == ("confirmed", np.argsort(order).tolist())
    assert set(one.where) == set(change(arrays)) and found.exit_code == 0


def test_tokens_that_were_exchanged_are_no_order_of_rows(model: Path, tmp_path: Path) -> None:
    other = tuple(IDS[at] for at in PAIR)
    arrays, _ = dumped(model, other, tmp_path / "other.safetensors")
    _, text = dumped(model, IDS, tmp_path / "plain.safetensors")
    for kept in (arrays, {key: arrays[key] for key in COARSE}, {"embd": arrays["embd"]}):
        found = told(model, tmp_path, kept, text)
        assert "capture_rows" not in {one.cause for one in found.findings}
        assert found.exit_code == 1, found.sentence


@pytest.mark.parametrize("key", ["L1.ffn_out", "L0.q", "L1.out"])
def test_of_one_wrong_row_only_its_place_is_said(key: str, model: Path, tmp_path: Path) -> None:
    arrays, text = dumped(model, IDS, tmp_path / "plain.safetensors")
    values = arrays[key].copy()
    values[5] = np.random.default_rng(0).normal(0, 1, values[5].shape)
    found = told(model, tmp_path, {**arrays, key: values}, text)
    lead = found.lead
    assert lead is not None and lead.where == (key,)
    if lead.cause == "capture_point":
        assert lead.certainty == "located" and found.exit_code == 2
        assert "taken at another point" not in lead.says and "in row 5 of 8" in lead.says
