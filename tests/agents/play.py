"""Plays the skill's own advice on every task, and counts what that costs.

`python -m tests.agents.play [--json] [TASK...]` prints for each task whether the answer was right,
the commands, the tokens of output that an agent would have read, and the seconds. A task is done
where a command exits 0; done although something is wrong is a false "done", the worst there is.

The player reads its commands out of SKILL.md, as an agent would: the row of the table whose comment
says the situation, with the files in place of `model` and `model.gguf`. Then it follows `next:`. It
has no other knowledge of the tool.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.agents.tasks import TASKS, Situation, Task, sound
from tests.conftest import ROOT
from tests.patience import PATIENCE

SKILL = ROOT / "aprfmt" / ".agents" / "skills" / "aprfmt" / "SKILL.md"
STEPS = 4  # commands of one task, the first included
READ = 3  # lines of an answer that are read for the cause
_WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass
class Played:
    """What one task cost, and how it ended."""

    task: str
    right: bool = False
    done: bool = False  # the player would say that all is well
    false_done: bool = False
    commands: list[str] = field(default_factory=list)
    tokens: int = 0  # words and signs of all output: an estimate of an agent's tokens
    lines: int = 0
    seconds: float = 0.0


def command_of(situation: Situation, text: str | None = None) -> str:
    """Return the command of SKILL.md's table whose comment says a situation."""
    text = SKILL.read_text(encoding="utf-8") if text is None else text
    found = [
        line.partition("#")[0].strip() for line in text.splitlines()
        if line.startswith("aprfmt ") and situation in line.partition("#")[2]
    ]  # fmt: skip
    assert len(found) == 1, f"{situation}: {len(found)} commands of SKILL.md say it"
    return found[0]


def filled(command: str, a: Path | None, b: Path) -> list[str]:
    """Return a command with files in place of the skill's own: the last name is B."""
    words = shlex.split(command)
    # `q4.gguf`, or where there is none `model.gguf`, is what is suspected; `model` is what is right
    suspect = "q4.gguf" if "q4.gguf" in words else "model.gguf"
    names = {"model": str(a), suspect: str(b)}
    return [names.get(word, word) for word in words[1:]]


def beside(path: Path, folder: Path) -> Path:
    """Return a path as one types it in the folder."""
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def run(words: list[str], folder: Path, played: Played) -> tuple[int, str]:
    """Run a command as an agent does, and count it; return exit code and output."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "aprfmt", *words], cwd=folder, text=True, timeout=PATIENCE,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "AI_AGENT": "tests"},
    )  # fmt: skip
    played.seconds += time.monotonic() - began
    played.commands.append(shlex.join(["aprfmt", *words]))
    played.tokens += len(_WORDS.findall(done.stdout))
    played.lines += done.stdout.count("\n")
    return done.returncode, done.stdout


def play(task: Task, folder: Path) -> Played:
    """Play one task in an empty folder."""
    a, b = task.fault(folder)
    played = Played(task.name)
    first = command_of(task.situation)
    code, said = run(filled(first, a, beside(b, folder)), folder, played)
    heads = ["\n".join(said.splitlines()[:READ])]
    named = all(word in heads[0] for word in task.says)
    held = b  # the file that the player would hand over
    while code != 0 and len(played.commands) < STEPS:
        step = re.search(r"^next: aprfmt (.+)$", said, re.M)
        if step is None:
            break
        before = {path.name for path in folder.iterdir()}
        code, said = run(shlex.split(step[1]), folder, played)
        made = [path for path in folder.iterdir() if path.name not in before]
        if len(made) == 1 and code == 0:  # a file was written: ask the first question again
            held = made[0]
            code, said = run(filled(first, a, beside(held, folder)), folder, played)
        elif code == 0:
            break  # it was looked at, not mended
    played.done = code == 0 and (task.control or held != b)
    wrong = not task.control and not (held != b and sound(task, folder, held))
    played.false_done = played.done and wrong
    if task.control:
        played.right = played.done and len(played.commands) == 1
    else:
        played.right = named and not played.false_done and (played.done or not task.mended)
    return played


def totals(rows: list[Played]) -> dict[str, float]:
    """Return the figures over all tasks."""
    return {
        "tasks": len(rows),
        "right": sum(row.right for row in rows),
        "false_done": sum(row.false_done for row in rows),
        "commands": sum(len(row.commands) for row in rows),
        "tokens": sum(row.tokens for row in rows),
        "seconds": round(sum(row.seconds for row in rows), 1),
    }


def main(argv: list[str] | None = None) -> int:
    """Play and print; exit 1 where an answer was not right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("tasks", nargs="*", choices=[*(task.name for task in TASKS), []])
    asked = parser.parse_args(argv)
    rows = []
    for task in TASKS:
        if asked.tasks and task.name not in asked.tasks:
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = play(task, Path(folder))
        rows.append(row)
        if not asked.json:
            word = "FALSE DONE" if row.false_done else "right" if row.right else "WRONG"
            print(f"{word:10} {row.task:28} {len(row.commands)} commands, {row.tokens:5} tokens, "
                  f"{row.lines:3} lines, {row.seconds:5.1f} s")  # fmt: skip
    found = totals(rows)
    if asked.json:
        print(json.dumps({"tasks": [asdict(row) for row in rows], "totals": found}))
    else:
        print(", ".join(f"{value} {name}" for name, value in found.items()))
    return int(not all(row.right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
