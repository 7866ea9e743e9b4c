"""`aprfmt hex`: header fields or decoded blocks beside their bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import options, render, shell_completion
from aprfmt.cli.damage_report import report_damage
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.base.protocols import Damage


@click.command("hex")
@options.model()
@click.argument("name", required=False, shell_complete=shell_completion.complete_tensors)
@click.option(
    "--tensor",
    "named",
    metavar="NAME",
    help="The same as NAME.",
    shell_complete=shell_completion.complete_tensors,
)
@click.option("--block", type=options.WholeNumber(0), default=0, help="First block to show.")
@click.option("--blocks", type=options.WholeNumber(1), default=2, show_default=True,
              help="How many blocks to show.")  # fmt: skip
@click.option("--offset", type=options.WholeNumber(0), help="Dump plain bytes from here instead.")
@click.option("--length", type=options.WholeNumber(1), default=256, show_default=True,
              help="Bytes to dump with --offset.")  # fmt: skip
@click.option("--limit", type=options.WholeNumber(1), default=64, show_default=True,
              help="Header fields to show.")  # fmt: skip
@options.common
def command(
    model: Path, name: str | None, named: str | None, block: int, blocks: int,
    offset: int | None, length: int, limit: int,
) -> int:  # fmt: skip
    """Show header fields, or the blocks of tensor NAME, or plain bytes, each beside its bytes.

    NAME is as `aprfmt cat` takes it: a stored name, a role, or a pattern of one tensor.
    """
    from aprfmt.cli import hex_read, hex_show

    if name is not None and named is not None:
        raise UsageError(f"two tensors, {name!r} and --tensor {named!r}; give one of them")
    name = named if name is None else name
    if name is not None and offset is not None:
        raise UsageError(f"tensor {name!r} and --offset; give one of them")
    body: hex_read.TensorBlocks | hex_read.PlainBytes | hex_read.HeaderRows
    damage: Sequence[Damage] = ()
    if name is not None:
        body, damage = hex_read.tensor_blocks(model, name, block, blocks)
    elif offset is not None:
        body = hex_read.plain_bytes(model, offset, length)
    else:
        body, damage = hex_read.header_rows(model, limit)
    body["damage"], code = report_damage(damage)
    return render.emit(body, code, lambda: hex_show.show(body))
