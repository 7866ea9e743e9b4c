"""Make the bytes of a plan's outputs.

A *piece* is some rows, or bytes, of an output that are made at once. A *band* is the same rows of a
packed source, still packed. A *run* is consecutive bytes of the source.

Bytes are copied in windows or re-encoded in chunks, and changed values are counted.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from aprfmt.base.background_iterator import iterate_ahead
from aprfmt.base.columns import Columns
from aprfmt.base.crc import crc32
from aprfmt.base.encodings import find_encoding
from aprfmt.base.processors import cpu_count
from aprfmt.base.protocols import LazyTensor
from aprfmt.base.shapes import matrix_shape
from aprfmt.codecs import codec, decode
from aprfmt.conversion.change_counts import ChangeCounts
from aprfmt.conversion.encoding_choice import column_importances
from aprfmt.conversion.options import Options
from aprfmt.conversion.outputs import Output
from aprfmt.conversion.repacking import repack_exactness
from aprfmt.conversion.report import Fidelity, TensorOutcome
from aprfmt.errors import CodecError, ConversionError
from aprfmt.quantizing.row_encoding import encode_rows
from aprfmt.tensors.runs import ByteRun, RunBytes, all_runs, byte_windows
from aprfmt.tensors.view import decode_rows

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.lattice import PackedWeight


WINDOW = 16 << 20  # bytes per write(); larger windows are not faster
BAND = 2 << 20  # bytes made at a time
BACK = 2 << 20  # bytes read back at a time: so much of two files is mapped meanwhile, twice
SMALL = 256 << 10  # runs below this are joined before they are written
CHUNK = 1 << 22  # elements decoded and encoded at a time


@dataclass
class WrittenTensor:
    """What is known of one written output.

    That is its CRC-32, where needed, and counts of changed values.
    """

    crc: int = 0
    counts: ChangeCounts = field(default_factory=ChangeCounts)
    lost_codes: int | None = None


class RowPiece(NamedTuple):
    """Rows of an output from row `first` on: a function that decodes them.

    `band` has the same rows still packed, where kernels may encode them directly.
    """

    first: int
    values: "Callable[[], Array]"
    band: "PackedWeight | None" = None


def output_chunks(output: Output, options: Options, written: WrittenTensor) -> Iterator[memoryview]:
    """Yield the stored bytes of one output in order, and fill in `written` as they are made.

    A CRC-32 is only computed where it is needed. Copied bytes are compared with the source itself,
    so they need one only for a resumable run, and for a source that is fetched once. That of
    repacked bytes is computed by the thread that makes them.
    """
    if output.part is not None:
        source = iter([memoryview(output.part.data())])
        written.counts = output.part.packed.counts
    elif output.made and output.runs is not None:
        yield from iterate_ahead(_repacked_bands(output.runs, options, written))
        return
    elif output.copies and output.runs is not None:
        source = _copied_windows(output.runs)
        if not (options.resume or (options.verify and output.is_remote)):
            yield from source
            return
    else:
        source = iterate_ahead(_encoded_chunks(output, options, written.counts))
        written.lost_codes = count_lost_codes(output)
    for chunk in source:
        written.crc = crc32(chunk, written.crc)
        yield chunk


def _copied_windows(runs: Sequence[ByteRun]) -> Iterator[memoryview]:
    """Yield the bytes to copy, in pieces; the mapped pages of a piece are then released.

    Small runs are joined to larger pieces.
    """
    if isinstance(runs, Columns):  # rows in another order
        for window in byte_windows(runs, BAND):
            yield memoryview(window)
        return
    for run in _join_small_runs(runs):
        if not isinstance(run, ByteRun):
            yield run
            continue
        run.tensor.expect(run.start, run.start + run.nbytes)
        for start in range(0, run.nbytes, WINDOW):
            stop = min(start + WINDOW, run.nbytes)
            yield run.tensor.raw(run.start + start, run.start + stop)
            run.tensor.drop(run.start + start, run.start + stop)
    for tensor in dict.fromkeys(run.tensor for run in runs):
        tensor.drop()


def copied_bytes(data: RunBytes, start: int, stop: int) -> Iterator[memoryview]:
    """Yield bytes [start, stop) of the bytes to copy, in pieces.

    Any thread may call it. Mapped pages are not released.
    """
    if data.reordered:
        yield memoryview(data.window(start, stop))
        return
    for part in _join_small_runs(data.runs(start, stop)):
        if isinstance(part, ByteRun):
            yield part.tensor.raw(part.start, part.start + part.nbytes)
        else:
            yield part


def _join_small_runs(runs: Iterable[ByteRun]) -> Iterator[memoryview | ByteRun]:
    """Yield large runs unchanged, and the bytes of small ones joined, in order."""
    batch: list[memoryview] = []
    nbytes = 0
    for run in runs:
        if run.nbytes < SMALL:
            batch.append(run.tensor.raw(run.start, run.start + run.nbytes))
            nbytes += run.nbytes
        if batch and (run.nbytes >= SMALL or nbytes >= WINDOW // 4):
            yield memoryview(b"".join(batch))
            batch, nbytes = [], 0
        if run.nbytes >= SMALL:
            yield run
    if batch:
        yield memoryview(b"".join(batch))


def _repacked_bands(
    runs: Sequence[ByteRun], options: Options, written: WrittenTensor
) -> Iterator[memoryview]:
    """Yield the bytes of runs that are repacked when read, in bands that stay in the cache.

    Their checksum is computed where they are verified or the run is resumable.
    """
    data, dropped = RunBytes(runs), 0
    summed = options.verify or options.resume
    for start in range(0, len(data), BAND):
        stop = min(start + BAND, len(data))
        band = memoryview(data.window(start, stop))
        written.crc = crc32(band, written.crc) if summed else 0
        if stop - dropped >= WINDOW:
            data.drop(dropped, stop)
            dropped = stop
        yield band
    data.drop(0, len(data))


def first_chunk(output: Output, options: Options, elements: int) -> int:
    """Encode about `elements` elements of an output, and return how many there were.

    The bytes are thrown away: `estimate` measures the time.
    """
    made = next(
        _encoded_chunks(output, replace(options, allow_overflow=True), ChangeCounts(), elements)
    )
    row = find_encoding(output.info.encoding)
    return made.nbytes * row.block_size // row.type_size


def _encoded_chunks(
    output: Output, options: Options, counts: ChangeCounts, chunk: int = CHUNK
) -> Iterator[memoryview]:
    """Yield the output's encoded bytes, some rows at a time, and count changes in `counts`.

    All of the output is encoded at once where the source's rows cannot be decoded alone. Raises
    ConversionError where values overflow without permission.
    """
    importance = column_importances(output, options)
    for piece in decoded_pieces(output, chunk):
        data, found = encode_piece(output, options, importance, piece)
        counts.join(found)
        check_overflow(output, options, counts)
        yield memoryview(data)
    for tensor in output.sources:
        tensor.drop()


def encode_piece(
    output: Output, options: Options, importance: "Array | None", piece: RowPiece
) -> "tuple[bytes | memoryview, ChangeCounts]":
    """Return (encoded bytes of some rows, counts of the values that encoding changed).

    `piece` has the rows of `output`. `importance` weighs their elements, None without an importance
    matrix.
    """
    target = output.info.encoding
    # Packed rows that kernels encode without decoding them to memory.
    band = recodable_rows(output, piece)
    if band is not None:
        made, counts = _recode_band(band, target, options)
        return (made if output.moved is None else _move_encoded(output, band, made)), counts
    # Others are decoded and encoded.
    values = piece.values()
    data = encode_rows(
        target,
        _as_input(values, output),
        fma=options.fma,
        importance=importance,
        first=piece.first,
        expert_rows=output.info.shape[-2] if len(output.info.shape) > 2 else 0,
        threads=options.threads or 0,
    )
    # Count changes: from the bytes by a kernel, else by decoding them.
    threads, counts = options.threads or cpu_count(), ChangeCounts()
    if counts.add_encoded(values, target, data, find_encoding(target).block_size, threads):
        return data, counts
    after = decode(target, data, values.shape, threads=threads)
    before = values if values.dtype == after.dtype else values.astype(after.dtype)
    if values.dtype.itemsize > after.dtype.itemsize:
        after = after.astype(values.dtype)
        before = values
    counts.add(before, after)
    return data, counts


def recodable_rows(output: Output, piece: RowPiece) -> "PackedWeight | None":
    """Return the packed rows of a piece if kernels can encode them directly; else None."""
    band = piece.band
    return band if band is not None and band.recodes(output.info.encoding) else None


def _recode_band(
    band: "PackedWeight", target: str, options: Options
) -> "tuple[bytes | memoryview, ChangeCounts]":
    """Return (packed rows encoded by kernels, counts of the values that encoding changed)."""
    threads, counts = options.threads or cpu_count(), ChangeCounts()
    made = np.empty(math.prod(band.shape) * find_encoding(target).type_size, np.uint8).data
    for found in band.recode_into(target, made, threads):
        counts.join(ChangeCounts(*found))
    return made, counts


def _move_encoded(output: Output, band: "PackedWeight", made: "bytes | memoryview") -> memoryview:
    """Return the encoded bytes of a whole tensor with their elements in the output's order.

    The encoding must have one element a block. `made` are the bytes in the order of `band`.
    """
    assert output.moved is not None
    kind = f"u{find_encoding(output.info.encoding).type_size}"
    moved = output.moved(np.frombuffer(made, kind).reshape(band.shape))
    return np.ascontiguousarray(moved).reshape(-1).view(np.uint8).data


def check_overflow(output: Output, options: Options, counts: ChangeCounts) -> None:
    """Raise ConversionError where finite values of `output` became infinite by encoding.

    `counts` says how many did. The option `allow_overflow` accepts it.
    """
    if counts.overflowed and not options.allow_overflow:
        raise ConversionError(
            f"{output.info.name}: {counts.overflowed} finite {output.source_encoding} values "
            f"overflow {output.info.encoding}; store it as BF16 or F32, or accept infinities with "
            "--allow-overflow"
        )


def count_lost_codes(output: Output) -> int | None:
    """Return how many FP8 codes cannot be recovered from the output's BF16 or F16 values.

    None for outputs in other encodings, and for sources without FP8 codes.
    """
    stored = output.info.encoding
    made = [tensor.packed() for tensor in output.sources if tensor.packed is not None]
    if not made or stored not in ("BF16", "F16"):
        return None
    from aprfmt.codecs.code_recovery import count_lost_codes, has_only_safe_scales

    lost = 0
    for packed in made:
        if has_only_safe_scales(packed, stored):
            continue
        for band in packed.split_bands(CHUNK // 4):
            found = count_lost_codes(band, stored)
            if found is None:
                return None
            lost += found
    return lost


def _as_input(values: "Array", output: Output) -> "Array":
    """Return values in the dtype that the target's codec encodes.

    Raises ConversionError where that would be another kind of number: integers for floats, say.
    """
    wanted = codec(output.info.encoding).dtype
    kinds = {values.dtype.kind, "f" if wanted.startswith(("float", "bfloat")) else wanted[0]}
    if len(kinds) > 1:
        raise ConversionError(
            f"{output.info.name}: {output.source_encoding} values cannot be stored as "
            f"{output.info.encoding}; only floats become other floats"
        )
    made = values if values.dtype.name == wanted else values.astype(wanted)
    if made is not values and kinds != {"f"} and not (made == values).all():
        raise ConversionError(
            f"{output.info.name}: holds {int(abs(values).max())}, which {output.info.encoding} "
            "cannot; store the model in a format that has its integers, such as APR"
        )
    return made


def decoded_pieces(output: Output, chunk: int) -> Iterator[RowPiece]:
    """Yield pieces of an output: the first row, and a function that decodes the piece when called.

    It returns about `chunk` elements as [rows, last axis]. A tensor whose rows cannot be decoded
    alone is one piece of its full shape.
    """
    name, shape = output.source_encoding, output.info.shape
    rows, columns = matrix_shape(shape)
    flat = find_encoding(output.info.encoding).flat  # blocks cross row ends: one piece
    if output.decodes is not None and output.moved is not None:
        bands = _split_bands(output.decodes(), output, math.prod(shape))
        alone = find_encoding(output.info.encoding).block_size == 1 and len(bands) == 1
        yield RowPiece(0, lambda: output.make().reshape(shape), bands[0] if alone else None)
        return
    if output.decodes is not None and not flat:
        at = 0
        for band in _split_bands(output.decodes(), output, chunk):
            yield RowPiece(at, band.decode, band)
            at += math.prod(band.shape[:-1])
        return
    cut = find_encoding(name).row_bytes(shape) is not None and columns and len(shape) > 1
    if output.runs is None or not cut or flat:
        yield RowPiece(0, lambda: output.make().reshape(shape))
        return
    data, step = RunBytes(output.runs), max(1, chunk // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield RowPiece(start, partial(decode_rows, name, data, start, stop, columns))


def _split_bands(packed: "PackedWeight", output: Output, chunk: int) -> "list[PackedWeight]":
    """Return a packed weight in bands of rows, of about `chunk` elements each.

    Raises ConversionError with its name where its codes and scales do not fit each other.
    """
    try:
        return packed.split_bands(chunk)
    except CodecError as error:
        raise ConversionError(f"{output.sources[0].info.name}: {error}") from error


def tensor_outcome(output: Output, written: WrittenTensor) -> TensorOutcome:
    """Return the report's entry for one output: how it was written, and how many values changed."""
    counts = written.counts
    lossy = counts.changed or counts.overflowed or counts.underflowed
    how: Fidelity = "bytes" if output.copies else "lossy" if lossy else "values"
    packed = output.part.packed if output.part is not None else None
    before, judged = repack_exactness(output) if output.copies else ("", None)
    if packed is not None:
        judged = packed.judged
    if judged is not None:
        how = "lossy" if judged.inexact else "values"
    return TensorOutcome(
        output.info.name if packed is None else packed.name,
        how,
        before or output.source_encoding,
        output.encoding,
        output.info.shape if packed is None else packed.shape,
        output.info.nbytes if packed is None else packed.nbytes,
        output.steps,
        counts.changed,
        counts.overflowed,
        counts.underflowed,
        *(judged or (0, 0, 0.0)),
        written.lost_codes,
    )


def tensor_checksum(stored: LazyTensor) -> int:
    """Return the CRC-32 of a stored tensor's bytes; releases mapped pages."""
    crc = 0
    for window in byte_windows(all_runs(stored), BACK):
        crc = crc32(window, crc)
    return crc
