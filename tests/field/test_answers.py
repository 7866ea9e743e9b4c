"""Every open row is answered: the verdict, each cause, its place, and nothing invented.

The frozen rows are asked by `python -m tests.field --frozen` alone: what a test demands is tuned
to.
"""

import pytest

from tests.field.judge import asked
from tests.field.rows import BY_NAME, OPEN


@pytest.mark.parametrize("name", sorted(row.name for row in OPEN))
def test_an_open_row_is_answered(name: str) -> None:
    answer = asked(name)
    assert answer.right, (answer.verdict, answer.named, answer.says)
    assert not answer.wrong and not answer.alarm, answer.says
    assert BY_NAME[name].control or answer.whole, (answer.named, answer.where, answer.confidence)
