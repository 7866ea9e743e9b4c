"""Finds which bytes of a file are wrong, by its structure, digests, or another copy.

A *block* is a fixed number of a file's bytes, of which the manifest has the SHA-256.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aprfmt.base.protocols import ByteSource, TensorInfo
from aprfmt.errors import FormatError
from aprfmt.formats import detect_format
from aprfmt.formats.damage import Structure
from aprfmt.recovery.byte_ranges import Range

_STEP = 4096  # differing bytes are reported by pages of this size
_WINDOW = 8 << 20


def header_tensors(file: ByteSource, partial: bool = False) -> Mapping[str, TensorInfo]:
    """Return {name: tensor} of one file's header; with `partial` the file may be cut.

    Raises FormatError for a damaged header.
    """
    return _parse_header(file, partial).infos


def header_end(file: ByteSource) -> int:
    """Return the offset where the first tensor of an undamaged file begins.

    It is the file's size where no tensor has bytes. FormatError if the header is damaged.
    """
    parsed = _parse_header(file)
    return min([info.offset for info in parsed.infos.values() if info.nbytes] or [file.size])


def _parse_header(file: ByteSource, partial: bool = False) -> Structure:
    """Return the parsed header of one file; FormatError if damaged or of another format."""
    spec = detect_format(file.path)
    if spec.structure is None:
        raise FormatError(f"{file.path}: files of the format {spec.name} are not repaired")
    return spec.structure(file.view, str(file.path), partial=partial)


def differing_pages(
    broken: ByteSource, good: ByteSource, start: int, stop: int, why: str
) -> Iterator[Range]:
    """Yield the ranges of [start, stop) in which two files differ, to 4096 bytes.

    `why` is the reason put into the ranges. `good` is the copy.
    """
    for first in range(start, stop, _WINDOW):
        last = min(first + _WINDOW, stop)
        mine, theirs = bytes(broken.view[first:last]), bytes(good.view[first:last])
        broken.drop(first, last)
        good.drop(first, last)
        if mine == theirs:
            continue
        for at in range(0, last - first, _STEP):
            if mine[at : at + _STEP] != theirs[at : at + _STEP]:
                yield Range(first + at, min(first + at + _STEP, last), why)


def differing_blocks(broken: ByteSource, blocks: Mapping[str, Any], size: int) -> Iterator[Range]:
    """Yield the Range of each block whose SHA-256 is not the one in the manifest.

    A block that the broken file's end cuts is one of them; those after the end are left out.
    `blocks` is {"size": bytes of a block, "sha256": digests}, `size` is that of the good file.
    """
    step = blocks["size"]
    for number, digest in enumerate(blocks["sha256"]):
        start, stop = number * step, min((number + 1) * step, size)
        if stop > broken.size:
            if start < broken.size:
                yield Range(start, stop, "block")
            return
        if hashlib.sha256(broken.view[start:stop]).hexdigest() != digest:
            yield Range(start, stop, "block")
        broken.drop(start, stop)


def check_tensor_digests(
    broken: ByteSource, good: ByteSource, rows: Sequence[Mapping[str, Any]]
) -> list[tuple[Range, bool]]:
    """Return (range, whether its SHA-256 is right) of each tensor in the manifest's rows.

    The ranges are those of the copy's header. A tensor that ends after the broken file's end is
    left out. `good` is the copy, `rows` are those of the manifest.
    """
    infos = header_tensors(good)
    found = []
    for row in rows:
        for name, digest in zip(row["names"], row["raw"], strict=False):
            info = infos.get(name)
            if info is None or info.offset + info.nbytes > broken.size:
                continue
            total = hashlib.sha256()
            for window in broken.windows(info.offset, info.offset + info.nbytes):
                total.update(window)
            one = Range(info.offset, info.offset + info.nbytes, f"tensor {name}")
            found.append((one, total.hexdigest() == digest))
    return found
