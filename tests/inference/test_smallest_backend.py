"""A backend of the required operations alone: the base class makes every other of these.

Seen red, each alone: rope's second half not turned, gate and up exchanged in `gated` and in
`swiglu_oai`, the last block of queries placed first, a cache's rows written one place too far.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.backends import base
from aprfmt.inference.backends.base import Backend, Heads, Numbers
from aprfmt.inference.loss import cross_entropy
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.inference.judge import backend, judged, rel
from tests.models import IDS

Array = Any


class Smallest(Backend):
    """numpy in float64, an operation in as few words as it takes."""

    name = "smallest"

    def array(self, x: Numbers) -> Array:
        return x.astype(np.float64)

    def to_numpy(self, x: Array) -> Numbers:
        return np.asarray(x)

    def zeros(self, shape: Sequence[int]) -> Array:
        return np.zeros(shape)

    def linear(self, x: Array, w: Any, bias: Array | None) -> Array:
        y = x @ w.array(self).reshape(w.n_rows, w.n_columns).T
        return y if bias is None else y + bias

    def softcap(self, x: Array, cap: float) -> Array:
        return np.tanh(x / cap) * cap

    def sigmoid(self, x: Array) -> Array:
        return 1 / (1 + np.exp(-x))

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        if kind == "silu":
            return x * self.sigmoid(x)
        assert kind == "gelu_tanh"
        return x * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def rms_norm(self, x: Array, weight: Array, *, eps: float, offset: int, cast: Any) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (weight + offset)

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        y = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) * weight
        return y if bias is None else y + bias

    def rope_table(
        self, positions: Numbers, inv_freq: Numbers, *, factor: float, cast: Any
    ) -> tuple[Array, Array]:
        angles = positions.astype(np.float64)[:, None] * inv_freq.astype(np.float64)
        return np.cos(angles) * factor, np.sin(angles) * factor

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        group = q.shape[1] // k.shape[1]
        found = np.einsum("thd,khd->htk", q, np.repeat(k, group, axis=1)) * heads.scale
        return found if heads.softcap is None else self.softcap(found, heads.softcap)

    def probs(self, scores: Array, heads: Heads) -> Array:
        e = np.exp(np.where(heads.mask, scores, -np.inf))
        total = e.sum(-1, keepdims=True)
        if heads.sinks is not None:
            total += np.exp(heads.sinks[:, None, None])
        return e / total

    def mix(self, probs: Array, v: Array) -> Array:
        return np.einsum("htk,khd->thd", probs, np.repeat(v, len(probs) // v.shape[1], axis=1))

    def concat(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts, axis=-1)

    def stack(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def take(self, x: Array, rows: Numbers) -> Array:
        return x[rows]

    def add_weighted(self, total: Array, rows: Numbers, y: Array, weights: Numbers) -> Array:
        total[rows] += y * weights[:, None]
        return total


def smallest(block: int) -> Smallest:
    found = Smallest("cpu", "float64")
    found.query_block = block
    return found


def test_the_required_operations_are_these_and_no_more() -> None:
    written = {name for name in vars(Smallest) if not name.startswith("_")} - {"name"}
    assert written == Backend.__abstractmethods__ and len(written) == 17
    lacking = type("Lacking", (Smallest,), {"mix": Backend.mix})
    with pytest.raises(TypeError, match="mix"):
        lacking("cpu", "float64")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3", "gpt2", "phi3", "qwen3_5"])
def test_required_operations_are_enough(name: str) -> None:
    """Softcap, windows; sinks, clamped experts; latents; learned positions; half a rope; states.

    Judged by transformers: our other backends share the defaults that are tried here.
    """
    expected = judged(name).true_logits
    with open_model(judged(name).folder) as model:
        for block in (base.QUERY_BLOCK, 7):
            with Session.open(model, smallest(block)) as session:
                assert rel(session.logits(IDS), expected) < 1e-12
        with Session.open(model, smallest(7)) as session:
            assert rel(session.prefill(IDS[:-2])[-1], expected[-3]) < 1e-12
            assert rel(session.step(IDS[-2]), expected[-2]) < 1e-12
            assert rel(session.step(IDS[-1]), expected[-1]) < 1e-12
            stats = session.trace(IDS, ["logits"], logits_rows="all").records["logits"].stats
    assert stats is not None and stats.mean == pytest.approx(float(expected.mean()), rel=1e-9)
    labels = np.asarray(IDS[1:])
    losses = smallest(7).cross_entropy(expected[:-1], labels)
    np.testing.assert_allclose(losses, cross_entropy(expected[:-1], labels), rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_a_number_is_rounded_as_the_dtype_holds_it(dtype: str) -> None:
    plain = Smallest("cpu", dtype)
    assert plain.itemsize == backend(f"torch:{dtype}").itemsize
    for value in (0.1, 22.627416997969522, 1.0 + 2**-9):
        assert plain.rounded(value) == backend(f"torch:{dtype}").rounded(value)
