"""`aprfmt repair`: a cut or damaged file, completed from a good copy."""

from pathlib import Path

import click

from aprfmt.cli import options, repair_run
from aprfmt.errors import UsageError


@click.command("repair", options_metavar="[OPTIONS] -o OUTPUT")
@options.model("broken")
@click.option(
    "--from",
    "copy",
    type=options.PathOrAddress(),
    metavar="SOURCE",
    help="A good copy: a file, or an address of which only the ranges needed are fetched.",
)
@click.option("-o", "--output", type=options.NamedPath(), help="The file to write.")
@click.option(
    "--index",
    is_flag=True,
    help="BROKEN is a folder of shards: make its index anew from what they hold.",
)
@click.option(
    "--manifest",
    type=options.PathOrAddress(),
    metavar="FILE",
    help="What `aprfmt hash --write` wrote of the good file; default: beside one of the two.",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Fetch all of SOURCE and compare it; a SOURCE on this machine always is.",
)
@click.option("--partial", is_flag=True, help="Without a SOURCE: write the tensors that are sound.")
@options.force
@options.common
def command(
    broken: Path, copy: Path | None, output: Path | None, index: bool, manifest: Path | None,
    compare: bool, partial: bool, force: bool,
) -> int:  # fmt: skip
    """Write BROKEN completed from SOURCE: what is missing or wrong, and no other byte, is taken.

    What is wrong is known from the headers, the manifest (to the tensor, with `hash --blocks` to
    the MiB), or the comparison. Bytes that nothing speaks of are taken as they are, with a warning;
    where the digest of the whole file is known, nothing is written that does not have it.
    --index replaces the index of a folder by one that fits its shards, and touches no shard.
    """
    if index:
        if copy is not None or partial or manifest is not None or compare:
            raise UsageError("--index reads the shards alone; leave --from and the others out")
        return repair_run.remake_index(broken, output, force)
    if output is None:
        raise UsageError("name the file to write with -o OUTPUT")
    if (copy is None) == (not partial):
        raise UsageError("give a good copy with --from SOURCE, or --partial to do without one")
    if not broken.exists():
        raise UsageError(f"{broken}: no such file")
    if broken.is_dir():
        raise UsageError(f"{broken}: is a folder; give the file of it that is cut or damaged")
    if copy is None:
        return repair_run.salvage_file(broken, output, force)
    return repair_run.complete_file(broken, copy, output, manifest, compare, force)
