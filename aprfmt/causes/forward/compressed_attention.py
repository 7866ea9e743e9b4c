"""Hypotheses about compressed attention and hyper-connections (deepseek_v4).

A *slot* is one of the token rows that a window of compressed keys is made of.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import (
    Array,
    Change,
    Hypothesis,
    Layers,
    Mismatch,
    Patch,
    hyper_change,
)
from aprfmt.causes.forward.product import replace_weights, zero_weights_change
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import PatchedModel

CAUSE_ROWS = (
    Cause(
        "compressed_keys",
        "forward",
        "bug",
        "Keys that stand for windows of tokens are made in another way, or are not read, or what "
        "attention reads keeps its rotation.",
        "Keys and queries of a layer are equal, and what its attention gives is not.",
        "Attention over keys that the named rule makes is equal.",
        keys=("heavy_layers", "sparse_rate", "heavy_rate"),
    ),
    Cause(
        "hyper_connections",
        "forward",
        "bug",
        "Residual streams are collapsed or mixed by other weights than the model's.",
        "The stream that a layer reads or leaves differs, and what it computes between is equal.",
        "Passes with the named weights changed are equal.",
        keys=("hc_iterations", "hc_eps"),
    ),
)
_KEYS = "compressed_keys"
_STREAMS = "hyper_connections"


def _mask_window_before(gate: Array) -> Array:
    """Return gates [windows, slots, width], -inf in the slots of the window before (first half)."""
    gate = np.array(gate)
    gate[:, : gate.shape[1] // 2] = -np.inf
    return gate


# What is said -> a window's keys, of the operation, values and gates [windows, slots, width].
SUMS: Mapping[str, Callable[[Any, Array, Array], Array]] = {
    "the tokens of a window count alike": lambda op, kv, gate: op(
        kv, np.where(np.isinf(gate), gate, gate.dtype.type(0))
    ),
    "gates are sigmoids, not a softmax": lambda op, kv, gate: (
        (kv / (1 + np.exp(-gate))).sum(axis=1).astype(kv.dtype)
    ),
}


def _patch_sum(summed: Callable[[Any, Array, Array], Array], point: str) -> Patch:
    """Return a patch: the compressor with gates at `point` sums by summed(op, values, gates).

    `op` is the model's own sum. Other compressors stay as they are.
    """

    def override(op: Any, at: Any, kv: Any, gate: Any) -> Any:
        """Return a compressor's sum of the values `kv` weighted by gates.

        At capture point `point` it is that of the mistake `summed`, elsewhere the model's own.
        """
        return summed(op, kv, gate) if at.point == point else op(kv, gate)

    return lambda patched, layers: patched.with_op("compress", override, layers)


def _keep_rotation(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model that does not undo rope in attention's result, in `layers`."""

    def kept(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return attention's result with rope left on it, in place of the unrotated `x`.

        `held` has the result by its point's name. Its rotated elements are put from split halves
        into adjacent pairs, the order of `x`.
        """
        read = np.array(held["attn_mixed"]).reshape(len(x), int(patched.hp["n_heads"]), -1)
        turned = int(patched.hp["rope_dim"])
        halves = read[..., -turned:].reshape(*read.shape[:2], 2, -1)
        read[..., -turned:] = halves.swapaxes(-1, -2).reshape(*read.shape[:2], -1)
        return read.reshape(x.shape)

    return patched.with_tap("attn", kept, layers)


def _key_change(says: str, make: Patch) -> Change:
    """Return the change of compressed keys that patch `make` makes, with the sentence `says`."""
    return Change(_KEYS, says, ("attn_compressor",), make, {_KEYS: says})


def usual_compression_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes of compressed attention; none for models without it."""
    if patched.spec.block.attention != "compressed":
        return
    none = (False,) * patched.n_layers
    says = "attention reads no key that stands for a window of tokens"
    yield hyper_change(_KEYS, says, heavy_layers=none, index_layers=none)
    for point, whose in (("compress_gate", "compressed keys"), ("index_compress_gate", "indexers")):
        for words, summed in SUMS.items():
            yield _key_change(f"of {whose} {words}", _patch_sum(summed, point))
        alone = _patch_sum(lambda op, kv, gate: op(kv, _mask_window_before(gate)), point)
        yield _key_change(f"of {whose} the window before does not count", alone)
    for role in ("attn_compressor_ape", "indexer.compressor_ape"):
        keys = [key for key in patched.weights if key.endswith(f".{role}.weight")]
        if keys:
            says = "gates have no bias by the position in the window"
            yield zero_weights_change(_KEYS, says, keys, patched)
    yield _key_change("what attention reads keeps its rotation", _keep_rotation)
    tables = [key for key in patched.weights if key.endswith(".ffn_gate_tid2eid.weight")]
    if tables:
        arrays = {key: np.roll(patched.stored[key].numpy(), 1, axis=0) for key in tables}
        says = "experts are those listed for the token before in the vocabulary"
        yield Change("moe_routing", says, tuple(tables), replace_weights(arrays), scoped=False)


Weights = Callable[[Array, int], Array]
# Point -> what is said, and the weights, of the model's and the number of streams.
MIXES: Mapping[str, tuple[tuple[str, Weights], ...]] = {
    "pre": (("streams are collapsed to their mean", lambda x, n: x * 0 + x.dtype.type(1 / n)),),
    "post": (
        ("the weights of what a branch gives are not doubled", lambda x, n: x * x.dtype.type(0.5)),
        ("every stream gets what a branch gives whole", lambda x, n: x * 0 + 1),
    ),
    "comb": (
        (
            "streams are mixed by the transposed weights",
            lambda x, n: x.reshape(-1, n, n).swapaxes(1, 2).reshape(x.shape),
        ),
        ("streams are not mixed", lambda x, n: x * 0 + np.eye(n, dtype=x.dtype).reshape(-1)),
    ),
}


def _patch_weights(part: str, changed: Weights) -> Patch:
    """Return a patch that changes the weights of both hyper-connections of a layer.

    `part` says which weights: pre, post or comb. They become changed(weights, number of streams).
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose hyper-connections in `layers` have weights changed by a mistake.

        The mistake is `changed`, a function of (weights, number of streams).
        """

        def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
            """Return the hyper-connection's weights `x` of one layer as `changed` makes them."""
            return np.ascontiguousarray(changed(np.array(x), int(patched.hp["hc_streams"])))

        for branch in ("attn", "ffn"):
            patched = patched.with_tap(f"hc_{branch}_{part}", tap, layers)
        return patched

    return make


def _mean_at_head(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose last norm reads the mean of all streams; `layers` is not used."""

    def tap(patched: PatchedModel, layer: int, x: Any, held: Mapping[str, Any]) -> Any:
        """Return equal weights for all streams, in place of the weights `x` of the head's sum."""
        return np.array(x) * 0 + x.dtype.type(1 / x.shape[-1])

    return patched.with_tap("hc_head_pre", tap, None)


def usual_connection_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes of hyper-connections; none for models without them."""
    if patched.spec.block.streams != "hyper":
        return
    change = partial(Change, _STREAMS)
    for part, rows in MIXES.items():
        for says, changed in rows:
            yield change(says, ("hc_streams",), _patch_weights(part, changed), {part: says})
    says = "the last norm reads the mean of the streams"
    yield change(says, ("output_hc",), _mean_at_head, {"head": says}, scoped=False)
    configured = int(patched.hp["hc_iterations"])
    for count in dict.fromkeys((1, configured - 1, configured + 1)):
        if count > 0 and count != configured:
            says = (
                f"the weights of mixing are normalised {count} times; the model says {configured}"
            )
            yield hyper_change(_STREAMS, says, hc_iterations=count)
    keys = [
        key
        for key in patched.weights
        if key.endswith(("hc_attn_base.weight", "hc_ffn_base.weight"))
    ]
    yield zero_weights_change(_STREAMS, "the connections have no shifts", keys, patched)


def try_compression_mistakes(case: Mismatch) -> Iterator[Change]:
    """Yield changes for the usual mistakes of compressed attention, for points in a layer."""
    if case.layer >= 0:
        yield from usual_compression_mistakes(case.patched)


def try_connection_mistakes(case: Mismatch) -> Iterator[Change]:
    """Yield changes for the usual mistakes of hyper-connections, for all points."""
    yield from usual_connection_mistakes(case.patched)


HYPOTHESES = (
    Hypothesis(_KEYS, try_compression_mistakes, 326, "which keys a query reads, as an indexer's"),
    Hypothesis(_STREAMS, try_connection_mistakes, 365, "weights of streams, before any sum"),
)
