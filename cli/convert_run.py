"""Runs a conversion for every command that converts: picks the function, warns, and reports."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

import click

from aprfmt.cli import render
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.conversion import ConversionReport
    from aprfmt.conversion.options import ConvertOptions

    class ConvertArguments(ConvertOptions, total=False):
        """What commands that convert take: fields of conversion's Options, and `accept`.

        Each command has some of them; one that is absent has the default of Options. `accept` is
        that of the verdict.
        """

        accept: Sequence[str]

    from aprfmt.conversion.report import TensorOutcome


def run_conversion(
    src: Path,
    dst: Path,
    to: str | None,
    adapter: Path | None = None,
    base: Path | None = None,
    **wishes: "Unpack[ConvertArguments]",
) -> int:
    """Convert, print the report, and return the exit code of the verification.

    Every conversion command but `set` ends here. The code is 0 where nothing was verified. `wishes`
    are the options of the command. `adapter` is merged into `src`; `base` is the model that `src`
    is an adapter of. `to` names the output format, None takes it from `dst`.
    """
    dry_run, accept = bool(wishes.get("dry_run")), wishes.pop("accept", ())
    report = convert_with_warnings(src, dst, to, adapter, base, **wishes)
    found = report.pronounced(accept)
    show = partial(show_report, report, dry_run, accept)
    body = report.to_json() | ({} if found is None else found.to_json())
    code = 0 if found is None else found.exit
    return render.emit(body, code, show, written=code == 0)


def convert_with_warnings(
    src: Path,
    dst: Path,
    to: str | None,
    adapter: Path | None = None,
    base: Path | None = None,
    **wishes: "Unpack[ConvertArguments]",
) -> "ConversionReport":
    """Convert `src` to `dst`, print warnings of what the target cannot hold; return the report.

    `adapter` is merged into `src`; `base` is the model that `src` is an adapter of. `to` names the
    output format, None takes it from `dst`. `wishes` are options of the conversion. Raises
    UsageError where no output format is known.
    """
    from aprfmt.conversion.output_format import NoFormatError, has_extension

    command = click.get_current_context()
    try:
        with render.ProgressLine(command.info_name or "", "bytes") as progress:
            report = _conversion_function(adapter, base, wishes)(src, dst, to=to, progress=progress)
    except NoFormatError as error:
        named = any(each.name == "to" for each in command.command.params)
        hint = ", or its name with --to" if named else ""
        if named and not has_extension(dst):
            hint += " (a Hugging Face folder: --to safetensors)"
        raise UsageError(f"{error}{hint}") from None
    for note in report.notes:
        if note.level == "warning":
            render.warn_note(note)
    return report


def _conversion_function(
    adapter: Path | None, base: Path | None, wishes: "ConvertArguments"
) -> "Callable[..., ConversionReport]":
    """Return the function that converts: plain, with an adapter merged, or an adapter alone.

    It takes (src, dst, to, progress). `adapter` is to be merged into the source. `base` is the
    model that the source is an adapter of. Raises UsageError where both are given.
    """
    if adapter is not None and base is not None:
        raise UsageError("--adapter merges into SRC, --base says SRC is an adapter: give one")
    if adapter is not None:
        from aprfmt.adapters import convert_merged

        return partial(convert_merged, adapter=adapter, **wishes)
    if base is not None:
        from aprfmt.adapters import convert_adapter

        force, dry_run = wishes["force"], wishes["dry_run"]
        return lambda src, dst, to, progress: convert_adapter(
            src, dst, base, force=force, dry_run=dry_run
        )
    from aprfmt.conversion import convert

    plain = {name: value for name, value in wishes.items() if name != "accept"}
    return partial(convert, **cast("ConvertOptions", plain))


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
    """Return the target file or folder if it holds everything that was written, else None.

    None means that several files are next to each other, as shards are.
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
    """Print the memory, disk and time that a dry run estimates; nothing without an estimate."""
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
    """Print the result of comparing the written output with the source.

    With --no-verify it prints that nothing was verified.
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
