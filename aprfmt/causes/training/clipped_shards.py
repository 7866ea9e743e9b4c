"""Gradients of which each rank clipped its own shards by their own norm, not by that of all."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aprfmt.causes.training.clipping import SAME, clip_factor
from aprfmt.causes.training.gradient_case import SIDES, GradientCase
from aprfmt.causes.training.optimizers import F64
from aprfmt.causes.training.step_size import SLACK

RANKS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 48, 64)  # counts of ranks that are tried
NAMED = 4  # ranks whose factors are named in a sentence
Cuts = Mapping[str, NDArray[np.int64]]  # {key: where each rank's elements end, [ranks]}


@dataclass(frozen=True)
class Sharding:
    """How gradients are cut into the shards of ranks.

    `says` names a rank's shard in a sentence. `cuts` are where the flat elements of each gradient
    are cut: rank r has those from cut r - 1 (0 for the first rank) up to cut r.
    """

    says: str
    cuts: Cuts


def shard_clipping(
    cases: Mapping[str, GradientCase],
    shapes: Mapping[str, Sequence[int]],
    bounds: Collection[float],
) -> str | None:
    """Return a sentence if each rank clipped its gradient shards by their own norm; None if not.

    `cases` are the gradients of all parameters, `shapes` their shapes by key, `bounds` the norms
    that may have been clipped to. A rank's factor follows from the norm of its computed shards:
    nothing is fitted. All given elements must be those of gradients clipped so, and two ranks at
    least must have unequal factors.
    """
    if not any(not each.right for each in cases.values()):
        return None
    sums = {
        key: tuple(
            np.concatenate([[0.0], np.cumsum(np.square(side.reshape(-1)))])
            for side in (each.given, each.computed)
        )
        for key, each in cases.items()
    }
    coarse = any(each.coarse for each in cases.values())
    room = SIDES[True] if coarse else SLACK / 10
    for sharding in shardings(shapes):
        given, computed = (_rank_norms(sums, sharding.cuts, side) for side in (0, 1))
        bound = next((each for each in bounds if abs(given.max() - each) <= room * each), None)
        if bound is None:
            continue
        factors = np.array([clip_factor(bound, norm) for norm in computed])
        if np.ptp(factors) <= SAME or (np.abs(given - factors * computed) > room * bound).any():
            continue
        if all(
            each.near(each.given, _scale_by_rank(each.computed, sharding.cuts[key], factors))
            for key, each in cases.items()
        ):
            return shard_clipping_sentence(sharding, bound, factors, computed)
    return None


def shardings(shapes: Mapping[str, Sequence[int]]) -> Iterator[Sharding]:
    """Yield the usual ways to cut gradients of these shapes into shards, for each number of ranks.

    They are rows of each gradient (FSDP2, cut by torch.chunk), a flat piece of each, and a piece of
    one flat buffer of all of them (FSDP1, ZeRO): in their order, or with each layer's norms last.
    """
    sizes = {key: int(np.prod(shape)) for key, shape in shapes.items()}
    total = sum(sizes.values())
    buffers = [_buffer_offsets(sizes, order) for order in (tuple(sizes), _norms_last(sizes))]
    for count in RANKS:
        ranks = np.arange(1, count + 1)
        rows, flat = {}, {}
        for key, shape in shapes.items():
            length = int(shape[0]) if shape else 1
            width = sizes[key] // length if length else 0
            rows[key] = np.minimum(ranks * -(-length // count), length) * width
            flat[key] = np.minimum(ranks * -(-sizes[key] // count), sizes[key])
        yield Sharding("its rows of each gradient", rows)
        yield Sharding("its flat piece of each gradient", flat)
        for starts in buffers:
            ends = {
                key: np.clip(ranks * -(-total // count) - starts[key], 0, sizes[key])
                for key in sizes
            }
            yield Sharding("its piece of one flat buffer of all gradients", ends)


def _buffer_offsets(sizes: Mapping[str, int], order: Sequence[str]) -> dict[str, int]:
    """Return where each gradient starts in a flat buffer that has the gradients `order`.

    `sizes` are their counts of elements by key.
    """
    ends = np.cumsum([0, *(sizes[key] for key in order)])
    return dict(zip(order, ends[:-1].tolist(), strict=True))


def _norms_last(keys: Collection[str]) -> tuple[str, ...]:
    """Return the keys of parameters with the norms of each layer after its other parameters.

    Modules of transformers' and torchtitan's decoder layers have their parameters so.
    """
    layers = list(dict.fromkeys(key.partition(".")[0] for key in keys))

    def place(key: str) -> tuple[int, bool]:
        """Return (number of the key's layer among all that are named, whether it is a norm)."""
        layer = key.partition(".")[0]
        return layers.index(layer), "norm" in key

    return tuple(sorted(keys, key=place))


def _rank_norms(sums: Mapping[str, tuple[F64, ...]], cuts: Cuts, side: int) -> F64:
    """Return the L2 norm of each rank's shards of all gradients, float64 [ranks].

    `sums` has two running sums of squares for each gradient, of the trainer's (`side` 0) and of the
    computed one (`side` 1). `cuts` says where each rank's elements end in it.
    """
    squares = [np.diff(np.concatenate([[0.0], sums[key][side][cuts[key]]])) for key in cuts]
    return np.asarray(np.sqrt(np.maximum(np.sum(squares, axis=0), 0.0)))


def element_factors(ends: NDArray[np.int64], factors: F64, start: int, stop: int) -> F64:
    """Return the factor of each flat element [start, stop) of one gradient, float64 [stop - start].

    Rank r multiplies its elements by factors[r]; its last element is before ends[r]. Both are
    [ranks].
    """
    return np.asarray(factors[np.searchsorted(ends, np.arange(start, stop), side="right")])


def _scale_by_rank(gradient: F64, ends: NDArray[np.int64], factors: F64) -> F64:
    """Return a gradient with each rank's elements multiplied by its factor.

    `ends` are where each rank's flat elements end, [ranks].
    """
    each = element_factors(ends, factors, 0, gradient.size)
    return np.asarray(gradient * each.reshape(gradient.shape))


def shard_clipping_sentence(sharding: Sharding, bound: float, factors: F64, norms: F64) -> str:
    """Return the sentence that each rank clipped its shards by their own norm to `bound`.

    `factors` and `norms` are those of the ranks' computed shards, float64 [ranks].
    """
    rows = [f"{x:.4g} (norm {y:.5g})" for x, y in zip(factors, norms, strict=True)]
    told = ", ".join(rows[:NAMED])
    if len(rows) > NAMED:
        told += f", ...; all lie between {factors.min():.4g} and {factors.max():.4g}"
    whole = float(np.sqrt(np.square(norms).sum()))
    return (
        f"each of {len(rows)} ranks clipped {sharding.says} to {bound:g} by the norm of its own "
        f"shards, not by that of all, {whole:.5g}: the factors are {told}"
    )
