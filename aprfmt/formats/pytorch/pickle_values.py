"""Descriptions of what a torch.save pickle contains: tensors, storages, dicts and objects.

None of them is made. Source: torch/_utils.py, torch/_tensor.py and torch/serialization.py (names
and arguments).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# dtype of torch -> (encoding, bytes of an element, values that it takes on a further last axis).
# Numbers without an encoding here are shown as their parts: complex128 as pairs of F64.
DTYPES: Mapping[str, tuple[str, int, int]] = {
    "float32": ("F32", 4, 1),
    "float64": ("F64", 8, 1),
    "float16": ("F16", 2, 1),
    "bfloat16": ("BF16", 2, 1),
    "int64": ("I64", 8, 1),
    "int32": ("I32", 4, 1),
    "int16": ("I16", 2, 1),
    "int8": ("I8", 1, 1),
    "uint8": ("U8", 1, 1),
    "uint16": ("U16", 2, 1),
    "uint32": ("U32", 4, 1),
    "uint64": ("U64", 8, 1),
    "bool": ("BOOL", 1, 1),
    "complex64": ("C64", 8, 1),
    "complex128": ("F64", 16, 2),
    "complex32": ("F16", 4, 2),
    "float8_e4m3fn": ("F8_E4M3", 1, 1),
    "float8_e5m2": ("F8_E5M2", 1, 1),
    "float8_e8m0fnu": ("F8_E8M0", 1, 1),
    "float8_e4m3fnuz": ("F8_E4M3FNUZ", 1, 1),
    "float8_e5m2fnuz": ("F8_E5M2FNUZ", 1, 1),
    "float4_e2m1fn_x2": ("F4", 1, 1),
    "qint8": ("I8", 1, 1),
    "quint8": ("U8", 1, 1),
    "qint32": ("I32", 4, 1),
    "quint4x2": ("U8", 1, 1),
    "quint2x4": ("U8", 1, 1),
    **{f"uint{bits}": ("U8", 1, 1) for bits in range(1, 8)},
    **{f"int{bits}": ("I8", 1, 1) for bits in range(1, 8)},
    **{name: ("U8", 1, 1) for name in ("bits8", "bits1x8", "bits2x4", "bits4x2")},
}
# Of these a byte holds several numbers, one after another through the whole tensor.
PACKED: Mapping[str, int] = {"quint4x2": 2, "quint2x4": 4}
# The classes of typed storages, torch/storage.py.
STORAGES: Mapping[str, str] = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A module and a name in it that loading the pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """A described storage: bytes that tensors share, by key.

    `start` is the offset in bytes at which a view of the storage begins. `data` are the bytes of an
    array that stand in the pickle itself; None for a storage of the file. `swapped`: those are
    big-endian.
    """

    key: str
    dtype: str
    nbytes: int
    start: int = 0
    data: bytes | None = None
    swapped: bool = False


@dataclass(slots=True, eq=False)
class TensorValue:
    """A described tensor: offset and strides are in elements of `dtype`, as torch counts them.

    `storage` is None for one without data (meta). `kind` is the class where that is no plain
    tensor; `facts` are its numbers and texts by name, `parts` the tensors that belong to it, by
    suffix. `shifts` are the lazy bits of torch that change its numbers: "conj", "neg".
    """

    storage: Storage | None
    dtype: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    kind: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)
    shifts: tuple[str, ...] = ()

    @property
    def in_pickle(self) -> bool:
        """Whether its numbers stand in the pickle itself, as those of an array of numpy do."""
        return self.storage is not None and self.storage.data is not None

    @property
    def quantized(self) -> bool:
        """Whether its stored numbers are codes of its values, of whatever class it is."""
        return "qscheme" in self.facts


@dataclass(slots=True, eq=False)
class PickledDict:
    """A described dict of any class, as (key, value) pairs in the order they were set."""

    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """Return the value that was set last under a text key; None without it."""
        return next((value for name, value in reversed(self.pairs) if name == key), None)


@dataclass(slots=True, eq=False)
class SparseTensorValue:
    """A described tensor in a layout other than strided, or a nested one.

    It has its tensors (indices, values) by name, and facts.
    """

    kind: str
    parts: dict[str, Any]
    facts: dict[str, Any]


@dataclass(slots=True, eq=False)
class PickledObject:
    """A described object of a class that is not imported.

    Its constructor's arguments, its state, and items and list elements that were added.
    """

    kind: GlobalName
    args: tuple[Any, ...] = ()
    state: Any = None
    items: PickledDict = field(default_factory=PickledDict)
    rows: list[Any] = field(default_factory=list)
