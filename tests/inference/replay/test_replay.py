"""A pass made again on what another run recorded: one mechanism for diagnose, parity and cells."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.engines.opening import open_trace
from aprfmt.inference.replay.patched_model import CallRecorder, OperationCall, PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import (
    measure_operation_residuals,
    record_points,
    run_shadow_pass,
    run_shadow_point,
    value_at,
)
from aprfmt.inference.weights import model_weights
from aprfmt.model import open_model
from tests.diagnosis.engines import tiny_folder, trace
from tests.models import IDS

MODELS = ("llama", "qwen2", "gemma2", "deepseek_v2", "gpt2")
BOUND = 2e-5
Alter = Callable[[str, int, Any], Any]


def larger(wanted: str, at: int) -> Callable[[], Alter]:
    """An engine that makes one point of one layer too large by a tenth."""
    return lambda: lambda point, layer, x: x * 1.1 if (point, layer) == (wanted, at) else x


def recorded(name: str, base: str, alter: Any = None) -> Path:
    """Return the saved trace of every point of a run."""
    how = {} if alter is None else {"alter": alter}
    return Path(trace(tiny_folder(base), f"replay-{name}-{base}", points=None, **how))


@pytest.mark.parametrize(
    ("base", "point"),
    [(base, point) for base in MODELS for point in ("attn_out", "ffn_out")
     if (base, point) != ("deepseek_v2", "ffn_out")] + [("deepseek_v2", "moe_out")],
)  # fmt: skip
def test_one_wrong_operation_is_the_only_one_off(base: str, point: str) -> None:
    """Every later point of the run is far away, and its operation is right nevertheless.

    Seen red: the pass goes on with its own values.
    """
    path = recorded(point, base, larger(point, 1))
    with open_model(tiny_folder(base)) as model, open_trace(path) as made:
        patched = PatchedModel.unpatched(model, IDS, "float32")
        key = f"L1.{point}"
        found = measure_operation_residuals(
            patched, RecordedTrace(made, IDS, {}), lambda key: BOUND
        )
        views = run_shadow_pass(patched, RecordedTrace(made, IDS, {}))
        patched.weights.close()
    assert found.wrong_keys == [key] and found.worst_key == key
    assert found.found[key][0] == pytest.approx(0.1, rel=0.1)
    assert [view.key for view in views.flagged] == [key]
    assert len(found.found) == len([v for v in views.views.values() if v.residual is not None
                                    and v.point not in ("experts", "router_margin")])  # fmt: skip


@pytest.mark.parametrize("base", MODELS)
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_right_run_is_right_on_every_backend(base: str, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    with open_model(tiny_folder(base)) as model, open_trace(recorded("right", base)) as made:
        weights = model_weights(model, None)
        runs = BACKENDS[backend]("cpu", "float32")
        patched = PatchedModel(model.spec, model.hyper, weights, runs, tuple(IDS))
        found = measure_operation_residuals(
            patched, RecordedTrace(made, IDS, {}), lambda key: BOUND
        )
        weights.close()
    assert found.all_right and len(found.found) > 10, found.wrong_keys


def test_the_experts_of_a_token_may_be_recorded_in_any_order() -> None:
    """Seen red: weights of experts compared place by place."""
    held: dict[int, Any] = {}

    def turned(point: str, layer: int, x: Any) -> Any:
        if point in ("experts", "expert_w"):
            held[layer] = True
            return np.ascontiguousarray(x[..., ::-1])
        return x

    path = recorded("turned", "deepseek_v2", lambda: turned)
    with open_model(tiny_folder("deepseek_v2")) as model, open_trace(path) as made:
        patched = PatchedModel.unpatched(model, IDS, "float32")
        found = measure_operation_residuals(
            patched, RecordedTrace(made, IDS, {}), lambda key: BOUND
        )
        patched.weights.close()
    assert held and found.all_right, found.wrong_keys
    assert any(key.endswith("expert_w") for key in found.found)


@pytest.mark.parametrize("base", MODELS)
def test_a_value_from_given_ones_is_the_whole_passs(base: str) -> None:
    """Each point from the point before it, and from nothing: the bits of the whole pass.

    Seen red: given values that are not put in.
    """
    with open_model(tiny_folder(base)) as model:
        patched = PatchedModel.unpatched(model, IDS, "float32")
        whole = record_points(patched)
        keys = [key for key in whole if key.startswith("L1.") or "." not in key]
        for key in keys[:: max(1, len(keys) // 6)]:
            found = value_at(patched, {}, key)
            assert found is not None and _near(found, whole[key]), key
            others = {name: x for name, x in whole.items() if name != key}
            found = value_at(patched, others, key)
            assert found is not None and _near(found, whole[key]), key
        moved = {"L0.out": np.zeros_like(whole["L0.out"])} if "L0.out" in whole else {}
        last = value_at(patched, moved, "logits")
        assert last is not None and not _near(last, whole["logits"])
        assert value_at(patched, {}, "L9.out") is None
        patched.weights.close()


def _near(x: Any, y: Any) -> bool:
    x, y = (np.asarray(value, np.float64) for value in (x, y))
    finite = np.isfinite(y)
    return x.shape == y.shape and bool(np.allclose(x[finite], y[finite], rtol=1e-4, atol=1e-5))


@pytest.mark.parametrize("base", MODELS)
def test_one_point_is_that_of_the_whole_pass(base: str) -> None:
    path = recorded("point", base, larger("attn_out", 0))
    with open_model(tiny_folder(base)) as model, open_trace(path) as made:
        patched = PatchedModel.unpatched(model, IDS, "float32")
        views: Mapping[str, Any] = run_shadow_pass(patched, RecordedTrace(made, IDS, {})).views
        for key in list(views)[::7]:
            one = run_shadow_point(patched, RecordedTrace(made, IDS, {}), key)
            assert one is not None and one.calls == ()
            assert one.residual == pytest.approx(views[key].residual, abs=1e-6), key
        patched.weights.close()


def test_a_part_of_what_an_earlier_point_was_made_of_takes_no_other_calls() -> None:
    """What is computed in between makes a later point: a convolution that the scan reads."""
    recorder = CallRecorder()
    joined, mixed, scanned = (np.zeros((2, 6)) for _ in range(3))

    def called(op: str, made: Any, *args: Any) -> OperationCall:
        return OperationCall(op, args, {}, made, recorder.at)

    product, convolution = called("linear", joined), called("convolve", mixed, joined[:, 2:4])
    recorder.calls = [product]
    assert recorder.take_calls(joined[:, :2]) == (product,)
    recorder.calls.append(convolution)
    assert recorder.take_calls(joined[:, 4:]) == ()
    scan = called("scan", scanned, mixed)
    recorder.calls.append(scan)
    assert recorder.take_calls(scanned) == (convolution, scan)
    recorder.calls = [convolution]
    assert recorder.take_calls(np.zeros(3)) == (convolution,)  # made by nothing that is known
