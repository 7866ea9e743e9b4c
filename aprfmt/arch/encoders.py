"""Text encoders: bert and its family, distilbert, mpnet.

Attention looks both ways, a LayerNorm follows each sum with the stream, and there is no head:
the rows of the last layer are pooled (pooling.py). roberta's and mpnet's position rows begin
after their padding id; llama.cpp's converter cuts the rows before it off, so they have no GGUF
table. Sources: transformers' modeling files; the gguf package's name map; the converter's
bert.py.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aprfmt.arch import hyper_rules, losses
from aprfmt.arch.gpt2 import NO_ROPE
from aprfmt.arch.pooling import pooling_rule
from aprfmt.arch.required_values import divided_head_dim_rule, require_values
from aprfmt.arch.spec import ArchSpec, Binding, BlockSpec, Facts, HyperRule, Loss, Params
from aprfmt.arch.spec_builders import Made, own_styles_only
from aprfmt.arch.tensor_rows import KV, Q, RoleRow, linear, make_tables, norm, plain_mlp
from aprfmt.arch.value_checks import whole_number
from aprfmt.base.protocols import Value

_TABLE = ("vocab_size", "hidden_size")
_BERT = "encoder.layer.{L}."
# Heads of masked language models and classifiers: not part of the encoder, in no file of GGUF.
POOLER = tuple(
    RoleRow(f"pooler.{part}", f"pooler.dense.{part}", shape, "optional", gguf="", layered=False)
    for part, shape in (("weight", ("hidden_size", "hidden_size")), ("bias", ("hidden_size",)))
)
BLOCK = BlockSpec(
    norm="layer", placement="after", position="learned", mlp="plain", attends="all", head="none",
    softmax_cast="none",
)  # fmt: skip


def embedding_rows(
    words: str,
    places: str = "",
    types: str = "",
    normed: str = "",
    *,
    bias: bool = True,
    extra: str = "",
) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of an encoder's embeddings and of their norm.

    `words`, `places` (positions), `types` (token types) and `normed` (the norm) are Hugging Face
    names, "" for one that the model does not have. `bias`: the norm has one. `extra` (`+2`) are
    rows of the position table before position 0's.
    """
    rows = [RoleRow("token_embd.weight", f"{words}.weight", _TABLE, layered=False)]
    if places:
        rows.append(
            RoleRow(
                "position_embd.weight",
                f"{places}.weight",
                (f"context_length{extra}", "hidden_size"),
                layered=False,
            )
        )
    if types:
        rows.append(
            RoleRow(
                "token_types.weight",
                f"{types}.weight",
                ("token_types", "hidden_size"),
                layered=False,
            )
        )
    return (*rows, *norm("token_embd_norm", normed, bias=bias, layered=False))


def _attention_rows(q: str, k: str, v: str, out: str) -> tuple[RoleRow, ...]:
    """Return the tensor-table rows of attention's four projections with biases.

    The arguments are their names in Hugging Face files.
    """
    return (
        *linear("attn_q", q, Q, "hidden_size", bias=""),
        *linear("attn_k", k, KV, "hidden_size", bias=""),
        *linear("attn_v", v, KV, "hidden_size", bias=""),
        *linear("attn_output", out, "hidden_size", Q, bias=""),
    )


_OLD = ("embeddings.word_embeddings", "embeddings.position_embeddings")
_BERT_LAYER = (
    *_attention_rows(
        _BERT + "attention.self.query", _BERT + "attention.self.key",
        _BERT + "attention.self.value", _BERT + "attention.output.dense",
    ),
    *norm("attn_output_norm", _BERT + "attention.output.LayerNorm", bias=True),
    *plain_mlp(_BERT + "intermediate.dense", _BERT + "output.dense"),
    *norm("layer_output_norm", _BERT + "output.LayerNorm", bias=True),
    *POOLER,
)  # fmt: skip
_BERT_ROWS = (
    *embedding_rows(*_OLD, "embeddings.token_type_embeddings", "embeddings.LayerNorm"),
    *_BERT_LAYER,
)
# What the oldest checkpoints, bert-base-uncased among them, call a norm's weight and bias.
_OLDEST = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def _make_encoder_tables(rows: Sequence[RoleRow]) -> Made:
    """Return the tensor table and bindings of encoder rows.

    Norms are also bound under the names that the oldest checkpoints have (`gamma`, `beta`).
    """
    older = tuple(
        Binding((row.hf.replace(now, then),), (row.role,))
        for row in rows
        for now, then in _OLDEST.items()
        if row.hf.endswith(now)
    )
    return make_tables(rows, hf_more=older)


def encoder_rules(*overrides: HyperRule) -> tuple[HyperRule, ...]:
    """Return the hyperparameter rules that encoders share; `overrides` replace or add to them.

    Positions are learned unless `overrides` say otherwise.
    """
    return hyper_rules.hyper_table(
        hyper_rules.n_kv_heads(hf=""),
        divided_head_dim_rule(),
        hyper_rules.norm_eps(1e-12, "layer_norm_eps", "layer_norm_epsilon"),
        hyper_rules.activation("gelu"),
        hyper_rules.fixed("tied_embeddings", True),
        pooling_rule("mean", causal=False),
        *NO_ROPE,
        HyperRule(
            "token_types",
            {"hf": ("type_vocab_size",), "gguf": ("tokenizer.ggml.token_type_count",)},
            "size",
            1,
            shape=hyper_rules.axis("token_types.weight", 0),
            shape_wins=True,
        ),
        *overrides,
    )


def _position_offset_rule(default: int) -> HyperRule:
    """Return the rule that reads and writes which row of the position table is position 0's.

    It is the row after the padding id's: config.json has `pad_token_id`.
    """

    def read(facts: Facts, hp: Params) -> tuple[Value, str] | None:
        """Return (row of the position table for position 0, key) of config.json.

        None without the key. The row is the padding id plus one.
        """
        found = facts.first("pad_token_id")
        return None if found is None else (whole_number(*found) + 1, found[1])

    return HyperRule(
        "position_offset",
        default=default,
        read={"hf": read},
        write={"hf": lambda value, hp: {"pad_token_id": value - 1}},
    )


def _attention_bias_rule(causal: bool = False, **usual: Value) -> HyperRule:
    """Return the rule for `attention_bias`, whose check refuses bert's uncommon attention.

    `usual` are more keys of config.json that must have this value. `causal`: a decoder.
    """
    wanted = {"position_embedding_type": "absolute", "is_decoder": causal, **usual}

    def check(value: Value, facts: Facts, hp: Params) -> str:
        """Raise ArchError if config.json asks for attention that is not computed here.

        Else return "", which says that there is no warning.
        """
        require_values(facts, {**wanted, **({"add_cross_attention": False} if causal else {})})
        return ""

    return HyperRule("attention_bias", default=True, check=check)


COMMON_IGNORED = frozenset(
    """attention_probs_dropout_prob hidden_dropout_prob classifier_dropout embedding_size
    add_cross_attention cross_attention_hidden_size gradient_checkpointing embeddings_dropout
    qa_dropout seq_classif_dropout dropout attention_dropout sinusoidal_pos_embds num_labels
    id2label label2id problem_type finetuning_task summary_type model_max_length
    tie_word_embeddings chunk_size_feed_forward
    """.split()
)
_BUFFERS = {"hf": ("embeddings.position_ids",)}  # 0, 1, 2, ..., in files of old versions
_LOST_POOLING = Loss(
    "hf",
    "pooling",
    lambda hp: hp["pooling"] != "mean",
    "config.json has no key for it: sentence-transformers reads it from 1_Pooling/config.json and "
    "takes the mean without",
)


def encoder_spec(
    name: str,
    made: Made,
    hyper: tuple[HyperRule, ...],
    block: BlockSpec = BLOCK,
    more_ignored: str = "",
    unused: tuple[str, ...] = (),
    **more: Any,
) -> ArchSpec:
    """Return the architecture of one of our encoders; `more_ignored` are keys that change nothing.

    `unused` are stored tensors that no pass reads. `made` are its tensor table and bindings.
    """
    activation = next(rule.default for rule in hyper if rule.name == "activation")
    return own_styles_only(
        ArchSpec(
            name=name,
            hyper=hyper,
            tensors=made[0],
            bindings=made[1],
            block=block,
            ignored=COMMON_IGNORED.union(more_ignored.split()),
            buffers={"hf": (*_BUFFERS["hf"], *unused)},
            lost=(*losses.common_losses(activation, partial=True), _LOST_POOLING),
            **more,
        )
    )


BERT = encoder_spec("bert", _make_encoder_tables(_BERT_ROWS), encoder_rules(_attention_bias_rule()))
_SKIPPING = replace(BLOCK, padding="skipped")
ROBERTA = encoder_spec(
    "roberta",
    _make_encoder_tables(_BERT_ROWS),
    encoder_rules(_attention_bias_rule(), _position_offset_rule(2)),
    _SKIPPING,
)


def _make_causal_tables(prefix: str, head: str, norm_name: str, words: str) -> Made:
    """Return the tables of a causal bert, with the head that predicts masked words.

    The arguments are Hugging Face names: of everything, of the head, of its norm, of its matrix.
    """
    inside = (replace(row, hf=prefix + row.hf) for row in _BERT_ROWS if row not in POOLER)
    return make_tables(
        (
            *inside,
            *(
                RoleRow(
                    f"head_in.{part}", f"{head}dense.{part}", ("hidden_size",) * axes, layered=False
                )
                for part, axes in (("weight", 2), ("bias", 1))
            ),
            *norm("output_norm", f"{head}{norm_name}", bias=True, layered=False),
            RoleRow(
                "output.weight", f"{words}decoder.weight", _TABLE, "!tied_embeddings", layered=False
            ),
            RoleRow("output.bias", f"{words}decoder.bias", ("vocab_size",), layered=False),
        ),
        hf_more=(Binding((f"{words}bias",), ("output.bias",)),),
    )


def _is_decoder(names: Collection[str], values: Mapping[str, Value]) -> bool:
    """Return whether config.json says that the model is a decoder.

    `names` (the tensors') is not used: every evidence function is given both.
    """
    return values.get("is_decoder") is True


def _causal_rules(*more: HyperRule) -> tuple[HyperRule, ...]:
    """Return the hyperparameter rules of a causal bert; `more` replace or add to them."""
    write = {"hf": lambda value, hp: {"is_decoder": True}}
    return encoder_rules(
        replace(pooling_rule(), write={**pooling_rule().write, **write}),
        hyper_rules.tied_embeddings(True),
        *more,
    )


_CAUSAL = replace(BLOCK, attends="causal", head="dense")
BERT_CAUSAL = encoder_spec(
    "bert_causal",
    _make_causal_tables("bert.", "cls.predictions.transform.", "LayerNorm", "cls.predictions."),
    _causal_rules(_attention_bias_rule(causal=True)),
    _CAUSAL,
    evidence=_is_decoder,
    unused=("cls.predictions.bias",),  # of a separate head, which has another one
)
ROBERTA_CAUSAL = encoder_spec(
    "roberta_causal",
    _make_causal_tables("roberta.", "lm_head.", "layer_norm", "lm_head."),
    _causal_rules(_attention_bias_rule(causal=True, hidden_act="gelu"), _position_offset_rule(2)),
    replace(_CAUSAL, padding="skipped"),
    evidence=_is_decoder,
    unused=("lm_head.bias",),
)

_D = "transformer.layer.{L}."


def _has_no_token_types(names: Collection[str], values: Mapping[str, Value]) -> bool:
    """Return whether tensor names show that the model has no table of token types.

    `values` (the metadata) is not used: every evidence function is given both.
    """
    return bool(names) and not any("token_type" in name for name in names)


DISTILBERT = encoder_spec(
    "distilbert",
    _make_encoder_tables((
        *embedding_rows(*_OLD, "", "embeddings.LayerNorm"),
        *_attention_rows(*(f"{_D}attention.{x}_lin" for x in ("q", "k", "v", "out"))),
        *norm("attn_output_norm", _D + "sa_layer_norm", bias=True),
        *plain_mlp(_D + "ffn.lin1", _D + "ffn.lin2"),
        *norm("layer_output_norm", _D + "output_layer_norm", bias=True),
    )),
    encoder_rules(
        hyper_rules.hidden_size(768, "dim hidden_size"),
        hyper_rules.n_layers(6, "n_layers num_hidden_layers"),
        hyper_rules.n_heads(12, "n_heads num_attention_heads"),
        hyper_rules.ffn_size(3072, "hidden_dim intermediate_size"),
        hyper_rules.vocab_size(30522),
        hyper_rules.context_length(512),
        hyper_rules.activation("gelu", "activation"),
    ),
    evidence=_has_no_token_types,
)  # fmt: skip


def _check_buckets(value: Value, facts: Facts, hp: Params) -> str:
    """Return ""; ArchError for a count other than 32, as transformers always computes with 32."""
    require_values(facts, {"relative_attention_num_buckets": 32})
    return ""


MPNET = encoder_spec(
    "mpnet",
    _make_encoder_tables((
        *embedding_rows(*_OLD, "", "embeddings.LayerNorm"),
        RoleRow("attn_rel_b.weight", "encoder.relative_attention_bias.weight",
            ("position_buckets", "n_heads"), layered=False),
        *_attention_rows(*(f"{_BERT}attention.attn.{x}" for x in "qkvo")),
        *norm("attn_output_norm", _BERT + "attention.LayerNorm", bias=True),
        *plain_mlp(_BERT + "intermediate.dense", _BERT + "output.dense"),
        *norm("layer_output_norm", _BERT + "output.LayerNorm", bias=True),
        *POOLER,
    )),
    encoder_rules(
        hyper_rules.size("position_buckets", "relative_attention_num_buckets", default=32,
            shape=hyper_rules.axis("attn_rel_b.weight", 0), shape_wins=True, check=_check_buckets),
        hyper_rules.fixed("position_offset", 2),
    ),
    replace(_SKIPPING, score_bias="relative"),
)  # fmt: skip
