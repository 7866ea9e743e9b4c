"""The matrix product that gave a trace's value, and the weights that may have been used in it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aprfmt.arch.role_vocabulary import role_key, split_key
from aprfmt.causes.forward.mismatch import Array, Change, Layers, Mismatch, Patch
from aprfmt.inference.replay.patched_model import MOVES, PatchedModel
from aprfmt.measure.distances import rel_l2

NOTHING: Mapping[str, Any] = {}
MAX_VALUES = 1 << 26  # largest weight that is read for a hypothesis


@dataclass(frozen=True)
class Product:
    """The matrix product that gives the trace's value, with its recorded input and output rows.

    `ours` is the reference's output; `bias` was added to the product (None: no bias); `key` is the
    weight, "" if the trace also holds the product itself, so that only the bias can be wrong.
    """

    x: Array
    theirs: Array
    ours: Array
    bias: Array | None
    key: str
    role: str

    @property
    def output_without_bias(self) -> Array:
        """The trace's output [rows, columns] less the reference's bias."""
        return self.theirs if self.bias is None else self.theirs - self.bias

    def weight_change(
        self,
        case: Mismatch,
        cause: str,
        says: str,
        w: Array,
        values: Mapping[str, Any] = NOTHING,
        general: bool = False,
    ) -> Change:
        """Return the change that sets the product's weight to other values `w` [rows, columns].

        `values` are numbers to report. `general`: `w` was solved from the trace, so that it would
        fit any trace.
        """
        make = replace_weights({self.key: w.reshape(case.patched.weights[self.key].shape)})
        if self.key == "token_embd.weight":
            make = replace_head(w)
        return Change(cause, says, (self.key,), make, values, scoped=False, general=general)

    def explains_output(self, case: Mismatch, w: Array, slack: float = 10.0) -> bool:
        """Return whether the input times the weight `w` gives the trace's output.

        `slack` times the point's tolerance is the largest relative L2.
        """
        return rel_l2(self.x @ w.T, self.output_without_bias) <= slack * case.view.tolerance


def product_of(case: Mismatch) -> Product | None:
    """Return the matrix product that gives the differing point; None if no product does."""
    last = next((call for call in reversed(case.view.calls) if call.op not in MOVES), None)
    if (
        last is None
        or last.op not in ("linear", "router", "add")
        or not case.gives_point_value(last)
    ):
        return None
    # Both outputs as [rows, columns].
    theirs, rows = case.recorded_result(last), case.rows
    assert theirs is not None
    theirs, ours = theirs.reshape(len(theirs), -1), case.array(last.result)
    ours = ours.reshape(len(ours), -1)
    # The last operation is a bias; the product may be recorded or not.
    if last.op == "add":
        if case.array(last.args[1]).ndim != 1:
            return None
        inner = case.call("linear", "router")
        bias: Array | None = case.array(last.args[1])
        role = ROLES.get(case.view.point, "")
        if inner is None:
            layer = "" if case.layer < 0 else f"L{case.layer}."
            return Product(ours[rows], theirs[rows], ours[rows], bias, "", f"{layer}{role}")
    else:
        inner, bias = last, None if last.args[2] is None else case.array(last.args[2])
    # The product itself, with its input and weight.
    key = inner.args[1].key
    x = case.array(inner.args[0])[rows]
    return Product(x, theirs[rows], ours[rows], bias, key, key.removesuffix(".weight"))


ROLES = {"q": "attn_q", "k": "attn_k", "v": "attn_v"}


def weight_values(patched: PatchedModel, key: str) -> Array | None:
    """Return a weight's values [rows, columns], float32; None if more than MAX_VALUES."""
    weight = patched.stored[key]
    if weight.n_rows * weight.n_columns > MAX_VALUES:
        return None
    return np.asarray(weight.numpy(), np.float32).reshape(weight.n_rows, weight.n_columns)


def product_with_weight(case: Mismatch) -> tuple[Product, Array] | None:
    """Return (the matrix product that gives the differing point, the values of its weight).

    The values are [rows, columns], float32. None if no product gives the point, or if its weight is
    not known or has more than MAX_VALUES.
    """
    found = product_of(case)
    w = None if found is None or not found.key else weight_values(case.patched, found.key)
    return None if found is None or w is None else (found, w)


def weights_of_same_shape(patched: PatchedModel, key: str) -> list[str]:
    """Return the keys of other weights of the same shape.

    Those of the same layer come first, then those of the same role.
    """
    shape, layer = patched.weights[key].shape, key.partition(".")[0]
    role = key.partition(".")[2]
    others = [k for k in patched.weights if k != key and patched.weights[k].shape == shape]
    return sorted(others, key=lambda k: (not k.startswith(f"{layer}."), not k.endswith(role)))


def remember_product(role: str, held: dict[str, Any]) -> Callable[..., Any]:
    """Return an override of `linear` that stores the product with the weight `role` in `held`.

    `held` has it under the role, such as "attn_v.weight", until it is taken out.
    """

    def linear(op: Any, at: Any, x: Any, w: Any, *rest: Any, **kwargs: Any) -> Any:
        """Return the product of `x` and `w`, which is kept in `held` if `w` has the role `role`."""
        y = op(x, w, *rest, **kwargs)
        if w.key.partition("[")[0].endswith(f".{role}"):
            held[role] = y
        return y

    return linear


def replace_weights(arrays: Mapping[str, Array]) -> Patch:
    """Return a patch that replaces weights by arrays, {tensor key: array}.

    Called with layers, it replaces only weights of these layers.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model with `arrays` in place of its weights, those of `layers` if given."""
        if layers is None:
            return patched.with_weights(arrays)
        return patched.with_weights(
            {key: array for key, array in arrays.items() if split_key(key)[0] in layers}
        )

    return make


def replace_head(w: Array) -> Patch:
    """Return a patch that makes a tied head `w` [rows, columns]; the embedding stays as it is."""

    def override(op: Any, at: Any, x: Any, own: Any, *rest: Any, **kwargs: Any) -> Any:
        """Return the logits `x` @ the other head's transpose where a tied head reads the embedding.

        Other products are computed as usual.
        """
        if own.key.partition("[")[0] != "token_embd.weight":
            return op(x, own, *rest, **kwargs)
        bias = rest[0] if rest else None
        return (x @ w.T + (0 if bias is None else bias)).astype(x.dtype)

    return lambda patched, layers: patched.with_op("linear", override, None)


def _are_of_layers(keys: Iterable[str]) -> bool:
    """Return whether tensors lie in several layers, and none outside the layers."""
    layers = {split_key(key)[0] for key in keys}
    return len(layers) > 1 and None not in layers


def zero_weights_change(
    cause: str, says: str, keys: Sequence[str], patched: PatchedModel
) -> Change:
    """Return the change to zeros in place of the weights `keys`."""
    arrays = {key: np.zeros(patched.weights[key].shape, np.float32) for key in keys}
    return Change(cause, says, tuple(keys), replace_weights(arrays), scoped=_are_of_layers(keys))


def scale_weights_change(
    cause: str, says: str, keys: Sequence[str], patched: PatchedModel, factor: float
) -> Change:
    """Return the change that multiplies the weights `keys` by a factor."""
    arrays = {
        key: np.asarray(patched.stored[key].numpy(), np.float32) * np.float32(factor)
        for key in keys
    }
    return Change(
        cause,
        says,
        tuple(keys),
        replace_weights(arrays),
        {"times": factor},
        scoped=_are_of_layers(keys),
    )


def other_weight_changes(case: Mismatch, key: str, other: str) -> Iterator[Change]:
    """Yield changes to try in which a model reads the tensor `other` where `key` belongs.

    In the first the two are exchanged; for one role in two layers, all tensors of these layers. For
    two roles of one layer there is a second: in all layers the role of `key` reads the tensor of
    the other role, which keeps its own.
    """
    yield exchange_weights_change(case, key, other)
    stored = case.patched.stored
    (layer, role), (from_layer, other_role) = split_key(key), split_key(other)
    if layer is None or layer != from_layer or role == other_role:
        return
    layers = range(case.patched.n_layers)
    pairs = {role_key(at, role): role_key(at, other_role) for at in layers}
    arrays = {
        own: stored[there].numpy()
        for own, there in pairs.items()
        if own in stored and there in stored and stored[own].shape == stored[there].shape
    }
    yield Change(
        "copied_tensor",
        f"{other_role} is read in place of {role}, too",
        (role,),
        replace_weights(arrays),
        {"read": other_role},
    )


def exchange_weights_change(case: Mismatch, key: str, other: str) -> Change:
    """Return the change that uses the tensor `other` of the model in place of the tensor `key`.

    If both have one role in two layers, all tensors of the first layer become those of the other.
    Otherwise the two tensors are exchanged.
    """
    stored = case.patched.stored
    (layer, role), (from_layer, other_role) = split_key(key), split_key(other)
    if role == other_role and layer is not None and from_layer is not None:
        arrays = {}
        for own in stored:
            its_layer, its_role = split_key(own)
            there = role_key(from_layer, its_role)
            if its_layer == layer and there in stored:
                arrays[own] = stored[there].numpy()
        return Change(
            "layer_order",
            f"layer {layer} runs the tensors of layer {from_layer}",
            (key, other),
            replace_weights(arrays),
            {"layer": layer, "runs": from_layer},
            scoped=False,
        )
    arrays = {key: stored[other].numpy(), other: stored[key].numpy()}
    return Change(
        "swapped_tensors",
        f"{key} and {other} stand under each other's names",
        (key, other),
        replace_weights(arrays),
        scoped=False,
    )
