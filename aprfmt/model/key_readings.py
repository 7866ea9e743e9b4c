"""How each metadata key and each key of a folder's JSON files is used, if not as hyperparameter."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, TypeVar

Reading = Literal[
    "role",
    "part of",
    "hyperparameter",
    "tokenizer part",
    "setting",
    "text",
    "without effect",
    "contradicted",
    "unread",
]


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """A table row: a regular expression of key names, how these keys are used, and the source.

    `as_stored`: no comparison knows their meaning, so two files are compared by stored values.
    `needed`: a model whose file of this kind lacks them is another model.
    """

    names: str
    reading: Reading
    source: str
    as_stored: bool = False
    needed: bool = False


class Names(Protocol):
    """A table row with a regular expression `names`, for `matching_row`."""

    @property
    def names(self) -> str:
        """The regular expression of the names that the row covers."""
        ...


Row = TypeVar("Row", bound=Names)
_SPEC = "the GGUF specification: it describes the file, and no loader reads it"
_OURS = (
    KeyPattern(r"aprfmt\.hf_config", "hyperparameter", "config.json, whose keys are items"),
    KeyPattern(r"aprfmt\.hyper\.\w+", "hyperparameter", "what the format has no key for"),
    KeyPattern(
        r"aprfmt\.(files|metadata|source\.metadata|gguf\.(metadata|tokenizer))",
        "part of",
        "files and keys of the source, which are items",
    ),
    KeyPattern(
        r"aprfmt\.(gguf_vocabulary|source\.(encodings|restore|stored))",
        "part of",
        "how the source's bits come back",
    ),
    KeyPattern(
        r"aprfmt\.(allowed_missing|dropped|repair\.missing)",
        "setting",
        "what is missing on purpose",
    ),
    KeyPattern(
        r"aprfmt\.(writer|source\.(file|format|size|sha256|writer)|quantize\.[\w.]+|"
        r"merged_adapters|generic|demo_model)",
        "text",
        "what the file was made of, and by what",
    ),
    KeyPattern(r"quantize\.imatrix\.\w+", "text", "llama-quantize: what it weighed by"),
)
# By the style of the keys: those of the container.
METADATA: Mapping[str, tuple[KeyPattern, ...]] = {
    "gguf": (
        *_OURS,
        KeyPattern(r"general\.architecture", "hyperparameter", "which tables the file is read by"),
        KeyPattern(
            r"general\.(alignment|file_type|quantization_version)",
            "setting",
            "the GGUF specification: how the file lies",
        ),
        KeyPattern(
            r"general\.sampling\.(sequence|top_k|top_p|min_p|xtc_probability|xtc_threshold|temp|"
            r"penalty_last_n|penalty_repeat|mirostat|mirostat_tau|mirostat_eta)",
            "setting",
            "llama.cpp: how tokens are drawn, compared with generation_config.json",
        ),
        KeyPattern(
            r"general\.sampling\.\w+",
            "setting",
            "llama.cpp: how tokens are drawn",
            as_stored=True,
            needed=True,
        ),
        KeyPattern(
            r"general\.(type|name|author|version|organization|basename|finetune|description|"
            r"quantized_by|size_label|license(\.(name|link))?|url|doi|uuid|repo_url|tags|"
            r"languages|datasets|base_model\.count|dataset\.count|parameter_count|"
            r"converted_by)",
            "text",
            _SPEC,
        ),
        KeyPattern(
            r"general\.source\.(url|doi|uuid|repo_url|hf_repo|"
            r"huggingface\.repository)",
            "text",
            _SPEC,
        ),
        KeyPattern(
            r"general\.(base_model|dataset)\.\d+\.(name|author|version|organization|"
            r"description|url|doi|uuid|repo_url)",
            "text",
            _SPEC,
        ),
        KeyPattern(
            r"split\.(no|count|tensors\.count)", "part of", "llama-gguf-split: the set of files"
        ),
        KeyPattern(
            r"tokenizer\.ggml\.(\w+_token_id|add_\w+_token|add_space_prefix|"
            r"remove_extra_whitespaces)",
            "tokenizer part",
            "llama.cpp: special ids and flags",
        ),
        KeyPattern(
            r"tokenizer\.ggml\.(model|pre|tokens|scores|token_type|merges|token_type_count)",
            "tokenizer part",
            "llama.cpp: the vocabulary",
        ),
        KeyPattern(
            r"tokenizer\.(chat_template(\.[\w-]+)?|chat_templates|huggingface\.json)",
            "tokenizer part",
            "llama.cpp: the templates",
        ),
        KeyPattern(r"adapter\.(type|lora\.alpha)", "hyperparameter", "llama.cpp: a LoRA adapter"),
        KeyPattern(
            r"adapter\.(lora\.(prompt_prefix|task_name)|alora\.invocation_tokens)",
            "setting",
            "llama.cpp: when an adapter is used",
            as_stored=True,
            needed=True,
        ),
        KeyPattern(r"imatrix\.(datasets|chunk_count|chunk_size)", "text", "llama-imatrix"),
        KeyPattern(r"format", "text", "safetensors: whose arrays were saved, in a copy of one"),
        KeyPattern(
            r"model_type|total_size|param_count", "text", "aprender: sizes, in a copy of its file"
        ),
        KeyPattern(
            r"clip\.\w*_?(has_\w+|use_gelu|use_silu|projector_type)",
            "hyperparameter",
            "llama.cpp: a tower",
            as_stored=True,
            needed=True,
        ),
    ),
    "safetensors": (
        *_OURS,
        KeyPattern(r"format", "text", "safetensors: whose arrays were saved"),
        KeyPattern(
            r"modelspec\.[\w.]+|ss_\w+", "text", "ModelSpec and sd-scripts: a training's record"
        ),
        KeyPattern(
            r"tensor_names|\w.*\.(_data|_type)|_?torchao.*",
            "part of",
            "torchao: how packed weights are put together",
        ),
    ),
    "apr": (
        *_OURS,
        KeyPattern(
            r"architecture|hf_architecture|hf_model_type|model_type",
            "hyperparameter",
            "aprender: which model it is",
            as_stored=True,
            needed=True,
        ),
        KeyPattern(r"hf_config", "hyperparameter", "config.json, whose keys are items"),
        KeyPattern(
            r"_name|name|description|author|license|data_source|data_license|version|source|"
            r"original_format|created_at|total_size|param_count|format|source_metadata|"
            r"tensor_shapes",
            "text",
            "aprender: where the file comes from, what it counts",
        ),
        KeyPattern(r"quantization|sharding", "setting", "aprender: how the file lies"),
        KeyPattern(
            r"chat_template|chat_format|special_tokens|tokenizer\.(vocabulary|scores|"
            r"token_type|merges|model|pre_type|\w+_token_id|add_\w+_token|add_space_prefix|"
            r"remove_extra_whitespaces|chat_template(s|\.\w+)?|huggingface\.json|vocab_size|model_type|"
            r"model_name|architecture)",
            "tokenizer part",
            "aprender: the vocabulary",
        ),
        KeyPattern(
            r"model\.(architecture|hidden_size|num_layers|num_heads|num_kv_heads|vocab_size|"
            r"intermediate_size|max_position_embeddings|rope_theta|rope_type|rms_norm_eps|"
            r"head_dim)",
            "without effect",
            "aprender's importer: the typed keys a second time",
        ),
    ),
}
# By file: keys of the JSON files of a folder.
_PEFT = "PEFT's LoraConfig"
_MLX = "mlx-lm"
_GENERATION = "transformers' GenerationConfig"
FILES: Mapping[str, tuple[KeyPattern, ...]] = {
    "tokenizer.json": (
        KeyPattern(r"version", "text", "the tokenizers library"),
        KeyPattern(
            r"truncation|padding",
            "setting",
            "the tokenizers library: lengths, which transformers sets itself",
        ),
        KeyPattern(
            r"added_tokens|normalizer|pre_tokenizer|post_processor|decoder|model",
            "tokenizer part",
            "the tokenizers library",
        ),
    ),
    "tokenizer_config.json": (
        KeyPattern(
            r"add_(bos|eos)_token|added_tokens_decoder|(bos|eos|unk|pad|sep|"
            r"cls|mask)_token|"
            r"model_specific_special_tokens|chat_template|"
            r"(image|video|audio|vision_bos|vision_eos|boi|eoi|eot|eom)_token|image_token_id|"
            r"language|task",
            "tokenizer part",
            "transformers' tokenizers",
        ),
        KeyPattern(
            r"add_prefix_space|additional_special_tokens|extra_special_tokens|legacy|"
            r"do_lower_case|strip_accents|tokenize_chinese_chars|split_special_tokens|"
            r"tokenizer_class|sp_model_kwargs|use_default_system_prompt|errors|never_split|"
            r"do_basic_tokenize|trim_offsets|add_dummy_prefix|vocab_type|keep_accents|"
            r"do_remove_accents",
            "tokenizer part",
            "transformers' tokenizers: what they set in the one of tokenizer.json",
            as_stored=True,
        ),
        KeyPattern(
            r"clean_up_tokenization_spaces|spaces_between_special_tokens",
            "setting",
            "transformers: how decoded text is tidied",
            as_stored=True,
        ),
        KeyPattern(
            r"model_max_length|padding_side|truncation_side|pad_to_multiple_of|max_length|"
            r"stride|truncation_strategy|pad_token_type_id|padding|truncation|"
            r"return_token_type_ids|add_special_tokens",
            "setting",
            "transformers: lengths and the filling of batches",
            as_stored=True,
        ),
        KeyPattern(
            r"name_or_path|_name_or_path|special_tokens_map_file|tokenizer_file|auto_map|"
            r"processor_class|model_input_names|backend|is_local|local_files_only|"
            r"transformers_version|vocab_file|merges_file|from_slow|use_fast|response_schema",
            "text",
            "transformers: which class loads it, and from where",
        ),
    ),
    "special_tokens_map.json": (
        KeyPattern(
            r"(bos|eos|unk|pad|sep|cls|mask|image|audio|video|boi|eoi)_token|"
            r"additional_special_tokens|extra_special_tokens",
            "tokenizer part",
            "transformers' tokenizers",
            as_stored=True,
        ),
    ),
    "chat_template.json": (
        KeyPattern(r"chat_template", "tokenizer part", "transformers' processors"),
    ),
    "generation_config.json": (
        KeyPattern(
            r"_from_model_config|transformers_version|_name_or_path|_commit_hash|"
            r"generation_kwargs",
            "text",
            f"{_GENERATION}: its writer",
        ),
        KeyPattern(  # those that the comparison of tokenizers goes through, by their defaults
            r"(bos|eos|pad)_token_id|forced_(bos|eos)_token_id|(begin_)?suppress_tokens|"
            r"bad_words_ids|do_sample|temperature|top_[kp]|min_p|typical_p|repetition_penalty|"
            r"no_repeat_ngram_size|num_beams|length_penalty|max_length|max_new_tokens|min_length|"
            r"decoder_start_token_id|force_words_ids|forced_decoder_ids|stop_strings|"
            r"no_timestamps_token_id|lang_to_id|task_to_id|alignment_heads|is_multilingual|"
            r"max_initial_timestamp_index|prev_sot_token_id|return_timestamps|user_token_id|"
            r"assistant_token_id|min_new_tokens|max_time|early_stopping|num_beam_groups|"
            r"diversity_penalty|penalty_alpha|dola_layers|top_h|epsilon_cutoff|eta_cutoff|"
            r"encoder_repetition_penalty|encoder_no_repeat_ngram_size|renormalize_logits|"
            r"constraints|remove_invalid_values|exponential_decay_length_penalty|sequence_bias|"
            r"token_healing|guidance_scale|watermarking_config|num_return_sequences",
            "setting",
            _GENERATION,
        ),
        KeyPattern(
            r"penalty_(last_n|repeat)|xtc_(probability|threshold)|mirostat(_tau|_eta)?|sequence",
            "setting",
            "llama.cpp: gguf-py writes it into a GGUF",
            as_stored=True,
        ),
        KeyPattern(
            r"use_cache|output_\w+|return_dict_in_generate|max_cache_len|cache_\w+|low_memory|"
            r"compile_config|disable_compile|continuous_batching_config|prefill_chunk_size",
            "setting",
            f"{_GENERATION}: how a call is made and what it returns",
        ),
        KeyPattern(
            r"trust_remote_code|chat_format|max_context_size|max_window_size|use_mtp|"
            r"is_assistant|num_assistant_tokens(_schedule)?|assistant_\w+|target_lookbehind|"
            r"prompt_lookup_num_tokens|max_matching_ngram_size|speculation_type",
            "setting",
            _GENERATION,
            as_stored=True,
        ),
    ),
    "adapter_config.json": (
        KeyPattern(
            r"peft_type|r|lora_alpha|rank_pattern|alpha_pattern|use_rslora|use_dora|"
            r"fan_in_fan_out|init_lora_weights|target_modules|target_parameters|modules_to_save|"
            r"lora_bias|trainable_token_indices|alora_invocation_tokens",
            "hyperparameter",
            _PEFT,
            as_stored=True,
        ),
        KeyPattern(  # what the names of the factors say as well
            r"layers_to_transform|layers_pattern|exclude_modules|bias|ensure_weight_tying",
            "setting",
            f"{_PEFT}: which modules get factors",
            as_stored=True,
        ),
        KeyPattern(
            r"base_model_name_or_path|revision|task_type",
            "text",
            f"{_PEFT}: what it was trained on",
            as_stored=True,
        ),
        KeyPattern(
            r"lora_dropout|loftq_config|eva_config|corda_config|lora_ga_config|runtime_config|"
            r"inference_mode|megatron_config|megatron_core|auto_mapping|peft_version|"
            r"qalora_group_size",
            "without effect",
            f"{_PEFT}: how it is trained, and by what",
        ),
        KeyPattern(r"fine_tune_type|lora_parameters", "hyperparameter", _MLX, as_stored=True),
        KeyPattern(  # what the names of the factors say as well
            r"num_layers|lora_layers",
            "setting",
            f"{_MLX}: which layers get factors",
            as_stored=True,
        ),
        KeyPattern(r"model", "text", f"{_MLX}: what it was trained on", as_stored=True),
        KeyPattern(
            r"train|test|data|hf_dataset|seed|optimizer|optimizer_config|batch_size|iters|"
            r"(val|test)_batches|learning_rate|lr_schedule|steps_per_(report|eval)|"
            r"resume_adapter_file|adapter_path|save_every|max_seq_length|config|"
            r"grad_checkpoint|grad_accumulation_steps|mask_prompt|report_to|project_name|wandb|"
            r"prompt_feature|completion_feature|chat_feature|trust_remote_code|"
            r"clear_cache_threshold",
            "without effect",
            f"{_MLX}: how it is trained, and by what",
        ),
    ),
    "index": (
        KeyPattern(r"total_size|total_parameters", "setting", "transformers: what the shards hold"),
        KeyPattern(
            r"format|mergekit_version|transformers_version|producer",
            "text",
            "which program wrote the index",
        ),
    ),
}


# What a tensor that no table lists seems to be, by its name: words for who reads its reading.
TENSORS: tuple[KeyPattern, ...] = (
    KeyPattern(r"((model\.)?mtp(_layers)?\b|.*\.nextn\.).*", "unread", "a draft head by its name"),
    KeyPattern(
        r"((model\.)?(vision|visual|audio|multi_modal|embed_vision|embed_audio)|mm\.|v\.|a\.).*",
        "unread",
        "a tower by its name",
    ),
)


def matching_row(rows: Iterable[Row], name: str) -> Row | None:
    """Return the first row whose regular expression `names` matches the whole name; else None."""
    return next((row for row in rows if _name_pattern(row.names).fullmatch(name)), None)


@cache
def _name_pattern(names: str) -> re.Pattern[str]:
    """Return the compiled regular expression, cached."""
    return re.compile(names)
