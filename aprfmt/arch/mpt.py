"""mpt: distances added to the scores instead of positions, norms without biases.

transformers always adds them, with slopes up to 2^-8, whatever `alibi` and `alibi_bias_max` say.
Source: transformers' modeling_mpt; the converter's mpt.py, llama.cpp's mpt.cpp.
"""

from collections.abc import Mapping
from typing import Any

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.fused_projection import GGUF_FUSED, IN_ORDER, fused_bindings, fused_rows
from aprfmt.arch.gpt2 import NO_ROPE, default_ffn_size
from aprfmt.arch.required_values import divided_head_dim_rule
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, Found, HyperRule, Loss, Params
from aprfmt.arch.tensor_rows import Q, linear, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import finite_number, positive_number
from aprfmt.base.protocols import Value

_B = "transformer.blocks.{L}."
_USUAL = 8.0
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", _B + "norm_1"),
        *fused_rows(None),
        *linear("attn_output", _B + "attn.out_proj", "hidden_size", Q),
        *norm("ffn_norm", _B + "norm_2"),
        *linear("ffn_up", _B + "ffn.up_proj", "ffn_size", "hidden_size"),
        *linear("ffn_down", _B + "ffn.down_proj", "hidden_size", "ffn_size"),
        embed="transformer.wte",
        final="transformer.norm_f",
    ),
    hf_first=fused_bindings(_B + "attn.Wqkv", IN_ORDER, ("weight",)),
    gguf_first=GGUF_FUSED[:1],
)


def _attn_config_value(facts: Facts, key: str) -> Found:
    """Return (value, key) of the object `attn_config`; None where it is absent or null."""
    found = facts.first("attn_config")
    inner: Any = found[0] if found is not None and isinstance(found[0], Mapping) else {}
    value = inner.get(key)
    return None if value is None else (value, f"attn_config.{key}")


def _read_clip(facts: Facts, hp: Params) -> Found:
    """Return (limit on q, k and v, key) of config.json; None without one."""
    found = _attn_config_value(facts, "clip_qkv")
    return None if found is None else (positive_number(*found), found[1])


def _read_clamp_gguf(facts: Facts, hp: Params) -> Found:
    """Return (limit on q, k and v, key) of a GGUF; 0 means None, as in llama.cpp."""
    found = facts.first("{arch}.attention.clamp_kqv")
    return None if found is None else (finite_number(*found) or None, found[1])


def _read_scale(facts: Facts, hp: Params) -> Found:
    """Return (factor on attention scores, key) of config.json; None without one."""
    found = _attn_config_value(facts, "softmax_scale")
    return None if found is None else (hyper_rules.check_scale_factor(*found), found[1])


def _write_config(value: Value, hp: Params) -> Params:
    """Return config.json's {"attn_config": object} with the limit and the factor."""
    scale = None if hp["attn_scale"] == hyper_rules.default_attn_scale(hp) else hp["attn_scale"]
    return {"attn_config": {"clip_qkv": value, "softmax_scale": scale}}


def _mark_read(value: Value) -> None:
    """Read every key of an object, so that none is reported as unknown: they are about training."""
    if isinstance(value, Mapping):
        for key in value:
            _mark_read(value[key])


def _check_attn_config(value: Value, facts: Facts, hp: Params) -> str:
    """Return a remark on settings of attn_config that transformers ignores, else ""."""
    found = facts.first("attn_config")
    if found is not None:
        _mark_read(found[0])
    unlike = [
        f"{found[1]} is {found[0]}"
        for key, usual in (
            ("alibi", True),
            ("alibi_bias_max", 8),
            ("qk_ln", False),
            ("prefix_lm", False),
        )
        if (found := _attn_config_value(facts, key)) is not None and found[0] != usual
    ]
    return f"{', '.join(unlike)}; transformers ignores that: ignored" if unlike else ""


MPT = ArchSpec(
    name="mpt",
    hyper=hyper_rules.hyper_table(
        hyper_rules.hidden_size(2048, "d_model hidden_size"),
        hyper_rules.n_layers(24, "n_layers num_hidden_layers"),
        hyper_rules.n_heads(16, "n_heads num_attention_heads"),
        hyper_rules.n_kv_heads(hf=""),
        divided_head_dim_rule(),
        hyper_rules.ffn_size(default_ffn_size, ""),
        hyper_rules.vocab_size(50368),
        hyper_rules.context_length(2048, "max_seq_len"),
        hyper_rules.norm_eps(1e-5, "layer_norm_epsilon", "layer_norm_epsilon"),
        HyperRule("activation", default="gelu"),
        hyper_rules.tied_embeddings(True),
        *NO_ROPE,
        HyperRule(
            "alibi_max_bias",
            {"gguf": ("{arch}.attention.max_alibi_bias",)},
            "positive",
            _USUAL,
            check=_check_attn_config,
        ),
        HyperRule(
            "qkv_clip",
            {"gguf": ("{arch}.attention.clamp_kqv",)},
            "positive",
            None,
            read={"hf": _read_clip, "gguf": _read_clamp_gguf},
            write={"hf": _write_config},
        ),
        hyper_rules.attn_scale(read={"hf": _read_scale}, write={"hf": lambda value, hp: {}}),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", position="none", score_bias="alibi", mlp="plain"),
    lost=(
        *losses.common_losses("gelu", partial=True),
        Loss(
            "hf",
            "alibi_max_bias",
            lambda hp: hp["alibi_max_bias"] != _USUAL,
            "transformers takes 8 whatever config.json says",
        ),
        Loss(
            "gguf",
            "attn_scale",
            lambda hp: hp["attn_scale"] != hyper_rules.default_attn_scale(hp),
            "llama.cpp divides mpt's scores by sqrt(head_dim)",
        ),
    ),
    ignored=frozenset(
        """emb_pdrop resid_pdrop expansion_ratio init_device learned_pos_emb logit_scale no_bias
        norm_type embedding_fraction verbose tokenizer_name init_config fc_type ffn_config
        use_pad_tok_in_ffn""".split()
    ),
)
