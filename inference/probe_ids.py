"""Token ids that show as much as possible of a model in one pass."""

from collections.abc import Iterator, Mapping, Sequence

from aprfmt.base.protocols import Value

SHORT, MARGIN = 48, 16
LONGEST = 1024  # longer passes take minutes; longer windows are only mentioned
TILE = 32


def choose_ids(hyperparameters: Sequence[Mapping[str, Value]], *, long: bool) -> tuple[int, ...]:
    """Return token ids for a pass that can show as many causes as possible.

    They are at least SHORT tokens. With `long` they are also 1.5 times as long as the longest
    window or trained context, up to LONGEST. `hyperparameters` has those of the compared models.
    The ids are spread over the smallest vocabulary; one token occurs twice in a row.
    """
    vocab = min(int(hp["vocab_size"]) for hp in hyperparameters)
    length = SHORT
    if long:
        for hp in hyperparameters:
            for reach in critical_lengths(hp):
                if reach + 1 <= LONGEST + MARGIN:
                    most = max(reach + MARGIN, 3 * reach // 2)
                    length = max(length, reach + 1, min(most, LONGEST))
    ids = [(7919 * i + 13 * (i // 7) + 5) % vocab for i in range(length)]
    if length > 5:
        ids[4] = ids[3]
    return tuple(ids)


def critical_lengths(hp: Mapping[str, Value]) -> Iterator[int]:
    """Yield the numbers of tokens at which a window or a scaling by length takes effect."""
    if hp["sliding_window"] is not None and any(hp["window_layers"]):
        yield int(hp["sliding_window"])
    scaling = hp["rope_scaling"]
    if scaling is not None:
        original = scaling.get("original_context_length")
        if scaling["type"] == "dynamic":
            yield int(hp["context_length"])
        elif scaling["type"] == "longrope" and original is not None:
            yield int(original)
