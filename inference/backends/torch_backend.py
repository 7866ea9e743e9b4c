"""torch in float32, float64, bfloat16 or float16, on the CPU or a CUDA device.

In bfloat16 and float16, values are rounded at the same places as in transformers' model code;
base.py states them for every operation.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from aprfmt.errors import ArchError, BackendUnavailableError
from aprfmt.inference.backends.base import Array, Heads, NormCast, Numbers, RopeCast
from aprfmt.inference.backends.hosted import ExpertRows, group_by_expert
from aprfmt.inference.backends.torch_device import torch_devices
from aprfmt.inference.backends.torch_recurrent import TorchRecurrent
from aprfmt.inference.weights import Weight

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
}


def _gelu_tanh_steps(x: Array) -> Array:
    """Return gelu with the tanh formula, every operation rounded to x's dtype."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


# Activations in single operations, each of them rounded.
STEPS: Mapping[str, Callable[[Array], Array]] = {"gelu_tanh": _gelu_tanh_steps}


class TorchBackend(TorchRecurrent):
    """The torch backend on the CPU, and the base class of torch_cuda.py.

    `tf32` allows TF32 in float32 products of a GPU.
    """

    name = "torch"

    def __init__(
        self,
        device: str,
        dtype: str,
        *,
        deterministic: bool = False,
        threads: int | None = None,
        tf32: bool = False,
    ) -> None:
        """Open a torch device in a dtype; BackendUnavailableError if either is not there.

        `threads` sets torch's threads for the whole process, None leaves them.
        """
        if dtype not in DTYPES:
            raise BackendUnavailableError(
                f"backend torch: found dtype {dtype!r}; expected one of {', '.join(DTYPES)}"
            )
        self._device = torch_devices(device)[0]
        super().__init__(str(self._device), dtype, deterministic=deterministic)
        self._type = DTYPES[dtype]
        self._wide = torch.float64 if dtype == "float64" else torch.float32
        self._tf32 = tf32
        if threads is not None:
            torch.set_num_threads(threads)

    def facts(self) -> Mapping[str, Any]:
        """Return {name: value} of what a trace records: versions, threads, TF32, and the base's."""
        return {
            **super().facts(),
            "device_name": "cpu",
            "threads": torch.get_num_threads(),
            "tf32": self._tf32,
            "versions": {"torch": torch.__version__, "numpy": np.__version__},
        }

    def set_position(self, position: int) -> None:
        """Set the position in the text of the first of the rows that are computed next.

        torch's matmul precision holds for the whole process, so it is set again for this backend.
        """
        super().set_position(position)
        wanted = "high" if self._tf32 else "highest"
        if torch.get_float32_matmul_precision() != wanted:
            torch.set_float32_matmul_precision(wanted)

    # in and out

    def array(self, x: Numbers) -> Array:
        """Return numbers as a tensor on the device, rounded to the dtype."""
        values = x if x.flags.writeable else np.array(x)  # torch warns about read-only memory
        return torch.from_numpy(values).to(self._device, self._type)

    def to_numpy(self, x: Array) -> Numbers:
        """Return a numpy array on the host, 16-bit floats as float32.

        A numpy array is returned unchanged.
        """
        if isinstance(x, np.ndarray):
            return x
        if x.is_floating_point() and x.dtype != torch.float64:
            x = x.float()
        values: Numbers = x.cpu().numpy()
        return values

    def zeros(self, shape: Sequence[int]) -> Array:
        """Return zeros of the dtype on the device."""
        return torch.zeros(tuple(shape), dtype=self._type, device=self._device)

    def rounded(self, value: float) -> float:
        """Return the number rounded to the dtype."""
        return float(torch.tensor(value, dtype=torch.float64).to(self._type))

    def wide(self, x: Array) -> Array:
        """Return x in float32 (float64 if that is the dtype)."""
        return x.to(self._wide)

    def narrow(self, x: Array) -> Array:
        """Return x rounded to the dtype."""
        return x.to(self._type)

    def exp(self, x: Array) -> Array:
        """Return the exponential of each element."""
        return torch.exp(x)

    def _rowwise(self, function: Callable[..., Array], *xs: Array) -> Array:
        """Return function(*xs) of a row-wise function.

        In deterministic mode it is called block by block.
        """
        return self.by_block(function, *xs) if self.deterministic else function(*xs)

    def _index(self, x: Numbers | Array) -> Array:
        """Return row numbers as an int64 tensor on the device; a tensor is returned unchanged."""
        if isinstance(x, torch.Tensor):
            return x
        return torch.from_numpy(np.ascontiguousarray(x, np.int64)).to(self._device)

    # products

    def dense(self, x: Array, rows: Array, bias: Array | None) -> Array:
        """Return x [tokens, in] times rows [out, in] transposed, plus bias [out]; rounded once."""
        return functional.linear(x, rows, bias)

    def router(self, x: Array, w: Weight, bias: Array | None, *, rounded: bool) -> Array:
        """Return a router's logits [tokens, n_experts].

        They are in the dtype if `rounded` or in deterministic mode, else in float32 at least.
        """
        if rounded or self.deterministic:
            return self.linear(x, w, bias)
        weight = self.wide(w.array(self)).reshape(w.n_rows, w.n_columns)
        return functional.linear(self.wide(x), weight, None if bias is None else self.wide(bias))

    # element by element

    def softcap(self, x: Array, cap: float) -> Array:
        """Return tanh(x / cap) * cap."""
        return self._rowwise(lambda rows: _softcap(rows, cap), x)

    def activate(self, x: Array, kind: str, *, steps: bool) -> Array:
        """Return act(x) by a function of ACTIVATIONS, or of STEPS with `steps`; else ArchError."""
        if kind not in ACTIVATIONS:
            raise ArchError(f"activation {kind!r}; expected one of {', '.join(ACTIVATIONS)}")
        return self._rowwise((steps and STEPS.get(kind)) or ACTIVATIONS[kind], x)

    def xielu(self, x: Array, positive: float, negative: float, beta: float, eps: float) -> Array:
        """Return xIELU of x in the dtype, every number and step rounded, as transformers does."""
        up, soft, slope, low = x.new_tensor([positive, negative - beta, beta, eps]).unbind()
        bent = (torch.expm1(torch.minimum(x, low)) - x) * (slope + soft) + slope * x
        return torch.where(x > 0, up * x * x + slope * x, bent)

    def sigmoid(self, x: Array) -> Array:
        """Return 1 / (1 + exp(-x))."""
        return self._rowwise(torch.sigmoid, x)

    # norms

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return x normalised in float32 by its root mean square, times weight + offset.

        `cast` says whether it is rounded to the dtype before or after the weight.
        """

        def norm(x: Array) -> Array:
            """Return the RMS norm of some rows of x, float32 inside, in the dtype of x."""
            wide = self.wide(x)
            y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
            if cast == "before_weight":
                return (weight + offset if offset else weight) * self.narrow(y)
            return self.narrow(y * (offset + self.wide(weight)))

        return self._rowwise(norm, x)

    def layer_norm(self, x: Array, weight: Array, bias: Array | None, *, eps: float) -> Array:
        """Return x normalised, weighted and shifted in float32, rounded last.

        With a bias it uses torch's function, as the models with biases do, for equal bits.
        """
        if bias is not None and weight.ndim == 1:
            width = (weight.shape[0],)
            return self._rowwise(
                lambda rows: functional.layer_norm(rows, width, weight, bias, eps), x
            )

        def norm(x: Array) -> Array:
            """Return the layer norm of some rows of x, step by step in float32, rounded last."""
            wide = self.wide(x)
            wide = wide - wide.mean(-1, keepdim=True)
            y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * self.wide(weight)
            return self.narrow(y if bias is None else y + self.wide(bias))

        return self._rowwise(norm, x)

    # rotary positions

    def rope_table(
        self, positions: Numbers, inv_freq: Numbers, *, factor: float, cast: RopeCast
    ) -> tuple[Array, Array]:
        """Return cos and sin [tokens, pairs] of float32 angles (float64 if that is the dtype).

        Both are multiplied by `factor`, and rounded to the dtype unless `cast` is `result`.
        """
        places = self._index(positions).to(self._wide)[:, None]
        angles = places * torch.from_numpy(inv_freq).to(self._device, self._wide)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return (cos, sin) if cast == "result" else (self.narrow(cos), self.narrow(sin))

    # attention

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention [tokens, heads, value_dim] of q over k and v.

        torch's fused function computes it where there is no softcap, no sink and no deterministic
        mode; otherwise blocks of queries do.
        """
        if heads.softcap is None and heads.sinks is None and not self.deterministic:
            q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k, v))  # (1, head, token, d)
            mixed = functional.scaled_dot_product_attention(
                q, k, v, self._mask(heads), scale=heads.scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            return mixed[0].swapaxes(0, 1)
        return super().attention(q, k, v, heads)

    def _mask(self, heads: Heads) -> Array:
        """Return the attention mask [tokens, keys] as a tensor on the device."""
        return torch.from_numpy(heads.mask).to(self._device)

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Return q.k [heads, tokens, keys], scaled and soft-capped.

        Each head's queries are multiplied with its group's keys.
        """

        def finish(product: Array) -> Array:
            """Return a product q.k multiplied by the heads' scale, then soft-capped."""
            scaled = product * heads.scale
            return scaled if heads.softcap is None else _softcap(scaled, heads.softcap)

        if self.deterministic:
            return self.tiled_scores(q, k, finish)
        (tokens, n_heads, d), (keys, kv_heads, _) = q.shape, k.shape
        grouped = q.swapaxes(0, 1).reshape(kv_heads, -1, d)  # (kv_head, group * token, d)
        return finish((grouped @ k.permute(1, 2, 0)).reshape(n_heads, tokens, keys))

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return the softmax over visible keys [heads, tokens, keys].

        Sinks join the softmax and are dropped from the result.
        """
        x = scores.masked_fill(~self._mask(heads), -torch.inf)
        sinks = None if heads.sinks is None else heads.sinks[:, None, None].expand(*x.shape[:2], 1)
        if heads.cast == "input":
            highest = x.amax(-1, keepdim=True)
            highest = highest if sinks is None else torch.maximum(highest, sinks)
            x, sinks = x - highest, None if sinks is None else sinks - highest
        joined = x if sinks is None else torch.cat([x, sinks], dim=-1)
        if heads.cast != "none" or self.deterministic:
            joined = self.wide(joined)
        if self.deterministic:
            highest = joined.amax(-1, keepdim=True)
            return self.tiled_softmax(
                joined[..., : x.shape[-1]], highest, None if sinks is None else joined[..., -1:]
            )
        return self.narrow(torch.softmax(joined, -1))[..., : x.shape[-1]]

    def mix(self, probs: Array, v: Array) -> Array:
        """Return each head's values weighted by probs: [tokens, heads, d]."""
        if self.deterministic:
            return self.tiled_mix(probs, v)
        (n_heads, tokens, keys), (_, kv_heads, d) = probs.shape, v.shape
        grouped = probs.reshape(kv_heads, -1, keys)  # (kv_head, group * token, key)
        mixed = (grouped @ v.swapaxes(0, 1)).reshape(n_heads, tokens, d)
        return mixed.swapaxes(0, 1).contiguous()

    # shapes and experts

    def concat(self, parts: Sequence[Array]) -> Array:
        """Return the tensors joined along the last axis."""
        return torch.cat(tuple(parts), dim=-1)

    def stack(self, parts: Sequence[Array]) -> Array:
        """Return the tensors joined along the first axis."""
        return torch.cat(tuple(parts))

    def repeat_heads(self, x: Array, n_heads: int) -> Array:
        """Return a view [tokens, n_heads, d] of the one head of x [tokens, 1, d]."""
        return x.expand(-1, n_heads, -1)

    def take(self, x: Array, rows: Numbers | Array) -> Array:
        """Return a copy of rows `rows` of x, in that order."""
        return x[self._index(rows)]

    def rows_by_expert(self, experts: Numbers, weights: Numbers) -> Iterable[ExpertRows]:
        """Return [(expert, its rows, their weights)] of the chosen experts, on the device.

        Rows and weights are slices of two tensors. Deterministic mode uses the base class's.
        """
        if self.deterministic:
            return super().rows_by_expert(experts, weights)
        order, chosen, counts = group_by_expert(experts)
        rows = self._index(order // experts.shape[1])
        factors = torch.from_numpy(weights.reshape(-1)[order]).to(self._device, self._wide)
        parts = (each.split(counts.tolist()) for each in (rows, factors))
        return list(zip(chosen.tolist(), *parts, strict=True))

    def combine(self, y: Array, places: Array, weights: Array | None) -> Array:
        """Return each token's weighted sum of its experts' outputs [tokens, width].

        These are the rows `places` [tokens, used] of y. All products are computed and rounded
        first, then added expert by expert in the order of `places`. `weights` None: the rows are
        added unweighted.
        """
        rows = y[places.T.contiguous()]  # (used, tokens, width)
        if weights is not None:
            rows = self.narrow(rows * weights.T[:, :, None])
        total, *others = rows.unbind()
        for each in others:
            total = total + each
        return total

    def column(self, weights: Numbers | Array) -> Array:
        """Return an expert's weights [n] as [n, 1], rounded to the dtype."""
        if isinstance(weights, np.ndarray):
            return super().column(weights)
        return self.narrow(weights[:, None])

    def add_rows(self, total: Array, rows: Numbers | Array, y: Array) -> Array:
        """Add y [n, width] to the n rows of total that `rows` numbers, in place; return total.

        No row may occur twice.
        """
        return total.index_add_(0, self._index(rows), y)

    def add_weighted(
        self, total: Array, rows: Numbers | Array, y: Array, weights: Numbers | Array
    ) -> Array:
        """Add y [n, width] times weights [n] to n rows of total in place; return total.

        `rows` are the numbers of these rows of total, each at most once.
        """
        factors = torch.as_tensor(weights).to(self._device, self._wide)
        return total.index_add_(0, self._index(rows), self.narrow(y * factors[:, None]))

    def cross_entropy(self, logits: Array, labels: Numbers) -> Numbers:
        """Return torch's fused loss of every label in the backend's dtype, on its device.

        torch's own mean on a CPU adds 16-bit losses in 16 bits: float16 overflows at 65,504 nats.
        """
        wanted = torch.as_tensor(labels, device=logits.device)
        found = functional.cross_entropy(logits, wanted, reduction="none")
        return np.asarray(found.double().cpu().numpy())


def _softcap(x: Array, cap: float) -> Array:
    """Return tanh(x / cap) * cap."""
    return torch.tanh(x / cap) * cap
