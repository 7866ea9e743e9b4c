"""gemma 2: four norms per layer, softcaps, every other layer windowed, its own attention scale.

llama.cpp derives the scale from the layer count, not from a key. Source:
docs/reference/architectures.md; llama.cpp's gemma2.cpp.
"""

from collections.abc import Callable, Collection, Mapping

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.gemma import NO_BIASES, PLUS_ONE, embedding_scale_rule, gemma_norm_rows
from aprfmt.arch.sliding_window import Window, window_period, window_rules
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, HyperRule, Loss, Params
from aprfmt.arch.tensor_rows import FUSED, attention, gated_mlp, make_tables, with_model_rows
from aprfmt.arch.value_checks import positive_number
from aprfmt.base.protocols import Value

SCALAR = 256  # transformers' default of query_pre_attn_scalar
LARGEST = 46  # layers of the 27B model, whose scale follows from hidden_size / n_heads


def has_four_norms(names: Collection[str]) -> bool:
    """Return whether tensor names include norms after attention and after the MLP."""
    return any("pre_feedforward_layernorm" in name or "post_ffw_norm" in name for name in names)


def has_qk_norms(names: Collection[str]) -> bool:
    """Return whether tensor names include norms of queries and keys."""
    return any("q_norm" in name for name in names)


def derived_scale(largest: int) -> Callable[[Params], float]:
    """Return llama.cpp's rule for the attention scale, a function of the hyperparameters.

    1/sqrt(head_dim), and 1/sqrt(hidden_size/n_heads) in the model with `largest` layers (27B).
    """

    def scale(hp: Params) -> float:
        """Return the factor on attention scores that llama.cpp derives from hyperparameters.

        It is one over the root of head_dim, or of hidden_size/n_heads with `largest` layers
        (27B).
        """
        size = hp["head_dim"]
        if hp["n_layers"] == largest:
            size = hp["hidden_size"] // hp["n_heads"]
        derived: float = float(size) ** -0.5
        return derived

    return scale


def query_scale_rule(largest: int) -> HyperRule:
    """Return the rule that reads and writes the factor on attention scores.

    It is query_pre_attn_scalar ** -0.5 in config.json. A GGUF has no key for it: readers compute it
    from other sizes, in another way for the model with `largest` layers (27B).
    """

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (factor on attention scores, key) of config.json; None without the key."""
        found = facts.first("query_pre_attn_scalar")
        if found is None:
            return None
        return hyper_rules.check_scale_factor(positive_number(*found) ** -0.5, found[1]), found[1]

    def write(value: Value, hp: Params) -> Params:
        """Return config.json's {"query_pre_attn_scalar": number}; `value` is the scores' factor.

        The number is whole where that gives the factor exactly.
        """
        scalar = value**-2.0
        near = round(scalar)
        return {"query_pre_attn_scalar": near if near and near**-0.5 == value else scalar}

    return hyper_rules.attn_scale(
        lambda hp: SCALAR**-0.5, derived_scale(largest), read={"hf": read}, write={"hf": write}
    )


def derived_scale_loss(largest: int) -> Loss:
    """Return the Loss (what a GGUF cannot express) of an attention scale unlike llama.cpp's.

    llama.cpp computes the scale in another way for the model with `largest` layers (27B).
    """
    assumed = derived_scale(largest)
    return Loss(
        "gguf",
        "attn_scale",
        lambda hp: hp["attn_scale"] != assumed(hp),
        "llama.cpp derives query_pre_attn_scalar from the layer count: every score of a model "
        "with another scale is multiplied wrongly",
        assumed=True,
    )


def softcap_rule(
    name: str, hf: str, gguf: str, default: float | None, *, written: bool = False
) -> HyperRule:
    """Return the rule that reads and writes a softcap; null in config.json means no softcap.

    `hf` and `gguf` are its keys. `written`: llama.cpp's converter writes the key since June 2024: a
    GGUF without it is older, and programs that take no default cap nothing.
    """
    key = f"{{arch}}.{gguf}"

    def check(value: Value, facts: Facts, hp: Mapping[str, Value]) -> str:
        """Return a warning for a GGUF without the softcap's key, whose default was taken.

        "" otherwise.
        """
        if facts.style != "gguf" or value is None or facts.first(key) is not None:
            return ""
        absent = key.replace("{arch}", facts.arch_key)
        return (
            f"{absent} is not there, {value} is taken, as by llama.cpp: programs without that "
            f"default cap nothing; aprfmt set FILE {absent}={value}"
        )

    keys = {"hf": (hf,), "gguf": (key,)}
    return HyperRule(
        name, keys, "float", default, null_in=("hf",), check=check if written else None
    )


def pattern_loss(period: int) -> Loss:
    """Return the Loss (what a GGUF cannot express) of windows in other layers than llama.cpp's.

    llama.cpp has windows in all layers but every `period`-th.
    """
    usual = window_period(period)
    return Loss(
        "gguf",
        "window_layers",
        lambda hp: hp["sliding_window"] is not None and hp["window_layers"] != usual(None, hp),
        f"llama.cpp windows all layers but one in {period}, older versions whatever the file says",
        assumed=True,
    )


SANDWICH = (
    *gemma_norm_rows("post_attention_norm", "post_attention_layernorm"),
    *gemma_norm_rows("ffn_norm", "pre_feedforward_layernorm"),
    *gated_mlp(),
    *gemma_norm_rows("post_ffw_norm", "post_feedforward_layernorm"),
)

_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *gemma_norm_rows("attn_norm", "input_layernorm"),
        *attention(),
        *SANDWICH,
        head_gguf="",
        norm_steps=PLUS_ONE,
    ),
    hf_more=FUSED,
)

GEMMA2 = ArchSpec(
    name="gemma2",
    hyper=hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(4),
        hyper_rules.head_dim(256),
        hyper_rules.context_length(8192),
        hyper_rules.activation("gelu_tanh", "hidden_activation"),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(),
        *window_rules(Window(4096, 4096, window_period(2), stated=True)),
        query_scale_rule(LARGEST),
        softcap_rule(
            "attn_softcap", "attn_logit_softcapping", "attn_logit_softcapping", 50.0, written=True
        ),
        softcap_rule(
            "final_softcap",
            "final_logit_softcapping",
            "final_logit_softcapping",
            30.0,
            written=True,
        ),
        embedding_scale_rule(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm_offset=1, norm_cast="after_weight", placement="sandwich"),
    lost=(
        *losses.common_losses("gelu_tanh"),
        losses.ONE_BIAS_KEY,
        NO_BIASES,
        derived_scale_loss(LARGEST),
        pattern_loss(2),
        Loss(
            "gguf",
            "attn_softcap",
            lambda hp: hp["attn_softcap"] is None or hp["final_softcap"] is None,
            "llama.cpp caps the scores at 50 and the logits at 30 where the file gives no cap",
        ),
    ),
    ignored=frozenset({"hidden_act", "cache_implementation"}),
    evidence=lambda names, values: has_four_norms(names) and not has_qk_norms(names),
)
