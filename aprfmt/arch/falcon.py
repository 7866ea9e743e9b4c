"""falcon: a fused projection by groups of heads; attention and MLP in parallel, or in sequence.

The 7B form has one norm and one key head, the 40B form a norm each and groups; GGUF calls the 40B
form's norm before the MLP `attn_norm`, the other `attn_norm_2`. Falcon-RW adds distances to the
scores, and its MLP reads the sum with attention. Sources: transformers' modeling_falcon (its sdpa
attention: the eager one adds the distances twice); the converter's falcon.py and llama.cpp's
falcon.cpp.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.fused_projection import GGUF_FUSED, GROUPED, fused_bindings, fused_rows
from aprfmt.arch.gpt2 import NO_ROPE, default_ffn_size
from aprfmt.arch.required_values import divided_head_dim_rule, require_values
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, Found, HyperRule, Loss, Params
from aprfmt.arch.spec_builders import own_styles_only
from aprfmt.arch.tensor_rows import Q, RoleRow, linear, make_tables, norm, with_model_rows
from aprfmt.arch.value_checks import boolean, whole_number
from aprfmt.base.protocols import Value

_H = "transformer.h.{L}."
_NEW = "new_decoder_architecture"
_SECOND = ("ffn_norm.weight", "ffn_norm.bias")


def _falcon_rows(*norms: RoleRow) -> tuple[RoleRow, ...]:
    """Return the table rows of a falcon model; `norms` are the rows of the norms in a layer."""
    return with_model_rows(
        *norms,
        *fused_rows("attention_bias"),
        *linear(
            "attn_output", _H + "self_attention.dense", "hidden_size", Q, bias="attention_out_bias"
        ),
        *linear("ffn_up", _H + "mlp.dense_h_to_4h", "ffn_size", "hidden_size", bias="mlp_bias"),
        *linear("ffn_down", _H + "mlp.dense_4h_to_h", "hidden_size", "ffn_size", bias="mlp_bias"),
        embed="transformer.word_embeddings",
        final="transformer.ln_f",
        norm_bias=True,
    )


def _norm_rows(role: str, hf: str, gguf: str, needs: str = "") -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of a norm's weight and bias.

    `gguf` is its name in a GGUF, "" if GGUF has no such norm.
    """
    return tuple(
        RoleRow(
            f"{role}.{part}",
            f"{_H}{hf}.{part}",
            ("hidden_size",),
            needs,
            gguf=gguf and f"{gguf}.{part}",
        )
        for part in ("weight", "bias")
    )


_FUSED = fused_bindings(_H + "self_attention.query_key_value", GROUPED)
_ONE = make_tables(
    _falcon_rows(
        *norm("attn_norm", _H + "input_layernorm", bias=True),
        *_norm_rows("ffn_norm", "post_attention_layernorm", "", "!parallel_residual"),
    ),
    hf_first=_FUSED,
    gguf_first=GGUF_FUSED,
)
_TWO = make_tables(
    _falcon_rows(
        *_norm_rows("attn_norm", "ln_attn", "attn_norm_2"),
        *_norm_rows("ffn_norm", "ln_mlp", "attn_norm"),
    ),
    hf_first=_FUSED,
    gguf_first=GGUF_FUSED,
)


def _boolean_or_default(facts: Facts, key: str, default: bool) -> bool:
    """Return the boolean that a key of the file has, or the default."""
    found = facts.first(key)
    return default if found is None else boolean(*found)


def _read_key_heads(two: bool) -> Callable[[Facts, Params], Found]:
    """Return a read function for the key heads: their number, 1 (`multi_query`), or all heads.

    `two`: the architecture with two norms a layer, which is new_decoder_architecture also where
    config.json does not say so.
    """

    def read(facts: Facts, hp: Params) -> Found:
        """Return (number of key heads, key) of config.json, by either form of falcon's keys.

        The old form (`multi_query`) has one key head or as many as query heads. None where the
        new form does not give the number. `two`: the architecture has two norms a layer, which
        implies the new form.
        """
        stated, one = (
            facts.first("num_kv_heads", "n_head_kv"),
            _boolean_or_default(facts, "multi_query", True),
        )
        if _boolean_or_default(facts, _NEW, two):
            return None if stated is None else (whole_number(*stated, 1), stated[1])
        return 1 if one else hp["n_heads"], "multi_query"

    return read


def _write_key_heads(two: bool) -> Callable[[Value, Params], Params]:
    """Return a write function for the key heads; `two`: the architecture has two norms a layer."""

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {key: value} for falcon's form and its number of key heads, `value`.

        The new form is written for two norms a layer, and for a number that the old form cannot
        say.
        """
        if two or value not in (1, hp["n_heads"]):
            return {_NEW: True, "num_kv_heads": value, "num_ln_in_parallel_attn": 1 + two}
        return {_NEW: False, "multi_query": value == 1, "num_kv_heads": value}

    return write


def _parallel_residual_rule(two: bool, alibi: bool) -> HyperRule:
    """Return the rule for whether attention and MLP read the same stream, in parallel.

    Its check raises ArchError for settings with which transformers builds a model but cannot run
    it. `two`: the architecture has two norms a layer, `alibi`: distances are added to the scores.
    """

    def check(value: Value, facts: Facts, hp: Params) -> str:
        """Raise ArchError for a config.json that contradicts this form of falcon.

        Else return "", which says that there is no warning. The form is `two` (two norms a layer)
        and `alibi` (distances added to the scores).
        """
        new = _boolean_or_default(facts, _NEW, two)
        require_values(facts, {"alibi": alibi, **({"parallel_attn": True} if new else {})})
        facts.first("num_ln_in_parallel_attn")  # counts as read: it follows from the form
        if two:
            require_values(facts, {_NEW: True})
        return ""

    rule = hyper_rules.flag(
        "parallel_residual", True, "parallel_attn", absent=() if two else _SECOND
    )
    return replace(rule, check=check)


def _position_rules(alibi: bool) -> tuple[HyperRule, ...]:
    """Return the rules for positions: distances added to the scores (`alibi`), or rope."""
    most = hyper_rules.fixed("alibi_max_bias", 8.0 if alibi else None)
    most = replace(most, write={"hf": lambda value, hp: {"alibi": alibi}})
    return (most, *(NO_ROPE if alibi else ()))


def _falcon_rules(two: bool, alibi: bool) -> tuple[HyperRule, ...]:
    """Return the hyperparameter rules of one form of falcon.

    `two`: each layer has two norms. `alibi`: distances are added to the scores.
    """
    return hyper_rules.hyper_table(
        hyper_rules.n_layers(hf="num_hidden_layers n_layer"),
        hyper_rules.n_heads(hf="num_attention_heads n_head"),
        replace(
            hyper_rules.n_kv_heads(hf=""),
            read={"hf": _read_key_heads(two)},
            write={"hf": _write_key_heads(two)},
        ),
        divided_head_dim_rule(),
        hyper_rules.ffn_size(default_ffn_size, "ffn_hidden_size"),
        hyper_rules.norm_eps(1e-5, "layer_norm_epsilon", "layer_norm_epsilon"),
        hyper_rules.activation("gelu", "activation"),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(False, "bias"),
        hyper_rules.flag("mlp_bias", False, "bias", present=("ffn_up.bias",), written=False),
        _parallel_residual_rule(two, alibi),
        *_position_rules(alibi),
    )


_LOST = (
    *losses.common_losses("gelu"),
    losses.ONE_BIAS_KEY,
    Loss("gguf", "attention_bias", lambda hp: hp["attention_bias"] or hp["mlp_bias"],
        "llama.cpp has no biases of falcon's projections and refuses the file"),
    Loss("gguf", "parallel_residual", lambda hp: not hp["parallel_residual"],
        "llama.cpp's falcon reads attention and MLP side by side", refused=True),
    Loss("gguf", "alibi_max_bias", lambda hp: hp["alibi_max_bias"] is not None,
        "llama.cpp's falcon rotates q and k, and adds no distances to the scores", refused=True),
)  # fmt: skip
_IGNORED = frozenset({"apply_residual_connection_post_layernorm", "n_embed"})
_ROPE_KEYS = frozenset({"rope_theta", "rope_parameters", "rope_scaling"})  # read, and not used


def _falcon_spec(name: str, *, two: bool, alibi: bool) -> ArchSpec:
    """Return the architecture of one form of falcon.

    `two`: attention and MLP have a norm each. `alibi`: distances are added to the scores.
    """

    def evidence(names: Collection[str], values: Mapping[str, Value]) -> bool:
        """Return whether tensor names and config.json show exactly this form of falcon.

        The form is `two` (two norms a layer) and `alibi` (distances added to the scores).
        """
        has_two = any(".ln_attn." in name or ".attn_norm_2." in name for name in names)
        return has_two is two and (values.get("alibi") is True) is alibi

    tensors, bindings = _TWO if two else _ONE
    block = BlockSpec(norm="layer", mlp="plain", parallel_norm="two" if two else "one")
    if alibi:
        block = replace(block, position="none", score_bias="alibi_keys")
    return own_styles_only(
        ArchSpec(
            name=name,
            hyper=_falcon_rules(two, alibi),
            tensors=tensors,
            bindings=bindings,
            block=block,
            lost=_LOST,
            evidence=evidence if two or alibi else None,
            ignored=_IGNORED
            | (_ROPE_KEYS if alibi else frozenset())
            | (frozenset({"multi_query"}) if two else frozenset()),
        )
    )


FALCON = _falcon_spec("falcon", two=False, alibi=False)
FALCON_40B = _falcon_spec("falcon_40b", two=True, alibi=False)
FALCON_RW = _falcon_spec("falcon_rw", two=False, alibi=True)
FALCON_RW_40B = _falcon_spec("falcon_rw_40b", two=True, alibi=True)
