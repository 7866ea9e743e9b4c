"""Recorded passes of the cupy backend, and what lets them do without the host.

Emulated, a replay runs the pass again with the host's numbers of the first time, so one that still
depends on them is found without a GPU. Seen red, each alone: a step's row of the cache and its mask
from the host's position; ids brought while a pass is recorded; one mask for two windows; places
that are not sorted by expert; equal numbers, and those that are none, ranked otherwise; a state
that is not read; steps of learned positions recorded; one mask of an encoder for two; garbage
collected while a pass is recorded.
"""

import gc
from typing import Any

import numpy as np
import pytest
from pytest import MonkeyPatch

from aprfmt.errors import ArchError, UsageError
from aprfmt.inference.backends.base import Backend
from aprfmt.inference.expert_blocks import block_shape
from aprfmt.inference.fast import graphs
from aprfmt.inference.fast.cuda import memory
from aprfmt.inference.fast.cupy_backend import CupyBackend
from aprfmt.inference.fast.cupy_experts import CupyMaths
from aprfmt.inference.fast.graphs import PassGraphs
from aprfmt.inference.recurrence import delta_rule
from aprfmt.inference.routing import ROUTERS, choose_experts
from aprfmt.inference.sampling import Sampler, Sampling
from aprfmt.inference.session import Session
from aprfmt.inference.state_space_scan import run_scan
from aprfmt.model import open_model
from tests.inference.encoders import IDS as ENCODED
from tests.inference.encoders import encoded
from tests.inference.gpu.machine import on
from tests.inference.judge import backend, judged, rel
from tests.inference.test_expert_blocks import HYPER
from tests.models import IDS

FEW = (
    "gemma2 float32", "qwen3_5 bfloat16", "mixtral float32", "bloom float32", "mamba2 float32",
    "gemma4 float32", "gemma3n float32", "kimi_linear float32", "minimax float32",
    "deepseek_v32 float32",
)  # fmt: skip
NAMES = (
    "gemma2", "qwen3_5", "bloom", "llama", "cohere2", "mamba", "mamba2", "falcon_h1", "nemotron_h",
    "gemma4", "gemma3n",
)  # fmt: skip
EXPERTS = (
    "mixtral", "gpt_oss", "deepseek_v3", "phimoe", "llama4", "qwen3_next", "nemotron_h_moe",
    "granite_hybrid_moe", "kimi_linear", "minimax", "deepseek_v32", "glm_moe_dsa",
)  # fmt: skip
# Weights of float32 stay that where the arithmetic has 16 bits: such experts are the host's.
RECORDED = [
    *(f"{name} float32" for name in (*NAMES, *EXPERTS)),
    *(f"{name} bfloat16" for name in NAMES),
]
OTHERS = [int(i) for i in np.random.default_rng(5).integers(0, 97, len(IDS))]


def recorded(session: Session) -> PassGraphs:
    found = session._graphs
    assert isinstance(found, PassGraphs)
    assert found._graphs and not found.refused, found.refused
    return found


def test_no_garbage_is_collected_while_a_pass_is_recorded(
    machine: Any, monkeypatch: MonkeyPatch
) -> None:
    begin, collecting = graphs._Recorded.run_recorded, []

    def then(found: graphs._Recorded) -> None:
        collecting.append(gc.isenabled())
        begin(found)

    monkeypatch.setattr(graphs._Recorded, "run_recorded", then)
    with open_model(judged("llama").folder) as model:
        with Session.open(model, CupyBackend("cuda", "float32")) as session:
            for _ in range(3):
                session.logits(IDS)
            recorded(session)
    assert not collecting[0]  # the others are replays, which run it again where they are emulated
    assert gc.isenabled()


@on("case", FEW, RECORDED)
def test_bits_are_equal_recorded_or_not(machine: Any, case: str) -> None:
    name, dtype = case.split()
    with open_model(judged(name).folder) as model:
        with Session.open(model, CupyBackend("cuda", dtype)) as session:
            plain = session.logits(IDS)
            replayed = [session.logits(ids) for ids in (IDS, OTHERS, IDS)]
            recorded(session)
        with Session.open(model, CupyBackend("cuda", dtype)) as session:
            others = session.logits(OTHERS)
    for found, expected in zip(replayed, (plain, others, plain), strict=True):
        np.testing.assert_array_equal(found, expected)


@on("name", ("mamba2", "gemma4", "deepseek_v32"), (*NAMES, *EXPERTS))
def test_prefills_are_recorded(machine: Any, name: str) -> None:
    """Into a cache, the last row's logits: states alone, and layers that run on that row only."""
    with open_model(judged(name).folder) as model:
        with Session.open(model, CupyBackend("cuda", "float32")) as session:
            given = (IDS, IDS, IDS, OTHERS, IDS)
            found = [np.array(session.prefill(ids), copy=True) for ids in given]
            recorded(session)
        with Session.open(model, CupyBackend("cuda", "float32")) as session:
            others = np.asarray(session.prefill(OTHERS))
    for each, expected in zip(found[1:], (found[0], found[0], others, found[0]), strict=True):
        np.testing.assert_array_equal(each, expected)


@on("name", ("gemma2", "bloom", "mixtral"), (*NAMES, *EXPERTS, "gemma3", "phi3"))
def test_recorded_steps_equal_the_prefill(machine: Any, name: str) -> None:
    """Twice, the second time behind another prompt; on a GPU over a cache that grows."""
    ids = list(IDS) if machine.name == "emulated" else [*IDS, *OTHERS, *OTHERS]
    with open_model(judged(name).folder) as model:
        with Session.open(model, CupyBackend("cuda", "float32")) as session:
            for given in (ids, ids[3:]):
                whole = session.logits(given)
                session.prefill(given[:-9])
                steps = np.stack([session.step(token) for token in given[-9:]])
                assert rel(steps, whole[-9:]) < 5e-6
            cache, found = session.cache, session._graphs
            assert isinstance(found, PassGraphs) and cache is not None
            steps_too = session._can_replay_steps and cache.can_truncate
            assert ("step" in {kind for kind, _ in found._graphs}) == steps_too, found.refused


@on("name", ("llama",), ("llama", "gpt_oss", "qwen3_5"))
def test_generation_is_the_cpus(machine: Any, name: str) -> None:
    found = []
    for b in (backend("numpy:float32"), CupyBackend("cuda", "float32")):
        with open_model(judged(name).folder) as model, Session.open(model, b) as session:
            made = [list(session.generate(IDS[:12], Sampler(Sampling()), 8)) for _ in range(3)]
            drawn = Sampling(0.8, top_k=20, seed=3)
            found.append([*made, list(session.generate(IDS[:12], Sampler(drawn), 8))])
    assert found[0] == found[1]


@on("name", ("gpt2",), ("gpt2",))
def test_learned_positions_end_behind_steps_too(
    machine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of such a model are not recorded: a replay would read rows behind the table's last."""
    monkeypatch.setattr("aprfmt.inference.kv_cache.ROWS", 128)  # room for more than the table has
    with open_model(judged(name).folder) as model:
        with Session.open(model, CupyBackend("cuda", "float32")) as session:
            last = session.weights["position_embd.weight"].n_rows
            session.prefill([*IDS, *OTHERS, *IDS][: last - 4])
            for token in IDS[:4]:
                session.step(token)
            with pytest.raises(UsageError, match="learned positions"):
                session.step(3)


@on("name", ("bert", "modernbert"), ("bert", "distilbert", "nomic_bert", "modernbert"))
def test_encoders_are_recorded(machine: Any, name: str) -> None:
    """Their masks are not causal; another sequence of the length shares them."""
    with open_model(encoded(name).folder) as model:
        with Session.open(model, CupyBackend("cuda", "float32")) as session:
            runs = [
                session.backend.to_numpy(session._run_pass(ids, None, None, "last"))
                for ids in (ENCODED, ENCODED, ENCODED[::-1], ENCODED)
            ]
            recorded(session)
        with Session.open(model, CupyBackend("cuda", "float32")) as session:
            other = session.backend.to_numpy(session._run_pass(ENCODED[::-1], None, None, "last"))
    for found, expected in zip(runs[1:], (runs[0], other, runs[0]), strict=True):
        np.testing.assert_array_equal(found, expected)


@on("name", ("opt",), ("opt", "apertus"))
def test_a_pass_that_needs_the_host_is_not_recorded(machine: Any, name: str) -> None:
    """Rows of positions behind others; an activation that is computed on the host."""
    with open_model(judged(name).folder) as model:
        with Session.open(model, CupyBackend("cuda", "float32")) as session:
            runs = [session.logits(IDS) for _ in range(3)]
            found = session._graphs
    assert isinstance(found, PassGraphs) and not found._graphs
    assert found.refused in ("rows are chosen on the host", "the host reads a value")
    np.testing.assert_array_equal(runs[1], runs[0])
    np.testing.assert_array_equal(runs[2], runs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("machine", ["gpu"], indirect=True)
@pytest.mark.parametrize("name", ["llama", "gemma2", "deepseek_v3"])
def test_traces_are_recorded_too(machine: Any, name: str) -> None:
    """Statistics of a replayed pass are those of a plain one, of other tokens as well."""
    with open_model(judged(name).folder) as model:
        with Session.open(model, CupyBackend("cuda", "float32")) as session:
            keys = [
                key
                for key in session.points
                if not key.endswith((".experts", ".router", ".expert_w", ".router_margin"))
            ]
            traces = [session.trace(ids, keys) for ids in (IDS, IDS, OTHERS, IDS)]
            recorded(session)
        with Session.open(model, CupyBackend("cuda", "float32")) as session:
            others = session.trace(OTHERS, keys)
    for found, expected in zip(traces[1:], (traces[0], others, traces[0]), strict=True):
        assert found.records.keys() == expected.records.keys()
        for key, record in expected.records.items():
            assert found.records[key].stats == record.stats, key


# what they are made of


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", 2e-6)])
@pytest.mark.parametrize("key_dim", [5, 40, 64, 130, 256, 257])
@pytest.mark.parametrize("by_channel", [False, True])
def test_the_delta_rule(
    machine: Any, dtype: str, bound: float, key_dim: int, by_channel: bool
) -> None:
    """In two pieces, the second from the first one's state; more than 256 keys on the host.

    The state decays by head, or by channel of the key.
    """
    random, b = np.random.default_rng(key_dim), CupyBackend("cuda", dtype)
    tokens, key_heads, heads, value_dim = 13, 2, 6, 11
    key_heads = heads if by_channel else key_heads
    q, k = random.standard_normal((2, tokens, key_heads, key_dim))
    v = random.standard_normal((tokens, heads, value_dim))
    shape = (tokens, heads, key_dim) if by_channel else (tokens, heads)
    decay, beta = -random.random(shape), random.random((tokens, heads))
    wanted, last = delta_rule(q, k, v, decay, beta, None, steps=True)
    found, state = [], None
    for part in (slice(0, 5), slice(5, tokens)):
        i, j, w, g, each = (b.array(x[part]) for x in (q, k, v, decay, beta))
        read, state = b.delta(i, j, w, g, each, state)
        found.append(b.to_numpy(read))
    assert rel(np.concatenate(found), wanted) < bound
    assert rel(b.to_numpy(state), last) < bound


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("count", [1, 3, 64, 300, 2000])
def test_an_indexer_chooses_what_the_host_chooses(
    machine: Any, monkeypatch: MonkeyPatch, dtype: str, count: int
) -> None:
    """Few kinds of keys and no fraction, so that many scores are equal, in every order of sums.

    Rows see none, some or all keys; heads and queries are computed in several rounds.
    """
    monkeypatch.setattr("aprfmt.inference.fast.cuda.attend.MOST_PRODUCTS", 9000)
    random, b = np.random.default_rng(count), CupyBackend("cuda", dtype)
    monkeypatch.setattr(b, "query_block", 4)
    tokens, keys, heads = 9, 700, 5
    q, k = random.integers(-2, 3, (tokens, heads, 6)), random.integers(-1, 2, (keys, 1, 6))
    weights = random.integers(-2, 3, (tokens, heads))
    mask = random.random((tokens, keys)) < np.linspace(0, 1, tokens)[:, None]
    placed = [b.array(x.astype(np.float64)) for x in (q, k, weights)]
    found, wanted = (
        each.to_numpy(
            each.chosen_keys(
                placed[0], placed[1], placed[2], mask, scale=0.5, count=count, causal=None
            )
        )
        != 0
        for each in (b, CupyBackend("cuda", dtype, deterministic=True))
    )
    np.testing.assert_array_equal(found, wanted)
    assert (found.sum(1) == np.minimum(mask.sum(1), count)).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_scores_that_are_no_numbers_are_chosen_last(machine: Any, dtype: str) -> None:
    b = CupyBackend("cuda", dtype)
    scores = np.array([[np.nan, 1, -np.inf, 2, np.inf, 2, np.nan, -0.0, 0.0]])
    mask = np.ones(scores.shape, np.uint8)
    for count, wanted in ((1, [4]), (2, [3, 4]), (5, [1, 3, 4, 5, 7]), (7, [1, 2, 3, 4, 5, 7, 8])):
        found = b._attention.choose_best(b.array(scores), memory.copy_to_gpu(mask), count)
        assert np.flatnonzero(b.to_numpy(found)[0]).tolist() == wanted, count


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_convolution_and_decay_are_those_of_the_host(machine: Any, dtype: str) -> None:
    random, b = np.random.default_rng(1), CupyBackend("cuda", dtype)
    window, kernel = random.standard_normal((9, 37)), random.standard_normal((37, 4))
    a, rate, shift = 20 * random.standard_normal((9, 37)), *random.standard_normal((2, 37))
    for name, given in (("convolve", (window, kernel)), ("decay", (a, rate, shift))):
        placed = [b.array(x) for x in given]
        found = b.to_numpy(getattr(b, name)(*placed))
        wanted = b.to_numpy(getattr(Backend, name)(b, *placed))
        assert rel(found, wanted) < (1e-15 if dtype == "float64" else 3e-7)


@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-13), ("float32", 2e-6)])
@pytest.mark.parametrize("each", [True, False], ids=["mamba", "mamba2"])
@pytest.mark.parametrize("size", [5, 40, 128, 256])
def test_a_scan(machine: Any, dtype: str, bound: float, each: bool, size: int) -> None:
    """In two pieces, the second from the first one's state."""
    random, b = np.random.default_rng(size), CupyBackend("cuda", dtype)
    tokens, heads, groups, width = 13, 6, 1 if each else 2, 1 if each else 11
    x = random.standard_normal((tokens, heads, width))
    step, skip = random.exponential(size=(tokens, heads)), random.standard_normal(heads)
    logs = random.standard_normal((heads, size) if each else heads)
    into, out = random.standard_normal((2, tokens, groups, size))
    wanted, last = run_scan(x, step, -np.exp(logs), into, out, skip, None, steps=True)
    found, state, rate = [], None, b.decay_rates(b.array(logs))
    for part in (slice(0, 5), slice(5, tokens)):
        y, t, i, o = (b.array(z[part]) for z in (x, step, into, out))
        read, state = b.scan(y, t, rate, i, o, b.array(skip), state)
        found.append(b.to_numpy(read))
    assert rel(np.concatenate(found), wanted) < bound
    assert rel(b.to_numpy(state), last) < bound


def test_a_scan_of_too_many_numbers_is_refused_by_name(machine: Any) -> None:
    b = CupyBackend("cuda", "float32")
    x, ones, wide = (b.zeros(shape) for shape in ((2, 3, 4), (2, 3), (2, 1, 257)))
    with pytest.raises(ArchError, match="ssm_state is 257"):
        b.scan(x, ones, b.zeros((3,)), wide, wide, b.zeros((3,)), None)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_steps_gates_and_biases_are_those_of_the_host(
    machine: Any, dtype: str, normed: bool, first: bool
) -> None:
    random, b = np.random.default_rng(1), CupyBackend("cuda", dtype)
    x, gate = (b.array(10 * y) for y in random.standard_normal((2, 9, 36)))
    weight, bias = (b.array(y) for y in random.standard_normal((2, 36)))
    bound = 1e-14 if dtype == "float64" else 5e-3 if "16" in dtype else 1e-6
    for name, given, options in (
        ("time_step", (x, bias, 0.125, 8.0), {}),
        ("gated_scan", (b.wide(x), gate, weight if normed else None),
         {"groups": 3, "eps": 0.01, "first": first}),
        ("convolve", (x, b.array(random.standard_normal((36, 4))), bias), {}),
    ):  # fmt: skip
        found = b.to_numpy(getattr(b, name)(*given, **options))
        wanted = b.to_numpy(getattr(Backend, name)(b, *given, **options))
        assert rel(found, wanted) < bound, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wide_stream_is_summed_and_normed_wide(machine: Any, dtype: str) -> None:
    random, b = np.random.default_rng(2), CupyBackend("cuda", dtype)
    x, y = (b.array(z) for z in random.standard_normal((2, 5, 33)))
    weight = b.array(random.standard_normal(33))
    total = b.add_wide(x, y)
    exact = b.to_numpy(x).astype(np.float64) + b.to_numpy(y)
    np.testing.assert_allclose(b.to_numpy(total), exact, rtol=1e-6)
    found = b.to_numpy(b.rms_norm(total, weight, eps=0.01, offset=0, cast="after_weight"))
    root = np.sqrt((exact**2).mean(-1, keepdims=True) + 0.01)
    assert rel(found, exact / root * b.to_numpy(weight)) < (5e-3 if "16" in dtype else 1e-6)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("biased", [False, True])
def test_routers_choose_alike(machine: Any, name: str, biased: bool) -> None:
    random, b = np.random.default_rng(3), CupyBackend("cuda", "float64")
    x = random.standard_normal((300, 16))
    x[:40] = np.round(x[:40])  # equal ones: the first is chosen
    bias = random.standard_normal(16) if biased else None
    hp = HYPER | {"router": name}
    wanted = choose_experts(x, bias, hp)
    found = choose_experts(
        b.array(x), None if bias is None else b.array(bias), hp, CupyMaths(b._ops)
    )
    np.testing.assert_array_equal(b.to_numpy(found.experts), wanted.experts)
    np.testing.assert_allclose(b.to_numpy(found.weights), wanted.weights, rtol=1e-13)
    np.testing.assert_allclose(b.to_numpy(found.margin), wanted.margin, rtol=1e-9, atol=1e-14)


def test_numbers_that_are_none_rank_last(machine: Any) -> None:
    b = CupyBackend("cuda", "float32")
    x = np.array([[1, np.nan, 3, 1, np.nan, -np.inf], [np.nan] * 6], np.float32)
    found = b.to_numpy(CupyMaths(b._ops).ranked(b.array(x)))
    np.testing.assert_array_equal(found, np.argsort(-x, axis=-1, kind="stable"))


@pytest.mark.parametrize(
    ("tokens", "used", "experts"),
    [(1, 1, 1), (1, 4, 16), (50, 3, 9), (512, 4, 16), (40, 2, 128), (600, 2, 3)],
)
@pytest.mark.parametrize("choice", ["any", "the same", "last"])
def test_every_token_finds_its_rows_by_ascending_expert(
    machine: Any, tokens: int, used: int, experts: int, choice: str
) -> None:
    random, b = np.random.default_rng(5), CupyBackend("cuda", "float64")
    chosen = np.stack([random.permutation(experts)[:used] for _ in range(tokens)])
    if choice != "any":
        first = 0 if choice == "the same" else experts - used
        chosen = np.tile(np.arange(first, first + used)[::-1], (tokens, 1))
    weights = random.random((tokens, used)) + 1
    found = b._lay_out_blocks(b._uploads.row_numbers(chosen), b.array(weights), experts)
    assert (len(found.experts), found.size) == block_shape(tokens, used, experts)
    rows, flat, places, owners = (
        b.to_numpy(x) for x in (found.rows, found.weights, found.places, found.experts)
    )
    order = np.argsort(chosen, -1)
    np.testing.assert_array_equal(rows[places], np.arange(tokens)[:, None].repeat(used, 1))
    np.testing.assert_array_equal(
        owners[places // found.size], np.take_along_axis(chosen, order, -1)
    )
    np.testing.assert_array_equal(flat[places], np.take_along_axis(weights, order, -1))
    padding = np.delete(np.arange(len(rows)), places)
    assert not rows[padding].any() and not flat[padding].any()
    assert owners.min() >= 0 and owners.max() < experts
