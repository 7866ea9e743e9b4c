"""Gradients of capture points that a trainer's hook saved: transformers' are ours, and the first
wrong one, backward from the loss, names the operation.

Seen red, each alone: rows of padding not cut off; points in the order of the forward pass; a point
that was not compared taken for right; the loss scale not taken off; a wrong shape read as it is.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers.models.llama import modeling_llama

from aprfmt.inference.batch import read_batch
from aprfmt.inference.capture import key_name
from aprfmt.inference.forward import Span
from aprfmt.inference.gradients.backend import GradientBackend
from aprfmt.inference.gradients.batch_gradients import batch_gradients, prepare
from aprfmt.inference.gradients.documents import documents
from aprfmt.inference.gradients.given_points import WITHOUT_GRADIENT
from aprfmt.model import open_model
from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.inference.gradient_judge import write_batch
from tests.models import EVERY, save_tiny
from tests.training import judged_steps as steps
from tests.training import thread_steps as threads
from tests.training.points import saved

EXACT = 1e-9  # relative, of a pass whose every operation is in float64
SERIES = {"bloom": 1e-8}  # its gelu has a constant of eight digits


def report(step: Path, *grads: str, batch: bool = True, **given: Any) -> StepReport:
    """Return what is said of a saved step with these files."""
    files = [step / f"{name}.safetensors" for name in grads or ("grads", "points")]
    return explain_step(
        step / "before", grads=files, batch=step / "batch.npz" if batch else None, **given
    )


@pytest.mark.parametrize("kind", EVERY)
def test_every_point_that_a_hook_saves_is_transformers(kind: str, tmp_path: Path) -> None:
    found = report(saved(kind, tmp_path, padded=False))
    assert found.exit_code != 1, found.pronounced.says
    assert len(found.points) > 15 and not found.causes
    for point in found.points:
        assert point.verdict == "agrees", (point.key, point.name, point.distance)
        assert point.distance is None or point.distance < SERIES.get(kind, EXACT), point


class Seen:
    """A recorder that notes which points come by."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def begin(self, facts: Any) -> None:
        pass

    def wants(self, point: str, layer: int) -> bool:
        return True

    def capture(self, point: str, layer: int, x: Any) -> Any:
        self.keys.append(key_name(point, layer))
        return x


@pytest.mark.parametrize("kind", EVERY)
def test_every_point_of_a_pass_has_a_gradient_but_those_of_a_choice(
    kind: str, tmp_path: Path
) -> None:
    """Seen red: the experts' weights cut from the graph, a choice missing in the table."""
    save_tiny(kind, tmp_path / "model")
    write_batch(tmp_path / "batch.npz", True)
    seen = Seen()
    with open_model(tmp_path / "model") as model:
        batch = read_batch(tmp_path / "batch.npz", int(model.hyper["vocab_size"]))
        found = batch_gradients(model, batch, points=None)
        made, _, _ = prepare(model, GradientBackend("cpu", "float64"), None, ())
        one = documents(batch)[0]
        with torch.no_grad():
            made.rebuild()
            made.run(one, range(len(one.ids)), Span(), record=True, recorder=seen)
        made.weights.close()
    names = {key: key.rpartition(".")[2] for key in seen.keys}
    without = {key for key, name in names.items() if name in WITHOUT_GRADIENT}
    assert len(names) > 15 and names.keys() - found.points.keys() == without


def test_a_gradient_of_a_choice_is_listed_with_its_reason(tmp_path: Path) -> None:
    step = saved("mixtral", tmp_path)
    arrays = load_file(step / "points.safetensors")
    row = next(iter(arrays.values()))
    save_file(arrays | {"L1.router_margin": row[..., :1].copy()}, step / "points.safetensors")
    found = report(step)
    assert found.exit_code == 0
    assert [one.name for one in found.left if "nothing is computed of it" in one.why] == [
        "L1.router_margin"
    ]


def test_rows_of_several_samples_are_those_of_their_tokens(tmp_path: Path) -> None:
    found = report(saved("llama", tmp_path))
    assert found.exit_code == 0 and len(found.points) == 45


@dataclass(frozen=True)
class BackwardFault:
    """A fault of one operation's backward: the first wrong points, and the operation named."""

    name: str
    kind: str
    around: Callable[[], Any]
    first: tuple[str, ...]
    operation: str

    def __str__(self) -> str:
        return self.name


def swiglu_halved() -> Any:
    """The product of gate and up gives half its gradient to both."""

    def forward(self: Any, x: Any) -> Any:
        gate, up = self.act_fn(self.gate_proj(x)), self.up_proj(x)
        value = gate * up
        return self.down_proj(steps.with_gradient_of(value, value / 2))

    return steps.patched(modeling_llama.LlamaMLP, "forward", forward)


OF_SCORES = r"one of: rope \(L2\.k_rope\), the scores .*, the softmax of the scores \(L2\.probs\)"
FAULTS = (
    BackwardFault("rope forward", "llama", steps.rotated_again, ("L2.k", "L2.q"), OF_SCORES),
    BackwardFault(
        "softmax without its sum", "llama", threads.softmax_without_sum, ("L2.k", "L2.q"), OF_SCORES
    ),
    BackwardFault(
        "a group's first head",
        "llama",
        steps.first_head_of_group,
        ("L2.v", "L2.k"),
        r"the backward of the sum of values by probabilities \(L2\.attn\)",
    ),
    BackwardFault(
        "no mask",
        "llama",
        steps.without_mask_backward,
        ("L2.v", "L2.k", "L2.q"),
        r"the backward of the sum of values by probabilities \(L2\.attn\)",
    ),
    BackwardFault(
        "RMS norm",
        "llama",
        steps.without_mean_term,
        ("L2.out",),
        r"the backward of the RMS norm \(final_norm\)",
    ),
    BackwardFault(
        "layer norm",
        "gpt2",
        steps.without_mean_in_layer_norm,
        ("L2.out",),
        r"the backward of the layer norm \(final_norm\)",
    ),
    BackwardFault(
        "activation",
        "llama",
        threads.silu_of_sigmoid,
        ("L2.ffn_gate",),
        r"the activation \(L2\.ffn_act\), the product of two values \(L2\.ffn_mul\)",
    ),
    BackwardFault(
        "gated product",
        "llama",
        swiglu_halved,
        ("L2.ffn_act", "L2.ffn_up"),
        r"the product of two values \(L2\.ffn_mul\)",
    ),
    BackwardFault(
        "other weights",
        "llama",
        steps.kernel_of_other_weights,
        ("L2.ffn_act", "L2.ffn_up"),
        r"the product with a weight \(L2\.ffn_out\)",
    ),
    BackwardFault(
        "no residual",
        "llama",
        threads.without_residual,
        ("L0.out",),
        r"without that of L1\.out, which does not come back",
    ),
    BackwardFault(
        "softcap", "gemma2", threads.tanh_without_slope, ("logits_raw",), r"softcap \(logits\)"
    ),
    BackwardFault(
        "router",
        "mixtral",
        steps.router_without_gradient,
        ("L2.ffn_norm",),
        r"the router's product \(L2\.router\)",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_the_first_wrong_point_names_the_operation(fault: BackwardFault, tmp_path: Path) -> None:
    found = report(saved(fault.kind, tmp_path, fault.around))
    assert found.exit_code == 1
    cause = next(one for one in found.causes if one.cause == "backward_operation")
    assert cause.roles == fault.first and cause.level == "located"
    assert re.search(fault.operation, cause.says), cause.says
    keys = [point.key for point in found.points]
    wrong = {point.key for point in found.points if point.verdict == "differs"}
    assert not wrong & set(keys[: keys.index(fault.first[0])])


def test_a_loss_scale_of_the_points_alone_is_no_difference(tmp_path: Path) -> None:
    step = saved("llama", tmp_path, loss_scale=1024.0)
    found = report(step)
    assert found.exit_code == 0 and any("1024 times" in note for note in found.notes)
    # Without gradients of parameters nothing says that it was taken off.
    alone = report(step, "points")
    assert alone.exit_code == 1 and alone.points[0].key == "logits"
    assert "1024" in alone.points[0].why


def test_points_without_a_batch_stay_open(tmp_path: Path) -> None:
    found = report(saved("llama", tmp_path), batch=False)
    assert found.exit_code == 2 and not found.points
    assert any(one.kind == "point" and "--batch" in one.why for one in found.left)


def shorter(points: dict[str, Any]) -> dict[str, Any]:
    """Cut the last token off one array."""
    return points | {"lm_head": points["lm_head"][:, :-1].copy()}


def of_nan(points: dict[str, Any]) -> dict[str, Any]:
    """Put a NaN into one array."""
    values = points["lm_head"].copy()
    values[0, 3, 5] = np.nan
    return points | {"lm_head": values}


def by_own_name(points: dict[str, Any]) -> dict[str, Any]:
    """Give one point its name in the table."""
    return {"L1.out" if key == "model.layers.1" else key: x for key, x in points.items()}


@pytest.mark.parametrize(
    ("change", "exit_code", "says"),
    [
        (shorter, 2, r"shape \[3, 15, \d+\]; expected \[3, 16, \.\.\.\]"),
        (of_nan, 1, "1 numbers are NaN or infinite"),
        (by_own_name, 0, ""),
    ],
)
def test_arrays_that_are_not_as_expected(
    change: Callable[[dict[str, Any]], dict[str, Any]], exit_code: int, says: str, tmp_path: Path
) -> None:
    step = saved("llama", tmp_path)
    save_file(change(load_file(step / "points.safetensors")), step / "points.safetensors")
    found = report(step)
    assert found.exit_code == exit_code, found.pronounced.says
    said = [one.why for one in found.left] + [each.why for each in found.points]
    assert any(re.search(says, each) for each in said)
    assert change is not by_own_name or "L1.out" in {each.name for each in found.points}


def test_an_open_point_behind_a_wrong_one_is_not_taken_for_right(tmp_path: Path) -> None:
    step = saved("llama", tmp_path)
    points = load_file(step / "points.safetensors")
    noise = np.random.default_rng(1).normal(0, 0.02, points["lm_head"].shape)
    points["lm_head"] = points["lm_head"] * (1 + noise)  # as arithmetic in few bits may leave it
    points["model.norm"] = points["model.norm"] * 3
    save_file(points, step / "points.safetensors")
    found = report(step)
    assert found.points[0].verdict == "not compared" and found.exit_code == 1
    (cause,) = found.causes
    assert cause.roles == ("final_norm",) and "right after" not in cause.says
    assert "the loss itself" in cause.says
    # Said to be float32, the same is a difference.
    stated = report(step, trained_in="float32")
    assert stated.points[0].verdict == "differs"
