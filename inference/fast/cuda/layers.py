"""Launches of layers.cu and attend.cu: a layer's fused operations on contiguous torch tensors.

Sizes are not checked. Nothing is allocated and nothing waits, so every call can be captured in a
CUDA graph. `stream` is a raw stream handle.
"""

from collections.abc import Callable, Sequence
from typing import Any

from aprfmt.inference.fast.cuda.arrays import stream_of
from aprfmt.inference.fast.cuda.loader import load_function

FILES = ("prelude.cuh", "layers.cu", "attend.cu")
# Dtypes that have kernels -> the types' names in prelude.cuh.
TYPES = {"float32": "float", "bfloat16": "bf16", "float16": "f16"}
# Activations in the order of layers.cu.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
BLOCK, KEYS = 128, 256  # threads of a product's and of an attention's block, as there
WARPS = BLOCK // 32
# Parts into which the keys of a one-query attention are cut.
SPLITS = 16
MAX_DIM = 512
# This many warps keep the memory of a big GPU busy; with fewer rows, several warps share a row.
BUSY_WARPS = 2048

_NAMES = ("rope_wide", "rope_rounded", "matvec1", "matvec2", "matvec_gated")
Tensor = Any


def _load_kernel(name: str, dtype: str) -> Callable[..., None]:
    """Return the kernel `name` compiled for a dtype."""
    real = TYPES[dtype]
    return load_function(FILES, name, (f"REAL {real}", f"STORED {real}"))


def load_kernels(dtype: str) -> None:
    """Compile and load every kernel of a dtype on the current device."""
    for name in (*_NAMES, "rms_norm", "append", "act_mul", "softmax_causal", "attend"):
        _load_kernel(name, dtype)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    *,
    dtype: str,
    eps: float,
    offset: int,
    before: bool,
    stream: int,
) -> None:
    """Fill y with the RMS norm of x [..., width] over the last axis, times weight + offset.

    `before`: rounded to the dtype before the weight, else after it.
    """
    width = x.shape[-1]
    pieces = -(-width * x.element_size() // 16)
    threads = min(1024, -(-pieces // 32) * 32)
    _load_kernel("rms_norm", dtype)(
        (x.numel() // width,),
        (threads,),
        (x.data_ptr(), weight.data_ptr(), y.data_ptr(), width, eps, float(offset), int(before)),
        stream=stream_of(stream),
    )


def rope(
    q: Tensor,
    q_out: Tensor,
    k: Tensor | None,
    k_out: Tensor | None,
    table: tuple[Tensor, Tensor],
    *,
    dtype: str,
    float32_table: bool,
    interleaved: bool,
    stepped: bool,
    stream: int,
) -> None:
    """Fill q_out and k_out with q and k [tokens, heads, dim] rotated by one table.

    Heads of a token lie together. k and k_out are None for a single tensor. `table` is (cos, sin)
    [tokens, pairs]. `float32_table`: the table is float32 for any dtype. `stepped`: each product is
    rounded.
    """
    tokens, heads, dim = q.shape
    more = (
        (0, 0, 0, 0)
        if k is None
        else (k.data_ptr(), k.stride(0), k_out.data_ptr() if k_out is not None else 0, k.shape[1])
    )
    pairs = table[0].shape[-1]
    _load_kernel("rope_wide" if float32_table else "rope_rounded", dtype)(
        (heads + more[3], tokens),
        (32 if dim <= 64 else 64,),
        (
            q.data_ptr(),
            q.stride(0),
            q_out.data_ptr(),
            heads,
            *more,
            table[0].data_ptr(),
            table[1].data_ptr(),
            dim,
            pairs,
            int(interleaved),
            int(stepped),
        ),
        stream=stream_of(stream),
    )


def append(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, cached: Tensor, *, dtype: str, stream: int
) -> None:
    """Write one token's k and v to row `cached` (int64 on the device) of keys and values."""
    widths = k.numel(), v.numel()
    _load_kernel("append", dtype)(
        (-(-sum(widths) // 256),),
        (256,),
        (
            k.data_ptr(),
            v.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            cached.data_ptr(),
            *widths,
        ),
        stream=stream_of(stream),
    )


def act_mul(gate: Tensor, up: Tensor, y: Tensor, kind: str, *, dtype: str, stream: int) -> None:
    """Fill y [rows, width] with act(gate) * up; rows need not be contiguous."""
    rows, width = y.shape
    _load_kernel("act_mul", dtype)(
        (-(-width // 256), rows),
        (256,),
        (
            gate.data_ptr(),
            gate.stride(0),
            up.data_ptr(),
            up.stride(0),
            y.data_ptr(),
            width,
            ACTIVATIONS.index(kind),
        ),
        stream=stream_of(stream),
    )


def warps_per_row(rows: int, columns: int, lane_elements: int) -> int:
    """Return the number of warps that share a row: more for few long rows.

    `lane_elements` are the elements a thread loads at a time.
    """
    steps, split = columns // (32 * lane_elements), 1
    while split < WARPS and rows * split < BUSY_WARPS and steps >= 2 * split:
        split *= 2
    return split


def matvec(
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    x: Tensor,
    y: Tensor,
    *,
    dtype: str,
    stream: int,
    residual: Tensor | None = None,
) -> None:
    """Fill y with x times one to three weights [n, columns], joined in order, plus biases.

    x is a single row. `residual` is added if given. Rows must be a multiple of 16 bytes long, and
    all tensors 16-byte aligned.
    """
    columns = x.shape[-1]
    counts = [w.shape[0] for w in weights] + [0] * (3 - len(weights))
    pointers = [w.data_ptr() for w in weights] + [0] * (3 - len(weights))
    added = [0 if b is None else b.data_ptr() for b in biases] + [0] * (3 - len(biases))
    total = sum(counts)
    split = warps_per_row(total, columns, 16 // x.element_size())
    several = 2 if total >= 8 * BUSY_WARPS else 1
    _load_kernel(f"matvec{several}", dtype)(
        (-(-total // (WARPS // split * several)),),
        (BLOCK,),
        (
            *pointers,
            *added,
            *counts,
            x.data_ptr(),
            y.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            columns,
            split,
        ),
        stream=stream_of(stream),
    )


def matvec_gated(
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    x: Tensor,
    y: Tensor,
    kind: str,
    *,
    dtype: str,
    stream: int,
) -> None:
    """Fill y with act(x @ gate) * (x @ up) of a single row x; `kind` is the activation.

    Rows must be a multiple of 16 bytes long, and all tensors 16-byte aligned.
    """
    rows, columns = gate.shape
    split = warps_per_row(rows, columns, 16 // x.element_size())
    added = [0 if b is None else b.data_ptr() for b in (gate_bias, up_bias)]
    _load_kernel("matvec_gated", dtype)(
        (-(-rows // (WARPS // split)),),
        (BLOCK,),
        (
            gate.data_ptr(),
            up.data_ptr(),
            *added,
            rows,
            x.data_ptr(),
            y.data_ptr(),
            columns,
            split,
            ACTIVATIONS.index(kind),
        ),
        stream=stream_of(stream),
    )


def softmax_causal(
    scores: Tensor,
    sinks: Tensor | None,
    probs: Tensor,
    *,
    cached: Tensor | None,
    before: int,
    window: int | None,
    dtype: str,
    stream: int,
) -> None:
    """Fill probs with the causal softmax of scores [heads, tokens, keys], which are contiguous.

    The first token has `before` earlier keys, or `cached` (int64 on the device) if given. A token
    sees only the last `window` keys, None: all. `sinks` [heads] join the softmax and are dropped.
    """
    heads, tokens, keys = scores.shape
    _load_kernel("softmax_causal", dtype)(
        (heads * tokens,),
        (128 if keys <= 1024 else 256,),
        (
            scores.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            probs.data_ptr(),
            0 if cached is None else cached.data_ptr(),
            before,
            tokens,
            keys,
            window or 0,
        ),
        stream=stream_of(stream),
    )


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    y: Tensor,
    parts: Tensor,
    arrived: Tensor,
    *,
    cached: Tensor | None,
    count: int,
    window: int | None,
    scale: float,
    softcap: float | None,
    dtype: str,
    stream: int,
) -> None:
    """Fill y [heads, v_dim] with one query's attention over a cache's buffers `keys` and `values`.

    It sees `cached` + 1 keys (int64 on the device), or `count` if `cached` is None, of these only
    the last `window` if given. `sinks` [heads] join the softmax and are dropped. `parts` has heads
    * SPLITS * (v_dim + 2) float32 for partial results, `arrived` heads int32, all zero.
    """
    heads, dim, v_dim = q.shape[-2], q.shape[-1], values.shape[-1]
    _load_kernel("attend", dtype)(
        (heads, SPLITS),
        (KEYS,),
        (
            q.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            y.data_ptr(),
            parts.data_ptr(),
            arrived.data_ptr(),
            0 if cached is None else cached.data_ptr(),
            count,
            window or 0,
            keys.shape[1],
            dim,
            v_dim,
            scale,
            softcap or 0.0,
        ),
        shared_mem=4 * (dim + max(v_dim, KEYS * 16 // q.element_size())),
        stream=stream_of(stream),
    )
