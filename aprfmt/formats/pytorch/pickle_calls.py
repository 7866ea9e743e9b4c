"""The functions whose calls torch.save writes, by name: what each call describes.

A row of the table takes the call's arguments, returns a description of the result and raises
ValueError for other arguments. Nothing is called. Arguments as in torch/_utils.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aprfmt.formats.cursor import MAX_DIMS
from aprfmt.formats.pytorch.distributed import SHARDED, SHARDS
from aprfmt.formats.pytorch.numpy_arrays import (
    array_tensor,
    describe_numpy_array,
    describe_numpy_buffer,
    describe_numpy_dtype,
    describe_numpy_scalar,
)
from aprfmt.formats.pytorch.pickle_imports import is_value_class
from aprfmt.formats.pytorch.pickle_reader import describe_value
from aprfmt.formats.pytorch.pickle_values import (
    DTYPES,
    GlobalName,
    PickledDict,
    PickledObject,
    SparseTensorValue,
    Storage,
    TensorValue,
)

_LIMIT = 1 << 62  # of sizes, strides and offsets, as torch's 64 bits hold them


def describe_call(function: GlobalName, args: tuple[Any, ...]) -> Any:
    """Return the description of a call's result; None if the function is not in the table.

    Raises ValueError for arguments that torch.save does not give the function.
    """
    row = _CALLS.get(str(function))
    if row is None:
        return None
    try:
        return row(*args)
    except TypeError as error:
        raise ValueError(f"its arguments do not fit ({error})") from None


def dtype_of(value: Any) -> str:
    """Return the name of the dtype that a pickled torch.NAME means; ValueError for another."""
    if isinstance(value, GlobalName) and value.module == "torch" and value.name in DTYPES:
        return value.name
    raise ValueError(f"{describe_value(value)} is no dtype that is read here")


def _check_size(value: Any, what: str) -> int:
    """Return a value as an int from 0 to 2**62; ValueError naming `what` for another."""
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise ValueError(f"{what} is {describe_value(value) if type(value) is not int else value}")
    return value


def _check_sizes(value: Any, what: str) -> tuple[int, ...]:
    """Return a list of sizes as a tuple; ValueError for a value or a length out of range."""
    if not isinstance(value, tuple | list) or len(value) > MAX_DIMS:
        raise ValueError(f"{what} is {describe_value(value)}, expected at most {MAX_DIMS} integers")
    return tuple(_check_size(each, what) for each in value)


def _describe_tensor(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
) -> TensorValue:
    """Return a strided view of a storage: what `torch._utils._rebuild_tensor_v2` would make.

    Gradient and hooks do not change its values. Raises ValueError where `storage` is no storage.
    """
    if not isinstance(storage, Storage):
        raise ValueError(f"the storage is {describe_value(storage)}")
    return _describe_view(storage, storage.dtype, offset, size, stride, metadata)


def _describe_view(
    storage: Storage | None, dtype: str, offset: Any, size: Any, stride: Any, metadata: Any = None
) -> TensorValue:
    """Return a TensorValue of dtype, offset, size and stride (in elements) in a storage.

    `metadata` may say that the values are to be conjugated or negated. Raises ValueError where
    sizes, strides or offset are no counts, and for fewer or more strides than sizes.
    """
    shape, strides = _check_sizes(size, "the size"), _check_sizes(stride, "the stride")
    if len(shape) != len(strides):
        raise ValueError(f"{len(shape)} sizes and {len(strides)} strides")
    bits = metadata.pairs if isinstance(metadata, PickledDict) else []
    shifts = tuple(key for key, value in bits if key in ("conj", "neg") and value is True)
    start = _check_size(offset, "the offset")
    return TensorValue(storage, dtype, start, shape, strides, shifts=shifts)


def _describe_tensor_v3(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> TensorValue:
    """Return the description of a view whose dtype is not that of its storage.

    Gradient and hooks do not change its values. Raises ValueError where `storage` is no storage.
    """
    if not isinstance(storage, Storage):
        raise ValueError(f"the storage is {describe_value(storage)}")
    return _describe_view(storage, dtype_of(dtype), offset, size, stride, metadata)


def _describe_parameter(
    data: Any, requires_grad: Any = True, hooks: Any = None, state: Any = None
) -> Any:
    """Return the description of a parameter: that of its data, with its attributes added.

    Gradient and hooks do not change its values. Raises ValueError where `data` is no tensor.
    """
    if not isinstance(data, TensorValue | SparseTensorValue):
        raise ValueError(f"the data is {describe_value(data)}")
    if isinstance(data, TensorValue) and not data.kind:
        data.kind = "Parameter"
    if isinstance(data, TensorValue):
        _add_attributes(data, state)
    return data


def _describe_quantized(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    quantizer: Any,
    requires_grad: Any = False,
    hooks: Any = None,
) -> TensorValue:
    """Return the description of a quantized tensor, with its scales and zero points.

    Gradient and hooks do not change its values. Raises ValueError for a quantizer of another form.
    """
    found = _describe_tensor(storage, offset, size, stride)
    if (
        not isinstance(quantizer, tuple)
        or not quantizer
        or not isinstance(quantizer[0], GlobalName)
    ):
        raise ValueError(f"the quantizer is {describe_value(quantizer)}")
    found.kind = "quantized"
    found.facts["qscheme"] = quantizer[0].name
    if quantizer[0].name == "per_tensor_affine" and len(quantizer) == 3:
        found.facts |= {"scale": quantizer[1], "zero_point": quantizer[2]}
    elif len(quantizer) == 4:
        found.parts |= {"scales": quantizer[1], "zero_points": quantizer[2]}
        found.facts["axis"] = quantizer[3]
    else:
        raise ValueError(f"the quantizer {quantizer[0].name} has {len(quantizer)} values")
    return found


def _describe_meta(dtype: Any, size: Any, stride: Any, requires_grad: Any = False) -> TensorValue:
    """Return the description of a tensor on the meta device, which has no values.

    Its gradient does not matter.
    """
    return _describe_view(None, dtype_of(dtype), 0, size, stride)


def _describe_wrapper(
    kind: Any,
    dtype: Any,
    size: Any,
    stride: Any,
    offset: Any,
    layout: Any,
    device: Any,
    requires_grad: Any,
) -> TensorValue:
    """Return the description of a wrapper subclass, a tensor without a storage.

    Layout, device and gradient do not matter for it.
    """
    found = _describe_view(None, dtype_of(dtype), offset, size, stride)
    found.kind = describe_value(kind)
    return found


def _describe_subclass(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Return the description of a tensor subclass: its tensor, its class and its attributes.

    Raises ValueError where the function that makes it, or its class, is not a known one.
    """
    if not isinstance(function, GlobalName) or not isinstance(args, tuple):
        raise ValueError(f"it is made by {describe_value(function)}")
    if str(function) not in _CALLS:
        raise ValueError(f"it is made by {describe_value(function)}, which is not in the table")
    if not isinstance(kind, GlobalName) or not is_value_class(kind):
        raise ValueError(f"its class is {describe_value(kind)}")
    if str(function) == _OF_TYPE:
        raise ValueError("it is made by itself")
    found = describe_call(function, args)
    if isinstance(found, TensorValue):
        if str(kind) not in ("torch.Tensor", "torch._tensor.Tensor"):
            found.kind = str(kind)
        _add_attributes(found, state)
    return found


def _add_attributes(tensor: TensorValue, state: Any) -> None:
    """Add the attributes in a state (a dict, or a tuple of a dict and of slots) to a tensor.

    The state of a ShardedTensor is a tuple that begins with the list of its shards.
    """
    if tensor.kind == SHARDED and isinstance(state, tuple) and state:
        tensor.parts[SHARDS] = state[0]
        return
    for table in state if isinstance(state, tuple) else (state,):
        if isinstance(table, PickledDict):
            tensor.parts |= {key: value for key, value in table.pairs if isinstance(key, str)}


def _describe_device_tensor(
    data: Any, dtype: Any, device: Any, requires_grad: Any = False
) -> TensorValue:
    """Return the description of a tensor of a device without storages, such as XLA's.

    torch saves the tensor's copy on the CPU, earlier versions a numpy array: bfloat16 as float32.
    Raises ValueError where `data` is neither, and for numbers of another dtype.
    """
    found = array_tensor(data) if isinstance(data, PickledObject) else data
    if not isinstance(found, TensorValue):
        raise ValueError(f"the data is {describe_value(data)}")
    wanted = dtype_of(dtype)
    if (found.dtype, wanted) == ("float32", "bfloat16") and isinstance(data, PickledObject):
        return _upper_halves(found)
    if found.dtype != wanted:
        raise ValueError(f"its numbers are {found.dtype}, and it is said to be {wanted}")
    found.kind = ""
    return found


def _upper_halves(value: TensorValue) -> TensorValue:
    """Return the bfloat16 numbers that a float32 array holds exactly: the upper half of each."""
    assert value.storage is not None
    halves = 1 if not value.storage.swapped else 0
    storage = replace(value.storage, dtype="bfloat16")
    stride = tuple(2 * step for step in value.stride)
    return TensorValue(storage, "bfloat16", halves, value.shape, stride)


def _describe_sparse(layout: Any, data: Any) -> SparseTensorValue:
    """Return the description of a sparse tensor: its tensors by name, its layout and shape.

    Raises ValueError where layout or data have another form.
    """
    if not isinstance(layout, str) or not isinstance(data, tuple) or len(data) < 3:
        raise ValueError(f"its layout is {describe_value(layout)}, its data {describe_value(data)}")
    coo = layout == "torch.sparse_coo"
    rows = layout in ("torch.sparse_csr", "torch.sparse_bsr")
    names = (
        ("indices", "values")
        if coo
        else (
            ("crow_indices", "col_indices", "values")
            if rows
            else ("ccol_indices", "row_indices", "values")
        )
    )
    if len(data) <= len(names):
        raise ValueError(f"{layout} has {len(data)} values")
    facts = {"layout": layout, "shape": list(_check_sizes(data[len(names)], "the size"))}
    return SparseTensorValue(layout, dict(zip(names, data, strict=False)), facts)


def _describe_nested(buffer: Any, sizes: Any, strides: Any, offsets: Any) -> SparseTensorValue:
    """Return the description of a nested tensor: its buffer, sizes, strides and offsets."""
    parts = {"buffer": buffer, "sizes": sizes, "strides": strides, "storage_offsets": offsets}
    return SparseTensorValue("nested", parts, {"layout": "nested"})


def _describe_jagged(given: Any) -> SparseTensorValue:
    """Return the description of a nested tensor in the jagged layout: values, offsets, lengths.

    Cached values in `given` are not used, as they follow from the offsets. ValueError without
    values and offsets.
    """
    held = dict(given.pairs) if isinstance(given, PickledDict) else {}
    parts = {name: held.get(name) for name in ("values", "offsets", "lengths")}
    if not all(isinstance(parts[name], TensorValue) for name in ("values", "offsets")):
        raise ValueError("it has no values and offsets")
    found = {name: part for name, part in parts.items() if part is not None}
    return SparseTensorValue(
        "jagged", found, {"layout": "torch.jagged", "ragged_idx": held.get("_ragged_idx")}
    )


def _describe_dict(pairs: Any = None, *more: Any) -> PickledDict:
    """Return a dict of the (key, value) pairs that a dict class was called with.

    Without arguments it is empty, as with a class (the default factory of a defaultdict). `more`
    arguments are ignored. ValueError for anything that is not a list of pairs.
    """
    if isinstance(pairs, PickledDict):
        return PickledDict(list(pairs.pairs))
    if pairs is None or isinstance(pairs, GlobalName):
        return PickledDict()
    rows = pairs if isinstance(pairs, list | tuple) else [pairs]
    if not all(isinstance(row, list | tuple) and len(row) == 2 for row in rows):
        raise ValueError("it is given no pairs")
    return PickledDict([(row[0], row[1]) for row in rows])


def _describe_list(values: Any = ()) -> list[Any]:
    """Return the values that set, frozenset or list was called with, as a list.

    Raises ValueError for other arguments than a list or tuple.
    """
    if not isinstance(values, list | tuple):
        raise ValueError(f"it is given {describe_value(values)}")
    return list(values)


def _encode_text(text: Any, coding: Any = "utf-8") -> bytes:
    """Return the bytes of `_codecs.encode(text, coding)`; ValueError for another coding."""
    if not isinstance(text, str) or coding not in ("latin1", "latin-1", "utf-8", "ascii"):
        raise ValueError(f"it is given {describe_value(text)} and {coding!r:.40}")
    try:
        return text.encode(coding)
    except UnicodeEncodeError:
        raise ValueError(f"its text has no {coding} bytes") from None


def _describe_bytes(value: Any = b"", *more: Any) -> bytes:
    """Return the bytes that `bytes` or `bytearray` was called with.

    Raises ValueError for arguments that are neither bytes nor text in latin-1.
    """
    if isinstance(value, str) and more and more[0] in ("latin-1", "latin1"):
        return _encode_text(value, "latin1")
    if not isinstance(value, bytes) or more:
        raise ValueError(f"it is given {describe_value(value)}")
    return value


def _describe_complex(real: Any, imaginary: Any = 0.0) -> complex:
    """Return a complex number; ValueError unless both are numbers."""
    if not all(isinstance(each, int | float) for each in (real, imaginary)):
        raise ValueError(f"it is given {describe_value(real)}")
    try:
        return complex(real, imaginary)
    except OverflowError:
        raise ValueError("its number is too large") from None


def _describe_text(value: Any, *more: Any) -> Any:
    """Return the text that torch.device or a layout was called with, whatever `more` is.

    Raises ValueError for another argument than text.
    """
    if not isinstance(value, str):
        raise ValueError(f"it is given {describe_value(value)}")
    return value


def _describe_reconstructed(kind: Any, base: Any, state: Any) -> PickledObject:
    """Return an empty object of a class; ValueError unless the class may be described.

    The other two arguments of copyreg's function are not used: the state comes later.
    """
    if not isinstance(kind, GlobalName) or not is_value_class(kind):
        raise ValueError(f"it makes {describe_value(kind)}")
    return PickledObject(kind)


def _describe_nested_class(outer: Any, name: Any) -> GlobalName | None:
    """Return the name of a class in another class, which protocols 2 and 3 get by getattr.

    None, which refuses the call, where `outer` may do more than hold values, or where either name
    does not begin with a capital letter, as those of classes do.
    """
    if not isinstance(outer, GlobalName) or not isinstance(name, str):
        return None
    if not all(part.isidentifier() and part[:1].isupper() for part in (outer.name, name)):
        return None
    return GlobalName(outer.module, f"{outer.name}.{name}") if is_value_class(outer) else None


_OF_TYPE = "torch._tensor._rebuild_from_type_v2"
_NUMPY_CORE = ("numpy.core", "numpy._core")
_CALLS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _describe_tensor,
    "torch._utils._rebuild_tensor_v2": _describe_tensor,
    "torch._utils._rebuild_tensor_v3": _describe_tensor_v3,
    "torch._utils._rebuild_parameter": _describe_parameter,
    "torch._utils._rebuild_parameter_with_state": _describe_parameter,
    "torch.nn.parameter.Parameter": _describe_parameter,
    "torch._utils._rebuild_qtensor": _describe_quantized,
    "torch._utils._rebuild_meta_tensor_no_storage": _describe_meta,
    "torch._utils._rebuild_wrapper_subclass": _describe_wrapper,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _describe_device_tensor,
    "torch._utils._rebuild_device_tensor_from_numpy": _describe_device_tensor,
    "torch._utils._rebuild_sparse_tensor": _describe_sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _describe_sparse,
    "torch._utils._rebuild_nested_tensor": _describe_nested,
    "torch.nested._internal.nested_tensor._rebuild_njt": _describe_jagged,
    _OF_TYPE: _describe_subclass,
    "torch.Size": lambda sizes=(): _check_sizes(sizes, "the size"),
    "torch.device": _describe_text,
    "torch.serialization._get_layout": _describe_text,
    "collections.OrderedDict": _describe_dict,
    "collections.defaultdict": _describe_dict,
    "collections.Counter": _describe_dict,
    "builtins.dict": _describe_dict,
    "builtins.set": _describe_list,
    "builtins.frozenset": _describe_list,
    "builtins.list": _describe_list,
    "builtins.complex": _describe_complex,
    "builtins.getattr": _describe_nested_class,
    "builtins.bytes": _describe_bytes,
    "builtins.bytearray": _describe_bytes,
    "_codecs.encode": _encode_text,
    "copyreg._reconstructor": _describe_reconstructed,
    "numpy.dtype": describe_numpy_dtype,
    **{f"{module}.multiarray.scalar": describe_numpy_scalar for module in _NUMPY_CORE},
    **{f"{module}.multiarray._reconstruct": describe_numpy_array for module in _NUMPY_CORE},
    **{f"{module}.numeric._frombuffer": describe_numpy_buffer for module in _NUMPY_CORE},
}
DESCRIBED = frozenset(_CALLS)  # the functions of the table, by name
