"""Cached rows that are wrong in some key heads: the rows, and the heads, are named.

Seen red: only the interval of operations, unconfirmed: rows were exchanged in all heads together.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import LONG, broken_here, tiny_folder, trace
from tests.diagnosis.test_hypotheses import MODULES

IDS = LONG[:20]
NARROW = MODULES - {"attn"}  # attention's output behind its product alone
Edit = Callable[[Any], Any]  # of keys or values [tokens, heads, d]


def cached(edit: Edit, parts: str = "kv") -> Mapping[str, Any]:
    """Return arguments of `trace`: attention reads edited keys ("k"), values ("v") or both."""

    def scores(here: Any, op: Any, q: Any, k: Any, own: Any) -> Any:
        return op(q, edit(k) if "k" in parts else k, own)

    def mix(here: Any, op: Any, probs: Any, v: Any) -> Any:
        return op(probs, edit(v) if "v" in parts else v)

    return {"ids": IDS, **broken_here(scores=scores, mix=mix)}


def rows(first: int, last: int, heads: list[int], read: int = -1) -> Edit:
    """Return an edit by which tokens `first` to `last` have another token's row, or zeros."""

    def edit(x: Any) -> Any:
        made = x.copy()
        for token in range(first, last + 1):
            made[token, heads] = 0 if read < 0 else x[read, heads]
        return made

    return edit


CASES: Mapping[str, tuple[str, frozenset[str], Mapping[str, Any], str]] = {
    "zeros": ("llama", MODULES | {"attn"}, cached(rows(9, 11, [0])),
              "keys and values are not the tokens' own: attention reads zeros for tokens 9 to 11 "
              "in key head 0"),
    "zeros, behind the product": ("llama", NARROW, cached(rows(9, 10, [1])),
                                  "attention reads zeros for tokens 9 to 10 in key head 1"),
    "another row of values": ("llama", MODULES | {"attn"}, cached(rows(7, 7, [1], 6), "v"),
                              "values are not the tokens' own: attention reads the row of token 6 "
                              "for token 7 in key head 1"),
    "keys alone": ("qwen2", MODULES | {"attn"}, cached(rows(5, 5, [0]), "k"),
                   "keys are not the tokens' own: attention reads zeros for token 5 in key head 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_of_one_key_head_are_named(name: str) -> None:
    base, points, how, says = CASES[name]
    run = trace(tiny_folder(base), f"heads {name}", points=points, **how)
    found = diagnose(str(tiny_folder(base)), str(run))
    assert found.complete and found.confidence == "confirmed", found.sentence
    (one,) = found.findings
    assert one.cause == "kv_cache" and says in one.says


@pytest.mark.parametrize("points", [MODULES | {"attn"}, NARROW])
def test_rows_of_all_heads_are_of_none_alone(points: frozenset[str]) -> None:
    how = cached(rows(9, 9, [0, 1]))
    run = trace(tiny_folder("llama"), f"all heads {len(points)}", points=points, **how)
    found = diagnose(str(tiny_folder("llama")), str(run))
    assert found.confidence == "confirmed" and "key head" not in found.sentence
    assert [one.cause for one in found.findings] == ["kv_cache"]


def noisy(x: Any) -> Any:
    made = x.copy()
    made[9:, 0] += np.random.default_rng(2).normal(size=made[9:, 0].shape).astype(x.dtype)
    return made


def test_other_values_of_one_head_are_no_rows_of_the_cache() -> None:
    run = trace(tiny_folder("llama"), "noisy head", points=MODULES | {"attn"}, **cached(noisy))
    found = diagnose(str(tiny_folder("llama")), str(run))
    assert found.confidence == "unconfirmed" and "kv_cache" not in {
        one.cause for one in found.findings
    }
