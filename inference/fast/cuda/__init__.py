"""CUDA kernels that both GPU backends use: decoding, products on encoded weights, statistics.

Importing this imports neither cupy nor torch. Arguments are torch tensors, cupy arrays, anything
with `__dlpack__`, or `Flat(ptr, count, dtype)`; all are contiguous and on the current device.
A call copies nothing, allocates nothing and does not wait: it enqueues kernels on `stream`
(`torch.cuda.current_stream().cuda_stream`; None is cupy's current stream), so that it can be
captured in a CUDA graph. The first call of each kind compiles or loads a module, so make one before
a capture. A launch that the driver refuses raises.

    decode("Q4_K", raw, out, stream=s)              whole tensors or whole rows of them
    decode_coded(packed, absmax, code, out, ...)    NF4 and FP4
    matvec("Q4_K", raw, x, out, stream=s)           x [tokens, in] times encoded [out, in], turned
    stats(x, result, workspace, stream=s)             one-pass statistics; `to_stats(result)` later
"""

from aprfmt.inference.fast.cuda.arrays import Flat, flat
from aprfmt.inference.fast.cuda.decode import DECODED, decode, decode_coded
from aprfmt.inference.fast.cuda.matvec import MATVEC, MATVEC_TOKENS, matvec
from aprfmt.inference.fast.cuda.reduce import RESULT, WORKSPACE, launch_stats, to_stats

__all__ = [
    "DECODED",
    "MATVEC",
    "MATVEC_TOKENS",
    "RESULT",
    "WORKSPACE",
    "Flat",
    "decode",
    "decode_coded",
    "flat",
    "launch_stats",
    "matvec",
    "to_stats",
]
