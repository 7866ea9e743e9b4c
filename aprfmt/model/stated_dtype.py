"""The dtype that config.json states, against the encodings of the weights."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Value

if TYPE_CHECKING:
    from aprfmt.model import Model

# Names of torch dtypes in config.json -> encodings.
DTYPES: Mapping[str, str] = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64",
}  # fmt: skip

# Other names that transformers takes: torch's, and what leaves the choice to the weights.
OTHER_DTYPES = frozenset(
    """auto float half double float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz
    float8_e8m0fnu float4_e2m1fn_x2 int8 uint8 int16 uint16 int32 uint32 int64 uint64 int4 bool
    complex64""".split()
)


def elements_by_encoding(model: "Model") -> Counter[str]:
    """Return {encoding: number of elements} over the model's matrices."""
    counts: Counter[str] = Counter()
    for tensor in model.values():
        if len(tensor.shape) > 1:
            counts[tensor.encoding] += math.prod(tensor.shape)
    return counts


def main_float_encoding(model: "Model") -> str:
    """Return the float encoding that most elements of plain matrices have; "" without any."""
    counts = elements_by_encoding(model)
    floats = Counter({name: n for name, n in counts.items() if name in DTYPES.values()})
    return floats.most_common(1)[0][0] if floats else ""


def is_of_weights(model: "Model", dtype: Value) -> bool:
    """Return whether a dtype, as config.json names it, is that of most plain float weights."""
    claimed = DTYPES.get(dtype) if isinstance(dtype, str) else None
    return claimed is not None and claimed == main_float_encoding(model)
