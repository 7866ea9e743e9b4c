"""One batch's gradients on several devices or in several types, and which of them is wrong."""

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.training.clipping import clip_factor
from aprfmt.causes.training.optimizers import Recipe, changed, parse_recipe, update_of
from aprfmt.errors import UsageError
from aprfmt.inference.device import parse_run
from aprfmt.model import open_model
from aprfmt.model.ledger import NotCompared, array_items
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, pronounce
from aprfmt.training.reference_gradients import explaining_missing_torch
from aprfmt.training.step_batch import read_step_batch

WORDS = VerdictWords("agree", "differ")


@dataclass(frozen=True)
class RunGradients:
    """One run of the backward pass: its loss, and where its gradients are wrong.

    `first_wrong` is the first wrong gradient, backward from the loss; `wrong` is the number of
    wrong ones. `flips` are routers that chose other experts than in float64: nothing of the run is
    judged then. `update` is the relative L2 distance of the optimizer's step of all parameters from
    that of float64's gradients, None where no optimizer was given.
    """

    run: str
    loss: float
    first_wrong: str | None
    wrong: int
    flips: tuple[str, ...]
    update: float | None = None


@dataclass(frozen=True)
class GradientDistances:
    """One gradient in all runs: each run's relative distance from float64, and what it may be.

    `apart` are the distances by run, `allowed` the largest ones that rounding explains, `wrong` the
    indices of the runs beyond that, `lost` those of the runs in which rounding may have left
    nothing of the gradient, of which nothing is said. `update` are the relative distances of the
    optimizer's steps, () for points and without an optimizer. `parameter` is False for the gradient
    at a point.
    """

    key: str
    parameter: bool
    size: float
    apart: tuple[float, ...]
    allowed: tuple[float, ...]
    wrong: tuple[int, ...]
    update: tuple[float, ...] = ()
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunsReport:
    """The gradients of a batch in several runs; `loss` is that of float64 on the CPU.

    `gradients` are in backward order: points from the loss, then parameters. `zero` are the keys of
    those that are zero up to rounding, `missing` those that some run does not have, `unread` arrays
    of the batch that nothing reads.
    """

    model: str
    adapter: str | None
    loss: float
    runs: tuple[RunGradients, ...]
    gradients: tuple[GradientDistances, ...]
    zero: tuple[str, ...]
    missing: tuple[str, ...]
    unread: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()

    @property
    def pronounced(self) -> Pronounced:
        """The verdict (word, sentence, exit code) over all gradients of all runs.

        It lists what was not compared.
        """
        left = [
            NotCompared("gradient", key, "unreadable", "a run has none") for key in self.missing
        ]
        left += [
            NotCompared("gradient", key, "no counterpart", "zero but for rounding")
            for key in self.zero
        ]
        left += [
            NotCompared("run", row.run, "unreadable", f"other experts are chosen at {row.flips[0]}")
            for row in self.runs
            if row.flips
        ]
        left += array_items("batch array", self.unread)
        lost = [
            (row, run)
            for row in self.gradients
            for at, run in enumerate(self.runs)
            if at in row.lost and not run.flips
        ]
        left += [
            NotCompared("gradient", row.key, "unreadable", f"rounding hides it in {run.run}")
            for row, run in lost
        ]
        wrong = [row for row in self.runs if row.wrong]
        detail = "; ".join(f"{row.run} is wrong in {row.wrong}" for row in wrong)
        every = len(self.gradients) + len(self.missing)
        hidden = {row.key for row, _ in lost if not row.wrong}
        counts = {"gradients": (len(self.gradients) - len(hidden), every)}
        return pronounce(WORDS, Compared(bool(wrong), counts, tuple(left), detail), self.accept)

    @property
    def exit_code(self) -> Literal[0, 1, 2]:
        """0: every run is within what rounding explains; 1: one is not; 2: not all was compared."""
        return self.pronounced.exit

    def to_json(self) -> dict[str, Any]:
        """Return {"between": {...}, "pronounced": {...}}: runs, gradients and the verdict."""
        found = self.pronounced
        return {
            "between": {
                "adapter": self.adapter,
                "loss": self.loss,
                "runs": [asdict(row) for row in self.runs],
                "gradients": [asdict(row) for row in self.gradients],
                "zero": list(self.zero),
                "missing": list(self.missing),
                "unread": list(self.unread),
                "verdict": found.word,
                "says": found.says,
            },
            **found.to_json(),
        }


def parse_gradient_run(text: str) -> tuple[str, str]:
    """Return (device, dtype) of a run such as `cuda:0:bfloat16`; float32 where it names no dtype.

    Raises UsageError for an unknown device or dtype, and for a backend that computes no gradients.
    """
    choice = parse_run(text)
    named = text.partition(":")[0]
    if choice.backend != "torch" and named != choice.device.partition(":")[0]:
        raise UsageError(
            f"--between {text!r}: {choice.backend} computes no gradients; expected DEVICE or "
            "DEVICE:TYPE, cpu or cuda:0:bfloat16"
        )
    if choice.device in ("auto", "cuda:all"):
        raise UsageError(f"--between {text!r}: expected one device, cpu or cuda:N")
    return choice.device, choice.dtype


def first_step_function(recipe: Recipe) -> Callable[[NDArray[Any], float], NDArray[Any]]:
    """Return a function of (a gradient, the norm of all gradients): the optimizer's first step.

    Weight decay is left out, which is the same whatever the gradient. Raises UsageError for a
    recipe of a later step.
    """
    if recipe.step not in (None, 1):
        raise UsageError(
            f"--between makes the first step of each run's gradients; step={recipe.step} needs the "
            "optimizer's state: leave it out"
        )

    def step_of(gradient: NDArray[Any], norm: float) -> NDArray[Any]:
        """Return the change that the optimizer's first step makes with a gradient, in its shape.

        `norm` is the norm of all parameters' gradients, by which they are clipped.
        """
        scale = 1.0 if recipe.clip is None else clip_factor(recipe.clip, norm)
        flat = gradient.reshape(-1).astype(np.float64)
        found = update_of(
            changed(recipe, wd=0.0, scale=scale), np.zeros_like(flat), flat, None, False
        )
        assert found is not None  # a first step takes the gradient alone
        return found.step.reshape(gradient.shape)

    return step_of


def compare_runs(
    model: Path | str,
    batch: Path | str,
    runs: Sequence[str],
    *,
    adapter: Path | str | None = None,
    optimizer: str | None = None,
    arch: str | None = None,
    accept: Collection[str] = (),
) -> RunsReport:
    """Return the gradients of a batch in every run, each compared with float64 on the CPU.

    `runs` are texts such as `cuda:0:bfloat16`. With `adapter` the model is frozen, and the
    adapter's factors train. `optimizer` is a recipe (`adamw:lr=2e-4`) whose first step is made of
    each run's gradients; it is not judged, as Adam makes whole steps of the smallest gradients.
    `accept` are patterns of what may stay uncompared. Raises UsageError for a text that is no run
    and for weights that make a gradient NaN or infinite, and BackendUnavailableError without torch.
    """
    step_of = None if optimizer is None else first_step_function(parse_recipe(optimizer))
    parsed = [parse_gradient_run(text) for text in runs]
    with explaining_missing_torch():
        from aprfmt.inference.gradients.device_gradients import GradientRun, gradients_between
    from aprfmt.adapters.trained_pairs import open_trained_pairs

    with ExitStack() as stack:
        base = stack.enter_context(open_model(Path(model), arch=arch))
        loaded = read_step_batch(Path(batch), base)
        pairs = open_trained_pairs(None if adapter is None else Path(adapter), base, stack)
        every = [GradientRun(device, dtype) for device, dtype in parsed]
        made = gradients_between(base, loaded, every, pairs=pairs, step_of=step_of)
    rows = []
    for number, run in enumerate(every):
        flips = tuple(made.flips.get(number, ()))
        wrong = 0 if flips else sum(number in gap.wrong for gap in made.gaps)
        first = made.first(number) if wrong else None
        update = None
        if step_of is not None:
            size = math.hypot(*(gap.step or 0.0 for gap in made.gaps))
            apart = math.hypot(*(gap.update[number] for gap in made.gaps if gap.update))
            update = apart / size if size else 0.0
        rows.append(RunGradients(str(run), made.losses[number], first, wrong, flips, update))
    return RunsReport(
        str(model),
        None if adapter is None else str(adapter),
        made.loss,
        tuple(rows),
        tuple(
            GradientDistances(
                g.key,
                g.parameter,
                g.size,
                g.distances,
                g.allowed,
                tuple(run for run in g.wrong if run not in made.flips),
                tuple(x / g.step if g.step else 0.0 for x in g.update),
                g.lost,
            )
            for g in made.gaps
        ),
        made.open,
        made.missing,
        loaded.unread,
        tuple(accept),
    )
