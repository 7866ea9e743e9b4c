"""Text encoders by their names: bert and its family, mpnet, modernbert, nomic-bert, jina v3.

What converting, comparing, checking and quantizing need; no forward pass. roberta's position rows
begin at its padding id, which llama.cpp's converter cuts off, so it has no GGUF table. Sources:
transformers' modeling files; the gguf package's name map; the converter's bert.py.
"""

from collections.abc import Collection, Mapping

from aprfmt.arch import rules
from aprfmt.arch.fused import GGUF_FUSED, IN_ORDER, fused_in, fused_rows
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.named import named
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import Rope
from aprfmt.arch.rows import KV, Q, RoleRow, linear, norm, tables
from aprfmt.arch.spec import HyperRule
from aprfmt.base.protocols import Value

_TABLE = ("vocab_size", "hidden_size")
_BERT = "encoder.layer.{L}."
_NOMIC = "encoder.layers.{L}."
_ROPE = (
    *rope_rules(Rope()),
    rules.rope_style("half"),
    HyperRule("rope_layers", default=rules.per_layer(True)),
)
# Heads of masked language models and classifiers: not part of the encoder, in no file of GGUF.
_POOLER = tuple(
    RoleRow(f"pooler.{part}", f"pooler.dense.{part}", shape, "optional", gguf="", layered=False)
    for part, shape in (("weight", ("hidden_size", "hidden_size")), ("bias", ("hidden_size",)))
)


def _embeddings(
    words: str, places: str = "", types: str = "", normed: str = "", *, bias: bool = True
) -> tuple[RoleRow, ...]:
    """Return the tables of words, positions and token types, and the norm behind them."""
    rows = [RoleRow("token_embd.weight", f"{words}.weight", _TABLE, layered=False)]
    if places:
        rows.append(RoleRow("position_embd.weight", f"{places}.weight",
                            ("context_length", "hidden_size"), layered=False))  # fmt: skip
    if types:
        rows.append(RoleRow("token_types.weight", f"{types}.weight",
                            ("token_types", "hidden_size"), layered=False))  # fmt: skip
    return (*rows, *norm("token_embd_norm", normed, bias=bias, layered=False))


def _attention(q: str, k: str, v: str, out: str) -> tuple[RoleRow, ...]:
    return (
        *linear("attn_q", q, Q, "hidden_size", bias=""),
        *linear("attn_k", k, KV, "hidden_size", bias=""),
        *linear("attn_v", v, KV, "hidden_size", bias=""),
        *linear("attn_output", out, "hidden_size", Q, bias=""),
    )


def _mlp(up: str, down: str) -> tuple[RoleRow, ...]:
    return (
        *linear("ffn_up", up, "ffn_size", "hidden_size", bias=""),
        *linear("ffn_down", down, "hidden_size", "ffn_size", bias=""),
    )


_OLD = ("embeddings.word_embeddings", "embeddings.position_embeddings")
_BERT_LAYER = (
    *_attention(
        _BERT + "attention.self.query", _BERT + "attention.self.key",
        _BERT + "attention.self.value", _BERT + "attention.output.dense",
    ),
    *norm("attn_output_norm", _BERT + "attention.output.LayerNorm", bias=True),
    *_mlp(_BERT + "intermediate.dense", _BERT + "output.dense"),
    *norm("layer_output_norm", _BERT + "output.LayerNorm", bias=True),
    *_POOLER,
)  # fmt: skip
_BERT_ROWS = (
    *_embeddings(*_OLD, "embeddings.token_type_embeddings", "embeddings.LayerNorm"),
    *_BERT_LAYER,
)


def _hyper(*overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return the rows that encoders share; positions are learned unless `overrides` say."""
    return rules.hyper_table(
        rules.n_kv_heads(hf=""),
        rules.head_dim(hf=""),
        rules.norm_eps(1e-12, "layer_norm_eps", "layer_norm_epsilon"),
        rules.activation("gelu"),
        rules.fixed("tied_embeddings", True),
        *NO_ROPE,
        rules.size("token_types", "type_vocab_size", shape=rules.axis("token_types.weight", 0),
            shape_wins=True, default=1),
        *overrides,
    )  # fmt: skip


BERT = named(
    "bert", ("bert", "BertModel", "BertForMaskedLM", "BertForSequenceClassification"), "bert",
    tables(_BERT_ROWS), _hyper(),
)  # fmt: skip
ROBERTA = named(
    "roberta",
    ("roberta", "RobertaModel", "RobertaForMaskedLM", "xlm-roberta", "XLMRobertaModel",
     "XLMRobertaForMaskedLM", "camembert", "CamembertModel"),
    "", tables(_BERT_ROWS), _hyper(),
)  # fmt: skip

_D = "transformer.layer.{L}."


def _without_types(names: Collection[str], values: Mapping[str, Value]) -> bool:
    return bool(names) and not any("token_type" in name for name in names)


DISTILBERT = named(
    "distilbert", ("distilbert", "DistilBertModel", "DistilBertForMaskedLM"), "bert",
    tables((
        *_embeddings(*_OLD, "", "embeddings.LayerNorm"),
        *_attention(*(f"{_D}attention.{x}_lin" for x in ("q", "k", "v", "out"))),
        *norm("attn_output_norm", _D + "sa_layer_norm", bias=True),
        *_mlp(_D + "ffn.lin1", _D + "ffn.lin2"),
        *norm("layer_output_norm", _D + "output_layer_norm", bias=True),
    )),
    _hyper(
        rules.hidden_size(768, "dim hidden_size"),
        rules.n_layers(6, "n_layers num_hidden_layers"),
        rules.n_heads(12, "n_heads num_attention_heads"),
        rules.ffn_size(3072, "hidden_dim intermediate_size"),
        rules.vocab_size(30522),
        rules.context_length(512),
        rules.activation("gelu", "activation"),
    ),
    evidence=_without_types,
)  # fmt: skip
MPNET = named(
    "mpnet", ("mpnet", "MPNetModel", "MPNetForMaskedLM"), "",
    tables((
        *_embeddings(*_OLD, "", "embeddings.LayerNorm"),
        RoleRow("attn_rel_b.weight", "encoder.relative_attention_bias.weight",
            ("position_buckets", "n_heads"), layered=False),
        *_attention(*(f"{_BERT}attention.attn.{x}" for x in "qkvo")),
        *norm("attn_output_norm", _BERT + "attention.LayerNorm", bias=True),
        *_mlp(_BERT + "intermediate.dense", _BERT + "output.dense"),
        *norm("layer_output_norm", _BERT + "output.LayerNorm", bias=True),
        *_POOLER,
    )),
    _hyper(
        rules.size("position_buckets", "relative_attention_num_buckets", default=32,
            shape=rules.axis("attn_rel_b.weight", 0), shape_wins=True),
    ),
)  # fmt: skip

_M = "layers.{L}."
MODERNBERT = named(
    "modernbert", ("modernbert", "ModernBertModel", "ModernBertForMaskedLM"), "modern-bert",
    tables(
        (
            *_embeddings("embeddings.tok_embeddings", normed="embeddings.norm", bias=False),
            RoleRow("attn_norm.weight", _M + "attn_norm.weight", ("hidden_size",), "optional"),
            *fused_rows(None),
            *linear("attn_output", _M + "attn.Wo", "hidden_size", Q),
            *norm("ffn_norm", _M + "mlp_norm"),
            # Gate and up in one matrix, in GGUF too.
            *linear("ffn_up", _M + "mlp.Wi", "2*ffn_size", "hidden_size"),
            *linear("ffn_down", _M + "mlp.Wo", "hidden_size", "ffn_size"),
            *norm("output_norm", "final_norm", layered=False),
        ),
        hf_first=fused_in(_M + "attn.Wqkv", IN_ORDER, ("weight",)),
        gguf_first=GGUF_FUSED[:1],
    ),
    _hyper(
        rules.norm_eps(1e-5, "norm_eps", "layer_norm_epsilon"),
        rules.activation("gelu", "hidden_activation"),
        # The width of the MLP is not a width of its first matrix.
        rules.size("ffn_size", "intermediate_size", "feed_forward_length", "intermediate_size"),
    ),
)  # fmt: skip

_SECOND = (
    *norm("attn_output_norm", _NOMIC + "norm1", bias=True),
    *norm("layer_output_norm", _NOMIC + "norm2", bias=True),
)
_TYPES = "embeddings.token_type_embeddings"
NOMIC_BERT = named(
    "nomic_bert", ("nomic_bert", "NomicBertModel"), "nomic-bert",
    tables(
        (
            *_embeddings(_OLD[0], "", _TYPES, "emb_ln"),
            *fused_rows(None),
            *linear("attn_output", _NOMIC + "attn.out_proj", "hidden_size", Q),
            *linear("ffn_up", _NOMIC + "mlp.fc11", "ffn_size", "hidden_size"),
            *linear("ffn_gate", _NOMIC + "mlp.fc12", "ffn_size", "hidden_size"),
            *linear("ffn_down", _NOMIC + "mlp.fc2", "hidden_size", "ffn_size"),
            *_SECOND,
        ),
        hf_first=fused_in(_NOMIC + "attn.Wqkv", IN_ORDER, ("weight",)),
        gguf_first=GGUF_FUSED[:1],
    ),
    _hyper(
        rules.hidden_size(None, "hidden_size n_embd"),
        rules.ffn_size(None, "intermediate_size n_inner"),
        rules.activation("silu"),
        *_ROPE,
    ),
)  # fmt: skip
JINA_V3 = named(
    "jina_embeddings_v3", ("jina_embeddings_v3", "JinaEmbeddingsV3Model"), "jina-bert-v3",
    tables(
        (
            *_embeddings(_OLD[0], "", _TYPES, "emb_ln"),
            *fused_rows(""),
            *linear("attn_output", _NOMIC + "mixer.out_proj", "hidden_size", Q, bias=""),
            *_mlp(_NOMIC + "mlp.fc1", _NOMIC + "mlp.fc2"),
            *_SECOND,
            *_POOLER,
        ),
        hf_first=fused_in(_NOMIC + "mixer.Wqkv", IN_ORDER),
        gguf_first=GGUF_FUSED,
    ),
    _hyper(rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"), *_ROPE),
)  # fmt: skip
