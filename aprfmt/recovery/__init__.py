"""A damaged or cut file, completed from a good copy; or what is sound of it as a file of its own.

Of a copy that lies elsewhere only the missing and the wrong ranges are fetched. Which ranges are
wrong is known from the copy's structure (the file is shorter, its header differs), from a manifest
(`aprfmt hash --write`; with `--blocks` to the block), or from comparing all bytes. What nothing
speaks of is taken as it is, and said (`Repair.unproven`), unless the digest of the whole file,
stated by the manifest or published by the hub, proves it at the end.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aprfmt.base.protocols import ByteSource, TensorInfo
from aprfmt.errors import FormatError, UsageError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.mapped_file import open_bytes
from aprfmt.model.manifest import manifest_path, read_manifest
from aprfmt.recovery.byte_ranges import Range, join_ranges, remaining_ranges
from aprfmt.remote.paths import is_remote

WINDOW = 8 << 20


@dataclass
class Repair:
    """What was taken from the copy, why, and what is known of the rest.

    `proof` says what the bytes of the output are held to: "compared" (all of them with the copy's),
    "sha256" (the file's digest), "blocks" or "tensors" (those digests), "" (nothing).
    """

    size: int
    ranges: list[Range] = field(default_factory=list)
    unproven: list[tuple[int, int]] = field(default_factory=list)
    proof: str = ""

    @property
    def taken(self) -> int:
        """Bytes of the output that come from the copy."""
        return sum(one.stop - one.start for one in self.ranges)

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the size, what was taken from the copy, and what nothing proves."""
        return {
            "size": self.size,
            "taken_bytes": self.taken,
            "ranges": [asdict(one) for one in self.ranges],
            "unproven": [{"start": start, "stop": stop} for start, stop in self.unproven],
            "proof": self.proof,
        }


class Unrepaired(FormatError):
    """The completed file does not have the digest it should; nothing was written."""


def repair(
    broken: Path,
    copy: Path,
    output: Path,
    *,
    manifest: Path | None = None,
    compare: bool = False,
    force: bool = False,
) -> Repair:
    """Write `output`: `broken`, with what is missing or wrong taken from `copy`.

    `manifest` is by default the one beside the copy or the broken file. `compare` compares all
    bytes with a copy that lies elsewhere, which fetches it; a copy on this machine always is.
    Raises UsageError where the files are not of one model or nothing says that anything is wrong,
    Unrepaired where the result is not what it should be.
    """
    with ExitStack() as stack:
        here = stack.enter_context(closing(open_bytes(broken)))
        there = stack.enter_context(closing(open_bytes(copy)))
        stated = _stated(manifest, copy, broken)
        found = plan_repair(here, there, stated, compare or not is_remote(copy))
        digest = _digest(there, stated)
        if not found.ranges and here.size == there.size and not (found.proof or digest):
            raise UsageError(
                f"{broken}: has the size and the header of {copy}, and nothing says what else "
                "could be wrong: give --manifest, or --compare to fetch and compare all bytes"
            )
        written = _write(here, there, found, output, digest, force)
        if digest and written != digest:
            raise AssertionError("an output with another digest is not published")
        if digest:
            found.proof, found.unproven = found.proof or "sha256", []
        return found


def plan_repair(
    here: ByteSource, there: ByteSource, stated: Mapping[str, Any] | None, compare: bool
) -> Repair:
    """Return which ranges of the copy are needed, and which bytes nothing speaks of."""
    from aprfmt.recovery.evidence import (
        check_tensor_digests,
        differing_blocks,
        differing_pages,
        header_end,
    )

    have = min(here.size, there.size)
    end = header_end(there)
    found = Repair(there.size)
    wrong = list(differing_pages(here, there, 0, min(end, have), "header"))
    _refuse_other(here, there, wrong)
    if compare:
        wrong += differing_pages(here, there, min(end, have), have, "bytes")
        found.proof = "compared"
    elif stated is not None and "blocks" in stated:
        wrong += differing_blocks(here, stated["blocks"], there.size)
        found.proof = "blocks"
    elif stated is not None and stated.get("tensors"):
        checked = check_tensor_digests(here, there, stated["tensors"])
        wrong += [one for one, right in checked if not right]
        known = [(0, end), *((one.start, one.stop) for one, _ in checked)]
        found.unproven = remaining_ranges(known, have)
        found.proof = "tensors"
    else:
        found.unproven = remaining_ranges([(0, end)], have)
    if here.size < there.size:
        wrong.append(Range(here.size, there.size, "missing"))
    found.ranges = join_ranges(wrong, there.size)
    return found


def _refuse_other(here: ByteSource, there: ByteSource, wrong: Sequence[Range]) -> None:
    """Raise UsageError where both headers are sound, and most tensors differ: two models."""
    from aprfmt.recovery.evidence import tensors_of

    if not wrong:
        return
    try:
        mine = tensors_of(here, partial=True)
    except FormatError:
        return  # damaged, which is why we are asked
    theirs = tensors_of(there)
    shared = sum(_like(mine[name], info) for name, info in theirs.items() if name in mine)
    if 2 * shared < len(theirs):
        raise UsageError(
            f"{there.path}: is another file than {here.path}: {shared} of its {len(theirs)} "
            "tensors are there in that shape and encoding; give a copy of the same file"
        )


def _like(one: TensorInfo, other: TensorInfo) -> bool:
    return (one.shape, one.encoding) == (other.shape, other.encoding)


def _stated(manifest: Path | None, copy: Path, broken: Path) -> Mapping[str, Any] | None:
    """Return the row of the file in a manifest, with its `tensors`; None without a manifest."""
    if manifest is None:
        beside = [manifest_path(copy), manifest_path(broken)]
        manifest = next((path for path in beside if path.is_file()), None)
        if manifest is None:
            return None
    body = read_manifest(manifest)
    rows = [row for row in body["files"] if "outside" in row]
    row = next((row for row in rows if row["name"] in (copy.name, broken.name)), None)
    if row is None and len(rows) == 1:
        (row,) = rows
    if row is None:
        raise UsageError(
            f"{manifest}: says nothing of {copy.name}; give the manifest of the model it belongs to"
        )
    return {**row, "tensors": body["tensors"]}


def _digest(there: ByteSource, stated: Mapping[str, Any] | None) -> str:
    """Return the SHA-256 that the whole file must have, "" where nobody says."""
    if stated is not None:
        return str(stated["sha256"])
    return there.sha256


def _write(
    here: ByteSource, there: ByteSource, found: Repair, output: Path, digest: str, force: bool
) -> str:
    """Publish the completed file; return its SHA-256. Raises Unrepaired, and writes nothing."""
    total = hashlib.sha256()
    with FileSet(force=force) as files:
        out = files.create(output)
        for piece in _pieces(here, there, found):
            total.update(piece)
            out.write(piece)
        if digest and total.hexdigest() != digest:
            left = "bytes that no digest is of" if found.proof else "bytes of it"
            raise Unrepaired(
                f"{here.path}: completed, it has SHA-256 {total.hexdigest()}, it should have "
                f"{digest}: {left} are wrong too; nothing was written, --compare finds them"
            )
    return total.hexdigest()


def _pieces(here: ByteSource, there: ByteSource, found: Repair) -> Iterator[memoryview]:
    """Yield the output's bytes in order."""
    at = 0
    for one in [*found.ranges, Range(found.size, found.size, "")]:
        yield from here.windows(at, one.start, WINDOW)
        yield from there.windows(one.start, one.stop, WINDOW)
        at = one.stop
