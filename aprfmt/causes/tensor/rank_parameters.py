"""Parameters of an engine's ranks that hold another rank's values, or their own times a factor.

A tensor that was put together of ranks shows only that some of its rows are wrong. A *piece* is the
share that one rank holds of one matrix, or of one expert's. Each piece is looked for among all that
the published model gives: where it belongs says what went wrong while loading.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from aprfmt.arch.element_moves import to_logical
from aprfmt.arch.engine_parameters import role_base
from aprfmt.base.sequences import first_and_more
from aprfmt.causes.tensor.context import PairContext
from aprfmt.causes.tensor.fused_layouts import fused_orders
from aprfmt.causes.tensor.guess import Group, JointHypothesis
from aprfmt.causes.tensor.proof import make_finding, prove_bytes
from aprfmt.codecs import decode, encode
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from aprfmt.model.engine_state import EngineTensor
from aprfmt.model.rank_tensors import EngineReading, element_array

Array = Any
SHOWN = 3  # pieces that a sentence names
VARIED = 8  # different bytes that a piece has at least: fewer may be found in several places
_FLOATS = ("F32", "F16", "BF16")  # encodings of which a factor of a part is looked for
_WORDS = {"attn_q": "q", "attn_k": "k", "attn_v": "v"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's share of one matrix: number of the rank, of the matrix, of the expert or None."""

    rank: int
    matrix: int
    expert: int | None = None


def rank_parameters(
    context: PairContext, pairs: Mapping[str, TensorPair], rows: Mapping[str, TensorDiff]
) -> Iterator[Group]:
    """Yield a function for each parameter of an engine of which some published tensor differs.

    It returns {tensor key: finding} if every piece of it is one of the published model's.
    """
    found: dict[str, tuple[EngineReading, list[str]]] = {}
    for key, row in rows.items():
        pair = pairs.get(key)
        if row.verdict != "DIFFERENT" or pair is None or pair.b is None:
            continue
        for tensor in pair.b.stored:
            if isinstance(tensor, EngineTensor) and tensor.reading is not None:
                reading = tensor.reading
                keys = found.setdefault(reading.tensor.name, (reading, []))[1]
                if key not in keys:
                    keys.append(key)
    for reading, keys in found.values():
        yield partial(_explain_parameter, context, reading, keys, rows)


def _explain_parameter(
    context: PairContext,
    reading: EngineReading,
    keys: Sequence[str],
    rows: Mapping[str, TensorDiff],
) -> dict[str, Finding]:
    """Return {tensor key: finding} of an engine's parameter with misplaced or scaled values.

    {} if that does not explain every difference of the parameter.
    """
    published, layout = context.models["a"], reading.layout
    hp = published.hyper
    arrays: list[Array] = []
    for part in reading.parameter.parts:
        stored = [published.source.tensors.get(name) for name in part.stored]
        cells = [element_array(tensor) for tensor in stored if tensor is not None]
        encodings = {tensor.info.encoding for tensor in stored if tensor is not None}
        if len(cells) < len(stored) or encodings != {reading.tensor.parts[0].info.encoding}:
            return {}
        arrays += to_logical(part.steps, cells, hp)
    held = reading.rank_arrays()
    # One rule for all ranks comes before a list of pieces that follows from it.
    moved = (
        _even_shares(reading, arrays, held)
        or _misplaced_pieces(reading, arrays, held)
        or _exchanged_matrices(reading, arrays, held)
        or _ordered_rows(reading, arrays, held, hp.get("n_kv_heads"))
        or _scaled_ranks(reading, arrays, held)
    )
    if moved is None:
        return {}
    proof = prove_bytes(moved.sample, moved.nbytes, moved.free)
    evidence = (moved.says, f"{reading.tensor.name} of {layout.ranks} ranks")
    made = {}
    for key in keys:
        before = rows[key].explanation
        away = None if before is None else before.residual_before
        made[key] = make_finding(moved.cause, (key,), evidence, away, 0.0, proof)
    return made


class MovedPieces(NamedTuple):
    """The cause that pieces are misplaced, a sentence, and the data for its proof.

    `sample` are bytes of them, `nbytes` is the size of all, `free` how many pieces' origins were
    found.
    """

    cause: str
    says: str
    sample: bytes
    nbytes: int
    free: int


def _pieces(
    reading: EngineReading, shares: Sequence[Array], rank: int
) -> Iterator[tuple[Piece, bytes]]:
    """Yield (label, bytes) of each piece of a rank: of each matrix, or of each expert's matrix.

    `shares` has one array for each matrix of the parameter: the share that the rank holds. The
    label names rank, matrix and expert.
    """
    stack = reading.parameter.axis == 1
    for matrix, share in enumerate(shares):
        if not stack:
            yield Piece(rank, matrix), share.tobytes()
            continue
        for expert, one in enumerate(share):
            yield Piece(rank, matrix, expert), one.tobytes()


def _misplaced_pieces(
    reading: EngineReading, arrays: Sequence[Array], held: Sequence[Array]
) -> MovedPieces | None:
    """Return the cause that ranks hold each other's pieces; None unless all pieces are found.

    `arrays` are the published model's matrices, `held` each rank's array.
    """
    layout = reading.layout
    right: dict[Piece, bytes] = {}
    for rank in range(layout.ranks):
        right.update(_pieces(reading, layout.shares(arrays, rank), rank))
    owners: dict[bytes, list[Piece]] = {}
    for piece, data in right.items():
        owners.setdefault(data, []).append(piece)
    moved: dict[Piece, Piece] = {}
    sample, count = b"", 0
    for rank, array in enumerate(held):
        for piece, data in _pieces(reading, layout.split_shares(array), rank):
            if right.get(piece) == data:
                continue
            near = owners.get(data)
            if near is None or len(set(data[:4096])) < VARIED:
                return None
            moved[piece] = min(near, key=lambda one: _nearness(piece, one))
            sample, count = sample or data, count + len(data)
    if not moved:
        return None
    cause, text = _movement_text(reading, moved)
    return MovedPieces(cause, text, sample, count, len(moved))


def _nearness(piece: Piece, other: Piece) -> tuple[bool, bool, bool, int]:
    """Return a sort key of a piece's possible origins: those that differ in one number first."""
    return (
        piece.matrix != other.matrix,
        piece.expert != other.expert,
        piece.rank != other.rank,
        abs(piece.rank - other.rank),
    )


def _movement_text(reading: EngineReading, moved: Mapping[Piece, Piece]) -> tuple[str, str]:
    """Return (cause, sentence) for misplaced pieces, {piece: the piece that is held instead}."""
    if any(piece.matrix != other.matrix for piece, other in moved.items()):
        names = _matrix_names(reading)
        pairs = dict.fromkeys((names[a.matrix], names[b.matrix]) for a, b in moved.items())
        shown = ", ".join(f"{b} stands where {a} belongs" for a, b in list(pairs)[:SHOWN])
        return "fused_order", f"{shown} in an engine's joined matrix"
    if any(piece.expert is not None for piece in moved):
        layout = reading.layout
        local = reading.tensor.shape[0] if layout.axis == 0 else 0
        places = dict.fromkeys(
            (a.rank * local + (a.expert or 0), b.rank * local + (b.expert or 0))
            for a, b in moved.items()
        )
        whole = {(a.rank, b.rank) for a, b in moved.items() if a.expert == b.expert}
        if local and len(whole) == len({a.rank for a in moved}) and len(places) > len(whole):
            return "expert_order", f"experts stand on other ranks: {_rank_text(moved)}"
        numbers = first_and_more(
            list(places), SHOWN, lambda pair: f"expert {pair[0]} is expert {pair[1]}"
        )
        lost = {a for a, _ in places} - {b for _, b in places}
        twice = f"; expert {min(lost)} is nowhere" if len(lost) == 1 else ""
        return "expert_order", f"experts hold other ones' weights: {numbers}{twice}"
    names = _matrix_names(reading)
    held = [one for each in reading.layout.sections for one in each]
    shared = [
        piece for piece in moved if held and held[piece.matrix].copies(reading.layout.ranks) > 1
    ]
    text = f"ranks hold other ranks' shares: {_rank_text(moved)}"
    if len(shared) == len(moved):
        kinds = " and ".join(dict.fromkeys(names[piece.matrix] for piece in shared))
        text = f"ranks share other heads of {kinds} than theirs: {_rank_text(moved)}"
    return "shard_order", text


def _rank_text(moved: Mapping[Piece, Piece]) -> str:
    """Return a sentence on which ranks hold which other ranks' pieces."""
    ranks = dict.fromkeys((a.rank, b.rank) for a, b in moved.items())
    if len(ranks) == 2 and (pair := list(ranks))[0] == pair[1][::-1]:
        return "those of ranks {} and {} are exchanged".format(*sorted(pair[0]))
    shown = first_and_more(
        list(ranks), SHOWN, lambda pair: f"rank {pair[0]} has that of rank {pair[1]}"
    )
    lost = {a for a, _ in ranks} - {b for _, b in ranks}
    nowhere = f"; that of rank {min(lost)} is nowhere" if len(lost) == 1 else ""
    return f"{shown}{nowhere}"


def _matrix_names(reading: EngineReading) -> list[str]:
    """Return a name for each matrix that a rank's array joins, such as q, k and v."""
    made: list[str] = []
    layout, parameter = reading.layout, reading.parameter
    for number, key in enumerate(parameter.keys):
        word = role_base(key) if key else ""
        word = _WORDS.get(word, word)
        many = (
            len(layout.sections[number]) if layout.axis == parameter.axis and layout.sections else 1
        )
        for at in range(many):
            if not word:
                made.append(f"part {len(made) + 1}")
            else:
                made.append(word if many == 1 else f"part {at + 1} of {word}")
    return made


def _exchanged_matrices(
    reading: EngineReading, arrays: Sequence[Array], held: Sequence[Array]
) -> MovedPieces | None:
    """Return the cause that an engine's matrices are joined in another order; or None.

    One order must make every rank's array that of the published model. `arrays` are the model's
    matrices, `held` each rank's array.
    """
    layout, parameter = reading.layout, reading.parameter
    names = _matrix_names(reading)
    if parameter.grouped or not 2 <= len(names) <= 4:
        return None
    right = [layout.shares(arrays, rank) for rank in range(len(held))]
    if any(len(shares) != len(names) for shares in right):
        return None
    for order in list(permutations(range(len(names))))[1:]:
        count = 0
        for shares, array in zip(right, held, strict=True):
            made = np.concatenate([shares[at] for at in order], parameter.axis)
            if made.shape != array.shape or made.tobytes() != array.tobytes():
                break
            count += array.nbytes
        else:
            said = f"{', '.join(names[at] for at in order)} are joined in this order"
            text = f"{said}, where an engine has {', '.join(names)}"
            return MovedPieces("fused_order", text, held[0].tobytes()[:4096], count, len(names))
    return None


def _even_shares(
    reading: EngineReading, arrays: Sequence[Array], held: Sequence[Array]
) -> MovedPieces | None:
    """Return the cause that joined matrices were divided among ranks as one matrix; or None.

    Then the ranks' arrays one after the other are the published model's joined matrices, where each
    rank should have its share of every matrix.
    """
    axis = reading.layout.axis
    if axis is None or axis != reading.parameter.axis or len(reading.layout.shares(arrays, 0)) < 2:
        return None
    whole, together = np.concatenate(list(arrays), axis), np.concatenate(list(held), axis)
    if whole.shape != together.shape or whole.tobytes() != together.tobytes():
        return None
    text = (
        f"each of {len(held)} ranks holds 1/{len(held)} of the joined rows as they follow each "
        f"other, where it should hold 1/{len(held)} of every matrix that is joined"
    )
    return MovedPieces("shard_order", text, held[0].tobytes()[:4096], together.nbytes, 1)


def _ordered_rows(
    reading: EngineReading, arrays: Sequence[Array], held: Sequence[Array], kv_heads: object
) -> MovedPieces | None:
    """Return the cause that every rank's rows stand in one other known order; or None.

    `arrays` are the model's matrices, `held` each rank's array. `kv_heads` is the model's number of
    key and value heads, which ranks divide; no group is looked for where it is no integer.
    """
    layout, axis = reading.layout, reading.parameter.axis
    names = _matrix_names(reading)
    if reading.parameter.grouped or layout.axis is None or layout.axis != axis or len(names) < 2:
        return None
    right = [layout.shares(arrays, rank) for rank in range(len(held))]
    if any(len(shares) != len(names) for shares in right):
        return None
    parts = [(name, share.shape[axis]) for name, share in zip(names, right[0], strict=True)]
    whole = [np.concatenate(shares, axis) for shares in right]
    if any(x.shape != y.shape for x, y in zip(whole, held, strict=True)):
        return None
    groups = 0
    if names == list(_WORDS.values()) and isinstance(kv_heads, int):
        groups = kv_heads // len(held) if kv_heads % len(held) == 0 else 0
    every = " ".join(names)
    for text, order in fused_orders(parts, groups):
        if all(
            np.take(x, order, axis).tobytes() == y.tobytes()
            for x, y in zip(whole, held, strict=True)
        ):
            said = f"[{every}]{' of each rank' * (len(held) > 1)}: "
            said += f"all {', then all '.join(names)} in A became {text} in B"
            count = sum(array.nbytes for array in held)
            return MovedPieces("fused_order", said, held[0].tobytes()[:4096], count, 1)
    return None


def _scaled_ranks(
    reading: EngineReading, arrays: Sequence[Array], held: Sequence[Array]
) -> MovedPieces | None:
    """Return the cause that some ranks' values are the published ones times a factor, or None.

    `held` are the values that the ranks hold, `arrays` the published ones. At least one rank's must
    be as published; of all other ranks every byte must be what the encoding makes of the published
    values times one factor for each rank.
    """
    encoding, layout = reading.tensor.parts[0].info.encoding, reading.layout
    if encoding not in _FLOATS:
        return None
    factors: dict[int, float] = {}
    sample, count = b"", 0
    for rank, array in enumerate(held):
        right, found = list(layout.shares(arrays, rank)), list(layout.split_shares(array))
        pairs = [
            (_values(x, encoding), _values(y, encoding)) for x, y in zip(right, found, strict=True)
        ]
        if all(x.tobytes() == y.tobytes() for x, y in zip(right, found, strict=True)):
            continue
        factor = _one_factor(pairs)
        with np.errstate(all="ignore"):
            made = [encode(encoding, np.float32(factor) * x)[""] for x, _ in pairs]
        if not factor or b"".join(made) != b"".join(y.tobytes() for y in found):
            return None
        factors[rank], sample = factor, sample or found[0].tobytes()[:4096]
        count += array.nbytes
    if not factors or len(factors) == len(held):
        return None
    some = list(factors.items())[:SHOWN]
    shown = ", ".join(f"rank {rank}'s is {one:.6g} times" for rank, one in some)
    text = f"of {len(held)} ranks' parts {shown} what was published; the others are as published"
    return MovedPieces("scale", text, sample, count, len(factors))


def _values(cells: Array, encoding: str) -> Array:
    """Return `cells`, stored elements of an encoding, decoded to float32 in the same shape."""
    return np.asarray(decode(encoding, cells.tobytes(), cells.shape), np.float32)


def _one_factor(pairs: Sequence[tuple[Array, Array]]) -> float:
    """Return the factor by which the second arrays are the first ones, or 0.0 if there is none.

    `pairs` are (first, second). The factor is read at the largest first value, and is rounded to
    three digits if that is near.
    """
    x, y = max(pairs, key=lambda pair: float(np.abs(pair[0]).max(initial=0.0)))
    at = np.unravel_index(np.argmax(np.abs(x)), x.shape)
    if not x[at] or not np.isfinite(y[at]):
        return 0.0
    factor = float(y[at]) / float(x[at])
    rounded = float(f"{factor:.3g}")
    return rounded if abs(rounded - factor) <= 1e-3 * abs(factor) else factor


HYPOTHESES = (
    JointHypothesis(
        ("shard_order", "fused_order", "expert_order", "scale"),
        rank_parameters,
        395,
        "every byte of what ranks hold, before guesses about tensors put together of them",
        engine=True,
    ),
)
