"""opt: learned positions that begin at row 2, a plain MLP with relu, biases everywhere.

llama.cpp has no form of it. Source: transformers' modeling_opt.
"""

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import rules
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.rows import KV, Q, RoleRow, around, linear, norm, tables
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, HyperRule
from aprfmt.arch.stated import divided_heads
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_O = "model.decoder.layers.{L}."
_BIAS = "attention_bias"
_TENSORS, _BINDINGS = tables(
    around(
        RoleRow("position_embd.weight", "model.decoder.embed_positions.weight",
            ("context_length+2", "hidden_size"), layered=False),
        *norm("attn_norm", _O + "self_attn_layer_norm", bias=True),
        *linear("attn_q", _O + "self_attn.q_proj", Q, "hidden_size", bias=_BIAS),
        *linear("attn_k", _O + "self_attn.k_proj", KV, "hidden_size", bias=_BIAS),
        *linear("attn_v", _O + "self_attn.v_proj", KV, "hidden_size", bias=_BIAS),
        *linear("attn_output", _O + "self_attn.out_proj", "hidden_size", Q,
            bias="attention_out_bias"),
        *norm("ffn_norm", _O + "final_layer_norm", bias=True),
        *linear("ffn_up", _O + "fc1", "ffn_size", "hidden_size", bias="mlp_bias"),
        *linear("ffn_down", _O + "fc2", "hidden_size", "ffn_size", bias="mlp_bias"),
        embed="model.decoder.embed_tokens", final="model.decoder.final_layer_norm", norm_bias=True,
    )
)  # fmt: skip


def _usual(value: Value, facts: Facts, hp: Mapping[str, Value]) -> str:
    """Raise ArchError for the forms of the 350M model and of old checkpoints."""
    width = facts.first("word_embed_proj_dim")
    if width is not None and width[0] != hp["hidden_size"]:
        raise ArchError(
            f"{width[1]}: is {width[0]}; expected {hp['hidden_size']}: projections beside the "
            "embedding are not known"
        )
    for key, usual in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False),
                       ("layer_norm_elementwise_affine", True)):  # fmt: skip
        found = facts.first(key)
        if found is not None and found[0] is not usual:
            raise ArchError(f"{key}: is {found[0]}; expected {usual}: no other is known")
    return ""


_EPS = rules.norm_eps(1e-5)  # config.json has no key for it

OPT = ArchSpec(
    name="opt",
    hyper=rules.hyper_table(
        rules.hidden_size(768),
        rules.n_layers(12),
        rules.n_heads(12),
        rules.n_kv_heads(hf=""),
        divided_heads(),
        rules.ffn_size(3072, "ffn_dim"),
        rules.vocab_size(50272),
        rules.context_length(2048),
        HyperRule("position_offset", default=2),
        replace(_EPS, keys={"apr": _EPS.keys["apr"]}),
        rules.activation("relu", "activation_function"),
        rules.tied_embeddings(True),
        rules.flag(_BIAS, True, "enable_bias", present=("attn_q.bias",)),
        rules.flag("attention_out_bias", True, "enable_bias", present=("attn_output.bias",),
            written=False),
        rules.flag("mlp_bias", True, "enable_bias", present=("ffn_up.bias",), written=False),
        *NO_ROPE,
        HyperRule("parallel_residual", default=False, check=_usual),
    ),
    tensors=_TENSORS,
    bindings={"hf": _BINDINGS["hf"]},
    block=BlockSpec(norm="layer", position="learned", mlp="plain"),
    ignored=frozenset({"dropout", "activation_dropout", "layerdrop", "init_std", "prefix"}),
)  # fmt: skip
