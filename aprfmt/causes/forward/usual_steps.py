"""Usual mistakes of engines in single steps: sums, norms, one side's rope, masks, caches."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.forward.convolution import convolutions
from aprfmt.causes.forward.delta_net import delta_nets
from aprfmt.causes.forward.indexer import choices
from aprfmt.causes.forward.lightning import changes as lightnings
from aprfmt.causes.forward.linear import dropped_bias
from aprfmt.causes.forward.mismatch import Change, Layers
from aprfmt.causes.forward.mlp import shaped_activations
from aprfmt.causes.forward.norm_order import passed_by
from aprfmt.causes.forward.per_layer import copies, inputs, sharing
from aprfmt.causes.forward.residual_stream import beside, unscaled_halves
from aprfmt.causes.forward.rope import other_elements
from aprfmt.causes.forward.routing_rules import rule_changes
from aprfmt.causes.forward.score_bias import score_biases
from aprfmt.causes.forward.single_steps import (
    FUNCTIONS,
    Sum,
    by_length,
    capped_after_mask,
    eps_outside,
    function_of,
    masked_with_zero,
    normed_sum,
    other_layers_cache,
    rotated,
    scaled_elsewhere,
    summed,
    values_rotated,
    window_in,
)
from aprfmt.causes.forward.state_space import scans
from aprfmt.causes.forward.usual_blocks import Usual, each
from aprfmt.inference.replay.patched_model import PatchedModel

SUMS: Mapping[str, Sum] = {
    "the stream is added to itself instead of what {} computed": lambda a, b: a + a,
    "what {} computed is added to itself instead of the stream": lambda a, b: b + b,
    "what {} computed is added twice": lambda a, b: a + 2 * b,
    "what {} computed is taken away from the stream": lambda a, b: a - b,
    "the stream is counted twice where what {} computed is added": lambda a, b: 2 * a + b,
    "the stream is multiplied by what {} computed": lambda a, b: a * b,
}
HALVES: Mapping[str, str] = {"attn": "attention", "ffn": "the MLP"}


def _sums(patched: PatchedModel) -> Iterator[Usual]:
    for words, how in SUMS.items():
        for half, name in HALVES.items():
            yield Usual(Change("residual", words.format(name), ("residual",), summed(half, how),
                               {"sum": words.format(name)}))  # fmt: skip
    if patched.spec.block.placement == "pre" and not patched.hp["parallel_residual"]:
        yield Usual(beside())
    if patched.spec.block.placement != "pre":
        for halves in (("attn", "ffn"), ("attn",), ("ffn",)):
            said = " and ".join(HALVES[half] for half in halves)
            yield Usual(Change(
                "residual", f"the norm behind {said} is applied to the sum with the stream",
                ("residual",), normed_sum(halves), {"norm_of_sum": list(halves)},
            ))  # fmt: skip
    scale = float(patched.hp["residual_scale"])
    if scale != 1:
        yield from each(unscaled_halves(patched))
        for whole, what in ((False, "the stream"), (True, "the sum")):
            yield Usual(Change(
                "multiplier", f"residual_scale multiplies {what}, not what a sublayer computed",
                ("residual_scale",), scaled_elsewhere(scale, whole), {"residual_scale": what},
            ))  # fmt: skip


def _norms(patched: PatchedModel) -> Iterator[Usual]:
    yield Usual(Change("norm_eps", "the norms add eps to the root, not below it", ("norm_eps",),
                       eps_outside, {"eps_outside": True}))  # fmt: skip
    if patched.spec.block.norm == "rms":
        yield Usual(Change("norm_kind", "the norms divide by a row's length, not by the root of "
                           "its mean square", ("norm",), by_length, {"mean": False}))  # fmt: skip
    if patched.spec.block.attention == "mla":
        for point, role, what in (("q_a", "attn_q_a_norm", "queries"),
                                  ("k_pe", "attn_kv_a_norm", "keys and values")):  # fmt: skip
            yield Usual(Change(
                "norm_skipped", f"the norm of the latent {what} is left out", (role,),
                passed_by((point,)), {"after": [point]},
            ))  # fmt: skip
    elif patched.hp["qk_norm"]:
        for point, what in (("v", "q"), ("q_norm", "k")):
            yield Usual(Change("qk_norm", f"{what} is not normalised", ("qk_norm",),
                               passed_by((point,)), {"qk_norm": what}))  # fmt: skip


def _ropes(patched: PatchedModel) -> Iterator[Usual]:
    if patched.spec.block.position != "rope" or not any(patched.hp["rope_layers"]):
        return
    for says, keys, queries in (
        ("keys are not rotated", 0, 1), ("queries are not rotated", 1, 0),
        ("keys are rotated twice", 2, 1), ("queries are rotated twice", 1, 2),
        ("queries and keys are rotated twice", 2, 2),
    ):  # fmt: skip
        yield Usual(Change("rope_layers", says, ("rope_layers",), rotated(keys, queries),
                           {"keys": keys, "queries": queries}))  # fmt: skip
    yield from each(other_elements(patched))
    if patched.spec.block.attention != "mla":
        yield Usual(Change("rope_layers", "values are rotated as the keys", ("rope_layers",),
                           values_rotated, {"values": 1}))  # fmt: skip


def _masks(patched: PatchedModel) -> Iterator[Usual]:
    cap = patched.hp["attn_softcap"]
    if cap is not None:
        yield Usual(Change(
            "softcap", f"scores are capped at {float(cap):g} after the mask was added: hidden keys "
            f"count with -{float(cap):g}", ("attn_softcap", "mask"),
            capped_after_mask(float(cap)), {"capped": "after the mask"},
        ))  # fmt: skip
    yield Usual(Change("mask", "hidden keys count with a score of zero", ("mask",),
                       masked_with_zero, {"hidden": 0}))  # fmt: skip


def _caches(patched: PatchedModel) -> Iterator[Usual]:
    for back, what in ((1, "the layer before"), (0, "the first layer")):
        if patched.n_layers > 1:
            yield Usual(Change(
                "kv_cache", f"attention reads keys and values of {what}", ("kv_cache",),
                other_layers_cache(back), {"layers_back": back}, earlier=True,
            ))  # fmt: skip


def _activations(patched: PatchedModel) -> Iterator[Usual]:
    told = str(patched.hp["activation"])
    for name in FUNCTIONS:
        says = "is left out" if name == "left out" else f"is {name}"
        yield Usual(Change("activation", f"the activation {says}; the model says {told}",
                           ("activation",), function_of(name), {"activation": name}))  # fmt: skip
    yield from each(shaped_activations(patched))


def single_layers(patched: PatchedModel) -> Iterator[Usual]:
    """Yield changes that are met in single layers: another window there, a bias left out."""
    hp = patched.hp
    told, own = hp["sliding_window"], [bool(x) for x in hp["window_layers"]]
    for layer in range(patched.n_layers if told is not None else 0):
        here = frozenset({layer})
        for size in (
            (int(told) + 1, int(told) - 1, len(patched.ids)) if own[layer] else (int(told),)
        ):
            reach = "all earlier tokens" if size == len(patched.ids) else f"{size} tokens"
            model = f"{told}" if own[layer] else "all"
            yield Usual(Change(
                "sliding_window", f"attention reaches {reach}; the model says {model}",
                ("sliding_window",), window_in(size), {"sliding_window": size},
            ), here)  # fmt: skip
    for key in patched.weights:
        where = split_key(key)[0]
        if key.endswith(".bias") and where is not None:
            yield Usual(dropped_bias(patched, key), frozenset({where}))


# --- products that are stored as one -------------------------------------------------------------

PAIRS = (("ffn_gate", "ffn_up"), ("ffn_gate_exps", "ffn_up_exps"))


def _splits(patched: PatchedModel) -> Iterator[Usual]:
    """Yield gate and up taken from their joined rows in another way."""
    for first, second in PAIRS:
        keys = [key for key in patched.stored if key.split(".")[-2] in (first, second)]
        if not keys:
            continue
        for says, mix in (
            ("in halves where they alternate row by row", _alternating_as_halves),
            ("row by row where they stand in halves", _halves_as_alternating),
        ):
            yield Usual(Change(
                "fused_order", f"{first} and {second} are taken from their joined rows {says}",
                tuple(keys), _split(first, second, mix), {"rows": says},
            ))  # fmt: skip
    keys = [key for key in patched.stored if key.split(".")[-2] in PAIRS[1]]
    if keys:
        yield Usual(Change("swapped_tensors", "gate and up of the experts are exchanged",
                           tuple(keys), _split(*PAIRS[1], lambda a, b: (b, a))))  # fmt: skip


def _alternating_as_halves(gate: Any, up: Any) -> tuple[Any, Any]:
    """Join [..., rows, n] alternating, then take the halves."""
    axis = gate.ndim - 2
    joined = np.stack([gate, up], axis + 1).reshape(
        *gate.shape[:axis], 2 * gate.shape[axis], *gate.shape[axis + 1 :]
    )
    first, second = np.split(joined, 2, axis)
    return first, second


def _halves_as_alternating(gate: Any, up: Any) -> tuple[Any, Any]:
    """Join [..., rows, n] one behind the other, then take every second row."""
    axis = gate.ndim - 2
    joined = np.concatenate([gate, up], axis)
    return (np.take(joined, range(0, joined.shape[axis], 2), axis),
            np.take(joined, range(1, joined.shape[axis], 2), axis))  # fmt: skip


def _split(
    first: str, second: str, mix: Callable[[Any, Any], tuple[Any, Any]]
) -> Callable[[PatchedModel, Layers], PatchedModel]:
    """Return a maker: weights and biases of two products are taken from their joined rows."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
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


def _rules(patched: PatchedModel) -> Iterator[Usual]:
    return each(rule_changes(patched) if any(patched.hp["moe_layers"]) else ())


def _convolutions(patched: PatchedModel) -> Iterator[Usual]:
    return each(convolutions(patched))


def _shared(patched: PatchedModel) -> Iterator[Usual]:
    for changes in (sharing, inputs, copies, choices):
        yield from each(changes(patched))


def _delta_nets(patched: PatchedModel) -> Iterator[Usual]:
    yield from each(delta_nets(patched))
    yield from each(scans(patched))
    yield from each(lightnings(patched))


def _score_biases(patched: PatchedModel) -> Iterator[Usual]:
    return each(score_biases(patched))


STEPS: tuple[Callable[[PatchedModel], Iterator[Usual]], ...] = (
    _sums, _norms, _ropes, _masks, _caches, _activations, _rules, _splits,
    _convolutions, _shared, _delta_nets, _score_biases,
)  # fmt: skip
