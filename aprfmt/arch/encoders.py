"""Text encoders: bert and its family, distilbert, mpnet; nomic-bert and jina v3.

Attention looks both ways, a LayerNorm follows each sum with the stream, and there is no head: the
rows of the last layer are pooled (pooling.py). roberta's and mpnet's position rows begin behind
their padding id; llama.cpp's converter cuts the rows before it off, so they have no GGUF table.
Sources: transformers' modeling files; the gguf package's name map; the converter's bert.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from aprfmt.arch import losses, rules
from aprfmt.arch.fused import GGUF_FUSED, IN_ORDER, fused_in, fused_rows
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.named import Made, in_its_styles
from aprfmt.arch.pooling import pooling
from aprfmt.arch.rope import rope_rules
from aprfmt.arch.rope_hf import Rope
from aprfmt.arch.rows import KV, Q, RoleRow, linear, norm, tables
from aprfmt.arch.spec import ArchSpec, BlockSpec, Facts, HyperRule, Loss
from aprfmt.arch.values import whole
from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

Params = Mapping[str, Value]
_TABLE = ("vocab_size", "hidden_size")
_BERT = "encoder.layer.{L}."
_NOMIC = "encoder.layers.{L}."
# Heads of masked language models and classifiers: not part of the encoder, in no file of GGUF.
_POOLER = tuple(
    RoleRow(f"pooler.{part}", f"pooler.dense.{part}", shape, "optional", gguf="", layered=False)
    for part, shape in (("weight", ("hidden_size", "hidden_size")), ("bias", ("hidden_size",)))
)
BLOCK = BlockSpec(
    norm="layer", placement="after", position="learned", mlp="plain", attends="all", head="none"
)


def embeddings(
    words: str, places: str = "", types: str = "", normed: str = "", *, bias: bool = True,
    extra: str = "",
) -> tuple[RoleRow, ...]:  # fmt: skip
    """Return the tables of words, positions and token types, and the norm behind them.

    `extra` (`+2`) are rows of the position table before position 0's.
    """
    rows = [RoleRow("token_embd.weight", f"{words}.weight", _TABLE, layered=False)]
    if places:
        rows.append(RoleRow("position_embd.weight", f"{places}.weight",
                            (f"context_length{extra}", "hidden_size"), layered=False))  # fmt: skip
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
    *embeddings(*_OLD, "embeddings.token_type_embeddings", "embeddings.LayerNorm"),
    *_BERT_LAYER,
)


def encoder_hyper(*overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return the rows that encoders share; positions are learned unless `overrides` say."""
    return rules.hyper_table(
        rules.n_kv_heads(hf=""),
        rules.head_dim(hf=""),
        rules.norm_eps(1e-12, "layer_norm_eps", "layer_norm_epsilon"),
        rules.activation("gelu"),
        rules.fixed("tied_embeddings", True),
        pooling("mean", causal=False),
        *NO_ROPE,
        HyperRule("token_types",
            {"hf": ("type_vocab_size",), "gguf": ("tokenizer.ggml.token_type_count",)}, "size", 1,
            shape=rules.axis("token_types.weight", 0), shape_wins=True),
        *overrides,
    )  # fmt: skip


def _offset(default: int) -> HyperRule:
    """Return the rule of the first position's row, which is the one behind the padding id's."""

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        found = facts.first("pad_token_id")
        return None if found is None else (whole(*found) + 1, found[1])

    return HyperRule(
        "position_offset", default=default, read={"hf": read},
        write={"hf": lambda value, hp: {"pad_token_id": value - 1}},
    )  # fmt: skip


def _plain_attention() -> HyperRule:
    """Return the rule of `attention_bias` and so on: bert's own keys that must be as usual."""

    def check(value: Value, facts: Facts, hp: Params) -> str:
        for key, usual in (("position_embedding_type", "absolute"), ("is_decoder", False),
                           ("chunk_size_feed_forward", None)):  # fmt: skip
            found = facts.first(key)
            if found is not None and usual is not None and found[0] != usual:
                raise ArchError(f"{key}: is {found[0]!r}; expected {usual!r}: no other is known")
        return ""

    return HyperRule("attention_bias", default=True, check=check)


COMMON_IGNORED = frozenset(
    """attention_probs_dropout_prob hidden_dropout_prob classifier_dropout embedding_size
    add_cross_attention cross_attention_hidden_size gradient_checkpointing embeddings_dropout
    qa_dropout seq_classif_dropout dropout attention_dropout sinusoidal_pos_embds num_labels
    id2label label2id problem_type finetuning_task summary_type model_max_length
    """.split()
)
_BUFFERS = {"hf": ("embeddings.position_ids",)}  # 0, 1, 2, ..., in files of old versions
_LOST_POOLING = Loss(
    "hf", "pooling", lambda hp: hp["pooling"] != "mean",
    "config.json has no key for it: sentence-transformers reads it from 1_Pooling/config.json and "
    "takes the mean without",
)  # fmt: skip


def encoder(
    name: str, made: Made, hyper: tuple[HyperRule, ...], block: BlockSpec = BLOCK, **more: Any
) -> ArchSpec:
    """Return the spec of one of our encoders."""
    activation = next(rule.default for rule in hyper if rule.name == "activation")
    return in_its_styles(ArchSpec(
        name=name, hyper=hyper, tensors=made[0], bindings=made[1], block=block,
        ignored=COMMON_IGNORED, buffers=_BUFFERS,
        lost=(*losses.common_losses(activation, partial=True), _LOST_POOLING), **more,
    ))  # fmt: skip


BERT = encoder("bert", tables(_BERT_ROWS), encoder_hyper(_plain_attention()))
ROBERTA = encoder("roberta", tables(_BERT_ROWS), encoder_hyper(_plain_attention(), _offset(2)))

_D = "transformer.layer.{L}."


def _without_types(names: Collection[str], values: Mapping[str, Value]) -> bool:
    return bool(names) and not any("token_type" in name for name in names)


DISTILBERT = encoder(
    "distilbert",
    tables((
        *embeddings(*_OLD, "", "embeddings.LayerNorm"),
        *_attention(*(f"{_D}attention.{x}_lin" for x in ("q", "k", "v", "out"))),
        *norm("attn_output_norm", _D + "sa_layer_norm", bias=True),
        *_mlp(_D + "ffn.lin1", _D + "ffn.lin2"),
        *norm("layer_output_norm", _D + "output_layer_norm", bias=True),
    )),
    encoder_hyper(
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
MPNET = encoder(
    "mpnet",
    tables((
        *embeddings(*_OLD, "", "embeddings.LayerNorm"),
        RoleRow("attn_rel_b.weight", "encoder.relative_attention_bias.weight",
            ("position_buckets", "n_heads"), layered=False),
        *_attention(*(f"{_BERT}attention.attn.{x}" for x in "qkvo")),
        *norm("attn_output_norm", _BERT + "attention.LayerNorm", bias=True),
        *_mlp(_BERT + "intermediate.dense", _BERT + "output.dense"),
        *norm("layer_output_norm", _BERT + "output.LayerNorm", bias=True),
        *_POOLER,
    )),
    encoder_hyper(
        rules.size("position_buckets", "relative_attention_num_buckets", default=32,
            shape=rules.axis("attn_rel_b.weight", 0), shape_wins=True),
        rules.fixed("position_offset", 2),
    ),
    replace(BLOCK, score_bias="relative"),
)  # fmt: skip

_ROTATED = (rules.rope_style("half"), HyperRule("rope_layers", default=rules.per_layer(True)))
_SECOND = (
    *norm("attn_output_norm", _NOMIC + "norm1", bias=True),
    *norm("layer_output_norm", _NOMIC + "norm2", bias=True),
)
_TYPES = "embeddings.token_type_embeddings"
NOMIC_BERT = encoder(
    "nomic_bert",
    tables(
        (
            *embeddings(_OLD[0], "", _TYPES, "emb_ln"),
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
    encoder_hyper(
        rules.hidden_size(None, "hidden_size n_embd"),
        rules.n_layers(None, "num_hidden_layers n_layer"),
        rules.n_heads(None, "num_attention_heads n_head"),
        rules.ffn_size(None, "intermediate_size n_inner"),
        rules.context_length(2048, "max_position_embeddings n_positions"),
        rules.activation("silu"),
        *rope_rules(Rope(theta=1000.0)),
        *_ROTATED,
    ),
    replace(BLOCK, position="rope", mlp="gated"),
)  # fmt: skip
JINA_EMBEDDINGS_V3 = encoder(
    "jina_embeddings_v3",
    tables(
        (
            *embeddings(_OLD[0], "", _TYPES, "emb_ln"),
            *fused_rows(""),
            *linear("attn_output", _NOMIC + "mixer.out_proj", "hidden_size", Q, bias=""),
            *_mlp(_NOMIC + "mlp.fc1", _NOMIC + "mlp.fc2"),
            *_SECOND,
            *_POOLER,
        ),
        hf_first=fused_in(_NOMIC + "mixer.Wqkv", IN_ORDER),
        gguf_first=GGUF_FUSED,
    ),
    encoder_hyper(
        rules.norm_eps(1e-5, "layer_norm_eps", "layer_norm_epsilon"),
        *rope_rules(Rope(theta=20000.0)),
        *_ROTATED,
    ),
    replace(BLOCK, position="rope"),
)  # fmt: skip
