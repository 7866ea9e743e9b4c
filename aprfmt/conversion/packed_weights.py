"""Outputs that store a weight in several tensors: bitsandbytes' packed bytes and companions.

A *part* is one of the tensors that a packed weight is stored as: codes, scales and so on.

The size of a quant state depends on the values, so a weight may be encoded once for the plan and
again for writing. In between only small parts are kept in memory, and all parts of the weight
encoded last. Dialects, whose sizes follow from the shape, are in `dialects`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aprfmt.base.encodings import find_encoding
from aprfmt.base.protocols import TensorInfo
from aprfmt.codecs import CODECS, codec, decode
from aprfmt.conversion.change_counts import ChangeCounts
from aprfmt.errors import ConversionError

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array
    from aprfmt.codecs.repacks import GroupCounts


DTYPES: Mapping[str, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_SMALL = 4096  # bytes: parts up to this are kept from planning to writing


def has_companions(name: str) -> bool:
    """Return whether an encoding is stored in several tensors: codes, scales and others."""
    return name in CODECS and len(CODECS[name].parts) > 1


@dataclass
class LatestParts:
    """The parts of the weight that was encoded last; one object per plan."""

    name: str = ""
    parts: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class PackedWeight:
    """One weight to be stored in several tensors.

    `make` returns the weight's values, float32 of `shape`; `counts` says how many values changed,
    `judged` the groups of one whose codes were kept.
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    make: "Callable[[], Array]"
    counts: ChangeCounts = field(default_factory=ChangeCounts, kw_only=True)
    nbytes: int = field(default=0, kw_only=True)  # sum over all parts
    counted: bool = field(default=False, kw_only=True)
    judged: "GroupCounts | None" = field(default=None, kw_only=True)

    def part(self, suffix: str) -> bytes:
        """Return the bytes of the stored tensor `suffix`; "" is the one that holds the codes.

        Subclasses implement it: this one raises NotImplementedError.
        """
        raise NotImplementedError

    def infos(self, main: str) -> dict[str, TensorInfo]:
        """Return {suffix: stored tensor}; "" is the one that holds the codes, named `main`.

        Names, dtypes and shapes are those of the library's own files. Subclasses implement it: this
        one raises NotImplementedError.
        """
        raise NotImplementedError


@dataclass(eq=False)
class BnbWeight(PackedWeight):
    """A weight to be stored in bitsandbytes' tensors; `encode(values)` returns {suffix: bytes}."""

    encode: "Callable[[Array], Mapping[str, bytes]]"
    latest: LatestParts
    kept: dict[str, bytes] = field(default_factory=dict)

    def part(self, suffix: str) -> bytes:
        """Return the bytes of the stored tensor `suffix`.

        The weight is encoded again if the part is no longer in memory.
        """
        if suffix in self.kept:
            return self.kept[suffix]
        if self.latest.name != self.name:
            values = self.make()
            parts = self.encode(values)
            if not self.counted:
                self._count_changes(values, parts)
            self.latest.name, self.latest.parts = self.name, parts
            self.kept.update({s: data for s, data in parts.items() if s and len(data) <= _SMALL})
        return self.latest.parts[suffix]

    def _count_changes(self, values: "Array", parts: Mapping[str, bytes]) -> None:
        """Count the values that encoding changed."""
        self.counts.add(values, decode(self.encoding, parts, self.shape))
        self.counted = True

    def infos(self, main: str) -> dict[str, TensorInfo]:
        """Encode the weight and return {suffix: stored tensor}; "" is named `main`.

        Sets `nbytes`, their bytes together.
        """
        self.part("")  # encodes once
        parts = self.latest.parts
        found = {}
        for suffix, dtype in codec(self.encoding).stored_as(parts).items():
            row, size = find_encoding(dtype), len(parts[suffix])
            name = f"{self.name}.{suffix}" if suffix else main
            count = size // row.type_size
            shape: tuple[int, ...] = (count, 1) if not suffix else (count,)
            found[suffix] = TensorInfo(name, shape, dtype, 0, size, row.row_bytes(shape))
        self.nbytes = sum(info.nbytes for info in found.values())
        return found


@dataclass(frozen=True, eq=False)
class PackedPart:
    """One stored tensor of a packed weight."""

    packed: PackedWeight
    suffix: str

    def data(self) -> bytes:
        """Return the bytes of the stored tensor."""
        return self.packed.part(self.suffix)


def weight_dtype(source: str, config: Mapping[str, Any] | None, name: str) -> str:
    """Return the dtype to record for a packed weight: "float32", "float16" or "bfloat16".

    It is that of the encoding `source`, else the one in config.json. Raises ConversionError if
    bitsandbytes does not know the latter. `name` is the weight, for the message.
    """
    of_source = next((dtype for dtype, encoding in DTYPES.items() if encoding == source), None)
    if of_source is not None:
        return of_source
    stated = (config or {}).get("dtype") or (config or {}).get("torch_dtype") or "float32"
    if stated not in DTYPES:
        raise ConversionError(
            f"{name}: config.json says dtype {stated!r}; expected float32, float16 or bfloat16"
        )
    return str(stated)
