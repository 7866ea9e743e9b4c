"""Experts routed on the device and multiplied in blocks give the numbers of the loop over them.

No backend of a CPU does so by itself: here torch's is told to, with a product for each block.

Seen red: rows of half a block in an estimate.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.inference.backends.torch_maths import TORCH
from aprfmt.inference.device import parse_run
from aprfmt.inference.expert_blocks import MOST, block_shape
from aprfmt.inference.fast.placement import WORKSPACE
from aprfmt.inference.fast.torch_products import lay_out_blocks
from aprfmt.inference.memory_estimate import estimate_run
from aprfmt.inference.routing import ROUTERS, choose_experts
from aprfmt.inference.running import RunRequest
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.model import open_model
from tests.inference.judge import backend, judged, rel
from tests.models import IDS, MAKERS, save_tiny

# Weights on outputs and on inputs, biases of experts and a clamped gate, groups, a shared expert.
NAMES = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "llama4", "phimoe", "ernie4_5_moe")
RUNS = ("torch:float64", "torch:float32", "torch:bfloat16")
HYPER = {
    "n_experts_used": 3, "norm_topk": True, "routed_scale": 1.7, "n_expert_groups": 4,
    "n_expert_groups_used": 2, "router_jitter": 0.01,
}  # fmt: skip


def told(patch: pytest.MonkeyPatch, run: str, *, blocks: bool) -> tuple[Any, list[str]]:
    """Return a CPU's backend that routes as a device does if `blocks`, and what it was asked."""
    arithmetic: Any = backend(run)
    calls: list[str] = []

    def all_held(stacks: Any) -> bool:
        calls.append("held")
        return blocks

    def found(logits: Any, bias: Any, hp: Any, *, rounds: bool, scale: Any = None) -> Any:
        calls.append("blocks")
        wide = arithmetic.wide(logits)
        given, factors = (
            None if one is None else torch.from_numpy(one.copy()).to(wide.dtype)
            for one in (bias, scale)
        )
        routing = choose_experts(wide, given, hp, TORCH, factors)
        weights = routing.weights
        if rounds:
            weights = arithmetic.wide(arithmetic.narrow(weights))
        return lay_out_blocks(routing.experts, weights, logits.shape[-1])

    def packed(experts: Any, weights: Any, n_experts: int) -> Any:
        given = torch.from_numpy(weights.copy()).to(arithmetic._wide)
        return lay_out_blocks(torch.from_numpy(experts.copy()), given, n_experts)

    patch.setattr(arithmetic, "can_stack_experts", all_held)
    patch.setattr(arithmetic, "route_blocks", found)
    patch.setattr(arithmetic, "pack_blocks", packed)
    return arithmetic, calls


def logits(
    patch: pytest.MonkeyPatch, name: str, run: str, ids: list[int], *, blocks: bool
) -> np.ndarray:
    arithmetic, calls = told(patch, run, blocks=blocks)
    with open_model(judged(name).folder) as model, Session.open(model, arithmetic) as session:
        result = session.logits(ids)
    assert calls, "no layer with experts ran"
    return result


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("ids", [IDS, IDS[:1], IDS * 9], ids=["prompt", "one", "long"])
def test_logits_are_those_of_the_loop(
    name: str, run: str, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name in MAKERS
    limit = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 8e-3}[run.rpartition(":")[2]]
    at_once, one_by_one = (
        logits(monkeypatch, name, run, list(ids), blocks=blocks) for blocks in (True, False)
    )
    assert rel(at_once, one_by_one) < limit


@pytest.mark.parametrize("name", NAMES)
def test_a_trace_gives_the_logits_of_the_plain_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experts are chosen on the host, where they are recorded, and multiplied in blocks too."""
    arithmetic, calls = told(monkeypatch, "torch:float64", blocks=True)
    with open_model(judged(name).folder) as model, Session.open(model, arithmetic) as session:
        plain = session.logits(IDS)
        count, kept = calls.count("blocks"), KeptValues()
        seen = [key for key in session.points if key.endswith((".experts", ".router"))]
        session.trace(IDS, (*seen, "logits"), keep=kept.keep, logits_rows="all")
        assert seen and calls.count("blocks") == count  # the device was not asked
        found = kept.fetch("logits")
    assert found is not None
    assert rel(found, plain) < 1e-13


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("biased", [False, True])
def test_routers_choose_alike_on_a_device(name: str, biased: bool) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((300, 16))
    x[:40] = np.round(x[:40])  # equal ones: the first is chosen
    bias = rng.standard_normal(16) if biased else None
    hp = HYPER | {"router": name}
    wanted = choose_experts(x, bias, hp)
    found = choose_experts(
        torch.from_numpy(x), None if bias is None else torch.from_numpy(bias), hp, TORCH
    )
    np.testing.assert_array_equal(found.experts.numpy(), wanted.experts)
    np.testing.assert_allclose(found.weights.numpy(), wanted.weights, rtol=1e-13)
    np.testing.assert_allclose(found.margin.numpy(), wanted.margin, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize(
    ("tokens", "used", "experts"),
    [(1, 1, 1), (1, 4, 16), (50, 3, 9), (512, 4, 16), (40, 2, 128), (2000, 2, 3)],
)
@pytest.mark.parametrize("choice", ["any", "the same", "last"])
def test_every_token_finds_its_rows_by_ascending_expert(
    tokens: int, used: int, experts: int, choice: str
) -> None:
    rng = np.random.default_rng(5)
    chosen = np.stack([rng.permutation(experts)[:used] for _ in range(tokens)])
    if choice != "any":
        first = 0 if choice == "the same" else experts - used
        chosen = np.tile(np.arange(first, first + used)[::-1], (tokens, 1))
    weights = rng.random((tokens, used)) + 1
    found = lay_out_blocks(torch.from_numpy(chosen), torch.from_numpy(weights), experts)
    assert (len(found.experts), found.size) == block_shape(tokens, used, experts)
    assert len(found.rows) == len(found.experts) * found.size
    rows, flat, places = (x.numpy() for x in (found.rows, found.weights, found.places))
    order = np.argsort(chosen, -1)
    np.testing.assert_array_equal(rows[places], np.arange(tokens)[:, None].repeat(used, 1))
    np.testing.assert_array_equal(
        found.experts.numpy()[places // found.size], np.take_along_axis(chosen, order, -1)
    )
    np.testing.assert_array_equal(flat[places], np.take_along_axis(weights, order, -1))
    assert len(np.unique(places)) == places.size == (flat > 0).sum()


def test_no_choice_needs_more_blocks_than_there_are() -> None:
    """The most blocks: all experts but one have one row more than full blocks."""
    for tokens, used, experts in ((7, 2, 5), (512, 4, 16), (4096, 8, 128), (3, 2, 64)):
        count, size = block_shape(tokens, used, experts)
        assert size <= MOST
        pairs = tokens * used
        few = min(experts, pairs)
        spare = pairs - few  # every one of `few` experts has a row
        assert few + spare // size == count


def test_an_estimate_of_a_gpu_counts_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pass on a CPU, every block's product written where the device writes it."""
    from torch.profiler import ProfilerActivity, profile

    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 512}
    save_tiny("mixtral", tmp_path / "m", "float32", **sizes)
    arithmetic, calls = told(monkeypatch, "torch:float32", blocks=True)

    def stacked(x: Any, stack: Any, experts: Any) -> Any:
        y = torch.empty((*x.shape[:2], stack.shape[1]))
        for at, expert in enumerate(experts.tolist()):
            torch.mm(x[at], stack.expert(expert).placed_on(arithmetic).T, out=y[at])
        return y

    monkeypatch.setattr(arithmetic, "multiply_stack", stacked)
    ids = [3 + i % 500 for i in range(400)]
    with open_model(tmp_path / "m") as model:
        asked = RunRequest(ids=tuple(ids), choice=parse_run("torch:cuda:float32"))
        found = estimate_run(model, asked, 0).devices[0]
        with Session.open(model, arithmetic) as session:
            session.extend(ids)  # weights are placed
            session.truncate()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                session.extend(ids)
            assert session.cache is not None
            cache = session.cache.nbytes
    assert calls
    rows = [row for row in seen.profiler.kineto_results.events() if row.name() == "[memory]"]
    sizes_taken = [row.nbytes() for row in sorted(rows, key=lambda row: row.start_ns())]
    peak = int(np.cumsum(sizes_taken).max()) + cache
    taken = peak + found.weights_bytes
    assert abs((found.peak_bytes - WORKSPACE) / taken - 1) < 0.1
