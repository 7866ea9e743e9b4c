"""Writes GGUF version 3, little-endian, as one file or as a split.

Everything before the data is fixed by `plan`, so files are written front to back. The same plan and
bytes give the same files.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from aprfmt.base.encodings import encoding
from aprfmt.base.protocols import TensorInfo, Typed, Value
from aprfmt.base.text import shorten
from aprfmt.errors import CodecError, ConversionError, UsageError
from aprfmt.formats.atomic import FileSet
from aprfmt.formats.gguf.layout import (
    ALIGNMENT_KEY,
    DEFAULT_ALIGNMENT,
    HEADER_SIZE,
    MAX_ALIGNMENT,
    MAX_DIMS,
    MAX_INT64,
    MAX_NAME_BYTES,
    MAX_SPLITS,
    SPLIT_TYPES,
    align,
    pack_header,
    pack_tensor,
    parse_split_name,
    split_name,
)
from aprfmt.formats.gguf.split import divide, split_keys
from aprfmt.formats.gguf.values import Piece, encode_key, encode_value
from aprfmt.formats.output import OutputFile


class _Shard:
    """One file: its metadata and tensors, and what of it has been written."""

    def __init__(self, path: Path, metadata: Sequence[Piece], keys: int) -> None:
        self.path = path
        self.metadata = metadata
        self.keys = keys
        self.infos: Sequence[TensorInfo] = ()
        self.out: OutputFile | None = None
        self.header: list[Piece] = []

    def begin(self, files: FileSet, infos: Sequence[TensorInfo], alignment: int) -> OutputFile:
        """Create the file and write everything before the data."""
        self.out = files.create(self.path)
        self.infos = infos
        self.header = [pack_header(len(infos), self.keys), *self.metadata]
        at = 0
        for info in infos:
            self.header.append(_entry(info, at))
            at += align(info.nbytes, alignment)
        for piece in self.header:
            self.out.write(piece)
        self.out.write(bytes(align(self.out.tell(), alignment) - self.out.tell()))
        return self.out

    def find(self, text: bytes) -> list[int]:
        """Return where `text` stands in the metadata; arrays copied as they were don't count."""
        found = []
        at = 0
        for piece in self.header:
            if isinstance(piece, bytes) and (inside := piece.find(text)) >= 0:
                found.append(at + inside)
                if piece.find(text, inside + 1) >= 0:
                    found.append(at + inside)
            at += len(piece)
        return found


class GGUFSink:
    """A GGUF model being written; see `aprfmt.base.protocols.Sink`.

    Errors are ConversionError for what GGUF cannot hold and for tensors that are missing, out of
    order or of another size than planned, OutputError for what the system refuses.
    """

    def __init__(
        self,
        path: Path,
        files: FileSet | None,
        force: bool,
        limit: int | None,
        alignment: int | None,
    ) -> None:
        self._path = path
        self._own = files is None
        self._files = FileSet(force=force) if files is None else files
        self._limit = limit
        self._alignment_wish = alignment
        self._alignment = DEFAULT_ALIGNMENT
        self._shards: list[_Shard] = []
        self._parts: list[Sequence[TensorInfo]] = []
        self._left: list[tuple[int, TensorInfo]] = []  # (shard, tensor) to come, last first
        self._planned = False

    def plan(self, metadata: Mapping[str, Value | Typed], infos: Sequence[TensorInfo]) -> None:
        """Fix everything; the `split.*` keys and the alignment in `metadata` become our own."""
        if self._planned:
            raise ConversionError(f"{self._path}: is planned already; a sink is planned once")
        for info in infos:
            _check(info)
        _check_unique(infos)
        plain = {key: value for key, value in metadata.items() if key not in SPLIT_TYPES}
        self._alignment = self._choose_alignment(plain)
        encoded = [(key, _encode(key, value)) for key, value in plain.items()]
        # Every file is laid out by its own alignment key, so all of a split carry it.
        rest = [(key, pieces) for key, pieces in encoded if key == ALIGNMENT_KEY]
        self._parts = self._divide(infos, _bytes(encoded), _bytes(rest))
        count = len(self._parts)
        for number in range(count):
            pieces = list(encoded if number == 0 else rest)
            if count > 1:
                keys = split_keys(number, count, len(infos))
                pieces += [(k, _encode(k, Typed(v, SPLIT_TYPES[k]))) for k, v in keys.items()]
            name = split_name(self._stem(), number, count) if count > 1 else self._path.name
            flat = [piece for _, pieces_of_key in pieces for piece in pieces_of_key]
            self._shards.append(_Shard(self._path.with_name(name), flat, len(pieces)))
        numbered = [(n, info) for n, part in enumerate(self._parts) for info in part]
        self._left = numbered[::-1]
        self._planned = True
        self._begin(0)

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write the bytes of the next planned tensor, and its padding."""
        if not self._left or self._left[-1][1].name != name:
            expected = repr(self._left[-1][1].name) if self._left else "no tensor"
            raise ConversionError(f"{self._path}: tensor {name!r} was given, {expected} is next")
        number, info = self._left[-1]
        out = self._begin(number)
        written = 0
        for chunk in chunks:
            written += memoryview(chunk).nbytes
            if written > info.nbytes:
                break
            out.write(chunk)
        if written != info.nbytes:
            raise ConversionError(
                f"{self._path}: tensor {name!r}: {written} bytes or more were given, "
                f"{info.nbytes} were planned"
            )
        self._left.pop()
        last = not self._left or self._left[-1][0] != number
        out.write(bytes(self._room(info, last) - written))
        if number and (not self._left or self._left[-1][0] != number):
            out.close()  # the first stays open, to be amended

    def _room(self, info: TensorInfo, last: bool) -> int:
        """Return the bytes a tensor takes, padding included.

        Nothing follows the last of a file where its encoding is unknown: a reader takes all that
        is left for such a tensor.
        """
        unpadded = last and not encoding(info.encoding).known
        return info.nbytes if unpadded else align(info.nbytes, self._alignment)

    def amend(self, old: str, new: str) -> None:
        """Write `new` over the metadata text `old`; ConversionError unless it stands there once."""
        before, after = old.encode("ascii"), new.encode("ascii")
        places = self._shards[0].find(before) if self._shards else []
        out = self._shards[0].out if self._shards else None
        if len(before) != len(after) or len(places) != 1 or out is None:
            raise ConversionError(
                f"{self._path}: {shorten(old, 80)!r} stands {len(places)} times in the metadata "
                f"and has {len(before)} bytes; expected once, and {len(after)} bytes"
            )
        out.patch(places[0], after)

    @property
    def files(self) -> Sequence[Path]:
        """The files being written, in shard order."""
        return [shard.path for shard in self._shards]

    @property
    def sizes(self) -> Mapping[Path, int]:
        """Bytes of every file, known as soon as it is planned."""
        found = {}
        for shard, infos in zip(self._shards, self._parts, strict=True):
            head = HEADER_SIZE + sum(len(piece) for piece in shard.metadata)
            head += sum(len(_entry(info, 0)) for info in infos)
            data = sum(self._room(info, info is infos[-1]) for info in infos)
            found[shard.path] = align(head, self._alignment) + data
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            if not any(exc):
                self._finish()
        finally:
            if self._own:
                self._files.discard()

    def _finish(self) -> None:
        if not self._planned or self._left:
            missing = repr(self._left[-1][1].name) if self._left else "the plan"
            raise ConversionError(
                f"{self._path}: {len(self._left)} tensors were not written, the first is "
                f"{missing}; nothing is published"
            )
        if self._own:
            self._files.publish()

    def _begin(self, number: int) -> OutputFile:
        shard = self._shards[number]
        if shard.out is None:
            return shard.begin(self._files, self._parts[number], self._alignment)
        return shard.out

    def _stem(self) -> str:
        """Return NAME of a path NAME.gguf or NAME-00001-of-00003.gguf."""
        found = parse_split_name(self._path.name)
        return found[0] if found else self._path.stem

    def _choose_alignment(self, metadata: dict[str, Value | Typed]) -> int:
        """Return the alignment: as asked, else the metadata's, else 32; the key is set to it."""
        given = metadata.get(ALIGNMENT_KEY)
        given = given.value if isinstance(given, Typed) else given
        chosen = self._alignment_wish if self._alignment_wish is not None else given
        chosen = DEFAULT_ALIGNMENT if chosen is None else chosen
        if type(chosen) is not int or not 0 < chosen <= MAX_ALIGNMENT or chosen & (chosen - 1):
            raise UsageError(
                f"{self._path}: alignment {chosen!r}; it must be a power of two up to "
                f"{MAX_ALIGNMENT}"
            )
        if given is not None or chosen != DEFAULT_ALIGNMENT:
            metadata[ALIGNMENT_KEY] = Typed(chosen, "uint32")
        return chosen

    def _divide(
        self, infos: Sequence[TensorInfo], first: int, rest: int
    ) -> list[Sequence[TensorInfo]]:
        """Deal the tensors out to files; `first` and `rest` are the bytes of their metadata."""
        if self._limit is None:
            return [infos]
        if self._limit <= 0:
            raise UsageError(f"{self._path}: a shard size of {self._limit} bytes; give a size > 0")
        costs = [(len(_entry(i, 0)), align(i.nbytes, self._alignment)) for i in infos]
        whole = divide(costs, (HEADER_SIZE + first,) * 2, self._alignment, self._limit)
        if len(whole) == 1:
            return [infos]
        keys = _bytes([(k, _encode(k, Typed(0, kind))) for k, kind in SPLIT_TYPES.items()])
        heads = HEADER_SIZE + first + keys, HEADER_SIZE + rest + keys
        counts = divide(costs, heads, self._alignment, self._limit)
        if len(counts) > MAX_SPLITS:
            raise ConversionError(
                f"{self._path}: {len(counts)} files of {self._limit} bytes; GGUF splits have at "
                f"most {MAX_SPLITS}; allow larger ones"
            )
        ends = [sum(counts[: n + 1]) for n in range(len(counts))]
        return [infos[end - count : end] for count, end in zip(counts, ends, strict=True)]


def open_sink(
    path: Path,
    *,
    force: bool = False,
    max_shard_size: int | None = None,
    alignment: int | None = None,
    files: FileSet | None = None,
    **options: Any,
) -> GGUFSink:
    """Start writing `path`.

    A model that does not fit into one file of `max_shard_size` bytes becomes STEM-00001-of-0000N;
    a file is larger only if a single tensor is. `alignment` (bytes, a power of two) is by default
    the one the metadata states, else 32. With `files` the sink writes into that set, and whoever
    owns it publishes.
    """
    if options:
        raise UsageError(f"{path}: GGUF files are not written with {', '.join(options)}")
    return GGUFSink(Path(path), files, force, max_shard_size, alignment)


def _encode(key: str, value: Value | Typed) -> list[Piece]:
    return [encode_key(key), *encode_value(key, value)]


def _bytes(encoded: Iterable[tuple[str, Sequence[Piece]]]) -> int:
    return sum(len(piece) for _, pieces in encoded for piece in pieces)


def _name(info: TensorInfo) -> bytes:
    try:
        return info.name.encode()
    except UnicodeEncodeError:
        raise ConversionError(
            f"tensor {info.name!r}: lone surrogates, which UTF-8 has not"
        ) from None


def _entry(info: TensorInfo, data_offset: int) -> bytes:
    code = encoding(info.encoding).ggml
    assert code is not None  # judged by _check
    return pack_tensor(_name(info), info.shape, code, data_offset)


def _check(info: TensorInfo) -> None:
    """Refuse what no GGUF reader would take. Raises ConversionError."""
    what = f"tensor {shorten(info.name, 100)!r}"
    if len(_name(info)) > MAX_NAME_BYTES:
        raise ConversionError(
            f"{what}: its name has {len(_name(info))} bytes, GGUF names have at most "
            f"{MAX_NAME_BYTES}; shorten it"
        )
    if len(info.shape) > MAX_DIMS:
        raise ConversionError(
            f"{what}: {len(info.shape)} dimensions, GGUF has at most {MAX_DIMS}; reshape it"
        )
    if any(not 0 <= size <= MAX_INT64 for size in info.shape):
        raise ConversionError(f"{what}: shape {list(info.shape)}; sizes are 0 to 2^63-1")
    try:
        row = encoding(info.encoding)
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


def _check_unique(infos: Sequence[TensorInfo]) -> None:
    seen: set[str] = set()
    for info in infos:
        if info.name in seen:
            raise ConversionError(f"tensor {info.name!r} is planned twice; names must be unique")
        seen.add(info.name)
