"""`aprfmt step`: what a training step did to the weights, and whether it is right."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import dry_run as dry_runs
from aprfmt.cli import options, render
from aprfmt.cli.html_page import add_page
from aprfmt.cli.step import output
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.model.renames import Rename
    from aprfmt.training.options import StepOptions


@click.command("step")
@options.model()
@click.option(
    "--after",
    type=options.PathOrAddress(),
    metavar="CKPT",
    help="The checkpoint after the step; of an adapter where --adapter is given.",
)
@click.option(
    "--adapter",
    type=options.PathOrAddress(),
    metavar="DIR",
    help="The adapter that is trained, before the step; MODEL is its base.",
)
@click.option(
    "--grads",
    multiple=True,
    type=options.NamedPath(),
    metavar="FILE",
    help="Gradients of the step, by parameter or capture point: safetensors, npz or .pt.",
)
@click.option(
    "--batch",
    type=options.FILE,
    metavar="FILE",
    help="The step's batch, safetensors, npz or .pt: its gradients are computed, and --grads or "
    "the update compared with them.",
)
@click.option(
    "--device", default="cpu", show_default=True, help="Device of --batch: cpu, cuda, cuda:N."
)
@click.option(
    "--dtype",
    default="float64",
    show_default=True,
    type=click.Choice(("float64", "float32", "bfloat16", "float16")),
    help="Arithmetic of --batch.",
)
@click.option(
    "--between",
    nargs=2,
    metavar="RUN RUN",
    help="Compare the batch's gradients of two runs, backward from the loss: cpu cuda:0:bfloat16.",
)
@click.option(
    "--check-gradients",
    is_flag=True,
    help="Compare --grads with differences of the batch's loss: forward passes only, no torch.",
)
@click.option(
    "--optimizer",
    metavar="RULE",
    help="What made the update: adamw:lr=2e-4,wd=0.1,step=1 (adam, sgd, lion, adafactor).",
)
@click.option(
    "--optimizer-state",
    type=options.FILE,
    metavar="FILE",
    help="What the trainer saved of the optimizer after the step, or before it (with --grads).",
)
@click.option(
    "--trained-in",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="The type the trainer computes in, whose rounding is measured. Default: the weights'.",
)
@options.rename
@options.accept()
@options.verbose("Every tensor.")
@options.html("Write a page: every tensor with its gradient and its update.")
@dry_runs.option
@options.arch
@options.force
@options.common
def command(
    model: Path,
    after: Path | None,
    adapter: Path | None,
    grads: tuple[Path, ...],
    batch: Path | None,
    device: str,
    dtype: str,
    between: tuple[str, str] | None,
    check_gradients: bool,
    optimizer: str | None,
    optimizer_state: Path | None,
    trained_in: str | None,
    rename: "tuple[Rename, ...]",
    accept: tuple[str, ...],
    verbose: bool,
    html: Path | None,
    dry_run: bool,
    arch: str | None,
    force: bool,
) -> int:
    """Explain one training step from MODEL, the checkpoint before it.

    Exit 0: every parameter is what the optimizer makes of it; 1: one is not, and the mistake that
    gives it is named if it is known; 2: one could not be compared. Steps that the stored type
    is too coarse to show are listed, and leave the exit code to the weights.
    """
    from aprfmt.training.options import answer_between, answer_step

    if dry_run:
        state = () if optimizer_state is None else (optimizer_state,)
        from aprfmt.training.memory import estimate_step

        arrays = (*grads, *state)
        found = estimate_step(
            model,
            after,
            adapter,
            arrays,
            arch,
            batch,
            dtype,
            differences=check_gradients,
            device=device,
        )
        return output.report_memory(found)
    options.check_new(force, html)
    given: StepOptions = {
        "after": after,
        "adapter": adapter,
        "grads": grads,
        "batch": batch,
        "device": device,
        "dtype": dtype,
        "check_gradients": check_gradients,
        "optimizer": optimizer,
        "optimizer_state": optimizer_state,
        "trained_in": trained_in,
        "rename": rename,
        "accept": accept,
        "arch": arch,
    }
    if between is not None:
        if html is not None:
            raise UsageError("--between compares two runs of one batch; leave out --html")
        runs = answer_between(model, between, **given)
        return render.emit(
            runs.to_json(), runs.exit_code, lambda: output.show_runs(runs, str(model), verbose)
        )
    with render.ProgressLine("step") as progress:
        report = answer_step(model, progress, **given)
    body = report.to_json()
    add_page(body, html, force, lambda: output.page(body))
    return render.emit(body, report.exit_code, lambda: output.show(report, verbose))
