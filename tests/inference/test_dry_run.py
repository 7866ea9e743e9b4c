"""`--dry-run` of what runs a model, held to what the run allocates.

The cache to the byte, weights to a fiftieth, the peak to a tenth.
"""

import math
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.base.protocols import LazyTensor
from aprfmt.errors import UsageError
from aprfmt.inference import memory_estimate
from aprfmt.inference.backends.torch_backend import TorchBackend
from aprfmt.inference.device import parse_run
from aprfmt.inference.expert_blocks import block_shape
from aprfmt.inference.fast import encoded, pages, placement
from aprfmt.inference.memory_estimate import (
    Estimate,
    _captured_shapes,
    _open_placement,
    _used_weights,
    add_devices,
    estimate_run,
    estimate_trace,
)
from aprfmt.inference.running import RunRequest, open_run
from aprfmt.inference.session import Session
from aprfmt.inference.weights import Weight
from aprfmt.model import Model, open_model
from tests.cli.run import aprfmt
from tests.inference.judge import judged
from tests.models import EVERY, save_tiny

pytestmark = pytest.mark.usefixtures("in_turn")
IDS = tuple(range(3, 63))
SIZES: Mapping[str, Any] = {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 2048}


def request(run: str, **more: Any) -> RunRequest:
    return RunRequest(ids=IDS, choice=parse_run(run), **more)


def ran(model: Model, asked: RunRequest, steps: int) -> Session:
    """Run a prompt and steps; the session, with what it holds."""
    with open_run(asked, model) as run:
        run.session.extend(list(asked.ids or ()))
        for _ in range(steps):
            run.session.extend([IDS[-1]])
        return run.session


def owner(x: Any) -> tuple[int, int]:
    """Return what an array's bytes belong to, and how many that are; 0 of a mapped file."""
    if hasattr(x, "untyped_storage"):
        return x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()
    if isinstance(x, memoryview):
        return id(x), x.nbytes  # a piece of huge pages
    while isinstance(x, np.ndarray) and x.base is not None:
        x = x.base
    return id(x), int(getattr(x, "nbytes", 0)) if isinstance(x, np.ndarray) else 0


def weights_of(session: Session) -> int:
    return sum(dict(owner(one) for one in session.weights.holder.placed_tensors()).values())


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("run", ["numpy", "numpy::float64", "torch::bfloat16", "torch::float32"])
def test_weights_and_cache_are_those_of_the_run(name: str, run: str) -> None:
    with open_model(judged(name).folder) as model:
        found = estimate_run(model, request(run), 3)
        session = ran(model, request(run), 3)
        assert session.cache is not None
        assert found.devices[0].cache_bytes == session.cache.nbytes > 0
        placed = weights_of(session)
        assert abs(found.devices[0].weights_bytes - placed) <= 0.02 * placed
        weights = session.weights
        used = weights.keys() - set(weights.unused_keys())
        assert found.read_bytes == sum(weights._rows[key].nbytes for key in used)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", EVERY)
def test_a_weight_is_counted_as_the_run_takes_it(
    name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU holds what is multiplied or looked up as it is stored, all else in the dtype.

    Seen red: experts' biases, routers in float32 and compressors' tables counted as stored.
    """
    multiplied: set[str] = set()
    numbers: set[str] = set()

    def noted(kind: Any, name: str, at: int, keys: set[str]) -> None:
        usual = getattr(kind, name)

        def note(*args: Any) -> Any:
            keys.add(args[at].key.partition("[")[0])
            return usual(*args)

        monkeypatch.setattr(kind, name, note)

    noted(TorchBackend, "linear", 2, multiplied)
    noted(TorchBackend, "embed", 1, multiplied)
    noted(Weight, "array", 0, numbers)
    asked = request("torch:cuda:float32", deterministic=deterministic)
    with open_model(judged(name).folder) as model:
        b = TorchBackend("cpu", "float32", deterministic=deterministic)
        with Session.open(model, b) as session:
            session.extend(list(IDS[:8]))
            session.extend(list(IDS[8:10]))
        on = _open_placement(asked.choice, asked.deterministic)
        counted = {one.key: one for one in _used_weights(model, on, asked, 10, 0, 1)}
    on_host = {key for key, one in counted.items() if not one.rows}
    assert numbers.isdisjoint(multiplied) and on_host == counted.keys() - multiplied - numbers
    assert {key for key, one in counted.items() if one.is_matrix} - on_host == multiplied


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """Return what a call allocates at most; huge pages come from the heap, to be counted."""
    monkeypatch.setattr(pages.Pages, "allocate", lambda self, size: memoryview(bytearray(size)))

    def peak(call: Callable[[], object]) -> int:
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        try:
            call()
            return tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()

    return peak


@pytest.fixture(params=["llama", "gemma3", "deepseek_v3", "qwen3_5", "mixtral", "gpt_oss"])
def large(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Model]:
    """A model that is large enough for Python's own objects not to count."""
    save_tiny(request.param, tmp_path / "m", "bfloat16", **SIZES)
    with open_model(tmp_path / "m") as model:
        yield model


@pytest.mark.parametrize(
    ("run", "tokens"), [("numpy", len(IDS)), ("numpy", 240), ("numpy::float64", 240)]
)
def test_the_peak_is_that_of_the_run(large: Model, run: str, tokens: int, traced: Any) -> None:
    """A long prompt's activations take as much as these small weights."""
    ids = tuple(range(3, 3 + tokens))
    asked = RunRequest(ids=ids, choice=parse_run(run))
    found = estimate_run(large, asked, 2).devices[0].peak_bytes
    ran(large, replace(asked, ids=ids[:2]), 0)  # imports are not counted
    taken = traced(lambda: ran(large, asked, 2))
    assert abs(found / taken - 1) < 0.1, (found, taken)


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_the_peak_of_torch_is_what_its_profiler_counts(arch: str, tmp_path: Path) -> None:
    """Its attention over 400 tokens makes all scores at once; in blocks it would be half."""
    from torch.profiler import ProfilerActivity, profile

    save_tiny(arch, tmp_path / "m", "bfloat16", **SIZES)
    ids = range(3, 403)
    asked = RunRequest(ids=tuple(ids), choice=parse_run("torch::float32"))
    with open_model(tmp_path / "m") as model:
        found = estimate_run(model, asked, 1).devices[0]
        with open_run(asked, model) as run:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
                run.session.extend(list(ids))
    rows = [row for row in seen.profiler.kineto_results.events() if row.name() == "[memory]"]
    sizes = [row.nbytes() for row in sorted(rows, key=lambda row: row.start_ns())]
    peak = int(np.cumsum(sizes).max())
    assert abs((found.peak_bytes - found.weights_bytes) / peak - 1) < 0.15


def test_the_peak_of_a_trace_is_that_of_the_run(large: Model, traced: Any) -> None:
    asked = request("numpy")
    found = estimate_trace(large, asked)

    def record() -> None:
        with open_run(asked, large) as run, run.trace() as trace:
            for key in trace.records:
                trace.recorded_values(key)

    taken = traced(record)
    assert found.devices[0].peak_bytes <= taken and found.values_bytes > 0
    with open_run(asked, large) as run, run.trace() as trace:
        sizes = [
            each.nbytes for key in trace.records if (each := trace.recorded_values(key)) is not None
        ]
    assert abs(found.values_bytes / sum(sizes) - 1) < 0.1


def test_a_weight_that_is_used_often_is_copied(tmp_path: Path) -> None:
    """Behind so many steps its stored bytes lie in memory too; the cache has grown twice."""
    save_tiny("llama", tmp_path / "m", "bfloat16", **SIZES)
    steps = encoded.MOVE_AT + 40
    with open_model(tmp_path / "m") as model:
        before = estimate_run(model, request("numpy"), 2).devices[0]
        found = estimate_run(model, request("numpy"), steps).devices[0]
        session = ran(model, request("numpy"), steps)
        assert session.cache is not None
        assert found.cache_bytes == session.cache.nbytes == 4 * before.cache_bytes
        assert found.weights_bytes == weights_of(session) > before.weights_bytes
        long = estimate_run(model, request("numpy"), 4000).devices[0]
        assert long.cache_bytes == before.cache_bytes * 4096 // 64
        assert long.weights_bytes == found.weights_bytes


def test_a_cache_grows_where_its_rows_are_full(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "m", "bfloat16")
    held: list[int] = []
    with open_model(tmp_path / "m") as model:
        for tokens in (63, 64, 65, 128, 129):
            asked = RunRequest(ids=(3,) * (tokens - 1), choice=parse_run("numpy"))
            session = ran(model, asked, 1)
            assert session.cache is not None
            held.append(session.cache.nbytes)
            assert estimate_run(model, asked, 1).devices[0].cache_bytes == held[-1]
    assert held == [held[0] * times for times in (1, 1, 2, 2, 4)]


@pytest.mark.parametrize("memory", [0, 200_000])
def test_a_budget_that_weights_do_not_fit_is_kept(memory: int, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "m", "bfloat16")
    with open_model(tmp_path / "m") as model:
        found = estimate_run(model, request("numpy", memory=memory), 2).devices[0]
        session = ran(model, request("numpy", memory=memory), 2)
        assert found.weights_bytes == weights_of(session) <= memory
        assert found.peak_bytes > found.weights_bytes + found.cache_bytes


def test_weights_through_an_encoding_are_exact(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "m", "bfloat16", **SIZES)
    with open_model(tmp_path / "m") as model:
        found = estimate_run(model, request("numpy", through="Q8_0"), 2).devices[0]
        assert found.weights_bytes == weights_of(ran(model, request("numpy", through="Q8_0"), 2))


def test_layers_are_split_over_gpus_as_a_run_splits_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = (("cuda:0", None), ("cuda:1", None)), True
    unknown = (("cuda:0", None),), True
    save_tiny("llama", tmp_path / "m", "bfloat16")
    monkeypatch.setattr(placement, "find_gpus", lambda device: unknown)
    with open_model(tmp_path / "m") as model:
        one = estimate_run(model, request("torch:cuda:bfloat16"), 4)
        monkeypatch.setattr(placement, "find_gpus", lambda device: two)
        both = estimate_run(model, request("torch:cuda:all:bfloat16"), 4)
        stored = dict(model.roles)
    assert [device.device for device in both.devices] == ["cuda:0", "cuda:1", "cpu"]
    first, second, _ = both.devices
    # Tables of tokens lie before the layers, the head behind them.
    layers = {"token_embd": 0, "L0": 0, "L1": 0, "L2": 1, "output_norm": 1, "output": 1}
    held = [0, 0]
    for key, tensor in stored.items():
        held[layers[key.partition(".")[0]]] += tensor.nbytes
    assert [first.weights_bytes, second.weights_bytes] == held
    assert one.devices[0].weights_bytes == sum(held)
    assert one.devices[0].cache_bytes == first.cache_bytes + second.cache_bytes
    assert first.cache_bytes == 2 * second.cache_bytes  # of three layers
    assert one.devices[0].free_bytes is None and one.devices[0].fits


def test_no_weight_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny("qwen3_5", tmp_path / "m", "bfloat16")
    read: list[str] = []
    with open_model(tmp_path / "m") as model:
        model.hyper  # noqa: B018 - some are read of small tensors
        kind = type(next(iter(model.source.tensors.values())))
        raw = kind.raw

        def noted(self: LazyTensor, *at: int) -> memoryview:
            read.append(self.info.name)
            return raw(self, *at)

        monkeypatch.setattr(kind, "raw", noted)
        for run in ("numpy", "torch::bfloat16", "torch:cuda"):
            estimate_run(model, request(run), 3)
            estimate_trace(model, request(run))
        assert not read
        model.roles["output_norm.weight"].numpy()
        assert read


def test_runs_that_stay_open_are_added(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "m", "bfloat16")
    with open_model(tmp_path / "m") as model:
        a, b = (estimate_trace(model, request(run)) for run in ("numpy", "numpy::float64"))
    found: tuple[Any, ...] = add_devices([a, b])
    assert len(found) == 1
    first, second = a.devices[0], b.devices[0]
    assert found[0].weights_bytes == first.weights_bytes + second.weights_bytes
    assert found[0].peak_bytes == first.weights_bytes + first.cache_bytes + second.peak_bytes


def test_an_engine_is_not_estimated(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "m")
    with open_model(tmp_path / "m") as model, pytest.raises(UsageError, match="manages its memory"):
        estimate_run(model, request("transformers"), 1)


def test_the_commands_say_it(demo_model: Path) -> None:
    ids = ("--ids", "1417,362,258")
    found = aprfmt("run", demo_model, *ids, "--max-tokens", "9", "--dry-run", "--json").json
    with open_model(demo_model) as model:
        expected: Estimate = estimate_run(
            model, RunRequest(ids=(1417, 362, 258), choice=parse_run("cpu")), 8
        )
    said = found["dry_run"]["runs"][0]
    assert (said["tokens"], said["steps"]) == (3, 8)
    one = {key: value for key, value in said["devices"][0].items() if key != "free_bytes"}
    assert one.items() <= expected.devices[0].to_json().items()
    text = aprfmt("parity", demo_model, "--between", "cpu", "transformers", *ids, "--dry-run")
    assert text.code == 0 and "cache" in text.out and "not counted" in text.out
    done = aprfmt("trace", demo_model, *ids, "--dry-run", "--engine", "transformers")
    assert done.code == 2 and "manages its memory itself" in done.err


@pytest.mark.parametrize(
    "name", ["qwen3_next", "kimi_linear", "lfm2", "mamba", "mamba2", "minimax", "deepseek_v3"]
)
def test_points_have_the_sizes_that_a_trace_of_them_has(name: str) -> None:
    """Fewer heads of keys than of values, a state of its own width: each point by itself."""
    ids = IDS[:7]
    with open_model(judged(name).folder) as model:
        said = {place.key: shape for place, shape in _captured_shapes(model, len(ids))}
        with open_run(RunRequest(ids=ids, choice=parse_run("numpy")), model) as run:
            trace = run.session.trace(ids, tuple(run.session.points), logits_rows="all", stop=False)
    found = {key: record.shape for key, record in trace.records.items() if key in said}
    assert len(found) > 20
    assert {key: math.prod(shape) for key, shape in found.items()} == {
        key: math.prod(said[key]) for key in found
    }


@pytest.mark.parametrize("tokens", [1, 7, 60, 600])
def test_experts_of_a_gpu_hold_every_row_of_their_blocks(tokens: int, tmp_path: Path) -> None:
    """Activations grow by the rows of all blocks, which hold every row an expert was chosen for."""
    save_tiny("mixtral", tmp_path / "m", "float32", **SIZES)
    with open_model(tmp_path / "m") as model:
        hp = model.hyper
        used, experts = int(hp["n_experts_used"]), int(hp["n_experts"])
        blocks, size = block_shape(tokens, used, experts)
        on = placement.place_torch("cuda", "float32", True)
        found = memory_estimate._mlp_size(model, on, {"experts": 1}, tokens, 0)
        hidden, width = int(hp["hidden_size"]), int(SIZES["intermediate_size"])
    assert blocks * size >= tokens * used
    assert found == 2 * tokens * hidden + blocks * size * max(3 * width, 2 * hidden + width)
    assert isinstance(found, int)
