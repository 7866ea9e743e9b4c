"""Codes of eight bits whose scale is not in the file: their values say nothing of the weight."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING

from aprfmt.base.protocols import LazyTensor, Note
from aprfmt.base.sequences import join_first
from aprfmt.errors import AprfmtError

if TYPE_CHECKING:
    from aprfmt.codecs.base import F32
    from aprfmt.model import Model

# Encodings of one byte for each element in which weights are stored as codes.
ENCODINGS = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8"})
_INTEGERS = "I8"  # integers are codes of a weight, or counts and positions: the name says which
_WEIGHT = "weight"

LARGE = 1.0  # root mean square: of weights it is far below, of codes scaled to their type above
_PLACES, _SAMPLE = 4, 16384  # samples of a tensor, and bytes of each
_WINDOW = 1 << 20  # bytes that are searched together
_SHOWN = 3  # names in a line


@dataclass(frozen=True)
class LoneCode:
    """A matrix of codes without a scale; `largest` is the largest number of its `encoding`."""

    encoding: str
    largest: float

    @property
    def text(self) -> str:
        """What the matrix holds, as a clause."""
        return (
            f"{self.encoding} values up to {self.largest:g}, the largest of the type, and no "
            "scale: codes whose scale is not in the file"
        )


def find_lone_codes(model: "Model") -> Mapping[str, LoneCode]:
    """Return {stored name: LoneCode} of the matrices of codes whose scale is not in the file.

    A code is scaled so that the largest weight of a tensor, row or block is the largest number of
    its type; a weight that was cast without a scale keeps a weight's size. Tensors that are parts
    of a packed weight, or of one that cannot be decoded, are left out.
    """
    stored = model.source.tensors
    kinds = set(map(attrgetter("info.encoding"), stored.values()))
    if not kinds & ENCODINGS:
        return {}
    told = {part.info.name for view in model.values() for part in view.parts.values()}
    told |= {name for lost in model.lost_parts.values() for name in lost.stored}
    told |= set() if model.unread is None else {one.name for one in model.unread.tensors}
    return {
        name: LoneCode(tensor.info.encoding, _largest(tensor.info.encoding))
        for name, tensor in stored.items()
        if _may_hold_codes(tensor) and name not in told and _holds_scaled_codes(tensor)
    }


def _may_hold_codes(tensor: LazyTensor) -> bool:
    """Return whether encoding, axes and name of a tensor are those of a matrix of codes."""
    info = tensor.info
    if info.encoding not in ENCODINGS or len(info.shape) < 2 or not info.nbytes:
        return False
    return info.encoding != _INTEGERS or info.name.endswith(_WEIGHT)


def _holds_scaled_codes(tensor: LazyTensor) -> bool:
    """Return whether a tensor's numbers are too large for weights and reach the type's largest.

    A sample decides the first; only where it is so, all bytes are read. False if they cannot be.
    """
    import numpy as np

    info, table = tensor.info, _values(tensor.info.encoding)
    try:
        sample = b"".join(_samples(tensor))
        found = table[np.frombuffer(sample, np.uint8)]
        found = found[np.isfinite(found) & (found != 0)]
        if not found.size or float(np.square(found).mean()) <= LARGE**2:
            return False
        wanted = [bytes([i]) for i in np.flatnonzero(np.abs(table) == _largest(info.encoding))]
        for start in range(0, info.nbytes, _WINDOW):
            piece = bytes(tensor.raw(start, min(info.nbytes, start + _WINDOW)))
            if any(code in piece for code in wanted):
                return True
    except AprfmtError:
        return False  # reported where the tensor is read
    finally:
        tensor.drop()
    return False


def _samples(tensor: LazyTensor) -> Iterator[bytes]:
    """Yield bytes from places of a tensor that are equally far from each other."""
    size = tensor.info.nbytes
    step = max(size // _PLACES, _SAMPLE)
    for start in range(0, size, step):
        yield bytes(tensor.raw(start, min(size, start + _SAMPLE)))


@cache
def _values(encoding: str) -> "F32":
    """Return float32 [256], the number of each byte of an encoding."""
    import numpy as np

    from aprfmt.codecs import decode

    return decode(encoding, np.arange(256, dtype=np.uint8).tobytes(), (256,)).astype(np.float32)


@cache
def _largest(encoding: str) -> float:
    """Return the largest number that quantizers to an encoding write; for I8 it is 127."""
    import numpy as np

    table = _values(encoding)
    return float(table[np.isfinite(table)].max())


def _claim(found: Mapping[str, LoneCode]) -> str:
    """Return what is said of these matrices, as a clause with the first names."""
    kinds = " and ".join(sorted({one.encoding for one in found.values()}))
    names = join_first(list(found), _SHOWN)
    many = f"{len(found)} weight{'s' * (len(found) > 1)}"
    return f"{many} of {kinds} codes without a scale in the file ({names})"


def lone_codes_note(model: "Model") -> Note | None:
    """Return the warning that weights are codes without their scale; None if there are none."""
    found = model.lone_codes
    if not found:
        return None
    text = f"{_claim(found)}: what the codes count for is lost"
    return Note("warning", str(model.path), text, "lone_codes")


def refuse_lone_codes(
    model: "Model", error: type[AprfmtError], names: Iterable[str] | None = None, todo: str = ""
) -> None:
    """Raise `error` where the values of codes without their scale are asked for.

    `names` are the stored tensors whose values are asked for, None: all. `todo` is what else can be
    done with them, as an imperative clause.
    """
    found = model.lone_codes
    if names is not None:
        found = {name: found[name] for name in names if name in found}
    if found:
        also = f"{todo}, or " if todo else ""
        raise error(
            f"{model.path}: {_claim(found)}; expected a scale for each, or values of a weight's "
            f"size; {also}convert again from the source, with its scales"
        )
