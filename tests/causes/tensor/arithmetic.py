"""Seeded faults of `aprfmt/causes/tensor/arithmetic.py`."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from aprfmt.causes.forward.rounding import round_to_type
from aprfmt.causes.tensor import arithmetic
from tests.causes.faults import HIDDEN, NORM, UP, Fault, computed, moved
from tests.diagnosis import dumps
from tests.diagnosis.cut_results import CUT
from tests.diagnosis.engine_changes import (
    DELTA,
    KIMI,
    LAYERS,
    LOGITS,
    How,
    before_mlp,
    changed,
    decay,
    dumped,
    last,
    placed,
    softplus,
    steps,
    traced,
    without_offset,
)
from tests.diagnosis.engines import COARSE, broken, broken_here
from tests.diagnosis.making import engine


def _ulps(x: Any) -> Any:
    x = x.copy()
    x[::3] += 1
    return x


def through(name: str, encoding: str) -> Callable[[Any], Any]:
    """Return how values come back from an encoding."""
    from aprfmt.codecs import decode, encode

    return lambda x: decode(encoding, encode(encoding, x), x.shape)


_FACTORS = 1 + np.arange(HIDDEN)[:, None] / 50

FAULTS = (
    Fault("one added", "norm_offset", NORM, computed(NORM, lambda x: x + np.float32(1)),
          arithmetic.guess_norm_offset, "plus 1"),
    Fault("one taken", "norm_offset", NORM, computed(NORM, lambda x: x - np.float32(1)),
          arithmetic.guess_norm_offset, "minus 1"),
    Fault("one added twice, rounded", "norm_offset", NORM,
          computed(NORM, lambda x: ((x + 1).astype(ml_dtypes.bfloat16) + 1).astype(np.float32)),
          arithmetic.guess_norm_offset, "plus 2"),
    Fault("scaled", "scale", UP, computed(UP, lambda x: x * np.float32(8)), arithmetic.guess_scale,
          "sqrt(hidden_size)"),
    Fault("rows scaled", "scale", UP, computed(UP, lambda x: x * _FACTORS.astype(np.float32)),
          arithmetic.guess_scale, "a factor of its own"),
    Fault("columns scaled", "scale", UP, computed(UP, lambda x: x * _FACTORS.T.astype(np.float32)),
          arithmetic.guess_scale, "every column"),
    Fault("a unit in the last place", "rounding", UP, moved(UP, _ulps), arithmetic.guess_rounding,
          "one unit in the last place of BF16", quantized=False),
    Fault("rounded to f8", "rounding", UP,
          computed(UP, lambda x: x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)),
          arithmetic.guess_rounding, "rounded to F8_E4M3", quantized=False),
    Fault("went through Q4_0", "quantisation", UP, computed(UP, through(UP, "Q4_0")),
          arithmetic.guess_quantization,
          "quantized to Q4_0 and decoded again / encoded 64 of 64 rows again: equal"),
)  # fmt: skip


def of_q(here: Any) -> bool:
    """Stand behind q."""
    return bool(here.point == "v")


def cache_rounded(kind: Any, kept: tuple[str, ...] = ("keys", "values"), off: float = 0) -> How:
    """Keep keys and values in 16 bits, or one of them.

    Before it they are larger by the relative number `off`, as another order of sums has them.
    """

    def short(x: Any, what: str) -> Any:
        moved = x * np.float32(1 + off)
        return moved.astype(kind).astype(np.float32) if what in kept else x

    return broken_here(
        scores=lambda here, op, q, k, *rest: op(q, short(k, "keys"), *rest),
        mix=lambda here, op, probs, v: op(probs, short(v, "values")),
    )


ENGINE_FAULTS = (
    placed("delta-dt-third", DELTA, "dt_bias at a third", "scale", "L0.ssm_dt.bias",
           decay(lambda a, rate, dt: -np.exp(rate) * softplus(a + dt / 3))),
    placed("scan-dt-third", "granite_hybrid", "dt_bias at a third", "scale", "",
           steps(lambda raw, dt: softplus(raw + dt / 3))),
    placed("kimi-dt-more", KIMI, "dt_bias times 1.7", "scale", "L0.ssm_dt.bias",
           decay(lambda a, rate, dt: -np.exp(rate) * softplus(a + 1.7 * dt))),
    engine("norm-offset", "gemma", "norms multiply by w for 1 + w", "norm_offset", "norm_offset",
           backend=lambda: broken("rms_norm", lambda op, x, w, **k: op(x, w - 1, **k))),
    engine("layer-norm-offset", "nemotron", "LayerNorms multiply by w for 1 + w", "norm_offset",
           "norm_offset", backend=lambda: broken("shift", lambda op, x, by: x)),
    engine("scaled", "llama", "a weight times 1.5", "scale", "L1.ffn_down.weight",
           weights=changed("L1.ffn_down.weight", lambda x: 1.5 * x)),
    traced("logits-softmax-bf16", "llama", "probabilities rounded to bfloat16, from logits alone",
           ["rounding"], ["probs"], LOGITS, verdict="precision",
           backend=lambda: broken("probs", lambda op, *a: round_to_type(op(*a), "bfloat16"))),
    dumped("hf-clean", "gemma2", "nothing, every module's output as .npy", ["rounding"], [],
           dumps.everything, dumps.as_npy, {}, verdict="precision"),
    placed("norm-one-last", "gemma", "the last norm lacks its 1, from logits alone",
           "norm_offset", "norm_offset", without_offset(last), LOGITS),
    placed("norm-one-mid", "gemma", "the norms before the MLP lack their 1", "norm_offset",
           "norm_offset", without_offset(before_mlp), COARSE),
    placed("norm-one-q", "gemma3", "the norms of q lack their 1", "norm_offset", "norm_offset",
           without_offset(of_q), None),
    placed("cache-f16", "qwen2", "keys and values kept in float16", "rounding", "",
           cache_rounded(np.float16), COARSE, "precision"),
    placed("cache-f16-logits", "llama", "the same, from logits alone", "rounding", "",
           cache_rounded(np.float16), LOGITS, "precision"),
    placed("cache-values-f16", "starcoder2", "values alone kept in float16, outputs of layers",
           "rounding", "", cache_rounded(np.float16, ("values",)), LAYERS, "precision"),
    placed("cache-ties", "qwen3", "a cache in bfloat16 of keys and values that differ by 4e-6",
           "rounding", "", cache_rounded(ml_dtypes.bfloat16, off=4e-6), LOGITS, "precision"),
    *CUT,
)  # fmt: skip
