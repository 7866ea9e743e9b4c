"""Finds the sequences of a dump's passes, and gives one's arrays row by row of its tokens.

A pass holds the tokens of several requests: packed one after another (`cu_seqlens`,
`query_start_loc`, `seq_lens`, or positions that begin anew), or as padded rows of a batch. A
*segment* is the tokens of one request in one pass, a *run* those of one request over all passes. A
prompt may come in chunks, one a pass, and each decode step adds a token. Rows are taken by request
and position, never by their number alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.dump_names import place_in_dump
from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError
from aprfmt.inference.engines.dump_folders import Dump, Pass
from aprfmt.inference.engines.rank_joining import JoinedArray
from aprfmt.inference.engines.tiles import Tiles, join_rows

Numbers = NDArray[Any]
_SHOWN = 4  # sequences, tokens or names in a message
_DRAFTS = 16  # tokens that a speculative step proposes, at most; a chunk of a prompt has more
_LOOKED = 3  # arrays of a pass that are read to see whether it is all zeros


@dataclass(frozen=True)
class Segment:
    """The tokens of one request in one pass: their rows there, positions and ids.

    `number` is the request's number in the batch of `count`, `rows` index the pass's tokens.
    `padding` is the number of hidden rows before the first token that the pass gave positions;
    `positions` are without them. `masked` are the ids before the first token that the attention
    mask of the pass hides, `behind` those after the last one. `cut`: later tokens of the pass were
    taken back.
    """

    step: int
    place: int  # of the pass in the dump
    number: int
    count: int
    rows: tuple[int, ...]
    positions: tuple[int, ...]
    ids: tuple[int, ...] | None
    request: str = ""
    padding: int = 0
    masked: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    cut: bool = False


@dataclass
class TokenRun:
    """One request's tokens over all passes."""

    stream: int
    segments: list[Segment] = field(default_factory=list)

    @property
    def positions(self) -> list[int]:
        """Positions of the request's tokens, ascending."""
        return sorted(at for one in self.segments for at in one.positions)

    @property
    def ids(self) -> list[int] | None:
        """Ids of the request's tokens in the order of positions.

        None if a pass does not say them.
        """
        if any(one.ids is None for one in self.segments):
            return None
        pairs = [
            pair for one in self.segments for pair in zip(one.positions, one.ids or (), strict=True)
        ]
        return [token for _, token in sorted(pairs)]

    @property
    def steps(self) -> list[int]:
        """Step of the pass that computed each token of the request, in the order of positions."""
        pairs = sorted((at, one.step) for one in self.segments for at in one.positions)
        return [step for _, step in pairs]

    @property
    def next_position(self) -> int:
        """Position of the token that would follow the request's last one."""
        return max(self.segments[-1].positions) + 1

    @property
    def padding(self) -> int:
        """How many positions before the request's first token the engine filled with padding."""
        return self.segments[0].padding


@dataclass(frozen=True)
class AlignedArrays:
    """One sequence's arrays by name: rows in the order of `positions`, or of those in `rows`.

    `steps` say for each token which pass computed it. `left` maps names that could not be aligned
    to the reason; `again` are those of the passes in it that hold tokens of the sequence once more.
    `notes` say what was left out. `masked` are ids before the first token that a mask hides, and
    `behind` those after the last one, of a sequence of one pass.
    `sequences` are the ids of all sequences of the dump, None where they are not known, and
    `chosen` is the index of this one among them. `repeats` are the other requests with the same
    tokens, which are none of `sequences`.
    """

    arrays: Mapping[str, JoinedArray]
    rows: Mapping[str, tuple[int, ...]]
    ids: tuple[int, ...] | None
    positions: tuple[int, ...]
    steps: tuple[int, ...]
    left: Mapping[str, str]
    notes: tuple[str, ...]
    again: frozenset[str] = frozenset()
    masked: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...] | None, ...] = ()
    chosen: int = 0
    repeats: "tuple[Repeat, ...]" = ()


@dataclass(frozen=True)
class Repeat:
    """Two requests of a dump with the same first tokens: their rows of these, each aligned.

    `requests` names both. `own` is the request that is read, `other` the one to compare it with.
    """

    requests: str
    own: AlignedArrays
    other: AlignedArrays


def align(dump: Dump, ids: Sequence[int] | None) -> AlignedArrays:
    """Return a dump's arrays of one request by token: the one with these ids, or the only one.

    Requests with the same ids count as one. FormatError if there is no such request, or if there
    are several and no ids to choose by.
    """
    notes: list[str] = []
    passes = list(_without_warm_ups(dump.passes, notes))
    if not passes:
        raise FormatError(
            f"all {len(dump.passes)} passes are warm-ups: their ids, or all values, are zero; "
            "dump a pass of a real request"
        )
    found = _join_sequences(passes, notes)
    chosen = _choose_sequence(found, ids)
    limit = None if ids is None else len(ids)
    aligned = _align_sequence(passes, chosen, limit, notes)
    alike = [(one, count) for one in found if (count := _shared_prompt(chosen, one, limit))]
    repeated = [one for one, _ in alike]
    again = dict(
        _computed_again([one for one in found if one not in repeated], chosen, aligned.ids)
    )
    # A request that only begins alike is a separate sequence.
    every = [one for one in found if one not in repeated or one.ids != chosen.ids]
    return replace(
        aligned,
        left={**aligned.left, **again},
        again=frozenset(again),
        sequences=tuple(None if (own := one.ids) is None else tuple(own) for one in every),
        chosen=every.index(chosen),
        repeats=tuple(_repeat(passes, chosen, one, count) for one, count in alike),
    )


def _shared_prompt(chosen: TokenRun, other: TokenRun, limit: int | None) -> int:
    """Return how many first tokens two requests share; 0 if their prompts are not the same.

    The prompt is taken to be the tokens of the first pass: its tokens (two at least) and positions
    must be equal. `limit` is the most tokens to count, None for all. 0 too if `other` is `chosen`.
    """
    first, second = chosen.segments[0], other.segments[0]
    mine, theirs = chosen.ids, other.ids
    if other is chosen or mine is None or theirs is None or not first.positions:
        return 0
    if (first.ids, first.positions) != (second.ids, second.positions) or len(mine) < 2:
        return 0
    if any(one.positions != list(range(len(one.positions))) for one in (chosen, other)):
        return 0
    alike = [x == y for x, y in zip(mine, theirs, strict=False)]
    count = alike.index(False) if False in alike else len(alike)
    return count if limit is None else min(count, limit)


def _repeat(passes: Sequence[Pass], chosen: TokenRun, other: TokenRun, count: int) -> Repeat:
    """Return the arrays of two requests at their first `count` tokens, which are the same."""
    names = [_request_name(one) for one in (chosen, other)]
    return Repeat(
        " and ".join(names),
        _align_sequence(passes, chosen, count, ()),
        _align_sequence(passes, other, count, ()),
    )


def _request_name(run: TokenRun) -> str:
    """Return a request's name for messages: its name or number in the batch, and its first pass."""
    first = run.segments[0]
    name = f"request {shorten(first.request, 40) if first.request else first.number}"
    place = place_in_dump(first.step)
    stream = f" of dp rank {run.stream}" if run.stream else ""
    return f"{name}{f' of {place}' if place else ''}{stream}"


def list_sequences(dump: Dump) -> list[tuple[int, ...]]:
    """Return the token ids of the sequences in a dump, in its order, of which it has the ids."""
    notes: list[str] = []
    found = _join_sequences(list(_without_warm_ups(dump.passes, notes)), notes)
    return [tuple(ids) for one in found if (ids := one.ids) is not None]


def _computed_again(
    found: Sequence[TokenRun], chosen: TokenRun, ids: Sequence[int] | None
) -> Iterator[tuple[str, str]]:
    """Yield (pass, reason) for passes that hold tokens of the chosen sequence once more.

    `ids` are the tokens that are read. Such passes are of a prompt that was sent twice, or were
    computed or stored twice; they may hold other values.
    """
    if ids is None:
        return
    for run in found:
        own = None if run is chosen else run.ids
        positions = run.positions
        if own is None or positions[0] >= len(ids):
            continue
        shared = [
            token == ids[at] for at, token in zip(positions, own, strict=True) if at < len(ids)
        ]
        if all(shared):
            places = dict.fromkeys(place_in_dump(one.step) for one in run.segments)
            last = min(positions[-1], len(ids) - 1)
            yield (
                ", ".join(filter(None, places)) or "a pass",
                f"holds tokens {positions[0]} to {last} of this sequence once more: not compared",
            )


def _without_warm_ups(passes: Sequence[Pass], notes: list[str]) -> Iterator[Pass]:
    """Yield the passes that are no warm-up; a remark on those left out is added to `notes`.

    A warm-up has only token ids of 0, or only values of 0 if it was captured before it ran.
    """
    dropped = []
    for one in passes:
        ids = one.batch.get("ids")
        dummy = ids is not None and np.size(values := ids.read()) > 1 and not np.any(values)
        if dummy or (len(passes) > 1 and _is_blank(one)):
            dropped.append(one.step)
        else:
            yield one
    if dropped:
        words = ", ".join(map(str, dict.fromkeys(dropped)))
        notes.append(f"pass {words}: a warm-up (its ids, or all values, are zero), left out")


def _is_blank(one: Pass) -> bool:
    """Return whether the first arrays of a pass are all zeros."""
    some = [row for row in one.arrays.values() if "float" in row.dtype and row.shape][:_LOOKED]
    return bool(some) and not any(np.any(row.read()) for row in some)


def _join_sequences(passes: Sequence[Pass], notes: list[str]) -> list[TokenRun]:
    """Return the sequences of all passes; each pass continues old sequences or begins new ones.

    A remark is added to `notes` where it had to be guessed which sequence rows continue.
    """
    found: list[TokenRun] = []
    guessed = False
    for place, one in enumerate(passes):
        free = [row for row in found if row.stream == one.stream]
        for part in _segments_of_pass(one, place, free):
            # A segment continues a sequence of its request, or one that ends where it begins.
            start = min(part.positions)
            if part.request:
                fits = [
                    row
                    for row in free
                    if row.segments[0].request == part.request
                    and row.next_position + row.padding <= start
                ]
            else:
                fits = [row for row in free if start and row.next_position + row.padding == start]
            guessed |= len(fits) > 1 and not part.request
            if not fits and (back := _drafting_run(found, part)) in free:
                fits = [_take_back(back, start - back.padding, notes)]
            if fits and (start or part.request):
                fits[0].segments.append(_without_padding(part, fits[0].padding))
                free.remove(fits[0])
            else:
                found.append(TokenRun(one.stream, [part]))
    if guessed:
        notes.append(
            "passes do not say which request a row is of: rows are taken in the order of the batch"
        )
    return found


def _drafting_run(found: Sequence[TokenRun], part: Segment) -> TokenRun | None:
    """Return the sequence whose drafted tokens the segment `part` replaces; None if there is none.

    The sequence's last pass followed its prompt and held a few drafts. `part` is of the next pass,
    begins after the first of these tokens, and has another id at its first position. Either both
    name their request, or there is only one sequence.
    """
    rows = [row for row in found if row.segments[0].request == part.request]
    if len(rows) != 1 or not (part.request or (len(found) == part.count == 1)):
        return None
    last, start = rows[0].segments[-1], min(part.positions) - rows[0].padding
    if last.place + 1 != part.place or last.ids is None or part.ids is None:
        return None
    if not 0 < last.positions[0] < start <= last.positions[-1] <= last.positions[0] + _DRAFTS:
        return None
    # A draft that was right is not computed again.
    drafts = dict(zip(last.positions, last.ids, strict=True))
    return rows[0] if drafts.get(start, part.ids[0]) != part.ids[0] else None


def _take_back(run: TokenRun, start: int, notes: list[str]) -> TokenRun:
    """Return `run`, changed: without the tokens of its last pass at positions from `start`.

    A remark on these drafts is added to `notes`.
    """
    last = run.segments[-1]
    kept = [row for row, at in enumerate(last.positions) if at < start]
    lost = len(last.positions) - len(kept)
    notes.append(
        f"{place_in_dump(last.step) or 'a pass'}: {lost} drafted "
        f"{'token' if lost == 1 else 'tokens'} from position {start} on, not "
        "accepted, left out"
    )
    run.segments[-1] = replace(
        last,
        rows=tuple(last.rows[row] for row in kept),
        positions=tuple(last.positions[row] for row in kept),
        ids=None if last.ids is None else tuple(last.ids[row] for row in kept),
        cut=True,
    )
    return run


def _without_padding(part: Segment, count: int) -> Segment:
    """Return the segment with positions counted from the first token after `count` of padding."""
    if not count:
        return part
    return replace(part, positions=tuple(at - count for at in part.positions), padding=count)


def _segments_of_pass(one: Pass, place: int, before: Sequence[TokenRun]) -> Iterator[Segment]:
    """Yield a Segment for each request of a pass: its rows, positions and ids, by first row.

    `place` is the pass's number in the dump, `before` the sequences that may continue here.
    """
    ids = None if "ids" not in one.batch else np.asarray(one.batch["ids"].read())
    shape = () if ids is None else ids.shape
    flat = None if ids is None else ids.reshape(-1)
    # Read positions, ids and bounds of the requests.
    said = None if "positions" not in one.batch else np.asarray(one.batch["positions"].read())
    if (
        said is not None
        and flat is not None
        and said.size > flat.size
        and (said.size % flat.size == 0)
    ):
        said = said.reshape(-1, flat.size)[0]  # three axes of a multimodal rope
    positions = None if said is None else said.reshape(-1).astype(np.int64)
    tokens = _count_tokens(one, flat, positions)
    bounds = list(_request_bounds(one, tokens, shape, positions, flat))
    names = _request_names(one)
    # Each request has the rows that its attention mask leaves; positions that begin anew with
    # each hidden row look like requests of their own.
    one_row, hidden_from = len(shape) < 2 or shape[0] == 1, 0
    for number, (first, stop) in enumerate(bounds):
        rows = np.arange(first, stop)
        mask = one.batch.get("mask")
        if mask is not None and flat is not None and int(np.prod(mask.shape)) == flat.size:
            rows = rows[np.asarray(mask.read()).reshape(-1)[first:stop] != 0]
        if not rows.size:
            continue
        masked = range(hidden_from if one_row else first, int(rows[0]))
        hidden_from = int(rows[-1]) + 1
        # In one row of several requests, what is hidden may be before the next.
        behind = range(hidden_from, hidden_from if one_row and len(bounds) > 1 else stop)
        padding = 0
        if positions is not None and rows[-1] < positions.size:
            own = positions[rows]
            hidden = positions[first : rows[0]]
            # transformers counts hidden rows where no positions are given.
            if hidden.size and np.array_equal(hidden, np.arange(own[0])):
                padding = int(own[0])
        else:
            start = _start_by_length(one, number, len(bounds), int(rows.size), before)
            if start is None:
                start = 0
                if flat is None and len(before) == 1 and not names:
                    start = before[0].next_position  # passes that say nothing are of one sequence
            own = np.arange(start, start + rows.size)
        part = Segment(
            one.step,
            place,
            number,
            len(bounds),
            tuple(rows.tolist()),
            tuple(own.tolist()),
            None if flat is None else tuple(flat[rows].tolist()),
            str(names[number]) if number < len(names) else "",
            masked=() if flat is None else tuple(flat[list(masked)].tolist()),
            behind=() if flat is None else tuple(flat[list(behind)].tolist()),
        )
        yield _without_padding(part, padding)


def _start_by_length(
    one: Pass, number: int, requests: int, rows: int, before: Sequence[TokenRun]
) -> int | None:
    """Return the position of the first of a request's `rows` in a pass, by seq_lens; else None.

    seq_lens counts the tokens of a request up to the end of this pass. `number` is that of the
    request of `requests`. A position counts where a sequence of `before` ends, or none is known:
    some engines count without the tokens of the pass.
    """
    lengths = _batch_numbers(one, "lengths")
    if lengths is None or len(lengths) != requests or lengths[number] <= rows:
        return None
    start = lengths[number] - rows
    ends = [row.next_position + row.padding for row in before]
    return start if start in ends or not ends else None


def _count_tokens(one: Pass, ids: Numbers | None, positions: Numbers | None) -> int:
    """Return how many tokens a pass has, padding included: by ids, positions or longest array."""
    if ids is not None:
        return int(ids.size)
    if positions is not None:
        return int(positions.size)
    lengths = [_row_count(row.shape) for row in one.arrays.values() if len(row.shape) > 1]
    return max(lengths, default=0)


def _row_count(shape: Sequence[int]) -> int:
    """Return the number of rows of an array; without a batch axis of one."""
    if len(shape) > 2 and shape[0] == 1:
        return int(shape[1])
    return int(shape[0]) if shape else 0


def _request_bounds(
    one: Pass, tokens: int, shape: Sequence[int], positions: Numbers | None, ids: Numbers | None
) -> Iterator[tuple[int, int]]:
    """Yield (first row, row after the last) of each request of a pass.

    `tokens` is the number of rows, `shape` that of the token ids, `ids` are these as one row.
    FormatError if it is not clear on which side the rows of a padded batch are padded.
    """
    starts = _batch_numbers(one, "starts")
    counts = _batch_numbers(one, "counts")
    lengths = _batch_numbers(one, "lengths")
    if starts is not None and len(starts) > 1 and starts[-1] <= tokens:
        yield from (pair for pair in pairwise(starts) if pair[1] > pair[0])
    elif counts is not None and 0 < sum(counts) <= tokens:
        yield from _cumulative_bounds(counts)
    elif lengths is not None and ids is not None and _are_lengths_of_rows(lengths, shape):
        mask = one.batch.get("mask")  # which says itself what is padding
        starts = [0] * shape[0] if mask is not None else _row_starts(lengths, shape, positions, ids)
        for row, (start, count) in enumerate(zip(starts, lengths, strict=True)):
            count = shape[1] if mask is not None else count
            yield row * shape[1] + start, row * shape[1] + start + count
    elif lengths is not None and _are_packed_lengths(lengths, tokens, positions):
        yield from _cumulative_bounds(lengths)
    elif lengths is not None and _are_decode_lengths(lengths, tokens, positions):
        yield from ((row, row + 1) for row in range(len(lengths)))
    elif len(shape) == 2 and shape[0] > 1:
        yield from ((row * shape[1], (row + 1) * shape[1]) for row in range(shape[0]))
    elif positions is not None and positions.size >= tokens > 0:
        own = positions[:tokens]
        one_run = np.array_equal(np.sort(own), np.arange(own.min(), own.min() + tokens))
        # The chunks of context parallelism are in another order and are one sequence.
        breaks = np.array([], np.int64) if one_run else np.flatnonzero(np.diff(own) != 1) + 1
        edges = [0, *breaks.tolist(), tokens]
        yield from pairwise(edges)
    elif tokens:
        yield 0, tokens


def _are_lengths_of_rows(lengths: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether sequence lengths are the tokens of each row of a padded batch.

    `shape` is that of the token ids, [rows, tokens]. In decode steps lengths count earlier tokens,
    too, and are larger than the rows.
    """
    rows = len(shape) == 2 and len(lengths) == shape[0]
    return rows and all(0 < count <= shape[1] for count in lengths) and max(lengths) > 1


def _row_starts(
    lengths: Sequence[int], shape: Sequence[int], positions: Numbers | None, ids: Numbers
) -> list[int]:
    """Return the index of the first token in each row of a padded batch.

    All rows are padded on one side: on it one id stands in all rows, and the positions of the other
    tokens are consecutive. `lengths` are the token counts of the rows, `shape` and `ids` those of
    the batch. FormatError if neither side is possible, or both are.
    """
    batch = ids.reshape(tuple(shape))
    places = None if positions is None or positions.size < ids.size else positions[: ids.size]
    places = None if places is None else places.reshape(tuple(shape))
    possible = []
    for starts in ([0] * len(lengths), [shape[1] - count for count in lengths]):
        kept = np.zeros(batch.shape, np.bool_)
        for row, (start, count) in enumerate(zip(starts, lengths, strict=True)):
            kept[row, start : start + count] = True
        follow = places is None or all(
            np.all(np.diff(own[held]) == 1) for own, held in zip(places, kept, strict=True)
        )
        if follow and len(np.unique(batch[~kept])) <= 1:
            possible.append(starts)
    if not possible or (len(possible) > 1 and possible[0] != possible[1]):
        raise FormatError(
            f"seq_lens says that rows of {shape[1]} tokens have {shorten(str(lengths), 60)}, and "
            "neither the ids nor positions say on which side they are padded; save the pass's "
            "attention_mask or position_ids too"
        )
    return possible[0]


def _are_packed_lengths(lengths: Sequence[int], tokens: int, positions: Numbers | None) -> bool:
    """Return whether `lengths` are those of requests packed one after another in a pass's rows.

    The pass has `tokens` rows. Rows after the last request are padding, whose positions, if known,
    must not continue that request.
    """
    rows = sum(lengths)
    if rows == tokens or not 0 < rows < tokens:
        return rows == tokens
    if positions is None:
        return True
    edges = np.cumsum([0, *lengths])
    inside = all(np.all(np.diff(positions[a:b]) == 1) for a, b in pairwise(edges))
    return bool(inside and positions[rows] != positions[rows - 1] + 1)


def _are_decode_lengths(lengths: Sequence[int], tokens: int, positions: Numbers | None) -> bool:
    """Return whether a pass is a decode step: one row for each request, its last token.

    Rows after them are padding, as in a graph of a fixed size, which only positions tell.
    """
    count = len(lengths)
    if positions is None:
        return 0 < count == tokens
    if not count or count > tokens or positions.size < count:
        return False
    return count == tokens or bool(np.all(positions[:count] + 1 == np.asarray(lengths)))


def _cumulative_bounds(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of consecutive runs of these lengths; empty runs are left out."""
    first = 0
    for count in counts:
        if count > 0:
            yield first, first + count
        first += count


def _batch_numbers(one: Pass, kind: str) -> list[int] | None:
    """Return the numbers of a pass's batch array `kind`; None if missing or no integers.

    `kind` is such as "positions" or "lengths".
    """
    if kind in one.batch:
        values = np.asarray(one.batch[kind].read()).reshape(-1)
        return [int(value) for value in values] if values.dtype.kind in "iu" else None
    return None


def _request_names(one: Pass) -> list[Any]:
    """Return the names or numbers of a pass's requests in batch order; [] without any."""
    numbers = _batch_numbers(one, "requests")
    if numbers is not None:
        return numbers
    for name, values in one.texts.items():
        if name.rpartition(".")[2] in ("rids", "req_ids", "request_ids"):
            return values
    return []


def _choose_sequence(found: Sequence[TokenRun], ids: Sequence[int] | None) -> TokenRun:
    """Return the sequence whose ids are `ids` or begin with them; without `ids`, the only one.

    A single sequence of unknown ids and as many tokens is taken, too. Requests with the same ids
    are one. Raises FormatError, which lists the sequences, if none fits or several do.
    """
    if ids is None:
        first = found[0].ids
        if len(found) == 1 or (first is not None and all(one.ids == first for one in found)):
            return found[0]
        _refuse_lost_between(found)
        if len({(one.stream, one.segments[0].request) for one in found}) == 1:
            length = len({at for one in found for at in one.positions})
            _refuse_other_order(found, length, f"if these {len(found)} sequences are one, ")
        raise FormatError(
            f"{len(found)} sequences in the dump ({_sequence_list_text(found)}); name one by "
            f"its token ids"
        )
    # Prefer the sequence of just these ids, then a longer one that begins with them.
    wanted = list(ids)
    unnamed = [one for one in found if one.ids is None]
    same = [one for one in found if one.ids == wanted]
    longer = [one for one in found if (one.ids or [])[: len(wanted)] == wanted]
    for group in (same, longer):
        if group:
            return group[0]
    if len(found) == 1 and unnamed:
        if len(found[0].positions) == len(wanted):
            return found[0]
        raise FormatError(
            f"{len(wanted)} token ids are given, the dump has {len(found[0].positions)} tokens; "
            "give the ids of the whole dump"
        )
    # Say what is wrong with what is there.
    for group in _pieces_by_request(found, wanted):
        _refuse_other_order(group, len(wanted), "")
    _refuse_lost(found, wanted)
    for one in found:
        _refuse_gaps(one)
    raise FormatError(
        f"the dump has no sequence of these {len(wanted)} token ids; it has "
        f"{_sequence_list_text(found)}"
    )


def _sequence_list_text(found: Sequence[TokenRun]) -> str:
    """Return a list of the sequences in words, for messages."""
    rows = []
    for one in found[:_SHOWN]:
        ids = one.ids
        begin = (
            ""
            if ids is None
            else f" {','.join(map(str, ids[:_SHOWN]))}" + (",..." if len(ids) > _SHOWN else "")
        )
        rows.append(f"{len(one.positions)} tokens{begin}")
    return "; ".join(rows) + ("; ..." if len(found) > _SHOWN else "")


def _pieces_by_request(
    found: Sequence[TokenRun], wanted: Sequence[int]
) -> Iterator[list[TokenRun]]:
    """Yield, for each stream and request with any, its runs whose token ids are those of `wanted`.

    A run's ids are compared at their positions; tokens after the end of `wanted` are ignored.
    """
    groups: dict[tuple[int, str], list[TokenRun]] = {}
    for one in found:
        pairs = zip(one.positions, one.ids or (), strict=False)
        inside = [wanted[at] == token for at, token in pairs if at < len(wanted)]
        if inside and all(inside):
            groups.setdefault((one.stream, one.segments[0].request), []).append(one)
    yield from groups.values()


def _refuse_other_order(pieces: Sequence[TokenRun], length: int, begin: str) -> None:
    """Raise FormatError if a request's passes are complete but not in the order of their tokens.

    `pieces` are the request's token runs. It is raised if they hold each of its first `length`
    tokens once, and a run of later tokens comes before a run of earlier ones. `begin` begins the
    message.
    """
    parts = [part for one in pieces for part in one.segments if min(part.positions) < length]
    there = sorted(at for part in parts for at in part.positions if at < length)
    parts.sort(key=lambda part: min(part.positions))
    wrong = next((pair for pair in pairwise(parts) if pair[0].place > pair[1].place), None)
    if wrong is None or there != list(range(length)):
        return
    late, early = wrong
    first, second = (place_in_dump(one.step) or "a pass" for one in (early, late))
    raise FormatError(
        f"{begin}its passes are not in the order in which they ran: {first} has the tokens from "
        f"position {min(early.positions)} on, {second} after it those from {min(late.positions)} "
        "on; number the files in the order of the run"
    )


def _refuse_lost(found: Sequence[TokenRun], wanted: Sequence[int]) -> None:
    """Raise FormatError if a dump has a sequence's first and later tokens, but not some between.

    `wanted` are the token ids of the sequence. Tokens after the last one in any pass may be
    missing.
    """
    there: set[int] = set()
    for one in found:
        pairs = list(zip(one.positions, one.ids or (), strict=False))
        if pairs and all(at < len(wanted) and wanted[at] == token for at, token in pairs):
            there.update(at for at, _ in pairs)
    lost = [at for at in range(len(wanted)) if at not in there]
    if 0 in there and lost and lost[0] < max(there):
        raise FormatError(
            f"{len(lost)} of {len(wanted)} tokens of the sequence are in no pass (position "
            f"{lost[0]} is the first): their pass was not kept"
        )


def _refuse_lost_between(found: Sequence[TokenRun]) -> None:
    """Raise FormatError if sequences may be one request of which the passes between are missing.

    They may be if only the first sequence begins at position 0, each other one begins in a later
    pass and after a gap in positions, and no pass names another request.
    """
    if len({(one.stream, one.segments[0].request) for one in found}) > 1:
        return
    pieces = [(one.segments[0], one.segments[-1]) for one in found]
    if found[0].positions[0] or not all(
        last.place < first.place and found[at].next_position < min(first.positions)
        for at, ((_, last), (first, _)) in enumerate(pairwise(pieces))
    ):
        return
    there = {at for one in found for at in one.positions}
    lost = [at for at in range(max(there) + 1) if at not in there]
    raise FormatError(
        f"{len(lost)} of {max(there) + 1} tokens of the sequence are in no pass (position "
        f"{lost[0]} is the first): was their pass not kept? if these are {len(found)} requests "
        f"({_sequence_list_text(found)}), name one by its token ids"
    )


def _refuse_gaps(chosen: TokenRun) -> None:
    """Raise FormatError if tokens of a sequence are in no pass."""
    positions = chosen.positions
    lost = sorted(set(range(max(positions) + 1)) - set(positions))
    if lost:
        raise FormatError(
            f"{len(lost)} of {max(positions) + 1} tokens of the sequence are in no pass (position "
            f"{lost[0]} is the first): they came from a prefix cache, or their pass was not kept; "
            "dump with the prefix cache off"
        )


def _align_sequence(
    passes: Sequence[Pass], chosen: TokenRun, length: int | None, notes: Sequence[str]
) -> AlignedArrays:
    """Return the arrays of one sequence, of its first `length` tokens (None: all).

    An array that does not fit is left out, with the reason in `left`. FormatError if a position is
    missing or there twice.
    """
    # Every position must be there once.
    positions = chosen.positions
    if len(set(positions)) != len(positions):
        twice = next(at for at in positions if positions.count(at) > 1)
        raise FormatError(
            f"position {twice} of one sequence is there in two passes; were two runs "
            "dumped into one folder?"
        )
    _refuse_gaps(chosen)
    ids = chosen.ids
    limit = length
    arrays: dict[str, JoinedArray] = {}
    rows: dict[str, tuple[int, ...]] = {}
    left: dict[str, str] = {}
    names = dict.fromkeys(name for one in chosen.segments for name in passes[one.place].arrays)
    whole = tuple(positions[:limit])
    # Align each array; what does not fit is left out with the reason.
    for name in names:
        try:
            made, own = _rows_of(name, passes, chosen, limit)
        except ValueError as error:
            left[name] = str(error)
            continue
        arrays[name] = made
        if own != whole:
            rows[name] = own
    return AlignedArrays(
        arrays,
        rows,
        None if ids is None else tuple(ids[:limit]),
        whole,
        tuple(chosen.steps[:limit]),
        left,
        tuple(notes),
        masked=chosen.segments[0].masked,
        behind=chosen.segments[0].behind if len(chosen.segments) == 1 else (),
    )


def _rows_of(
    name: str, passes: Sequence[Pass], chosen: TokenRun, limit: int | None
) -> tuple[JoinedArray, tuple[int, ...]]:
    """Return (an array's rows in the order of positions, their positions).

    `chosen` is the sequence, `limit` the number of its tokens (None: all). ValueError if passes do
    not fit together.
    """
    taken: list[_Taken] = []
    kinds: set[tuple[int, ...]] = set()
    held = [passes[part.place] for part in chosen.segments if name in passes[part.place].arrays]
    shapes = [(one.arrays[name].shape, _pass_tokens(one)) for one in held]
    turned = _has_heads_first(shapes)
    # Rows as passes of several tokens have them: a pass of one token has no axis of a batch then.
    unbatched = {shape[1:] for shape, n in shapes if n > 1 and len(shape) > 2 and shape[0] == n}
    # Find the row of every position in the arrays of its pass.
    for part in chosen.segments:
        one = passes[part.place].arrays.get(name)
        if one is None:
            continue
        one = _with_tokens_first(one) if turned else one
        tokens = _pass_tokens(passes[part.place])
        count = _flat_length(one.shape, tokens)
        positions, rows = part.positions, part.rows
        kept = _kept_rows(one.shape, passes[part.place])
        if kept is not None:
            tokens, rows = kept.size, tuple(np.searchsorted(kept, rows).tolist())
        elif count < tokens or not tokens:
            if count != part.count:
                raise ValueError(
                    f"{list(one.shape)} in {place_in_dump(part.step) or 'a pass'}, which has "
                    f"{tokens} tokens of {part.count} requests"
                )
            if part.cut:
                continue  # its last row is of a draft
            positions, rows = part.positions[-1:], (part.number,)  # the last of each request
        at, own = np.array(positions, np.int64), np.array(rows, np.int64)
        if limit is not None:
            at, own = at[at < limit], own[at < limit]
        if at.size:
            taken.append(_Taken(one, at, own))
            alone = tokens == one.shape[0] and one.shape[1:] in unbatched
            kinds.add(one.shape[1:] if alone else _row_shape(one.shape, tokens))
    if not taken:
        raise ValueError("no row of the sequence")
    # All rows must have one shape.
    if len(kinds) > 1:
        raise ValueError(f"rows of {len(kinds)} shapes: {shorten(str(sorted(kinds)), 80)}")
    inner = kinds.pop()
    positions_of = np.concatenate([one.positions for one in taken])
    order = np.argsort(positions_of, kind="stable")
    places = np.empty_like(order)  # row of the result that each taken row becomes
    places[order] = np.arange(order.size)

    def take_rows(values: Numbers) -> Numbers:
        """Return the sequence's rows in order of position, of one pass's values [tokens, ...]."""
        rows = taken[0].rows[order]
        return values if np.array_equal(rows, np.arange(len(values))) else values[rows]

    def read() -> Numbers:
        """Return the sequence's rows of all passes in order of position; arrays are read once."""
        if len(taken) == 1:
            return take_rows(taken[0].array.read().reshape(-1, *inner))
        made: Numbers | None = None
        edge = 0
        for one in taken:
            values = one.array.read().reshape(-1, *inner)
            if made is None:
                made = np.empty((order.size, *inner), values.dtype)
            made[places[edge : edge + one.rows.size]] = values[one.rows]
            edge += one.rows.size
        assert made is not None
        return made

    first = taken[0].array
    tiles = _tiles_of_rows(taken)
    if tiles is not None and inner != (tiles.width,):
        tiles = None
    apart = first.read_parts if len(taken) == 1 and len(inner) == 1 else None

    def read_parts() -> list[Numbers]:
        """Return the sequence's rows of each part of a joined result, such as qkv."""
        assert apart is not None
        return [take_rows(part.reshape(-1, part.shape[-1])) for part in apart()]

    return (
        JoinedArray(
            name,
            (order.size, *inner),
            first.dtype,
            read,
            first.how,
            read_parts=None if apart is None else read_parts,
            tiles=tiles,
        ),
        tuple(positions_of[order].tolist()),
    )


def _kept_rows(shape: Sequence[int], one: Pass) -> NDArray[np.int64] | None:
    """Return the rows of a pass's tokens that an array without its padding holds, ascending.

    These are the rows that the attention mask leaves; or, of an array [batch, tokens, ...], all
    rows of the columns that it leaves in some sequence, if these follow each other. None if the
    array has all rows of the pass, or other ones.
    """
    mask, ids = one.batch.get("mask"), one.batch.get("ids")
    tokens = _pass_tokens(one)
    if mask is None or ids is None or int(np.prod(mask.shape)) != tokens or not shape:
        return None
    if _flat_length(shape, tokens) == tokens:
        return None
    real = np.asarray(mask.read()).reshape(-1) != 0
    kept = np.flatnonzero(real)
    if len(ids.shape) == 2 and ids.shape[0] > 1 and len(shape) > 2:
        columns = np.flatnonzero(real.reshape(ids.shape).any(0))
        together = columns.size and int(columns[-1] - columns[0]) + 1 == columns.size
        if together and tuple(shape[:2]) == (ids.shape[0], columns.size):
            return (np.arange(ids.shape[0])[:, None] * ids.shape[1] + columns).reshape(-1)
    return kept if 1 < kept.size < tokens and _row_count(shape) == kept.size else None


def _has_heads_first(shapes: Sequence[tuple[tuple[int, ...], int]]) -> bool:
    """Return whether an array is [1, heads, tokens, width] in each pass.

    `shapes` are (shape, number of tokens) of each pass. False if all of them also fit [1, tokens,
    heads, width].
    """
    if not all(len(shape) == 4 and shape[0] == 1 and shape[2] == n for shape, n in shapes):
        return False
    return any(shape[1] != n for shape, n in shapes)


def _with_tokens_first(array: JoinedArray) -> JoinedArray:
    """Return an array [1, heads, tokens, width] as [1, tokens, heads, width]."""
    one, heads, tokens, width = array.shape

    def read() -> Numbers:
        """Return the values as [1, tokens, heads, width], from [1, heads, tokens, width]."""
        return array.read().swapaxes(1, 2)

    return JoinedArray(array.name, (one, tokens, heads, width), array.dtype, read, array.how)


@dataclass(frozen=True)
class _Taken:
    """Rows of one pass's array, and the positions that they are of."""

    array: JoinedArray
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]


def _tiles_of_rows(taken: Sequence[_Taken]) -> Tiles | None:
    """Return all rows as blocks, read pass by pass; None if that is not possible.

    It needs arrays with blocks of one width, consecutive rows in each pass, and ascending
    positions.
    """
    found: list[Tiles] = []
    for one in taken:
        whole = one.array.tiles
        if whole is None or np.any(np.diff(one.positions) <= 0) or np.any(np.diff(one.rows) != 1):
            return None
        if found and found[0].width != whole.width:
            return None
        found.append(whole.row_range(int(one.rows[0]), one.rows.size))
    return found[0] if len(found) == 1 else join_rows(found)


def _pass_tokens(one: Pass) -> int:
    """Return how many tokens a pass has, by the shapes of its ids, positions or arrays."""
    ids, positions = one.batch.get("ids"), one.batch.get("positions")
    if ids is not None:
        return int(np.prod(ids.shape, dtype=np.int64))
    if positions is not None:
        return int(positions.shape[-1])
    return _count_tokens(one, None, None)


def _flat_length(shape: Sequence[int], tokens: int) -> int:
    """Return the number of token rows of an array in a pass of `tokens` tokens.

    An array [batch, tokens, ...] has the rows of all its sequences.
    """
    if len(shape) > 2 and shape[0] * shape[1] == tokens:
        return tokens
    return _row_count(shape)


def _row_shape(shape: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """Return the shape of one token's values in an array of a pass of `tokens` tokens."""
    if len(shape) > 2 and (shape[0] == 1 or shape[0] * shape[1] == tokens):
        return shape[2:]
    return shape[1:]
