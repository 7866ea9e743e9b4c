"""Tiny models of the architectures that are known by their names only, made by transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

SIZES: Mapping[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 40,
    "vocab_size": 56, "max_position_embeddings": 128,
}  # fmt: skip
_TYPED = {**SIZES, "type_vocab_size": 3}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
            "sep_token_id": 2}  # fmt: skip
BASE, CAUSAL, MASKED = "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM"

# label -> (architecture, transformers' model type, loader, configuration)
LISTED: Mapping[str, tuple[str, str, str, Mapping[str, Any]]] = {
    "bert": ("bert", "bert", BASE, _TYPED),
    "roberta": ("roberta", "roberta", BASE, _TYPED),
    "xlm-roberta": ("roberta", "xlm-roberta", BASE, _TYPED),
    "camembert": ("roberta", "camembert", BASE, _TYPED),
    "distilbert": ("distilbert", "distilbert", BASE, {
        "dim": 24, "n_layers": 3, "n_heads": 6, "hidden_dim": 40, "vocab_size": 56,
        "max_position_embeddings": 128,
    }),
    "mpnet": ("mpnet", "mpnet", BASE, SIZES),
    "modernbert": ("modernbert", "modernbert", BASE, {**SIZES, **_SPECIAL}),
    "nomic_bert": ("nomic_bert", "nomic_bert", BASE, _TYPED),
    "jina_embeddings_v3": ("jina_embeddings_v3", "jina_embeddings_v3", BASE, _TYPED),
    "bloom": ("bloom", "bloom", CAUSAL, {
        "hidden_size": 24, "n_layer": 3, "n_head": 6, "vocab_size": 56,
    }),
    "mpt": ("mpt", "mpt", CAUSAL, {
        "d_model": 24, "n_layers": 3, "n_heads": 6, "vocab_size": 56, "max_seq_len": 128,
    }),
    "opt": ("opt", "opt", CAUSAL, {
        "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "ffn_dim": 40,
        "vocab_size": 56, "max_position_embeddings": 128, "word_embed_proj_dim": 24,
    }),
    "gpt_neo": ("gpt_neo", "gpt_neo", CAUSAL, {
        "hidden_size": 24, "num_layers": 4, "num_heads": 6, "intermediate_size": 40,
        "vocab_size": 56, "max_position_embeddings": 128,
        "attention_types": [[["global", "local"], 2]],
    }),
    "olmo": ("olmo", "olmo", CAUSAL, {**SIZES, "num_key_value_heads": 2}),
}  # fmt: skip
POOLED = ("bert", "jina_embeddings_v3")  # what a file of GGUF has no place for


def save(label: str, folder: Path) -> Any:
    """Write a tiny model with random weights as a folder; return it."""
    import torch
    import transformers

    auto: Any = transformers
    auto.logging.set_verbosity_error()
    _, kind, loader, values = LISTED[label]
    config = auto.AutoConfig.for_model(kind, **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = getattr(auto, loader).from_config(config)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(torch.randn(tensor.shape))
    model.save_pretrained(folder)
    return model
