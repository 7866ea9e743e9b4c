"""gemma 3 (text): q/k-norms, five windowed layers per full one, two rope bases, no score cap.

Windowed layers use their own rope base, without scaling. Source: docs/reference/architectures.md;
llama.cpp's gemma3.cpp.
"""

from collections.abc import Mapping
from reprlib import repr as short_repr

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.gemma import NO_BIASES, PLUS_ONE, embedding_scale_rule, gemma_norm_rows
from aprfmt.arch.gemma2 import (
    SANDWICH,
    derived_scale_loss,
    has_four_norms,
    has_qk_norms,
    pattern_loss,
    query_scale_rule,
    softcap_rule,
)
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import RopeDefaults
from aprfmt.arch.sliding_window import Window, window_period, window_rules
from aprfmt.arch.spec import MISSING, ArchSpec, BlockSpec, Facts, HyperRule, Loss, PerLayer
from aprfmt.arch.tensor_rows import FUSED, attention, make_tables, with_model_rows
from aprfmt.arch.value_checks import whole_number
from aprfmt.base.protocols import Value

LARGEST = 62  # layers of the 27B model
LOCAL_THETA = 10000.0


def _window_layers(facts: Facts | None, hp: Mapping[str, Value]) -> PerLayer:
    """Return one boolean a layer: a window in all but every sixth.

    The old key sliding_window_pattern may give another period.
    """
    found = None if facts is None else facts.first("sliding_window_pattern")
    return window_period(6 if found is None else whole_number(*found, 1))(facts, hp)


def _check_no_score_cap(value: Value, facts: Facts, hp: Mapping[str, Value]) -> str:
    """Return a remark if a file gives a cap on the scores, which transformers ignores, else ""."""
    found = facts.first("attn_logit_softcapping", "{arch}.attn_logit_softcapping")
    if found is None:
        return ""
    return (
        f"{found[1]} is {short_repr(found[0])}; transformers and llama.cpp do not cap gemma3's "
        "scores: ignored"
    )


_TENSORS, _BINDINGS = make_tables(
    with_model_rows(
        *gemma_norm_rows("attn_norm", "input_layernorm"),
        *attention(),
        *gemma_norm_rows("attn_q_norm", "self_attn.q_norm", ("head_dim",)),
        *gemma_norm_rows("attn_k_norm", "self_attn.k_norm", ("head_dim",)),
        *SANDWICH,
        norm_steps=PLUS_ONE,
    ),
    hf_more=FUSED,
)

GEMMA3 = ArchSpec(
    name="gemma3",
    hyper=hyper_rules.hyper_table(
        # Multimodal checkpoints leave out keys whose value is transformers' default.
        hyper_rules.hidden_size(2304),
        hyper_rules.n_layers(26),
        hyper_rules.n_heads(8),
        hyper_rules.n_kv_heads(4),
        hyper_rules.head_dim(256),
        hyper_rules.ffn_size(9216),
        hyper_rules.vocab_size(262208),
        hyper_rules.context_length(131072),
        hyper_rules.activation("gelu_tanh", "hidden_activation"),
        hyper_rules.tied_embeddings(True),
        *hyper_rules.attention_biases(),
        hyper_rules.fixed("qk_norm", True),
        *rope_rules(
            RopeDefaults(
                theta=1e6, theta_local=LOCAL_THETA, local_key="rope_local_base_freq", layers="full"
            )
        ),
        *window_rules(Window(4096, MISSING, _window_layers, stated=True)),
        query_scale_rule(LARGEST),
        HyperRule("attn_softcap", default=None, check=_check_no_score_cap),
        softcap_rule("final_softcap", "final_logit_softcapping", "final_logit_softcapping", None),
        embedding_scale_rule(),
    ),
    tensors=_TENSORS,
    bindings=_BINDINGS,
    block=BlockSpec(norm_offset=1, norm_cast="after_weight", placement="sandwich", qk_norm="head"),
    lost=(
        *losses.common_losses("gelu_tanh"),
        losses.ONE_BIAS_KEY,
        NO_BIASES,
        derived_scale_loss(LARGEST),
        pattern_loss(6),
        Loss(
            "gguf",
            "rope_theta_local",
            lambda hp: hp["rope_theta_local"] != LOCAL_THETA,
            "older versions of llama.cpp rotate windowed layers by base 10000 whatever the file "
            "says",
            assumed=True,
        ),
    ),
    ignored=frozenset({"hidden_act", "cache_implementation", "_sliding_window_pattern"}),
    evidence=lambda names, values: has_four_norms(names) and has_qk_norms(names),
)
