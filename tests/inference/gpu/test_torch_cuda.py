"""The torch backend on a GPU against numpy in float64: every architecture, point by point.

Seen red: weights taken for joined that only lie side by side in memory; steps of a model whose
frequencies follow the length compared with one prefill.
"""

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from pytest import MonkeyPatch

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.fast import graphs
from aprfmt.inference.fast.graphs import PassGraphs
from aprfmt.inference.rope import depends_on_length
from aprfmt.inference.sampling import Sampler, Sampling
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.measure.tolerances import DISCRETE, run_tolerance
from aprfmt.model import open_model
from tests.inference.gpu.on_gpu import cuda, need
from tests.inference.judge import backend, judged, rel, run, traced, traced64
from tests.models import EVERY, IDS, MAKERS

pytestmark = pytest.mark.gpu
LONG = [int(i) for i in np.random.default_rng(5).integers(0, 97, 150)]
DENSE = ["llama", "qwen2", "gemma2", "gemma3", "gpt2", "cohere", "olmo2", "phi2", "deepseek_v2"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    need()
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("name", EVERY)
def test_float32_is_within_tolerance_at_every_point(name: str) -> None:
    logits, trace = traced(name, cuda())
    expected, reference = traced64(name)
    moe = bool(set(trace.records) & {f"L{layer}.router" for layer in range(8)})
    limit = run_tolerance("float32", "float64", moe=moe).rel_l2
    assert set(trace.records) == set(reference.records)
    for key in trace.records:
        if key.rpartition(".")[2] not in DISCRETE:
            assert rel(trace.recorded_values(key), reference.recorded_values(key)) < limit, key
    assert rel(logits, expected) < limit
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", EVERY)
def test_fused_operations_too(name: str) -> None:
    """Nothing recorded: one product for q, k, v, one kernel for the gated MLP."""
    logits, expected = run(name, cuda()), traced64(name)[0]
    assert rel(logits, expected) < 5e-6
    np.testing.assert_array_equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", MAKERS)
def test_float64_agrees(name: str) -> None:
    assert rel(run(name, cuda("float64")), traced64(name)[0]) < 1e-11


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_within_their_bound(name: str, dtype: str) -> None:
    expected = run(name, backend("torch:float64"))
    assert rel(run(name, cuda(dtype)), expected) < run_tolerance(dtype, "float64").rel_l2


def test_rms_norm_of_4_rows_of_896() -> None:
    random = np.random.default_rng(1)
    x, w = random.standard_normal((4, 896)), random.standard_normal(896)
    here, there = backend("numpy:float32"), cuda()
    found, expected = (
        b.to_numpy(b.rms_norm(b.array(x), b.array(w), eps=1e-6, offset=0, cast="before_weight"))
        for b in (there, here)
    )
    assert np.abs(found - expected).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "llama4", "phimoe"]
)
def test_runs_are_equal_to_the_bit_recorded_or_not(name: str, dtype: str) -> None:
    with open_model(judged(name).folder) as model, Session.open(model, cuda(dtype)) as session:
        runs = [session.logits(LONG[:60]) for _ in range(4)]
        graphs = session._graphs
        assert graphs is not None
        assert isinstance(graphs, PassGraphs)
        assert graphs._graphs and not graphs.refused, graphs.refused
    for again in runs[1:]:
        np.testing.assert_array_equal(again, runs[0])
    with open_model(judged(name).folder) as model, Session.open(model, cuda(dtype)) as session:
        np.testing.assert_array_equal(session.logits(LONG[:60]), runs[0])


def test_what_another_session_recorded_is_not_freed_meanwhile(monkeypatch: MonkeyPatch) -> None:
    """The collector would free a graph and pinned memory, which ends a recording."""
    old: list[object] = []
    begin, ages = graphs._Recorded.run_recorded, gc.get_threshold()

    def with_garbage(recorded: graphs._Recorded) -> None:
        ring = list(old)
        old.clear()
        ring.append(ring)
        del ring
        gc.set_threshold(1)
        begin(recorded)

    with open_model(judged("llama").folder) as model:
        with Session.open(model, cuda()) as session:
            before = [session.logits(IDS) for _ in range(3)]
            old.append(session._graphs)
        session._graphs = None
        monkeypatch.setattr(graphs._Recorded, "run_recorded", with_garbage)
        with Session.open(model, cuda()) as session:
            try:
                after = [session.logits(IDS) for _ in range(3)]
            finally:
                gc.set_threshold(*ages)
            found = session._graphs
            assert isinstance(found, PassGraphs)
            assert found._graphs and not found.refused, found.refused
    np.testing.assert_array_equal(after[-1], before[-1])


@pytest.mark.parametrize("name", EVERY)
def test_steps_equal_the_prefill(name: str) -> None:
    """The first step runs as it is, the second is recorded, later ones are replayed."""
    ids = list(IDS)
    with open_model(judged(name).folder) as model, Session.open(model, cuda()) as session:
        whole = session.logits(ids)
        if depends_on_length(
            model.hyper
        ):  # frequencies follow the length: a prefill for every step
            whole = np.stack([session.logits(ids[: n + 1])[-1] for n in range(len(ids))])
        session.prefill(ids[:9])
        steps = [session.step(token) for token in ids[9:]]
        again = session.prefill(ids[:9])
        repeated = [session.step(token) for token in ids[9:]]
        experts = bool(model.hyper["n_experts"])
    limit = run_tolerance("float32", "float32").rel_l2 if experts else 5e-6
    assert rel(np.stack(steps), whole[9:]) < limit
    assert rel(again[-1], whole[8]) < limit
    assert rel(np.stack(repeated), whole[9:]) < limit


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_cache_that_grows_under_recorded_steps(name: str) -> None:
    ids = LONG[:60] if name == "gpt2" else LONG
    with open_model(judged(name).folder) as model, Session.open(model, cuda()) as session:
        whole = session.logits(ids)
        session.prefill(ids[:20])
        steps = [session.step(token) for token in ids[20:]]
        session.truncate(30)
        back = [session.step(token) for token in ids[30:40]]
    assert rel(np.stack(steps), whole[20:]) < 5e-6
    assert rel(np.stack(back), whole[30:40]) < 5e-6


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss", "phi3", "llama-dynamic"])
def test_generation_is_the_cpus(name: str) -> None:
    found = {}
    for place, b in (("cpu", backend("numpy:float32")), ("cuda", cuda())):
        with open_model(judged(name).folder) as model, Session.open(model, b) as session:
            found[place] = list(session.generate(IDS[:12], Sampler(Sampling()), 20))
            drawn = Sampling(0.8, top_k=20, seed=3)
            found[place] += list(session.generate(IDS[:12], Sampler(drawn), 12))
    assert found["cuda"] == found["cpu"]


@pytest.mark.parametrize("run_", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt2", "gpt_oss", "cohere", "deepseek_v3", "olmo2", "qwen2_moe"]
)
def test_deterministic_bits_depend_on_nothing_else(name: str, run_: str) -> None:
    ids = LONG[:60] if name == "gpt2" else LONG
    b = cuda(run_, deterministic=True)
    with open_model(judged(name).folder) as model, Session.open(model, b) as session:
        whole = session.logits(ids)
        prefix = session.logits(ids[: len(ids) - 13])
        first = session.prefill(ids[: len(ids) - 6], "all")
        steps = np.stack([session.step(token) for token in ids[len(ids) - 6 :]])
    np.testing.assert_array_equal(prefix, whole[: len(prefix)])
    np.testing.assert_array_equal(first, whole[: len(first)])
    np.testing.assert_array_equal(steps, whole[len(first) :])


def test_statistics_of_a_trace_wait_on_the_device() -> None:
    with open_model(judged("gemma2").folder) as model, Session.open(model, cuda()) as session:
        keys = tuple(session.points)
        kept = KeptValues()
        values = session.trace(IDS, keys, keep=kept.keep, fetch=kept.fetch)
        waited = session.trace(IDS, keys)
        for _ in range(2):
            session.trace(IDS, keys)
    assert list(waited.records) == list(values.records)
    for key, record in waited.records.items():
        mine, theirs = record.stats, values.records[key].stats
        assert mine is not None and theirs is not None, key
        assert (mine.count, mine.min, mine.max) == (theirs.count, theirs.min, theirs.max), key
        assert mine.std == pytest.approx(theirs.std, rel=1e-9), key


def test_a_trace_ends_at_the_first_point_that_is_not_finite() -> None:
    with open_model(judged("llama").folder) as model:
        plain = Session.open(model, cuda())
        up = plain.weights["L1.ffn_up.weight"].numpy().copy()
        up[3, 5] = np.nan
        weights = plain.weights.with_arrays({"L1.ffn_up.weight": up})
        session = Session(model.spec, model.hyper, weights, plain.backend)
        trace = session.trace(IDS, tuple(session.points))
    assert trace.nonfinite == "L1.ffn_up" and list(trace.records)[-1] == "L1.ffn_up"


def test_facts_name_what_ran() -> None:
    b = cuda()
    b.zeros((1000, 1000))
    facts = b.facts()
    assert facts["device"] == "cuda:0" and facts["device_name"] == torch.cuda.get_device_name(0)
    assert facts["tf32"] is False and facts["memory_peak_bytes"] >= 4_000_000
    assert facts["driver"] is None or facts["driver"][0].isdigit()
    assert cuda(tf32=True).facts()["tf32"] is True
    with pytest.raises(BackendUnavailableError, match="expected cuda:0 to cuda:"):
        cuda(device="cuda:99")


def test_without_kernels_torch_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aprfmt.inference.fast.torch_cuda.kernels_problem", lambda: "no cupy")
    b = cuda()
    assert "none: no cupy" in b.facts()["kernels"]
    for name in ("llama", "gemma2", "gpt_oss"):
        assert rel(run(name, b), traced64(name)[0]) < 5e-6
        with open_model(judged(name).folder) as model, Session.open(model, b) as session:
            session.prefill(IDS[:9])
            steps = [session.step(token) for token in IDS[9:]]
        assert rel(np.stack(steps), traced64(name)[0][9:]) < 5e-6
