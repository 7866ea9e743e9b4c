"""What is asked about a training step: one home for `aprfmt step` and `aprfmt.step`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from aprfmt.base.sequences import listed
from aprfmt.errors import UsageError
from aprfmt.model.renames import Rename, parse_rename

if TYPE_CHECKING:
    from aprfmt.training.device_comparison import RunsReport
    from aprfmt.training.report import StepReport


class StepOptions(TypedDict, total=False):
    """The options of a step besides the model, each as `aprfmt step` has it.

    `grads` is one file or several, `rename` rules OLD=NEW, `accept` patterns unread:PATTERN.
    """

    after: Path | str | None
    adapter: Path | str | None
    grads: Path | str | Sequence[Path | str]
    batch: Path | str | None
    device: str
    dtype: str
    check_gradients: bool
    optimizer: str | None
    optimizer_state: Path | str | None
    trained_in: str | None
    rename: str | Sequence[str | Rename]
    accept: str | Sequence[str]
    arch: str | None


Progress = Callable[[int, int], None]
# What two runs of one batch are asked with, and what other options are without being given.
OF_RUNS = ("adapter", "optimizer", "arch", "accept")
DEFAULTS = {"device": "cpu", "dtype": "float64"}


def answer_step(
    model: Path | str, progress: Progress | None = None, **options: Unpack[StepOptions]
) -> "StepReport":
    """Return what a step did to the weights, and whether it is right (see `explain_step`).

    `progress` is called with (parameters judged, all parameters). Raises UsageError where there is
    nothing to compare, or where a file is of another model.
    """
    from aprfmt.training.step import explain_step

    given: dict[str, Any] = {**options}
    if "check_gradients" in given:
        given["differences"] = given.pop("check_gradients")
    for name in ("grads", "accept"):
        given[name] = listed(given.get(name, ()))
    rules = listed(given.get("rename", ()))
    given["rename"] = [parse_rename(each) if isinstance(each, str) else each for each in rules]
    return explain_step(model, progress=progress, **given)


def answer_between(
    model: Path | str, runs: Sequence[str], **options: Unpack[StepOptions]
) -> "RunsReport":
    """Return the gradients of a batch in several runs, and which run is wrong (`compare_runs`).

    `runs` are texts such as `cuda:0:bfloat16`. Raises UsageError without a batch, and for an option
    that a comparison of runs does not use.
    """
    from aprfmt.training.device_comparison import compare_runs

    given: dict[str, Any] = {**options}
    batch = given.pop("batch", None)
    unused = [
        "--" + name.replace("_", "-")
        for name, value in given.items()
        if name not in OF_RUNS and value and value != DEFAULTS.get(name)
    ]
    if batch is None or unused:
        todo = ["give --batch FILE"] * (batch is None)
        todo += [f"leave out {', '.join(unused)}"] * bool(unused)
        raise UsageError(f"--between compares two runs of one batch; {'; '.join(todo)}")
    used = {name: given[name] for name in OF_RUNS if name in given}
    used["accept"] = listed(used.get("accept", ()))
    return compare_runs(model, batch, listed(runs), **used)
