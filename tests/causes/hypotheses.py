"""The functions of the table of hypotheses, as their modules have them."""

from collections.abc import Callable
from typing import Any

from aprfmt.base.registry import LazyFunction


def load_function(find: Callable[..., Any]) -> Callable[..., Any]:
    """Return a row's function itself, its module imported if the table only names it."""
    return find.load() if isinstance(find, LazyFunction) else find
