"""No change is confirmed on the values that gave it its numbers: pairs that nothing made.

Values that have nothing to do with each other are sometimes a factor, an order or an offset apart,
where they are few.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import aprfmt
from aprfmt.causes.forward import logit_relations
from aprfmt.causes.training import batch_labels, batch_samples
from aprfmt.compare import diff_models
from aprfmt.measure.logprob_relations import SharedRow, find_relation

SHAPES = [(1,), (2,), (3,), (4,), (8,), (1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 4), (8, 2),
          (1, 32), (24, 3)]  # fmt: skip
Pair = tuple[Any, Any]


def noise(rng: Any, shape: tuple[int, ...]) -> Pair:
    return rng.normal(size=shape), rng.normal(size=shape)


def whole(rng: Any, shape: tuple[int, ...]) -> Pair:
    return rng.integers(-2, 3, shape), rng.integers(-2, 3, shape)


def bits(rng: Any, shape: tuple[int, ...]) -> Pair:
    return rng.integers(0, 2, shape), rng.integers(0, 2, shape)


def constant(rng: Any, shape: tuple[int, ...]) -> Pair:
    return np.full(shape, rng.normal()), np.full(shape, rng.normal())


def filled(rng: Any, shape: tuple[int, ...]) -> Pair:
    return rng.normal(size=shape), np.full(shape, rng.normal())


def one_value(rng: Any, shape: tuple[int, ...]) -> Pair:
    x = rng.normal(size=shape)
    y = x.copy()
    y.flat[rng.integers(y.size)] = rng.normal()
    return x, y


@pytest.mark.parametrize("seed", [9])
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("make", [noise, whole, bits, constant, filled, one_value])
def test_values_that_nothing_relates_confirm_nothing(
    make: Any, alone: bool, seed: int, tmp_path: Path
) -> None:
    """`alone`: one pair of a file; else many, so that one may be taken for another."""
    rng = np.random.default_rng(seed)
    made = {
        f"t{i}.{n}": [each.astype(np.float32) for each in make(rng, shape)]
        for i, shape in enumerate(SHAPES)
        for n in range(1 if alone else 4)
    }
    for group in [{key: row} for key, row in made.items()] if alone else [made]:
        for side, name in enumerate(("a", "b")):
            tensors = {key: row[side] for key, row in group.items()}
            save_file(tensors, tmp_path / f"{name}.safetensors")
        a, b = (aprfmt.open(tmp_path / f"{name}.safetensors") for name in ("a", "b"))
        with a, b:
            report = diff_models(a, b, only=("tensors",))
        sure = [row for row in report.tensors if row.explanation
                and row.explanation.certainty == "confirmed"]  # fmt: skip
        assert not sure, [(row.shape_a, row.explanation) for row in sure]


def test_enough_values_confirm_a_change(tmp_path: Path) -> None:
    """What was made is still confirmed: on four values a factor, or an order."""
    rng = np.random.default_rng(9)
    pairs = {"factor": (x := rng.normal(size=4), 1.5 * x),
             "order": (x := rng.normal(size=4), x[::-1].copy())}  # fmt: skip
    for side, name in enumerate(("a", "b")):
        save_file(
            {key: row[side].astype(np.float32) for key, row in pairs.items()},
            tmp_path / f"{name}.safetensors",
        )
    a, b = (aprfmt.open(tmp_path / f"{name}.safetensors") for name in ("a", "b"))
    with a, b:
        found = {row.key: row.explanation for row in diff_models(a, b, only=("tensors",)).tensors}
    assert {key: (row.cause, row.certainty) for key, row in found.items() if row} == {
        "factor": ("scale", "confirmed"), "order": ("row_offset", "confirmed"),
    }  # fmt: skip


@pytest.mark.parametrize("shape", [(4, 4), (5, 2), (9, 7)])
def test_a_matrix_smaller_than_what_is_looked_for_is_compared(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    """A shift over ends of rows was looked for before the first row."""
    rng = np.random.default_rng(9)
    x = rng.normal(size=shape).astype(np.float32)
    for name, values in (("a", x), ("b", np.roll(x, 1))):
        save_file({"t": values}, tmp_path / f"{name}.safetensors")
    a, b = (aprfmt.open(tmp_path / f"{name}.safetensors") for name in ("a", "b"))
    with a, b:
        assert diff_models(a, b, only=("tensors",)).tensors[0].verdict == "DIFFERENT"


def _log_probabilities(x: Any, y: Any) -> float | None:
    rows = [SharedRow(b, a, np.zeros(a.shape), 1.0) for a, b in zip(x, y, strict=True)]
    found = find_relation(rows, 1e-4)
    return None if found is None else found.factor


def _logits(x: Any, y: Any) -> float | None:
    return logit_relations._factor_of_rows(x, y, 1e-4)


def _loss_terms(x: Any, y: Any) -> float | None:
    case: Any = SimpleNamespace(case=lambda key: SimpleNamespace(given=y[:, 0]))
    found = batch_samples._solve_sample_factors(case, "w", [x[:, 0], None])
    return None if found is None else found[0]


def _labels(x: Any, y: Any) -> float | None:
    case: Any = SimpleNamespace(case=lambda key: SimpleNamespace(given=y[:, 0]))
    parts: Any = SimpleNamespace(mean=lambda basis: x[:, 0])
    found = batch_labels._solve_label_factors(case, parts, [np.ones(1)])
    return None if found is None else float(found[1][0])


FITTED: dict[str, Callable[[Any, Any], float | None]] = {
    "log-probabilities": _log_probabilities,
    "logits": _logits,
    "terms of a loss": _loss_terms,
    "labels": _labels,
}


def test_a_factor_of_every_second_item_is_no_factor() -> None:
    """Whichever half it was found on: the other half judges it."""
    x, odd = np.random.default_rng(9).normal(size=(2, 16, 8))
    x, odd = (each - each.mean(1, keepdims=True) for each in (x, odd))
    for name, fit in FITTED.items():
        assert fit(x, 1.5 * x) == pytest.approx(1.5), name
        for half in (0, 1):
            obeys = np.arange(len(x))[:, None] % 2 == half
            assert fit(x, np.where(obeys, 1.5 * x, odd)) is None, name
