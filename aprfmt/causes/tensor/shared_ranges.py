"""Tensors whose byte ranges in a file overlap, and whether only the shared bytes differ.

A and B are the two models, runs or traces that are compared; a *side* is one of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.base.protocols import LazyTensor
from aprfmt.causes.row import Cause
from aprfmt.errors import AprfmtError
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import Proof, unfitted_proof
from aprfmt.measure.records import TensorDiff
from aprfmt.model import Model
from aprfmt.remote.paths import is_remote

if TYPE_CHECKING:
    from numpy.typing import NDArray

CAUSE_ROWS = (
    Cause(
        "overlapping_ranges", "tensor", "bug",
        "Two tensors of a file share bytes: a writer left less room than one needs, or stated a "
        "wrong offset.",
        "The range of one tensor begins before that of another ends.",
        "Every byte that differs from the other side's lies in a shared range.",
        next="again",
    ),
)  # fmt: skip
_SHOWN = 2  # pairs in a sentence


class SharedRange(NamedTuple):
    """Bytes [start, stop) of a file that belong to two tensors, by their stored names."""

    first: str
    second: str
    start: int
    stop: int


def shared_ranges(tensors: Mapping[str, LazyTensor]) -> Iterator[SharedRange]:
    """Yield each range of bytes that a tensor shares with an earlier one of its file, by offset.

    The earlier one is the one that reaches furthest. Tensors without bytes share none.
    """
    furthest: dict[object, LazyTensor] = {}
    for one in sorted(tensors.values(), key=lambda one: (one.info.offset, one.info.nbytes)):
        if not one.info.nbytes:
            continue
        before, stop = furthest.get(one.path), one.info.offset + one.info.nbytes
        end = 0 if before is None else before.info.offset + before.info.nbytes
        if before is not None and one.info.offset < end:
            yield SharedRange(
                before.info.name, one.info.name, one.info.offset, min(end, stop)
            )  # fmt: skip
        if before is None or stop > end:
            furthest[one.path] = one


def overlap_findings(
    rows: Sequence[TensorDiff], a: Model, b: Model, command: str
) -> Iterator[Finding]:
    """Yield the finding of each side whose tensors share bytes of their file.

    It is confirmed where every byte that differs from the other side's lies in a shared range, as
    far as tensors can be read. `rows` are the compared tensors, `command` is the next command for
    B.
    """
    for label, model, other in (("A", a, b), ("B", b, a)):
        tensors = model.source.tensors
        found = list(shared_ranges(tensors))
        if not found:
            continue
        names = {name for one in found for name in (one.first, one.second)}
        keys = tuple(
            row.key for row in rows if names & {row.key, row.name_a if label == "A" else row.name_b}
        )
        shown = "; ".join(_pair_text(one, tensors) for one in found[:_SHOWN])
        more = f"; {len(found) - _SHOWN} more pairs" if len(found) > _SHOWN else ""
        says = (
            f"{label}'s tensors share bytes of {model.path.name}, so that one was written over the "
            f"other, or its offset is wrong: {shown}{more}"
        )
        proof = _proof(found, tensors, other.source.tensors, model.path)
        yield Finding(
            "overlapping_ranges", says, "tensor", "bug", keys or tuple(sorted(names)), True,
            side=label, keys=keys, proof=proof, next=command if label == "B" else "",
        )  # fmt: skip


def _pair_text(one: SharedRange, tensors: Mapping[str, LazyTensor]) -> str:
    """Return in words two tensors that share bytes: names, ranges, number of shared bytes."""
    infos = [tensors[name].info for name in (one.first, one.second)]
    first, second = (f"{i.name} ({i.offset}..{i.offset + i.nbytes})" for i in infos)
    count = one.stop - one.start
    return f"{first} and {second}, {count} byte{'s' * (count != 1)}"


def _proof(
    found: list[SharedRange],
    mine: Mapping[str, LazyTensor],
    theirs: Mapping[str, LazyTensor],
    path: Path,
) -> Proof | None:
    """Return the proof that nothing but shared bytes differs; None if none could be compared.

    `mine` are the tensors with shared ranges `found`, `theirs` the other side's. `path` is the
    file of `mine`.
    """
    differing = inside = 0
    for name in dict.fromkeys(name for one in found for name in (one.first, one.second)):
        other, info = theirs.get(name), mine[name].info
        if other is None or (other.info.encoding, other.info.shape) != (info.encoding, info.shape):
            continue
        x = _bytes_of(mine[name], path)
        try:
            y = np.frombuffer(other.raw(), np.uint8)
        except AprfmtError:
            continue
        if x is None or x.size != y.size:
            continue
        places = np.flatnonzero(x != y) + info.offset
        held = np.zeros(places.size, bool)
        for one in found:
            if name in (one.first, one.second):
                held |= (places >= one.start) & (places < one.stop)
        differing, inside = differing + places.size, inside + int(held.sum())
    return unfitted_proof(differing, inside / differing) if differing else None


def _bytes_of(tensor: LazyTensor, path: Path) -> "NDArray[np.uint8] | None":
    """Return the bytes in a tensor's range, also of one that is not read for its overlap.

    None where they are not in the local file `path`.
    """
    path = tensor.path or path
    if is_remote(path) or not path.is_file():
        return None
    return np.fromfile(path, np.uint8, tensor.info.nbytes, offset=tensor.info.offset)
