"""A file whose end was never written: all bytes after some offset are zero.

A download or a save that stopped leaves a file of the right size whose last bytes are zero. Tensor
by tensor this is many faults: some hold zeros, one is damaged, one bias is not added. All of it is
one fault.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from aprfmt.base.protocols import LazyTensor
from aprfmt.errors import AprfmtError
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.records import TensorDiff
from aprfmt.model import Model
from aprfmt.tensors.view import stored_by_name

_LEAST = 256  # bytes of zeros at the end from which it is looked at
_WINDOW = 1 << 20


def unwritten_tails(a: Model, b: Model, rows: Sequence[TensorDiff]) -> Iterator[Finding]:
    """Yield a finding for each file of B that is zero from some byte to its end, where A's is not.

    Its tensors have A's stored bytes before that offset and zeros after it. There are two or
    more: a single one is explained by itself.
    """
    apart = {row.key for row in rows if row.verdict == "DIFFERENT"}
    if len(apart) < 2:
        return
    theirs = stored_by_name(a.values())
    parts = {key: {*stored_by_name([view])} for key, view in b.roles.items() if key in apart}
    asked = set[str]().union(*parts.values())
    for file, held in _by_file(b).items():
        start = _first_zero(held)
        if start is None:
            continue
        some = [tensor for tensor in held if tensor.info.name in asked]
        right = {t.info.name for t in some if _is_cut(t, theirs.get(t.info.name), start)}
        keys = tuple(key for key, names in parts.items() if names <= right)
        if len(keys) < 2:
            continue
        end = max(t.info.offset + t.info.nbytes for t in held)
        yield Finding(
            "stale_tensor",
            f"{file.name} of B is zero from byte {start} to its end ({end - start} bytes): it was "
            f"never written there, as after a download or a save that was interrupted; "
            f"{len(keys)} tensors",
            "tensor",
            "bug",
            keys,
            True,
            residual_before=1.0,
            residual_after=0.0,
            of="stored bytes, by A's with zeros after that byte",
            proof=unfitted_proof(end - start),
        )


def _by_file(model: Model) -> Mapping[Path, list[LazyTensor]]:
    """Return a model's stored tensors by file, in the order of their bytes."""
    found: dict[Path, list[LazyTensor]] = {}
    for tensor in stored_by_name(model.values()).values():
        if tensor.path is not None:  # None for values that are computed
            found.setdefault(tensor.path, []).append(tensor)
    return {file: sorted(held, key=lambda t: t.info.offset) for file, held in found.items()}


def _first_zero(held: Sequence[LazyTensor]) -> int | None:
    """Return the file offset from which all bytes of the tensors are zero, or None.

    `held` are the file's tensors in order. None if these are only a few bytes, or the whole file.
    """
    start = None
    for tensor in reversed(held):
        size = tensor.info.nbytes
        for stop in range(size, 0, -_WINDOW):
            begin = max(0, stop - _WINDOW)
            kept = len(bytes(tensor.raw(begin, stop)).rstrip(b"\0"))
            start = tensor.info.offset + begin + kept
            if kept:
                tensor.drop()
                end = max(t.info.offset + t.info.nbytes for t in held)
                return start if end - start >= _LEAST else None
        tensor.drop()
    return None  # all of it is zero, which is said of the model


def _is_cut(tensor: LazyTensor, other: LazyTensor | None, start: int) -> bool:
    """Return whether a tensor's bytes before offset `start` of its file equal `other`'s.

    Both must have the same encoding. A tensor that ends before that byte has to be equal as a
    whole.
    """
    if other is None or (other.info.encoding, other.info.nbytes) != (
        tensor.info.encoding,
        tensor.info.nbytes,
    ):
        return False
    whole = min(tensor.info.nbytes, max(0, start - tensor.info.offset))
    try:
        return all(
            bytes(tensor.raw(at, min(whole, at + _WINDOW)))
            == bytes(other.raw(at, min(whole, at + _WINDOW)))
            for at in range(0, whole, _WINDOW)
        )
    except AprfmtError:
        return False
    finally:
        tensor.drop()
        other.drop()
