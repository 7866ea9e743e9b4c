"""Writes GGUF version 3, little-endian, as one file or as a split.

Everything before the data is fixed by `plan`, so files are written front to back. The same plan and
bytes give the same files.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import TensorInfo, TypedValue, Value
from aprfmt.base.text_escape import shorten
from aprfmt.errors import CodecError, ConversionError, UsageError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.gguf import layout
from aprfmt.formats.gguf.split import divide_tensors
from aprfmt.formats.gguf.value_encoding import Piece, encode_key, encode_value
from aprfmt.formats.sequential import FileProgram, Segment, SequentialSink, TensorSlot


class GGUFSink(SequentialSink):
    """A GGUF model being written; see `aprfmt.base.protocols.Sink`.

    The `split.*` keys and the alignment of the metadata are replaced by our own. ConversionError
    for what GGUF cannot store.
    """

    def __init__(
        self,
        path: Path,
        *,
        force: bool = False,
        files: FileSet | None = None,
        max_shard_size: int | None = None,
        alignment: int | None = None,
    ) -> None:
        """Prepare to write `path`; nothing is opened before `plan`.

        A file of more than `max_shard_size` bytes becomes a split. `alignment` (bytes) is None for
        that of the metadata. `files` is the set to write into, None for one that the sink
        publishes.
        """
        super().__init__(path, force=force, files=files)
        self._limit = max_shard_size
        self._alignment_wish = alignment

    def _lay_out(
        self, metadata: Mapping[str, Value | TypedValue], infos: Sequence[TensorInfo]
    ) -> Sequence[FileProgram]:
        """Return what each output file holds: one file, or the shards of a split.

        A FileProgram has the file's bytes and the ranges of its tensors, in order.
        """
        for info in infos:
            _refuse_unstorable(info)
        plain = {key: value for key, value in metadata.items() if key not in layout.SPLIT_TYPES}
        alignment = self._choose_alignment(plain)
        keys = {key: _encode_pair(key, value) for key, value in plain.items()}
        # Every file is laid out by its own alignment key, so all of a split carry it.
        rest = {key: pieces for key, pieces in keys.items() if key == layout.ALIGNMENT_KEY}
        parts = self._distribute_tensors(infos, _count_bytes(keys), _count_bytes(rest), alignment)
        count = len(parts)
        if count == 1:
            return [_file_program(self._path, keys, infos, alignment)]
        programs = []
        for number, part in enumerate(parts):
            path = self._path.with_name(layout.split_name(self._stem(), number, count))
            own = _encode_split(number, count, len(infos))
            programs.append(_file_program(path, (rest if number else keys) | own, part, alignment))
        return programs

    def _stem(self) -> str:
        """Return NAME of a path NAME.gguf or NAME-00001-of-00003.gguf."""
        found = layout.parse_split_name(self._path.name)
        return found[0] if found else self._path.stem

    def _choose_alignment(self, metadata: dict[str, Value | TypedValue]) -> int:
        """Return the alignment in bytes: the one asked for, else the metadata's, else 32.

        Sets the key in `metadata` unless it is the default and absent. UsageError if it is not a
        power of two.
        """
        stated = metadata.get(layout.ALIGNMENT_KEY)
        stated = stated.value if isinstance(stated, TypedValue) else stated
        chosen = self._alignment_wish if self._alignment_wish is not None else stated
        chosen = layout.DEFAULT_ALIGNMENT if chosen is None else chosen
        if (
            type(chosen) is not int
            or not 0 < chosen <= layout.MAX_ALIGNMENT
            or chosen & (chosen - 1)
        ):
            raise UsageError(
                f"{self._path}: alignment {chosen!r}; it must be a power of two up to "
                f"{layout.MAX_ALIGNMENT}"
            )
        if stated is not None or chosen != layout.DEFAULT_ALIGNMENT:
            metadata[layout.ALIGNMENT_KEY] = TypedValue(chosen, "uint32")
        return chosen

    def _distribute_tensors(
        self, infos: Sequence[TensorInfo], first: int, rest: int, alignment: int
    ) -> list[Sequence[TensorInfo]]:
        """Return the tensors of each file; `first` and `rest` are bytes of metadata.

        `first` are those of the first file, `rest` those of every other one. Raises UsageError for
        a shard size of 0 or less, ConversionError for more than MAX_SPLITS files.
        """
        if self._limit is None:
            return [infos]
        if self._limit <= 0:
            raise UsageError(f"{self._path}: a shard size of {self._limit} bytes; give a size > 0")
        costs = [(len(_table_line(i, 0)), layout.align_size(i.nbytes, alignment)) for i in infos]
        # First without split keys: if one file is enough, it has none.
        whole = divide_tensors(costs, (layout.HEADER_SIZE + first,) * 2, alignment, self._limit)
        if len(whole) == 1:
            return [infos]
        keys = _count_bytes(_encode_split(0, 0, 0))
        heads = layout.HEADER_SIZE + first + keys, layout.HEADER_SIZE + rest + keys
        counts = divide_tensors(costs, heads, alignment, self._limit)
        if len(counts) > layout.MAX_SPLITS:
            raise ConversionError(
                f"{self._path}: {len(counts)} files of {self._limit} bytes; GGUF splits have at "
                f"most {layout.MAX_SPLITS}; allow larger ones"
            )
        left = iter(infos)
        return [list(islice(left, count)) for count in counts]


def open_sink(
    path: Path,
    *,
    force: bool = False,
    max_shard_size: int | None = None,
    alignment: int | None = None,
    files: FileSet | None = None,
    **options: Any,
) -> GGUFSink:
    """Return a sink that writes a GGUF model to `path`.

    A model that does not fit into one file of `max_shard_size` bytes becomes STEM-00001-of-0000N;
    a file is larger only if a single tensor is. `alignment` (bytes, a power of two) is by default
    the one in the metadata, else 32. With `files` the sink writes into that set, and whoever
    owns it publishes. UsageError for other options.
    """
    if options:
        raise UsageError(f"{path}: GGUF files are not written with {', '.join(options)}")
    return GGUFSink(
        path, force=force, files=files, max_shard_size=max_shard_size, alignment=alignment
    )


def _file_program(
    path: Path, metadata: Mapping[str, Sequence[Piece]], infos: Sequence[TensorInfo], alignment: int
) -> FileProgram:
    """Return what one file holds: header, metadata, tensor table, ranges of the tensors.

    Nothing follows the last tensor where its encoding is unknown: a reader takes all that is left
    for such a tensor.
    """
    zeros = memoryview(bytes(alignment))
    entries: list[bytes] = []
    body: list[Segment] = []
    at = 0
    for info in infos:
        end = layout.align_size(info.nbytes, alignment)
        entries.append(_table_line(info, at))
        body += [TensorSlot(info.name, info.nbytes), zeros[: end - info.nbytes]]
        at += end
    if infos and not find_encoding(infos[-1].encoding).known:
        body.pop()
    pieces = [piece for key in metadata.values() for piece in key]
    head = b"".join([layout.pack_header(len(infos), len(metadata)), *pieces, *entries])
    return FileProgram(path, head.ljust(layout.align_size(len(head), alignment), b"\0"), body)


def _encode_pair(key: str, value: Value | TypedValue) -> list[Piece]:
    """Return the stored bytes of a key and its value, as a list to write one by one."""
    return [encode_key(key), *encode_value(key, value)]


def _encode_split(number: int, count: int, tensors: int) -> dict[str, list[Piece]]:
    """Return {key: stored bytes, as a list} of the split keys of shard `number`, counted from 0.

    `tensors` is the number of tensors in all shards.
    """
    values = {layout.SPLIT_NO: number, layout.SPLIT_COUNT: count, layout.SPLIT_TENSORS: tensors}
    return {
        key: _encode_pair(key, TypedValue(value, layout.SPLIT_TYPES[key]))
        for key, value in values.items()
    }


def _count_bytes(metadata: Mapping[str, Sequence[Piece]]) -> int:
    """Return the number of bytes of encoded metadata."""
    return sum(len(piece) for pieces in metadata.values() for piece in pieces)


def _name_bytes(info: TensorInfo) -> bytes:
    """Return a tensor's name as UTF-8; ConversionError for lone surrogates."""
    try:
        return info.name.encode()
    except UnicodeEncodeError:
        raise ConversionError(
            f"tensor {info.name!r}: lone surrogates, which UTF-8 has not"
        ) from None


def _table_line(info: TensorInfo, data_offset: int) -> bytes:
    """Return the bytes of a tensor's line in the table; its name must be valid."""
    code = find_encoding(info.encoding).ggml
    assert code is not None  # _refuse_unstorable has checked it
    return layout.pack_tensor(_name_bytes(info), info.shape, code, data_offset)


def _refuse_unstorable(info: TensorInfo) -> None:
    """Raise ConversionError for a tensor that no GGUF reader would accept."""
    what = f"tensor {shorten(info.name, 100)!r}"
    if len(_name_bytes(info)) > layout.MAX_NAME_BYTES:
        raise ConversionError(
            f"{what}: its name has {len(_name_bytes(info))} bytes, GGUF names have at most "
            f"{layout.MAX_NAME_BYTES}; shorten it"
        )
    if len(info.shape) > layout.MAX_DIMS:
        raise ConversionError(
            f"{what}: {len(info.shape)} dimensions, GGUF has at most {layout.MAX_DIMS}; reshape it"
        )
    if any(not 0 <= size <= layout.MAX_INT64 for size in info.shape):
        raise ConversionError(f"{what}: shape {list(info.shape)}; sizes are 0 to 2^63-1")
    try:
        row = find_encoding(info.encoding)
        size = row.nbytes(info.shape) if row.known else info.nbytes
    except CodecError as error:
        raise ConversionError(f"{what}: {error}") from None
    if row.ggml is None:
        raise ConversionError(f"{what}: GGUF has no type for {info.encoding}; choose another one")
    if info.nbytes != size:
        raise ConversionError(
            f"{what}: {info.nbytes} bytes are planned, shape {list(info.shape)} of "
            f"{info.encoding} takes {size}"
        )
