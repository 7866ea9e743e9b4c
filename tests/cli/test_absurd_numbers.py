"""Every option that takes a number, of every command, with numbers that nobody means.

Seen red: `scan --unit-time nan` ended in `bug:`; 5,000 digits came back in the message.
"""

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from aprfmt.cli.commands import COMMANDS
from aprfmt.cli.main import group
from tests.cli.run import aprfmt

WHOLE = ("1" + "0" * 30, "-1" + "0" * 30, "9" * 5000, "1e3", "nan", "٣x")
REAL = ("nan", "inf", "-inf", "1e308", "-1e308", "1e400", "9" * 5000, "1,5")
NUMBERS = (click.types.IntParamType, click.types.FloatParamType)


def numeric() -> Iterator[tuple[str, str, str]]:
    """Yield (command, option, absurd number)."""
    context = click.Context(group)
    for name in COMMANDS:
        command = group.get_command(context, name)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter, click.Option) and isinstance(parameter.type, NUMBERS):
                whole = isinstance(parameter.type, click.types.IntParamType)
                for text in WHOLE if whole else REAL:
                    yield name, max(parameter.opts, key=len), text


CASES = list(numeric())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the examples."""
    made = tmp_path_factory.mktemp("absurd")
    assert aprfmt("demo", "--into", made / "model").code == 0
    assert aprfmt("convert", made / "model", made / "model.gguf").code == 0
    assert aprfmt("quantize", made / "model", made / "q4.gguf", "--type", "Q4_0").code == 0
    whole = (made / "model.gguf").read_bytes()
    (made / "model.gguf.part").write_bytes(whole[: len(whole) // 2])
    (made / "text.txt").write_text("Once upon a time there was a small model.\n")
    return made


def test_the_options_are_found() -> None:
    options = {(name, option) for name, option, _ in CASES}
    assert {("scan", "--jobs"), ("diff", "--top"), ("run", "--top-p")} <= options
    assert len(options) >= 30


@pytest.mark.parametrize(
    ("name", "option", "text"), CASES, ids=[f"{n}{o}={t[:12]}" for n, o, t in CASES]
)
def test_an_absurd_number_ends_in_one_line(
    name: str, option: str, text: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "here"
    shutil.copytree(folder, place)
    monkeypatch.chdir(place)
    words = shlex.split(COMMANDS[name].example)[1:]
    done = aprfmt(*words, f"{option}={text}")
    assert done.code in (0, 1, 2), done.err
    assert "bug:" not in done.err and "Traceback" not in done.err
    if done.code == 2:
        (line,) = done.err.splitlines() or [""]
        assert line.startswith("aprfmt: ") and len(line) < 400 and text[:2] in line
        assert not done.out
