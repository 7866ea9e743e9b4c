"""How many tokens and merges of two vocabularies differ, as numbers a person can weigh."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from aprfmt.tokenizer.vocabulary import Vocabulary


def counts(a: Vocabulary, b: Vocabulary) -> Mapping[str, int]:
    """Return what differs of two vocabularies by number; only what is not zero.

    Tokens are compared id by id, those behind the shorter list are on one side only. A merge counts
    as moved where it has to change its place to bring the merges of both sides into one order.
    """
    mine, theirs = list(a.merges or ()), list(b.merges or ())
    left, right = {*mine}, {*theirs}
    rank = {merge: i for i, merge in enumerate(mine)}
    common = [rank[merge] for merge in dict.fromkeys(theirs) if merge in left]
    found = {
        "tokens_changed": sum(x != y for x, y in zip(a.tokens, b.tokens, strict=False)),
        "tokens_only_in_a": max(0, len(a.tokens) - len(b.tokens)),
        "tokens_only_in_b": max(0, len(b.tokens) - len(a.tokens)),
        "merges_only_in_a": len(left - right),
        "merges_only_in_b": len(right - left),
        "merges_moved": len(common) - _longest_rising(common),
    }
    return {name: count for name, count in found.items() if count}


def _longest_rising(values: Sequence[int]) -> int:
    """Return how many of some distinct numbers rise in their order, at most."""
    ends: list[int] = []
    for value in values:
        at = bisect_left(ends, value)
        ends[at : at + 1] = [value]
    return len(ends)
