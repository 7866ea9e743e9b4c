"""`aprfmt repair`: a cut or damaged file, completed from a good copy."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import options, render
from aprfmt.errors import AprfmtError, ArchError, UsageError

if TYPE_CHECKING:
    from aprfmt.recovery import Repair


RANGES = 20  # ranges shown
PROOFS = {
    "compared": "every byte compared",
    "sha256": "SHA-256 of the file is right",
    "blocks": "every block has its digest",
    "tensors": "every tensor has its digest",
}


def remake_index(folder: Path, output: Path | None, force: bool) -> int:
    """Write a new shard index for a folder, print what it lists, and return exit code 0.

    `output` is its path, None for the usual one in the folder. With `force` it may exist.
    """
    from aprfmt.recovery.index_repair import write_index

    found = write_index(folder, output, force=force)
    body = {
        "broken": str(folder), "output": str(found.path), "size": found.size,
        "index": {"tensors": found.tensors, "shards": list(found.shards)},
    }  # fmt: skip

    def show() -> None:
        """Print the path of the index written, and its number of tensors and shards."""
        render.line(f"wrote {found.path}: {found.tensors} tensors in {len(found.shards)} shards")

    return render.emit(body, 0, show, written=True)


def rewrite_by_index(folder: Path, output: Path | None, force: bool) -> int:
    """Write a folder of shards anew by its index, print what was left out, and return exit code 0.

    `output` is the new folder, which may exist with `force`.
    """
    from aprfmt.recovery.by_index import write_by_index

    if output is None:
        raise UsageError("name the folder to write with -o OUTPUT")
    found = write_by_index(folder, output, force=force)
    warn_of_shapes(output)
    body = {
        "broken": str(folder), "output": str(found.folder),
        "index": {"tensors": found.tensors, "shards": list(found.shards)},
        "removed": {name: list(each) for name, each in found.removed.items()},
        "left_out": list(found.left_out),
    }  # fmt: skip

    def show() -> None:
        """Print the tensors left out of each shard, the files left out, and the folder."""
        for name, each in found.removed.items():
            more = f" and {len(each) - 1} more" if len(each) > 1 else ""
            render.say(f"{name}: without {each[0]}{more}, which the index names elsewhere")
        for name in found.left_out:
            render.say(f"left out: {name}")
        shards = f"{found.tensors} tensors in {len(found.shards)} shards"
        render.say(f"wrote {found.folder}: {shards}, each as the index says", style="good")

    return render.emit(body, 0, show, written=True)


def warn_of_shapes(output: Path) -> None:
    """Print a warning where a written file has tensors in shapes that its model cannot have.

    A file that is no model by itself is not judged.
    """
    from aprfmt.model import open_model
    from aprfmt.model.completeness import require_shapes

    try:
        with open_model(output) as model:
            resolution = model.resolution
    except AprfmtError:
        return
    try:
        require_shapes(resolution, output)
    except ArchError as error:
        render.warn(str(error), "misshapen")


def complete_file(
    broken: Path, copy: Path, output: Path, manifest: Path | None, compare: bool, force: bool
) -> int:
    """Repair a file from a good copy, print the ranges taken, and return exit code 0.

    Bytes of the broken file that nothing proves are warned of. `manifest` has the digests of the
    good file, None for one next to the files. With `compare` all bytes are compared with the copy.
    """
    from aprfmt.recovery import repair

    if copy.is_dir():
        copy = copy / broken.name
    found = repair(broken, copy, output, manifest=manifest, compare=compare, force=force)
    if found.unproven:
        count = sum(stop - start for start, stop in found.unproven)
        render.warn(
            f"{output}: {render.size_text(count)} were taken from {broken.name} as they are, and "
            "nothing proves them; give --manifest, or --compare to fetch and compare all bytes",
            "unproven",
        )
    warn_of_shapes(output)
    body = {
        "broken": str(broken), "output": str(output), "source": str(copy),
        "size": found.size, "taken_bytes": found.taken,
        "ranges": [{"start": r.start, "stop": r.stop, "why": r.why} for r in found.ranges],
        "unproven": [{"start": start, "stop": stop} for start, stop in found.unproven],
        "proof": found.proof,
    }  # fmt: skip
    return render.emit(body, 0, partial(show, found, output), written=True)


def show(found: "Repair", output: Path) -> None:
    """Print the ranges taken from the copy, and what proves the result."""
    for one in render.first_rows(found.ranges, RANGES):
        size = render.size_text(one.stop - one.start)
        render.say(f"{one.start}..{one.stop}  {size}  {one.why}")
    proof = PROOFS.get(found.proof, "nothing proves the rest")
    size, new = render.size_text(found.size), render.size_text(found.taken)
    render.say(
        f"wrote {output}: {size}, {new} of them new; {proof}",
        style="good" if found.proof and not found.unproven else "warn",
    )


def salvage_file(broken: Path, output: Path, force: bool) -> int:
    """Write the undamaged tensors to a new file, print the others, and return exit code 0.

    `broken` is the damaged file, `output` the new one, which may exist with `force`.
    """
    from aprfmt.recovery.salvage import salvage

    found = salvage(broken, output, force=force)
    if found.missing:
        render.warn(
            f"{output}: {len(found.missing)} of {len(found.missing) + len(found.kept)} tensors are "
            "missing, which the key aprfmt.repair.missing lists",
            "salvaged",
        )
    warn_of_shapes(output)
    body = {
        "broken": str(broken),
        "output": str(output),
        "kept": len(found.kept),
        "missing": found.missing,
    }

    def show_missing() -> None:
        """Print the tensors that could not be salvaged and why, then the number written."""
        for name, why in found.missing.items():
            render.say(f"missing {name}: {why}")
        whole = "" if found.missing else ", every one that it held"
        render.say(f"wrote {output}: {len(found.kept)} tensors{whole}")

    return render.emit(body, 0, show_missing, written=True)


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
    "--by-index",
    is_flag=True,
    help="BROKEN is a folder of shards: write it to the folder OUTPUT, each tensor in the shard "
    "alone that the index names.",
)
@click.option(
    "--manifest",
    type=options.PathOrAddress(),
    metavar="FILE",
    help="What `aprfmt hash --write` wrote of the good file; default: next to one of the two.",
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
    broken: Path,
    copy: Path | None,
    output: Path | None,
    index: bool,
    by_index: bool,
    manifest: Path | None,
    compare: bool,
    partial: bool,
    force: bool,
) -> int:
    """Write BROKEN completed from SOURCE: only missing and wrong bytes are taken from SOURCE.

    Wrong bytes are found by the headers, by the manifest (which tensor; with `hash --blocks` which
    MiB), or by the comparison. Bytes that none of these covers are kept, with a warning. If the
    digest of the whole file is known, only a file that has it is written. --index replaces the
    index of a folder by one that fits its shards, and touches no shard. --by-index writes shards
    that fit the index, without stale copies of tensors.
    """
    if index and by_index:
        raise UsageError("--index makes the index fit the shards, --by-index these fit it: one")
    if index or by_index:
        if copy is not None or partial or manifest is not None or compare:
            option = "--index" if index else "--by-index"
            raise UsageError(f"{option} reads the shards alone; leave --from and the others out")
        if by_index:
            return rewrite_by_index(broken, output, force)
        return remake_index(broken, output, force)
    if output is None:
        raise UsageError("name the file to write with -o OUTPUT")
    if (copy is None) == (not partial):
        raise UsageError("give a good copy with --from SOURCE, or --partial to do without one")
    if not broken.exists():
        raise UsageError(f"{broken}: no such file")
    if broken.is_dir():
        raise UsageError(f"{broken}: is a folder; give the file of it that is cut or damaged")
    if copy is None:
        return salvage_file(broken, output, force)
    return complete_file(broken, copy, output, manifest, compare, force)
