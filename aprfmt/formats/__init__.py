"""The FORMATS table, detection by content, and the two verbs: open_source and open_sink.

A row says how a format is recognised, which functions read and write it, and what it can store.
No other code compares a format's name in an `if`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from aprfmt.base.encodings import Encoding
from aprfmt.base.protocols import Note, Overlay, Region, Sink, Source, TensorInfo
from aprfmt.base.registry import Registry
from aprfmt.errors import FormatError, TruncatedError, UnsupportedError
from aprfmt.formats.unfinished_writes import may_be_half_changed
from aprfmt.remote.paths import parse_location

if TYPE_CHECKING:
    from aprfmt.formats.damage import Structure
    from aprfmt.formats.header_field import HeaderField


class OpenSource(Protocol):
    """The signature of the function with which a format opens a regular file."""

    def __call__(self, path: Path, *, partial: bool = False) -> Source:
        """Return `path` as an open source.

        `partial` lists the structure of a truncated file instead of raising.
        """
        ...


class ReadStructure(Protocol):
    """The signature of the function that reads the structure of one file from its bytes.

    Other shards of the model are not looked at.
    """

    def __call__(self, view: Region, where: str, /, *, partial: bool = False) -> "Structure":
        """Return the structure in a whole file's bytes.

        `where` names the file in errors, `partial` as in OpenSource.
        """
        ...


class OpenSink(Protocol):
    """The signature of the function with which a format starts a new file."""

    def __call__(
        self, path: Path, *, force: bool = False, max_shard_size: int | None = None, **options: Any
    ) -> Sink:
        """Return a sink that writes `path`; an existing file is refused unless `force`."""
        ...


@dataclass(frozen=True)
class ValueRules:
    """What a format says about single metadata values; used when one is set.

    `types` are the names of the types one value can have, () where values are JSON or text.
    `keys(architectures)` maps the keys that readers know to their types (() if values have no
    type); a `*` in a key is any text. The writer itself sets keys that begin with one of
    `writer_keys`.
    """

    types: tuple[str, ...] = ()
    keys: Callable[[Sequence[str]], Mapping[str, tuple[str, ...]]] = lambda architectures: {}
    writer_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class FormatSpec:
    """One container format: how it is recognised, opened and written.

    `recognise(head, size)` looks at the first bytes (up to 4096) and the file's size.
    `holds(encoding)` says whether the format has a code for an encoding. `style` is the naming
    style its own files use by default ("hf" or "gguf"). `vectors_f32` marks formats whose readers
    expect norms and 1-D tensors as F32; `keys_like` names the format whose metadata keys it uses,
    where it has none of its own.
    """

    name: str
    extensions: tuple[str, ...]
    recognise: Callable[[bytes, int], bool]
    open_source: OpenSource
    open_sink: OpenSink
    holds: Callable[[Encoding], bool]
    style: str
    header_fields: "Callable[[Region, str], Iterator[HeaderField]]"
    structure: ReadStructure | None = None  # None: such files are not repaired
    vectors_f32: bool = False
    keys_like: str = ""
    carries: bool = False  # True: encodings without a code are stored too, as plain bytes
    keeps: bool = False  # True: where that is asked for; open_sink then takes `carry=True`
    max_name_bytes: int | None = None
    max_dims: int | None = None
    order: Callable[[Sequence[TensorInfo]], list[TensorInfo]] = list  # data order on disk
    weights_name: str | None = None  # name of the weights inside a folder output
    rewrites: bool = False  # open_sink takes `like`, a source of this format: what the plan does
    # not change keeps its bytes; the sink's method `order` gives the data order
    takes: Callable[[Any], bool] = lambda value: True  # can it be a metadata value?
    values: ValueRules = ValueRules()
    checksum: Callable[[Source, Mapping[Path, int]], bool | None] | None = None  # do the bytes of a
    # file that `open_source` opened fit the checksum it carries? None where it carries none. It is
    # given the CRC-32 of files whose bytes were all read
    fill: Callable[[bytes, int], bytes] = lambda head, size: head  # what stands before the tensors,
    # made that long where the format has room for nothing
    writes: bool = True  # False: such files are only read, and `open_sink` says what to write
    collects: bool = False  # open_source takes `damaged=True`: damage is collected, not raised


# What files begin with, blanks left out: a format of ours is imported for such a file alone. Those
# that have no such bytes are asked about every file.
BEGINNINGS: Mapping[str, tuple[bytes, ...]] = {
    "apr": (b"APR", b"{"),  # a file, and the manifest of a set of files
    "gguf": (b"GGUF",),
}

FORMATS: Registry[FormatSpec] = Registry(
    "formats",
    {
        "apr": "aprfmt.formats.apr:FORMAT",
        "gguf": "aprfmt.formats.gguf:FORMAT",
        "safetensors": "aprfmt.formats.safetensors:FORMAT",
        "pytorch": "aprfmt.formats.pytorch:FORMAT",
    },
    FormatError,
)


def writable_formats(*, own: bool = False) -> list[str]:
    """Return the names of the formats that are written here.

    `own`: without those of other packages.
    """
    return [name for name in (FORMATS.own if own else FORMATS) if FORMATS[name].writes]


def suffix_to_write(path: Path) -> str:
    """Return the suffix of a file next to `path` that is written: its own, if its format is.

    Of a format that is only read it is that of safetensors.
    """
    only_read = [FORMATS[name] for name in FORMATS if not FORMATS[name].writes]
    known = any(path.suffix in row.extensions for row in only_read)
    return FORMATS["safetensors"].extensions[0] if known else path.suffix


def detect_format(path: Path, wanted: str = "a model file") -> FormatSpec:
    """Return the format of a file by its content, never by its name.

    `wanted` is what messages say was expected. Raises UnsupportedError for files recognised as
    something else, TruncatedError for an archive that is cut, FormatError otherwise.
    """
    from aprfmt.formats.mapped_file import read_head

    head, size = read_head(path, 4096)
    begin = head.lstrip()
    others = {name for name, begins in BEGINNINGS.items() if not begin.startswith(begins)}
    name = FORMATS.first(lambda spec: spec.recognise(head, size), without=others)
    if name is not None:
        return FORMATS[name]

    from aprfmt.formats.foreign_formats import EXTENSIONS, foreign_file
    from aprfmt.formats.pytorch.zip_archive import CUT, is_cut_archive

    # What another program's name stands on would not be read whole either.
    if path.suffix.lower() not in EXTENSIONS and is_cut_archive(path):
        raise TruncatedError(f"{path}: {CUT}")
    what = foreign_file(path, head, size, wanted)
    if what:
        raise UnsupportedError(f"{path}: is {what}")
    found = f"starts with {head[:8].hex(' ')}" if head else "is an empty file"
    raise FormatError(
        f"{path}: {found}; expected {', '.join(FORMATS)} content - "
        f"is it {wanted}, and was it copied whole?"
    )


def open_source(
    path: Path | str, *, partial: bool = False, damaged: bool = False, wanted: str = "a model file"
) -> Source:
    """Return one open file (or all shards of a split), by its content; a context manager.

    `wanted` is what messages say was expected of a file that is something else. With `damaged`,
    faults that leave other tensors readable are collected in `source.damage`, and only reading an
    affected tensor raises; without it the first fault raises. Folders are handled by
    `aprfmt.model`. Raises FormatError if the file is not in one of FORMATS.
    """
    path = parse_location(path)
    if may_be_half_changed(path):
        from aprfmt.formats.in_place_patch import refuse_half_changed

        refuse_half_changed(path)
    spec = detect_format(path, wanted)
    if not (damaged and spec.collects):
        return spec.open_source(path, partial=partial)
    collecting: Callable[..., Source] = spec.open_source
    return collecting(path, partial=partial, damaged=True)


def _stored_source(source: Source) -> Source:
    """Return the source of the stored file, without wrappers such as a merge around it."""
    while isinstance(source, Overlay):
        source = source.wrapped_source
    return source


def checksum_matches(source: Source, known: Callable[[], Mapping[Path, int]] = dict) -> bool | None:
    """Return whether a file's bytes have the checksum that it contains; None if it has none.

    Reads every byte, except of files in `known()`, which gives their CRC-32 by path.
    """
    stored = _stored_source(source)
    check = FORMATS[stored.format].checksum
    return None if check is None else check(stored, known())


def has_checksum(source: Source) -> bool:
    """Return whether the format of a file has a checksum over all its bytes."""
    return FORMATS[_stored_source(source).format].checksum is not None


def checksum_notes(source: Source, matches: bool | None = None) -> list[Note]:
    """Return [a warning] if a file's checksum over all its bytes is wrong, else [].

    Reads every byte of the file, unless `matches` already gives the result.
    """
    if (checksum_matches(source) if matches is None else matches) is not False:
        return []
    text = "the footer's checksum is not that of the bytes before it; the file is damaged"
    return [Note("warning", str(source.path), text, "checksum")]


def open_sink(
    path: Path | str,
    format: str,
    *,
    force: bool = False,
    max_shard_size: int | None = None,
    **options: Any,
) -> Sink:
    """Return a sink that writes `path` in `format`; plan first, then write in plan order.

    With `force` the file may exist. `max_shard_size` is the most tensor bytes of a file, None for
    one file. `options` are the format's own.
    """
    return FORMATS[format].open_sink(
        Path(path), force=force, max_shard_size=max_shard_size, **options
    )
