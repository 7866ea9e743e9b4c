"""minimax (MiniMax-Text-01, M1): lightning attention in most layers, attention in others, experts.

The residual stream after a norm, times a factor, is added to the output of attention or MLP,
times another. Files published before transformers had the model say the factors, the layers and
the rotated elements by other keys. GGUF has one factor for every stream and none for what is added.
Sources: transformers' modeling_minimax and configuration_minimax; the converter's minimax.py,
llama.cpp's minimax-01.cpp.
"""

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.layer_kinds import layers_with_role, read_layer_kinds
from aprfmt.arch.minimax_m2 import rotary_dim_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import IGNORED_WINDOW, Window, window_rules
from aprfmt.arch.spec import Binding, BlockSpec, Facts, Found, HyperRule, Loss, Params
from aprfmt.arch.spec_builders import full_spec
from aprfmt.arch.tensor_rows import (
    KV,
    LAYER,
    Q,
    RoleRow,
    experts,
    linear,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import boolean, finite_number, sequence, whole_number
from aprfmt.base.protocols import Value

_IN, _ELSE, _MOE = "lightning_layers", "!lightning_layers", "block_sparse_moe."
_EXPERTS, _EXPERT_BINDINGS = experts(_MOE + "experts", "w1", "w3", "w2")
_MADE = make_tables(
    with_model_rows(
        *norm("attn_norm", "input_layernorm"),
        *linear("attn_q", "self_attn.q_proj", Q, "hidden_size", _ELSE),
        *linear("attn_k", "self_attn.k_proj", KV, "hidden_size", _ELSE),
        *linear("attn_v", "self_attn.v_proj", KV, "hidden_size", _ELSE),
        *linear("attn_output", "self_attn.o_proj", "hidden_size", Q),
        *linear("attn_qkv", "self_attn.qkv_proj", f"3*{Q}", "hidden_size", _IN),
        *linear("attn_gate", "self_attn.output_gate", Q, "hidden_size", _IN),
        RoleRow("ssm_norm.weight", "self_attn.norm.weight", (Q,), _IN, gguf="attn_norm_2.weight"),
        *norm("ffn_norm", "post_attention_layernorm"),
        RoleRow(
            "ffn_gate_inp.weight", _MOE + "gate.weight", ("n_experts", "hidden_size"), "moe_layers"
        ),
        *_EXPERTS,
    ),
    hf_first=(
        Binding((LAYER + "self_attn.out_proj.weight",), ("attn_output.weight",), needs=_IN),
        *_EXPERT_BINDINGS,
    ),
    # transformers 5 calls the module `mlp` in memory.
    hf_more=(Binding((LAYER + "mlp.gate.weight",), ("ffn_gate_inp.weight",)),),
)
# Of the stream and of what is added: in layers with attention, with lightning, after the MLP.
_FACTORS = tuple(
    (f"{part}_{kind}_factor", f"layernorm_{published}_{kind}")
    for part, published in (
        ("full_attn", "full_attention"),
        ("linear_attn", "linear_attention"),
        ("mlp", "mlp"),
    )
    for kind in ("alpha", "beta")
)
_ONE_FACTOR, _LISTED = "{arch}.residual_scale", "{arch}.attention.recurrent_layers"
_INTERVAL = 8  # in a GGUF that does not list them, all layers but every eighth have lightning


def _usual_layers(hp: Params) -> tuple[bool, ...]:
    """Return one boolean a layer: lightning attention, by llama.cpp's rule without a list."""
    return tuple((i + 1) % _INTERVAL != 0 for i in range(hp["n_layers"]))


def _lightning_layers_rule() -> HyperRule:
    """Return the rule for the layers with lightning attention; by default every other one."""
    kinds = ("full_attention", "linear_attention")
    usual = read_layer_kinds(kinds[1:], kinds[:1], "layer_types")

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has lightning attention, key) of config.json.

        The list of kinds counts, else that of older files, where 0 is lightning attention. None
        without a list.
        """
        found, older = usual(facts, hp), facts.first("attn_type_list")
        if found is not None or older is None:
            return found
        listed = sequence(*older, hp["n_layers"])[: hp["n_layers"]]
        return tuple(whole_number(kind, older[1]) == 0 for kind in listed), older[1]

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has lightning attention, key) of a GGUF.

        None without a list.
        """
        found = facts.first(_LISTED)
        if found is None:
            return None
        listed = sequence(*found, hp["n_layers"])[: hp["n_layers"]]
        return tuple(boolean(mark, found[1]) for mark in listed), found[1]

    def write(value: Value, hp: Params) -> Params:
        """Return {GGUF key: one boolean per layer: lightning attention}.

        {} where llama.cpp assumes the same.
        """
        return {} if tuple(value) == _usual_layers(hp) else {_LISTED: list(value)}

    return HyperRule(
        _IN,
        read={"hf": read, "gguf": read_gguf},
        write={"hf": lambda value, hp: {"layer_types": [kinds[on] for on in value]}, "gguf": write},
        default=lambda hp: tuple(i % 2 == 1 for i in range(hp["n_layers"])),
        default_in={"gguf": _usual_layers},
        shape=layers_with_role("ssm_norm.weight"),
    )


def _residual_scales_rule() -> HyperRule:
    """Return the rule that reads and writes the six factors on residual streams and outputs."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (factors on residual streams and sublayer outputs, first key) of config.json.

        The factors are in the order of _FACTORS, 1 for an absent key. None without any of the
        keys.
        """
        found = [facts.first(*keys) for keys in _FACTORS]
        if not any(found):
            return None
        values = tuple(1.0 if each is None else float(finite_number(*each)) for each in found)
        return values, next(each[1] for each in found if each is not None)

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (factors on residual streams and sublayer outputs, key) of a GGUF.

        None without the key. A GGUF has one number, the factor of every residual stream; outputs
        have the factor 1.
        """
        found = facts.first(_ONE_FACTOR)
        if found is None:
            return None
        return (float(finite_number(*found)), 1.0) * (len(_FACTORS) // 2), found[1]

    names = tuple(keys[0] for keys in _FACTORS)
    return HyperRule(
        "residual_scales", read={"hf": read, "gguf": read_gguf}, default=(1.0,) * len(_FACTORS),
        write={
            "hf": lambda value, hp: dict(zip(names, value, strict=True)),
            "gguf": lambda value, hp: {_ONE_FACTOR: value[0]},
        },
    )  # fmt: skip


def _unpublished_mix(hp: Params) -> str:
    """Return in words two features of a model that no published one has together; "" for none.

    `hp` are the model's hyperparameters. A check warns of such a model.
    """
    if not any(hp[_IN]):
        return "a stream that continues from the norm, and no layer with lightning attention"
    return "" if not all(hp[_IN]) else "lightning attention, and no layer with attention"


MINIMAX = full_spec(
    "minimax",
    _MADE,
    hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(8),
        hyper_rules.context_length(4096 * 32),
        hyper_rules.norm_eps(1e-5),
        *rotary_dim_rules(RopeDefaults(theta=1e6)),
        *window_rules(Window(listed=False)),
        *moe.expert_count_rules(8, 2, "num_local_experts num_experts"),
        moe.expert_size_rule("intermediate_size"),
        moe.all_moe_layers_rule(),
        hyper_rules.fixed("norm_topk", True),
        _lightning_layers_rule(),
        _residual_scales_rule(),
    ),
    BlockSpec(recurrence="lightning", residual="norm", router_cast="logits"),
    lost=(
        *losses.common_losses(),
        IGNORED_WINDOW,
        Loss(
            "gguf",
            "residual_scales",
            lambda hp: hp["residual_scales"] != (hp["residual_scales"][0], 1.0) * 3,
            "llama.cpp multiplies every stream by one factor, and nothing that is added",
        ),
        Loss(
            "gguf",
            "norm_eps",
            lambda hp: hp["norm_eps"] != 1e-6,
            "llama.cpp uses one epsilon for all norms, transformers 1e-6 after lightning attention",
        ),
    ),
    ignored=frozenset(
        """block_size router_jitter_noise postnorm shared_intermediate_size shared_moe_mode
        layernorm_eps""".split()
    ),
    buffers={"hf": tuple(
        f"{LAYER}self_attn.{name}"
        for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
    )},
    mixed=_unpublished_mix,
)  # fmt: skip
