"""minimax-m3 (text): attention reads blocks of keys that an indexer chooses for each key head.

Norms store weight - 1, every MLP has gpt-oss's clamped gate, experts are routed as minimax-m2's,
with a shared one. transformers joins gate and up in its files of the text alone; published files of
the whole model have them apart. GGUF stores every norm with the 1 added. Sources: transformers'
modeling_minimax_m3_vl, configuration_minimax_m3_vl and conversion mapping; the converter's
minimax.py, llama.cpp's minimax-m3.cpp.
"""

from collections.abc import Mapping

from aprfmt.arch import hyper_rules, losses, moe
from aprfmt.arch.deepseek import ROUTER_BIAS, routed_scale_rule, sigmoid_router_rule
from aprfmt.arch.gemma import PLUS_ONE, gemma_norm_rows
from aprfmt.arch.gpt_oss import ALPHA, LIMIT
from aprfmt.arch.joining_steps import Split
from aprfmt.arch.layer_kinds import layers_with_role, read_layer_kinds
from aprfmt.arch.qwen2_moe import ROUTER, shared_expert_rows
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.spec import (
    Binding,
    BlockSpec,
    Facts,
    Found,
    HyperRule,
    Loss,
    Params,
    Read,
    split_key,
)
from aprfmt.arch.spec_builders import full_spec
from aprfmt.arch.tensor_rows import (
    LAYER,
    attention,
    experts,
    gated_mlp,
    linear,
    make_tables,
    norm,
    with_model_rows,
)
from aprfmt.arch.value_checks import object_under, sequence, whole_number

_IN, _MOE, _INDEXER = "index_layers", "moe_layers", "self_attn.indexer"
_EXPERTS, _EXPERT_BINDINGS = experts("block_sparse_moe.experts", "w1", "w3", "w2")
_EACH = len(_EXPERTS)  # bindings of one tensor an expert come first, those of joined ones then
_INDEX = tuple(
    row
    for part, out in (("q", "index_heads*index_head_dim"), ("k", "index_head_dim"))
    for row in (
        *linear(f"indexer.{part}_proj", f"{_INDEXER}.{part}_proj", out, "hidden_size", _IN),
        *norm(
            f"indexer.{part}_norm",
            f"{_INDEXER}.{part}_norm",
            ("index_head_dim",),
            _IN,
            gguf_steps=PLUS_ONE,
        ),
    )
)


def _bind_gate_up(module: str, end: str, size: str) -> Binding:
    """Return the binding of gate and up stored as one matrix in `module`, gate's rows first.

    `end` is the end of their roles, `size` the hyperparameter with the rows of each.
    """
    roles = tuple(f"ffn_{part}{end}.weight" for part in ("gate", "up"))
    return Binding((f"{LAYER}{module}.gate_up_proj.weight",), roles, (Split((size, size)),))


# Published files' names of the indexer and of a mixture.
_PUBLISHED = (
    *(
        Binding(
            (f"{LAYER}self_attn.index_{part}_{kind}.weight",), (f"indexer.{part}_{kind}.weight",)
        )
        for part in "qk"
        for kind in ("proj", "norm")
    ),
    Binding((f"{LAYER}block_sparse_moe.gate.weight",), ("ffn_gate_inp.weight",)),
    Binding((f"{LAYER}block_sparse_moe.e_score_correction_bias",), ("exp_probs_b.bias",)),
    *(
        Binding(
            (f"{LAYER}block_sparse_moe.shared_experts.{part}_proj.weight",),
            (f"ffn_{part}_shexp.weight",),
        )
        for part in ("gate", "up", "down")
    ),
)
_MADE = make_tables(
    with_model_rows(
        *gemma_norm_rows("attn_norm", "input_layernorm"),
        *attention(bias=None, out_bias=None),
        *gemma_norm_rows("attn_q_norm", "self_attn.q_norm", ("head_dim",)),
        *gemma_norm_rows("attn_k_norm", "self_attn.k_norm", ("head_dim",)),
        *_INDEX,
        *gemma_norm_rows("ffn_norm", "post_attention_layernorm"),
        *gated_mlp(needs=f"!{_MOE}"),
        ROUTER,
        ROUTER_BIAS,
        *_EXPERTS,
        *shared_expert_rows("mlp.shared_experts", f"{_MOE} & shared_ffn_size"),
        norm_steps=PLUS_ONE,
    ),
    hf_first=(
        _bind_gate_up("mlp", "", "ffn_size"),
        _bind_gate_up("mlp.shared_experts", "_shexp", "shared_ffn_size"),
        *_EXPERT_BINDINGS[_EACH:],
        *_EXPERT_BINDINGS[:_EACH],
    ),
    hf_more=_PUBLISHED,
)
_NESTED = "sparse_attention_config"  # published files have the indexers' sizes in this object


def _size(name: str, key: str, nested: str, gguf: str, default: int) -> HyperRule:
    """Return the rule of one size of an indexer, the hyperparameter `name`.

    The key `nested` in published files' object wins over `key`. `gguf` is GGUF's key below
    "attention.indexer.".
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (size of the attention's indexer, its key) of config.json; None with neither key.

        The key `nested` in published files' object counts before `key`.
        """
        inside, found = object_under(facts, _NESTED).get(nested), facts.first(key)
        if inside is not None:
            return whole_number(inside, f"{_NESTED}.{nested}"), f"{_NESTED}.{nested}"
        return None if found is None else (whole_number(*found), key)

    write = {"hf": lambda value, hp: {key: value}}
    keys = {"hf": (key,), "gguf": (f"{{arch}}.attention.indexer.{gguf}",)}
    return HyperRule(name, keys, "int", default, read={"hf": read}, write=write)


def _read_layers(listed: Read, key: str, nested: bool) -> Read:
    """Return a read function for a list of kinds, else for numbers that are not 0 under `key`.

    `nested`: the numbers are in published files' object.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (one boolean per layer, key) of config.json; None without a list.

        The list of layer kinds (`listed`) counts, else the numbers under `key`, where 0 is False.
        With `nested` that key is in published files' object.
        """
        found = listed(facts, hp)
        if found is not None:
            return found
        inside = object_under(facts, _NESTED).get(key) if nested else None
        numbers = facts.first(key) if not nested else None if inside is None else (inside, key)
        if numbers is None:
            return None
        marks = sequence(*numbers, hp["n_layers"])[: hp["n_layers"]]
        return tuple(whole_number(mark, key) != 0 for mark in marks), numbers[1]

    return read


_DENSE = "{arch}.leading_dense_block_count"  # a GGUF's tensors say which layers have experts
_KINDS = {True: "minimax_m3_sparse", False: "full_attention"}
_MLPS = {True: "sparse", False: "dense"}


def _layer_rules() -> tuple[HyperRule, HyperRule]:
    """Return the rules for the layers with an indexer (default: none) and with experts (all)."""
    indexed = read_layer_kinds((_KINDS[True],), (_KINDS[False],), "layer_types")
    mixed = read_layer_kinds((_MLPS[True],), (_MLPS[False],), "mlp_layer_types")
    return (
        HyperRule(
            _IN,
            read={"hf": _read_layers(indexed, "sparse_attention_freq", nested=True)},
            write={"hf": lambda value, hp: {"layer_types": [_KINDS[on] for on in value]}},
            default=hyper_rules.per_layer(False),
            shape=layers_with_role("indexer.q_proj.weight"),
        ),
        HyperRule(
            _MOE,
            read={"hf": _read_layers(mixed, "moe_layer_freq", nested=False)},
            write={
                "hf": lambda value, hp: {"mlp_layer_types": [_MLPS[on] for on in value]},
                "gguf": lambda value, hp: {_DENSE: (*value, True).index(True)},
            },
            default=hyper_rules.per_layer(True),
            shape=layers_with_role("ffn_gate_inp.weight"),
        ),
    )


def _shared_width(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the rows of a shared expert's `up`, in the first layer that has one; None without."""
    role = "ffn_up_shexp.weight"
    found = (shape for key, shape in shapes.items() if shape and split_key(key)[1] == role)
    return next((shape[0] for shape in found), None)


def _shared_rule() -> HyperRule:
    """Return the rule for the shared expert's width; GGUF counts experts of the usual width."""
    count = "{arch}.expert_shared_count"
    return HyperRule(
        "shared_ffn_size",
        {"hf": ("shared_intermediate_size",)},
        "size",
        default_in={"hf": 3072},
        write={"gguf": lambda value, hp: {count: value // hp["moe_ffn_size"]}},
        shape=_shared_width,
    )


def _unpublished_mix(hp: Params) -> str:
    """Return in words two features of a model that no published one has together; "" for none.

    `hp` are the model's hyperparameters. A check warns of such a model.
    """
    if not any(hp[_IN]):
        return ""
    if hp["index_heads"] != hp["n_kv_heads"]:
        return f"{hp['index_heads']} heads of an indexer and {hp['n_kv_heads']} key heads"
    if hp["index_head_dim"] < hp["rope_dim"]:
        return f"{hp['index_head_dim']} elements of an indexer's head, {hp['rope_dim']} that rotate"
    if hp["index_topk"] < hp["index_local_blocks"]:
        return (
            f"{hp['index_topk']} blocks of keys that are read and {hp['index_local_blocks']} of "
            "them before the query"
        )
    return ""


MINIMAX_M3_VL = full_spec(
    "minimax_m3_vl",
    _MADE,
    hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(4),
        hyper_rules.head_dim(128),
        hyper_rules.ffn_size(12288, "dense_intermediate_size"),
        hyper_rules.context_length(524288),
        HyperRule(
            "activation",
            default="swiglu_oai",
            write={"hf": lambda value, hp: {"hidden_act": "silu"}},
        ),
        hyper_rules.fixed("qk_norm", True),
        *rope_rules(RopeDefaults(theta=5e6, partial=1.0)),
        *moe.expert_count_rules(128, 4, "num_local_experts num_experts"),
        moe.expert_size_rule("intermediate_size", 3072),
        _shared_rule(),
        HyperRule("norm_topk", {"gguf": ("{arch}.expert_weights_norm",)}, "bool", True),
        routed_scale_rule(2.0),
        sigmoid_router_rule(),
        *_layer_rules(),
        _size("index_heads", "index_n_heads", "sparse_num_index_heads", "head_count", 4),
        _size("index_head_dim", "index_head_dim", "sparse_index_dim", "key_length", 128),
        _size("index_block", "index_block_size", "sparse_block_size", "block_size", 128),
        _size("index_topk", "index_topk_blocks", "sparse_topk_blocks", "top_k", 16),
        _size("index_local_blocks", "index_local_blocks", "sparse_local_block", "local_blocks", 1),
        HyperRule("swiglu_limit", {"hf": ("swiglu_limit",)}, "float", 7.0),
        HyperRule("swiglu_alpha", {"hf": ("swiglu_alpha",)}, "float", 1.702),
    ),
    BlockSpec(
        norm_offset=1,
        norm_cast="after_weight",
        qk_norm="head",
        indexer="blocks",
        shared_expert="plain",
        router_cast="logits",
    ),
    lost=(
        *losses.common_losses("swiglu_oai", partial=True),
        Loss(
            "gguf",
            "swiglu_limit",
            lambda hp: (hp["swiglu_limit"], hp["swiglu_alpha"]) != (LIMIT, ALPHA),
            f"llama.cpp clamps at {LIMIT} with a gain of {ALPHA} whatever the model says",
        ),
        Loss(
            "gguf",
            _MOE,
            lambda hp: hp[_MOE] != tuple(sorted(hp[_MOE])),
            "llama.cpp has dense layers only before the first one with experts, and refuses the "
            "file",
        ),
        Loss(
            "gguf",
            _IN,
            lambda hp: hp[_IN] != hp[_MOE],
            "llama.cpp has an indexer in the layers with experts, and refuses the file",
        ),
        Loss(
            "gguf",
            "shared_ffn_size",
            lambda hp: hp["shared_ffn_size"] % hp["moe_ffn_size"] != 0,
            "llama.cpp takes a shared expert to be some experts wide, and refuses the file",
        ),
    ),
    ignored=frozenset(
        """hidden_act rotary_dim router_jitter_noise router_aux_loss_coef output_router_logits
        n_shared_experts scoring_func use_routing_bias use_qk_norm qk_norm_type
        expert_shared_count leading_dense_block_count""".split()
    ),
    mixed=_unpublished_mix,
)
