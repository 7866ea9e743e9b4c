"""Usual mistakes of engines in single operations: sums, norms, rope, masks, caches."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.forward.compressed_attention import (
    usual_compression_mistakes,
    usual_connection_mistakes,
)
from aprfmt.causes.forward.convolution import usual_convolution_mistakes
from aprfmt.causes.forward.delta_net import usual_delta_net_mistakes
from aprfmt.causes.forward.indexer import usual_key_choice_mistakes
from aprfmt.causes.forward.late_bias import late_bias_changes
from aprfmt.causes.forward.layer_sharing import (
    shared_key_changes,
    usual_layer_input_mistakes,
    usual_stream_copy_mistakes,
)
from aprfmt.causes.forward.lightning_attention import usual_lightning_mistakes as lightnings
from aprfmt.causes.forward.linear import dropped_bias_change
from aprfmt.causes.forward.mismatch import Change, Layers, Patch
from aprfmt.causes.forward.mlp import usual_activation_numbers
from aprfmt.causes.forward.norm import eps_outside_change
from aprfmt.causes.forward.norm_changes import skip_norms
from aprfmt.causes.forward.operation_patches import (
    FUNCTIONS,
    cap_after_mask,
    divide_by_length,
    limit_window,
    mask_with_zero,
    norm_over_rotated_keys,
    norm_sum,
    rotate_times,
    rotate_values,
    scale_sum_or_stream,
    use_activation_function,
    use_earlier_layer_cache,
)
from aprfmt.causes.forward.residual_stream import (
    HALVES,
    shared_norm_input_change,
    sublayer_factor_change,
    sublayer_sum_changes,
    usual_sublayer_factor_mistakes,
)
from aprfmt.causes.forward.rope import rotated_element_changes, rotation_count_changes
from aprfmt.causes.forward.routing_rules import routing_rule_changes
from aprfmt.causes.forward.score_bias import usual_score_bias_mistakes
from aprfmt.causes.forward.state_space import usual_scan_mistakes
from aprfmt.causes.forward.usual_blocks import UsualMistake, with_layers
from aprfmt.inference.replay.patched_model import PatchedModel


def _sum_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of adding a sublayer's result to the residual stream in another way."""
    for sublayer in HALVES:
        yield from map(UsualMistake, sublayer_sum_changes(sublayer))
    if patched.spec.block.placement == "pre" and not patched.hp["parallel_residual"]:
        yield UsualMistake(shared_norm_input_change())
    if patched.spec.block.placement != "pre":
        for sublayers in (("attn", "ffn"), ("attn",), ("ffn",)):
            said = " and ".join(HALVES[sublayer] for sublayer in sublayers)
            yield UsualMistake(Change(
                "residual", f"the norm after {said} is applied to the sum with the stream",
                ("residual",), norm_sum(sublayers), {"norm_of_sum": list(sublayers)},
            ))  # fmt: skip
    scale = float(patched.hp["residual_scale"])
    # Norms undo a factor of the stream: half of one sublayer is twice the other, and an embedding.
    for factor in (2.0, 0.5):
        for sublayer in HALVES:
            yield UsualMistake(sublayer_factor_change(patched, sublayer, factor * scale))
    if scale != 1:
        yield from with_layers(usual_sublayer_factor_mistakes(patched))
        for whole, what in ((False, "the stream"), (True, "the sum")):
            yield UsualMistake(Change(
                "multiplier", f"residual_scale multiplies {what}, not what a sublayer computed",
                ("residual_scale",), scale_sum_or_stream(scale, whole), {"residual_scale": what},
            ))  # fmt: skip


def _norm_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of norms: another divisor, epsilon elsewhere, or one left out."""
    yield UsualMistake(eps_outside_change())
    if patched.spec.block.norm == "rms":
        yield UsualMistake(
            Change(
                "norm_kind",
                "the norms divide by a row's length, not by the root of its mean square",
                ("norm",),
                divide_by_length,
                {"divide_by": "the length of a row"},
            )
        )
    if patched.spec.block.attention == "mla":
        for point, role, what in (("q_a", "attn_q_a_norm", "queries"),
                                  ("k_pe", "attn_kv_a_norm", "keys and values")):  # fmt: skip
            yield UsualMistake(Change(
                "norm_skipped", f"the norm of the latent {what} is left out", (role,),
                skip_norms((point,)), {"after": [point]},
            ))  # fmt: skip
        says = "the norm of the latent keys and values is taken over their whole row, with k_pe"
        yield UsualMistake(
            Change("norm_kind", says, ("attn_kv_a_norm",), norm_over_rotated_keys, {"over": "kv_a"})
        )
    elif patched.hp["qk_norm"]:
        for point, what in (("v", "q"), ("q_norm", "k")):
            yield UsualMistake(
                Change(
                    "qk_norm",
                    f"{what} is not normalised",
                    ("qk_norm",),
                    skip_norms((point,)),
                    {"qk_norm": what},
                )
            )


def _rope_side_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of rotating q or k alone or twice, other elements, or the values.

    Nothing for models without rope.
    """
    if patched.spec.block.position != "rope" or not any(patched.hp["rope_layers"]):
        return
    yield from with_layers(rotation_count_changes("keys", "queries"))
    yield UsualMistake(Change("rope_layers", "queries and keys are rotated twice", ("rope_layers",),
                       rotate_times(2, 2), {"keys": 2, "queries": 2}))  # fmt: skip
    yield from with_layers(rotated_element_changes(patched))
    if patched.spec.block.attention == "mla":
        says = "keys have their rotated part first, queries have it last"
        yield UsualMistake(
            Change("fused_order", says, ("k_pe",), _rotated_keys_first, {"first": "rotated"})
        )
    if patched.spec.block.attention == "gqa":
        yield UsualMistake(Change("rope_layers", "values are rotated as the keys", ("rope_layers",),
                           rotate_values, {"values": 1}))  # fmt: skip


def _rotated_keys_first(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the MLA model whose keys alone have the rotated elements first, in `layers`."""
    nope = int(patched.hp["qk_nope_head_dim"])

    def override(op: Any, at: Any, q: Any, k: Any, heads: Any) -> Any:
        """Return the scores of `q` with keys `k` whose rotated elements come first."""
        return op(q, np.concatenate([k[..., nope:], k[..., :nope]], axis=-1), heads)

    return patched.with_op("scores", override, layers)


def _mask_step_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of a mask applied before the softcap, and of masked keys with score 0."""
    cap = patched.hp["attn_softcap"]
    if cap is not None:
        yield UsualMistake(Change(
            "softcap", f"scores are capped at {float(cap):g} after the mask was added: hidden keys "
            f"count with -{float(cap):g}", ("attn_softcap", "mask"),
            cap_after_mask(float(cap)), {"capped": "after the mask"},
        ))  # fmt: skip
    yield UsualMistake(Change("mask", "hidden keys count with a score of zero", ("mask",),
                       mask_with_zero, {"hidden": 0}))  # fmt: skip


def _cache_step_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of attention that reads an earlier layer's keys and values."""
    for back, what in ((1, "the layer before"), (0, "the first layer")):
        if patched.n_layers > 1:
            yield UsualMistake(Change(
                "kv_cache", f"attention reads keys and values of {what}", ("kv_cache",),
                use_earlier_layer_cache(back), {"layers_back": back}, earlier=True,
            ))  # fmt: skip


def _activation_step_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of another activation function, and of clamps and offsets on it."""
    configured = str(patched.hp["activation"])
    for name in FUNCTIONS:
        says = "is left out" if name == "left out" else f"is {name}"
        yield UsualMistake(
            Change(
                "activation",
                f"the activation {says}; the model says {configured}",
                ("activation",),
                use_activation_function(name),
                {"activation": name},
            )
        )
    yield from with_layers(usual_activation_numbers(patched))


def single_layer_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield mistakes that occur in single layers: another window there, or a bias left out."""
    hp = patched.hp
    configured, own = hp["sliding_window"], [bool(x) for x in hp["window_layers"]]
    for layer in range(patched.n_layers if configured is not None else 0):
        here = frozenset({layer})
        for size in (
            (int(configured) + 1, int(configured) - 1, len(patched.ids))
            if own[layer]
            else (int(configured),)
        ):
            reach = "all earlier tokens" if size == len(patched.ids) else f"{size} tokens"
            model = f"{configured}" if own[layer] else "all"
            yield UsualMistake(Change(
                "sliding_window", f"attention reaches {reach}; the model says {model}",
                ("sliding_window",), limit_window(size), {"sliding_window": size},
            ), here)  # fmt: skip
    for key in patched.weights:
        where = split_key(key)[0]
        if key.endswith(".bias") and where is not None:
            yield UsualMistake(dropped_bias_change(patched, key), frozenset({where}))


# --- products that are stored as one -------------------------------------------------------------

PAIRS = (("ffn_gate", "ffn_up"), ("ffn_gate_exps", "ffn_up_exps"))


def _joined_split_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of splitting joined gate and up weights in another order of rows.

    Exchanged gate and up of experts are one more.
    """
    for first, second in PAIRS:
        keys = [key for key in patched.stored if key.split(".")[-2] in (first, second)]
        if not keys:
            continue
        for says, mix in (
            ("in halves where they alternate row by row", _split_alternating_as_halves),
            ("row by row where they stand in halves", _split_halves_as_alternating),
        ):
            yield UsualMistake(Change(
                "fused_order", f"{first} and {second} are taken from their joined rows {says}",
                tuple(keys), _split_joined(first, second, mix), {"rows": says},
            ))  # fmt: skip
    keys = [key for key in patched.stored if key.split(".")[-2] in PAIRS[1]]
    if keys:
        yield UsualMistake(Change("swapped_tensors", "gate and up of the experts are exchanged",
                           tuple(keys), _split_joined(*PAIRS[1], lambda a, b: (b, a))))  # fmt: skip


def _split_alternating_as_halves(gate: Any, up: Any) -> tuple[Any, Any]:
    """Return (gate, up), each [..., rows, n], as halves of joined rows that alternate."""
    axis = gate.ndim - 2
    joined = np.stack([gate, up], axis + 1).reshape(
        *gate.shape[:axis], 2 * gate.shape[axis], *gate.shape[axis + 1 :]
    )
    first, second = np.split(joined, 2, axis)
    return first, second


def _split_halves_as_alternating(gate: Any, up: Any) -> tuple[Any, Any]:
    """Return (gate, up), each [..., rows, n], as every second row of joined halves."""
    axis = gate.ndim - 2
    joined = np.concatenate([gate, up], axis)
    return (np.take(joined, range(0, joined.shape[axis], 2), axis),
            np.take(joined, range(1, joined.shape[axis], 2), axis))  # fmt: skip


def _split_joined(first: str, second: str, mix: Callable[[Any, Any], tuple[Any, Any]]) -> Patch:
    """Return a patch: the weights and biases of two products become mix(first, second).

    `first` and `second` are roles without their ending, such as `ffn_gate` and `ffn_up`.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose products `first` and `second` in `layers` have rows of each other.

        Their weights and biases become what the mistake `mix` makes of both.
        """
        arrays: dict[str, Any] = {}
        for key in patched.stored:
            layer, role = split_key(key)
            name, part = role.rsplit(".", 1)
            other = key.replace(f"{first}.", f"{second}.")
            inside = layers is None or layer in layers
            if name != first or not inside or other not in patched.stored:
                continue
            pair = [np.asarray(patched.stored[k].numpy()) for k in (key, other)]
            flat = part == "bias"
            mixed = mix(*(x[..., None] if flat else x for x in pair))
            arrays[key], arrays[other] = (x[..., 0] if flat else x for x in mixed)
        return patched.with_weights(arrays)

    return make


def _routing_rule_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Return an iterator of the mistakes of routing by another rule; empty without experts."""
    return with_layers(routing_rule_changes(patched) if any(patched.hp["moe_layers"]) else ())


def _convolution_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Return an iterator of the usual mistakes of short convolutions."""
    return with_layers(usual_convolution_mistakes(patched))


def _sharing_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of shared keys, per-layer inputs, stream copies and key choices."""
    for changes in (
        shared_key_changes,
        usual_layer_input_mistakes,
        usual_stream_copy_mistakes,
        usual_key_choice_mistakes,
        usual_compression_mistakes,
        usual_connection_mistakes,
    ):
        yield from with_layers(changes(patched))


def _recurrence_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the usual mistakes of delta nets, state space scans and lightning attention."""
    yield from with_layers(usual_delta_net_mistakes(patched))
    yield from with_layers(usual_scan_mistakes(patched))
    yield from with_layers(lightnings(patched))


def _late_bias_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Return an iterator of the mistakes of adding biases of queries and keys after rope."""
    return with_layers(late_bias_changes(patched))


def _score_bias_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Return an iterator of the usual mistakes of a bias on attention scores."""
    return with_layers(usual_score_bias_mistakes(patched))


STEPS: tuple[Callable[[PatchedModel], Iterator[UsualMistake]], ...] = (
    _sum_mistakes,
    _norm_mistakes,
    _rope_side_mistakes,
    _late_bias_mistakes,
    _mask_step_mistakes,
    _cache_step_mistakes,
    _activation_step_mistakes,
    _routing_rule_mistakes,
    _joined_split_mistakes,
    _convolution_mistakes,
    _sharing_mistakes,
    _recurrence_mistakes,
    _score_bias_mistakes,
)
