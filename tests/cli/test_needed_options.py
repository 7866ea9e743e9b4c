"""An option that could have no effect is refused, in every command by one table.

Seen red: a row without its check, a check of defaults, and an option of a run that `trace` ignores.
"""

from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from aprfmt.cli import options
from aprfmt.cli.main import group
from tests.cli.run import aprfmt

CONTEXT = click.Context(group)
ARGUMENTS = {"convert": ("a", "b"), "diff": ("a", "b"), "hex": ("a",)}
ROWS = [(name, option) for name, rows in options.NEEDED.items() for option in rows]
VALUES = {"memory": "1G", "dtype": "float32", "trained_in": "float32", "fma": "strict"}


def parameters(name: str) -> dict[str, click.Parameter]:
    command = group.get_command(CONTEXT, name)
    assert command is not None
    return {each.name: each for each in command.params if each.name}


def spelled(name: str, option: str, value: str | None = None) -> list[str]:
    """Return an option of a command as it is typed, with a value if it takes one."""
    found = parameters(name)[option]
    if isinstance(found, click.Argument):
        return [value or "1"]
    flag = isinstance(found, click.Option) and found.is_flag
    return [max(found.opts, key=len)] + [value or VALUES.get(option, "1")] * (not flag)


@pytest.mark.parametrize(("name", "option"), ROWS, ids=lambda each: str(each))
def test_an_option_alone_is_refused(name: str, option: str) -> None:
    needed = options.NEEDED[name][option]
    arguments = ARGUMENTS.get(name, ("nothing.gguf",))
    done = aprfmt(name, *arguments, *spelled(name, option))
    assert done.code == 2 and "alone it has no effect" in done.err, done.err
    assert all(max(parameters(name)[each].opts, key=len) in done.err for each in needed)
    for each in needed:
        done = aprfmt(name, *arguments, *spelled(name, option), *spelled(name, each))
        assert "no effect" not in done.err


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, rows in options.UNUSED_WITH.items() for option in rows],
)
def test_an_option_that_another_makes_useless_is_refused(name: str, option: str) -> None:
    for other in options.UNUSED_WITH[name][option]:
        done = aprfmt(name, "nothing.gguf", *spelled(name, other), *spelled(name, option))
        assert done.code == 2 and "has no effect with" in done.err, done.err
    done = aprfmt(name, "nothing.gguf", *spelled(name, option))
    assert "no effect" not in done.err


def valued() -> Iterator[str]:
    """Yield the options of `trace` that take a value of their own kind."""
    for name, each in parameters("trace").items():
        if isinstance(each, click.Option) and not each.is_flag and name not in ("form", "force"):
            yield name


@pytest.mark.parametrize("option", list(valued()))
def test_trace_ignores_no_value(option: str, demo_model: Path) -> None:
    plain = aprfmt("trace", demo_model)
    done = aprfmt("trace", demo_model, *spelled("trace", option, "zzz"))
    assert plain.code == 0 and (done.code, done.out) != (0, plain.out), done.err
