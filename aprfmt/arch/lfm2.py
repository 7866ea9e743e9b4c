"""lfm2 and its mixture: short convolutions, and attention with normed heads in some layers.

The norm after the last layer is called embedding_norm, in GGUF too. Sources:
transformers' modeling files; the gguf package's name map; the converter's lfm2.py.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.deepseek import routed_scale_rule, sigmoid_router_rule
from aprfmt.arch.layer_kinds import (
    IN,
    attention_rows,
    conv_layers_rule,
    kv_heads_rule,
    other_layers_rule,
    read_layer_kinds,
    read_layer_numbers,
)
from aprfmt.arch.mla import dense_first_rule
from aprfmt.arch.recurrent_steps import Depthwise
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, Found, HyperRule, Loss, Params
from aprfmt.arch.tensor_rows import RoleRow, Rows, experts, linear, make_tables, model_rows, norm
from aprfmt.arch.value_checks import boolean, finite_number, whole_number
from aprfmt.base.protocols import Value

_CONV, _BIAS = "conv_layers", "conv_bias"
_BEFORE, _ = model_rows()
LAST = RoleRow(
    "output_norm.weight", "model.embedding_norm.weight", ("hidden_size",),
    gguf="token_embd_norm.weight", layered=False,
)  # fmt: skip
_HEAD = RoleRow(
    "output.weight", "lm_head.weight", ("vocab_size", "hidden_size"), "!tied_embeddings",
    layered=False,
)  # fmt: skip


def _mlp_rows(needs: str = "") -> Rows:
    """Return the tensor-table rows of the gated MLP's three matrices."""
    return (
        *linear("ffn_gate", "feed_forward.w1", "ffn_size", "hidden_size", needs),
        *linear("ffn_up", "feed_forward.w3", "ffn_size", "hidden_size", needs),
        *linear("ffn_down", "feed_forward.w2", "hidden_size", "ffn_size", needs),
    )


GATED = _mlp_rows()
CONVOLUTION = (
    *linear("shortconv.in_proj", "conv.in_proj", "3*hidden_size", "hidden_size", _CONV, bias=_BIAS),
    RoleRow("shortconv.conv.weight", "conv.conv.weight", ("hidden_size", "conv_taps"), _CONV,
        (Depthwise("hidden_size", "conv_taps"),)),
    RoleRow("shortconv.conv.bias", "conv.conv.bias", ("hidden_size",), f"{_CONV} & {_BIAS}"),
    *linear("shortconv.out_proj", "conv.out_proj", "hidden_size", "hidden_size", _CONV, bias=_BIAS),
)  # fmt: skip


def _lfm2_rows(*mlp: RoleRow, head: RoleRow = _HEAD) -> Rows:
    """Return the tensor-table rows of a model with these MLP rows and this head."""
    return (
        *_BEFORE,
        *norm("attn_norm", "operator_norm"),
        *attention_rows(bias=None, out="out_proj"),
        *norm("attn_q_norm", "self_attn.q_layernorm", ("head_dim",), IN),
        *norm("attn_k_norm", "self_attn.k_layernorm", ("head_dim",), IN),
        *CONVOLUTION,
        *norm("ffn_norm", "ffn_norm"),
        *mlp,
        LAST,
        head,
    )


def _read_ffn_size(facts: Facts, hp: Params) -> Found:
    """Return (MLP width, key): two thirds of config.json's, times a factor, rounded up.

    config.json may switch that off; then the width is the one of its key. None without that key.
    """
    stated = facts.first("block_ff_dim", "intermediate_size")
    adjust = facts.first("block_auto_adjust_ff_dim")
    factor = facts.first("block_ffn_dim_multiplier")
    unit = facts.first("block_multiple_of")
    if stated is None or (adjust is not None and not boolean(*adjust)):
        return stated
    size = 2 * whole_number(*stated, 1) // 3
    if factor is not None:
        size = int(finite_number(*factor) * size)
    multiple = 256 if unit is None else whole_number(*unit, 1)
    return -(-size // multiple) * multiple, stated[1]


def _conv_layers_rule() -> HyperRule:
    """Return the rule for the layers with a convolution: by kind, or by old files' numbers.

    Old files list the numbers of the layers with attention.
    """
    kinds = read_layer_kinds(("conv",), ("full_attention",), "layer_types")
    numbers = read_layer_numbers("full_attn_idxs")

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has a convolution, key) of config.json.

        None without a list. A list of kinds counts, else old files' numbers of the layers with
        attention.
        """
        listed, attending = kinds(facts, hp), numbers(facts, hp)
        if listed is not None or attending is None:
            return listed
        return tuple(not on for on in attending[0]), attending[1]

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {"layer_types": kind of each layer}.

        `value`: True for a convolution.
        """
        return {"layer_types": ["conv" if on else "full_attention" for on in value]}

    return conv_layers_rule(read, write)


def _tied_rule() -> HyperRule:
    """Return the rule for a tied head; an older key wins in transformers where both exist."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (whether the head uses the embedding's weight, key) of config.json.

        None without a key. The older `tie_embedding` counts before `tie_word_embeddings`.
        """
        older, usual = facts.first("tie_embedding"), facts.first("tie_word_embeddings")
        return older or usual

    return replace(hyper_rules.tied_embeddings(default=True), read={"hf": read})


_SHARED = (
    kv_heads_rule(8),
    hyper_rules.context_length(128000),
    hyper_rules.norm_eps(1e-5, "norm_eps"),
    _tied_rule(),
    hyper_rules.fixed("activation", "silu"),
    hyper_rules.fixed("qk_norm", True),
    *rope_rules(RopeDefaults(theta=1e6)),
    hyper_rules.size("conv_taps", "conv_L_cache", "shortconv.l_cache", default=3),
    _conv_layers_rule(),
    other_layers_rule("rope_layers", "conv_layers"),
    other_layers_rule("attention_layers", "conv_layers"),
    hyper_rules.flag("conv_bias", False, "conv_bias", present=("shortconv.in_proj.bias",)),
)
_BLOCK = BlockSpec(qk_norm="head", recurrence="short_conv")
_LOST = (
    *losses.common_losses(),
    Loss(
        "gguf", "conv_bias", lambda hp: hp["conv_bias"],
        "llama.cpp knows no biases of short convolutions and refuses the file",
    ),
)  # fmt: skip
# Keys of published models that transformers does not read.
_IGNORED = frozenset(
    """block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_swiglu
    block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads
    use_pos_enc""".split()
)

_TENSORS, _BINDINGS = make_tables(_lfm2_rows(*GATED))
LFM2 = ArchSpec(
    name="lfm2",
    hyper=hyper_rules.hyper_table(
        *_SHARED,
        replace(
            hyper_rules.ffn_size(8192),
            read={"hf": _read_ffn_size},
            write={
                "hf": lambda value, hp: {
                    "intermediate_size": value,
                    "block_auto_adjust_ff_dim": False,
                }
            },
        ),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=_BLOCK,
    lost=_LOST,
    ignored=_IGNORED,
)

_EXPERTS, _EXPERTS_HF = experts("feed_forward.experts", "w1", "w3", "w2")
_MOE_TENSORS, _MOE_BINDINGS = make_tables(
    _lfm2_rows(
        *_mlp_rows("!moe_layers"),
        RoleRow(
            "ffn_gate_inp.weight",
            "feed_forward.gate.weight",
            ("n_experts", "hidden_size"),
            "moe_layers",
        ),
        RoleRow(
            "exp_probs_b.bias",
            "feed_forward.expert_bias",
            ("n_experts",),
            "moe_layers & expert_bias",
        ),
        *_EXPERTS,
        head=replace(_HEAD, gguf=""),
    ),
    hf_first=_EXPERTS_HF,
)
LFM2_MOE = ArchSpec(
    name="lfm2_moe",
    hyper=hyper_rules.hyper_table(
        *_SHARED,
        hyper_rules.ffn_size(7168),
        *moe.expert_count_rules(32, 4),
        moe.expert_size_rule(hf_default=1792),
        dense_first_rule(2, "num_dense_layers"),
        moe.norm_topk_rule(True, gguf=True),
        routed_scale_rule(1.0),
        sigmoid_router_rule("sigmoid_bias_eps"),
        hyper_rules.flag("expert_bias", True, "use_expert_bias", present=("exp_probs_b.bias",)),
    ),
    tensors=_MOE_TENSORS,
    bindings=_MOE_BINDINGS,
    block=_BLOCK,
    lost=(
        *_LOST,
        moe.norm_topk_loss(True),
        Loss(
            "gguf",
            "expert_bias",
            lambda hp: not hp["expert_bias"],
            "llama.cpp asks for a bias of the choice of experts and refuses the file",
        ),
    ),
    ignored=_IGNORED,
)
