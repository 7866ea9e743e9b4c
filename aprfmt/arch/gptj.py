"""gptj: attention and MLP in parallel after one norm, 64 elements of each head rotated in pairs.

The source pairs adjacent elements. llama.cpp has names for it and no graph. Source:
transformers' modeling_gptj; the gguf package's name map.
"""

from collections.abc import Mapping
from dataclasses import replace

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.gpt2 import BUFFERS, default_ffn_size
from aprfmt.arch.required_values import divided_head_dim_rule
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, HyperRule
from aprfmt.arch.tensor_rows import KV, Q, linear, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import whole_number
from aprfmt.base.protocols import Value

_H = "transformer.h.{L}."
_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", _H + "ln_1", bias=True),
        *linear("attn_q", _H + "attn.q_proj", Q, "hidden_size"),
        *linear("attn_k", _H + "attn.k_proj", KV, "hidden_size"),
        *linear("attn_v", _H + "attn.v_proj", KV, "hidden_size"),
        *linear("attn_output", _H + "attn.out_proj", "hidden_size", Q),
        *linear("ffn_up", _H + "mlp.fc_in", "ffn_size", "hidden_size", bias=""),
        *linear("ffn_down", _H + "mlp.fc_out", "hidden_size", "ffn_size", bias=""),
        embed="transformer.wte",
        final="transformer.ln_f",
        norm_bias=True,
        head_bias=True,
    )
)


def _rope_rules() -> tuple[HyperRule, ...]:
    """Return the rules for rope; the config counts the rotated elements, the base is fixed."""
    rows = {rule.name: rule for rule in rope_rules(RopeDefaults(partial=1.0))}

    def read(facts: Facts, hp: Mapping[str, Value]) -> tuple[Value, str] | None:
        """Return (rotated elements of a head, key) of config.json; None without the key."""
        found = facts.first("rotary_dim")
        return None if found is None else (whole_number(*found, 1), found[1])

    rows["rope_dim"] = replace(
        rows["rope_dim"],
        read={"hf": read},
        write={"hf": lambda value, hp: {"rotary_dim": value}},
        default_in={**rows["rope_dim"].default_in, "hf": 64},
    )
    for name in ("rope_theta", "rope_scaling", "rope_scaling_layers"):
        rule = rows[name]
        rows[name] = replace(
            rule,
            read={style: read for style, read in rule.read.items() if style != "hf"},
            keys={style: keys for style, keys in rule.keys.items() if style != "hf"},
            write={**rule.write, "hf": lambda value, hp: {}},
            check=None,
        )
    return tuple(rows.values())


GPTJ = ArchSpec(
    name="gptj",
    hyper=hyper_rules.hyper_table(
        hyper_rules.hidden_size(4096, "n_embd hidden_size"),
        hyper_rules.n_layers(28, "n_layer num_hidden_layers"),
        hyper_rules.n_heads(16, "n_head num_attention_heads"),
        hyper_rules.n_kv_heads(hf=""),
        divided_head_dim_rule(),
        hyper_rules.ffn_size(default_ffn_size, "n_inner"),
        hyper_rules.vocab_size(50400),
        hyper_rules.context_length(2048, "n_positions max_position_embeddings n_ctx"),
        hyper_rules.norm_eps(1e-5, "layer_norm_epsilon", "layer_norm_epsilon"),
        hyper_rules.activation("gelu_tanh", "activation_function", tanh="gelu_new"),
        hyper_rules.tied_embeddings(shown=False),
        hyper_rules.fixed("mlp_bias", True),
        hyper_rules.fixed("parallel_residual", True),
        *_rope_rules(),
        hyper_rules.rope_style("interleaved"),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm="layer", mlp="plain", activation_cast="steps"),
    lost=losses.common_losses("gelu_tanh", partial=True),
    ignored=frozenset(
        """n_ctx rotary gradient_checkpointing scale_attn_weights summary_type summary_use_proj
        summary_activation summary_proj_to_labels summary_first_dropout""".split()
    ),
    buffers=BUFFERS,
)
