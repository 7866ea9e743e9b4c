"""Usual mistakes of engines about norms, the residual stream, factors, biases and experts."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aprfmt.causes.forward.experts import expert_mistakes
from aprfmt.causes.forward.mismatch import Change, Layers, hyper_change
from aprfmt.causes.forward.moe import routed_change, routing_tries, uncorrected
from aprfmt.causes.forward.norm import (
    eps_change,
    norm_name,
    norm_places,
    offsets,
    offsets_in_places,
)
from aprfmt.causes.forward.norm_order import (
    divided_otherwise,
    keys_and_values_rounded,
    normed_after_rope,
    normed_otherwise,
    of_normed,
    op_rounded,
    other_kind,
    passed_by,
    rounded_to,
    table_rounded,
)
from aprfmt.causes.forward.product import scaled_vectors, zeroed
from aprfmt.causes.forward.residual_stream import factor_change, kept, parallel_change, type_rows
from aprfmt.causes.forward.shards import shard_sums, shard_tables
from aprfmt.causes.forward.weights import tied
from aprfmt.inference.replay.patched_model import PatchedModel

EPS = (1e-5, 1e-6, 1e-8, 1e-12, 0.0, 1e-3)


@dataclass(frozen=True)
class Usual:
    """A change with the layers it belongs to (None: it may be in all or in some)."""

    change: Change
    layers: Layers = None


def hyper(cause: str, says: str, **values: Any) -> Usual:
    """Return the change to other hyperparameters."""
    return Usual(hyper_change(cause, says, **values))


def each(changes: Iterable[Change], layers: Layers = None) -> Iterator[Usual]:
    """Yield changes of the same layers."""
    return (Usual(change, layers) for change in changes)


# --- norms ---------------------------------------------------------------------------------------


def _eps(patched: PatchedModel) -> Iterator[Usual]:
    for eps in EPS:
        if eps != float(patched.hp["norm_eps"]):
            yield Usual(eps_change(patched, eps))


def _offsets(patched: PatchedModel) -> Iterator[Usual]:
    yield from each(offsets())
    yield from each(offsets_in_places(patched))


def _kinds(patched: PatchedModel) -> Iterator[Usual]:
    layer = patched.spec.block.norm == "layer"
    does = ("keep", "keeps") if layer else ("take away", "takes away")
    yield Usual(
        Change(
            "norm_kind",
            f"the norms {does[0]} the mean of a row",
            ("norm",),
            other_kind(),
            {"mean": not layer},
        )
    )
    if layer:
        for whole, what in (
            (True, "the root mean square of a row, its mean included"),
            (False, "the deviation of n - 1 values"),
        ):
            yield Usual(
                Change(
                    "norm_kind",
                    f"the norms divide by {what}",
                    ("norm",),
                    divided_otherwise(whole),
                    {"divide_by": what},
                )
            )
    for points in norm_places(patched):
        says = f"{norm_name(points)} {does[len(points) == 1]} the mean of a row"
        yield Usual(
            Change(
                "norm_kind",
                says,
                ("norm",),
                other_kind(points),
                {"mean": not layer, "behind": points},
            )
        )


def _skipped(patched: PatchedModel) -> Iterator[Usual]:
    """Yield norms that are left out: those after a sublayer, and the last one."""
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
        yield Usual(Change("norm_skipped", says, (role,), passed_by(points), {"after": points}))


def _qk_norms(patched: PatchedModel) -> Iterator[Usual]:
    if not patched.hp["qk_norm"] or patched.spec.block.attention == "mla":
        return
    where = ("qk_norm",)
    yield Usual(
        Change(
            "qk_norm",
            "q and k are not normalised",
            where,
            passed_by(("v", "q_norm")),
            {"qk_norm": False},
        )
    )
    yield Usual(
        Change(
            "qk_norm",
            "q and k are normalised after rope instead of before",
            where,
            normed_after_rope,
            {"after_rope": True},
        )
    )
    wide = patched.spec.block.qk_norm == "width"
    says = "each head" if wide else "all heads together"
    yield Usual(
        Change(
            "qk_norm",
            f"q and k are normalised over {says}",
            where,
            normed_otherwise(not wide),
            {"whole_width": not wide},
        )
    )


# --- the stream ----------------------------------------------------------------------------------


def _residuals(patched: PatchedModel) -> Iterator[Usual]:
    if patched.spec.block.placement == "pre":
        yield Usual(parallel_change(patched))
        for what, halves in (
            ("the norm's result", ("attn", "ffn")),
            ("before attention the norm's result", ("attn",)),
            ("before the MLP the norm's result", ("ffn",)),
        ):
            yield Usual(
                Change(
                    "residual",
                    f"{what} instead of its input is added to what a sublayer computed",
                    ("residual",),
                    of_normed(halves),
                    {"kept": "normed"},
                )
            )
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
            yield Usual(
                Change(
                    "residual",
                    f"what {what} computed {says}",
                    ("residual",),
                    kept(point, keep, 0),
                    {"kept": "added" if keep else "stream"},
                )
            )


def _short(patched: PatchedModel) -> float:
    """Return the embedding's factor in bfloat16, as engines in 16 bits have it."""
    return float(rounded_to(patched.hp["embedding_scale"], "bfloat16"))


def _factors(patched: PatchedModel) -> Iterator[Usual]:
    width = float(patched.hp["hidden_size"])
    for name, values in (
        ("embedding_scale", (1.0, width**0.5, _short(patched))),
        ("residual_scale", (1.0,)),
        ("logit_scale", (1.0,)),
    ):
        told = float(patched.hp[name])
        for value in values:
            if abs(value - told) > 1e-6 * abs(told):
                if name == "embedding_scale" and patched.spec.block.position == "learned":
                    continue
                yield Usual(factor_change(name, value, told))
        if told not in (0.0, 1.0):
            yield Usual(factor_change(name, 1 / told, told))


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
# Biases behind sums over devices: each one that adds them adds them once more.
SUMMED = ("attn_output", "ffn_down", "ssm_out", "ffn_down_shexp")
RANKS = (2.0, 4.0, 8.0)


def _biases(patched: PatchedModel) -> Iterator[Usual]:
    stored = [key for key in patched.weights if key.endswith(".bias")]
    seen: set[tuple[str, ...]] = set()
    for says, roles in BIASES.items():
        keys = tuple(key for key in stored if key.split(".")[-2] in roles)
        if not keys or keys in seen:
            continue
        seen.add(keys)
        yield Usual(zeroed("missing_bias", f"{says} is added", keys, patched))
    if stored and tuple(stored) not in seen:
        yield Usual(zeroed("missing_bias", "no bias is added", tuple(stored), patched))
    for keys in seen:
        what = " and ".join(dict.fromkeys(key.split(".")[-2] for key in keys))
        says = f"the bias of {what} is added twice"
        yield Usual(scaled_vectors("missing_bias", says, keys, patched, 2.0))
    summed = tuple(key for key in stored if key.split(".")[-2] in SUMMED)
    for times in RANKS if summed else ():
        says = f"the biases behind sums over devices are added {times:g} times"
        yield Usual(scaled_vectors("missing_bias", says, summed, patched, times))


def _weights(patched: PatchedModel) -> Iterator[Usual]:
    """Yield the embedding for the head, and exchanges: gate with up, keys with values."""
    yield from each(tied(patched))
    stored = patched.stored
    for first, second in (("ffn_gate", "ffn_up"), ("attn_k", "attn_v")):
        pairs = [
            (key, key.replace(first, second))
            for key in stored
            if key.split(".")[-2:] == [first, "weight"]
        ]
        pairs = [(a, b) for a, b in pairs if b in stored and stored[a].shape == stored[b].shape]
        if pairs:
            yield Usual(
                Change(
                    "swapped_tensors",
                    f"{first} and {second} are exchanged in every layer",
                    tuple(key for pair in pairs for key in pair),
                    _exchanged(pairs),
                    scoped=False,
                )
            )


def _exchanged(pairs: list[tuple[str, str]]) -> Callable[[PatchedModel, Layers], PatchedModel]:
    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        arrays: dict[str, Any] = {}
        for a, b in pairs:
            arrays |= {a: patched.stored[b].numpy(), b: patched.stored[a].numpy()}
        return patched.with_weights(arrays)

    return make


# --- experts -------------------------------------------------------------------------------------


def _routing(patched: PatchedModel) -> Iterator[Usual]:
    if not any(patched.hp["moe_layers"]):
        return
    for says, values in routing_tries(patched.hp):
        yield hyper("moe_routing", says, **values)
    if float(patched.hp["routed_scale"]) != 1:
        yield Usual(routed_change(patched, 1.0))
    yield from each(uncorrected(patched))
    yield from each(expert_mistakes(patched))
    shared = tuple(key for key in patched.weights if key.endswith(".ffn_down_shexp.weight"))
    if shared:
        yield Usual(zeroed("moe_routing", "the shared expert is left out", shared, patched))


ROUNDED: Mapping[str, tuple[str, ...]] = {
    "rope": ("rope",), "the softmax": ("probs",), "scores": ("scores",),
    "norms": ("rms_norm", "layer_norm"), "the activation": ("activate",),
    "matrix products": ("linear",), "the decay": ("decay",),
}  # fmt: skip


def roundings(patched: PatchedModel) -> Iterator[Usual]:
    """Yield operations whose results are rounded to 16 bits in a pass that is float32 otherwise."""
    for dtype in ("bfloat16", "float16"):
        rows: dict[str, Any] = {
            f"results of {name} are": (ops, op_rounded(ops, dtype)) for name, ops in ROUNDED.items()
        }
        rows["keys and values, as a cache holds them, are"] = (
            ("kv_cache",), keys_and_values_rounded(dtype),
        )  # fmt: skip
        if any(patched.hp["rope_layers"]):
            rows["cos and sin of rope are"] = (("rope",), table_rounded(dtype))
        for says, (ops, make) in rows.items():
            yield Usual(
                Change("rounding", f"{says} rounded to {dtype}", ops, make, {"dtype": dtype})
            )


def _embedded(patched: PatchedModel) -> Iterator[Usual]:
    yield from each(type_rows(patched))
    table = patched.weights.get_role(None, "position_embd.weight")
    if table is not None:
        yield Usual(
            zeroed(
                "positions",
                "no position is added to the embedding",
                ("position_embd.weight",),
                patched,
            )
        )


def _shards(patched: PatchedModel) -> Iterator[Usual]:
    yield from each(shard_sums(patched))
    yield from each(shard_tables(patched))


BLOCKS: tuple[Callable[[PatchedModel], Iterator[Usual]], ...] = (
    _eps, _biases, _factors, _weights, _residuals, _offsets, _qk_norms, _skipped, _kinds, _routing,
    _shards, _embedded,
)  # fmt: skip
