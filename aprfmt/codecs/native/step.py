"""The C kernels of a decoding step: products, norms, rotations, activations, attention.

All take and fill contiguous float32 arrays of the caller, release the GIL, and raise CodecError
where lengths do not fit. A result depends neither on the number of threads nor on other rows.
"""

import aprfmt.codecs.native._kernels as _kernels
from aprfmt.codecs.native import products

__all__ = ["ACTIVATIONS", "activate", "attention", "level", "products", "rms_norm", "rope",
           "softmax"]  # fmt: skip

activate = _kernels.activate
attention = _kernels.attention
level = _kernels.level
rms_norm = _kernels.rms_norm
rope = _kernels.rope
softmax = _kernels.softmax

ACTIVATIONS = {name: kind for kind, name in enumerate(("silu", "gelu_tanh", "relu", "gelu"))}
"""Name -> what `activate` calls it by (level.h)."""
