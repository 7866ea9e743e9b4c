"""falcon: attention and MLP side by side, a fused projection by groups of heads.

The 7B form has one norm and one key head, the 40B form a norm each and groups; GGUF calls the 40B
form's norm before the MLP `attn_norm`, the other `attn_norm_2`. Source: transformers'
modeling_falcon; the converter's falcon.py, llama.cpp's falcon.cpp.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace

from aprfmt.arch import losses, rules
from aprfmt.arch.fused import GGUF_FUSED, GROUPED, fused_in, fused_rows
from aprfmt.arch.gpt2 import four_times
from aprfmt.arch.rows import Q, RoleRow, around, linear, norm, tables
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, HyperRule, Loss
from aprfmt.arch.stated import divided_heads
from aprfmt.arch.values import boolean
from aprfmt.arch.values import whole as whole_number
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Params = Mapping[str, Value]
Found = tuple[Value, str] | None
_H = "transformer.h.{L}."
_NEW = "new_decoder_architecture"


def _layer(*norms: RoleRow) -> tuple[RoleRow, ...]:
    return around(
        *norms,
        *fused_rows("attention_bias"),
        *linear("attn_output", _H + "self_attention.dense", "hidden_size", Q,
            bias="attention_out_bias"),
        *linear("ffn_up", _H + "mlp.dense_h_to_4h", "ffn_size", "hidden_size", bias="mlp_bias"),
        *linear("ffn_down", _H + "mlp.dense_4h_to_h", "hidden_size", "ffn_size", bias="mlp_bias"),
        embed="transformer.word_embeddings", final="transformer.ln_f", norm_bias=True,
    )  # fmt: skip


def _renamed(role: str, hf: str, gguf: str) -> tuple[RoleRow, ...]:
    return tuple(
        RoleRow(f"{role}.{part}", f"{hf}.{part}", ("hidden_size",), gguf=f"{gguf}.{part}")
        for part in ("weight", "bias")
    )


_FUSED = fused_in(_H + "self_attention.query_key_value", GROUPED)
_ONE = tables(
    _layer(*norm("attn_norm", _H + "input_layernorm", bias=True)),
    hf_first=_FUSED, gguf_first=GGUF_FUSED,
)  # fmt: skip
_TWO = tables(
    _layer(
        *_renamed("attn_norm", _H + "ln_attn", "attn_norm_2"),
        *_renamed("ffn_norm", _H + "ln_mlp", "attn_norm"),
    ),
    hf_first=_FUSED, gguf_first=GGUF_FUSED,
)  # fmt: skip


def _is_new(facts: Facts) -> bool:
    found = facts.first(_NEW)
    return found is not None and boolean(*found)


def _key_heads(facts: Facts, hp: Params) -> Found:
    """Return the key heads: of the 40B form as stated, else one or as many as query heads."""
    stated, one = facts.first("num_kv_heads", "n_head_kv"), facts.first("multi_query")
    if _is_new(facts):
        return None if stated is None else (whole_number(*stated, 1), stated[1])
    single = one is None or boolean(*one)
    return 1 if single else hp["n_heads"], "multi_query"


def _supported(value: Value, facts: Facts, hp: Params) -> str:
    """Raise ArchError for the sequential form (falcon-rw), which adds ALiBi to the scores."""
    for key, usual in (("alibi", False), ("parallel_attn", True)):
        found = facts.first(key)
        if found is not None and boolean(*found) is not usual and not (usual and _is_new(facts)):
            raise ArchError(
                f"{key}: is {found[0]}; expected {usual}: falcon-rw's block is not known"
            )
    facts.first("num_ln_in_parallel_attn")
    return ""


def _hyper(new: bool) -> tuple[HyperRule, ...]:
    write: Params = {_NEW: new, "alibi": False, "parallel_attn": True}
    norms = {"num_ln_in_parallel_attn": 2} if new else {}

    def heads(value: Value, hp: Params) -> Params:
        if new:
            return {**write, **norms, "num_kv_heads": value}
        return {**write, "multi_query": value == 1, "num_kv_heads": value}

    return rules.hyper_table(
        rules.n_layers(hf="num_hidden_layers n_layer"),
        rules.n_heads(hf="num_attention_heads n_head"),
        replace(
            rules.n_kv_heads(hf=""),
            read={"hf": _key_heads},
            write={"hf": heads},
            default_in={} if new else {"hf": 1},
        ),
        divided_heads(),
        rules.ffn_size(four_times, "ffn_hidden_size"),
        rules.norm_eps(1e-5, "layer_norm_epsilon", "layer_norm_epsilon"),
        rules.activation("gelu", "activation"),
        rules.tied_embeddings(True),
        *rules.attention_biases(False, "bias"),
        rules.flag("mlp_bias", False, "bias", present=("ffn_up.bias",), written=False),
        HyperRule("parallel_residual", default=True, check=_supported),
    )


_LOST = (
    *losses.common_losses("gelu"),
    losses.ONE_BIAS_KEY,
    Loss("gguf", "attention_bias", lambda hp: hp["attention_bias"] or hp["mlp_bias"],
        "llama.cpp has no biases of falcon's projections and refuses the file"),
)  # fmt: skip
_IGNORED = frozenset({"apply_residual_connection_post_layernorm", "n_embed"})


def _has_two(names: Collection[str], values: Mapping[str, Value]) -> bool:
    return any(".ln_attn." in name or ".attn_norm_2." in name for name in names)


FALCON = ArchSpec(
    name="falcon",
    hyper=_hyper(False),
    tensors=_ONE[0],
    bindings=_ONE[1],
    block=BlockSpec(norm="layer", mlp="plain"),
    lost=_LOST,
    ignored=_IGNORED,
)

FALCON_40B = ArchSpec(
    name="falcon_40b",
    hyper=_hyper(True),
    tensors=_TWO[0],
    bindings=_TWO[1],
    block=BlockSpec(norm="layer", mlp="plain", parallel_norm="two"),
    lost=_LOST,
    ignored=_IGNORED | {"multi_query"},
    evidence=_has_two,
)
