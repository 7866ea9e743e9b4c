"""Seeded faults of `aprfmt/causes/forward/convolution.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from aprfmt.inference.kv_cache import KVCache
from tests.diagnosis.engine_changes import DELTA, KIMI, LAYERS, LOGITS, placed, traced
from tests.diagnosis.engines import broken, broken_here
from tests.diagnosis.making import engine
from tests.model_values import LFM2


def late_taps(op: Any, window: Any, kernel: Any) -> Any:
    """Let the last tap be the next token's, of which the last token has none."""
    return op(np.concatenate([window[1:], 0 * window[:1]]), kernel)


def taps(change: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """Return a backend whose convolutions take another window or kernel."""
    return lambda: broken("convolve", lambda op, window, kernel: op(*change(window, kernel)))


def early(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Let each token's taps begin one position before."""
    return np.concatenate([0 * window[:1], window[:-1]]), kernel


def unreset(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Begin with rows of another sequence."""
    back = kernel.shape[1] - 1
    other = np.random.default_rng(5).standard_normal((back, window.shape[1]))
    return np.concatenate([other.astype(window.dtype), window[back:]]), kernel


def wrapped(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Begin with the last rows of the sequence, as circular padding does."""
    back = kernel.shape[1] - 1
    return np.concatenate([window[-back:], window[back:]]), kernel


def repeated(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Begin with the first row of the sequence, repeated."""
    back = kernel.shape[1] - 1
    return np.concatenate([window[back : back + 1].repeat(back, 0), window[back:]]), kernel


def alone(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Let each token see itself only, as steps without a state do."""
    return window, kernel * (np.arange(kernel.shape[1]) == kernel.shape[1] - 1)


def restarted(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Begin a pass with zeros, behind a cache too."""
    back = kernel.shape[1] - 1
    return np.concatenate([0 * window[:back], window[back:]]), kernel


def ungated(which: int) -> Any:
    """Return a backend that leaves out the first or the second gate of every convolution."""

    def make() -> Any:
        calls = iter(range(1 << 30))

        def change(op: Any, a: Any, b: Any) -> Any:
            gates = a.shape == b.shape and a.shape[-1] == LFM2["hidden_size"]
            return b if gates and next(calls) % 2 == which else op(a, b)

        return broken("mul", change)

    return make


def late(window: Any, kernel: Any) -> tuple[Any, Any]:
    """Let each token's taps end one position behind."""
    return np.concatenate([window[1:], 0 * window[:1]]), kernel


def biased_taps(change: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """Return a backend whose convolutions, which have biases, take another window or kernel."""
    return lambda: broken(
        "convolve", lambda op, window, kernel, *bias: op(*change(window, kernel), *bias)
    )


BEHIND = frozenset({"conv_in", "attn_out", "out", "logits"})
CHUNK = 5  # tokens


def _short(op: Any, window: Any, kernel: Any, *bias: Any) -> Any:
    """Convolve chunks that each begin with zeros."""
    back = kernel.shape[1] - 1
    found = []
    for at in range(0, len(window) - back, CHUNK):
        rows = np.array(window[at : at + CHUNK + back])
        rows[:back] = 0
        found.append(op(rows, kernel, *bias))
    return np.concatenate(found)


ENGINE_FAULTS = (
    engine("lfm2-chunks", "lfm2", f"the convolution begun anew at every chunk of {CHUNK}",
           "conv_state", "shortconv", fine=True, backend=lambda: broken("convolve", _short)),
    traced("logits-taps", "lfm2", "taps one position late, from logits alone", ["convolution"],
           ["shortconv"], LOGITS, {}, backend=lambda: broken("convolve", late_taps)),
    engine("lfm2-early", "lfm2", "taps one position early", "convolution", "shortconv",
           backend=taps(early)),
    engine("lfm2-early-fine", "lfm2", "the same, every point recorded", "convolution",
           "shortconv", fine=True, backend=taps(early)),
    engine("lfm2-reversed", "lfm2", "taps reversed", "convolution", "shortconv", fine=True,
           backend=taps(lambda window, kernel: (window, kernel[:, ::-1].copy()))),
    engine("lfm2-unreset", "lfm2", "state of another sequence", "conv_state", "shortconv",
           fine=True, backend=taps(unreset)),
    traced("lfm2-unreset-behind", "lfm2", "state of another sequence, seen behind the product",
           ["conv_state"], ["shortconv"], BEHIND, {}, backend=taps(unreset)),
    engine("lfm2-wrapped", "lfm2", "the convolution wraps around", "conv_state", "shortconv",
           backend=taps(wrapped)),
    engine("mamba-repeated", "mamba", "a convolution begins with its first row repeated",
           "conv_state", "ssm_conv1d", backend=biased_taps(repeated)),
    traced("layers-wrapped", "lfm2", "the convolution wraps around, from outputs of layers",
           ["conv_state"], ["shortconv"], LAYERS, {}, backend=taps(wrapped)),
    engine("lfm2-alone", "lfm2", "no state carried from step to step", "conv_state",
           "shortconv", backend=taps(alone)),
    engine("lfm2-gate-before", "lfm2", "the gate before the convolution left out", "convolution",
           "shortconv", fine=True, backend=ungated(0)),
    engine("lfm2-gate-after", "lfm2", "the gate after the convolution left out", "convolution",
           "shortconv", backend=ungated(1)),
    engine("lfm2-restarted", "lfm2", "no state carried to the recorded tokens",
           ("conv_state", "capture_rows"), "shortconv", fine=True, cached=20,
           backend=taps(restarted), cache=KVCache),
    engine("mamba-taps", "mamba", "taps one position late", "convolution", "ssm_conv1d",
           fine=True, backend=biased_taps(late)),
    placed("kimi-taps", KIMI, "kernels reversed", "convolution", "ssm_conv1d",
           broken_here(convolve=lambda here, op, x, k: op(x, k[:, ::-1].copy()))),
    placed("delta-taps", DELTA, "kernels reversed, from logits alone", "convolution",
           "ssm_conv1d", broken_here(convolve=lambda here, op, x, k: op(x, k[:, ::-1].copy())),
           LOGITS),
    placed("two-of-delta", DELTA, "no dt_bias and reversed kernels", "convolution missing_bias",
           "ssm_conv1d", {**broken_here(
               decay=lambda here, op, a, rate, dt: op(a, rate, 0 * dt),
               convolve=lambda here, op, x, k: op(x, k[:, ::-1].copy()))}, None),
)  # fmt: skip
