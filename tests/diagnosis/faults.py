"""The table of seeded faults: one thing broken in each, and the diagnosis it must get.

A fault is a damaged copy of a model's files, or the saved trace of an engine that computes
something else. Controls are pairs with nothing wrong. `upstream` are numbers in the list of real
bugs that the project started from (the column "upstream" of docs/notes/faults.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.inference.kv_cache import KVCache
from tests.diagnosis import files
from tests.diagnosis.controls import PAIRS
from tests.diagnosis.engines import COARSE, LONG, Stale, broken, broken_here, trace
from tests.diagnosis.fault import Fault as Fault
from tests.diagnosis.fault import Pair
from tests.diagnosis.faults_diagnosis_order import WALK
from tests.diagnosis.faults_files import FILE_FAULTS
from tests.diagnosis.faults_files import UP as UP
from tests.diagnosis.faults_files import neurons_moved as neurons_moved
from tests.diagnosis.faults_moved import MOVED_CONTROLS, MOVED_FAULTS
from tests.diagnosis.faults_packed import PACKED_CONTROLS, PACKED_FAULTS
from tests.diagnosis.faults_tokens import CONTROLS_TOKENS, FAULTS_TOKENS
from tests.diagnosis.faults_undecoded import UNDECODED_FAULTS
from tests.diagnosis.making import DEMO as DEMO
from tests.diagnosis.making import ROOT as ROOT
from tests.diagnosis.making import engine
from tests.models import IDS

# --- engines that compute something else -------------------------------------------------------

Values = Callable[[Any], Mapping[str, Any]]


def heads(**facts: Any) -> Callable[..., Any]:
    """Return an operation of attention that gets other fields of Heads."""

    def change(op: Any, *args: Any) -> Any:
        *first, own = args
        new = {name: value(own) if callable(value) else value for name, value in facts.items()}
        return op(*first, replace(own, **new))

    return change


def shared_heads(op: Any, q: Any, k: Any, own: Any) -> Any:
    """Query head h reads key head h modulo the number of key heads."""
    return op(q, k[:, np.arange(q.shape[1]) % k.shape[1]], own)


def first_tile(op: Any, scores: Any, own: Any) -> Any:
    """Divide by the sum of the first 32 keys only."""
    masked = np.where(own.mask, scores, -np.inf)
    e = np.exp(masked - masked.max(-1, keepdims=True))
    return e / e[..., :32].sum(-1, keepdims=True)


def left_out(kept: str, at: str) -> Callable[[], Callable[[str, int, Any], Any]]:
    """Return a maker of a pass in which the value at `kept` stands for the sum at `at`."""

    def fresh() -> Callable[[str, int, Any], Any]:
        held: dict[str, Any] = {}

        def alter(point: str, layer: int, x: Any) -> Any:
            if point == kept:
                held["x"] = x
            return held["x"] if point == at else x

        return alter

    return fresh


def zeros_at(point: str) -> Callable[[], Callable[[str, int, Any], Any]]:
    """Return a maker of a pass in which the value at `point` is zeros in every layer."""
    return lambda: lambda name, layer, x: x * 0 if name == point else x


def stale(rows: Callable[[int], Sequence[int]], layer: int = 0) -> Callable[[Any, int], Stale]:
    """Return a maker of caches that give back other rows in one layer."""

    def make(backend: Any, n_layers: int) -> Stale:
        cache = Stale(backend, n_layers)
        cache.rows, cache.layer = rows, layer
        return cache

    return make


def number(weights: Any, key: str) -> Any:
    """Return a weight's values, writable."""
    return np.array(weights[key].numpy(), np.float32)


def without_biases(weights: Any) -> Mapping[str, Any]:
    """Return zeros for every q, k and v bias."""
    names = [key for key in weights if ".attn_" in key and key.endswith(".bias")]
    return {key: 0 * number(weights, key) for key in names}


def exchanged(first: str, second: str) -> Values:
    """Return an overlay that exchanges two weights."""
    return lambda w: {first: number(w, second), second: number(w, first)}


def layers_exchanged(weights: Any) -> Mapping[str, Any]:
    """Return an overlay with layers 1 and 2 exchanged."""
    names = {"L1.": "L2.", "L2.": "L1."}
    return {names[key[:3]] + key[3:]: number(weights, key) for key in weights if key[:3] in names}


def changed(key: str, change: Callable[[Any], Any]) -> Values:
    """Return an overlay of one weight."""
    return lambda w: {key: change(number(w, key))}


def one_bit(x: Any) -> Any:
    """Flip the highest exponent bit of one value."""
    x = x.copy()
    x.view(np.uint32)[5, 7] ^= np.uint32(1 << 26)
    return x


def experts_exchanged(weights: Any) -> Mapping[str, Any]:
    """Return an overlay with experts 0 and 1 of layer 1 exchanged, the router not."""
    keys = [f"L1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
    return {key: number(weights, key)[[1, 0, 2, 3, 4, 5]] for key in keys}


def recorded_as(at: str, instead: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a renaming: `at` gets the values of `instead`."""

    def rename(values: dict[str, Any]) -> dict[str, Any]:
        return {
            key: values.get(key.rpartition(".")[0] + "." + instead, value)
            if key.endswith("." + at)
            else value
            for key, value in values.items()
        }

    return rename


def without_stream(values: dict[str, Any]) -> dict[str, Any]:
    """Record the value a layer adds under the name of the stream after it."""
    return {
        key: value - values[key.replace(".out", ".mid")] if key.endswith(".out") else value
        for key, value in values.items()
    }


def read_as_f16() -> Pair:
    """Return the demo model, and the trace of an engine that reads its BF16 bytes as F16."""
    wrong = files.copy(DEMO, "read-as-f16", tensors=files.relabel("F16"))
    return DEMO, trace(wrong, "engine-read-as-f16", points=COARSE)


ALL = lambda own: np.ones_like(own.mask)  # noqa: E731
SHIFTED = lambda n: [0, *range(n - 1)]  # noqa: E731
ENGINES: tuple[Fault, ...] = (
    Fault("read-as-f16", "demo", "BF16 bytes read as F16", read_as_f16, ("dtype_mislabel",),
          ("token_embd.weight", "L0.attn_norm.weight", "L1.attn_q.bias", "L2.ffn_up.weight"),
          upstream=(8,)),
    engine("attention-gate", "qwen3_5", "the gate of attention left out", "attention_gate",
           "attn_gate", **broken_here(
               mul=lambda here, op, x, g: x if here.point == "attn_mixed" else op(x, g))),
    engine("eps-1e-6", "llama", "norms add 1e-6 for 3e-4", "norm_eps", "norm_eps",
           hp={"norm_eps": 1e-6}),
    engine("eps-layer-norm", "gpt2", "layer norms add 1e-6", "norm_eps", "norm_eps",
           hp={"norm_eps": 1e-6}),
    engine("eps-post-norm", "olmo2", "q/k and post norms add 1e-6", "norm_eps", "norm_eps",
           hp={"norm_eps": 1e-6}),
    engine("theta", "llama", "base 10000 for 5000", "rope_theta", "rope_theta", upstream=(3,),
           hp={"rope_theta": 10000.0}),
    engine("theta-odd", "qwen3", "base 7345, behind a q/k-norm", "rope_theta", "rope_theta",
           fine=True, hp={"rope_theta": 7345.0}),
    engine("scaling-dropped", "llama-llama3", "llama3 scaling left out", "rope_scaling",
           "rope_scaling", hp={"rope_scaling": None}),
    engine("yarn-dropped", "llama-yarn", "yarn left out", "rope_scaling", "rope_scaling",
           fine=True, hp={"rope_scaling": None}),
    engine("linear-factor", "llama", "positions divided by 4", "rope_scaling", "rope_scaling",
           fine=True, hp={"rope_scaling": {"type": "linear", "factor": 4.0}}),
    engine("pairing", "llama", "adjacent pairs for split halves", "rope_pairing", "rope_style",
           upstream=(24,), hp={"rope_style": "interleaved"}),
    engine("pairing-cohere", "cohere", "split halves for adjacent pairs", "rope_pairing",
           "rope_style", fine=True, upstream=(24,), hp={"rope_style": "half"}),
    engine("local-theta", "gemma3", "local layers rotate with the global base", "rope_theta",
           "L0.rope_theta_local", fine=True,
           hp=lambda hp: {"rope_theta_local": hp["rope_theta"]}),
    engine("nope-rotates", "smollm3", "a layer rotates that should not", "rope_layers",
           "L3.rope_layers", hp={"rope_layers": (True,) * 5}),
    engine("layer-still", "llama", "layer 1 does not rotate", "rope_layers", "L1.rope_layers",
           hp={"rope_layers": (True, False, True)}),
    engine("full-layer-rotates", "cohere2", "a layer without a window rotates", "rope_layers",
           "L3.rope_layers", hp={"rope_layers": (True,) * 5}),
    engine("partial-whole", "phi2", "all elements rotated for half of them", "partial_rotary",
           "rope_dim", hp=lambda hp: {"rope_dim": hp["head_dim"]}),
    engine("positions-5", "llama", "positions counted from 5", "positions", "positions",
           fine=True, positions=range(5, 5 + len(IDS))),
    engine("positions-learned", "gpt2", "learned positions two rows on", "positions",
           "positions", positions=range(2, 2 + len(IDS))),
    engine("window-dropped", "mistral", "no sliding window", "sliding_window", "sliding_window",
           hp={"sliding_window": None}),
    engine("window-5", "qwen2", "a window of 5 for 8, where layers have one", "sliding_window",
           "L1.sliding_window", fine=True, hp={"sliding_window": 5}),
    engine("mask-none", "llama", "attention sees later tokens", "mask", "mask", upstream=(25,),
           backend=lambda: broken("probs", heads(mask=ALL, causal=None))),
    engine("attn-softcap", "gemma2", "scores not capped", "softcap", "attn_softcap",
           hp={"attn_softcap": None}),
    engine("attn-softcap-3", "gemma2", "scores capped at 3 for 4", "softcap", "attn_softcap",
           fine=True, hp={"attn_softcap": 3.0}),
    engine("final-softcap", "gemma2", "logits not capped", "softcap", "final_softcap", fine=True,
           hp={"final_softcap": None}),
    engine("final-softcap-only-logits", "gemma2", "the same, from the ten slots", "softcap",
           "final_softcap", confidence="ambiguous", hp={"final_softcap": None}),
    engine("attention-scale", "granite", "1/sqrt(d) for the model's factor", "attention_scale",
           "attn_scale", hp=lambda hp: {"attn_scale": hp["head_dim"] ** -0.5}),
    engine("attention-scale-1", "phi3", "scores not scaled", "attention_scale", "attn_scale",
           fine=True, hp={"attn_scale": 1.0}),
    engine("tiles", "llama", "softmax sums over the first 32 keys", "softmax_reduction",
           "softmax", upstream=(25,), ids=LONG, backend=lambda: broken("probs", first_tile)),
    engine("sinks", "gpt_oss", "sinks left out of the softmax", "softmax_reduction", "softmax",
           fine=True, backend=lambda: broken("probs", heads(sinks=None))),
    engine("gqa", "llama", "query head h reads key head h mod 2", "gqa_mapping", "n_kv_heads",
           fine=True, backend=lambda: broken("scores", shared_heads)),
    engine("activation", "llama", "gelu for silu", "activation", "activation",
           hp={"activation": "gelu"}),
    engine("activation-erf", "gpt2", "gelu with erf for tanh", "activation", "activation",
           hp={"activation": "gelu"}),
    engine("activation-squared", "arcee", "relu for its square", "activation", "activation",
           hp={"activation": "relu"}),
    engine("clamp", "gpt_oss", "gate and up clamped at 7 for 1.5", "activation", "swiglu_limit",
           hp={"swiglu_limit": 7.0}),
    engine("alpha-beta", "apertus", "beta not added to the activation's second alpha", "activation",
           "activation", backend=lambda: broken("xielu", without_beta)),
    engine("residual-attention", "llama", "attention replaces the stream", "residual", "residual",
           alter=left_out("attn_out", "mid")),
    engine("residual-mlp", "qwen3", "the MLP is not added", "residual", "residual",
           alter=left_out("mid", "out")),
    engine("experts-zero", "mixtral", "the experts' sum is zeros", "zero_result", "moe_out",
           alter=zeros_at("moe_out")),
    engine("embedding-scale", "gemma", "embedding not multiplied", "multiplier",
           "embedding_scale", hp={"embedding_scale": 1.0}),
    engine("residual-scale", "granite", "what is added is not multiplied", "multiplier",
           "residual_scale", hp={"residual_scale": 1.0}),
    engine("logit-scale", "cohere", "logits multiplied by 1 for 0.3", "multiplier", "logit_scale",
           fine=True, hp={"logit_scale": 1.0}),
    engine("norm-topk", "mixtral", "weights of the experts not renormalised", "moe_routing",
           "norm_topk", hp={"norm_topk": False}),
    engine("routed-scale", "deepseek_v3", "experts' factor left out", "moe_routing",
           "routed_scale", fine=True, hp={"routed_scale": 1.0}),
    engine("choice-unbiased", "ernie4_5_moe", "experts chosen without the bias", "moe_routing",
           "router", hp={"router": "softmax"}),
    engine("near-ties", "phimoe", "experts weighed by a softmax over all of them", "moe_routing",
           "router", hp={"router": "softmax"}),
    engine("groups", "deepseek_v3", "groups of experts ignored", "moe_routing",
           "n_expert_groups_used", hp={"n_expert_groups_used": 4}),
    engine("logits-late", "llama", "the head is given the row before", "logits_row", "logits",
           rename=lambda values: values | {
               "logits": np.concatenate([values["logits"][:1], values["logits"][:-1]])}),
    engine("cache-shifted", "llama", "layer 0 reads the row before", "kv_cache", "L0.kv_cache",
           cache=stale(SHIFTED)),
    engine("cache-one", "llama", "one row of the cache is its neighbour's", "kv_cache",
           "L1.kv_cache", fine=True, upstream=(26,),
           cache=stale(lambda n: [*range(7), 6, *range(8, n)], 1)),
    engine("cache-steps", "llama", "later tokens read one stale row",
           ("kv_cache", "capture_rows"), "L1.v_cache", fine=True, cached=20,
           cache=stale(lambda n: [*range(7), 6, *range(8, n)], 1)),
    engine("clean-steps", "llama", "nothing: tokens 20 to 28 behind a cache", "capture_rows",
           "L0.q", fine=True, verdict="same", cached=20, cache=KVCache),
    engine("bias-dropped", "qwen2", "no q, k, v bias", "missing_bias", "L0.attn_q.bias",
           upstream=(25,), weights=without_biases),
    engine("norm-offset", "gemma", "norms multiply by w for 1 + w", "norm_offset", "norm_offset",
           backend=lambda: broken("rms_norm", lambda op, x, w, **k: op(x, w - 1, **k))),
    engine("layer-norm-offset", "nemotron", "LayerNorms multiply by w for 1 + w", "norm_offset",
           "norm_offset", backend=lambda: broken("shift", lambda op, x, by: x)),
    engine("tied-head", "llama", "the embedding for the head", "tied_embedding", "output.weight",
           weights=lambda w: {"output.weight": number(w, "token_embd.weight")}),
    engine("swapped", "llama", "gate and up exchanged", "swapped_tensors", "L1.ffn_gate.weight",
           weights=exchanged("L1.ffn_gate.weight", "L1.ffn_up.weight")),
    engine("layers", "llama", "layers 1 and 2 exchanged", "layer_order", "L1.attn_norm.weight",
           weights=layers_exchanged),
    engine("by-columns", "llama-square", "a square weight read by columns", "transpose",
           "L0.attn_output.weight", upstream=(23,),
           weights=changed("L0.attn_output.weight", lambda x: x.T)),
    engine("key-heads", "llama", "key heads 0 and 1 exchanged", "head_order", "L1.attn_k.weight",
           weights=changed("L1.attn_k.weight", lambda x: np.roll(x, 16, 0))),
    engine("heads", "llama", "query heads 0 and 1 exchanged", "head_order", "L1.attn_q.weight",
           weights=changed("L1.attn_q.weight",
                           lambda x: x.reshape(4, 16, -1)[[1, 0, 2, 3]].reshape(64, -1))),
    engine("rows-one-off", "llama", "embedding read one row on", "row_offset",
           "token_embd.weight",
           weights=changed("token_embd.weight", lambda x: np.roll(x, -1, 0))),
    engine("scaled", "llama", "a weight times 1.5", "scale", "L1.ffn_down.weight",
           weights=changed("L1.ffn_down.weight", lambda x: 1.5 * x)),
    engine("one-bit", "llama", "one exponent bit of one weight", "bit_rot", "L1.ffn_down.weight",
           weights=changed("L1.ffn_down.weight", one_bit)),
    engine("stale-weight", "llama", "a weight of another checkpoint", "stale_tensor",
           "L1.ffn_down.weight", confidence="unconfirmed",
           weights=changed("L1.ffn_down.weight",
                           lambda x: np.random.default_rng(0).permutation(x.reshape(-1))
                           .reshape(x.shape))),
    engine("stale-norm", "llama", "a norm left at its initial ones", "stale_tensor",
           "L1.ffn_norm.weight", weights=changed("L1.ffn_norm.weight", np.ones_like)),
    engine("experts", "qwen2_moe", "experts 0 and 1 exchanged", "expert_order",
           "L1.ffn_up_exps.weight", weights=experts_exchanged),
    engine("one-layer-only", "qwen3", "only the last layer has another activation", "activation",
           "L2.activation", upstream=(29,), backend=lambda: broken("activate", only_third())),
    engine("stacked", "qwen2", "pairing, biases, mask and activation at once",
           ("missing_bias", "rope_pairing", "mask", "activation"), "L0.attn_q.bias",
           fine=True, upstream=(25,), weights=without_biases,
           hp={"rope_style": "interleaved", "activation": "gelu"},
           backend=lambda: broken("probs", heads(mask=ALL, causal=None))),
    engine("numbers", "qwen2", "eps, base and window at once",
           ("norm_eps", "rope_theta", "sliding_window"), "norm_eps", fine=True,
           hp={"norm_eps": 1e-6, "rope_theta": 1e4, "sliding_window": None}),
    engine("nan-activation", "llama", "one value of one activation is NaN", "nonfinite",
           "L0.ffn_act", fine=True, backend=lambda: broken("activate", one_nan)),
    engine("bias-elsewhere", "qwen2", "q recorded before its bias", "capture_point", "L0.q",
           fine=True, verdict="same", rename=recorded_as("q", "q_mm")),
    engine("stream-elsewhere", "llama", "what a layer adds recorded as its output",
           "capture_point", "L0.out", fine=True, verdict="same", rename=without_stream),
    engine("last-row", "llama", "the last token's rows only", "capture_rows", "L0.q",
           verdict="same", rows="last"),
    engine("clean-trace", "deepseek_v2", "nothing", (), (), verdict="same", fine=True),
)  # fmt: skip


def one_nan(op: Any, x: Any, kind: str, **how: Any) -> Any:
    """Return an activation with one NaN."""
    y = np.array(op(x, kind, **how))
    y[6, 11] = np.nan
    return y


def without_beta(op: Any, x: Any, up: float, down: float, beta: float, eps: float) -> Any:
    """Compute xIELU with the second alpha as its softplus gives it."""
    return op(x, up, down - beta, beta, eps)


def only_third() -> Callable[..., Any]:
    """Return an activation that is another function from the third call on."""
    calls = iter(range(1 << 30))

    def change(op: Any, x: Any, kind: str, **how: Any) -> Any:
        return op(x, "gelu" if next(calls) == 2 else kind, **how)

    return change


# Rows of another file, which makes them with the functions above.
from tests.diagnosis.faults_compressed import COMPRESSED_FAULTS  # noqa: E402
from tests.diagnosis.faults_encoders import ENCODER_FAULTS  # noqa: E402
from tests.diagnosis.faults_engine import ENGINE_FAULTS  # noqa: E402
from tests.diagnosis.faults_indexer import INDEXER_FAULTS  # noqa: E402
from tests.diagnosis.faults_llama4 import LLAMA4_FAULTS  # noqa: E402
from tests.diagnosis.faults_modules import MODULE_FAULTS  # noqa: E402
from tests.diagnosis.faults_places import PLACE_FAULTS  # noqa: E402
from tests.diagnosis.faults_types import TYPE_FAULTS  # noqa: E402

ENGINES = (*ENGINES, *ENGINE_FAULTS, *ENCODER_FAULTS, *LLAMA4_FAULTS, *TYPE_FAULTS, *INDEXER_FAULTS)
ENGINES = (*ENGINES, *MODULE_FAULTS, *PLACE_FAULTS, *COMPRESSED_FAULTS)
FILES = (*FILE_FAULTS, *WALK, *MOVED_FAULTS, *UNDECODED_FAULTS, *PACKED_FAULTS, *FAULTS_TOKENS)
CONTROLS = (*PAIRS, *MOVED_CONTROLS, *PACKED_CONTROLS, *CONTROLS_TOKENS)
FAULTS: dict[str, Fault] = {fault.name: fault for fault in (*ENGINES, *FILES, *CONTROLS)}
