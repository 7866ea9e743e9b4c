"""The arithmetic that forward.py calls, as one base class: every backend has the same operations.

A backend writes the abstract operations; every other operation is made of these here, and a backend
replaces it where it knows a better way. What exists only to be fast (fused operations, recorded
passes, statistics that wait on a device) is such a replacement, and stands in inference/fast.

Arrays are the backend's own (numpy or torch). Activations are [tokens, width] or [tokens, heads,
head_dim]; attention scores are [heads, tokens, keys]. No operation has a default for eps, theta,
scale, window, pairing or activation: the model gives all of these.

Rounding: an operation rounds its result to the backend's dtype once, unless its docstring says
otherwise; sums inside float16 and bfloat16 operations are float32. In float32 and float64
everything is computed in the dtype itself.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from aprfmt.inference.backends.hosted import Hosted
from aprfmt.inference.backends.recorded import PassRecorder, PendingStats
from aprfmt.inference.backends.recurrent import Recurrent
from aprfmt.inference.masks import (
    Causal,
    Mask,
    causal_mask,
    chunk_mask,
    ended_windows_mask,
    window_mask,
)
from aprfmt.measure.softmax import log_softmax
from aprfmt.tensors.stats import Stats, compute_stats

if TYPE_CHECKING:
    from aprfmt.inference.weights import Weight

Array = Any  # the backend's own
Part = tuple["Weight", Array | None]  # a product's weight and bias
Numbers = NDArray[Any]  # numpy's
Style = Literal["half", "interleaved"]
NormCast = Literal["before_weight", "after_weight"]
RopeCast = Literal["table", "table_and_result", "result"]
SoftmaxCast = Literal["float32", "input", "none"]

# Rows of a block in deterministic mode; a row is always at its position modulo ROWS in a block.
ROWS = 64
# Query rows whose scores attention has in memory at a time, where it is made of its steps.
QUERY_BLOCK = 512
ITEM_SIZES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Heads:
    """How attention combines one layer's queries and keys.

    `mask` [tokens, keys] is True where a query may look; `scale` multiplies q.k; `softcap` c is
    tanh(x/c)*c on the scaled scores, before the mask; `sinks` [heads] are logits that join every
    softmax and are dropped from its result. `causal` is (cached, window) if the mask equals
    masks.causal_mask of these; None for any other mask. `device_mask` [tokens, keys], where it is
    not None, is on the device and takes the place of `mask`, which then has its shape only.
    """

    mask: Mask
    scale: float
    softcap: float | None
    sinks: Array | None
    cast: SoftmaxCast
    causal: Causal | None = None
    device_mask: Array | None = None


class Backend(Recurrent, Hosted, ABC):
    """One method for each operation of the forward pass; no graph, no autograd, no dispatcher.

    `device` is where the arrays really are (`cpu`, `cuda:0`), `dtype` the name of the arithmetic's
    dtype (float64, float32, bfloat16, float16), `itemsize` the bytes an element takes.
    `deterministic`: products run in blocks of ROWS rows, so that a row's bits depend on nothing
    else. Attention's sums over keys then run in blocks of `key_block` keys: moving a key by whole
    blocks moves no bit, and moving it by less may.
    """

    name: str  # key of BACKENDS
    query_block = QUERY_BLOCK
    key_block = ROWS

    def __init__(self, device: str, dtype: str, *, deterministic: bool = False) -> None:
        """Set the device, the dtype and its item size; the next row's position is 0."""
        self.device = device
        self.dtype = dtype
        self.itemsize = ITEM_SIZES[dtype]
        self.deterministic = deterministic
        self._origin = 0

    def facts(self) -> Mapping[str, Any]:
        """Return {name: value} of what a trace records of the backend.

        Here name, device, dtype and deterministic mode. Backends add versions, threads, and whether
        TF32 is on.
        """
        return {
            "backend": self.name,
            "device": self.device,
            "dtype": self.dtype,
            "deterministic": self.deterministic,
        }

    def set_position(self, position: int) -> None:
        """Set the position in the text of the first row of the following activations.

        Deterministic products need it: a row's number in its block of ROWS rows follows from it.
        """
        self._origin = position

    def to_layer_device(self, layer: int, n_layers: int, x: Array) -> Array:
        """Return x on the device of a layer; later results are placed there too. Here x itself."""
        return x

    def graphs(self) -> PassRecorder | None:
        """Return a recorder of one session's passes; None if the backend has none."""
        return None

    def pending(self) -> PendingStats | None:
        """Return an object that collects a trace's statistics; None if each is computed at once."""
        return None

    def budget(self) -> int | None:
        """Return how many bytes of weights the device may hold.

        None: the limit is a fraction of the host's free memory.
        """
        return None

    # in and out

    def host_row(self, x: Array, best: Any | None) -> Any:
        """Return logits [vocab] for a sampler: a numpy array, or an object that converts to one.

        `best` is the argmax on the device that a replayed pass has computed already, None without
        one. It is not used here.
        """
        return self.to_numpy(x)

    def place(self, weight: "Weight") -> Array | None:
        """Return a whole weight uploaded in its stored encoding.

        None if the backend keeps no encoded weights: the caller then decodes it and uploads the
        numbers.
        """
        return None

    @abstractmethod
    def array(self, x: Numbers) -> Array:
        """Return numpy floats placed on the device, rounded to the dtype."""

    def constant(self, x: Numbers) -> Array:
        """Return a small array on the device, rounded to the dtype, as `array` does.

        The array is the same in every pass of the model, so that a backend may upload it once and
        a recorded pass may read it.
        """
        return self.array(x)

    @abstractmethod
    def to_numpy(self, x: Array) -> Numbers:
        """Return an array as numpy on the host.

        float64 stays float64, every other float becomes float32, integers become int64.
        """

    def stats(self, x: Array) -> Stats:
        """Return x's mean, standard deviation, extremes and counts, as traces record them.

        `x` is an activation of this backend, or a numpy array (expert ids).
        """
        return compute_stats(self.to_numpy(x))

    @abstractmethod
    def zeros(self, shape: Sequence[int]) -> Array:
        """Return zeros of the dtype; callers write into slices of it."""

    def wide(self, x: Array) -> Array:
        """Return x in float32 if the dtype has 16 bits, else x itself."""
        return x

    def narrow(self, x: Array) -> Array:
        """Return a float32 x rounded to the dtype if that has 16 bits, else x itself."""
        return x

    def rounded(self, value: float) -> float:
        """Return the number rounded to the dtype."""
        import ml_dtypes

        kind = ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        return float(np.array(value, np.float64).astype(kind))

    # products

    def ids_with_rows(self, ids: Numbers, count: int) -> Numbers | Array:
        """Return token ids for a table of `count` rows: an id without a row there becomes 0.

        While a pass is recorded, a backend may do this on the device.
        """
        return np.where(ids < count, ids, 0)

    def embed(self, table: "Weight", ids: Numbers) -> Array:
        """Return rows `ids` of the embedding table [vocab, width]: [tokens, width].

        Only these rows are decoded, unless the table is on the device already.
        """
        placed = table.placed_for_lookup(self)
        if placed is not None:
            return self.take(placed, ids)
        return self.array(table.rows_of(np.asarray(ids, np.int64)))

    @abstractmethod
    def linear(self, x: Array, w: "Weight", bias: Array | None) -> Array:
        """Return x [tokens, in] times w [out, in] transposed, plus bias [out].

        `w` may be encoded: the backend decodes it or multiplies by the encoded bytes. With a bias
        the result may be rounded once instead of twice.
        """

    def router(self, x: Array, w: "Weight", bias: Array | None, *, rounded: bool) -> Array:
        """Return an expert router's logits [tokens, n_experts] for x.

        If not `rounded`, inputs and result are float32 (float64 if that is the dtype). This default
        is `linear` whatever `rounded` says, for backends whose dtype does not have 16 bits.
        """
        return self.linear(x, w, bias)

    def projections(self, x: Array, parts: Sequence[Part]) -> list[Array]:
        """Return `linear` of x and each (weight, bias) of `parts`, in order.

        A backend may compute them in one product.
        """
        return [self.linear(x, w, bias) for w, bias in parts]

    def add_linear(self, residual: Array, x: Array, w: "Weight", bias: Array | None) -> Array:
        """Return residual plus `linear` of x; the product is rounded, then the sum."""
        return self.add(residual, self.linear(x, w, bias))

    # element by element

    def add(self, a: Array, b: Array) -> Array:
        """Return a + b; b may be a vector."""
        return a + b

    def add_wide(self, a: Array, b: Array) -> Array:
        """Return a + b in float32 at least: a sum that is not rounded to 16 bits."""
        return self.wide(a) + self.wide(b)

    def mul(self, a: Array, b: Array) -> Array:
        """Return a * b, broadcasting."""
        return a * b

    def scale(self, x: Array, factor: float) -> Array:
        """Return x times `factor`, which is not rounded to the dtype; the product is."""
        return x * float(factor)

    def shift(self, x: Array, number: float) -> Array:
        """Return x plus a number, rounded once."""
        return x + float(number)

    def clip(self, x: Array, limit: float) -> Array:
        """Return x with its elements clamped to [-limit, limit]."""
        return x.clip(-limit, limit)

    @abstractmethod
    def softcap(self, x: Array, cap: float) -> Array:
        """Return tanh(x / cap) * cap, each step rounded."""

    @abstractmethod
    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Return act(x) for silu, gelu (erf), gelu_tanh, relu or relu2; else ArchError.

        With `steps` every operation inside gelu_tanh is rounded, not only its result.
        """

    @abstractmethod
    def sigmoid(self, x: Array) -> Array:
        """Return 1 / (1 + exp(-x))."""

    def tanh(self, x: Array) -> Array:
        """Return the hyperbolic tangent of each element."""
        return self.softcap(x, 1.0)

    def gaussian_topk(self, x: Array, factor: float) -> Array:
        """Return max(0, x - mean - factor * std) of each row, std over n; every step rounded.

        Of normally distributed values, those above `factor` standard deviations stay positive.
        """
        wide, count = self.wide(x), x.shape[-1]
        mean = (wide.sum(-1) / count)[:, None]
        apart = wide - mean
        std = self.narrow(((apart * apart).sum(-1) / count) ** 0.5)[:, None]
        edge = self.add(self.narrow(mean), self.scale(std, self.rounded(factor)))
        return self.narrow((self.wide(x) - self.wide(edge)).clip(0))

    def rescaled(self, x: Array, like: Array) -> Array:
        """Return x with each row scaled to the root mean square of the row of `like`.

        Every step is rounded. The mean square of x counts as 1e-5 at least.
        """
        target = self.narrow(self.wide(self._mean_square(like)) ** 0.5)
        own = self.narrow(self.wide(self._mean_square(x)).clip(1e-5) ** 0.5)
        return self.narrow(self.wide(self.mul(x, target)) / self.wide(own))

    def _mean_square(self, x: Array) -> Array:
        """Return the mean of each row's squares [tokens, 1], rounded to the dtype."""
        wide = self.wide(self.mul(x, x))
        return self.narrow(wide.sum(-1) / x.shape[-1])[:, None]

    def mix_copies(self, x: Array, coefs: Array) -> Array:
        """Return copies of x [tokens, n * width] mixed by coefs [tokens, n * n], rounded once.

        Copy i is the sum over j of copy j times coefficient i * n + j.
        """
        n = round(coefs.shape[-1] ** 0.5)
        width, wide, weights = x.shape[-1] // n, self.wide(x), self.wide(coefs)
        mixed = []
        for i in range(n):
            terms = (
                wide[:, j * width : (j + 1) * width] * weights[:, i * n + j : i * n + j + 1]
                for j in range(n)
            )
            mixed.append(self.narrow(sum(terms, start=next(terms))))
        return self.concat(mixed)

    def xielu_numbers(self, stored: Sequence["Weight"]) -> Sequence[Any]:
        """Return (positive, negative, beta, eps) for `xielu` from a layer's four stored weights.

        The first two are stored before a softplus; beta is added to the second.
        """
        raw = [float(weight.numpy().reshape(-1)[0]) for weight in stored]
        positive, negative = (max(a, 0.0) + math.log1p(math.exp(-abs(a))) for a in raw[:2])
        return positive, raw[2] + negative, raw[2], raw[3]

    def xielu(self, x: Array, positive: float, negative: float, beta: float, eps: float) -> Array:
        """Return beta*x, plus positive*x^2 above zero, negative*(expm1(min(x, eps)) - x) below.

        This default computes on the host in float32 (float64 if that is the dtype), rounded once.
        """
        wide = self.to_numpy(x)
        bent = negative * (np.expm1(np.minimum(wide, eps)) - wide)
        return self.array(np.where(wide > 0, positive * wide * wide, bent) + beta * wide)

    def swiglu_oai(self, gate: Array, up: Array, limit: float, alpha: float) -> Array:
        """Return (u + 1) * g * sigmoid(alpha * g), each step rounded.

        g is gate, at most limit; u is up, clamped to [-limit, limit].
        """
        gate, up = gate.clip(max=limit), up.clip(-limit, limit)
        return (up + 1) * (gate * self.sigmoid(gate * alpha))

    def clipped_gates(self, gate: Array, up: Array, limit: float) -> tuple[Array, Array]:
        """Return (gate, at most `limit`; up, clamped to [-limit, limit])."""
        return gate.clip(max=limit), up.clip(-limit, limit)

    def gated(self, x: Array, gate: Part, up: Part, kind: str, *, steps: bool) -> Array:
        """Return act(x @ gate) * (x @ up), every step rounded: a gated MLP before its down product.

        `gate` and `up` are (weight, bias), `kind` is the activation's name. With `steps` every
        operation inside gelu_tanh is rounded too.
        """
        act = self.activate(self.linear(x, *gate), kind, steps=steps)
        return self.mul(act, self.linear(x, *up))

    # norms

    @abstractmethod
    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis.

        Computed in float32 (float64 if that is the dtype). `before_weight`: rounded to the dtype,
        then multiplied; `after_weight`: multiplied, then rounded. `weight` broadcasts.
        """

    @abstractmethod
    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """Return (x - mean) / sqrt(var + eps) * weight + bias over the last axis, var over n."""

    # rotary positions

    @abstractmethod
    def rope_table(
        self, positions: Numbers, inv_freq: Numbers, *, factor: float, cast: RopeCast
    ) -> tuple[Array, Array]:
        """Return cos and sin [tokens, pairs] of the angles by which rope rotates, times factor.

        An angle is a position times `inv_freq` (float32). Computed in float32 (float64 if that is
        the dtype); rounded to the dtype unless `cast` is `result`.
        """

    def rope(self, x: Array, table: tuple[Array, Array], *, style: Style, cast: RopeCast) -> Array:
        """Return x [tokens, heads, head_dim] with the first elements of each head rotated.

        Two elements that rotate together are a pair. `table` is (cos, sin) [tokens, pairs], so 2 *
        pairs elements are rotated. Style `half` pairs element i with i + pairs, `interleaved` 2i
        with 2i + 1. The result is in the split-half layout either way; the elements after those are
        unchanged. `cast` says which of table and result are rounded.
        """
        cos, sin = (part[:, None, :] for part in table)  # (token, 1, pair)
        pairs = cos.shape[-1]
        rotated = x if cast == "table" else self.wide(x)
        if style == "half":
            first, second = rotated[..., :pairs], rotated[..., pairs : 2 * pairs]
        else:
            first, second = rotated[..., 0 : 2 * pairs : 2], rotated[..., 1 : 2 * pairs : 2]
        halves = (first * cos - second * sin, second * cos + first * sin)
        return self.concat([*(self.narrow(half) for half in halves), x[..., 2 * pairs :]])

    def ropes(
        self, xs: Sequence[Array], table: tuple[Array, Array], *, style: Style, cast: RopeCast
    ) -> list[Array]:
        """Return `rope` of each tensor of `xs`, in order; a backend may do it in one kernel."""
        return [self.rope(x, table, style=style, cast=cast) for x in xs]

    # attention

    def attention_mask(
        self, tokens: int, keys: int, cached: int, window: int | None, *, causal: bool
    ) -> Mask:
        """Return the mask [tokens, keys] of the keys that the last tokens may see.

        `cached` positions come before the tokens. `window` limits how far back a query sees, None
        not at all. Unless `causal`, a query sees later keys too, within the window.
        """
        if causal:
            return causal_mask(cached, tokens, keys, window)
        return window_mask(keys, window)

    def chunked_mask(self, tokens: int, keys: int, cached: int, chunk: int) -> Mask:
        """Return the mask [tokens, keys] of the keys that the last tokens may see.

        These are the earlier keys of the token's chunk of `chunk` positions.
        """
        return chunk_mask(cached, tokens, keys, chunk)

    def window_ends(self, tokens: int, windows: int, cached: int, rate: int) -> Mask:
        """Return the mask [tokens, windows] of the windows of `rate` positions that have ended.

        A query of compressed attention sees only keys that stand for such windows. `cached`
        positions come before the tokens.
        """
        return ended_windows_mask(cached, tokens, windows, rate)

    def join_masks(self, first: Mask, second: Mask, gap: int) -> Mask:
        """Return two masks as one [tokens, all keys]: the first's keys, hidden keys, the second's.

        `gap` is the number of hidden keys between them.
        """
        hidden = np.zeros((len(first), gap), np.bool_)
        joined: Mask = np.concatenate([first, hidden, second], axis=1)
        return joined

    def limit_keys(self, heads: Heads, chosen: Mask | Array) -> Heads:
        """Return `heads` whose queries look only where `chosen` [tokens, keys] is True too.

        `chosen` is what `chosen_keys` returns, or a numpy array.
        """
        return replace(heads, mask=heads.mask & chosen, causal=None)

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention of q over k and v: [tokens, heads, value_dim].

        It is the fused form of `scores`, `probs` and `mix`. q [tokens, heads, d], k and v [keys,
        kv_heads, d or value_dim]. Here `query_block` queries are computed at a time, which bounds
        the scores in memory.
        """
        origin, parts, start = self._origin, [], 0
        while start < len(q):
            stop = min(len(q), start + self.query_block - (origin + start) % self.query_block)
            seen = heads.causal and (heads.causal[0] + start, heads.causal[1])
            limits = heads.device_mask
            part = replace(
                heads,
                mask=heads.mask[start:stop],
                causal=seen,
                device_mask=None if limits is None else limits[start:stop],
            )
            self._origin = origin + start
            parts.append(self.attend(q[start:stop], k, v, part))
            start = stop
        self._origin = origin
        return parts[0] if len(parts) == 1 else self.stack(parts)

    def attend(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention of one block of queries: mix(probs(scores)).

        The result is [tokens, heads, value_dim].
        """
        return self.mix(self.probs(self.scores(q, k, heads), heads), v)

    @abstractmethod
    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Return q.k times the scale, after the softcap, before the mask: [heads, tokens, keys].

        q is [tokens, heads, d], k [keys, kv_heads, d].
        """

    @abstractmethod
    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return the masked softmax over keys [heads, tokens, keys], a sink's column dropped."""

    @abstractmethod
    def mix(self, probs: Array, v: Array) -> Array:
        """Return the values weighted by probs [heads, tokens, keys]: [tokens, heads, value_dim]."""

    def append(
        self, buffers: Sequence[Array], rows: Sequence[Array], start: int
    ) -> tuple[Array, ...]:
        """Write rows after the first `start` rows of cache buffers, and return the rows to read.

        `rows` are [tokens, kv_heads, d], mostly of k and v. Returned is a view of each buffer up to
        the last row written. A pass that is being recorded returns the whole buffers, whose invalid
        rows the mask hides.
        """
        stop = start + int(rows[0].shape[0])
        for buffer, x in zip(buffers, rows, strict=True):
            buffer[start:stop] = x
        return tuple(buffer[:stop] for buffer in buffers)

    # shapes and experts

    @abstractmethod
    def concat(self, parts: Sequence[Array]) -> Array:
        """Return the arrays joined along the last axis."""

    @abstractmethod
    def stack(self, parts: Sequence[Array]) -> Array:
        """Return the arrays joined along the first axis."""

    def repeat_heads(self, x: Array, n_heads: int) -> Array:
        """Return x [tokens, 1, d] with its one head repeated: [tokens, n_heads, d]."""
        return self.concat([x] * n_heads).reshape(len(x), n_heads, -1)

    def mean_rows(self, x: Array) -> Array:
        """Return the mean of the rows of x as [1, width].

        It is summed in float32 at least and rounded once.
        """
        return self.narrow(self.wide(x).sum(0) / len(x)).reshape(1, -1)

    @abstractmethod
    def take(self, x: Array, rows: Any) -> Array:
        """Return rows `rows` of x's first axis, in that order.

        `rows` are numpy integers, or the row numbers that `rows_by_expert` yields.
        """

    @abstractmethod
    def add_weighted(self, total: Array, rows: Any, y: Array, weights: Any) -> Array:
        """Add y [n, width] times weights [n] to n rows of total [tokens, width]; return total.

        `rows` are the numbers of these rows of total, which is changed in place. The product is
        computed in float32 at least and rounded once; the sum is rounded too.
        """

    # a loss

    def cross_entropy(self, logits: Array, labels: Numbers) -> Numbers | float:
        """Return the loss of each label [tokens] in nats; some backends return their mean.

        It is computed in the backend's arithmetic, unlike what `eval` prints, which is one float64
        function for all: `parity` asks whether a run's loss is that of its logits [tokens, vocab].
        """
        logs = log_softmax(self.to_numpy(logits))
        return np.asarray(-np.take_along_axis(logs, labels[:, None], -1)[:, 0])
