"""`aprfmt step`: forty mistakes are named and placed, and no step that is right is accused."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training import adapters
from tests.training.faults import FAULTS, INNOCENTS, StepFault
from tests.training.gradient_faults import (
    GRADIENT_FAULTS,
    GRADIENT_INNOCENTS,
    GradientFault,
    report_of,
    right_gradients,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_mistake_is_named_where_it_is(fault: StepFault, tmp_path: Path) -> None:
    report = fault.make().report(tmp_path)
    assert report.exit_code == 1
    assert [cause.cause for cause in report.causes] == [fault.cause]
    found = report.causes[0]
    assert (len(found.roles), found.level) == (fault.tensors, fault.level)


@pytest.mark.parametrize("name", INNOCENTS)
def test_a_right_step_is_not_accused(name: str, tmp_path: Path) -> None:
    report = INNOCENTS[name]().report(tmp_path)
    assert report.causes == () and report.exit_code == 0
    assert report.counts["agrees"] == len(report.tensors)


@pytest.mark.parametrize("fault", GRADIENT_FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_gradient_is_named_where_it_is(fault: GradientFault, tmp_path: Path) -> None:
    report = report_of(tmp_path, fault.make(right_gradients()))
    assert report.exit_code == 1
    assert [cause.cause for cause in report.causes] == [fault.cause]
    found = report.causes[0]
    assert (len(found.roles), found.level) == (fault.tensors, fault.level)
    assert fault.says in found.says


@pytest.mark.parametrize("name", GRADIENT_INNOCENTS)
def test_a_right_gradient_is_not_accused(name: str, tmp_path: Path) -> None:
    change, encoding = GRADIENT_INNOCENTS[name]
    report = report_of(tmp_path, change(right_gradients()), encoding)
    assert report.causes == () and report.exit_code == 0
    assert report.counts["agrees"] == len(report.tensors)


def test_the_first_step_of_an_adapter_moves_b_alone(tmp_path: Path) -> None:
    """Seen red: A of a pair whose B is zero taken for one that should move."""
    report = adapters.report_of(tmp_path, True, lambda name: "lora_A" in name)
    assert report.causes == () and report.exit_code == 0
    assert report.tensors[0].key == "L0.attn_q.weight.lora_a"


@pytest.mark.parametrize(
    ("cause", "still", "count"),
    [
        ("adapter_half_frozen", lambda name: "1.self_attn.q_proj.lora_B" in name, 1),
        ("adapter_half_frozen", lambda name: "0.self_attn.v_proj.lora_A" in name, 1),
        ("adapter_frozen", lambda name: "q_proj" in name, 4),
    ],
)
def test_a_factor_that_did_not_move_is_named(
    cause: str, still: Callable[[str], bool], count: int, tmp_path: Path
) -> None:
    report = adapters.report_of(tmp_path, False, still)
    assert [(one.cause, len(one.roles)) for one in report.causes] == [(cause, count)]
    assert report.exit_code == 1


def test_an_adapter_whose_a_is_frozen_everywhere_is_open(tmp_path: Path) -> None:
    """It may be meant so; it is not said to agree either."""
    report = adapters.report_of(tmp_path, False, lambda name: "lora_A" in name)
    assert report.causes == () and report.exit_code == 2
