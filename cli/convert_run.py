"""How every command that converts does it: the way by its options, the warnings, the report."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import convert_show, render
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.conversion import ConversionReport


def run(src: Path, dst: Path, to: str | None, **wishes: Any) -> int:
    """Convert and report; every conversion command but `set` ends here.

    `wishes` are fields of conversion's Options: what the commands call their options, and what
    `convert` has of adapters.
    """
    dry_run = bool(wishes.get("dry_run"))
    report = converted(src, dst, to, **wishes)
    show = partial(convert_show.show, report, dry_run)
    return render.emit(report.to_json(), 0, show, written=True)


def converted(src: Path, dst: Path, to: str | None, **wishes: Any) -> "ConversionReport":
    """Convert, warn of what the target cannot say, and return the report."""
    from aprfmt.conversion import NoFormatError

    command = click.get_current_context()
    try:
        with render.ProgressLine(command.info_name or "", "bytes") as progress:
            report = _way(wishes)(src, dst, to=to, progress=progress, **wishes)
    except NoFormatError as error:
        named = any(each.name == "to" for each in command.command.params)
        raise UsageError(f"{error}" + (", or its name with --to" if named else "")) from None
    for note in report.notes:
        if note.level == "warning":
            render.warn_note(note)
    return report


def _way(wishes: dict[str, Any]) -> "Callable[..., ConversionReport]":
    """Return the function that converts: plainly, with an adapter merged, or an adapter itself.

    What it alone takes is taken out of `wishes`. Raises UsageError for both at once.
    """
    adapter, base = wishes.pop("adapter", None), wishes.pop("base", None)
    if adapter is not None and base is not None:
        raise UsageError("--adapter merges into SRC, --base says SRC is an adapter: give one")
    if adapter is not None:
        from aprfmt.adapters import convert_merged

        return partial(convert_merged, adapter=adapter)
    if base is not None:
        from aprfmt.adapters import convert_adapter

        kept = {name: wishes[name] for name in ("force", "dry_run")}
        wishes.clear()
        return lambda src, dst, to, progress: convert_adapter(src, dst, base, **kept)
    from aprfmt.conversion import convert

    return convert
