"""Describes byte ranges of a tensor: rows, experts, file offset and alignment."""

from aprfmt.measure.row_reader import RowReader

ALIGNED = (1 << 16, 4096, 512, 64)  # bytes of what disks, systems and loaders read at a time


def common_alignment(start: int, stop: int) -> int:
    """Return the largest of the alignments ALIGNED (bytes) that both ends of a range have; or 0."""
    return next((size for size in ALIGNED if start % size == 0 and stop % size == 0), 0)


def range_in_file(side: RowReader, start: int, stop: int) -> tuple[str, int, int] | None:
    """Return (stored name, file offset of the first byte, offset past the last) of a byte range.

    None if the bytes are not consecutive in one file. `start` and `stop` count in the logical
    tensor.
    """
    first, begin = side.bytes.locate(start)
    last, end = side.bytes.locate(stop - 1)
    if first is not last or end - begin != stop - 1 - start:
        return None
    offset = first.info.offset
    return first.info.name, offset + begin, offset + end + 1


def range_text(side: RowReader, start: int, stop: int) -> str:
    """Return a byte range of the logical tensor in words: where in the file, which rows."""
    found = range_in_file(side, start, stop)
    if found is None:
        where = f"bytes {start} to {stop - 1} of {side.name}"
    else:
        name, begin, end = found
        even = common_alignment(begin, end)
        inside = begin - side.bytes.locate(start)[0].info.offset
        where = f"bytes {begin:#x} to {end - 1:#x} of the file, in {name} at +{inside:#x}"
        where += f", {end - begin} bytes" + (f", aligned to {even}" if even else "")
    return where + units_text(side, start, stop)


def units_text(side: RowReader, start: int, stop: int) -> str:
    """Return text on the rows or experts of a byte range, such as ": rows 3-5".

    "" for a vector, and where rows are not separate bytes.
    """
    size = side.row_bytes
    if side.columns == 1 or not size:
        return ""
    if len(side.shape) == 3:
        one = size * side.shape[1]
        if start % one == 0 and stop % one == 0:
            return f": {numbered_text('expert', start // one, stop // one)}"
    exact = start % size == 0 and stop % size == 0
    rows = numbered_text("row", start // size, -(-stop // size))
    return f": {rows}" if exact else f": in {rows}"


def numbered_text(one: str, start: int, stop: int) -> str:
    """Return `row 3` or `rows 3-9` for the numbers [start, stop); `one` is the singular, `row`."""
    return f"{one} {start}" if stop - start == 1 else f"{one}s {start}-{stop - 1}"
