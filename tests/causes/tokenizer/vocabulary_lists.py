"""Seeded faults of `aprfmt/causes/tokenizer/vocabulary_lists.py`."""

from tests.diagnosis.token_edits import (
    GGML,
    Keys,
    Texts,
    all_normal,
    cut,
    keys,
    late_merges,
    lose,
    pieces_shifted,
    rows,
    scored,
    texts,
    two_gguf,
    typed,
)


def backwards(found: Keys) -> None:
    """Scores with the other sign: the worst pieces are joined first."""
    found[GGML + "scores"] = [-score for score in found[GGML + "scores"]]


def bytes_normal(found: Keys) -> None:
    kinds = found[GGML + "token_type"]
    found[GGML + "token_type"] = [1 if kind == 6 else kind for kind in kinds]


def added_lost(found: Texts) -> None:
    """The converter forgot an added token."""
    rows = found["tokenizer.json"]["added_tokens"]
    rows[:] = [row for row in rows if row["content"] != "<|im_start|>"]
    found["tokenizer_config.json"]["extra_special_tokens"] = ["<|im_end|>"]


def strips(found: Texts) -> None:
    for row in found["tokenizer.json"]["added_tokens"]:
        row["rstrip"] = True


FILE_FAULTS = rows({
    # https://github.com/ggml-org/llama.cpp/issues/7062
    "types-lost": ("no token types: all are normal", keys(lose(GGML + "token_type")),
                   "token_types", GGML + "token_type"),
    # https://github.com/ggml-org/llama.cpp/issues/9692
    "merges-missing": ("no merges", keys(lose(GGML + "merges")), "tokenizer_merges",
                       GGML + "merges"),
    "merges-cut": ("the first 900 of 1277 merges", keys(cut(900)), "tokenizer_merges",
                   "merge 900"),
    "merges-order": ("the first ten merges last", two_gguf(late_merges), "tokenizer_merges",
                     "merge 0"),
    "pieces-shifted": ("pieces one id too early from 700 on", keys(pieces_shifted),
                       "tokenizer_pieces", "id 700"),
    # https://github.com/unslothai/unsloth/pull/5080
    "types-normal": ("control tokens marked normal", keys(all_normal), "token_types",
                     GGML + "token_type"),
    "scores-sign": ("scores with the other sign", two_gguf(backwards, scored), "tokenizer_scores",
                    GGML + "scores"),
    "bytes-normal": ("byte tokens marked normal", two_gguf(bytes_normal, scored), "token_types",
                     GGML + "token_type"),
    # https://github.com/ggml-org/llama.cpp/issues/15842
    "added-lost": ("an added token is missing", texts(added_lost), "added_tokens",
                   "token <|im_start|>"),
    "added-strips": ("added tokens strip the blanks behind them", texts(strips), "added_tokens",
                     "tokenizer.json: added_tokens"),
    # https://github.com/unslothai/unsloth/pull/6229
    "control-user": ("special tokens typed USER_DEFINED", keys(typed(4, "<|im_")), "token_types",
                     GGML + "token_type"),
}, "bug")  # fmt: skip
