"""Runs a conversion for every command that converts: picks the function, warns, and reports."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack, cast

import click

from aprfmt.cli import convert_show, render
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


def run_conversion(
    src: Path,
    dst: Path,
    to: str | None,
    adapter: Path | None = None,
    base: Path | None = None,
    **wishes: "Unpack[ConvertArguments]",
) -> int:
    """Convert, print the report, and return the exit code: that of the verification.

    Every conversion command but `set` ends here. It is 0 where nothing was verified. `wishes` are
    the options of the command. `adapter` is merged into `src`; `base` is the model that `src` is an
    adapter of. `to` names the output format, None takes it from `dst`.
    """
    dry_run, accept = bool(wishes.get("dry_run")), wishes.pop("accept", ())
    report = convert_with_warnings(src, dst, to, adapter, base, **wishes)
    found = report.pronounced(accept)
    show = partial(convert_show.show_report, report, dry_run, accept)
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
