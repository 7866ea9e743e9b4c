"""The types between all parts: what a stored tensor is, where tensors come from, where they go.

A *part* is one of the stored tensors of a packed weight. Reading: a `Source` is an open file with
all its shards. Writing: a `Sink` is planned first (all names, shapes and encodings), then fed in
plan order. Nothing here knows a format.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from numpy.typing import NDArray

Value = Any  # str, int, float, bool, None, sequences and mappings of these
APRFMT_PREFIX = "aprfmt."  # what those metadata keys begin with that aprfmt alone writes


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file, or a sink's plan, says about one tensor.

    `shape` is row-major, outermost first, and that of the weight itself, also when packed.
    `encoding` is a key of `encodings.ENCODINGS` (or `type#142`). `offset` counts from the start of
    the file that holds the tensor. `row_bytes` is None where blocks cross row ends, so that rows
    cannot be moved undecoded.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    offset: int
    nbytes: int
    row_bytes: int | None


class Region(Protocol):
    """The bytes of a file: a memoryview, or what fetches the bytes that a slice asks for."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> memoryview: ...


@runtime_checkable
class RemoteRegion(Region, Protocol):
    """A region whose bytes are on another machine; its beginning is cached, for headers."""

    def head(self, stop: int, wish: int = 0) -> memoryview:
        """Return the first bytes of the file, at least `stop` of them.

        If they have to be fetched, the first `wish` bytes are fetched at once.
        """
        ...


class ByteSource(Protocol):
    """The bytes of one file, local or remote; readers know nothing else of it.

    `identity` changes when the bytes do; "" where nothing says so. `sha256` is the digest of all
    bytes where a site publishes it, or somebody computed it; else "".
    """

    path: Path
    size: int
    identity: str
    sha256: str

    @property
    def view(self) -> Region:
        """All bytes; a slice of it is valid until close()."""
        ...

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Return the bytes of every range [start, stop), in order."""
        ...

    def windows(self, start: int, stop: int, size: int = ...) -> Iterator[memoryview]:
        """Yield the bytes of [start, stop) that exist, in windows of `size`."""
        ...

    def expect(self, start: int, stop: int) -> None:
        """Announce that bytes [start, stop) will be read soon."""
        ...

    def drop(self, start: int, stop: int) -> None:
        """Announce that bytes [start, stop) are not needed soon, so that memory can be freed."""
        ...

    def close(self) -> None:
        """Release the bytes."""
        ...


class LazyTensor(Protocol):
    """A stored tensor whose bytes are not read until `raw` is called.

    Classes of tensors derive from it; what most of them do not have has a default here. `info` is
    theirs to give, as a property or a slot.
    """

    __slots__ = ()

    @property
    def info(self) -> TensorInfo:
        """Name, shape, encoding, offset and size."""
        ...

    @property
    def path(self) -> Path | None:
        """The file that holds the bytes, or None."""
        return None

    @property
    def parts(self) -> Mapping[str, "LazyTensor"]:
        """The stored tensors of a packed weight by suffix, "" for its codes; empty for most."""
        return {}

    @property
    def damage(self) -> str:
        """Why the bytes cannot be read; "" where nothing is wrong. Reads no bytes."""
        return ""

    @property
    def spoilt(self) -> bool:
        """Whether nothing that the file says of the tensor can be trusted, its shape included."""
        return False

    @property
    def makes(self) -> bool:
        """Whether the bytes are in no file, but made on request, whole rows at a time."""
        return False

    @property
    def made_of(self) -> tuple["LazyTensor", ...]:
        """The stored tensors that its bytes are made from; () for a stored tensor."""
        return ()

    @property
    def unwrapped(self) -> "LazyTensor":
        """The stored tensor with the same bytes: itself, or the one that this tensor wraps."""
        return self

    @property
    def decode(self) -> Callable[[], "NDArray[Any]"] | None:
        """A function that decodes the tensor to `info.shape`; None if its bytes are enough."""
        return None

    @property
    def packed(self) -> Callable[[], Any] | None:
        """A function returning the weight as a codecs.lattice.PackedWeight; None if not packed."""
        return None

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return a read-only zero-copy view of stored bytes [start, stop), valid until close()."""
        ...

    def location(self, start: int = 0) -> tuple[ByteSource, int] | None:
        """Return (file, offset) of stored byte `start`; None where the bytes are in no file."""
        return None

    def expect(self, start: int = 0, stop: int | None = None) -> None:
        """Announce that bytes [start, stop) will be read soon; a remote file starts fetching."""
        return

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Announce that bytes [start, stop) are not needed soon, so that memory can be freed."""


def parts_of(tensor: LazyTensor) -> Mapping[str, LazyTensor]:
    """Return {suffix: stored tensor} of a packed weight's parts; {"": itself} for others."""
    return tensor.parts or {"": tensor}


def raw_parts(tensor: LazyTensor) -> dict[str, memoryview]:
    """Return {suffix: stored bytes} of all parts of a tensor."""
    return {suffix: part.raw() for suffix, part in parts_of(tensor).items()}


@dataclass(frozen=True, slots=True)
class Note:
    """A remark about a file that can still be opened: where, and what was found.

    `key` is a key of `base/warnings.py`, which explains it; a note needs none.
    """

    level: str  # "warning" or "note"
    where: str
    text: str
    key: str = ""


SURPLUS = "surplus"  # kind of a Damage: bytes that belong to nothing; all the rest is whole


@dataclass(frozen=True, slots=True)
class Damage:
    """Something wrong with a file of which other tensors can still be read.

    `tensors` are the tensors whose bytes are missing or cannot be trusted because of it: reading
    one of them raises. Empty if the broken rule affects no tensor.
    """

    where: str  # the file
    text: str
    tensors: tuple[str, ...] = ()
    # `kind` of the matching error: "format", "truncated", "unsupported"; or SURPLUS.
    kind: str = "format"


def tensor_damage(tensor: LazyTensor) -> str:
    """Return why a tensor's bytes cannot be read, companions included; "" where nothing is wrong.

    Reads no bytes.
    """
    return next((one.damage for one in (tensor, *tensor.parts.values()) if one.damage), "")


def shape_is_known(tensor: LazyTensor) -> bool:
    """Return whether a tensor's stated shape can be trusted.

    It can where only bytes are cut off. It cannot where the tensor, or a companion of it, is
    damaged in what states its shape.
    """
    return not any(one.spoilt for one in (tensor, *tensor.parts.values()))


def has_aprfmt_keys(metadata: Mapping[str, Value]) -> bool:
    """Return whether a file's metadata has a key that begins with "aprfmt.", as aprfmt writes."""
    return any(key.startswith(APRFMT_PREFIX) for key in metadata)


class Source(Protocol):
    """An open model file, all its shards; a context manager."""

    format: str  # key of FORMATS
    path: Path  # what the caller opened
    files: tuple[Path, ...]  # every file that belongs to it, in shard order
    version: str
    metadata: Mapping[str, Value]
    types: Mapping[str, str]  # value types by metadata key where the format has them, else {}
    tensors: Mapping[str, LazyTensor]  # in the file's own order
    notes: Sequence[Note]

    @property
    def damage(self) -> Sequence[Damage]:
        """What is wrong with the file; always empty unless it was opened with `damaged=True`."""
        ...

    def close(self) -> None:
        """Unmap the files; views returned by raw() are invalid afterwards."""
        ...

    def __enter__(self) -> "Source": ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class Overlay(Protocol):
    """A source that adds tensors or metadata over those of another source."""

    @property
    def wrapped_source(self) -> Source:
        """The source below."""
        ...


@dataclass(frozen=True, slots=True)
class TypedValue:
    """A metadata value and the type it must be written as (`uint32`, `array:string`)."""

    value: Value
    type: str


class Sink(Protocol):
    """A file being written; published when the `with` ends without error and every tensor is there.

    Anything else discards it.
    """

    def plan(self, metadata: Mapping[str, Value | TypedValue], infos: Sequence[TensorInfo]) -> None:
        """Fix metadata, names, shapes and encodings; `offset` of the infos is ignored."""
        ...

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        """Write one tensor's bytes, in plan order; the chunks must add up to its `nbytes`."""
        ...

    def amend(self, old: str, new: str) -> None:
        """Write `new` over the metadata text `old` and correct every checksum.

        For values known only after the tensors have been written, such as a digest. Both texts are
        ASCII and equally long; `old` occurs exactly once.
        """
        ...

    @property
    def files(self) -> Sequence[Path]:
        """The files being written, in shard order, an index last."""
        ...

    @property
    def sizes(self) -> Mapping[Path, int]:
        """{path: bytes} of every file, known as soon as it is planned."""
        ...

    def __enter__(self) -> "Sink": ...

    def __exit__(self, *exc: object) -> None: ...


@runtime_checkable
class OrderedSink(Protocol):
    """A sink that decides the order of tensors: it keeps that of a rewritten file."""

    def order(self, infos: Sequence[TensorInfo]) -> list[TensorInfo]:
        """Return the tensors in the order in which they must be planned and written."""
        ...
