"""Encoders with rope: nomic-bert, and jina v3, a roberta with adapters for its tasks.

Both were published with code of their own, under other keys and names than transformers has for
them now; both forms are read. jina's published matrices are the originals of parametrizations whose
low-rank factors (`lora_A` and `lora_B`, one of each for a task) have no role: without a task the
model runs without them. Sources: transformers' modeling files and its conversion mapping; the gguf
package's name map; the converter's bert.py.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from aprfmt.arch import hyper_rules
from aprfmt.arch.encoders import BLOCK, POOLER, embedding_rows, encoder_rules, encoder_spec
from aprfmt.arch.fused_projection import GGUF_FUSED, IN_ORDER, PARTS, fused_bindings, fused_rows
from aprfmt.arch.required_values import require_values
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import Binding, Facts, HyperRule, Params
from aprfmt.arch.tensor_rows import Q, RoleRow, linear, make_tables, norm, plain_mlp
from aprfmt.arch.value_checks import sequence, text
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_LAYER = "encoder.layers.{L}."
_WORDS, _TYPES = "embeddings.word_embeddings", "embeddings.token_type_embeddings"
_NORMS = (
    *norm("attn_output_norm", _LAYER + "norm1", bias=True),
    *norm("layer_output_norm", _LAYER + "norm2", bias=True),
)
# What transformers calls in memory what the checkpoints have under other names.
_RENAMED = (
    ("emb_ln", "embeddings.LayerNorm"), ("attn.out_proj", "self_attn.o_proj"),
    ("mixer.out_proj", "self_attn.o_proj"), ("norm1", "post_attention_layernorm"),
    ("norm2", "post_mlp_layernorm"), ("fc11", "up_proj"), ("fc12", "gate_proj"),
)  # fmt: skip


def _transformers_bindings(
    rows: Iterable[RoleRow], parts: Iterable[str], *more: tuple[str, str]
) -> tuple[Binding, ...]:
    """Return the bindings of today's names in transformers, made of rows of published names.

    `parts` are "weight", "bias" or both of q, k and v, which are separate there. `more` are further
    (published, present) pieces of names to replace.
    """
    found = [
        Binding((f"layers.{{L}}.self_attn.{x}_proj.{part}",), (f"attn_{x}.{part}",))
        for x in "qkv"
        for part in parts
    ]
    for row in rows:
        name = row.hf.removeprefix("encoder.")
        for then, now in (*_RENAMED, *more):
            name = name.replace(then, now)
        if row.hf and name != row.hf:
            found.append(Binding((name,), (row.role,)))
    return tuple(found)


def _check_nomic(value: Value, facts: Facts, hp: Params) -> str:
    """Return ""; ArchError for blocks of nomic's own code that no rule describes."""
    require_values(
        facts,
        {
            "prenorm": False,
            "parallel_block": False,
            "use_rms_norm": False,
            "causal": False,
            "qkv_proj_bias": False,
            "mlp_fc1_bias": False,
            "mlp_fc2_bias": False,
            "rotary_emb_fraction": 1,
            "rotary_emb_interleaved": False,
            "rotary_emb_scale_base": None,
            "rotary_scaling_factor": None,
            "num_experts": 0,
            "moe_every_n_layers": 0,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
    )
    return ""


def _check_tasks(value: Value, facts: Facts, hp: Params) -> str:
    """Return a remark that names the tasks whose adapters are not applied, "" without adapters."""
    require_values(facts, {"position_embedding_type": "rotary"})
    found = facts.first("lora_adaptations")
    if found is None:
        return ""
    names = ", ".join(text(name, found[1]) for name in sequence(*found))
    return f"{found[1]} names adapters for {names}; the model runs without one"


def _rope_rules(
    rope: RopeDefaults, check: Callable[[Value, Facts, Params], str]
) -> tuple[HyperRule, ...]:
    """Return the rules for rope of all layers; `check` is that of the rule for `rope_layers`."""
    each = HyperRule("rope_layers", default=hyper_rules.per_layer(True), check=check)
    return (*rope_rules(rope), hyper_rules.rope_style("half"), each)


def _activation_rule() -> HyperRule:
    """Return the rule for the activation, by `hidden_act` or `activation_function`.

    Published configs have the second, which names a whole gated MLP ("swiglu", "geglu").
    """
    usual = hyper_rules.activation("silu")
    gates = {"swiglu": "silu", "geglu": "gelu"}

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (activation of the MLPs, key) of config.json; None if it has neither key.

        `hidden_act` comes first. Else `activation_function` names a whole gated MLP, such as
        "swiglu", which has its activation. Raises ArchError for an unknown one.
        """
        whole, plain = facts.first("activation_function"), usual.read["hf"](facts, hp)
        if plain is not None or whole is None:
            return plain
        name = text(*whole)
        if name not in gates:
            raise ArchError(f"{whole[1]}: is {name!r}; expected {' or '.join(gates)}")
        return gates[name], whole[1]

    return replace(usual, read={**usual.read, "hf": read})


_EPS = hyper_rules.norm_eps(1e-12, "layer_norm_eps", "layer_norm_epsilon")
_NOMIC_ROWS = (
    *embedding_rows(_WORDS, "", _TYPES, "emb_ln"),
    *fused_rows(None),
    *linear("attn_output", _LAYER + "attn.out_proj", "hidden_size", Q),
    *linear("ffn_up", _LAYER + "mlp.fc11", "ffn_size", "hidden_size"),
    *linear("ffn_gate", _LAYER + "mlp.fc12", "ffn_size", "hidden_size"),
    *linear("ffn_down", _LAYER + "mlp.fc2", "hidden_size", "ffn_size"),
    *_NORMS,
)
NOMIC_BERT = encoder_spec(
    "nomic_bert",
    make_tables(
        _NOMIC_ROWS,
        hf_first=fused_bindings(_LAYER + "attn.Wqkv", IN_ORDER, ("weight",)),
        hf_more=_transformers_bindings(_NOMIC_ROWS, ("weight",), ("fc2", "down_proj")),
        gguf_first=GGUF_FUSED[:1],
    ),
    encoder_rules(
        hyper_rules.hidden_size(None, "hidden_size n_embd"),
        hyper_rules.n_layers(None, "num_hidden_layers n_layer"),
        hyper_rules.n_heads(None, "num_attention_heads n_head"),
        hyper_rules.head_dim(),
        replace(_EPS, keys={**_EPS.keys, "hf": ("layer_norm_eps", "layer_norm_epsilon")}),
        hyper_rules.ffn_size(None, "intermediate_size n_inner"),
        hyper_rules.context_length(2048, "max_position_embeddings n_positions"),
        _activation_rule(),
        *_rope_rules(RopeDefaults(theta=1000.0, base_key="rotary_emb_base"), _check_nomic),
    ),
    replace(BLOCK, position="rope", mlp="gated"),
    more_ignored="""attn_pdrop embd_pdrop resid_pdrop dense_seq_output fused_bias_fc
        fused_dropout_add_ln max_trained_positions pad_vocab_size_multiple parallel_block_tied_norm
        reorder_and_upcast_attn summary_activation summary_first_dropout summary_proj_to_labels
        summary_use_proj use_flash_attn use_xentropy""",
)


def _has_mixers(names: Collection[str], values: Params) -> bool:
    """Return whether tensor names are those of jina's published code (`.mixer.Wqkv.`).

    `values` (the metadata) is not used: every evidence function is given both.
    """
    return any(".mixer.Wqkv." in name for name in names)


_JINA_ROWS = (
    *embedding_rows(_WORDS, "", _TYPES, "emb_ln"),
    *fused_rows(""),
    *linear("attn_output", _LAYER + "mixer.out_proj", "hidden_size", Q, bias=""),
    *plain_mlp(_LAYER + "mlp.fc1", _LAYER + "mlp.fc2"),
    *_NORMS,
    *POOLER,
)
_JINA_QKV = fused_bindings(_LAYER + "mixer.Wqkv", IN_ORDER)


def _original_binding(binding: Binding) -> Binding:
    """Return the binding of a matrix under the name that torch's parametrization gives it.

    That is `NAME.parametrizations.weight.original` for `NAME.weight`.
    """
    name = binding.stored[0].removesuffix(".weight") + ".parametrizations.weight.original"
    return replace(binding, stored=(name,))


_ORIGINALS = (
    *(Binding((row.hf,), (row.role,)) for row in _JINA_ROWS
      if row.hf.endswith(".weight") and "norm" not in row.role),
    _JINA_QKV[0],
)  # fmt: skip
JINA_EMBEDDINGS_V3 = encoder_spec(
    "jina_embeddings_v3",
    make_tables(
        _JINA_ROWS,
        hf_first=_JINA_QKV,
        hf_more=(*_transformers_bindings(_JINA_ROWS, PARTS), *map(_original_binding, _ORIGINALS)),
        gguf_first=GGUF_FUSED,
    ),
    encoder_rules(
        hyper_rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"),
        *_rope_rules(RopeDefaults(theta=20000.0, base_key="rotary_emb_base"), _check_tasks),
    ),
    replace(BLOCK, position="rope"),
    evidence=_has_mixers,
    more_ignored="""emb_pooler load_trained_adapters lora_alpha lora_dropout_p
        lora_main_params_trainable lora_rank matryoshka_dimensions output_past task_instructions
        truncate_dim use_flash_attn use_reentrant""",
)
