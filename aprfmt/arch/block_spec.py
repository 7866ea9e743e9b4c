"""The description of a decoder block: which of a fixed set of operations each part of it is."""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from aprfmt.errors import ArchError


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Which operations a decoder block performs: the comment above each field says what it means.

    In parentheses stand architectures that have the value. `check` checks the values.
    """

    # Kind of the norms on the residual stream.
    norm: Literal["rms", "layer"] = "rms"
    # Added to every weight of these norms: 1 in gemma, whose files hold the weight less 1.
    norm_offset: Literal[0, 1] = 0
    # Where a norm is rounded to the activations' dtype: before its weight (llama, mistral, mixtral,
    # qwen, phi3, granite, smollm3, deepseek) or after it (olmo2, gpt-oss, cohere, gemma).
    norm_cast: Literal["before_weight", "after_weight"] = "before_weight"
    # pre: a norm before attention and before the MLP (llama). post: after each, none before
    # (olmo2). sandwich: both (gemma2, gemma3). after: of each sum, and the stream continues from it
    # (bert). by_mixer: pre in layers that a recurrence mixes, post in those with attention
    # (olmo_hybrid).
    placement: Literal["pre", "post", "sandwich", "after", "by_mixer"] = "pre"
    # Norm of queries and keys. head: RMS over head_dim, one weight for all heads. width: RMS over
    # the whole projection, before it is split. head_layer: LayerNorm over head_dim (cohere and
    # stablelm: a weight row for each head and no bias; phi2: one weight and bias). plain: RMS over
    # head_dim without a weight (llama4).
    qk_norm: Literal["none", "head", "width", "head_layer", "plain"] = "none"
    # Where attention and MLP run in parallel: both read one norm, or one each (falcon-40b).
    parallel_norm: Literal["one", "two"] = "one"
    # Before rope, after it (hunyuan), or after it in the layers that rotate only (rotated: llama4).
    qk_norm_place: Literal["before_rope", "after_rope", "rotated"] = "before_rope"
    # gqa: grouped queries. mla: latent keys and values. compressed: one head of keys that are the
    # values, and keys that stand for windows of tokens (deepseek_v4).
    attention: Literal["gqa", "mla", "compressed"] = "gqa"
    # Attention reads the `index_topk` keys that score best by heads of the indexer's own. Their
    # rotated elements are paired by halves (half: deepseek v3.2) or as neighbours (interleaved:
    # glm-5). blocks: it chooses blocks of keys for each key head (minimax-m3).
    indexer: Literal["none", "half", "interleaved", "blocks"] = "none"
    # A learned logit of each head takes part in the softmax and is dropped after it (gpt-oss).
    sinks: bool = False
    # rope, learned rows that are added to the embedding, or none.
    position: Literal["rope", "learned", "none"] = "rope"
    # counted: a padding token has a position like any other. skipped: it has the row before the
    # first position's, and later tokens do not count it (roberta, mpnet).
    padding: Literal["counted", "skipped"] = "counted"
    # Added to the attention scores. alibi: a slope of each head times the distance. alibi_keys: the
    # slope times the key's position, both in bfloat16, before the scores are scaled (falcon-rw).
    # relative: a row of a table by the distance (mpnet).
    score_bias: Literal["none", "alibi", "alibi_keys", "relative"] = "none"
    # To earlier positions and itself, or to all positions.
    attends: Literal["causal", "all"] = "causal"
    # Layers of `window_layers` reach back a number of positions (sliding), or to the last multiple
    # of it (chunk: llama4).
    window: Literal["sliding", "chunk"] = "sliding"
    # logits: a matrix. dense: a matrix, the activation and the last norm before it (causal bert).
    # none: an encoder.
    head: Literal["logits", "dense", "none"] = "logits"
    # A factor on queries, by position: in all layers (ministral3), or in those without rope, the
    # position counted from 1 (unrotated: llama4).
    temperature: Literal["none", "all", "unrotated"] = "none"
    # Gated or plain; experts replace it in layers of `moe_layers`.
    mlp: Literal["gated", "plain"] = "gated"
    # An expert's weight multiplies its output, or its input (llama4).
    expert_weights: Literal["output", "input"] = "output"
    # The one that the hyperparameters name, or xielu, whose numbers are in every layer (apertus).
    activation: Literal["named", "xielu"] = "named"
    # An expert that every token uses: added (plain), or times its own gate's sigmoid (gated).
    shared_expert: Literal["none", "plain", "gated"] = "none"
    # The output of attention times a projection's sigmoid: element by element, or one number for
    # each head (sigmoid_head: lfm3).
    attention_gate: Literal["none", "sigmoid", "sigmoid_head"] = "none"
    # plain: RMS over each head of the values, without a weight (gemma3n, gemma4).
    value_norm: Literal["none", "plain"] = "none"
    # instead: in the MLP's place. parallel: they read the stream through a norm and router of their
    # own, and are added to the MLP (gemma4).
    experts: Literal["instead", "parallel"] = "instead"
    # one: the residual stream. altup: `altup_streams` copies, of which the first goes through the
    # layer, with a short cut of low rank (gemma3n). hyper: `hc_streams` streams that are collapsed
    # to one before attention and before the MLP, and mixed after it (deepseek_v4).
    streams: Literal["one", "altup", "hyper"] = "one"
    # A number multiplies the stream after every layer (gemma4).
    layer_scale: bool = False
    # The output of attention and MLP is added to the stream, or, both times a factor, to the normed
    # stream (norm: minimax).
    residual: Literal["stream", "norm"] = "stream"
    # What mixes tokens where attention does not. In `delta_layers`: gated_delta, or kimi_delta,
    # whose state decays by channel (kimi_linear). In `conv_layers`: short_conv (lfm2). In
    # `ssm_layers`: mamba, with a rate for each number of the state, or mamba2, with one for each
    # head. In `lightning_layers`: lightning, linear attention that decays by head (minimax).
    recurrence: Literal[
        "none", "gated_delta", "short_conv", "mamba", "mamba2", "lightning", "kimi_delta"
    ] = "none"
    # Instead of attention, or in parallel, and the outputs are added (beside: falcon_h1).
    recurrence_place: Literal["instead", "beside"] = "instead"
    # both: a layer is a mixer and an MLP, each after a norm. one: it is one of the two, after its
    # only norm (mamba, nemotron_h).
    halves: Literal["both", "one"] = "both"
    # Norms on a mamba's time step, B and C: RMS without a weight (plain: falcon_mamba) or with one
    # (weighted: jamba).
    ssm_norms: Literal["none", "plain", "weighted"] = "none"
    # projections: inputs and outputs of the projections have factors (falcon_h1).
    multipliers: Literal["none", "projections"] = "none"

    # What follows is rounding, which shows in BF16 and F16 only.
    # float32: the scores are cast to float32, the probabilities back (most). input: the maximum is
    # subtracted in the scores' dtype before that cast (gpt-oss). none: no cast, torch's softmax of
    # 16-bit scores adds a row in float32 too, but in another order (bert).
    softmax_cast: Literal["float32", "input", "none"] = "float32"
    # table: cos and sin are rounded, and every product (most). table_and_result: cos and sin, then
    # the float32 result (cohere). result: the float32 result only (olmo2, olmo3, ernie, deepseek
    # v2).
    rope_cast: Literal["table", "table_and_result", "result"] = "table"
    # weights: the logits and the experts' weights are rounded (qwen2-moe, qwen3-moe, gpt-oss).
    # logits: the logits only (mixtral). none: nothing, the product is float32 too (deepseek,
    # hunyuan). product: the weights, of a float32 product (ernie).
    router_cast: Literal["weights", "logits", "none", "product"] = "weights"
    # Rounded is the result of gelu_tanh, or each step inside it (steps: gpt2, phi2).
    activation_cast: Literal["result", "steps"] = "result"

    def check(self) -> None:
        """Raise ArchError if a field has a value that its type does not list."""
        kinds = get_type_hints(BlockSpec)
        for name, values in (
            (each.name, get_args(kinds[each.name]) or (False, True)) for each in fields(self)
        ):
            if getattr(self, name) not in values:
                raise ArchError(
                    f"block field {name} is {getattr(self, name)!r}; expected one of {values}"
                )
