"""Usual mistakes of engines about norms, the residual stream, factors, biases and experts."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes.forward.experts import routed_scale_change, usual_expert_mistakes
from aprfmt.causes.forward.mismatch import Change, Layers, Patch, hyper_change
from aprfmt.causes.forward.moe import usual_routing_rules, without_choice_correction
from aprfmt.causes.forward.norm import (
    eps_change,
    head_weight_changes,
    norm_kind_change,
    norm_offset_changes,
    norm_offset_changes_by_place,
    norm_places,
    usual_shared_norms,
)
from aprfmt.causes.forward.norm_changes import (
    add_to_normed,
    divide_layer_norm_by,
    norm_after_rope,
    norm_heads_jointly,
    skip_norms,
)
from aprfmt.causes.forward.product import scale_weights_change, zero_weights_change
from aprfmt.causes.forward.product_inputs import usual_input_mistakes
from aprfmt.causes.forward.rank_shares import usual_share_mistakes
from aprfmt.causes.forward.residual_stream import (
    factor_change,
    keep_one_summand,
    parallel_change,
    usual_embedding_factors,
    usual_token_type_mistakes,
)
from aprfmt.causes.forward.rounding import (
    cut_to_type,
    round_keys_and_values,
    round_on_scales,
    round_operations,
    round_rope_table,
    round_to_blocks,
    round_to_type,
)
from aprfmt.causes.forward.shards import usual_shard_sum_mistakes, usual_shard_table_mistakes
from aprfmt.causes.forward.weights import tied_head_change
from aprfmt.inference.replay.patched_model import PatchedModel

EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, 1e-3)


@dataclass(frozen=True)
class UsualMistake:
    """A change that engines make by mistake, and the layers it applies to (None: all or some)."""

    change: Change
    layers: Layers = None


def hyper_mistake(cause: str, says: str, **values: Any) -> UsualMistake:
    """Return the usual mistake of running with hyperparameters `values`.

    `says` is the sentence about it.
    """
    return UsualMistake(hyper_change(cause, says, **values))


def with_layers(changes: Iterable[Change], layers: Layers = None) -> Iterator[UsualMistake]:
    """Return an iterator of the changes as UsualMistakes of `layers` (None: all)."""
    return (UsualMistake(change, layers) for change in changes)


# --- norms ---------------------------------------------------------------------------------------


def _eps_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of norms with another epsilon."""
    for eps in EPS:
        if eps != float(patched.hp["norm_eps"]):
            yield UsualMistake(eps_change(patched, eps))


def _norm_offset_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of norm weights plus or minus 1, in all norms or those of one place."""
    yield from with_layers(norm_offset_changes(patched))
    yield from with_layers(norm_offset_changes_by_place(patched))


def _norm_kind_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of RMS norms in place of layer norms and the reverse.

    They are tried in all norms, then in those before attention, before the MLP, and so on. For
    layer norms there are two other divisors too.
    """
    yield UsualMistake(norm_kind_change(patched))
    if patched.spec.block.norm == "layer":
        for whole, what in (
            (True, "the root mean square of a row, its mean included"),
            (False, "the deviation of n - 1 values"),
        ):
            yield UsualMistake(
                Change(
                    "norm_kind",
                    f"the norms divide by {what}",
                    ("norm",),
                    divide_layer_norm_by(whole),
                    {"divide_by": what},
                )
            )
    for points in norm_places(patched):
        yield UsualMistake(norm_kind_change(patched, points))


def _skipped_norm_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of leaving a norm out: before attention, before the MLP, and so on."""
    block = patched.spec.block
    rows: list[tuple[str, tuple[str, ...], str]] = [
        ("the norm before the head is left out", ("out",), "output_norm"),
        ("the norm before attention is left out", ("in",), "attn_norm"),
        ("the norm before the MLP is left out", ("mid",), "ffn_norm"),
    ]
    if block.placement != "pre":
        rows = [
            ("the norms after attention and after the MLP are left out",
             ("attn_out", "ffn_out", "moe_out"), "post_attention_norm"),
            ("the norm after attention is left out", ("attn_out",), "post_attention_norm"),
            ("the norm after the MLP is left out", ("ffn_out", "moe_out"), "post_ffw_norm"),
            *rows,
        ]  # fmt: skip
    for says, points, role in rows:
        yield UsualMistake(
            Change("norm_skipped", says, (role,), skip_norms(points), {"after": points})
        )


def _query_key_norm_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of q and k norms: left out, after rope, or over other axes.

    Nothing for models without such norms, and for MLA.
    """
    if not patched.hp["qk_norm"] or patched.spec.block.attention == "mla":
        return
    where = ("qk_norm",)
    yield UsualMistake(
        Change(
            "qk_norm",
            "q and k are not normalised",
            where,
            skip_norms(("v", "q_norm")),
            {"qk_norm": False},
        )
    )
    yield UsualMistake(
        Change(
            "qk_norm",
            "q and k are normalised after rope instead of before",
            where,
            norm_after_rope,
            {"after_rope": True},
        )
    )
    if patched.spec.block.qk_norm == "head_layer":
        yield from with_layers(head_weight_changes())
    wide = patched.spec.block.qk_norm == "width"
    says = "each head" if wide else "all heads together"
    yield UsualMistake(
        Change(
            "qk_norm",
            f"q and k are normalised over {says}",
            where,
            norm_heads_jointly(not wide),
            {"whole_width": not wide},
        )
    )


# --- the stream ----------------------------------------------------------------------------------


def _residual_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of adding a sublayer's result: in parallel, to the norm, or not at all."""
    # Parallel sublayers, and sums with the norm's result.
    yield from with_layers(usual_shared_norms(patched))
    yield from with_layers(usual_input_mistakes(patched))
    if patched.spec.block.placement == "pre":
        yield UsualMistake(parallel_change(patched))
        for what, sublayers in (
            ("the norm's result", ("attn", "ffn")),
            ("before attention the norm's result", ("attn",)),
            ("before the MLP the norm's result", ("ffn",)),
        ):
            yield UsualMistake(
                Change(
                    "residual",
                    f"{what} instead of its input is added to what a sublayer computed",
                    ("residual",),
                    add_to_normed(sublayers),
                    {"kept": "normed"},
                )
            )
    # Sums that keep one summand only.
    for point, what in (
        ("attn_out", "attention"),
        ("ffn_out", "the MLP"),
        ("moe_out", "the MLP"),
        ("attn_contrib", "attention"),
        ("ffn_contrib", "the MLP"),
    ):
        if not any(key.endswith(f".{point}") for key in patched.points):
            continue
        for keep, says in (
            (1, "replaces the stream instead of being added"),
            (0, "is not added to the stream"),
        ):
            yield UsualMistake(
                Change(
                    "residual",
                    f"what {what} computed {says}",
                    ("residual",),
                    keep_one_summand(point, keep, 0),
                    {"kept": "added" if keep else "stream"},
                )
            )


def _bf16_embedding_factor(patched: PatchedModel) -> float:
    """Return the embedding's factor rounded to bfloat16, which engines in 16 bits use."""
    return float(round_to_type(patched.hp["embedding_scale"], "bfloat16"))


def _factor_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of factors on embedding, stream and logits: left out or another."""
    embedding = usual_embedding_factors(patched)
    for name, values in (
        ("embedding_scale", (*embedding, _bf16_embedding_factor(patched))),
        ("residual_scale", (1.0,)),
        ("logit_scale", (1.0,)),
    ):
        configured = float(patched.hp[name])
        for value in values:
            if abs(value - configured) > 1e-6 * abs(configured):
                if name == "embedding_scale" and patched.spec.block.position == "learned":
                    continue
                yield UsualMistake(factor_change(name, value, configured))
        if configured not in (0.0, 1.0):
            yield UsualMistake(factor_change(name, 1 / configured, configured))


# --- weights -------------------------------------------------------------------------------------

BIASES: Mapping[str, tuple[str, ...]] = {
    "no bias of q, k and v": ("attn_q", "attn_k", "attn_v"),
    "no bias of q": ("attn_q",), "no bias of k": ("attn_k",), "no bias of v": ("attn_v",),
    "no bias of attention's output": ("attn_output",),
    "no bias of attention": ("attn_q", "attn_k", "attn_v", "attn_output"),
    "no bias of the MLP": ("ffn_gate", "ffn_up", "ffn_down"),
    "no bias of the MLP's output": ("ffn_down",),
    "no bias of a norm": ("attn_norm", "ffn_norm", "output_norm"),
    "no bias of the head": ("output",),
    "no bias of the router": ("ffn_gate_inp",),
    "no bias of the experts": ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
}  # fmt: skip
# Biases added after sums over devices: each device that adds them adds them once more.
SUMMED = ("attn_output", "ffn_down", "ssm_out", "ffn_down_shexp")
RANKS = (2.0, 4.0, 8.0)


def _bias_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of biases: left out, added twice, or added once by each device."""
    stored = [key for key in patched.weights if key.endswith(".bias")]
    seen: dict[tuple[str, ...], None] = {}  # in the order of the table
    # Leave out the biases of each row of the table, then all.
    for says, roles in BIASES.items():
        keys = tuple(key for key in stored if key.split(".")[-2] in roles)
        if not keys or keys in seen:
            continue
        seen[keys] = None
        yield UsualMistake(zero_weights_change("missing_bias", f"{says} is added", keys, patched))
    if stored and tuple(stored) not in seen:
        yield UsualMistake(
            zero_weights_change("missing_bias", "no bias is added", tuple(stored), patched)
        )
    # Add them twice, or once for each of several devices.
    for keys in seen:
        what = " and ".join(dict.fromkeys(key.split(".")[-2] for key in keys))
        says = f"the bias of {what} is added twice"
        yield UsualMistake(scale_weights_change("repeated_bias", says, keys, patched, 2.0))
    summed = tuple(key for key in stored if key.split(".")[-2] in SUMMED)
    for times in RANKS if summed else ():
        says = f"the biases after sums over devices are added {times:g} times"
        yield UsualMistake(scale_weights_change("repeated_bias", says, summed, patched, times))


def _weight_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of exchanged weights: embedding as head, gate and up, keys and values."""
    yield from with_layers(tied_head_change(patched))
    stored = patched.stored
    for first, second in (("ffn_gate", "ffn_up"), ("attn_k", "attn_v")):
        pairs = [
            (key, key.replace(first, second))
            for key in stored
            if key.split(".")[-2:] == [first, "weight"]
        ]
        pairs = [(a, b) for a, b in pairs if b in stored and stored[a].shape == stored[b].shape]
        if pairs:
            yield UsualMistake(
                Change(
                    "swapped_tensors",
                    f"{first} and {second} are exchanged",
                    tuple(key for pair in pairs for key in pair),
                    _exchange_weights(pairs),
                )
            )


def _exchange_weights(pairs: list[tuple[str, str]]) -> Patch:
    """Return a patch: the weights of each pair of tensor keys, both of one layer, are exchanged."""

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model in which the weights of each of `pairs` are exchanged, in `layers`."""
        arrays: dict[str, Any] = {}
        for a, b in pairs:
            if layers is None or split_key(a)[0] in layers:
                arrays |= {a: patched.stored[b].numpy(), b: patched.stored[a].numpy()}
        return patched.with_weights(arrays)

    return make


# --- experts -------------------------------------------------------------------------------------


def _routing_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of choosing and weighting experts; none for models without experts."""
    if not any(patched.hp["moe_layers"]):
        return
    for says, values in usual_routing_rules(patched.hp):
        yield hyper_mistake("moe_routing", says, **values)
    configured = float(patched.hp["routed_scale"])
    for scale in (1.0, configured**2) if configured != 1 else ():
        yield UsualMistake(routed_scale_change(patched, scale))
    yield from with_layers(without_choice_correction(patched))
    yield from with_layers(usual_expert_mistakes(patched))
    shared = tuple(key for key in patched.weights if key.endswith(".ffn_down_shexp.weight"))
    if shared:
        yield UsualMistake(
            zero_weights_change("moe_routing", "the shared expert is left out", shared, patched)
        )


ROUNDED: Mapping[str, tuple[str, ...]] = {
    "rope": ("rope",), "the softmax": ("probs",), "scores": ("scores",),
    "norms": ("rms_norm", "layer_norm"), "the activation": ("activate",),
    "matrix products": ("linear",), "the decay": ("decay",),
}  # fmt: skip

# All operations with floating-point results, as a device without a rounding unit computes them.
EVERY = (
    "embed", "linear", "router", "add", "mul", "scale", "softcap", "activate", "sigmoid",
    "swiglu_oai", "xielu", "rms_norm", "layer_norm", "gated_norm", "rope", "scores", "probs", "mix",
    "add_weighted", "convolve",
)  # fmt: skip


BOTH = ("scores", "mix")
CACHED = "keys and values, as a cache holds them, are"
# What a cache holds in 16 or 8 bits -> the operations that read it.
IN_SHORT: Mapping[str, tuple[str, ...]] = {
    CACHED: BOTH,
    "keys alone, as a cache holds them, are": ("scores",),
    "values alone, as a cache holds them, are": ("mix",),
}
# What shares a scale of a cache in 8 bits -> the axes of [tokens, heads, d] along which it holds.
SCALES: Mapping[str, tuple[int, ...] | None] = {
    "all": None,
    "each head": (0, 2),
    "each token": (1, 2),
    "each head of each token": (2,),
}


def rounding_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of rounding results to 16 bits, or the cache to 8 or 4 bits."""
    for dtype in ("bfloat16", "float16"):
        rows: dict[str, Any] = {
            f"results of {name} are": (ops, round_operations(ops, dtype))
            for name, ops in ROUNDED.items()
        }
        rows |= {held: (("kv_cache",), _round_cache(dtype, ops)) for held, ops in IN_SHORT.items()}
        if any(patched.hp["rope_layers"]):
            rows["cos and sin of rope are"] = (("rope",), round_rope_table(dtype))
        for says, (ops, make) in rows.items():
            yield UsualMistake(_rounding_change(says, dtype, ops, make))
    if patched.hp["n_heads"]:
        yield from map(UsualMistake, _cache_changes())


def cut_changes() -> Iterator[Change]:
    """Yield the changes that cut results to 16 bits: toward zero, where they are to be rounded.

    They are of the whole pass, since an engine cuts everywhere.
    """
    for dtype in ("bfloat16", "float16"):
        for name, ops in {**ROUNDED, "sums": ("add",), "all operations": EVERY}.items():
            says = f"results of {name} are cut to {dtype}, not rounded to nearest"
            make = round_operations(ops, dtype, cut_to_type)
            values = {"dtype": dtype, "rounds": "toward zero"}
            yield Change("rounding", says, ops, make, values, scoped=False)


def _cache_changes() -> Iterator[Change]:
    """Yield the changes that store cached keys and values in 8 or 4 bits, with scales or not."""
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        for says, ops in IN_SHORT.items():
            yield _rounding_change(says, dtype, ("kv_cache",), _round_cache(dtype, ops))
    for codes in ("float8_e4m3fn", "int8"):
        for shares, axes in SCALES.items():
            make = round_keys_and_values(partial(round_on_scales, codes=codes, axes=axes), BOTH)
            change = _rounding_change(CACHED, codes, ("kv_cache",), make)
            says = f"{change.says}, on a scale of {shares}"
            yield replace(change, says=says, values={"dtype": codes, "scale": shares})
    for encoding in ("Q8_0", "Q4_0"):
        make = round_keys_and_values(partial(round_to_blocks, encoding=encoding), BOTH)
        yield _rounding_change(CACHED, encoding, ("kv_cache",), make)


def _round_cache(dtype: str, ops: Collection[str] = BOTH) -> Patch:
    """Return a patch: `ops` read keys and values rounded to a shorter float type."""
    return round_keys_and_values(partial(round_to_type, dtype=dtype), ops)


def _rounding_change(says: str, dtype: str, ops: tuple[str, ...], make: Patch) -> Change:
    """Return the change, by patch `make`, that rounds to `dtype` what `says` names.

    `ops` are the operations it acts on.
    """
    return Change("rounding", f"{says} rounded to {dtype}", ops, make, {"dtype": dtype})


def _embedding_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of other token types, and of an embedding without positions."""
    yield from with_layers(usual_token_type_mistakes(patched))
    table = patched.weights.get_role(None, "position_embd.weight")
    if table is not None:
        yield UsualMistake(
            zero_weights_change(
                "positions",
                "no position is added to the embedding",
                ("position_embd.weight",),
                patched,
            )
        )


def _shard_mistakes(patched: PatchedModel) -> Iterator[UsualMistake]:
    """Yield the mistakes of sums over devices, of their shares, and of tables with one's rows."""
    yield from with_layers(usual_shard_sum_mistakes(patched))
    yield from with_layers(usual_share_mistakes(patched))
    yield from with_layers(usual_shard_table_mistakes(patched))


BLOCKS: tuple[Callable[[PatchedModel], Iterator[UsualMistake]], ...] = (
    _eps_mistakes,
    _bias_mistakes,
    _factor_mistakes,
    _weight_mistakes,
    _residual_mistakes,
    _norm_offset_mistakes,
    _query_key_norm_mistakes,
    _skipped_norm_mistakes,
    _norm_kind_mistakes,
    _routing_mistakes,
    _shard_mistakes,
    _embedding_mistakes,
)
