"""Legal and malformed safetensors files: the tables the tests run over.

The malformed ones are the rules of the format, each broken once, with the cases of the reference's
own tests (incomplete buffer, header sizes, misaligned FP4 ...) and of its published attack notes.
"""

import json
from dataclasses import dataclass
from typing import Any

from aprfmt.errors import FormatError, TruncatedError


@dataclass(frozen=True)
class Case:
    """A file and its verdict; `lenient` marks what the reference library lets pass."""

    id: str
    data: bytes
    says: str = ""
    error: type[FormatError] | None = FormatError
    lenient: bool = False

    def __str__(self) -> str:
        return self.id


def reference(data: bytes) -> dict[str, dict[str, Any]]:
    """Return what the reference library reads: dtype, shape and data by name."""
    from safetensors import deserialize

    return dict(deserialize(data))  # type: ignore[no-untyped-call]


def entry(
    dtype: Any = "F32", shape: Any = (4,), offsets: Any = (0, 16), **more: Any
) -> dict[str, Any]:
    """Return one header entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def file(
    header: dict[str, Any] | str | bytes, data: bytes = b"", length: int | None = None
) -> bytes:
    """Return a file; `header` may be raw text or bytes."""
    if isinstance(header, dict):
        header = json.dumps(header, separators=(",", ":"))
    raw = header if isinstance(header, bytes) else header.encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


_W = {"w": entry()}
_D = bytes(16)
_TEXT = json.dumps(_W)
_ENTRY = json.dumps(entry())
_META: Any = {"__metadata__": {"format": "pt"}, **_W}


def _cut(id: str, data: bytes, says: str) -> Case:
    return Case(id, data, says, TruncatedError)


MALFORMED: tuple[Case, ...] = (
    _cut("empty", b"", "0 bytes"),
    _cut("too_small", b"<hey>", "5 bytes"),
    Case("length_only", bytes(8), "begins with nothing"),
    Case("length_over_limit", file(_W, _D, 100_000_001), "the format allows 100000000"),
    Case("length_2p63", file(_W, _D, 1 << 63), "the format allows"),
    _cut("length_beyond", file(_W, b"", 1000), "header length at offset 0 is 1000"),
    _cut("header_cut", file(_W, _D)[:20], "12 bytes follow"),
    Case("header_array", file("[]"), "begins with 0x5b"),
    Case("header_string", file('"hi"'), "begins with 0x22"),
    Case("space_before", file(" " + _TEXT, _D), "begins with 0x20", lenient=True),
    Case("newline_before", file("\n" + _TEXT, _D), "begins with 0x0a", lenient=True),
    Case("newline_after", file(_TEXT + "\n", _D), "ends with 0x0a", lenient=True),
    Case("zero_after", file(_TEXT + "\0", _D), "ends with 0x00"),
    Case("text_after", file(_TEXT + "}", _D), "not JSON"),
    Case("bom", file(b"\xef\xbb\xbf" + _TEXT.encode(), _D), "begins with 0xef"),
    Case("not_utf8", file(b'{"\xff":1}'), "not UTF-8"),
    Case("not_json", file("{notjson}"), "not JSON"),
    Case("nan", file('{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}', _D), "NaN"),
    Case("deep", file('{"a":' * 50000 + "1" + "}" * 50000), "deep"),
    Case("duplicate", file(f'{{"w":{_ENTRY},"w":{_ENTRY}}}', _D),
         "'w' stands twice", lenient=True),
    Case("duplicate_escaped", file(f'{{"w":{_ENTRY},"\\u0077":{_ENTRY}}}', _D),
         "'w' stands twice", lenient=True),
    Case("duplicate_field", file('{"w":{"dtype":"F32","dtype":"F32","shape":[4],'
                                 '"data_offsets":[0,16]}}', _D), "'dtype' stands twice"),
    Case("lone_surrogate", file('{"\\ud800":' + _ENTRY + "}", _D), "surrogate"),
    Case("metadata_number", file({"__metadata__": {"n": 1}, **_W}, _D), "is int"),
    Case("metadata_nested", file({"__metadata__": {"n": {}}, **_W}, _D), "is dict"),
    Case("metadata_list", file({"__metadata__": ["a"], **_W}, _D), "is list"),
    Case("metadata_null", file({"__metadata__": None, **_W}, _D), "NoneType", lenient=True),
    Case("entry_list", file({"w": []}), "'w' has []"),
    Case("entry_null", file({"w": None}), "'w' has None"),
    Case("no_dtype", file({"w": {"shape": [4], "data_offsets": [0, 16]}}, _D), "expected dtype"),
    Case("no_shape", file({"w": {"dtype": "F32", "data_offsets": [0, 16]}}, _D), "expected dtype"),
    Case("no_offsets", file({"w": {"dtype": "F32", "shape": [4]}}, _D), "expected dtype"),
    Case("unknown_field", file({"w": entry(note="x")}, _D), "note", lenient=True),
    Case("dtype_unknown", file({"w": entry("F31")}, _D), "'F31' is not one of"),
    Case("dtype_lower", file({"w": entry("f32")}, _D), "dtype 'f32'"),
    Case("dtype_number", file({"w": entry(0)}, _D), "dtype '0'"),
    Case("shape_negative", file({"w": entry(shape=[-4])}, _D), "non-negative integers"),
    Case("shape_float", file({"w": entry(shape=[4.0])}, _D), "non-negative integers"),
    Case("shape_bool", file({"w": entry("U8", [True], [0, 1])}, b"\0"), "non-negative integers"),
    Case("shape_string", file({"w": entry(shape="4")}, _D), "non-negative integers"),
    Case("shape_number", file({"w": entry(shape=4)}, _D), "non-negative integers"),
    Case("shape_2p64", file({"w": entry(shape=[1 << 64])}, _D), "non-negative integers"),
    Case("shape_wraps", file({"w": entry(shape=[1 << 32, 1 << 32])}, _D), "more elements"),
    Case("shape_wraps_to_0", file({"w": entry(shape=[1 << 32, 1 << 32, 0], offsets=[0, 0])}),
         "more elements"),
    Case("bits_wrap", file({"w": entry("F64", [1 << 60], [0, 0])}), "more bits"),
    Case("offsets_one", file({"w": entry(offsets=[16])}, _D), "the second of two"),
    Case("offsets_three", file({"w": entry(offsets=[0, 16, 16])}, _D), "the second of two"),
    Case("offsets_negative", file({"w": entry(offsets=[-16, 0])}, _D), "non-negative"),
    Case("offsets_swapped", file({"w": entry(offsets=[16, 0])}, _D), "hold -16 bytes"),
    Case("size_small", file({"w": entry(offsets=[0, 15])}, bytes(15)), "takes 16"),
    Case("size_large", file({"w": entry(offsets=[0, 17])}, bytes(17)), "takes 16"),
    Case("f4_misaligned", file({"w": entry("F4", [3], [0, 2])}, bytes(2)), "12 bits"),
    Case("f6_misaligned", file({"w": entry("F6_E2M3", [2], [0, 2])}, bytes(2)), "12 bits"),
    Case("hole_at_start", file({"w": entry(offsets=[8, 24])}, bytes(24)), "8 bytes unused"),
    Case("hole_between", file({"a": entry(), "b": entry(offsets=[20, 36])}, bytes(36)),
         "4 bytes unused after tensor 'a'"),
    Case("overlap", file({"a": entry(), "b": entry(offsets=[8, 24])}, bytes(24)), "overlaps"),
    Case("overlap_same", file({"a": entry(), "b": entry()}, _D), "overlaps"),
    Case("overlap_amplify", file({f"t{n}": entry() for n in range(1000)}, _D), "overlaps"),
    Case("empty_inside", file({"a": entry(), "z": entry("F32", [0], [8, 8])}, _D), "overlaps"),
    _cut("trunc_data", file(_W, _D[:-1]), "1 bytes are missing"),
    _cut("no_data", file(_W), "16 bytes are missing"),
    Case("trailing", file(_W, _D + b"x"), "1 bytes follow"),
    Case("polyglot_zip", file(_W, _D + b"PK\x05\x06" + bytes(18)), "22 bytes follow"),
    Case("trailing_no_tensors", file({}, b"x"), "1 bytes follow"),
)  # fmt: skip

_ALL_ONES = {"a": entry(shape=[1] * 70, offsets=[0, 4])}

LEGAL: tuple[Case, ...] = tuple(
    Case(id, data, "", None)
    for id, data in (
        ("plain", file(_W, _D)),
        ("no_tensors", file({})),
        ("metadata_only", file({"__metadata__": {"a": "b"}})),
        ("metadata_empty", file({"__metadata__": {}, **_W}, _D)),
        ("metadata", file(_META, _D)),
        ("padded_header", file(_TEXT + " " * 100, _D)),
        ("unpadded_header", file(_TEXT + " ", _D)),
        ("spaced_json", file(json.dumps(_W, indent=1), _D)),
        ("scalar", file({"w": entry(shape=[], offsets=[0, 4])}, bytes(4))),
        ("zero_size", file({"w": entry(shape=[2, 0], offsets=[0, 0])})),
        ("zero_in_middle", file({"a": entry(), "z": entry("F32", [0], [16, 16]),
                                 "b": entry(offsets=[16, 32])}, bytes(32))),
        ("zero_first", file({"b": entry(), "z": entry("I8", [0], [0, 0])}, _D)),
        ("other_order", file({"b": entry(offsets=[16, 32]), "a": entry()}, bytes(32))),
        ("empty_name", file({"": entry()}, _D)),
        ("name_escaped", file('{"\\u00e9\\ud83d\\ude00":' + _ENTRY + "}", _D)),
        ("name_controls", file({"\x1b[31m\n": entry()}, _D)),
        ("dims_70", file(_ALL_ONES, bytes(4))),
        ("unaligned", file({"a": entry("U8", [3], [0, 3]), "b": entry(offsets=[3, 19])},
                           bytes(19))),
        ("f4", file({"w": entry("F4", [4], [0, 2])}, bytes(2))),
        ("f6", file({"w": entry("F6_E3M2", [4], [0, 3])}, bytes(3))),
        ("fp8_scale", file({"w": entry("F8_E8M0", [4], [0, 4])}, bytes(4))),
        ("nan_bytes", file(_W, b"\xff" * 16)),
    )
)  # fmt: skip
