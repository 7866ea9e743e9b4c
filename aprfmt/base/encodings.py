"""The encoding table: every way a tensor's numbers can be stored, once.

An *encoding* is how bytes in a file hold numbers (F32, BF16, Q4_K, NF4 ...); a *dtype* is the
element type of an array in memory. Nothing here imports numpy: `inspect` and `tensors` run
without it.

Sources: ggml's type table (ids and block sizes as in the C structs of ggml-common.h), the
safetensors format page (dtype names), the APR v2 format (codes; 8 and 9 are legacy).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from aprfmt.base.fork_types import CONTESTED, DECODED, MEASURED, TypeSize
from aprfmt.base.registry import installed_entry_points
from aprfmt.errors import CodecError

K = TypeVar("K")

# NAME:TYPE or NAME:COUNT TYPE without the space; TYPE is a letter and the bytes of one number, or
# members in parentheses.
_MEMBER = re.compile(r"(\w+):(\d*)(?:([fiuw]\d)|\((.*?)\))")


def block_members(layout: str) -> Iterator[tuple[str, int, str]]:
    """Yield (name, count, type) of a block's members in file order; count 0 is a single one.

    Types are letter and bytes: `f` float, `i` and `u` integer, `w` bytes that ggml reads as one
    word of so many. A member that repeats several has their layout as its type. Raises CodecError
    for text that is not such members.
    """
    rest = _MEMBER.sub("", layout).split()
    if rest:
        raise CodecError(
            f"layout {layout!r}: {rest[0]!r} is not NAME:TYPE or NAME:COUNT TYPE with one of the "
            "types f, i, u, w and bytes (f2, 16u1)"
        )
    for name, count, kind, inner in _MEMBER.findall(layout):
        yield name, int(count or 0), kind or inner


def block_numbers(layout: str) -> Iterator[tuple[str, int]]:
    """Yield (type, bytes) of every single number of a block, in file order.

    `layout` is that of the encoding's row.
    """
    for _, count, kind in block_members(layout):
        inner = list(block_numbers(kind)) if ":" in kind else [(kind, int(kind[1]))]
        yield from inner * (count or 1)


def member_offsets(layout: str) -> dict[str, tuple[int, int]]:
    """Return {member: (start, stop)}: the bytes that each member of a block takes.

    `layout` is that of the encoding's row.
    """
    found, at = {}, 0
    for name, count, kind in block_members(layout):
        one = sum(width for _, width in block_numbers(kind)) if ":" in kind else int(kind[1])
        found[name] = at, at + one * (count or 1)
        at = found[name][1]
    return found


@dataclass(frozen=True, slots=True)
class Encoding:
    """A row of the encoding table: how many elements a block holds and how many bytes it takes.

    `flat` encodings run over the flattened tensor, so that blocks cross row ends and rows cannot
    be moved without decoding. `header` bytes come once before the blocks of a non-empty tensor.
    `numpy` names the element dtype of encodings that are plain arrays (ml_dtypes' names count).
    `ggml`, `safetensors` and `apr` are the codes of the three containers, where they have one;
    `file_type` is the general.file_type of a GGUF that is mostly of it (enum llama_ftype).
    `layout` is the byte map of a block (see `block_members`), which decoding, byte swapping, bounds
    and explanations use; `row_layout` that of the header of each row. `claim` is for a weight
    stored in several tensors: a tensor W is one where a tensor `W.CLAIM` exists; its codec names
    the others.
    """

    name: str
    block_size: int
    type_size: int
    numpy: str = ""
    safetensors: str = ""
    ggml: int | None = None
    apr: int | None = None
    flat: bool = False
    header: int = 0
    removed: str = ""  # why it is not decoded: ggml dropped it, a fork has it, or its rows
    measure: TypeSize | None = None  # of a type that is copied, not decoded
    row_layout: str = ""
    layout: str = ""
    file_type: int | None = None
    claim: str = ""

    @property
    def known(self) -> bool:
        """Whether the size of its blocks is in the table: not for unknown ids and removed types."""
        return self.block_size > 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Return the bytes a tensor of `shape` takes (row-major, a scalar is one element).

        Raises CodecError for an unknown encoding or a row that is not a whole number of blocks.
        """
        if not self.known:
            raise CodecError(f"{self.name}: its size is not known, so no tensor of it can be made")
        count = math.prod(shape)
        if self.flat:
            return self.header * (count > 0) + -(-count // self.block_size) * self.type_size
        row = shape[-1] if shape else 1
        if row % self.block_size:
            raise CodecError(
                f"{self.name} rows must be a multiple of {self.block_size} elements, "
                f"found {row} in shape {list(shape)}"
            )
        rows = count // row if row else 0
        return rows * self.row_header + count // self.block_size * self.type_size

    @property
    def row_header(self) -> int:
        """Number of bytes in front of the blocks of each row."""
        return _layout_bytes(self.row_layout)

    def row_bytes(self, shape: Sequence[int]) -> int | None:
        """Return the bytes of one row (last axis); None where rows are not whole blocks."""
        if self.flat or not self.known:
            return None
        row = shape[-1] if shape else 1
        if row % self.block_size:
            return None
        return self.row_header + row // self.block_size * self.type_size

    @property
    def bits_per_weight(self) -> float:
        """Bits per element, companions not counted; 0.0 when unknown."""
        return 8 * self.type_size / self.block_size if self.known else 0.0


@cache
def _layout_bytes(layout: str) -> int:
    """Return the bytes of one block of a layout."""
    return sum(width for _, width in block_numbers(layout))


def block_encoding(name: str, block_size: int, layout: str, **codes: Any) -> Encoding:
    """Return the table's row of an encoding whose blocks have this layout.

    `codes` are further fields of the row.
    """
    return Encoding(name, block_size, _layout_bytes(layout), layout=layout, **codes)


def _plain_row(
    name: str, size: int, numpy: str, ggml: int | None, apr: int | None, type: int | None = None
) -> Encoding:
    """Return the table's row of an encoding of single numbers of `size` bytes.

    `ggml`, `apr` and `type` are its code in GGUF, in APR and its general.file_type.
    """
    return Encoding(
        name, 1, size, numpy=numpy, safetensors=name, ggml=ggml, apr=apr, file_type=type
    )


def _ggml(
    name: str, block_size: int, layout: str, ggml: int, type: int | None = None, **codes: Any
) -> Encoding:
    """Return the table's row of a ggml block type; `type` is its general.file_type."""
    return block_encoding(name, block_size, layout, ggml=ggml, file_type=type, **codes)


def _removed_row(name: str, ggml: int, todo: str) -> Encoding:
    """Return the table's row of a type that ggml removed; `todo` says what to do about it."""
    return Encoding(name, 0, 0, ggml=ggml, removed=todo)


_REPACK = "ggml removed this interleaved type; repack the tensor to Q4_0 with an older llama.cpp"
_GONE = "ggml removed this type in 2023; convert again from the original weights"

_DIALECTS = (
    "GPTQ", "AWQ", "FP8_BLOCK", "GPT_OSS", "MLX",
    "COMPRESSED_PACKED", "COMPRESSED_PACKED_FLOAT", "COMPRESSED_PLAIN",
    "MODELOPT", "FP8_EXPERTS", "TORCHAO", "MODELOPT_EXPERTS",
)  # fmt: skip

# A ggml row: elements, layout (as in the C struct), type id, general.file_type.
_ROWS: tuple[Encoding, ...] = (
    _plain_row("F32", 4, "float32", 0, 0, 0),
    _plain_row("F16", 2, "float16", 1, 1, 1),
    _ggml("Q4_0", 32, "d:f2 qs:16u1", 2, 2),
    _ggml("Q4_1", 32, "d:f2 m:f2 qs:16u1", 3, 3),
    _removed_row("Q4_2", 4, _GONE),
    _removed_row("Q4_3", 5, _GONE),
    _ggml("Q5_0", 32, "d:f2 qh:w4 qs:16u1", 6, 8),
    _ggml("Q5_1", 32, "d:f2 m:f2 qh:w4 qs:16u1", 7, 9),
    _ggml("Q8_0", 32, "d:f2 qs:32i1", 8, 7),
    _ggml("Q8_1", 32, "d:f2 s:f2 qs:32i1", 9),
    _ggml("Q2_K", 256, "scales:16u1 qs:64u1 d:f2 dmin:f2", 10, 10),
    _ggml("Q3_K", 256, "hmask:32u1 qs:64u1 scales:12u1 d:f2", 11, 12),
    _ggml("Q4_K", 256, "d:f2 dmin:f2 scales:12u1 qs:128u1", 12, 15, apr=12),
    _ggml("Q5_K", 256, "d:f2 dmin:f2 scales:12u1 qh:32u1 qs:128u1", 13, 17),
    _ggml("Q6_K", 256, "ql:128u1 qh:64u1 scales:16i1 d:f2", 14, 18, apr=14),
    _ggml("Q8_K", 256, "d:f4 qs:256i1 bsums:16i2", 15),
    _ggml("IQ2_XXS", 256, "d:f2 group:8(index:4u1 word:u4)", 16, 19),
    _ggml("IQ2_XS", 256, "d:f2 qs:32u2 scales:8u1", 17, 20),
    _ggml("IQ3_XXS", 256, "d:f2 qs:64u1 word:8u4", 18, 23),
    _ggml("IQ1_S", 256, "d:f2 qs:32u1 qh:8u2", 19, 24),
    _ggml("IQ4_NL", 32, "d:f2 qs:16u1", 20, 25),
    _ggml("IQ3_S", 256, "d:f2 qs:64u1 qh:8u1 signs:32u1 scales:4u1", 21, 26),
    _ggml("IQ2_S", 256, "d:f2 qs:32u1 signs:32u1 qh:8u1 scales:8u1", 22, 28),
    _ggml("IQ4_XS", 256, "d:f2 scales_h:u2 scales_l:4u1 qs:128u1", 23, 30),
    _plain_row("I8", 1, "int8", 24, 6),
    _plain_row("I16", 2, "int16", 25, None),
    _plain_row("I32", 4, "int32", 26, 4),
    _plain_row("I64", 8, "int64", 27, 5),
    _plain_row("F64", 8, "float64", 28, 3),
    _ggml("IQ1_M", 256, "qs:32u1 qh:16u1 scales:4u2", 29, 31),
    _plain_row("BF16", 2, "bfloat16", 30, 30, 32),
    _removed_row("Q4_0_4_4", 31, _REPACK),
    _removed_row("Q4_0_4_8", 32, _REPACK),
    _removed_row("Q4_0_8_8", 33, _REPACK),
    _ggml("TQ1_0", 256, "qs:48u1 qh:4u1 d:f2", 34, 36),
    _ggml("TQ2_0", 256, "qs:64u1 d:f2", 35, 37),
    _removed_row("IQ4_NL_4_4", 36, _REPACK),
    _removed_row("IQ4_NL_4_8", 37, _REPACK),
    _removed_row("IQ4_NL_8_8", 38, _REPACK),
    _ggml("MXFP4", 32, "e:u1 qs:16u1", 39, 38),
    _ggml("NVFP4", 64, "d:4u1 qs:32u1", 40, 39),
    _ggml("Q1_0", 128, "d:f2 qs:16u1", 41, 40),
    _ggml("Q2_0", 64, "d:f2 qs:16u1", 42, 41),
    # ik_llama.cpp's: some with a header in front of every row, some only measured and copied.
    *(_ggml(name, n, layout, id, row_layout=row) for name, n, layout, id, row in DECODED),
    *(
        Encoding(name, 0, 0, ggml=id, removed=why, measure=measure)
        for name, id, measure, why in MEASURED
    ),
    _plain_row("U8", 1, "uint8", None, 7),
    _plain_row("U16", 2, "uint16", None, None),
    _plain_row("U32", 4, "uint32", None, None),
    _plain_row("U64", 8, "uint64", None, None),
    _plain_row("BOOL", 1, "bool", None, None),
    _plain_row("C64", 8, "complex64", None, None),
    _plain_row("F8_E4M3", 1, "float8_e4m3fn", None, None),
    _plain_row("F8_E5M2", 1, "float8_e5m2", None, None),
    _plain_row("F8_E8M0", 1, "float8_e8m0fnu", None, None),
    _plain_row("F8_E4M3FNUZ", 1, "float8_e4m3fnuz", None, None),
    _plain_row("F8_E5M2FNUZ", 1, "float8_e5m2fnuz", None, None),
    # safetensors counts 4- and 6-bit elements in the shape and refuses a tensor whose bits do not
    # end on a byte; elements run over row ends.
    Encoding("F4", 2, 1, safetensors="F4", flat=True),
    Encoding("F6_E2M3", 4, 3, safetensors="F6_E2M3", flat=True),
    Encoding("F6_E3M2", 4, 3, safetensors="F6_E3M2", flat=True),
    # APR's own quantizations: blocks over the flattened tensor; Q8 has one float32 scale in front.
    block_encoding("APR_Q4", 32, "scale:f2 qs:16u1", apr=128, flat=True),
    Encoding("APR_Q8", 1, 1, apr=129, flat=True, header=4),
    # Dialects of safetensors checkpoints: packed integers and their scales, in several tensors. The
    # size of a block depends on the configuration, so these rows give no size.
    *(Encoding(name, 0, 0, flat=True) for name in _DIALECTS),
    # bitsandbytes: two elements a byte over the flattened matrix; companions hold the rest.
    Encoding("NF4", 2, 1, flat=True, claim="quant_state.bitsandbytes__nf4"),
    Encoding("FP4", 2, 1, flat=True, claim="quant_state.bitsandbytes__fp4"),
)


class RowsByKey(dict[K, Encoding]):
    """A dict of rows; missing keys are looked up among the rows that other packages offer.

    Other packages offer Encoding rows in the entry-point group `aprfmt.encodings`; such a row may
    not take a name or a code that a row here has. Iteration gives the rows read so far.
    """

    def __missing__(self, key: K) -> Encoding:
        """Return another package's row; KeyError for a key that none has."""
        if key in self:
            return self[key]
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        """Return whether a row has this key; reads other packages' rows for an unknown one."""
        if not super().__contains__(key):
            _read_entry_points()
        return super().__contains__(key)

    def get(self, key: K, default: Any = None) -> Any:
        """Return the row of a key, or `default`."""
        return self[key] if key in self else default


def _rows_by(key: str) -> RowsByKey[Any]:
    """Return {value of the field `key`: row}, without rows that have no value there."""
    found = ((getattr(row, key), row) for row in _ROWS)
    return RowsByKey({code: row for code, row in found if code not in ("", None)})


ENCODINGS: RowsByKey[str] = _rows_by("name")
BY_GGML: RowsByKey[int] = _rows_by("ggml")
BY_SAFETENSORS: RowsByKey[str] = _rows_by("safetensors")
BY_APR: RowsByKey[int] = _rows_by("apr")
BY_CLAIM: RowsByKey[str] = _rows_by("claim")


def all_encodings() -> RowsByKey[str]:
    """Return {name: row} of all encodings, those of other packages included."""
    _read_entry_points()
    return ENCODINGS


@cache
def _read_entry_points() -> None:
    """Add the rows that other packages offer to all tables, once; they replace none."""
    tables: tuple[tuple[str, RowsByKey[Any]], ...] = (
        ("name", ENCODINGS), ("ggml", BY_GGML), ("safetensors", BY_SAFETENSORS), ("apr", BY_APR),
        ("claim", BY_CLAIM),
    )  # fmt: skip
    for point in installed_entry_points("encodings"):
        row: Encoding = point.load()
        codes = [(table, getattr(row, key)) for key, table in tables]
        codes = [(table, code) for table, code in codes if code not in ("", None)]
        if not any(dict.__contains__(table, code) for table, code in codes):
            for table, code in codes:
                table[code] = row


UNNAMED = "type#?"


def unknown_encoding(ggml_id: int) -> Encoding:
    """Return a row for a ggml id whose layout is unknown.

    With it a file opens, and its bytes can be copied; decoding them raises.
    """
    claims = " or ".join(map(str, CONTESTED.get(ggml_id, ())))
    said = f"forks use it for {claims}; its bytes can be copied, not decoded" if claims else ""
    return Encoding(f"type#{ggml_id}", 0, 0, ggml=ggml_id, removed=said)


def find_encoding(name: str) -> Encoding:
    """Return the row of an encoding name; CodecError for an unknown name.

    `type#142` gives an unknown row with that ggml id. `type#?` stands for the encoding of a damaged
    tensor whose file names none.
    """
    row: Encoding | None = ENCODINGS.get(name)
    if row is not None:
        return row
    if name.startswith("type#") and name[5:].isdigit():
        return unknown_encoding(int(name[5:]))
    if name == UNNAMED:
        return Encoding(UNNAMED, 0, 0)
    raise CodecError(f"encoding {name!r} is not one we know: {', '.join(ENCODINGS)}")
