"""Makes the stored tensors of a model again from its base, and compares them byte for byte."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from aprfmt.attestation.recipes import Recipe
from aprfmt.base.budget import Budget, end_where_time_is_over
from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import LazyTensor
from aprfmt.codecs import CODECS, codec
from aprfmt.conversion.encoding_choice import column_importances
from aprfmt.conversion.outputs import Output
from aprfmt.conversion.run import CHUNK, WrittenTensor, decoded_pieces, encode_piece, output_chunks
from aprfmt.errors import CodecError, ConversionError
from aprfmt.measure.requantization import HOPELESS, QuantRecipe, store_through
from aprfmt.model import Model
from aprfmt.quantizing.mixture import is_quantized

State = Literal["reproduced", "not reproduced", "not tried", "not reached"]
STATES: tuple[State, ...] = get_args(State)
COPIED = "bytes of the base"  # TensorAttestation.how of a tensor that the base stores as it is
_WORST: tuple[State, ...] = ("not reproduced", "not tried", "reproduced")


@dataclass(frozen=True, slots=True)
class TensorAttestation:
    """Whether a weight's stored tensors are what its base gives.

    `how` is the arithmetic that gave them, or nearly so; `why` says what stands against it.
    `tensor` is the stored tensor whose byte `byte` is the first that differs; of one in blocks,
    `block` is that byte's, in row `row`, and so many `blocks` differ. `sha256` are digests of the
    stored bytes, in the order of `names`.
    """

    key: str
    names: tuple[str, ...]
    encoding: str
    state: State
    how: str = ""
    why: str = ""
    tensor: str = ""
    byte: int | None = None
    block: int | None = None
    row: int | None = None
    blocks: int | None = None
    sha256: tuple[str, ...] = ()


class _Difference(NamedTuple):
    """The first byte that differs, and how many blocks do where that was counted.

    `how` names the kind of rounding. `seen` is how many blocks were compared where the count was
    given up; else None.
    """

    byte: int
    blocks: int | None = None
    how: str = ""
    seen: int | None = None


def rederive(
    recipes: Sequence[Recipe],
    quantized: Model,
    progress: Callable[[int, int], None] | None = None,
    budget: Budget | None = None,
) -> Iterator[TensorAttestation]:
    """Yield a row for each weight of the first recipe, and for each tensor only the file has.

    A weight whose bytes the first recipe does not give is tried with the others. `progress` is
    called with weights done and weights in all. `quantized` is the quantized model. Weights that
    `budget` leaves are "not reached", and nothing of them is read.
    """
    budget = budget or Budget()
    stored = quantized.source.tensors
    (first, groups), *others = [(recipe, _outputs_by_weight(recipe)) for recipe in recipes]
    ways = first.ways
    for done, (key, outputs) in enumerate(groups.items(), 1):
        names = tuple(one.info.name for one in outputs if one.info.name in stored)
        nbytes = sum(stored[name].info.nbytes for name in names)
        row = TensorAttestation(key, names, outputs[0].encoding, "not reached", why=budget.reason)
        if not (budget.has_time() and budget.has_room(nbytes)):
            yield row
            continue
        with budget.in_force():
            tries = [(replace(first, ways=ways), groups), *others]
            row = _attest_by_recipes(key, tries, stored)
        ways = tuple(sorted(ways, key=lambda way: str(way) != row.how))  # what worked last, first
        if progress is not None:
            progress(done, len(groups))
        yield row
    planned = {one.info.name for outputs in groups.values() for one in outputs}
    for name, tensor in stored.items():
        if name not in planned:
            room = budget.has_time() and budget.has_room(tensor.info.nbytes)
            yield TensorAttestation(
                name,
                (name,),
                tensor.info.encoding,
                "not reproduced",
                "",
                "the base gives no such tensor",
                name,
                sha256=(_tensor_digest(tensor),) if room else (),
            )


def _attest_by_recipes(
    key: str,
    tries: "Sequence[tuple[Recipe, Mapping[str, list[Output]]]]",
    stored: Mapping[str, LazyTensor],
) -> TensorAttestation:
    """Return the TensorAttestation of a weight by the first recipe that gives its bytes.

    If none does, it is that by the first of all. `tries` are recipes, each with its planned
    outputs by weight; the first has the weight `key`.
    """
    (recipe, groups), *others = tries
    row = _attest_weight(key, groups[key], stored, recipe)
    for other, known in others:
        if row.state != "reproduced" and key in known:
            again = _attest_weight(key, known[key], stored, other)
            row = again if again.state == "reproduced" else row
    return row


def _outputs_by_weight(recipe: Recipe) -> dict[str, list[Output]]:
    """Return {role or name: planned output tensors of the weight}; a packed one has several."""
    assert recipe.plan is not None
    packed = {id(one.part.packed): one for one in recipe.plan.outputs if one.part and one.role}
    found: dict[str, list[Output]] = {}
    for output in recipe.plan.outputs:
        main = output if output.part is None else packed.get(id(output.part.packed), output)
        name = main.info.name if main.part is None else main.part.packed.name
        found.setdefault(main.role or name, []).append(output)
    return found


def _attest_weight(
    key: str, outputs: Sequence[Output], stored: Mapping[str, LazyTensor], recipe: Recipe
) -> TensorAttestation:
    """Return the TensorAttestation of a weight: that of its stored tensor with the worst state.

    `stored` is {name: tensor} of the file, `outputs` are the planned tensors of the weight. `key`
    is the role of the weight, or its name.
    """
    first = outputs[0]
    names = tuple(one.info.name for one in outputs if one.info.name in stored)
    base = TensorAttestation(key, names, first.encoding, "not tried")
    rows = []
    for output in outputs:
        held = stored.get(output.info.name)
        if held is None:
            rows.append(
                replace(
                    base,
                    state="not reproduced",
                    tensor=output.info.name,
                    why=f"there is no tensor {output.info.name}",
                )
            )
            continue
        try:
            rows.append(_attest_tensor(output, held, base, recipe))
        except (CodecError, ConversionError) as error:
            rows.append(replace(base, tensor=output.info.name, why=str(error)))
    digests = tuple(_tensor_digest(stored[name]) for name in names)
    worst = min(rows, key=lambda row: _WORST.index(row.state))
    return replace(worst, sha256=digests)


def _attest_tensor(
    output: Output, tensor: LazyTensor, base: TensorAttestation, recipe: Recipe
) -> TensorAttestation:
    """Return `base` with the state of one stored tensor: whether the plan gives its bytes.

    `tensor` is the tensor of the file. `base` is the weight's row without a state.
    """
    info, name = tensor.info, output.info.name
    if info.shape != output.info.shape:
        why = f"has shape {list(info.shape)}; the base gives {list(output.info.shape)}"
        return replace(base, state="not reproduced", tensor=name, why=why)
    if info.encoding != output.info.encoding:
        why = f"is {info.encoding}; the base gives {output.info.encoding}"
        if info.encoding not in CODECS or not codec(info.encoding).has_encoder:
            return replace(
                base,
                tensor=name,
                encoding=info.encoding,
                why=f"nothing here writes {info.encoding}",
            )
        return replace(base, state="not reproduced", tensor=name, why=why)
    # Equal shape and encoding: compare bytes, in the way in which the tensor was made.
    searched = is_quantized(info.encoding)
    if output.copies or output.part is not None:
        found = _first_difference(output_chunks(output, recipe.options, WrittenTensor()), tensor)
        how = "laid out anew" if output.made else COPIED
        if output.part is not None:
            how = recipe.type or base.encoding
    elif searched and recipe.lacks:
        why = f"made with the importance matrix {recipe.lacks}: give it with --imatrix"
        return replace(base, tensor=name, why=why)
    else:
        found = _least_difference(output, tensor, recipe, searched)
        how = found.how
        if found.byte < 0:
            found = None
    if found is None:
        return replace(base, state="reproduced", how=how)
    return _difference_row(output, replace(base, how=how), found)


def _difference_row(
    output: Output, base: TensorAttestation, found: _Difference
) -> TensorAttestation:
    """Return the row of a tensor whose bytes differ, with the block or row of the first one.

    `found` is that difference; `base` is the row without a state.
    """
    row, name = find_encoding(output.info.encoding), output.info.name
    columns = max(output.info.shape[-1], 1) if output.info.shape else 1
    block = at = None
    where = f"byte {found.byte}"
    if row.known and row.block_size > 1:
        block = found.byte // row.type_size
        at = block * row.block_size // columns
        where = f"block {block} (row {at})"
    elif row.known and row.type_size and output.part is None:
        at = found.byte // row.type_size // columns
        where = f"row {at}, byte {found.byte}"
    of = "" if found.seen is None else f" of the first {found.seen}"
    more = f"; {found.blocks}{of} blocks differ" if found.blocks and found.blocks > 1 else ""
    return replace(
        base,
        state="not reproduced",
        tensor=name,
        why=f"{where} is not what the base gives{more}",
        byte=found.byte,
        block=block,
        row=at,
        blocks=found.blocks,
    )


def _first_difference(made: Iterator[memoryview], tensor: LazyTensor) -> _Difference | None:
    """Return the first byte in which bytes that were made differ from the stored tensor.

    None where all are equal. A missing or additional byte is a difference. `made` are the chunks of
    bytes in order. `tensor` is the stored tensor.
    """
    at, first = 0, None
    for chunk in made:
        end_where_time_is_over()
        stop = min(at + chunk.nbytes, tensor.info.nbytes)
        one = np.frombuffer(chunk, np.uint8)
        other = np.frombuffer(tensor.raw(at, stop), np.uint8)
        same = one[: other.size] == other
        if first is None and not same.all():
            first = at + int(np.argmin(same))
        at += chunk.nbytes
    if first is None and at != tensor.info.nbytes:
        first = min(at, tensor.info.nbytes)
    tensor.drop()
    return None if first is None else _Difference(first)


def _least_difference(
    output: Output, tensor: LazyTensor, recipe: Recipe, searched: bool
) -> _Difference:
    """Return the difference by the kind of rounding that gives the fewest wrong blocks.

    A kind is given up when too many blocks differ; then the fraction of wrong blocks counts. The
    difference's byte is -1 where one kind gives every byte. `tensor` is the file's tensor, `recipe`
    has the kinds to try. `searched`: the encoding searches for its scales, so that the bytes depend
    on how sums are rounded.
    """
    size = find_encoding(output.info.encoding).type_size
    importance = column_importances(output, recipe.options)
    weighed = ", with the importance matrix" if importance is not None else ""
    best: _Difference | None = None
    least = math.inf
    ways = recipe.ways
    if not searched:
        ways = tuple({way.through: way for way in ways}.values())
    # Each way encodes all values again, and is given up once too many blocks differ.
    for way in ways:
        said = f"{way}{weighed}" if searched else "values of the base"
        if way.through and not searched:
            said += f", through {way.through}"
        options = replace(recipe.options, fma=way.fma)
        at, first, differ, seen = 0, -1, 0, 0
        for piece in decoded_pieces(output, CHUNK):
            band = None if way.through else piece.band
            values = piece.values if not way.through else _rounded_values(piece.values, way)
            data, _ = encode_piece(
                output, options, importance, piece._replace(values=values, band=band)
            )
            one = np.frombuffer(data, np.uint8)
            other = np.frombuffer(tensor.raw(at, at + one.size), np.uint8)
            same = one == other
            if first < 0 and not same.all():
                first = at + int(np.argmin(same))
            differ += int((~same.reshape(-1, size).all(axis=1)).sum())
            seen, at = seen + one.size // size, at + one.size
            if differ > HOPELESS * seen:
                break
        if not differ:
            tensor.drop()
            return _Difference(-1, 0, said)
        if differ / seen < least:
            least = differ / seen
            best = _Difference(first, differ, said, seen if differ > HOPELESS * seen else None)
    tensor.drop()
    assert best is not None
    return best


def _rounded_values(
    values: Callable[[], "np.ndarray"], recipe: QuantRecipe
) -> "Callable[[], np.ndarray]":
    """Return a function that returns `values()` rounded to the float type that `recipe` names.

    It is for files that were stored as that type before they were quantized.
    """
    return lambda: store_through(values(), recipe)


def _tensor_digest(tensor: LazyTensor) -> str:
    """Return the SHA-256 of a tensor's stored bytes, in hex."""
    digest = hashlib.sha256(tensor.raw())
    tensor.drop()
    return digest.hexdigest()
