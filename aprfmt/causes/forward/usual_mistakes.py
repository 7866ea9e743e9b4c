"""The table of usual mistakes of engines: changes with the values that occur in practice.

Hypotheses solve values from a trace that shows an operation's own input and output. Where it shows
neither (outputs of layers, or logits alone), each of these changes is tried on the whole pass
(search.py). Likelier ones come first.
"""

from collections.abc import Callable, Iterator
from itertools import zip_longest

import numpy as np

from aprfmt.causes.forward import softmax
from aprfmt.causes.forward.attention import (
    head_mapping_changes,
    open_window_change,
    score_scale_change,
    usual_masks,
)
from aprfmt.causes.forward.attention_operands import result_order_changes
from aprfmt.causes.forward.kv_cache import cache_change
from aprfmt.causes.forward.mismatch import Change, Layers
from aprfmt.causes.forward.mlp import activation_changes
from aprfmt.causes.forward.rope import (
    early_table_offsets,
    head_width_changes,
    other_bases,
    pairing_change,
    position_divisor_change,
    positions_change,
    reversed_rotation_change,
    rotated_count_change,
    scaling_value_changes,
    theta_change,
    theta_of_other_layers_change,
    usual_divisors,
    usual_positions,
    without_scaling_changes,
)
from aprfmt.causes.forward.rope_precision import rounded_angle_changes
from aprfmt.causes.forward.rotations import token_positions, without_rope
from aprfmt.causes.forward.scaled_scores import (
    rope_factor_scales,
    yarn_factor_scales,
    yarn_score_changes,
)
from aprfmt.causes.forward.usual_blocks import (
    BLOCKS,
    UsualMistake,
    hyper_mistake,
    rounding_mistakes,
    with_layers,
)
from aprfmt.causes.forward.usual_steps import STEPS
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.rope import RopeKind, rotation_of_layer


def layers_of_rope_kinds(patched: PatchedModel) -> dict[RopeKind, Layers]:
    """Return {rope kind: its layers}; layers are None if the only kind is in all layers."""
    found: dict[RopeKind, set[int]] = {}
    for layer in range(patched.n_layers):
        kind = rotation_of_layer(patched.hp, layer)
        if kind is not None and patched.spec.block.position == "rope":
            found.setdefault(kind, set()).add(layer)
    every = len(found) == 1 and len(next(iter(found.values()))) == patched.n_layers
    return {kind: None if every else frozenset(layers) for kind, layers in found.items()}


# --- rope ----------------------------------------------------------------------------------------


def _theta_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of another base of rope, for each kind of rope."""
    for kind, layers in layers_of_rope_kinds(patched).items():
        for theta in other_bases(kind):
            yield UsualMistake(theta_change(patched, kind, theta), layers)


def _scaling_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield mistakes of rope's scaling: none, other values of it, positions divided by a factor."""
    for kind, layers in layers_of_rope_kinds(patched).items():
        yield from with_layers(without_scaling_changes(patched, kind), layers)
        yield from with_layers(scaling_value_changes(patched, kind), layers)
        yield from with_layers(
            (
                position_divisor_change(patched, kind, factor)
                for factor in usual_divisors(patched, kind)
            ),
            layers,
        )


def _pairing_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of the other rope pairing, and of rotating backwards."""
    if layers_of_rope_kinds(patched):
        yield from with_layers(
            (pairing_change(str(patched.hp["rope_style"])), reversed_rotation_change())
        )


def _partial_rotary_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of rotating another number of elements, for kinds without scaling."""
    width = int(patched.hp["qk_rope_head_dim"] or patched.hp["head_dim"])
    configured = int(patched.hp["rope_dim"])
    for kind, layers in layers_of_rope_kinds(patched).items():
        if kind.scaled:
            continue  # the scaling's lists fit only the model's number of pairs
        for n in (width, width // 2, width // 4, 3 * width // 4):
            if n != configured and n > 0 and n % 2 == 0:
                yield UsualMistake(rotated_count_change(patched, kind, n), layers)
        for change in head_width_changes(patched, kind):
            yield UsualMistake(change, layers)


def _rotating_layer_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of layers that rotate as another kind does, not at all, or wrongly."""
    every = layers_of_rope_kinds(patched)
    # The other kind's frequencies.
    for kind, layers in every.items():
        for other in every:
            if other != kind:
                yield UsualMistake(theta_of_other_layers_change(patched, other), layers)
    # No rotation at all, or in all layers.
    if every:
        yield UsualMistake(
            Change(
                "rope_layers",
                "nothing is rotated",
                ("rope_layers",),
                without_rope,
                {"rotates": False},
            )
        )
        if not all(patched.hp["rope_layers"]):
            yield hyper_mistake(
                "rope_layers",
                "layers rotate that should not",
                rope_layers=(True,) * patched.n_layers,
            )


def _rounded_angle_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of rope's angles made in 16 bits, for each kind of rope.

    A module that is cast to the model's type has its frequencies in that type.
    """
    for kind, layers in layers_of_rope_kinds(patched).items():
        yield from with_layers(rounded_angle_changes(patched, kind), layers)


def _position_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of token positions: all zero, or shifted."""
    ours, rotated = token_positions(patched), patched.spec.block.position == "rope"
    for theirs in usual_positions(ours):
        yield UsualMistake(positions_change(ours, theirs, rotated=rotated))
    for change in early_table_offsets(patched):
        yield UsualMistake(change)


# --- attention -----------------------------------------------------------------------------------


def _score_scale_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of another factor on the scores; none for models without attention."""
    configured, d = float(patched.hp["attn_scale"]), int(patched.hp["head_dim"])
    width = int(patched.hp["hidden_size"])
    heads = int(patched.hp["n_heads"])
    if not (d and heads):
        return  # no attention
    usual = (d**-0.5, 1.0, 1 / d, (width / heads) ** -0.5, width**-0.5, configured * configured,
             configured * d**-0.5, configured**0.5, configured / 2, configured * 2,
             1 / configured)  # fmt: skip
    for value in dict.fromkeys(usual):
        if abs(value - configured) > 1e-6 * configured:
            yield UsualMistake(score_scale_change(patched, value))
    for layers in layers_of_rope_kinds(patched).values():
        first = 0 if layers is None else min(layers)
        yield from with_layers(rope_factor_scales(patched, first), layers)
    yield from with_layers(yarn_score_changes(patched), None)
    yield from with_layers(yarn_factor_scales(patched), None)
    if patched.hp["attn_scale_by_layer"]:
        yield hyper_mistake(
            "attention_scale",
            "scores are not divided by the layer's number",
            attn_scale_by_layer=False,
        )


def _cap_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of softcaps on scores and logits: left out, or another value."""
    for name, what in (("attn_softcap", "scores"), ("final_softcap", "logits")):
        configured = patched.hp[name]
        if configured is not None:
            yield hyper_mistake(
                "softcap", f"{what} are not capped; the model says {configured:g}", **{name: None}
            )
        for cap in (30.0, 50.0):
            if configured is not None and cap != configured:
                yield hyper_mistake(
                    "softcap",
                    f"{what} are capped at {cap:g}; the model says {configured:g}",
                    **{name: cap},
                )


def _window_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of sliding windows: left out, of another size, or in other layers.

    Nothing for models without windows.
    """
    hp = patched.hp
    configured, own = hp["sliding_window"], tuple(bool(x) for x in hp["window_layers"])
    if configured is None or not any(own):
        return
    # No window, or one of another size.
    says = f"; the model says {configured}"
    yield hyper_mistake(
        "sliding_window", f"attention reaches all earlier tokens{says}", sliding_window=None
    )
    for size in (
        int(configured) + 1,
        int(configured) - 1,
        int(configured) // 2,
        2 * int(configured),
    ):
        if size > 0:
            yield hyper_mistake(
                "sliding_window", f"attention reaches {size} tokens{says}", sliding_window=size
            )
    # The window in other layers.
    if not all(own):
        yield hyper_mistake(
            "sliding_window",
            "every layer has the window; the model says only some",
            window_layers=(True,) * len(own),
        )
        flipped = tuple(not x for x in own)
        yield hyper_mistake(
            "sliding_window",
            "the window is in the layers that have none, and only there",
            window_layers=flipped,
        )
        for shift in (1, -1):
            moved = own[shift:] + own[:shift]
            if moved not in (own, flipped):
                yield hyper_mistake(
                    "sliding_window",
                    "the layers with a window are counted from another layer",
                    window_layers=moved,
                )


def added_window_mistake(patched: PatchedModel, window: int) -> UsualMistake:
    """Return the mistake that limits every layer of a model without windows to `window` tokens."""
    return hyper_mistake(
        "sliding_window",
        f"attention reaches {window} tokens; the model says all",
        sliding_window=window,
        window_layers=(True,) * patched.n_layers,
    )


def _mask_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of no causal mask, of its diagonal off by one, and of open windows.

    An open window shows as many tokens after a query as before it.
    """
    yield from with_layers(usual_masks(len(patched.ids)))
    windowed = frozenset(np.flatnonzero(patched.hp["window_layers"]).tolist())
    opened = open_window_change(patched) if windowed else None
    if opened is not None:
        every = len(windowed) == patched.n_layers
        yield UsualMistake(opened, None if every else windowed)


def _softmax_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Return an iterator of the mistakes of softmaxes that sum over a wrong set of keys."""
    return with_layers(softmax.usual_softmax_mistakes(patched))


def _head_mapping_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of mapping query heads to other key heads, and of reshaped results."""
    yield from with_layers(
        head_mapping_changes(
            patched,
            lambda own, n_kv: [np.arange(len(own)) % n_kv, own[::-1].copy(), np.zeros_like(own)],
        )
    )
    yield from with_layers(result_order_changes(patched))


def _cache_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of attention that reads the keys or values one token off."""
    at = np.arange(len(patched.ids))
    for rows in (np.maximum(at - 1, 0), np.minimum(at + 1, len(at) - 1)):
        if not np.array_equal(rows, at):
            for keys, values in ((rows, rows), (rows, None), (None, rows)):
                yield UsualMistake(cache_change(keys, values))


# --- the MLP -------------------------------------------------------------------------------------


def _activation_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Return an iterator of the mistakes of using another activation function."""
    return with_layers(activation_changes(patched))


# Changes of one kind each, by the model's own numbers.
USUAL: tuple[Callable[[PatchedModel], Iterator[UsualMistake]], ...] = (
    _theta_mistakes,
    _scaling_mistakes,
    _pairing_mistakes,
    _activation_mistakes,
    _window_mistakes,
    _cap_mistakes,
    _score_scale_mistakes,
    *BLOCKS,
    _mask_mistakes,
    _head_mapping_mistakes,
    _partial_rotary_mistakes,
    _rotating_layer_mistakes,
    _softmax_mistakes,
    _position_mistakes,
    _cache_mistakes,
    *STEPS,
    rounding_mistakes,
    _rounded_angle_mistakes,
)
# What a model without heads (mamba) cannot have got wrong.
OF_ATTENTION = frozenset(
    {
        _score_scale_mistakes,
        _mask_mistakes,
        _head_mapping_mistakes,
        _partial_rotary_mistakes,
        _rotating_layer_mistakes,
        _softmax_mistakes,
        _cache_mistakes,
    }
)


def usual_mistakes(patched: PatchedModel) -> list[UsualMistake]:
    """Return the usual mistakes for a model: the first of every kind, then the second, and so on.

    The likeliest of a kind comes first. A large model allows few passes, so the first mistakes
    are of different kinds.
    """
    rows = [row for row in USUAL if patched.hp["n_heads"] or row not in OF_ATTENTION]
    columns = zip_longest(*(list(changes(patched)) for changes in rows))
    return [usual for column in columns for usual in column if usual is not None]


LISTS = ("window_layers", "rope_layers", "moe_layers", "ssm_layers")


def layer_groups_of(patched: PatchedModel, usual: UsualMistake) -> list[Layers]:
    """Return the sets of layers in which to try a mistake; None stands for all layers.

    A mistake with `layers` has just these. Others are tried in all layers, then in each kind of
    layer. Single layers are tried elsewhere.
    """
    if usual.layers is not None or not usual.change.scoped:
        return [usual.layers]
    lists = [name for name in LISTS if name in patched.hp]
    kinds: dict[tuple[object, ...], set[int]] = {}
    for layer in range(patched.n_layers):
        kinds.setdefault(tuple(patched.hp[name][layer] for name in lists), set()).add(layer)
    some = [frozenset(layers) for layers in kinds.values()] if len(kinds) > 1 else []
    return [None, *some]
