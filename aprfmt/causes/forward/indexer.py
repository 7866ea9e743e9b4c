"""Hypotheses about sparse attention: which keys an indexer chooses, and by what scores.

A *block* is keys that follow each other and are chosen together. A *group* is the query heads for
which one choice is made.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Change, Hypothesis, Layers, Mismatch, hyper_change
from aprfmt.causes.row import Cause
from aprfmt.inference.replay.patched_model import Override, PatchedModel

CAUSE_ROWS = (
    Cause(
        "key_choice", "forward", "bug",
        "Sparse attention reads other keys than the model's indexer chooses: too few or too many, "
        "their neighbours, or those that score best by another rule.",
        "Queries, keys and values of a layer are equal, and what its attention gives is not.",
        "Attention over the keys that the named rule chooses is equal.",
        keys=("index_topk", "index_layers", "index_block", "index_local_blocks"),
    ),
)  # fmt: skip
CAUSE = "key_choice"


def _operation_change(says: str, where: str, op: str, override: Override) -> Change:
    """Return the change that replaces operation `op` by `override`.

    `says` is the sentence about it, `where` what it names as the place of the mistake.
    """

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose operation `op` is `override` in `layers`."""
        return patched.with_op(op, override, layers)

    return Change(CAUSE, says, (where,), make, {CAUSE: says})


def _choose_every_key(op: Any, at: Any, scores: Any, mask: Any, count: int) -> Any:
    """Override the indexer's choice: return `mask`, so that every visible key is chosen.

    `scores` and `count` are not used.
    """
    return mask


def _shift_choice(by: int) -> Override:
    """Return an override that chooses the keys `by` tokens after those that the indexer chose."""

    def choose(op: Any, at: Any, scores: Any, mask: Any, count: int) -> Any:
        """Return the bool mask of the keys that are `by` tokens after those the indexer chose.

        It stays within `mask`; a query without any key left reads all that it may see.
        """
        kept = np.roll(op(scores, mask, count), by, axis=-1) & mask
        kept[~kept.any(axis=-1)] = mask[~kept.any(axis=-1)]  # attention reads something
        return kept

    return choose


def _choose_lowest(op: Any, at: Any, scores: Any, mask: Any, count: int) -> Any:
    """Override the indexer's choice: return the mask of the `count` keys with lowest scores."""
    return op(-scores, mask, count)


def _keep_negative_products(op: Any, at: Any, q: Any, k: Any, weights: Any, scale: float) -> Any:
    """Override the index scores: return them without relu, so that negative products of q, k count.

    They are the score of q less that of -q.
    """
    return op(q, k, weights, scale) - op(-q, k, weights, scale)


def _weigh_heads_alike(op: Any, at: Any, q: Any, k: Any, weights: Any, scale: float) -> Any:
    """Override the index scores: return them with every head's weight 1."""
    return op(q, k, np.ones_like(weights), scale)


def _without_index_rope(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose indexers score queries and keys as they were before rope."""
    for part in "qk":

        def before(
            patched: PatchedModel, layer: int, x: Any, held: Any, name: str = f"index_{part}"
        ) -> Any:
            """Return an indexer's queries or keys before rope, in place of the rotated `x`."""
            return np.array(held[name]).reshape(x.shape)

        patched = patched.with_tap(f"index_{part}_rope", before, layers)
    return patched


def usual_key_choice_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes of an attention indexer; none for models without one."""
    kind = patched.spec.block.indexer
    compressed = patched.spec.block.attention == "compressed"
    if kind == "none" and not compressed:
        return
    what = "blocks" if kind == "blocks" else "keys"
    # Other numbers of keys, all keys, or their neighbours.
    configured = int(patched.hp["index_topk"])
    for count in dict.fromkeys((configured - 1, configured + 1, configured // 2, 2 * configured)):
        if count > 0 and count != configured:
            says = f"an indexer chooses {count} {what}; the model says {configured}"
            yield hyper_change(CAUSE, says, index_topk=count)
    yield _operation_change(
        "attention reads every key, not those that an indexer chooses",
        "index_topk",
        "best_keys",
        _choose_every_key,
    )
    for by, where in ((1, "after"), (-1, "before")):
        yield _operation_change(
            f"attention reads the key {where} each that an indexer chooses",
            "index_topk",
            "best_keys",
            _shift_choice(by),
        )
    yield _operation_change(
        "an indexer chooses the keys that score worst", "index_topk", "best_keys", _choose_lowest
    )
    if kind == "blocks":
        yield from _block_mistakes(patched)
        return
    yield _operation_change(
        "an indexer's heads all weigh one", "indexer.proj", "index_scores", _weigh_heads_alike
    )
    yield _operation_change(
        "an indexer's heads keep negative products",
        "indexer",
        "index_scores",
        _keep_negative_products,
    )
    if compressed:
        return
    yield Change(
        CAUSE,
        "an indexer's queries and keys are not rotated",
        ("indexer",),
        _without_index_rope,
        {CAUSE: "not rotated"},
    )
    # Other rotations and other scores of the indexer.
    other = "interleaved" if kind == "half" else "half"
    yield Change(
        CAUSE,
        f"an indexer rotates pairs as {other}; the model's are {kind}",
        ("indexer",),
        lambda patched, layers: patched.with_block(layers, indexer=other),
        {"indexer": other},
    )


def _block_mistakes(patched: PatchedModel) -> Iterator[Change]:
    """Yield changes for the usual mistakes of an indexer that chooses blocks of keys."""
    yield Change(
        CAUSE,
        "an indexer's queries and keys are not rotated",
        ("indexer",),
        _without_index_rope,
        {CAUSE: "not rotated"},
    )
    size, local = (int(patched.hp[name]) for name in ("index_block", "index_local_blocks"))
    for count in dict.fromkeys((size - 1, size + 1, size // 2, 2 * size)):
        if count > 0:
            says = f"an indexer's blocks have {count} keys; the model says {size}"
            yield hyper_change(CAUSE, says, index_block=count)
    for count in dict.fromkeys((0, local - 1, local + 1)):
        if 0 <= count != local:
            says = f"{count} blocks next to a query are always read; the model says {local}"
            yield hyper_change(CAUSE, says, index_local_blocks=count)
    says = "every group of heads reads the blocks that the first one's indexer chooses"
    yield Change(CAUSE, says, ("index_blocks",), _share_first_blocks, {CAUSE: says})


def _share_first_blocks(patched: PatchedModel, layers: Layers) -> PatchedModel:
    """Return the model whose groups of heads all read the first group's blocks."""

    def shared(patched: PatchedModel, layer: int, x: Any, held: Any) -> Any:
        """Return the blocks of keys chosen by the first group of heads, for every group.

        `x` is [groups, ...]: the choice of each group.
        """
        return np.broadcast_to(x[:1], x.shape).copy()

    return patched.with_tap("index_blocks", shared, layers)


def try_key_choices(case: Mismatch) -> Iterator[Change]:
    """Yield changes of the keys that a layer's indexer chooses, for points in a layer."""
    if case.layer >= 0:
        yield from usual_key_choice_mistakes(case.patched)


HYPOTHESES = (
    Hypothesis(CAUSE, try_key_choices, 325, "which keys a query sees, as its mask"),
)  # fmt: skip
