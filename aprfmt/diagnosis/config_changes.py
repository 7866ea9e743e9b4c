"""Configuration keys in which two models differ."""

from collections.abc import Iterator, Mapping
from typing import Any

from aprfmt.arch.value_checks import same_value
from aprfmt.base.protocols import Value
from aprfmt.model.config_paths import GONE, Key

IN_FILES = "safetensors"  # the key style whose values stand in a config.json


def differing_keys(
    mine: Mapping[str, Value], theirs: Mapping[str, Value], above: Key = ()
) -> Iterator[tuple[Key, Any]]:
    """Yield (path, value in `mine`) of the innermost keys in which `theirs` differs from `mine`.

    The value of a key that `mine` lacks is GONE.
    """
    for key, value in mine.items():
        other = theirs.get(key, GONE)
        if isinstance(value, Mapping) and isinstance(other, Mapping | type(None)):
            yield from differing_keys(value, other or {}, (*above, key))
        elif other is GONE or not same_value(value, other):
            yield (*above, key), value
    for key in theirs:
        if key not in mine:
            yield (*above, key), GONE
