"""Seeded faults of `aprfmt/causes/tensor/other_tensors.py`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from aprfmt.causes.tensor import other_tensors
from tests.causes.faults import (
    EMBEDDING,
    GATE,
    HEAD,
    LAYER,
    UP,
    Fault,
    computed,
    copied,
    exchanged,
    moved,
    raw,
)
from tests.diagnosis import dumps, files
from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.added_constants import ADDED
from tests.diagnosis.dumps import as_npz, logits_only
from tests.diagnosis.engine_changes import (
    ALL,
    DELTA,
    LOGITS,
    THREE,
    Values,
    changed,
    decay,
    dumped,
    heads,
    number,
    placed,
    softplus,
    steps,
    traced,
)
from tests.diagnosis.engines import broken, tiny_folder
from tests.diagnosis.fault import Pair
from tests.diagnosis.making import engine
from tests.diagnosis.token_edits import configured, rows


def layers(data: dict[str, bytes]) -> None:
    """Exchange layers 1 and 2."""
    for name in list(data):
        if name.startswith(LAYER):
            exchanged(name, name.replace("layers.1.", "layers.2."))(data)


FAULTS = (
    Fault("gate and up exchanged", "swapped_tensors", UP, exchanged(UP, GATE),
          other_tensors.guess_other_tensor, "are exchanged"),
    Fault("gate over up", "copied_tensor", UP, copied(GATE, UP),
          other_tensors.guess_other_tensor, "one was copied over the other"),
    Fault("the embedding for the head", "tied_embedding", HEAD, copied(EMBEDDING, HEAD),
          other_tensors.guess_other_tensor, "B's head has the values of the embedding"),
    Fault("layers exchanged", "layer_order", UP, layers, other_tensors.guess_other_tensor,
          "layer 1 has the tensor of A's layer 2"),
    Fault("never filled", "stale_tensor", UP, raw(UP, lambda old: bytes(len(old))),
          other_tensors.explain_constant_side, "0 everywhere"),
    Fault("of another checkpoint", "stale_tensor", UP,
          computed(UP, lambda x: np.random.default_rng(8).standard_normal(x.shape)),
          other_tensors.guess_stale_tensor, "another checkpoint", confirmed=False),
    Fault("in any order", "value_order", UP,
          moved(UP, lambda x: np.random.default_rng(8).permutation(x.ravel()).reshape(x.shape)),
          other_tensors.explain_other_order, "in an order that has no name", quantized=False,
          confirmed=False),
)  # fmt: skip


def without_biases(weights: Any) -> Mapping[str, Any]:
    """Return zeros for every q, k and v bias."""
    names = [key for key in weights if ".attn_" in key and key.endswith(".bias")]
    return {key: 0 * number(weights, key) for key in names}


def weights_exchanged(first: str, second: str) -> Values:
    """Return an overlay that exchanges two weights."""
    return lambda w: {first: number(w, second), second: number(w, first)}


def layers_exchanged(weights: Any) -> Mapping[str, Any]:
    """Return an overlay with layers 1 and 2 exchanged."""
    names = {"L1.": "L2.", "L2.": "L1."}
    return {names[key[:3]] + key[3:]: number(weights, key) for key in weights if key[:3] in names}


def nothing(role: str) -> Any:
    """Return an overlay with zeros for the biases of a role."""
    return lambda weights: {
        key: 0 * weights[key].numpy() for key in weights if key.endswith(f".{role}.bias")
    }


def unbiased(op: Any, raw: Any, bias: Any, low: float, high: float) -> Any:
    """Leave out the bias of time steps."""
    return op(raw, None, low, high)


NO_DT = decay(lambda a, rate, dt: -np.exp(rate) * softplus(a))


def mlp_biases(rows: files.Rows) -> None:
    for layer in range(3):
        for part, size in (("gate", 72), ("up", 72), ("down", 48)):
            data = np.linspace(-0.5, 0.5, size, dtype="<f4")
            rows[f"model.layers.{layer}.mlp.{part}_proj.bias"] = ("F32", (size,), data.tobytes())


def denied(name: str) -> Pair:
    """Two folders with MLP biases; the second one's flag denies them."""
    source = tiny_folder("llama")
    return tuple(
        files.copy(source, f"tokens-{name}-{flag}", tensors=mlp_biases, config={"mlp_bias": flag})
        for flag in (True, False)
    )  # type: ignore[return-value]


ENGINE_FAULTS = (
    engine("bias-dropped", "qwen2", "no q, k, v bias", "missing_bias", "L0.attn_q.bias",
           upstream=(25,), weights=without_biases),
    engine("tied-head", "llama", "the embedding for the head", "tied_embedding", "output.weight",
           weights=lambda w: {"output.weight": number(w, "token_embd.weight")}),
    engine("swapped", "llama", "gate and up exchanged", "swapped_tensors", "L1.ffn_gate.weight",
           weights=weights_exchanged("L1.ffn_gate.weight", "L1.ffn_up.weight")),
    engine("layers", "llama", "layers 1 and 2 exchanged", "layer_order", "L1.attn_norm.weight",
           weights=layers_exchanged),
    engine("stale-weight", "llama", "a weight of another checkpoint", "stale_tensor",
           "L1.ffn_down.weight", confidence="unconfirmed",
           weights=changed("L1.ffn_down.weight",
                           lambda x: np.random.default_rng(0).permutation(x.reshape(-1))
                           .reshape(x.shape))),
    engine("stale-norm", "llama", "a norm left at its initial ones", "stale_tensor",
           "L1.ffn_norm.weight", weights=changed("L1.ffn_norm.weight", np.ones_like)),
    engine("stacked", "qwen2", "pairing, biases, mask and activation at once",
           ("missing_bias", "rope_pairing", "mask", "activation"), "L0.attn_q.bias",
           fine=True, upstream=(25,), weights=without_biases,
           hp={"rope_style": "interleaved", "activation": "gelu"},
           backend=lambda: broken("probs", heads(mask=ALL, causal=None))),
    traced("stacked-three", "qwen2", "biases, activation and window, from logits alone",
           ["missing_bias", "activation", "sliding_window"], ["L0.attn_q.bias"], LOGITS, THREE,
           hp={"activation": "gelu", "sliding_window": None}, weights=without_biases),
    dumped("hf-two", "qwen2", "no biases and gelu, logits as .npy", ["missing_bias", "activation"],
           ["L0.attn_q.bias"], dumps.logits_only, dumps.as_npy, THREE,
           wrong=dumps.gelu_and_no_biases),
    engine("seed-oss-bias", "seed_oss", "attention's output has no bias", "missing_bias",
           "L0.attn_output.bias", fine=True, weights=nothing("attn_output")),
    engine("qwen2-5-vl-bias", "qwen2_5_vl", "q has no bias", "missing_bias", "L0.attn_q.bias",
           fine=True, weights=nothing("attn_q")),
    engine("mamba-unbiased", "mamba", "time steps without bias", "missing_bias", "L0.ssm_dt.bias",
           backend=lambda: broken("time_step", unbiased)),
    dumped("hf-one-bias", "qwen2", "one bias of layer 1 is zero, logits alone", ["missing_bias"],
           ["L1.attn_v.bias"], logits_only, as_npz, THREE,
           wrong=wrong.without_bias("model.layers.1.self_attn.v_proj.bias")),
    placed("delta-dt", DELTA, "no dt_bias", "missing_bias", "L0.ssm_dt.bias", NO_DT),
    placed("delta-dt-logits", "qwen3_next", "no dt_bias, from logits alone", "missing_bias",
           "L0.ssm_dt.bias", NO_DT, LOGITS),
    placed("scan-dt", "granite_hybrid", "no dt_bias", "missing_bias", "",
           steps(lambda raw, dt: softplus(raw))),
    *ADDED,
)  # fmt: skip


FILE_FAULTS = rows({
    "flag-denies": ("mlp_bias is false beside stored biases", denied, "missing_bias", "mlp_bias"),
    # https://github.com/huggingface/transformers/issues/45127
    "flag-ties": ("tie_word_embeddings beside a head of its own",
                  configured("llama", {"tie_word_embeddings": True}), "tied_embedding",
                  "tie_word_embeddings"),
}, "bug")  # fmt: skip
