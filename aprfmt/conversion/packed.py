"""Weights that a target stores in several tensors: bitsandbytes' packed bytes and companions.

The size of a quant state is known only when its numbers are, so a weight is encoded once while
planning where that matters, and once more when its bytes are written. Between the two only small
parts are kept; of everything else the weight encoded last is held, and no other.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aprfmt.base.encodings import encoding
from aprfmt.base.protocols import TensorInfo
from aprfmt.conversion.counts import Counts
from aprfmt.errors import ConversionError

_SMALL = 4096  # bytes: parts up to this are kept from planning to writing


def has_companions(name: str) -> bool:
    """Say whether an encoding is stored in several tensors."""
    from aprfmt.codecs import CODECS

    return name in CODECS and len(CODECS[name].parts) > 1


@dataclass
class Latest:
    """The parts of the weight that was encoded last; one for a plan."""

    name: str = ""
    parts: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(eq=False)
class Packed:
    """One weight on its way into several stored tensors.

    `make` gives the weight's values, float32 of `shape`; `encode(values)` its parts by suffix,
    "" being the packed bytes; `counts` says how the values fared.
    """

    name: str
    encoding: str
    shape: tuple[int, ...]
    make: Callable[[], Any]
    encode: Callable[[Any], Mapping[str, bytes]]
    latest: Latest
    counts: Counts = field(default_factory=Counts)
    kept: dict[str, bytes] = field(default_factory=dict)
    nbytes: int = 0  # of all parts together
    counted: bool = False

    def part(self, suffix: str) -> bytes:
        """Return one part's bytes, encoding the weight again where they are not at hand."""
        if suffix in self.kept:
            return self.kept[suffix]
        if self.latest.name != self.name:
            values = self.make()
            parts = self.encode(values)
            if not self.counted:
                self._count(values, parts)
            self.latest.name, self.latest.parts = self.name, parts
            self.kept.update({s: data for s, data in parts.items() if s and len(data) <= _SMALL})
        return self.latest.parts[suffix]

    def _count(self, values: Any, parts: Mapping[str, bytes]) -> None:
        from aprfmt.codecs import decode

        self.counts.add(values, decode(self.encoding, parts, self.shape))
        self.counted = True

    def infos(self, main: str) -> dict[str, TensorInfo]:
        """Return the stored tensors by suffix; `main` is the name of the packed bytes.

        Names, dtypes and shapes are those of the library's own files, as the codec knows them.
        """
        from aprfmt.codecs import codec

        self.part("")  # encodes once
        parts = self.latest.parts
        found = {}
        for suffix, dtype in codec(self.encoding).stored_as(parts).items():
            row, size = encoding(dtype), len(parts[suffix])
            name = f"{self.name}.{suffix}" if suffix else main
            count = size // row.type_size
            shape: tuple[int, ...] = (count, 1) if not suffix else (count,)
            found[suffix] = TensorInfo(name, shape, dtype, 0, size, row.row_bytes(shape))
        self.nbytes = sum(info.nbytes for info in found.values())
        return found


@dataclass(frozen=True, eq=False)
class Part:
    """One stored tensor of a packed weight."""

    packed: Packed
    suffix: str

    def data(self) -> bytes:
        """Return its bytes."""
        return self.packed.part(self.suffix)


def weight_dtype(source: str, config: Mapping[str, Any] | None, name: str) -> str:
    """Return the dtype a packed weight says it had: the source's own, else the model's.

    Raises ConversionError where neither is one that bitsandbytes knows.
    """
    own = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(source)
    if own is not None:
        return own
    said = (config or {}).get("dtype") or (config or {}).get("torch_dtype") or "float32"
    if said not in ("float32", "float16", "bfloat16"):
        raise ConversionError(
            f"{name}: config.json says dtype {said!r}; expected float32, float16 or bfloat16"
        )
    return str(said)
