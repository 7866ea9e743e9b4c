"""Reads, sets and removes keys of a nested configuration by their paths."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aprfmt.arch.value_checks import same_value
from aprfmt.tensors.companions import SECTIONS

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

    A key that itself has dots (of a module in a quantization section) is not split where it exists,
    nor where it is new in a section that has a key for each module with its own settings.
    """
    parts, value = name.split("."), values
    path: list[str] = []
    while parts:
        if path and _names_a_new_module(path[-1], value, parts):
            setting = parts[-1:] if parts[-1] in value else []
            return (*path, ".".join(parts[: len(parts) - len(setting)]), *setting)
        sizes = range(len(parts), 1, -1) if isinstance(value, Mapping) else ()
        size = next((n for n in sizes if ".".join(parts[:n]) in value), 1)
        path.append(".".join(parts[:size]))
        value = value.get(path[-1]) if isinstance(value, Mapping) else None
        parts = parts[size:]
    return tuple(path)


def _names_a_new_module(above: str, section: Any, parts: Sequence[str]) -> bool:
    """Return whether the rest of a dotted name is a module that an MLX section does not name yet.

    `above` is the section's key in config.json, `parts` are the rest's parts. An MLX section has
    bits and no method, and next to them the settings of single modules by the modules' names.
    """
    if above not in SECTIONS or not isinstance(section, Mapping) or len(parts) < 2:
        return False
    known = any(".".join(parts[:size]) in section for size in range(1, len(parts) + 1))
    return "bits" in section and "quant_method" not in section and not known


def key_path(model: "Model", key: str) -> Key:
    """Return the path of a key that a user wrote, as its names from the outermost object.

    Dots separate names only in a model with a config.json; in other models they belong to the
    metadata key.
    """
    config = None if model.folder is None else model.folder.config
    return (key,) if config is None else path_of_name(config, key)


def read_with_changes(model: "Model", changes: Changes) -> "Model":
    """Return a model of the same files, with the configuration changed as `changes` says."""
    from aprfmt.model.renames import RenamedSource

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
