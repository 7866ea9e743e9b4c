"""A cause is named in the layers that have it: each layer shows by its own input what it did."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward.operation_patches import limit_window
from aprfmt.causes.forward.softmax import sum_over_keys
from aprfmt.diagnosis import diagnose
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.shadow import record_points
from aprfmt.model import open_model
from tests.diagnosis.engines import LONG as MANY
from tests.diagnosis.engines import broken_here, tiny_folder, trace

Arrays = dict[str, Any]
LAYERS = 5
STREAM = frozenset({"out", "final_norm", "logits"})
WINDOW = 8  # tokens, as many as the smallest tile of a softmax that is tried
LONG = MANY[:40]


def without_last_output(values: Arrays) -> Arrays:
    """transformers' hidden_states: the last entry is behind the final norm."""
    return {key: value for key, value in values.items() if key != f"L{LAYERS - 1}.out"}


def folder(windowed: bool) -> Any:
    """A model of five layers, all with a window of 8 or none."""
    options = {"num_hidden_layers": LAYERS, "sliding_window": WINDOW if windowed else None}
    return tiny_folder("mistral", **options)


def run(windowed: bool, pattern: str, tokens: int, size: int = WINDOW) -> Any:
    """A run whose layers have a window where `pattern` has an S."""
    hp = {"sliding_window": size, "window_layers": tuple(letter == "S" for letter in pattern)}
    return trace(
        folder(windowed), f"pattern-{windowed}-{pattern}-{tokens}-{size}", ids=LONG[:tokens],
        points=STREAM, hp=hp, rename=without_last_output,
    )  # fmt: skip


def named(pattern: str, windowed: bool) -> set[str]:
    """The places of the cause: each layer that is not as the model says, or all of them."""
    wrong = [at for at, letter in enumerate(pattern) if (letter == "S") != windowed]
    every = len(wrong) == LAYERS
    return {"sliding_window"} if every else {f"L{at}.sliding_window" for at in wrong}


# The tiles of a softmax of 8 divide 40 tokens, and not 37.
@pytest.mark.parametrize("tokens", [40, 37])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("pattern", ["SSSFS", "SSFFF", "FFFSS", "SFSFS", "FFFFS", "SSSSF"])
def test_a_window_is_named_in_the_layers_that_have_it(
    pattern: str, windowed: bool, tokens: int
) -> None:
    """Seen red: "the softmax sums over whole tiles" was confirmed for a layer that is right."""
    found = diagnose(str(folder(windowed)), str(run(windowed, pattern, tokens)))
    causes = [(row.cause, row.confirmed, {*row.where}) for row in found.findings]
    listed = ", ".join(str(at) for at, letter in enumerate(pattern) if letter == "S")
    whole = {"window_layers"} if f"the window is in layers {listed};" in found.sentence else None
    assert causes == [("sliding_window", True, whole or named(pattern, windowed))], found.sentence


@pytest.mark.parametrize("pattern", ["SSSSS", "FFFFF"])
def test_a_run_with_the_windows_of_its_model_is_the_same(pattern: str) -> None:
    windowed = pattern[0] == "S"
    found = diagnose(str(folder(windowed)), str(run(windowed, pattern, 40)))
    assert found.verdict == "same" and not found.findings, found.sentence


def scaled_except(layer: int) -> Any:
    """Arguments of `trace`: scores are doubled in all layers but one."""

    def scores(here: Any, beneath: Any, *given: Any) -> Any:
        made = beneath(*given)
        return made if here.layer == layer else made * made.dtype.type(2)

    return broken_here(scores=scores)


@pytest.mark.parametrize("layer", [1, 3, 4])
def test_a_factor_is_not_named_in_the_layer_that_does_not_have_it(layer: int) -> None:
    """Seen red: of the last layer, whose own output is not there, nothing was tried alone."""
    model = folder(windowed=False)
    made = trace(model, f"scaled-{layer}", ids=LONG, points=STREAM, rename=without_last_output,
                 **scaled_except(layer))  # fmt: skip
    found = diagnose(str(model), str(made))
    where = {f"L{at}.attn_scale" for at in range(LAYERS) if at != layer}
    causes = [(row.cause, row.confirmed, {*row.where}) for row in found.findings]
    assert causes == [("attention_scale", True, where)], found.sentence


def narrower_in(layer: int, size: int) -> Any:
    """Arguments of `trace`: one layer has a window of `size` tokens, the others one of WINDOW."""
    at = np.arange(len(LONG))

    def narrow(here: Any, beneath: Any, *given: Any) -> Any:
        *first, heads = given
        reach = size if here.layer == layer else WINDOW
        seen = heads.mask & (at > at[:, None] - reach)
        return beneath(*first, replace(heads, mask=seen, causal=None))

    return broken_here(scores=narrow, probs=narrow)


@pytest.mark.parametrize("layer", [1, 3, 4])
def test_a_window_of_another_size_in_one_layer_is_solved_there(layer: int) -> None:
    """A second window is tried in place of the first one, not beneath it."""
    model = folder(windowed=False)
    made = trace(model, f"narrower-{layer}", ids=LONG, points=STREAM, rename=without_last_output,
                 **narrower_in(layer, 5))  # fmt: skip
    found = diagnose(str(model), str(made))
    causes = {(row.cause, row.confirmed, row.values["sliding_window"]) for row in found.findings}
    assert causes == {("sliding_window", True, n) for n in (WINDOW, 5)}, found.sentence
    narrow = next(row for row in found.findings if row.values["sliding_window"] == 5)
    assert narrow.where == (f"L{layer}.sliding_window",)


def test_a_change_of_operands_is_made_after_those_that_the_model_has() -> None:
    """Sums over tiles keep the window that was found before them."""
    with open_model(folder(windowed=False)) as model:
        plain = PatchedModel.unpatched(model, LONG, "float32", None)
        windowed = limit_window(WINDOW)(plain, None)
        tiled = sum_over_keys("whole tiles of {} keys only", 8)(windowed, None)
        short = limit_window(5)(windowed, None)
        other = limit_window(5)(plain, None)
        values = [record_points(each) for each in (plain, windowed, tiled, short, other)]
        plain.weights.close()
    nothing, once, summed, twice, alone = (each["L2.out"] for each in values)
    assert not np.array_equal(nothing, once)
    assert np.allclose(once, summed, atol=1e-5), "40 tokens are whole tiles"
    assert np.array_equal(twice, alone)
