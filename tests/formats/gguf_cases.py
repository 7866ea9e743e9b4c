"""Legal, odd and malformed GGUF files: the tables the tests run over.

The ids in capitals are the handcrafted files of llama.cpp's test-gguf.cpp; the others are those of
the strictness comparison between readers, and one for each fault found in a GGUF reader so far.
"""

import struct
from dataclasses import dataclass

from aprfmt.errors import FormatError, TruncatedError, UnsupportedError
from tests.formats.gguf_files import (
    ARR,
    BOOL,
    DATA,
    I32,
    I64,
    STR,
    U8,
    U32,
    File,
    aligned,
    one,
    plain,
    two,
)


@dataclass(frozen=True)
class Case:
    """A file and the verdict: `error` None means it opens, with a note that has `says`."""

    id: str
    data: bytes
    says: str = ""
    error: type[FormatError] | None = FormatError

    def __str__(self) -> str:
        return self.id


def _nested(depth: int) -> bytes:
    file = File()
    value = file.array(U8, [7])
    for _ in range(depth - 1):
        value = file.array(ARR, [value])
    return value


def _cut_in_the_middle() -> bytes:
    file = File(data=DATA[:160])
    return file.tensor("a", [8]).tensor("b", [32], offset=32).build()[:-1]


def _long(length: int) -> str:
    return "n" * length


_GIANT = 1 << 63

MALFORMED: tuple[Case, ...] = (
    # header
    Case("HEADER_BAD_MAGIC", one(magic=b"FUGG").build(), "starts with 46 55 47 47"),
    Case("HEADER_BAD_VERSION_0", one(version=0).build(), "version 0 at offset 4", UnsupportedError),
    Case("HEADER_BAD_VERSION_1", one(version=1).build(), "older llama.cpp", UnsupportedError),
    Case("HEADER_BAD_VERSION_FUTURE", one(version=4).build(), "knows 2 and 3", UnsupportedError),
    Case("version_future_big_endian", one(order=">", version=4).build(), "big-endian version 4",
         UnsupportedError),
    Case("HEADER_BAD_N_TENSORS", one(n_tensors=-1).build(), "the tensor count at offset 8 is 1844"),
    Case("HEADER_BAD_N_KV", one(n_keys=-1).build(), "the key count at offset 16 is 18446744"),
    Case("n_tensors_beyond_file", one(n_tensors=900_000).build(), "21600000 bytes", TruncatedError),
    Case("n_keys_beyond_file", one(n_keys=900_000).build(), "12600000 bytes", TruncatedError),
    Case("empty_file", b"", "needs 4 bytes", TruncatedError),
    Case("magic_only", b"GGUF", "the version at offset 4 needs 4", TruncatedError),
    Case("half_a_header", b"GGUF\3\0\0\0\1\0\0\0", "the tensor count", TruncatedError),
    # keys
    Case("KV_BAD_KEY_SIZE", File(keys=[b"\xff" * 32]).build(), "key 0 at offset 24 has 1844674407"),
    Case("KV_EMPTY_KEY", plain().key("", U8, 1).build(), "has 0 bytes; GGUF keys have 1 to 65535"),
    Case("KV_BAD_TYPE", plain().raw_key("x", 13, b"\0").build(), "value type 13; GGUF has 0 to 12"),
    Case("KV_DUPLICATE_KEY", plain().key("x", U8, 1).key("x", U8, 1).build(), "'x' at offset"),
    Case("KV_BAD_ALIGN", aligned(13).build(), "general.alignment is 13; it must be a power of two"),
    Case("KV_WRONG_TYPE_ALIGN", aligned(32, I32).build(), "general.alignment has type int32"),
    Case("align_string", plain().key("general.alignment", STR, "32").build(), "has type string"),
    Case("align_0", aligned(0).build(), "general.alignment is 0"),
    Case("align_2_21", aligned(1 << 21).build(), "power of two up to 1048576"),
    Case("key_too_long", plain().key(_long(65_536), U8, 1).build(), "has 65536 bytes"),
    Case("key_not_utf8", plain().key(b"a\xff", U8, 1).build(), "not UTF-8 (byte 1 is 0xff)"),
    Case("key_cut", plain().key("x", U32, 1).build()[:84], "key 'x'", TruncatedError),
    Case("bool_2", plain().key("x", BOOL, 2).build(), "has a bool of 2 at offset"),
    Case("bool_255_in_array", plain().raw_key("x", ARR, File().array(BOOL, [0, 1, 255])).build(),
         "has a bool of 255 at offset"),
    Case("bool_2_in_array", plain().raw_key("x", ARR, File().array(BOOL, [1, 2])).build(),
         "has a bool of 2 at offset"),
    Case("string_longer_than_file", plain().raw_key("x", STR, b"\xff\0\0\0\0\0\0\0ab").build(),
         "needs 255 bytes", TruncatedError),
    Case("string_of_2_63", plain().raw_key("x", STR, b"\xff" * 8).build(), "the limit is 67108864"),
    Case("arr_u8_2p32", plain().raw_key("x", ARR, struct.pack("<IQ", U8, 1 << 32)).build(),
         "is 4294967296, the limit is"),
    Case("arr_5_million_in_1_kb",
         plain().raw_key("x", ARR, struct.pack("<IQ", STR, 5_000_000) + bytes(900)).build(),
         "takes at least 40000000 bytes", TruncatedError),
    Case("arr_count_wraps", plain().raw_key("x", ARR, struct.pack("<IQ", I64, 1 << 61)).build(),
         "the limit is 67108864"),
    Case("arr_bad_element_type", plain().raw_key("x", ARR, struct.pack("<IQ", 77, 1)).build(),
         "the element type of key 'x'"),
    Case("arr_string_passes_the_end",
         plain().raw_key("x", ARR, struct.pack("<IQQ", STR, 2, 1) + b"a" + struct.pack("<Q", 9)
         + b"bcdefghi").build().rstrip(b"\0"),
         "x'[1]", TruncatedError),
    Case("arr_string_of_2_63",
         plain().raw_key("x", ARR, struct.pack("<IQ", STR, 2) + b"\xff" * 16).build(),
         "x'[0] at offset"),
    Case("nested_17_deep", plain().raw_key("x", ARR, _nested(17)).build(), "deeper than the limit"),
    Case("nested_and_cut",
         plain(padded=False).raw_key("x", ARR, struct.pack("<IQIQ", ARR, 2, U8, 1) + b"\1").build(),
         "key 'x'", TruncatedError),
    # tensors
    Case("TENSORS_BAD_N_DIMS", File().tensor("a", [1] * 5).build(), "has 5 dimensions"),
    Case("n_dims_max", File().tensor("a", [1], n_dims=0xFFFFFFFF).build(),
         "has 4294967295 dimensions"),
    Case("TENSORS_BAD_SHAPE", File().tensor("a", [(1 << 64) - 1]).build(), "below 2^63"),
    Case("TENSORS_NE_TOO_BIG", File().tensor("a", [1 << 33, 1 << 33]).build(), "below 2^63"),
    Case("TENSORS_NBYTES_TOO_BIG", File().tensor("a", [1 << 31, 1 << 31], "I64").build(),
         "ends beyond 2^63"),
    Case("dims_2p32x2p32", File(data=DATA).tensor("a", [1 << 32, 1 << 32]).build(), "below 2^63"),
    Case("negative_beside_zero", File().tensor("a", [_GIANT, 0]).build(), "below 2^63"),
    Case("dims_wrap_to_8", File(data=DATA).tensor("a", [1 << 61, 8]).build(), "below 2^63"),
    Case("TENSORS_BAD_OFFSET", File().tensor("a", [8], offset=(1 << 64) - 1).build(),
         "no multiple of the alignment 32"),
    Case("offset_2_63", File(data=DATA).tensor("a", [8], offset=_GIANT).build(),
         "data offset 9223372036854775808"),
    Case("TENSORS_DUPLICATE_NAME", File(data=DATA).tensor("a", [8]).tensor("a", [8], offset=32)
         .build(), "tensor 'a' at offset 57 stands twice"),
    Case("TENSORS_BAD_ALIGN", aligned(13).tensor("b", [8], offset=128).build(), "power of two"),
    Case("TENSORS_INCONSISTENT_ALIGN",
         File(data=DATA).tensor("a", [3]).tensor("b", [3], offset=12).build(),
         "data offset 12, which is no multiple of the alignment 32"),
    Case("name_not_utf8", File(data=DATA).tensor(b"\xc3(", [8]).build(), "tensor 0 at offset 32"),
    Case("name_longer_than_file", File(n_tensors=1, padded=False).build() + b"\xff\xff" + bytes(30),
         "the name of tensor 0", TruncatedError),
    Case("name_length_minus_1", File(n_tensors=1, padded=False).build() + b"\xff" * 32,
         "the limit is 65535"),
    Case("type_negative", File(data=DATA).tensor("a", [8], -1).build(), "ggml type -1"),
    Case("overlap", two(0).build(), "tensor 'b' (96..128) overlaps tensor 'a', which ends at 128"),
    Case("overlap_by_half", two(32, data=128).tensor("c", [8], offset=32).build(), "overlaps"),
    Case("row_no_multiple_of_block", File(data=DATA).tensor("a", [33, 2], "Q4_0").build(),
         "tensor 'a': Q4_0 rows must be a multiple of 32 elements, found 33"),
    Case("scalar_q4_0", File(data=DATA).tensor("a", [], "Q4_0").build(), "multiple of 32"),
    Case("table_cut", one().build()[:90], "tensor 'a'", TruncatedError),
    # data
    Case("DATA_NOT_ENOUGH_DATA", _cut_in_the_middle(),
         "tensor 'b' needs bytes 128..256, the file has 255, 1 too few", TruncatedError),
    Case("DATA_INCONSISTENT_ALIGN", two(36, alignment=1).build(), "data offset 36"),
    Case("DATA_MEM_SIZE_OVERFLOW",
         File(data=bytes(32)).tensor("a", [_GIANT - 64], "I8")
         .tensor("b", [_GIANT - 64], "I8", _GIANT - 64).build(), "beyond 2^63"),
    Case("data_bigger_than_file", File(data=DATA).tensor("a", [1 << 40]).build(),
         "the file has 1088, 4398046510080 too few", TruncatedError),
    Case("no_data_at_all", File(padded=False).tensor("a", [8]).build(), "too few",
         TruncatedError),
    Case("zero_size_far_away", File(data=DATA).tensor("a", [0], offset=1 << 40).build(),
         "tensor 'a' needs bytes", TruncatedError),
    Case("unknown_type_beyond_the_end", File(data=DATA).tensor("a", [8], 142, 1 << 20).build(),
         "none left for it", TruncatedError),
    Case("unknown_type_at_the_end", File(data=DATA).tensor("a", [8], 142, len(DATA)).build(),
         "none left for it", TruncatedError),
    Case("unknown_type_shares_offset",
         File(data=DATA).tensor("a", [8], 142).tensor("b", [8], 142).build(), "overlaps"),
)  # fmt: skip

# Files that llama.cpp or another strict reader refuses, and that we open with a note.
WARNED: tuple[Case, ...] = (
    Case("TENSORS_BAD_NAME_SIZE", File(data=DATA[:32]).tensor(_long(64), [8]).build(),
         "1 tensor name is longer than 63 bytes", None),
    Case("TENSORS_BAD_TYPE", File(data=DATA[:32]).tensor("a", [8], 43).build(),
         "1 tensor is of ggml type 43 (type#43)", None),
    Case("type_142", File(data=DATA[:64]).tensor("a", [8], 142).tensor("b", [8], 142, 32).build(),
         "2 tensors are of ggml type 142", None),
    Case("removed_type", File(data=DATA[:32]).tensor("a", [8], 31).build(), "repack", None),
    Case("hole", two(96, data=128).build(),
         "64 unused bytes in 1 holes, the first before tensor 'b'", None),
    Case("hole_in_front", File(data=DATA[:64]).tensor("a", [8], offset=32).build(),
         "32 unused bytes in 1 holes", None),
    Case("trailing", two(32, data=65).build(), "1 bytes follow the data", None),
    Case("trailing_without_tensors", plain().build() + b"x", "1 bytes follow", None),
    Case("data_in_another_order",
         File(data=DATA[:64]).tensor("a", [8], offset=32).tensor("b", [8]).build(),
         "in another order", None),
    Case("padding_missing", File(data=DATA[:5]).tensor("a", [5], "I8").build(), "27 bytes of pad",
         None),
    Case("big_endian", one(order=">").build(), "big-endian", None),
)  # fmt: skip

LEGAL: tuple[Case, ...] = (
    Case("HEADER_EMPTY", File().build(), "", None),
    Case("header_without_padding", File(padded=False).build(), "", None),
    Case("KV_SUCCESS", plain().build(), "", None),
    Case("TENSORS_SUCCESS", one().build(), "", None),
    Case("DATA_SUCCESS", two(32, data=64).build(), "", None),
    Case("version_2", one(version=2).build(), "", None),
    Case("TENSORS_ZERO_DIM", File().tensor("a", [32, 0]).build(), "", None),
    Case("zero_in_the_middle",
         File(data=DATA[:64]).tensor("a", [8]).tensor("z", [0], offset=32)
         .tensor("b", [8], offset=32).build(), "", None),
    Case("rank_0", File(data=DATA[:32]).tensor("a", []).build(), "", None),
    Case("rank_4", File(data=DATA[:96]).tensor("a", [2, 3, 1, 4]).build(), "", None),
    Case("TENSORS_CUSTOM_ALIGN", aligned(1).build(), "", None),
    Case("alignment_2_20",
         File(alignment=1 << 20, data=bytes(1 << 20)).key("general.alignment", U32, 1 << 20)
         .tensor("a", [8]).build(), "", None),
    Case("name_of_63", File(data=DATA[:32]).tensor(_long(63), [8]).build(), "", None),
    Case("empty_name", File(data=DATA[:32]).tensor("", [8]).build(), "", None),
    Case("name_not_ascii", File(data=DATA[:32]).tensor("größe.重み.\U0001f40b", [8]).build(), "",
         None),
    Case("name_of_controls", File(data=DATA[:32]).tensor("a\n\x1b[31m", [8]).build(), "", None),
    Case("empty_values",
         plain().key("s", STR, "").raw_key("n", ARR, File().array(I32, []))
         .raw_key("t", ARR, File().array(STR, [])).raw_key("u", ARR, File().array(ARR, [])).build(),
         "", None),
    Case("nested_16_deep", plain().raw_key("x", ARR, _nested(16)).build(), "", None),
    Case("string_not_utf8", plain().key("x", STR, b"\xff\xfe").build(), "", None),
    Case("key_of_65535", plain().key(_long(65_535), U8, 1).build(), "", None),
)  # fmt: skip
