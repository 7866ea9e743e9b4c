"""Reads, sets and removes keys of a nested configuration by their paths."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aprfmt.model.renames import RenamedSource

if TYPE_CHECKING:
    from aprfmt.model import Model

GONE = object()  # the key has to go

Key = tuple[str, ...]
Changes = Mapping[Key, Any]


def value_at_path(values: Any, path: Key) -> Any:
    """Return the value at a path of nested keys, None if the path does not exist."""
    for key in path:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def with_changes(values: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Return a copy of nested values with the keys in `changes` set, or removed where GONE."""
    made = dict(values)
    inner: dict[str, dict[Key, Any]] = {}
    for key, value in changes.items():
        if len(key) > 1:
            inner.setdefault(key[0], {})[key[1:]] = value
        elif value is GONE:
            made.pop(key[0], None)
        else:
            made[key[0]] = value
    for name, rest in inner.items():
        held = made.get(name)
        made[name] = with_changes(held if isinstance(held, Mapping) else {}, rest)
    return made


def key_path(model: "Model", key: str) -> Key:
    """Return a user's key as a path: split at its dots for a config.json, else the key alone."""
    in_file = model.folder is not None and model.folder.config is not None
    return (*key.split("."),) if in_file else (key,)


def read_with_changes(model: "Model", changes: Changes) -> "Model":
    """Return a model that reads the same files with some keys of its configuration changed."""
    source, folder = model.source, model.folder
    if folder is not None and folder.config is not None:
        folder = replace(folder, config=with_changes(folder.config, changes))
    else:
        keyed = RenamedSource(source, ())
        keyed.metadata = with_changes(source.metadata, changes)
        source = keyed
    return type(model)(source, folder, model.forced, model.allow_missing)
