"""The cupy backend against numpy's float64, for every architecture, dtype and form.

Emulated, a few architectures; on a GPU all of them. Seen red, each alone: the epsilon left out of
the norm, pairs of the other rope style, a grouped head that reads the first key head, a rounding
left out.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import ArchError, BackendUnavailableError
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.backends.base import Heads
from aprfmt.inference.fast.cupy_backend import CupyBackend
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.measure.tolerances import DISCRETE, run_tolerance
from aprfmt.model import open_model
from aprfmt.tensors.stats import compute_stats
from tests.inference.gpu.machine import on
from tests.inference.judge import judged, median_row, rel, run, traced, traced64
from tests.inference.moved_keys import hidden_blocks_move_no_bit
from tests.models import EVERY, IDS, MAKERS

FEW = ("gemma2", "qwen3_5")
# 64 positions, and no more.
LEARNED = ("gpt2", "gpt_bigcode", "opt", "opt_350m", "bert_causal", "roberta_causal")


def cases(few: tuple[str, ...] = FEW, every: Any = MAKERS) -> pytest.MarkDecorator:
    """Parametrize (machine, name): `few` emulated, all on a GPU."""
    return on("name", few, every)


def cupy(dtype: str, **options: Any) -> CupyBackend:
    return CupyBackend("cuda", dtype, **options)


@cache
def reference(name: str) -> np.ndarray:
    """Return numpy's float64 logits, which the CPU suite holds to transformers'."""
    return run(name, BACKENDS["numpy"]("cpu", "float64"))


@cases(few=(*FEW, "mixtral", "gpt_oss"), every=EVERY)
def test_float64_and_float32_are_within_rounding(machine: Any, name: str) -> None:
    for dtype, bound in (("float64", 1e-12), ("float32", 5e-6)):
        assert rel(run(name, cupy(dtype)), reference(name)) < bound


@cases()
def test_every_point_of_a_float32_trace(machine: Any, name: str) -> None:
    """Stepped and fused, against the reference of every capture point."""
    _, expected_trace = traced64(name)
    _, found = traced(name, cupy("float32"))
    assert found.records.keys() == expected_trace.records.keys()
    for key, record in expected_trace.records.items():
        expected, values = expected_trace.recorded_values(key), found.recorded_values(key)
        assert expected is not None and values is not None
        if record.point in DISCRETE:
            if record.point == "experts":
                np.testing.assert_array_equal(values, expected)
            continue
        assert rel(values, expected) < run_tolerance("float32", "float64").rel_l2, key
        stats, wanted = found.records[key].stats, compute_stats(values)
        assert stats is not None
        assert stats.mean == pytest.approx(wanted.mean, rel=1e-9, abs=1e-12), key
        assert (stats.min, stats.max, stats.nan) == (wanted.min, wanted.max, wanted.nan), key


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@cases()
def test_sixteen_bits_are_within_their_bound(machine: Any, name: str, dtype: str) -> None:
    _, exact = traced64(name)
    moe = any(record.point == "router" for record in exact.records.values())
    bound = run_tolerance(dtype, "float64", moe=moe).rel_l2
    measure = median_row if moe else rel  # a rounding may choose another expert for a row
    assert measure(run(name, cupy(dtype)), reference(name)) < bound


@on("dtype", ("bfloat16", "float16"), ("bfloat16", "float16", "float32", "float64"))
def test_gates_are_clamped_as_numbers(machine: Any, dtype: str) -> None:
    """Seen red: numpy's clip of the 16 bits, which the arrays hold as integers."""
    gate, up = np.random.default_rng(0).normal(0, 4, (2, 5, 37)).astype(np.float32)
    b = cupy(dtype)
    found = b.clipped_gates(b.array(gate), b.array(up), 2.5)
    for values, expected in zip(found, (gate.clip(max=2.5), up.clip(-2.5, 2.5)), strict=True):
        np.testing.assert_array_equal(b.to_numpy(values), b.to_numpy(b.array(expected)))


@cases()
def test_steps_and_pieces_equal_the_prefill(machine: Any, name: str) -> None:
    ids = list(IDS)
    with open_model(judged(name).folder) as model, Session.open(model, cupy("float32")) as session:
        whole = session.logits(ids)
        session.truncate()
        parts = [session.extend(ids[:9], logits_rows="all")]
        parts += [session.extend(ids[9:20], logits_rows="all")]
        parts += [session.step(token)[None] for token in ids[20:]]
    assert rel(np.concatenate(parts), whole) < 5e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@cases(few=())
def test_deterministic_bits_depend_on_nothing_else(machine: Any, name: str, dtype: str) -> None:
    deterministic(name, dtype, 60 if name in LEARNED else 70)


@cases(few=("llama",), every=())
def test_deterministic_bits_of_a_short_sequence(machine: Any, name: str) -> None:
    deterministic(name, "bfloat16", 12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_sums_do_not_see_whole_blocks_of_hidden_keys(
    machine: Any, dtype: str
) -> None:
    """Seen red: blocks of 64 keys, as on the CPU, where a thread adds up every 256th."""
    hidden_blocks_move_no_bit(cupy(dtype, deterministic=True))


def deterministic(name: str, dtype: str, count: int) -> None:
    """Compare a sequence with itself, its prefix, its steps and the stepped attention."""
    ids = [int(i) for i in np.random.default_rng(5).integers(1, 97, count)]
    b = cupy(dtype, deterministic=True)
    with open_model(judged(name).folder) as model, Session.open(model, b) as session:
        whole = session.logits(ids)
        again = session.logits(ids)
        prefix = session.logits(ids[: count - 7])
        first = session.prefill(ids[: count - 4], "all")
        steps = np.stack([session.step(token) for token in ids[count - 4 :]])
        kept = KeptValues()
        trace = session.trace(
            ids,
            ["L1.scores", "L1.probs", "logits"],
            keep=kept.keep,
            fetch=kept.fetch,
            logits_rows="all",
        )
    np.testing.assert_array_equal(again, whole)
    np.testing.assert_array_equal(prefix, whole[: len(prefix)])
    np.testing.assert_array_equal(first, whole[: len(first)])
    np.testing.assert_array_equal(steps, whole[len(first) :])
    np.testing.assert_array_equal(trace.recorded_values("logits"), whole)


@cases(few=("llama",))
def test_runs_are_repeatable_bit_for_bit(machine: Any, name: str) -> None:
    first, second = (run(name, cupy("float32")) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@cases(few=("llama", "gpt_oss"), every=("llama", "deepseek_v3", "gpt_oss"))
def test_weights_that_do_not_fit_are_streamed(machine: Any, name: str) -> None:
    """Bits are equal, but of experts: those that are held are multiplied in blocks, not one by one.

    Seen red: addresses kept of experts that are placed for one use (gpt-oss', without rows).
    """
    whole = run(name, cupy("float32"))
    for budget in (0, 40_000):
        b = cupy("float32")
        with open_model(judged(name).folder) as model:
            with Session.open(model, b, memory=budget) as session:
                found = session.logits(IDS)
                if model.hyper["n_experts"]:
                    assert rel(found, whole) < 2e-6
                else:
                    np.testing.assert_array_equal(found, whole)
        facts = b.facts()
        assert facts["weights_streamed"] > 0 and facts["weights_held"] <= budget


def test_many_queries_by_cublas_equal_few_by_the_kernel(machine: Any, monkeypatch: Any) -> None:
    """Both attentions with groups, window, softcap and sinks."""
    random = np.random.default_rng(7)
    q, k, v = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((40, 6, 8), (40, 2, 8), (40, 2, 12))
    )
    place = np.arange(40)
    mask = (place[None] <= place[:, None]) & (place[None] > place[:, None] - 9)
    b, many = cupy("float32"), cupy("float32")
    for cap in (None, 1.5):
        for sinks in (None, random.standard_normal(6).astype(np.float32)):
            results = []
            for backend, limit in ((b, 256), (many, 1)):
                base = "aprfmt.inference.fast.cuda.attend."
                monkeypatch.setattr(base + "MANY_QUERIES", limit)
                monkeypatch.setattr(base + "QUERY_BLOCK", 16)
                heads = Heads(
                    mask, 0.3, cap, None if sinks is None else backend.array(sinks), "float32"
                )
                placed = (backend.array(x) for x in (q, k, v))
                mixed = backend.attention(next(placed), next(placed), next(placed), heads)
                results.append(backend.to_numpy(mixed))
            assert rel(results[1], results[0]) < 1e-6
            assert rel(results[0], reference_attention(q, k, v, mask, 0.3, cap, sinks)) < 1e-6


def reference_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    scale: float,
    cap: float | None,
    sinks: np.ndarray | None,
) -> np.ndarray:
    out = np.empty((len(q), q.shape[1], v.shape[-1]))
    for h in range(q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])
        s = q[:, h].astype(np.float64) @ k[:, g].astype(np.float64).T * scale
        s = s if cap is None else np.tanh(s / cap) * cap
        e = np.where(mask, np.exp(s), 0)
        total = e.sum(1) + (0 if sinks is None else np.exp(float(sinks[h])))
        out[:, h] = (e / total[:, None]) @ v[:, g]
    return out


ROUNDED: dict[str, Callable[[Any, np.ndarray], Any]] = {
    "silu": lambda b, x: b.activate(x, "silu", steps=False),
    "gelu": lambda b, x: b.activate(x, "gelu", steps=False),
    "gelu_tanh": lambda b, x: b.activate(x, "gelu_tanh", steps=False),
    "gelu_tanh steps": lambda b, x: b.activate(x, "gelu_tanh", steps=True),
    "relu": lambda b, x: b.activate(x, "relu", steps=False),
    "relu2": lambda b, x: b.activate(x, "relu2", steps=False),
    "sigmoid": lambda b, x: b.sigmoid(x),
    "softcap": lambda b, x: b.softcap(x, 1.7),
    "scale": lambda b, x: b.scale(x, 0.37),
    "add": lambda b, x: b.add(x, x[3]),
    "mul": lambda b, x: b.mul(x, x[3]),
    "mul rows": lambda b, x: b.mul(x[:, :1], x),
    "mean rows": lambda b, x: b.mean_rows(x),
    "add rows": lambda b, x: b.add(x.reshape(37, 2, 25), x[:, None, :25]),
    "swiglu_oai": lambda b, x: b.swiglu_oai(x, b.scale(x, 2.0), 1.1, 1.702),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ROUNDED)
def test_operations_round_where_torch_on_the_cpu_does(machine: Any, name: str, dtype: str) -> None:
    x = np.random.default_rng(3).standard_normal((37, 50)).astype(np.float32) * 3
    x[0, :4] = (0.0, -0.0, 30.0, -30.0)
    results = []
    for b in (cupy(dtype), BACKENDS["torch"]("cpu", dtype)):
        results.append(b.to_numpy(ROUNDED[name](b, b.array(x))))
    if dtype in ("bfloat16", "float16"):  # functions differ in last bits
        assert np.mean(results[0] != results[1]) < (0.1 if name == "gelu" else 0.01)
        assert rel(*results) < {"bfloat16": 4e-3, "float16": 5e-4}[dtype] * 0.1
    else:
        assert rel(*results) < {"float32": 3e-7, "float64": 1e-15}[dtype]


def test_not_a_number_is_counted_and_said(machine: Any) -> None:
    b = cupy("bfloat16")
    x = np.array([[1.0, np.nan], [np.inf, 0.0]], np.float32)
    stats = b.stats(b.array(x))
    assert (stats.nan, stats.inf, stats.zeros, stats.max) == (1, 1, 1, 1.0)
    with pytest.raises(ArchError, match="activation 'elu'"):
        b.activate(b.array(x), "elu", steps=False)


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(BackendUnavailableError, match="expected one of float32, float64"):
        CupyBackend("cuda", "int8")


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["gpu"], indirect=True)
def test_devices_that_are_not_there(machine: Any) -> None:
    with pytest.raises(BackendUnavailableError, match="there are"):
        CupyBackend("cuda:99", "float32")
    with pytest.raises(BackendUnavailableError, match="computes on cuda"):
        CupyBackend("cpu", "float32")
    facts = cupy("float32").facts()
    assert facts["tf32"] is False and facts["driver"] and facts["memory_total"] > 0
