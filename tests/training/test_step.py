"""`aprfmt step`: forty mistakes are named and placed, and no step that is right is accused."""

from pathlib import Path

import pytest

from tests.training.faults import FAULTS, INNOCENTS, StepFault


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
