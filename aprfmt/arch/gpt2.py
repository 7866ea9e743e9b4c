"""gpt2: learned positions, LayerNorm, one c_attn; Hugging Face stores matrices as [in, out].

Source: docs/reference/architectures.md; transformers' modeling_gpt2.
"""

from collections.abc import Mapping

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.layout_steps import Transposed
from aprfmt.arch.required_values import divided_head_dim_rule
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, Facts, HyperRule, Loss
from aprfmt.arch.tensor_rows import KV, Q, RoleRow, linear, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import boolean
from aprfmt.base.protocols import Value

_H = "transformer.h.{L}."
_TURNED = (Transposed(),)  # Conv1D
_ROLES = {part: tuple(f"attn_{x}.{part}" for x in "qkv") for part in ("weight", "bias")}
_QKV = Split((Q, KV, KV))

POSITIONS = RoleRow(
    "position_embd.weight", "transformer.wpe.weight", ("context_length", "hidden_size"),
    layered=False,
)  # fmt: skip
_FUSED_ROWS = tuple(
    RoleRow(role, "", (rows, "hidden_size")[: 2 if part == "weight" else 1], gguf="")
    for part, roles in _ROLES.items()
    for role, rows in zip(roles, (Q, KV, KV), strict=True)
)
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        POSITIONS,
        *norm("attn_norm", _H + "ln_1", bias=True),
        *_FUSED_ROWS,
        *linear("attn_output", _H + "attn.c_proj", "hidden_size", Q, bias="", hf_steps=_TURNED),
        *norm("ffn_norm", _H + "ln_2", bias=True),
        *linear("ffn_up", _H + "mlp.c_fc", "ffn_size", "hidden_size", bias="", hf_steps=_TURNED),
        *linear(
            "ffn_down", _H + "mlp.c_proj", "hidden_size", "ffn_size", bias="", hf_steps=_TURNED
        ),
        embed="transformer.wte",
        final="transformer.ln_f",
        norm_bias=True,
    ),
    hf_first=(
        Binding((_H + "attn.c_attn.weight",), _ROLES["weight"], (*_TURNED, _QKV)),
        Binding((_H + "attn.c_attn.bias",), _ROLES["bias"], (_QKV,)),
    ),
    gguf_first=tuple(
        Binding((f"blk.{{L}}.attn_qkv.{part}",), roles, (_QKV,)) for part, roles in _ROLES.items()
    ),
)


# Causal masks that early checkpoints store.
BUFFERS = {"hf": (_H + "attn.bias", _H + "attn.masked_bias")}


def _read_scale(facts: Facts, hp: Mapping[str, Value]) -> tuple[Value, str] | None:
    """Return (factor on attention scores, key) of config.json's switch; None without it."""
    found = facts.first("scale_attn_weights")
    if found is None:
        return None
    return (hyper_rules.default_attn_scale(hp) if boolean(*found) else 1.0), found[1]


def _write_scale(value: Value, hp: Mapping[str, Value]) -> Mapping[str, Value]:
    """Return config.json's {key: whether scores are divided by sqrt(head_dim)}."""
    return {"scale_attn_weights": value == hyper_rules.default_attn_scale(hp)}


def default_ffn_size(hp: Mapping[str, Value]) -> int:
    """Return the usual inner width of the MLP, four times the hidden size."""
    size: int = 4 * hp["hidden_size"]
    return size


def attn_scale_rule() -> HyperRule:
    """Return the rule for the attention scale: by a switch of config.json 1/sqrt(head_dim) or 1."""
    return hyper_rules.attn_scale(read={"hf": _read_scale}, write={"hf": _write_scale})


# Positions are learned, or added to the scores.
NO_ROPE = (
    hyper_rules.fixed("rope_theta", None),
    hyper_rules.fixed("rope_theta_local", None),
    hyper_rules.fixed("rope_dim", 0),
    hyper_rules.fixed("rope_scaling", None),
    hyper_rules.fixed("rope_style", "half"),
    HyperRule("rope_layers", default=hyper_rules.per_layer(False)),
)

GPT2 = ArchSpec(
    name="gpt2",
    hyper=hyper_rules.hyper_table(
        hyper_rules.hidden_size(768, "n_embd hidden_size"),
        hyper_rules.n_layers(12, "n_layer num_hidden_layers"),
        hyper_rules.n_heads(12, "n_head num_attention_heads"),
        hyper_rules.n_kv_heads(hf=""),
        divided_head_dim_rule(),
        hyper_rules.ffn_size(default_ffn_size, "n_inner"),
        hyper_rules.vocab_size(50257),
        hyper_rules.context_length(1024, "n_positions max_position_embeddings n_ctx"),
        hyper_rules.norm_eps(1e-5, "layer_norm_epsilon", "layer_norm_epsilon"),
        hyper_rules.activation("gelu_tanh", "activation_function", tanh="gelu_new"),
        hyper_rules.tied_embeddings(True),
        hyper_rules.fixed("attention_bias", True),
        hyper_rules.fixed("attention_out_bias", True),
        hyper_rules.fixed("mlp_bias", True),
        *NO_ROPE,
        attn_scale_rule(),
        hyper_rules.flag("attn_scale_by_layer", False, "scale_attn_by_inverse_layer_idx"),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", position="learned", mlp="plain", activation_cast="steps"),
    lost=(
        *losses.common_losses("gelu_tanh", partial=True),
        Loss(
            "gguf",
            "attn_scale",
            lambda hp: (
                hp["attn_scale"] != hyper_rules.default_attn_scale(hp) or hp["attn_scale_by_layer"]
            ),
            "llama.cpp divides gpt2's scores by sqrt(head_dim) in every layer",
        ),
    ),
    ignored=frozenset(
        """n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation
        summary_proj_to_labels summary_first_dropout""".split()
    ),
    buffers=BUFFERS,
)
