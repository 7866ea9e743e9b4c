"""Lists of moves: the runs of elements a tensor is made of; how to chain and to invert them.

A *move* is a run: elements that follow each other in an input tensor and in the output. A list of
moves describes one output; `list[list[Move]]` one list for each output of a step. All positions
count elements of row-major order.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from aprfmt.arch.spec import Array, LayoutStep, Move
from aprfmt.base.columns import FEW, Columns
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Moves = list[list[Move]]
Chain = Sequence[Sequence[Move]]  # long ones as numbers
Shapes = Sequence[tuple[int, ...]]

_MANY = 1 << 15  # longer chains are not cached
_KEPT = 64  # chains
_chains: dict[object, Chain] = {}


def identity_moves(shapes: Shapes) -> Moves:
    """Return the moves of a step that changes nothing: each tensor in one run."""
    return [[Move(i, 0, math.prod(shape))] for i, shape in enumerate(shapes)]


def to_logical(
    steps: Sequence[LayoutStep], stored: Sequence[Array], hp: Mapping[str, Value]
) -> Sequence[Array]:
    """Return the logical arrays of stored ones: the steps undone, the first one first."""
    arrays = stored
    for step in steps:
        arrays = step.undo(arrays, hp)
    return arrays


def to_stored(
    steps: Sequence[LayoutStep], logical: Sequence[Array], hp: Mapping[str, Value]
) -> Sequence[Array]:
    """Return the stored arrays of logical ones: the steps applied, the last one first."""
    arrays = logical
    for step in reversed(steps):
        arrays = step.apply(arrays, hp)
    return arrays


def chain_steps(
    steps: Sequence[LayoutStep], before: Sequence[Shapes], hp: Mapping[str, Value], back: bool
) -> Chain | None:
    """Return the moves from stored to logical tensors of a chain of steps, or None.

    With `back`, those from logical to stored. None if a step cannot be expressed as moves: then the
    arrays have to be decoded. `before` has the shapes of each step's inputs, and without steps
    those of the tensors. Results are cached, as many layers are equal: callers must not change
    them.
    """
    if not steps:
        return identity_moves(before[0])
    # Layers of equal shapes ask for the same chain.
    key = _cache_key(steps, before, hp, back)
    if key in _chains:
        return _chains[key]
    moves = identity_moves(before[0])
    for step, inputs in zip(steps, before, strict=False):
        outer = step.moves(inputs, hp)
        if outer is None:
            return None
        moves = compose_moves(outer, moves)
    if back:
        moves = invert_moves(moves, [math.prod(shape) for shape in before[0]])
    chain = [_as_columns(each) if len(each) > FEW else each for each in moves]
    if key is not None and sum(map(len, moves)) <= _MANY:
        if len(_chains) >= _KEPT:
            _chains.clear()
        _chains[key] = chain
    return chain


def _as_columns(moves: Sequence[Move]) -> Columns[Move]:
    """Return moves as columns of numbers, which take less memory than objects."""
    return Columns.from_rows(Move, [(move.source, move.start, move.count) for move in moves])


def _cache_key(
    steps: Sequence[LayoutStep], before: Sequence[Shapes], hp: Mapping[str, Value], back: bool
) -> object:
    """Return the cache key of a chain; None where a step of another package is not hashable."""
    key = (*steps, *(tuple(map(tuple, each)) for each in before), repr(dict(hp)), back)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def merge_moves(moves: Sequence[Move]) -> list[Move]:
    """Return the moves with empty ones left out and adjoining ones joined."""
    out: list[Move] = []
    for move in moves:
        if move.count == 0:
            continue
        last = out[-1] if out else None
        if last and last.source == move.source and last.start + last.count == move.start:
            out[-1] = Move(last.source, last.start, last.count + move.count)
        else:
            out.append(move)
    return out


def compose_moves(outer: Sequence[Sequence[Move]], inner: Sequence[Sequence[Move]]) -> Moves:
    """Return the moves of two steps in sequence: from `inner`'s inputs to `outer`'s outputs.

    Raises ArchError if `outer` reads beyond the end of an output of `inner`.
    """
    ends = [list(accumulate(move.count for move in moves)) for moves in inner]
    return [
        merge_moves([piece for move in moves for piece in _trace_move(move, inner, ends)])
        for moves in outer
    ]


def _trace_move(move: Move, inner: Sequence[Sequence[Move]], ends: list[list[int]]) -> list[Move]:
    """Return the runs of `inner`'s inputs that make up one run of its outputs.

    `ends` are the running totals of the elements of each output of `inner`. Raises ArchError for a
    move of elements that no output of `inner` has.
    """
    total = ends[move.source][-1] if move.source < len(ends) and ends[move.source] else 0
    if move.start < 0 or move.start + move.count > total:
        raise ArchError(
            f"a move takes elements {move.start} to {move.start + move.count} of tensor "
            f"{move.source}, which has {total}"
        )
    pieces: list[Move] = []
    at, left = move.start, move.count
    i = bisect_right(ends[move.source], at)
    while left:
        source = inner[move.source][i]
        skipped = at - (ends[move.source][i] - source.count)
        count = min(left, source.count - skipped)
        pieces.append(Move(source.source, source.start + skipped, count))
        at, left, i = at + count, left - count, i + 1
    return pieces


def invert_moves(moves: Sequence[Sequence[Move]], sizes: Sequence[int]) -> Moves:
    """Return the moves of the inverse step: the runs that each input is made of.

    `sizes` are the elements of each input. Raises ArchError unless the moves take every element of
    every input exactly once.
    """
    # Where does each run of an input appear in the outputs?
    runs: list[list[tuple[int, Move]]] = [[] for _ in sizes]
    for output, row in enumerate(moves):
        at = 0
        for move in row:
            if move.count:
                runs[move.source].append((move.start, Move(output, at, move.count)))
            at += move.count
    # Sorted by their start, these runs have to cover the input exactly once.
    inverse: Moves = []
    for source, (found, size) in enumerate(zip(runs, sizes, strict=True)):
        found.sort(key=lambda run: run[0])
        at = 0
        for start, move in found:
            if start != at:
                raise ArchError(
                    _not_once_text(source, min(start, at), size, "twice" if start < at else "never")
                )
            at += move.count
        if at != size:
            raise ArchError(_not_once_text(source, min(at, size), size, "never"))
        inverse.append(merge_moves([move for _, move in found]))
    return inverse


def _not_once_text(source: int, element: int, size: int, times: str) -> str:
    """Return the error message of moves that take an element twice or never."""
    return f"moves take element {element} of tensor {source} ({size} elements) {times}, not once"
