"""The keys of each style (config.json, GGUF, APR) that are not hyperparameters.

A key that is neither read by a rule nor listed here is reported as unknown, never dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from aprfmt.arch.rope_hf import ROPE_OBJECTS
from aprfmt.base.protocols import Value

if TYPE_CHECKING:
    from aprfmt.arch.spec import ArchSpec, HyperParams


@dataclass(frozen=True)
class KeyStyle:
    """What is specific to one key style.

    `counts(key, arch_key)`: whether the key concerns the architecture at all. `heads(spec, hp)`:
    the keys that name the architecture. `nested`: values may be inside the spec's section.
    """

    counts: Callable[[str, str], bool]
    heads: Callable[["ArchSpec", "HyperParams"], Mapping[str, Value]]
    nested: bool = False


def class_name(spec: "ArchSpec") -> str:
    """Return the class that transformers loads the architecture with, "" without one."""
    names = [name for name in spec.called.get("hf", ()) if name.endswith("ForCausalLM")]
    names += [name for name in spec.called.get("hf", ()) if name.endswith("LMHeadModel")]
    names += [name for name in spec.called.get("hf", ()) if name[:1].isupper()]  # encoders
    return names[0] if names else ""


def _hf_name_keys(spec: "ArchSpec", hp: "HyperParams") -> Mapping[str, Value]:
    """Return config.json's {key: value} that name the architecture: class and model type."""
    name = class_name(spec)
    classes = {"architectures": [name]} if name else {}
    return {**classes, "model_type": spec.called["hf"][0]}


def _apr_name_keys(spec: "ArchSpec", hp: "HyperParams") -> Mapping[str, Value]:
    """Return an APR file's {key: value} that name the architecture."""
    return {
        "architecture": spec.called["apr"][0],
        "hf_architecture": class_name(spec),
        "hf_model_type": spec.called["hf"][0],
    }


# The typed keys of APR that are not hyperparameters, and custom keys that the reference writer
# (aprender) uses; families of keys by prefix.
_APR_OTHER = frozenset(
    """model_type name description author license data_source data_license version source
    original_format created_at total_size param_count quantization sharding chat_template
    chat_format special_tokens architecture hf_architecture hf_model_type tensor_shapes
    source_metadata hf_config linear_attn_hparams format model_config""".split()
)
_APR_FAMILIES = ("tokenizer.", "aprfmt.", "model.")

KNOWN: Mapping[str, KeyStyle] = {
    "hf": KeyStyle(lambda key, arch: True, _hf_name_keys, nested=True),
    "gguf": KeyStyle(lambda key, arch: key.startswith(f"{arch}."), lambda spec, hp: {}),
    "apr": KeyStyle(
        lambda key, arch: key not in _APR_OTHER and not key.startswith(_APR_FAMILIES),
        _apr_name_keys,
    ),
}

# What a key is that no rule reads (`KeyRow.reading`).
KeyReading = Literal["setting", "text", "tokenizer part", "part of", "without effect"]


@dataclass(frozen=True)
class KeyRow:
    """Keys that no rule reads: what they are, and the source that says so.

    `as_stored`: loaders use them in a way that is not known here, so that two files are compared
    by their values. `needed`: in addition a config.json without them is another one.
    """

    reading: KeyReading
    source: str
    keys: str
    as_stored: bool = False
    needed: bool = False


CAUSAL_KEY = "is_causal"
# Keys of config.json that turn the causal mask off.
MASK_KEYS = (CAUSAL_KEY, "use_bidirectional_attention")
_GENERATION = "transformers' GenerationConfig took these over; generate() reads them, no forward"
# Keys that change the forward pass of no architecture. Keys of towers (`vision_config`) are those
# of another table: the ledger reads them by it.
ROWS: Mapping[str, tuple[KeyRow, ...]] = {
    "hf": (
        KeyRow(
            "text", "transformers' PreTrainedConfig writes them, its models read none",
            """_name_or_path transformers_version finetuning_task task_specific_params prefix
            unsloth_version unsloth_fixed""",
        ),
        KeyRow(
            "setting", "transformers and vLLM: which class the weights are loaded into",
            "architectures model_type", as_stored=True, needed=True,
        ),
        KeyRow(
            "setting", "transformers: whose code is run, and what the classes are called",
            "auto_map problem_type id2label label2id num_labels pruned_heads", as_stored=True,
        ),
        KeyRow(
            "setting", "transformers: what the weights are cast to", "torch_dtype dtype",
            as_stored=True,
        ),
        KeyRow(
            "setting", "transformers: how a model is loaded and what a call returns",
            """_attn_implementation_autoset torchscript use_bfloat16 use_cache
            pretraining_tp chunk_size_feed_forward output_attentions output_hidden_states
            output_scores output_router_logits return_dict return_dict_in_generate
            keys_to_ignore_at_inference cache_implementation tf_legacy_loss""",
        ),
        KeyRow(
            "without effect",
            "transformers' models: of initialisation, dropout and losses, which only training has",
            """initializer_range initializer_factor init_std attention_dropout hidden_dropout
            resid_pdrop embd_pdrop attn_pdrop embedding_dropout residual_dropout classifier_dropout
            hidden_dropout_prob embed_pdrop router_aux_loss_coef router_jitter_noise aux_loss_alpha
            seq_aux""",
        ),
        KeyRow(
            "tokenizer part", "ids and classes that tokenizers and processors read",
            "bos_token_id eos_token_id pad_token_id tokenizer_class",
        ),
        KeyRow(
            "tokenizer part", "ids that models read: where an answer, a part or an image begins",
            """sep_token_id cls_token_id unk_token_id decoder_start_token_id boi_token_index
            eoi_token_index image_token_index image_token_id boi_token_id eoi_token_id
            video_token_id vision_start_token_id vision_end_token_id audio_token_id
            audio_token_index mm_tokens_per_image""",
            as_stored=True,
        ),
        KeyRow(
            "setting", _GENERATION,
            """forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens
            bad_words_ids max_length min_length do_sample early_stopping num_beams num_beam_groups
            diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
            no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
            remove_invalid_values exponential_decay_length_penalty""",
        ),
        KeyRow(
            "without effect", "transformers' masks: true is the default, and false is refused",
            CAUSAL_KEY,
        ),
        KeyRow(
            "without effect", "transformers' models of this kind have neither mode",
            """is_decoder is_encoder_decoder is_llama_config cross_attention_hidden_size
            add_cross_attention tie_encoder_decoder rope_ratio""",
        ),
        KeyRow(
            "part of", "what the codecs of packed weights read", "quantization_config quantization"
        ),
        KeyRow("part of", "the section of a tower", "vision_config audio_config"),
    ),
    "gguf": (
        KeyRow(
            "without effect", "llama.cpp reads them of other architectures, or not at all",
            "attention.causal rope.scaling.finetuned tensor_data_layout",
        ),
        KeyRow(
            "without effect", "llama.cpp's llama_context computes it from the factor of yarn",
            "rope.scaling.yarn_attn_factor",
        ),
    ),
    "apr": (),
}  # fmt: skip


# Keys of config.json that other programs read and transformers does not -> what is known of them.
_READ_ELSEWHERE: Mapping[str, str] = dict.fromkeys(
    (f"{name}.attn_factor" for name in ROPE_OBJECTS),
    "transformers reads attention_factor alone; vLLM and llama.cpp's converter read this key too",
)


def other_readers_text(key: str) -> str:
    """Return which programs read a key of config.json that transformers ignores; "" for others.

    `key` is the dotted path, without the section of a text model.
    """
    return _READ_ELSEWHERE.get(key, "")


def known_rows(style: str) -> Mapping[str, KeyRow]:
    """Return {key: its row} of every key of a style that no rule reads."""
    return {key: row for row in ROWS.get(style, ()) for key in row.keys.split()}


IGNORED: Mapping[str, frozenset[str]] = {style: frozenset(known_rows(style)) for style in ROWS}
