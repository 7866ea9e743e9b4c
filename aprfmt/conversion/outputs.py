"""The plan of a conversion: the tensors that the target will store."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import LazyTensor, Note, TensorInfo
from aprfmt.conversion.packed_weights import PackedPart
from aprfmt.errors import CodecError, ConversionError
from aprfmt.formats.mapped_file import MappedFile
from aprfmt.tensors.restoration import Restoration
from aprfmt.tensors.runs import ByteRun

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.lattice import PackedWeight


PLAIN_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Output:
    """One stored tensor of the target.

    `runs` are the source bytes in the target's element order, in `source_encoding`; None if a
    layout step changes values: then `make()` returns the decoded array of `info.shape`. Bytes are
    copied if there are runs and the encodings are equal, re-encoded otherwise.
    """

    info: TensorInfo
    source_encoding: str
    runs: Sequence[ByteRun] | None
    make: "Callable[[], Array]"
    spellings: tuple[str, ...]
    steps: tuple[str, ...] = ()
    sources: tuple[LazyTensor, ...] = ()
    role: str = ""  # the role, if the tensor holds exactly one
    part: PackedPart | None = None  # set if the target stores the weight in several tensors
    rows: Sequence[ByteRun] | None = None  # as `runs`, of [out, in] where the target turns a matrix
    # Set if `make` only decodes this packed weight, which can then be done by rows, or moves its
    # elements besides: `moved` does that to an array of any dtype, new bytes of them included.
    decodes: "Callable[[], PackedWeight] | None" = None
    moved: "Callable[[Array], Array] | None" = None

    @property
    def encoding(self) -> str:
        """The encoding of the weight, also if its codes and scales are stored as plain bytes."""
        return self.info.encoding if self.part is None else self.part.packed.encoding

    @property
    def companion(self) -> bool:
        """Whether this is a companion of a packed weight (its scales, say), not its codes."""
        return self.part is not None and self.part.suffix != ""

    @property
    def copies(self) -> bool:
        """Whether stored bytes are copied, not decoded."""
        return self.runs is not None and self.info.encoding == self.source_encoding

    @property
    def made(self) -> bool:
        """Whether the copied bytes are in no file: they are repacked while they are written."""
        return self.copies and any(tensor.makes for tensor in self.sources)

    @property
    def is_remote(self) -> bool:
        """Whether bytes are fetched from another machine, so that they should be read only once."""
        places = [part.location() for tensor in self.sources for part in stored_parts(tensor)]
        return any(place is not None and not isinstance(place[0], MappedFile) for place in places)


def stored_parts(tensor: LazyTensor) -> Sequence[LazyTensor]:
    """Return the stored tensors whose bytes a tensor is made of; [the tensor] for most."""
    beneath = (*tensor.made_of, *tensor.parts.values())
    if not beneath:
        return [tensor.unwrapped]
    return [one for each in beneath for one in stored_parts(each)]


@dataclass
class Plan:
    """Everything a conversion will write, before a byte is written.

    `absent` are required role keys that are missing in the output on purpose.
    """

    outputs: list[Output]
    style: str | None
    notes: list[Note]
    restoration: Restoration
    dropped: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)  # by name in the source: the flag
    edited: Collection[tuple[str, str]] = ()  # keys (kind, name) that get another value, or go
    files_dropped: tuple[str, ...] = ()  # files next to the weights that --drop names

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the target's stored tensors."""
        return tuple(output.info.name for output in self.outputs)


def make_info(name: str, shape: tuple[int, ...], name_of_encoding: str) -> TensorInfo:
    """Return the TensorInfo of a tensor to write; ConversionError if the shape does not fit."""
    row = find_encoding(name_of_encoding)
    try:
        size = row.nbytes(shape)
    except CodecError as error:
        raise ConversionError(f"{name}: {error}; choose another with --tensor") from error
    return TensorInfo(name, shape, name_of_encoding, 0, size, row.row_bytes(shape))
