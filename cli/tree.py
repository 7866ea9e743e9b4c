"""`aprfmt tree`: tensors as a tree of name components."""

from pathlib import Path

import click

from aprfmt.cli import options, render
from aprfmt.cli.damage_report import report_damage
from aprfmt.cli.tree_show import build_tree, show


@click.command("tree")
@options.model()
@options.patterns
@click.option("--depth", type=options.WholeNumber(1), help="Show at most this many levels.")
@options.common
def command(model: Path, patterns: tuple[str, ...], depth: int | None) -> int:
    """Show tensors as a tree of name components, with sizes."""
    from aprfmt.model import open_model
    from aprfmt.model.resolve import names_matching

    with open_model(model, damaged=True) as opened:
        names = names_matching(opened, patterns) if patterns else list(opened)
        root = build_tree([(name, opened[name]) for name in names])
        damage, code = report_damage(opened.damage)
    body = {"model": str(opened.path), "tree": root, "damage": damage}
    return render.emit(body, code, lambda: show(root, depth, str(opened.path)))
