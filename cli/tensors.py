"""`aprfmt tensors`: every tensor of a file, one line each."""

from pathlib import Path

import click

from aprfmt.cli import options, render
from aprfmt.cli.damage_report import report_damage


@click.command("tensors")
@options.model()
@options.patterns
@click.option("--stats", is_flag=True, help="Decode and add mean, std, min, max, zeros, NaN, Inf.")
@click.option("--limit", type=options.WholeNumber(1), help="Show at most this many.")
@click.option("--partial", is_flag=True, help="A cut file, or a missing one of a set, is no error.")
@options.arch
@options.common
def command(
    model: Path, patterns: tuple[str, ...], stats: bool, limit: int | None, partial: bool,
    arch: str | None,
) -> int:  # fmt: skip
    """List tensors: name, role, shape, encoding, bytes, offset.

    PATTERN is whole dot-components from the left (blk.3.ffn_gate) or, where none match there,
    anywhere (ffn_gate); or a glob, or re:...; in any spelling, or by role.
    """
    from aprfmt.cli.tensors_show import show, tensor_row
    from aprfmt.model import open_model
    from aprfmt.model.resolve import names_matching

    with open_model(model, arch=arch, partial=partial, damaged=True) as opened:
        roles = opened.roles_of
        names = names_matching(opened, patterns) if patterns else list(opened)
        rows = []
        with render.ProgressLine("tensors") as progress:
            for i, name in enumerate(names[:limit]):
                rows.append(tensor_row(name, opened[name], roles.get(name, ()), stats))
                progress(i + 1, len(names[:limit]))
        for note in opened.notes:
            if note.level == "warning" or note.key == "remark":
                render.warn_note(note)
        damage, code = report_damage(opened.damage, partial=partial)
    body = {"model": str(opened.path), "count": len(names), "tensors": rows, "damage": damage}
    return render.emit(body, code, lambda: show(rows, len(names), stats))
