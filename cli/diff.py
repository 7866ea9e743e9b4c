"""`aprfmt diff`: which tensors of two files differ, by how much, and why."""

from pathlib import Path

import click

from aprfmt.cli import options, output_format, render
from aprfmt.cli.ci_reports import agree_with_verdict, cases_of_diff
from aprfmt.cli.damage_report import report_damage
from aprfmt.cli.html_page import add_page
from aprfmt.compare import diff
from aprfmt.compare.diffs import SECTIONS
from aprfmt.errors import UsageError


@click.command("diff")
@options.model("a")
@options.model("b")
@options.tensor
@click.option(
    "--only",
    type=click.Choice(SECTIONS),
    multiple=True,
    help="Only these sections; every difference in them counts.",
)
@click.option("--top", type=options.WholeNumber(0),
              help="Show the worst N tensors (with -v: 10).")  # fmt: skip
@options.verbose("Every cause, differing field and text, the worst tensors with numbers.")
@options.accept(within=True)
@click.option("--base", type=options.PathOrAddress(), metavar="SRC", help="The float source: "
              "say which quantized tensors derive from it byte for byte.")  # fmt: skip
@click.option("--adapter", type=options.PathOrAddress(), metavar="DIR", help="Say whether B is A "
              "with this LoRA adapter merged: once, in every shard.")  # fmt: skip
@click.option("--imatrix", type=options.NamedPath(), metavar="FILE",
              help="With --base: the importance matrix that was used.")  # fmt: skip
@click.option("--explain/--no-explain", default=True, show_default=True,
              help="Test every differing tensor against the known causes.")  # fmt: skip
@click.option("--sample", callback=options.parse_size, metavar="SIZE",
              help="Compare random ranges only, SIZE bytes a side; never exits 0.")  # fmt: skip
@click.option("--seed", type=options.WholeNumber(0), help="With --sample: the seed of another run.")
@options.html("Write a page: findings, map of all tensors, difference images.")
@options.arch
@options.force
@options.common_ci
def command(
    a: Path, b: Path, patterns: tuple[str, ...], only: tuple[str, ...], top: int | None,
    verbose: bool, accept: tuple[str, ...], base: Path | None, adapter: Path | None,
    imatrix: Path | None, explain: bool, sample: int | None, seed: int | None,
    html: Path | None, arch: str | None, force: bool,
) -> int:  # fmt: skip
    """Compare two models in any formats, tensor by tensor, by what they mean.

    Exit 0: equal (layout-only differences are named), 1: different, or something that can carry
    meaning is on one side only; 2: nothing differs, but something could not be compared. --sample
    exits 1 where a range differs, and 2 where none does: equality cannot be shown by ranges.
    """
    from aprfmt.cli import diff_adapter, diff_html, diff_sampled, diff_show

    if output_format.answer_format() in ("sarif", "junit") and (
        sample is not None or adapter is not None
    ):
        raise UsageError("--format sarif and junit list tensors: not with --sample or --adapter")
    if sample is not None:
        if base or imatrix or html or only or accept:
            raise UsageError("--sample compares bytes: it goes with --tensor, --seed and --arch")
        return diff_sampled.compare_samples(a, b, sample, seed, patterns, arch)
    if adapter is not None:
        return diff_adapter.compare_adapter(a, b, adapter, arch, accept)
    if not only and patterns:
        only = ("tensors",)
    render.STATUS.doing(f"comparing {a} and {b}")
    with render.ProgressLine("diff") as progress:
        report = diff(
            a, b, tensors=patterns, only=only or None, arch=arch, base=base, imatrix=imatrix,
            explain=explain, images=0 if html is None else diff_html.IMAGES, progress=progress,
        )  # fmt: skip
    found = report.pronounced(accept)
    code = found.exit
    for note in report.notes:
        render.warn(note, "comparison")
    body = report.to_json()
    add_page(body, html, force, lambda: diff_html.render_page(report, code))
    report_damage(report.damage)
    return render.emit(
        body, code, lambda: diff_show.show(report, found, verbose, top),
        cases=lambda: agree_with_verdict(
            cases_of_diff(body, report.fields_apart, accept), code, report.b
        ),
    )  # fmt: skip
