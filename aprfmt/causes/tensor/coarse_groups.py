"""Groups of a quantized copy with a scale many times too large, and runs that are far off.

A *group* is the elements that share a scale. Every error is within the copy's own step then, so
that only the other file's values show it: they span far fewer steps than in all other groups. A and
B are the two files that are compared; a *side* is one of them, or its tensor.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from aprfmt.causes.tensor.differing_pair import DifferingPair
from aprfmt.causes.tensor.guess import PairHypothesis
from aprfmt.causes.tensor.packed_copies import packed_copies
from aprfmt.causes.tensor.proof import accused_proof, make_finding
from aprfmt.measure.bounds import fit_errors
from aprfmt.measure.coarse_steps import WideSteps, wide_steps_of_cells
from aprfmt.measure.findings import Finding
from aprfmt.measure.tensors import block_copy, block_wide_steps, far_blocks

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array


def explain_coarse_groups(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding of groups whose scale is far too large, though errors are within a step."""
    if case.numbers is not None or case.a.shape != case.b.shape or len(case.a.shape) < 2:
        return
    if case.before.nonfinite is not None:
        return  # scales that are no numbers are no copy's
    a, b = case.a.side, case.b.side
    coarse = block_copy(a, b)
    for copied, whose in ((b, "B's"), (a, "A's")):
        if coarse is copied or a.encoding == b.encoding:
            found = block_wide_steps(a, b, copied)
            if found is not None:
                yield _wide_steps_finding(case, whose, found)
                return
    if coarse is not None:
        return
    for copy in packed_copies(case):
        if not (copy.finite and fit_errors(copy.x, copy.y, copy.lattice).how):
            continue
        rows, columns = copy.y.shape
        tall, wide = copy.grouping.rows or rows, copy.grouping.columns or columns
        found = wide_steps_of_cells(copy.x, copy.lattice.step, tall, wide)
        if found is not None:
            yield _wide_steps_finding(case, copy.whose, found, copy.rows)


def explain_far_runs(case: DifferingPair) -> Iterator[Finding]:
    """Yield the finding of blocks that are far worse than encoding the source makes them.

    All errors are within a step there, so that a bound in the copy's own steps is met. Where it is
    not met, later rows say more: what stands in the place of the scales, say.
    """
    if case.numbers is not None or case.a.shape != case.b.shape or len(case.a.shape) < 2:
        return
    if case.before.nonfinite is not None or case.a.encoding == case.b.encoding:
        return
    copies = list(packed_copies(case))
    if copies and not any(copy.finite and copy.fit().how for copy in copies):
        return
    found = far_blocks(case.a.side, case.b.side)
    if found is not None:
        says = "a few blocks are far worse than all others: damage or an edit, no rounding"
        before = case.before.relative
        yield make_finding("bit_rot", (case.key,), (says, found.text()), before, None, None)


def _wide_steps_finding(
    case: DifferingPair, whose: str, found: WideSteps, rows: "Array | None" = None
) -> Finding:
    """Return the finding that some groups of a side have scales far too large for their values.

    `whose` names the side, `rows` are the numbers of the rows that were looked at, None for all.
    """
    return make_finding(
        "quant_scale",
        (case.key,),
        (
            f"{whose} scales are far too large for the values that they hold, which were rounded "
            "to steps as wide",
            found.text(rows),
        ),
        case.before.relative,
        None,
        accused_proof(case.before.changed),
    )


HYPOTHESES = (
    PairHypothesis(
        ("quant_scale",),
        explain_coarse_groups,
        255,
        "before a bound in the copy's own steps, which steps too wide would meet",
    ),
    PairHypothesis(
        ("bit_rot",),
        explain_far_runs,
        256,
        "before a bound in the copy's own steps, which these values meet",
        facts=("two encodings", "blocks"),
    ),
)
