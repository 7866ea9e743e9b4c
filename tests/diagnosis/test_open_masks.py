"""Rows of causal attention that see later tokens: which rows, and that no adapter is suggested.

Seen red: only the interval of operations, with the hint of an adapter of rank 8.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import LONG, broken, tiny_folder, trace
from tests.diagnosis.test_hypotheses import MODULES

IDS = LONG[:20]
LAYERS = frozenset({"out", "logits"})
Seen = Callable[[Any, Any], Any]  # which keys [1, keys] each query [tokens, 1] sees as well


def opened(seen: Seen) -> Mapping[str, Any]:
    """Return arguments of `trace`: attention sees the keys that are `seen`, too."""

    def change(op: Any, scores: Any, own: Any) -> Any:
        tokens, keys = own.mask.shape[-2:]
        query, key = np.arange(keys - tokens, keys)[:, None], np.arange(keys)[None]
        return op(scores, replace(own, mask=own.mask | seen(query, key), causal=None))

    return {"ids": IDS, "backend": lambda: broken("probs", change)}


OPEN: Mapping[str, tuple[frozenset[str], Seen, str]] = {
    "first rows": (LAYERS, lambda i, j: (i < 8) & (j < 99), "the first 8 tokens see all tokens"),
    "first rows, from modules": (MODULES, lambda i, j: (i < 5) & (j < 99),
                                 "the first 5 tokens see all tokens"),
    "an image's tokens": (LAYERS, lambda i, j: (i > 5) & (i < 12) & (j > 5) & (j < 12),
                          "tokens 6 to 11 all see each other"),
    "a later pass": (LAYERS, lambda i, j: (i >= 13) & (j < 99), "tokens from 13 on see all tokens"),
    "rows in the middle": (LAYERS, lambda i, j: (i > 5) & (i < 9) & (j < 99),
                           "tokens 6 to 8 see all tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_open_rows_are_named(name: str) -> None:
    points, seen, says = OPEN[name]
    folder = tiny_folder("llama")
    run = trace(folder, f"open-{name}".replace(" ", "-"), points=points, **opened(seen))
    found = diagnose(str(folder), str(run))
    (finding,) = found.findings
    assert (finding.cause, finding.certainty) == ("mask", "confirmed"), found.sentence
    assert says in finding.says


def test_a_rank_of_as_many_rows_as_differ_suggests_no_adapter() -> None:
    """Eight rows of noise have rank 8."""
    noise = np.random.default_rng(1).standard_normal((8, 256)).astype(np.float32)

    def make() -> Any:
        def alter(point: str, layer: int, x: Any) -> Any:
            if point != "attn_out" or layer != 1:
                return x
            made = np.array(x)
            made[:8] += noise[:, : made.shape[-1]]
            return made

        return alter

    folder = tiny_folder("llama")
    run = trace(folder, "open-noise", points=MODULES, ids=IDS, alter=make)
    found = diagnose(str(folder), str(run))
    assert found.verdict == "bug" and "adapter" not in found.sentence, found.sentence
