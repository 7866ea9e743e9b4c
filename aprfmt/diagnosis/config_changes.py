"""Differing configuration keys of two models, and a model read with some keys changed."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from aprfmt.arch.value_checks import same_value
from aprfmt.base.protocols import Value
from aprfmt.model import Model
from aprfmt.model.config_paths import GONE, Changes, Key, with_changes
from aprfmt.model.renames import RenamedSource

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


def read_with_changes(b: Model, changes: Changes) -> Model:
    """Return B read with some configuration keys changed; its files are not written."""
    if b.key_style != IN_FILES:
        source = RenamedSource(b.source, ())
        source.metadata = with_changes(b.metadata, changes)
        return Model(source, b.folder, b.forced, b.allow_missing)
    assert b.folder is not None
    config = with_changes(b.folder.config or {}, changes)
    return Model(b.source, replace(b.folder, config=config), b.forced, b.allow_missing)
