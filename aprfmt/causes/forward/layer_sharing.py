"""Hypotheses about what layers share: keys and values, an embedding, copies of the stream."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Hypothesis, Layers, Mismatch, Patch
from aprfmt.causes.row import Cause
from aprfmt.inference.layer_heads import head_dim_of_layer, key_value_layer, kv_head_count
from aprfmt.inference.replay.patched_model import STREAM, PatchedModel

CAUSE_ROWS = (
    Cause(
        "kv_sharing", "forward", "bug",
        "A layer without keys and values of its own uses those of another layer than the model "
        "says: the last one of its kind that has some.",
        "The layer's queries are equal, and what its attention gives is not.",
        "Attention over the named layer's keys and values is equal.",
        keys=("own_kv_layers", "value_is_key"),
    ),
    Cause(
        "per_layer_input", "forward", "bug",
        "The embedding that every layer has a part of is left out, not scaled, or another layer's "
        "part is taken.",
        "The stream differs after a layer's MLP, which is equal.",
        "Passes with the named part of it left out or exchanged are equal.",
    ),
    Cause(
        "altup", "forward", "bug",
        "The copies of the stream are predicted, corrected or added in another way.",
        "The stream that a layer reads or leaves differs, and what it computes between is equal.",
        "Passes with the named step left out or changed are equal.",
        keys=("altup_scaled",),
    ),
)  # fmt: skip

# Called with a point's value, what the layer's earlier points had, and the model.
Altered = Callable[[Array, Mapping[str, Any], PatchedModel], Array]


def _hidden_size(patched: PatchedModel) -> int:
    """Return the width of the residual stream."""
    return int(patched.hp["hidden_size"])


def _shift_layer_inputs(x: Array, held: Mapping[str, Any], patched: PatchedModel) -> Array:
    """Return the per-layer inputs rolled, so that each layer gets those of the next layer.

    `x` are the inputs [tokens, layers * size]. `held` is not used.
    """
    return np.roll(x, -int(patched.hp["per_layer_size"]), axis=-1)


def _input_copy(x: Array, held: Mapping[str, Any], patched: PatchedModel) -> Array:
    """Return the stream that enters the layer in place of the predicted copies `x`.

    `held` are the layer's earlier points by name; `x` is returned if they lack the stream.
    `patched` is not used.
    """
    entering = held.get(STREAM)
    return x if entering is None or entering.shape != x.shape else np.array(entering)


def _correct_first_copy(x: Array, held: Mapping[str, Any], patched: PatchedModel) -> Array:
    """Return the predicted copies with only the first one corrected.

    `x` are the corrected copies, `held` the layer's earlier points by name.
    """
    moved = np.array(held["altup_predicted"])
    moved[:, : _hidden_size(patched)] = x[:, : _hidden_size(patched)]
    return moved


def _predicted_copies(x: Array, held: Mapping[str, Any], patched: PatchedModel) -> Array:
    """Return the predicted copies without their correction; `x` and `patched` are not used.

    `held` are the layer's earlier points by name.
    """
    return np.array(held["altup_predicted"])


def _scale_by(factor: float) -> Altered:
    """Return a function (values, earlier points, model) -> values times `factor`."""
    return lambda x, held, patched: x * x.dtype.type(factor)


# Point -> what is said, what is named, and what the pass goes on with.
INPUTS: Mapping[str, tuple[tuple[str, Altered], ...]] = {
    "per_layer_embd": (
        ("the tokens' rows of the layers' embedding are left out", _scale_by(0)),
        ("the tokens' rows of the layers' embedding are not scaled", lambda x, held, patched: (
            x / x.dtype.type(float(patched.hp["per_layer_size"]) ** 0.5))),
    ),
    "per_layer_proj": (("the projection for the layers' inputs is left out", _scale_by(0)),),
    "per_layer": (
        ("every layer takes the next one's input", _shift_layer_inputs),
        ("the layers' inputs are not divided by the root of 2", _scale_by(2.0**0.5)),
    ),
    "per_layer_contrib": (("the layers' inputs are dropped", _scale_by(0)),),
}  # fmt: skip
COPIES: Mapping[str, tuple[tuple[str, Altered], ...]] = {
    "altup_predicted": (("the copies are not predicted", _input_copy),),
    "altup_corrected": (
        ("the copies are not corrected", _predicted_copies),
        ("the first copy alone is corrected", _correct_first_copy),
    ),
    "laurel": (("the short cut of low rank is left out", lambda x, held, patched: (
        np.array(held["attn_norm"]))),),
    "mid": (("the sum with the short cut is not divided by the root of 2", _scale_by(2.0**0.5)),),
}  # fmt: skip


def _alter_point(point: str, altered: Altered) -> Patch:
    """Return a patch that replaces values of `point` by altered(values, earlier points, model)."""

    def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return what the mistake `altered` makes of the value `x` of the patched capture point.

        `held` has the layer's earlier points by name.
        """
        return altered(x, held, patched)

    return lambda patched, layers: patched.with_tap(
        point, tap, None if point.startswith("per_layer_e") else layers
    )


def _transpose_coefficients(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model that mixes the copies by the transposed coefficients."""

    def mixed(op: Any, at: Any, x: Any, coefs: Any) -> Any:
        """Return the stream's copies `x` mixed by the transposed n x n coefficients."""
        n = round(coefs.shape[-1] ** 0.5)
        return op(x, coefs.reshape(-1, n, n).swapaxes(1, 2).reshape(coefs.shape))

    return patched.with_op("mix_copies", mixed, layers)


def _without_tanh(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model without the tanh on its router of copies."""
    return patched.with_op("tanh", lambda op, at, x: x, layers)


def _without_gate_cut(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose sparse gate keeps all values, without gaussian top-k."""
    return patched.with_op("gaussian_topk", lambda op, at, x, factor: x, layers)


def _sample_variance(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose gaussian top-k divides the variance by n - 1, not n."""

    def cut(op: Any, at: Any, x: Any, factor: float) -> Any:
        """Return the gaussian top-k of `x`, its threshold from a variance over n - 1, not n."""
        count = x.shape[-1]
        return op(x, factor * (count / (count - 1)) ** 0.5)

    return patched.with_op("gaussian_topk", cut, layers)


def usual_layer_input_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes with per-layer embeddings; none without them."""
    if patched.hp["per_layer_size"]:
        yield from _changes_of_rows("per_layer_input", "per_layer_size", INPUTS)


def usual_stream_copy_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes with AltUp's stream copies and with sparse gates."""
    if patched.spec.block.streams == "altup":
        yield from _changes_of_rows("altup", "altup_streams", COPIES)
        yield Change(
            "altup",
            "the copies are mixed by the transposed coefficients",
            ("altup_streams",),
            _transpose_coefficients,
            {"altup": "transposed"},
        )
        yield Change(
            "altup",
            "the router's result is not bent by tanh",
            ("altup_streams",),
            _without_tanh,
            {"altup": "no tanh"},
        )
    if any(patched.hp["ffn_sparsity"]):
        for says, make in (
            ("the gate is not cut", _without_gate_cut),
            ("the gate is cut by a variance over one less than its values", _sample_variance),
        ):
            yield Change("activation", says, ("ffn_sparsity",), make, {"ffn_sparsity": says})


def _changes_of_rows(
    cause: str, name: str, rows: Mapping[str, tuple[tuple[str, Altered], ...]]
) -> Iterator[Change]:
    """Yield the change of each row of a table {capture point: ((sentence, new values), ...)}.

    `name` is the hyperparameter that the changes name; "new values" is a function of the point's
    values.
    """
    for point, changes in rows.items():
        for says, altered in changes:
            yield Change(cause, says, (name,), _alter_point(point, altered), {cause: says})


def shared_key_changes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes that let a layer without own keys and values read those of another layer."""
    hp, n = patched.hp, patched.n_layers
    # Layers without keys of their own, and those that have some.
    shared = [layer for layer in range(n) if not hp["own_kv_layers"][layer]]
    owners = [layer for layer in range(n) if hp["own_kv_layers"][layer]]
    for layer in shared:
        configured = key_value_layer(hp, layer)
        for other in owners:
            alike = kv_head_count(hp, other) == kv_head_count(hp, layer)
            if (
                other != configured
                and alike
                and head_dim_of_layer(hp, other) == head_dim_of_layer(hp, layer)
            ):
                yield Change(
                    "kv_sharing",
                    f"L{layer} reads the keys and values of L{other}; by the model "
                    f"those of L{configured}",
                    (f"L{layer}.own_kv_layers",),
                    _read_keys_of(layer, other),
                    {"layer": other},
                    scoped=False,
                    earlier=True,
                )


def _read_keys_of(reader: int, owner: int) -> Patch:
    """Return a patch function: layer `reader` uses the keys and values of layer `owner`."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model in which layer `reader` reads the keys and values of layer `owner`.

        `layers` is not used.
        """
        held: dict[str, Any] = {}

        def read(what: str, layer: int, own: Any) -> Any:
            """Return the keys ("k") or values ("v") that a layer reads, in place of its `own`.

            Layer `reader` gets those of layer `owner`, which `held` keeps; other layers their
            own.
            """
            if layer == owner:
                held[what] = own
            return held.get(what, own) if layer == reader else own

        return patched.with_keys_and_values(read)

    return make


def try_shared_keys(case: Mismatch) -> Iterator[Change]:
    """Yield changes to other layers' keys and values, for a layer that has none of its own."""
    if case.layer < 0 or case.patched.hp["own_kv_layers"][case.layer]:
        return
    mine = f"L{case.layer}.own_kv_layers"
    yield from (change for change in shared_key_changes(case.patched) if change.where == (mine,))


def try_layer_inputs(case: Mismatch) -> Iterator[Change]:
    """Yield changes of per-layer inputs: dropped, moved or not scaled."""
    if case.view.point.startswith("per_layer") or case.view.point in ("out", "ffn_stream"):
        yield from usual_layer_input_mistakes(case.patched)


def try_stream_copies(case: Mismatch) -> Iterator[Change]:
    """Yield changes of AltUp's predictions, corrections and sums, and of sparse gates."""
    yield from usual_stream_copy_mistakes(case.patched)


HYPOTHESES = (
    Hypothesis("kv_sharing", try_shared_keys, 335, "other layers' keys, before other tokens'"),
    Hypothesis(
        "per_layer_input", try_layer_inputs, 366, "known steps of the stream, before any sum"
    ),
    Hypothesis("altup", try_stream_copies, 367, "known steps of its copies, before any sum"),
)
