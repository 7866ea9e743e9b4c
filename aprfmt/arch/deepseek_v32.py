"""deepseek v3.2 and glm-5: deepseek v3 whose attention reads the keys that an indexer chooses.

An indexer's rotated elements are in split halves (v3.2) or in adjacent pairs (glm-5). Layers of
glm-5.2 may have none: they read the keys that the last indexer before them chose. Sources:
transformers' modeling_deepseek_v32 and modeling_glm_moe_dsa; the converter's glm.py, llama.cpp's
deepseek32.cpp and glm-dsa.cpp.
"""

from dataclasses import replace

from aprfmt.arch import hyper_rules, moe
from aprfmt.arch.deepseek import DEEPSEEK_V3, EXPERTS_HF, v3_rules, v3_tables
from aprfmt.arch.layer_kinds import layers_with_role, read_layer_kinds
from aprfmt.arch.mla import (
    LISTED_EXPERTS_LOSS,
    expert_groups_rule,
    listed_experts_rule,
    mla_length_rules,
    q_lora_rank_rule,
    shared_experts_rule,
)
from aprfmt.arch.spec import Facts, Found, HyperRule, Params
from aprfmt.arch.tensor_rows import linear, norm
from aprfmt.arch.value_checks import listed_kinds, sequence, text, whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

_IN, _MODULE = "index_layers", "self_attn.indexer"
_TENSORS, _BINDINGS = v3_tables(
    *linear(
        "indexer.attn_q_b", f"{_MODULE}.wq_b", "index_heads*index_head_dim", "q_lora_rank", _IN
    ),
    *linear("indexer.attn_k", f"{_MODULE}.wk", "index_head_dim", "hidden_size", _IN),
    *norm("indexer.k_norm", f"{_MODULE}.k_norm", ("index_head_dim",), _IN, bias=True),
    *linear("indexer.proj", f"{_MODULE}.weights_proj", "index_heads", "hidden_size", _IN),
)
_TYPES = "{arch}.attention.indexer.types"


def _index_layers_rule(names: str) -> HyperRule:
    """Return the rule that reads and writes which layers have an indexer.

    Other layers use that of an earlier layer. config.json lists the layers, or has one letter a
    layer, or gives a period: all up to an offset, then every n-th. If `names` is "", all layers
    have one and no key is read.
    """
    # config.json has three forms: a list of kinds, one letter a layer, or a period.
    listed = read_layer_kinds(("full",), ("shared",), "indexer_types")

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has an indexer, key) of config.json.

        None without a key. Of three keys the first that is there counts: a list of kinds, a
        pattern of letters, a period. Raises ArchError for a pattern that is not one letter F or S
        for every layer.
        """
        found, pattern = listed(facts, hp), facts.first("index_topk_pattern")
        if found is not None:
            return found
        if pattern is not None:
            kinds = text(*pattern)
            if len(kinds) != hp["n_layers"] or set(kinds) - set("FS"):
                raise ArchError(f"{pattern[1]}: is {kinds!r}; expected F or S for every layer")
            return tuple(kind == "F" for kind in kinds), pattern[1]
        # A period counts from the last of the first layers, which all have an indexer.
        every, offset = facts.first("index_topk_freq"), facts.first("index_skip_topk_offset")
        if every is None:
            return None
        step = max(whole_number(*every), 1)
        start = 2 if offset is None else whole_number(*offset)
        return tuple(max(i - start + 1, 0) % step == 0 for i in range(hp["n_layers"])), every[1]

    def read_gguf(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer: it has an indexer, key) of a GGUF; None without the key.

        Raises ArchError for a list of other values than true and false.
        """
        found = facts.first(_TYPES)
        if found is None:
            return None
        kinds = sequence(*found, hp["n_layers"])
        if any(kind not in (0, 1) for kind in kinds):
            raise ArchError(f"{found[1]}: holds {kinds!r}; expected true or false for every layer")
        return tuple(bool(kind) for kind in kinds[: hp["n_layers"]]), found[1]

    def check(value: Value, facts: Facts, hp: Params) -> str:
        """Raise ArchError if config.json lists a kind of layer without an indexer; else return "".

        "" says that there is no warning, as for every check of a rule.
        """
        found = facts.first("layer_types")
        if found is not None:
            listed_kinds(*found, hp["n_layers"], _INDEXED)
        return ""

    rule = HyperRule(_IN, default=hyper_rules.per_layer(True), check=check)
    if not names:
        return rule
    return replace(
        rule,
        keys={"gguf": (_TYPES,)},
        read={"hf": read, "gguf": read_gguf},
        write={
            "hf": lambda value, hp: {"indexer_types": ["full" if on else "shared" for on in value]},
            "gguf": lambda value, hp: {_TYPES: list(value)},
        },
        shape=layers_with_role("indexer.attn_k.weight"),
    )


def _unpublished_mix(hp: Params) -> str:
    """Return in words two features of a model that no published one has together; "" for none.

    `hp` are the model's hyperparameters. A check warns of such a model.
    """
    if hp["q_lora_rank"] is None:
        return "an indexer and queries that are not compressed"
    return "" if hp[_IN][0] else "an indexer and a first layer that has none"


def _v32_rules(heads: int, *overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return the rules of both models; `heads` is the default number of an indexer's heads."""
    return v3_rules(
        hyper_rules.rope_style("interleaved"),
        shared_experts_rule("n_shared_experts", 1),
        moe.expert_size_rule(hf_default=2048),
        listed_experts_rule(3, counted=True),
        hyper_rules.size(
            "index_heads", "index_n_heads", "attention.indexer.head_count", hf_default=heads
        ),
        hyper_rules.size(
            "index_head_dim", "index_head_dim", "attention.indexer.key_length", hf_default=128
        ),
        hyper_rules.size("index_topk", "index_topk", "attention.indexer.top_k", hf_default=2048),
        *overrides,
    )


# What configurations call the layers: transformers 5.23, and its releases before.
_INDEXED = ("indexed_attention", "deepseek_sparse_attention")
_IGNORED = DEEPSEEK_V3.ignored | {"mlp_bias", "layer_types"}
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    called={},
    hyper=_v32_rules(
        64,
        hyper_rules.context_length(163840),
        _index_layers_rule(""),
        expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 8),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 4),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=replace(DEEPSEEK_V3.block, indexer="half"),
    lost=(*DEEPSEEK_V3.lost, LISTED_EXPERTS_LOSS),
    ignored=_IGNORED,
    evidence=None,
    mixed=_unpublished_mix,
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    name="glm_moe_dsa",
    called={},
    hyper=_v32_rules(
        32,
        hyper_rules.context_length(202752),
        hyper_rules.norm_eps(1e-5),
        *mla_length_rules(192, 256),
        q_lora_rank_rule(2048),
        *moe.expert_count_rules(256, 8, EXPERTS_HF),
        expert_groups_rule("n_expert_groups", "n_group", "expert_group_count", 1),
        expert_groups_rule("n_expert_groups_used", "topk_group", "expert_group_used_count", 1),
        _index_layers_rule("indexer_types"),
    ),
    block=replace(DEEPSEEK_V3.block, indexer="interleaved"),
    ignored=_IGNORED | {"rope_interleave", "indexer_rope_interleave"},
    draft_layer={_IN: True},
)
