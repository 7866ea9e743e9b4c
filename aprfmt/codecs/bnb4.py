"""The codec of bitsandbytes' 4-bit weights, which NF4 and FP4 share; they differ in their code.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

main part  two elements a byte over the flattened weight: the HIGH nibble is the earlier element;
           an odd count leaves the last low nibble as padding
companions quant_state.py
value = code[nibble] * absmax[block], formed in float32 and rounded once to the weight's dtype.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from aprfmt.codecs import double_quant, parallel, quant_state
from aprfmt.codecs.base import (
    CHUNK,
    F32,
    U8,
    Array,
    Bytes,
    Codec,
    Fma,
    as_rows,
    check_finite,
    check_length,
    check_out,
    is_fused,
    part_bytes,
)
from aprfmt.codecs.bf16 import round_to_bf16
from aprfmt.errors import CodecError


def round_in_place(dtype: str, values: F32) -> None:
    """Round float32 `values` in place to what `dtype` can hold, ties to even."""
    if dtype == "bfloat16":
        bits = values.view(np.uint32)
        np.bitwise_and(round_to_bf16(bits), 0xFFFF0000, out=bits)
    elif dtype == "float16":
        values[:] = values.astype(np.float16)


BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # what the library accepts
_ROUNDINGS = {"float32": 0, "bfloat16": 1, "float16": 2}
_SMALLEST = np.float32(1e-38)  # the library divides by no less


class Bnb4Codec(Codec):
    """A weight of bitsandbytes' Linear4bit with its companions.

    `blocksize`, `double_quantization` and `dtype` (the weight's) are for encoding; decoding follows
    the file. `with_options` gives a codec with others.
    """

    optional_parts = (quant_state.NESTED_ABSMAX, quant_state.NESTED_QUANT_MAP)

    def __init__(
        self,
        name: str,
        code: tuple[float, ...],
        *,
        blocksize: int = 64,
        double_quantization: bool = False,
        dtype: str = "float32",
    ) -> None:
        """Set the 16 values of the code and how `encode` stores a weight.

        Raises CodecError for a dtype or a block size that the library does not accept.
        """
        if dtype not in quant_state.DTYPES:
            raise CodecError(f"{name}: dtype {dtype!r}; expected {quant_state.DTYPES}")
        if blocksize not in BLOCK_SIZES:
            raise CodecError(f"{name}: blocks of {blocksize} elements; expected {BLOCK_SIZES}")
        self.name = name
        self.code: F32 = np.array(code, np.float32)
        self.blocksize, self.double_quantization = blocksize, double_quantization
        self.weight_dtype = dtype
        self.parts = ("", self.row.claim, quant_state.ABSMAX, quant_state.QUANT_MAP)

    def shape_of(self, raw: Mapping[str, Bytes]) -> tuple[int, ...]:
        """Return the weight's shape, from the quant state."""
        return quant_state.shape_of(self.name, raw)

    def needed(self, raw: Mapping[str, Bytes]) -> Sequence[str]:
        """Return the suffixes that must exist.

        They include those of the nested absmax where the absmax itself is quantized.
        """
        return self.parts + self.optional_parts * quant_state.is_nested(self.name, raw)

    def stored_as(self, parts: Iterable[str]) -> Mapping[str, str]:
        """Return {suffix: encoding}: F32 for numbers, U8 for codes and JSON.

        The absmax is F32 numbers, or U8 codes where `parts` include a nested absmax.
        """
        every = tuple(parts)
        floats = {*self.optional_parts, quant_state.QUANT_MAP}
        if quant_state.NESTED_ABSMAX not in every:
            floats.add(quant_state.ABSMAX)
        return {suffix: "F32" if suffix in floats else "U8" for suffix in every}

    def config(self, options: Mapping[str, Any], left_out: Sequence[str]) -> Mapping[str, Any]:
        """Return the `quantization_config` that transformers writes for a model it packed itself.

        `left_out` are skipped, and the head (transformers skips it where nothing is listed).
        Source: transformers' BitsAndBytesConfig.to_dict with its defaults.
        """
        return {
            "_load_in_4bit": True,
            "_load_in_8bit": False,
            "bnb_4bit_compute_dtype": "float32",
            "bnb_4bit_quant_storage": "uint8",
            "bnb_4bit_quant_type": self.name.lower(),
            "bnb_4bit_use_double_quant": bool(options.get("double_quantization", False)),
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_skip_modules": [*left_out, "lm_head"] if left_out else None,
            "llm_int8_threshold": 6.0,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "quant_method": "bitsandbytes",
        }

    def steps(self, raw: Mapping[str, Bytes], count: int) -> F32:
        """Return float32 [count]: the block's absmax times the largest gap of the code."""
        state = quant_state.read_state(self.name, raw)
        absmax = quant_state.read_absmax(self.name, raw, state)
        found: F32 = absmax.repeat(state.blocksize)[:count] * np.diff(np.sort(self.code)).max()
        return found

    def coded(self, raw: Mapping[str, Bytes], count: int) -> "CodedParts":
        """Return the codes, absmax and code table of a weight of `count` elements, checked.

        Raises CodecError when a part is missing or lengths disagree.
        """
        state = quant_state.read_state(self.name, raw)
        if state.count != count:
            raise CodecError(
                f"{self.name}: the quant state's shape {list(state.shape)} has {state.count} "
                f"elements, the output {count}"
            )
        packed = part_bytes(self.name, raw)
        check_length(self.name, packed.size, -(-count // 2), f"shape {list(state.shape)}")
        with np.errstate(all="ignore"):
            absmax = quant_state.read_absmax(self.name, raw, state)
        code = quant_state.read_code(self.name, raw)
        # safetensors aligns no tensor, the kernel reads aligned floats: only others are copied.
        absmax, code = (np.require(x, requirements="A") for x in (absmax, code))
        return CodedParts(packed, absmax, code, state.blocksize, state.dtype)

    def decode(self, raw: Mapping[str, Bytes], out: Array) -> None:
        """Fill float32 `out` with the values, which the weight's dtype can hold exactly.

        Raises CodecError when a part is missing or lengths disagree.
        """
        check_out(self.name, out, self.dtype)
        self.coded(raw, out.size).decode(decode_coded, out)

    def decode_native(
        self, kernels: ModuleType, raw: Mapping[str, Bytes], out: Array, threads: int, store: int
    ) -> None:
        """Fill `out` as `decode` does, by the native kernel for codes, on `threads` threads.

        `kernels` is the native extension, `raw` the stored parts by suffix, `store` how the kernel
        writes.
        """
        self.coded(raw, out.size).decode(kernels.decode_coded, out, threads, store)

    def granule(self, raw: Mapping[str, Bytes], count: int) -> int:
        """Return at which elements `cut` may start: at each multiple of two blocks.

        With double quantization it is two times the blocks that share one nested scale.
        """
        state = quant_state.read_state(self.name, raw)
        return 2 * state.blocksize * max(state.nested_blocksize, 1)

    def cut(self, raw: Mapping[str, Bytes], start: int, stop: int) -> Mapping[str, Bytes]:
        """Return {suffix: bytes} of elements [start, stop) as a 1-D weight of these alone."""
        return {
            **raw,
            "": memoryview(raw[""])[start // 2 : -(-stop // 2)],
            **quant_state.cut_companions(self.name, raw, start, stop),
        }

    def with_options(self, **options: Any) -> "Bnb4Codec":
        """Return a codec that encodes with `options`; CodecError for what the library refuses."""
        try:
            return Bnb4Codec(self.name, tuple(map(float, self.code)), **options)
        except TypeError as error:
            raise CodecError(f"{self.name}: {error}") from error

    def encode(
        self, x: Array, *, fma: Fma = "fused", importance: Array | None = None
    ) -> Mapping[str, bytes]:
        """Return {suffix: bytes} of float32 `x`, which is first rounded to the weight's dtype.

        There is no multiply-add to fuse, and `importance` is not used. Raises CodecError for a NaN
        or an infinity.
        """
        is_fused(fma)
        return self.encode_coded(x, encode_coded)

    def encode_native(
        self, kernels: ModuleType, x: Array, *, fma: Fma, importance: Array | None
    ) -> Mapping[str, bytes]:
        """Return what `encode` returns, made by the native kernel for codes."""
        return self.encode_coded(x, kernels.encode_coded)

    def encode_coded(self, x: Array, kernel: Callable[..., None]) -> Mapping[str, bytes]:
        """Return {suffix: bytes} of float32 `x`, its codes made by `kernel`.

        `kernel` has the signature of the function `encode_coded` below.
        """
        values = as_rows(self.name, x).reshape(-1)
        check_finite(self.name, values)
        if self.weight_dtype != "float32":
            values = values.copy()
            with np.errstate(all="ignore"):
                round_in_place(self.weight_dtype, values)
            check_finite(f"{self.name} as {self.weight_dtype}", values)
        order = np.argsort(self.code, kind="stable").astype(np.uint8)
        ascending = self.code[order]
        bounds = (ascending[:-1] + ascending[1:]) / np.float32(2)
        packed = np.empty(-(-values.size // 2), np.uint8)
        absmax = np.empty(-(-values.size // self.blocksize), np.float32)
        kernel(values, packed, absmax, self.blocksize, bounds, order)
        if values.size % 2:  # the last low nibble is padding: the library stores a zero's
            packed[-1] = packed[-1] & 0xF0 | order[np.searchsorted(bounds, 0, side="left")]
        return {"": packed.tobytes()} | quant_state.encode_companions(
            self.name,
            self.code,
            absmax,
            shape=x.shape,
            blocksize=self.blocksize,
            dtype=self.weight_dtype,
            nested=double_quant.quantize_absmax(absmax) if self.double_quantization else None,
        )


@dataclass(frozen=True)
class CodedParts:
    """A 4-bit weight: packed bytes, a float32 absmax for each block, the 16 values of its code."""

    packed: U8
    absmax: F32
    code: F32
    blocksize: int
    dtype: str

    def decode(
        self,
        kernel: Callable[..., None],
        out: Array,
        threads: int = 1,
        store: int = parallel.STORE_BY_SIZE,
    ) -> None:
        """Fill float32 `out` on `threads` threads, with a kernel like `decode_coded` below."""

        def task(start: int, stop: int) -> Callable[[], None]:
            """Return a function that decodes elements [start, stop) of the weight into `out`."""
            to = _ROUNDINGS[self.dtype]
            return lambda: kernel(
                self.packed,
                self.absmax,
                self.code,
                self.blocksize,
                out[start:stop],
                start,
                to,
                store,
            )

        unit = math.lcm(2, self.blocksize)
        parts = parallel.split_range(out.size, unit, threads) if threads > 1 else [(0, out.size)]
        parallel.run_tasks([task(start, stop) for start, stop in parts], threads)


def decode_coded(
    packed: U8,
    absmax: F32,
    code: F32,
    blocksize: int,
    out: F32,
    first: int,
    to: int,
    store: int = parallel.STORE_BY_SIZE,
) -> None:
    """Fill `out` with elements `first`, first + 1, ... of packed 4-bit codes.

    `packed` has two codes a byte, `absmax` float32 a scale for each `blocksize` elements, `code`
    the 16 values of the codes. `first` starts a block and a byte. `store` is used by the native
    kernel alone. The product is formed in float32 and rounded once to the dtype `to`: 0 float32, 1
    bfloat16, 2 float16.
    """
    two = np.stack([code.repeat(16), np.tile(code, 16)], axis=1)  # (byte, high then low nibble)
    unit = math.lcm(2, blocksize)
    step = max(1, CHUNK // unit) * unit
    dtype = next(name for name, number in _ROUNDINGS.items() if number == to)
    with np.errstate(all="ignore"):
        for start in range(0, out.size, step):
            values, at = out[start : start + step], first + start
            bytes_ = packed[at // 2 : (at + values.size + 1) // 2]
            values[:] = two[bytes_].reshape(-1)[: values.size]
            scales = absmax[at // blocksize : -(-(at + values.size) // blocksize)]
            whole = values.size // blocksize
            blocks = values[: whole * blocksize].reshape(whole, blocksize)
            blocks *= scales[:whole, None]
            values[whole * blocksize :] *= scales[-1]
            round_in_place(dtype, values)


def encode_coded(x: F32, packed: U8, absmax: F32, blocksize: int, bounds: F32, order: U8) -> None:
    """Fill `packed` and `absmax` from `x`, as bitsandbytes quantizes.

    A nibble is order[number of `bounds` below x / absmax]. A whole block is multiplied by the
    reciprocal, a short last one divided, as the library does. An odd count leaves the last low
    nibble undefined.
    """
    # Scale each block by its largest magnitude, to -1..1.
    whole = x.size // blocksize
    blocks, rest = x[: whole * blocksize].reshape(whole, blocksize), x[whole * blocksize :]
    with np.errstate(all="ignore"):
        absmax[:whole] = np.abs(blocks).max(axis=1, initial=0)
        scaled = np.zeros(x.size + x.size % 2, np.float32)
        inverse = np.float32(1) / np.maximum(absmax[:whole], _SMALLEST)
        scaled[: blocks.size] = np.clip(blocks * inverse[:, None], -1, 1).reshape(-1)
        if rest.size:
            absmax[-1] = np.maximum(np.abs(rest).max(), _SMALLEST)
            scaled[blocks.size : x.size] = np.clip(rest / absmax[-1], -1, 1)
    # The number of bounds below a value is its code in ascending order.
    nibbles = order[np.searchsorted(bounds, scaled, side="left")]
    packed[:] = nibbles[0::2] << 4 | nibbles[1::2]
