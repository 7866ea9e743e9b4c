"""Puts the parts that ranks dumped of one array together, before anything is compared.

A rank's *part* is what it holds of an array that ranks divide. A *joined result* is one module's
output for several projections, as qkv_proj; its parts are the columns of each projection. An *axis*
is a kind of parallelism: tensor, sequence, context.

How an array is divided comes from its dims where the dump or `ranks.json` says them. Without, it
follows from its size: the width that the model gives the point, and the tokens of the step. Columns
are of tensor parallelism, rows of sequence and context parallelism. What every rank holds whole has
to be equal. A sum over ranks that was taken before the all-reduce is not: it is added up where what
follows is equal on all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.dump_names import rank_of_axis
from aprfmt.errors import FormatError
from aprfmt.inference.engines.parts import finite_distance
from aprfmt.inference.engines.rank_dims import Division, parse_dims
from aprfmt.inference.engines.stored_arrays import StoredBytes
from aprfmt.inference.engines.tiles import Tiles, add_up, join_columns, join_rows
from aprfmt.tensors.memory_compare import bytes_equal

Numbers = NDArray[Any]
Layout = Literal["whole", "columns", "rows", "zigzag", "replicated", "partial", "one rank"]
# Points that are sums over tensor-parallel ranks: row-parallel products, a divided embedding, and
# what experts of several ranks add up to.
SUMMED = ("attn_out", "ffn_out", "moe_out", "shexp_out", "embd", "embd_scaled")
_SPARSE = ("moe_out", "embd", "embd_scaled")  # of which a rank may have nothing
NEAR = 2.0**-7  # relative distance that 16-bit rounding of one more sum makes at most
_MOST_RANKS = 1024
_TOGETHER = 16  # ranks whose files are open at a time while they are compared
_ROWS_AXES = ("cp", "sp")  # axes that divide tokens


def _no_bytes() -> StoredBytes | None:
    """Return None: an array that is computed has no stored bytes."""
    return None


class UnclearLayoutError(FormatError):
    """How ranks divide an array that is no point of the model follows from nothing."""


@dataclass(frozen=True)
class DumpedArray:
    """One array of one rank at one step; `origin` is its file, `dims` what the dump says of it."""

    name: str
    ranks: Mapping[str, int]
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Numbers]
    origin: str
    dims: str = ""
    stored: Callable[[], StoredBytes | None] = _no_bytes
    tiles: Tiles | None = None


@dataclass(frozen=True)
class PointWidths:
    """Sizes that a model gives whole arrays, by the arrays' names.

    `widths` are elements of a token, `parts` are (elements, elements of a head) of each part of a
    joined result such as qkv_proj, `points` are the points that a name says, `known` are the
    widths of all points.
    """

    widths: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    points: Mapping[str, str] = field(default_factory=dict)
    known: frozenset[int] = frozenset()
    vocabulary: int = 0


@dataclass(frozen=True)
class JoinedArray:
    """A whole array; `how` says how its ranks' parts were put together.

    `read_parts` returns the parts of a joined result such as qkv_proj, each a separate array.
    `tiles` holds what `read` returns where blocks of it can be read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Numbers]
    how: Layout = "whole"
    stored: Callable[[], StoredBytes | None] = _no_bytes
    read_parts: Callable[[], list[Numbers]] | None = None
    tiles: Tiles | None = None


@dataclass(frozen=True)
class RankDisagreement:
    """An array that every rank should hold alike; `apart` is how far two ranks are.

    That is of the values that are finite on both; `nonfinite`: other ones are finite on the second.
    """

    name: str
    axis: str
    ranks: tuple[int, int]
    apart: float
    nonfinite: bool = False

    @property
    def says(self) -> str:
        """A sentence that names the two ranks and how far their values are apart."""
        first, second = self.ranks
        how = "NaN or infinity on one of them" if self.nonfinite else f"{self.apart:.3g} apart"
        return (
            f"{rank_of_axis(self.axis)}s {first} and {second} hold other values ({how}) of "
            f"what every rank computes alike"
        )


def row_axis(shape: Sequence[int]) -> int:
    """Return the axis of an array's tokens: the first, or the second after a batch of one."""
    return 1 if len(shape) > 2 and shape[0] == 1 else 0


def width_of(shape: Sequence[int]) -> int:
    """Return the number of elements of a token."""
    return int(np.prod(shape[row_axis(shape) + 1 :], dtype=np.int64))


def lone_shares(
    shapes: Mapping[str, tuple[int, ...]], widths: PointWidths, tokens: int | None
) -> dict[str, tuple[int, int, int]]:
    """Return {name: (its columns, all columns, ranks)} of arrays that have one rank's columns.

    `shapes` are those of joined arrays, of `tokens` tokens (None: unknown). Left out are arrays
    of a point that has all its columns in another layer: there the layers differ in size.
    """
    found: dict[str, tuple[int, int, int]] = {}
    entire: set[str] = set()
    for name, shape in shapes.items():
        whole, point = widths.widths.get(name), widths.points.get(name, "")
        size = int(np.prod(shape, dtype=np.int64))
        if whole is None or not size or len(shape) < 2:
            continue
        own = size // tokens if tokens and size % tokens == 0 else width_of(shape)
        if shape[row_axis(shape)] == 1:
            own = width_of(shape)
        ranks = _ranks_of_share(own, whole, widths.parts.get(name, ()))
        if ranks > 1:
            found[name] = own, whole, ranks
        elif own >= whole:
            entire.add(point)
    return {name: row for name, row in found.items() if widths.points.get(name, "") not in entire}


def _ranks_of_share(own: int, whole: int, parts: Sequence[tuple[int, int]]) -> int:
    """Return the number of ranks among which `whole` columns are divided if one rank has `own`.

    1 if `own` are all, 0 if no number fits. `parts` are (columns, columns of a head) of each
    projection in a joined result; a rank has at least one head of each.
    """
    if own >= whole:
        return 1
    for ranks in range(2, _MOST_RANKS + 1):
        if parts and sum(max(-(-width // ranks), unit) for width, unit in parts) == own:
            return ranks
    return whole // own if not parts and own and whole % own == 0 else 0


def join_ranks(
    name: str,
    parts: Mapping[int, JoinedArray],
    axis: str,
    dims: Sequence[Division] | None,
    widths: PointWidths,
    tokens: int | None,
    unequal: list[RankDisagreement],
) -> JoinedArray:
    """Return one array put together from the parts {rank: part} of the ranks of an axis.

    `dims` say how it is divided (None: sizes decide), `tokens` is the length of the step. Where
    ranks should hold equal values and do not, that is added to `unequal` and the first rank's
    values are taken. FormatError where it is not clear how the array is divided.
    """
    rows = [parts[rank] for rank in sorted(parts)]
    if len(rows) == 1:
        return rows[0]
    if dims is not None:
        own = [one for one in dims if one.axis == axis]
        if not own:
            return _take_replicated(name, parts, axis, unequal)
        return _join_by_dims(name, rows, own[0])
    how = _layout_by_size(name, rows, axis, widths, tokens)
    if how == "replicated":
        return _take_replicated(name, parts, axis, unequal)
    if how == "columns":
        return _join_columns(name, rows, axis, widths)
    return _concatenate_ranks(name, rows, row_axis(rows[0].shape), how)


def _layout_by_size(
    name: str, rows: Sequence[JoinedArray], axis: str, widths: PointWidths, tokens: int | None
) -> Layout:
    """Return how ranks divide an array (rows, columns or not), by sizes of arrays and model.

    `rows` are the ranks' arrays, `tokens` the length of the step (None: unknown). FormatError if
    sizes do not fit, UnclearLayoutError if they leave it open.
    """
    count = len(rows)
    shapes = [row.shape for row in rows]
    each = {width_of(shape) for shape in shapes}
    lengths = [shape[row_axis(shape)] if shape else 0 for shape in shapes]
    if any(len(shape) < 1 for shape in shapes):
        return "replicated"
    # One number for each token, or one for the whole batch.
    if all(len(shape) == 1 for shape in shapes) and name not in widths.widths:
        # Ids, positions and lengths: one number a token.
        if axis in _ROWS_AXES and (tokens is None or sum(lengths) == tokens):
            return "rows"
        return "replicated"
    if len(each) > 1:
        raise FormatError(
            f"{name}: {rank_of_axis(axis)}s hold {_sizes_text(shapes)}; expected equal widths; "
            "were they dumped from one run?"
        )
    # Compare a rank's width with that of the model's point.
    part = each.pop()
    whole = widths.widths.get(name)
    in_rows = (
        tokens is not None
        and lengths != [tokens] * count
        and 0 <= (sum(lengths) - tokens) < max(count, 2)
    )
    if whole is not None:
        if part == whole or (part > whole and whole == widths.vocabulary):
            return "rows" if in_rows or axis in _ROWS_AXES else "replicated"
        heads = widths.parts.get(name, ())
        shared = bool(heads) and sum(max(size // count, unit) for size, unit in heads) == part
        if shared or (part * count >= whole and (part * count) % whole == 0):
            return "columns"
        if whole == widths.vocabulary and part * count >= whole:
            return "columns"  # padded to a multiple of the ranks
        ranks = _ranks_of_share(part, whole, heads)
        if ranks > count:
            lacking = f"{ranks - count} of {ranks} ranks {'is' if ranks - count == 1 else 'are'}"
            raise FormatError(
                f"{name}: {count} {rank_of_axis(axis)}s hold {part} columns each of {whole}; "
                f"{lacking} missing"
            )
        raise FormatError(
            f"{name}: {count} {rank_of_axis(axis)}s hold {_sizes_text(shapes)}; {whole} columns "
            f"are expected"
        )
    # Without a point of the model, sizes and values decide.
    if axis in _ROWS_AXES or in_rows:
        return "rows"
    if part * count in widths.known and part not in widths.known:
        return "columns"
    if next(_unlike_first(rows), None) is None:
        return "replicated"
    raise UnclearLayoutError(
        f"{name}: {count} {rank_of_axis(axis)}s hold {_sizes_text(shapes)}, and its name says no "
        f"point; say "
        f'its dims in ranks.json, such as {{"arrays": {{"{name}": "t h[{axis}]"}}}}'
    )


def _sizes_text(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return different shapes in words, each once."""
    return ", ".join(str(list(shape)) for shape in dict.fromkeys(shapes))


def _take_replicated(
    name: str, parts: Mapping[int, JoinedArray], axis: str, unequal: list[RankDisagreement]
) -> JoinedArray:
    """Return the first rank's array, of which all ranks of an axis should hold equal copies.

    The first rank that differs by more than rounding is noted in `unequal`. FormatError if shapes
    differ.
    """
    ranks = sorted(parts)
    first = parts[ranks[0]]
    for rank in ranks[1:]:
        if parts[rank].shape != first.shape:
            raise FormatError(
                f"{name}: {rank_of_axis(axis)} {ranks[0]} holds {list(first.shape)}, rank {rank} "
                f"{list(parts[rank].shape)}; expected the same on every rank"
            )
    for number in _unlike_first([parts[rank] for rank in ranks]):
        rank = ranks[number]
        values, other = first.read(), parts[rank].read()
        apart, nonfinite = finite_distance(other, values), not _finite_alike(values, other)
        if apart > NEAR or values.dtype.kind in "iub" or nonfinite:
            unequal.append(RankDisagreement(name, axis, (ranks[0], rank), apart, nonfinite))
            break
    return replace(first, name=name, how="replicated", read_parts=None)


def _unlike_first(rows: Sequence[JoinedArray]) -> Iterator[int]:
    """Yield the index of each array that does not equal the first, NaN equal to NaN.

    Bytes that are stored in the same dtype and shape are compared before anything is converted,
    many ranks' at a time.
    """
    first = rows[0].stored()
    for start in range(1, len(rows), _TOGETHER):
        unlike = {
            number: held
            for number in range(start, min(start + _TOGETHER, len(rows)))
            if rows[number].shape == rows[0].shape and (held := rows[number].stored()) is not None
        }
        equal = set()
        if first is not None:
            equal = _equal_bytes(first, unlike)
        for number in range(start, min(start + _TOGETHER, len(rows))):
            if number not in equal and (
                rows[number].shape != rows[0].shape
                or not _equal_numbers(rows[0].read(), rows[number].read())
            ):
                yield number


def _equal_bytes(first: StoredBytes, others: Mapping[int, StoredBytes]) -> set[int]:
    """Return the keys of `others` whose encoding and bytes are those of the first."""
    with ExitStack() as stack:
        open_ones = {
            number: stack.enter_context(closing(one.windows()))
            for number, one in others.items()
            if one.form == first.form
        }
        for window in stack.enter_context(closing(first.windows())):
            wanted = np.frombuffer(window, np.uint8)
            for number, windows in list(open_ones.items()):
                found = next(windows, None)
                if found is None or not bytes_equal(np.frombuffer(found, np.uint8), wanted):
                    del open_ones[number]
        return {number for number, rest in open_ones.items() if next(rest, None) is None}


def _equal_numbers(x: Numbers, y: Numbers) -> bool:
    """Return whether two arrays are equal, NaN equal to NaN.

    The comparison without NaN comes first, as it is faster and mostly enough.
    """
    return np.array_equal(x, y) or np.array_equal(x, y, equal_nan=True)


def _finite_alike(x: Numbers, y: Numbers) -> bool:
    """Return whether the same elements of both are finite."""
    return np.array_equal(np.isfinite(x), np.isfinite(y))


def may_be_summands(rows: Sequence[JoinedArray], point: str) -> bool:
    """Return whether ranks' arrays of a point may be products that an all-reduce adds up.

    False if a value is not finite, if a rank has only zeros (but for embeddings and experts,
    whose rows may be on another rank), or if half of the rows of two ranks are multiples of each
    other: ranks multiply different columns, so that this is no chance.
    """
    flat = [np.asarray(row.read(), np.float64).reshape(-1, row.shape[-1]) for row in rows]
    if not all(np.isfinite(one).all() for one in flat):
        return False
    if point not in _SPARSE and not all(one.any() for one in flat):
        return False
    first = flat[0]
    own = np.sum(first * first, axis=1)
    for other in flat[1:]:
        theirs = np.sum(other * other, axis=1)
        both = (own > 0) & (theirs > 0)
        apart = theirs - np.sum(first * other, axis=1) ** 2 / np.maximum(own, 1e-300)
        alike = both & (apart <= NEAR * NEAR * theirs)
        if 2 * int(np.count_nonzero(alike)) >= max(1, int(np.count_nonzero(both))):
            return False
    return True


def sum_ranks(name: str, rows: Sequence[JoinedArray]) -> JoinedArray:
    """Return the sum of what ranks hold: a product before its all-reduce."""

    def read() -> Numbers:
        """Return the sum of all ranks' arrays in float32, or in float64 if the parts are."""
        total: Numbers = np.array(
            rows[0].read(), np.float64 if rows[0].dtype == "float64" else np.float32
        )
        for row in rows[1:]:
            total = total + row.read()
        return total

    tiles = _tiles_of(rows)
    whole = add_up(tiles) if tiles else None
    return JoinedArray(name, rows[0].shape, rows[0].dtype, read, "partial", tiles=whole)


def _tiles_of(rows: Sequence[JoinedArray]) -> list[Tiles]:
    """Return the ranks' tiles; [] where a rank's array has to be read as a whole."""
    found = [row.tiles for row in rows if row.tiles is not None]
    return found if len(found) == len(rows) else []


def _join_by_dims(name: str, rows: Sequence[JoinedArray], said: Division) -> JoinedArray:
    """Return the ranks' parts joined as `said`, the division that the dump's dims state.

    FormatError if the array lacks that dimension or sizes do not fit.
    """
    if said.how == "partial":
        return sum_ranks(name, rows)
    if said.dimension >= len(rows[0].shape):
        raise FormatError(
            f"{name}: its dims divide dimension {said.dimension} of shape {list(rows[0].shape)}"
        )
    if said.how == "zigzag":
        return _join_zigzag(name, rows, said.dimension)
    how: Layout = "rows" if said.dimension == row_axis(rows[0].shape) else "columns"
    return _concatenate_ranks(name, rows, said.dimension, how)


def _join_zigzag(name: str, rows: Sequence[JoinedArray], at: int) -> JoinedArray:
    """Return the ranks' halves joined in order: rank i of n holds chunks i and 2n-1-i of 2n.

    `at` is the dimension. Raises FormatError where the size of a rank is odd.
    """
    if any(row.shape[at] % 2 for row in rows):
        raise FormatError(f"{name}: {rows[0].shape[at]} rows of a rank are no two equal chunks")

    def read() -> Numbers:
        """Return the ranks' chunks joined in order along dimension `at`.

        The first halves come in the order of ranks, then the second halves from the last rank on.
        """
        halves = [np.split(row.read(), 2, axis=at) for row in rows]
        both = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
        return np.concatenate(both, axis=at)

    shape = list(rows[0].shape)
    shape[at] = sum(row.shape[at] for row in rows)
    return JoinedArray(name, tuple(shape), rows[0].dtype, read, "zigzag")


def _concatenate_ranks(name: str, rows: Sequence[JoinedArray], at: int, how: Layout) -> JoinedArray:
    """Return the parts joined along dimension `at`; FormatError if other sizes differ.

    `how` is the layout to note in the result.
    """
    shape = list(rows[0].shape)
    others = {(*row.shape[:at], *row.shape[at + 1 :]) for row in rows}
    if len(others) > 1:
        raise FormatError(
            f"{name}: ranks hold {_sizes_text([row.shape for row in rows])}; expected sizes "
            f"that are "
            f"equal but for dimension {at}"
        )
    shape[at] = sum(row.shape[at] for row in rows)

    def read() -> Numbers:
        """Return the ranks' parts joined along dimension `at`.

        Only one rank's part is in memory with the result at a time.
        """
        made: Numbers | None = None
        edge = 0
        for row in rows:
            values = row.read()
            if made is None:
                made = np.empty(shape, values.dtype)
            place = (slice(None),) * at + (slice(edge, edge + row.shape[at]),)
            made[place] = values
            edge += row.shape[at]
        assert made is not None
        return made

    tiles, later_axes = _tiles_of(rows), len(shape) - 1 - at
    if not tiles or later_axes > 1:
        return JoinedArray(name, tuple(shape), rows[0].dtype, read, how)
    whole = join_rows(tiles) if later_axes else join_columns(tiles)
    return JoinedArray(name, tuple(shape), rows[0].dtype, whole.reader(shape), how, tiles=whole)


def _join_columns(
    name: str, rows: Sequence[JoinedArray], axis: str, widths: PointWidths
) -> JoinedArray:
    """Return the ranks' columns joined; in a joined result such as qkv, projection by projection.

    Key heads that several ranks share are taken once. FormatError if sizes do not fit.
    """
    at = row_axis(rows[0].shape) + 1
    whole = widths.widths.get(name, 0)
    parts = widths.parts.get(name, ())
    local = width_of(rows[0].shape)
    count = len(rows)
    # Equal shares of a single matrix follow one another.
    if not parts and (not whole or local * count == whole or whole == widths.vocabulary):
        return _concatenate_ranks(name, rows, at, "columns")
    if not parts:
        parts = ((whole, local),)
    # Parts of a joined result: a rank has its share, at least one head, of each.
    sizes = [max(width // count, unit) for width, unit in parts]
    if sum(sizes) != local:
        raise FormatError(
            f"{name}: {local} columns of a rank; {count} {rank_of_axis(axis)}s would hold "
            f"{sum(sizes)} ({' + '.join(map(str, sizes))})"
        )
    starts = np.cumsum([0, *sizes]).tolist()
    copies = [max(1, size * count // width) for size, (width, _) in zip(sizes, parts, strict=True)]

    def read_parts() -> list[Numbers]:
        """Return each part of a joined result with all ranks' columns in order.

        Raises FormatError where ranks that share a key head have different values of it.
        """
        made: list[Numbers] = []
        for number, row in enumerate(rows):
            flat = row.read().reshape(*row.shape[:at], -1)
            made = made or [np.empty((*row.shape[:at], width), flat.dtype) for width, _ in parts]
            for start, size, times, whole in zip(starts, sizes, copies, made, strict=False):
                first = number // times * size
                share, place = flat[..., start : start + size], whole[..., first : first + size]
                if not number % times:
                    place[...] = share
                elif not _equal_numbers(share, place):
                    raise FormatError(
                        f"{name}: {rank_of_axis(axis)}s {number - number % times} and {number} "
                        "share a key head and hold other values of it"
                    )
        return made

    def read() -> Numbers:
        """Return all ranks' columns in order: all of q, then all of k, then all of v in a qkv.

        Raises FormatError where ranks that share a key head have different values of it.
        """
        found = read_parts()
        return found[0] if len(found) == 1 else np.concatenate(found, axis=-1)

    shape = (*rows[0].shape[:at], sum(width for width, _ in parts))
    tiles = _tiles_of(rows)
    if tiles and max(copies) == 1 and at == len(rows[0].shape) - 1:
        # Nothing is there twice: of each part the ranks' columns follow one another.
        own = list(zip(starts, sizes, strict=False))
        joined = join_columns([one.columns(*share) for share in own for one in tiles])
        reader = joined.reader(shape)
        return JoinedArray(name, shape, rows[0].dtype, reader, "columns", tiles=joined)
    return JoinedArray(name, shape, rows[0].dtype, read, "columns", read_parts=read_parts)


def dims_of(parts: Sequence[DumpedArray], given: str | None) -> tuple[Division, ...] | None:
    """Return how an array is divided, as ranks.json or the dump says; None if neither does.

    `given` are the dims of ranks.json, which come first. () means that every rank holds it whole.
    """
    said = given if given is not None else next((one.dims for one in parts if one.dims), "")
    if given is None and not said:
        return None
    if said == "replicated":
        return ()
    return parse_dims(said, parts[0].origin)
