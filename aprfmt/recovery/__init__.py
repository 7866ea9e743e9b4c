"""Repairs a damaged or cut file from a good copy.

Of a copy at an address only the missing and the wrong ranges are fetched. Which ranges are wrong is
known from the copy's structure (the file is shorter, its header differs), from a manifest (`aprfmt
hash --write`; with `--blocks` to the block), or from comparing all bytes. Bytes that none of these
covers are copied from the damaged file, and reported (`Repair.unproven`), unless the digest of the
whole file, from the manifest or published by the hub, proves them at the end.
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
    """Which ranges were taken from the copy, why, and what proves all other bytes.

    `proof` says what the bytes of the output were compared with: "compared" (the copy's, all of
    them), "sha256" (the file's digest), "blocks" or "tensors" (those digests), "" (nothing).
    """

    size: int
    ranges: list[Range] = field(default_factory=list)
    unproven: list[tuple[int, int]] = field(default_factory=list)
    proof: str = ""

    @property
    def taken(self) -> int:
        """The number of bytes of the output that come from the copy."""
        return sum(one.stop - one.start for one in self.ranges)

    def to_json(self) -> dict[str, Any]:
        """Return {size, taken_bytes, ranges, unproven, proof} as JSON.

        `ranges` were taken from the copy, and nothing proves the bytes of `unproven`.
        """
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
    """Write `broken` with missing and wrong bytes taken from `copy`; return what was taken.

    The result goes to `output`, which may exist with `force`. `manifest` is by default the one next
    to the copy or the broken file. `compare` compares all bytes with a copy at an address, which
    fetches it; a copy on this machine always is compared. Raises UsageError where the files are not
    of one model or nothing says that anything is wrong, Unrepaired where the result does not have
    the digest it should. An AssertionError is a bug: such a result was published.
    """
    with ExitStack() as stack:
        here = stack.enter_context(closing(open_bytes(broken)))
        there = stack.enter_context(closing(open_bytes(copy)))
        stated = _manifest_row(manifest, copy, broken)
        found = plan_repair(here, there, stated, compare or not is_remote(copy))
        digest = _expected_digest(there, stated)
        if not found.ranges and here.size == there.size and not (found.proof or digest):
            raise UsageError(
                f"{broken}: has the size and the header of {copy}, and nothing says what else "
                "could be wrong: give --manifest, or --compare to fetch and compare all bytes"
            )
        written = _write_repaired(here, there, found, output, digest, force)
        if digest and written != digest:
            raise AssertionError("an output with another digest is not published")
        if digest:
            found.proof, found.unproven = found.proof or "sha256", []
        return found


def plan_repair(
    broken: ByteSource, good: ByteSource, manifest_row: Mapping[str, Any] | None, compare: bool
) -> Repair:
    """Return the ranges to take from the copy, and the bytes that nothing proves.

    `good` is the copy, `manifest_row` the file's row of a manifest or None. With
    `compare` all bytes are compared.
    """
    from aprfmt.recovery.evidence import (
        check_tensor_digests,
        differing_blocks,
        differing_pages,
        header_end,
    )

    # The header is always compared: it shows whether the two are one file at all.
    have = min(broken.size, good.size)
    end = header_end(good)
    found = Repair(good.size)
    wrong = list(differing_pages(broken, good, 0, min(end, have), "header"))
    _refuse_other_model(broken, good, wrong)
    # The strongest evidence there is finds the rest: all bytes, block or tensor digests.
    if compare:
        wrong += differing_pages(broken, good, min(end, have), have, "bytes")
        found.proof = "compared"
    elif manifest_row is not None and "blocks" in manifest_row:
        wrong += differing_blocks(broken, manifest_row["blocks"], good.size)
        found.proof = "blocks"
    elif manifest_row is not None and manifest_row.get("tensors"):
        checked = check_tensor_digests(broken, good, manifest_row["tensors"])
        wrong += [one for one, right in checked if not right]
        known = [(0, end), *((one.start, one.stop) for one, _ in checked)]
        found.unproven = remaining_ranges(known, have)
        found.proof = "tensors"
    else:
        found.unproven = remaining_ranges([(0, end)], have)
    if broken.size < good.size:
        wrong.append(Range(broken.size, good.size, "missing"))
    found.ranges = join_ranges(wrong, good.size)
    return found


def _refuse_other_model(broken: ByteSource, good: ByteSource, wrong: Sequence[Range]) -> None:
    """Raise UsageError if fewer than half of the copy's tensors are in the broken file.

    They are two different models then. Nothing is raised where the headers are equal, or where the
    broken one is damaged. `good` is the copy, `wrong` are the ranges of the header that
    differ.
    """
    from aprfmt.recovery.evidence import header_tensors

    if not wrong:
        return
    try:
        mine = header_tensors(broken, partial=True)
    except FormatError:
        return  # a damaged header is what is to be repaired
    theirs = header_tensors(good)
    shared = sum(
        _same_shape_and_encoding(mine[name], info) for name, info in theirs.items() if name in mine
    )
    if 2 * shared < len(theirs):
        raise UsageError(
            f"{good.path}: is another file than {broken.path}: {shared} of its {len(theirs)} "
            "tensors are there in that shape and encoding; give a copy of the same file"
        )


def _same_shape_and_encoding(one: TensorInfo, other: TensorInfo) -> bool:
    """Return whether two tensors have the same shape and encoding."""
    return (one.shape, one.encoding) == (other.shape, other.encoding)


def _manifest_row(manifest: Path | None, copy: Path, broken: Path) -> Mapping[str, Any] | None:
    """Return the file's row of a manifest, with the manifest's `tensors`; None without a manifest.

    Without a given one it is looked for next to the copy and the broken file. Raises UsageError for
    a manifest without a row of either file.
    """
    if manifest is None:
        manifests = [manifest_path(copy), manifest_path(broken)]
        manifest = next((path for path in manifests if path.is_file()), None)
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


def _expected_digest(good: ByteSource, manifest_row: Mapping[str, Any] | None) -> str:
    """Return the SHA-256 that the whole file must have, "" where it is not known.

    It is the manifest's, else the one that the copy's site publishes. `good` is the copy,
    `manifest_row` the file's row of a manifest or None.
    """
    if manifest_row is not None:
        return str(manifest_row["sha256"])
    return good.sha256


def _write_repaired(
    broken: ByteSource, good: ByteSource, found: Repair, output: Path, digest: str, force: bool
) -> str:
    """Write the repaired file, and return its SHA-256.

    `good` is the copy, `found` the ranges to take from it. Raises
    Unrepaired, and writes nothing, where it is not `digest`.
    """
    total = hashlib.sha256()
    with FileSet(force=force) as files:
        out = files.create(output)
        for piece in _repaired_bytes(broken, good, found):
            total.update(piece)
            out.write(piece)
        if digest and total.hexdigest() != digest:
            left = "bytes that no digest is of" if found.proof else "bytes of it"
            raise Unrepaired(
                f"{broken.path}: completed, it has SHA-256 {total.hexdigest()}, it should have "
                f"{digest}: {left} are wrong too; nothing was written, --compare finds them"
            )
    return total.hexdigest()


def _repaired_bytes(broken: ByteSource, good: ByteSource, found: Repair) -> Iterator[memoryview]:
    """Yield the bytes of the repaired file in order, from the broken file and the copy.

    `good` is the copy, `found` the ranges to take from it.
    """
    at = 0
    for one in [*found.ranges, Range(found.size, found.size, "")]:
        yield from broken.windows(at, one.start, WINDOW)
        yield from good.windows(one.start, one.stop, WINDOW)
        at = one.stop
