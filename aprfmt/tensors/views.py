"""A stored tensor as a user sees it: facts at once, bytes and numbers when asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aprfmt.base.encodings import encoding as encoding_row
from aprfmt.base.protocols import LazyTensor, damage_of
from aprfmt.errors import BackendUnavailableError, CodecError

# Encodings whose bits are those of a torch dtype that numpy has no counterpart of.
_TORCH_DTYPES: Mapping[str, str] = {
    "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def decode_tensor(tensor: LazyTensor) -> Any:
    """Return a tensor's numbers as a row-major array of its shape.

    float32 for everything quantized, F16, BF16 and FP8; the own type of F32, F64, integers.
    """
    from aprfmt.codecs import decode

    info = tensor.info
    own = getattr(tensor, "decode", None)
    if own is not None:
        try:
            return own()
        except CodecError as error:
            raise CodecError(f"{info.name}: {error}") from error
    raw = {suffix: part.raw() for suffix, part in tensor.parts.items()} or {"": tensor.raw()}
    try:
        return decode(info.encoding, raw, info.shape, row_bytes=info.row_bytes)
    except CodecError as error:
        raise CodecError(f"{info.name}: {error}") from error


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor under its name in the file: facts at once, bytes and numbers when asked for."""

    lazy: LazyTensor

    @property
    def name(self) -> str:
        """The file's own name of it."""
        return self.lazy.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major, outermost first; that of the weight itself, also when packed."""
        return self.lazy.info.shape

    @property
    def encoding(self) -> str:
        """Key of dtypes.ENCODINGS, or `type#142`."""
        return self.lazy.info.encoding

    @property
    def nbytes(self) -> int:
        """Stored bytes (of the main part, where there are companions)."""
        return self.lazy.info.nbytes

    @property
    def offset(self) -> int:
        """Where the bytes begin, from the start of the file that holds them."""
        return self.lazy.info.offset

    @property
    def parts(self) -> Mapping[str, LazyTensor]:
        """Companion tensors by suffix; empty for most."""
        return self.lazy.parts

    @property
    def damage(self) -> str:
        """Why its bytes cannot be read; "" where nothing is wrong."""
        return damage_of(self.lazy)

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return a read-only view of the stored bytes, valid until the model is closed."""
        return self.lazy.raw(start, stop)

    def drop(self) -> None:
        """Release the mapped pages of its bytes; they are read again if needed."""
        self.lazy.drop()

    def numpy(self) -> Any:
        """Return the decoded values, row-major, as a new array."""
        return decode_tensor(self.lazy)

    def torch(self) -> Any:
        """Return the decoded values as a new torch tensor on the CPU.

        F16, BF16 and FP8 come in torch's own dtype, bit for bit; the rest as `numpy()` gives it.
        Raises BackendUnavailableError without torch.
        """
        try:
            import torch
        except ImportError as error:
            raise BackendUnavailableError(
                f"{self.name}: torch is not installed; pip install 'aprfmt[torch]'"
            ) from error
        same = _TORCH_DTYPES.get(self.encoding)
        if same is None or self.parts:
            return torch.from_numpy(self.numpy())
        stored = torch.frombuffer(bytearray(self.raw()), dtype=torch.uint8)
        return stored.view(getattr(torch, same)).reshape(self.shape)

    def __getitem__(self, at: Any) -> Any:
        """Return `numpy()[at]`, decoding only the rows that the first index or slice names.

        Encodings whose blocks run across row ends, and packed weights, are decoded whole. Raises
        IndexError as numpy does.
        """
        first, rest = (at[0], at[1:]) if isinstance(at, tuple) and at else (at, ())
        info = self.lazy.info
        count = self.shape[0] if self.shape else 0
        if not isinstance(first, int | slice) or not count or info.row_bytes is None or self.parts:
            return self.numpy()[at]
        if isinstance(first, int):
            if not -count <= first < count:
                raise IndexError(f"{self.name}: index {first}; axis 0 has {count} rows")
            low, high = first % count, first % count + 1
        else:
            places = range(*first.indices(count))
            low = min(places, default=0)
            high = max(places, default=-1) + 1
        rows = self._rows(low, high)
        if isinstance(first, int):
            return rows[(0, *rest)]
        start = first.indices(count)[0] - low if high else 0
        picked = rows[start :: first.step or 1] if high else rows
        return picked[(slice(None), *rest)] if rest else picked

    def _rows(self, low: int, high: int) -> Any:
        """Return entries [low, high) of the first axis, decoded."""
        from aprfmt.codecs import decode

        info = self.lazy.info
        assert info.row_bytes is not None
        one = info.nbytes // self.shape[0]
        shape = (high - low, *self.shape[1:])
        row_bytes = info.row_bytes if len(self.shape) > 1 else None
        if len(self.shape) == 1:  # whole blocks around the elements
            row = encoding_row(self.encoding)
            low_block, high_block = low // row.block_size, -(-high // row.block_size)
            raw = self.raw(low_block * row.type_size, high_block * row.type_size)
            skip = low - low_block * row.block_size
            block = decode(self.encoding, raw, ((high_block - low_block) * row.block_size,))
            return block[skip : skip + high - low]
        return decode(self.encoding, self.raw(low * one, high * one), shape, row_bytes=row_bytes)
