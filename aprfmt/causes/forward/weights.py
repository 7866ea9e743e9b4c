"""Hypotheses about a weight's values: scaled, of a wrong type, quantized, damaged, stale."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.forward.mismatch import Change, Hypothesis, Mismatch
from aprfmt.causes.forward.norm import norm_key
from aprfmt.causes.forward.product import (
    Product,
    product_of,
    product_with_weight,
    replace_head,
    replace_weights,
    weight_values,
)
from aprfmt.causes.forward.rounding import round_on_scales
from aprfmt.codecs import CODECS, decode, encode
from aprfmt.errors import CodecError
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.measure.distances import rel_l2
from aprfmt.tensors import norms

MOST = 1 << 28  # values most values of all weights that are reread together
UNLIKE = 0.3  # cosine below which two matrices have nothing to do with one another
OTHER_16 = {"BF16": "F16", "F16": "BF16"}
# Encodings a copy may have been quantized to, finest first.
ENCODINGS = ("F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "NF4")
# What engines round a matrix to as they load it: codes -> [rows, columns] that share a scale (0:
# all), and those of its input [tokens, columns], if products are of 8 bits.
LOADED: Mapping[str, tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]] = {
    "int8": (((1, 0), (0, 0), (1, 128), (1, 64), (1, 32)), ((1, 0), (0, 0))),
    "float8_e4m3fn": (((1, 0), (0, 0), (128, 128)), ((1, 0), (0, 0), (1, 128))),
    "int4": (((1, 128), (1, 64), (1, 32), (1, 0)), ()),
    "uint4": (((1, 128), (1, 64), (1, 32), (1, 0)), ()),
}
FIRST = 16  # rows that are held against the trace before all are
COARSEST = 0.3  # relative L2 that no such copy exceeds
SCALES = ("float32", "bfloat16", "float16")  # types of these scales


def find_output_factor(case: Mismatch) -> Iterator[Change]:
    """Yield the change of a weight by one factor, or by one per row, solved from the trace."""
    product = product_with_weight(case)
    if product is None:
        return
    found, w = product
    ours = (found.x @ w.T).astype(np.float64)
    theirs = found.output_without_bias
    power = float(np.sum(ours * ours))
    if not power:
        return
    # One factor for all.
    factor = float(np.sum(ours * theirs)) / power
    if factor and rel_l2(ours * factor, theirs) <= 3 * case.view.tolerance:
        if case.view.point == "logits" and found.bias is None and factor > 0:
            return  # of all logits: a sampler's temperature or the model's factor as well
        scaled = w * np.float32(factor)
        lost = _lost_factor(case.patched, factor)
        if lost is not None:
            (name, value), (_, role) = lost, split_key(found.key)
            yield Change(
                "multiplier",
                f"the {value:g} of {name} multiplies what {role} gives",
                (name,),
                replace_weights({found.key: scaled}),
                {name: value},
                scoped=False,
            )
            return
        says = f"{found.key} is multiplied by {factor:.6g}"
        yield found.weight_change(case, "scale", says, scaled, {"factor": factor})
        return
    # One factor for each column, if there are rows enough to judge them.
    columns = np.sum(ours * theirs, 0) / np.maximum(np.sum(ours * ours, 0), 1e-300)
    if (
        len(ours) > 2
        and columns.all()
        and rel_l2(ours * columns, theirs) <= 3 * case.view.tolerance
    ):
        changed = np.flatnonzero(np.abs(columns - 1) > 1e-3)
        says = f"{len(changed)} rows of {found.key} are multiplied by numbers of their own"
        values = {"rows": changed.tolist()[:16]}
        scales = columns[:, None].astype(np.float32)
        yield found.weight_change(case, "scale", says, w * scales, values, general=True)


def _lost_factor(patched: PatchedModel, factor: float) -> tuple[str, float] | None:
    """Return (name, value) of a model factor that an earlier change replaced, if it is `factor`.

    Then the run applies that factor at another point, and no weight is wrong. None for no such
    factor.
    """
    if patched.stated is None:
        return None
    settings = [patched.hp, *(hp for hp, _ in patched.own.values())]
    for name, value in patched.stated.items():
        taken = {hp[name] for hp in settings} - {value} if name.endswith("_scale") else ()
        if any(own and abs(factor * own / value - 1) <= 1e-4 for own in taken):
            return name, value
    return None


def try_other_16_bit_type(case: Mismatch) -> Iterator[Change]:
    """Yield changes that read stored 16-bit values as the other 16-bit type.

    First each weight or bias before the point, then all weights of that encoding.
    """
    stored = case.patched.stored
    readers = list(case.calls("linear", "router", "embed"))
    keys = [(call.args[0] if call.op == "embed" else call.args[1]).key for call in readers]
    norm, product = norm_key(case), product_of(case)
    if norm is not None:
        keys.append(norm)
    if product is not None and product.bias is not None:
        keys.append(f"{product.role}.bias")
    known = [key for key in keys if key in stored and stored[key].encoding in OTHER_16]
    for key in known:
        yield from _reread_change(case, (key,))
    for encoding in dict.fromkeys(stored[key].encoding for key in known):
        alike = tuple(key for key in stored if stored[key].encoding == encoding)
        if sum(math.prod(stored[key].shape) for key in alike) <= MOST:
            yield from _reread_change(case, alike)


def _reread_change(case: Mismatch, keys: tuple[str, ...]) -> Iterator[Change]:
    """Yield the change that reads tensors of one 16-bit encoding as the other 16-bit type.

    `keys` are the tensors' keys. Nothing if one of them is too large to be read.
    """
    stored, read = case.patched.stored, {}
    own = stored[keys[0]].encoding
    for key in keys:
        values = weight_values(case.patched, key)
        if values is None:
            return
        with np.errstate(all="ignore"):
            other = decode(OTHER_16[own], encode(own, values), values.shape)
        read[key] = np.asarray(other, np.float32).reshape(stored[key].shape)
    what = f"{keys[0]} holds {own} and" if len(keys) == 1 else f"every {own} tensor"
    yield Change(
        "dtype_mislabel",
        f"{what} is read as {OTHER_16[own]}",
        keys,
        replace_weights(read),
        {"stored": own, "read": OTHER_16[own]},
        scoped=False,
    )


def try_quantization(case: Mismatch) -> Iterator[Change]:
    """Yield the change to a quantized copy of the weight, by the finest encoding that fits."""
    if case.view.residual is None or case.view.residual > 0.5:
        return
    product = product_with_weight(case)
    if product is None:
        return
    found, values = product
    for name in ENCODINGS:
        if name not in CODECS or name == case.patched.stored[found.key].encoding:
            continue
        try:
            with np.errstate(all="ignore"):
                copy = decode(name, encode(name, values), values.shape)
        except CodecError:
            continue  # rows are not a whole number of blocks
        copy = np.asarray(copy, np.float32)
        if found.explains_output(case, copy, 3.0):
            says = f"{found.key} is a {name} copy"
            yield found.weight_change(case, "quantisation", says, copy, {"encoding": name})
            return


def try_quantized_on_load(case: Mismatch) -> Iterator[Change]:
    """Yield the change that an engine quantized the matrix of a product when it loaded it.

    It is at most one. The product may be in 8 bits as well: then its input is quantized, too.
    """
    if case.view.residual is None or case.view.residual > COARSEST:
        return
    product = product_with_weight(case)
    if product is None:
        return
    found, values = product
    # The row of the largest value has the scale of all.
    largest = int(np.argmax(np.abs(values).max(1)))
    bound = 10 * case.view.tolerance  # of a part
    few = np.unique([largest, *range(min(FIRST, len(values)))])
    for codes, (blocks, inputs) in LOADED.items():
        taken_as = {taken: _in_blocks(found.x, codes, taken) for taken in inputs}
        for block, scales in itertools.product(blocks, SCALES):
            rows = few if block[0] < 2 else np.arange(min(block[0], len(values)))
            some = _in_blocks(values[rows], codes, block, scales)
            if some is None:
                continue
            for taken, x in ((None, found.x), *taken_as.items()):
                if x is None:
                    continue
                if rel_l2(x @ some.T, found.output_without_bias[:, rows]) > bound:
                    continue
                copy = _in_blocks(values, codes, block, scales)
                if copy is not None and replace(found, x=x).explains_output(case, copy, 3.0):
                    yield _loaded_change(case, found, copy, (codes, block, taken))
                    return


def _in_blocks(
    values: NDArray[np.float32], codes: str, block: tuple[int, int], scales: str = "float32"
) -> NDArray[np.float32] | None:
    """Return a matrix quantized to the type `codes` and back, with one scale for each block of it.

    A block is `block` (rows, columns). `scales` is the type of the scales. None if the matrix has
    no whole number of blocks.
    """
    rows, columns = (size or n for size, n in zip(block, values.shape, strict=True))
    if values.shape[0] % rows or values.shape[1] % columns:
        return None
    parts = values.reshape(values.shape[0] // rows, rows, -1, columns)
    rounded: NDArray[np.float32] = round_on_scales(parts, codes, (1, 3), scales)
    return rounded.reshape(values.shape)


def _loaded_change(
    case: Mismatch,
    found: Product,
    copy: NDArray[np.float32],
    how: tuple[str, tuple[int, int], tuple[int, int] | None],
) -> Change:
    """Return the change that an engine uses `copy`, a quantized copy of a product's weight.

    `how` is (encoding of the codes, rows and columns that share a scale, the same for the product's
    input or None where that is not quantized).
    """
    codes, block, taken = how
    says = f"{found.key} is a copy in {codes}, {_shared_scale(block, 'row')}"
    change = found.weight_change(case, "quantisation", says, copy, {"encoding": codes})
    if taken is None:
        return change

    def linear(op: Any, at: Any, x: Any, w: Any, *rest: Any) -> Any:
        """Return the product of `x` and `w`; for the quantized matrix, of `x` rounded to codes."""
        own = w.key.partition("[")[0] == found.key
        return op(_in_blocks(x, codes, taken) if own else x, w, *rest)

    return replace(
        change,
        says=f"{says}, whose input is rounded to it, {_shared_scale(taken, 'token')}",
        make=lambda patched, layers: change.make(patched, layers).with_op("linear", linear, None),
    )


def _shared_scale(block: tuple[int, int], row: str) -> str:
    """Return in words which values share a scale: all, a `row`, or a block of this size."""
    if block == (0, 0):
        return "one scale for all"
    if block == (1, 0):
        return f"a scale for each {row}"
    return f"a scale for each {block[0]} x {block[1]}"


def find_wrong_value(case: Mismatch) -> Iterator[Change]:
    """Yield the change of a single value of the weight, solved from the trace.

    Such a value shows as one output column that differs by a multiple of one input column.
    """
    product = product_with_weight(case)
    if product is None:
        return
    found, values = product
    if len(found.x) < 3:
        return
    away = found.theirs.astype(np.float64) - found.ours
    # Only one output column may be off.
    lengths = np.linalg.norm(away, axis=0)
    wrong = np.flatnonzero(lengths > 10 * np.median(lengths) + 1e-3 * lengths.max())
    if len(wrong) != 1:
        return
    row = int(wrong[0])
    delta, inputs = away[:, row], found.x.astype(np.float64)
    # It must be a multiple of one input column.
    factors = inputs.T @ delta / np.maximum(np.sum(inputs**2, 0), 1e-300)
    missed = np.linalg.norm(delta[:, None] - inputs * factors, axis=0) / norms.exact_norm(delta)
    column = int(np.argmin(missed))
    if missed[column] > 0.01:
        return
    # Correct that value of the weight.
    values = values.copy()
    old = float(values[row, column])
    values[row, column] += np.float32(factors[column])
    new = float(values[row, column])
    says = f"{found.key}[{row}, {column}] is {new:.6g} instead of {old:.6g}"
    at = {"index": [row, column], "value": new, "was": old}
    yield found.weight_change(case, "bit_rot", says, values, at)


def find_stale_weight(case: Mismatch) -> Iterator[Change]:
    """Yield the change to a weight of zeros, or to one solved from the trace's values.

    It is solved only if there are more tokens than columns.
    """
    found = product_of(case)
    if found is None or not found.key:
        return
    shape = case.patched.weights[found.key].shape
    if not np.any(found.output_without_bias):
        zeros, says = np.zeros(shape, np.float32), f"{found.key} is all zero"
        yield found.weight_change(case, "stale_tensor", says, zeros, general=True)
    elif len(found.x) > 1.2 * found.x.shape[1] and len(shape) == 2:
        inputs = found.x.astype(np.float64)
        solved = np.linalg.lstsq(inputs, found.output_without_bias.astype(np.float64), rcond=None)[
            0
        ].T
        solved = solved.astype(np.float32)
        if case.view.point == "logits" and found.key == "token_embd.weight":
            yield from _other_head(case, solved, len(inputs))
            return
        says = f"{found.key} has other values (solved from {len(inputs)} tokens)"
        yield found.weight_change(case, "stale_tensor", says, solved, general=True)


def _other_head(case: Mismatch, solved: NDArray[np.float32], tokens: int) -> Iterator[Change]:
    """Yield the change of a tied head to `solved`, a weight solved from `tokens` tokens.

    The embedding stays as it is. If the two are unlike, the run's head was never tied.
    """
    own = weight_values(case.patched, "token_embd.weight")
    if own is None:
        return
    alike = abs(float(np.sum(solved * own))) / (norms.exact_norm(solved) * norms.exact_norm(own))
    cause = "tied_embedding" if alike < UNLIKE else "stale_tensor"
    what = "is no copy of the embedding, which" if alike < UNLIKE else "is not the embedding, which"
    yield Change(
        cause, f"the head {what} the model has as head (solved from {tokens} tokens)",
        ("output.weight",), replace_head(solved), scoped=False, general=True,
    )  # fmt: skip


def try_embedding_as_head(case: Mismatch) -> Iterator[Change]:
    """Yield the change to the embedding in place of the head, at points after the layers."""
    call = case.call("linear")
    if call is not None and case.layer < 0 and call.args[1].key == "output.weight":
        yield from tied_head_change(case.patched)


def tied_head_change(patched: PatchedModel) -> Iterator[Change]:
    """Yield the change that uses the embedding as head, if there is a head of the same shape."""
    head, table = (
        patched.weights.get_role(None, "output.weight"),
        patched.stored["token_embd.weight"],
    )
    if head is not None and head.shape == table.shape:
        yield Change(
            "tied_embedding",
            "the head is the embedding; the model has a separate head",
            ("output.weight",),
            lambda patched, layers: patched.with_weights({"output.weight": table.numpy()}),
            scoped=False,
        )


HYPOTHESES = (
    Hypothesis("tied_embedding", try_embedding_as_head, 80, "a stored matrix, before solved ones"),
    Hypothesis("scale", find_output_factor, 120, "one factor, before other values"),
    Hypothesis("dtype_mislabel", try_other_16_bit_type, 130, "the same bytes, before other values"),
    Hypothesis("bit_rot", find_wrong_value, 140, "one value, before a whole matrix"),
    Hypothesis("quantisation", try_quantization, 150, "within a bound, once no exact change fits"),
    Hypothesis(
        "quantisation", try_quantized_on_load, 152, "the same by an engine, once no type fits"
    ),
    Hypothesis("stale_tensor", find_stale_weight, 160, "any matrix, the last of a product"),
)
