"""Arrays and scalars of numpy in a pickle: their numbers stand in the pickle, in no record.

Sources: numpy's `ndarray.__reduce__` and `__reduce_ex__`, `numpy/_core/numeric.py` (`_frombuffer`).
"""

import math
import struct
from itertools import accumulate
from operator import mul
from typing import Any

from aprfmt.formats.cursor import MAX_DIMS
from aprfmt.formats.pytorch.pickle_values import (
    DTYPES,
    GlobalName,
    PickledObject,
    Storage,
    TensorValue,
)

# numpy's scalars: code of the dtype -> how struct reads it.
_SCALARS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b",
            "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?"}  # fmt: skip
# Codes of numpy's dtypes -> torch's name of the same numbers.
_NUMBERS = {"f8": "float64", "f4": "float32", "f2": "float16", "i8": "int64", "i4": "int32",
            "i2": "int16", "i1": "int8", "u8": "uint64", "u4": "uint32", "u2": "uint16",
            "u1": "uint8", "b1": "bool", "c8": "complex64", "c16": "complex128"}  # fmt: skip
_ARRAYS = ("ndarray", "memmap", "matrix")  # classes of numpy whose values are those of an array


def describe_numpy_dtype(code: Any, *more: Any) -> PickledObject:
    """Return an object that stands for numpy.dtype(code); `more` arguments are ignored."""
    return PickledObject(GlobalName("numpy", "dtype"), (code,))


def describe_numpy_scalar(dtype: Any, data: Any = b"") -> Any:
    """Return the Python number of a numpy scalar's bytes; ValueError for an unknown dtype."""
    code = dtype.args[0] if isinstance(dtype, PickledObject) and dtype.args else None
    row = _SCALARS.get(code) if isinstance(code, str) else None
    if row is None or not isinstance(data, bytes) or len(data) != struct.calcsize("<" + row):
        raise ValueError(f"it is no number of a dtype that is read here ({code!r:.40})")
    return struct.unpack((">" if _is_big_endian(dtype) else "<") + row, data)[0]


def describe_numpy_array(kind: Any, *more: Any) -> PickledObject:
    """Return an object that stands for a numpy array; its values are set later, as its state.

    `more` arguments are ignored. Raises ValueError where `kind` is no class.
    """
    if not isinstance(kind, GlobalName):
        raise ValueError("it makes no class")
    return PickledObject(kind)


def describe_numpy_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> PickledObject:
    """Return an object that stands for the numpy array of a buffer, as protocol 5 pickles it.

    `order` is "C" for row-major numbers, "F" for column-major ones. Raises ValueError for another.
    """
    if order not in ("C", "F"):
        raise ValueError("its order is neither C nor F")
    state = (1, shape, dtype, order == "F", data)
    return PickledObject(GlobalName("numpy", "ndarray"), state=state)


def array_tensor(value: PickledObject) -> TensorValue | None:
    """Return a numpy array of numbers as a described tensor, whose storage holds the bytes.

    None for any other object, and for arrays of texts, dates, objects and records. Raises
    ValueError where the bytes do not fit the shape.
    """
    state = value.state
    if value.kind.module.partition(".")[0] != "numpy" or value.kind.name not in _ARRAYS:
        return None
    if not isinstance(state, tuple) or len(state) != 5:
        return None
    _, shape, dtype, columns, data = state
    name = _number_name(dtype)
    if name is None or not isinstance(data, bytes):
        return None
    if (
        not isinstance(shape, tuple | list)
        or len(shape) > MAX_DIMS
        or any(type(size) is not int or size < 0 for size in shape)
        or math.prod(shape) * DTYPES[name][1] != len(data)
    ):
        raise ValueError(f"an array of numpy has {len(data)} bytes, which do not fit its shape")
    sizes = tuple(shape)
    # Elements from one index to the next on each axis, in row-major or column-major order.
    inner = sizes[:-1] if columns else sizes[:0:-1]
    steps = tuple(accumulate(inner, mul, initial=1))
    storage = Storage("", name, len(data), data=data, swapped=_is_big_endian(dtype))
    stride = steps if columns else steps[::-1]
    return TensorValue(storage, name, 0, sizes, stride[: len(sizes)], str(value.kind))


def _number_name(dtype: Any) -> str | None:
    """Return torch's name of a described dtype of numpy; None where it is not of plain numbers.

    bfloat16 and FP8 of the package ml_dtypes are classes of the same names as torch's.
    """
    code = dtype.args[0] if isinstance(dtype, PickledObject) and dtype.args else None
    if isinstance(code, GlobalName) and code.module == "ml_dtypes" and code.name in DTYPES:
        return code.name
    return _NUMBERS.get(code) if isinstance(code, str) else None


def _is_big_endian(dtype: PickledObject) -> bool:
    """Return whether the numbers of a described dtype are big-endian."""
    return isinstance(dtype.state, tuple) and ">" in dtype.state[1:2]
