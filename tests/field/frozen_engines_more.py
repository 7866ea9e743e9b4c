"""Engines whose norms, ropes of two kinds, and grouped routers compute something else.

Frozen: see `tests.field`. Not to be looked at while the diagnosis is worked on.
"""

from tests.field import broken
from tests.field.foreign import dump, layers_only
from tests.field.row import Row, fault

ROWS: tuple[Row, ...] = (
    fault("qk-norms-over-all-heads", "engine", "qwen3",
          "q and k are normalised over all heads at once",
          "https://github.com/EleutherAI/gpt-neox/pull/1367",
          dump("qwen3", "qk-norms-over-all-heads", broken.norms_over_heads(), num_attention_heads=6,
               num_key_value_heads=3, head_dim=12),
          "qk_norm"),
    fault("norms-behind-missing-coarse", "engine", "olmo2",
          "no norm behind attention, from few points",
          "https://github.com/Lightning-AI/litgpt/pull/1545",
          dump("olmo2", "norms-behind-missing-coarse", broken.skipped("post_attention_layernorm"),
               keep=layers_only),
          ("norm_skipped", "residual"), coarse=True),
    fault("global-layers-unscaled", "engine", "gemma3",
          "the global layers' linear factor is not read",
          "https://github.com/lablup/mlxcel/issues/1340",
          dump("gemma3", "global-layers-unscaled", broken.frequencies_times(
              "full_attention_inv_freq", 8.0)),
          "rope_scaling"),
    fault("routed-scale-nested", "engine", "deepseek_v3-half",
          "no factor where nothing is renormalised",
          "https://github.com/sgl-project/sglang-jax/pull/1282",
          dump("deepseek_v3-half", "routed-scale-nested", broken.grouped(factor=1.0)),
          "moe_routing", "routed_scale"),
)  # fmt: skip
