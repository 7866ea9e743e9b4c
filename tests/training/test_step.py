"""`aprfmt step`: forty mistakes are named and placed, and no step that is right is accused."""

from pathlib import Path

import pytest

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
