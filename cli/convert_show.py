"""What a conversion prints: files written, encodings changed, layout steps, verification."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.cli import render

if TYPE_CHECKING:
    from aprfmt.conversion import ConversionReport
    from aprfmt.conversion.report import TensorOutcome

WORTH_SAYING = 1_000_000  # bytes of a verbatim tokenizer
# What people read of a layout step, by the name before its sizes (arch/layout_steps.py and
# arch/joining_steps.py).
STEPS: Mapping[str, str] = {
    "Added": "norm weights +1 in GGUF",
    "RowsPermuted": "q and k rows in the rope order of GGUF",
    "Transposed": "matrices transposed",
    "TransposedEach": "matrices transposed",
    "ChannelsLast": "kernels with their input channels moved",
    "Oriented": "matrices transposed where they are stored so",
    "Reshaped": "reshaped",
    "Split": "fused tensors apart or together",
    "Stacked": "experts apart or stacked",
    "HalvesBelow": "halves of a compressor's positions side by side",
    "HalvesExchanged": "halves of a draft head's join exchanged",
    "Joined": "joined on the first axis",
    "KvB": "kv_b apart or together",
}


def single_output(report: "ConversionReport") -> Path | None:
    """Return the target file or folder where it holds all that was written, else None.

    None means that several files lie next to each other, as shards do.
    """
    target = report.target
    alone = report.files == (target,) or all(path.parent == target for path in report.files)
    return target if alone else None


def show_report(
    report: "ConversionReport", dry_run: bool = False, accept: Sequence[str] = ()
) -> None:
    """Print the files written, the changes of encoding and layout, and the verification.

    After a dry run they are those that would be written. `accept` are the values of --accept, which
    the verdict takes into account.
    """
    size = sum(report.sizes.values())
    verb = "would write" if dry_run else "wrote"
    arch = f", {report.arch}" if report.arch else ""
    listed = single_output(report) is None
    name = f"{len(report.files)} files" if listed else render.escape(str(report.target))
    render.line(
        f"{verb} {name} ({report.target_format}{arch}): "
        f"{len(report.tensors)} tensors, {render.size_text(size)}"
        + (f" ({size} bytes in {len(report.sizes)} files)" if dry_run else "")
    )
    for path in report.files if listed else ():
        render.line(f"  {render.escape(str(path))}  {render.size_text(report.sizes[path])}")
    _print_changes(report)
    for note in report.notes:
        if note.level == "note":  # of an adapter: what was done with it
            render.say(f"  {note.text}")
    if report.carried_bytes >= WORTH_SAYING:
        held = render.size_text(report.carried_bytes)
        render.line(f"  of it {held} are tokenizer.json verbatim, which --no-carry leaves out")
    _print_estimate(report)
    _print_verification(report, dry_run, accept)


def _print_changes(report: "ConversionReport") -> None:
    """Print which encodings became others, and which layout steps tensors went through."""
    changed = [t for t in report.tensors if t.encoding != t.source_encoding]
    by_change: dict[tuple[str, str, str], list[TensorOutcome]] = {}
    for tensor in changed:
        by_change.setdefault((tensor.source_encoding, tensor.encoding, tensor.how), []).append(
            tensor
        )
    # One line for each change of encoding, with what it cost.
    for (before, after, how), tensors in by_change.items():
        groups = sum(t.groups for t in tensors)
        counts = ""
        if groups:
            counts = f": repacked, {sum(t.inexact for t in tensors)} of {groups} groups changed"
            if how == "lossy":
                counts += f", by at most {max(t.largest_error for t in tensors):.3g}"
        elif how == "lossy":
            fields = ("changed", "overflowed", "underflowed")
            counts = ": " + ", ".join(
                f"{sum(getattr(t, field) for t in tensors)} {field}" for field in fields
            )
        codes = [t.lost_codes for t in tensors if t.lost_codes is not None]
        if codes:
            lost = sum(codes)
            counts += f"; {lost} codes do not come back" if lost else "; every code comes back"
        render.line(f"  {before} -> {after}: {len(tensors)} tensors, {how}{counts}")
    # One line for each sequence of layout steps.
    steps: dict[tuple[str, ...], int] = {}
    for tensor in report.tensors:
        said = tuple(dict.fromkeys(STEPS.get(s.partition("(")[0], s) for s in tensor.steps))
        if said:
            steps[said] = steps.get(said, 0) + 1
    for said, count in steps.items():
        render.line(f"  {', '.join(said)}: {count} tensors")


def _print_estimate(report: "ConversionReport") -> None:
    """Print the memory, disk and time that a dry run estimates; nothing where there was none."""
    if report.estimate is None:
        return
    found = report.estimate
    free = found["disk_free_bytes"]
    room = "" if free is None else f" of {render.size_text(free)} free"
    seconds = found["seconds"]
    why = "nothing can be written there" if seconds["write"] is None else "the source is cached"
    took = f"unknown: {why}" if seconds["total"] is None else f"about {seconds['total']:.1f} s"
    short = free is not None and free < found["disk_bytes"]
    render.line(
        f"  memory at most {render.size_text(found['memory_bytes'])}; disk "
        f"{render.size_text(found['disk_bytes'])}{room}; time {took}",
        style="bad" if short else "",
    )


def _print_verification(report: "ConversionReport", dry_run: bool, accept: Sequence[str]) -> None:
    """Print what comparing the written output with the source has shown.

    It says so where nothing was verified (--no-verify).
    """
    found = report.pronounced(accept)
    if found is None:
        if not dry_run:
            render.line("  not verified (--no-verify)", style="warn")
    else:
        style = {0: "good", 1: "bad", 2: "warn"}[found.exit]
        render.say(f"  {found.says}", style=style)
        if found.exit == 1:
            render.say("  say so with --accept unread:PATTERN, and take it along yourself")
    if report.accounted is not None and report.accounted.counts["dropped"]:
        render.line(f"  accounted: {report.accounted.says}")
