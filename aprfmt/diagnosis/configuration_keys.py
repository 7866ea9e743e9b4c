"""Finds the configuration keys that repair B, tried on B's own file before they are printed."""

import json
import shlex
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from aprfmt.arch.hyperparameters import write_hyper
from aprfmt.arch.value_checks import same_value
from aprfmt.causes.restored_keys import misfit_reason, refusal_reason
from aprfmt.errors import AprfmtError
from aprfmt.model import Model
from aprfmt.model.config_paths import GONE, Changes, Key, differing_keys, read_with_changes

IN_FILES = "safetensors"  # the key style whose values stand in a config.json
_MOST = 24  # differing keys of which a part is sought


def repair_arguments(a: Model, b: Model, names: Collection[str]) -> list[str]:
    """Return the fewest arguments of `aprfmt set` that give B A's values of hyperparameters.

    They are KEY=VALUE and `--remove KEY`, quoted for a shell. `names` are the hyperparameters. []
    where no keys of B do that: where the tensors determine the value, or B no longer fits its
    tensors.
    """
    try:
        changes = dict(_keys_to_change(a, b))
        if not changes or not _repairs(a, b, changes, names):
            return []
        read = {
            key
            for one in (a, b)
            for key, name in one.resolution.report.read.items()
            if name in names
        }
        own = {key: value for key, value in changes.items() if ".".join(key) in read}
        if own and _repairs(a, b, own, names):
            changes = own
        for key in list(changes)[:_MOST]:
            fewer = {each: value for each, value in changes.items() if each != key}
            if fewer and _repairs(a, b, fewer, names):
                changes = fewer
    except AprfmtError:
        return []
    return [_set_argument(b, key, value) for key, value in changes.items()]


def _set_argument(b: Model, key: Key, value: Any) -> str:
    """Return the argument of `aprfmt set` for one key: KEY=VALUE or `--remove KEY`, quoted."""
    name = ".".join(key)
    if b.key_style == IN_FILES and not _has_key(b.config, key):
        name = f"config.json:{name}"
    if value is GONE:
        return f"--remove {shlex.quote(name)}"
    return shlex.quote(f"{name}={json.dumps(value, default=list)}")


def _has_key(config: Any, key: Key) -> bool:
    """Return whether a nested configuration has a key."""
    for part in key:
        if not isinstance(config, Mapping) or part not in config:
            return False
        config = config[part]
    return True


def _keys_to_change(a: Model, b: Model) -> Iterator[tuple[Key, Any]]:
    """Yield (path, A's value) of the keys in which B's configuration differs from A's.

    The value is GONE for a key to remove. Where the formats differ, A's hyperparameters are
    written in B's key style first.
    """
    if b.key_style == IN_FILES:
        if a.config is not None and b.config is not None:
            yield from differing_keys(a.config, b.config)
        return
    style = b.key_style
    mine = write_hyper(a.spec, a.hyper, style)
    if a.key_style == style:
        mine = {**mine, **{key: value for key, value in a.metadata.items() if key in mine}}
    read = b.resolution.report.read
    for name, value in mine.items():
        if name not in b.metadata or not same_value(b.metadata[name], value):
            yield (name,), value
    for name in read:
        if name in b.metadata and name not in mine and name not in a.metadata:
            yield (name,), GONE


def _repairs(a: Model, b: Model, changes: Changes, names: Collection[str]) -> bool:
    """Return whether B with these changes has A's values of `names` and stays consistent.

    `changes` is {path of a key: value}. B must fit its tensors, and have no hyperparameter value
    that neither A nor B has.
    """
    made = read_with_changes(b, changes)
    if refusal_reason(made) or misfit_reason(made):
        return False
    if any(one.kind == "keys" for one in made.resolution.relations):
        return False  # read under another value than its key says
    return all(_hyperparameter_equal(a, made, name) for name in names) and all(
        _hyperparameter_equal(a, made, name) or _hyperparameter_equal(b, made, name)
        for name in {*a.hyper, *made.hyper}
    )


def _hyperparameter_equal(one: Model, other: Model, name: str) -> bool:
    """Return whether both models lack a hyperparameter or have the same value of it."""
    if (name in one.hyper) != (name in other.hyper):
        return False
    return name not in one.hyper or same_value(one.hyper[name], other.hyper[name])
