"""Engines with two to four faults at once."""

from tests.field import broken
from tests.field.foreign import (
    attention,
    configured,
    dump,
    frequencies,
    own_layer,
    plain_frequencies,
    setting,
    weights,
)
from tests.field.row import Row, cause, fault

ROWS: tuple[Row, ...] = (
    fault("bias-and-eps", "engine", "qwen2", "no biases, and the default epsilon",
          "https://github.com/sbryngelson/ANEForge/pull/253 "
          "https://github.com/foundation-model-stack/foundation-model-stack/pull/99",
          dump("qwen2", "bias-and-eps", setting("RMSNorm", variance_epsilon=1e-6),
               *(weights(f"{p}_proj.bias", lambda x: 0 * x) for p in "qkv")),
          [cause("norm_eps", "norm_eps"), cause("missing_bias", "L0.attn_?.bias")]),
    fault("gemma2-three", "engine", "gemma2", "cap, scale and window of a whole family lost",
          "https://github.com/sgl-project/sglang/issues/33915 "
          "https://github.com/ggml-org/llama.cpp/pull/8444",
          dump("gemma2", "gemma2-three", setting("Gemma2Attention", scaling=16**-0.5,
               attn_logit_softcapping=None), attention(mask=broken.all_keys)),
          [cause("attention_scale", "attn_scale"), cause("softcap", "attn_softcap"),
           cause("sliding_window", ("sliding_window", "L?.sliding_window"))]),
    fault("base-gqa-eps", "engine", "llama", "default base, default epsilon, key heads tiled",
          "https://github.com/marin-community/levanter/pull/649 "
          "https://github.com/ekzhang/jax-js/pull/180",
          dump("llama", "base-gqa-eps", frequencies(plain_frequencies(1e4)),
               setting("RMSNorm", variance_epsilon=1e-6), attention(repeat="tile")),
          [cause("norm_eps", "norm_eps"), cause("rope_theta", "rope_theta"),
           cause("gqa_mapping", "n_kv_heads")]),
    fault("granite-four", "engine", "granite", "all four factors of the family are missing",
          "https://github.com/OpenNMT/CTranslate2/pull/1882",
          dump("granite", "granite-four", setting("DecoderLayer", residual_multiplier=1.0),
               setting("GraniteAttention", scaling=lambda a: a.head_dim**-0.5),
               setting("GraniteModel", embedding_multiplier=1.0), configured(logits_scaling=1.0)),
          [cause("multiplier", "embedding_scale"), cause("attention_scale", "attn_scale"),
           cause("multiplier", "residual_scale"), cause("multiplier", "logit_scale")]),
    fault("gemma-three", "engine", "gemma", "w + 2, exact gelu, and the embedding not multiplied",
          "https://github.com/utensils/mold/pull/1078 "
          "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4661",
          dump("gemma", "gemma-three", broken.norms_times(lambda w: w + 1),
               broken.activation("gelu"), broken.unscaled_embedding()),
          [cause("multiplier", "embedding_scale"), cause("norm_offset", "norm_offset"),
           cause("activation", ("activation", "L?.activation"))]),
    fault("moe-and-rope", "engine", "qwen3_moe", "weights not renormalised, and another base",
          "https://github.com/pytorch/torchtitan/issues/1448 "
          "https://github.com/Luce-Org/lucebox/pull/447",
          dump("qwen3_moe", "moe-and-rope", broken.routed(False),
               frequencies(plain_frequencies(1e6))),
          [cause("rope_theta", "rope_theta"), cause("moe_routing", "norm_topk")]),
    fault("phi-three", "engine", "phi2", "epsilon, activation and the rotated part's base",
          "https://github.com/pie-project/pie/pull/603 "
          "https://github.com/paiml/aprender/pull/2096",
          dump("phi2", "phi-three", setting("LayerNorm", eps=1e-5), broken.activation("silu"),
               frequencies(plain_frequencies(1e6))),
          [cause("norm_eps", "norm_eps"), cause("rope_theta", "rope_theta"),
           cause("activation", ("activation", "L?.activation"))]),
    fault("four-at-once", "engine", "qwen2", "pairs, biases, mask and activation",
          "https://github.com/kekzl/imp/pull/503 https://github.com/sbryngelson/ANEForge/pull/253",
          dump("qwen2", "four-at-once", broken.pairs(), attention(mask=broken.no_mask),
               broken.activation("gelu"), *(weights(f"{p}_proj.bias",
               lambda x: 0 * x) for p in "qkv"),
               use_sliding_window=False, sliding_window=None, hidden_size=60, num_attention_heads=5,
               num_key_value_heads=1),
          [cause("missing_bias", "L0.attn_?.bias"), cause("rope_pairing", "rope_style"),
           cause("mask", "mask"), cause("activation", ("activation", "L?.activation"))]),
    fault("norm-stream-and-theta", "engine", "llama",
          "the norm's result is the stream, another base",
          "https://github.com/allenai/OLMo/pull/680 https://github.com/huggingface/nanotron/pull/188",
          dump("llama", "norm-stream-and-theta", own_layer(mlp_from="normed"),
               frequencies(plain_frequencies(1e4))),
          [cause("rope_theta", "rope_theta"), cause("residual", ("residual", "L?.residual"))]),
)  # fmt: skip
