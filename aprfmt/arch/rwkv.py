"""rwkv (its fourth version, the one transformers has): time mixing and channel mixing, by names.

Only the first block has a norm before it. GGUF has forms of later versions only.
Source: transformers' modeling_rwkv.
"""

from aprfmt.arch import hyper_rules
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.spec_builders import names_only_spec
from aprfmt.arch.tensor_rows import RoleRow, linear, make_tables, norm, with_model_rows

_LAYER = "rwkv.blocks.{L}"
_TIME, _CHANNEL = f"{_LAYER}.attention", f"{_LAYER}.feed_forward"
_WIDE = "time_mix_size"


def _mix_rows(role: str, hf: str, *names: str) -> tuple[RoleRow, ...]:
    """Return the rows of the vectors that mix a token with the one before, one for each name.

    `names` are the projections that read the mixture: k, v, r.
    """
    return tuple(
        RoleRow(f"{role}_{name}.weight", f"{hf}.time_mix_{name}", ("1", "1", "hidden_size"))
        for name in names
    )


RWKV = names_only_spec(
    "rwkv",
    make_tables(
        with_model_rows(
            *norm("token_embd_norm", "rwkv.blocks.0.pre_ln", bias=True, layered=False),
            *norm("attn_norm", f"{_LAYER}.ln1", bias=True),
            RoleRow("time_mix_decay.weight", f"{_TIME}.time_decay", (_WIDE,)),
            RoleRow("time_mix_first.weight", f"{_TIME}.time_first", (_WIDE,)),
            *_mix_rows("time_mix", _TIME, "key", "value", "receptance"),
            *linear("time_mix_k", f"{_TIME}.key", _WIDE, "hidden_size"),
            *linear("time_mix_v", f"{_TIME}.value", _WIDE, "hidden_size"),
            *linear("time_mix_r", f"{_TIME}.receptance", _WIDE, "hidden_size"),
            *linear("time_mix_output", f"{_TIME}.output", "hidden_size", _WIDE),
            *norm("ffn_norm", f"{_LAYER}.ln2", bias=True),
            *_mix_rows("channel_mix", _CHANNEL, "key", "receptance"),
            *linear("channel_mix_k", f"{_CHANNEL}.key", "ffn_size", "hidden_size"),
            *linear("channel_mix_r", f"{_CHANNEL}.receptance", "hidden_size", "hidden_size"),
            *linear("channel_mix_v", f"{_CHANNEL}.value", "hidden_size", "ffn_size"),
            embed="rwkv.embeddings",
            final="rwkv.ln_out",
            head="head",
            norm_bias=True,
        )
    ),
    hyper_rules.hyper_table(
        hyper_rules.hidden_size(4096),
        hyper_rules.n_layers(32),
        hyper_rules.fixed("n_heads", 1),
        hyper_rules.fixed("n_kv_heads", 1),
        hyper_rules.vocab_size(50277),
        hyper_rules.ffn_size(lambda hp: 4 * hp["hidden_size"]),
        hyper_rules.size(_WIDE, "attention_hidden_size", default=lambda hp: hp["hidden_size"]),
        hyper_rules.fixed("activation", "relu2"),
        hyper_rules.context_length(1024, "context_length"),
        hyper_rules.norm_eps(1e-5, "layer_norm_epsilon"),
        *NO_ROPE,
    ),
    ignored=frozenset({"rescale_every"}),
)
