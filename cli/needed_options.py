"""Options that mean something only with another one: refused alone, never ignored.

One row an option: the commands' own code need not ask. What the values of options, or the model,
make useless is refused where it is known.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar, cast

import click
from click.core import ParameterSource

from aprfmt.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_RUNS = ("payload", "engine", "dry_run", "loaded", "arrays")
# command -> {option: options of which it needs one}
NEEDED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "convert": {"fma": ("quantize", "encoding", "tensor_encodings")},
    "diff": {"seed": ("sample",)},
    "hash": {"blocks": ("write",), "ranks": ("roles",)},
    "hex": {"length": ("offset",)},
    "run": {name: ("temperature",) for name in ("top_k", "top_p", "seed")},
    "step": {"device": ("batch",), "dtype": ("batch",), "trained_in": ("batch", "grads")},
    "trace": {
        name: _RUNS
        for name in (
            "prompt",
            "ids",
            "chat",
            "positions",
            "behind",
            "threads",
            "memory",
            "deterministic",
        )
    },
}
# command -> {option: options and arguments in whose presence it has no effect}
UNUSED_WITH: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "hex": {"limit": ("name", "named", "offset"), "block": ("offset",), "blocks": ("offset",)}
}


def refuse_unused_options(function: F) -> F:
    """Return a command's function that refuses given options which could have no effect."""

    @wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        """Call the function, or raise UsageError for the first such option."""
        context = click.get_current_context()
        names = {each.name: _label(each) for each in context.command.params if each.name}
        given = [
            name
            for name in names
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        ]
        name = context.info_name or ""
        for option in given:
            needed = NEEDED.get(name, {}).get(option, ())
            if needed and not set(needed) & set(given):
                wanted = " or ".join(names[each] for each in needed)
                raise UsageError(f"{names[option]}: needs {wanted}; alone it has no effect")
            others = [each for each in UNUSED_WITH.get(name, {}).get(option, ()) if each in given]
            if others:
                raise UsageError(f"{names[option]}: has no effect with {names[others[0]]}")
        return function(*args, **kwargs)

    return cast(F, command)


def _label(parameter: click.Parameter) -> str:
    """Return what a user calls a parameter: the long option, or the argument's name."""
    if isinstance(parameter, click.Argument):
        return parameter.make_metavar(click.get_current_context()).strip("[]")
    return max(parameter.opts, key=len)
