"""`aprfmt merge`: a sharded model in one file."""

from pathlib import Path
from typing import Any

import click

from aprfmt.cli import options
from aprfmt.cli.convert_run import run


@click.command("merge")
@options.model("src")
@click.argument("dst", type=click.Path(path_type=Path))
@options.force
@options.resume
@options.no_verify
@options.common
def command(src: Path, dst: Path, **wishes: Any) -> int:
    """Write a sharded SRC (any shard, or the index) as the one file DST."""
    return run(src, dst, None, complete=False, **wishes)
