"""Seeded faults of `aprfmt/causes/forward/delta_net.py`.

Seen red: without their hypotheses these are placed, and not named.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from aprfmt.inference.recurrence import delta_rule_by_token
from tests.diagnosis.engine_changes import DELTA, KIMI, LOGITS, How, decay, placed, softplus
from tests.diagnosis.engines import broken_here
from tests.diagnosis.head_changes import exchanged_decays
from tests.diagnosis.making import engine


def unit(x: Any) -> Any:
    """Return vectors of length one."""
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def delta(keys: Callable[[Any], Any], each: Callable[[Any, int], Any], *, rule: bool = True) -> How:
    """Run the delta rule with other keys, another mapping of key heads, or without its error."""

    def change(here: Any, op: Any, q: Any, k: Any, v: Any, g: Any, b: Any, state: Any) -> Any:
        n = v.shape[1] // k.shape[1]
        q, k = each(unit(q), n) * np.float32(q.shape[-1] ** -0.5), each(keys(k), n)
        state = np.zeros((v.shape[1], k.shape[2], v.shape[2]), v.dtype)
        if rule:
            read, state = delta_rule_by_token(q, k, v, g, b, state)
            return read.astype(np.float32), state
        reads = []
        for t in range(len(q)):
            state = state * np.exp(g[t])[:, None, None]
            state = state + k[t][:, :, None] * (v[t] * b[t][:, None])[:, None, :]
            reads.append((q[t][:, None, :] @ state)[:, 0])
        return np.stack(reads).astype(np.float32), state

    return broken_here(delta=change)


def in_rows(x: Any, n: int) -> Any:
    """Let each key head serve n value heads in a row."""
    return np.repeat(x, n, axis=1)


def in_turn(x: Any, n: int) -> Any:
    """Let the key heads serve value heads in turn."""
    return np.tile(x, (1, n, 1))


def output_gate(here: Any, op: Any, x: Any, w: Any, gate: Any, kind: str, *, eps: float) -> Any:
    """Take a sigmoid for silu."""
    return op(x, w, gate, kind, eps=eps) / gate


def raw_strength(here: Any, op: Any, x: Any) -> Any:
    """Leave the sigmoid of beta out."""
    return x if here.point == "beta_mm" else op(x)


def conv_linear(here: Any, op: Any, x: Any, kind: str, **how: Any) -> Any:
    """Leave the activation behind the convolution out."""
    return x if here.point == "delta_qkv" else op(x, kind, **how)


def reversed_strength(here: Any, op: Any, x: Any) -> Any:
    """Give each head the beta of the head from the other end."""
    return op(x)[:, ::-1] if here.point == "beta_mm" else op(x)


NO_EXP = decay(lambda a, rate, dt: rate * softplus(a + dt))


RAW_KEYS = delta(lambda k: k, in_rows)


def sigmoid_left_out(
    here: Any, op: Any, x: Any, w: Any, gate: Any, kind: str, *, eps: float
) -> Any:
    """Take silu for the sigmoid."""
    return op(x, w, gate, kind, eps=eps) * gate


def first_channels(here: Any, op: Any, q: Any, k: Any, v: Any, g: Any, *rest: Any) -> Any:
    """Let every channel of a head decay as its first: a gated delta net's decay by head."""
    return op(q, k, v, np.repeat(g[..., :1], g.shape[-1], axis=-1), *rest)


def forgetful(here: Any, op: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    """Begin with an empty state in every token."""
    parts = [op(*(x[t : t + 1] for x in (q, k, v, *rest[:-1])), None) for t in range(len(q))]
    return np.concatenate([part[0] for part in parts]), parts[-1][1]


ENGINE_FAULTS = (
    engine("olmo-hybrid-strength", "olmo_hybrid", "a delta net's strength up to 1, not 2",
           "recurrence", "delta_strength", fine=True, hp={"delta_strength": 1.0}),
    engine("olmo-hybrid-coarse", "olmo_hybrid", "the same, outputs recorded", "recurrence",
           "delta_strength", hp={"delta_strength": 1.0}),
    placed("kimi-channels", KIMI, "every channel decays as its head's first", "recurrence",
           "decay", broken_here(delta=first_channels)),
    placed("kimi-keeps", KIMI, "nothing decays", "recurrence", "decay",
           decay(lambda a, rate, dt: 0 * a)),
    placed("kimi-silu", KIMI, "the output gate is silu", "recurrence", "delta_norm",
           broken_here(gated_norm=sigmoid_left_out)),
    placed("kimi-state", KIMI, "no state carried", "recurrence", "delta",
           broken_here(delta=forgetful)),
    placed("delta-dt-subtracted", DELTA, "dt_bias subtracted", "recurrence", "decay",
           decay(lambda a, rate, dt: -np.exp(rate) * softplus(a - dt))),
    placed("delta-rates", DELTA, "A_log without exp", "recurrence", "decay", NO_EXP),
    placed("delta-rates-logits", DELTA, "A_log without exp, from logits alone", "recurrence",
           "decay", NO_EXP, LOGITS),
    placed("delta-softplus", DELTA, "no softplus", "recurrence", "decay",
           decay(lambda a, rate, dt: -np.exp(rate) * (a + dt)), None),
    placed("delta-keeps", DELTA, "nothing decays", "recurrence", "decay",
           decay(lambda a, rate, dt: 0 * a), None),
    placed("delta-keys", DELTA, "keys not normalised", "recurrence", "delta", RAW_KEYS),
    placed("delta-keys-logits", DELTA, "keys not normalised, from logits alone", "recurrence",
           "delta", RAW_KEYS, LOGITS),
    placed("delta-key-heads", DELTA, "value heads read key heads in turn", "recurrence", "delta",
           delta(unit, in_turn), None),
    placed("delta-no-rule", DELTA, "values written, not their errors", "recurrence", "delta",
           delta(unit, in_rows, rule=False)),
    placed("delta-alpha-heads", DELTA, "the decay's heads reversed", "recurrence", "decay",
           decay(lambda a, rate, dt: -np.exp(rate) * softplus(a[:, ::-1] + dt))),
    placed("delta-alpha-heads-logits", DELTA, "the same, from logits alone", "recurrence",
           "decay", decay(lambda a, rate, dt: -np.exp(rate) * softplus(a[:, ::-1] + dt)), LOGITS),
    placed("delta-rate-heads", DELTA, "A_log and dt_bias reversed", "recurrence", "decay",
           decay(lambda a, rate, dt: -np.exp(rate[::-1]) * softplus(a + dt[::-1]))),
    placed("delta-beta-heads", DELTA, "beta's heads reversed", "recurrence", "beta",
           broken_here(sigmoid=reversed_strength)),
    placed("delta-beta", DELTA, "beta without its sigmoid", "recurrence", "beta",
           broken_here(sigmoid=raw_strength)),
    placed("delta-gate", DELTA, "the output gate is a sigmoid", "recurrence", "delta_norm",
           broken_here(gated_norm=output_gate)),
    placed("delta-conv-linear", DELTA, "no activation behind the convolution", "recurrence",
           "conv", broken_here(activate=conv_linear)),
    placed("delta-dt-heads", DELTA, "dt_bias of heads 1 and 4 exchanged", "recurrence", "decay",
           exchanged_decays([0, 4, 2, 3, 1, 5], [0, 1, 2, 3, 4, 5])),
    placed("delta-rate-head", DELTA, "head 2 has the A_log of head 0", "recurrence", "decay",
           exchanged_decays([0, 1, 2, 3, 4, 5], [0, 1, 0, 3, 4, 5])),
)  # fmt: skip
