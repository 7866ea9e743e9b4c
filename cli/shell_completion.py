"""Shell completion of tensor names and metadata keys, read from the model on the command line.

What commands give click as `shell_complete`; a model that cannot be opened has nothing to offer,
and says nothing.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.errors import AprfmtError

if TYPE_CHECKING:
    from aprfmt.model import Model

MODELS = ("model", "src", "a")  # what commands call the argument that names a model
MOST = 400  # candidates, more than anybody reads


def complete_tensors(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the tensor names that begin with `incomplete`, for the shell's completion.

    The names stored in the model's file come first, then those that other formats give the tensors.
    """

    def names(model: "Model") -> Iterable[str]:
        """Yield the tensor names stored in the file, then each tensor's names in other formats."""
        from aprfmt.model.resolve import spellings_by_name

        yield from model
        for spellings in spellings_by_name(model).values():
            yield from spellings

    return _complete_from_model(ctx, incomplete, names)


def complete_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the model's metadata keys that begin with `incomplete`."""
    return _complete_from_model(ctx, incomplete, lambda model: model.metadata)


def complete_settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the model's metadata keys that begin with `incomplete`, each followed by "="."""
    return [f"{key}=" for key in complete_keys(ctx, param, incomplete)]


def _complete_from_model(
    ctx: click.Context, incomplete: str, names: "Callable[[Model], Iterable[str]]"
) -> list[str]:
    """Return those of `names(model)` that begin with `incomplete`; [] without a readable model."""
    from aprfmt.model import open_model

    given = next((ctx.params[name] for name in MODELS if ctx.params.get(name)), None)
    given = given or next(iter(ctx.args), None)  # an option without its value stops click's parser
    if given is None:
        return []
    try:
        with open_model(Path(given).expanduser(), partial=True, damaged=True) as model:
            return matching_names(names(model), incomplete)
    except (AprfmtError, OSError):
        return []


def matching_names(names: Iterable[str], incomplete: str) -> list[str]:
    """Return the names that begin with `incomplete`, each once, at most MOST.

    Names that a shell would have to quote are left out.
    """
    found = dict.fromkeys(name for name in names if name.startswith(incomplete))
    return [name for name in found if name.isprintable() and not set(name) & set(" '\"\\$`")][:MOST]
