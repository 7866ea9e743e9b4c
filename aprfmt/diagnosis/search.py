"""The search for usual mistakes, alone and together, where no single operation can be tested.

A *step* is one usual mistake made in some layers of the reference model.

With outputs of layers, or logits alone, nothing can be solved from an operation's own input and
output. So each change of the table is made in the reference pass. If no single change removes the
difference, several are joined, beginning with the change that brings the values nearest. Nearness
is the mean logarithm of the rows' distances, so that a change that makes the first rows agree
exactly (a norm, where the other rows differ by rope) counts for more than one that makes all rows a
little better.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from aprfmt.causes.forward.cached_rotations import cached_rotation_changes
from aprfmt.causes.forward.drafted_rows import drafted_row_changes
from aprfmt.causes.forward.experts import find_capacity
from aprfmt.causes.forward.kv_cache import later_pass_changes
from aprfmt.causes.forward.logit_relations import nearly_factor_changes
from aprfmt.causes.forward.mismatch import Change, Layers, Mismatch, differing_rows, spanned_layers
from aprfmt.causes.forward.norm import EPS, eps_change
from aprfmt.causes.forward.shards import find_shard_counts_with_bias
from aprfmt.causes.forward.single_pass import changes_of_one_pass, tokens_of_one_pass
from aprfmt.causes.forward.usual_blocks import UsualMistake, cut_changes
from aprfmt.causes.forward.usual_mistakes import (
    added_window_mistake,
    layer_groups_of,
    layers_of_rope_kinds,
    usual_mistakes,
)
from aprfmt.causes.forward.usual_steps import single_layer_mistakes
from aprfmt.diagnosis.attention_rows import (
    AGREES,
    restart_solver,
    row_solvers,
    solve_masks,
    solve_rows,
    solve_strided_masks,
)
from aprfmt.errors import AprfmtError
from aprfmt.inference.replay.patched_model import MOVES, PatchedModel
from aprfmt.inference.replay.shadow import ROUTING, ShadowPoint

RUNS = 2000  # passes of a small model at one divergence
WORK = 4e10  # products of all passes of a large one
ALL = 1.5  # the passes at all divergences of a trace together, times those at one
PASSES_OF_A_FIT = 90  # that a number takes until it fits
FIRST_CHANGES = 3  # changes after which the number of another one is fitted
FITTED = 0.35  # share of the passes that are left to rows and numbers
AFTER_ROWS = 0.15  # share of the passes that rows leave to numbers and to single passes
JOINED = 0.6  # share of the passes at one divergence that joined changes have at least
DEEPEST = 4  # changes that are joined
OTHERS = 300  # passes to look for something else that would explain joined changes as well
# Operations that know a token's place or read those before it: a later pass may run them otherwise.
READS_EARLIER = {"probs", "mix", "scores", "rope", "embed", "convolve", "scan", "delta"}
LEAST = 0.02  # digits by which a change must bring the rows nearer to be continued
FEW = 3  # operations between two points up to which hypotheses solve what there is to solve
TIES = 3.0  # tolerances, and
OF_ROUNDING = 0.02  # share of the difference, that values between two neighbours may leave
MOST_OF_CUTS = 0.1  # relative L2 beyond which results cut to 16 bits are no more in question
CLEAR = 0.3  # a residual that does not fall below this share of the first one proves nothing


@dataclass(frozen=True)
class SearchStep:
    """A change tried in some layers; `everywhere`: these are all layers that it can apply to."""

    change: Change
    layers: Layers
    everywhere: bool = True  # in all layers that the change belongs to

    @property
    def changed_thing(self) -> tuple[str, tuple[str, ...]]:
        """The (cause, places) that the tried change is about; two changes of one are not joined."""
        return (self.change.cause, self.change.where)


def bound_with(view: ShadowPoint, steps: Sequence[SearchStep]) -> float:
    """Return the relative L2 within which a point agrees once these changes are made.

    It is the point's tolerance, and more where all changes round: of the values that are rounded a
    few stand so near to the middle of two neighbours that each side takes another one. `view` is
    the point as it differs without them.
    """
    if view.residual is None or any(step.change.cause != "rounding" for step in steps):
        return view.tolerance
    return max(TIES * view.tolerance, OF_ROUNDING * view.residual)


@dataclass(frozen=True)
class TriedSteps:
    """Steps applied together, the point's relative L2 with them (`residual`), and its nearness."""

    steps: tuple[SearchStep, ...]
    residual: float
    nearness: float


@dataclass
class SearchBudget:
    """The work left for all searches of one trace; 1.0 is the work of one search."""

    left: float = ALL


@dataclass
class Search:
    """The search at one divergence: `runs` of `allowed` passes are left, `tried` were made."""

    case: Mismatch
    budget: SearchBudget = field(default_factory=SearchBudget)
    runs: int = 0
    allowed: int = 0
    most: int = 1
    tried: int = 0
    singles: list[TriedSteps] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Set how many passes the model's size and the budget allow."""
        patched = self.case.patched
        held = sum(math.prod(patched.weights[key].shape) for key in patched.weights)
        share = len(spanned_layers(self.case)) / max(patched.n_layers, 1)
        work = max(1.0, held * len(patched.ids) * min(share, 1.0))
        self.most = int(min(RUNS, max(24, WORK / work)))
        self.runs = self.allowed = int(self.most * min(1.0, self.budget.left))

    # --- one pass ---------------------------------------------------------------------------

    def measure(self, steps: tuple[SearchStep, ...]) -> TriedSteps | None:
        """Return how near these changes together bring the point to the trace, by one pass.

        None if the pass fails, none is left, or the distance is not finite.
        """
        view = self.run_with_steps(steps)
        if view is None or view.residual is None or not math.isfinite(view.residual):
            return None
        return TriedSteps(steps, view.residual, self.nearness(view))

    def run_with_steps(self, steps: tuple[SearchStep, ...]) -> ShadowPoint | None:
        """Return the diverging point, computed anew with these changes applied.

        It costs one of the passes left. None where none is left, or where the changes cannot be
        applied together. The caller judges whether the point agrees.
        """
        if self.runs <= 0:
            return None
        self.runs -= 1
        self.tried += 1
        self.budget.left -= 1 / self.most
        return self.case.attempt_all([(step.change, step.layers) for step in steps])

    def nearness(self, view: ShadowPoint) -> float:
        """Return how near a computed point is to the trace: minus the mean log10 of row distances.

        Higher is nearer. Only the rows that the trace has count.
        """
        rows = self.case.distances_by_row(view)[self.case.rows]
        return -float(np.mean(np.log10(np.maximum(rows, self.case.view.tolerance / 10))))

    def solves(self, tried: TriedSteps) -> bool:
        """Return whether tried changes remove the point's difference from the trace.

        It has to be within tolerance after them, and smaller by a clear factor.
        """
        view = self.case.view
        assert view.residual is not None
        bound = min(bound_with(view, tried.steps), CLEAR * view.residual)
        return tried.residual <= bound

    @property
    def smallest_remaining_share(self) -> float:
        """The fraction of the point's difference that the best single change leaves.

        1.0 if untried.
        """
        assert self.case.view.residual is not None
        left = min((one.residual for one in self.singles), default=self.case.view.residual)
        return left / self.case.view.residual

    # --- the search -------------------------------------------------------------------------

    def run(self, joined: bool = True) -> list[TriedSteps]:
        """Return all single changes that remove the difference, else a joined change, else [].

        Without `joined` only single changes are tried.
        """
        self.singles = list(self._measure_each(self._usual_steps()))
        found = [one for one in self.singles if self.solves(one)]
        if not found:
            found = [one for one in self._measure_each(self._restart_steps()) if self.solves(one)]
        if not found:
            most = int(FITTED * self.allowed)
            alone = self._measure_each(self._single_layer_steps(), most)
            found = [one for one in alone if self.solves(one)]
        if not found:
            with self._passes_kept():
                found = [one for one in self._measure_each(self._row_steps()) if self.solves(one)]
        if not found:
            fitted = list(self._measure_each(self._fitted_steps()))
            self.singles += fitted
            found = [one for one in fitted if self.solves(one)]
        if not found:
            # After the numbers: another base of rope leaves the first row, too, as it is.
            passes = self._measure_each(self._one_pass_steps())
            found = [one for one in passes if self.solves(one)]
        if not found:
            found = [one for one in self._measure_each(self._strided_steps()) if self.solves(one)]
        if found or not joined:
            return found
        # Single layers take many passes; joined changes have their own share of them.
        self.runs = max(self.runs, int(JOINED * self.allowed))
        return self._join_changes() or self._fit_second_number()

    @contextmanager
    def _passes_kept(self) -> Iterator[None]:
        """Keep a share of the passes (AFTER_ROWS) from what runs in here, for what comes after."""
        kept = min(self.runs, int(AFTER_ROWS * self.allowed))
        self.runs -= kept
        yield
        self.runs += kept

    def _measure_each(self, steps: Iterator[SearchStep], left: int = 0) -> Iterator[TriedSteps]:
        """Yield the result of each change that can be applied, until `left` passes are left."""
        for step in steps:
            if self.runs <= left:
                return
            tried = self.measure((step,))
            if tried is not None:
                yield tried

    def _usual_steps(self) -> Iterator[SearchStep]:
        """Yield the usual mistakes as changes, each in the groups of layers where it acts.

        A mistake acts in layers whose operations lie before the point.
        """
        here, patched = spanned_layers(self.case), self.case.patched
        for usual in self._usual_changes():
            for layers in layer_groups_of(patched, usual):
                if (layers is None or layers & here) and may_act(self.case, usual.change, layers):
                    yield SearchStep(usual.change, layers, layers == usual.layers)

    def _usual_changes(self) -> list[UsualMistake]:
        """Return the usual mistakes that this model allows, and those that the values suggest.

        These are a window, by the rows that differ, a factor of the logits, and results that are
        cut where the difference is as small as that.
        """
        patched, found = self.case.patched, usual_mistakes(self.case.patched)
        late = differing_rows(self.case)
        if len(late) and late[0] > 0 and not any(patched.hp["window_layers"]):
            found.append(added_window_mistake(patched, int(late[0])))
        residual = self.case.view.residual
        cut = cut_changes() if residual is not None and residual <= MOST_OF_CUTS else ()
        return [*map(UsualMistake, (*nearly_factor_changes(self.case), *cut)), *found]

    def _restart_steps(self) -> Iterator[SearchStep]:
        """Yield the change to positions that begin again at the first row that differs, if any.

        A later pass behind a cached prefix counts its tokens anew. Few numbers are tried.
        """
        case = self.case
        solver = restart_solver(case) if len(case.rows) == case.tokens else None
        rows, bound = case.distances_by_row(case.view), AGREES * case.view.tolerance
        if solver is None or not (rows[:1] <= bound).all():
            return
        found = solve_rows(solver, self._row_residuals, None, rows, bound)
        if found is not None:
            yield SearchStep(found, None)

    def _single_layer_steps(self) -> Iterator[SearchStep]:
        """Yield changes of single layers as steps.

        First those of the table for one layer; then, if several layers lie between the trace's
        last points and this one, every usual change in each of them.
        """
        here = sorted(spanned_layers(self.case))
        for usual in single_layer_mistakes(self.case.patched):
            if usual.layers is not None and usual.layers & {*here}:
                if may_act(self.case, usual.change, usual.layers):
                    yield SearchStep(usual.change, usual.layers, False)
        if len(here) < 2:
            return
        for usual in self._usual_changes():
            if usual.change.scoped:
                for layer in here:
                    if usual.layers is None or layer in usual.layers:
                        yield SearchStep(usual.change, frozenset({layer}))

    def _row_steps(self) -> Iterator[SearchStep]:
        """Yield changes of masks, cached rows and positions, solved from the rows that differ."""
        case = self.case
        ops = {call.op for call in case.view.calls}
        if "add_weighted" in ops and len(case.rows) == case.tokens:
            for change in find_capacity(case):
                yield SearchStep(change, None)
        if len(case.rows) != case.tokens or not ops & READS_EARLIER:
            return
        bound = AGREES * case.view.tolerance
        rows = case.distances_by_row(case.view)
        late = np.flatnonzero(rows > bound)
        here = sorted(spanned_layers(case))
        scopes: list[Layers] = [None]
        if len(here) > 1:
            scopes += [frozenset({layer}) for layer in here]
        if "probs" in ops:
            for change in solve_masks(late, case.tokens):
                for layers in scopes:
                    yield SearchStep(change, layers)
        if {"mix", "rope"} <= ops and len(late):
            for change in cached_rotation_changes(case.patched, int(late[0])):
                for layers in scopes if late[0] > 1 else scopes[:1]:
                    yield SearchStep(change, layers)
        if "mix" in ops and len(late) and late[0] > 1:
            for change in later_pass_changes(case.tokens, int(late[0])):
                for layers in scopes[1:]:  # in all of them the table tried it
                    yield SearchStep(change, layers)
        for op, solver in row_solvers(case):
            for layers in scopes:
                if op in ops and (layers is None or op not in ("rope", "embed")):
                    found = solve_rows(solver, self._row_residuals, layers, rows, bound)
                    if found is not None:
                        yield SearchStep(found, layers)
        for change in drafted_row_changes(case) if "mix" in ops else ():
            yield SearchStep(change, None)

    def _strided_steps(self) -> Iterator[SearchStep]:
        """Yield changes of masks to those that see a stride of keys: in all layers, then in one."""
        case = self.case
        if len(case.rows) != case.tokens or all(call.op != "probs" for call in case.view.calls):
            return
        rows = case.distances_by_row(case.view)
        late = np.flatnonzero(rows > AGREES * case.view.tolerance)
        here = sorted(spanned_layers(case))
        scopes: list[Layers] = [None]
        if len(here) > 1:
            scopes += [frozenset({layer}) for layer in here]
        for layers in scopes:
            for change in solve_strided_masks(late, case.tokens):
                yield SearchStep(change, layers)

    def _one_pass_steps(self) -> Iterator[SearchStep]:
        """Yield usual mistakes as search steps that apply only in the pass of the differing rows.

        It is for rows that the run computed in one later pass, or in a chunk. Yields nothing if the
        differing rows are not those of one later pass, or no operation reads earlier rows.
        """
        case = self.case
        ops = {call.op for call in case.view.calls}
        if len(case.rows) != case.tokens or not ops & READS_EARLIER:
            return
        rows = case.distances_by_row(case.view)
        bound = AGREES * case.view.tolerance
        passed = tokens_of_one_pass(np.flatnonzero(rows > bound))
        if passed is None:
            return
        first, last = passed
        for step in self._usual_steps():
            usual = [(step.change, step.layers)]
            for change, layers in changes_of_one_pass(usual, case.patched, first, last):
                left = self._row_residuals(change, layers)
                if left is None:
                    continue
                wrong = np.flatnonzero(left > bound)
                if not len(wrong):
                    yield SearchStep(change, layers)
                elif wrong[0] > first:
                    end = int(wrong[0]) - 1
                    for ended, there in changes_of_one_pass(usual, case.patched, first, end):
                        yield SearchStep(ended, there)

    def _row_residuals(self, change: Change, layers: Layers) -> np.ndarray | None:
        """Return the residual of every row of the point under a change; None if the pass fails."""
        tried = self.run_with_steps((SearchStep(change, layers),))
        return None if tried is None else self.case.distances_by_row(tried)

    def _fitted_steps(self) -> Iterator[SearchStep]:
        """Yield changes whose number is fitted to the trace.

        The numbers are counts of shards, and those of the rows of NUMBERS.
        """
        from aprfmt.causes.forward.table import NUMBERS  # reads the tables of all causes of a pass

        case, patched = self.case, self.case.patched
        for change in find_shard_counts_with_bias(case):
            yield SearchStep(change, None)
        for kind, layers in layers_of_rope_kinds(patched).items():
            for row in (row for row in NUMBERS if row.by_rope):
                near = [one for one in self._singles_of(row.cause) if one.steps[0].layers == layers]
                make = partial(row.make, patched, kind)
                yield from self._fit_number(near, make, layers)
        for row in (row for row in NUMBERS if not row.by_rope):
            near = self._singles_of(row.cause)
            yield from self._fit_number(near, partial(row.make, patched), None)

    def _singles_of(self, cause: str) -> list[TriedSteps]:
        """Return the single changes of a cause that were tried."""
        return [one for one in self.singles if one.steps[0].change.cause == cause]

    def _fit_number(
        self, near: Sequence[TriedSteps], make: object, layers: Layers
    ) -> Iterator[SearchStep]:
        """Yield the step of `make(number)` for the numbers that fit best, starting from `near`.

        `near` are tried changes of that kind. Nothing is yielded if each of them leaves over 80 %
        of the difference.
        """
        case = self.case
        assert case.view.residual is not None and callable(make)
        numbers = {}
        for one in near:
            value = _change_number(one.steps[0].change)
            if value is not None and value > 0:
                numbers[value] = one.residual
        if not numbers or min(numbers.values()) > 0.8 * case.view.residual:
            return

        def make_in_layers(value: float) -> Change:
            """Return the change that `make` gives for a number, restricted to `layers`."""
            change: Change = make(value)
            return replace(change, make=lambda patched, _: change.make(patched, layers))

        before = self.tried
        for change in case.best_number(make_in_layers, numbers):
            yield SearchStep(change, layers)
        self.runs -= max(0, PASSES_OF_A_FIT - (self.tried - before))

    def _join_changes(self) -> list[TriedSteps]:
        """Return the first joined changes that remove the difference, as a list of one; or [].

        The combinations that bring the rows nearest are extended first, up to DEEPEST changes.
        """
        start = self.nearness(self.case.view)
        whole = [one for one in self.singles if one.steps[0].everywhere]
        steps = [one.steps[0] for one in whole if one.nearness != start]
        front = [one for one in whole if one.nearness > start + LEAST]
        done: set[frozenset[int]] = set()
        while front and self.runs > 0:
            front.sort(key=lambda one: one.nearness)
            best = self._with_best_values(front.pop(), steps)
            if self.solves(best):
                return [best]
            about = {step.changed_thing for step in best.steps}
            for step in steps:
                key = frozenset(map(id, (*best.steps, step)))
                if step.changed_thing in about or key in done:
                    continue
                done.add(key)
                found = self.measure((*best.steps, step))
                if found is None:
                    continue
                if self.solves(found):
                    return [found]
                if found.nearness > best.nearness + LEAST and len(found.steps) < DEEPEST:
                    front.append(found)
        return []

    def _with_best_values(self, tried: TriedSteps, steps: Sequence[SearchStep]) -> TriedSteps:
        """Return joined changes, in which each but the last has the number that fits best.

        That is the number among `steps`, single changes with other numbers, that brings the point
        nearest to the trace.
        """
        best = tried
        for at, step in enumerate(tried.steps[:-1]):
            for other in steps:
                if other.changed_thing != step.changed_thing or other is step:
                    continue
                found = self.measure((*best.steps[:at], other, *best.steps[at + 1 :]))
                if found is not None and found.nearness > best.nearness:
                    best = found
        return best

    def _fit_second_number(self) -> list[TriedSteps]:
        """Return two changes, a number of the second fitted after the first, as a list of one.

        They remove the difference together. The first is one of those that bring the rows nearest,
        or an epsilon fitted to the first row, on which no rotation acts. [] if there are none.
        """
        self.runs = max(self.runs, int(FITTED * self.allowed))
        if self.runs < PASSES_OF_A_FIT:
            return []
        near = sorted((one for one in self.singles if one.steps[0].everywhere), key=_nearness)
        first = [*self._measure_each(self._eps_of_first_row()), *reversed(near)]
        started = dict.fromkeys(one.steps[0].changed_thing for one in first)
        for about in list(started)[:FIRST_CHANGES]:
            one = next(each for each in first if each.steps[0].changed_thing == about)
            step, view = one.steps[0], self.run_with_steps(one.steps)
            if view is None or view.residual is None:
                continue
            changed = step.change.make(self.case.patched, step.layers)
            view = replace(view, calls=self.case.view.calls)
            second = Search(replace(self.case, patched=changed, view=view), self.budget)
            found = second.fit_numbers(about)
            self.runs, self.tried = self.runs - second.tried, self.tried + second.tried
            if found is not None:
                return [replace(found, steps=(step, *found.steps))]
        return []

    def _eps_of_first_row(self) -> Iterator[SearchStep]:
        """Yield the change of the norms' epsilon to the value that the first row shows, if any."""
        case = self.case.judged_by_first_row()
        if case is not None:
            self.runs -= PASSES_OF_A_FIT
            for change in case.best_number(lambda eps: eps_change(case.patched, eps), EPS):
                yield SearchStep(change, None)

    def fit_numbers(self, without: tuple[str, tuple[str, ...]]) -> TriedSteps | None:
        """Return the change with a fitted number that removes the difference of the point; or None.

        Numbers of the changed thing `without` are not fitted.
        """
        from aprfmt.causes.forward.table import NUMBERS

        causes = {row.cause for row in NUMBERS}
        usual = (step for step in self._usual_steps() if step.change.cause in causes)
        self.singles = list(
            self._measure_each(step for step in usual if step.changed_thing != without)
        )
        tried = (*self.singles, *self._measure_each(self._fitted_steps()))
        return next((one for one in tried if self.solves(one)), None)

    # --- proving each of several ------------------------------------------------------------

    def necessary_steps(self, answer: TriedSteps) -> list[tuple[SearchStep, float]]:
        """Return (change, residual without it) of each change that the answer cannot do without.

        `answer` are joined changes that remove the difference of the point.
        """
        steps, left = list(answer.steps), list(answer.steps)
        found: list[tuple[SearchStep, float]] = []
        self.runs = max(self.runs, 2 * len(steps))
        for step in steps:
            rest = tuple(other for other in left if other is not step)
            without = self.measure(rest) if rest else None
            if without is not None and self.solves(without):
                left.remove(step)
                continue
            assert self.case.view.residual is not None
            found.append((step, self.case.view.residual if without is None else without.residual))
        return found

    def same_cause_steps(self, steps: Sequence[SearchStep], step: SearchStep) -> list[SearchStep]:
        """Return changes of the same cause that remove the difference in place of `step`.

        `steps` are the joined changes, `step` among them.
        """
        rest = tuple(other for other in steps if other is not step)
        self.runs = max(self.runs, OTHERS // 10)
        tried = [
            self.measure((*rest, one.steps[0]))
            for one in self.singles
            if one.steps[0].change.cause == step.change.cause and one.steps[0] is not step
        ]
        return [one.steps[-1] for one in tried if one is not None and self.solves(one)]

    def other_cause_steps(self, steps: Sequence[SearchStep], step: SearchStep) -> list[SearchStep]:
        """Return a change of each other cause that removes the difference in place of `step`.

        `steps` are the joined changes, `step` among them.
        """
        rest = tuple(other for other in steps if other is not step)
        found: dict[str, SearchStep] = {}
        self.runs = max(self.runs, min(OTHERS, self.allowed // 4))
        for one in self.singles:
            other = one.steps[0]
            if (
                not other.everywhere
                or other.change.cause in (step.change.cause, *found)
                or other in rest
            ):
                continue
            tried = self.measure((*rest, other))
            if tried is not None and self.solves(tried):
                found[other.change.cause] = other
        return list(found.values())


def _nearness(tried: TriedSteps) -> float:
    """Return how near tried steps bring the point to the trace, as a sort key."""
    return tried.nearness


def is_wide(case: Mismatch) -> bool:
    """Return whether more than FEW operations lie between the trace's last points and this one.

    Then testing each operation alone cannot tell which of them is wrong.
    """
    return sum(call.op not in MOVES for call in case.view.calls) > FEW


def _change_number(change: Change) -> float | None:
    """Return the number that a tried change sets, from which the fit of a better one starts.

    It is the first of the change's values that is a number, or the float `factor` of a value that
    is a mapping. None if it sets no number.
    """
    for value in change.values.values():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, dict) and isinstance(value.get("factor"), float):
            return float(value["factor"])
    return None


def may_act(case: Mismatch, change: Change, layers: Layers) -> bool:
    """Return whether a change replaces something that the operations before the point use.

    True for changes of hyperparameters and of the block, which may act on anything. False for a
    change that cannot be made.
    """
    before = case.patched
    try:
        after = change.make(before, layers)
    except (AprfmtError, ValueError, KeyError):
        return False
    if after.hp is not before.hp or after.spec is not before.spec or after.own is not before.own:
        return True
    ops = {call.op for call in case.view.calls if call.op not in MOVES}
    if any(
        len(after.overrides[op]) > len(before.overrides.get(op, ()))
        for op in ops & {*after.overrides}
    ):
        return True
    if after.positions != before.positions:
        return bool(ops & {"rope", "embed"})
    if after.taps != before.taps and ("add_weighted" in ops or case.view.point in ROUTING):
        return True
    passed = {case.view.point, *(call.location.point for call in case.view.calls)}
    if any(after.taps[name] != before.taps.get(name) for name in passed & {*after.taps}):
        return True
    return _reads_replaced_weight(case, after)


def _reads_replaced_weight(case: Mismatch, after: PatchedModel) -> bool:
    """Return whether an operation before the point reads a weight that `after` replaced.

    A vector counts as read if its length is that of the replaced weight.
    """
    replaced = after.replaced[len(case.patched.replaced) :]
    read = {each.key.partition("[")[0] for call in case.view.calls for each in call.weights}
    vectors = [each.shape for call in case.view.calls for each in call.vectors]
    return any(key in read or after.weights[key].shape[-1:] in vectors for key in replaced)
