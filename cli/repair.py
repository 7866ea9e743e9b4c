"""`aprfmt repair`: a cut or damaged file, completed from a good copy."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import options, render
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.repair import Repair


PROOFS = {
    "compared": "every byte compared",
    "sha256": "SHA-256 of the file is right",
    "blocks": "every block has its digest",
    "tensors": "every tensor has its digest",
}


@click.command("repair", options_metavar="[OPTIONS] -o OUTPUT")
@options.model("broken")
@click.option(
    "--from",
    "copy",
    type=options.Place(),
    metavar="SOURCE",
    help="A good copy: a file, or an address of which only the ranges needed are fetched.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="The file to write."
)
@click.option(
    "--manifest",
    type=options.Place(),
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
    broken: Path,
    copy: Path | None,
    output: Path,
    manifest: Path | None,
    compare: bool,
    partial: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Write BROKEN completed from SOURCE: what is missing or wrong, and no other byte, is taken.

    What is wrong is known from the headers, the manifest (to the tensor, with `hash --blocks` to
    the MiB), or the comparison. Bytes that nothing speaks of are taken as they are, with a warning;
    where the digest of the whole file is known, nothing is written that does not have it.
    """
    if (copy is None) == (not partial):
        raise UsageError("give a good copy with --from SOURCE, or --partial to do without one")
    if not broken.exists():
        raise UsageError(f"{broken}: no such file")
    if broken.is_dir():
        raise UsageError(f"{broken}: is a folder; give the file of it that is cut or damaged")
    body: dict[str, Any] = {"broken": str(broken), "output": str(output)}
    if copy is None:
        body |= salvaged(broken, output, force, quiet or as_json)
    else:
        if copy.is_dir():
            copy = copy / broken.name
        body |= completed(broken, copy, output, manifest, compare, force, quiet or as_json)
    return render.emit("repair", 0, body, as_json)


def completed(
    broken: Path, copy: Path, output: Path, manifest: Path | None, compare: bool, force: bool,
    silent: bool,
) -> dict[str, Any]:  # fmt: skip
    """Repair from a copy; return the facts."""
    from aprfmt.repair import repair

    found = repair(broken, copy, output, manifest=manifest, compare=compare, force=force)
    if not silent:
        show(found, output)
    if found.unproven:
        count = sum(stop - start for start, stop in found.unproven)
        render.warn(
            f"{output}: {render.size_text(count)} were taken from {broken.name} as they are, and "
            "nothing proves them; give --manifest, or --compare to fetch and compare all bytes",
            "unproven",
        )
    return {
        "source": str(copy), "size": found.size, "taken_bytes": found.taken,
        "ranges": [{"start": r.start, "stop": r.stop, "why": r.why} for r in found.ranges],
        "unproven": [{"start": start, "stop": stop} for start, stop in found.unproven],
        "proof": found.proof,
    }  # fmt: skip


def show(found: "Repair", output: Path) -> None:
    """Print what was taken, and what holds the result."""
    for one in found.ranges[:20]:
        size = render.size_text(one.stop - one.start)
        render.line(render.escape(f"{one.start}..{one.stop}  {size}  {one.why}"))
    if len(found.ranges) > 20:
        render.line(f"... {len(found.ranges) - 20} more (--json)", style="dim")
    proof = PROOFS.get(found.proof, "nothing proves the rest")
    render.line(
        render.escape(f"wrote {output}: {render.size_text(found.size)}, "
                      f"{render.size_text(found.taken)} of them new; {proof}"),
        style="good" if found.proof and not found.unproven else "warn",
    )  # fmt: skip


def salvaged(broken: Path, output: Path, force: bool, silent: bool) -> dict[str, Any]:
    """Write what is sound; return the facts."""
    from aprfmt.repair.salvage import salvage

    found = salvage(broken, output, force=force)
    render.warn(
        f"{output}: {len(found.missing)} of {len(found.missing) + len(found.kept)} tensors are "
        "missing, which the key aprfmt.repair.missing lists",
        "salvaged",
    )
    if not silent:
        for name, why in found.missing.items():
            render.line(render.escape(f"missing {name}: {why}"))
        render.line(render.escape(f"wrote {output}: {len(found.kept)} tensors"))
    return {"kept": len(found.kept), "missing": found.missing}
