"""Checks where header, index and tensors of an APR v2 file are: overlap, holes, alignment, end."""

from collections.abc import Sequence
from itertools import pairwise

from aprfmt.errors import FormatError, TruncatedError
from aprfmt.formats.apr import layout
from aprfmt.formats.apr.layout import HEADER_SIZE, align_size
from aprfmt.formats.apr.structure import ParsedApr
from aprfmt.formats.damage import report_overlap, tensor_label


def check_regions(parsed: ParsedApr) -> None:
    """Report overlap, remark on holes and unaligned tensors, and set `parsed.end`."""
    header = parsed.header
    fixed = [
        (0, HEADER_SIZE, "the header"),
        (header.metadata_offset, parsed.metadata_end, "the metadata"),
        (header.index_offset, parsed.index_end, "the tensor index"),
    ]
    _check_overlap(parsed, [region for region in fixed if region[0] < region[1]])
    infos = parsed.undamaged_infos()
    if not parsed.faults.damage:
        tensors = [(i.offset, i.offset + i.nbytes, tensor_label(i.name)) for i in infos if i.nbytes]
        _note_holes(parsed, sorted([*(r for r in fixed if r[0] < r[1]), *tensors]))
    unaligned = [i.name for i in infos if i.nbytes and i.offset % layout.ALIGNMENT]
    if unaligned:
        name = tensor_label(unaligned[0])
        parsed.remark(f"{len(unaligned)} tensors are not 64-byte aligned, first {name}")
    # Relative to data_offset, as the writer pads. An empty tensor counts by its offset.
    start = header.data_offset
    parsed.end = start + max((align_size(i.offset + i.nbytes - start) for i in infos), default=0)


def _check_overlap(parsed: ParsedApr, fixed: Sequence[tuple[int, int, str]]) -> None:
    """Report header, metadata, index or tensors that share bytes with one another.

    `fixed` are (start, stop, name) of those other than tensors.
    """
    for (_, end, before), (start, stop, name) in pairwise(sorted(fixed)):
        if start < end:
            error = f"{name} ({start}..{stop}) overlaps {before}, which ends at {end}"
            parsed.faults.add(FormatError(f"{parsed.where}: {error}"))
    infos = [info for info in parsed.undamaged_infos() if info.nbytes]
    for info in infos:
        start, stop = info.offset, info.offset + info.nbytes
        for first, end, what in fixed:
            if start < end and first < stop:
                extent = f"{tensor_label(info.name)} ({start}..{stop})"
                text = f"{extent} overlaps {what}, which ends at {end}"
                parsed.faults.add(FormatError(f"{parsed.where}: {text}"), info.name)
    report_overlap(infos, parsed.faults)


def _note_holes(parsed: ParsedApr, regions: Sequence[tuple[int, int, str]]) -> None:
    """Warn about unused bytes between regions, which are (start, stop, name), sorted."""
    holes = 0
    for (_, end, before), (start, _, name) in pairwise(regions):
        if start > align_size(end):
            holes += 1
            if holes == 1:
                parsed.warn("holes", f"{start - end} unused bytes between {before} and {name}")
    if holes > 1:
        parsed.warn("holes", f"{holes} holes between the parts of the file")


def check_end(parsed: ParsedApr, partial: bool) -> None:
    """Report a file that ends before its data, without its footer, or with bytes after it.

    With `partial` a cut file is only a warning.
    """
    missing = parsed.end - parsed.size
    if missing > 0:
        every = parsed.undamaged_infos()
        beyond = [info for info in every if info.offset + info.nbytes > parsed.size]
        first = f"; {tensor_label(beyond[0].name)} is the first beyond the end" if beyond else ""
        text = (
            f"has {parsed.size} bytes, its tensors end at {parsed.end}: {missing} bytes are "
            f"missing, {len(beyond)} of {len(parsed.entries)} tensors are cut{first}"
        )
        if partial and not parsed.faults.collect:
            parsed.warn("truncated", text)
            return
        todo = "" if parsed.faults.collect else "; get the file again, or list it with --partial"
        error = TruncatedError(f"{parsed.where}: {text}{todo}")
        parsed.faults.cut(error, [info.name for info in beyond if info.nbytes])
    elif parsed.faults.damage:
        return  # the end of the data is not known
    elif parsed.footer == "missing":
        parsed.warn("no_checksum", "no footer checksum, so damage to the data cannot be noticed")
    elif parsed.footer == "trailing":
        parsed.warn(
            "trailing_bytes",
            f"{parsed.size - parsed.end} bytes follow the data, where a 4-byte footer is expected",
        )
