"""torch on CUDA devices: fused kernels, encoded weights, recorded passes, layers over several GPUs.

Rounding is that of torch_backend.py; sums run in another order. Without cupy there are no kernels:
torch's own operations are used, weights are decoded on the CPU, and `facts` says so.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from aprfmt.inference.backends.base import Array, Heads, NormCast, Numbers, RopeCast, Style
from aprfmt.inference.backends.torch_device import torch_devices
from aprfmt.inference.cuda_driver import cupy_problem, driver_version
from aprfmt.inference.fast.cuda import layers
from aprfmt.inference.fast.device_row import DeviceRow
from aprfmt.inference.fast.gpu_encodings import MEMORY_SHARE
from aprfmt.inference.fast.graphs import PassGraphs, PassInputs
from aprfmt.inference.fast.torch_graphs import TorchGraphMaker
from aprfmt.inference.fast.torch_pass_statistics import TorchPending
from aprfmt.inference.fast.torch_products import TorchProducts
from aprfmt.inference.fast.torch_weights import HALVES, Uploader, current_stream
from aprfmt.inference.masks import Causal, Mask
from aprfmt.tensors.stats import Stats, compute_stats

# Products of an indexer's queries and keys that are in memory at the same time.
MOST_PRODUCTS = 1 << 26


def kernels_problem() -> str:
    """Return why cupy's kernels cannot be used here; "" if they can."""
    try:
        import cupy
    except ImportError as error:
        return cupy_problem() or f"cupy cannot be imported: {error}"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "cupy sees no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return cupy_problem() or f"cupy cannot use the GPU: {error}"


class CudaBackend(TorchProducts):
    """The torch backend on one GPU, or with layers spread over all GPUs in order (`cuda:all`)."""

    def __init__(self, device: str, dtype: str, **options: Any) -> None:
        """Open the devices of a name in a dtype, and set torch's process-wide options for them.

        16-bit products then sum in float32. `problem` says why kernels cannot be used, "" if they
        can.
        """
        super().__init__(device, dtype, **options)
        self._devices = torch_devices(device)
        if len(self._devices) > 1:
            self.device = "cuda:all"
        torch.cuda.set_device(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.problem = kernels_problem()
        self._decodes = not self.problem
        self._fused = self._decodes and dtype in layers.TYPES and not self.deterministic
        self.recording: PassInputs | None = None
        self._masks: dict[Hashable, torch.Tensor] = {}
        self._constants: dict[Hashable, torch.Tensor] = {}
        self._scratch: dict[torch.device, list[torch.Tensor]] = {}
        self._uploaders: dict[torch.device, Uploader] = {}

    def facts(self) -> Mapping[str, Any]:
        """Return {name: value} of what a trace records: versions, TF32, GPUs, peak memory."""
        names = [torch.cuda.get_device_name(device) for device in self._devices]
        peaks = [torch.cuda.max_memory_allocated(device) for device in self._devices]
        versions = dict(super().facts()["versions"]) | {"cuda": torch.version.cuda}
        if not self.problem:
            import cupy

            versions["cupy"] = cupy.__version__
        return dict(super().facts()) | {
            "device_name": names[0],
            "device_names": names,
            "driver": driver_version(),
            "memory_peak_bytes": sum(peaks),
            "kernels": "cupy"
            if self._decodes
            else f"none: {self.problem}; weights are decoded on the CPU and held in the dtype",
            "versions": versions,
        }

    def set_position(self, position: int) -> None:
        """Set the position of the next rows, the matmul precision and the current device."""
        super().set_position(position)
        if len(self._devices) == 1 and torch.cuda.current_device() != self._device.index:
            torch.cuda.set_device(self._device)

    def to_layer_device(self, layer: int, n_layers: int, x: Array) -> Array:
        """Return x on the layer's GPU; the first layers are on the first GPU."""
        if len(self._devices) == 1:
            return x
        self._set_device(self._devices[layer * len(self._devices) // n_layers])
        return x.to(self._device)

    def _set_device(self, device: torch.device) -> None:
        """Make a device the current one, of this backend and of torch; it returns nothing."""
        self._device = device
        torch.cuda.set_device(device)

    def budget(self) -> int:
        """Return how many bytes of weights may be held: a fraction of the devices' free memory."""
        return int(sum(torch.cuda.mem_get_info(d)[0] for d in self._devices) * MEMORY_SHARE)

    def graphs(self) -> PassGraphs | None:
        """Return a recorder of passes; None on several devices or in deterministic mode."""
        if self.deterministic or len(self._devices) > 1:
            return None
        return PassGraphs(self, TorchGraphMaker(self._device, self.prepare))

    def prepare(self) -> None:
        """Load every kernel that a recorded pass may launch."""
        if self._fused:
            layers.load_kernels(self.dtype)

    # in and out

    def array(self, x: Numbers) -> Array:
        """Return numbers as a tensor on the device, rounded to the dtype.

        Raises NotRecordable while a pass is recorded.
        """
        self._refuse_in_recording("numbers are brought to the device")
        return super().array(x)

    def constant(self, x: Numbers) -> Array:
        """Return a small array on the device, rounded to the dtype; equal ones are placed once."""
        return self._constant(x, self._type)

    def to_numpy(self, x: Array) -> Numbers:
        """Return a numpy array on the host; a numpy array is returned unchanged.

        Raises NotRecordable while a pass is recorded.
        """
        self._refuse_in_recording("the host reads a value")
        return super().to_numpy(x)

    def stats(self, x: Array) -> Stats:
        """Return the statistics of x, computed on the device in one pass; waits for the result."""
        pending = None if isinstance(x, np.ndarray) else self.pending()
        if pending is None:
            return compute_stats(self.to_numpy(x))
        pending.add(x)
        return pending.read()[0]

    def pending(self) -> TorchPending | None:
        """Return an object that collects a trace's statistics.

        None without kernels, or on several GPUs: each is then computed at once.
        """
        return TorchPending(self._device) if self._decodes and len(self._devices) == 1 else None

    def best(self, row: torch.Tensor) -> torch.Tensor:
        """Return int64 [argmax, 1 if that logit is NaN else 0] of logits [vocab], on the device."""
        place = row.argmax().view(1)  # argmax treats a NaN as the highest
        return torch.cat((place, row[place].isnan().to(torch.int64)))

    def host_row(self, x: Array, best: Any | None) -> Any:
        """Return logits whose argmax is computed on the device, copied only if more is needed.

        `best` is the result of the method `best` that a replayed pass has copied to the host
        already, or None.
        """
        found = self.best(x) if best is None else best

        def wait_for_best() -> Sequence[int]:
            """Return [argmax of the logits, whether a logit is NaN] on the host.

            It waits until the device has computed them.
            """
            if best is not None:  # a replay copies it to the host
                torch.cuda.current_stream().synchronize()
            numbers: list[int] = found.tolist()
            return numbers

        return DeviceRow(self, x, wait_for_best)

    def _index(self, x: Numbers | Array) -> Array:
        """Return row numbers as an int64 tensor on the device.

        In a pass being recorded they must be one of its inputs; NotRecordable is raised otherwise.
        """
        if self.recording is not None and isinstance(x, np.ndarray):
            return self.recording.find_rows(x)
        return super()._index(x)

    def ids_with_rows(self, ids: Numbers, count: int) -> Numbers | Array:
        """Return token ids to `embed` with a table of `count` rows: 0 for an id that has none."""
        if self.recording is None:
            return super().ids_with_rows(ids, count)
        rows = self._index(ids)
        return rows * (rows < count)

    def _constant(self, x: Numbers, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a small array on the device, in float32 at least if `dtype` is None.

        Equal arrays are placed once. Raises NotRecordable for a new one while a pass is recorded.
        """
        wanted = self._wide if dtype is None else dtype
        key = (self._device, wanted, x.tobytes())
        if key not in self._constants:
            self._refuse_in_recording("a constant is new")
            self._constants[key] = torch.from_numpy(x.copy()).to(self._device, wanted)
        return self._constants[key]

    def alibi_bias(self, slopes: Numbers, start: int, queries: int, keys: int) -> Array:
        """Return ALiBi's slope times (key - query) [heads, queries, keys], rounded once.

        The first query is at position `start`. Multiplied in float64 on the device; a recorded step
        reads the position there.
        """
        cached = None if self.recording is None else self.recording.cached
        places = torch.arange(max(queries, keys), device=self._device)
        away = places[:keys] - (places[:queries, None] + (start if cached is None else cached))
        exact = self._constant(slopes, torch.float64)[:, None, None]
        return (exact * away).to(self._type)

    # norms and rotary positions

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return x normalised in float32 by its root mean square, by one kernel if it fits.

        The kernel reads x in the run's dtype: a float32 x of a 16-bit run is normed by torch.
        """
        if (
            not self._fused
            or x.dtype != self._type
            or weight.ndim != 1
            or len(weight) != x.shape[-1]
        ):
            return super().rms_norm(x, weight, eps=eps, offset=offset, cast=cast)
        x, weight = x.contiguous(), weight.to(x.device)
        y = torch.empty_like(x)
        layers.rms_norm(
            x,
            weight,
            y,
            dtype=self.dtype,
            eps=eps,
            offset=offset,
            before=cast == "before_weight",
            stream=current_stream(),
        )
        return y

    def rope_table(
        self, positions: Numbers, inv_freq: Numbers, *, factor: float, cast: RopeCast
    ) -> tuple[Array, Array]:
        """Return cos and sin [tokens, pairs] of float32 angles (float64 if that is the dtype).

        Both are multiplied by `factor`, and rounded to the dtype unless `cast` is `result`.
        """
        angles = self._index(positions).to(self._wide)[:, None] * self._constant(inv_freq)
        cos, sin = angles.cos(), angles.sin()
        if factor != 1:
            cos, sin = cos * factor, sin * factor
        return (cos, sin) if cast == "result" else (self.narrow(cos), self.narrow(sin))

    def rope(self, x: Array, table: tuple[Array, Array], *, style: Style, cast: RopeCast) -> Array:
        """Return x with the first elements of each head rotated; these come out in split halves."""
        return self.ropes([x], table, style=style, cast=cast)[0]

    def ropes(
        self, xs: Sequence[Array], table: tuple[Array, Array], *, style: Style, cast: RopeCast
    ) -> list[Array]:
        """Return each tensor of `xs` with its pairs of elements rotated by `table`, (cos, sin).

        One or two tensors are rotated by one kernel.
        """
        table = (table[0].to(xs[0].device), table[1].to(xs[0].device))
        dims = {x.shape[-1] for x in xs}
        lined = all(x.stride(2) == 1 and x.stride(1) == x.shape[2] for x in xs)
        if not (self._fused and lined and len(xs) <= 2 and len(dims) == 1):
            return [super(CudaBackend, self).rope(x, table, style=style, cast=cast) for x in xs]
        outs = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in xs]
        other = len(xs) == 2
        layers.rope(
            xs[0],
            outs[0],
            xs[1] if other else None,
            outs[1] if other else None,
            table,
            dtype=self.dtype,
            float32_table=table[0].dtype != self._type,
            interleaved=style == "interleaved",
            stepped=cast == "table",
            stream=current_stream(),
        )
        return outs

    # attention

    def append(
        self, buffers: Sequence[Array], rows: Sequence[Array], start: int
    ) -> tuple[Array, ...]:
        """Write rows after the first `start` rows of each buffer, and return the rows to read.

        A recorded step reads the position on the device and returns the whole buffers.
        """
        cached = None if self.recording is None else self.recording.cached
        if cached is None:
            return super().append(buffers, rows, start)
        if self._fused and len(rows) == 2:
            (k, v), (keys, values) = (x.contiguous() for x in rows), buffers
            layers.append(k, v, keys, values, cached, dtype=self.dtype, stream=current_stream())
        else:
            for buffer, x in zip(buffers, rows, strict=True):
                buffer.index_copy_(0, cached.view(1), x)
        return tuple(buffers)

    def _mask(self, heads: Heads) -> Array:
        """Return the mask [tokens, keys] on the device.

        A causal one is computed there, once per pass and kind. Others are copied, if they are not
        on the device; in a recorded pass they must have been copied before the recording began.
        """
        if heads.device_mask is not None:
            return heads.device_mask
        if heads.causal is None:
            brought = super()._mask
            if self.recording is None:
                return brought(heads)
            return self.recording.constant_array(heads.mask, lambda: brought(heads))
        (cached, window), (tokens, keys) = heads.causal, heads.mask.shape
        recorded = self.recording
        begin: Any = cached if recorded is None or recorded.cached is None else recorded.cached
        masks = self._masks if recorded is None else recorded.masks
        key = (self._device, cached, window, tokens, keys)
        if key not in masks:
            if len(masks) >= 8:
                masks.clear()
            query = torch.arange(tokens, device=self._device)[:, None] + begin
            places = torch.arange(keys, device=self._device)
            seen = places <= query
            masks[key] = seen if window is None else seen & (places > query - window)
        return masks[key]

    def limit_keys(self, heads: Heads, chosen: Mask | Array) -> Heads:
        """Return `heads` whose queries look only where `chosen` [tokens, keys] is True too."""
        if not isinstance(chosen, torch.Tensor):
            return super().limit_keys(heads, chosen)
        limited = self._mask(heads) & chosen.to(self._device)
        return replace(heads, causal=None, device_mask=limited)

    def chosen_keys(
        self,
        q: Array,
        k: Array,
        weights: Array,
        mask: Mask,
        *,
        scale: float,
        count: int,
        causal: Causal | None,
    ) -> Mask | Array:
        """Return the mask [tokens, keys] of the keys that an indexer chooses, on the device.

        Deterministic runs choose on the host.
        """
        if self.deterministic:
            return super().chosen_keys(q, k, weights, mask, scale=scale, count=count, causal=causal)
        seen = self._mask(Heads(mask, scale, None, None, "float32", causal))
        parts = []
        for start in range(0, len(mask), self.query_block):
            rows = slice(start, start + self.query_block)
            scores = self.index_scores(q[rows], k, weights[rows], scale)
            shown = scores.masked_fill(~seen[rows] | scores.isnan(), -torch.inf)
            order = shown.argsort(dim=-1, descending=True, stable=True)[:, :count]
            parts.append(torch.zeros_like(seen[rows]).scatter_(-1, order, True) & seen[rows])
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def index_scores(self, q: Array, k: Array, weights: Array, scale: float) -> Array:
        """Return the sum over heads of weight * max(0, q.k * scale) [tokens, keys].

        It is on the device, in float32 at least; in deterministic runs a numpy array.
        """
        if self.deterministic:
            return super().index_scores(q, k, weights, scale)
        queries, keys = self.wide(q).swapaxes(0, 1), self.wide(k)[:, 0].T
        factors = self.wide(weights).T[:, :, None]
        total = factors.new_zeros(queries.shape[1], keys.shape[1])
        some = max(1, MOST_PRODUCTS // total.numel())  # heads at a time
        for start in range(0, len(queries), some):
            heads = slice(start, start + some)
            products = (queries[heads] @ keys).mul_(scale).relu_()
            total += products.mul_(factors[heads]).sum(0)
        return total

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return attention [tokens, heads, value_dim] of q over k and v.

        Our kernel computes one query, torch's attention many. Blocks of queries are used where
        there is a softcap or a sink, and in deterministic mode.
        """
        if self.deterministic:
            return super().attention(q, k, v, heads)
        if len(q) == 1 and self._fused and heads.causal is not None:
            if max(q.shape[-1], v.shape[-1]) <= layers.MAX_DIM:
                return self._attend_one_query(
                    q, k.contiguous(), v.contiguous(), heads, heads.causal[1]
                )
        if heads.softcap is not None or heads.sinks is not None:
            return super().attention(q, k, v, heads)
        (tokens, n_heads, d), (keys, kv_heads, _) = q.shape, k.shape
        plain = False
        if heads.causal is not None and tokens == keys:
            cached, window = heads.causal
            plain = cached == 0 and (window is None or window >= tokens)
        flash = plain and self._type in HALVES and v.shape[-1] == d
        if kv_heads != n_heads and not flash:  # only flash attention supports grouped heads
            k, v = (
                x[:, :, None].expand(-1, -1, n_heads // kv_heads, -1).reshape(keys, n_heads, -1)
                for x in (k, v)
            )
        mask = None if plain else self._mask(heads)
        q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k, v))  # (1, head, token, d)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=plain, scale=heads.scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        return mixed[0].swapaxes(0, 1)

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Return q.k [heads, tokens, keys], scaled and soft-capped.

        In float32 the scale is applied inside the product, in 16-bit types after it.
        """
        if self.deterministic or self._type in HALVES:
            return super().scores(q, k, heads)
        (tokens, n_heads, d), (keys, kv_heads, _) = q.shape, k.shape
        grouped = q.swapaxes(0, 1).reshape(kv_heads, -1, d)  # (kv_head, group * token, d)
        out = torch.empty((kv_heads, grouped.shape[1], keys), dtype=self._type, device=q.device)
        out = torch.baddbmm(out, grouped, k.permute(1, 2, 0), beta=0, alpha=heads.scale)
        scaled = out.view(n_heads, tokens, keys)
        return scaled if heads.softcap is None else self.softcap(scaled, heads.softcap)

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return the masked softmax [heads, tokens, keys]; one kernel if the mask is causal."""
        plain = heads.cast != "input" or self.dtype == "float32"
        if not (self._fused and plain and heads.causal is not None and scores.is_contiguous()):
            return super().probs(scores, heads)
        before, window = heads.causal
        probs = torch.empty_like(scores)
        layers.softmax_causal(
            scores,
            heads.sinks,
            probs,
            before=before,
            window=window,
            dtype=self.dtype,
            cached=None if self.recording is None else self.recording.cached,
            stream=current_stream(),
        )
        return probs

    def _attend_one_query(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: Heads, window: int | None
    ) -> torch.Tensor:
        """Return one query's attention [1, heads, value_dim] by our kernel.

        Its buffers for partial sums are allocated once per shape.
        """
        n_heads, v_dim = q.shape[1], v.shape[2]
        key = ("attend", self._device, n_heads, v_dim)
        if key not in self._constants:
            self._refuse_in_recording("a buffer is new")
            size = n_heads * layers.SPLITS * (v_dim + 2)
            self._constants[key] = torch.zeros(size, dtype=torch.float32, device=self._device)
            self._constants["arrived", *key] = torch.zeros(
                n_heads, dtype=torch.int32, device=self._device
            )
        y = torch.empty((1, n_heads, v_dim), dtype=self._type, device=q.device)
        layers.attend(
            q.contiguous(),
            k,
            v,
            heads.sinks,
            y,
            self._constants[key],
            self._constants["arrived", *key],
            count=len(k),
            window=window,
            scale=heads.scale,
            cached=None if self.recording is None else self.recording.cached,
            softcap=heads.softcap,
            dtype=self.dtype,
            stream=current_stream(),
        )
        return y
