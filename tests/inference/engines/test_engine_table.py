"""The page of engines' dumps has a row of every sound dump and of every seeded fault."""

import re

import pytest

pytest.importorskip("torch")

from tests.inference.engine_table import HEADING, PAGE, faulty_rows, sound_rows


def test_the_page_has_the_rows_of_the_tables() -> None:
    """Seen red: a layout of ranks and a seeded fault had no row, and one row too few was counted.

    `python -m tests.inference.engine_table --write` makes the rows.
    """
    told = PAGE.read_text().partition(HEADING)[2]
    sound, _, faulty = told.partition("| kind | seeded fault |")
    for text, wanted in ((sound, sound_rows()), (faulty, faulty_rows())):
        rows = [
            line.split(" | ") for line in text.splitlines() if line.endswith((" yes |", " NO |"))
        ]
        assert [(row[0].removeprefix("| "), row[1]) for row in rows] == wanted
        assert re.findall(r"^(\d+) rows$", text, re.M) == [str(len(wanted))]
        assert all(row[-1] == "yes |" for row in rows)
    assert told.rstrip().endswith("\n0 rows are not as they should be")
