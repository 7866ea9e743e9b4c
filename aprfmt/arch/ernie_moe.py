"""ernie4_5 with experts: softmax scores, a bias for the choice only, shared experts, dense layers.

Source: transformers' modeling_ernie4_5_moe; the converter's ernie.py, llama.cpp's ernie4-5-moe.cpp.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.ernie import BIASES, ROPE
from aprfmt.arch.layout_steps import Reshaped
from aprfmt.arch.mla import shared_experts_rule
from aprfmt.arch.qwen2_moe import EXPERT_BINDINGS, EXPERTS, ROUTER, shared_expert_rows
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, Facts, HyperRule, Loss, Params
from aprfmt.arch.tensor_rows import (
    FUSED,
    LAYER,
    RoleRow,
    attention,
    gated_mlp,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import finite_number, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_FIRST, _LAST, _STEP = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"
_SMALL = 1e-9  # below what the weights of chosen experts add up to
_FLAT = (Reshaped(("n_experts",), ("1", "n_experts")),)

_TENSORS, _BINDINGS = make_tables(
    (
        *with_model_rows(
            *norm("attn_norm", "input_layernorm"),
            *attention(),
            *norm("ffn_norm", "post_attention_layernorm"),
            *gated_mlp(bias="mlp_bias", needs="!moe_layers"),
            ROUTER,
            RoleRow("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias", ("n_experts",),
                "moe_layers", hf_steps=_FLAT),
            *EXPERTS,
            *shared_expert_rows("mlp.shared_experts", "moe_layers & shared_ffn_size", "mlp_bias"),
        ),
        RoleRow("output.bias", "lm_head.bias", ("vocab_size",), "mlp_bias", layered=False),
    ),
    hf_first=EXPERT_BINDINGS,
    # transformers 5 keeps the bias below the router in memory.
    hf_more=(
        Binding((LAYER + "mlp.gate.moe_statics.e_score_correction_bias",), ("exp_probs_b.bias",),
            _FLAT),
        *FUSED,
    ),
)  # fmt: skip


def _layers_of_range(first: int, last: int, step: int, hp: Params) -> tuple[bool, ...]:
    """Return one boolean a layer: True for multiples of `step` from `first` to `last`.

    `first` and `last` count layers from 0, the multiples from 1.
    """
    return tuple((i + 1) % step == 0 and first <= i <= last for i in range(hp["n_layers"]))


def _moe_layers_rule() -> HyperRule:
    """Return the rule for moe_layers: every step-th layer from a first to a last one."""

    def read_hf(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (one boolean per layer: it has experts, key) of config.json's range of layers.

        First, last and step have defaults. The key is the first of the three that is there, ""
        without any.
        """
        first, last, step = (facts.first(key) for key in (_FIRST, _LAST, _STEP))
        end = hp["n_layers"] - 1 if last is None or last[0] == -1 else whole_number(*last)
        start = 1 if first is None else whole_number(*first)
        every = 1 if step is None else whole_number(*step, 1)
        return _layers_of_range(start, end, every, hp), (first or last or step or (0, ""))[1]

    def read_gguf(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (one boolean per layer: it has experts, key) of a GGUF's first layer and step.

        None where a GGUF has neither key.
        """
        first = facts.first("{arch}.leading_dense_block_count")
        step = facts.first("{arch}.interleave_moe_layer_step")
        if first is None and step is None:
            return None
        start = 0 if first is None else whole_number(*first)
        every = 1 if step is None else whole_number(*step, 1)
        return _layers_of_range(start, hp["n_layers"] - 1, every, hp), (first or step or (0, ""))[1]

    def layers_to_range(value: Value) -> tuple[int, int, int]:
        """Return (first, last, step) of the layers with experts; `value` has one boolean per layer.

        Without such layers the first is one past the last.
        """
        on = [i for i, sparse in enumerate(value) if sparse]
        if not on:
            return len(value), len(value) - 1, 1
        step = on[1] - on[0] if len(on) > 1 else on[0] + 1
        return on[0], on[-1], step if (on[0] + 1) % step == 0 else 1

    def write_hf(value: Value, hp: Params) -> Params:
        """Return config.json's {key: number}: the first and last layer with experts, their step."""
        return dict(zip((_FIRST, _LAST, _STEP), layers_to_range(value), strict=True))

    def write_gguf(value: Value, hp: Params) -> Params:
        """Return GGUF's {key: number} for the first layer with experts and their step."""
        first, _, step = layers_to_range(value)
        return {"{arch}.leading_dense_block_count": first, "{arch}.interleave_moe_layer_step": step}

    # transformers leaves the first layer dense by default, llama.cpp none.
    return HyperRule(
        "moe_layers",
        read={"hf": read_hf, "gguf": read_gguf},
        write={"hf": write_hf, "gguf": write_gguf},
        default=lambda hp: _layers_of_range(1, hp["n_layers"] - 1, 1, hp),
        default_in={"gguf": lambda hp: _layers_of_range(0, hp["n_layers"] - 1, 1, hp)},
    )


def _shared_experts_rule() -> HyperRule:
    """Return the rule for the shared experts' width; GGUF has the width and the number."""
    rule = shared_experts_rule("moe_num_shared_experts", 2)
    width = "{arch}.expert_shared_feed_forward_length"
    read = {name: read for name, read in rule.read.items() if name != "gguf"}

    def write(value: Value, hp: Params) -> Params:
        """Return GGUF's {key: number} for the number of shared experts and their joint width."""
        return {**rule.write["gguf"](value, hp), width: value}

    return replace(
        rule, keys={"gguf": (width,)}, kind="int", read=read, write={**rule.write, "gguf": write}
    )


def _check_norm_min(value: Value, facts: Facts, hp: Params) -> str:
    """Refuse a `moe_norm_min` that could change how experts are weighted; return "", no remark.

    The weights of the chosen experts are divided by their sum, or by this number where it is more.
    Raises ArchError for one that a sum could fall below.
    """
    found = facts.first("moe_norm_min")
    if found is not None and finite_number(*found) > _SMALL:
        raise ArchError(
            f"{found[1]}: is {found[0]!r}; expected at most {_SMALL}: no larger one is known"
        )
    return ""


_COUNTS = moe.expert_count_rules(64, 6, "moe_num_experts num_experts")

ERNIE4_5_MOE = ArchSpec(
    name="ernie4_5_moe",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(4),
        hyper_rules.context_length(131072),
        hyper_rules.norm_eps(1e-5),
        hyper_rules.tied_embeddings(True),
        *BIASES,
        *ROPE,
        _COUNTS[0],
        replace(_COUNTS[1], keys={**_COUNTS[1].keys, "hf": ("moe_k", "num_experts_per_tok")}),
        moe.expert_size_rule(hf_default=1536),
        _shared_experts_rule(),
        _moe_layers_rule(),
        HyperRule("norm_topk", default=True, check=_check_norm_min),
        hyper_rules.fixed("router", "softmax_bias"),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(rope_cast="result", router_cast="product", shared_expert="plain"),
    lost=(
        *losses.common_losses(),
        losses.ONE_BIAS_KEY,
        Loss(
            "gguf",
            "mlp_bias",
            lambda hp: hp["mlp_bias"] or hp["attention_out_bias"],
            "llama.cpp has no biases of output, MLP and head here and refuses the file",
        ),
    ),
    ignored=frozenset(
        """moe_capacity moe_gate moe_use_aux_free moe_layer_indices use_flash_attention
        num_nextn_predict_layers multi_token_pred_lambda expert_shared_count""".split()
    ),
)
