"""Hypotheses about the embedding, the residual stream, the factors on it and the logits."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.number_ranges import number_ranges
from aprfmt.causes.forward.attention import solve_cap
from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Layers,
    Mismatch,
    Patch,
    hyper_change,
)
from aprfmt.causes.forward.norm_changes import NORMS
from aprfmt.causes.forward.operation_patches import (
    POINTS_BEFORE_SUM,
    Sum,
    change_sublayer_sum,
    share_norm_input,
)
from aprfmt.causes.forward.point_signatures import PointPair, PointSignature
from aprfmt.causes.forward.product import replace_weights, weight_values
from aprfmt.causes.forward.score_bias import is_score_bias
from aprfmt.causes.row import Cause
from aprfmt.inference.moe import ROUTED
from aprfmt.inference.replay.patched_model import MOVES, STREAM, OperationCall, PatchedModel
from aprfmt.measure.distances import rel_l2
from aprfmt.measure.short_numbers import short_number
from aprfmt.tensors.norms import exact_norm

CAUSE_ROWS = (
    Cause(
        "residual", "forward", "bug",
        "A sublayer's output is not added to the stream, or is added in another place; or a whole "
        "layer is left out.",
        "The stream is equal to what was added, or unchanged, or both sublayers read one input.",
        "The sum as named is equal.",
        keys=("parallel_residual",),
    ),
    Cause(
        "multiplier", "config", "bug",
        "A factor of the embedding, the residual or the logits is missing or has another value.",
        "All values of a point differ by one factor.",
        "Multiplying by the printed factor makes them equal.",
        keys=("embedding_scale", "residual_scale", "residual_scales", "logit_scale",
              "attn_in_scale",
              "attn_out_scale", "key_scale", "ssm_in_scale", "ssm_out_scale", "ssm_scales",
              "ffn_gate_scale", "ffn_down_scale"),
    ),
    Cause(
        "token_ids", "forward", "bug",
        "The run read other tokens than its records say.",
        "The embedding's rows are those of other ids at single places; all rows from there on "
        "differ.",
        "The pass with the named ids is equal.",
    ),
    Cause(
        "token_type_ids", "forward", "bug",
        "Tokens have another type, or no row of the table of types is added.",
        "The embedding differs by one vector in every row.",
        "The pass with the named row of the types is equal.",
    ),
    Cause(
        "dropout", "forward", "bug",
        "Dropout is on: the run was made in training mode.",
        "Some values are zero, and all others are larger by one factor; two runs differ.",
        "The share of zeros gives the factor that all other values have.",
    ),
)  # fmt: skip

# Point -> the hyperparameter of the factor before it.
FACTORS = {
    "embd": "embedding_scale", "embd_scaled": "embedding_scale", "attn_contrib": "residual_scale",
    "ffn_contrib": "residual_scale", "mid": "residual_scale", "out": "residual_scale",
    "logits": "logit_scale", "logits_raw": "logit_scale",
}  # fmt: skip

MOST_WRONG = 0.5  # share of the tokens up to which single ids are wrong, not the table
MOST_ROWS = 512
IN_EMBEDDING = "embd", "embd_in"  # the points before types and positions are added
MOST_STARTS = 8  # of a second segment, besides the first row that differs
MOST_PLACES = 4  # by which recorded ids are looked for before or after their rows
HALVES: Mapping[str, str] = {"attn": "attention", "ffn": "the MLP"}  # sublayers in words
POWERS = (-3, -2, -1, 1, 2, 3)  # of 2: factors that are tried before a number is fitted

# Other sums; a stream is counted several times where each device adds it (shards.COUNTS).
SUMS: Mapping[str, Sum] = {
    "the stream is added to itself instead of what {} computed": lambda a, b: a + a,
    "what {} computed is added to itself instead of the stream": lambda a, b: b + b,
    "what {} computed is taken away from the stream": lambda a, b: a - b,
    "the stream is counted twice where what {} computed is added": lambda a, b: 2 * a + b,
    "the stream is counted 4 times where what {} computed is added": lambda a, b: 4 * a + b,
    "the stream is counted 8 times where what {} computed is added": lambda a, b: 8 * a + b,
    "the stream is multiplied by what {} computed": lambda a, b: a * b,
}


def find_embedding_rows(case: Mismatch) -> Iterator[Change]:
    """Yield the change of which embedding rows the run read, as solved from the trace.

    A few wrong rows are other token ids; rows that are all shifted alike are a row offset.
    """
    call = case.call("embed")
    if call is None or case.view.point not in ("embd", "embd_scaled") or len(case.view.calls) > 2:
        return
    if call.args[0].key != "token_embd.weight":
        return
    table = weight_values(case.patched, "token_embd.weight")
    if table is None:
        return
    # Find the table's nearest row for every token; each must match.
    theirs = case.view.theirs[case.rows].astype(np.float64)
    scale = float(case.patched.hp["embedding_scale"]) if case.view.point == "embd_scaled" else 1.0
    found = []
    for row in theirs[:MOST_ROWS]:
        away = np.linalg.norm(table * np.float32(scale) - row.astype(np.float32), axis=1)
        best = int(np.argmin(away))
        if away[best] > 10 * case.view.tolerance * max(exact_norm(row), 1e-30):
            return
        found.append(best)
    ids = np.asarray(case.patched.ids)[case.rows][: len(found)]
    # A few wrong rows, or all tokens some places on: the run read other token ids.
    few = np.flatnonzero(np.asarray(found) != ids)
    moved = _places_moved(ids, np.asarray(found))
    if 0 < len(few) <= MOST_WRONG * len(ids) or moved:
        read = np.asarray(case.patched.ids).copy()
        read[case.rows[few]] = np.asarray(found)[few]
        yield token_ids_change(np.asarray(case.patched.ids), read)
        return
    # All rows shifted alike: the table is read with an offset.
    shift = np.unique((np.asarray(found) - ids) % len(table))
    if len(shift) == 1 and shift[0]:
        move = int(shift[0]) if shift[0] <= len(table) // 2 else int(shift[0]) - len(table)
        yield Change(
            "row_offset",
            f"token_embd.weight is read {abs(move)} row{'s' if abs(move) > 1 else ''} "
            f"{'further on' if move > 0 else 'too early'}",
            ("token_embd.weight",),
            replace_weights({"token_embd.weight": np.roll(table, -move, axis=0)}),
            {"offset": move},
            scoped=False,
        )


def _places_moved(own: Array, read: Array) -> int:
    """Return by how many places the ids `read` are the ids `own` moved; 0 where they are not.

    1: the first of `own` is not in `read`. -1: another token stands before them. Two thirds of the
    ids, and four of them, must be there, and not all be alike.
    """
    for places in range(1, min(MOST_PLACES, len(own) // 3) + 1):
        rest = len(own) - places
        for move, ours, theirs in (
            (places, own[places:], read[:rest]),
            (-places, own[:rest], read[places:]),
        ):
            if rest >= 4 and len(np.unique(ours)) > 1 and np.array_equal(ours, theirs):
                return move
    return 0


def _ids_text(own: Array, read: Array) -> str:
    """Return in words where the recorded ids `own` differ from the ids `read` by the run."""
    places = _places_moved(own, read)
    if places:
        way = "late" if places > 0 else "early"
        count = f"{abs(places)} place{'s' if abs(places) > 1 else ''}"
        return (
            f"the recorded ids stand {count} too {way}: the run read "
            f"{', '.join(map(str, read[:4]))}, ..., and the records begin with "
            f"{', '.join(map(str, own[:4]))}"
        )
    at = np.flatnonzero(own != read)
    shown = [f"token {i} is {own[i]} in the records, and the run read {read[i]}" for i in at[:4]]
    return "; ".join(shown) + (f", and {len(at) - 4} more" if len(at) > 4 else "")


def token_ids_change(own: Array, read: Array) -> Change:
    """Return the change that the embedding rows of other tokens were read.

    `own` are the recorded ids and `read` the ids whose rows the run used, both int arrays.
    """
    at = np.flatnonzero(own != read)

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose embedding looks up the ids `read`; `layers` is not used."""

        def override(op: Any, at_: Any, table: Any, ids: Any) -> Any:
            """Return the rows of the ids `read` for the token embedding.

            Other tables are read at `ids`, as usual.
            """
            same = table.key == "token_embd.weight" and len(ids) == len(read)
            return op(table, read if same else ids)

        return patched.with_op("embed", override, layers)

    return Change(
        "token_ids", _ids_text(own, read), ("input_ids",), make,
        {"positions": at.tolist(), "recorded": own[at].tolist(), "read": read[at].tolist()},
        scoped=False,
    )  # fmt: skip


def usual_token_type_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes to another row of the token type table for all tokens, and to no row.

    Nothing for models without the table.
    """
    weight = patched.weights.get_role(None, "token_types.weight")
    if weight is None:
        return
    table = np.asarray(weight.numpy(), np.float32)
    for row in range(1, min(len(table), 8)):
        yield Change(
            "token_type_ids",
            f"every token has type {row}; the model says 0",
            ("token_types.weight",),
            replace_weights({"token_types.weight": np.roll(table, -row, 0)}),
            {"token_type": row},
            scoped=False,
        )
    yield Change(
        "token_type_ids", "no row of the token types is added", ("token_types.weight",),
        replace_weights({"token_types.weight": 0 * table}), {"token_type": None}, scoped=False,
    )  # fmt: skip


def try_token_types(case: Mismatch) -> Iterator[Change]:
    """Yield changes of the token types, at points up to the first layer.

    All tokens have another type, or some of them: those whose rows differ, those from the first
    row that differs on, or those after a token that is in the text twice, as separators are.
    """
    weight = case.patched.weights.get_role(None, "token_types.weight")
    if case.layer > 0 or weight is None:
        return
    yield from usual_token_type_mistakes(case.patched)
    table = np.asarray(weight.numpy(), np.float32)
    ids = np.asarray(case.patched.ids)
    if case.view.mine.shape[case.view.axis] != len(ids):
        return
    differs = case.distances_by_row(case.view) > case.view.tolerance
    first = int(np.argmax(differs))
    numbers, counts = np.unique(ids, return_counts=True)
    after = 1 + np.flatnonzero(np.isin(ids, numbers[counts > 1]))
    starts = [first, *(int(at) for at in after[:MOST_STARTS])]
    masks = [differs, *(np.arange(len(ids)) >= start for start in starts)]
    some = {mask.tobytes(): mask for mask in masks if mask.any() and not mask.all()}
    for row in range(1, min(len(table), 8)):
        for mask in some.values():
            yield _token_types_change(table, np.where(mask, row, 0))


def _token_types_change(table: Array, types: Array) -> Change:
    """Return the change that tokens have these types, int [tokens], where the model says 0.

    `table` [types, hidden] is the model's table of types.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model that adds each token's own row of the table; `layers` is not used."""

        def override(op: Any, at: Any, x: Any, added: Any) -> Any:
            """Return the sum; of the embedding and the first row of types, with each token's."""
            of_types = at.point in IN_EMBEDDING and np.ndim(added) == 1 and len(x) == len(types)
            if of_types and np.array_equal(np.asarray(added), table[0].astype(added.dtype)):
                return op(x, table[types].astype(added.dtype))
            return op(x, added)

        return patched.with_op("add", override, layers)

    row = int(types.max())
    where = number_ranges(np.flatnonzero(types).tolist(), 4)
    return Change(
        "token_type_ids", f"the tokens at positions {where} have type {row}; the model says 0",
        ("token_types.weight",), make, {"token_type": row, "at": where}, scoped=False,
    )  # fmt: skip


def find_dropout(case: Mismatch) -> Iterator[Change]:
    """Yield the change that applies the trace's dropout in the reference, if dropout was on.

    It was on if a fraction p of the values is zero and the others are 1 / (1 - p) times as large.
    The factor is found on even rows and judged on odd ones.
    """
    call = next((call for call in reversed(case.view.calls) if call.op not in MOVES), None)
    if call is None or not case.gives_point_value(call):
        return
    theirs, ours = (
        np.asarray(x, np.float64) for x in (case.recorded_result(call), case.array(call.result))
    )
    rest: Array = np.zeros(())
    # Of a residual sum, dropout is on what was added.
    if call.op == "add" and case.array(call.args[1]).ndim == ours.ndim:
        summands = _parallel_summands(case, call)
        if summands is not None:
            yield from _dropout_of_two(case, call, theirs, summands)
            return
        stream, added = (np.asarray(case.array(x), np.float64) for x in call.args)
        theirs, ours, rest = theirs - stream, added, stream
    size = float(np.abs(ours).max())
    # Find the share of zeros, and the factor of the other values on even rows.
    known = np.abs(ours) > 1e-2 * size
    ratio = np.divide(theirs, ours, out=np.zeros_like(ours), where=known)
    zero = np.abs(ratio) < 1e-3
    even = np.zeros(ours.shape, np.bool_)
    even[::2] = True
    share = float(zero[known].mean()) if known.any() else 0.0
    if not 0.005 < share < 0.95 or not (known & ~zero & even).any():
        return
    factor = float(np.median(ratio[known & ~zero & even]))
    # The factor must be that of the share, and fit the odd rows.
    p = 1 - 1 / factor if factor > 1 else 0.0
    odd = ratio[known & ~zero & ~even]
    if p <= 0 or not len(odd) or np.abs(odd / factor - 1).max() > 1e-2 or abs(p - share) > 0.1:
        return
    # Give the dropped values in the trial pass.
    drops = np.abs(theirs) < 0.5 * np.abs(factor * ours)
    yield _dropout_change(case, call, rest + np.where(drops, 0.0, factor * ours), share, factor)


def _dropout_change(
    case: Mismatch, call: OperationCall, made: Array, share: float, factor: float
) -> Change:
    """Return the change that one operation gives the values `made`, with dropout applied.

    It is the `call` that gives the differing point. `share` of the values are zero, the others
    `factor` times as large.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model in which the call gives the values `made`; `layers` is not used."""

        def override(op: Any, at: Any, *args: Any, **kwargs: Any) -> Any:
            """Return `made`, the values with dropout, for the call that gives the differing point.

            Other calls give their own result.
            """
            y = op(*args, **kwargs)
            here = at == call.location and y.shape == made.shape
            return np.asarray(made, y.dtype) if here else y

        return patched.with_op(call.op, override, layers)

    p = 1 - 1 / factor
    return Change(
        "dropout", f"dropout is on: {share:.3g} of the values are zero and all others are "
        f"{factor:.5g} times as large, as for p = {p:.3g}", (case.view.key,), make,
        {"p": float(f"{p:.3g}")}, scoped=False, general=True,
    )  # fmt: skip


def _parallel_summands(case: Mismatch, last: OperationCall) -> tuple[Array, Array, Array] | None:
    """Return (stream, first, second) where a point is the sum of a stream and two sublayers.

    `last` is the addition that gives the point. None where it is the only one since the values
    that the trace has.
    """
    before = [call for call in case.calls("add") if call is not last]
    if not before:
        return None
    for at, operand in enumerate(last.args):
        sum_before = case.array(operand)
        for call in before:
            made = case.array(call.result)
            if made.shape != sum_before.shape or not np.array_equal(made, sum_before):
                continue
            stream, first = (np.asarray(case.array(x), np.float64) for x in call.args)
            if stream.shape == first.shape == made.shape:
                return stream, first, np.asarray(case.array(last.args[1 - at]), np.float64)
    return None


def _dropout_of_two(
    case: Mismatch, call: OperationCall, theirs: Array, summands: tuple[Array, Array, Array]
) -> Iterator[Change]:
    """Yield the change that applies dropout to both sublayers that are added to one stream.

    `theirs` is the trace's sum of `summands`, (stream, first, second). Each value of the sublayers
    is zero or larger by one factor. It is found on even rows, where most values have both, and
    judged on odd ones.
    """
    stream, first, second = summands
    both = first + second
    known = np.abs(both) > 1e-2 * float(np.abs(both).max())
    added = theirs - stream
    ratio = np.divide(added, both, out=np.zeros_like(both), where=known)
    even = np.zeros(both.shape, np.bool_)
    even[::2] = True
    if not (known & even).any():
        return
    factor = float(np.median(ratio[known & even]))
    if factor <= 1:
        return
    # Each value is nearest to one of four sums, and must be that sum.
    sums = np.stack([both, first, second, np.zeros_like(both)]) * factor
    away = np.abs(sums - added)
    chosen = away.argmin(axis=0)
    made = np.take_along_axis(sums, chosen[None], axis=0)[0]
    dropped = [float(np.isin(chosen, which).mean()) for which in ((2, 3), (1, 3))]
    p, share = 1 - 1 / factor, sum(dropped) / 2
    odd = ~even
    close = np.abs(made - added)[odd] <= 1e-2 * np.abs(both)[odd].mean()
    if not close.size or not close.all() or min(dropped) < 0.005 or abs(p - share) > 0.1:
        return
    yield _dropout_change(case, call, stream + made, share, factor)


PRINTED = 5e-5  # how far a factor of five digits is off, relative to it


def factor_change(name: str, value: float, configured: float) -> Change:
    """Return the change of the multiplier `name` from the `configured` value to `value`.

    A factor on the logits may also be a sampler's temperature: the sentence names both.
    """
    says = f"{name} is {value:.9g}; the model says {configured:.9g}"
    if name == "embedding_scale" and value == configured**2 != configured:
        says += ": applied twice"
    if name == "logit_scale" and value > 0 and configured and value != 1:
        says += f"; or {temperature_text(value / configured)}"
    return hyper_change("multiplier", says, **{name: value})


def temperature_text(factor: float) -> str:
    """Return the clause on a sampling temperature T that multiplies the logits by `factor`, 1/T."""
    return f"a temperature of {short_number(1 / factor, PRINTED):.6g} divided the logits"


def find_factor(case: Mismatch) -> Iterator[Change]:
    """Yield the change of the one factor at this point, solved from the trace.

    It is on the whole point, or on what is added to the residual stream.
    """
    name = FACTORS.get(case.view.point)
    scaled = case.call("scale")
    if scaled is not None and not case.gives_point_value(scaled):
        yield from _try_common_factors(case, scaled)
        return
    if name is None:
        return
    # Fit one factor to the point, or to what is added to the stream.
    configured = float(case.patched.hp[name])
    if case.view.point in ("mid", "out"):
        yield from _find_added_factor(case, name, configured)
        return
    if case.view.recorded is None or case.view.mine.shape != case.view.theirs.shape:
        return
    ours, theirs = case.recorded_rows
    if name == "embedding_scale" and case.patched.spec.block.position == "learned":
        return
    # Undo the softcap of the logits first.
    if name == "logit_scale" and case.patched.hp["final_softcap"] is not None:
        cap = float(case.patched.hp["final_softcap"])
        inside = np.abs(theirs) < 0.99 * cap
        ours, theirs = (cap * np.arctanh(x[inside] / cap) for x in (ours, theirs))
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    # The least-squares factor must explain all values.
    power = float(np.sum(ours * ours))
    if not power or ours.shape != theirs.shape:
        return
    found = float(np.sum(ours * theirs)) / power
    if found and rel_l2(ours * found, theirs) <= 20 * case.view.tolerance:
        none = factor_change(name, 1.0, configured)
        near = configured != 1 and abs(found * configured - 1) <= 20 * case.view.tolerance
        if near and case.trial(none) <= case.view.tolerance:
            yield none
            return
        yield from case.rounded_change(
            lambda v: factor_change(name, v, configured), found * configured
        )


def usual_embedding_factors(patched: PatchedModel) -> tuple[float, ...]:
    """Return the wrong factors that engines apply to the embedding.

    The model's factor is left out or applied twice, or sqrt(hidden size) is applied, alone or with
    it. () for models with learned positions: a factor there is on the tokens' rows alone.
    """
    if patched.spec.block.position == "learned":
        return ()
    configured, root = (float(patched.hp[name]) for name in ("embedding_scale", "hidden_size"))
    root = root**0.5
    found = (1.0, configured**2, root, configured * root)
    return tuple(value for value in dict.fromkeys(found) if value != configured)


def find_stream_size(case: Mismatch) -> Iterator[Change]:
    """Yield changes of a factor on the residual stream that enters the layer of this point.

    Norms hide the size of the stream, so that a wrong size shows first where something is added to
    the stream, as a wrong factor on what is added does. Later points tell the two apart.
    """
    if case.layer > 0:
        yield from _find_entering_size(case)
        return
    usual = usual_embedding_factors(case.patched)
    if case.layer < 0 or not usual:
        return
    configured = float(case.patched.hp["embedding_scale"])
    scaled = case.found.views.get("embd_scaled")
    recorded = scaled is not None and scaled.recorded is not None

    def make(value: float) -> Change:
        """Return the change of the embedding's factor to `value`.

        Where the trace recorded the embedding with another factor, the sentence says so and that
        point is dropped.
        """
        change = factor_change("embedding_scale", value, configured)
        if not recorded:
            return change
        says = f"{change.says}; it entered the first layer so, and not as recorded before it"
        return replace(change, says=says, drop=frozenset({"embd_scaled"}))

    stream = case.plain.get("embd_scaled", case.plain.get("embd"))
    yield from _fit_size(case, make, configured, usual, stream)


def _find_entering_size(case: Mismatch) -> Iterator[Change]:
    """Yield changes of a factor on the stream that enters a layer other than the first."""
    before = f"L{case.layer - 1}.out"
    sums = any(_sublayer_of(case, call) for call in case.calls("add"))
    if not sums and all(split_key(key)[0] != case.layer - 1 for key in case.view.after):
        return  # the point reads no stream
    entering = case.recorded.value_of(before)
    if entering is not None and entering.rows is not None:
        return

    def make(value: float) -> Change:
        """Return the change that this mismatch's layer reads the stream times `value`."""

        def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
            """Return the residual stream that enters the layer, times `value`.

            The stream is the trace's (`entering`) where it was recorded, else the model's `x`.
            """
            stream = x if entering is None else entering.values.reshape(x.shape)
            return np.asarray(value * stream, x.dtype)

        layers = frozenset({case.layer - 1})
        return Change(
            "multiplier",
            f"the stream in layer {case.layer} is {value:.9g} times what left layer "
            f"{case.layer - 1}",
            (before,),
            lambda patched, _: patched.with_tap("out", tap, layers),
            {"entering": value},
            scoped=False,
            earlier=True,
            drop=frozenset() if entering is None else frozenset({before}),
        )

    root = float(case.patched.hp["hidden_size"]) ** 0.5
    stream = None if entering is None else entering.values
    yield from _fit_size(case, make, 1.0, (root, 1 / root) if sums else (), stream)


def _fit_size(
    case: Mismatch,
    make: Callable[[float], Change],
    configured: float,
    usual: Sequence[float],
    stream: Array | None,
) -> Iterator[Change]:
    """Yield changes of the factor on the stream, `make(factor)`: a usual one, or a fitted one.

    `configured` is the model's factor, `stream` what enters the layer with it. Where the point, or
    the layer's first recorded sum, is linear in the stream, its values give the factor. Else the
    factor is found by trials, if there are `usual` ones to begin with: after a norm many factors
    fit.
    """
    # Solve the factor where the point, or the layer's first sum, is linear in the stream.
    sums = [case.found.views.get(f"L{case.layer}.{name}") for name in ("mid", "out")]
    first = next((view for view in sums if view is not None and view.recorded is not None), None)
    if first is not None and first.key != case.view.key and not first.flagged:
        return  # what is added there has the model's share
    product = None if case.call(*NORMS) else case.view.mine
    for view, added in ((case.view, product), (first, stream)):
        if view is None or added is None:
            continue
        ours, theirs = (x.astype(np.float64) for x in (view.mine, view.theirs))
        power = float(np.sum(np.square(added, dtype=np.float64)))
        if not power or not ours.shape == theirs.shape == added.shape:
            continue
        more = float(np.sum((theirs - ours) * added)) / power
        left = rel_l2(ours + more * added, theirs)
        if more != -1 and left <= view.tolerance:
            solved = (1 + more) * configured
            # Rounding of single values moves their mean factor by so much.
            off = 3 * left * exact_norm(theirs) / math.sqrt(power * added.size)
            near = max(PRINTED, off / abs(1 + more))
            known = [value for value in usual if abs(value / solved - 1) <= near]
            yield make(known[0] if known else short_number(solved, near))
            return
    if usual:
        yield from case.best_number(make, (*usual, *(configured * 2.0**k for k in POWERS)))


def _try_common_factors(case: Mismatch, call: OperationCall) -> Iterator[Change]:
    """Yield changes to usual factors, where the trace does not hold the scaled value itself.

    `call` is the call of the operation `scale`; the capture point where it is called says which
    factor it is.
    """
    name = (
        "embedding_scale"
        if call.location.point == "embd"
        else (
            "logit_scale"
            if call.location.point in ("final_norm", "logits_raw")
            else "residual_scale"
        )
    )
    configured = float(case.patched.hp[name])
    plain = factor_change(name, 1.0, configured)
    if case.trial(plain) <= case.view.tolerance:
        yield plain
        return
    tries = (configured * 2.0**k for k in POWERS)
    yield from case.best_number(lambda v: factor_change(name, v, configured), tries)


def _find_added_factor(case: Mismatch, name: str, configured: float) -> Iterator[Change]:
    """Yield the change to one factor on what is added to the residual stream.

    `name` is the hyperparameter, `configured` its value in the model.
    """
    call = case.call("add")
    if call is None or not case.gives_point_value(call) or case.patched.hp["parallel_residual"]:
        return
    stream, added = (case.array(x).astype(np.float64) for x in call.args)
    theirs = case.view.theirs - stream
    found = float(np.sum(theirs * added) / max(float(np.sum(added * added)), 1e-300))
    if found and rel_l2(added * found, theirs) <= 100 * case.view.tolerance:
        yield from case.rounded_change(
            lambda v: factor_change(name, v, configured), found * configured
        )


def try_residual_sums(case: Mismatch) -> Iterator[Change]:
    """Yield changes that leave out one summand of a sum before the point.

    Pre-norm models also get the change that attention and MLP read the same input.
    """
    adds = [call for call in case.calls("add") if not is_score_bias(call)]
    if case.layer < 0:
        return
    for says, keep in (
        ("what the sublayer computed replaces the stream instead of being added", 1),
        ("what the sublayer computed is not added to the stream", 0),
    ):
        # Leave out one summand of each sum in turn.
        for index, call in enumerate(adds):
            if case.array(call.args[1]).ndim < 2:
                continue  # a bias
            if call.location.point in IN_EMBEDDING:
                continue  # no sublayer's sum: positions
            if call.location.point.startswith(("per_layer", "altup")):
                continue  # no sublayer's sum: separate hypotheses (layer_sharing.py)
            if call.location.point in ROUTED:
                lost = "routed experts are" if keep else "shared expert is"
                yield Change(
                    "moe_routing",
                    f"the {lost} left out",
                    ("moe_out",),
                    keep_one_summand(call.location.point, keep, _sum_number(adds, index)),
                    {"left_out": lost},
                )
                continue
            yield Change(
                "residual",
                f"{says} (before {case.view.point})",
                ("residual",),
                keep_one_summand(call.location.point, keep, _sum_number(adds, index)),
                {"kept": "added" if keep else "stream"},
            )
    # Add in another way: a norm of the stream counted twice is one of half of what is added.
    for sublayer in filter(None, dict.fromkeys(_sublayer_of(case, call) for call in adds)):
        yield from sublayer_sum_changes(sublayer)
    # Give attention and MLP one input.
    if case.patched.spec.block.placement == "pre":
        yield parallel_change(case.patched)
        if not case.patched.hp["parallel_residual"]:
            yield shared_norm_input_change()


def sublayer_sum_changes(sublayer: str) -> Iterator[Change]:
    """Yield the changes to wrong sums of the stream and a sublayer's result.

    `sublayer` is attn or ffn.
    """
    for words, how in SUMS.items():
        says = words.format(HALVES[sublayer])
        yield Change(
            "residual", says, ("residual",), change_sublayer_sum(sublayer, how), {"sum": says}
        )


def try_left_out_layers(case: Mismatch) -> Iterator[Change]:
    """Yield the change that leaves out a layer, for the point after it."""
    if case.view.point == "out":
        yield Change(
            "residual",
            "the layer is left out: what leaves it is what entered it",
            ("residual",),
            lambda patched, layers: patched.with_tap("out", _layer_input, layers),
            {"kept": "stream"},
        )


def _layer_input(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
    """Return what entered the layer in place of its output `x`, to leave the layer out.

    `held` are the layer's earlier points by name. `x` is returned where the stream is not among
    them.
    """
    return held.get(STREAM, x)


# What a layer's own scale may be applied to by mistake, in words -> what leaves the layer, of the
# stream that enters, what the layer adds to it, what it adds last (0 if nothing), and the scale.
LAYER_SCALES: Mapping[str, Callable[[Any, Any, Any, Any], Any]] = {
    "multiplies what the layer adds, not the stream": lambda x, y, last, s: x + y * s,
    "multiplies the stream that enters, not what the layer adds": lambda x, y, last, s: x * s + y,
    "multiplies all but the layer's last summand": lambda x, y, last, s: (x + y - last) * s + last,
    "is left out": lambda x, y, last, s: x + y,
    "is applied twice": lambda x, y, last, s: (x + y) * s * s,
}


def try_layer_scales(case: Mismatch) -> Iterator[Change]:
    """Yield changes of what a layer's own scale multiplies, for the point after such a layer."""
    role = "layer_output_scale.weight"
    if case.view.point != "out" or case.patched.weights.get_role(case.layer, role) is None:
        return
    for says, how in LAYER_SCALES.items():
        yield Change(
            "multiplier", f"the layer's own scale {says}", (role,), _scale_layer(role, how),
            {"layer_scale": says},
        )  # fmt: skip


def _scale_layer(role: str, how: Callable[[Any, Any, Any, Any], Any]) -> Patch:
    """Return a patch that applies the scale `role` of a layer by `how`, a value of LAYER_SCALES."""

    def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return what leaves a layer, whose right value is `x`, with its scale applied by `how`.

        `x` where the layer has no scale, or one that is zero, or where the stream is not held.
        """
        weight, stream = patched.weights.get_role(layer, role), held.get(STREAM)
        scale = None if weight is None else np.asarray(weight.numpy(), np.float32)
        if scale is None or stream is None or not scale.all():
            return x
        last = np.asarray(held.get("per_layer_contrib", np.float32(0)))
        entered, made = np.asarray(stream), np.asarray(x)
        return np.asarray(how(entered, made / scale - entered, last, scale), made.dtype)

    return lambda patched, layers: patched.with_tap("out", tap, layers)


def sublayer_factor_change(patched: PatchedModel, sublayer: str, value: float) -> Change:
    """Return the change of residual_scale to `value` for one `sublayer` (attn or ffn).

    For a model without such a factor, 2 means that the result is added twice.
    """
    configured = float(patched.hp["residual_scale"])
    name = HALVES[sublayer]
    if (configured, value) == (1, 2):
        says = f"what {name} computed is added twice"
        return Change(
            "residual", says, ("residual",), _scale_sublayer(sublayer, value), {"sum": says}
        )
    return Change(
        "multiplier", f"what {name} computed is multiplied by {value:g}; the model says "
        f"{configured:g}", ("residual_scale",),
        _scale_sublayer(sublayer, value / configured), {"residual_scale": {name: value}},
    )  # fmt: skip


def usual_sublayer_factor_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes that leave out residual_scale on one sublayer; none if the model has none."""
    if float(patched.hp["residual_scale"]) != 1:
        for sublayer in POINTS_BEFORE_SUM:
            yield sublayer_factor_change(patched, sublayer, 1.0)


def _scale_sublayer(sublayer: str, factor: float) -> Patch:
    """Return a patch: what one `sublayer` (attn or ffn) adds to the stream is times `factor`."""

    def override(op: Any, at: Any, a: Any, b: Any) -> Any:
        """Return a + factor * b where `sublayer`'s result `b` is added to the stream.

        Elsewhere it returns a + b.
        """
        inside = at.point in POINTS_BEFORE_SUM[sublayer] and b.ndim > 1
        return op(a, b * b.dtype.type(factor)) if inside else op(a, b)

    return lambda patched, layers: patched.with_op("add", override, layers)


def find_sublayer_factor(case: Mismatch) -> Iterator[Change]:
    """Yield changes of the residual factor on one sublayer: usual ones, then a fitted one.

    It is solved on even rows where the point is the sum itself, and else by trials.
    """
    sums = {_sublayer_of(case, call): call for call in case.calls("add")}
    if case.layer < 0 or not any(sums):
        return
    yield from usual_sublayer_factor_mistakes(case.patched)
    configured = float(case.patched.hp["residual_scale"])
    for sublayer, call in sums.items():

        def make(value: float, sublayer: str = sublayer) -> Change:
            """Return the change of the factor on what `sublayer` adds to the stream to `value`."""
            return sublayer_factor_change(case.patched, sublayer, value)

        if not sublayer:
            continue
        if not case.gives_point_value(call):
            yield from case.best_number(make, (configured * 2.0**k for k in POWERS))
            continue
        stream, added = (case.array(x).astype(np.float64) for x in call.args)
        even = np.arange(len(added)) % 2 == 0  # the odd rows judge it
        theirs = (case.view.theirs.reshape(added.shape) - stream)[even]
        found = float(np.sum(theirs * added[even]) / max(float(np.sum(added[even] ** 2)), 1e-300))
        if found and rel_l2(added[even] * found, theirs) <= 100 * case.view.tolerance:
            yield from case.rounded_change(make, found * configured)


def _sublayer_of(case: Mismatch, call: OperationCall) -> str:
    """Return the sublayer (attn or ffn) that a call adds to the stream; "" for another sum."""
    points = (name for name, points in POINTS_BEFORE_SUM.items() if call.location.point in points)
    return next(points, "") if case.array(call.args[1]).ndim > 1 else ""


def parallel_change(patched: PatchedModel) -> Change:
    """Return the change that runs attention and MLP in parallel, or in sequence if they were."""
    other = not patched.hp["parallel_residual"]
    says = "the MLP reads the stream after attention instead of the layer's input"
    if other:
        says = "attention and MLP read one input and are added together"
    return hyper_change("residual", says, parallel_residual=other)


def shared_norm_input_change() -> Change:
    """Return the change to parallel attention and MLP whose two norms read the same stream."""
    return Change(
        "residual", "attention and MLP read one stream, each by its own norm, and are added "
        "together", ("residual", "parallel_residual"), share_norm_input, {"side_by_side": True},
    )  # fmt: skip


def _sum_number(adds: Any, index: int) -> int:
    """Return how many of the sums before `adds[index]` are at the same location of the pass."""
    return sum(call.location == adds[index].location for call in adds[:index])


def keep_one_summand(point: str, keep: int, turn: int) -> Patch:
    """Return a patch: a sum after `point` becomes one of its summands.

    `keep`: 0 for the stream, 1 for what is added to it. `turn` is the number of the sum, from 0,
    among sums at that location.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model that keeps one summand of a residual sum after `point` in `layers`."""
        count: dict[Any, int] = {}

        def override(op: Any, at: Any, a: Any, b: Any) -> Any:
            """Return one summand of the chosen sum: a, the stream, where `keep` is 0, else b.

            Chosen is sum number `turn`, from 0, after the capture point `point`; other sums are a
            + b.
            """
            if at.point != point or b.ndim < 2:
                return op(a, b)
            if count.get("at") != at:
                count.clear()
                count["at"], count["turn"] = at, 0
            here = count["turn"]
            count["turn"] += 1
            return (a, b)[keep] if here == turn else op(a, b)

        return patched.with_op("add", override, layers)

    return make


def try_logit_caps(case: Mismatch) -> Iterator[Change]:
    """Yield the changes to no softcap on the logits, and to the cap that the trace's show."""
    if case.view.point != "logits" or case.view.mine.shape != case.view.theirs.shape:
        return
    configured = case.patched.hp["final_softcap"]

    def cap_logits(value: float | None) -> Change:
        """Return the change of the softcap on the logits to `value`; None for no cap."""
        capped = "not capped" if value is None else f"capped at {value:g}"
        model = "caps none" if configured is None else f"says {configured:g}"
        says = f"the logits are {capped}; the model {model}"
        return hyper_change("softcap", says, final_softcap=value)

    # Undo the model's cap, and solve the trace's one.
    ours, theirs = (x.astype(np.float64).reshape(-1) for x in case.recorded_rows)
    if configured is not None:
        yield cap_logits(None)
        inside = np.abs(ours) < float(configured) * (1 - 1e-6)
        ours = np.where(
            inside, float(configured) * np.arctanh(np.where(inside, ours, 0) / configured), ours
        )
    found = solve_cap(ours, theirs)
    if found is not None:
        yield from case.rounded_change(cap_logits, found)


def see_one_factor(pair: PointPair) -> str:
    """Return that all values differ by one factor; "" if they do not."""
    return pair.factor_text


HYPOTHESES = (
    Hypothesis(
        "row_offset", find_embedding_rows, 20, "rows of a table, before what is computed from them"
    ),
    Hypothesis("residual", try_left_out_layers, 28, "no operation at all, before any number"),
    Hypothesis("multiplier", find_factor, 30, "one factor, before the numbers of an operation"),
    Hypothesis("multiplier", try_layer_scales, 31, "a stored factor, after one of all values"),
    Hypothesis("multiplier", find_stream_size, 32, "the stream, before a factor of what is added"),
    Hypothesis("residual", try_residual_sums, 370, "sums, once both terms are right"),
    Hypothesis("softcap", try_logit_caps, 430, "the logits, after all that gives them"),
    Hypothesis(
        "token_ids", find_embedding_rows, 24, "rows of other ids, after rows that all moved alike"
    ),
    Hypothesis("token_type_ids", try_token_types, 27, "one row of a table, before a factor"),
    Hypothesis("multiplier", find_sublayer_factor, 35, "a factor of a part, after one of all"),
    Hypothesis("dropout", find_dropout, 440, "zeros at random, which any operation may have"),
    PointSignature("multiplier", see_one_factor, 1050, "one factor, before one of each row"),
)
