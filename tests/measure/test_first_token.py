"""The first token that differs: of scores before the mask, keys that a token does not see say none.

Seen red: a wrong rope base was "position 0", where nothing is rotated, by the later keys of row 0.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aprfmt.inference.trace import Record, Trace
from aprfmt.measure.traces import compare_traces, find_first_token
from tests.cli.run import aprfmt

HEADS, TOKENS = 2, 5


def trace(architecture: str, off: tuple[int, int] | None, *, probs: bool, window: int) -> Trace:
    """Return scores, those of the (query, key) `off` wrong, and with `probs` what the mask leaves.

    A token sees the last `window` keys.
    """
    scores = np.random.default_rng(0).standard_normal((HEADS, TOKENS, TOKENS)).astype(np.float32)
    if off is not None:
        scores[:, off[0], off[1]] += 1
    values = {"L0.scores": scores}
    if probs:
        at = np.arange(TOKENS)
        seen = (at <= at[:, None]) & (at > at[:, None] - window)
        exps = np.where(seen, np.exp(scores), 0)
        values["L0.probs"] = exps / exps.sum(axis=-1, keepdims=True)
    places = tuple(range(TOKENS))
    records = {
        key: Record(key.partition(".")[2], 0, one.shape, places, "float32", None, "cpu", None)
        for key, one in values.items()
    }
    return Trace({"architecture": architecture}, records, fetch=values.__getitem__)


@pytest.mark.parametrize(
    ("architecture", "off", "probs", "window", "first"),
    [
        ("llama", (0, 3), False, TOKENS, None),  # a later key
        ("llama", (0, 3), True, TOKENS, None),
        ("llama", (3, 0), False, TOKENS, 3),
        ("llama", (3, 0), True, TOKENS, 3),
        ("llama", (3, 0), True, 2, None),  # a key outside the window
        ("llama", (3, 2), True, 2, 3),
        ("llama", (2, 2), False, TOKENS, 2),
        ("bert", (0, 3), False, TOKENS, 0),  # which reads later tokens
        ("unknown", (0, 3), False, TOKENS, 0),
    ],
)
def test_a_token_differs_by_the_keys_it_sees(
    architecture: str, off: tuple[int, int], probs: bool, window: int, first: int | None
) -> None:
    right = trace(architecture, None, probs=probs, window=window)
    wrong = trace(architecture, off, probs=probs, window=window)
    points = compare_traces(wrong, right).points
    assert next(one for one in points if one.key == "L0.scores").beyond
    found = find_first_token(points, wrong, right)
    assert (None if found is None else found.position) == first


@pytest.mark.parametrize("points", ["all", "L0.scores"])
def test_a_wrong_rope_base_is_seen_from_position_1(
    points: str, demo_model: Path, tmp_path: Path
) -> None:
    right, wrong = tmp_path / "right.gguf", tmp_path / "wrong.gguf"
    assert aprfmt("convert", demo_model, right, "--quiet").code == 0
    base = ("set", right, "qwen2.rope.freq_base=10000", "-o", wrong, "--quiet")
    assert aprfmt(*base).code == 0
    asked = ("--payload", "--points", points, "--ids", "5,6,7,8,9", "--reference", right, "--json")
    done = aprfmt("trace", wrong, *asked)
    assert done.json["reference"]["first_token"]["position"] == 1


@pytest.mark.parametrize(("tolerance", "first"), [(0.0, 3), (1e-6, 3), (10.0, None)])
def test_a_token_whose_values_are_equal_is_not_the_first_that_differs(
    tolerance: float, first: int | None
) -> None:
    """Also where a point allows nothing, as a bound that was measured on equal runs."""
    right = trace("llama", None, probs=False, window=TOKENS)
    wrong = trace("llama", (3, 0), probs=False, window=TOKENS)
    points = [replace(one, tolerance=tolerance) for one in compare_traces(wrong, right).points]
    found = find_first_token(points, wrong, right)
    assert (None if found is None else found.position) == first
