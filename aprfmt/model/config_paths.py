"""Reads, sets and removes keys of a nested configuration by their paths."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aprfmt.arch.value_checks import same_value
from aprfmt.model.renames import RenamedSource

if TYPE_CHECKING:
    from aprfmt.base.protocols import Value
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
    """Return a copy of nested values in which the keys of `changes` are set, or removed if GONE."""
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
        nested = made.get(name)
        made[name] = with_changes(nested if isinstance(nested, Mapping) else {}, rest)
    return made


def path_of_name(values: Any, name: str) -> Key:
    """Return the keys, from the outermost, to which a dotted name leads in nested values.

    A key that itself has dots (of a module in a quantization section) is not split where it exists.
    """
    parts, path, value = name.split("."), [], values
    while parts:
        sizes = range(len(parts), 1, -1) if isinstance(value, Mapping) else ()
        size = next((n for n in sizes if ".".join(parts[:n]) in value), 1)
        path.append(".".join(parts[:size]))
        value = value.get(path[-1]) if isinstance(value, Mapping) else None
        parts = parts[size:]
    return tuple(path)


def key_path(model: "Model", key: str) -> Key:
    """Return the path of a key that a user wrote, as its names from the outermost object.

    Dots separate names only in a model with a config.json; in other models they belong to the
    metadata key.
    """
    config = None if model.folder is None else model.folder.config
    return (key,) if config is None else path_of_name(config, key)


def read_with_changes(model: "Model", changes: Changes) -> "Model":
    """Return a model of the same files, with the configuration changed as `changes` says."""
    source, folder = model.source, model.folder
    if folder is not None and folder.config is not None:
        folder = replace(folder, config=with_changes(folder.config, changes))
    else:
        keyed = RenamedSource(source, ())
        keyed.metadata = with_changes(source.metadata, changes)
        source = keyed
    return type(model)(source, folder, model.forced, model.allow_missing)


def differing_keys(
    mine: "Mapping[str, Value]", theirs: "Mapping[str, Value]", above: Key = ()
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
