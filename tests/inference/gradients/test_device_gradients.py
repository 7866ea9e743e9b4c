"""Gradients of one batch in two runs: right ones are not accused, a wrong backward is placed.

Seen red, each alone: the arbiter in float32; a run held to bfloat16's rounding; the first wrong
point taken forward.
"""

import math
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.cli import render
from aprfmt.cli.step import output
from aprfmt.errors import UsageError
from aprfmt.inference.batch import Batch, read_batch
from aprfmt.inference.gradients import device_gradients
from aprfmt.inference.gradients.backend import GradientBackend
from aprfmt.inference.gradients.batch_gradients import batch_gradients
from aprfmt.inference.gradients.device_gradients import GradientGap, GradientRun, gradients_between
from aprfmt.inference.gradients.rounding_noise import NoisyPasses, RoundingNoise, largest_distance
from aprfmt.model import Model, open_model
from aprfmt.training.device_comparison import RunGradients, RunsReport, compare_runs
from tests.inference.gradient_judge import write_batch
from tests.models import save_tiny

_FOLDER = tempfile.TemporaryDirectory(prefix="aprfmt-between-")


@cache
def made(name: str, seed: int = 0) -> tuple[Model, Batch]:
    """Return a tiny model and a batch of it; `seed` is that of the model's weights."""
    folder = Path(_FOLDER.name) / f"{name}-{seed}"
    save_tiny(name, folder, seed=seed)
    write_batch(folder / "batch.npz", True)
    model = open_model(folder)
    return model, read_batch(folder / "batch.npz", int(model.hyper["vocab_size"]))


class _Bent(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Any, factor: float) -> Any:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


class _Noise(torch.autograd.Function):
    """The identity, whose gradient is multiplied by one plus noise."""

    @staticmethod
    def forward(ctx: Any, x: Any, noise: Any) -> Any:
        ctx.noise = noise
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (1 + ctx.noise), None


def wrong(name: str, factor: float, at: int) -> Callable[[str, str], GradientBackend]:
    """Return what opens a backend whose call number `at` of an operation has a wrong backward."""

    class Wrong(GradientBackend):
        calls = 0

    original = getattr(GradientBackend, name)

    def operation(self: Any, *args: Any, **options: Any) -> Any:
        Wrong.calls += 1
        out = original(self, *args, **options)
        return _Bent.apply(out, factor) if Wrong.calls == at + 1 else out  # type: ignore[no-untyped-call]

    setattr(Wrong, name, operation)
    return Wrong


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("llama", ("float64", "float32")),
        ("llama", ("float32", "bfloat16")),
        ("gemma2", ("float32", "float32")),
        ("mamba2", ("float32", "float64")),
    ],
)
def test_right_gradients_are_not_accused(name: str, dtypes: tuple[str, str]) -> None:
    found = gradients_between(*made(name), [GradientRun("cpu", dtype) for dtype in dtypes])
    assert found.agrees and not found.wrong and len(found.gaps) > 50
    assert all(found.first(run) is None for run in (0, 1))


# Models whose gradients bfloat16 moves by much of their size: recurrent states sum what cancels.
SENSITIVE = [("qwen3_5", 1), ("qwen3_5", 2), ("mamba2", 0), ("mamba2", 1), ("olmo_hybrid", 2)]


@pytest.mark.parametrize(("name", "seed"), [*SENSITIVE, ("mamba", 1), ("falcon_h1", 4)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_right_gradients_of_recurrent_states_are_not_accused(
    name: str, seed: int, dtype: str
) -> None:
    """Seen red: without passes that round at random; one of them alone held to its distance."""
    found = gradients_between(*made(name, seed), [GradientRun("cpu", dtype)] * 2)
    assert not found.wrong and not found.flips and len(found.gaps) > 50


@pytest.mark.parametrize(
    ("name", "seed", "at"), [("qwen3_5", 2, 8), ("mamba2", 0, 3), ("mamba2", 1, 3)]
)
@pytest.mark.parametrize("factor", [-1.0, 0.0, 8.0])
def test_a_wrong_backward_shows_beside_much_rounding(
    name: str, seed: int, at: int, factor: float
) -> None:
    """The fault is in the last layer's norm, where less rounding has come together.

    Seen red: a bound of any size for a gradient that rounding moves.
    """
    faulty = GradientRun("cpu", "bfloat16", wrong("rms_norm", factor, at))
    found = gradients_between(*made(name, seed), [GradientRun("cpu", "bfloat16"), faulty])
    assert found.wrong == (1,)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_noise_of_seven_percent_shows_in_few_bits(name: str) -> None:
    """In a matrix of the last layer. Seen red: a bound of 16 units of roundoff for every run."""

    class Noisy(GradientBackend):
        def linear(self, x: Any, w: Any, bias: Any) -> Any:
            y = super().linear(x, w, bias)
            if w.key != "L2.ffn_down.weight":
                return y
            random = torch.Generator().manual_seed(0)
            noise = 0.07 * torch.randn(y.shape, generator=random, dtype=torch.float64)
            return _Noise.apply(y, noise.to(y))  # type: ignore[no-untyped-call]

    runs = [GradientRun("cpu", "bfloat16"), GradientRun("cpu", "bfloat16", Noisy)]
    found = gradients_between(*made(name), runs)
    assert found.wrong == (1,)
    assert found.first(1) in ("L2.ffn_down.weight", "L2.ffn_mul", "L2.ffn_gate", "L2.ffn_act")


def test_a_gradient_that_rounding_may_leave_nothing_of_is_listed() -> None:
    found = gradients_between(*made("olmo_hybrid", 2), [GradientRun("cpu", "bfloat16")] * 2)
    lost = {gap.key for gap in found.gaps if gap.lost}
    assert lost and not found.agrees and not found.wrong
    assert all(max(gap.allowed) >= 1 for gap in found.gaps if gap.key in lost)
    folder = Path(_FOLDER.name) / "olmo_hybrid-2"
    report = compare_runs(folder, folder / "batch.npz", ["cpu:float32", "cpu:bfloat16"])
    said = report.pronounced
    assert said.exit == 2 and {row.name for row in said.not_compared} == lost
    assert {row.why for row in said.not_compared} == {"rounding hides it in cpu:bfloat16"}
    assert f"{len(report.gradients) - len(lost)} of {len(report.gradients)}" in said.says


@pytest.mark.parametrize(
    ("off", "lost"), [(0.01, ()), (0.21, ()), (0.5, ()), (0.51, (1,)), (1.0, (1,)), (1.2, ())]
)
def test_a_run_near_float64_has_kept_its_gradient(off: float, lost: tuple[int, ...]) -> None:
    """However much rounding explains. Seen red: a k bias of the 0.5B shape on a GPU, 0.21 off."""
    gap = GradientGap("L0.attn_k.bias", True, 1.0, (0.0, off), (1e-6, 1.1))
    assert gap.lost == lost and gap.wrong == ((1,) if off > 1.1 else ())


def test_random_roundings_move_as_far_as_two_right_results_are_apart() -> None:
    """In the root mean square a result is 1/sqrt(12) of a unit off; two are sqrt(2) times that."""
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) + 1
    with RoundingNoise(0):
        moved = x * 3
        copied, narrow = x.clone(), x.to(torch.bfloat16)
    units = (moved - x * 3) / torch.where(x * 3 < 4, 2.0**-22, 2.0**-21)
    assert {*units.tolist()} == {-1.0, 0.0, 1.0}
    assert float(units.square().mean()) == pytest.approx(1 / 6, rel=0.05)
    assert torch.equal(copied, x) and not torch.equal(narrow, x.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_random_roundings_make_no_infinity_and_no_nan(dtype: torch.dtype) -> None:
    largest, infinite = torch.finfo(dtype).max, float("inf")
    stays = torch.tensor([infinite, -infinite, float("nan")], dtype=dtype)
    ends = torch.tensor([0.0, -0.0, largest, -largest], dtype=dtype)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    with RoundingNoise(0):
        for _ in range(40):
            assert [*map(str, (stays * 1.0).tolist())] == ["inf", "-inf", "nan"]
            moved = (ends * 1.0).tolist()
            assert all(map(math.isfinite, moved)) and max(map(abs, moved[:2])) <= smallest
            assert dtype is torch.float16 or moved[:2] == [0.0, 0.0]


def test_a_pass_that_alone_overflows_says_nothing_of_rounding() -> None:
    right, other = np.array([3.0, 4.0]), np.array([3.0, 5.0])
    distance = partial(largest_distance, dtype="bfloat16")
    assert distance(right, other) == pytest.approx(4 / 2**0.5)
    assert distance(right, np.array([np.nan, 1])) == distance(right, None) == 0.0
    assert distance(np.array([np.inf, 1]), other) == distance(None, other) == np.inf


def test_a_small_rounding_of_many_elements_is_held_to_a_narrow_bound() -> None:
    """Seen red, each: in float32, of few elements, or where rounding is a large share."""
    for dtype, elements, share, times in (
        ("bfloat16", 64, 0.07, 1.5),
        ("float16", 64, 0.07, 1.5),
        ("float32", 64, 0.07, 4.0),
        ("bfloat16", 63, 0.07, 4.0),
        ("bfloat16", 64, 0.09, 4.0),
    ):
        right = np.ones(elements)
        found = largest_distance(right, (1 + share * 2**0.5) * right, dtype)
        assert found == pytest.approx(times * share * elements**0.5), (dtype, elements, share)


@pytest.mark.parametrize("name", ["llama", "mamba2", "qwen3_next"])
def test_a_run_is_judged_alike_beside_any_other(name: str) -> None:
    """Seen red: a run held to a bound without measurement where no other is in its dtype."""
    beside = [
        GradientRun("cpu", "bfloat16"),
        GradientRun("cpu", "float64"),
        GradientRun("cpu", "float32"),
        GradientRun("cpu", "float32", wrong("rms_norm", 1.02, 3)),
    ]
    judged = []
    for other in beside:
        found = gradients_between(*made(name), [GradientRun("cpu", "float32"), other])
        judged.append({gap.key: (gap.distances[0], gap.allowed[0]) for gap in found.gaps})
        assert found.first(0) is None
    assert judged[0] and all(each == judged[0] for each in judged)


# One layer's operation: its number of call, and the point at which its gradient is wrong first.
BENT = {
    "silu": ("activate", 1, "L1.ffn_gate"),
    "rope": ("rope", 2, "L1.q"),
    "norm": ("rms_norm", 3, "L1.mid"),
    "softmax": ("probs", 2, "L2.scores"),
}


@pytest.mark.parametrize("fault", BENT)
@pytest.mark.parametrize("run", [0, 1])
def test_a_wrong_backward_is_placed_and_its_run_named(fault: str, run: int) -> None:
    name, at, first = BENT[fault]
    runs = [GradientRun("cpu", "float32"), GradientRun("cpu", "float32")]
    runs[run] = GradientRun("cpu", "float32", wrong(name, 1.02, at))
    found = gradients_between(*made("llama"), runs)
    assert found.wrong == (run,) and not found.agrees
    assert found.first(run) == first and found.first(1 - run) is None
    last = next(gap for gap in found.gaps if gap.key == "L2.out")
    assert not last.wrong


def test_two_runs_that_are_wrong_alike_do_not_excuse_each_other() -> None:
    both = [GradientRun("cpu", "float32", wrong("activate", 1.02, 1)) for _ in range(2)]
    found = gradients_between(*made("llama"), both)
    assert found.wrong == (0, 1) and found.first(0) == found.first(1) == "L1.ffn_gate"


def test_one_run_is_nothing_to_compare() -> None:
    with pytest.raises(UsageError, match="1 run to compare"):
        gradients_between(*made("llama"), [GradientRun("cpu", "float32")])


def test_experts_chosen_otherwise_are_no_wrong_gradient() -> None:
    runs = [GradientRun("cpu", "float32"), GradientRun("cpu", "float32", _OtherExperts)]
    found = gradients_between(*made("mixtral"), runs)
    assert found.flips.keys() == {1} and not found.agrees and not found.wrong


class _OtherExperts(GradientBackend):
    """Its routers see their logits the other way round."""

    def router_numbers(self, x: Any) -> Any:
        return -super().router_numbers(x)


@pytest.mark.parametrize("update", [None, 0.25])
@pytest.mark.parametrize(
    ("wrong", "flips", "says"),
    [
        (None, (), "within what rounding explains"),
        ("L1.attn_q", (), "wrong first at L1.attn_q, 3 gradients in all"),
        ("L1.attn_q", ("L0.experts", "L1.experts"), "other experts at 2 points: not judged"),
    ],
)
def test_a_run_is_one_line_with_its_loss_and_its_step(
    wrong: str | None, flips: tuple[str, ...], says: str, update: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lines: list[str] = []
    monkeypatch.setattr(render, "say", lambda text, style="": lines.append(text))
    run = RunGradients("cpu:bfloat16", 2.5, wrong, 3 if wrong else 0, flips, update)
    output.show_runs(RunsReport("m", None, 2.25, (run,), (), (), ()), "m", verbose=False)
    (line,) = (each for each in lines if each.startswith("  cpu:bfloat16: loss 2.500000"))
    assert says in line and ("first step is 0.25 from" in line) is (update is not None)
    assert any("loss 2.250000 nats per label" in each for each in lines)


@pytest.mark.parametrize("parameter", [False, True])
def test_gradients_that_rounding_leaves_of_zero_are_listed_and_not_compared(
    parameter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every key is compared, left or missing, and none is two of these."""
    beneath, sizes = device_gradients._zero_norm, {}

    def floor(exact: Any, of_parameters: bool) -> float:
        if of_parameters is not parameter:
            return beneath(exact, of_parameters)
        mine = exact.by_role.values() if parameter else exact.points.values()
        sizes[parameter] = sorted(float(np.linalg.norm(x)) for x in mine)
        return sizes[parameter][4]  # five are that small, or smaller

    monkeypatch.setattr(device_gradients, "_zero_norm", floor)
    found = gradients_between(*made("llama"), [GradientRun("cpu", "float32")] * 2)
    assert len(found.open) == len(set(found.open)) == 5
    compared = [gap.key for gap in found.gaps]
    assert not {*compared} & {*found.open}
    smallest = min(gap.size for gap in found.gaps if gap.parameter is parameter)
    assert smallest == pytest.approx(sizes[parameter][5])


@pytest.mark.parametrize("name", ["mixtral", "qwen3_next", "deepseek_v3", "gemma3", "mamba2"])
def test_passes_that_round_at_random_stay_near_the_plain_one(name: str) -> None:
    """Seen red: the largest of some values moved, so that it is none of them in the backward."""
    model, batch = made(name)
    plain = batch_gradients(model, batch, dtype="float32")
    (noisy, *_) = NoisyPasses(lambda: batch_gradients(model, batch, dtype="float32"))
    for key in plain.keys:
        right, other = plain.gradient(key), noisy.gradient(key)
        off = float(np.linalg.norm(other - right))
        assert off <= 1e-3 * float(np.linalg.norm(right)), key
    assert any(not np.array_equal(plain.gradient(k), noisy.gradient(k)) for k in plain.keys)
