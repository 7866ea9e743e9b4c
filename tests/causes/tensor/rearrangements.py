"""Seeded faults of `aprfmt/causes/tensor/rearrangements.py`."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from aprfmt.causes.tensor import rearrangements
from tests.causes.faults import EMBEDDING, HEADS, HIDDEN, OUT, SIZE, UP, Fault, K, Q, moved, rows_of
from tests.diagnosis import dumps
from tests.diagnosis import wrong_modules as wrong
from tests.diagnosis.dumps import as_npz, everything
from tests.diagnosis.engine_changes import (
    FIVE,
    LOGITS,
    THREE,
    changed,
    dumped,
    number,
    rope,
    traced,
)
from tests.diagnosis.engines import COARSE, broken
from tests.diagnosis.head_changes import one_head
from tests.diagnosis.making import engine


def _pairs(x: Any, heads: int) -> Any:
    """Rows of each head from split halves to adjacent pairs."""
    split = x.reshape(heads, 2, -1, HIDDEN)
    return split.swapaxes(1, 2).reshape(x.shape)


def _undone(x: Any, heads: int) -> Any:
    """Rows of each head from adjacent pairs to split halves."""
    pairs = x.reshape(heads, -1, 2, HIDDEN)
    return pairs.swapaxes(1, 2).reshape(x.shape)


def _for(heads: int, right: int) -> Any:
    """Rows permuted for one number of heads, and put right for the true one, as loaders do."""
    return lambda x: _undone(_pairs(x, heads), right)


def _columns(x: Any) -> Any:
    return x.reshape(-1, HEADS, SIZE)[:, [2, 1, 0, 3]].reshape(-1, HIDDEN)


def _two_rows(x: Any) -> Any:
    x = x.copy()
    x[[5, 9]] = x[[9, 5]]
    return x


_SHUFFLED = np.random.default_rng(3).permutation(HIDDEN)

FAULTS = (
    Fault(
        "transposed",
        "transpose",
        UP,
        moved(UP, lambda x: x.T),
        rearrangements.guess_transposed,
        "rows and columns exchanged",
    ),
    Fault(
        "adjacent pairs",
        "rope_pairing",
        Q,
        moved(Q, lambda x: _pairs(x, HEADS)),
        rearrangements.guess_rearranged,
        "adjacent pairs in B",
    ),
    Fault(
        "pairs of too many heads",
        "gqa_mapping",
        K,
        moved(K, lambda x: _pairs(x, HEADS)),
        rearrangements.guess_rearranged,
        "as if there were 4 heads of 8 rows; there are 2 of 16",
    ),
    *(
        Fault(
            f"k made for {heads} heads",
            "gqa_mapping",
            K,
            moved(K, _for(heads, HEADS // 2)),
            rearrangements.guess_rearranged,
            f"made for {heads} heads and undone for 2",
        )
        for heads in (1, 4, 8)
    ),
    *(
        Fault(
            f"q made for {heads} heads",
            "gqa_mapping",
            Q,
            moved(Q, _for(heads, HEADS)),
            rearrangements.guess_rearranged,
            f"made for {heads} heads and undone for 4",
        )
        for heads in (1, 2, 8, 16)
    ),
    Fault(
        "k undone for the heads of q",
        "gqa_mapping",
        K,
        moved(K, lambda x: _undone(_pairs(x, HEADS // 2), HEADS)),
        rearrangements.guess_rearranged,
        "made for 2 heads and undone for 4",
    ),
    Fault(
        "heads in another order",
        "head_order",
        Q,
        moved(Q, rows_of(lambda x: x[[1, 0, 2, 3]])),
        rearrangements.guess_rearranged,
        "1, 0, 2, 3",
    ),
    Fault(
        "heads after the first come round",
        "head_order",
        Q,
        moved(Q, rows_of(lambda x: x[[0, 2, 3, 1]])),
        rearrangements.guess_rearranged,
        "heads 0, 1, 2, ... of A are these of B: 0, 3, 1, 2",
    ),
    Fault(
        "two key heads exchanged",
        "head_order",
        K,
        moved(K, lambda x: np.roll(x, 16, 0)),
        rearrangements.guess_rearranged,
        "heads 0, 1, 2, ... of A are these of B: 1, 0",
    ),
    Fault(
        "heads of the output product",
        "head_order",
        OUT,
        moved(OUT, _columns),
        rearrangements.guess_rearranged,
        "2, 1, 0, 3",
    ),
    Fault(
        "query heads regrouped",
        "gqa_mapping",
        Q,
        moved(Q, rows_of(lambda x: x[[0, 2, 1, 3]])),
        rearrangements.guess_rearranged,
        "grouped the other way",
    ),
    Fault(
        "rows shuffled",
        "row_offset",
        UP,
        moved(UP, lambda x: x[_SHUFFLED]),
        rearrangements.guess_rearranged,
        "another order",
    ),
    Fault(
        "two rows exchanged",
        "row_offset",
        EMBEDDING,
        moved(EMBEDDING, _two_rows),
        rearrangements.guess_rearranged,
        "5 of A is 9 of B",
    ),
)


def shared_heads(op: Any, q: Any, k: Any, own: Any) -> Any:
    """Query head h reads key head h modulo the number of key heads."""
    return op(q, k[:, np.arange(q.shape[1]) % k.shape[1]], own)


def experts_exchanged(weights: Any) -> Mapping[str, Any]:
    """Return an overlay with experts 0 and 1 of layer 1 exchanged, the router not."""
    keys = [f"L1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
    return {key: number(weights, key)[[1, 0, 2, 3, 4, 5]] for key in keys}


def first_kv_head(op: Any, probs: Any, v: Any) -> Any:
    """Every query head reads value head 0 to the last in turn, not in groups."""
    return op(probs, v[:, np.arange(probs.shape[0]) % v.shape[1]])


ENGINE_FAULTS = (
    engine("pairing", "llama", "adjacent pairs for split halves", "rope_pairing", "rope_style",
           upstream=(24,), hp={"rope_style": "interleaved"}),
    engine("pairing-cohere", "cohere", "split halves for adjacent pairs", "rope_pairing",
           "rope_style", fine=True, upstream=(24,), hp={"rope_style": "half"}),
    engine("gqa", "llama", "query head h reads key head h mod 2", "gqa_mapping", "n_kv_heads",
           fine=True, backend=lambda: broken("scores", shared_heads)),
    engine("by-columns", "llama-square", "a square weight read by columns", "transpose",
           "L0.attn_output.weight", upstream=(23,),
           weights=changed("L0.attn_output.weight", lambda x: x.T)),
    engine("key-heads", "llama", "key heads 0 and 1 exchanged", "head_order", "L1.attn_k.weight",
           weights=changed("L1.attn_k.weight", lambda x: np.roll(x, 16, 0))),
    engine("heads", "llama", "query heads 0 and 1 exchanged", "head_order", "L1.attn_q.weight",
           weights=changed("L1.attn_q.weight",
                           lambda x: x.reshape(4, 16, -1)[[1, 0, 2, 3]].reshape(64, -1))),
    engine("experts", "qwen2_moe", "experts 0 and 1 exchanged", "expert_order",
           "L1.ffn_up_exps.weight", weights=experts_exchanged),
    traced("logits-pairing", "llama", "adjacent pairs, from logits alone", ["rope_pairing"],
           ["rope_style"], LOGITS, hp={"rope_style": "interleaved"}),
    traced("logits-gqa", "llama", "value heads in turn for groups, from logits alone",
           ["gqa_mapping"], ["n_kv_heads"], LOGITS, THREE,
           backend=lambda: broken("mix", first_kv_head)),
    dumped("hf-pairing", "llama", "adjacent pairs, every module's output as .npy",
           ["rope_pairing"], ["rope_style"], dumps.everything, dumps.as_npy, FIVE,
           wrong=dumps.adjacent_pairs),
    dumped("hf-gqa", "llama", "key heads in turn, layers and logits as .npz", ["gqa_mapping"],
           ["n_kv_heads"], dumps.layer_outputs, dumps.as_npz, THREE, wrong=dumps.heads_in_turn),
    engine("ernie-halves", "ernie4_5", "split halves for adjacent pairs", "rope_pairing",
           "rope_style", fine=True, hp={"rope_style": "half"}),
    engine("glm-halves", "glm", "split halves for adjacent pairs", "rope_pairing", "rope_style",
           fine=True, hp={"rope_style": "half"}),
    engine("gptj-halves", "gptj", "split halves for adjacent pairs", "rope_pairing", "rope_style",
           fine=True, hp={"rope_style": "half"}),
    dumped("hf-rope-backwards", "llama", "the sine has the other sign", ["rope_pairing"],
           ["rope_style"], everything, as_npz, FIVE, wrong=rope(wrong.other_sign)),
    traced("one-head", "llama", "query head 3 reads key head 0", ["gqa_mapping"], ["n_kv_heads"],
           COARSE, THREE, **one_head()),
    traced("one-head-keys", "llama", "it reads the keys of head 0", ["gqa_mapping"],
           ["n_kv_heads"], COARSE, THREE, **one_head(values=False)),
    traced("one-head-late", "llama", "the same in later passes alone", ["gqa_mapping"],
           ["n_kv_heads"], COARSE, THREE, **one_head(since=20)),
)  # fmt: skip
