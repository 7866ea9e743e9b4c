"""gpt-oss: experts in every layer, attention sinks, biases everywhere, clamped swiglu.

Hugging Face keeps gate and up interleaved in one tensor, [experts, in, out] where the values are
plain and [experts, out, in] where they are MXFP4 (binding.bind_packed). GGUF calls the norm before
the experts `post_attention_norm`. Source: docs/reference/architectures.md; the converter's
gpt_oss.py.
"""

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.layout_steps import Transposed
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import YARN_BETAS, RopeDefaults, yarn_attention_factor
from aprfmt.arch.sliding_window import Window, window_period, window_rules
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, HyperRule, Loss
from aprfmt.arch.tensor_rows import (
    FUSED,
    LAYER,
    RoleRow,
    attention,
    make_tables,
    norm,
    with_model_rows,
)

_EXPERTS = LAYER + "mlp.experts."
_TURNED = Transposed()
_TURNS = Split(("moe_ffn_size", "moe_ffn_size"), axis=1, interleaved=True)
_GATE_UP = ("ffn_gate_exps.weight", "ffn_up_exps.weight")

_EXPERT_ROWS = tuple(
    RoleRow(f"ffn_{name}_exps.{part}", "", ("n_experts", *shape), gguf=None)
    for part, shapes in (
        ("weight", (("moe_ffn_size", "hidden_size"), ("hidden_size", "moe_ffn_size"))),
        ("bias", (("moe_ffn_size",), ("hidden_size",))),
    )
    for name, shape in (("gate", shapes[0]), ("up", shapes[0]), ("down", shapes[1]))
)

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *attention(),
        RoleRow("attn_sinks.weight", "self_attn.sinks", ("n_heads",)),
        RoleRow(
            "ffn_norm.weight",
            "post_attention_layernorm.weight",
            ("hidden_size",),
            gguf="post_attention_norm.weight",
        ),
        RoleRow("ffn_gate_inp.weight", "mlp.router.weight", ("n_experts", "hidden_size")),
        RoleRow("ffn_gate_inp.bias", "mlp.router.bias", ("n_experts",)),
        *_EXPERT_ROWS,
    ),
    hf_first=(
        Binding((_EXPERTS + "gate_up_proj",), _GATE_UP, (_TURNED, _TURNS)),
        Binding(
            (_EXPERTS + "gate_up_proj_bias",), ("ffn_gate_exps.bias", "ffn_up_exps.bias"), (_TURNS,)
        ),
        Binding((_EXPERTS + "down_proj",), ("ffn_down_exps.weight",), (_TURNED,)),
        Binding((_EXPERTS + "down_proj_bias",), ("ffn_down_exps.bias",)),
    ),
    hf_more=FUSED,
)

LIMIT, ALPHA = 7.0, 1.702
YARN = {
    "type": "yarn",
    "factor": 32.0,
    "original_context_length": 4096,
    "beta_fast": YARN_BETAS[0],
    "beta_slow": YARN_BETAS[1],
    "attention_factor": yarn_attention_factor(32.0, None, None),
    "mscale": None,
    "mscale_all_dim": None,
    "truncate": False,
}  # transformers' default

GPT_OSS = ArchSpec(
    name="gpt_oss",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.head_dim(64),
        hyper_rules.context_length(131072),
        hyper_rules.norm_eps(1e-5),
        HyperRule(
            "activation",
            default="swiglu_oai",
            write={"hf": lambda value, hp: {"hidden_act": "silu"}},
        ),
        hyper_rules.tied_embeddings(shown=False),
        *hyper_rules.attention_biases(True),
        hyper_rules.fixed("mlp_bias", True),
        *rope_rules(RopeDefaults(theta=150000.0, hf_default=YARN)),
        *window_rules(Window(128, 128, window_period(2), stated=True)),
        *moe.expert_count_rules(128, 4, "num_local_experts num_experts"),
        moe.expert_size_rule("intermediate_size"),
        moe.all_moe_layers_rule(),
        moe.router_rule("softmax_topk"),
        HyperRule("swiglu_limit", {"hf": ("swiglu_limit",)}, "float", LIMIT),
        HyperRule("swiglu_alpha", {"hf": ("swiglu_alpha",)}, "float", ALPHA),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm_cast="after_weight", sinks=True, softmax_cast="input"),
    lost=(
        *losses.common_losses("swiglu_oai"),
        losses.ONE_BIAS_KEY,
        Loss(
            "gguf",
            "window_layers",
            lambda hp: (
                hp["sliding_window"] is not None
                and hp["window_layers"] != window_period(2)(None, hp)
            ),
            "llama.cpp windows every other layer, starting with the first, whatever the file says",
            assumed=True,
        ),
        Loss(
            "gguf",
            "swiglu_limit",
            lambda hp: (hp["swiglu_limit"], hp["swiglu_alpha"]) != (LIMIT, ALPHA),
            f"llama.cpp clamps at {LIMIT} with a gain of {ALPHA} whatever the model says",
        ),
    ),
    ignored=frozenset({"hidden_act", "initial_context_length", "experts_per_token"}),
)
