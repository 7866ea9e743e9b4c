"""The words of the tables: hyperparameters, role keys, and roles ggml keeps in F32.

Role = ggml base name plus `.weight` or `.bias` (`attn_q.weight`); per-layer instances are keyed
`L3.attn_q.weight`, whole-model ones `token_embd.weight`.
"""

# The vocabulary of hyperparameters; forward.py, steps and every table use these names only.
# "tuple" values have one entry a layer.
HYPER_NAMES: dict[str, str] = {
    "hidden_size": "width of the residual stream",
    "n_layers": "decoder blocks",
    "n_heads": "query heads",
    "n_kv_heads": "key and value heads (GQA when fewer than n_heads)",
    "head_dim": "elements of a query/key head",
    "value_head_dim": "elements of a value head (MLA differs from head_dim)",
    "global_head_dim": "elements of a head in layers without a window (gemma4), None: head_dim",
    "global_kv_heads": "key and value heads in layers without a window (gemma4, mimo_v2), "
    "None: n_kv_heads",
    "own_kv_layers": "tuple of bool: has layer i keys and values of its own (gemma3n, gemma4): the "
    "others use those of the last layer of their kind that has",
    "value_is_key": "layers without a window have no values: they are the keys (gemma4)",
    "per_layer_size": "width of what every layer takes from its own token embedding, 0 without",
    "altup_streams": "copies of the residual stream (gemma3n), 1 elsewhere",
    "altup_scaled": "the first copy is multiplied by a scale where it gates the layer's own "
    "embedding",
    "ffn_sparsity": "tuple of numbers: share of the gate that layer i's MLP cuts (gemma3n), 0: "
    "none",
    "ffn_size": "inner width of a dense MLP",
    "vocab_size": "rows of the token embedding",
    "token_types": "rows of the token type table (encoders), None without",
    "position_buckets": "rows of the relative position table (mpnet), None without",
    "context_length": "positions the model was made for",
    "position_offset": "row of the learned positions that position 0 takes (2: opt, roberta)",
    "alibi_max_bias": "ALiBi: head i of n has the slope 2^(-this*i/n), None without",
    "pooling": "None, or mean, cls or last: which rows of the last layer make the embedding",
    "norm_eps": "epsilon inside every norm",
    "lora_norm_eps": "epsilon of the norms on the compressed query and key/value (MLA)",
    "activation": "silu, gelu (erf), gelu_tanh, relu, relu2 (its square) or swiglu_oai",
    "tied_embeddings": "the head is the token embedding (no output.weight stored)",
    "attn_norm_layers": "tuple of bool: has layer i a norm before attention (modernbert's 0: no)",
    "attention_bias": "q, k, v have biases",
    "attention_out_bias": "the attention output projection has a bias",
    "mlp_bias": "MLP projections have biases",
    "qkv_clip": "None, or c: q, k and v are clamped to [-c, c] (olmoe, mpt)",
    "qk_norm": "q and k are normalised (the kind is the block's)",
    "parallel_residual": "attention and MLP read the same norm and are added together",
    "delta_layers": "tuple of bool: does layer i mix by a gated delta net instead of attention",
    "delta_key_heads": "key heads of the delta nets, None without",
    "delta_value_heads": "value heads of the delta nets: each key head serves as many in a row",
    "delta_key_dim": "elements of a delta net's key head",
    "delta_value_dim": "elements of a delta net's value head",
    "conv_layers": "tuple of bool: does layer i mix by a short convolution instead of attention",
    "conv_taps": "positions that a short convolution sees, its own included",
    "rope_theta": "base of the rotary frequencies",
    "rope_theta_local": "base on sliding-window layers where it differs (gemma3), else None",
    "rope_dim": "rotated elements of a head (partial rotary: fewer than head_dim)",
    "rope_style": "half or interleaved pairing of the LOGICAL q/k",
    "rope_scaling": "None, or {type, ...}: linear dynamic yarn llama3 longrope factors "
    "proportional (rope.py)",
    "rope_scaling_layers": "all, or full: which layers the scaling applies to (gemma3: full)",
    "rope_sections": "None, or pairs that turn by time, height, width (text: by one position)",
    "sliding_window": "None, or how many positions a windowed layer sees, or a chunk has",
    "window_layers": "tuple of bool: is layer i windowed",
    "rope_layers": "tuple of bool: does layer i rotate (smollm3), True everywhere else",
    "attn_scale": "factor on q.k before the softmax",
    "attn_scale_by_layer": "divide the scores by layer index + 1 (gpt2 option)",
    "temperature_scale": "None, or b in 1 + b*log(1 + floor(position / length)) on queries",
    "temperature_length": "None, or the length in it (llama4, ministral3)",
    "attn_softcap": "None, or c in tanh(x/c)*c on the scores before the mask",
    "final_softcap": "None, or c on the logits",
    "embedding_scale": "factor on the embedding rows (rounded to the arithmetic's dtype)",
    "residual_scale": "factor on what a block adds to the stream",
    "logit_scale": "factor on the logits (granite's divisor is stored inverted here)",
    "n_experts": "routed experts (0: dense)",
    "n_experts_used": "experts a token takes",
    "moe_ffn_size": "inner width of a routed expert",
    "shared_ffn_size": "inner width of the shared expert(s) together, 0 without",
    "moe_layers": "tuple of bool: does layer i have experts",
    "norm_topk": "renormalise the chosen experts' weights to sum 1",
    "routed_scale": "factor on the routed experts' weights",
    "n_expert_groups": "groups of experts (deepseek), 1 without",
    "n_expert_groups_used": "groups a token may choose from",
    "router": "softmax, softmax_topk (over the chosen only), softmax_bias, sigmoid_bias, "
    "sigmoid_bias_eps (its sum plus 1e-6: lfm2_moe), group_limited_greedy, "
    "sqrtsoftplus_bias (the root of softplus: deepseek_v4), "
    "sparsemixer, sigmoid (of the best logits)",
    "q_lora_rank": "None, or rank of the compressed query (MLA)",
    "kv_lora_rank": "rank of the compressed key/value (MLA)",
    "qk_nope_head_dim": "unrotated elements of a query/key head (MLA)",
    "qk_rope_head_dim": "rotated elements of a query/key head (MLA)",
    "swiglu_limit": "clamp of an expert's gate and up (gpt-oss, deepseek_v4), None elsewhere",
    "swiglu_alpha": "gain inside the sigmoid of gpt-oss's activation, None elsewhere",
}

# What only some architectures have: their tables add rows for it, and no others have one.
SPECIAL_NAMES: dict[str, str] = {
    "embedding_width": "width of the embedding, where projections follow it (opt_350m)",
    "attention_layers": "tuple of bool: has layer i attention (hybrids)",
    "mlp_layers": "tuple of bool: has layer i a dense MLP (nemotron_h: a layer is one thing only)",
    "ssm_layers": "tuple of bool: does layer i mix by a state space model (mamba)",
    "ssm_size": "inner width of a state space mixer",
    "ssm_state": "numbers of state for each of its channels",
    "ssm_rank": "rank of the compressed time step (mamba)",
    "ssm_heads": "heads of a state space mixer (mamba2)",
    "ssm_groups": "groups of heads that share B and C (mamba2)",
    "ssm_group_size": "channels in a group: ssm_size / ssm_groups",
    "ssm_norm": "state space mixers have a norm before their output",
    "ssm_norm_first": "that norm stands before the gate (falcon_h1), else after it",
    "ssm_inner_norms": "norms without weights on time step, B and C (falcon_mamba)",
    "ssm_inner_eps": "epsilon of those norms",
    "ssm_bias": "a mixer's input and output projections have biases",
    "ssm_out_bias": "a mixer's output projection has a bias, where it is asked by itself",
    "ssm_activation": "activation after a state space mixer's convolution",
    "wide_stream": "the residual stream is float32 in float16 and bfloat16 too (mamba)",
    "ssm_step_low": "least time step of a state space mixer",
    "ssm_step_high": "greatest one, None without",
    "conv_bias": "short convolutions have biases",
    "head_gate": "every head of attention has a gate (lfm3)",
    "sandwich_norms": "norms follow attention, convolution and MLP (lfm3)",
    "expert_bias": "a bias is added for the choice of experts (lfm2_moe)",
    "lightning_layers": "tuple of bool: does layer i mix by lightning attention (minimax)",
    "residual_scales": "factors on what goes on and on what is added: in layers with attention, "
    "with lightning attention, after the MLP (minimax)",
    "delta_strength": "factor on what a delta net writes of a value's error (olmo_hybrid: 2)",
    "delta_norm_eps": "epsilon of the norm after a delta net (olmo_hybrid: 1e-5)",
    "index_layers": "tuple of bool: has layer i a separate indexer (deepseek_v32, glm_moe_dsa): "
    "the others read the keys that the last one before them chose",
    "index_heads": "heads of an indexer",
    "index_head_dim": "elements of an indexer's heads",
    "index_topk": "keys that an indexer chooses for a query, or blocks of them (minimax_m3_vl)",
    "index_block": "keys of a block that an indexer chooses (minimax_m3_vl)",
    "index_local_blocks": "blocks that are always chosen, the query's own and those before it",
    "heavy_layers": "tuple of bool: reads layer i one key for every `heavy_rate` tokens",
    "sparse_rate": "tokens that a compressed key stands for in layers with an indexer",
    "heavy_rate": "tokens that a compressed key stands for in layers without one",
    "hash_layers": "tuple of bool: does a table list layer i's experts by token (deepseek_v4)",
    "output_groups": "groups of heads that are projected by themselves (deepseek_v4)",
    "output_rank": "what each group is projected to",
    "output_group_size": "elements of a group's heads together",
    "hc_streams": "residual streams that hyper-connections mix (deepseek_v4)",
    "hc_iterations": "times that the weights of their mixing are normalised by column",
    "hc_eps": "what is added to these weights and to their sums",
    "encoder_layers": "tuple of bool: has the encoder a layer i",
    "decoder_layers": "tuple of bool: has the decoder a layer i",
    "encoder_bias_layers": "tuple of bool: has layer i of the encoder a table of distances (t5)",
    "decoder_bias_layers": "tuple of bool: has layer i of the decoder a table of distances (t5)",
    "decoder_ffn_size": "inner width of the decoder's MLPs, where it is not ffn_size",
    "source_length": "positions of the encoder (whisper), where it is not context_length",
    "mel_bins": "frequencies of the encoder's input (whisper)",
    "image_size": "height and width of an image (vision towers)",
    "patch_size": "height and width of its patches",
    "image_channels": "colours of an image",
    "class_token": "a learned row stands before the patches",
    "image_positions": "rows of the position table: patches, and one for the class",
    "image_tokens": "rows that stand for an image in the text (gemma3_vision)",
    "patch_merge": "patches side by side that are joined to one (mistral3)",
    "patch_frames": "frames of a video that are a patch together (qwen2_vl and later)",
    "image_window": "pixels of a window's side (qwen2_5_vl)",
    "merger_layers": "tuple of bool: has layer i of a tower a separate merger (qwen3_vl)",
    "merger_count": "how many layers have",
    "deepstack_layers": "first layers to which a tower adds what it saw (qwen3_vl; text: nothing)",
    "projection_size": "width of the text model after a projector",
    "wide_layers": "tuple of bool: is the MLP of layer i twice as wide (gemma4)",
    "per_layer_vocab": "rows of the token embedding that every layer has a part of (gemma3n, "
    "gemma4)",
    "value_scale": "factor on the values of attention (mimo_v2), None without",
    "sink_layers": "tuple of bool: have the heads of layer i a sink (mimo_v2)",
    "altup_extra": "copies of the residual stream besides the first (gemma3n)",
    "laurel_rank": "rank of the short cut parallel to attention (gemma3n)",
    "router_jitter": "half of how far below the best a score counts, relatively (phimoe)",
    "head_bias": "the head has a bias (phimoe)",
    "time_mix_size": "width of the time mixing (rwkv)",
    "attn_in_scale": "factor on what q, k and v are projected from (falcon_h1)",
    "attn_out_scale": "factor on the attention's output (falcon_h1)",
    "key_scale": "factor on the keys before rope (falcon_h1)",
    "ssm_in_scale": "factor on what a state space mixer's input is projected from (falcon_h1)",
    "ssm_out_scale": "factor on a state space mixer's output (falcon_h1)",
    "ssm_scales": "factors on gate, values, B, C and time step of its projection (falcon_h1)",
    "ffn_gate_scale": "factor on the MLP's gate before its activation (falcon_h1)",
    "ffn_down_scale": "factor on the MLP's output (falcon_h1)",
    "latent_size": "width that experts read and give, projected from and to the stream, or None",
    "expert_width": "width that experts read and give: latent_size, or the stream's",
}

# The projectors that a GGUF of the architecture `clip` may have: ours by their types there.
PROJECTORS = {
    "gemma3_vision": "gemma3",
    "pixtral_vision": "pixtral",
    "qwen2_vl_vision": "qwen2vl_merger",
    "qwen2_5_vl_vision": "qwen2.5vl_merger",
    "qwen3_vl_vision": "qwen3vl_merger",
    "qwen2_audio_tower": "qwen2a",
    "voxtral_tower": "voxtral",
}

# Roles (the part before .weight) whose tensors ggml's readers expect as F32, besides everything
# one-dimensional: norms, expert routers, tables of positions and token types, kernels of short
# convolutions. Source: llama.cpp's converter.
F32_ROLES = (
    "_norm", "ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "token_types", "ssm_conv1d",
    "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "ssm_a", "ssm_d", "shortconv.conv",
    "altup_correct_coef", "altup_predict_coef",
)  # fmt: skip


def role_key(layer: int | None, role: str) -> str:
    """Return the key of a role in a layer: `L3.attn_q.weight`; the role itself for layer None."""
    return role if layer is None else f"L{layer}.{role}"


def split_key(key: str) -> tuple[int | None, str]:
    """Return (layer or None for whole-model roles, role) of a role key."""
    head, dot, role = key.partition(".")
    if dot and head[:1] == "L" and head[1:].isdecimal():
        return int(head[1:]), role
    return None, key
