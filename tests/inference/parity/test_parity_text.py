"""Unusual text is never reported as a bug, in any arithmetic; real faults are still found on it.

Seen red: a loss bound that knows neither the dtype nor the size of the values, rows behind an
expert's flip held against the run, the scores of their keys too, text that no run does well on.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.base.outcome import Check
from aprfmt.conversion import convert
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.backends.torch_backend import TorchBackend
from aprfmt.inference.device import parse_run
from aprfmt.inference.parity.outcomes import measure_backend_loss
from aprfmt.inference.parity.parity_records import Parity
from aprfmt.inference.parity.request import ParityRequest
from aprfmt.inference.parity.run_comparison import compare_choices
from aprfmt.measure import tolerances
from aprfmt.measure.tolerances import BASE, ROUNDOFF, label_loss_bound, loss_bound
from aprfmt.model import open_model
from tests.inference.crooked import Tf32, WrongLoss
from tests.inference.judge import judged
from tests.models import IDS, VOCAB

RUNS = ("numpy", "torch:cpu:bfloat16", "torch:cpu:float16", "torch", "numpy:cpu:float64")
# The second is what random numbers gave; the last sends tokens to experts by slim margins.
PROMPTS = {
    "ascending": tuple(range(1, 9)),
    "random": (65, 80, 1, 78, 41, 58, 90, 6, 31, 57, 25, 64, 4, 22, 79, 94, 48, 15, 70, 36, 83),
    "one id": (5,) * 24,
    "rare": tuple(range(VOCAB - 1, VOCAB - 25, -1)),
    "two": (7, 50),
    "in turns": (3, 90) * 12,
}
# Dense ones that amplify rounding most, softcaps, and experts that flip.
MODELS = ("qwen2", "llama-yarn-factor", "gemma2", "mixtral-window", "deepseek_v3")


@pytest.fixture(autouse=True)
def more_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dict(BACKENDS._rows)
    for kind in (Tf32, WrongLoss):
        rows[kind.__name__.lower()] = (f"tests.inference.crooked:{kind.__name__}", "")
    monkeypatch.setattr(BACKENDS, "_rows", rows)


def compared(path: Path, runs: tuple[str, ...], ids: tuple[int, ...], **options: Any) -> Parity:
    with open_model(path) as model:
        return compare_choices(
            model, [parse_run(run) for run in runs], ParityRequest(ids, **options)
        )


def healthy(found: Parity) -> None:
    failed = [str(check) for check in found.checks if check.outcome == "FAIL"]
    assert not failed and found.exit_code == 0, failed
    assert found.pairs and {pair.verdict for pair in found.pairs} <= {"same", "precision"}
    for pair in found.pairs:
        losses = pair.losses
        assert losses.own_off is not None and losses.own_bound is not None, losses.why
        assert 0 <= losses.own_off <= losses.own_bound


def named(found: Parity, name: str, pair: int = 0) -> Check:
    return next(check for check in found.pairs[pair].report.checks if check.name == name)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", MODELS)
def test_unusual_text_is_no_bug(name: str, prompt: str) -> None:
    runs = (*RUNS, "tf32")
    found = compared(judged(name).folder, runs, PROMPTS[prompt], through="NF4", text="odd")
    healthy(found)
    for pair in found.pairs:
        assert pair.report.outcome == "PASS" and pair.diff.compared > 30


@pytest.mark.parametrize("prompt", PROMPTS)
def test_unusual_text_is_no_bug_of_a_quantized_file(
    prompt: str, demo_model: Path, tmp_path: Path
) -> None:
    target = tmp_path / "q.gguf"
    convert(demo_model, target, encoding="Q8_0")
    healthy(compared(target, RUNS, PROMPTS[prompt], text="odd"))


@pytest.mark.parametrize("text", ["zxqv 0x7f kernels jjjj 99 qqq", "\U0001f9ff\U0001fae0 ჰჲ \x00"])
@pytest.mark.parametrize("model", ["gemma", "smollm2"])
def test_unusual_text_is_no_bug_of_a_real_model(
    model: str, text: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    with open_model(path) as opened:
        assert opened.tokenizer is not None
        ids = tuple(opened.tokenizer.encode(text))
    healthy(compared(path, ("numpy", "torch:cpu:bfloat16"), ids, text=text))


def test_text_that_no_run_does_well_on_is_not_the_runs_fault() -> None:
    found = compared(
        judged("gpt2").folder, ("numpy", "torch"), PROMPTS["one id"], through="NF4", text="odd"
    )
    check = named(found, "quantized-loss-bounded")
    assert check.outcome == "NOT_RUN" and "the reference's" in check.found
    assert (found.pairs[0].losses.reference or 0.0) > math.log(VOCAB)


def test_a_token_sent_to_other_experts_is_left_out_with_all_that_sees_it() -> None:
    """The scores of earlier tokens hold the keys of later ones, which the mask takes away after."""
    ids = PROMPTS["rare"]
    found = compared(
        judged("mixtral-window").folder, ("numpy", "torch:cpu:float16"), ids, through="NF4"
    )
    [pair] = found.pairs
    assert pair.experts and all(flip.explained for flip in pair.experts)
    assert pair.logits is not None and pair.logits.rel_l2 > 0.1  # over all rows
    before = pair.compared_before or {}
    assert 0 < before["logits"] <= before["L2.scores"] <= max(f.position for f in pair.experts)
    check = named(found, "quantized-logits")
    assert check.outcome == "PASS" and f"the first {before['logits']} rows" in check.expected
    scores = next(point for point in pair.diff.points if point.key == "L2.scores")
    heads = 4
    assert scores.values == heads * before["L2.scores"] ** 2 and not scores.beyond


# --- rounding that grows on the way ---------------------------------------------------------------


class Skewed(TorchBackend):
    """One layer's activation is off by six percent; rounding to bfloat16 hides less."""

    calls = 0

    def activate(self, x: Any, kind: str, *, steps: bool) -> Any:
        y = super().activate(x, kind, steps=steps)
        self.calls += 1
        return y * 1.06 if self.calls % 3 == 2 else y


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mixtral"])
def test_rounding_that_grew_is_told_from_an_operation_that_is_wrong(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole runs are given less room than rounding takes, as a model that amplifies it does."""
    monkeypatch.setitem(tolerances.BASE, "bfloat16", tolerances.Tolerance(1e-3, "too little"))
    run = "torch:cpu:bfloat16"
    found = compared(judged(name).folder, ("numpy", run), IDS, through="NF4")
    [pair] = found.pairs
    assert (found.verdict, found.exit_code) == ("precision", 0)
    assert pair.first is not None and pair.cause.startswith("rounding, amplified")
    healthy(found)
    check = named(found, "points")
    assert check.outcome == "PASS" and "on the run's own inputs" in check.found
    assert len(pair.operations) == 1 and not pair.operations[0].wrong
    monkeypatch.setitem(BACKENDS._loaded, "torch", Skewed)
    wrong = compared(judged(name).folder, ("numpy", run), IDS, through="NF4")
    assert (wrong.verdict, wrong.exit_code) == ("bug", 1)
    assert "points" in [check.name for check in wrong.checks if check.outcome == "FAIL"]


# --- the bound of a loss -------------------------------------------------------------------------


def rows_of(kind: str, vocab: int, scale: float) -> tuple[np.ndarray, tuple[int, ...]]:
    rng = np.random.default_rng(int(scale * 10) + vocab)
    logits = scale * rng.standard_normal((33, vocab))
    if kind == "far from zero":
        logits += 40 * scale
    if kind == "one row":
        logits[:] = logits[0]
    if kind == "sure":
        logits[np.arange(33), rng.integers(0, vocab, 33)] += 30 * scale
    return logits.astype(np.float32), tuple(int(i) for i in rng.integers(0, vocab, 33))


@pytest.mark.parametrize("kind", ["plain", "far from zero", "one row", "sure"])
@pytest.mark.parametrize("run", RUNS)
def test_rounding_stays_inside_the_bound_and_a_shift_of_labels_does_not(
    run: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = parse_run(run).open()
    right = backend.cross_entropy
    for vocab in (11, 4_099):
        for scale in (0.3, 3.0, 12.0):
            logits, ids = rows_of(kind, vocab, scale)
            stored = backend.to_numpy(backend.array(logits))
            found = measure_backend_loss(backend, stored, ids)
            assert found.off is not None and found.bound is not None and found.nats is not None
            assert found.off <= found.bound
            wide = torch.from_numpy(np.asarray(stored[:-1], np.float64))
            true = torch.nn.functional.cross_entropy(wide, torch.tensor(ids[1:])).item()
            assert abs(found.nats - true) <= label_loss_bound(true, backend.dtype, vocab)
            # Roundings are not lost in it: ten thousand times the unit roundoff, not a constant.
            assert found.bound < ROUNDOFF[backend.dtype] * 3e3 + 1e-3
            with monkeypatch.context() as patch:
                patch.setattr(backend, "cross_entropy", lambda x, y: right(x, np.roll(y, 1)))
                wrong = measure_backend_loss(backend, stored, ids)
            assert wrong.off is not None and wrong.bound is not None and wrong.off > wrong.bound


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_beyond_every_bound(
    run: str, wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = parse_run(run).open()
    logits, ids = rows_of("plain", 11, 1.0)

    def losses(x: Any, y: Any) -> Any:
        found = np.ones(len(y))
        found[7] = wrong
        return found

    monkeypatch.setattr(backend, "cross_entropy", losses)
    assert measure_backend_loss(backend, logits, ids).off == math.inf


def test_the_bounds_grow_with_dtype_and_size() -> None:
    order = ("float64", "float32", "float16", "bfloat16")
    bounds = [label_loss_bound(3.0, dtype, 50_000) for dtype in order]
    assert bounds == sorted(bounds) and bounds[0] < 1e-9 and bounds[1] < 1e-3
    assert label_loss_bound(14.0, "bfloat16", 100) > label_loss_bound(1.0, "bfloat16", 100)
    for dtype in BASE:
        tolerance = BASE[dtype].rel_l2
        assert loss_bound(tolerance, 8.0) == pytest.approx(2 * loss_bound(tolerance, 4.0))
    # First order, and the worst that logits within `e` of others can do to any loss.
    rng = np.random.default_rng(3)
    z = 4 * rng.standard_normal((50, 97))
    e = 0.05 * rng.uniform(-1, 1, z.shape)
    for label in (0, 50, 96):
        y = torch.full((50,), label)
        change = torch.nn.functional.cross_entropy(
            torch.from_numpy(z + e), y, reduction="none"
        ) - torch.nn.functional.cross_entropy(torch.from_numpy(z), y, reduction="none")
        assert float(change.abs().max()) <= float(np.max(np.ptp(e, axis=1)))
        assert abs(float(change.mean())) <= loss_bound(0.05, 1.0)


@pytest.mark.parametrize("prompt", ["random", "rare", "ascending", "in turns"])
@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_labels_that_are_not_shifted_are_found_on_any_text(name: str, prompt: str) -> None:
    found = compared(judged(name).folder, ("numpy", "wrongloss"), PROMPTS[prompt])
    assert found.verdict == "bug" and found.pairs[0].cause.startswith("own-loss")
    assert [check.name for check in found.checks if check.outcome == "FAIL"] == ["own-loss"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_wrong_loss_is_found_in_coarse_arithmetic(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = TorchBackend.cross_entropy
    monkeypatch.setattr(TorchBackend, "cross_entropy", lambda b, x, y: right(b, x, np.roll(y, 1)))
    found = compared(judged("qwen2").folder, ("numpy", f"torch:cpu:{dtype}"), IDS)
    assert found.verdict == "bug" and named(found, "own-loss").outcome == "FAIL"


def test_a_loss_needs_one_label() -> None:
    for count, why in ((1, "a single token has no label"), (2, ""), (3, "")):
        logits = np.random.default_rng(2).standard_normal((count, 7)).astype(np.float32)
        ids = [3, 1, 4][:count]
        found = measure_backend_loss(parse_run("numpy").open(), logits, ids)
        assert found.why == why and (found.nats is None) == (count == 1)
        if found.nats is not None:
            labels = torch.tensor(ids[1:])
            true = torch.nn.functional.cross_entropy(torch.from_numpy(logits[:-1]).double(), labels)
            assert found.nats == pytest.approx(true.item(), rel=1e-5)
        none = measure_backend_loss(None, logits, ids)
        assert none.nats is None and "engine" in none.why
