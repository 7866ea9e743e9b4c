"""The two ways of `aprfmt repair`: from a good copy, or without one what is sound."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.cli import render

if TYPE_CHECKING:
    from aprfmt.repair import Repair

RANGES = 20  # ranges shown
PROOFS = {
    "compared": "every byte compared",
    "sha256": "SHA-256 of the file is right",
    "blocks": "every block has its digest",
    "tensors": "every tensor has its digest",
}


def remake_index(folder: Path, output: Path | None, force: bool) -> int:
    """Make the index of a folder anew, and print what it lists."""
    from aprfmt.repair.index_repair import write_index

    found = write_index(folder, output, force=force)
    body = {
        "broken": str(folder), "output": str(found.path), "size": found.size,
        "index": {"tensors": found.tensors, "shards": list(found.shards)},
    }  # fmt: skip

    def show() -> None:
        render.line(f"wrote {found.path}: {found.tensors} tensors in {len(found.shards)} shards")

    return render.emit(body, 0, show, written=True)


def complete_file(
    broken: Path, copy: Path, output: Path, manifest: Path | None, compare: bool, force: bool
) -> int:
    """Repair from a copy, and print what was taken."""
    from aprfmt.repair import repair

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
    body = {
        "broken": str(broken), "output": str(output), "source": str(copy),
        "size": found.size, "taken_bytes": found.taken,
        "ranges": [{"start": r.start, "stop": r.stop, "why": r.why} for r in found.ranges],
        "unproven": [{"start": start, "stop": stop} for start, stop in found.unproven],
        "proof": found.proof,
    }  # fmt: skip
    return render.emit(body, 0, partial(show, found, output), written=True)


def show(found: "Repair", output: Path) -> None:
    """Print what was taken, and what proves the result right."""
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
    """Write the tensors that are sound, and print those that are not."""
    from aprfmt.repair.salvage import salvage

    found = salvage(broken, output, force=force)
    if found.missing:
        render.warn(
            f"{output}: {len(found.missing)} of {len(found.missing) + len(found.kept)} tensors are "
            "missing, which the key aprfmt.repair.missing lists",
            "salvaged",
        )
    body = {
        "broken": str(broken),
        "output": str(output),
        "kept": len(found.kept),
        "missing": found.missing,
    }

    def show_missing() -> None:
        for name, why in found.missing.items():
            render.say(f"missing {name}: {why}")
        whole = "" if found.missing else ", every one that it held"
        render.say(f"wrote {output}: {len(found.kept)} tensors{whole}")

    return render.emit(body, 0, show_missing, written=True)
