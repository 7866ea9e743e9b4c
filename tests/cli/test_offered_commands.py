"""Commands of other packages: found by name, never in place of ours, and clear when broken."""

from importlib.metadata import EntryPoint

import click
import pytest

from aprfmt.cli import main


@click.command("largest")
def largest() -> int:
    """Print a word."""
    click.echo("found")
    return 0


def offer(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    point = EntryPoint(name, value, "aprfmt.commands")
    monkeypatch.setattr(
        main, "installed_entry_points", lambda kind: [point] if kind == "commands" else []
    )


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main.main(list(args))
    found = capsys.readouterr()
    return int(stop.value.code or 0), found.out, found.err


def test_a_command_of_another_package_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch, "largest", f"{__name__}:largest")
    monkeypatch.setattr(EntryPoint, "load", lambda self: largest)
    assert call(capsys, "largest") == (0, "found\n", "")
    code, _, said = call(capsys, "largets")
    assert code == 2 and "near names: largest" in said


def test_ours_are_never_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch, "explain", "nowhere:command")
    assert call(capsys, "explain", "rope_theta")[0] == 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:command", "cannot be imported"),
        ("math:pi", "expected a click.Command"),
        ("math:no_such_name", "cannot be imported"),
    ],
)
def test_a_broken_one_is_one_line(
    value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offer(monkeypatch, "largest", value)
    code, _, line = call(capsys, "largest")
    assert code == 2 and said in line and value in line and line.count("\n") == 1
