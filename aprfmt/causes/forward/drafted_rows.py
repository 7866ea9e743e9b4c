"""Cached rows of tokens that are not in the sequence: of rejected drafts, or of padding.

A *cached row* is the keys and values that the cache has of one token. A *slot* is a position whose
cached row may be another token's.

What layer 0 keeps of a token depends on its id and its position alone, so the rows of the whole
vocabulary are computed and the one that gives attention's output is the token that stands there. In
later layers its rows are those of a pass over the tokens before it.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Layers, Mismatch, differing_rows
from aprfmt.errors import AprfmtError
from aprfmt.inference.replay.patched_model import (
    CallRecorder,
    OperationCall,
    PassLocation,
    PatchedModel,
    StopPass,
)
from aprfmt.tensors.norms import exact_norm

SLOTS = 4  # as many tokens are drafted at once
ROWS = 8  # rows of attention's output that choose a token
VIEWS = 32  # random sums of a row
SMALL = 512  # ids of a vocabulary that are all tried
HIGHEST = 60.0  # what a score is above the reference's at most
STARTS = 24  # random beginnings of a search for several tokens, of a small vocabulary
TOKENS = 8192  # tokens of all of them together
SWEEPS = 8  # passes over the slots until no token changes
CHUNK = 256  # tokens of the vocabulary in one pass
SAME = 1e-5  # share of the largest value that rounding makes of a sum
WORK = 2e11  # products of all passes over the vocabulary


@dataclass(frozen=True)
class CachedRows:
    """Keys and values [rows, heads, d] that a pass gave to attention, {layer: array} each."""

    keys: dict[int, Array] = field(default_factory=dict)
    values: dict[int, Array] = field(default_factory=dict)


class _Passing(CallRecorder):
    """A recorder that knows the last capture point passed and stores no operations."""

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Return the value `x` of a capture point unchanged.

        Forget the operations called so far.
        """
        self.calls = []
        self.set_location(point, layer)
        return x


def _written_rows(patched: PatchedModel, last: int) -> CachedRows:
    """Return the keys and values that attention reads in a model's pass, in layers up to `last`."""
    rows = CachedRows()

    def scores(op: Any, at: PassLocation, q: Any, k: Any, heads: Any) -> Any:
        """Return the attention scores of `q` and `k`; keep the keys of the layer in `rows`."""
        rows.keys[at.layer] = k
        return op(q, k, heads)

    def mix(op: Any, at: PassLocation, probs: Any, v: Any) -> Any:
        """Return the sum of values weighted by `probs`; keep the values of the layer in `rows`.

        Raises StopPass in layer `last`, since nothing later is needed.
        """
        rows.values[at.layer] = v
        if at.layer >= last:
            raise StopPass
        return op(probs, v)

    with contextlib.suppress(StopPass):
        patched.with_op("scores", scores, None).with_op("mix", mix, None).run(_Passing())
    return rows


def drafted_rows_change(
    slots: Mapping[int, int], since: int, added: bool = False, rest: bool = False
) -> Change:
    """Return the change that attention reads cached rows of other tokens, {position: token id}.

    Queries of tokens from `since` on read them, in place of the tokens' own rows or, with `added`,
    in addition. `rest`: the rows of all other positions before `since` are also those of the pass
    over the other tokens.
    """
    tokens = ", ".join(f"{token} at position {slot}" for slot, token in slots.items())
    which = "a token that is" if len(slots) == 1 else "tokens that are"
    says = (
        f"from token {since} on attention reads the cached {'row' if len(slots) == 1 else 'rows'} "
        f"of {which} not there: id {tokens}, as of a rejected draft or of padding"
    )
    if added:
        says += ", in addition to the tokens' own"
    if rest:
        says += f"; the rows up to {since - 1} saw it"

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model whose attention reads cached rows of the other tokens in `layers`.

        These are the keys and values of a pass over the ids with `slots` put in.
        """
        ids = np.array(patched.ids)
        ids[list(slots)] = list(slots.values())
        held: list[CachedRows] = []
        rows = list(range(min(slots), since) if rest else slots)

        def read(what: str, layer: int, own: Any) -> Any:
            """Return the layer's keys ("k") or values ("v") with the other tokens' rows.

            They replace rows of `own`, or are appended to it with `added`. The first call runs
            the pass over the other tokens.
            """
            if not held:
                held.append(_written_rows(replace(patched, ids=tuple(ids)), patched.n_layers))
            theirs = (held[0].keys if what == "k" else held[0].values)[layer][rows]
            if added:
                return np.concatenate([own, theirs])
            made = np.array(own)
            made[rows] = theirs
            return made

        if added:
            return _with_more_keys(patched, read, layers, len(rows), since)
        return patched.with_keys_and_values(read, layers, since)

    values = {"tokens": {str(slot): token for slot, token in slots.items()}, "since": since}
    says = "keys and values are not the tokens' own: " + says
    return Change("kv_cache", says, ("kv_cache",), make, values | ({"beside": 1} if added else {}))


def _with_more_keys(
    patched: PatchedModel, read: Callable[..., Any], layers: Layers, more: int, since: int
) -> PatchedModel:
    """Return the model whose attention reads `more` additional keys and values, appended by `read`.

    `read` is called with ("k" or "v", layer, own rows). Queries of tokens before `since` do not
    see the additional ones.
    """

    def scores(op: Any, at: PassLocation, q: Any, k: Any, heads: Any) -> Any:
        """Return the scores of `q` with the layer's keys and the additional ones."""
        return op(q, read("k", at.layer, k), heads)

    def probs(op: Any, at: PassLocation, scores: Any, heads: Any) -> Any:
        """Return the softmax over all keys.

        Queries before token `since` do not see additional ones.
        """
        seen = np.repeat(np.arange(len(heads.mask))[:, None] >= since, more, 1)
        mask = np.concatenate([heads.mask, seen], 1)
        return op(scores, replace(heads, mask=mask, causal=None))

    def mix(op: Any, at: PassLocation, probs: Any, v: Any) -> Any:
        """Return the sum of the layer's values and the additional ones, weighted by `probs`."""
        return op(probs, read("v", at.layer, v))

    made = patched.with_op("scores", scores, layers).with_op("probs", probs, layers)
    return made.with_op("mix", mix, layers)


def drafted_row_changes(case: Mismatch) -> Iterator[Change]:
    """Yield changes to cached rows of tokens that are not in the sequence, solved in layer 0.

    Rows before some token agree, later ones do not. Each of the newest positions before it is
    tried alone, then two and more together, then rows in addition to the tokens' own. Where more
    than a product follows attention, each token of a small vocabulary is tried in the newest
    position. Nothing where a vocabulary is too large.
    """
    late = differing_rows(case)
    if not len(late) or not late[0]:
        return
    first, vocabulary = int(late[0]), int(case.patched.hp["vocab_size"])
    asked = _VocabularySearch.of(case, late)
    if asked is None:
        for token in range(vocabulary) if vocabulary <= SMALL else ():
            yield drafted_rows_change({first - 1: token}, first)
        return
    newest = list(range(first - 1, max(first - 1 - asked.slots, -1), -1))
    later = list(range(first, min(first + asked.slots, case.tokens)))
    tried = [([slot], False) for slot in newest]
    for n in range(1, asked.slots + 1):
        tried += [(newest[:n], False)] if n > 1 else []
        tried += [(later[:n], True)]
    for slots, added in tried:
        found = asked.solve(slots, added)
        if found is not None:
            found = dict(sorted(found.items()))
            yield drafted_rows_change(found, first, added)
            if not added and max(slots) < first - 1:
                yield drafted_rows_change(found, first, rest=True)
            return


@dataclass(frozen=True)
class _VocabularySearch:
    """A search for the tokens whose cached rows explain attention's recorded output in layer 0.

    `late` are the rows that differ, `bound` is the largest distance of rows that agree, `slots` how
    many positions can be tried. Sums are those of the reference's softmax: all keys together are 1.
    """

    case: Mismatch
    scores: OperationCall
    probs: Array
    mix: OperationCall
    output: "_Output"
    late: Array
    bound: float
    slots: int
    _parts: dict[int, tuple[Array, Array] | None] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Mismatch, late: Array) -> "_VocabularySearch | None":
        """Return the search for a divergence; None where the point cannot show cached rows.

        It must be in layer 0, after attention. `late` are the numbers of the differing rows.
        """
        scores, probs, mix = (case.call(op) for op in ("scores", "probs", "mix"))
        if case.layer or scores is None or probs is None or mix is None:
            return None
        n, bound = case.tokens, 2 * case.view.tolerance
        output = _Output.of(case, mix)
        if output is None or case.array(probs.result).shape[1:] != (n, n):
            return None
        weights = case.patched.weights
        read = [key for key in weights if key.startswith("L0.attn")]
        size = sum(math.prod(weights[key].shape) for key in read)
        slots = min(SLOTS, int(WORK / max(size * int(case.patched.hp["vocab_size"]), 1)))
        rows = late[np.linspace(0, len(late) - 1, min(len(late), ROWS)).astype(np.int64)]
        return cls(case, scores, case.array(probs.result), mix, output, rows, bound, slots)

    @property
    def group(self) -> int:
        """Number of query heads that share one key head."""
        return int(self.probs.shape[0] // self.case.array(self.mix.args[1]).shape[1])

    def solve(self, slots: Sequence[int], added: bool) -> dict[int, int] | None:
        """Return {position: token id} whose rows explain the recorded output; None for none.

        `slots` are the positions. Their rows replace the tokens' own, or are read in addition
        (`added`). Several positions are solved one after the other, from several starting
        points: one start may end at wrong tokens that no exchange of a single one improves.
        """
        rows = self.late
        total = np.ones((len(self.probs), len(rows)))
        held = self.case.array(self.mix.result)[rows].astype(np.float64).transpose(1, 0, 2)
        values = self.case.array(self.mix.args[1]).astype(np.float64)
        for slot in () if added else slots:
            own = self.probs[:, rows, slot].astype(np.float64)
            total = total - own
            held = held - own[:, :, None] * np.repeat(values[slot], self.group, 0)[:, None]
        parts = {}
        for slot in slots:
            part = self._vocabulary(slot)
            if part is None:
                return None
            seen: Array = np.any(self.probs[:, rows, slot], axis=0) | added
            parts[slot] = part[0] * seen[:, None], part[1]
        size, random = parts[slots[0]][1].shape[1], np.random.default_rng(0)
        starts = 2 + min(STARTS, TOKENS // size) if len(slots) > 1 else 1
        for start in range(starts):
            order = slots if start % 2 else slots[::-1]
            chosen = {slot: int(random.integers(size)) for slot in order} if start > 1 else {}
            theirs = {slot: parts[slot] for slot in order}
            if self._descend(theirs, chosen, total, held) <= self.bound:
                return chosen
        return None

    def _descend(
        self,
        parts: Mapping[int, tuple[Array, Array]],
        chosen: dict[int, int],
        total: Array,
        held: Array,
    ) -> float:
        """Improve `chosen`, {position: token id}, until exchanging one token makes it no better.

        Better is nearer to attention's recorded output; the distance reached is returned. `parts`
        has for each position (softmax weight, value) of every token of the vocabulary; `total` and
        `held` are the sums of weights and of weighted values over the other keys.
        """
        best = math.inf
        for _ in range(SWEEPS if len(parts) > 1 else 1):
            before = dict(chosen)
            for slot in parts:
                sums, mixed = total, held
                for other, token in chosen.items():
                    if other != slot:
                        weights, theirs = parts[other]
                        sums = sums + weights[:, :, token]
                        mixed = mixed + weights[:, :, token, None] * theirs[:, None, token]
                chosen[slot], best = self._find_nearest_token(parts[slot], sums, mixed)
            if chosen == before:
                break
        return best

    def _vocabulary(self, slot: int) -> tuple[Array, Array] | None:
        """Return (softmax weights, values) of every token of the vocabulary at a position.

        Weights are [heads, rows, tokens]: what the token's key adds to the softmax's sum. Values
        are [heads, tokens, d]. None where the tokens cannot be run.
        """
        if slot in self._parts:
            return self._parts[slot]
        self._parts[slot] = None
        patched, case, rows = self.case.patched, self.case, self.late
        q, _, heads = self.scores.args
        given = case.array(q)[rows]
        own = case.array(self.scores.result)[:, rows, rows].astype(np.float64)
        share = self.probs[:, rows, rows].astype(np.float64)
        weights, values = [], []
        for start in range(0, int(patched.hp["vocab_size"]), CHUNK):
            ids = tuple(range(start, min(start + CHUNK, int(patched.hp["vocab_size"]))))
            try:
                some = _written_rows(replace(patched, ids=ids, positions=(slot,) * len(ids)), 0)
            except (AprfmtError, ValueError):
                return None
            raw = case.array(patched.backend.scores(given, some.keys[0], heads)).astype(np.float64)
            above = np.minimum(raw - own[:, :, None], HIGHEST)
            weights.append(share[:, :, None] * np.exp(above))
            values.append(some.values[0].transpose(1, 0, 2).astype(np.float64))
        joined = np.repeat(np.concatenate(values, 1), self.group, 0)
        self._parts[slot] = np.concatenate(weights, 2), joined
        return self._parts[slot]

    def _find_nearest_token(
        self, part: tuple[Array, Array], total: Array, held: Array
    ) -> tuple[int, float]:
        """Return (token id, distance) of the token whose row best explains the recorded output.

        `part` are the vocabulary's (weights, values) at a position. `total` [heads, rows] and
        `held` [heads, rows, d] are the sums of weights and of weighted values over the other keys.
        """
        weights, values = part
        theirs = self.output.projected(self.case.view.theirs[self.late] - self.output.added)
        norm = exact_norm(theirs)
        best = (0, math.inf)
        for start in range(0, weights.shape[2], CHUNK):
            at = slice(start, start + CHUNK)
            some = weights[:, :, at, None]
            mixed = (held[:, :, None] + some * values[:, None, at]) / (
                total[:, :, None, None] + some
            )
            made = self.output.of_mixed(mixed.transpose(2, 1, 0, 3), self.late)
            away = np.linalg.norm((made - theirs).reshape(len(made), -1), axis=1) / norm
            nearest = int(np.argmin(away))
            if away[nearest] < best[1]:
                best = start + nearest, float(away[nearest])
        return best


@dataclass(frozen=True)
class _Output:
    """How attention's weighted values become the recorded point: gated, multiplied, added to.

    `factor` [tokens, width] is a gate's. Of a point with many values `views` [out, few] are random
    sums, which tell candidates apart as well. `weight` [width, few] is the last product's with
    these.
    """

    factor: Array
    views: Array
    weight: Array
    added: Array

    @classmethod
    def of(cls, case: Mismatch, mix: OperationCall) -> "_Output | None":
        """Return how the result of operation call `mix` becomes the point; None if not linearly."""
        mixed = case.array(mix.result)
        mixed = mixed.reshape(len(mixed), -1).astype(np.float64)
        mine = case.view.mine.reshape(len(case.view.mine), -1).astype(np.float64)
        after = list(itertools.dropwhile(lambda call: call is not mix, case.view.calls))[1:]
        products = [call for call in after if call.op == "linear"]
        if case.view.axis:
            return None
        entering, weight = mixed, np.eye(mixed.shape[1])
        if products:
            entering = case.array(products[-1].args[0]).astype(np.float64)
            weight = np.asarray(products[-1].args[1].numpy(), np.float64)
        if entering.shape != mixed.shape or weight.shape != (mine.shape[1], mixed.shape[1]):
            return None
        added = mine - entering @ weight.T
        if np.abs(added - added[0]).max() > SAME * max(float(np.abs(mine).max()), 1e-30):
            return None
        factor = np.divide(entering, mixed, out=np.ones_like(mixed), where=mixed != 0)
        views = np.random.default_rng(0).standard_normal((mine.shape[1], VIEWS))
        views = views if mine.shape[1] > VIEWS else np.eye(mine.shape[1])
        return cls(factor, views, weight.T @ views, added[0])

    def projected(self, rows: Array) -> Array:
        """Return rows of the point projected onto the random directions, [rows, directions]."""
        flat: Array = rows.reshape(len(rows), -1) @ self.views
        return flat

    def of_mixed(self, mixed: Array, rows: Array) -> Array:
        """Return the point's rows that mixed values give, projected onto random directions.

        `mixed` is [candidates, rows, heads, d], `rows` the numbers of the rows, and the result
        [candidates, rows, directions]. `added` is not in it.
        """
        made: Array = (mixed.reshape(*mixed.shape[:2], -1) * self.factor[rows]) @ self.weight
        return made
