"""Damage of a file that is read all the same: one line on stderr, a list in JSON, exit 2."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

import click

from aprfmt.base.protocols import Damage
from aprfmt.cli import render
from aprfmt.cli.render import escape


def report_damage(
    damage: Iterable[Damage], *, partial: bool = False
) -> tuple[list[dict[str, object]], int]:
    """Print one line for each damaged file to stderr; return (rows for the JSON, exit code).

    The code is 0 where nothing is damaged, else 2. With `partial` the user has said that the file
    is cut: that is a warning, and the code is 0 if nothing else is wrong.
    """
    by_file: dict[str, list[Damage]] = {}
    for one in damage:
        by_file.setdefault(one.where, []).append(one)
    code = 0
    for where, found in by_file.items():
        expected = partial and all(one.kind == "truncated" for one in found)
        code = code if expected else 2
        begin = "warning" if expected else "aprfmt"
        render.STATUS.clear()
        click.echo(f"{begin}: {escape(damage_sentence(where, found), 1500)}", err=True)
    return [asdict(one) for found in by_file.values() for one in found], code


def damage_sentence(where: str, found: Sequence[Damage]) -> str:
    """Return one line about a damaged file: how many tensors are lost, and the first fault.

    `where` is the file, `found` all its damage.
    """
    lost = len({name for one in found for name in one.tensors})
    kinds = {one.kind for one in found}
    cost = "packed weights cannot be decoded" if "codec" in kinds else "costs no tensor"
    cost = "tensors are lost" if "truncated" in kinds else cost
    cost = f"{lost} tensor{'s' * (lost != 1)} cannot be read" if lost else cost
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{where}: is damaged, {cost}: {found[0].text}{more}; aprfmt validate says more"
