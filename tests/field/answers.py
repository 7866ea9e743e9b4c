"""Every open row is answered: the verdict, each cause, its place, and nothing invented.

As test_answers.py this is collected: a deterministic sample by default, all open rows under
APRFMT_EVERYTHING. The frozen rows are asked by `python -m tests.field --frozen` alone.
"""

import os

import pytest

from tests.field.judge import asked
from tests.field.rows import BY_NAME, OPEN

EVERYTHING = bool(os.environ.get("APRFMT_EVERYTHING"))
NAMES = sorted(row.name for row in OPEN)
# By name, so that it is the same everywhere: every fourth open row.
SAMPLE = NAMES[::4]


@pytest.mark.parametrize("name", NAMES if EVERYTHING else SAMPLE)
def test_an_open_row_is_answered(name: str) -> None:
    answer = asked(name)
    assert answer.right, (answer.verdict, answer.named, answer.says)
    assert not answer.wrong and not answer.alarm, answer.says
    assert BY_NAME[name].control or answer.whole, (answer.named, answer.where, answer.confidence)
