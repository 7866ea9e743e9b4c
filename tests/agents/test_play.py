"""The player of the skill's advice: it is right on every task, and its counting can fail.

Seen red: a row of SKILL.md with another command, an answer without its cause in the first lines, an
exit 0 for a file that is still wrong, a `next:` that leads in a circle.
"""

from pathlib import Path

import pytest

from tests.agents import play as player
from tests.agents.play import SKILL, Played, command_of, filled, play, totals
from tests.agents.tasks import DEMO, TASKS, Task, right, sound
from tests.conftest import not_run

MOST_COMMANDS = 3  # where a command mends B; looking alone may take one more
MOST_TOKENS = 800  # words and signs of all answers of one task


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_skills_advice_is_right(task: Task, tmp_path: Path) -> None:
    if not (DEMO / "model.safetensors").is_file():
        not_run("fixtures/demo holds no model")
    pytest.importorskip("torch", reason="NOT-RUN: files are written by its libraries")
    found = play(task, tmp_path)
    assert not found.false_done, found.commands
    assert found.right, found
    assert len(found.commands) <= (MOST_COMMANDS if task.mended else player.STEPS)
    assert found.tokens <= MOST_TOKENS
    assert found.done or not task.mended


def test_every_situation_is_a_row_of_the_skill() -> None:
    for situation in {task.situation for task in TASKS}:
        assert command_of(situation).startswith("aprfmt ")
    with pytest.raises(AssertionError, match="0 commands"):
        command_of("B answers badly", SKILL.read_text().replace("B answers badly", "B is odd"))


def test_files_take_the_places_of_the_skills_own() -> None:
    a, b = Path("x/right"), Path("x/b.gguf")
    assert filled("aprfmt diagnose model model.gguf", a, b) == ["diagnose", "x/right", "x/b.gguf"]
    words = filled("aprfmt attest q4.gguf --from model", a, b)
    assert words == ["attest", "x/b.gguf", "--from", "x/right"]


def test_done_of_a_wrong_file_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that says equal of everything, after a repair that repaired nothing."""
    task = next(one for one in TASKS if one.name == "rope base lost")

    def says(words: list[str], folder: Path, played: Played) -> tuple[int, str]:
        played.commands.append(" ".join(words))
        if len(played.commands) == 1:
            head = "bug: rope_theta - qwen2.rope.freq_base"
            return 1, f"{head}\nnext: aprfmt convert model fixed.gguf\n"
        if len(played.commands) == 2:
            (folder / "fixed.gguf").write_bytes((folder / "b.gguf").read_bytes())
        return 0, "same: nothing differs\n"

    monkeypatch.setattr(player, "run", says)
    found = play(task, tmp_path)
    assert found.done and found.false_done and not found.right
    assert totals([found])["false_done"] == 1


def test_a_control_that_is_accused_is_not_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = next(one for one in TASKS if one.control)

    def accuses(words: list[str], folder: Path, played: Played) -> tuple[int, str]:
        played.commands.append(" ".join(words))
        return 1, "bug: rope_theta\n"

    monkeypatch.setattr(player, "run", accuses)
    assert not play(task, tmp_path).right


def test_what_is_sound_is_judged_by_other_libraries(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="NOT-RUN: gguf is not installed")
    task = next(one for one in TASKS if one.name == "rope base lost")
    _, b = task.fault(tmp_path)
    assert not sound(task, tmp_path, b)
    assert sound(task, tmp_path, right(tmp_path))
