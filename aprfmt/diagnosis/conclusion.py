"""The conclusion where no cause was found: equal, or different by rounding only.

A and B are the two models, runs or traces that are compared; a *side* is one of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from aprfmt.diagnosis.records import Evidence, PointRow
from aprfmt.inference.replay.shadow import OperationResiduals
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.tolerances import DISCRETE

GAIN = 3.0  # gains (out / in) worth reporting


def rounding_finding(
    points: Sequence[PointRow],
    found: Sequence[Finding],
    evidence: Sequence[Evidence],
    residuals: OperationResiduals,
    supposed: str = "",
    short: Mapping[str, str] | None = None,
) -> Finding | None:
    """Return the finding on differences that no cause explains; None if nothing differs.

    It is "precision" for rounding. It is "bug" for NaN or infinity on one side only, and for a
    difference beyond the tolerance of whole runs where no operation was judged on the run's own
    input. None too where points recorded elsewhere could hide a difference. `supposed` is an
    arithmetic that only the size of the differences suggests: never confirmed. `short` is {point
    key: 16-bit type} of points in a finer run, where the finding then is. A point that only one
    side recorded counts with its distance on the run's own input.
    """
    # The points that count: with numbers, no choices, recorded where they say.
    elsewhere = {key for finding in found if finding.level == "capture" for key in finding.where}
    rows = [
        row for row in points if row.key not in elsewhere and _relative_difference(row) is not None
    ]
    rows = [row for row in rows if row.point not in DISCRETE]
    if not rows:
        return None
    worst = max(rows, key=lambda row: _relative_difference(row) or 0.0)
    if not _relative_difference(worst):
        return None
    # Beyond the tolerance of whole runs it is rounding only by the shadow pass.
    beyond = [row for row in rows if row.apart]
    if not beyond and elsewhere:
        return None
    shadows = [row.shadow for row in rows if row.shadow is not None]
    # NaN or infinity on one side only is never rounding.
    endless = [row for row in rows if not math.isfinite(_relative_difference(row) or 0.0)]
    if endless:
        return Finding(
            "",
            f"{endless[0].key} is infinitely far apart: there is no distance to call rounding",
            "forward",
            "bug",
            (endless[0].key,),
            False,
            endless[0].key,
            _relative_difference(endless[0]),
        )
    # The sentence says by which evidence it is called rounding.
    judged = residuals.all_right and all(row.shadow is not None for row in beyond)
    explained = judged or not beyond
    says = f"runs differ by {_relative_difference(worst):.3g} at most, at {worst.key}"
    if beyond:
        says += f"; {beyond[0].key} is beyond the tolerance of whole runs, " + (
            f"and {_short_text(short)}: rounding, amplified"
            if explained and short
            else "yet every operation gives the run's own values on its own inputs: rounding, "
            "amplified"
            if explained
            else f"and the operation that makes {residuals.wrong_keys[0]} is wrong on its own input"
            if residuals.wrong_keys
            else "and no operation was judged on the run's own input: not known to be rounding"
        )
    elif short:
        says += f"; {_short_text(short)}"
    if any("margin inside the rounding" in row.says for row in evidence):
        says += "; experts were chosen otherwise by margins inside the rounding"
    if supposed:
        says += (
            f"; each is as far off, in every row, as a run with {supposed} would be, and no usual "
            "mistake is: a fault that is no larger cannot be told from that"
        )
    return Finding(
        "rounding",
        says,
        "forward",
        "precision" if explained else "bug",
        tuple(short or (worst.key,)),
        explained and not supposed,
        beyond[0].key if beyond else "",
        _relative_difference(worst),
        max(shadows, default=None),
        "the worst point; after: one operation at a time",
        proof=unfitted_proof(len(shadows)) if shadows and explained else None,
    )


def _short_text(short: Mapping[str, str]) -> str:
    """Return in words which points are computed in which types, from {point key: dtype}."""
    first, types = next(iter(short)), " and ".join(dict.fromkeys(short.values()))
    if len(short) == 1:
        return f"{first} is computed in {types}"
    more = f"{len(short) - 1} more point" + "s" * (len(short) > 2)
    return f"{first} and {more} are computed in {types}"


def _relative_difference(row: PointRow) -> float | None:
    """Return the relative L2 between both runs at a point, else that on the run's own input.

    The second is from the shadow pass, in which each operation reads the recorded input. None
    without either.
    """
    return row.shadow if row.direct is None else row.direct


def largest_gains(points: Sequence[PointRow]) -> Iterator[Evidence]:
    """Yield evidence of up to three points that most amplify their layer's input difference."""
    jumps = [row for row in points if row.gain is not None and row.gain > GAIN and row.direct]
    for row in sorted(jumps, key=lambda row: -(row.gain or 0.0))[:3]:
        yield Evidence(
            "forward",
            f"{row.key} is {row.direct:.3g} apart, {row.gain:.3g} times its layer's input: a "
            "gain, no cause by itself",
            (row.key,),
            row.gain,
        )
