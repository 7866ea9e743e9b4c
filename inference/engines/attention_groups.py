"""Ranks of attention data parallelism: each group attends to requests of its own.

Tensor-parallel ranks are in groups. Ranks of one group hold different columns of the same tokens;
those of another group hold other requests. A *step* is one forward pass. Arrays of feed-forward
modules are divided among all ranks and have every group's tokens: one group after another, or each
group in as many rows as the longest has.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from aprfmt.inference.engines.rank_joining import DumpedArray, JoinedArray, row_axis

TP, DP = "tp", "dp"


@dataclass(frozen=True)
class AttentionGroups:
    """Which group each tensor-parallel rank is of, and the tokens that groups have at a step.

    `places` is {tp rank: (group, rank in the group)}, `tokens` is {step: tokens of each group},
    `gathered` are the names of arrays that have rows of every group.
    """

    places: Mapping[int, tuple[int, int]]
    tokens: Mapping[int, Sequence[int]]
    gathered: Collection[str]

    @property
    def sizes(self) -> dict[str, int]:
        """The number of groups as "dp", and the number of ranks in each as "tp"."""
        groups, ranks = zip(*self.places.values(), strict=True)
        return {DP: max(groups) + 1, TP: max(ranks) + 1}

    def own(self, one: DumpedArray) -> DumpedArray:
        """Return an array of one group's tokens with its ranks renamed by the group.

        Its data-parallel rank becomes the group's number, its tensor-parallel rank the number in
        the group.
        """
        group, rank = self.places[one.ranks[TP]]
        return replace(one, ranks={**_other_ranks(one), TP: rank, DP: group})

    def shared(self, one: DumpedArray) -> DumpedArray:
        """Return an array that has the tokens of all groups with its ranks renamed.

        It keeps its tensor-parallel rank and has no data-parallel rank.
        """
        return replace(one, ranks={**_other_ranks(one), TP: one.ranks[TP]})

    def rows_of_group(self, array: JoinedArray, step: int, group: int) -> JoinedArray | None:
        """Return one group's rows of an array of all groups' tokens at a step.

        None if the array's number of rows is not that of all groups' tokens.
        """
        tokens, at = self.tokens[step], row_axis(array.shape)
        starts = _first_rows_of_groups(tokens, array.shape[at], len(self.places))
        if starts is None:
            return None
        first, count = starts[group], tokens[group]
        shape = (*array.shape[:at], count, *array.shape[at + 1 :])
        tiles = None if array.tiles is None or at else array.tiles.row_range(first, count)
        return JoinedArray(
            array.name,
            shape,
            array.dtype,
            lambda: array.read()[(slice(None),) * at + (slice(first, first + count),)],
            array.how,
            tiles=tiles,
        )


def _other_ranks(one: DumpedArray) -> dict[str, int]:
    """Return {axis: rank} of an array, without the axes tp and dp and the process number."""
    return {axis: rank for axis, rank in one.ranks.items() if axis not in (TP, DP, "rank")}


def _first_rows_of_groups(tokens: Sequence[int], rows: int, ranks: int) -> list[int] | None:
    """Return each group's first row in an array of all groups' tokens.

    `tokens` is each group's number of tokens. An array of `rows` rows has the groups' tokens one
    after the other, or is padded: each group then has as many rows as the longest one has tokens,
    or up to `ranks` - 1 more. None if `rows` fits neither.
    """
    each, rest = divmod(rows, len(tokens))
    if rows == sum(tokens):
        return [sum(tokens[:group]) for group in range(len(tokens))]
    if not rest and max(tokens) <= each < max(tokens) + ranks:
        return [each * group for group in range(len(tokens))]
    return None


def find_attention_groups(
    found: Sequence[tuple[int, DumpedArray]], ids: Collection[str]
) -> AttentionGroups | None:
    """Return how tensor-parallel ranks are divided into attention groups; None if they are not.

    `found` are (step, array), `ids` the names of arrays of token ids. Ranks of a group have equal
    ids, and each group is as many ranks that follow each other. Where files do not name the groups,
    some array must also have the tokens of all groups.
    """
    held: dict[int, dict[int, tuple[int, ...]]] = {}  # ids by rank and step
    said: dict[int, set[int | None]] = {}
    for step, one in found:
        rank = one.ranks.get(TP)
        if rank is None:
            return None
        said.setdefault(rank, set()).add(one.ranks.get(DP))
        if one.name in ids:
            row = tuple(np.asarray(one.read()).reshape(-1).tolist())
            if held.setdefault(rank, {}).setdefault(step, row) != row:
                return None  # ranks of another axis, whose requests differ
    if held.keys() != said.keys() or len({frozenset(row) for row in held.values()}) != 1:
        return None
    ranks = sorted(held)
    kinds = list(dict.fromkeys(tuple(sorted(held[rank].items())) for rank in ranks))
    number = {rank: kinds.index(tuple(sorted(held[rank].items()))) for rank in ranks}
    stated = {rank: next(iter(groups)) for rank, groups in said.items() if len(groups) == 1}
    names = [stated.get(rank) for rank in ranks]
    count = len(ranks) // len(kinds)
    blocks = [number[rank] for rank in ranks] == [at // count for at in range(len(ranks))]
    if len(kinds) < 2 or len(ranks) % len(kinds) or not blocks or ranks != [*range(len(ranks))]:
        return None
    if names != [number[rank] for rank in ranks] and set(names) != {None}:
        return None
    tokens = {step: [len(dict(kind)[step]) for kind in kinds] for step in held[ranks[0]]}
    gathered: dict[str, bool] = {}
    for step, one in found:
        rows, own = (
            one.shape[row_axis(one.shape)] if len(one.shape) in (2, 3) else -1,
            tokens.get(step, ()),
        )
        fits = bool(own) and _first_rows_of_groups(own, rows, len(ranks)) is not None
        if not fits or rows != own[number[one.ranks[TP]]]:
            gathered[one.name] = fits and gathered.get(one.name, True)
    all_tokens = frozenset(name for name, fits in gathered.items() if fits)
    if None in names and not all_tokens:
        return None
    places = {rank: (number[rank], at % count) for at, rank in enumerate(ranks)}
    return AttentionGroups(places, tokens, all_tokens)
