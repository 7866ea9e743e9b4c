"""Chooses token ids for a pass, and lists the causes that such a pass cannot show."""

from collections.abc import Iterator, Mapping, Sequence

from aprfmt.base.protocols import Value

SHORT, MARGIN = 48, 16
LONGEST = 1024  # longer passes take minutes; longer windows are only mentioned
TILE = 32


def chosen_ids(every: Sequence[Mapping[str, Value]], *, long: bool) -> tuple[int, ...]:
    """Return ids for a pass that can show as many causes as possible for these hyperparameters.

    They are long enough for softmax tiles and, with `long`, for half as much again as the windows
    and trained contexts up to LONGEST. They are spread over the vocabulary; one token occurs twice
    in a row.
    """
    vocab = min(int(hp["vocab_size"]) for hp in every)
    length = SHORT
    if long:
        for hp in every:
            for reach in reaches(hp):
                if reach + 1 <= LONGEST + MARGIN:
                    most = max(reach + MARGIN, 3 * reach // 2)
                    length = max(length, reach + 1, min(most, LONGEST))
    ids = [(7919 * i + 13 * (i // 7) + 5) % vocab for i in range(length)]
    if length > 5:
        ids[4] = ids[3]
    return tuple(ids)


def reaches(hp: Mapping[str, Value]) -> Iterator[int]:
    """Yield the number of tokens at which a window or a scaling by length takes effect."""
    if hp["sliding_window"] is not None and any(hp["window_layers"]):
        yield int(hp["sliding_window"])
    scaling = hp["rope_scaling"]
    if scaling is not None:
        original = scaling.get("original_context_length")
        if scaling["type"] == "dynamic":
            yield int(hp["context_length"])
        elif scaling["type"] == "longrope" and original is not None:
            yield int(original)


def disagree(given: Sequence[int] | None, recorded: Mapping[str, Sequence[int]]) -> str:
    """Return a sentence if the given ids and those of the traces differ, "" if they are equal.

    `recorded` has the ids of each side (by letter) whose trace states them.
    """
    for label, ids in recorded.items():
        if given is not None and tuple(given) != tuple(ids):
            return f"{label} was run on other token ids than those given ({_first(given, ids)})"
    if len(recorded) == 2 and tuple(recorded["A"]) != tuple(recorded["B"]):
        return "the traces are of other token ids: " + _first(recorded["A"], recorded["B"])
    return ""


def _first(a: Sequence[int], b: Sequence[int]) -> str:
    """Return a text about the first difference of two sequences of ids."""
    at = next(
        (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]),
        min(len(a), len(b)),
    )
    return f"{len(a)} and {len(b)} ids, the first difference at {at}"


def hidden_from(hp: Mapping[str, Value], tokens: int) -> Iterator[str]:
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
        for reach in reaches({**hp, "sliding_window": None}):
            if tokens <= reach:
                yield f"rope_scaling: {tokens} tokens; beyond {reach} other frequencies apply"
