"""The text of models that see, with a head: transformers' own text models, as causal ones.

transformers runs a text of qwen2_vl and its kin only inside the whole model, which brings a tower.
The classes here join its text model and a head as the whole model does; they are registered, so
that AutoModelForCausalLM builds and loads them like any other.
"""

import importlib
from functools import cache
from typing import Any

# transformers' prefix -> its module
HEADLESS = {
    "Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl",
    "Qwen3VLMoe": "qwen3_vl_moe",
}  # fmt: skip


@cache
def causal(prefix: str) -> Any:
    """Return the class of a text model with its head, registered for its configuration."""
    import torch
    import transformers
    from transformers.modeling_outputs import CausalLMOutputWithPast

    auto: Any = transformers
    module = f"transformers.models.{HEADLESS[prefix]}.modeling_{HEADLESS[prefix]}"
    code: Any = importlib.import_module(module)
    config_class = getattr(auto, f"{prefix}TextConfig")
    base: Any = getattr(code, f"{prefix}PreTrainedModel")

    def init(self: Any, config: Any) -> None:
        if not hasattr(config, "tie_word_embeddings"):  # only the whole model's has it
            config.tie_word_embeddings = False
        if prefix.startswith("Qwen2"):  # every pair must be in a section
            pairs = config.hidden_size // config.num_attention_heads // 2
            config.rope_parameters.setdefault("mrope_section", [pairs - pairs // 2, pairs // 2, 0])
        base.__init__(self, config)
        self.model = getattr(code, f"{prefix}TextModel")(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self: Any, input_ids: Any = None, **options: Any) -> Any:
        out = self.model(input_ids=input_ids, **options)
        return CausalLMOutputWithPast(
            logits=self.lm_head(out.last_hidden_state), past_key_values=out.past_key_values
        )

    made = type(
        f"{prefix}TextModel",
        (base, auto.GenerationMixin),
        {
            "__module__": module,
            "__init__": init,
            "forward": forward,
            "config_class": config_class,
            "config": None,
            "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
        },
    )
    auto.AutoModelForCausalLM.register(config_class, made, exist_ok=True)
    return made


def registered() -> None:
    """Let AutoModelForCausalLM build and load every such model."""
    for prefix in HEADLESS:
        causal(prefix)
