"""`aprfmt split`: the same model in several shards."""

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from aprfmt.cli import options
from aprfmt.cli.convert_run import run_conversion

if TYPE_CHECKING:
    from aprfmt.cli.convert_run import ConvertArguments


@click.command("split")
@options.model("src")
@click.argument("dst", type=options.NamedPath())
@click.option(
    "--max-shard-size",
    callback=options.parse_size,
    required=True,
    metavar="SIZE",
    help="Bytes of tensor data in a shard at most (500M, 2G).",
)
@options.force
@options.resume
@options.no_verify
@options.jobs
@options.accept()
@options.common
def command(src: Path, dst: Path, **wishes: "Unpack[ConvertArguments]") -> int:
    """Write SRC as shards named after DST (x.gguf gives x-00001-of-0000N.gguf)."""
    wishes["complete"], wishes["plain_copy"] = False, True
    return run_conversion(src, dst, None, **wishes)
