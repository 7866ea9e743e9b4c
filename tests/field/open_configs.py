"""Keys of config.json and of GGUF that say something else than the tensors were made for."""

from tests.field.converter import Wrong, converted
from tests.field.hf import edited
from tests.field.row import Row, fault

ROWS: tuple[Row, ...] = (
    fault("bias-flag-off", "config", "llama-bias", "attention_bias is false, the biases are stored",
          "https://github.com/vllm-project/vllm/pull/3767",
          edited("llama-bias", "bias-flag-off", config={"attention_bias": False}),
          "missing_bias"),
    fault("mlp-bias-flag-off", "config", "llama-bias", "mlp_bias is false, the biases are stored",
          "https://github.com/mlc-ai/mlc-llm/pull/3494",
          edited("llama-bias", "mlp-bias-flag-off", config={"mlp_bias": False}),
          "missing_bias"),
    fault("low-factor-changed", "config", "llama-llama3", "another low_freq_factor",
          "https://github.com/ggml-org/llama.cpp/pull/18013",
          edited("llama-llama3", "low-factor-changed", config=lambda config: (
              config["rope_parameters"].update(low_freq_factor=2.0))),
          "rope_scaling", "rope_scaling*"),
    fault("trained-context-from-default", "config", "llama-yarn",
          "the trained context of the default",
          "https://github.com/ggml-org/llama.cpp/pull/8676",
          edited("llama-yarn", "trained-context-from-default", config=lambda config: (
              config["rope_parameters"].update(original_max_position_embeddings=64))),
          "rope_scaling", "rope_scaling*"),
    fault("rotary-of-glm", "config", "phi2", "the whole head rotates, for half of it",
          "https://github.com/ml-explore/mlx-lm/pull/1698",
          edited("phi2", "rotary-of-glm", config=lambda config: (
              config["rope_parameters"].update(partial_rotary_factor=1.0),
              config.update(partial_rotary_factor=1.0)) and None),
          "partial_rotary", "rope_dim"),
    fault("gelu-without-tanh", "config", "gemma2", "gelu where the model has its tanh form",
          "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4661",
          edited("gemma2", "gelu-without-tanh", config={"hidden_activation": "gelu"}),
          "activation", "activation"),
    fault("softcaps-not-carried", "config", "gemma2", "neither cap is in the copy",
          "https://github.com/paiml/realizar/issues/27",
          edited("gemma2", "softcaps-not-carried", config={
              "attn_logit_softcapping": None, "final_logit_softcapping": None}),
          "softcap", ("attn_softcap", "final_softcap")),
    fault("window-not-passed", "config", "mistral", "the window is not passed on",
          "https://github.com/axolotl-ai-cloud/axolotl/pull/732",
          edited("mistral", "window-not-passed", config={"sliding_window": None}),
          "sliding_window", "sliding_window"),
    fault("topk-flag-lost", "config", "qwen3_moe", "norm_topk_prob is not carried over",
          "https://github.com/NVIDIA/Megatron-LM/issues/1593",
          edited("qwen3_moe", "topk-flag-lost", config={"norm_topk_prob": False}),
          "moe_routing", "norm_topk"),
    fault("heads-of-another-size", "config", "llama", "half as many heads of double size",
          "https://github.com/vllm-project/vllm/pull/2622",
          edited("llama", "heads-of-another-size", config={
              "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20},
              num_attention_heads=6, num_key_value_heads=6, head_dim=10),
          "gqa_mapping", ("n_heads", "head_dim", "n_kv_heads")),
    fault("granite-multiplier-lost", "config", "granite", "no residual multiplier in the GGUF",
          "https://github.com/ggml-org/llama.cpp/pull/9412",
          converted("granite", "granite-multiplier-lost", wrong=Wrong(
              keys=lambda keys: keys.pop("granite.residual_scale") and None)),
          "multiplier", "residual_scale"),
    fault("local-base-lost", "config", "gemma3", "the local layers' own base is not carried",
          "https://github.com/google/gemma.cpp/issues/986",
          edited("gemma3", "local-base-lost", config=lambda config: (
              config["rope_parameters"]["sliding_attention"].update(rope_theta=10000.0))),
          "rope_theta", "rope_theta_local"),
    fault("linear-factor-lost", "config", "llama-linear", "GGUF's scaling keys are missing",
          "https://github.com/ollama/ollama/pull/3565",
          converted("llama-linear", "linear-factor-lost", wrong=Wrong(keys=lambda keys: (
              keys.pop("llama.rope.scaling.type"),
              keys.pop("llama.rope.scaling.factor")) and None)),
          "rope_scaling", "rope_scaling"),
)  # fmt: skip
