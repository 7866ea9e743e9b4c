"""What is wrong in seeded engines: changes that faults of several causes share, and their makers.

A change is written on the backend's operations, between two points of the pass (`broken_here`) or
everywhere (`broken`), not with the makers of the hypotheses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.diagnosis import dumps
from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.engines import COARSE, Stale, broken_here, tiny_folder, trace
from tests.diagnosis.fault import Fault, Pair

Values = Callable[[Any], Mapping[str, Any]]


def heads(**facts: Any) -> Callable[..., Any]:
    """Return an operation of attention that gets other fields of Heads."""

    def change(op: Any, *args: Any) -> Any:
        *first, own = args
        new = {name: value(own) if callable(value) else value for name, value in facts.items()}
        return op(*first, replace(own, **new))

    return change


def left_out(kept: str, at: str) -> Callable[[], Callable[[str, int, Any], Any]]:
    """Return a maker of a pass in which the value at `kept` stands for the sum at `at`."""

    def fresh() -> Callable[[str, int, Any], Any]:
        held: dict[str, Any] = {}

        def alter(point: str, layer: int, x: Any) -> Any:
            if point == kept:
                held["x"] = x
            return held["x"] if point == at else x

        return alter

    return fresh


def stale(rows: Callable[[int], Sequence[int]], layer: int = 0) -> Callable[[Any, int], Stale]:
    """Return a maker of caches that give back other rows in one layer."""

    def make(backend: Any, n_layers: int) -> Stale:
        cache = Stale(backend, n_layers)
        cache.rows, cache.layer = rows, layer
        return cache

    return make


def number(weights: Any, key: str) -> Any:
    """Return a weight's values, writable."""
    return np.array(weights[key].numpy(), np.float32)


def changed(key: str, change: Callable[[Any], Any]) -> Values:
    """Return an overlay of one weight."""
    return lambda w: {key: change(number(w, key))}


ALL = lambda own: np.ones_like(own.mask)  # noqa: E731


FIVE: Mapping[str, Any] = {
    "hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 12,
    "intermediate_size": 70,
}  # fmt: skip


THREE: Mapping[str, Any] = dict(FIVE) | {
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10,
}  # fmt: skip


LAYERS: frozenset[str] = frozenset({"out", "logits"})


LOGITS: frozenset[str] = frozenset({"logits"})


def traced(
    name: str,
    base: str,
    says: str,
    causes: Sequence[str],
    where: Sequence[str],
    points: frozenset[str] | None,
    sizes: Mapping[str, Any] = FIVE,
    *,
    verdict: str = "bug",
    confidence: str = "confirmed",
    without_model: bool = False,
    **how: Any,
) -> Fault:
    """Return the fault of an engine's trace with these points, against the model.

    `without_model`: against the trace of a right engine, with no weights to compute with.
    """

    def make() -> Pair:
        folder = tiny_folder(base, **sizes)
        taken = None if "rename" in how else points
        found = trace(folder, f"engine-{name}", points=taken, **how)
        if not without_model:
            return folder, found
        return trace(folder, f"engine-{name}-right", points=points), found

    return Fault(name, base, says, make, tuple(causes), tuple(where), verdict, confidence)


def dumped(
    name: str,
    base: str,
    says: str,
    causes: Sequence[str],
    where: Sequence[str],
    keep: dumps.Keep,
    write: Callable[[Mapping[str, Any], str], Path],
    sizes: Mapping[str, Any],
    *,
    wrong: dumps.Break | None = None,
    verdict: str = "bug",
) -> Fault:
    """Return the fault of what transformers' modules gave, against the model."""
    return Fault(
        name,
        base,
        says,
        lambda: dumps.dump(base, name, sizes, wrong, keep, write),
        tuple(causes),
        tuple(where),
        verdict,
    )


SEVEN: dict[str, Any] = dict(FIVE) | {
    "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 6,
}  # fmt: skip


def rope(make: Any) -> dumps.Break:
    """Replace the rotation of q and k."""
    return wrong.function("apply_rotary_pos_emb", make)


How = Mapping[str, Any]


DELTA = "qwen3_5"


def placed(
    name: str, base: str, says: str, cause: str, where: str, how: How, points: Any = COARSE,
    verdict: str = "bug", confidence: str = "confirmed",
) -> Fault:  # fmt: skip
    """Return the fault of an engine that changes operations between two points of the pass."""

    def make() -> Pair:
        folder = tiny_folder(base)
        return folder, trace(folder, f"engine-{name}", points=points, **how)

    causes = tuple(cause.split())
    return Fault(name, base, says, make, causes, (where,) if where else (), verdict, confidence)


def decay(how: Callable[[Any, Any, Any], Any]) -> How:
    """Compute the decay's logarithm otherwise, of the product, A_log and dt_bias."""
    return broken_here(decay=lambda here, op, a, rate, dt: how(a, rate, dt).astype(np.float32))


def softplus(x: Any) -> Any:
    """Return log(1 + exp(x))."""
    return np.log1p(np.exp(x))


KIMI = "kimi_linear"


def steps(how: Callable[[Any, Any], Any]) -> How:
    """Take another time step, of the product and its bias."""

    def change(here: Any, op: Any, raw: Any, bias: Any, low: float, high: float) -> Any:
        return np.asarray(np.clip(how(raw, 0 if bias is None else bias), low, high), np.float32)

    return broken_here(time_step=change)


Here = Callable[[Any], bool]


def without_offset(here_only: Here) -> How:
    """Multiply by the weight alone in some norms of 1 + weight."""

    def change(here: Any, op: Any, x: Any, w: Any, *, offset: int, **how: Any) -> Any:
        return op(x, w, offset=0 if here_only(here) else offset, **how)

    return broken_here(rms_norm=change)


def last(here: Any) -> bool:
    """Stand before the head of a model of three layers."""
    return bool(here.point == "out" and here.layer == 3)


def before_mlp(here: Any) -> bool:
    """Stand before the MLP."""
    return bool(here.point == "mid")


V4, M3 = "deepseek_v4", "minimax_m3_vl"


V4, M3 = "deepseek_v4", "minimax_m3_vl"
