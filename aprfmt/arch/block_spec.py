"""The description of a decoder block: which of a fixed set of operations each part of it is."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from aprfmt.errors import ArchError


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Which operations a block performs; `check` checks each field's value.

    norm: kind of the norms on the residual stream. norm_cast: where the result is rounded to the
    activations' dtype ("before_weight": llama, mistral, mixtral, qwen, phi3, granite, smollm3,
    deepseek; "after_weight": olmo2, gpt-oss, cohere, gemma). placement: pre (llama), post (olmo2:
    after attention and MLP, none before), sandwich (gemma2/3: both), after (bert: of each sum, and
    the stream continues from it), by_mixer (olmo_hybrid: pre in layers that a recurrence mixes,
    post in those with attention). qk_norm: none; head (RMS over head_dim, shared weight); width
    (RMS over the whole projection before the split); head_layer (LayerNorm over head_dim: cohere
    and stablelm with one weight row a head and no bias, phi2 with one shared weight and bias);
    plain (RMS over head_dim without a weight: llama4). qk_norm_place: before_rope; after_rope
    (hunyuan); rotated: after rope, in layers that rotate only (llama4). parallel_norm: with a
    parallel residual attention and MLP read one norm, or one each (two: falcon-40b). position:
    rope; learned rows added to the embedding; none. padding: a padding token has a position like
    any other (counted), or the row before the first one's, and is not counted in the positions of
    later tokens (skipped: roberta, mpnet). score_bias: none; alibi (a slope a head times the
    distance); alibi_keys (a slope a head times the key's position, both in bfloat16, before the
    scores are scaled: falcon-rw); relative (a row of a table by the distance: mpnet). attends: to
    earlier positions and itself (causal), or to all. window: `window_layers` reach back a number of
    positions (sliding), or to the last multiple of it (chunk: llama4). head: logits; dense (a
    matrix, the activation and the last norm before the words: causal bert); none (encoders).
    temperature: none; all: a factor on every query, by position (ministral3); unrotated: in layers
    without rope only, the position counted from 1 (llama4). mlp: gated or plain; experts replace it
    on `moe_layers`. expert_weights: an expert's weight multiplies its output, or its input
    (llama4). activation: the one that is named, or xielu (apertus), whose numbers are in every
    layer. shared_expert: none; plain (added); gated (times its own gate's sigmoid). attention_gate:
    what attention gives is multiplied by a projection's sigmoid, element by element, or one number
    a head (sigmoid_head: lfm3). value_norm: none; plain (RMS over the head without a weight:
    gemma3n, gemma4). experts: in the MLP's place (instead), or read the stream through their own
    norm and router, and are added to the MLP (parallel: gemma4). streams: one; altup:
    `altup_streams` copies, of which the first goes through the layer, with a short cut of low rank
    (gemma3n); hyper: `hc_streams` streams, collapsed to one before attention and before the MLP,
    and mixed after it (deepseek_v4). attention: grouped queries (gqa), latent keys and values
    (mla), or compressed: one head of keys that are the values, and keys that stand for windows of
    tokens. layer_scale: a number multiplies the stream after every layer (gemma4). indexer:
    attention reads `index_topk` keys that score best by the indexer's own heads, whose rotated
    elements are paired so (half: deepseek v3.2; interleaved: glm-5), or blocks of keys for each key
    head (blocks: minimax-m3). recurrence: what mixes tokens in place of attention, in
    `delta_layers` (gated_delta; kimi_delta: its state decays by channel: kimi_linear),
    `conv_layers` (short_conv: lfm2) or `ssm_layers` (mamba: a rate for each number of state;
    mamba2: heads) or `lightning_layers` (lightning: linear attention that decays by head: minimax).
    residual: attention's or the MLP's output is added to the stream itself, or, both times a
    factor, to the normed stream (norm: minimax). recurrence_place: in place of attention (instead),
    or in parallel: their outputs are added (beside: falcon_h1). halves: a layer is a mixer and an
    MLP, each after a norm (both), or one of the two after the only norm (one: mamba, nemotron_h).
    ssm_norms: norms on a mamba's time step, B and C: none, RMS without a weight (plain:
    falcon_mamba) or with one (weighted: jamba). multipliers: inputs and outputs of projections have
    factors (projections: falcon_h1).

    Rounding that shows in BF16 and F16 only. softmax_cast: "input" subtracts the maximum in the
    scores' dtype first (gpt-oss; gpt2's softmax is "float32"). rope_cast: what is rounded to the
    activations' dtype: cos and sin, and every product (table: most); cos and sin, then the float32
    result (table_and_result: cohere); the float32 result only (result: olmo2, olmo3, ernie,
    deepseek v2). router_cast: what is rounded: the logits and the experts' weights (weights:
    qwen2-moe, qwen3-moe, gpt-oss); the logits only (logits: mixtral); nothing, the product is
    float32 too (none: deepseek, hunyuan); the weights, of a float32 product (product: ernie).
    activation_cast: each step inside gelu_tanh instead of its result (steps: gpt2 and phi2).
    """

    norm: Literal["rms", "layer"] = "rms"
    norm_offset: Literal[0, 1] = 0
    norm_cast: Literal["before_weight", "after_weight"] = "before_weight"
    placement: Literal["pre", "post", "sandwich", "after", "by_mixer"] = "pre"
    qk_norm: Literal["none", "head", "width", "head_layer", "plain"] = "none"
    parallel_norm: Literal["one", "two"] = "one"
    qk_norm_place: Literal["before_rope", "after_rope", "rotated"] = "before_rope"
    attention: Literal["gqa", "mla", "compressed"] = "gqa"
    indexer: Literal["none", "half", "interleaved", "blocks"] = "none"
    sinks: bool = False
    position: Literal["rope", "learned", "none"] = "rope"
    padding: Literal["counted", "skipped"] = "counted"
    score_bias: Literal["none", "alibi", "alibi_keys", "relative"] = "none"
    attends: Literal["causal", "all"] = "causal"
    window: Literal["sliding", "chunk"] = "sliding"
    head: Literal["logits", "dense", "none"] = "logits"
    temperature: Literal["none", "all", "unrotated"] = "none"
    mlp: Literal["gated", "plain"] = "gated"
    expert_weights: Literal["output", "input"] = "output"
    activation: Literal["named", "xielu"] = "named"
    shared_expert: Literal["none", "plain", "gated"] = "none"
    attention_gate: Literal["none", "sigmoid", "sigmoid_head"] = "none"
    value_norm: Literal["none", "plain"] = "none"
    experts: Literal["instead", "parallel"] = "instead"
    streams: Literal["one", "altup", "hyper"] = "one"
    layer_scale: bool = False
    residual: Literal["stream", "norm"] = "stream"
    recurrence: Literal[
        "none", "gated_delta", "short_conv", "mamba", "mamba2", "lightning", "kimi_delta"
    ] = "none"
    recurrence_place: Literal["instead", "beside"] = "instead"
    halves: Literal["both", "one"] = "both"
    ssm_norms: Literal["none", "plain", "weighted"] = "none"
    multipliers: Literal["none", "projections"] = "none"
    softmax_cast: Literal["float32", "input"] = "float32"
    rope_cast: Literal["table", "table_and_result", "result"] = "table"
    router_cast: Literal["weights", "logits", "none", "product"] = "weights"
    activation_cast: Literal["result", "steps"] = "result"

    def check(self) -> None:
        """Raise ArchError if a field has a value that its type does not list."""
        kinds = get_type_hints(BlockSpec)
        for name, values in (
            (each.name, _allowed_values(kinds[each.name])) for each in fields(self)
        ):
            if getattr(self, name) not in values:
                raise ArchError(
                    f"block field {name} is {getattr(self, name)!r}; expected one of {values}"
                )


def _allowed_values(kind: Any) -> tuple[object, ...]:
    """Return the values of a field's type: those of a Literal, or both booleans."""
    return get_args(kind) or (False, True)
