"""Products whose input is rounded to 8 bits: the type, what shares a scale, and the products.

Seen red: only the operations, located, with their weights.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward.rounding import round_to_type
from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import broken_here, tiny_folder, trace
from tests.diagnosis.test_hypotheses import MODULES

Rounding = Callable[[Any], Any]  # of an input [tokens, width]


def codes(x: Any, axis: int | None) -> Any:
    """Round to int8 on the scale of the largest along an axis."""
    scale = np.abs(x).max(axis, keepdims=True) / 127
    return (np.rint(x / scale) * scale).astype(x.dtype)


def floats(x: Any, axis: int | None) -> Any:
    """Round to float8 on the scale of the largest along an axis."""
    scale = np.abs(x).max(axis, keepdims=True) / 448
    return (round_to_type(x / scale, "float8_e4m3fn") * scale).astype(x.dtype)


def given(role: str, how: Rounding, layer: int | None = 1) -> Mapping[str, Any]:
    """Return arguments of `trace`: products with the weight `role` read rounded inputs."""

    def linear(here: Any, op: Any, x: Any, w: Any, *args: Any, **more: Any) -> Any:
        own = layer is None or w.key.startswith(f"L{layer}.")
        return op(how(x) if own and role in w.key else x, w, *args, **more)

    return broken_here(linear=linear)


CASES: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "int8, all": (given("ffn_down", lambda x: codes(x, None)), "int8, on a scale of the whole"),
    "int8, token": (given("ffn_down", lambda x: codes(x, 1)), "int8, on a scale of each token"),
    "int8, every layer": (given("ffn_up", lambda x: codes(x, 1), None), "int8, on a scale of each"),
    "float8, token": (given("attn_output", lambda x: floats(x, 1)),
                      "float8_e4m3fn, on a scale of each token"),
    "float8, cast": (given("ffn_down", lambda x: round_to_type(x, "float8_e4m3fn")),
                     "float8_e4m3fn, without a scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_the_input_is_rounded_to_is_named(name: str) -> None:
    how, says = CASES[name]
    folder = tiny_folder("llama")
    run = trace(folder, f"input-{name}".replace(" ", "-").replace(",", ""),
                points=MODULES | {"attn"}, **how)  # fmt: skip
    found = diagnose(str(folder), str(run))
    assert found.verdict == "precision", found.sentence
    assert f"the input of products is rounded to {says}" in found.sentence


def test_a_weight_that_is_rounded_is_no_rounded_input() -> None:
    def weights(held: Any) -> Any:
        key = "L1.ffn_down.weight"
        return {key: codes(np.array(held[key].numpy(), np.float32), None)}

    folder = tiny_folder("llama")
    found = diagnose(str(folder), str(trace(folder, "input-none", points=MODULES, weights=weights)))
    assert "the input of products" not in found.sentence, found.sentence
