"""Weights on a CUDA device, encoded as in the file: uploaded once, decoded by kernels when used.

Weights in the dtype of the arithmetic are placed as numbers. Every other encoding with a kernel
stays encoded; it is decoded into a scratch buffer that all weights share, or multiplied without
decoding. Uploads go through pinned memory in pieces.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from aprfmt.base.encodings import ENCODINGS
from aprfmt.inference.backends.base import Array
from aprfmt.inference.fast.gpu_encodings import CODED
from aprfmt.inference.weights import Weight

HALVES = (torch.bfloat16, torch.float16)
_PIECE = 32 << 20  # bytes per piece of an upload


class Uploader:
    """Uploads through two buffers of pinned memory: one is filled while the other is copied."""

    def __init__(self) -> None:
        """Start without buffers; the two are allocated when needed."""
        self._pieces: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        self._next = 0

    def upload(self, data: Any, device: torch.device) -> torch.Tensor:
        """Return a uint8 tensor with the bytes of a buffer; the copy may not be finished yet."""
        source = np.frombuffer(data, np.uint8)
        placed = torch.empty(source.size, dtype=torch.uint8, device=device)
        for start in range(0, source.size, _PIECE):
            piece, sent = self._next_buffer()
            part = source[start : start + _PIECE]
            sent.synchronize()
            np.copyto(piece.numpy()[: part.size], part)
            placed[start : start + part.size].copy_(piece[: part.size], non_blocking=True)
            sent.record(torch.cuda.current_stream(device))
        return placed

    def _next_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Return (pinned buffer, event of its last copy), the two buffers in turn."""
        if len(self._pieces) < 2:
            piece = torch.empty(_PIECE, dtype=torch.uint8, pin_memory=True)
            sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._pieces.append((piece, sent))
            return self._pieces[-1]
        self._next = 1 - self._next
        return self._pieces[self._next]


@dataclass(frozen=True)
class BlocksOnTorch:
    """A weight's stored bytes [n_rows, row_bytes] on the device, in an encoding with a kernel."""

    encoding: str
    raw: torch.Tensor
    n_columns: int

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.raw.device

    def decode(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` [stop - start, n_columns] with rows [start, stop) of the weight."""
        from aprfmt.inference.fast import cuda

        cuda.decode(self.encoding, self.raw[start:stop], out, stream=current_stream())

    def gather_rows(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Fill `out` [ids, n_columns] with rows `ids` of the weight."""
        from aprfmt.inference.fast import cuda

        cuda.decode(self.encoding, self.raw[ids], out, stream=current_stream())

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Fill `out` [tokens, n_rows] with x times the transposed weight, and return True.

        Returns False, `out` unchanged, for an encoding without a kernel, for more tokens than
        MATVEC_TOKENS, and in float64.
        """
        from aprfmt.inference.fast import cuda

        few = len(x) <= cuda.MATVEC_TOKENS and x.dtype != torch.float64
        if not few or self.encoding not in cuda.MATVEC:
            return False
        cuda.matvec(self.encoding, self.raw, x.contiguous(), out, stream=current_stream())
        return True


@dataclass(frozen=True)
class Bnb4OnTorch:
    """A whole 4-bit weight of bitsandbytes: packed nibbles, absmax and code in float32."""

    packed: torch.Tensor
    absmax: torch.Tensor
    code: torch.Tensor
    blocksize: int
    saved: str
    n_columns: int

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.packed.device

    def decode(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Fill `out` with rows [start, stop) of the weight; a block begins at both."""
        from aprfmt.inference.fast import cuda

        first, last = start * self.n_columns, stop * self.n_columns
        cuda.decode_coded(
            self.packed[first // 2 : -(-last // 2)],
            self.absmax[first // self.blocksize : -(-last // self.blocksize)],
            self.code,
            out,
            blocksize=self.blocksize,
            saved=self.saved,
            stream=current_stream(),
        )

    @property
    def row_step(self) -> int:
        """The number of rows after which a row begins at a quantization block and at 16 bytes.

        0 if only the whole weight can be decoded.
        """
        for rows in (1, 2, 4, 8, 16, 32, 64):
            if rows * self.n_columns % max(self.blocksize, 64) == 0:
                return rows
        return 0

    def multiply(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Return False: no kernel multiplies 4-bit codes, so the weight must be decoded."""
        return False


def current_stream() -> int:
    """Return the raw handle of torch's current stream."""
    return int(torch.cuda.current_stream().cuda_stream)


def plan_upload(
    w: Weight, upload: Callable[[Any], torch.Tensor]
) -> tuple[int, Callable[[], BlocksOnTorch | Bnb4OnTorch]] | None:
    """Return (bytes it takes, function that uploads it) of a weight that stays encoded.

    None if it has no stored bytes that a kernel reads.
    """
    if w.encoding not in CODED:
        stored = w.stored_bytes()
        if stored is None:
            return None
        raw, size = stored, memoryview(stored).nbytes

        def upload_blocks() -> BlocksOnTorch:
            """Return the weight's blocks as stored, on the device, for kernels to decode."""
            placed = upload(raw).view(w.n_rows, -1)
            w.release_pages()
            return BlocksOnTorch(w.encoding, placed, w.n_columns)

        return size, upload_blocks
    parts = w.bnb4_parts()
    if parts is None:
        return None

    def upload_parts() -> Bnb4OnTorch:
        """Return a bitsandbytes 4-bit weight's codes, scales and table on the device."""
        absmax, code = (
            upload(np.ascontiguousarray(x).view(np.uint8)).view(torch.float32)
            for x in (parts.absmax, parts.code)
        )
        placed = upload(np.ascontiguousarray(parts.packed))
        w.release_pages()
        return Bnb4OnTorch(placed, absmax, code, parts.blocksize, parts.dtype, w.n_columns)

    return parts.packed.nbytes + parts.absmax.nbytes, upload_parts


def plain_bytes(w: Weight, dtypes: Mapping[str, torch.dtype]) -> tuple[Array, torch.dtype] | None:
    """Return (stored bytes, torch dtype) of a weight of plain floats; None for others."""
    name = ENCODINGS[w.encoding].numpy if w.encoding in ENCODINGS else ""
    stored = w.stored_bytes() if name in dtypes else None
    return None if stored is None else (stored, dtypes[name])
