"""Parts of B that differ each for itself, and together leave the function as it is.

A *part* is the weights and hyperparameters of B that one finding is about. A and B are the two
models that are compared.

A factor of the configuration may be folded into a weight, heads may be repeated where their count
says so, a stream may be turned. Each change alone makes another model, and all of them the same
one. This is asked of passes: every weight and every hyperparameter alone has to move the logits,
so that none of them is unread, and all of them together must not.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aprfmt.causes import CAUSES
from aprfmt.diagnosis.probes import TABLES, make_probe, unrouted_experts
from aprfmt.diagnosis.records import Touched
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.records import EQUAL

if TYPE_CHECKING:
    from aprfmt.diagnosis.finding_effects import MixedResult, PartMeasurement
    from aprfmt.diagnosis.static_findings import DifferingRows, Levels
    from aprfmt.measure.records import TensorDiff

EQUAL_FUNCTION = "equal_function"
TIMES = 30.0  # what a change alone does to the logits, over what all of them together do
MOST_IDS = 2048  # rows of a table that one more probe reads


def find_equal_parts(
    measuring: "PartMeasurement",
    found: "MixedResult",
    levels: "Levels",
    differing: "DifferingRows",
    bound: float,
) -> tuple[tuple[int, ...], Finding, Touched] | None:
    """Return (numbers of findings, the one they are, its part) of faults that cancel; None if none.

    `found` are the measured effects, `bound` the tolerance of the logits (relative L2). None too
    where a row of a table or an expert that differs was in no pass, and where passes take too long.
    """
    bugs = [i for i in measuring.live if levels.findings[i].verdict == "bug"]
    chosen = [i for i in bugs if found.shares[i].before > bound or _has_several(levels.parts[i])]
    if not chosen or (len(chosen) == 1 and not _has_several(levels.parts[chosen[0]])):
        return None
    # All of them together, the rest as in A, leave nothing but rounding.
    others = [i for i in measuring.live if i not in chosen]
    together = measuring.without(others)
    if not together.distance <= bound or not _reaches_all_rows(measuring, others, differing, bound):
        return None
    if unrouted_experts(differing, measuring.passes.routed):
        return None
    # Each weight and number alone moves the logits: none of them is unread.
    hyper = tuple(dict.fromkeys(name for i in chosen for name in levels.parts[i].hyper))
    rows = {} if levels.report is None else {row.key: row for row in levels.report.tensors}
    keys = tuple(key for i in chosen for key in levels.parts[i].keys if not _is_equal(rows, key))
    least = TIMES * together.distance
    moved = _least_effect(measuring, hyper, keys, max(bound, least))
    if moved is None:
        return None
    told = dict.fromkeys(_what_differs(levels.findings[i], levels.parts[i]) for i in chosen)
    cause = CAUSES[EQUAL_FUNCTION]
    tokens = sum(len(one.ids) for one in measuring.probes)
    alone = f"each alone moves them by {moved:.2g} or more"
    if moved == math.inf:
        alone = "none of them fits a pass alone"
    says = (
        f"{'; '.join(told)}: together they leave the function as it is, the logits of {tokens} "
        f"tokens are {together.distance:.3g} apart; {alone}"
    )
    where = tuple(dict.fromkeys(name for i in chosen for name in levels.findings[i].where))
    finding = Finding(
        cause.name, says, "tensor", cause.verdict, where, True, proof=unfitted_proof(tokens)
    )
    return tuple(chosen), finding, Touched(hyper, keys)


def _has_several(part: Touched) -> bool:
    """Return whether a part has more than one weight or hyperparameter, which could cancel."""
    return len(part.keys) + len(part.hyper) > 1


def _is_equal(rows: "Mapping[str, TensorDiff]", key: str) -> bool:
    """Return whether a weight has equal values on both sides."""
    return key in rows and rows[key].verdict in EQUAL


def _what_differs(finding: Finding, part: Touched) -> str:
    """Return what differs in words; a fault that the values seemed to show is left out."""
    if finding.cause == "stale_tensor":
        return f"{len(part.keys)} tensors have other values"
    return finding.says


def _reaches_all_rows(
    measuring: "PartMeasurement", others: Sequence[int], differing: "DifferingRows", bound: float
) -> bool:
    """Return whether passes agree that read every row of a table that differs.

    `others` are the findings whose parts are A's. Rows that no probe reads are read by one more.
    """
    ids = {i for one in measuring.probes for i in one.ids}
    left = [row for row in differing.rows.get(TABLES[0], ()) if row not in ids]
    length = max((len(one.ids) for one in measuring.probes), default=0)
    if any(row >= length for row in differing.rows.get(TABLES[1], ())):
        return False
    if not left:
        return True
    passes = measuring.passes
    probe = make_probe(left[:MOST_IDS], [passes.a.hyper, passes.b.hyper], "rows that differ")
    spent = passes.flops + 2 * passes.pass_flops(probe)
    if len(left) > MOST_IDS or probe.rows is not None or not measuring.has_room_for(spent):
        return False
    blend = passes.blend([measuring.parts[i] for i in others])
    return passes.run_from_first_difference(blend, probe).distance <= bound


def _least_effect(
    measuring: "PartMeasurement", hyper: Sequence[str], keys: Sequence[str], least: float
) -> float | None:
    """Return the smallest distance of the logits that one of these names of B alone makes in A.

    Relative L2. None as soon as one makes no more than `least`, or no pass is left for it.
    """
    passes, probe = measuring.passes, measuring.probes[0]
    every = tuple(dict.fromkeys((*passes.a.roles, *passes.b.roles)))
    numbers = tuple(dict.fromkeys((*passes.a.hyper, *passes.b.hyper)))
    smallest = math.inf
    for name in (*hyper, *keys):
        if not measuring.is_affordable():
            return None
        kept = Touched(
            tuple(one for one in numbers if one != name), tuple(one for one in every if one != name)
        )
        moved = passes.run_from_first_difference(passes.blend([kept]), probe).distance
        if not moved > least:
            return None
        smallest = min(smallest, moved)
    return smallest
