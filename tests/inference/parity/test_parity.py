"""Parity: seeded wrong backends are found by operation; rounding, quantization and flips are not.

Seen red: the shadowed operation run on the wrong inputs, an expert flip called a bug, a tolerance
raised by a calibration, the fused form left out, a bundle that needs the model.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.conversion import convert
from aprfmt.errors import FormatError, OutputError, UsageError
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.device import DeviceChoice, parse_run
from aprfmt.inference.loss import cross_entropy
from aprfmt.inference.parity import cell, run_comparison
from aprfmt.inference.parity.bundle import choose_bundle, replay_bundle, save_bundle
from aprfmt.inference.parity.calibrate import (
    calibrate_tolerances,
    load_calibration,
    save_calibration,
)
from aprfmt.inference.parity.cell import cut_cell
from aprfmt.inference.parity.outcomes import compare_experts, compare_logits, mean_label_loss
from aprfmt.inference.parity.request import ParityRequest
from aprfmt.inference.parity.run_comparison import compare_choices, compare_runs, run_once
from aprfmt.inference.trace import Trace
from aprfmt.measure.tolerances import ROWS, CalibratedBound, point_threshold, weights_class
from aprfmt.measure.traces import compare_traces
from aprfmt.model import open_model
from tests.inference.crooked import compared
from tests.inference.crooked import crooked_backends as crooked_backends
from tests.inference.judge import backend, judged, rel, traced64
from tests.models import IDS

MINE = CalibratedBound(("numpy", "torch"), "exact", "q", "float32", 3e-6, 1e-5, 6e-7, 5, "measured")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "deepseek_v3", "gpt_oss"])
def test_backends_agree_up_to_rounding(name: str) -> None:
    found = compared(name, ["numpy", "torch", "numpy"], arbiter=True)
    assert (found.verdict, found.exit_code) == ("precision", 0)
    torch_, same = found.pairs
    assert torch_.verdict == "precision" and not torch_.diff.first and not torch_.operations
    assert same.verdict == "same" and all(p.bits for p in same.diff.points)
    assert torch_.logits is not None and torch_.logits.argmax == 1.0
    assert 0 < torch_.logits.rel_l2 < 1e-5 and torch_.logits.rows == len(IDS)
    assert {d.of for d in found.arbiter} == {0, 1, 2}
    assert all(0 < d.rel_l2["logits"] < 1e-5 for d in found.arbiter)
    assert [c.outcome for c in found.checks if c.name == "fused-form"] == ["PASS"] * 3


# Wrong backend -> (model, first wrong operation, its inputs, its weights).
FAULTS = {
    "wrong-eps": ("qwen2", "L0.attn_norm", ("L0.in",), ("L0.attn_norm.weight",)),
    "wrong-pairs": ("qwen2", "L0.q_rope", ("L0.q",), ()),
    "no-bias": ("gpt_oss", "L0.attn_out", ("L0.attn",),
                ("L0.attn_output.weight", "L0.attn_output.bias")),
    "no-mask": ("gpt_oss", "L0.probs", ("L0.scores",), ("L0.attn_sinks.weight",)),
    "wrong-activation": ("gemma2", "L0.ffn_act", ("L0.ffn_gate",), ()),
    "truncated": ("deepseek_v3", "L0.q_a", ("L0.attn_norm",), ("L0.attn_q_a.weight",)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_operation_is_found_cut_out_and_replayed(fault: str, tmp_path: Path) -> None:
    name, key, inputs, weights = FAULTS[fault]
    runs = ["numpy", fault]
    found = compared(name, runs)
    [pair] = found.pairs
    operation = pair.first_operation
    assert (found.verdict, found.exit_code, pair.first) == ("bug", 1, key)
    assert operation is not None and operation.wrong and operation.residual > operation.bound
    assert (operation.key, operation.inputs, operation.weights) == (key, inputs, weights)
    assert key in pair.cause
    bundle = choose_bundle(found, runs)
    assert bundle is not None
    path = tmp_path / "bundle.safetensors"
    save_bundle(path, bundle, ["aprfmt", "parity"])
    with pytest.raises(OutputError):
        save_bundle(path, bundle, [])
    again = replay_bundle(path)
    assert again.reproduced and (again.reference, again.other) == (0.0, 0.0)
    assert again.distance == operation.residual and again.key == key
    assert again.facts["command"] == ["aprfmt", "parity"]
    assert {"aprfmt", "numpy", "python"} <= set(again.facts["versions"])
    right = replay_bundle(path, ["numpy", "torch"])
    assert not right.reproduced and right.distance < 1e-6 and right.other is not None
    assert path.stat().st_size < 60_000


@pytest.mark.parametrize(
    "point", ["embd", "L1.scores", "L1.attn", "L2.out", "final_norm", "logits"]
)
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "gpt2-inverse-layer", "cohere", "qwen3_moe"])
def test_a_cell_gives_what_the_model_gives(name: str, point: str) -> None:
    b, ours = backend("numpy:float64"), traced64(name)[1]
    with open_model(judged(name).folder) as model:
        cell = cut_cell(model, point, IDS, ours.recorded_values, b, columns=[5, 90, 3])
        expected = ours.recorded_values(point)
        assert expected is not None
        if point == "logits":
            assert cell.rows == (3, 5, 90)
            expected = expected[:, [3, 5, 90]]
        assert rel(cell.run(b), expected) < 1e-12
    assert len(cell.inputs) <= 3 and len(cell.weights) <= 2


def test_what_only_the_fused_form_does_wrong_is_found() -> None:
    """qwen2's biases are added apart where q_mm is wanted: step by step this backend is right."""
    found = compared("qwen2", ["numpy", "no-bias"])
    assert found.pairs[0].first is None and found.verdict == "bug"
    failed = [check for check in found.checks if check.outcome == "FAIL"]
    assert [check.name for check in failed] == ["fused-form"]
    assert "fused operation" in failed[0].todo


def test_a_wrong_engine_is_found_by_its_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from aprfmt.inference.engines import ENGINES

    rows = dict(ENGINES._rows) | {"halves": ("tests.inference.crooked:halved", "")}
    monkeypatch.setattr(ENGINES, "_rows", rows)
    found = compared("llama", ["numpy", "halves"])
    [pair] = found.pairs
    operation = pair.first_operation
    assert pair.first == "final_norm" and operation is not None
    assert operation.shadow and (operation.inputs, operation.weights) == (
        ("embd",),
        ("output_norm.weight",),
    )
    bundle = choose_bundle(found, ["numpy", "halves"])
    assert bundle is not None and bundle.shadow
    assert rel(bundle.found * 2, bundle.expected) < 1e-6


def test_wrong_logits_of_an_engine_are_kept_with_the_columns_of_their_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from aprfmt.inference.engines import ENGINES

    rows = dict(ENGINES._rows) | {"half-logits": ("tests.inference.crooked:halved_logits", "")}
    monkeypatch.setattr(ENGINES, "_rows", rows)
    monkeypatch.setattr(cell, "VOCAB_ROWS", 40)  # of the vocabulary's 97
    found = compared("llama", ["numpy", "half-logits"])
    bundle = choose_bundle(found, ["numpy", "half-logits"])
    assert found.pairs[0].first == "logits" and bundle is not None and bundle.shadow
    columns = bundle.cell.rows
    assert len(columns) == 40
    assert bundle.found.shape == bundle.expected.shape == (len(IDS), len(columns))
    assert rel(bundle.found * 2, bundle.expected) < 1e-6
    recorded = found.pairs[0].recorded
    assert recorded is not None and np.array_equal(recorded, bundle.found)


def test_transformers_is_a_run_like_any_other() -> None:
    found = compared("qwen3", ["numpy", "transformers", "transformers:float64"])
    assert found.verdict == "precision"
    assert found.runs[1].via == "the folder itself"
    assert [check.name for check in found.checks if check.outcome == "FAIL"] == []
    assert found.pairs[0].losses.why == "an engine's own loss is not called"


# --- losses and logits --------------------------------------------------------------------------


def test_the_three_oracles_tell_a_wrong_loss_from_a_wrong_forward() -> None:
    wrong = compared("qwen2", ["numpy", "wrong-loss"], through="NF4")
    [pair] = wrong.pairs
    assert pair.first is None and wrong.verdict == "bug" and pair.cause.startswith("own-loss")
    assert pair.losses.own is not None and pair.losses.forward is not None
    assert pair.losses.forward == pytest.approx(pair.losses.reference, abs=1e-6)
    assert abs(pair.losses.own - pair.losses.forward) > 0.05
    right = compared("qwen2", ["numpy", "torch"], through="NF4")
    [pair] = right.pairs
    assert right.verdict == "precision" and right.weights_class == "exact"
    names = {check.name: check.outcome for check in pair.report.checks}
    assert names["own-loss"] == names["quantized-logits"] == names["quantized-loss"] == "PASS"
    assert names["quantized-loss-bounded"] == "NOT_RUN"  # ids are not known to be text
    assert pair.losses.own is not None and abs(pair.losses.own - pair.losses.forward) < 1e-5  # type: ignore[operator]
    # Both sides went through NF4: they agree, and both are as far from the float weights.
    assert right.noise is not None and right.noise.rel_l2["logits"] > 0.02
    assert pair.logits is not None and pair.logits.rel_l2 < 1e-5


def test_a_quantized_model_with_its_source(demo_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "q.gguf"
    convert(demo_model, target, encoding="Q8_0")
    with open_model(target) as model, open_model(demo_model) as base:
        choices = [parse_run("numpy"), parse_run("torch")]
        found = compare_choices(model, choices, ParityRequest(IDS), base)
    assert found.verdict == "precision" and found.noise is not None
    assert 1e-4 < found.noise.rel_l2["logits"] < 0.1 and found.noise.ce is not None
    assert (found.noise.of, found.noise.what) == (0, f"{base.path}, before quantization")


def test_engines_take_no_matched_weights() -> None:
    with pytest.raises(UsageError, match="write the model through NF4 first"):
        compared("llama", ["numpy", "transformers"], through="NF4")
    with pytest.raises(UsageError, match="NF5: is not known; near names"):
        compared("llama", ["numpy", "torch"], through="NF5")
    with pytest.raises(UsageError, match="at least two"):
        compared("llama", ["numpy"])


def test_logits_are_compared_over_all_rows() -> None:
    rng = np.random.default_rng(1)
    a = rng.standard_normal((70, 50)).astype(np.float32)
    ids = [int(i) for i in rng.integers(0, 50, 70)]
    b = a.copy()
    top = np.argsort(-a[66])[:2]
    b[66, top[1]] = a[66, top[0]] + 0.5
    found = compare_logits(a, b, ids, within=False)
    [flip] = found.flips
    assert (flip.position, flip.a, flip.b) == (66, int(top[0]), int(top[1]))
    assert flip.margin_a == pytest.approx(float(a[66, top[0]] - a[66, top[1]]))
    assert flip.margin_b == pytest.approx(0.5) and not flip.explained
    assert found.argmax == pytest.approx(69 / 70) and found.top_k == 1.0
    assert found.ce_a == pytest.approx(float(np.mean(cross_entropy(a[:-1], ids[1:]))))
    assert found.kl_mean > 0 and found.rel_l2 == pytest.approx(rel(b, a))
    assert mean_label_loss(a[:1], ids[:1]) is None


# --- experts ------------------------------------------------------------------------------------


def _routed(trace: Trace, change: dict[str, np.ndarray]) -> Trace:
    return replace(trace, fetch=lambda key: change[key] if key in change else trace.fetch(key))


def test_an_expert_flip_by_margin_is_precision_and_hides_nothing() -> None:
    ours = traced64("mixtral")[1]
    experts, router, out = (
        ours.recorded_values(f"L1.{p}") for p in ("experts", "router", "moe_out")
    )
    assert experts is not None and router is not None and out is not None
    other, row = experts.copy(), 20
    spare = next(e for e in range(6) if e not in experts[row])
    other[row, 1] = spare
    # The router's scores are as near as rounding: the flip is explained, what follows is not held
    # against this token and those that see it.
    close = router.copy()
    close[row, spare] = close[row, experts[row, 1]] - 1e-12
    near = close.copy()
    near[row, spare] += 2e-12
    moved = out.copy()
    moved[row:] += 1.0
    a = _routed(ours, {"L1.router": close})
    b = _routed(ours, {"L1.experts": other, "L1.router": near, "L1.moe_out": moved})
    [flip] = compare_experts(a, b)
    assert (flip.key, flip.position, flip.came) == ("L1.experts", row, (spare,)) and flip.explained
    diff, before = compare_runs(a, b, [flip], (), True)
    assert diff.first is None
    assert before["L1.experts"] == before["L1.moe_out"] == before["logits"] == row
    assert "L1.router" not in before and "L0.moe_out" not in before
    wrong = moved.copy()
    wrong[3] += 1.0  # an earlier token is still compared
    b = _routed(ours, {"L1.experts": other, "L1.router": near, "L1.moe_out": wrong})
    assert compare_runs(a, b, [flip], (), True)[0].first == "L1.moe_out"
    # With the margin as it was no rounding turns this choice: nothing is left out.
    b = _routed(ours, {"L1.experts": other, "L1.moe_out": moved})
    [flip] = compare_experts(ours, b)
    if flip.gap is not None and flip.gap > 1e-3:
        assert not flip.explained
        assert compare_runs(ours, b, [flip], (), True)[0].first == "L1.moe_out"


# --- tolerances ---------------------------------------------------------------------------------


def test_thresholds_say_why_and_the_most_specific_counts() -> None:
    plain = point_threshold("q", ("numpy", "torch"), ("float32", "float32"), "exact")
    deep = point_threshold("q", ("numpy", "torch"), ("float32", "float32"), "exact", depth=128)
    assert deep.rel_l2 == pytest.approx(2 * plain.rel_l2) and "128/32 layers" in deep.reason
    eight = point_threshold("q", ("llama.cpp", "numpy"), ("float32", "float32"), "quantized")
    assert eight.rel_l2 > 1e-2 and "8 bits" in eight.reason
    lookup = point_threshold("embd", ("llama.cpp", "numpy"), ("float32", "float32"), "quantized")
    assert lookup.rel_l2 < plain.rel_l2
    tf32 = point_threshold("q", ("numpy", "torch"), ("float32", "tf32"), "exact")
    assert plain.rel_l2 < tf32.rel_l2 < 1e-2
    for row in (plain, deep, eight, lookup, tf32):
        assert row.unit and row.reason and row.max_over_rms > row.rel_l2
    assert all(row.reason for row in ROWS)
    found = point_threshold("q", ("torch", "numpy"), ("float32",) * 2, "exact", calibrated=[MINE])
    assert (found.rel_l2, found.source, found.reason) == (3e-6, "calibrated", "measured")
    assert weights_class(["F32"] * 9 + ["Q4_K"]) == "quantized"
    assert weights_class(["BF16", "F32"]) == "half" and weights_class(["F32"]) == "exact"


@pytest.mark.parametrize(
    ("count", "repeats", "starts"),
    [(24, 3, (0, 8, 16)), (24, 2, (0, 12)), (5, 4, (0, 1, 2, 3)), (2, 3, (0, 1, 0))],
)
def test_a_calibration_runs_sequences_that_begin_elsewhere(
    count: int, repeats: int, starts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As far apart as the ids allow; every run has each of them, and none is narrowed before."""
    asked: list[tuple[DeviceChoice, ParityRequest]] = []
    beneath = run_once

    def counted(model: Any, choice: DeviceChoice, request: ParityRequest) -> Any:
        asked.append((choice, request))
        return beneath(model, choice, request)

    monkeypatch.setattr("aprfmt.inference.parity.calibrate.run_once", counted)
    choices, ids = [parse_run("numpy"), parse_run("torch")], (IDS * 3)[:count]
    with open_model(judged("llama").folder) as model:
        found = calibrate_tolerances(
            model, choices, ParityRequest(ids, calibrated=(MINE,)), repeats
        )
    wanted = [ids[at:] + ids[:at] for at in starts]
    assert [(choice, list(request.ids)) for choice, request in asked] == [
        (choice, list(turned)) for turned in wanted for choice in choices
    ]
    assert not any(request.calibrated for _, request in asked)
    assert found.repeats == repeats and all(
        f"{repeats} sequences" in row.evidence for row in found.rows
    )


def test_calibration_narrows_and_comes_back_from_its_file(tmp_path: Path) -> None:
    choices = [parse_run("numpy"), parse_run("torch")]
    path = tmp_path / "t.json"
    with open_model(judged("llama").folder) as model:
        found = calibrate_tolerances(model, choices, ParityRequest(IDS), 3)
        assert not found.beyond
        by_point = {row.point: row for row in found.rows}
        for row in found.rows:
            table = point_threshold(row.point, row.pair, (row.dtype, row.dtype), row.weights)
            assert row.largest <= row.rel_l2 <= table.rel_l2
            assert row.runs >= 3 and "3 sequences" in row.evidence
        assert by_point["scores"].rel_l2 < 2e-5 and by_point["embd"].largest == 0
        save_calibration(path, found)
        rows = load_calibration(path)
        assert rows == found.rows
        again = compare_choices(
            model, choices, ParityRequest(IDS, calibrated=rows, calibrated_by=str(path))
        )
        assert again.verdict == "precision" and again.calibrated == str(path)
        reasons = {point.reason for point in again.pairs[0].diff.points if not point.why}
        assert all("times the largest" in reason for reason in reasons), reasons
        wrong = calibrate_tolerances(
            model, [choices[0], parse_run("wrong-activation")], ParityRequest(IDS), 2
        )
        assert wrong.beyond and all(
            row.rel_l2 <= point_threshold(row.point, row.pair, (row.dtype,) * 2, row.weights).rel_l2
            for row in wrong.rows
        )
    text = json.loads(path.read_text())
    text["rows"][0]["rel_l2"] = 0.5
    path.write_text(json.dumps(text))
    with pytest.raises(FormatError, match="a calibration only narrows"):
        load_calibration(path)
    path.write_text("{}")
    with pytest.raises(FormatError, match="no file of parity --calibrate"):
        load_calibration(path)


def test_statistics_say_where_to_look_and_zeros_nothing() -> None:
    ours = traced64("llama")[1]
    bare = replace(ours, fetch=lambda key: None)
    gate, act = ours.records["L1.ffn_gate"], ours.records["L1.ffn_act"]
    assert gate.stats is not None and act.stats is not None and act.stats.std is not None
    half = replace(act, stats=replace(act.stats, std=act.stats.std * 0.45))
    near = replace(gate, stats=replace(gate.stats, std=(gate.stats.std or 0) * 0.6))
    other = replace(bare, records={**ours.records, "L1.ffn_act": half, "L1.ffn_gate": near})
    diff = compare_traces(other, ours)
    # 0.6 is outside the gate's narrower band, and would not be outside another point's.
    assert [p.key for p in diff.points if p.outside] == ["L1.ffn_gate", "L1.ffn_act"]
    assert diff.exit_code == 2 and diff.first is None  # statistics alone are no verdict
    zero = replace(ours, fetch=lambda key: np.zeros(ours.records[key].shape))
    nothing = compare_traces(zero, zero)
    assert nothing.exit_code == 2
    assert {p.why for p in nothing.points if p.rel_l2 is None} == {
        "zero on both sides: nothing was measured"
    }


def test_rows_of_other_positions_are_named() -> None:
    ours = traced64("llama")[1]
    record = ours.records["L1.out"]

    def why(mine: tuple[int, ...], other: tuple[int, ...]) -> str:
        sides = (
            replace(ours, records={"L1.out": replace(record, positions=places)})
            for places in (mine, other)
        )
        return compare_traces(*sides).points[0].why

    assert why((3,), (5,)) == "row of position 3 against position 5"
    assert why((0, 1, 9), (0, 1, 10)) == "3 rows each, but row 2 is of position 9 against 10"
    assert why((0, 1), (1,)) == "rows of 2 positions against 1"


def test_a_nan_is_named_and_never_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from aprfmt.inference.backends.numpy_backend import NumpyBackend

    class Broken(NumpyBackend):
        def softcap(self, x: Any, cap: float) -> Any:
            return super().softcap(x, cap) * np.float32("nan")

    monkeypatch.setitem(BACKENDS._loaded, "numpy", Broken)
    monkeypatch.setattr(run_comparison, "PLAIN_ROWS", 4)
    found = compared("gemma2", ["torch", "numpy"])
    assert found.verdict == "bug" and found.runs[1].nonfinite == "L0.scores"
    assert any(c.name == "finite" and c.outcome == "FAIL" for c in found.checks)
    assert found.pairs[0].first_operation is not None
    assert found.pairs[0].first_operation.key == "L0.scores"
