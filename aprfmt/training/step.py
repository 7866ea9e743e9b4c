"""Answers what one training step did, and whether it is what its optimizer makes of it."""

from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from aprfmt.causes.training.optimizers import Recipe, parse_recipe
from aprfmt.errors import UsageError
from aprfmt.model import open_model
from aprfmt.training.parameters import Parameter, pair_parameters
from aprfmt.training.report import StepReport, TensorStep
from aprfmt.training.update import Sums, pieces, same_bytes


def explain_step(
    model: Path | str,
    *,
    after: Path | str | None = None,
    adapter: Path | str | None = None,
    optimizer: str | None = None,
    arch: str | None = None,
    accept: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> StepReport:
    """Return what a step did to the parameters of a model, or of an adapter of it.

    `model` is the checkpoint before the step (with `adapter`: the base below it), `after` the one
    after it. `optimizer` is the recipe: `adamw:lr=2e-4,wd=0.1,step=1`. Raises UsageError where
    there is nothing to compare, or where `after` is of another model.
    """
    if after is None:
        raise UsageError("nothing to explain; give --after CKPT, the checkpoint after the step")
    recipe = None if optimizer is None else parse_recipe(optimizer)
    with ExitStack() as stack:
        base = stack.enter_context(open_model(Path(model), arch=arch))
        before = base if adapter is None else stack.enter_context(open_model(Path(adapter)))
        later = stack.enter_context(open_model(Path(after), arch=arch if adapter is None else None))
        found = pair_parameters(before, later, None if adapter is None else base)
        rows = []
        for number, parameter in enumerate(found.rows, 1):
            rows.append(_explained(parameter, recipe))
            parameter.drop()
            if progress is not None:
                progress(number, len(found.rows))
        return StepReport(
            str(model),
            str(after),
            None if adapter is None else str(adapter),
            None if recipe is None else recipe.text(),
            tuple(rows),
            (),
            found.left,
            accept=tuple(accept),
        )


def _explained(parameter: Parameter, recipe: Recipe | None) -> TensorStep:
    """Return what a step did to one parameter."""
    sums, before = Sums(), parameter.before
    still = same_bytes(parameter)
    for _, _, values, after in pieces(before, None if still else parameter.after):
        sums.add(values, values if after is None else after, before.encoding)
    why = "no optimizer says what the step was to do"
    if recipe is not None:
        why = "nothing says the gradient"
    return TensorStep(
        parameter.key,
        parameter.names,
        before.shape,
        before.encoding,
        sums.weight**0.5,
        update=sums.facts(),
        why=why,
    )
