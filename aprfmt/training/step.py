"""Answers what one training step did, and whether it is what its optimizer makes of it."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.sequences import join_first
from aprfmt.base.shapes import matrix_shape
from aprfmt.causes import CAUSES
from aprfmt.causes.contradicted_flags import HEAD, TABLE
from aprfmt.causes.training.backward_case import BackwardCase, BackwardGuess, first_place
from aprfmt.causes.training.clipped_parts import clipping_by_part, part_norms
from aprfmt.causes.training.clipping import (
    CLIPPED_BY,
    CLIPS,
    ON_PURPOSE,
    Clipping,
    OtherNorm,
    clip_factor,
    other_norm_clipping,
    row_clipping,
    scaled_bound,
    tensor_clipping,
    value_clipping,
)
from aprfmt.causes.training.gradient_case import PART, GradientCase, GradientGuess
from aprfmt.causes.training.gradient_scale import joined_factors
from aprfmt.causes.training.lost_updates import DecayEvidence, lost_decay_guess
from aprfmt.causes.training.momentum import new_optimizer_sentence
from aprfmt.causes.training.optimizers import (
    CALLED,
    F64,
    OPTIMIZERS,
    Recipe,
    changed,
    parse_recipe,
    parse_settings,
)
from aprfmt.causes.training.step_case import COARSE, StepGuess, held_in
from aprfmt.causes.training.step_size import SLACK, simple_value
from aprfmt.causes.training.table import BACKWARDS
from aprfmt.causes.training.weight_decay import no_decay_guess
from aprfmt.errors import UsageError
from aprfmt.formats.foreign_formats import refuse_trainer_shards
from aprfmt.inference.gradients.given_points import ROLES_WITHOUT_GRADIENT, read_points
from aprfmt.inference.gradients.misread_base import base_quantization
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.measure.named_causes import NamedCause, short_keys
from aprfmt.measure.proofs import Proof, cap_proof
from aprfmt.measure.verdicts import Certainty
from aprfmt.model import Model, open_model
from aprfmt.model.kinds import peft_config
from aprfmt.model.ledger import NotCompared, array_items
from aprfmt.model.renames import Rename, rename_names
from aprfmt.tensors.stats import compute_stats
from aprfmt.tensors.view import is_zero
from aprfmt.training import ComputedGradients
from aprfmt.training.differences import DifferenceChecker, open_differences
from aprfmt.training.gradient_verdict import judge_gradient
from aprfmt.training.judgement import Judgement
from aprfmt.training.parameters import Parameter, pair_parameters
from aprfmt.training.points import ZERO, ComparedPoints, compare_points
from aprfmt.training.reference_gradients import BatchNumbers as BatchNumbers
from aprfmt.training.reference_gradients import Computed, compute_gradients, doubtful_loss
from aprfmt.training.report import ArrayFacts, Norms, StepReport, TensorStep, UpdateFacts
from aprfmt.training.saved_arrays import (
    OptimizerState,
    SavedArrays,
    hyper_of,
    open_gradients,
    open_state,
    plain_name,
    unread_files,
)
from aprfmt.training.step_batch import read_step_batch
from aprfmt.training.step_causes import (
    Mistake,
    fewest_mistakes,
    joined_factor_causes,
    largest_update,
    nonfinite_causes,
    rivals_text,
    step_cause,
    unknown_cause,
)
from aprfmt.training.update import Sums, pieces, same_bytes
from aprfmt.training.update_check import (
    AVERAGED,
    RowReader,
    StepInputs,
    is_idle,
    judge_count,
    judge_moments,
    judge_update,
    moved_without_gradient,
    share_reproduced,
)


def explain_step(
    model: Path | str,
    *,
    after: Path | str | None = None,
    adapter: Path | str | None = None,
    grads: Sequence[Path | str] = (),
    optimizer: str | None = None,
    optimizer_state: Path | str | None = None,
    batch: Path | str | None = None,
    device: str = "cpu",
    dtype: str = "float64",
    computed: ComputedGradients | None = None,
    facts: BatchNumbers | None = None,
    differences: bool = False,
    trained_in: str | None = None,
    rename: Sequence[Rename] = (),
    arch: str | None = None,
    accept: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> StepReport:
    """Return what a step did to the parameters of a model, or of an adapter of it.

    `model` is the checkpoint before the step (with `adapter`: the base below it), `after` the one
    after it. `grads` are files of the gradients of the step, `optimizer` is the recipe
    (`adamw:lr=2e-4,wd=0.1,step=1`), `optimizer_state` the optimizer's state, saved after the step.
    `batch` is the step's batch: its gradients are computed by torch on `device` in `dtype`, and
    compared with the given ones. With `differences` the given ones are checked by forward passes
    instead, without torch. `trained_in` is the trainer's arithmetic (`bfloat16`), whose rounding a
    second pass measures; None: it is taken from gradients and weights. `computed` are gradients
    computed elsewhere, and `facts` the numbers of their batch that a wrong factor may equal.
    `rename` maps names in gradients and state, `accept` are patterns of what may stay uncompared.
    Raises UsageError where there is nothing to compare, or where a file is of another model.
    """
    if after is None and not grads:
        raise UsageError(
            "nothing to explain; give --after CKPT, the checkpoint after the step, or --grads FILE"
        )
    if after is not None and not Path(after).is_dir():
        refuse_trainer_shards(Path(after), weights=True)
    with ExitStack() as stack:
        base = stack.enter_context(open_model(Path(model), arch=arch))
        before = base if adapter is None else stack.enter_context(open_model(Path(adapter)))
        later = None
        if after is not None:
            own = arch if adapter is None else None
            later = stack.enter_context(open_model(Path(after), arch=own))
        found = pair_parameters(before, later, None if adapter is None else base)
        # The arrays that the trainer saved.
        given = None
        paths = [Path(each) for each in grads]
        if grads:
            given = open_gradients(paths, found.rows, before, stack, rename, base)
        state = None
        if optimizer_state is not None:
            path = Path(optimizer_state)
            state = open_state(path, found.rows, before, stack, rename, later)
        if rename:
            kept = () if state is None else (state.first, state.second)
            held = [plain_name(name) for each in (given, *kept) if each for name in each.held]
            rename_names(dict.fromkeys(held), rename, "--grads and --optimizer-state")
        # What the given gradients are compared with.
        checker, points, loaded = None, None, None
        if differences:
            if batch is None or given is None:
                raise UsageError(
                    "gradients are checked by differences of a batch's loss; give "
                    "--batch FILE and --grads FILE"
                )
            if adapter is not None:
                raise UsageError(
                    "--check-gradients: differences are of the weights of a whole "
                    "model; leave it out for --adapter, or train the model itself"
                )
            checker = stack.enter_context(open_differences(base, Path(batch)))
        elif batch is not None:
            if given is not None and given.points:
                loaded = read_step_batch(Path(batch), base)
                points = read_points(base, loaded, given.point_shapes, given.point)
            own_adapter = None if adapter is None else Path(adapter)
            computed, facts = compute_gradients(
                base,
                Path(batch),
                adapter=own_adapter,
                device=device,
                dtype=dtype,
                trained_in=trained_in or _few_bits(given, found.rows),
                points=() if points is None else points.values.keys(),
                head_twice=adapter is None and _head_is_table(base, found.rows),
            )
        step = _Step(
            before,
            found.rows,
            given,
            state,
            optimizer,
            progress,
            computed,
            facts or BatchNumbers(),
            trained_in,
            checker,
            None if adapter is None else base,
        )
        report = step.report(later is not None)
        if points is not None and loaded is not None and isinstance(computed, Computed):
            report = _with_points(
                report,
                compare_points(
                    base,
                    loaded,
                    points,
                    computed,
                    trained_in=trained_in,
                    right_parameters=step.right_parameters,
                ),
            )
        elif given is not None and given.points:
            why = "no --batch says what they are"
            if differences:
                why = "--check-gradients checks those of parameters; leave it out"
            missing = [NotCompared("point", name, "unreadable", why) for name in given.points]
            report = replace(report, left=tuple(missing))
        return replace(
            report,
            model=str(model),
            after=None if after is None else str(after),
            adapter=None if adapter is None else str(adapter),
            left=(*found.left, *step.left, *report.left, *array_items("file", unread_files(paths))),
            accept=tuple(accept),
        )


def _with_points(report: StepReport, found: ComparedPoints) -> StepReport:
    """Return the report with compared points: rows, notes, and a cause for the first wrong one."""
    notes, causes = list(report.notes), list(report.causes)
    if found.scale != 1.0:
        notes.append(
            f"the gradients of all points are {found.scale:.6g} times the computed ones, as under "
            "a loss scale; those of the parameters are not, and the points are compared without it"
        )
    if found.first:
        stored = {row.key: (row.name,) for row in found.points}
        one = step_cause("backward_operation", found.says, found.first, stored, None)
        causes.append(one)
    return replace(
        report, points=found.points, left=found.left, causes=tuple(causes), notes=tuple(notes)
    )


ROUNDED_AWAY = "update_rounded_away"
NO_DECAY = ("decay_missing", "decay_rounded_away")
FINER_COPY = (
    " (or the trainer keeps a finer copy of the weights, which this checkpoint does not show: "
    "--trained-in float32 says so)"
)
UNNUMBERED = (
    "it is no first step, and nothing says its number: a later one needs --optimizer-state; step=1 "
    "says that it is the first"
)
MOST_COPIES = 64  # of the gradients, in the norm over ranks that hold the same
MOST_SHARED = 4  # mistakes of several parameters that are tried on all that differ
BLUR = 32.0  # of the root mean square of a trainer's rounding: no element of it is further off


def _few_bits(given: SavedArrays | None, parameters: Sequence[Parameter]) -> str | None:
    """Return "bfloat16" if the gradient of some matrix was made in 16 bits, else None.

    Autocast makes such gradients.
    """
    for parameter in parameters:
        reader = None if given is None or parameter.vector else given.reader(parameter)
        if reader is not None and reader.noise >= UNIT["F16"]:
            return "bfloat16"
    return None


@dataclass(frozen=True)
class _Compared:
    """How a given gradient compares with a computed one; `why` says why it was not compared."""

    facts: ArrayFacts | None = None  # of the computed one
    distance: float | None = None
    found: Judgement | None = None
    why: str = ""


@dataclass
class _Step:
    """One training step that is explained: its files, what is found, and what is left open."""

    model: Model
    parameters: Sequence[Parameter]
    given: SavedArrays | None
    state: OptimizerState | None
    optimizer: str | None
    progress: Callable[[int, int], None] | None
    computed: ComputedGradients | None
    facts: BatchNumbers
    trained_in: str | None
    checker: DifferenceChecker | None = None
    base: Model | None = None  # below an adapter

    def __post_init__(self) -> None:
        """Find LoRA pairs and the recipe, and add arrays that belong to no parameter to `left`."""
        self.notes: list[str] = []
        self.left: list[NotCompared] = []
        self.gradients: dict[str, ArrayFacts] = {}
        self.compared: dict[str, _Compared] = {}
        # The sums of the sizes of all elements of given gradients, by key.
        self.sums: dict[str, float] = {}
        # Keys whose gradient made the step, or was compared with the moments of after it.
        self.used: set[str] = set()
        # What the rates that groups began with are multiplied by; None: the state's are taken.
        self.schedule: float | None = None
        self.unclipped = False  # whether no clipping but the stated one was made
        self.clipped_before = False  # whether the given gradients were clipped before the step
        self.doubted = ""  # a cause that what was given does not tell from a right step
        self._leave_out_choices()
        self.pairs = lora_pairs(self.parameters)
        self.recipe = self._recipe()
        why = "it is of no parameter of the model"
        names = () if self.given is None else self.given.unplaced
        self.left += [NotCompared("gradient", name, "unreadable", why) for name in names]
        unread = self.facts.unread if self.checker is None else self.checker.unread
        self.left += array_items("batch array", unread)
        self.left += array_items("state array", () if self.state is None else self.state.unread)
        entries = () if self.state is None else self.state.left
        why = "which parameter it is of is not known"
        self.left += [NotCompared("moment", name, "unreadable", why) for name in entries]
        if self.state is not None and self.state.recognized:
            self.notes.append(
                "numbers of the state were told by the steps that their moments make, and by the "
                "order of layers and of modules in them"
            )
        if around := self._left_out_of_names():
            self.notes.append(f"names of the gradients are read without {' and '.join(around)}")

    def _left_out_of_names(self) -> list[str]:
        """Return, quoted, prefixes and endings that gradients' names have and weights' have not."""
        found: dict[str, None] = {}
        for row in self.parameters if self.given is not None else ():
            assert self.given is not None
            place = self.given.placed.get(row.key)
            for name in () if place is None else place.names:
                own = next((each for each in row.names if each in name), name)
                found |= dict.fromkeys(each for each in name.split(own, 1) if each)
        return [f"'{each}'" for each in found]

    def _leave_out_choices(self) -> None:
        """Move parameters that get no gradient by their nature from `parameters` to `left`.

        A parameter with a saved gradient or moment stays, and so does one with NaN or infinity.
        """
        kept = []
        states = () if self.state is None else (self.state.first, self.state.second)
        stores = [each for each in (self.given, *states) if each is not None]
        for row in self.parameters:
            role = split_key(row.key)[1]
            begin = next((each for each in ROLES_WITHOUT_GRADIENT if role.startswith(each)), None)
            saved = any(row.key in each.placed for each in stores)
            if begin is None or saved or not _is_finite(row):
                kept.append(row)
                continue
            why = ROLES_WITHOUT_GRADIENT[begin]
            self.left.append(NotCompared("parameter", row.key, "no counterpart", why))
        self.parameters = kept

    @property
    def right_parameters(self) -> bool:
        """Whether gradients of parameters were given, and all that were compared agree."""
        found = [one.found for one in self.compared.values() if one.found is not None]
        return bool(found) and all(one.verdict == "agrees" for one in found)

    def report(self, updates: bool) -> StepReport:
        """Return the report on all parameters.

        `updates` says that there is a checkpoint after the step.
        """
        norm = self._measure_gradients()
        rows, judged = self._judge_parameters(updates, norm, self.progress)
        if updates:
            rows, judged = self._judge_by_schedule(rows, judged, norm)
        if self._is_clipped_by_chance(judged):
            self.unclipped = True
            rows, judged = self._judge_parameters(updates, norm)
        if updates:
            rows = self._judge_as_first(rows, judged, norm)
        rows = self._mark_lost_decay(rows, judged)
        rows = self._accept_rounded_away_steps(rows, judged)
        self._share_guesses(judged, norm)
        _limit_missing_decays(judged)
        rows = self._open_unnumbered(rows, judged) if updates else rows
        stored = {row.key: row.names for row in self.parameters}
        causes = [
            *nonfinite_causes(rows, judged, stored),
            *self._frozen_factors(rows, judged, stored),
            *self._causes(rows, judged, stored, norm),
            *unknown_cause(rows, judged, stored),
        ]
        self._add_notes(rows, judged)
        return StepReport(
            "",
            None,
            None,
            None if self.recipe is None else self.recipe.text(),
            tuple(rows),
            tuple(causes),
            norms=Norms(norm, self._size()),
            loss=self._loss()[0],
            computed_on=self._loss()[1],
            notes=tuple(self.notes),
        )

    def _is_clipped_by_chance(self, judged: Mapping[str, Judgement]) -> bool:
        """Return whether clippings that nothing states explain few parameters, and no whole step.

        A step has one bound, to which all gradients are clipped: it has to explain most of the
        parameters that do not agree without clipping.
        """
        found = Counter(one.clipped for one in judged.values() if one.clipped is not None)
        if not found:
            return False
        wrong = sum(one.verdict == "differs" for one in judged.values())
        common = found.most_common(1)[0][1]
        return common <= (wrong + sum(found.values())) / 2

    def _accept_rounded_away_steps(
        self, rows: list[TensorStep], judged: dict[str, Judgement]
    ) -> list[TensorStep]:
        """Return the rows, with "agrees" for steps too small to show in a checkpoint of few bits.

        Weights that the trainer holds in a finer type begin as the stored ones, and a first step
        below the stored type's spacing then moves none of them. That is no mistake where the
        trainer says so (`trained_in`), or the bits of the other parameters show it. Where they do
        not tell, a mistake of the type is not confirmed, and `doubted` is set to it. Entries of
        `judged` are changed too.
        """
        if self.recipe is None or self.recipe.step not in (None, 1):
            return rows
        gone = {
            key
            for key, one in judged.items()
            if any(guess.cause == ROUNDED_AWAY for guess in one.guesses)
        }
        told = [one for key, one in judged.items() if key in gone or one.verdict == "agrees"]
        every = [one.held_counts for one in told]
        moved, due, other, far = (sum(each[part] for each in every) for part in range(4))
        held = held_in(int(moved), due, int(other), int(far))
        if self.trained_in != "float32" and held != "finer":
            if not held:
                self.doubted = ROUNDED_AWAY
            return rows
        for key in gone:
            one = judged[key]
            decay = one.decay_shown
            judged[key] = Judgement("agrees", whole=True, shows=one.exact, decay_shown=decay)
        return [replace(row, verdict="agrees", why="") if row.key in gone else row for row in rows]

    def _judge_as_first(
        self, rows: list[TensorStep], judged: dict[str, Judgement], norm: float | None
    ) -> list[TensorStep]:
        """Return the rows, with "differs" for later steps that were made as a first step.

        A new optimizer, which lost the moments, makes such steps. They need no moments, so this is
        tried for the parameters whose moments are not known; `judged` gets the mistake. It holds
        only if all of these made such a step, and no parameter agrees with what was stated: one
        that is trained from this step on makes a first step too. `norm` is that of all given
        gradients. Moments that no verdict needs then leave `left`.
        """
        recipe = self.recipe
        known = self.state is not None and not (self.state.indexed and self.state.left)
        first = recipe is None or recipe.step in (None, 1)
        if recipe is None or known or first or not recipe.keeps_moments:
            return rows
        says = new_optimizer_sentence(recipe)
        if any(row.verdict == "agrees" for row in rows):
            return rows
        found: dict[str, Judgement] = {}
        for parameter, row in zip(self.parameters, rows, strict=True):
            if row.verdict != "not compared" or parameter.after is None:
                continue
            held = self._inputs_of(parameter, norm)
            if held.first is not None or held.second is not None or held.gradient is None:
                continue
            one = changed(self._recipe_of(parameter), step=1)
            made = judge_update(parameter, one, held)
            parameter.drop()
            if made.verdict != "agrees":
                return rows
            guess = StepGuess("moments_lost", says, one)
            found[row.key] = replace(made, verdict="differs", why=guess.says, guesses=(guess,))
        judged |= found
        if found:
            self.left = [each for each in self.left if each.kind != "moment"]
        return [
            replace(row, verdict="differs", why=says) if row.key in found else row for row in rows
        ]

    def _open_unnumbered(
        self, rows: list[TensorStep], judged: dict[str, Judgement]
    ) -> list[TensorStep]:
        """Return the rows, with "not compared" for steps whose number nothing states.

        Without a stated number and a state a step is compared as the optimizer's first. If most
        parameters neither agree with that nor have a mistake that explains it, it is a later one,
        and mistakes found by the first step's rule mean nothing. Entries of `judged` are changed
        too.
        """
        recipe = self.recipe
        if recipe is None or not recipe.keeps_moments or recipe.step or self.state is not None:
            return rows
        moved = [row for row in rows if row.key in judged and row.update and row.update.moved]
        known = [row for row in moved if row.verdict == "agrees" or judged[row.key].guesses]
        later = {
            row.key
            for row in moved
            if judged[row.key].verdict == "differs"
            and not self._has_wrong_gradient(row.key)
            and all(_departs(guess) for guess in judged[row.key].guesses)
        }
        if len(known) >= len(moved) / 2:
            if moved and len(known) == len(moved):
                self.notes.append("no step=N is stated: the step is compared as the first")
            return rows
        judged |= {key: Judgement("not compared", UNNUMBERED) for key in later}
        return [
            replace(row, verdict="not compared", why=UNNUMBERED) if row.key in later else row
            for row in rows
        ]

    def _has_wrong_gradient(self, key: str) -> bool:
        """Return whether a parameter's given gradient is not the one computed of the batch."""
        one = self.compared.get(key)
        return one is not None and one.found is not None and one.found.verdict == "differs"

    def _mark_lost_decay(
        self, rows: list[TensorStep], judged: dict[str, Judgement]
    ) -> list[TensorStep]:
        """Return the rows, with "differs" for those whose decay the stored type rounded away.

        Their entries of `judged` are set to that mistake. A decay that is far below the type's
        spacing shows in few elements of one tensor, so the evidence of all tensors is added up.
        """
        agreeing = {
            key: one.decay_shown
            for key, one in judged.items()
            if one.verdict == "agrees" and one.decay_shown is not None and one.decay_shown.lost
        }
        if not sum(agreeing.values(), DecayEvidence()).none:
            return rows
        made = []
        for row in rows:
            if row.key in agreeing:
                recipe = self._recipe_of(next(p for p in self.parameters if p.key == row.key))
                guesses = self._lost_decay_guesses(recipe, row)
                judged[row.key] = Judgement("differs", guesses[0].says, guesses, whole=True)
                row = replace(row, verdict="differs", why=guesses[0].says)
            made.append(row)
        return made

    def _lost_decay_guesses(self, recipe: Recipe, row: TensorStep) -> tuple[StepGuess, ...]:
        """Return the guesses for a tensor that did not decay: decay rounded away, decay not made.

        If the state says the decay of the tensor's group, only one of the two is left.
        """
        decay = self._group_of(row.names[0]).get("weight_decay")
        lost = lost_decay_guess(recipe, row.encoding, stated=decay == recipe.wd)
        if decay == recipe.wd:
            return (lost,)
        return (no_decay_guess(recipe),) if decay == 0 else (lost, no_decay_guess(recipe))

    def _judge_parameters(
        self, updates: bool, norm: float | None, progress: Callable[[int, int], None] | None = None
    ) -> tuple[list[TensorStep], dict[str, Judgement]]:
        """Return (the report's row of every parameter, {key: verdict to look for causes by}).

        `updates` says that there is a checkpoint after the step. `norm` is that of all given
        gradients.
        """
        rows: list[TensorStep] = []
        judged: dict[str, Judgement] = {}
        for number, parameter in enumerate(self.parameters, 1):
            row, found = self._judge_parameter(parameter, updates, norm)
            rows.append(row)
            if found is not None:
                judged[parameter.key] = found
            parameter.drop()
            if progress is not None:
                progress(number, len(self.parameters))
        return rows, judged

    def _judge_by_schedule(
        self, rows: list[TensorStep], judged: dict[str, Judgement], norm: float | None
    ) -> tuple[list[TensorStep], dict[str, Judgement]]:
        """Return (rows, verdicts) by the rate that most parameters show, if a schedule sets it.

        A trainer saves the state after its schedule has set the next learning rate. So if only the
        state says the rate and the steps are of another, that is no difference: `left` gets the
        rate, and all parameters are judged by it. `norm` is that of all given gradients.
        """
        stated = {} if self.optimizer is None else parse_settings(self.optimizer)
        wrong = [key for key, one in judged.items() if one.verdict == "differs"]
        if self.state is None or not self.state.scheduled or "lr" in stated or not wrong:
            return rows, judged
        found: Counter[float] = Counter()
        self.schedule = 1.0
        for row in self.parameters:
            if row.key in wrong:
                one = self._judge_update(row, self._recipe_of(row), self._inputs_of(row, norm))
                row.drop()
                factors = [
                    guess.number[1]
                    for guess in one.guesses
                    if isinstance(guess, StepGuess) and guess.number and guess.number[0] == "factor"
                ]
                found[1.0 if one.verdict == "agrees" else factors[0] if factors else 0.0] += 1
        near = {
            factor: sum(n for other, n in found.items() if abs(other - factor) <= SLACK * factor)
            for factor in found
        }
        self.schedule = max(near, key=lambda factor: (factor > 0, near[factor]))
        if not self.schedule or near[self.schedule] <= len(wrong) / 2:
            self.schedule = None
            return rows, judged
        why = (
            f"the steps are those of {self.schedule:.4g} times the group's first rate; the state "
            "has what the schedule set for the next step (lr=RATE states this one's)"
        )
        self.left.append(NotCompared("rate", "lr", "no counterpart", why))
        return self._judge_parameters(True, norm)

    def _loss(self) -> tuple[float | None, str | None]:
        """Return (mean loss of the batch, device and arithmetic by which it was computed).

        (None, None) without a batch.
        """
        if self.computed is not None:
            return self.computed.loss, self.computed.how
        if self.checker is not None:
            return self.checker.loss, self.checker.how
        return None, None

    # --- what was said ---------------------------------------------------------------------

    def _recipe(self) -> Recipe | None:
        """Return the optimizer of the step with its settings and number; None if nothing gives it.

        Settings that --optimizer leaves out are taken from the state's groups. Raises UsageError
        where no learning rate is known.
        """
        if self.state is None:
            return None if self.optimizer is None else parse_recipe(self.optimizer)
        settings = _state_settings(self.state)
        stated = {} if self.optimizer is None else parse_settings(self.optimizer)
        name = stated.get("name", self.state.kind)
        if bool(self.state.factored) != (name == "adafactor"):
            kept = self.state.factored or "no second moments by row and column"
            raise UsageError(
                f"{self.state.path}: has {kept}, and --optimizer says {name}; expected the rule "
                "that made it: adafactor has moments by row and column, no other has"
            )
        if "lr" not in settings and "lr" not in stated:
            if self.optimizer is not None:
                return self._with_step_number(parse_recipe(self.optimizer))
            raise UsageError(
                f"{self.state.path}: holds no settings of its optimizer (no param_groups with lr); "
                "give them with --optimizer adamw:lr=..."
            )
        if "lr" in stated:  # a rule that states its rate is complete
            assert self.optimizer is not None
            return self._with_step_number(self._with_direction(parse_recipe(self.optimizer)))
        name = str(stated.get("name", self.state.kind))
        known = {"lr", "wd", *OPTIMIZERS[name].settings}
        held = {key: value for key, value in settings.items() if key in known}
        text = ",".join(f"{key}={value}" for key, value in held.items())
        self.notes.append(f"settings of the optimizer are those of its state: {name}:{text}")
        recipe = parse_recipe(f"{name}:{text}")
        return self._with_step_number(self._with_direction(changed(recipe, **stated)))

    def _with_direction(self, recipe: Recipe) -> Recipe:
        """Return the recipe (an optimizer's settings), with ascent if the state says maximize.

        A note is added then.
        """
        assert self.state is not None
        if not any(group.get("maximize") is True for group in self.state.groups):
            return recipe
        self.notes.append("the state says maximize: the step goes up the gradient")
        return changed(recipe, scale=-1.0)  # torch turns the gradient before all else

    def _with_step_number(self, recipe: Recipe) -> Recipe:
        """Return the recipe with its step number from the state, where --optimizer gives none.

        Raises UsageError where Adam's number is in neither, or where the state is of another step
        than this one or the one before.
        """
        if self.state is None:
            return recipe
        steps = self.state.steps
        if steps is None and recipe.step is None and recipe.row.second:
            raise UsageError(
                f"{self.state.path}: does not say how many steps were made; add step=N to "
                "--optimizer"
            )
        if steps is None or recipe.step is None:
            # A state of no steps is that of before the first.
            return changed(recipe, step=recipe.step if steps is None else max(1, steps))
        if recipe.step not in (steps, steps + 1):
            raise UsageError(
                f"{self.state.path}: is of step {steps}; expected that of step {recipe.step}, or "
                f"of {recipe.step - 1} before it"
            )
        return recipe

    def _recipe_of(self, parameter: Parameter) -> Recipe:
        """Return the optimizer and settings for one parameter: the step's, with its group's own.

        The learning rate and weight decay are those of the parameter's group in the optimizer's
        state, and so are settings that --optimizer does not state. Without a group, or where
        --optimizer states a rate that no group has, the step's common settings are returned.
        Sparse updates are for token tables alone.
        """
        assert self.recipe is not None
        recipe = self.recipe
        if recipe.sparse and "embd" not in parameter.key:
            recipe = changed(recipe, sparse=False)
        if self.state is not None and self.state.steps is not None and recipe.step is not None:
            less = self.state.steps - self.state.fewer.get(parameter.key, self.state.steps)
            recipe = changed(recipe, step=max(1, recipe.step - less))
        stated = {} if self.optimizer is None else parse_settings(self.optimizer)
        if self.state is None or ("lr" in stated and not self._has_rates(stated["lr"])):
            return recipe
        found = self.state.group_of(parameter.names[0])
        values = _group_settings(found)
        values = {
            field: value
            for field, value in values.items()
            if field in ("lr", "wd", *self.recipe.row.settings)
            and (field not in stated or field in ("lr", "wd"))
        }
        if "wd" in values and "decay_on" not in stated:
            values["decay_on"] = "all"
        first = found.get("initial_lr")
        if self.schedule is not None and isinstance(first, int | float):
            values["lr"] = first * self.schedule
        return changed(recipe, **values)

    def _group_of(self, name: str) -> Mapping[str, Any]:
        """Return the settings of the optimizer's group that has the parameter; {} without one."""
        return {} if self.state is None else self.state.group_of(name)

    def _has_rates(self, stated: float) -> bool:
        """Return whether the state's groups have several learning rates, one of them `stated`."""
        assert self.state is not None
        rates = {group.get("lr") for group in self.state.groups}
        return len(rates) > 1 and stated in rates

    def _inputs_of(self, parameter: Parameter, norm: float | None) -> StepInputs:
        """Return the gradient, the moments and the norms that the optimizer had for a parameter.

        `norm` is that of all given gradients. Without given gradients those computed of the batch
        are used. 8-bit moments of after the step are left out.
        """
        gradient = None if self.given is None else self.given.reader(parameter)
        if self.given is None:
            gradient = self._computed_reader(parameter)
            norm = self._size()
        if self.clipped_before:
            norm = None
        others = {}
        facts = self.gradients.get(parameter.key)
        if facts is None and self.given is None and parameter.key in self.compared:
            facts = self.compared[parameter.key].facts
        if norm is not None and facts is not None:
            others = {"norm": norm, "own_norm": facts.norm}
            others.update((str(by), size) for by, size in self._other_norms.items())
            if (kind := self._kind_norms.get(parameter.vector)) is not None:
                others["kind_norm"] = kind
        if self.unclipped:
            others["unclipped"] = 1.0
        group = self._group_of(parameter.names[0])
        for key, name in (("rate", "lr"), ("decay", "weight_decay")):
            if isinstance(group.get(name), float):
                others[key] = group[name]
        ungiven = bool(self.gradients) and parameter.key not in self.gradients
        parts = self._part_norms if norm is not None else {}
        bare = StepInputs(gradient, others=others, part_norms=parts, ungiven=ungiven)
        if self.state is None or self.recipe is None:
            return replace(bare, idle=self._is_idle(parameter.key))
        first, second = (kept.reader(parameter) for kept in (self.state.first, self.state.second))
        after = self._has_state_after()
        if after and self._has_codes(parameter):
            first = second = None  # rounded to 8 bits after the step was made of them
        # Without a count the rule has no use for one but that it is not the first step.
        own = self.state.fewer.get(parameter.key, self.state.steps)
        steps = next((n for n in (own, self.recipe.step) if n is not None), 2)
        flags = {group.get("decoupled_weight_decay") for group in self.state.groups}
        if flags == {False}:
            others["decoupled"] = 0.0
        if first is None and second is None:
            return replace(bare, idle=self._is_idle(parameter.key))
        return replace(bare, first=first, second=second, step=steps, after=after)

    @cached_property
    def _other_norms(self) -> dict[OtherNorm, float]:
        """The largest element and the sum of absolute values of all given gradients, by OtherNorm.

        Trainers may clip by these instead of the norm. {} without given gradients.
        """
        if not self.sums:
            return {}
        largest = max(each.largest for each in self.gradients.values())
        return {"largest": largest, "sum": sum(self.sums.values())}

    @cached_property
    def _part_norms(self) -> dict[str, float]:
        """The norms of parts of the gradients that the step is made of, by the name of the part.

        These are the given gradients, or without any those computed of the batch.
        """
        given = {key: one.norm for key, one in self.gradients.items()}
        return part_norms(given or self._computed_norms, self._optimizer_groups)

    @cached_property
    def _computed_norms(self) -> dict[str, float]:
        """{key: norm of the gradient that was computed of the batch}."""
        facts = {key: one.facts for key, one in self.compared.items()}
        return {key: one.norm for key, one in facts.items() if one is not None}

    @cached_property
    def _optimizer_groups(self) -> list[list[str]]:
        """The keys of the parameters of each group in the optimizer's state; [] for no groups."""
        groups = () if self.state is None else self.state.groups
        keys: list[list[str]] = [[] for _ in groups]
        for row in self.parameters if len(keys) > 1 else ():
            own = self._group_of(row.names[0])
            for number, group in enumerate(groups):
                if own is group:
                    keys[number].append(row.key)
        return keys

    @cached_property
    def _kind_norms(self) -> dict[bool, float]:
        """{False: norm of the given gradients of all matrices, True: that of all vectors}.

        These are the two groups that trainers make; {} where all are of one kind.
        """
        squares: dict[bool, float] = {}
        for row in self.parameters:
            if row.key in self.gradients:
                own = self.gradients[row.key].norm
                squares[row.vector] = squares.get(row.vector, 0.0) + own**2
        return {kind: each**0.5 for kind, each in squares.items()} if len(squares) == 2 else {}

    def _computed_reader(self, parameter: Parameter) -> RowReader | None:
        """Return a reader of the parameter's gradient as computed of the batch; None without one.

        Its `noise` (relative) and `blur` (absolute) are what the trainer's rounding may change.
        """
        if self.computed is None or parameter.key not in self.computed.keys:
            return None
        values = self.computed.gradient(parameter.key).astype(np.float64)
        values = values.reshape(matrix_shape(parameter.before.shape))
        rounding = self.computed.rounding(parameter.key) or 0.0
        # What the trainer's arithmetic may leave in one element, of the L2 distance over all.
        blur = BLUR * rounding / max(1.0, values.size**0.5)
        floor = UNIT["F32"] * float(np.abs(values).max(initial=0.0))
        size = float(np.linalg.norm(values))
        noise = max(UNIT["F32"], BLUR * rounding / size if size else 0.0)
        return RowReader(lambda start, stop: values[start:stop], noise, max(blur, floor))

    def _names_in_8_bits(self) -> Collection[str]:
        """Return the stored names of parameters whose moments are kept in 8 bits."""
        assert self.state is not None
        return {self.state.names.get(owner, plain_name(owner)) for owner in self.state.coded}

    def _has_codes(self, parameter: Parameter) -> bool:
        """Return whether the optimizer keeps the moments of a parameter in 8 bits."""
        return parameter.names[0] in self._names_in_8_bits()

    def _judge_update(self, parameter: Parameter, recipe: Recipe, held: StepInputs) -> Judgement:
        """Return the verdict on one parameter's change: whether the recipe gives it.

        A recipe is an optimizer with its settings, `held` what the optimizer had. Where the
        change differs and the state may be that of before the step, that is tried too.
        """
        if recipe.name == "adafactor":
            recipe = self._adafactor_recipe(parameter, recipe, held)
        state = self.state
        if state is not None and parameter.key in state.fewer and is_idle(parameter, held):
            why = f"made {held.step} of {state.steps} steps, and none now: it did not move"
            return Judgement("not compared", why)
        found = judge_update(parameter, recipe, held)
        if held.ungiven and self.state is not None and self.state.steps is None:
            # A state without step counts may be that of before the step.
            before = replace(held, step=max(1, held.step - 1), after=False)
            alone = moved_without_gradient(parameter, recipe, before)
            found = found if alone is None else alone
        counted = state is not None and state.steps is not None
        if found.verdict == "agrees" and counted and not self._has_codes(parameter):
            found = judge_count(parameter, recipe, held) or found
        if found.verdict == "agrees":
            found = self._with_moments(parameter, recipe, held, found)
        if found.verdict == "differs" and self._may_be_before(held):
            first = 1 if held.first is None else held.step
            step = first if self.state is None or self.state.steps is None else held.step + 1
            before = replace(held, step=held.step if counted else first - 1, after=False)
            other = judge_update(parameter, changed(recipe, step=step), before)
            if other.verdict == "agrees" or (other.guesses and not found.guesses):
                self.used.add(parameter.key)
                found = other
        found = self._by_unseen(parameter, recipe, held, found)
        return self._without_inputs(parameter, held, self._by_other_rule(parameter, found))

    def _by_unseen(
        self, parameter: Parameter, recipe: Recipe, held: StepInputs, found: Judgement
    ) -> Judgement:
        """Return "differs" for a parameter whose gradient the optimizer never saw, else `found`.

        It did not move, and the state has moments of others and none of it. It would have made a
        first step, which has to be large enough to be seen.
        """
        state = self.state
        if found.verdict != "not compared" or state is None or self.given is None:
            return found
        unknown = state.indexed and state.left
        coded = parameter.names[0] in self._names_in_8_bits()
        moments = held.first is not None or held.second is not None
        if unknown or coded or moments or held.gradient is None or not recipe.keeps_moments:
            return found
        gradient = self.gradients.get(parameter.key)
        if not state.first.placed or gradient is None or not gradient.largest:
            return found
        first = judge_update(parameter, changed(recipe, step=1), held)
        frozen = next((each for each in first.guesses if each.cause == "frozen"), None)
        if not isinstance(frozen, StepGuess):
            return found
        says = "did not move, and the optimizer's state has nothing of it: it is in no group"
        return replace(first, why=says, guesses=(replace(frozen, says=says),))

    def _by_other_rule(self, parameter: Parameter, found: Judgement) -> Judgement:
        """Return "not compared" for a differing step if the state has an array of no known rule.

        Such is the remainder that Kahan summation carries: another rule than the stated one may
        have made the step. Else `found`.
        """
        names = {} if self.state is None else self.state.unused
        name = names.get(parameter.names[0]) or names.get(parameter.key)
        if found.verdict != "differs" or name is None:
            return found
        why = f"the state has {name}, which no rule here uses: the step may be that of another rule"
        return replace(found, verdict="not compared", why=why, guesses=())

    def _with_moments(
        self, parameter: Parameter, recipe: Recipe, held: StepInputs, found: Judgement
    ) -> Judgement:
        """Return the verdict on a right update, with whether its moments have the given gradient.

        The moments of after the step alone give the step; `found` is the verdict on that. Whether
        the gradient is in them is another question; `used` gets the parameter where it was
        answered.
        """
        if self.given is None or held.gradient is None:
            return found
        if held.first is None or not held.after or recipe.nesterov or recipe.name == "lion":
            self.used.add(parameter.key)  # the step was made of it
            return found
        other = judge_moments(parameter, recipe, held)
        if other is None:
            return found
        self.used.add(parameter.key)
        if other.verdict == "agrees":
            return replace(found, clipped=other.clipped or found.clipped)
        return replace(found, verdict="differs", why=other.why, guesses=other.guesses, whole=True)

    def _adafactor_recipe(self, parameter: Parameter, recipe: Recipe, held: StepInputs) -> Recipe:
        """Return the recipe with the factor that Adafactor's norms put on one parameter's rate.

        The rate is times the weight's root mean square where it is scaled by the parameter, and the
        step is divided by its own root mean square where that is above the threshold, 1. torch
        bounds the rate by one over the root of the step's number, too; transformers scales the
        decay with the rate. Sources: torch.optim.Adafactor, transformers.optimization.Adafactor.
        """
        if self.state is None or held.gradient is None or held.second is None or not recipe.lr:
            return recipe
        group = self.state.group_of(parameter.names[0])
        squares = weights = count = 0.0
        for start, stop, values, _ in pieces(parameter.before, parameter.after):
            root = np.sqrt(np.maximum(held.second.rows(start, stop), 0.0))
            step = held.gradient.rows(start, stop) / np.where(root == 0, 1.0, root)
            squares += float(np.square(step).sum())
            weights += float(np.square(values, dtype=np.float64).sum())
            count += step.size
        threshold = next((group[key] for key in ("d", "clip_threshold") if key in group), 1.0)
        of_torch = "clip_threshold" not in group
        smallest = group.get("eps", (None, 1e-3))
        least = float(smallest[1]) if isinstance(smallest, list | tuple) else 1e-3
        rate = recipe.lr
        if of_torch and recipe.step is not None:
            rate = min(rate, recipe.step**-0.5)
        if of_torch or group.get("scale_parameter") is True:
            rate *= max(least, (weights / count) ** 0.5)
        decay = recipe.decay_factor if of_torch else recipe.decay_factor * rate / recipe.lr
        over = max(1.0, (squares / count) ** 0.5 / float(threshold))
        return changed(recipe, relative=rate / over / recipe.lr, decay_factor=decay)

    def _may_be_before(self, held: StepInputs) -> bool:
        """Return whether the state may be the one before the step, not the one after it.

        That is possible where the gradient is given, and the state or --optimizer does not say the
        step's number.
        """
        if self.state is None or held.gradient is None or not held.after:
            return False
        stated = {} if self.optimizer is None else parse_settings(self.optimizer)
        return (held.first is not None) and (self.state.steps is None or "step" not in stated)

    def _without_inputs(
        self, parameter: Parameter, held: StepInputs, found: Judgement
    ) -> Judgement:
        """Return `found`, or "not compared" where only the sizes of steps agree.

        Sizes do not show that a parameter is right if others have a gradient or moments and this
        one has none.
        """
        if found.verdict != "agrees" or not found.signs or held.idle:
            return found
        if self.state is not None and parameter.names[0] in self._names_in_8_bits():
            why = (
                "its moments were rounded to 8 bits after the step; give those of before it and "
                "--grads"
            )
        elif self.state is not None and self.state.steps != 0:
            why = "the optimizer's state has no moments of it"
            if self.state.indexed and not self.state.recognized and self.state.left:
                why = "no number of the optimizer's state is known to be its own"
        elif self.given is not None:
            why = "no gradient of it was given"
        else:
            return found
        return replace(found, verdict="not compared", why=why)

    def _is_idle(self, key: str) -> bool:
        """Return whether a parameter is A of a LoRA pair whose B is zero before the step.

        Its gradient is then zero: that of A is B times something, that of B is A times something.
        """
        other = self.pairs.get(key)
        return key.endswith(".lora_a") and other is not None and is_zero(other.before)

    # --- one parameter ---------------------------------------------------------------------

    def _measure_gradients(self) -> float | None:
        """Return the norm over all given gradients, None without any.

        Sets `gradients` to the size of each, and `compared` to how it compares with the computed
        one.
        """
        for parameter in self.parameters:
            place = None if self.given is None else self.given.placed.get(parameter.key)
            if self.given is not None and place is not None:
                values = self.given.values(parameter, place)
                self.gradients[parameter.key] = array_facts(values)
                self.sums[parameter.key] = float(np.abs(values).sum(dtype=np.float64))
        for parameter in self.parameters:
            if self.computed is not None:
                self.compared[parameter.key] = self._compare_computed(parameter, self.computed)
            elif self.checker is not None:
                self.compared[parameter.key] = self._compare_checked(parameter, self.checker)
        if self.given is None:
            return None
        norm = float(np.sqrt(sum(row.norm**2 for row in self.gradients.values())))
        self._join_factors()
        self._accept_clipping(norm)
        self._explain_backward()
        self._judge_second_table(self.given)
        return norm

    def _judge_second_table(self, given: SavedArrays) -> None:
        """Judge a tied embedding of which the head's gradient is given too, and is another one.

        It "differs" then. If the sum of both gradients is the computed one, the cause is
        "gradient_tied": the trainer holds the embedding and the head as two weights.
        """
        found = given.second_table(self.parameters)
        if found is None or not found[1]:
            return
        name, apart = found
        table = next(row for row in self.parameters if row.key == TABLE)
        why = f"{name} is the same weight, and its gradient is another one, {apart:.3g} from it"
        judged = Judgement("differs", why, whole=True)
        one = self.compared.get(TABLE, _Compared())
        self.compared[TABLE] = replace(one, found=judged, why="")
        if self.computed is None or TABLE not in self.computed.keys:
            return
        case = self._gradient_case(table, self.computed)
        head = given.values(table, given.placed[HEAD]).astype(np.float64)
        both = replace(case, given=case.given + head.reshape(case.given.shape))
        if judge_gradient(both, self.computed.rounding(TABLE)).verdict == "agrees":
            says = (
                f"the trainer holds the table and the head, {name}, as two weights: each has a "
                "part of the gradient, and both together are the computed one"
            )
            self._accept_mistake(BackwardGuess("gradient_tied", says), [TABLE], ())

    def _join_factors(self) -> None:
        """Replace similar factors measured in several gradients by one common factor, if it fits.

        It is tried on all gradients with a measured factor and on those that nothing explains; a
        gradient that it does not explain keeps its own factor. Changes `compared`.
        """
        measured = {}
        for key, one in self.compared.items():
            for guess in () if one.found is None else one.found.guesses:
                if isinstance(guess, GradientGuess) and guess.factor is not None:
                    measured[key] = guess.factor
        by_key = {row.key: row for row in self.parameters}
        counts = self.facts.counts if self.checker is None else self.checker.counts
        differ = [
            key
            for key, one in self.compared.items()
            if one.found is not None
            and one.found.verdict == "differs"
            and (key in measured or not one.found.guesses)
        ]
        for joined, keys in joined_factors(measured, counts):
            for key in [*differ]:
                held = self.compared[key].found
                assert held is not None
                if self.computed is None:
                    made = key in keys  # a pass along the factor was made of each
                else:
                    case = self._gradient_case(by_key[key], self.computed)
                    case = case.with_rounding(self.computed.rounding(key))
                    wanted = joined.made(case)
                    alone = key in keys and joined.right(case)
                    made = alone or case.near(case.given, wanted, case.residual)
                if made:
                    differ.remove(key)
                    others = [each for each in held.guesses if not getattr(each, "factor", None)]
                    found = replace(held, guesses=(*others, joined))
                    self.compared[key] = replace(self.compared[key], found=found)

    def _explain_backward(self) -> None:
        """Set, in `compared`, mistakes of a whole backward pass that explain the gradients.

        They are looked for where a gradient differs that no mistake of one parameter explains. The
        batch's gradients are computed with the mistake to see whether it does.
        """
        computed = self.computed
        if not isinstance(computed, Computed):
            return
        for row in BACKWARDS:
            case = self._backward_case(computed)
            unlike = case.wrong or case.open  # what few bits may leave may be a small mistake, too
            if all(self._has_untied_guess(key) for key in unlike):
                break
            for guess in row.find(case):
                keys = self._keys_explained_by(guess, computed, case)
                if keys:
                    self._accept_mistake(guess, keys, case.right, guess.most)
                    break
        self._doubt_tied_tables()

    def _doubt_tied_tables(self) -> None:
        """Drop the guess that a tied embedding has one part of its gradient, where others differ.

        The embedding's own part comes through all layers: if other gradients differ unexplained,
        that part is wrong too, and may be there. Changes `compared`.
        """
        found = {key: one.found for key, one in self.compared.items() if one.found is not None}
        if not any(one.verdict == "differs" and not one.guesses for one in found.values()):
            return
        for key, one in found.items():
            if one.guesses and not self._has_untied_guess(key):
                self.compared[key] = replace(self.compared[key], found=replace(one, guesses=()))

    def _backward_case(self, computed: Computed) -> BackwardCase:
        """Return all gradients as they compare now, without those that a mistake explains."""
        found = {key: one.found for key, one in self.compared.items() if one.found is not None}
        given = {key for key, one in found.items() if any(map(_is_of_backward, one.guesses))}
        wrong = {key for key, one in found.items() if one.verdict == "differs"}
        by_key = {row.key: row for row in self.parameters}
        norms = {}
        for key, one in self.compared.items():
            if key in self.gradients and one.facts is not None:
                norms[key] = self.gradients[key].norm, one.facts.norm
        return BackwardCase(
            lambda key: self._gradient_case(by_key[key], computed),
            {row.key: row.names for row in self.parameters},
            frozenset(key for key, one in found.items() if one.verdict == "agrees"),
            frozenset(wrong - given),
            frozenset(key for key in self.compared if key not in found and key in computed.keys),
            norms,
            computed.recompute,
            self.facts.labels,
            self.facts.row_length,
            self.facts.packed,
            _dropout_rates(self.model, self.base or self.model),
            frozenset(key for key, one in found.items() if one.verdict == "not compared"),
            computed.by_label,
            self.facts.routers,
            self.facts.experts,
            self.facts.padded_first,
            self.facts.adapter,
            self.facts.padded_last,
            _norm_offset(self.base or self.model),
            None if self.base is None else base_quantization(self.base),
            self.facts.partly_labelled,
        )

    def _has_untied_guess(self, key: str) -> bool:
        """Return whether some guess explains this parameter's gradient by itself.

        The guess that a tied embedding has one of its two uses does not count: it says little where
        other gradients differ too.
        """
        found = self.compared[key].found
        return found is not None and any(g.cause != "gradient_tied" for g in found.guesses)

    def _keys_explained_by(
        self, guess: BackwardGuess, computed: Computed, case: BackwardCase
    ) -> frozenset[str]:
        """Return the keys of the gradients that a mistake explains; empty if it does not hold.

        It holds if the gradients computed with the mistake are the given ones, in every parameter,
        and little of their differences remains. A gradient that was not given has to be zero then.
        """
        found = {key: one.found for key, one in self.compared.items() if one.found is not None}
        unlike = frozenset(
            key
            for key, one in found.items()
            if one.verdict != "agrees" and not any(map(_is_of_backward, one.guesses))
        )
        if guess.source:
            return frozenset(guess.source)  # they were compared where they were found
        if guess.change is None:
            return unlike & case.wrong
        made = computed.recompute(guess.change)
        for key in case.missing:
            if key in made.keys and made.gradient(key).any():
                return frozenset()
        left = there = 0.0
        for key in unlike if guess.alone else unlike | case.right:
            pair = case.case(key)
            values = (
                made.gradient_near(key, pair.given)
                if key in made.keys
                else np.zeros_like(pair.computed)
            )
            other = replace(pair, computed=values.astype(np.float64).reshape(pair.given.shape))
            if judge_gradient(other, computed.rounding(key)).verdict != "agrees":
                return frozenset()
            if key in unlike and pair.computed.any() and other.computed.any():
                left, there = left + other.distance**2, there + pair.distance**2
        # What leaves as much as there was is within the trainer's rounding, and says nothing.
        return unlike | case.missing if left <= PART**2 * there else frozenset()

    def _accept_mistake(
        self,
        guess: BackwardGuess,
        keys: Collection[str],
        right: Collection[str],
        most: Certainty = "confirmed",
    ) -> None:
        """Set, in `compared`, a guessed mistake as the one explanation of the gradients of `keys`.

        `right` are the keys of the gradients that agree, `most` the highest certainty it may get.
        """
        says = guess.says
        change = guess.change
        if change is not None and (change.operation is not None or change.misread is not None):
            says += f"; backward from the loss it begins {first_place(keys, right)}"
        one = BackwardFound(guess.cause, says, lambda case: case.given, most=most)
        for key in keys:
            judged = Judgement("differs", says, (one,), whole=True)
            self.compared[key] = replace(self.compared[key], found=judged, why="")

    def _accept_clipping(self, norm: float) -> None:
        """Set given gradients to "agrees" if they are the computed ones clipped to a usual bound.

        `norm` is that of all given gradients. A note is added then. Gradients that were clipped
        under a loss scale are set to that mistake instead.
        """
        held = [one.found for one in self.compared.values() if one.found is not None]
        before = self._size()
        if self.computed is not None and any(one.verdict == "differs" for one in held):
            by_key = {row.key: row for row in self.parameters}
            cases = {
                key: self._gradient_case(by_key[key], self.computed)
                for key, one in self.compared.items()
                if one.found is not None
            }
            clipping = value_clipping(cases)
            if clipping is not None:
                self._accept_clipped(clipping, max(abs(x.computed).max() for x in cases.values()))
                return
            each = tensor_clipping(cases)
            each = each or row_clipping(cases, lambda key: self._weights_of_rows(by_key[key]))
            if each is not None:
                self._accept_own_norms(*each)
                return
        bounds = (
            *CLIPS,
            *(() if self.recipe is None or not self.recipe.clip else (self.recipe.clip,)),
        )
        bound = next((each for each in bounds if abs(norm - each) <= 1e-3 * each), None)
        if bound is None and norm:  # a bound is a number that somebody wrote
            written = float(f"{norm:.1g}")
            bound = written if abs(norm - written) <= 1e-5 * written else None
        if before is None or norm >= before or not held:
            return
        causes = [{guess.cause for guess in one.guesses} for one in held]
        if not all("gradient_factor" in each for each in causes):
            return
        if bound is not None:
            self._accept_clipped(Clipping("norm", bound), before)
            return
        other = other_norm_clipping(self._other_norms, norm / before, bounds)
        if other is not None:
            size = next(value for by, value in self._other_norms.items() if by == other.by)
            self._accept_clipped(other, size * before / norm)
            return
        stated = None if self.recipe is None else self.recipe.clip
        parts = part_norms(self._computed_norms, self._optimizer_groups)
        of_part = clipping_by_part(parts, norm / before, before, (stated,) if stated else CLIPS)
        if of_part is not None:
            says, one = of_part
            says += "" if stated else ON_PURPOSE
            keys = [key for key, each in self.compared.items() if each.found is not None]
            sure = stated is not None and one
            self._accept_mistake(
                BackwardGuess("clip_by_part", says), keys, (), "confirmed" if sure else "explained"
            )
            self.clipped_before = True
            return
        # A factor that is a power of two by itself is a loss scale or ranks.
        scaled = scaled_bound(norm, bounds)
        if scaled is not None and simple_value(norm / before, SLACK * norm / before) is None:
            self._accept_clipped(Clipping("norm", *scaled), before)

    def _weights_of_rows(self, parameter: Parameter) -> F64:
        """Return a parameter before the step, float64 [rows, last axis]; a vector is one row."""
        values = parameter.before.numpy().astype(np.float64)
        parameter.drop()
        return values.reshape((1, -1) if parameter.vector else matrix_shape(values.shape))

    def _accept_own_norms(self, says: str, keys: Collection[str]) -> None:
        """Set the gradients of `keys` to the mistake that each was clipped by its own norm.

        `says` describes it. It is confirmed where clipping by the norm of all is stated, else only
        explained.
        """
        stated = self.recipe is not None and self.recipe.clip is not None
        if not stated:
            says += ON_PURPOSE
        guess = BackwardGuess("clip_by_tensor", says)
        self._accept_mistake(guess, keys, (), "confirmed" if stated else "explained")

    def _accept_clipped(self, clipping: Clipping, before: float) -> None:
        """Set all compared gradients to "agrees" as clipped ones, or to a mistake of clipping.

        A mistake is clipping under a loss scale, or by another number than the stated norm.
        `before` is the norm, the largest element or the sum before `clipping`.
        """
        keys = [key for key, one in self.compared.items() if one.found is not None]
        recipe = self.recipe
        if clipping.by != "norm" and recipe is not None and recipe.clip and not recipe.clip_value:
            cause = "clip_by_value" if clipping.by == "value" else "clip_other_norm"
            says = f"{clipping.says}, from {before:.4g}, and not the norm of all"
            self._accept_mistake(BackwardGuess(cause, says), keys, ())
            return
        if clipping.scale != 1.0:
            says = f"{clipping.says}: it was {before:.4g} without the scale"
            guess = BackwardGuess("clip_before_unscale", says)
            self._accept_mistake(guess, keys, ())
            return
        for key in keys:
            agreed = Judgement("agrees", whole=True)
            self.compared[key] = replace(self.compared[key], found=agreed)
        if clipping.by == "norm":
            text = f"clipping to the norm {clipping.bound:g}; it was {before:.4g}"
        elif clipping.by in CLIPPED_BY:
            text = (
                f"clipping by {CLIPPED_BY[clipping.by]} to {clipping.bound:g}; it was {before:.4g}"
            )
        else:
            text = f"clipping each element to {clipping.bound:g}; the largest was {before:.4g}"
        self.notes.append(f"the gradients are those of after {text}")

    def _judge_parameter(
        self, parameter: Parameter, updates: bool, norm: float | None
    ) -> tuple[TensorStep, Judgement | None]:
        """Return (the report's row of one parameter, the verdict by which causes are looked for).

        `updates` says that there is a checkpoint after the step. `norm` is that of all given
        gradients. The verdict is None for a gradient that is not finite, and where nothing was
        compared.
        """
        before = parameter.before
        paired = updates and parameter.after is not None
        facts, size = None, None
        if paired and same_bytes(parameter):
            facts = UpdateFacts(int(np.prod(before.shape)), 0, 0, 0.0, 0.0)
        elif paired:
            sums = Sums()
            for _, _, values, after in pieces(before, parameter.after):
                assert after is not None
                sums.add(values, after, before.encoding)
            facts, size = sums.facts(), sums.weight**0.5
        gradient = self.gradients.get(parameter.key)
        row = TensorStep(
            parameter.key,
            parameter.names,
            before.shape,
            before.encoding,
            size,
            gradient,
            update=facts,
        )
        one = self.compared.get(parameter.key, _Compared())
        wrong = one.found
        row = replace(row, computed=one.facts, distance=one.distance, why=one.why)
        if wrong is not None:
            row = replace(row, verdict=wrong.verdict, why=wrong.why)
        if gradient is not None and gradient.nonfinite:
            why = f"its gradient holds {gradient.nonfinite} NaN or infinite numbers"
            return replace(row, verdict="differs", why=why), None
        if not paired:
            why = row.why or "no batch says its gradient, and no checkpoint is of after the step"
            return replace(row, why=why if row.verdict == "not compared" else row.why), wrong
        if self.recipe is None:
            if row.verdict == "differs":
                return row, wrong
            why = row.why or "no --optimizer says what the step was to do"
            return replace(row, verdict="not compared", why=why), wrong
        recipe = self._recipe_of(parameter)
        found = self._judge_update(parameter, recipe, self._inputs_of(parameter, norm))
        assert row.update is not None
        update = replace(row.update, step=found.step, decay=found.decay, arrived=found.arrived)
        row = replace(row, update=update)
        if row.verdict == "differs" and found.verdict != "differs":
            return row, wrong
        if one.why and found.verdict == "agrees":  # the gradient could not be compared
            return replace(row, verdict="not compared"), found
        guesses = (*(() if wrong is None else wrong.guesses), *found.guesses)
        row = replace(row, verdict=found.verdict, why=found.why)
        return row, replace(found, guesses=guesses)

    def _compare_computed(self, parameter: Parameter, computed: ComputedGradients) -> "_Compared":
        """Return how a parameter's given gradient compares with the one computed of the batch.

        If either is missing, the result's `why` names it.
        """
        key = parameter.key
        if key not in computed.keys:
            return _Compared(why="no gradient of it was computed here")
        values = computed.gradient(key)
        # Without any gradients the update alone is held to those computed here.
        why = "" if self.given is None else "no gradient of it was given"
        found = _Compared(array_facts(values), why=why)
        place = None if self.given is None else self.given.placed.get(key)
        if self.given is None or place is None:
            return found
        case = self._gradient_case(parameter, computed)
        found = replace(found, facts=array_facts(case.computed))
        if not np.isfinite(case.given).all():
            return replace(found, why="")
        judged = judge_gradient(
            case,
            computed.rounding(key),
            stated=self.trained_in is not None,
            floor=ZERO * self._largest_norm,
            flips=computed.flips if isinstance(computed, Computed) else (),
        )
        nothing = judged.verdict == "agrees" and case.distance > 1  # rounding of zero on both sides
        return _Compared(found.facts, None if nothing else case.distance, judged)

    @cached_property
    def _largest_norm(self) -> float:
        """The norm of the largest computed gradient, 0.0 without any."""
        assert self.computed is not None
        each = (self.computed.gradient(key) for key in self.computed.keys)
        return max((float(np.linalg.norm(values)) for values in each), default=0.0)

    def _gradient_case(self, parameter: Parameter, computed: ComputedGradients) -> GradientCase:
        """Return a parameter's given gradient with the computed one, both as matrices."""
        assert self.given is not None
        rows = matrix_shape(parameter.before.shape)
        given = self.given.values(parameter, self.given.placed[parameter.key])
        given = given.astype(np.float64).reshape(rows)
        values = computed.gradient_near(parameter.key, given)
        return GradientCase(
            parameter.key,
            given,
            values.astype(np.float64).reshape(rows),
            self._is_gradient_coarse(parameter, self.given),
            self._cut_sizes(),
            self.facts.counts,
            self.facts.tokens,
            self.facts.repeated,
            earlier=self._earlier_gradient(parameter),
        )

    def _earlier_gradient(self, parameter: Parameter) -> F64 | None:
        """Return the gradient of the step before, float64 [rows, columns], None if it is not known.

        The first moment of before the second step is that gradient, or 1 - b1 times it.
        """
        state, recipe = self.state, self.recipe
        if state is None or recipe is None or recipe.step != 2 or state.steps not in (None, 1):
            return None
        recipe = self._recipe_of(parameter)
        reader = state.first.reader(parameter)
        decayed = recipe.adds_decay_to_gradient and recipe.decays(parameter.vector)
        if reader is None or decayed or recipe.name not in AVERAGED:
            return None
        whole = 1 - recipe.b1 if recipe.row.second else 1.0
        rows, columns = matrix_shape(parameter.before.shape)
        return reader.rows(0, rows).astype(np.float64).reshape(rows, columns) / whole

    def _is_gradient_coarse(self, parameter: Parameter, given: SavedArrays) -> bool:
        """Return whether the weight, its given gradient or the run has 16 bits or fewer."""
        if self.trained_in in ("bfloat16", "float16") or parameter.before.encoding in COARSE:
            return True
        reader = given.reader(parameter)
        return reader is not None and reader.noise >= UNIT["F16"]

    def _compare_checked(self, parameter: Parameter, checker: DifferenceChecker) -> "_Compared":
        """Return how a parameter's given gradient compares with differences of the batch's loss.

        Without a given gradient, or a pass that reads the weight, its `why` says so. Nothing is in
        it for a gradient that is not finite.
        """
        place = None if self.given is None else self.given.placed.get(parameter.key)
        if self.given is None or place is None:
            return _Compared(why="no gradient of it was given")
        coarse = self._is_gradient_coarse(parameter, self.given)
        given = self.given.values(parameter, place).astype(np.float64)
        if not np.isfinite(given).all():
            return _Compared()
        largest = max(one.norm for one in self.gradients.values())
        found, apart = checker.judge(parameter.key, given, coarse, largest)
        if found is None:
            return _Compared(why="no pass of the batch reads it")
        return _Compared(None, apart, found)

    def _size(self) -> float | None:
        """Return the L2 norm over all gradients computed of the batch, None without any."""
        known = [one.facts.norm for one in self.compared.values() if one.facts is not None]
        return float(np.sqrt(sum(each**2 for each in known))) if known else None

    def _cut_sizes(self) -> dict[str, int]:
        """Return {hyperparameter: value} of the numbers of heads, key-value heads and experts.

        Weights are divided by these. `tied_embeddings` is among them, as 0 or 1. What the model
        does not have is left out.
        """
        hyper = hyper_of(self.base or self.model)
        names = ("n_heads", "n_kv_heads", "n_experts", "tied_embeddings")
        found = {name: int(hyper[name]) for name in names if isinstance(hyper.get(name), int)}
        if self.base is None and _head_is_table(self.model, self.parameters):
            found["tied_embeddings"] = 1
        return found

    def _given_options(self) -> frozenset[str]:
        """Return which of the options --grads and --optimizer-state were given."""
        held = {"--grads": self.given, "--optimizer-state": self.state}
        return frozenset(name for name, arrays in held.items() if arrays is not None)

    def _causes(
        self,
        rows: list[TensorStep],
        judged: Mapping[str, Judgement],
        stored: Mapping[str, Sequence[str]],
        norm: float | None,
    ) -> Iterator[NamedCause]:
        """Yield a cause for each mistake that was guessed for parameters, with its proof.

        The proof is over all their elements. Sets the `why` of the rows that it explains.
        `stored` is {key: names in the file}, `norm` that of all given gradients.
        """
        known = {row.key: row for row in self.parameters}
        at = {row.key: number for number, row in enumerate(rows)}
        mistakes = fewest_mistakes(judged)
        told = {one for one, _ in mistakes if self._clipped_group(one, judged) is not None}
        for one, also in joined_factor_causes(mistakes, told):
            given = every = 0.0
            for key in one.keys:
                guess = next(
                    each
                    for each in judged[key].guesses
                    if each.cause == one.cause and each.says in (one.parts or (one.says,))
                )
                share, size = 1.0, float(np.prod(known[key].before.shape))
                if isinstance(guess, StepGuess) and not judged[key].whole:
                    held = self._inputs_of(known[key], norm)
                    share = share_reproduced(known[key], guess, held, judged[key].signs)
                    known[key].drop()
                given, every = given + share * size, every + size
                rows[at[key]] = replace(rows[at[key]], why=guess.says)
            share = given / max(1.0, every)
            # An element says one digit at least: whether it moved as the mistake would move it.
            proof = cap_proof(Proof(every, share, one.free, 1.0), CAUSES[one.cause].most)
            if proof is not None:
                proof = cap_proof(proof, guess.most)
            if one.parts and proof is not None:
                proof = cap_proof(proof, "explained")  # what gives the factors is not known
            cause = one.cause
            if (said := self._clipped_group(one, judged)) is not None:
                cause, one = said[0], replace(one, says=said[1])
                proof = None if proof is None else cap_proof(proof, "explained")
            text = one.says + rivals_text(cause, also, self._given_options())
            if cause == self.doubted:
                proof = None if proof is None else cap_proof(proof, "explained")
                text += FINER_COPY
            largest = largest_update(rows, one.keys)
            yield step_cause(cause, text, one.keys, stored, proof, size=largest, also=also)

    def _share_guesses(self, judged: dict[str, Judgement], norm: float | None) -> None:
        """Add to each differing parameter of `judged` guesses made for others that explain it too.

        A number fitted to a small parameter is inexact, so the numbers fitted to others are tried.
        Only the MOST_SHARED commonest guesses are. `norm` is that of all given gradients.
        """
        wrong = {key: one for key, one in judged.items() if one.verdict == "differs"}
        fitted = [
            guess
            for one in wrong.values()
            for guess in one.guesses
            if isinstance(guess, StepGuess) and guess.number is not None
        ]
        counts = Counter((guess.cause, guess.says) for guess in fitted)
        numbers = {(guess.cause, guess.says): guess.number for guess in reversed(fitted)}
        often = [said for said, count in counts.most_common(MOST_SHARED) if count > 1]
        for parameter in self.parameters:
            if parameter.key not in wrong:
                continue
            known = {(guess.cause, guess.says) for guess in wrong[parameter.key].guesses}
            new = [said for said in often if said not in known]
            if not new:
                continue
            inputs, recipe = self._inputs_of(parameter, norm), self._recipe_of(parameter)
            for cause, says in new:
                one, number = judged[parameter.key], numbers[cause, says]
                assert number is not None
                held = replace(inputs, others={**inputs.others, number[0]: number[1]})
                found = self._judge_update(parameter, recipe, held)
                same = [each for each in found.guesses if (each.cause, each.says) == (cause, says)]
                judged[parameter.key] = replace(one, guesses=(*one.guesses, *same))
            parameter.drop()

    def _clipped_group(
        self, one: Mistake, judged: Mapping[str, Judgement]
    ) -> tuple[str, str] | None:
        """Return (cause, sentence) if some steps' factor comes from clipping their group alone.

        The group was clipped a second time to a usual bound, or clipped to the stated bound by its
        own norm, as by a rank that knows its own shard only. None where it is neither, or where the
        step does not depend on the gradients' size.
        """
        recipe = self.recipe
        if one.cause != "step_factor" or recipe is None or recipe.row.sizes:
            return None
        guesses = [each for each in judged[one.keys[0]].guesses if isinstance(each, StepGuess)]
        guess = next((each for each in guesses if each.says == one.says), None)
        norms = [self.gradients[key].norm for key in one.keys if key in self.gradients]
        every = float(np.sqrt(sum(each.norm**2 for each in self.gradients.values())))
        if guess is None or guess.recipe is None or len(norms) < len(one.keys):
            return None
        once = 1.0 if recipe.clip is None else clip_factor(recipe.clip, every)
        alone = float(np.sqrt(sum(each**2 for each in norms)))
        norm = once * alone
        factor = guess.recipe.factor / recipe.factor
        if recipe.clip is not None and every > recipe.clip:
            own = clip_factor(recipe.clip, alone)
            if abs(factor * once - own) <= SLACK * own and own > once:
                return "clip_by_tensor", (
                    f"the gradients of these were clipped by the norm {alone:.4g} that they have "
                    f"together to {recipe.clip:g}, not by that of all, {every:.4g}"
                )
        # Of all parameters a factor may as well be of the norm that is clipped, or of the rate.
        copies = round(1 / factor**2) if factor < 1 else 1
        if len(norms) == len(self.gradients) and every > (recipe.clip or every) and copies > 1:
            if copies <= MOST_COPIES and abs(factor * copies**0.5 - 1) <= SLACK:
                return "step_factor", (
                    f"{one.says}: the rate, or the norm that clips is too large, as of {copies} "
                    "copies of all gradients"
                )
        bound = next((each for each in CLIPS if abs(factor * norm - each) <= SLACK * each), None)
        if bound is None or factor >= 1:
            return None
        return "clip_twice", (
            f"the gradients of these were clipped once more, from the norm {norm:.4g} that they "
            f"have together to {bound:g}"
        )

    def _frozen_factors(
        self,
        rows: list[TensorStep],
        judged: Mapping[str, Judgement],
        stored: Mapping[str, Sequence[str]],
    ) -> Iterator[NamedCause]:
        """Yield causes for LoRA factors that did not move though others did.

        Sets their rows to "differs". `stored` is {key: names in the file}.
        """
        moved = {row.key: bool(row.update and row.update.moved) for row in rows if row.update}
        moved = {key: moves for key, moves in moved.items() if key in self.pairs}
        some = {end for key, moves in moved.items() if moves for end in [key[-7:]]}
        half, whole = [], []
        for key, moves in moved.items():
            other = self.pairs[key].key
            known = key in judged and judged[key].guesses
            if moves or other not in moved or known:
                continue
            if moved[other]:
                # A next to a B of zero has no gradient. Where no A moves, that may be meant so.
                if not self._is_idle(key) and (key.endswith(".lora_b") or ".lora_a" in some):
                    half.append(key)
            elif some:
                whole.append(key)
        beside = Proof(len(half), 1.0, len(half), 0.0)  # found on the factors that it speaks of
        for cause, keys, says, proof in (
            ("adapter_half_frozen", half, "did not move, and the other factor did", beside),
            ("adapter_frozen", whole, "neither factor moved, and those of other pairs did", None),
        ):
            if keys:
                at = {row.key: number for number, row in enumerate(rows)}
                for key in keys:
                    rows[at[key]] = replace(rows[at[key]], verdict="differs", why=says)
                yield step_cause(cause, says, keys, stored, proof)

    def _has_state_after(self) -> bool:
        """Return whether the given state is the one after the step; True if it does not tell."""
        if self.state is None or self.recipe is None:
            return False
        return self.state.steps is None or self.state.steps == self.recipe.step

    def _add_notes(self, rows: Sequence[TensorStep], judged: Mapping[str, Judgement]) -> None:
        """Add notes about what is no fault, and to `left` what could not be compared.

        Notes are on steps below the stored type's resolution, rounding to a coarser type,
        directions without a gradient, and gradients without a batch.
        """
        if self.state is not None and self.state.fewer:
            fewer = self.state.fewer
            least, most = min(fewer.values()), max(fewer.values())
            counts = f"{least}" if least == most else f"{least} to {most}"
            self.notes.append(
                f"steps are counted for each parameter: {len(fewer)} made {counts} of "
                f"{self.state.steps}, as those do that were frozen or had no gradient "
                f"({join_first(sorted(fewer), 2)})"
            )
        hidden = [key for key, one in judged.items() if one.verdict == "agrees" and not one.shows]
        if hidden:
            kinds = {row.key: row.encoding for row in rows}
            kind = Counter(kinds[key] for key in hidden).most_common(1)[0][0]
            self.left += [
                NotCompared("step", key, "no counterpart", f"smaller than {kind} shows")
                for key in hidden
            ]
        if self.given is None and self.computed is not None and judged:
            self.notes.append(
                "no gradients were given: the update is held to those computed of the batch"
            )
        stored = {row.key: row for row in self.parameters}
        coarser = [
            key
            for key, one in judged.items()
            if one.verdict == "agrees" and _is_stored_coarser(stored[key])
        ]
        if coarser:
            one = stored[coarser[0]]
            assert one.after is not None
            why = (
                f"{one.before.encoding} before the step, {one.after.encoding} after it: what that "
                "rounded away is not known"
            )
            self.left += [NotCompared("rounding", key, "unreadable", why) for key in coarser]
        signs = [key for key, one in judged.items() if one.verdict == "agrees" and one.signs]
        if signs:
            why = "no gradient was given: sizes are compared, not signs"
            self.left += [NotCompared("direction", key, "no counterpart", why) for key in signs]
        unseen = [
            key for key in signs if judged[key].decay is None and self._must_decay(stored[key])
        ]
        why = "no gradient was given, and the sizes do not show the decay"
        self.left += [NotCompared("decay", key, "no counterpart", why) for key in unseen]
        self._add_hidden_decays(judged, {row.key: row.encoding for row in rows})
        if self.given is not None and self.computed is None and self._has_state_after():
            why = (
                "the moments of after the step do not say what it was; give --batch, the state of "
                "before the step, or clip=BOUND"
            )
            self.left += [
                NotCompared("gradient", key, "unreadable", why)
                for key, one in judged.items()
                if one.verdict == "agrees" and key in self.given.placed and key not in self.used
            ]
        self._add_doubts()
        every = [key for key, one in judged.items() if one.decays_all]
        if every:
            self.notes.append(
                f"norms and biases decay, as all weights do: {short_keys(every)} "
                "(decay_on=matrices says that they should not)"
            )
        bounds = {one.clipped for one in judged.values() if one.clipped is not None}
        for by, bound in sorted(bounds):
            what = f"the gradients given were clipped by {CLIPPED_BY.get(by)} to"
            if by == "norm":
                what = "the gradients given were clipped to the norm"
            elif by == "value":
                what = "each element of the gradients given was clipped to"
            self.notes.append(f"{what} {bound:g} in the step")

    def _add_hidden_decays(self, judged: Mapping[str, Judgement], kinds: Mapping[str, str]) -> None:
        """Add to `left` the weight decays that weights of few bits do not show.

        The evidence of all tensors is added up. `kinds` are their encodings. Where another decay
        than the stated one fits better, the verdict stays open.
        """
        stored = {row.key: row for row in self.parameters}
        shown = {
            key: one.decay_shown
            for key, one in judged.items()
            if one.verdict == "agrees" and one.decay_shown and self._must_decay(stored[key])
        }
        every = sum(shown.values(), DecayEvidence())
        if every.stated:
            return
        less = every.interval[1] <= 1 if every.allowed else every.size[0] < 1
        amount = "less" if less else "more"
        between = decay_interval_text(every)
        for key in shown:
            if every.other:
                why = f"the weights show {amount} of it than was stated, each within its rounding"
                why += between
                self.left.append(NotCompared("decay", key, "unreadable", why))
            else:
                why = f"{kinds[key]} is too coarse to show how large it is{between}"
                self.left.append(NotCompared("decay", key, "no counterpart", why))

    def _must_decay(self, parameter: Parameter) -> bool:
        """Return whether the recipe surely applies weight decay to a parameter.

        Vectors are unsure.
        """
        recipe = self._recipe_of(parameter)
        if recipe.adds_decay_to_gradient or (parameter.vector and recipe.decay_on != "all"):
            return False
        return recipe.decays(parameter.vector)

    def _add_doubts(self) -> None:
        """Add notes that a batch or gradients agree, but are hardly those of a trainer.

        That is a loss that no trained model has, and gradients equal to the bit to those computed
        here, in another arithmetic than the trainer's.
        """
        loss, vocabulary = self._loss()[0], hyper_of(self.base or self.model).get("vocab_size")
        if loss is not None and isinstance(vocabulary, int):
            doubt = doubtful_loss(loss, vocabulary)
            self.notes += [doubt] if doubt else []
        computed = self.computed
        self.notes += self.facts.notes
        if computed is None or self.given is None:
            return
        rounded = [
            key
            for key in self.given.placed
            if key in computed.keys and computed.gradient(key).any() and computed.rounding(key)
        ]
        by_key = {row.key: row for row in self.parameters}
        if rounded and all(self._is_copy(by_key[key], computed) for key in rounded):
            self.notes.append(
                "every gradient is equal to the bit to the one computed here, which another "
                "arithmetic does not reach: these are no trainer's gradients, and show nothing"
            )

    def _is_copy(self, parameter: Parameter, computed: ComputedGradients) -> bool:
        """Return whether a given gradient is just the computed one, rounded to its stored type."""
        assert self.given is not None
        given = self.given.values(parameter, self.given.placed[parameter.key])
        values = computed.gradient_near(parameter.key, given).reshape(given.shape)
        return bool(np.array_equal(given, values.astype(given.dtype)))


class BackwardFound(GradientGuess):
    """A mistake of a whole backward pass, as the explanation of one parameter's gradient."""


def _departs(guess: StepGuess | GradientGuess) -> bool:
    """Return whether a guess is a recipe other than the stated one, such as another step number."""
    return isinstance(guess, StepGuess) and guess.recipe is not None


def _is_of_backward(guess: StepGuess | GradientGuess) -> bool:
    """Return whether a guess is about a whole backward pass."""
    return isinstance(guess, BackwardFound)


def _dropout_rates(*models: Model) -> dict[str, float]:
    """Return {key of a configuration: dropout rate} for the rates that are not zero.

    The configuration of an adapter is its adapter_config.json.
    """
    configs: list[Mapping[str, Any]] = [
        each.config if isinstance(each.config, Mapping) else peft_config(each) for each in models
    ]
    return {
        str(key): float(value)
        for config in configs
        for key, value in config.items()
        if "drop" in str(key) and isinstance(value, int | float) and 0 < value < 1
    }


def _head_is_table(model: Model, parameters: Sequence[Parameter]) -> bool:
    """Return whether a model's file stores a tied output head that is no parameter of its own."""
    head, table = model.roles.get(HEAD), model.roles.get(TABLE)
    stored = head is not None and table is not None and head.names != table.names
    return stored and all(row.key != HEAD for row in parameters)


def _norm_offset(model: Model) -> int | None:
    """Return what a model's RMSNorm adds to its weight, 0 or 1; None for other norms."""
    block = model.spec.block
    return block.norm_offset if block.norm == "rms" else None


def _is_stored_coarser(parameter: Parameter) -> bool:
    """Return whether a parameter is stored in fewer bits after the step than before it."""
    after = parameter.after
    if after is None or parameter.before.encoding not in UNIT or after.encoding not in UNIT:
        return False
    return UNIT[after.encoding] > UNIT[parameter.before.encoding]


def _is_finite(parameter: Parameter) -> bool:
    """Return whether a parameter holds no NaN and no infinity after the step, if that is given."""
    if parameter.after is None or parameter.after.encoding not in UNIT:
        return True
    sides = pieces(parameter.before, parameter.after)
    return all(after is not None and bool(np.isfinite(after).all()) for _, _, _, after in sides)


def lora_pairs(parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """Return {key of a LoRA factor: the other factor of its pair}."""
    known = {row.key: row for row in parameters}
    found = {}
    for key in known:
        for end, other in ((".lora_a", ".lora_b"), (".lora_b", ".lora_a")):
            partner = key.removesuffix(end) + other
            if key.endswith(end) and partner in known:
                found[key] = known[partner]
    return found


def _state_settings(state: OptimizerState) -> dict[str, float]:
    """Return {field of Recipe: value} from all groups of a state; the largest weight decay counts.

    Zeros are left out, except a learning rate of zero.
    """
    found: dict[str, float] = {}
    for group in state.groups:
        for name, value in _group_settings(group).items():
            found[name] = max(found.get(name, 0.0), value) if name == "wd" else value
    return {name: value for name, value in found.items() if value or name == "lr"}


def _group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return {field of Recipe: value} of one parameter group of a state.

    `step`, `clip` and settings that a recipe does not have are left out.
    """
    found: dict[str, Any] = {}
    for name, value in group.items():
        if name == "betas" and isinstance(value, list) and len(value) == 2:
            found["b1"], found["b2"] = (float(each) for each in value)
        elif name == "nesterov":
            found["nesterov"] = value is True
        elif name in CALLED and isinstance(value, int | float) and not isinstance(value, bool):
            found[CALLED[name]] = float(value)
    return {
        name: value for name, value in found.items() if name not in ("step", "clip", "clip_value")
    }


def array_facts(values: "np.ndarray[tuple[int, ...], np.dtype[np.floating]]") -> ArrayFacts:
    """Return an array's norm, its largest value, and its counts of zeros and non-finite numbers."""
    found = compute_stats(values)
    return ArrayFacts(found.l2 or 0.0, found.absmax or 0.0, found.zeros, found.nan + found.inf)


def decay_interval_text(shown: DecayEvidence) -> str:
    """Return the range of decays that the weights' bits allow, to end a sentence; "" for any."""
    least, largest = shown.interval
    if not np.isfinite(largest):
        return f": it is more than {least:g} times the stated one" if least else ""
    return f": it may be {least:g} to {largest:g} times the stated one"


def _limit_missing_decays(judged: dict[str, Judgement]) -> None:
    """Limit the certainty of guesses in `judged` that a tensor did not decay.

    The evidence of all tensors that may have no decay is added up. If no bit of the weights shows
    it, the guess is not confirmed: rounding may hide a small decay. Nor is it where the type would
    round a decay away. Guesses that the bits contradict are dropped.
    """
    held = {
        key: one.decay_shown
        for key, one in judged.items()
        if one.decay_shown is not None and any(each.cause in NO_DECAY for each in one.guesses)
    }
    shown = sum(held.values(), DecayEvidence())

    def limited(guess: StepGuess | GradientGuess) -> StepGuess | GradientGuess:
        """Return a guess about a step, at most "explained" where bits do not decide it.

        That is for guesses that the tensor did not decay; other guesses are returned unchanged.
        """
        open_ = shown.lost and guess.cause == "decay_missing"
        sure = shown.told if shown.coarse else shown.none
        if isinstance(guess, StepGuess) and guess.cause in NO_DECAY and (open_ or not sure):
            return replace(guess, most="explained")
        return guess

    for key in held:
        kept = shown.none or not shown.coarse
        left = [g for g in judged[key].guesses if kept or g.cause not in NO_DECAY]
        judged[key] = replace(judged[key], guesses=tuple(map(limited, left)))
