"""Rules for mixtures of experts; a family's table overrides the rules that differ."""

from collections.abc import Collection, Mapping
from typing import Any

from aprfmt.arch.hyper_rules import fixed, per_layer, size
from aprfmt.arch.spec import Facts, Found, HyperRule, Loss, Params
from aprfmt.arch.value_checks import sequence, whole_number
from aprfmt.base.protocols import Value

MAX_EXPERTS = 1 << 16


def expert_count_rules(
    experts: int, used: int, hf: str = "num_experts num_local_experts"
) -> tuple[HyperRule, HyperRule]:
    """Return (the rule for the number of experts, the rule for how many of them a token uses).

    `experts` and `used` are the numbers where config.json has no key, `hf` are the keys of the
    first, separated by spaces.
    """
    return (
        size("n_experts", hf, "expert_count", "num_experts", hf_default=experts, high=MAX_EXPERTS),
        size(
            "n_experts_used",
            "num_experts_per_tok",
            "expert_used_count",
            "num_experts_per_tok",
            hf_default=used,
            high=MAX_EXPERTS,
        ),
    )


def expert_size_rule(hf: str = "moe_intermediate_size", hf_default: Any = None) -> HyperRule:
    """Return the rule for the inner width of an expert; without a key a GGUF means ffn_size.

    `hf` is config.json's key, `hf_default` the width where it is absent, None where it has to be
    there.
    """
    return size(
        "moe_ffn_size",
        hf,
        "expert_feed_forward_length",
        "moe_intermediate_size",
        default=lambda hp: hp["ffn_size"],
        hf_default=hf_default,
    )


def all_moe_layers_rule() -> HyperRule:
    """Return the rule for `moe_layers` of models whose layers all have experts."""
    return HyperRule("moe_layers", default=per_layer(True))


def sparse_layers_rule() -> HyperRule:
    """Return qwen's rule for moe_layers: every decoder_sparse_step-th, none of mlp_only_layers."""

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has experts, key) by config.json's step and list.

        Every `decoder_sparse_step`-th layer has experts, except those of `mlp_only_layers`. All
        layers have experts without these keys.
        """
        step, dense = facts.first("decoder_sparse_step"), facts.first("mlp_only_layers")
        every = 1 if step is None else whole_number(*step, 1)
        without = () if dense is None else [whole_number(i, dense[1]) for i in sequence(*dense)]
        layers = tuple((i + 1) % every == 0 and i not in without for i in range(hp["n_layers"]))
        return layers, (step or dense or ("", "num_experts"))[1]

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {key: value} for layers with experts: step 1, and the dense ones."""
        dense = [i for i, sparse in enumerate(value) if not sparse]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}

    return HyperRule("moe_layers", read={"hf": read}, write={"hf": write}, default=per_layer(True))


def norm_topk_rule(default: bool, gguf: bool | None = None) -> HyperRule:
    """Return the rule for whether the chosen experts' weights are renormalised.

    `gguf`: llama.cpp's fixed choice; None: a GGUF has a key for it.
    """
    keys = {"hf": ("norm_topk_prob",)}
    if gguf is None:
        keys["gguf"] = ("{arch}.expert_weights_norm",)
        return HyperRule("norm_topk", keys, "bool", default, {"gguf": False})
    return HyperRule("norm_topk", keys, "bool", default, {"gguf": gguf})


def router_rule(kind: str) -> HyperRule:
    """Return the rule for the kind of routing, which is always `kind`: no key changes it."""
    return fixed("router", kind)


def norm_topk_loss(gguf: bool) -> Loss:
    """Return the Loss (what a GGUF cannot express) of whether experts' weights are renormalised.

    `gguf` is llama.cpp's fixed choice: it computes models with the other one wrongly.
    """
    return Loss(
        "gguf",
        "norm_topk",
        lambda hp: hp["norm_topk"] is not gguf,
        f"GGUF has no key for it: llama.cpp {'always' if gguf else 'never'} renormalises the "
        "chosen experts' weights",
    )


def has_router(names: Collection[str], values: Mapping[str, Value]) -> bool:
    """Return whether tensor names show a router: the model has experts.

    `values` (the metadata) is not used: every evidence function is given both.
    """
    return any(".ffn_gate_inp." in name or ".block_sparse_moe." in name for name in names)
