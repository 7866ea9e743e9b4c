"""Legal, odd and malformed APR v2 files: the tables the tests run over."""

import json
from dataclasses import dataclass

from aprfmt.errors import FormatError, TruncatedError, UnsupportedError
from tests.formats.apr_files import METADATA, AprFile, Tensor

_F = AprFile()
_HUGE = (1 << 64) - 1


@dataclass(frozen=True)
class Case:
    """A file and its verdict: `error` None means that it opens, with a note that has `says`."""

    id: str
    data: bytes
    says: str = ""
    error: type[FormatError] | None = FormatError

    def __str__(self) -> str:
        return self.id


def _refused(id: str, file: AprFile | bytes, says: str, error: type[FormatError]) -> Case:
    return Case(id, file if isinstance(file, bytes) else file.build(), says, error)


def _bad(id: str, file: AprFile | bytes, says: str) -> Case:
    return _refused(id, file, says, FormatError)


def _cut(id: str, file: AprFile | bytes, says: str) -> Case:
    return _refused(id, file, says, TruncatedError)


def _unsupported(id: str, file: AprFile | bytes, says: str) -> Case:
    return _refused(id, file, says, UnsupportedError)


def _one(**changes: object) -> AprFile:
    return _F.but(tensors=(Tensor(b"a", **changes),))  # type: ignore[arg-type]


def _text(text: str) -> AprFile:
    return _F.but(metadata=text.encode("utf-8", "surrogatepass"))


_WHOLE = _F.build()

MALFORMED: tuple[Case, ...] = (
    _cut("empty", b"", "0 bytes"),
    _cut("trunc_header", _WHOLE[:63], "63 bytes"),
    _bad("magic_other", _F.but(magic=b"GPR\0"), "47 50 52 00"),
    _unsupported("magic_v1", _F.but(magic=b"APRN", version=(1, 0)), "APR v1"),
    _unsupported("magic_v1_bad_crc", _F.but(magic=b"APRN", checksum=1), "APR v1"),
    _unsupported("magic_apr1", _F.but(magic=b"APR1"), "APR1"),
    _unsupported("magic_apr2_other", _F.but(magic=b"APR2", checksum=5), "APR2"),
    _unsupported("magic_documents_only", _F.but(magic=b"APR\x02"), "documents"),
    _bad("header_crc", _F.but(checksum=12345), "checksum at offset 40 is 0x00003039"),
    _bad("header_crc_zero", _F.but(checksum=0), "dumps leave there"),
    _unsupported("version_3", _F.but(version=(3, 0)), "version 3.0"),
    _unsupported("version_1", _F.but(version=(1, 0)), "version 1.0"),
    _unsupported("column_major", _F.but(flags=0x0C00), "LAYOUT-002"),
    _bad("metadata_in_header", _F.but(fields={"metadata_offset": 32}), "inside the header"),
    _cut("metadata_beyond", _F.but(fields={"metadata_offset": _HUGE}), "metadata_offset"),
    _cut("metadata_size_beyond", _F.but(fields={"metadata_size": 1 << 31}), "metadata at offset"),
    _bad("metadata_empty", _F.but(metadata=b""), "is empty"),
    _bad("metadata_array", _text("[]"), "list"),
    _bad("metadata_number", _text("1"), "int"),
    _bad("metadata_cut_json", _text('{"a":'), "not JSON"),
    _bad("metadata_nan", _text('{"a":NaN}'), "NaN"),
    _bad("metadata_not_utf8", _F.but(metadata=b'{"a":"\xff"}'), "not UTF-8"),
    _bad("metadata_deep", _text('{"a":' + "[" * 5000 + "]" * 5000 + "}"), "deep"),
    _bad("metadata_bom", _F.but(metadata=b"\xef\xbb\xbf{}"), "byte-order mark"),
    _bad("metadata_trailing", _text("{}x"), "not JSON"),
    _bad("count_max", _F.but(fields={"count": (1 << 32) - 1}), "the limit is"),
    _cut("count_forged", _F.but(fields={"count": 900_000}), "900000 index entries"),
    _bad("count_too_many", _F.but(fields={"count": 3}), "tensor '' has"),
    _cut("index_beyond", _F.but(fields={"index_offset": _HUGE}), "tensor_index_offset"),
    _cut("name_beyond", _one(name_length=60_000), "name of index entry 0"),
    _unsupported("index_json", _F.but(index=b'[{"name":"weights","dtype":"json"}]'), "is JSON"),
    _bad("name_not_utf8", _F.but(tensors=(Tensor(b"a\xffb"),)), "not UTF-8"),
    _bad("duplicate", _F.but(tensors=(Tensor(b"x"), Tensor(b"x"))), "'x' stands twice"),
    _bad(
        "duplicate_apart",
        _F.but(tensors=(Tensor(b"x"), Tensor(b"y"), Tensor(b"x"))),
        "'x' stands twice",
    ),
    *(
        _unsupported(f"code_{code}", _one(code=code), f"dtype code {code}")
        for code in (15, 16, 24, 29, 31, 127, 130, 255)
    ),
    _bad("size_small", _one(size=15), "has 15 bytes; shape [4] under dtype code 0 takes F32 16"),
    _bad("size_huge", _one(size=_HUGE), "F32 16"),
    _bad("dims_huge", _one(shape=(_HUGE, _HUGE)), "under dtype code 0 takes F32"),
    _bad("dims_wrap_to_8", _one(shape=(1 << 63, 2, 8), size=32), "takes F32"),
    _bad("dims_bytes_wrap", _one(shape=(1 << 62,), size=0), "takes F32"),
    _bad("dims_cut_to_8", _one(shape=(1,) * 7 + (4, 4)[:1], data=bytes(64)), "takes F32 16"),
    _bad("ndim_255", _one(ndim=255), "255 dimensions"),
    _cut("ndim_64", _one(ndim=64), "shape of tensor 'a'"),
    _bad(
        "neither_size",
        _one(shape=(3, 300), code=12, data=bytes(700)),
        "takes Q4_K 576 or 864, Q5_K 704 or 1056",
    ),
    _bad("code_8_neither", _one(shape=(40,), code=8, data=bytes(40)), "APR_Q4 36, Q8_0 68"),
    _cut("offset_beyond", _one(offset=1 << 20), "is the first beyond the end"),
    _cut("offset_wraps", _one(offset=_HUGE - 8), "missing"),
    _cut("empty_tensor_beyond", _one(shape=(0,), data=b"", offset=4096), "bytes are missing"),
    _bad("overlap", _F.but(tensors=(Tensor(b"a"), Tensor(b"b", offset=0))), "overlaps"),
    _bad("overlap_by_one", _F.but(tensors=(Tensor(b"a"), Tensor(b"b", offset=15))), "overlaps"),
    _bad("data_over_index", _F.but(fields={"data_offset": 192}), "overlaps"),
    _bad("data_over_header", _F.but(fields={"data_offset": 0}), "overlaps"),
    _bad("index_over_metadata", _F.but(fields={"index_offset": 64}), "overlaps the metadata"),
    _bad("index_over_header", _F.but(fields={"index_offset": 8}), "overlaps the header"),
    _cut("data_beyond", _F.but(tensors=(), fields={"data_offset": 1 << 40}), "are missing"),
    _cut("trunc_data", _WHOLE[:-70], "tensor 'b' is the first beyond the end"),
    _cut("trunc_padding", _WHOLE[:-5], "1 bytes are missing"),
    _cut("trunc_index", _WHOLE[: 64 + 128 + 10], "index entries"),
    _bad("lz4_garbage", _F.but(flags=0x0401, metadata=b"\x10\0\0\0" + b"\x05" * 36), "LZ4"),
)

_LEGACY = {**METADATA, "quantization": "Q4_K_M"}

# These open, with a note that says so.
WARNED: tuple[Case, ...] = tuple(
    Case(id, file if isinstance(file, bytes) else file.build(), says, None)
    for id, file, says in (
        ("unsorted", _F.but(tensors=(Tensor(b"b"), Tensor(b"a"))), "not sorted"),
        ("no_footer", _F.but(footer=b""), "no footer"),
        ("trailing_1", _WHOLE + b"x", "5 bytes follow"),
        ("trailing_many", _WHOLE + bytes(1000), "1004 bytes follow"),
        ("footer_cut", _WHOLE[:-1], "3 bytes follow"),
        ("legacy_apr2", _F.but(magic=b"APR2"), "legacy magic 'APR2'"),
        ("legacy_aprn", _F.but(magic=b"APRN", flags=0), "legacy magic 'APRN'"),
        ("hole", _F.but(gap=bytes(192)), "unused bytes between the tensor index and tensor 'a'"),
        ("holes", _F.but(tensors=(Tensor(b"a", data=bytes(16) + b"h" * 300, size=16),
                                  Tensor(b"b")), gap=bytes(128)), "2 holes"),
        ("unaligned", _F.but(gap=bytes(3)), "2 tensors are not 64-byte aligned"),
        ("minor", _F.but(version=(2, 7)), "version 2.7"),
        ("reserved", _F.but(reserved=b"x" * 20), "reserved header bytes"),
        ("undefined_flags", _F.but(flags=0xB400), "0x1000, 0x2000, 0x8000"),
        ("encrypted", _F.but(flags=0x0404), "no encryption"),
        ("code_8", _one(code=8, shape=(40,), data=bytes(36)), "code 8 read as APR_Q4"),
        ("code_8_of_256", _one(code=8, shape=(256,), data=bytes(144)), "code 8 read as APR_Q4"),
        ("code_8_is_q8_0", _one(code=8, shape=(64,), data=bytes(68)), "code 8 read as Q8_0"),
        ("code_9", _one(code=9, shape=(3,), data=bytes(7)), "code 9 read as APR_Q8"),
        ("code_2_bf16", _one(code=2, data=bytes(8)), "code 2 read as BF16"),
        ("code_2_q4_0", _one(code=2, shape=(64,), data=bytes(36)), "code 2 read as Q4_0"),
        ("code_3_q4_1", _one(code=3, shape=(64,), data=bytes(40)), "code 3 read as Q4_1"),
        ("code_6_q5_0", _one(code=6, shape=(64,), data=bytes(44)), "code 6 read as Q5_0"),
        ("code_7_q5_1", _one(code=7, shape=(64,), data=bytes(48)), "code 7 read as Q5_1"),
        ("code_12_q5_k", _one(code=12, shape=(256,), data=bytes(176)), "code 12 read as Q5_K"),
        ("code_13_q5_k", _one(code=13, shape=(256,), data=bytes(176)), "code 13 read as Q5_K"),
        ("code_14_q2_k", _one(code=14, shape=(256,), data=bytes(84)), "code 14 read as Q2_K"),
        ("typed_key", _F.but(metadata=_LEGACY), "'quantization' is str, not object"),
        ("duplicate_key", _text('{"model_type":"a","model_type":"b"}'), "stands twice"),
        ("name_cut_at_256", _F.but(tensors=(Tensor(b"n" * 255 + b"\xc3"),)), "cut at 256"),
        ("dangling_carried", _F.but(metadata={"aprfmt.tensors": {"w": {
            "encoding": "Q5_0", "shape": [32]}}}), "no tensor 'w@Q5_0'"),
        ("carried_table", _F.but(metadata={"aprfmt.tensors": [1]}), "aprfmt.tensors is list"),
    )
)  # fmt: skip

# These open without a remark.
LEGAL: tuple[Case, ...] = tuple(
    Case(id, file.build(), "", None)
    for id, file in (
        ("plain", _F),
        ("no_tensors", _F.but(tensors=())),
        ("scalar", _one(shape=(), data=bytes(4))),
        ("empty_tensor", _F.but(tensors=(Tensor(b"a", (0, 7), data=b""), Tensor(b"b")))),
        ("empty_name", _F.but(tensors=(Tensor(b""), Tensor(b"b")))),
        ("no_row_major_flag", _F.but(flags=0)),
        ("converter_flags", _F.but(flags=0x0020)),
        ("lz4_flag_only", _F.but(flags=0x0401)),
        ("zstd_flag_only", _F.but(flags=0x0402)),
        ("data_in_other_order", _F.but(tensors=(Tensor(b"a", offset=64), Tensor(b"b", offset=0)))),
        ("metadata_spaced", _text(json.dumps(METADATA, indent=2))),
        ("metadata_nulls", _F.but(metadata={**METADATA, "name": None, "rope_theta": None})),
        ("metadata_object_only", _text("{}")),
        ("non_ascii", _F.but(tensors=(Tensor("ä".encode()), Tensor("日本".encode())))),
        ("sharding_of_one", _F.but(metadata={"sharding": {"shard_count": 1, "shard_index": 0}})),
        ("dims_8", _one(shape=(1, 1, 1, 1, 1, 2, 2, 1))),
        ("name_300_bytes", _F.but(tensors=(Tensor(b"n" * 300),))),
    )
)
