"""Seeded faults of `aprfmt/causes/forward/norm_changes.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.dumps import as_npz, logits_only
from tests.diagnosis.engine_changes import (
    LAYERS,
    LOGITS,
    THREE,
    Here,
    How,
    before_mlp,
    dumped,
    last,
    placed,
    traced,
)
from tests.diagnosis.engines import COARSE, broken, broken_here


def uncentred(op: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
    """A layer norm that does not take the mean away."""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(eps)) * w + bias


def post_norms_left_out() -> Callable[..., Any]:
    """Leave out the norms right behind attention and the MLP: of four in a layer (olmo2)."""
    calls = iter(range(1 << 30))
    layers = 3

    def change(op: Any, x: Any, w: Any, **how: Any) -> Any:
        at = next(calls)
        return x if at < 4 * layers and at % 4 >= 2 else op(x, w, **how)

    return change


def keeping_mean(here_only: Here) -> How:
    """Divide by the root mean square in some layer norms, and keep the mean."""

    def change(here: Any, op: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
        if not here_only(here):
            return op(x, w, bias, eps=eps)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps)) * w
        return (y if bias is None else y + bias).astype(np.float32)

    return broken_here(layer_norm=change)


def centring(here_only: Here) -> How:
    """Take the mean away in some RMS norms."""

    def change(here: Any, op: Any, x: Any, *rest: Any, **how: Any) -> Any:
        return op(x - x.mean(-1, keepdims=True) if here_only(here) else x, *rest, **how)

    return broken_here(rms_norm=change)


def unbiased(here: Any, op: Any, x: Any, w: Any, bias: Any, *, eps: float) -> Any:
    """Divide by the deviation of n - 1 values."""
    y = x - x.mean(-1, keepdims=True)
    y = y / np.sqrt(x.var(-1, ddof=1, keepdims=True) + np.float32(eps)) * w
    return (y if bias is None else y + bias).astype(np.float32)


ENGINE_FAULTS = (
    traced("layers-norm-kind", "phi2", "layer norms keep the mean, from outputs of layers",
           ["norm_kind"], ["norm"], LAYERS, {}, backend=lambda: broken("layer_norm", uncentred)),
    traced("logits-post-norms", "olmo2", "norms behind the sublayers left out, logits alone",
           ["norm_skipped"], ["post_attention_norm"], LOGITS, {},
           backend=lambda: broken("rms_norm", post_norms_left_out())),
    dumped("hf-row-length", "qwen2", "rows are divided by their length, logits alone",
           ["norm_kind"], ["norm"], logits_only, as_npz, THREE,
           wrong=wrong.forwards("RMSNorm", wrong.by_length)),
    placed("norm-mean-last", "gpt2", "the last norm keeps the mean, from logits alone",
           "norm_kind", "norm", keeping_mean(last), LOGITS),
    placed("norm-mean-mid", "bloom", "the norms before the MLP keep the mean", "norm_kind",
           "norm", keeping_mean(before_mlp), COARSE),
    placed("norm-centred-last", "llama", "the last norm takes the mean away", "norm_kind", "norm",
           centring(last), COARSE),
    placed("norm-unbiased", "gpt2", "norms divide by the deviation of n - 1 values", "norm_kind",
           "norm", broken_here(layer_norm=unbiased), COARSE),
)  # fmt: skip
