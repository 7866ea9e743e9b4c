"""Backends that are wrong in one operation: what parity has to find."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.backends.numpy_backend import NumpyBackend
from aprfmt.inference.device import parse_run
from aprfmt.inference.parity.parity_records import Parity
from aprfmt.inference.parity.request import ParityRequest
from aprfmt.inference.parity.run_comparison import compare_choices
from aprfmt.model import open_model
from tests.inference.judge import judged
from tests.models import IDS


class WrongEps(NumpyBackend):
    """RMSNorm with the epsilon of another family."""

    name = "wrong-eps"

    def rms_norm(self, x: Any, weight: Any, *, eps: float, offset: int, cast: Any) -> Any:
        return super().rms_norm(x, weight, eps=eps * 30, offset=offset, cast=cast)


class WrongPairs(NumpyBackend):
    """Rope on adjacent pairs where halves are meant, left in their places."""

    name = "wrong-pairs"

    def rope(self, x: Any, table: Any, *, style: Any, cast: Any) -> Any:
        y = super().rope(x, table, style="interleaved", cast=cast)
        half = y.shape[-1] // 2
        return np.stack([y[..., :half], y[..., half:]], axis=-1).reshape(y.shape)


class NoBias(NumpyBackend):
    """Products that forget their bias."""

    name = "no-bias"

    def linear(self, x: Any, w: Any, bias: Any) -> Any:
        return super().linear(x, w, None)


class NoMask(NumpyBackend):
    """Attention that sees the future."""

    name = "no-mask"

    def probs(self, scores: Any, heads: Any) -> Any:
        from dataclasses import replace

        everything = np.ones_like(heads.mask)
        return super().probs(scores, replace(heads, mask=everything, causal=None))


class WrongActivation(NumpyBackend):
    """The erf gelu for the tanh one, and a silu that is too steep."""

    name = "wrong-activation"

    def activate(self, x: Any, kind: str, *, steps: bool) -> Any:
        if kind == "gelu_tanh":
            return super().activate(x, "gelu", steps=steps)
        return super().activate(x * np.float32(1.001), kind, steps=steps)


class Truncated(NumpyBackend):
    """A product that forgets its last input column, as a partial warp did."""

    name = "truncated"

    def linear(self, x: Any, w: Any, bias: Any) -> Any:
        x = np.array(x)
        x[..., -1] = 0
        return super().linear(x, w, bias)


class WrongLoss(NumpyBackend):
    """A forward pass that is right and a loss that is not: labels not shifted."""

    name = "wrong-loss"

    def cross_entropy(self, logits: Any, labels: Any) -> float:
        wide = logits - np.max(logits, axis=-1, keepdims=True)
        logs = wide - np.log(np.sum(np.exp(wide), axis=-1, keepdims=True))
        return float(np.mean(-np.take_along_axis(logs, np.roll(labels, 1)[:, None], -1)))


class Tf32(NumpyBackend):
    """Nothing wrong: products of TF32, as a GPU computes float32 ones where that is allowed."""

    def linear(self, x: Any, w: Any, bias: Any) -> Any:
        y = to_tf32(x) @ to_tf32(self.array(w.rows(0, w.n_rows))).T
        return y if bias is None else y + bias

    def facts(self) -> Any:
        return {**super().facts(), "tf32": True}


def to_tf32(x: Any) -> Any:
    """Round float32 to 11 bits of significand, to nearest with ties away from zero."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)).view(np.float32)


CROOKED = {
    backend.name: backend
    for backend in (WrongEps, WrongPairs, NoBias, NoMask, WrongActivation, Truncated, WrongLoss)
}


@contextmanager
def halved(
    model: Any, ids: Any, choice: Any, *, at: str = "final_norm", **options: Any
) -> Iterator[Any]:
    """Give numpy's trace with one point halved: an engine that is wrong in one place."""
    from dataclasses import replace

    from aprfmt.inference.device import choose_device
    from aprfmt.inference.running import RunRequest, run_and_trace

    wanted, rows = options.get("wanted"), options.get("logits_rows", "all")
    asked = RunRequest(tuple(ids), choose_device(), wanted=wanted, logits_rows=rows)
    with run_and_trace(asked, model) as trace:

        def fetch(key: str) -> Any:
            values = trace.fetch(key)
            return values / 2 if values is not None and key == at else values

        yield replace(trace, fetch=fetch, run={**trace.run, "backend": {"backend": "halves"}})


halved_logits = partial(halved, at="logits")


@pytest.fixture(autouse=True)
def crooked_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows = dict(BACKENDS._rows)
    for name, kind in CROOKED.items():
        rows[name] = (f"tests.inference.crooked:{kind.__name__}", "")
    monkeypatch.setattr(BACKENDS, "_rows", rows)
    yield


def compared(name: str, runs: list[str], **options: Any) -> Parity:
    with open_model(judged(name).folder) as model:
        return compare_choices(
            model, [parse_run(run) for run in runs], ParityRequest(IDS, **options)
        )
