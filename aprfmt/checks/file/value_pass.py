"""One pass over every stored byte of every tensor, in windows."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from aprfmt.base.budget import end_where_time_is_over
from aprfmt.base.encodings import find_encoding as encoding_row
from aprfmt.base.protocols import LazyTensor, TensorInfo, tensor_damage
from aprfmt.checks.file.scales import first_bad_block, header_is_bad
from aprfmt.codecs import codec
from aprfmt.errors import AprfmtError, UnsupportedError
from aprfmt.formats.mapped_file import MemoryTensor
from aprfmt.model import Model
from aprfmt.tensors.stats import Accumulator, Stats, tensor_stats

Progress = Callable[[int, int], None]  # bytes done, bytes in all
WINDOW = 16 << 20  # bytes decoded, and then dropped, at a time


@dataclass(frozen=True, slots=True)
class TensorScan:
    """What one pass over the bytes of a stored tensor found.

    `stats` is None for integers (nothing can be wrong with one) and where `unread` says why not.
    `scale` names the first bad block and says how many are, `odd` a bad byte of a bool.
    """

    info: TensorInfo
    stats: Stats | None = None
    scale: str = ""
    odd: str = ""
    unread: str = ""


def block_windows(tensor: LazyTensor) -> Iterator[tuple[int, MemoryTensor]]:
    """Yield (index of the first block, a window of blocks as a tensor), about WINDOW bytes each.

    Where rows have a scale before them or are padded, windows are whole rows; where they have such
    a scale the index is that of the row. A header before all blocks (APR_Q8) is in every window. A
    window's pages are dropped before the next.
    """
    info = tensor.info
    row = encoding_row(info.encoding)
    count = math.prod(info.shape)
    columns = info.shape[-1] if info.shape else 1
    if info.row_bytes and columns * row.type_size != info.row_bytes * row.block_size:  # or headed
        step = max(1, WINDOW // info.row_bytes)  # rows are padded to whole blocks
        for start in range(0, count // columns, step):
            end_where_time_is_over()
            rows = min(step, count // columns - start)
            at, stop = start * info.row_bytes, (start + rows) * info.row_bytes
            part = replace(info, shape=(rows, columns), nbytes=stop - at)
            yield (
                start if row.row_header else at // row.type_size,
                MemoryTensor(part, tensor.raw(at, stop)),
            )
            tensor.drop(at, stop)
        return
    header = row.header if count else 0
    blocks = -(-count // row.block_size)
    step = max(1, WINDOW // row.type_size)
    for start in range(0, blocks, step):
        end_where_time_is_over()
        end = min(start + step, blocks)
        at, stop = header + start * row.type_size, header + end * row.type_size
        data = tensor.raw(at, stop)
        if header:
            data = memoryview(bytes(tensor.raw(0, header)) + bytes(data))
        elements = min(end * row.block_size, count) - start * row.block_size
        part = replace(info, shape=(elements,), nbytes=len(data), row_bytes=None)
        yield start, MemoryTensor(part, data)
        tensor.drop(at, stop)


def scan_values(model: Model, progress: Progress | None = None) -> dict[str, TensorScan]:
    """Return {stored name: TensorScan} of one pass over the bytes of every tensor.

    Tensors are read in windows, none as a whole. `progress` is called with (bytes done, all bytes).
    """
    tensors = model.source.tensors
    total = sum(tensor.info.nbytes for tensor in tensors.values())
    done = 0
    found = {}
    for name, tensor in tensors.items():

        def report(count: int, before: int = done) -> None:
            """Call `progress` with (bytes scanned, bytes of all tensors).

            `count` are the bytes scanned of this tensor, `before` those of earlier tensors.
            """
            if progress is not None:
                progress(before + count, total)

        found[name] = _scan_tensor(tensor, report)
        done += tensor.info.nbytes
    return found


def undecodable_reason(tensor: LazyTensor) -> str:
    """Return why a tensor's values cannot be decoded, without reading them; "" if they may be."""
    if damage := tensor_damage(tensor):
        return damage
    try:
        codec(tensor.info.encoding)
    except UnsupportedError as error:
        return str(error)
    return ""


def _scan_tensor(tensor: LazyTensor, report: Callable[[int], None]) -> TensorScan:
    """Return what a pass over one tensor's bytes found; `report` is called with its bytes done.

    Integers are not read. For a tensor that cannot be decoded `unread` says why.
    """
    info = tensor.info
    if why := undecodable_reason(tensor):
        return TensorScan(info, unread=why)
    dtype = codec(info.encoding).dtype
    if dtype == "bool":
        return TensorScan(info, odd=_first_bad_bool(tensor))
    if dtype.lstrip("u").startswith("int"):
        return TensorScan(info)
    # Decode in windows, for statistics and the first bad scale.
    row = encoding_row(info.encoding)
    total, scale, done, many = Accumulator(), "", 0, 0
    unit = "row" if row.row_header else "block"
    try:
        for first, window in block_windows(tensor):
            raw = window.raw()
            if row.header and not scale and header_is_bad(raw[: row.header]):
                scale = "its scale is NaN or infinite"
            bad = first_bad_block(info.encoding, raw[row.header :], info.row_bytes)
            if bad is not None:
                scale = scale or f"{unit} {first + bad[0]} has {bad[1]}"
                many += bad[2]
            total.add_stats(tensor_stats(window))
            done += len(raw)
            report(done)
    except AprfmtError as error:
        return TensorScan(info, unread=str(error))
    more = f" ({many} {unit}s are bad)" if many > 1 else ""
    return TensorScan(info, total.result(), f"{scale}{more}")


def _first_bad_bool(tensor: LazyTensor) -> str:
    """Return the first byte of a bool tensor that is neither 0 nor 1, in words; "" for none."""
    for start in range(0, tensor.info.nbytes, WINDOW):
        end_where_time_is_over()
        stop = min(start + WINDOW, tensor.info.nbytes)
        data = bytes(tensor.raw(start, stop))
        tensor.drop(start, stop)
        odd = data.translate(None, b"\0\1")
        if odd:
            return f"element {start + data.index(odd[:1])} is {odd[0]}"
    return ""
