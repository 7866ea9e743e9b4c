"""Reads, sets and removes keys of a nested configuration by their paths."""

from collections.abc import Mapping
from typing import Any

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
