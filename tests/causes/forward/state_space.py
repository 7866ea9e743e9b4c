"""Seeded faults of `aprfmt/causes/forward/state_space.py`.

Seen red: without their hypotheses these are placed, and not named; a state and a convolution that
are lost together were neither of the two.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.lightning import decay_slopes
from tests.diagnosis.engine_changes import LAYERS, LOGITS, How, placed, softplus, steps
from tests.diagnosis.engines import broken, broken_here
from tests.diagnosis.head_changes import exchanged_scan
from tests.diagnosis.making import engine
from tests.model_values import IDS


def undecayed(op: Any, x: Any, step: Any, rate: Any, *rest: Any) -> Any:
    """Keep the whole state."""
    return op(x, step, 0 * rate, *rest)


def decays_of_layer_0(op: Any, x: Any, step: Any, rate: Any, *rest: Any) -> Any:
    """Leave the layer out of the slopes."""
    return op(x, step, -decay_slopes(len(rate), 0, 4).astype(rate.dtype), *rest)


def without_gate() -> Any:
    """Return what alters a pass so that lightning attention has no gate."""
    held: dict[str, Any] = {}

    def alter(point: str, layer: int, x: Any) -> Any:
        if point == "lightning_norm":
            held["x"] = x
        return held["x"] if point == "lightning_gated" else x

    return alter


def scanned(change: Callable[..., Any]) -> Any:
    """Return a backend whose scans take other operands."""
    return lambda: broken("scan", lambda op, *given: op(*change(*given)))


def rated(change: Callable[[Any], Any]) -> Any:
    """Return a backend whose scans have other rates."""
    return lambda: broken("decay_rates", lambda op, logs: change(logs))


def dealt(x: Any, step: Any, rate: Any, b: Any, c: Any, skip: Any, state: Any) -> Any:
    """Deal the groups' B and C to the heads in turn."""
    order = np.arange(x.shape[1]) % b.shape[1]
    return x, step, rate, b[:, order], c[:, order], skip, state


def other_state() -> Any:
    """Return a backend whose first layer begins with the state of another sequence."""
    calls = iter(range(1 << 30))

    def change(op: Any, x: Any, step: Any, rate: Any, b: Any, *rest: Any) -> Any:
        shape = (x.shape[1], x.shape[2], b.shape[2])
        other = np.random.default_rng(5).standard_normal(shape).astype(x.dtype)
        state = rest[-1] if next(calls) else other
        return op(x, step, rate, b, *rest[:-1], state)

    return broken("scan", change)


def alone_scanned(op: Any, x: Any, step: Any, rate: Any, b: Any, c: Any, *rest: Any) -> Any:
    """Scan every token by itself, as steps without a state do."""
    found = [op(x[t:][:1], step[t:][:1], rate, b[t:][:1], c[t:][:1], rest[0], None)
             for t in range(len(x))]  # fmt: skip
    return np.concatenate([read for read, _ in found]), found[-1][1]


def unlimited(op: Any, raw: Any, bias: Any, low: float, high: float) -> Any:
    """Take time steps as they are."""
    return op(raw, bias, 0.0, np.inf)


def gated(**changed: Any) -> Any:
    """Return a backend whose gates and norms are applied otherwise."""
    return lambda: broken("gated_scan", lambda op, x, gate, weight, **how: op(
        x, gate, weight, **{**how, **changed}))  # fmt: skip


def rates(how: Callable[[Any], Any]) -> How:
    """Take other rates, of A_log."""
    return broken_here(decay_rates=lambda here, op, logs: np.asarray(how(logs), np.float32))


def skip(how: Callable[[Any], Any]) -> How:
    """Take another skip."""
    return broken_here(scan=lambda here, op, *args: op(*args[:5], how(args[5]), *args[6:]))


def written(factor: Callable[[Any, Any], Any]) -> How:
    """Write B x to the state times factor(step, rate), token by token."""

    def scan(here: Any, op: Any, x: Any, step: Any, rate: Any, b: Any, c: Any, skip: Any,
             state: Any) -> Any:  # fmt: skip
        rates = rate if rate.ndim == 2 else rate[:, None]
        if state is None:
            state = np.zeros((x.shape[1], x.shape[2], b.shape[2]), x.dtype)
        into, out = (np.repeat(y, x.shape[1] // y.shape[1], axis=1) for y in (b, c))
        reads = []
        for t in range(len(x)):
            dt = step[t][:, None]
            wrote = (factor(dt, rates) * into[t])[:, None] * x[t][:, :, None]
            state = np.exp(dt * rates)[:, None] * state + wrote
            reads.append((state * out[t][:, None]).sum(-1) + skip[:, None] * x[t])
        return np.stack(reads).astype(x.dtype), state

    return broken_here(scan=scan)


def norm_elsewhere(here: Any, op: Any, *args: Any, first: bool, **how: Any) -> Any:
    """Put the norm on the other side of the gate."""
    return op(*args, first=not first, **how)


CHUNK, PLACES = 5, (4, 11, 13)  # tokens, fewer than the records have


def _begin_anew(starts: tuple[int, ...]) -> Any:
    """Return an operation on rows and a state that loses the state at some tokens."""

    def change(op: Any, *given: Any) -> Any:
        *rows, state = given
        read = []
        for token in range(len(rows[0])):  # token by token, as in decoding
            here = None if token in starts else state
            each, state = op(*(x[token : token + 1] for x in rows), here)
            read.append(each)
        return np.concatenate(read), state

    return change


def _chunked(op: Any, x: Any, step: Any, rate: Any, b: Any, c: Any, skip: Any, state: Any) -> Any:
    """Scan in chunks that do not hand their state on."""
    parts = [slice(at, at + CHUNK) for at in range(0, len(x), CHUNK)]
    read = [op(x[s], step[s], rate, b[s], c[s], skip, None) for s in parts]
    return np.concatenate([each for each, _ in read]), read[-1][1]


def _convolve_anew(place: int) -> Any:
    """Let the convolution see zeros in place of the tokens before one."""

    def change(op: Any, window: Any, kernel: Any, *bias: Any) -> Any:
        back = kernel.shape[1] - 1
        later = np.concatenate([0 * window[:back], window[place + back :]])
        return np.concatenate([op(window[: place + back], kernel, *bias), op(later, kernel, *bias)])

    return change


def _scan_anew(place: int) -> Any:
    """Scan the tokens from one on without the state of those before it."""

    def change(op: Any, x: Any, step: Any, rate: Any, b: Any, c: Any, skip: Any, state: Any) -> Any:
        first, _ = op(x[:place], step[:place], rate, b[:place], c[:place], skip, state)
        then, state = op(x[place:], step[place:], rate, b[place:], c[place:], skip, None)
        return np.concatenate([first, then]), state

    return change


def begun_anew(place: int, op: str, change: Any) -> How:
    """Begin a mixer at a token as if it were the first: its state and its convolution."""
    made = {op: change, "convolve": _convolve_anew(place)}
    return broken_here(
        **{name: lambda here, *given, how=how: how(*given) for name, how in made.items()}
    )


ENGINE_FAULTS = (
    engine("mamba2-chunks", "mamba2", f"the state lost at every chunk of {CHUNK}", "ssm_state",
           "ssm_state", backend=lambda: broken("scan", _chunked)),
    engine("qwen3-next-breaks", "qwen3_next", f"the state lost at tokens {PLACES}", "ssm_state",
           "delta", fine=True, backend=lambda: broken("delta", _begin_anew(PLACES))),
    placed("layers-mamba-begun", "mamba", "state and convolution lost at token 8, by layers",
           "ssm_state", "ssm_state", begun_anew(8, "scan", _scan_anew(8)), LAYERS),
    placed("layers-bamba-begun", "bamba", "the same in a hybrid", "ssm_state", "ssm_state",
           begun_anew(8, "scan", _scan_anew(8)), LAYERS),
    placed("layers-delta-begun", "qwen3_next", "the same of a delta net", "ssm_state", "delta",
           begun_anew(8, "delta", _begin_anew((8,))), LAYERS),
    placed("layers-delta-lost", "qwen3_next", "its state alone", "ssm_state", "delta",
           broken_here(delta=lambda here, *given: _begin_anew((8,))(*given)), LAYERS),
    engine("minimax-undecayed", "minimax", "no head of lightning attention decays", "ssm_decay",
           "lightning", fine=True, backend=lambda: broken("scan", undecayed)),
    engine("minimax-first", "minimax", "every layer decays as the first", "ssm_decay", "lightning",
           backend=lambda: broken("scan", decays_of_layer_0)),
    engine("minimax-ungated", "minimax", "the gate left out", "ssm_gate", "lightning_gated",
           fine=True, alter=without_gate),
    engine("mamba-plus", "mamba", "A not negated", "ssm_decay", "ssm_a", backend=rated(np.exp),
           ids=IDS[:6]),
    engine("mamba-bare", "mamba", "A as it is stored, negated", "ssm_decay", "ssm_a", fine=True,
           backend=rated(np.negative), ids=IDS[:6]),
    engine("mamba-skip", "mamba", "no skip D x", "ssm_scan", "ssm_d", fine=True,
           backend=scanned(lambda *given: (*given[:5], 0 * given[5], given[6]))),
    engine("falcon-mamba-exchanged", "falcon_mamba", "B and C exchanged", "ssm_scan", "ssm_scan",
           fine=True, backend=scanned(
               lambda x, step, rate, b, c, *rest: (x, step, rate, c, b, *rest))),
    engine("mamba2-twice", "mamba2", "A of a GGUF taken for its logarithm", "ssm_decay", "ssm_a",
           backend=rated(lambda logs: -np.exp(-np.exp(logs)))),
    engine("mamba2-unlimited", "mamba2", "time steps without limits", "ssm_step", "ssm_step",
           fine=True, backend=lambda: broken("time_step", unlimited)),
    engine("mamba2-groups", "mamba2", "groups dealt to heads in turn", "ssm_scan", "ssm_scan",
           backend=scanned(dealt)),
    engine("mamba2-norm-of-all", "mamba2", "the gate's norm over all groups", "ssm_gate",
           "ssm_gated",
           fine=True, backend=gated(groups=1)),
    engine("mamba2-unreset", "mamba2", "the state of another sequence", "ssm_state",
           "L0.ssm_state",
           fine=True, backend=other_state),
    engine("mamba2-alone", "mamba2", "no state carried from step to step", "ssm_state", "ssm_state",
           backend=lambda: broken("scan", alone_scanned)),
    engine("mamba2-restarted", "mamba2", "no state carried to the recorded tokens",
           ("ssm_state", "capture_rows"), "ssm_state", fine=True, cached=20,
           cache=KVCache, backend=scanned(lambda *given: (*given[:6], None))),
    engine("nemotron-h-norm-first", "nemotron_h", "the norm before the gate", "ssm_gate",
           "ssm_gated",
           fine=True, backend=gated(first=True)),
    engine("bamba-undecayed", "bamba", "no state decays", "ssm_decay", "ssm_a", fine=True,
           backend=rated(lambda logs: 0 * logs)),
    engine("granite-hybrid-moe-softmax", "granite_hybrid_moe", "no skip D x in a mixture",
           "ssm_scan", "ssm_d", fine=True,
           backend=scanned(lambda *given: (*given[:5], 0 * given[5], given[6]))),
    engine("falcon-h1-late", "falcon_h1", "the norm behind the gate", "ssm_gate", "ssm_gated",
           fine=True, backend=gated(first=False)),
    placed("scan-rates", "mamba", "exp taken twice of A_log", "ssm_decay", "ssm_a",
           rates(lambda logs: -np.exp(np.exp(logs)))),
    placed("scan-rates-logits", "mamba2", "the same, from logits alone", "ssm_decay",
           "ssm_a", rates(lambda logs: -np.exp(np.exp(logs))), LOGITS),
    placed("scan-skip", "falcon_mamba", "no skip", "ssm_scan", "ssm_d", skip(lambda d: 0 * d)),
    placed("scan-skip-ones", "nemotron_h", "a skip of ones, from logits alone", "ssm_scan",
           "ssm_d", skip(lambda d: 0 * d + 1), LOGITS),
    placed("scan-softplus", "nemotron_h_moe", "no softplus", "ssm_step", "ssm_step",
           steps(lambda raw, dt: raw + dt), None),
    placed("scan-softplus-twice", "mamba", "softplus twice", "ssm_step", "ssm_step",
           steps(lambda raw, dt: softplus(softplus(raw + dt)))),
    placed("scan-first-limits", "mamba2", "limits of the first time steps, from logits alone",
           "ssm_step", "ssm_step",
           broken_here(time_step=lambda here, op, raw, dt, *limits: op(raw, dt, 0.001, 0.1)),
           LOGITS),
    placed("scan-norm", "falcon_h1", "the norm on the other side of the gate", "ssm_gate",
           "ssm_gated", broken_here(gated_scan=norm_elsewhere)),
    placed("scan-exact", "mamba", "B discretised exactly, outputs of layers", "ssm_scan",
           "ssm_scan", written(lambda dt, a: np.expm1(dt * a) / a), LAYERS),
    placed("scan-exact-heads", "mamba2", "the same of one rate a head", "ssm_scan",
           "ssm_scan", written(lambda dt, a: np.expm1(dt * a) / a)),
    placed("scan-bilinear", "falcon_mamba", "B discretised by the bilinear rule", "ssm_scan",
           "ssm_scan", written(lambda dt, a: dt / (1 - dt * a / 2))),
    placed("scan-unstepped", "nemotron_h", "B without its time step, from logits alone", "ssm_scan",
           "ssm_scan", written(lambda dt, a: 1 + 0 * a), LOGITS),
    placed("scan-bamba", "bamba", "no skip, beside attention", "ssm_scan", "ssm_d",
           skip(lambda d: 0 * d)),
    placed("scan-hybrid-moe", "granite_hybrid_moe", "nothing decays", "ssm_decay", "ssm_a",
           rates(lambda logs: 0 * logs)),
    placed("mamba2-skip-heads", "mamba2", "D of the first heads in turn", "ssm_scan", "ssm_d",
           exchanged_scan(5, [0, 1, 2, 0, 1, 2])),
    placed("mamba2-rate-heads", "mamba2", "A of a table of heads by its columns", "ssm_decay",
           "ssm_a", exchanged_scan(2, [0, 3, 1, 4, 2, 5])),
)  # fmt: skip
