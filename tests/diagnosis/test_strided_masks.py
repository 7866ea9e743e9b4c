"""Sparse attention where the model's is dense: strides of keys are named, other masks are not.

Seen red: only the interval of operations was said, unconfirmed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward.mismatch import Change
from aprfmt.diagnosis import diagnose
from aprfmt.diagnosis.attention_rows import solve_strided_masks
from tests.diagnosis.engines import LONG, broken, tiny_folder, trace
from tests.diagnosis.test_hypotheses import MODULES

LOGITS = frozenset({"logits"})
LAYERS = frozenset({"out", "logits"})
Seen = Callable[[Any, Any], Any]  # which keys [1, keys] each query [tokens, 1] sees


def masked(seen: Seen) -> Mapping[str, Any]:
    """Return arguments of `trace`: attention also hides the keys that are not `seen`."""

    def change(op: Any, scores: Any, own: Any) -> Any:
        tokens, keys = own.mask.shape[-2:]
        query, key = np.arange(keys - tokens, keys)[:, None], np.arange(keys)[None]
        return op(scores, replace(own, mask=own.mask & seen(query, key), causal=None))

    return {"ids": LONG, "backend": lambda: broken("probs", change)}


STRIDED: Mapping[str, tuple[str, frozenset[str], Seen, str]] = {
    "dilated": (
        "llama",
        LAYERS,
        lambda i, j: (i - j) % 2 == 0,
        "tokens see their own key, and of earlier ones those at distances divisible by 2",
    ),
    "dilated behind a window": (
        "qwen2",
        MODULES,
        lambda i, j: ((i - j) % 4 == 0) | (i - j < 7),
        "tokens see the last 7 keys, and of earlier ones those at distances divisible by 4",
    ),
    "dilated, from logits": (
        "llama",
        LOGITS,
        lambda i, j: (i - j) % 3 == 0,
        "tokens see their own key, and of earlier ones those at distances divisible by 3",
    ),
    "every fourth key": (
        "llama",
        MODULES,
        lambda i, j: (j % 4 == 0) | (i - j < 3),
        "tokens see the last 3 keys, and of earlier ones those at positions divisible by 4",
    ),
}


@pytest.mark.parametrize("name", STRIDED)
def test_keys_of_a_stride_are_named(name: str) -> None:
    base, points, seen, says = STRIDED[name]
    run = trace(tiny_folder(base), f"strided {name}", points=points, **masked(seen))
    found = diagnose(str(tiny_folder(base)), str(run))
    assert found.complete and found.confidence == "confirmed", found.sentence
    (one,) = found.findings
    assert one.cause == "mask" and says in one.says


OTHERS: Mapping[str, tuple[Seen, str]] = {
    "a window": (lambda i, j: i - j < 9, "sliding_window"),
    "chunks": (lambda i, j: i // 9 == j // 9, "mask"),
    "a first key and a window": (lambda i, j: (i - j < 8) | (j < 1), "mask"),
    "keys at random": (lambda i, j: ((i * 7 + j * 5) % 11 > 3) | (i - j < 3), ""),
    "a stride that changes": (lambda i, j: ((i - j) % (2 + i // 20) == 0) | (i - j < 3), ""),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks_are_not_taken_for_strides(name: str) -> None:
    seen, cause = OTHERS[name]
    run = trace(tiny_folder("llama"), f"unstrided {name}", points=MODULES, **masked(seen))
    found = diagnose(str(tiny_folder("llama")), str(run))
    assert [one.cause for one in found.findings] == [cause], found.sentence
    assert "divisible" not in found.sentence and not any(one.also for one in found.findings)
    assert found.confidence == ("confirmed" if cause else "unconfirmed")


@pytest.mark.parametrize(("first", "n"), [(1, 12), (2, 12), (4, 30), (7, 30)])
def test_strided_masks_differ_from_a_dense_one_at_the_first_differing_row(
    first: int, n: int
) -> None:
    """No two are the same, and none is a window, of which the first row would say the same."""
    made: list[Change] = list(solve_strided_masks(np.arange(first, n), n))
    assert made and len({change.says for change in made}) == len(made)
    assert not list(solve_strided_masks(np.arange(n), n))
    assert not list(solve_strided_masks(np.array([], np.int64), n))
