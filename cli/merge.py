"""`aprfmt merge`: a sharded model in one file."""

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from aprfmt.cli import options
from aprfmt.cli.convert_run import run_conversion

if TYPE_CHECKING:
    from aprfmt.cli.convert_run import ConvertArguments


@click.command("merge")
@options.model("src")
@click.argument("dst", type=options.NamedPath())
@options.force
@options.resume
@options.no_verify
@options.jobs
@options.accept()
@options.common
def command(src: Path, dst: Path, **wishes: "Unpack[ConvertArguments]") -> int:
    """Write a sharded SRC (any shard, or the index) as the one file DST."""
    wishes["complete"], wishes["plain_copy"] = False, True
    return run_conversion(src, dst, None, **wishes)
