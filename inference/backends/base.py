"""The arithmetic that forward.py calls, as one protocol: every backend has the same operations.

Arrays are the backend's own (numpy or torch). Activations are [tokens, width] or
[tokens, heads, head_dim]; attention scores are [heads, tokens, keys]. No operation has a default
for eps, theta, scale, window, pairing or activation: the model gives all of these.

Rounding: an operation rounds its result to the backend's dtype once, unless its docstring says
otherwise; sums inside float16 and bfloat16 operations are float32. In float32 and float64
everything is computed in the dtype itself.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.tensors.stats import Stats

if TYPE_CHECKING:
    from aprfmt.inference.kv_cache import KVCache
    from aprfmt.inference.weights import Weight

Array = Any  # the backend's own
Numbers = NDArray[Any]  # numpy's
Mask = NDArray[np.bool_]
Style = Literal["half", "interleaved"]
NormCast = Literal["before_weight", "after_weight"]
RopeCast = Literal["table", "table_and_result", "result"]
SoftmaxCast = Literal["float32", "input"]

# Rows of a block in deterministic mode; a row is always at its position modulo ROWS in a block.
ROWS = 64
# Decoded bytes of one panel (some rows) of a weight that is not kept decoded.
PANEL_BYTES = 4 << 20


def panel_rows(columns: int) -> int:
    """Return how many rows of a weight are decoded at a time: a function of its width only."""
    rows = PANEL_BYTES // (4 * max(columns, 1))
    return max(ROWS, rows // ROWS * ROWS)


@dataclass(frozen=True)
class Heads:
    """How attention combines one layer's queries and keys.

    `mask` [tokens, keys] is True where a query may look; `scale` multiplies q.k; `softcap` c is
    tanh(x/c)*c on the scaled scores, before the mask; `sinks` [heads] are logits that join every
    softmax and are dropped from its result. `causal` is (cached, window) if the mask equals
    attention.causal_mask of these; None for any other mask.
    """

    mask: Mask
    scale: float
    softcap: float | None
    sinks: Array | None
    cast: SoftmaxCast
    causal: tuple[int, int | None] | None = None


class Slots(Protocol):
    """Statistics that are computed on a device asynchronously and read together."""

    def add(self, x: Array) -> None:
        """Enqueue the statistics of the next value."""
        ...

    def join(self) -> None:
        """Make work enqueued from now on wait for what is enqueued so far."""
        ...

    def read(self) -> list[Stats]:
        """Return the statistics of every value added, in order."""
        ...


class Graphs(Protocol):
    """One session's recorded passes."""

    best: Any | None  # for `host_row`: of the last pass, if it was replayed

    def run(
        self,
        run: Callable[[Numbers, Numbers], Array],
        ids: Numbers,
        cache: "KVCache | None",
        rows: Hashable,
        *,
        steps: bool,
    ) -> Array:
        """Return the logits of `run(ids, positions)`, by replaying a recorded pass if there is one.

        `rows` distinguishes passes that return different rows. `steps` says that a decoding step
        depends only on its token, its position and the cache.
        """
        ...


class Backend(Protocol):
    """One method for each operation of the forward pass; no graph, no autograd, no dispatcher."""

    @property
    def name(self) -> str:
        """Key of BACKENDS."""
        ...

    @property
    def device(self) -> str:
        """`cpu`, `cuda:0`: where the arrays really are."""
        ...

    @property
    def dtype(self) -> str:
        """Name of the arithmetic's dtype: float64, float32, bfloat16, float16."""
        ...

    @property
    def itemsize(self) -> int:
        """Bytes an element takes."""
        ...

    @property
    def deterministic(self) -> bool:
        """Products run in blocks of ROWS rows, so that a row's bits depend on its inputs only."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """Return what a trace records: versions, threads, whether TF32 is on."""
        ...

    def at(self, position: int) -> None:
        """Set the position of the first row of the following activations."""
        ...

    def at_layer(self, layer: int, n_layers: int, x: Array) -> Array:
        """Return x on the device of a layer; later results are placed there too."""
        ...

    def graphs(self) -> "Graphs | None":
        """Return a recorder of one session's passes; None if the backend has none."""
        ...

    def slots(self) -> "Slots | None":
        """Return Slots for one trace's statistics; None if each one is computed at once."""
        ...

    def budget(self) -> int | None:
        """Return how many bytes of weights the device may hold; None: a share of the host's."""
        ...

    # in and out

    def host_row(self, x: Array, best: Any | None) -> Any:
        """Return logits [vocab] for a sampler: a numpy array, or an object that converts to one.

        `best` is Graphs.best of this pass.
        """
        ...

    def place(self, weight: "Weight") -> Array | None:
        """Return a whole weight, uploaded as stored; None: decode it and use `array`."""
        ...

    def array(self, x: Numbers) -> Array:
        """Place floating-point numbers on the device, rounded to the dtype."""
        ...

    def to_numpy(self, x: Array) -> Numbers:
        """Return float64 as float64, every other float as float32, integers as int64."""
        ...

    def stats(self, x: Array) -> Stats:
        """Return the statistics of an activation, or of a numpy array (expert ids)."""
        ...

    def zeros(self, shape: Sequence[int]) -> Array:
        """Return zeros of the dtype; callers write into slices of it."""
        ...

    def rounded(self, value: float) -> float:
        """Return the number rounded to the dtype."""
        ...

    # products

    def embed(self, table: "Weight", ids: Numbers) -> Array:
        """Return rows `ids` of [vocab, width]: [tokens, width]."""
        ...

    def linear(self, x: Array, w: "Weight", bias: Array | None) -> Array:
        """Return x [tokens, in] times w [out, in] transposed, plus bias [out].

        `w` may be encoded: the backend decodes it or multiplies by the encoded bytes. With a bias
        the result may be rounded once instead of twice.
        """
        ...

    def router(self, x: Array, w: "Weight", bias: Array | None, *, rounded: bool) -> Array:
        """Return an expert router's logits [tokens, n_experts].

        Not `rounded`: inputs and result in float32 (float64 if that is the dtype).
        """
        ...

    def projections(self, x: Array, parts: "Sequence[tuple[Weight, Array | None]]") -> list[Array]:
        """Return `linear` of x and each (weight, bias); a backend may do it in one product."""
        ...

    def add_linear(self, residual: Array, x: Array, w: "Weight", bias: Array | None) -> Array:
        """Return residual plus `linear` of x; the product is rounded, then the sum."""
        ...

    # element by element

    def add(self, a: Array, b: Array) -> Array:
        """Return a + b; b may be a vector."""
        ...

    def mul(self, a: Array, b: Array) -> Array:
        """Return a * b, broadcasting."""
        ...

    def scale(self, x: Array, factor: float) -> Array:
        """Return x times a number that is not itself rounded to the dtype."""
        ...

    def softcap(self, x: Array, cap: float) -> Array:
        """Return tanh(x / cap) * cap, each step rounded."""
        ...

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Return act(x) for silu, gelu (erf), gelu_tanh or relu; ArchError for another name.

        With `steps` every operation inside gelu_tanh is rounded, not only its result.
        """
        ...

    def sigmoid(self, x: Array) -> Array:
        """Return 1 / (1 + exp(-x))."""
        ...

    def swiglu_oai(self, gate: Array, up: Array, limit: float, alpha: float) -> Array:
        """Return (u + 1) * g * sigmoid(alpha * g), each step rounded.

        g is gate, at most limit; u is up, clamped to [-limit, limit].
        """
        ...

    def gated(
        self,
        x: Array,
        gate: "tuple[Weight, Array | None]",
        up: "tuple[Weight, Array | None]",
        kind: str,
        *,
        steps: bool,
    ) -> Array:
        """Return act(linear(x, gate)) times linear(x, up), every step rounded."""
        ...

    # norms

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return x / sqrt(mean(x^2) + eps) * (weight + offset) over the last axis.

        Computed in float32 (float64 if that is the dtype). `before_weight`: rounded to the dtype,
        then multiplied; `after_weight`: multiplied, then rounded. `weight` broadcasts.
        """
        ...

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """Return (x - mean) / sqrt(var + eps) * weight + bias over the last axis, var over n."""
        ...

    # rotary positions

    def rope_table(
        self, positions: Numbers, inv_freq: Numbers, *, factor: float, cast: RopeCast
    ) -> tuple[Array, Array]:
        """Return cos and sin [tokens, pairs] of position times inv_freq (float32), times factor.

        Computed in float32 (float64 if that is the dtype); rounded to the dtype unless `cast` is
        `result`.
        """
        ...

    def rope(self, x: Array, table: tuple[Array, Array], *, style: Style, cast: RopeCast) -> Array:
        """Rotate the first 2 * pairs elements of every head of x [tokens, heads, head_dim].

        `half` pairs element i with i + pairs, `interleaved` 2i with 2i + 1. The result is in the
        split-half layout either way; elements after the rotated part are unchanged.
        """
        ...

    def ropes(
        self, xs: Sequence[Array], table: tuple[Array, Array], *, style: Style, cast: RopeCast
    ) -> list[Array]:
        """Return `rope` of each tensor; a backend may do it in one kernel."""
        ...

    # attention

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return the fused form of `scores`, `probs` and `mix`: [tokens, heads, value_dim].

        q [tokens, heads, d], k and v [keys, kv_heads, d or value_dim].
        """
        ...

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Return q.k times the scale, after the softcap, before the mask: [heads, tokens, keys]."""
        ...

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return the masked softmax over the keys, a sink's column dropped."""
        ...

    def mix(self, probs: Array, v: Array) -> Array:
        """Return the values weighted by probs [heads, tokens, keys]: [tokens, heads, value_dim]."""
        ...

    def append(
        self, buffers: tuple[Array, Array], k: Array, v: Array, start: int
    ) -> tuple[Array, Array]:
        """Write k and v [tokens, kv_heads, d] to rows `start` on of a cache's two buffers.

        Returns the rows that attention reads: up to the last one written; in a pass that is being
        recorded, the whole buffers, whose invalid rows the mask hides.
        """
        ...

    # shapes and experts

    def concat(self, parts: Sequence[Array]) -> Array:
        """Join along the last axis."""
        ...

    def stack(self, parts: Sequence[Array]) -> Array:
        """Join along the first axis."""
        ...

    def repeat_heads(self, x: Array, n_heads: int) -> Array:
        """Return [tokens, n_heads, d] from [tokens, 1, d]."""
        ...

    def take(self, x: Array, rows: Numbers) -> Array:
        """Return the rows of the first axis, in that order."""
        ...

    def add_weighted(self, total: Array, rows: Numbers, y: Array, weights: Numbers) -> Array:
        """Add y [n, width] times weights [n] to `rows` of total [tokens, width], in place.

        The product is computed in float32 at least and rounded once; the sum is rounded too.
        """
        ...
