"""Checks that two sides ran on the same token ids, and what these ids cannot show."""

from collections.abc import Iterator, Mapping, Sequence

from aprfmt.base.protocols import Value
from aprfmt.inference.probe_ids import TILE, critical_lengths


def id_mismatch_sentence(
    given_ids: Sequence[int] | None, recorded: Mapping[str, Sequence[int]]
) -> str:
    """Return a sentence if the given ids and those of the traces differ; "" if they are equal.

    `recorded` has the ids of each side ("A", "B") whose trace has them.
    """
    for label, ids in recorded.items():
        if given_ids is not None and tuple(given_ids) != tuple(ids):
            return (
                f"{label} was run on other token ids than those given "
                f"({_first_difference_text(given_ids, ids)})"
            )
    if len(recorded) == 2 and tuple(recorded["A"]) != tuple(recorded["B"]):
        return "the traces are of other token ids: " + _first_difference_text(
            recorded["A"], recorded["B"]
        )
    return ""


def _first_difference_text(a: Sequence[int], b: Sequence[int]) -> str:
    """Return the lengths and the first differing place of two sequences of ids, as text."""
    at = next(
        (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
        min(len(a), len(b)),
    )
    return f"{len(a)} and {len(b)} ids, the first difference at {at}"


def hidden_causes(hp: Mapping[str, Value], tokens: int) -> Iterator[str]:
    """Yield sentences about causes that a pass over `tokens` tokens cannot show."""
    rotates = any(hp["rope_layers"])
    if tokens < 2:
        yield "mask, positions and rope: one token at position 0 does not show them"
    elif tokens < 4 and rotates:
        yield f"rope: {tokens} tokens hardly tell a base from a scaling"
    window = hp["sliding_window"]
    if window is not None and any(hp["window_layers"]) and tokens <= int(window):
        yield f"sliding_window: {tokens} tokens; more than {window} would show it, give --ids"
    if tokens <= TILE:
        yield f"softmax_reduction: {tokens} tokens; more than {TILE} would show tiles of {TILE}"
    scaling = hp["rope_scaling"]
    if scaling is not None and scaling["type"] in ("dynamic", "longrope"):
        for reach in critical_lengths({**hp, "sliding_window": None}):
            if tokens <= reach:
                yield f"rope_scaling: {tokens} tokens; beyond {reach} other frequencies apply"
