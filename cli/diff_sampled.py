"""`aprfmt diff A B --sample SIZE`: random ranges of both files, and what they can show."""

from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.cli import render
from aprfmt.cli.diff_show import FINDINGS

if TYPE_CHECKING:
    from aprfmt.measure.sampling import SampleReport


def compare_samples(
    a: Path, b: Path, nbytes: int, seed: int | None, patterns: tuple[str, ...], arch: str | None
) -> int:
    """Compare random ranges, and say what that shows."""
    from aprfmt.measure.sampling import sample

    report = sample(a, b, nbytes, seed=seed, tensors=patterns, arch=arch)
    return render.emit(report.to_json(), report.exit_code, lambda: show_samples(report))


def show_samples(report: "SampleReport") -> None:
    """Print what random ranges have shown, and what they cannot show."""
    looked, whole = render.size_text(report.bytes), render.size_text(report.of_bytes)
    render.line(f"{report.ranges} of {report.of_ranges} ranges, {looked} of {whole} a side "
                f"(--seed {report.seed})", style="head")  # fmt: skip
    if report.settled:
        render.line(f"  {report.settled} tensors are equal by the digests of their files")
    for found in report.differing[:FINDINGS]:
        render.say(f"  {found.tensor}: byte {found.byte} differs", style="bad")
    for one in report.unlike[:FINDINGS]:
        render.say(f"  {one.tensor}: {one.why}", style="bad")
    left = max(0, len(report.differing) - FINDINGS) + max(0, len(report.unlike) - FINDINGS)
    if left:
        render.line(f"  ... {left} more (--json)", style="dim")
    if report.unsampled:
        count, first = len(report.unsampled), report.unsampled[0]
        render.say(
            f"  {count} tensors have no bytes to compare ({first.tensor}: {first.why})",
            style="warn",
        )
    if report.different:
        render.say(report.pronounced.says, style="bad")
        return
    if report.share is not None:
        render.line(
            f"no range differs: with 95 % confidence fewer than {report.share:.2%} of the ranges do"
        )
    render.say(report.pronounced.says, style="warn")
    render.line("one changed tensor, or one bit, is easily missed; diff without --sample reads "
                "everything", style="warn")  # fmt: skip
