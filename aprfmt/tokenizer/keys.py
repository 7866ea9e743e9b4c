"""The metadata keys of a tokenizer in each format: one row per fact.

GGUF keys and value types: gguf-py `constants.Keys.Tokenizer` and `GGUFWriter` (a test
compares). APR keys: the reference importer's custom keys; those it lacks follow its naming.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aprfmt.model.carried_files import FOREIGN_TOKENIZER

HF_JSON = "tokenizer.huggingface.json"  # the verbatim tokenizer.json, in GGUF and in APR
CHAT_TEMPLATE = "tokenizer.chat_template"  # variants: tokenizer.chat_template.NAME
CHAT_TEMPLATES = "tokenizer.chat_templates"  # the names of the variants
APR_CHAT_TEMPLATE = "chat_template"
TEMPLATE_FILE = "chat_template.jinja"  # of a Hugging Face folder
TEMPLATE_FOLDER = "additional_chat_templates"  # NAME.jinja: transformers' other templates
GENERATION_CONFIG = "generation_config.json"
# What a folder's tokenizer is read from: these files, and these keys of its config.json.
TOKENIZER_JSON = "tokenizer.json"
READ_FILES = (
    TOKENIZER_JSON, "tokenizer_config.json", "special_tokens_map.json", GENERATION_CONFIG,
    TEMPLATE_FILE, "chat_template.json",
)  # fmt: skip
READ_CONFIG_KEYS = (
    "architectures", "model_type", "text_config", "vocab_size", "bos_token_id", "eos_token_id",
    "pad_token_id", "type_vocab_size",
)  # fmt: skip
APR_GGUF = FOREIGN_TOKENIZER  # JSON {key: [type, value or null]}: the way back to GGUF

# GGUF token types (llama.cpp `llama_token_type`).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, slots=True)
class Key:
    """One fact: GGUF's key and type, APR's key."""

    gguf: str
    type: str
    apr: str


TOKENS = Key("tokenizer.ggml.tokens", "array:string", "tokenizer.vocabulary")
SCORES = Key("tokenizer.ggml.scores", "array:float32", "tokenizer.scores")
TYPES = Key("tokenizer.ggml.token_type", "array:int32", "tokenizer.token_type")
MERGES = Key("tokenizer.ggml.merges", "array:string", "tokenizer.merges")
MODEL = Key("tokenizer.ggml.model", "string", "tokenizer.model")
PRE = Key("tokenizer.ggml.pre", "string", "tokenizer.pre_type")

# role -> key of a token id. The names of the roles are Hugging Face's (`bos_token`, `pad_token`).
IDS: Mapping[str, Key] = {
    role: Key(f"tokenizer.ggml.{name}_token_id", "uint32", f"tokenizer.{name}_token_id")
    for role, name in {
        "bos": "bos",
        "eos": "eos",
        "unk": "unknown",
        "pad": "padding",
        "sep": "seperator",  # the misspelling is the format's
        "mask": "mask",
        "eot": "eot",
        "eom": "eom",
    }.items()
}
END_ROLES = ("eos", "eot", "eom")  # those whose ids end an answer

FLAGS: Mapping[str, Key] = {
    name: Key(f"tokenizer.ggml.{name}", "bool", f"tokenizer.{name}")
    for name in (
        "add_bos_token",
        "add_eos_token",
        "add_sep_token",
        "add_space_prefix",
        "remove_extra_whitespaces",
    )
}

KEYS: tuple[Key, ...] = (
    MODEL, PRE, TOKENS, SCORES, TYPES, MERGES, *IDS.values(), *FLAGS.values(),
    Key(CHAT_TEMPLATE, "string", CHAT_TEMPLATE), Key(HF_JSON, "string", HF_JSON),
)  # fmt: skip

# Keys of generation_config.json that change what is generated, with transformers' defaults
# (generation/configuration_utils.py; Whisper's are read in models/whisper/generation_whisper.py).
GENERATION: Mapping[str, Any] = {
    "do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None,
    "typical_p": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1,
    "length_penalty": 1.0, "max_length": 20, "max_new_tokens": None, "min_length": 0,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "bad_words_ids": None,
    "decoder_start_token_id": None, "forced_decoder_ids": None, "force_words_ids": None,
    "no_timestamps_token_id": None, "lang_to_id": None, "task_to_id": None,
    "alignment_heads": None, "is_multilingual": None, "max_initial_timestamp_index": None,
    "prev_sot_token_id": None, "return_timestamps": None, "stop_strings": None,
    "user_token_id": None, "assistant_token_id": None, "min_new_tokens": None, "max_time": None,
    "early_stopping": False, "num_beam_groups": 1, "diversity_penalty": 0.0,
    "penalty_alpha": None, "dola_layers": None, "top_h": None, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0,
    "renormalize_logits": False, "constraints": None, "remove_invalid_values": False,
    "exponential_decay_length_penalty": None, "sequence_bias": None, "token_healing": False,
    "guidance_scale": None, "watermarking_config": None, "num_return_sequences": 1,
}  # fmt: skip

# Key of generation_config.json -> GGUF's key for it. llama.cpp's converter writes each that a file
# states under that name (gguf-py 0.19, metadata.py); it knows no repetition_penalty, but
# `penalty_repeat`, which divides logits alike. APR has no keys of its own.
GENERATION_KEYS: Mapping[str, Key] = {
    name: Key(f"general.sampling.{key}", kind, "")
    for name, key, kind in (
        ("temperature", "temp", "float32"), ("top_k", "top_k", "int32"),
        ("top_p", "top_p", "float32"), ("min_p", "min_p", "float32"),
        ("repetition_penalty", "penalty_repeat", "float32"),
        ("penalty_last_n", "penalty_last_n", "int32"),
        ("xtc_probability", "xtc_probability", "float32"),
        ("xtc_threshold", "xtc_threshold", "float32"), ("mirostat", "mirostat", "int32"),
        ("mirostat_tau", "mirostat_tau", "float32"), ("mirostat_eta", "mirostat_eta", "float32"),
        ("sequence", "sequence", "string"),
    )
}  # fmt: skip
LEFT_OUT_BY_WRITERS = ("repetition_penalty",)  # whose absence from a GGUF is a writer's habit

# Architecture in GGUF -> control tokens that keep the blanks after them; all other control tokens
# of a SentencePiece vocabulary remove those blanks. GGUF has no key for it; llama.cpp goes by the
# architecture's name (src/llama-vocab.cpp).
SWALLOWING: Mapping[str, tuple[str, ...]] = {"phi3": ("<unk>", "<s>", "<|endoftext|>")}

# Texts of tokens that end a turn, for files that name only one end token. llama.cpp uses the same
# list (src/llama-vocab.cpp, special_eog_ids); a text counts only if it is a control token.
END_TEXTS: tuple[str, ...] = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
)  # fmt: skip

# Joins an id that only one of two config.json states with the files that both state it in.
STATED_ELSEWHERE = "; still stated in "
