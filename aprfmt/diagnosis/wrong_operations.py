"""Compares a trace with the reference: finds each wrong operation in order, and its cause."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.registry import offered_items
from aprfmt.causes.forward import table
from aprfmt.causes.forward.capture_point import find_other_capture_point
from aprfmt.causes.forward.kv_cache import find_unwritten_rows
from aprfmt.causes.forward.mismatch import Change, Layers, Mismatch, computed_layer, spanned_layers
from aprfmt.causes.forward.shifted_series import find_shifted_series
from aprfmt.diagnosis.accumulated_rounding import (
    explain_by_arithmetic,
    first_directed_point,
    points_cut_to_16_bits,
    points_in_16_bits,
    with_16_bit_points,
    with_recorded_arithmetic,
)
from aprfmt.diagnosis.faint_epsilon import with_narrow_norms
from aprfmt.diagnosis.pass_boundaries import later_pass_clause
from aprfmt.diagnosis.run_arithmetic import TraceInArithmetic, arithmetic_of_products
from aprfmt.diagnosis.search import CLEAR, Search, SearchBudget, SearchStep, bound_with, is_wide
from aprfmt.diagnosis.trace_results import (
    Agreement,
    Divergence,
    Examined,
    Solution,
    layer_scopes,
    measure_agreement,
    sentence_without_places,
    weights_inside,
)
from aprfmt.inference.replay.patched_model import MOVES, PatchedModel
from aprfmt.inference.replay.recorded_trace import RecordedTrace
from aprfmt.inference.replay.shadow import ShadowPass, ShadowPoint, record_points, run_shadow_pass
from aprfmt.measure.bounds import NMSE, NMSE_SLACK
from aprfmt.tensors.norms import exact_norm

Array = NDArray[Any]
LIMIT = 24  # divergences examined in one trace
# An answer is preferred to another only if its residual is smaller by this factor.
CLOSER = 10.0
UNLIKE = 0.3  # cosine below which two products have nothing to do with one another
FEW_ROWS = 4  # below so many rows that is chance
WEIGHTED = ("linear", "router", "embed")  # operations that read a weight
RECHECKS = 16  # passes that judge earlier answers again
FEW_LAYERS = 8  # layers before one point, in each of which an earlier explanation is undone
_COMMON = {"add", "linear", *MOVES}  # operations of nearly every point
LayerChanges = list[tuple[Change, Layers]]
NEAR = 4  # usual mistakes that are tried together with rounding
NEARLY = 0.1  # such a mistake leaves this share of the difference at most
FAINT = 0.8  # a mistake inside the rounding leaves this share of the difference at most


def examine(patched: PatchedModel, recorded: RecordedTrace) -> Examined:
    """Return the divergences of a trace, each point judged on the trace's own recorded input.

    In order of execution: the first wrong operation is explained by a change of the reference,
    the change is applied, and the search continues with the next one.
    """
    values = record_points(patched)
    for key, value in values.items():
        recorded.shapes.setdefault(key, value.shape)
    recorded, found = _read_in_its_arithmetic(patched, recorded)
    before = found
    # Explain the first divergence, apply its change, and go on with the next one.
    guessed = ""
    start = (patched, recorded)
    known: set[str] = set()  # diverging points without an explanation
    divergences: list[Divergence] = []
    tried: dict[str, int] = {}
    budget = SearchBudget()
    while True:
        view = next((view for view in found.flagged if view.key not in known), None)
        if view is None or len(divergences) >= LIMIT:
            break
        if view.one_sided_nonfinite:  # NaN and infinities cannot confirm a hypothesis
            known.add(view.key)
            divergences.append(Divergence(view, None, (), "nonfinite"))
            continue
        case = Mismatch(patched, recorded, view, found, values)
        undone = _undone_in_layers(case, divergences, start, known) if divergences else None
        if undone is not None:
            divergences, patched, recorded, found = undone
            values = record_points(patched)
            continue
        shifted = None if divergences else find_shifted_series(case)
        if shifted is not None:
            recorded = shifted.recorded
            found = run_shadow_pass(patched, recorded)
            start = (start[0], recorded)
            then = found.first
            answer = Solution(
                shifted.change, None, 0.0, then, math.inf, patched, recorded, Agreement()
            )
            divergences.append(Divergence(view, answer))
            continue
        unwritten = find_unwritten_rows(case)
        elsewhere = unwritten or find_other_capture_point(case)
        if elsewhere is not None:
            recorded = case.without(elsewhere.drop)
            found = run_shadow_pass(patched, recorded)
            then = next((view for view in found.flagged if view.key not in known), None)
            shown = Agreement() if unwritten is None else measure_agreement(case, found, unwritten)
            answer = Solution(elsewhere, None, 0.0, then, math.inf, patched, recorded, shown)
            divergences.append(Divergence(view, answer))
            continue
        # Numbers are improved until they fit only where nothing that has none explains the point.
        answers = list(_answers_of_table(replace(case, fitting=False), known)) or list(
            _answers_of_table(case, known)
        )
        several = is_wide(case) and len(spanned_layers(case)) > 1
        undecided = _is_judged_by_no_later_point(case, answers)
        if several or undecided or all(answer.change.general for answer in answers):
            search = Search(case, budget)
            together = _search_usual_mistakes(case, search, answers, known)
            if together:
                divergences += together
                patched, recorded = _last_pass(together)
                values = record_points(patched)
                found = run_shadow_pass(patched, recorded)
                continue
            tried[view.key] = search.tried
            guess = (
                None
                if answers
                else explain_by_arithmetic(
                    patched, recorded, found, search.smallest_remaining_share
                )
            )
            mixed = None if answers or guess else find_faint_mistakes(case, search)
            if mixed is not None:
                divergence, patched, recorded, guessed = mixed
                divergences.append(divergence)
                values = record_points(patched)
                found = run_shadow_pass(patched, recorded)
                continue
            if guess is not None:
                recorded, guessed = guess
                found = run_shadow_pass(patched, recorded)
                before = before if divergences else found
                start = (start[0], recorded.ignoring(start[1].without))
                continue
        if not answers:
            likely = _likely_cause(case)
            known |= _same_cause_divergences(case, likely)
            inside, reads = weights_inside(case), later_pass_clause(case)
            count = tried.get(view.key, 0)
            divergences.append(Divergence(view, None, (), likely, inside, count, reads=reads))
            continue
        here = computed_layer(case)
        best = _best_answer(answers, here)
        narrower = _without_layer(divergences, best.change, here, patched.n_layers)
        if narrower is not None:
            divergences = narrower
            patched, recorded = _apply_changes(*start, _chosen_changes(divergences))
        else:
            divergences.append(Divergence(view, best, _equally_good(answers, best, view)))
            patched, recorded = best.patched, best.recorded
        values = record_points(patched)
        found = run_shadow_pass(patched, recorded)
    # A small difference with a direction is a fault too; then recheck all answers.
    cut = {} if divergences or guessed else points_cut_to_16_bits(patched, recorded, found)
    if not divergences and not guessed and not cut:
        divergences = find_directed_mistake(patched, recorded, found, values)
    divergences = recheck_answers(divergences, *start, found)
    short = {} if divergences or guessed else points_in_16_bits(patched, recorded, found)
    short = {**short, **cut}
    return Examined(tuple(divergences), before, found, view is not None, guessed, short)


def _read_in_its_arithmetic(
    patched: PatchedModel, recorded: RecordedTrace
) -> tuple[RecordedTrace, ShadowPass]:
    """Return (trace, its shadow pass), with the trace judged in the arithmetic its values show.

    The given trace is returned where its recorded dtype is right and no tolerance is measured.
    """
    found = run_shadow_pass(patched, recorded)
    coarser = arithmetic_of_products(found)
    if coarser:
        recorded = recorded.with_trace(TraceInArithmetic(recorded.trace, coarser))
        found = run_shadow_pass(patched, recorded)
    grown = with_recorded_arithmetic(patched, recorded, found)
    grown = with_narrow_norms(patched, with_16_bit_points(grown, found), found)
    return (recorded, found) if grown is recorded else (grown, run_shadow_pass(patched, grown))


def _is_judged_by_no_later_point(case: Mismatch, answers: Sequence[Solution]) -> bool:
    """Return whether the values may have been taken elsewhere, and no later point would show it.

    An engine that leaves out an operation and a recorder that reads the value before it then give
    the same dump. So the usual mistakes are tried as well.
    """
    if not any(answer.change.is_of_recording for answer in answers):
        return False
    keys = list(case.found.views)
    later = keys[keys.index(case.view.key) + 1 :]
    return all(case.found.views[key].residual is None for key in later)


def _undone_in_layers(
    case: Mismatch,
    divergences: Sequence[Divergence],
    start: tuple[PatchedModel, RecordedTrace],
    known: Collection[str],
) -> tuple[list[Divergence], PatchedModel, RecordedTrace, ShadowPass] | None:
    """Return what is left of the divergences if an earlier change is taken back in some layers.

    A change that explains one layer is applied to later layers too, though these may not need it.
    So before a new cause is looked for at the disagreeing point of `case`, each earlier change is
    removed from the layers that the point is computed from, and the pass is run again. The result
    is (divergences with the narrowed change, patched model, trace, its pass) of the first removal
    after which this point and all points before it agree. None if there is no such removal.
    `start` is the model and the trace without any change, `known` are keys of divergences that
    have no explanation.
    """
    spanned, key = spanned_layers(case), case.view.key
    for kept in _narrower_explanations(divergences, spanned, case.patched.n_layers):
        patched, recorded = _apply_changes(*start, _chosen_changes(kept))
        found = run_shadow_pass(patched, recorded)
        view = found.views.get(key)
        if view is None or view.residual is None or view.flagged:
            continue
        before = list(found.views)[: list(found.views).index(key)]
        if not any(found.views[other].flagged for other in before if other not in known):
            return kept, patched, recorded, found
    return None


def _narrower_explanations(
    divergences: Sequence[Divergence], spanned: Layers, n_layers: int
) -> Iterator[list[Divergence]]:
    """Yield the divergences with explanations removed from layers, each time in another way.

    One explanation, then all, is removed from all `spanned` layers; then from each of them where
    they are few.
    """
    layers = sorted(spanned or ())
    single = layers if len(layers) <= FEW_LAYERS else ()
    every = tuple(range(len(divergences)))
    for place in dict.fromkeys((frozenset(layers), *(frozenset({layer}) for layer in single))):
        for chosen in dict.fromkeys((*((at,) for at in every), every)):
            kept = [
                _outside_layers(divergence, place, n_layers) if at in chosen else divergence
                for at, divergence in enumerate(divergences)
            ]
            if any(new is not old for new, old in zip(kept, divergences, strict=True)):
                yield kept


def _outside_layers(divergence: Divergence, layers: frozenset[int], n_layers: int) -> Divergence:
    """Return the divergence with its explanation removed from `layers`.

    The divergence itself where the explanation is not one of single layers, is in none of these,
    or would be left in none of the model's `n_layers`.
    """
    answer = divergence.answer
    if answer is None or not answer.change.scoped:
        return divergence
    own = frozenset(range(n_layers)) if answer.layers is None else answer.layers
    if not own & layers or own <= layers:
        return divergence
    return replace(divergence, answer=replace(answer, layers=own - layers))


def _without_layer(
    divergences: Sequence[Divergence], change: Change, layer: int, n_layers: int
) -> list[Divergence] | None:
    """Return the divergences with an earlier explanation removed from `layer`; None if none was.

    It is removed where `change` gives the same quantity another value: the explanation was found
    in another layer and does not hold in this one.
    """
    for at, earlier in enumerate(divergences):
        answer = earlier.answer
        if answer is None or _quantity_key(answer.change) != _quantity_key(change):
            continue
        kept = _outside_layers(earlier, frozenset({layer}), n_layers)
        if kept is not earlier:
            return [*divergences[:at], kept, *divergences[at + 1 :]]
    return None


def _quantity_key(change: Change) -> tuple[str, tuple[str, ...], str]:
    """Return a key that is equal for changes of the same quantity to different values.

    It is (cause, places, sentence without the numbers).
    """
    return change.cause, change.where, sentence_without_places(change.says)


def _equally_good(
    answers: Sequence[Solution], best: Solution, view: ShadowPoint
) -> tuple[Solution, ...]:
    """Return the solutions of other causes, or by other rules, that explain as well as `best`.

    Two solutions of one cause follow two rules if their values have other names. The places where a
    change acts are no rule: the run may not show some of them. Next to a solution
    about rope's scaling a shift of all positions is none of its own: it turns queries and keys
    alike, so all that it changes is the length by which the scaling takes its factors.
    """
    return _one_of_each_cause(
        tuple(
            answer
            for answer in answers
            if _rule_key(answer.change) != _rule_key(best.change)
            and answer.reach == best.reach
            and answer.change.general == best.change.general
            and answer.change.of_values == best.change.of_values
            and answer.residual <= CLOSER * best.residual + view.tolerance / CLOSER
            and not (best.change.cause == "rope_scaling" and _shifts_all_alike(answer.change))
        )
    )


def _shifts_all_alike(change: Change) -> bool:
    """Return whether a change gives positions that are all shifted by one number."""
    return change.cause == "positions" and change.values.get("offset") is not None


def _rule_key(change: Change) -> tuple[str, frozenset[str]]:
    """Return (cause, names of its values but for places): what a change states of any place."""
    return change.cause, frozenset(change.values) - {"behind"}


def _search_usual_mistakes(
    case: Mismatch, search: Search, answers: list[Solution], known: set[str]
) -> list[Divergence]:
    """Return a divergence for each of several usual mistakes needed together, or [].

    Single mistakes that explain the point are appended to `answers` instead, and [] is returned.
    `known` are keys of divergences without an explanation.
    """
    # Single mistakes are answers like those of the table.
    order = {key: i for i, key in enumerate(case.found.views)}
    here = order[case.view.key]
    found = search.run()
    for one in found:
        if len(one.steps) == 1:
            step = one.steps[0]
            answer = _furthest_in_scope(case, [step], one.residual, known, order, here)
            if answer is not None:
                answers.append(answer)
    # Several together, only where no single one explains the point.
    joined = next((one for one in found if len(one.steps) > 1), None)
    if joined is None or answers:
        return []
    needed = search.necessary_steps(joined)
    steps = [step for step, _ in needed]
    answer = _furthest_in_scope(case, steps, joined.residual, known, order, here)
    for at, step in enumerate(list(steps)):  # others of its cause may agree further
        reach = -math.inf if answer is None else answer.reach
        for other in search.same_cause_steps(steps, step) if reach < math.inf else ():
            tried = [*steps[:at], other, *steps[at + 1 :]]
            further = _furthest_in_scope(case, tried, joined.residual, known, order, here)
            if further is not None and further.reach > reach:
                answer, steps, reach = further, tried, further.reach
                needed[at] = (other, needed[at][1])
    if answer is None:
        return []
    # One divergence for each of the joined changes, with what else could be there.
    made = []
    for step, without in needed:
        layers = step.layers if answer.layers is None else answer.layers
        own = replace(answer, change=step.change, layers=layers)
        others = tuple(
            replace(answer, change=other.change, layers=other.layers)
            for other in search.other_cause_steps(steps, step)
        )
        made.append(Divergence(replace(case.view, residual=without), own, others, joined=True))
    return made


def _furthest_in_scope(
    case: Mismatch,
    steps: Sequence[SearchStep],
    residual: float,
    known: set[str],
    order: Mapping[str, int],
    here: int,
) -> Solution | None:
    """Return a Solution of these steps in the layers in which the pass agrees furthest, or None.

    None if a point up to the divergence still disagrees. `residual` is the Solution's, `known` are
    keys of divergences to ignore, `order` the number of each point in the pass, `here` that of the
    divergence.
    """
    # Within one layer each set of layers may be right; else the steps' own count.
    scopes: list[Layers | None] = [None]
    if len(spanned_layers(case)) <= 1 and computed_layer(case) >= 0:
        scopes = list(layer_scopes(case, replace(steps[0].change, scoped=True)))
    best: Solution | None = None
    scoped = any(step.change.scoped for step in steps)
    # Apply all steps, and see up to which point the pass agrees.
    for scope in scopes:
        patched, recorded = case.patched, case.recorded
        layers: Layers = steps[0].layers
        for step in steps:
            layers = scope if scope is not None and step.change.scoped else step.layers
            patched = step.change.make(patched, layers)
        found = run_shadow_pass(patched, recorded)
        wider = {
            view.key: bound
            for view in found.flagged
            if view.key in case.found.views
            and view.residual is not None
            and view.residual <= (bound := bound_with(case.found.views[view.key], steps))
        }
        if wider:
            recorded = recorded.with_bounds({**recorded.bounds, **wider})
            found = run_shadow_pass(patched, recorded)
        then = next((view for view in found.flagged if view.key not in known), None)
        reach = math.inf if then is None else order.get(then.key, _point_order(then, order))
        if reach <= here or _spoils_layer(case, found, layers, scoped):
            continue
        if best is None or reach > best.reach:
            best = Solution(
                steps[-1].change,
                layers,
                residual,
                then,
                reach,
                patched,
                recorded,
                measure_agreement(case, found, steps[-1].change),
                len(found.flagged),
            )
        if reach == math.inf:
            break
    return best


def _last_pass(divergences: Sequence[Divergence]) -> tuple[PatchedModel, RecordedTrace]:
    """Return (patched model, trace) of the last of several divergences, which has a solution."""
    answer = divergences[-1].answer
    assert answer is not None
    return answer.patched, answer.recorded


def _answer_rank(answer: Solution) -> tuple[float, bool, bool, bool, int, float]:
    """Return a sort key of a solution to a divergence; the best one has the largest.

    In order: how far the pass agrees, that the change is specific and not `general`, that the
    point was not merely recorded elsewhere, that the change says what an operation did and not
    only what came out, that fewer points are left wrong, the smaller residual.
    """
    change = answer.change
    there, made = not change.is_of_recording, not change.of_values
    return (answer.reach, not change.general, there, made, -answer.left, -answer.residual)


def _best_answer(answers: Sequence[Solution], layer: int) -> Solution:
    """Return the best solution to a divergence in `layer`.

    Between a change of a whole layer and of one operation in it, the latter is chosen where the
    layer's next points disagree: the table has changes of single operations after those of the
    whole layer.
    """
    best = max(answers, key=_answer_rank)
    if best.then is None or best.then.layer != layer:
        return best
    said = best.change.cause, best.change.where
    return [
        answer
        for answer in answers
        if (answer.change.cause, answer.change.where) == said
        and _answer_rank(answer)[:-1] == _answer_rank(best)[:-1]
    ][-1]


def _one_of_each_cause(answers: tuple[Solution, ...]) -> tuple[Solution, ...]:
    """Return the first solution of each cause."""
    return tuple({answer.change.cause: answer for answer in reversed(answers)}.values())


def _same_point_divergences(view: ShadowPoint, found: ShadowPass) -> set[str]:
    """Return the keys of the same point in all layers that diverge, to report them as one."""
    return {other.key for other in found.flagged if other.point == view.point}


def _likely_cause(case: Mismatch) -> str:
    """Return the cause that the last operation before a point suggests; "" if several may be wrong.

    "quantisation" for a quantized weight and a difference as small as quantizing makes: the run
    used values that were never quantized. "stale_tensor" for a product that is unrelated to that
    of the model's weight.
    """
    last = next((call for call in reversed(case.view.calls) if call.op in WEIGHTED), None)
    if last is None:
        return ""
    weight = last.args[0] if last.op == "embed" else last.args[1]
    usual = NMSE.get(weight.encoding)
    residual = case.view.residual or math.inf
    if usual is not None and residual**2 <= NMSE_SLACK * usual:
        return "quantisation"
    others = [call for call in case.view.calls if call is not last and call.op not in MOVES]
    biased = [call for call in others if call.op == "add" and case.array(call.args[1]).ndim == 1]
    alone = len(others) == len(biased)
    return "stale_tensor" if alone and _is_unlike_the_model(case) else ""


def _is_unlike_the_model(case: Mismatch) -> bool:
    """Return whether several rows of a point are unrelated to the model's own.

    False for dumps by rank or pass, where rows of other tokens, or partial sums, look the same.
    """
    ours, theirs = (np.asarray(x, np.float64) for x in case.recorded_rows)
    if len(case.rows) < FEW_ROWS or case.recorded.trace.run.get("dump"):
        return False
    sizes = exact_norm(ours) * exact_norm(theirs)
    return sizes == 0 or abs(float(np.sum(ours * theirs))) < UNLIKE * sizes


def _same_cause_divergences(case: Mismatch, likely: str) -> set[str]:
    """Return the keys of flagged points that the suspected cause `likely` accounts for too.

    These are the same point in other layers, and for "quantisation" each point with that
    suspicion.
    """
    found = _same_point_divergences(case.view, case.found)
    if likely == "quantisation":
        for view in case.found.flagged:
            if _likely_cause(replace(case, view=view)) == likely:
                found.add(view.key)
    return found


def _answers_of_table(case: Mismatch, known: set[str]) -> Iterator[Solution]:
    """Yield, for each row of the hypothesis table, its best change that explains the divergence.

    The best one lets the pass agree furthest. Rows without such a change yield nothing. `known`
    are keys of divergences to ignore.
    """
    order = {key: i for i, key in enumerate(case.found.views)}
    here = order[case.view.key]
    for row in (*table.TABLE, *offered_items("hypotheses")):
        best: Solution | None = None
        for change in row.propose(case):
            answer = _verify_change(case, change, known, order, here)
            if answer is None:
                continue
            if best is None or _answer_rank(answer) > _answer_rank(best):
                best = answer
            if best.reach == math.inf:
                break
        if best is not None:
            yield best


def _verify_change(
    case: Mismatch, change: Change, known: set[str], order: Mapping[str, int], here: int
) -> Solution | None:
    """Return the change as a Solution if all points up to the divergence agree with it, else None.

    It is tried in several sets of layers: the set is chosen with which the pass agrees furthest,
    and then the one that leaves the fewest points wrong. `known` are keys of divergences to ignore,
    `order` the number of each point in the pass, `here` that of the divergence.
    """
    if change.drop:
        residual = 0.0
    else:
        # A wide tolerance admits what takes away a part of the difference only, as chance does.
        residual, apart = case.trial(change), case.view.residual
        bound = case.view.tolerance if apart is None else min(case.view.tolerance, CLEAR * apart)
        if not residual <= bound:
            return None
    best: Solution | None = None
    for layers in layer_scopes(case, change):
        patched, recorded = change.make(case.patched, layers), case.without(change.drop)
        found = run_shadow_pass(patched, recorded)
        then = next((view for view in found.flagged if view.key not in known), None)
        reach = math.inf if then is None else order.get(then.key, _point_order(then, order))
        left = len(found.flagged)
        if reach <= here or _spoils_layer(case, found, layers, change.scoped):
            continue
        if best is None or (reach, -left) > (best.reach, -best.left):
            best = Solution(
                change,
                layers,
                residual,
                then,
                reach,
                patched,
                recorded,
                measure_agreement(case, found, change),
                left,
            )
        if reach == math.inf:
            break
    return best


def _spoils_layer(case: Mismatch, found: ShadowPass, layers: Layers, scoped: bool) -> bool:
    """Return whether a point of the layer that a change explains is wrong with it, and was right.

    `found` is the pass with the change in `layers`. Each operation is judged on the run's own
    input, so that a change that is right makes no other operation wrong: what was solved from the
    queries alone says nothing of the keys. Points of other layers are put right by narrowing the
    layers. A change that cannot be narrowed, since it is not `scoped`, has to leave them right.
    """
    here = computed_layer(case)
    if scoped and (here < 0 or (layers is not None and here not in layers)):
        return False
    for view in found.flagged:
        before = case.found.views.get(view.key)
        same = before is not None and (before.base, before.after) == (view.base, view.after)
        if (view.layer == here or not scoped) and same and before is not None:
            if before.residual is not None and not before.flagged:
                return True
    return False


def _point_order(view: ShadowPoint, order: Mapping[str, int]) -> float:
    """Return a sort key for a point that the first pass lacks: after its layer's last point."""
    same = [place for key, place in order.items() if key.startswith(f"L{view.layer}.")]
    return max(same, default=len(order)) + 0.5


def recheck_answers(
    divergences: Sequence[Divergence],
    patched: PatchedModel,
    recorded: RecordedTrace,
    final: ShadowPass,
) -> list[Divergence]:
    """Return the divergences without the explanations that all changes together disprove.

    Several faults hide what tells their explanations apart. With all of them repaired, another
    explanation in place of the chosen one is dropped if points disagree with it. A point that
    then agrees as recorded was not recorded elsewhere: its divergence is dropped. `patched` and
    `recorded` are those before any change, `final` the pass with all changes.
    """
    divergences = [replace(d, doubtful=_is_doubtful(d, divergences, final)) for d in divergences]
    answered = [d for d in divergences if d.answer is not None]
    if sum(not d.answer.change.drop for d in answered if d.answer is not None) < 2:
        return divergences
    bound = {view.key for view in final.flagged}
    left = RECHECKS

    def agrees(steps: LayerChanges) -> bool:
        """Return whether a pass with the changes `steps` disagrees with the trace nowhere new.

        Points that disagree with all changes together (`final`) may. One pass is taken from
        `left`.
        """
        nonlocal left
        left -= 1
        found = run_shadow_pass(*_apply_changes(patched, recorded, steps))
        return {view.key for view in found.flagged} <= bound

    kept: list[Divergence] = []
    for divergence in divergences:
        answer, others = divergence.answer, []
        rest = [d for d in divergences if d is not divergence]
        if answer is not None and answer.change.drop and left > 0 and agrees(_chosen_changes(rest)):
            continue  # the point agrees as it was recorded: it was not taken elsewhere
        for other in divergence.others:
            own = replace(divergence, answer=other)
            steps = _chosen_changes([own if d is divergence else d for d in divergences])
            if left <= 0 or agrees(steps):
                others.append(other)
        kept.append(replace(divergence, others=tuple(others)))
    return kept


def _is_doubtful(
    divergence: Divergence, divergences: Sequence[Divergence], final: ShadowPass
) -> bool:
    """Return whether a point without an explanation leaves an explanation of another in doubt.

    Several changes together, or one with a free value for every column, may fit one point by chance
    where the cause is a change that is not in the table. And where every point that an explanation
    makes agree is computed from one without any, it is not known whether the operation read what
    was recorded there. `final` is the pass with all changes.
    """
    open_ones = [other for other in divergences if other.answer is None and not other.likely]
    answer = divergence.answer
    if answer is None or not open_ones:
        return False
    ops = {call.op for call in divergence.view.calls} - _COMMON
    loose = divergence.joined or answer.change.general
    if loose and any(ops & {call.op for call in other.view.calls} for other in open_ones):
        return True
    unknown = {view.key for other in open_ones for view in (other.view, *final.flagged)
               if view.point == other.view.point}  # fmt: skip
    explained = [divergence.view, *(final.views[key] for key in answer.agreement.points
                                    if key in final.views)]  # fmt: skip
    return all(unknown & {*view.after} for view in explained)


def _chosen_changes(divergences: Sequence[Divergence]) -> LayerChanges:
    """Return the changes of the reference's pass that explain divergences, as (change, layers).

    A divergence that no change explains gives none. With all of them the pass is run again.
    """
    return [(d.answer.change, d.answer.layers) for d in divergences if d.answer is not None]


def _apply_changes(
    patched: PatchedModel, recorded: RecordedTrace, steps: LayerChanges
) -> tuple[PatchedModel, RecordedTrace]:
    """Return (patched model with all changes, trace without the points they drop)."""
    without = set(recorded.without)
    for change, layers in steps:
        patched = change.make(patched, layers)
        without |= change.drop
    return patched, recorded.ignoring(without)


def find_faint_mistakes(
    case: Mismatch, search: Search
) -> tuple[Divergence, PatchedModel, RecordedTrace, str] | None:
    """Return (divergence, patched model, trace, arithmetic) of one mistake plus rounding, or None.

    The mistake must explain nearly all of the difference. What it leaves must be as large as
    rounding to TF32 or 16 bits makes it, at every point and in every row.
    """
    assert case.view.residual is not None
    near = sorted(search.singles, key=lambda one: one.residual)[:NEAR]
    for one in near:
        change = one.steps[0].change
        if one.residual > NEARLY * case.view.residual:
            break
        for layers in dict.fromkeys((one.steps[0].layers, *layer_scopes(case, change))):
            patched = change.make(case.patched, layers)
            left = run_shadow_pass(patched, case.recorded)
            guess = (
                explain_by_arithmetic(patched, case.recorded, left, 1.0) if left.flagged else None
            )
            if guess is not None:
                recorded, says = guess
                agrees = measure_agreement(case, run_shadow_pass(patched, recorded), change)
                answer = Solution(
                    change, layers, one.residual, None, math.inf, patched, recorded, agrees
                )
                return Divergence(case.view, answer), patched, recorded, says
    return None


def find_directed_mistake(
    patched: PatchedModel, recorded: RecordedTrace, found: ShadowPass, plain: Mapping[str, Array]
) -> list[Divergence]:
    """Return [a divergence] inside the run's own rounding that has a direction, or [].

    Its mistake is never confirmed: removing it removes only some of the difference. The divergence
    has no explanation where no usual mistake removes enough of it: then it is not known whether the
    run is only rounded. `plain` are the reference's values by point.
    """
    view = first_directed_point(patched, recorded, found)
    if view is None or not view.residual:
        return []
    case = Mismatch(patched, recorded, view, found, plain)
    search = Search(case)
    search.run(joined=False)
    best = min(search.singles, key=lambda one: one.residual, default=None)
    if best is None or best.residual > FAINT * view.residual:
        return [Divergence(view, None, (), "", weights_inside(case), search.tried)]
    step = best.steps[0]
    answer = Solution(
        step.change, step.layers, best.residual, None, math.inf, case.patched, case.recorded
    )
    return [Divergence(view, answer, faint=True)]
