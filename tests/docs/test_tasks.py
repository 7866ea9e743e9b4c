"""docs/explanation/ten_tasks.md shows the commands that are run, and ours do what it says.

Seen red: a command that the page lacks, a task of three commands, another exit code.
"""

import re
from pathlib import Path

import pytest

from tests.docs import tasks
from tests.docs.tasks import BEGIN, END, PAGE, PREPARE, TASKS, Task


def test_the_page_shows_what_is_run() -> None:
    text = PAGE.read_text()
    shown = text.partition(BEGIN)[2].partition(END)[0]
    assert tasks.commands() in shown and "\n".join(PREPARE) in text
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in shown.splitlines()
        if line.startswith("| ")
    ][2:]
    assert len(TASKS) == len(rows) == 10
    for task, (what, ours, seconds, tool, count, theirs, gap) in zip(TASKS, rows, strict=True):
        assert (what, int(ours), gap) == (task.what, len(task.ours), task.gap)
        assert re.fullmatch(r"\d+\.\d", seconds)
        if not task.theirs:
            assert (tool, count, theirs) == ("-", "-", "-")
            continue
        assert (tool, int(count)) == (task.tool, len(task.theirs))
        assert re.fullmatch(r"\d+\.\d", theirs)


def test_no_task_needs_more_than_two_commands() -> None:
    assert all(1 <= len(task.ours) <= 2 for task in TASKS)
    assert all(command.startswith("aprfmt ") for task in TASKS for command, _ in task.ours)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tasks")
    for command in PREPARE:
        assert tasks.cost(command, place)[1] == 0, command
    return place


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.what)
def test_ours_does_it(task: Task, folder: Path) -> None:
    for module in ("transformers", "torch"):
        if any(f" {module}" in command for command, _ in task.ours):
            pytest.importorskip(module, reason=f"NOT-RUN: {module} is not installed")
    for command, code in task.ours:
        assert tasks.cost(command, folder)[1] == code, command
