"""Answers what one training step did, and whether it is what its optimizer makes of it."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.errors import UsageError
from aprfmt.formats.foreign_formats import refuse_trainer_shards
from aprfmt.inference.gradients.given_points import ROLES_WITHOUT_GRADIENT, read_points
from aprfmt.measure.encoding_noise import UNIT
from aprfmt.model import open_model
from aprfmt.model.ledger import NotCompared, array_items
from aprfmt.model.renames import Rename, rename_names
from aprfmt.training import ComputedGradients
from aprfmt.training.decay_verdicts import limit_missing_decays, mark_lost_decay
from aprfmt.training.differences import open_differences
from aprfmt.training.explained_step import ExplainedStep
from aprfmt.training.gradient_comparison import head_is_table
from aprfmt.training.parameter_verdicts import judge_parameters
from aprfmt.training.parameters import Parameter, pair_parameters
from aprfmt.training.points import ComparedPoints, compare_points
from aprfmt.training.reference_gradients import BatchNumbers, Computed, compute_gradients
from aprfmt.training.report import Norms, StepReport
from aprfmt.training.revised_verdicts import (
    accept_rounded_away_steps,
    is_clipped_by_chance,
    judge_as_first,
    judge_by_schedule,
    open_unnumbered,
)
from aprfmt.training.saved_arrays import (
    SavedArrays,
    open_gradients,
    open_state,
    plain_name,
    unread_files,
)
from aprfmt.training.shard_clipped_updates import judge_by_shards
from aprfmt.training.shared_gradient_mistakes import measure_gradients
from aprfmt.training.step_batch import read_step_batch
from aprfmt.training.step_causes import (
    frozen_factor_causes,
    mistake_causes,
    nonfinite_causes,
    share_guesses,
    step_cause,
    unknown_cause,
)
from aprfmt.training.step_notes import add_notes
from aprfmt.training.step_recipe import find_recipe
from aprfmt.training.update import pieces


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
    if after is None and not grads and batch is None:
        raise UsageError(
            "nothing to explain; give --after CKPT, the checkpoint after the step, or "
            "--grads FILE, or --batch FILE, whose loss and gradients are computed"
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
            own_adapter = None if adapter is None else Path(adapter)
            checker = stack.enter_context(open_differences(base, Path(batch), own_adapter))
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
                head_twice=adapter is None and head_is_table(base, found.rows),
            )
        step = ExplainedStep(
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
        _set_up_step(step)
        report = _make_report(step, later is not None)
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


def _left_out_of_names(step: ExplainedStep) -> list[str]:
    """Return, quoted, the prefixes and endings that gradients' names add to those of weights."""
    found: dict[str, None] = {}
    for row in step.parameters if step.given is not None else ():
        assert step.given is not None
        place = step.given.placed.get(row.key)
        for name in () if place is None else place.names:
            own = next((each for each in row.names if each in name), name)
            found |= dict.fromkeys(each for each in name.split(own, 1) if each)
    return [f"'{each}'" for each in found]


def _leave_out_choices(step: ExplainedStep) -> None:
    """Move parameters that by their nature get no gradient from `step.parameters` to `step.left`.

    ROLES_WITHOUT_GRADIENT lists them. A parameter with a saved gradient or moment stays, and so
    does one with NaN or infinity.
    """
    kept = []
    states = () if step.state is None else (step.state.first, step.state.second)
    stores = [each for each in (step.given, *states) if each is not None]
    for row in step.parameters:
        role = split_key(row.key)[1]
        begin = next((each for each in ROLES_WITHOUT_GRADIENT if role.startswith(each)), None)
        saved = any(row.key in each.placed for each in stores)
        if begin is None or saved or not _is_finite(row):
            kept.append(row)
            continue
        why = ROLES_WITHOUT_GRADIENT[begin]
        step.left.append(NotCompared("parameter", row.key, "no counterpart", why))
    step.parameters = kept


def _is_finite(parameter: Parameter) -> bool:
    """Return whether a parameter holds no NaN and no infinity after the step, if that is given."""
    if parameter.after is None or parameter.after.encoding not in UNIT:
        return True
    sides = pieces(parameter.before, parameter.after)
    return all(after is not None and bool(np.isfinite(after).all()) for _, _, _, after in sides)


def _lora_pairs(parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """Return {key of a LoRA factor A or B: the parameter of the other factor of its weight}."""
    known = {row.key: row for row in parameters}
    found = {}
    for key in known:
        for end, other in ((".lora_a", ".lora_b"), (".lora_b", ".lora_a")):
            partner = key.removesuffix(end) + other
            if key.endswith(end) and partner in known:
                found[key] = known[partner]
    return found


def _set_up_step(step: ExplainedStep) -> None:
    """Set a step's LoRA pairs and recipe, and list in `step.left` the arrays of no known parameter.

    Parameters that get no gradient by their nature are moved to `step.left`, too. Raises UsageError
    if the recipe cannot be known.
    """
    _leave_out_choices(step)
    step.pairs = _lora_pairs(step.parameters)
    step.recipe = find_recipe(step)
    why = "it is of no parameter of the model"
    names = () if step.given is None else step.given.unplaced
    step.left += [NotCompared("gradient", name, "unreadable", why) for name in names]
    unread = step.facts.unread if step.checker is None else step.checker.unread
    step.left += array_items("batch array", unread)
    step.left += array_items("state array", () if step.state is None else step.state.unread)
    entries = () if step.state is None else step.state.left
    why = "which parameter it is of is not known"
    step.left += [NotCompared("moment", name, "unreadable", why) for name in entries]
    if step.state is not None and step.state.recognized:
        step.notes.append(
            "numbers of the state were told by the steps that their moments make, and by the "
            "order of layers and of modules in them"
        )
    if around := _left_out_of_names(step):
        step.notes.append(f"names of the gradients are read without {' and '.join(around)}")


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


def _few_bits(given: SavedArrays | None, parameters: Sequence[Parameter]) -> str | None:
    """Return "bfloat16" if the gradient of some matrix was made in 16 bits, else None.

    Autocast makes such gradients.
    """
    for parameter in parameters:
        reader = None if given is None or parameter.vector else given.reader(parameter)
        if reader is not None and reader.noise >= UNIT["F16"]:
            return "bfloat16"
    return None


def _make_report(step: ExplainedStep, updates: bool) -> StepReport:
    """Return the report on a step whose inputs are read: all parameters, causes, notes.

    `updates`: a checkpoint of after the step was given.
    """
    norm = measure_gradients(step)
    rows, judged = judge_parameters(step, updates, norm, step.progress)
    if updates:
        rows, judged = judge_by_schedule(step, rows, judged, norm)
    if is_clipped_by_chance(judged):
        step.unclipped = True
        rows, judged = judge_parameters(step, updates, norm)
    if updates:
        rows = judge_as_first(step, rows, judged, norm)
    rows = mark_lost_decay(step, rows, judged)
    rows = accept_rounded_away_steps(step, rows, judged)
    if updates:
        judge_by_shards(step, judged, norm)
    share_guesses(step, judged, norm)
    limit_missing_decays(judged)
    rows = open_unnumbered(step, rows, judged) if updates else rows
    stored = {row.key: row.names for row in step.parameters}
    causes = [
        *nonfinite_causes(rows, judged, stored),
        *frozen_factor_causes(step, rows, judged, stored),
        *mistake_causes(step, rows, judged, stored, norm),
        *unknown_cause(step, rows, judged, stored),
    ]
    add_notes(step, rows, judged)
    return StepReport(
        "",
        None,
        None,
        None if step.recipe is None else step.recipe.text(),
        tuple(rows),
        tuple(causes),
        norms=Norms(norm, step.computed_norm()),
        loss=step.loss()[0],
        computed_on=step.loss()[1],
        notes=tuple(step.notes),
    )
