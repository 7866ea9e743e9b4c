"""The level of the forward pass: what passes and recorded runs show of two sides.

Two models are compared by passes in which single findings are removed, each recorded side with what
its model makes of the recorded input, then both runs with each other. A and B are the two models,
runs or traces that are compared; a *side* is one of them. A *point* is a capture point.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.diagnosis import trace_pair
from aprfmt.diagnosis.records import ABSENT_POINTS
from aprfmt.diagnosis.sides import Side, open_side_trace
from aprfmt.diagnosis.trace_pair import point_rows
from aprfmt.diagnosis.zero_values import hidden_by_rounding
from aprfmt.errors import ArchError
from aprfmt.inference.capture import key_name, parse_key, point_instances
from aprfmt.inference.points import POINTS
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import OperationResiduals, ShadowPoint
from aprfmt.measure.trace_view import TraceLike, unread_arrays
from aprfmt.measure.traces import PointDiff, find_first_token
from aprfmt.measure.unread_arrays import unequal_arrays
from aprfmt.model import Model
from aprfmt.model.ledger import NotCompared

if TYPE_CHECKING:
    from aprfmt.diagnosis.diagnosis_order import DiagnosisRun
    from aprfmt.diagnosis.forward import JudgedTrace


@np.errstate(all="ignore")  # NaN and infinities are reported with their place instead
def compare_passes(run: "DiagnosisRun") -> None:
    """Compare the forward passes and add findings and evidence to the diagnosis.

    Two models are compared by passes in which single findings are removed, then each recorded
    side with its model, then both runs. Stops where a side gives the diagnosis a reason to end.
    """
    assert run.ids is not None
    dtype = run.pass_dtype()
    if run.pair is not None:
        _measure_findings(run, dtype)
    for side in (run.a, run.b):
        if side.kind != "model":
            _examine_side(run, side, dtype)
        if run.levels.reason:
            return
    if run.traces:
        compare_runs(run)
    conclude(run)


def _measure_findings(run: "DiagnosisRun", dtype: str) -> None:
    """Measure by forward passes how much each finding about the files changes the logits.

    If a difference of the logits remains, B's own pass is examined with A as the reference.
    Raises ArchError where A has a tensor of another shape than its hyperparameters give.
    """
    assert run.pair is not None and run.ids is not None
    for key, has, wanted in run.pair.a.resolution.coverage.misshapen[:1]:
        raise ArchError(f"A cannot be run: {key} has shape {list(has)}, not {list(wanted)}")
    chosen = run.chosen or run.pair.probe_given_ids(run.ids)
    rest = run.pair.measure_findings(chosen, dtype, run.memory, run.reporter)
    _store_points(run, list(run.pair.points.values()))
    if rest:
        run.add_evidence(
            "forward",
            f"what was found does not explain all: the logits still differ by {rest:.3g}",
            number=rest,
        )
        _examine_side(run, run.b, dtype, against=run.a.model)


def _examine_side(
    run: "DiagnosisRun", side: Side, dtype: str, against: Model | None = None
) -> None:
    """Compare each recorded value of a side with what the model makes of the recorded input.

    The result is stored in `run.judged`; evidence and what was checked or not is added to
    `run.levels`. `against` is the reference model; None means the one that the side ran on.
    """
    # The reference model, and the side's trace (run now if it is not saved).
    model = against or run.model_of(side)
    assert run.ids is not None
    if model is None:
        run.levels.not_checked.append(
            f"{side.label}: shadowing and confirmation need the weights; give --model"
        )
        return
    trace = run.traces.get(side.label)
    if trace is None:
        found_trace = open_side_trace(side, run.ids, run.stack, model, memory=run.memory)
        trace = run.store_trace(side, found_trace)
    if run.levels.reason:
        return
    # Each operation is judged on the side's own input.
    from aprfmt.diagnosis.forward import judge_trace
    from aprfmt.diagnosis.wrong_operations import examine  # with every cause of a pass

    patched = PatchedModel.unpatched(model, run.ids, dtype, run.memory)
    served = next((one.adapter for one in (run.a, run.b) if one.model is model), None)
    patched = replace(patched, adapter=served)
    recorded = RecordedTrace(trace, run.ids, {})
    found = judge_trace(side.label, examine(patched, recorded), run.ids, str(model.path))
    patched.weights.close()
    run.judged[side.label] = found
    run.levels.evidence += found.evidence
    # Say how many points were judged, and what could not be.
    count = found.examined.before.compared_count
    if count:
        run.levels.checked.append(
            f"{side.label}: {count} points on its own inputs through the operations of "
            f"{model.path.name} (numpy {dtype})"
        )
    else:
        run.levels.not_checked.append(
            f"{side.label}: no point of it can be compared with {model.path.name}"
        )
    views = found.examined.before.views
    run.levels.not_checked += hidden_by_rounding(
        side.label,
        [(view.tolerance, view.recorded.dtype) for view in views.values()
         if view.recorded is not None and view.residual is not None],
    )  # fmt: skip
    run.levels.left = (*run.levels.left, *_unfitting_arrays(trace, views))
    left = [key for key, view in views.items() if view.recorded is None]
    if left:
        run.levels.not_checked.append(
            f"{side.label}: {len(left)} {ABSENT_POINTS}: {', '.join(left[:4])}"
            f"{', ...' if len(left) > 4 else ''}{_unseen_end_clause(views)}"
        )
    run.levels.left = (*run.levels.left, *_unseen_layers(found))
    if found.examined.unfinished:
        run.levels.not_checked.append(f"{side.label}: divergences beyond the first ones")


def compare_runs(run: "DiagnosisRun") -> None:
    """Compare both sides' recorded values at every point; run models where needed."""
    # A side that is a model is run to record the points that the other has.
    model = run.model_of(run.a)
    moe = model is not None and bool(model.hyper["n_experts"])
    for side, other in ((run.a, run.b), (run.b, run.a)):
        if side.label in run.traces or side.model is None:
            continue
        known = point_instances(side.model.spec.block, side.model.hyper, side.model.roles)
        there = run.traces.get(other.label)
        wanted = [key for key in (known if there is None else there.records) if key in known]
        run.store_trace(
            side, open_side_trace(side, run.ids, run.stack, None, wanted or ["logits"], run.memory)
        )
    if len(run.traces) < 2:
        return
    from aprfmt.diagnosis.statistics_evidence import differing_statistics

    a, b = run.traces["A"], run.traces["B"]
    # The reference is A, or the model if A is a trace and B is not.
    reference = "B" if run.a.kind == "trace" and run.b.kind != "trace" else "A"
    # Every shared point, and the first token that differs.
    pairs = trace_pair.compare_points(a, b, moe, reference)
    token = find_first_token(pairs, *((b, a) if reference == "A" else (a, b)))
    if token is not None:
        run.first = token
        run.add_evidence("forward", token.text, token.key, number=token.rel_l2)
    _store_points(run, pairs)
    run.levels.evidence += differing_statistics(a, b, "MODEL" if model is None else str(model.path))
    # What was compared, and what could not be.
    compared = sum(pair.rel_l2 is not None for pair in pairs)
    run.levels.checked.append(f"both runs with each other: {compared} points")
    run.levels.reason = run.levels.reason or trace_pair.no_common_row_sentence(pairs, a, b)
    for pair in pairs:
        if pair.why:
            run.levels.not_checked.append(f"{pair.key}: {pair.why}")
    if not run.judged:
        run.levels.not_checked += trace_pair.joined_stage_sentences(a, b)
        run.levels.not_checked += hidden_by_rounding(
            "A and B", trace_pair.point_tolerances(pairs, a, b)
        )
    # Without a model only the traces' own signatures suggest a cause.
    if run.a.kind == run.b.kind == "trace":
        run.rows_apart = trace_pair.partial_rows_finding(pairs)
    if not run.judged and not run.has_two_models():
        finding = trace_pair.signature_finding(pairs, a, b)
        if finding is not None:
            run.levels.findings.append(finding)
            if not finding.confirmed:
                run.levels.not_checked.append(
                    "confirmation by recomputation: the traces do not hold the weights; give "
                    "--model"
                )
    _compare_unmapped_arrays(run, a, b)


def _compare_unmapped_arrays(run: "DiagnosisRun", a: TraceLike, b: TraceLike) -> None:
    """Add the finding that arrays of two dumps differ that are no capture point.

    Where a capture point differs beyond rounding they may be its consequence: then they are
    evidence.
    """
    from aprfmt.diagnosis.unmapped_arrays import unmapped_finding

    alike = sum(row.state == "equal" for row in run.unread_arrays())
    found = unmapped_finding(unequal_arrays(a, b), alike)
    if found is None:
        return
    departs = any(one.verdict == "bug" for one in run.levels.findings)
    if departs or any(pair.beyond for pair in run.pairs):
        run.add_evidence("capture", found.says, *found.where, number=found.residual_before)
    else:
        run.levels.findings.append(found)


def _store_points(run: "DiagnosisRun", pairs: Sequence[PointDiff]) -> None:
    """Store how each capture point compares.

    Add evidence for NaN and infinities on both sides.
    """
    run.pairs = pairs
    run.levels.evidence += trace_pair.nonfinite_on_both_sides(pairs)
    run.points = point_rows(pairs, {k: v.examined.before for k, v in run.judged.items()})


def conclude(run: "DiagnosisRun") -> None:
    """Add the findings that only one side has; if there are none, judge what rounding explains.

    What both sides do alike against the model is evidence, and no difference between them.
    """
    from aprfmt.causes.forward.dumped_ranks import differing_ranks, differing_requests
    from aprfmt.diagnosis import conclusion
    from aprfmt.diagnosis.forward import shared_findings, with_side

    levels = run.levels
    # What both sides do alike against the model is no difference between them.
    a, b = (run.judged[x].findings if x in run.judged else [] for x in ("A", "B"))
    shared = shared_findings(a, b)
    for finding in shared:
        run.add_evidence("forward", f"both sides depart from the model alike: {finding.says}",
                 *finding.where[:4])  # fmt: skip
    for finding in (*a, *b):
        if finding not in shared and not any(
            finding.cause == other.cause and finding.where == other.where for other in shared
        ):
            other_side = run.judged.get("B" if finding.side == "A" else "A")
            told = other_side is not None and finding.side and finding.verdict != "same"
            levels.findings.append(
                with_side(finding, other_side) if other_side is not None and told else finding
            )
    # Findings about the recording itself: ranks, requests, rows, large gains.
    unlike = [*differing_ranks(run.traces), *differing_requests(run.traces)]
    levels.findings += unlike
    apart = run.rows_apart
    if apart is not None and all(finding.cause != apart.cause for finding in levels.findings):
        levels.findings.append(apart)
    levels.evidence += conclusion.largest_gains(run.points)
    if run.judged and run.pair is None and levels.findings and not unlike:
        passes = [found.examined.after for found in run.judged.values()]
        levels.complete = not any(made.flagged for made in passes)
    # NaN on one side is a bug even where no operation was found wrong.
    broken = trace_pair.nonfinite_finding(run.pairs)
    if broken is not None and not any(row.verdict == "bug" for row in levels.findings):
        levels.findings.append(broken)
    if any(finding.verdict in ("bug", "precision") for finding in levels.findings):
        return
    # A side of which nothing was compared agrees with nothing.
    levels.reason = levels.reason or _unread_side_reason(run)
    if levels.reason:
        return
    # Without any bug or precision finding, judge whether the rest is rounding.
    guess = next((made.examined.supposed for made in run.judged.values()), "")
    short: dict[str, str] = {}
    residuals = OperationResiduals()
    for judged in run.judged.values():
        short |= judged.examined.short
        for view in judged.examined.after.views.values():
            residuals.add(view)
    rounded = conclusion.rounding_finding(
        run.points, levels.findings, levels.evidence, residuals, guess, short
    )
    if rounded is not None:
        levels.findings.append(rounded)


def _unread_side_reason(run: "DiagnosisRun") -> str:
    """Return a sentence if no value of one side was compared with anything, else ""."""
    if any(pair.rel_l2 is not None for pair in run.pairs):
        return ""
    silent = [
        label
        for label in run.traces
        if label not in run.judged or not run.judged[label].examined.before.compared_count
    ]
    if not silent or len(silent) == len(run.traces) > 1:
        return ""
    rest = unread_clause(run.traces[silent[0]])
    return f"no point of {silent[0]} could be compared{rest}"


def incomparable_reason(run: "DiagnosisRun") -> str:
    """Return why nothing could be compared; "" if something was."""
    if run.levels.findings or run.levels.reason:
        return ""
    if run.traces and not any(
        row.direct is not None or row.shadow is not None for row in run.points
    ):
        if any(one.state == "unequal" for one in run.unread_arrays()):
            return ""  # a difference is known, though not at a point
        rest = unread_clause(*run.traces.values())
        return f"no point of the two has values on the same rows{rest}"
    return ""


def _unfitting_arrays(trace: TraceLike, views: Mapping[str, ShadowPoint]) -> Iterator[NotCompared]:
    """Yield a NotCompared for each recorded point whose rows have another size than the model's.

    Nothing was compared of them, so that they are neither right nor wrong.
    """
    for key, view in views.items():
        record = trace.records.get(key)
        row = POINTS[view.point].rows
        if view.recorded is not None or record is None or row in ("scores", "logits"):
            continue
        count = len(record.positions or ()) or (record.shape[0] if record.shape else 0)
        mine = view.mine.size // max(1, view.mine.shape[0] if view.mine.ndim else 1)
        if count and math.prod(record.shape) != count * mine:
            why = f"its rows have {math.prod(record.shape) / count:g} values, the model's {mine}"
            yield NotCompared("captured array", key, "unreadable", why)


def _unseen_end_clause(views: Mapping[str, ShadowPoint]) -> str:
    """Return a clause on what the pass does after a trace's last compared point, or "".

    What lies between two compared points is judged with the second one.
    """
    keys = [*views]
    last = max((i for i, key in enumerate(keys) if views[key].residual is not None), default=None)
    if last is None or last == len(keys) - 1:
        return ""
    return f"; nothing after {keys[last]} was compared"


def _unseen_layers(judged: "JudgedTrace") -> Iterator[NotCompared]:
    """Yield a NotCompared for the last point of a series that holds the inputs of layers.

    What was taken for a layer's output is its input, and no later value is recorded: nothing of
    this last layer was compared.
    """
    after = judged.examined.after.views
    keys = [*after]
    seen = max((i for i, key in enumerate(keys) if after[key].residual is not None), default=-1)
    for finding in judged.findings:
        taken = [key for key in finding.where if key in after and parse_key(key)[1] >= 0]
        if finding.cause != "capture_point" or not taken:
            continue
        last = max(taken, key=keys.index)
        view, layer = judged.examined.before.views[last], parse_key(last)[1]
        entering = "embd" if layer == 0 else key_name("out", layer - 1)
        there = after.get(entering)
        if there is None or seen > keys.index(entering) or there.mine.size != view.theirs.size:
            continue
        if view.distance(there.mine.reshape(view.mine.shape)) <= view.whole_tolerance:
            why = f"it holds {entering}, and nothing recorded is computed in layer {layer}"
            yield NotCompared("captured array", last, "unreadable", why)


def unread_clause(*traces: TraceLike) -> str:
    """Return the end of a sentence that lists arrays of traces that are no capture point, or ""."""
    left = [f"{one.name}: {one.why}" for one in unread_arrays(*traces)]
    return f"; {'; '.join(left[:3])}" + ", ..." * (len(left) > 3) if left else ""
