"""Random roundings in a backward pass, which show how far rounding alone moves its gradients."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

# The integers by which the numbers of each float dtype are counted, in units in the last place.
COUNTED_BY: Mapping[torch.dtype, torch.dtype] = {
    torch.float64: torch.int64, torch.float32: torch.int32,
    torch.bfloat16: torch.int16, torch.float16: torch.int16,
}  # fmt: skip
# Dtypes whose smallest numbers gradients come near: a zero may be what is left of one.
UNDERFLOWING = (torch.float16,)
# Operations that move values and round none, unless their result has fewer bits.
MOVING = frozenset(
    """_to_copy _unsafe_view abs alias amax amin arange cat clamp clamp_max clamp_min clone
    constant_pad_nd copy_ cummax embedding fill_ flip full full_like gather index index_put
    index_select kthvalue lift_fresh masked_fill max maximum min minimum nan_to_num neg new_empty
    new_full new_ones new_zeros ones ones_like relu repeat roll scalar_tensor scatter
    select_backward sign slice_backward sort stack threshold_backward topk tril triu where zero_
    zeros zeros_like""".split()
)
# One of so many values moves up by one unit in the last place, and one moves down. The variance
# is then 1/6 of a unit squared: that of the difference of two results which were rounded
# independently, as each rounding has 1/12.
OF_VALUES = 12
# Passes that round at random, by which the rounding of a gradient is measured.
PASSES = 8
# A right pass may be this many times as far from the truth as the passes show: another order of
# adding, on another device, rounds otherwise.
MOST = 4.0
# Types of few bits, in which every operation adds up in more bits and rounds its result alone, as
# the passes do. Gradients of many elements whose rounding is small are then no further off than the
# passes show: 0.93 times at most, of 8,600 gradients of right passes in transformers and here.
FEW_BITS = ("bfloat16", "float16")
ELEMENTS, SMALL, NARROW = 64, 0.08, 1.5

Pass = TypeVar("Pass")


class RoundingNoise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which torch's operations round at random, forward and backward, on any device.

    The results of every operation that rounds move by one unit in the last place of their dtype, up
    or down, as two right ways to compute them differ. So the gradients of two passes in the dtype,
    one of them in this context, differ by what rounding does to them. A zero becomes the smallest
    number of float16, as it may be rounded from one. Other zeros, infinities and NaN stay.
    """

    def __init__(self, seed: int) -> None:
        """Seed the random roundings; the same seed gives the same ones."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._random: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run torch's operation `func`, and return its result with random rounding if it rounds."""
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        results = out if isinstance(out, tuple | list) else (out,)
        moving = func.overloadpacket.__name__ in MOVING
        read = max((x.itemsize for x in args if isinstance(x, torch.Tensor)), default=0)
        for x in results:
            if not isinstance(x, torch.Tensor) or x.dtype not in COUNTED_BY:
                continue
            if not moving or x.itemsize < read:
                self._move(x)
        return out

    def _move(self, x: torch.Tensor) -> None:
        """Move random values of a float tensor by one unit in the last place, in place."""
        whole = COUNTED_BY[x.dtype]
        if x.device not in self._random:
            self._random[x.device] = torch.Generator(x.device).manual_seed(self._seed)
        drawn = torch.randint(
            OF_VALUES, x.shape, generator=self._random[x.device], dtype=torch.int8, device=x.device
        )
        steps = (drawn == 0).to(whole) - (drawn == 1).to(whole)
        # A zero has no number below it, and is mostly no rounded one.
        steps = torch.where(x == 0, steps.abs() * (x.dtype in UNDERFLOWING), steps)
        moved = (x.contiguous().view(whole) + steps).view(x.dtype)
        x.copy_(torch.where(torch.isfinite(x) & torch.isfinite(moved), moved, x))


class NoisyPasses(Generic[Pass]):
    """PASSES right passes of one kind that round at random; each is made when it is first asked."""

    def __init__(self, make: Callable[[], Pass]) -> None:
        """Begin with no pass made; `make` runs one, forward and backward."""
        self._make = make
        self._made: list[Pass] = []

    def __iter__(self) -> Iterator[Pass]:
        """Yield PASSES passes with random rounding; each is made once and kept."""
        for number in range(PASSES):
            if number == len(self._made):
                with RoundingNoise(number):
                    self._made.append(self._make())
            yield self._made[number]


def largest_distance(right: NDArray[Any] | None, noisy: NDArray[Any] | None, dtype: str) -> float:
    """Return how far (L2) rounding may move a gradient from the exact one, by two passes of it.

    `right` is of a plain pass in `dtype`, `noisy` of one that rounds at random: each is taken to be
    off by their distance over the root of 2, times MOST, or times NARROW where more is not seen.
    Infinity if the plain pass overflows; 0.0, which says nothing, if only the other does or gives
    another shape.
    """
    if right is None or not np.isfinite(right).all():
        return math.inf
    if noisy is None or noisy.shape != right.shape or not np.isfinite(noisy).all():
        return 0.0
    off = float(np.linalg.norm(noisy - right)) / math.sqrt(2)
    small = off <= SMALL * float(np.linalg.norm(right))
    narrow = dtype in FEW_BITS and right.size >= ELEMENTS and small
    return off * (NARROW if narrow else MOST)
