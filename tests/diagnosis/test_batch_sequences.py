"""Dumps of several sequences: rows of another request, and sequences that were not compared.

The values are those of transformers' own passes, one for each request.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from aprfmt.inference.engines.opening import open_trace
from aprfmt.measure.traces import compare_traces
from aprfmt.model import open_model
from tests.diagnosis.engines import place
from tests.diagnosis.faults import DEMO
from tests.field import hf

pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")

Arrays = dict[str, Any]
TEXTS = (
    "Once upon a time there was a little girl",
    "The dog ran to the big red house and",
    "Tom and his mom went to the park to",
    "She was very happy and said thank you",
)


@cache
def batch() -> Mapping[str, Any]:
    """Return ids [4, n] and, by module, what transformers makes of each, [4, n, size]."""
    import torch

    with open_model(DEMO) as model:
        ids = [model.tokenizer.encode(text, add_special=False) for text in TEXTS]
    length = min(map(len, ids))
    found: dict[str, list[Any]] = {}
    for one in ids:
        with torch.no_grad():
            made = hf.loaded(DEMO)(torch.tensor([one[:length]]), output_hidden_states=True)
        for layer, values in enumerate(made.hidden_states[1:-1]):
            found.setdefault(f"model.layers.{layer}", []).append(values.numpy())
        found.setdefault("model.norm", []).append(made.hidden_states[-1].numpy())
    arrays = {name: np.concatenate(rows) for name, rows in found.items()}
    return {"input_ids": np.array([one[:length] for one in ids])} | arrays


def ids_of(number: int) -> tuple[int, ...]:
    """Return the ids of a request."""
    return tuple(batch()["input_ids"][number].tolist())


def saved(name: str, change: Callable[[str, Any], Any] = lambda name, x: x) -> Path:
    """Return a .npz of the batch, each array but the ids changed."""
    arrays = {
        key: values if key == "input_ids" else change(key, values.copy())
        for key, values in batch().items()
    }
    path = place(f"sequences-{name}.npz")
    np.savez(path, **arrays)
    return path


def taken(order: Sequence[int], modules: Sequence[str] = ()) -> Callable[[str, Any], Any]:
    """Return a change that gives request i the rows of request order[i], in these modules."""
    return lambda name, x: x[list(order)] if not modules or name in modules else x


LAST = ("model.layers.2", "model.norm")
ROWS: dict[str, tuple[Callable[[str, Any], Any], int, int, str]] = {
    "exchanged": (taken((0, 2, 1, 3)), 1, 2, "the two are exchanged"),
    "in turn": (taken((1, 2, 0, 3)), 0, 1, "its own are those of the sequence"),
    "given to two": (taken((0, 2, 2, 3)), 1, 2, "its own rows are not in B"),
    "from a layer on": (taken((0, 2, 1, 3), LAST), 1, 2, "at all 2 points that differ"),
    "rounded": (lambda _, x: x[[0, 2, 1, 3]] * np.float32(1 + 1e-7), 1, 2, "exchanged"),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_another_request_are_known(name: str, turned: bool) -> None:
    """Seen red: "any of these operations may be wrong", thirteen weights named."""
    change, mine, other, says = ROWS[name]
    pair = [saved("alone"), saved(name, change)]
    a, b = map(str, reversed(pair) if turned else pair)
    found = diagnose(a, b, model=str(DEMO))
    assert (found.kind, found.cause, found.exit_code) == ("bug", "other_sequence", 1), found
    assert found.lead is not None and found.lead.certainty == "confirmed"
    assert found.lead.side == ("A" if turned else "B")
    assert {row.cause for row in found.findings} <= {"other_sequence", "rounding"}
    assert found.lead.values["ids"] == list(ids_of(mine))
    if not turned:
        assert says in found.sentence
        assert found.lead.values["rows_of"] == list(ids_of(other))


def test_a_dump_alone_has_what_the_model_makes_of_another_request() -> None:
    path = saved("exchanged", taken((0, 2, 1, 3)))
    found = diagnose(str(DEMO), str(path), ids=ids_of(1))
    assert (found.kind, found.cause, found.exit_code) == ("bug", "other_sequence", 1), found
    assert len(found.findings) == 1 and found.lead is not None
    assert found.lead.values["rows_of"] == list(ids_of(2))


@pytest.mark.parametrize("wrong", [(), (2,), (2, 3)])
def test_other_sequences_that_differ_are_said(wrong: Sequence[int]) -> None:
    """Seen red: "same", exit 0, without a word of the three sequences beside the given one."""

    def change(name: str, x: Any) -> Any:
        x[list(wrong)] *= np.float32(1.5)
        return x

    b = saved(f"wrong-{len(wrong)}", change)
    found = diagnose(str(saved("alone")), str(b), model=str(DEMO), ids=ids_of(0))
    left = [row for row in found.pronounced.not_compared if row.kind == "sequence"]
    assert [row.state for row in left] == ["unequal"] * len(wrong)
    assert found.exit_code == (1 if wrong else 0)
    agree = [text for text in found.checked if "other sequences" in text]
    assert agree == [f"{3 - len(wrong)} other sequences of both dumps, which agree"]


def test_without_ids_the_sequence_that_differs_is_examined() -> None:
    b = saved("last", taken((0, 1, 3, 2)))
    found = diagnose(str(saved("alone")), str(b), model=str(DEMO))
    assert found.ids == ids_of(2) and found.exit_code == 1
    assert diagnose(str(saved("alone")), str(saved("copy")), model=str(DEMO)).exit_code == 0


def test_sequences_beside_the_one_of_a_model_are_named() -> None:
    found = diagnose(str(DEMO), str(saved("alone")), ids=ids_of(0))
    left = [row for row in found.pronounced.not_compared if row.kind == "sequence"]
    assert [row.state for row in left] == ["unread"] * 3 and found.exit_code == 0
    assert left[0].name.startswith(f"of {len(ids_of(1))} tokens {ids_of(1)[0]},")


def test_a_comparison_of_two_traces_names_the_other_sequences() -> None:
    paths = saved("alone"), saved("copy")
    with (
        open_model(DEMO) as model,
        open_trace(paths[0], ids_of(0), model) as a,
        open_trace(paths[1], ids_of(0), model) as b,
    ):
        found = compare_traces(a, b)
    assert [row.kind for row in found.left if row.kind == "sequence"] == ["sequence"] * 3
