"""Expert routing, sparse attention's choice and position biases: defaults that run on the host.

A *stack* is the weight of all experts of a layer, [n_experts, out, in]. A *block* of an
ExpertBlocks is a fixed number of token rows that one expert multiplies.

The numbers are computed by numpy and copied to the backend.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError
from aprfmt.inference.masks import Causal, Mask
from aprfmt.inference.routing import NUMPY, Maths

if TYPE_CHECKING:
    from aprfmt.inference.weights import Weight

Array = Any  # the backend's own
Numbers = NDArray[Any]  # numpy's


@dataclass(frozen=True)
class ExpertBlocks:
    """The token rows that each expert multiplies, in blocks of `size` rows, all on the device.

    `experts` [n] is the expert of each block. `rows` [n * size] are the token numbers of the
    blocks' rows, one block after the other, and `weights` [n * size] the factors of these rows. A
    block that is not full is padded with token 0, weighted by 0. `places` [tokens, used] are the
    indices in `rows` at which a token stands, by ascending expert.
    """

    experts: Array
    rows: Array
    weights: Array
    places: Array
    size: int


# An expert's number, the rows that it gets, and their weights, as the backend takes them.
ExpertRows = tuple[int, Any, Any]


def group_by_expert(experts: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return (flat indices into experts sorted by expert, the chosen experts, how many each has).

    `experts` is [tokens, used]. Only experts that are chosen are listed, ascending; the indices of
    one expert ascend.
    """
    chosen, counts = np.unique(experts, return_counts=True)
    return np.argsort(experts, axis=None, kind="stable"), chosen, counts


class _Host(Protocol):
    """The operations of a backend that the defaults below call."""

    deterministic: bool
    query_block: int

    def array(self, x: Numbers) -> Array:
        """Return numpy floats placed on the device, rounded to the dtype."""

    def to_numpy(self, x: Array) -> Numbers:
        """Return an array as numpy on the host."""

    def add_weighted(self, total: Array, rows: Any, y: Array, weights: Any) -> Array:
        """Add y times weights to the rows of total that `rows` numbers, in place; return total."""

    def linear(self, x: Array, w: "Weight", bias: Array | None) -> Array:
        """Return x times w transposed, plus bias."""

    def stack(self, parts: Sequence[Array]) -> Array:
        """Return the arrays joined along the first axis."""

    def take(self, x: Array, rows: Any) -> Array:
        """Return rows `rows` of x, in that order."""

    def zeros(self, shape: Sequence[int]) -> Array:
        """Return zeros of the dtype."""

    def index_scores(self, q: Array, k: Array, weights: Array, scale: float) -> Numbers:
        """Return an indexer's scores [tokens, keys] as numpy."""

    def _expert_addresses(self, stack: "Weight") -> Any:
        """Return the addresses [n_experts] of a stack's weights on the device, or None."""

    def best_keys(self, scores: Numbers, mask: Mask, count: int) -> Mask:
        """Return the mask of the `count` highest scores of each row."""


class Hosted:
    """Defaults for expert routing, position biases, and the keys that sparse attention reads.

    `maths` are the functions that a router is computed with. What an indexer chooses is worked out
    in float32 at least, whatever the dtype.
    """

    maths: Maths = NUMPY

    def router_numbers(self: _Host, x: Array) -> Array:
        """Return a router's logits, or experts' weights, in the array type of `maths`.

        It is numpy's here.
        """
        return self.to_numpy(x)

    def router_factors(self, weight: "Weight") -> Array:
        """Return a router's bias or scale as the array that `maths` computes with: numpy's here."""
        return weight.numpy()

    def listed_experts(self, table: "Weight", ids: Numbers, n_experts: int) -> Array:
        """Return the experts [tokens, used] that a table [vocab, used] lists for token ids.

        They are integers in the array type of `maths`: here numpy's int64. Raises ArchError for
        an expert that is not one of `n_experts`.
        """
        found = np.concatenate([np.asarray(table.rows(int(i), int(i) + 1)) for i in ids])
        chosen = found.astype(np.int64)
        wrong = (chosen != found) | (chosen < 0) | (chosen >= n_experts)
        if wrong.any():
            row = int(np.flatnonzero(wrong.any(axis=1))[0])
            raise ArchError(
                f"{table.key}: lists the experts {found[row].tolist()} for token {int(ids[row])}; "
                f"expected whole numbers from 0 to {n_experts - 1}"
            )
        return chosen

    def as_logits_dtype(self, x: Array, other: Array) -> Array:
        """Return x, a result of `router_factors`, in the dtype of `other`, a router's logits."""
        return x.astype(other.dtype, copy=False)

    def rounded_factors(self: _Host, x: Array) -> Array:
        """Return experts' weights, rounded to the backend's dtype, in `maths`'s array type."""
        return self.to_numpy(self.array(x))

    def chosen_keys(
        self: _Host,
        q: Array,
        k: Array,
        weights: Array,
        mask: Mask,
        *,
        scale: float,
        count: int,
        causal: Causal | None,
    ) -> Mask | Array:
        """Return the mask [tokens, keys] of the `count` keys an indexer chooses for each query.

        It is `best_keys` of `index_scores`, computed for `query_block` queries at a time. `q`
        [tokens, heads, d], `k` [keys, 1, d] and `weights` [tokens, heads] are the indexer's; only
        keys that `mask` shows are chosen. `causal` is (cached, window) if the mask is causal, else
        None. The result may be on the device; `limit_keys` takes it.
        """
        parts = [
            self.best_keys(
                self.to_numpy(self.index_scores(q[start:stop], k, weights[start:stop], scale)),
                mask[start:stop],
                count,
            )
            for start in range(0, len(mask), self.query_block)
            for stop in [min(start + self.query_block, len(mask))]
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def index_scores(self: _Host, q: Array, k: Array, weights: Array, scale: float) -> Numbers:
        """Return the sum over heads of weight * max(0, q.k * scale) [tokens, keys], a numpy array.

        q [tokens, heads, d], k [keys, 1, d], weights [tokens, heads]; hidden keys have a score too.
        """
        queries, keys, factors = (self.to_numpy(x) for x in (q, k, weights))
        keys, total = keys[:, 0], np.zeros((len(queries), len(keys)), queries.dtype)
        for head in range(queries.shape[1]):
            if self.deterministic:  # BLAS rounds a product by how many rows it has
                products = np.einsum("td,kd->tk", queries[:, head], keys, optimize=False)
            else:
                products = queries[:, head] @ keys.T
            total += np.maximum(products * total.dtype.type(scale), 0) * factors[:, head : head + 1]
        return total

    def block_scores(self: _Host, q: Array, k: Array, cached: int, size: int) -> Numbers:
        """Return the largest q.k [heads, tokens, blocks] over each block's keys, as a numpy array.

        q is [tokens, heads, d], k [keys, 1, d]. A block is `size` keys that follow each other, and
        `cached` positions come before the tokens. Keys later than the token do not count; a block
        that has only such keys gets -inf.
        """
        queries, keys = (self.to_numpy(x) for x in (q, k))
        keys = keys[:, 0]
        short = -len(keys) % size
        later = np.arange(len(keys)) > (cached + np.arange(len(queries)))[:, None]
        best = []
        for head in range(queries.shape[1]):
            if self.deterministic:  # BLAS rounds a product by how many rows it has
                products = np.einsum("td,kd->tk", queries[:, head], keys, optimize=False)
            else:
                products = queries[:, head] @ keys.T
            products[later] = -np.inf
            padded = np.pad(products, ((0, 0), (0, short)), constant_values=-np.inf)
            best.append(padded.reshape(len(queries), -1, size).max(axis=-1))
        return np.stack(best)

    def best_keys(self, scores: Numbers, mask: Mask, count: int) -> Mask:
        """Return the mask [tokens, keys] of the `count` highest scores of each row.

        Only keys that `mask` shows are chosen. Of equal scores the first are. A row that sees fewer
        keys than that gets all of them.
        """
        shown = np.where(mask, scores, -np.inf)
        order = np.argsort(-shown, axis=-1, kind="stable")[:, :count]
        kept: Mask = np.zeros(mask.shape, np.bool_)
        np.put_along_axis(kept, order, True, axis=-1)
        return kept & mask

    def rows_by_expert(self, experts: Numbers, weights: Numbers) -> Iterable[ExpertRows]:
        """Yield (expert, its rows, their weights) for each expert that is chosen, ascending.

        `experts` and `weights` are [tokens, used]. Rows ascend; an expert's weights [n] are in
        their order. `take` and `add_weighted` accept both. They are numpy arrays here.
        """
        for expert in np.unique(experts).tolist():
            rows, ranks = np.nonzero(experts == expert)
            yield expert, rows, weights[rows, ranks]

    def column(self: _Host, weights: Any) -> Array:
        """Return an expert's weights [n] as [n, 1], rounded to the dtype."""
        return self.array(weights[:, None])

    def add_rows(self: _Host, total: Array, rows: Any, y: Array) -> Array:
        """Add y [n, width] to the rows of total [tokens, width] that `rows` numbers; return total.

        Total is changed in place, and the sum rounded to the dtype.
        """
        return self.add_weighted(total, rows, y, np.ones(len(rows), np.float32))

    def can_stack_experts(self: _Host, stacks: Sequence["Weight"]) -> bool:
        """Return whether a layer's experts [n_experts, out, in] can be multiplied all at once.

        They can if all their weights are decoded on the device at known addresses, and never in
        deterministic runs. Then `route_blocks` says which rows they get, or `pack_blocks` for a
        choice made on the host. Otherwise experts are computed one after the other.
        """
        return not self.deterministic and all(self._expert_addresses(w) is not None for w in stacks)

    def _expert_addresses(self, stack: "Weight") -> Any:
        """Return the addresses [n_experts] of a stack's weights on the device.

        None where not all are decoded there; always None on the host.
        """
        return None

    def route_blocks(
        self,
        logits: Array,
        bias: Numbers | None,
        hp: Mapping[str, Value],
        *,
        rounds: bool,
        scale: Numbers | None = None,
    ) -> ExpertBlocks:
        """Return the rows that each expert multiplies by the router's logits, and their weights.

        `logits` are [tokens, n_experts]. Everything stays on the device. `bias` [n_experts] is
        added to the scores for the choice only. `rounds`: the experts' weights are rounded to the
        dtype. `scale` [n_experts] multiplies them. Only backends with `can_stack_experts` have it;
        the others raise NotImplementedError.
        """
        raise NotImplementedError

    def pack_blocks(self, experts: Numbers, weights: Numbers, n_experts: int) -> ExpertBlocks:
        """Return the blocks of token rows that each expert gets, by a choice made on the host.

        `experts` are the chosen experts and `weights` their weights, both [tokens, used]. Only
        backends with `can_stack_experts` have it; the others raise NotImplementedError.
        """
        raise NotImplementedError

    def multiply_stack(self: _Host, x: Array, stack: "Weight", experts: Any) -> Array:
        """Return [n, rows, out]: x[i] [rows, in] times expert experts[i]'s weight transposed."""
        ys = [
            self.linear(rows, stack.expert(expert), None)
            for rows, expert in zip(x, experts.tolist(), strict=True)
        ]
        return self.stack([y[None] for y in ys])

    def combine(self, y: Array, places: Array, weights: Array | None) -> Array:
        """Return each token's sum of its experts' outputs: the rows `places` [tokens, used] of y.

        Each row is multiplied by its number of `weights` [tokens, used]; None: by none. Products
        and sums are rounded as `add_weighted` rounds them. Only backends with `can_stack_experts`
        have it; the others raise NotImplementedError.
        """
        raise NotImplementedError

    def alibi_bias(self: _Host, slopes: Numbers, start: int, queries: int, keys: int) -> Array:
        """Return slope times (key - query) [heads, queries, keys], rounded once: ALiBi's bias.

        `slopes` [heads] are float64. The first query is at position `start`, the first key at 0.
        """
        away = np.arange(keys)[None, :] - np.arange(start, start + queries)[:, None]
        return self.array(slopes[:, None, None] * away)
