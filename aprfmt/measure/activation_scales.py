"""Input scales stored with packed weights: they change no value of a weight.

So no verdict of a tensor depends on them, but what an engine computes does. A *part* is one of the
stored tensors of a packed weight: codes, scales, zero points. A and B are the two files that are
compared; a *side* is one of them, or its tensor. An *item* is one such scale that differs, as the
verdict lists it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from aprfmt.base.protocols import LazyTensor
from aprfmt.codecs import decode
from aprfmt.codecs.dialect import INPUT_SCALES, OF_INPUTS
from aprfmt.codecs.scale_checks import check_input_scale_tensors
from aprfmt.errors import CodecError
from aprfmt.measure.alignment import TensorPair
from aprfmt.measure.encoding_noise import UNIT, storage_noise
from aprfmt.model.ledger import NotCompared, State
from aprfmt.tensors.view import View

if TYPE_CHECKING:
    from aprfmt.codecs.base import Array

ROUNDINGS = 1.5  # roundings to both sides' types by which one number may be apart


@dataclass(frozen=True, slots=True)
class InputScale:
    """The scales of a layer's inputs as one of two files stores them.

    `raw` are the bytes; `name`, `encoding` and `shape` are those of the stored tensor.
    """

    name: str
    raw: bytes
    encoding: str
    shape: tuple[int, ...]

    @property
    def values(self) -> "Array | None":
        """The numbers by which inputs are multiplied once quantized (float64).

        None for parts that are no such scale, or whose numbers are not usable.
        """
        return _multipliers(self.name, self.encoding, self.raw, self.shape)

    def equals(self, other: "InputScale") -> bool:
        """Return whether two scales are the same bytes, or the same numbers stored otherwise."""
        if (self.name, self.encoding) == (other.name, other.encoding):
            return self.raw == other.raw
        return self._is_near(other, lambda x: x)

    def inverts(self, other: "InputScale") -> bool:
        """Return whether one scale is the reciprocal of the other, and not equal to it."""
        return not self.equals(other) and self._is_near(other, lambda x: 1.0 / x)

    def _is_near(self, other: "InputScale", change: "Callable[[Array], Array]") -> bool:
        """Return whether this scale's numbers are `change`(the other's numbers), up to rounding."""
        x, y = self.values, other.values
        if x is None or y is None or x.size != y.size:
            return False
        slack = ROUNDINGS * (storage_noise(self.encoding) + storage_noise(other.encoding))
        made = change(y)
        return bool((np.abs(x - made) <= slack * np.abs(made)).all())


def differing_input_scales(pairs: Sequence[TensorPair]) -> Iterator[NotCompared]:
    """Yield an item for each input scale that differs between A and B or is in one of them only.

    Only pairs of packed weights that are as many stored tensors on both sides count (one for each
    expert, say). Two dialects may give one scale two names, and one may store the reciprocal: then
    the numbers are compared.
    """
    for pair in pairs:
        if pair.a is None or pair.b is None or not _are_packed_alike(pair.a, pair.b):
            continue
        a, b = _input_scales(pair.a), _input_scales(pair.b)
        for key in dict.fromkeys((*a, *b)):
            one, other = a.get(key), b.get(key)
            if one is not None and other is not None:
                if one.equals(other):
                    continue
                state: State = "unequal"
                name = one.name if one.name == other.name else f"{one.name}, {other.name} in B"
                note = "1/s stands for s" * one.inverts(other)
            else:
                state = "only in A" if other is None else "only in B"
                name = next(each.name for each in (one, other) if each is not None)
                weight = (pair.b if state == "only in B" else pair.a).stored[key[0]].info.name
                note = f"next to {weight}; engines take 1.0, or 0, where there is none"
            many = "" if len(pair.a.stored) == 1 else f"[{key[0]}]"
            yield NotCompared("scale of activations", f"{pair.key}{many}: {name}", state, note)


def _are_packed_alike(a: View, b: View) -> bool:
    """Return whether both are packed weights, made of as many stored tensors."""
    return len(a.stored) == len(b.stored) and all(
        any(stored.parts for stored in view.stored) for view in (a, b)
    )


def check_input_scales(view: View) -> None:
    """Raise CodecError, with the tensor's name, for an input scale that is not one number."""
    _check_each_tensor(view, lambda stored: check_input_scale_tensors(stored.parts))


def check_packed_parts(view: View) -> None:
    """Raise CodecError, naming the tensor, if a packed weight's parts do not fit its config."""
    _check_each_tensor(view, lambda stored: stored.packed and stored.packed().laid_out())


def _check_each_tensor(view: View, check: Callable[[LazyTensor], object]) -> None:
    """Call `check` on every stored tensor of a view; a CodecError gets the tensor's name."""
    for stored in view.stored:
        try:
            check(stored)
        except CodecError as error:
            raise CodecError(f"{stored.info.name}: {error}") from error


def _input_scales(view: View) -> dict[tuple[int, str], InputScale]:
    """Return a weight's input scales as {(index of the stored tensor, kind of scale): InputScale}.

    All names of INPUT_SCALES are one kind.
    """
    found = {}
    for number, stored in enumerate(view.stored):
        for suffix, part in stored.parts.items():
            if OF_INPUTS.search(suffix):
                name, raw, kind = suffix.lstrip("._"), bytes(part.raw()), part.info.encoding
                key = name if name not in INPUT_SCALES else ""
                found[number, key] = InputScale(name, raw, kind, part.info.shape)
    return found


def _multipliers(name: str, encoding: str, raw: bytes, shape: tuple[int, ...]) -> "Array | None":
    """Return the numbers that inputs are multiplied by (float64, flat), from a stored input scale.

    None where the bytes `raw` are no such scale, or its numbers are not usable.
    """
    if name not in INPUT_SCALES or encoding not in UNIT:
        return None
    values = np.asarray(decode(encoding, raw, shape), np.float64).reshape(-1)
    if not (np.isfinite(values).all() and (values > 0).all()):
        return None
    return 1.0 / values if INPUT_SCALES[name] else values
