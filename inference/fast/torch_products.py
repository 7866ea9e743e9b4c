"""Products of the CUDA backend: with decoded weights, with encoded weights, and fused ones.

A *panel* is some rows of a weight that are decoded together. A *stack* is the weight of all experts
of a layer, [n_experts, out, in]. A *block* of experts' rows is a fixed number of token rows that
one expert multiplies.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from aprfmt.base.protocols import Value
from aprfmt.inference.backends.base import Array, Numbers, Part
from aprfmt.inference.backends.hosted import ExpertBlocks
from aprfmt.inference.backends.torch_backend import DTYPES, STEPS, TorchBackend
from aprfmt.inference.backends.torch_maths import TORCH
from aprfmt.inference.expert_blocks import block_shape
from aprfmt.inference.fast.cuda import batched, layers
from aprfmt.inference.fast.gpu_encodings import SCRATCH, stays_encoded
from aprfmt.inference.fast.graphs import NotRecordable
from aprfmt.inference.fast.torch_weights import (
    HALVES,
    BlocksOnTorch,
    Bnb4OnTorch,
    Uploader,
    current_stream,
    plain_bytes,
    plan_upload,
)
from aprfmt.inference.routing import choose_experts
from aprfmt.inference.weights import Weight


class TorchProducts(TorchBackend):
    """The product operations of CudaBackend; `recording` is the pass being recorded, or None."""

    recording: Any | None
    _decodes: bool  # cupy's kernels are available
    _fused: bool  # they support this dtype, and the run is not deterministic
    _uploaders: dict[torch.device, Uploader]
    _devices: tuple[torch.device, ...]
    _scratch: dict[torch.device, list[torch.Tensor]]

    def _set_device(self, device: torch.device) -> None:
        """Make a device the current one; CudaBackend does. Here: NotImplementedError."""
        raise NotImplementedError

    def _constant(self, x: Numbers, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a small array on the device; CudaBackend does. Here: NotImplementedError."""
        raise NotImplementedError

    def _refuse_in_recording(self, what: str) -> None:
        """Raise NotRecordable(what) if a pass is being recorded, for it may not read the host."""
        if self.recording is not None:
            raise NotRecordable(what)

    # weights

    def place(self, w: Weight) -> Array | None:
        """Return a weight of plain floats as a tensor of the dtype, uploaded in its stored type.

        None for other encodings.
        """
        self._refuse_in_recording("a weight is placed")
        plain = plain_bytes(w, DTYPES)
        if plain is None:
            return None
        stored, dtype = plain
        numbers = self._upload(stored).view(dtype)
        return numbers.to(self._type).reshape(w.shape)

    def _upload(self, data: Any) -> torch.Tensor:
        """Return bytes as a uint8 tensor on the current device, sent through pinned memory."""
        if self._device not in self._uploaders:
            self._uploaders[self._device] = Uploader()
        return self._uploaders[self._device].upload(data, self._device)

    def _on_device(self, device: torch.device, x: torch.Tensor) -> torch.Tensor:
        """Return x on the device of a weight, which becomes the current device.

        x is on another device before a tied head, whose weight is on the first GPU.
        """
        if x.device == device:
            return x
        self._set_device(device)
        return x.to(device)

    def _encoded_weight(self, w: Weight) -> BlocksOnTorch | Bnb4OnTorch | None:
        """Return a weight that stays encoded on the device; None for one that is decoded.

        Over budget it is uploaded for this use only.
        """
        if not (self._decodes and stays_encoded(w.encoding, self.dtype)):
            return None
        kept: BlocksOnTorch | Bnb4OnTorch | None = w.encoded_on(self)
        if kept is not None:
            return kept
        found = plan_upload(w, self._upload)
        if found is None:
            return None
        self._refuse_in_recording("a weight is brought to the device")
        size, make = found
        kept = w.place_encoded(self, size, make)
        return make() if kept is None else kept  # over budget: for this use only

    def _decode_panels(
        self, w: Weight, encoded: BlocksOnTorch | Bnb4OnTorch
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (first row, decoded rows) of a weight, a panel at a time.

        All panels are decoded into the same scratch buffer: each overwrites the one before.
        """
        step = SCRATCH // (w.n_columns * self.itemsize)
        if isinstance(encoded, Bnb4OnTorch):
            step = step // encoded.row_step * encoded.row_step if encoded.row_step else w.n_rows
        for start in range(0, w.n_rows, max(step, 1)):
            stop = min(start + step, w.n_rows)
            panel = self._scratch_numbers((stop - start) * w.n_columns).view(
                stop - start, w.n_columns
            )
            encoded.decode(start, stop, panel)
            yield start, panel

    def _scratch_numbers(self, count: int) -> torch.Tensor:
        """Return `count` numbers of the scratch buffer, which grows where needed.

        Old buffers are not freed: recorded passes use them.
        """
        buffers = self._scratch.setdefault(self._device, [])
        if not buffers or buffers[-1].numel() < count:
            self._refuse_in_recording("a buffer grows")
            buffers.append(torch.empty(count, dtype=self._type, device=self._device))
        return buffers[-1][:count]

    def decoded_weight(self, w: Weight) -> Array | None:
        """Return a weight's decoded numbers; None where it stays encoded or exceeds the budget."""
        return None if self._encoded_weight(w) is not None else w.placed_on(self)

    def embed(self, table: Weight, ids: Numbers) -> Array:
        """Return rows `ids` of the table [tokens, width]; only these are decoded.

        They are decoded on the device if the table is there, else on the host.
        """
        if len(self._devices) > 1:
            self._set_device(self._devices[0])
        kept = self._encoded_weight(table)
        if isinstance(kept, BlocksOnTorch):
            out = torch.empty((len(ids), table.n_columns), dtype=self._type, device=self._device)
            kept.gather_rows(self._index(ids), out)
            return out
        held = table.placed_on(self) if kept is None else None
        if held is not None:
            return held.reshape(table.n_rows, -1)[self._index(ids)]
        self._refuse_in_recording("rows are decoded on the host")
        return self.array(np.concatenate([table.rows(int(i), int(i) + 1) for i in ids]))

    # products

    def linear(self, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return x [tokens, in] times w [out, in] transposed, plus bias [out].

        The weight is decoded on the device, multiplied as encoded bytes, or decoded panel by panel.
        """
        kept = self._encoded_weight(w)
        if kept is None:
            held = w.placed_on(self)
            if held is None or self.deterministic:
                if held is not None:
                    x = self._on_device(held.device, x)
                    bias = None if bias is None else self._on_device(held.device, bias)
                return super().linear(x, w, bias)
            return self._decoded_product(x, held.reshape(w.n_rows, w.n_columns), bias)
        x = self._on_device(kept.device, x)
        y = torch.empty((len(x), w.n_rows), dtype=self._type, device=x.device)
        if self.deterministic or not kept.multiply(x, y):
            for start, panel in self._decode_panels(w, kept):
                part = self.tiled_linear(x, panel) if self.deterministic else x @ panel.T
                if len(panel) == w.n_rows:
                    y = part
                else:
                    y[:, start : start + len(panel)] = part
        return y if bias is None else y + self._on_device(y.device, bias)

    def _decoded_product(
        self, x: torch.Tensor, w: torch.Tensor, bias: Array | None
    ) -> torch.Tensor:
        """Return x times a decoded weight transposed, plus bias.

        A single row uses a kernel limited only by memory speed.
        """
        x = self._on_device(w.device, x)
        bias = (
            None if bias is None else self._on_device(w.device, bias)
        )  # of a tied head: elsewhere
        if len(x) == 1 and self._fits_one_row_kernel(x, w):
            y = torch.empty((1, len(w)), dtype=self._type, device=w.device)
            layers.matvec([w], [bias], x, y, dtype=self.dtype, stream=current_stream())
            return y
        if bias is None or self._type in HALVES:
            return functional.linear(x, w, bias)
        return functional.linear(x, w).add_(bias)  # cuBLAS' own bias makes float32 slower

    def add_linear(self, residual: Array, x: Array, w: Weight, bias: Array | None) -> Array:
        """Return residual + x @ w.T + bias; one kernel computes it for a single row."""
        held = self.decoded_weight(w) if len(x) == 1 and self._fused else None
        if held is not None and residual.device == held.device:
            rows = held.reshape(w.n_rows, w.n_columns)
            if self._fits_one_row_kernel(x, rows):
                y = torch.empty((1, len(rows)), dtype=self._type, device=rows.device)
                layers.matvec(
                    [rows],
                    [bias],
                    x,
                    y,
                    residual=residual,
                    dtype=self.dtype,
                    stream=current_stream(),
                )
                return y
        return residual + self.linear(x, w, bias)

    def _fits_one_row_kernel(self, x: torch.Tensor, *weights: torch.Tensor) -> bool:
        """Return whether the one-row kernels fit x and these weights.

        Sizes and addresses must be multiples of 16 bytes, and tensors contiguous.
        """
        return (
            self._fused
            and x.shape[-1] * self.itemsize % 16 == 0
            and all(t.data_ptr() % 16 == 0 and t.is_contiguous() for t in (x, *weights))
        )

    def projections(self, x: Array, parts: Sequence[Part]) -> list[Array]:
        """Return x times each weight, plus its bias; one product if all are decoded."""
        held = (
            []
            if self.deterministic or len(parts) < 2
            else [self.decoded_weight(w) for w, _ in parts]
        )
        if not held or any(w is None for w in held) or len(parts) > 3:
            return super().projections(x, parts)
        weights = [w.reshape(len(w), -1) for w in held if w is not None]
        biases = [bias for _, bias in parts]
        sizes = [len(w) for w in weights]
        # Joined on first use, before a pass is recorded: recordings contain the weights' addresses.
        joined = self._join_weights([w for w, _ in parts], weights)
        if len(x) == 1 and self._fits_one_row_kernel(x, *weights):
            y = torch.empty((1, sum(sizes)), dtype=self._type, device=x.device)
            layers.matvec(weights, biases, x, y, dtype=self.dtype, stream=current_stream())
            return list(torch.split(y, sizes, dim=-1))
        if joined is None:
            return super().projections(x, parts)
        given = [bias for bias in biases if bias is not None]
        if len(given) not in (0, len(biases)):
            ys = torch.split(functional.linear(x, joined), sizes, dim=-1)
            return [y if b is None else y + b for y, b in zip(ys, biases, strict=True)]
        y = self._decoded_product(x, joined, torch.cat(given) if given else None)
        return list(torch.split(y, sizes, dim=-1))

    # experts

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

        Everything stays on the device. `bias` [n_experts] is added to the scores for the choice
        only, `scale` [n_experts] multiplies the weights. `rounds`: the weights are rounded to the
        dtype.
        """
        wide = self.wide(logits)
        given = None if bias is None else self._constant(bias, wide.dtype)
        factors = None if scale is None else self._constant(scale, wide.dtype)
        routing = choose_experts(wide, given, hp, TORCH, factors)
        weights = self.wide(self.narrow(routing.weights)) if rounds else routing.weights
        return lay_out_blocks(routing.experts, weights, logits.shape[-1])

    def pack_blocks(self, experts: Numbers, weights: Numbers, n_experts: int) -> ExpertBlocks:
        """Return the rows that each expert multiplies, in blocks, by a choice made on the host.

        `experts` are the chosen experts and `weights` their weights, both [tokens, used].
        """
        given = torch.from_numpy(weights.copy()).to(self._device, self._wide)
        return lay_out_blocks(self._index(experts.copy()), given, n_experts)

    def multiply_stack(self, x: Array, stack: Weight, experts: Any) -> Array:
        """Return [n, rows, out]: x[i] [rows, in] times the transposed weight of expert experts[i].

        All blocks are multiplied at once, by the addresses of the weights.
        """
        addresses = self._expert_addresses(stack)
        assert addresses is not None
        return batched.multiply_addressed(x.contiguous(), addresses[experts], stack.shape[1])

    def _expert_addresses(self, stack: Weight) -> torch.Tensor | None:
        """Return the addresses [n_experts] of a stack's weights; None where not all are decoded.

        They are looked up at the first call, which places the weights. None too where
        `gives_right_products` says that cuBLAS cannot multiply by addresses.
        """
        if self not in stack.notes:
            if (
                self._decodes and stays_encoded(stack.encoding, self.dtype)
            ) or not stack.fits_budget(self):
                return None
            self._refuse_in_recording("addresses are brought to the device")
            if not batched.gives_right_products(self._device, self._type):
                return None
            held = [stack.expert(each).placed_on(self) for each in range(stack.shape[0])]
            if any(w is None or not w.is_contiguous() for w in held):
                return None
            found = [w.data_ptr() for w in held if w is not None]
            stack.notes[self] = torch.tensor(found, device=self._device)
        addresses: torch.Tensor = stack.notes[self]
        return addresses if addresses.device == self._device else None

    def _join_weights(self, parts: list[Weight], held: list[torch.Tensor]) -> torch.Tensor | None:
        """Return the weights as one tensor [rows, columns], each of them a slice of it.

        `held` are their decoded numbers, which are copied into the tensor at the first call. None
        if a copy is needed while a pass is recorded.
        """
        total = sum(len(w) for w in held)
        size, first = held[0].element_size(), held[0]
        at, storage = first.data_ptr(), first.untyped_storage().data_ptr()
        for w in held:
            if w.data_ptr() != at or w.untyped_storage().data_ptr() != storage:
                break
            at += w.numel() * size
        else:
            return first.as_strided((total, first.shape[1]), (first.shape[1], 1))
        if self.recording is not None:
            return None
        joined = torch.cat(held)
        sizes = [len(w) for w in held]
        for each, rows in zip(parts, torch.split(joined, sizes), strict=True):
            each.replace_placed(self, rows.reshape(each.shape))
        return joined

    def gated(self, x: Array, gate: Part, up: Part, kind: str, *, steps: bool) -> Array:
        """Return act(x @ gate) * (x @ up).

        For a single row one kernel computes it, where operations are fused.
        """
        rounded_steps = steps and kind in STEPS and self._type in HALVES
        if not self._fused or rounded_steps or kind not in layers.ACTIVATIONS:
            return super().gated(x, gate, up, kind, steps=steps)
        if len(x) == 1:
            first, second = self.decoded_weight(gate[0]), self.decoded_weight(up[0])
            if (
                first is not None
                and second is not None
                and self._fits_one_row_kernel(x, first, second)
            ):
                y = torch.empty((1, len(first)), dtype=self._type, device=x.device)
                layers.matvec_gated(
                    first,
                    second,
                    gate[1],
                    up[1],
                    x,
                    y,
                    kind,
                    dtype=self.dtype,
                    stream=current_stream(),
                )
                return y
        g, u = self.linear(x, *gate), self.linear(x, *up)
        y = torch.empty_like(g)
        layers.act_mul(g, u, y, kind, dtype=self.dtype, stream=current_stream())
        return y


def lay_out_blocks(experts: torch.Tensor, weights: torch.Tensor, n_experts: int) -> ExpertBlocks:
    """Return the (token, expert) pairs sorted by expert, in equal blocks of one expert each.

    The rows of a block that no pair takes are padding of weight 0. `experts` are the chosen experts
    and `weights` their weights, both [tokens, used]. All tensors are on the experts' device.
    """
    tokens, used = experts.shape
    count, size = block_shape(tokens, used, n_experts)
    device, flat = experts.device, experts.reshape(-1)

    def count_up(length: int) -> torch.Tensor:
        """Return the integers 0 to length - 1 on the experts' device."""
        return torch.arange(length, device=device)

    of_pair, order = torch.sort(flat, stable=True)
    pairs = torch.zeros(n_experts, dtype=torch.int64, device=device)
    pairs.scatter_add_(0, flat, torch.ones_like(flat))
    blocks = (pairs + (size - 1)) // size
    ends = blocks.cumsum(0)
    # Where an expert's first pair lies in `rows`, less where it lies in `order`.
    ahead = (ends - blocks) * size - (pairs.cumsum(0) - pairs)
    slots = count_up(len(flat)) + ahead[of_pair]
    rows = torch.zeros(count * size, dtype=torch.int64, device=device)
    rows.scatter_(0, slots, order // used)
    padded = torch.zeros(count * size, dtype=weights.dtype, device=device)
    padded.scatter_(0, slots, weights.reshape(-1)[order])
    places = torch.empty_like(flat).scatter_(0, order, slots).reshape(tokens, used)
    # Blocks after the last one that is used may have any expert: all their rows are padding.
    owners = torch.searchsorted(ends, count_up(count), right=True).clamp(max=n_experts - 1)
    return ExpertBlocks(owners, rows, padded, places.sort(-1).values, size)
