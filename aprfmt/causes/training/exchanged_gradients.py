"""Gradients that stand under another parameter's name."""

from collections.abc import Iterator

from aprfmt.causes.row import Cause
from aprfmt.causes.training.backward_case import BackwardCase, BackwardGuess, BackwardHypothesis
from aprfmt.measure.named_causes import short_keys

CAUSE_ROWS = (
    Cause(
        "gradient_exchanged",
        "gradient",
        "bug",
        "Gradients of equal shape stand under each other's names: another order of projections, "
        "or of layers.",
        "The norm of a given gradient is that of another parameter's computed one.",
        "The computed gradient of the other parameter gives every element.",
    ),
)
NEAR = 1e-2  # of a norm


def guess_exchanged(case: BackwardCase) -> Iterator[BackwardGuess]:
    """Yield the guess that wrong gradients are those of other wrong parameters."""
    source: dict[str, str] = {}
    for key in sorted(case.wrong):
        given = case.norms[key][0]
        for other in sorted(case.wrong - {key} - set(source.values())):
            if not given or abs(case.norms[other][1] - given) > NEAR * given:
                continue
            mine, theirs = case.case(key), case.case(other)
            if mine.given.shape == theirs.computed.shape and mine.near(mine.given, theirs.computed):
                source[key] = other
                break
    closed = {key: other for key, other in source.items() if key in source.values()}
    if closed and set(closed) == set(closed.values()):
        pairs = ", ".join(
            f"{short_keys([key])} has that of {short_keys([other])}"
            for key, other in list(closed.items())[:2]
        )
        says = f"{len(closed)} gradients are exchanged: {pairs}" + (
            ", ..." if len(closed) > 2 else ""
        )
        yield BackwardGuess("gradient_exchanged", says, source=closed)


HYPOTHESES = (
    BackwardHypothesis(("gradient_exchanged",), guess_exchanged, 290, "nothing is computed again"),
)
