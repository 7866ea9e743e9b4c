"""Tensors that have the names of another container, but not its order of rows.

llama.cpp's files have other names than those of Hugging Face, and some of their tensors are stored
otherwise: rows of q and k in another order, norms plus 1. Whoever only renames tensors makes a file
whose names say one layout while its values have the other. Nothing in that file tells which it is:
another model with the same values does.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from aprfmt.arch.binding import groups_for
from aprfmt.arch.role_vocabulary import split_key
from aprfmt.errors import AprfmtError
from aprfmt.model import Model
from aprfmt.model.name_relations import rename_relation
from aprfmt.model.relations import STYLE_OF
from aprfmt.model.renames import Rename, rename_names
from aprfmt.model.resolve import resolve_with_names

if TYPE_CHECKING:
    from aprfmt.tensors.view import View

_COMPARED = 6  # tensors that are stored otherwise, of which rows are read
_ROWS = (
    64  # first rows of a tensor: a head or more, since the first row of a head may keep its place
)
_NEARER = 0.5  # share of the distance under the names' layout below which names alone are wrong


def read_by_names_alone(a: Model, b: Model) -> tuple[Model, Model]:
    """Return both models, one of them read as if only its names were of another container.

    That is so where its values are nearer to the other model's without the layout that the names
    stand for. Otherwise, and where no renames give the names of its own container, it is returned
    as it is. What is returned in its place shares its file, which stays open as long as it does.
    """
    return _unless_nearer(a, b), _unless_nearer(b, a)


def _unless_nearer(model: Model, other: Model) -> Model:
    """Return `model`, or it under its container's names if that is nearer to `other`'s values."""
    style = STYLE_OF.get(model.format)
    try:
        if style is None or not any(one.kind == "container" for one in model.relations):
            return model
        made = _under_names_of(model, style)
        if made is None:
            return model
        keys = [key for key in _stored_otherwise(model, made) if key in other.roles]
        step = max(1, -(-len(keys) // _COMPARED))
        before = after = 0.0
        for key in keys[::step]:
            mine = [one.roles[key] for one in (model, made, other)]
            if len({view.shape for view in mine}) > 1:
                return model
            before += _rows_apart(mine[0], mine[2])
            after += _rows_apart(mine[1], mine[2])
        return made if after < _NEARER * before else model
    except AprfmtError:
        return model  # what cannot be read is said where it is compared


def _stored_otherwise(model: Model, made: Model) -> Iterator[str]:
    """Yield the keys of roles that both readings of one file take through other layout steps."""
    for key, view in model.roles.items():
        second = made.roles.get(key)
        if second is None or view.group is None or second.group is None:
            continue
        if view.group.binding.steps != second.group.binding.steps:
            yield key


def _rows_apart(view: "View", other: "View") -> float:
    """Return the relative L2 distance of the first rows of a tensor from another's, at most 2."""
    from aprfmt.measure.distances import rel_l2
    from aprfmt.measure.numbers import to_float64
    from aprfmt.measure.row_reader import RowReader

    one, two = RowReader(view), RowReader(other)
    rows = list(range(min(one.rows, _ROWS)))
    return min(2.0, rel_l2(to_float64(one.take(rows)), to_float64(two.take(rows))))


def _under_names_of(model: Model, style: str) -> Model | None:
    """Return the model read with its tensors renamed to the names of `style`; None if none do.

    A tensor has to stand for one tensor of that style. The relation of the result has the renames.
    """
    from aprfmt.model.relation_search import CALLED

    pairs: dict[str, str] = {}
    groups = groups_for(model.spec, style, tuple(model.roles), model.hyper)
    wanted = {key: group for group in groups for key in group.roles}
    for key, view in model.roles.items():
        group = wanted[key]
        if len(view.names) != 1 or len(group.stored) != 1:
            return None
        pairs[view.names[0]] = group.stored[0]
    rules = _rules_of(pairs, {view.names[0]: key for key, view in model.roles.items()})
    names = rename_names(model, rules, model.path, strict=False)
    if any(names.get(new) != old for old, new in pairs.items()):
        return None
    found = resolve_with_names(model, model.forced, names, style)
    if found.coverage.missing or found.coverage.misshapen:
        return None
    relation = rename_relation(
        model.path, rules, ((old, new) for new, old in names.items()), len(model)
    )
    says = (
        f"{relation.count} of {len(model)} tensors have the names of "
        f"{CALLED[model.resolution.style]} in a {model.format} file, and are stored as those of "
        f"{CALLED[style]} are: only the names are wrong"
    )
    made = Model(model.source, model.folder, model.forced, model.allow_missing)
    made.read_as(replace(found, relations=(replace(relation, says=says), *found.relations)))
    return made


def _rules_of(pairs: dict[str, str], keys: dict[str, str]) -> list[Rename]:
    """Return the renames of components that turn the names of `pairs` into their values.

    `keys` are the role keys of the names. Numbers of layers become marks. Rules without a number
    come first: their few components could stand in a new name of a layer.
    """
    rules: dict[tuple[bool, Rename], None] = {}
    for old, new in pairs.items():
        layer = split_key(keys[old])[0]
        first, last = old.rpartition("."), new.rpartition(".")
        if first[2] == last[2] and first[0] and last[0]:
            old, new = first[0], last[0]
        if layer is not None:
            old, new = (
                re.sub(rf"(?<=\.){layer}(?=\.|$)", "{N}", name, count=1) for name in (old, new)
            )
        if old != new:
            rules[layer is not None, Rename(old, new)] = None
    return [rule for _, rule in sorted(rules, key=lambda one: one[0])]
