"""Finds recorded q, k and v that were cut from one joined projection in the wrong column order.

A fused projection gives [q | k | v], or such columns group by group: for each group of heads its q,
k and v, as Megatron and GPT-NeoX store them, and as the ranks' shares give them one after another.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.sequences import join_first
from aprfmt.causes.forward.cut_points import recorded_values_are_used
from aprfmt.causes.forward.mismatch import Change, Mismatch
from aprfmt.inference.capture import key_name, parse_key

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

PARTS = ("q", "k", "v")
MOST_GROUPS = 64  # groups of columns that are tried
SHOWN = 4  # points that one sentence names


def joined_columns_text(case: Mismatch, key: str) -> str:
    """Return in words the column orders by which q, k or v was joined and wrongly cut apart, or "".

    `key` names the recorded point. An order is [q | k | v], or these for each of some groups of
    heads. The reference's q, k and v are joined by one order and cut by another: the text names
    the two that give the recorded values within the tolerance of two whole runs. "" where no two
    orders do, and where the recorded values are the reference's own.
    """
    point, layer = parse_key(key)
    view = case.found.views[key]
    arrays = [case.plain.get(key_name(part, layer)) for part in PARTS]
    parts = [one for one in arrays if one is not None and one.ndim == 3]
    if point not in PARTS or len(parts) < len(PARTS) or len({len(one) for one in parts}) > 1:
        return ""
    place = PARTS.index(point)
    if view.distance(parts[place]) <= view.whole_tolerance:
        return ""
    heads = [one.shape[1] for one in parts]
    most = min(*heads, MOST_GROUPS)
    groups = [n for n in range(1, most + 1) if not any(each % n for each in heads)]
    flat = [one.reshape(len(one), -1) for one in parts]
    for stored, cut in permutations(groups, 2):
        found = _cut_columns(_join_columns(flat, stored), flat, cut)[place]
        if view.distance(found.reshape(parts[place].shape)) <= view.whole_tolerance:
            return f"{_order_text(cut)} of what is {_order_text(stored)}"
    return ""


def find_other_column_order(case: Mismatch) -> Change | None:
    """Return a Change that ignores q, k and v that were cut in another order than they were joined.

    None where the first wrong point is not q, k or v, or where the run went on with these values.
    """
    key = case.view.key
    said = joined_columns_text(case, key)
    if not said or recorded_values_are_used(case):
        return None
    texts = {
        name: text
        for name, view in case.found.views.items()
        if view.recorded is not None and (text := joined_columns_text(case, name))
    }
    orders = [
        f"{join_first([name for name, text in texts.items() if text == order], SHOWN)} as {order}"
        for order in dict.fromkeys(texts.values())
    ]
    return Change(
        "capture_point",
        f"the columns of a joined projection were cut in another order than they have: "
        f"{'; '.join(orders)}",
        tuple(texts),
        drop=frozenset(texts),
        values={"recorded_as": case.view.point, "is": said},
        scoped=False,
    )


def _join_columns(parts: Sequence["Array"], groups: int) -> "Array":
    """Return q, k and v, each [tokens, width], joined to [tokens, all widths], group by group.

    `groups` is the number of equal groups of columns; 1 is [q | k | v].
    """
    by_group = [one.reshape(len(one), groups, -1) for one in parts]
    joined: Array = np.concatenate(by_group, axis=2).reshape(len(parts[0]), -1)
    return joined


def _cut_columns(joined: "Array", parts: Sequence["Array"], groups: int) -> list["Array"]:
    """Return q, k and v, cut from joined columns as if these had so many groups.

    `parts` are arrays of the widths that q, k and v have.
    """
    ends = np.cumsum([one.shape[1] // groups for one in parts])[:-1]
    by_group = np.split(joined.reshape(len(joined), groups, -1), ends, axis=2)
    return [one.reshape(len(joined), -1) for one in by_group]


def _order_text(groups: int) -> str:
    """Return the column order of so many groups in words, such as "[q | k | v]"."""
    return "[q | k | v]" if groups == 1 else f"{groups} groups of [q | k | v]"
