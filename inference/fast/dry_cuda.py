"""Memory of torch runs on CUDA devices, counted with ghosts: arrays without numbers.

The operations are those of torch_cuda.py and torch_products.py. A GPU that is not here is
assumed to have room enough, and the kernels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from aprfmt.base.encodings import ENCODINGS
from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.backends.base import (
    ITEM_SIZES,
    Array,
    Heads,
    NormCast,
    Numbers,
    Part,
    RopeCast,
    Style,
)
from aprfmt.inference.dry.ghosts import Ghost, Ledger
from aprfmt.inference.fast.cuda import MATVEC, MATVEC_TOKENS, layers
from aprfmt.inference.fast.dry_experts import DryExperts
from aprfmt.inference.fast.kept import CODED, MEMORY_SHARE, SCRATCH, stays_encoded
from aprfmt.inference.weights import Weight, free_memory

MASKS = 8  # that are cached on a device
WORKSPACE = 32 << 20  # what cuBLAS allocates on a Hopper GPU, a quarter of it on others
PINNED = 2 * (32 << 20)  # host memory that uploads go through


@dataclass(frozen=True)
class FoundGpus:
    """The GPUs a device name means: names, free bytes (None: not here), whether kernels run."""

    names: tuple[str, ...]
    free: tuple[int | None, ...]
    kernels: bool


def find_gpus(device: str) -> FoundGpus:
    """Return the names of the GPUs of `cuda`, `cuda:N` or `cuda:all`, and their free bytes.

    Without a GPU here, one is assumed on which kernels run, its free bytes unknown. Raises
    BackendUnavailableError for another name, or for `cuda:all` without a GPU.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        raise BackendUnavailableError(f"device {device!r}; expected cuda, cuda:N or cuda:all")
    try:
        import torch

        here = torch.cuda.is_available()
    except ImportError:
        here = False
    if not here:
        if number == "all":
            raise BackendUnavailableError(
                f"device {device!r}: no GPU is here to be counted; expected cuda or cuda:N"
            )
        return FoundGpus((f"cuda:{int(number or 0)}",), (None,), kernels=True)
    from aprfmt.inference.backends.torch_device import torch_devices
    from aprfmt.inference.fast.torch_cuda import kernels_problem

    devices = torch_devices(device)
    free = tuple(int(torch.cuda.mem_get_info(one)[0]) for one in devices)
    return FoundGpus(tuple(map(str, devices)), free, kernels=not kernels_problem())


class EncodedOnGpu:
    """A weight that stays encoded on a device; it can be cut at multiples of `step` rows."""

    def __init__(self, encoding: str, arrays: Sequence[Ghost], step: int) -> None:
        """Take the ghosts of a weight's parts: stored bytes, or packed codes, absmax and table.

        Panels of rows begin at multiples of `step`.
        """
        self.encoding, self.arrays, self.step = encoding, tuple(arrays), step

    @property
    def account(self) -> Ledger:
        """The account of the device that the weight is on."""
        return self.arrays[0].memory.account


class DryCuda(DryExperts):
    """Allocates what torch does on one GPU, or with layers spread over all of them in order."""

    def __init__(self, device: str, dtype: str, **options: Any) -> None:
        """Open an account for each GPU of `device` and one for the host, all empty."""
        super().__init__(device, dtype, **options)
        self._found = find_gpus(device)
        self._gpus = [Ledger(name) for name in self._found.names]
        self.account, self.host = self._gpus[0], Ledger("cpu")
        self.accounts = [*self._gpus, self.host]
        self._decodes = self._found.kernels
        self._fused = self._decodes and dtype in layers.TYPES and not self.deterministic
        self._scratch: dict[str, list[Ghost]] = {}
        self._kept_masks: dict[tuple[Any, ...], Ghost] = {}
        self._constants: dict[tuple[Any, ...], Ghost] = {}
        self._pinned: list[Ghost] = []
        self._steps = 0
        self._recorded = False  # this pass is run on the stream that graphs are recorded on

    def at(self, position: int) -> None:
        """Set the next row's position, and count the steps.

        The second step runs on the stream of recordings, which gets a cuBLAS workspace too.
        """
        super().at(position)
        self._steps += position > 0
        self._recorded = self._steps == 2 and len(self._gpus) == 1 and not self.deterministic

    def dense(self, x: Array, rows: Array, bias: Array | None) -> Array:
        """Return a new ghost for the product, and allocate cuBLAS's workspace once per stream."""
        self._allocate_workspace()
        return self.allocate((len(x), len(rows)))

    def router_product(self, x: Array, w: Weight, bias: Array | None, *, rounded: bool) -> Array:
        """Return a ghost for the router's product, which cuBLAS computes where it is widened."""
        if not (rounded or self.deterministic):
            self._allocate_workspace()
        return super().router_product(x, w, bias, rounded=rounded)

    def _allocate_workspace(self) -> None:
        """Allocate cuBLAS's workspace on the current device and stream, if not done yet."""
        key = (self.account.device, "workspace", self._recorded)
        if key not in self._constants:
            self._constants[key] = self.allocate((WORKSPACE,), 1)

    def free(self) -> list[int | None]:
        """Return the bytes free on each GPU and on the host; None where that is not known."""
        return [*self._found.free, free_memory()]

    def budget(self) -> int:
        """Return the share of free GPU memory that weights may take, in bytes.

        It is no limit (1 << 62) if there is no GPU here.
        """
        known = [free for free in self._found.free if free is not None]
        return int(sum(known) * MEMORY_SHARE) if known else 1 << 62

    def at_layer(self, layer: int, n_layers: int, x: Array) -> Array:
        """Return x on the layer's GPU, and make that the current account."""
        self.account = self._gpus[layer * len(self._gpus) // n_layers]
        return self._on_current(x)

    def _on_current(self, x: Array) -> Array:
        """Return x if it is on the current account's device, else a new ghost there."""
        return x if x.memory.account is self.account else self.allocate(x.shape, x.itemsize)

    def _on_account(self, account: Ledger, x: Array) -> Array:
        """Make `account` the current one, and return x on its device."""
        self.account = account
        return self._on_current(x)

    # in and out

    def array(self, x: Any) -> Ghost:
        """Return numbers as a ghost of the dtype on the device; an upload is counted briefly."""
        if isinstance(x, Ghost) and x.memory.account is self.account:
            return x if x.itemsize == self.itemsize else self.allocate(x.shape)
        size = x.itemsize
        if size != self.itemsize:
            self.account.count_briefly((size + self.itemsize) * x.size)
        return self.allocate(x.shape)

    def to_numpy(self, x: Any) -> Numbers:
        """Return zeros that take no memory; the step is no longer recorded from here on."""
        self._recorded = False
        return super().to_numpy(x)

    def _on_host(self, shape: Sequence[int]) -> Ghost:
        """Return a new ghost of one byte an element in the host's account."""
        return Ghost.allocate(self.host, shape, 1)

    # weights

    def _upload(self, stored: Any) -> Ghost:
        """Return a new ghost for uploaded bytes; the pinned buffers are allocated once."""
        if not self._pinned:
            self._pinned.append(Ghost.allocate(self.host, (PINNED,), 1))
        return self.allocate((stored.nbytes,), 1)

    def place(self, w: Weight) -> Array | None:
        """Return a ghost for an uploaded weight of plain floats; None for other encodings."""
        name = ENCODINGS[w.encoding].numpy if w.encoding in ENCODINGS else ""
        stored: Any = w.stored_bytes() if name in ITEM_SIZES else None
        if stored is None:
            return None
        numbers = self._upload(stored)
        if name == self.dtype:
            return Ghost(w.shape, self.itemsize, numbers.memory)
        return self.allocate(w.shape)

    def _encoded_weight(self, w: Weight) -> EncodedOnGpu | None:
        """Return a weight that stays encoded on the device; None for one that is decoded."""
        if not (self._decodes and stays_encoded(w.encoding, self.dtype)):
            return None
        there: EncodedOnGpu | None = w.encoded_on(self)
        if there is not None:
            return there
        prepared = self._upload_sizes(w)
        if prepared is None:
            return None
        size, parts, step = prepared

        def upload_parts() -> EncodedOnGpu:
            """Return the weight, its parts allocated on the device."""
            uploaded = [self._upload(Ghost.allocate(self.host, (n,), 1)) for n in parts]
            return EncodedOnGpu(w.encoding, uploaded, step)

        held: EncodedOnGpu | None = w.place_encoded(self, size, upload_parts)
        return upload_parts() if held is None else held

    def _upload_sizes(self, w: Weight) -> tuple[int, list[int], int] | None:
        """Return (bytes counted in the budget, bytes of each part, step of rows to cut at).

        None if the weight has no stored bytes that a kernel reads.
        """
        if w.encoding not in CODED:
            stored: Any = w.stored_bytes()
            return None if stored is None else (stored.nbytes, [stored.nbytes], 1)
        coded: Any = w.bnb4_parts()
        if coded is None:
            return None
        unit = max(coded.blocksize, 64)
        steps = (n for n in (1, 2, 4, 8, 16, 32, 64) if n * w.n_columns % unit == 0)
        step = next(steps, w.n_rows)
        return coded.packed + coded.absmax, [coded.packed, coded.absmax, 64], step

    def _panels(self, w: Weight, kept: EncodedOnGpu) -> Iterator[Ghost]:
        """Yield a ghost [rows, columns] for each panel of rows that a weight is decoded in."""
        step = SCRATCH // (w.n_columns * self.itemsize) // kept.step * kept.step
        for start in range(0, w.n_rows, max(step, 1)):
            rows = min(start + max(step, 1), w.n_rows) - start
            yield self._scratch_numbers(rows * w.n_columns).reshape(rows, w.n_columns)

    def _scratch_numbers(self, count: int) -> Ghost:
        """Return `count` numbers of the device's scratch buffer, which grows where needed."""
        buffers = self._scratch.setdefault(self.account.device, [])
        if not buffers or buffers[-1].size < count:
            buffers.append(self.allocate((count,)))
        return buffers[-1][:count]

    def decoded_weight(self, w: Weight) -> Array | None:
        """Return a weight's decoded ghost; None where it stays encoded or exceeds the budget."""
        return None if self._encoded_weight(w) is not None else w.placed_on(self)

    def embed(self, table: Weight, ids: Numbers) -> Array:
        """Return a new ghost [tokens, width] on the first GPU; the table is placed there."""
        self.account = self._gpus[0]
        kept = self._encoded_weight(table)
        if kept is None:
            table.placed_on(self)
        return self.allocate((len(ids), table.n_columns))

    # products

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return a ghost for x [tokens, in] times w [out, in] transposed, plus bias.

        Few rows multiply encoded bytes directly; more need panels decoded into the scratch buffer.
        """
        kept = self._encoded_weight(w)
        if kept is None:
            held = w.placed_on(self)
            if held is None or self.deterministic:
                x = x if held is None else self._on_account(held.memory.account, x)
                return super().linear(x, w, bias)
            return self._decoded_product(x, held.reshape(w.n_rows, w.n_columns), bias)
        x = self._on_account(kept.account, x)
        y = self.allocate((len(x), w.n_rows))
        few = len(x) <= MATVEC_TOKENS and self.dtype != "float64" and w.encoding in MATVEC
        if self.deterministic or not few:
            for panel in self._panels(w, kept):
                part = self.dense(x, panel, None)
                if self.deterministic:
                    part = self.tiled_linear(x, panel)
                if len(panel) == w.n_rows:
                    y = part
        return y if bias is None else y + bias

    def _decoded_product(self, x: Array, w: Array, bias: Array | None) -> Array:
        """Return a ghost for x times a decoded weight; cuBLAS is used for more than one row."""
        x = self._on_account(w.memory.account, x)
        return (
            self.allocate((1, len(w))) if self._fits_one_row_kernel(x) else self.dense(x, w, bias)
        )

    def _fits_one_row_kernel(self, x: Array) -> bool:
        """Return whether the kernel for a single row fits, which needs no workspace."""
        return len(x) == 1 and self._fused and x.shape[-1] * self.itemsize % 16 == 0

    def add_linear(self, residual: Array, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return a ghost for residual plus `linear`; one kernel does both for a single row."""
        if len(x) == 1 and self._fused and self.decoded_weight(w) is not None:
            return self.allocate((1, w.n_rows))
        return residual + self.linear(x, w, bias)

    def projections(self, x: Array, parts: Sequence[Part]) -> list[Array]:
        """Return ghosts for x times each weight; decoded weights are joined and multiplied once."""
        found = (
            []
            if self.deterministic or len(parts) < 2
            else [self.decoded_weight(w) for w, _ in parts]
        )
        held = [w for w in found if w is not None]
        if not held or len(held) < len(found) or len(parts) > 3:
            return super().projections(x, parts)
        weights = [w.reshape(len(w), -1) for w in held]
        if any(w.memory is not weights[0].memory for w in weights):
            joined = self.allocate((sum(map(len, weights)), weights[0].shape[1]))
            for (part, _), w in zip(parts, weights, strict=True):
                part.replace_placed(self, joined[: len(w)].reshape(part.shape))
        y = self.allocate((len(x), sum(map(len, weights))))
        ends = list(accumulate(len(w) for w in weights))
        return [y[:, end - len(w) : end] for w, end in zip(weights, ends, strict=True)]

    def gated(self, x: Array, gate: Part, up: Part, kind: str, *, steps: bool) -> Array:
        """Return a ghost for act(x @ gate) * (x @ up).

        A single row takes one kernel, more rows two products and a kernel.
        """
        if not self._fused or kind not in layers.ACTIVATIONS:
            return super().gated(x, gate, up, kind, steps=steps)
        if (
            len(x) == 1
            and self.decoded_weight(gate[0]) is not None
            and self.decoded_weight(up[0]) is not None
        ):
            return self.allocate((1, gate[0].n_rows))
        g, u = self.linear(x, *gate), self.linear(x, *up)
        y = g.copy()
        del u
        return y

    # norms, rotary positions, attention

    def rms_norm(
        self, x: Array, weight: Array, *, eps: float, offset: int, cast: NormCast
    ) -> Array:
        """Return a new ghost; the kernel allocates nothing else, torch's steps do."""
        if self._fused and weight.ndim == 1 and len(weight) == x.shape[-1]:
            return self.allocate(x.shape)
        return super().rms_norm(x, weight, eps=eps, offset=offset, cast=cast)

    def rope(self, x: Array, table: tuple[Array, Array], *, style: Style, cast: RopeCast) -> Array:
        """Return a new ghost; the kernel allocates nothing else, torch's steps do."""
        return (
            self.allocate(x.shape)
            if self._fused
            else super().rope(x, table, style=style, cast=cast)
        )

    def attention(self, q: Array, k: Array, v: Array, heads: Heads) -> Array:
        """Return a ghost [tokens, heads, value_dim], and count what the attention used allocates.

        That is our kernel for one query, torch's for many, blocks of queries where there is a
        softcap or a sink.
        """
        (tokens, n_heads, d), (keys, kv_heads, _) = q.shape, k.shape
        if self.deterministic:
            return super().attention(q, k, v, heads)
        if tokens == 1 and self._fused and heads.causal is not None:
            if max(d, v.shape[-1]) <= layers.MAX_DIM:
                return self._one_query(n_heads, v.shape[-1])
        if heads.softcap is not None or heads.sinks is not None:
            return super().attention(q, k, v, heads)
        plain = False
        if heads.causal is not None and tokens == keys:
            cached, window = heads.causal
            plain = cached == 0 and (window is None or window >= tokens)
        flash = plain and self.itemsize == 2 and v.shape[-1] == d
        if kv_heads != n_heads and not flash:
            k, v = (self.allocate((keys, n_heads, x.shape[-1])) for x in (k, v))
        if not plain:
            self._device_mask(heads, tokens, keys)
            self.account.count_briefly(tokens * keys * self.itemsize)
        out = self.allocate((tokens, n_heads, v.shape[-1]))
        self.account.count_briefly(4 * tokens * n_heads)
        return out

    def _one_query(self, n_heads: int, width: int) -> Array:
        """Return a ghost for one query's attention; its partial sums are allocated once."""
        key = (self.account.device, n_heads, width)
        if key not in self._constants:
            size = n_heads * (layers.SPLITS * (width + 2) + 1)
            self._constants[key] = self.allocate((size,), 4)
        return self.allocate((1, n_heads, width))

    def _device_mask(self, heads: Heads, tokens: int, keys: int) -> None:
        """Allocate a causal mask on the device, kept for later layers; at most MASKS are."""
        key = (self.account.device, heads.causal, tokens, keys)
        if key not in self._kept_masks:
            if len(self._kept_masks) >= MASKS:
                self._kept_masks.clear()
            self._kept_masks[key] = self.allocate((tokens, keys), 1)

    def probs(self, scores: Array, heads: Heads) -> Array:
        """Return a new ghost; one kernel for a causal mask, torch's steps for others."""
        if self._fused and heads.causal is not None:
            return self.allocate(scores.shape)
        return super().probs(scores, heads)

    def scores(self, q: Array, k: Array, heads: Heads) -> Array:
        """Return a ghost [heads, tokens, keys]; float32 is scaled within the product."""
        if self.deterministic or self.itemsize == 2:
            return super().scores(q, k, heads)
        out = self.allocate((q.shape[1], len(q), len(k)))
        return out if heads.softcap is None else self.softcap(out, heads.softcap)
