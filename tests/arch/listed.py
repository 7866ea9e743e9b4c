"""Tiny models made by transformers, of every architecture that is known by its names only."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

SIZES: Mapping[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 40,
    "vocab_size": 56, "max_position_embeddings": 128,
}  # fmt: skip
_TYPED = {**SIZES, "type_vocab_size": 3}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1,
            "sep_token_id": 2}  # fmt: skip
BASE, CAUSAL, MASKED = "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM"
SEQ2SEQ = "AutoModelForSeq2SeqLM"

_HYBRID = {**SIZES, **_SPECIAL, "num_hidden_layers": 4, "num_key_value_heads": 2}
_T5 = {
    "d_model": 24, "d_kv": 6, "d_ff": 40, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "vocab_size": 56, "relative_attention_num_buckets": 8,
}  # fmt: skip
_VISION = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 40,
    "image_size": 16, "patch_size": 4, "projection_dim": 12,
}  # fmt: skip
_LLAMA = {**SIZES, **_SPECIAL, "hidden_size": 28, "num_attention_heads": 7, "model_type": "llama"}
_QWEN = {**SIZES, **_SPECIAL, "hidden_size": 28, "num_attention_heads": 7, "num_key_value_heads": 1}
_SEES = {"depth": 4, "num_heads": 6, "patch_size": 4}

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
    "gpt_neo": ("gpt_neo", "gpt_neo", CAUSAL, {
        "hidden_size": 24, "num_layers": 4, "num_heads": 6, "intermediate_size": 40,
        "vocab_size": 56, "max_position_embeddings": 128,
        "attention_types": [[["global", "local"], 2]],
    }),
    "olmo": ("olmo", "olmo", CAUSAL, {**SIZES, "num_key_value_heads": 2}),
    "bitnet": ("bitnet", "bitnet", CAUSAL, {
        **SIZES, **_SPECIAL, "num_key_value_heads": 2, "tie_word_embeddings": True,
    }),
    "eurobert": ("eurobert", "eurobert", MASKED, {**SIZES, **_SPECIAL, "num_key_value_heads": 2}),
    "persimmon": ("persimmon", "persimmon", CAUSAL, SIZES),
    "xglm": ("xglm", "xglm", CAUSAL, {
        "d_model": 24, "num_layers": 3, "attention_heads": 6, "ffn_dim": 40, "vocab_size": 56,
        "max_position_embeddings": 128,
    }),
    "biogpt": ("biogpt", "biogpt", CAUSAL, SIZES),
    "codegen": ("codegen", "codegen", CAUSAL, {
        "n_embd": 24, "n_layer": 3, "n_head": 4, "vocab_size": 56, "n_positions": 128,
        "rotary_dim": 4,
    }),
    "rwkv": ("rwkv", "rwkv", CAUSAL, {
        "hidden_size": 24, "num_hidden_layers": 3, "vocab_size": 56, "attention_hidden_size": 36,
        "intermediate_size": 40, "context_length": 64,
    }),
    "jamba": ("jamba", "jamba", CAUSAL, {
        **_HYBRID, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "mamba_d_state": 5, "mamba_dt_rank": 3,
    }),
    "t5": ("t5", "t5", SEQ2SEQ, _T5),
    "t5-v1.1": ("t5_gated", "t5", SEQ2SEQ, {
        **_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }),
    "mt5": ("t5_gated", "mt5", SEQ2SEQ, _T5),
    "umt5": ("umt5", "umt5", SEQ2SEQ, {**_T5, "num_decoder_layers": 4}),
    "t5-encoder": ("t5_encoder", "t5", "T5EncoderModel", _T5),
    "t5-v1.1-encoder": ("t5_gated_encoder", "t5", "T5EncoderModel", {
        **_T5, "feed_forward_proj": "gated-gelu",
    }),
    "umt5-encoder": ("umt5_encoder", "umt5", "UMT5EncoderModel", _T5),
    "whisper": ("whisper", "whisper", "AutoModelForSpeechSeq2Seq", {
        "d_model": 24, "encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 6,
        "decoder_attention_heads": 6, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36,
        "vocab_size": 56, "num_mel_bins": 8, "max_source_positions": 30,
        "max_target_positions": 20, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 1,
    }),
    "clip_vision": ("clip_vision", "clip_vision_model", BASE, _VISION),
    "siglip_vision": ("siglip_vision", "siglip_vision_model", BASE, _VISION),
    "gemma3_vision": ("gemma3_vision", "gemma3", "AutoModelForImageTextToText", {
        "text_config": {**_HYBRID, "head_dim": 6}, "mm_tokens_per_image": 4,
        "vision_config": {**_VISION, "vision_use_head": False},
        "image_token_index": 55, "boi_token_index": 53, "eoi_token_index": 54,
    }),
    "pixtral_vision": ("pixtral_vision", "llava", "AutoModelForImageTextToText", {
        "text_config": _LLAMA,
        "vision_config": {**_VISION, "model_type": "pixtral", "hidden_act": "silu"},
    }),
    "mistral3_vision": ("pixtral_vision", "mistral3", "AutoModelForImageTextToText", {
        "text_config": {**_LLAMA, "model_type": "mistral"}, "spatial_merge_size": 2,
        "vision_config": {**_VISION, "model_type": "pixtral"},
    }),
    "qwen2_vl_vision": ("qwen2_vl_vision", "qwen2_vl", "AutoModelForImageTextToText", {
        "text_config": _QWEN, "vision_config": {
            **_SEES, "embed_dim": 24, "hidden_size": 28, "mlp_ratio": 3,
        },
    }),
    "qwen2_5_vl_vision": ("qwen2_5_vl_vision", "qwen2_5_vl", "AutoModelForImageTextToText", {
        "text_config": _QWEN, "vision_config": {
            **_SEES, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 28,
            "fullatt_block_indexes": [1, 3],
        },
    }),
    "qwen3_vl_vision": ("qwen3_vl_vision", "qwen3_vl", "AutoModelForImageTextToText", {
        "text_config": _QWEN, "vision_config": {
            **_SEES, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 28,
            "num_position_embeddings": 36, "deepstack_visual_indexes": [1, 3],
        },
    }),
    "qwen3_vl_moe_vision": ("qwen3_vl_vision", "qwen3_vl_moe", "AutoModelForImageTextToText", {
        "text_config": {**_QWEN, "num_experts": 4, "moe_intermediate_size": 20},
        "vision_config": {
            **_SEES, "hidden_size": 24, "intermediate_size": 40, "out_hidden_size": 28,
            "num_position_embeddings": 16, "deepstack_visual_indexes": [],
        },
    }),
    "qwen2_audio_tower": ("qwen2_audio_tower", "qwen2_audio",
                          "Qwen2AudioForConditionalGeneration", {
        "text_config": {**_LLAMA, "model_type": "qwen2"},
        "audio_config": {
            "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 6,
            "encoder_ffn_dim": 40, "num_mel_bins": 8, "max_source_positions": 30,
        },
    }),
    "voxtral_tower": ("voxtral_tower", "voxtral", "VoxtralForConditionalGeneration", {
        "text_config": _LLAMA,
        "audio_config": {
            "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6,
            "intermediate_size": 96, "num_mel_bins": 8, "max_source_positions": 30,
        },
    }),
    "mimo": ("mimo", "qwen2", CAUSAL, {**SIZES, "num_key_value_heads": 2}),
    "mimo_v2": ("mimo_v2", "mimo_v2_flash", CAUSAL, {
        **SIZES, "num_key_value_heads": 1, "head_dim": 6, "v_head_dim": 4, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    }),
}  # fmt: skip
# Models whose checkpoints bring their own code: transformers' class that computes the same.
REMOTE = {"mimo": {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}}
# The half of a model that an architecture is: what its names begin with, as published and as
# transformers 5 writes them.
_PROJECTOR = "multi_modal_projector."
CUT = {
    "gemma3_vision": {"vision_tower.": "vision_tower.vision_model.", _PROJECTOR: _PROJECTOR},
    "pixtral_vision": {"vision_tower.": "vision_tower.", _PROJECTOR: _PROJECTOR},
    "mistral3_vision": {"vision_tower.": "vision_tower.", _PROJECTOR: _PROJECTOR},
    **{
        f"{name}_vision": {"model.visual.": "visual.", "visual.": "visual."}
        for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    },
    "qwen2_audio_tower": {"audio_tower.": "audio_tower.", _PROJECTOR: _PROJECTOR},
    "voxtral_tower": {"audio_tower.": "audio_tower.", _PROJECTOR: _PROJECTOR},
}
# What a file of GGUF has no place for.
HOMELESS = {
    "siglip_vision": "v.head",
    "bert": "pooler",
    "jina_embeddings_v3": "pooler",
    "eurobert": "output.weight",
}
# Roles whose names the gguf package's map does not know: joined experts that the converter cuts,
# and norms that it names itself.
UNMAPPED = {
    **dict.fromkeys(("qwen2_vl_vision", "qwen2_5_vl_vision"), ("attn_q", "attn_k", "attn_v")),
    **dict.fromkeys(
        ("qwen3_vl_vision", "qwen3_vl_moe_vision"), ("v.deepstack", "v.post_ln", "mm.0", "mm.2")
    ),
    "clip_vision": ("v.class_embd",),  # named without a suffix
    "llama4": ("ffn_gate_exps", "ffn_up_exps"),
    "bitnet": ("attn_sub_norm", "ffn_sub_norm"),
}


def built(kind: str, loader: str, values: Mapping[str, Any]) -> Any:
    """Return a tiny model with random weights."""
    import torch
    import transformers

    auto: Any = transformers
    auto.logging.set_verbosity_error()
    config = auto.AutoConfig.for_model(kind, **values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = getattr(auto, loader)
        model = getattr(made, "from_config", made)(config)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.copy_(torch.randn(tensor.shape))
    return model


def save(label: str, folder: Path) -> Any:
    """Write a tiny model with random weights as a folder; return it."""
    _, kind, loader, values = LISTED[label]
    model = built(kind, loader, values)
    model.save_pretrained(folder)
    if label in REMOTE:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | REMOTE[label]))
    cut(label, folder)
    return model


def cut(label: str, folder: Path) -> None:
    """Leave the half of a model that the label's architecture is, under its published names."""
    if label not in CUT:
        return
    path = folder / "model.safetensors"
    kept = {
        name.replace(now, published, 1): values
        for name, values in load_file(path).items()
        for now, published in CUT[label].items()
        if name.startswith(now)
    }
    save_file(kept, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": LISTED[label][0]}))
