"""Keys of config.json and of GGUF that say something else than the tensors were made for.

Frozen: see `tests.field`. Not to be looked at while the diagnosis is worked on.
"""

from tests.field.hf import edited
from tests.field.row import Row, fault

ROWS: tuple[Row, ...] = (
    fault("llama3-block-lost", "config", "llama-llama3", "no scaling in the copy's config",
          "https://github.com/felafax/felafax/issues/59",
          edited("llama-llama3", "llama3-block-lost", config={
              "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
          "rope_scaling", "rope_scaling"),
    fault("attention-factor-dropped", "config", "llama-yarn-factor", "a sub-key of yarn is dropped",
          "https://github.com/ml-explore/mlx-lm/pull/1507",
          edited("llama-yarn-factor", "attention-factor-dropped", config=lambda config: (
              config["rope_parameters"].pop("attention_factor") and None)),
          "rope_scaling", "rope_scaling*"),
    fault("partial-factor-lost", "config", "stablelm", "the rotated part of a head is the whole",
          "https://github.com/InternLM/lmdeploy/pull/3861",
          edited("stablelm", "partial-factor-lost", config=lambda config: (
              config["rope_parameters"].update(partial_rotary_factor=1.0),
              config.update(partial_rotary_factor=1.0)) and None),
          "partial_rotary", "rope_dim"),
    fault("eps-of-the-first-file", "config", "llama", "1e-6 where the weights had another",
          "https://github.com/meta-llama/llama/issues/771",
          edited("llama", "eps-of-the-first-file", config={"rms_norm_eps": 1e-6}),
          "norm_eps", "norm_eps"),
    fault("window-flag-off", "config", "qwen2", "use_sliding_window is false in the copy",
          "https://github.com/EricLBuehler/candle-vllm/pull/140",
          edited("qwen2", "window-flag-off", config=lambda config: (
              config.update(use_sliding_window=False, sliding_window=None,
                            layer_types=["full_attention"] * config["num_hidden_layers"]))),
          "sliding_window", "sliding_window"),
)  # fmt: skip
