"""What hyperparameters result in, compared without a pass: how far, which side, from where.

Distances are relative to A: seen red, those to B, by which half a frequency is as far as twice one.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import derived_quantities
from aprfmt.diagnosis.derived_quantities import Quantity
from aprfmt.inference.rope import compute_frequencies, rotation_of_layer
from aprfmt.model import open_model
from tests.diagnosis.engines import tiny_folder


@pytest.fixture(scope="module")
def hyper() -> Mapping[str, Any]:
    with open_model(tiny_folder("llama")) as model:
        return dict(model.hyper)


def linear(factor: float) -> dict[str, Any]:
    return {"rope_scaling": {"type": "linear", "factor": factor}}


# (A, B) -> how far the frequencies are apart, in parts of A's.
APART: list[tuple[dict[str, Any], dict[str, Any], float]] = [
    ({}, linear(2.0), 0.5),
    (linear(2.0), {}, 1.0),
    (linear(2.0), linear(8.0), 0.75),
    (linear(8.0), linear(2.0), 3.0),
]


@pytest.mark.parametrize(("a", "b", "apart"), APART)
def test_frequencies_are_apart_by_parts_of_those_of_a(
    a: dict[str, Any], b: dict[str, Any], apart: float, hyper: Mapping[str, Any]
) -> None:
    plain = {"rope_scaling": None}
    found = derived_quantities.compare_frequencies({**hyper, **plain, **a}, {**hyper, **plain, **b})
    assert not found.equal and f"differ by {apart:.3g} of their size at most" in found.says
    assert found.where == tuple(f"L{i}" for i in range(hyper["n_layers"]))
    assert found.position == 1  # rope leaves position 0 as it is


@pytest.mark.parametrize(("mine", "other"), [(1e4, 1e6), (1e6, 1e4), (1e4, 1.0001e4)])
def test_of_all_pairs_the_one_furthest_apart_counts(
    mine: float, other: float, hyper: Mapping[str, Any]
) -> None:
    sides = [{**hyper, "rope_scaling": None, "rope_theta": theta} for theta in (mine, other)]
    x, y = (
        np.asarray(compute_frequencies(hp, kind, 1).inv_freq, np.float64)
        for hp in sides
        if (kind := rotation_of_layer(hp, 0)) is not None
    )
    found = derived_quantities.compare_frequencies(*sides)
    assert f"differ by {np.max(np.abs(x - y) / x):.3g} of their size" in found.says


def test_layers_that_rotate_on_one_side_alone_differ_from_the_first_token(
    hyper: Mapping[str, Any],
) -> None:
    layers = tuple(i != 1 for i in range(hyper["n_layers"]))
    for a, b in (
        (hyper, {**hyper, "rope_layers": layers}),
        ({**hyper, "rope_layers": layers}, hyper),
    ):
        found = derived_quantities.compare_frequencies(a, b)
        assert (found.position, found.where) == (0, ("L1",)) and "in kind or factor" in found.says


def score_scales(hyper: Mapping[str, Any]) -> tuple[Quantity, Quantity]:
    a, b = {**hyper, "attn_scale": 0.125}, {**hyper, "attn_scale": 0.25}
    return derived_quantities.compare_score_scales(a, b), derived_quantities.compare_score_scales(
        b, a
    )


def test_each_side_has_its_own_number(hyper: Mapping[str, Any]) -> None:
    one, turned = score_scales(hyper)
    assert "0.125 in A, 0.25 in B" in one.says and "0.25 in A, 0.125 in B" in turned.says
    assert one.position == turned.position == 0
    gelu, silu = {**hyper, "activation": "gelu"}, {**hyper, "activation": "silu"}
    said = (
        derived_quantities.compare_activations(gelu, silu),
        derived_quantities.compare_activations(silu, gelu),
    )
    assert said[0].says.startswith("gelu and silu differ by up to ")
    assert said[1].says.startswith("silu and gelu differ by up to ")


@pytest.mark.parametrize(
    ("mine", "other", "first"), [(4, 9, 4), (9, 4, 4), (None, 5, 5), (7, None, 7)]
)
def test_masks_differ_from_the_smaller_window_on(
    mine: int | None, other: int | None, first: int, hyper: Mapping[str, Any]
) -> None:
    layers = tuple(i == 1 for i in range(hyper["n_layers"]))
    sides = [{**hyper, "sliding_window": size, "window_layers": layers} for size in (mine, other)]
    found = derived_quantities.compare_masks(*sides)
    assert (found.position, found.where) == (first, ("L1",))
