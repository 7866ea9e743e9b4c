"""Findings and evidence on one side's trace, from its comparison with the reference model.

The *places* of a finding are the points, operations and weights that it names.

A and B are the two models, runs or traces that are compared; a *side* is one of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.number_ranges import number_ranges
from aprfmt.causes import CAUSES, find_cause
from aprfmt.causes.forward.cut_points import deciding_key
from aprfmt.causes.forward.factor_formulas import says_with_formula
from aprfmt.diagnosis.next_commands import recording_sentence
from aprfmt.diagnosis.records import ALSO_EXPLAINS, CANNOT_TELL, Evidence
from aprfmt.diagnosis.trace_results import (
    AGREES,
    Divergence,
    Examined,
    Solution,
    sentence_without_places,
)
from aprfmt.inference.points import POINTS
from aprfmt.inference.replay.patched_model import MOVES
from aprfmt.inference.replay.shadow import ShadowPoint
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import cap_proof, unfitted_proof
from aprfmt.measure.tolerances import DISCRETE

AGREEING = 16  # one column in so many agrees at least, where columns that differ are named
COLUMN_RANGES = 3  # ranges of columns that a sentence names
SHOWN = 5  # operations or weights that a sentence names one by one


@dataclass
class JudgedTrace:
    """The findings and evidence about one side's trace; `label` is the side."""

    label: str
    examined: Examined
    findings: list[Finding] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)


def judge_trace(label: str, examined: Examined, ids: Sequence[int], model: str) -> JudgedTrace:
    """Return the findings and evidence of a trace's divergences, one finding per cause.

    Divergences with the same cause and values are one finding with all places. `label` is the
    side, `ids` and `model` go into the commands that are proposed where no cause was found.
    """
    found = JudgedTrace(label, examined)
    for divergence in examined.divergences:
        _add_finding(found.findings, _divergence_finding(label, divergence))
        found.evidence += _divergence_evidence(label, divergence, examined.before.views)
        if divergence.answer is None and divergence.likely != "nonfinite":
            step = recording_sentence(divergence.view, examined.before.views, ids, model)
            if step:
                found.evidence.append(Evidence("forward", step, (divergence.view.key,)))
    rows = _partial_rows_finding(label, examined)
    if rows is not None:
        _add_finding(found.findings, rows)
    for view in examined.before.views.values():
        if view.note:
            found.evidence.append(Evidence("forward", f"{view.key}: {view.note}", (view.key,)))
    found.evidence += _nonfinite_on_both_sides(label, examined)
    return found


def _nonfinite_on_both_sides(label: str, examined: Examined) -> Iterable[Evidence]:
    """Yield evidence that trace and reference have equal NaN or infinities at some points.

    That counts as no difference, but nothing could be measured at these points.
    """
    views = [
        view
        for view in examined.before.views.values()
        if view.nonfinite is not None and view.nonfinite.both and not view.nonfinite.alone
    ]
    if views:
        assert views[0].nonfinite is not None
        says = views[0].nonfinite.text("the model", label)
        yield Evidence(
            "forward", f"{views[0].key}: {says}; {len(views)} points are like this, the model's "
            f"values on {label}'s own inputs", tuple(view.key for view in views[:8]),
            float(views[0].nonfinite.both),
        )  # fmt: skip


def _divergence_places(divergence: Divergence) -> tuple[str, ...]:
    """Return what a divergence names: points, operations, weights, or those of its explanation.

    A point or weight of a change that is per layer is named in each of the change's layers.
    """
    answer = divergence.answer
    if answer is None:
        if divergence.likely:
            return divergence.inside or (divergence.view.key,)
        # A weight is no likelier than the operation that reads it.
        operations = _computing_operations(divergence.view)
        weights = () if divergence.reads else divergence.inside
        return (*operations, *weights) or (divergence.view.key,)
    if answer.layers is None or not answer.change.scoped:
        return answer.change.where
    layers = sorted(answer.layers)
    names = answer.change.where
    if any(split_key(name)[0] is not None for name in names):
        return tuple(name for name in names if split_key(name)[0] in (None, *layers))
    return tuple(f"L{layer}.{name}" for layer in layers for name in names)


def _computing_operations(view: ShadowPoint) -> tuple[str, ...]:
    """Return the distinct operations before a point that compute something, in order."""
    return tuple(dict.fromkeys(call.op for call in view.calls if call.op not in MOVES))


def _divergence_finding(label: str, divergence: Divergence) -> Finding:
    """Return the finding of a divergence, explained or not."""
    view, answer = divergence.view, divergence.answer
    if answer is None:
        return _unexplained_finding(label, divergence)
    change = answer.change
    return Finding(
        change.cause,
        says_with_formula(answer.patched.hp, change),
        CAUSES[change.cause].level if CAUSES[change.cause].level == "capture" else "forward",
        CAUSES[change.cause].verdict,
        _divergence_places(divergence),
        not divergence.doubtful and not divergence.faint,
        view.key,
        view.residual,
        answer.residual,
        view.key,
        change.values,
        label,
        tuple(other.change.cause for other in divergence.others),
        proof=cap_proof(answer.agreement.proof(change), change.most),
    )


def _names_or_ends(names: Sequence[str], what: str) -> str:
    """Return names as text; of more than SHOWN their number, the first and the last.

    `what` is what the names are of, such as "points".
    """
    if len(names) <= SHOWN:
        return ", ".join(names)
    return f"{len(names)} {what} from {names[0]} to {names[-1]}"


def _unexplained_finding(label: str, divergence: Divergence) -> Finding:
    """Return the finding of a divergence that no cause explains: where, and what may be wrong."""
    view, cause = divergence.view, divergence.likely
    if cause == "nonfinite":
        return _nonfinite_finding(label, view)
    # What was computed from what, and every weight that may be wrong.
    ops = _names_or_ends(_computing_operations(view), "operations")
    after = ", ".join(view.after) or "token ids"
    says = f"{view.key} is not what {ops} makes of this run's own {after}"
    if not ops:
        says = f"{view.key} is not what follows from this run's own {after}"
    says += _suspects_clause(divergence)
    says += _columns_clause(view) if cause in ("", "stale_tensor") else ""
    # A difference as small as quantization or rounding gets that verdict.
    if cause == "quantisation":
        says += ", by no more than quantizing these weights costs: the run had finer ones"
    elif view.residual is not None and view.residual <= view.whole_tolerance:
        cause, says = "rounding", says + ", by less than whole runs may differ"
    verdict = CAUSES[cause].verdict if cause else "bug"
    return Finding(
        cause,
        says,
        "forward",
        verdict,
        _divergence_places(divergence),
        False,
        view.key,
        view.residual,
        None,
        view.key,
        side=label,
        after=view.after,
    )


def _suspects_clause(divergence: Divergence) -> str:
    """Return the clause on what may be wrong at a point that no cause explains; or "".

    Where tokens of earlier passes agree, operations and weights are right for them: what a later
    pass reads of them is in question.
    """
    view, cause = divergence.view, divergence.likely
    if divergence.reads:
        return divergence.reads
    says, count = "", len(_computing_operations(view))
    if len(divergence.inside) + count > 1 and not cause:
        weights = _names_or_ends(divergence.inside, "weights") or "no weight"
        which = "any of these operations may be wrong, or what they read"
        says = f"; {which if count > 1 else 'it may be wrong, or what it reads'}: "
        says += f"{_routing_weights_text(view)}{weights}"
    if not cause and "linear" in _computing_operations(view):
        says += _rank_clause(view)
    return says


def _rank_clause(view: ShadowPoint) -> str:
    """Return the clause that what a product differs by is of low rank, as an adapter's is; or "".

    "" unless the rank is at most half the number of rows that differ: that of a few rows is low
    whatever differs, and all rows that an adapter reads differ. "" too where no more columns
    differ than the rank: then rows of a weight do.
    """
    if view.recorded is None or view.recorded.values.size != view.mine.size or view.axis != 0:
        return ""
    mine, theirs = (np.asarray(x, np.float64).reshape(len(x), -1) for x in (view.mine, view.theirs))
    apart, room = theirs - mine, view.tolerance * float(np.linalg.norm(theirs))
    if not np.isfinite(apart).all():
        return ""
    left = np.sqrt(np.cumsum(np.linalg.svd(apart, compute_uv=False)[::-1] ** 2))[::-1]
    rank = int(np.count_nonzero(left > room))
    columns = int(np.count_nonzero(np.linalg.norm(apart, axis=0) > room / theirs.shape[1] ** 0.5))
    rows = int(np.count_nonzero(np.linalg.norm(apart, axis=1) > room / len(theirs) ** 0.5))
    if not 2 <= rank <= rows // 2 or columns <= rank:
        return ""
    return (
        f"; what it differs by has rank {rank} in {len(apart)} rows: an adapter of this rank that "
        "is merged by another factor, or is not merged, gives such a difference"
    )


def _columns_clause(view: ShadowPoint) -> str:
    """Return the clause on the columns of a point that differ, where the others agree; or "".

    A column is one element of every token's row: values of several heads are counted through. It
    agrees if it is within its tolerance over all rows. "" where the columns that differ are in more
    than COLUMN_RANGES ranges, or fewer than one in AGREEING agree: that can be chance.
    """
    if view.recorded is None or view.point in DISCRETE or view.base or view.mine.ndim < 2:
        return ""
    mine, theirs = view.recorded.comparable_values(view.mine, view.axis)
    mine, theirs = (np.asarray(x, np.float64) for x in (mine, theirs))
    if mine.shape != theirs.shape or not np.isfinite(mine - theirs).all():
        return ""
    mine, theirs = (
        np.moveaxis(x, view.axis, 0).reshape(x.shape[view.axis], -1) for x in (mine, theirs)
    )
    apart, sizes = np.linalg.norm(theirs - mine, axis=0), np.linalg.norm(theirs, axis=0)
    wrong = np.flatnonzero(apart > AGREES * view.tolerance * np.maximum(sizes, sizes.mean()))
    width = len(apart)
    ranges = 1 + int(np.count_nonzero(np.diff(wrong) > 1))
    if not len(wrong) or ranges > COLUMN_RANGES or AGREEING * (width - len(wrong)) < width:
        return ""
    columns = "column" if len(wrong) == 1 else "columns"
    verb = "differs" if len(wrong) == 1 else "differ"
    return f"; only {columns} {number_ranges(wrong.tolist())} of {width} {verb}, the others agree"


def _routing_weights_text(view: ShadowPoint) -> str:
    """Return a clause that names the routing weights that a point needs and the trace lacks, or "".

    "" if the operations before the point weight no expert's output, and if the trace holds the
    weights: then these were used.
    """
    weighted = any(call.op == "add_weighted" for call in view.calls)
    name = f"{view.key.rpartition('.')[0]}.expert_w"
    if not weighted or name in view.after:
        return ""
    return f"the routing weights of the experts ({name}), "


def _nonfinite_finding(label: str, view: ShadowPoint) -> Finding:
    """Return the finding that the trace has other NaN or infinities than the operation gives.

    It is confirmed if all other values of the point are within the tolerance of one operation.
    """
    assert view.nonfinite is not None
    ops = ", ".join(_computing_operations(view)) or "no operation"
    after = ", ".join(view.after) or "token ids"
    says = (
        f"{view.key}: {view.nonfinite.text('the model', label)}, where {ops} was given "
        f"{label}'s own {after}"
    )
    rest = view.finite_distance
    sure = rest <= view.tolerance
    return Finding(
        "nonfinite",
        says,
        "forward",
        CAUSES["nonfinite"].verdict,
        (view.key,),
        sure,
        view.key,
        view.residual,
        rest if sure else None,
        f"{view.key}; after: its other values",
        {"nonfinite": {view.key: asdict(view.nonfinite)}},
        label,
        after=view.after,
    )


def _add_finding(found: list[Finding], finding: Finding) -> None:
    """Append a finding, or merge its places into one with the same cause and sentence."""
    for i, other in enumerate(found):
        same = (other.cause, other.confirmed) == (finding.cause, finding.confirmed)
        if same and _is_same_cause(other, finding):
            where = tuple(dict.fromkeys((*other.where, *finding.where)))
            found[i] = replace(other, where=where)
            return
    found.append(finding)


def _is_same_cause(a: Finding, b: Finding) -> bool:
    """Return whether two findings are one cause in several places."""
    row = find_cause(a.cause)
    return (row is not None and row.by_place) or (
        dict(a.values) == dict(b.values)
        and sentence_without_places(a.says) == sentence_without_places(b.says)
    )


def _is_elsewhere(answer: Solution, other: Solution) -> bool:
    """Return whether one of two solutions says that the values were taken at another point."""
    return any(one.change.is_of_recording for one in (answer, other))


def _deciding_clause(key: str, keys: Sequence[str]) -> str:
    """Return the end of a sentence on what more to capture, where two causes explain a point alike.

    `key` is the point that they explain, `keys` are the points of a pass in execution order.
    """
    later = deciding_key(key, keys) if key in keys else ""
    return f"{later or 'the probabilities that it samples from'} of the same run would"


def _divergence_evidence(
    label: str, divergence: Divergence, views: Mapping[str, ShadowPoint]
) -> Iterable[Evidence]:
    """Yield evidence on a divergence: its distance, and the changes that explain it.

    `views` are the points of the pass before any change, in execution order.
    """
    view, answer = divergence.view, divergence.answer
    # First that this operation, on its own input, gives another value.
    calls = ", ".join(dict.fromkeys(call.op for call in view.calls)) or f"what follows {view.base}"
    cause = divergence.likely if answer is None else answer.change.cause
    wrong = "wrong" if not cause or CAUSES[cause].verdict == "bug" else "where they part"
    if not divergence.faint:
        yield Evidence(
            "forward",
            f"{label}'s own input through the model's {calls} is {view.residual:.3g} from "
            f"{label}'s {view.key} (tolerance {view.tolerance:.3g}): this operation is {wrong}, "
            "not its input",
            (view.key,),
            view.residual,
        )
    # Then what explains it: nothing, or the change with what it leaves.
    if answer is None:
        tried = f", nor do {divergence.tried} passes with usual mistakes" * bool(divergence.tried)
        yield Evidence(
            "forward", f"nothing in the table makes {view.key} agree{tried}", (view.key,)
        )
        return
    keys = list(views)
    later = keys[keys.index(view.key) + 1 :] if view.key in views else keys
    compared = any(views[key].residual is not None for key in later)
    then = "every later point agrees" if compared else "no later point was recorded"
    then = then if answer.then is None else f"the next divergence is {answer.then.key}"
    layers = ", ".join(map(str, sorted(answer.layers or ())))
    scope = f" in layer {layers} alone" if layers else ""
    if divergence.faint:
        yield Evidence(
            "forward", f"{view.key} is no further off than this run's arithmetic makes it, but not "
            f"at random: with this applied - {answer.change.says} - it is {answer.residual:.3g} "
            "away, which rounding alone does not do; a run in float32 would show it",
            (view.key,), answer.residual,
        )  # fmt: skip
        return
    if divergence.doubtful:
        yield Evidence(
            "forward", f"{answer.change.cause} fits {view.key} loosely, and the same operations, "
            "or what they read, stay unexplained elsewhere", (view.key,),
        )  # fmt: skip
    yield Evidence(
        "forward",
        f"with this applied{scope} - {answer.change.says} - {view.key} is {answer.residual:.3g} "
        f"away; {then}",
        (view.key,),
        answer.residual,
    )
    # Other changes that explain it as well make the finding ambiguous.
    for other in divergence.others:
        yield Evidence(
            "forward",
            f"{other.change.cause} {ALSO_EXPLAINS} ({other.change.says}): {CANNOT_TELL}"
            + (f"; {_deciding_clause(view.key, keys)}" if _is_elsewhere(other, answer) else ""),
            (view.key,),
            other.residual,
        )


def _partial_rows_finding(label: str, examined: Examined) -> Finding | None:
    """Return the finding that a trace holds only some rows of the pass; None if it has all.

    It is confirmed where these rows agree, or explained divergences say why they do not.
    """
    views = [
        view
        for view in examined.before.views.values()
        if view.recorded is not None and view.recorded.rows is not None
        if POINTS[view.point].rows != "logits"
    ]
    if not views:
        return None
    seen = views[0].recorded
    assert seen is not None
    explained = [one.answer is not None for one in examined.divergences]
    agree = all(explained) if explained else all(not view.flagged for view in views)
    what = "these agree" if agree else "not all that differs in them is explained"
    return Finding(
        "capture_rows",
        f"{label} holds {seen.note} only; {what}",
        "capture",
        "same",
        tuple(view.key for view in views),
        agree,
        views[0].key,
        max((view.residual for view in views if view.residual is not None), default=None),
        None,
        "the rows both have",
        side=label,
        proof=unfitted_proof(len(views)) if agree else None,
    )


def with_side(finding: Finding, other: JudgedTrace) -> Finding:
    """Return a finding about one of two traces, its sentence with what the other trace has.

    The sentence also names the side. `other` is the trace that does not have this finding.
    """
    view = other.examined.before.views.get(finding.first)
    right = view is not None and view.residual is not None and not view.flagged
    says = f"{finding.side}: {finding.says}"
    if right and finding.verdict == "bug":
        says += f"; {other.label} has at {finding.first} what the model makes"
    return replace(finding, says=says)


def shared_findings(first: Sequence[Finding], second: Sequence[Finding]) -> list[Finding]:
    """Return the findings of `first` that `second` has too: no difference between the sides."""
    return [
        finding
        for finding in first
        if any(
            finding.cause == other.cause
            and dict(finding.values) == dict(other.values)
            and finding.where == other.where
            for other in second
        )
    ]
