"""From what parity found to a bundle: the cell, run once more on both sides."""

from collections.abc import Sequence

from aprfmt.inference.device import parse_run
from aprfmt.inference.parity.bundle import Bundle
from aprfmt.inference.parity.cells import Parity


def bundle_of(found: Parity, runs: Sequence[str]) -> Bundle | None:
    """Return the reproduction of the first pair with an operation taken apart, wrong ones first.

    Where no operation is wrong by itself the first point beyond tolerance is taken: a replay then
    shows that the operation alone agrees.
    """
    pairs = [pair for pair in found.pairs if pair.cell is not None]
    pairs.sort(key=lambda pair: pair.first_operation is None)
    for pair in pairs:
        cell = pair.cell
        operation = next((o for o in pair.operations if cell and o.key == cell.key), None)
        if cell is None or operation is None:
            continue
        first, second = runs[pair.a], runs[pair.b]
        expected = cell.run(parse_run(first).open())
        if operation.shadow:
            if pair.recorded is None:
                continue
            other = pair.recorded
        else:
            other = cell.run(parse_run(second).open())
        facts = {
            "model": found.model,
            "ids": list(found.ids),
            "first_point": pair.first,
            "cause": pair.cause,
            "through": found.through,
            "backends": [dict(found.runs[pair.a].backend), dict(found.runs[pair.b].backend)],
        }
        return Bundle(
            cell, expected, other, (first, second), operation.residual, operation.bound,
            operation.shadow, facts,
        )  # fmt: skip
    return None
