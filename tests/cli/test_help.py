"""The help: groups, one example of each command that really runs, near names, completion.

Seen red: an example of another folder, a command outside the groups, completion that raises.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from aprfmt.cli.commands import COMMANDS, GROUPS
from tests.cli.examples import make_examples
from tests.cli.run import ROOT, aprfmt

TEXT = "Once upon a time there was a small model that told the same story twice.\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the examples are of."""
    made = tmp_path_factory.mktemp("help")
    make_examples(made)
    return made


def test_each_command_stands_in_one_group() -> None:
    assert list(GROUPS) == ["Look", "Convert", "Compare", "Run", "Check"]
    assert sum(map(len, GROUPS.values())) == len(COMMANDS)


def test_help_shows_the_groups_in_order() -> None:
    out = aprfmt("--help").out
    places = [out.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    for (title, rows), begin, end in zip(GROUPS.items(), places, [*places[1:], None], strict=True):
        for name, row in rows.items():
            assert f"  {name} " in out[begin:end] and row.summary in out[begin:end], title
    for name in ("import", "export"):
        assert "Shorthand: convert" in COMMANDS[name].summary


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_of_a_command_runs(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = COMMANDS[name].example
    assert aprfmt(name, "--help").out.rstrip().endswith(f"Example:\n    {example}")
    words = shlex.split(example)
    assert words[:2] == ["aprfmt", name]
    monkeypatch.chdir(folder)
    done = aprfmt(*words[1:])
    assert done.code == 0, done.err
    assert done.out or name == "logits"


def test_a_path_that_is_no_command_is_inspected(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert aprfmt("model.gguf").out == aprfmt("inspect", "model.gguf").out
    assert aprfmt("model.gguf", "--json").json["command"] == "inspect"
    assert aprfmt("hf://org", "--json").json["command"] == "inspect"
    (folder / "tree").write_text("a file named like a command")
    assert "Missing argument" in aprfmt("tree").err
    done = aprfmt("modle.gguf")
    assert done.code == 2 and "near names: model.gguf" in done.err and done.err.count("\n") == 1
    assert "near names: tensors" in aprfmt("tensor").err


def completed(folder: Path, line: str) -> list[str]:
    """Return what bash is offered behind `line`."""
    words = line.split(" ")
    env = os.environ | {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_APRFMT_COMPLETE": "bash_complete",
        "PYTHONPATH": str(ROOT),
    }
    code = "from aprfmt.cli.main import main; main([])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr and "bug" not in done.stdout, done.stderr
    return [row.partition(",")[2] for row in done.stdout.splitlines() if row]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("aprfmt cat model.gguf blk.0.ffn_g", ["blk.0.ffn_gate.weight"]),
        ("aprfmt cat model.gguf model.layers.0.mlp.gate", ["model.layers.0.mlp.gate_proj.weight"]),
        ("aprfmt diff model.gguf q4.gguf --tensor token_e", ["token_embd.weight"]),
        ("aprfmt set model.gguf general.arch", ["general.architecture="]),
        ("aprfmt set model.gguf --remove general.arch", ["general.architecture"]),
        ("aprfmt explain dtype_mis", ["dtype_mislabel"]),
        ("aprfmt cat nowhere.gguf blk", []),
        ("aprfmt cat text.txt blk", []),
        ("aprfmt quan", ["quantize"]),
    ],
)
def test_names_of_the_model_are_completed(folder: Path, line: str, expected: list[str]) -> None:
    assert completed(folder, line) == expected
