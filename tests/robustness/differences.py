"""Files that other readers judge differently, and why; prints docs/reference/reader_differences.md.

    python -m tests.robustness.differences > docs/reference/reader_differences.md

The sets are what the readers were seen to do (`test_differences.py` runs them and compares); the
reasons are ours, one a case, whichever reader differs.
"""

from collections.abc import Mapping

from tests.formats import gguf_cases, safetensors_cases

# reader -> (package, version the sets below were taken with)
VERSIONS: Mapping[str, tuple[str, str]] = {
    "gguf-py": ("gguf", "0.19.0"),
    "libgguf": ("libgguf", "0.2.2"),
    "gguf-validate": ("libgguf", "0.2.2"),
    "safetensors": ("safetensors", "0.8.0"),
}
WHAT: Mapping[str, str] = {
    "gguf-py": "the Python reader of llama.cpp's own package, every tensor touched",
    "libgguf": "the C reader of libgguf (`inspect_gguf`): structure only, no judgement of the data",
    "gguf-validate": "libgguf's validator; its errors count, its warnings do not",
    "safetensors": "the reference library (Rust), `deserialize`",
}
KINDS = {reader: "safetensors" if reader == "safetensors" else "gguf" for reader in VERSIONS}

# What a reader does where we refuse: "opens" it, or gives "no answer" within HEAP. What it does
# where we open: "refuses".
HEAP = 512 << 20
OPENS, NO_ANSWER, REFUSES = "opens", "no answer", "refuses"

_RESERVED = ("HEADER_BAD_N_TENSORS", "HEADER_BAD_N_KV", "n_tensors_beyond_file",
             "n_keys_beyond_file")  # fmt: skip
_BOOLS = ("bool_2", "bool_255_in_array", "bool_2_in_array")
_UNALIGNED = ("TENSORS_INCONSISTENT_ALIGN", "DATA_INCONSISTENT_ALIGN")
_UNKNOWN = ("unknown_type_beyond_the_end", "unknown_type_at_the_end", "unknown_type_shares_offset")


def _each(ids: tuple[str, ...], what: str) -> dict[str, str]:
    return dict.fromkeys(ids, what)


FOUND: Mapping[str, Mapping[str, str]] = {
    "gguf-py": _each(
        ("KV_EMPTY_KEY", "key_too_long", *_BOOLS, "string_longer_than_file", "string_of_2_63",
         "arr_string_passes_the_end", "nested_17_deep", *_UNALIGNED, "overlap", "overlap_by_half",
         "zero_size_far_away"), OPENS,
    ) | _each(("arr_u8_2p32",), NO_ANSWER)
    | _each(("TENSORS_BAD_TYPE", "type_142", "removed_type"), REFUSES),
    "libgguf": _each(
        ("KV_EMPTY_KEY", "KV_DUPLICATE_KEY", "KV_BAD_ALIGN", "KV_WRONG_TYPE_ALIGN", "align_string",
         "align_2_21", "key_too_long", *_BOOLS, "TENSORS_BAD_SHAPE", "TENSORS_NE_TOO_BIG",
         "TENSORS_NBYTES_TOO_BIG", "dims_2p32x2p32", "negative_beside_zero", "dims_wrap_to_8",
         "TENSORS_BAD_OFFSET", "offset_2_63", "TENSORS_DUPLICATE_NAME", "TENSORS_BAD_ALIGN",
         *_UNALIGNED, "type_negative", "overlap", "overlap_by_half", "row_no_multiple_of_block",
         "scalar_q4_0", "DATA_NOT_ENOUGH_DATA", "DATA_MEM_SIZE_OVERFLOW", "data_bigger_than_file",
         "no_data_at_all", "zero_size_far_away", *_UNKNOWN), OPENS,
    ) | _each(_RESERVED, NO_ANSWER)
    | _each(("big_endian", "empty_values", "nested_16_deep", "string_not_utf8"), REFUSES),
    "gguf-validate": _each(
        ("KV_EMPTY_KEY", "KV_BAD_ALIGN", "align_string", "key_too_long", *_BOOLS, "arr_u8_2p32",
         "type_negative", "row_no_multiple_of_block", "scalar_q4_0", *_UNKNOWN), OPENS,
    ) | _each(_RESERVED, NO_ANSWER)
    | _each(("big_endian", "TENSORS_ZERO_DIM", "zero_in_the_middle", "empty_values",
             "nested_16_deep", "string_not_utf8"), REFUSES),
    "safetensors": _each(
        ("space_before", "newline_before", "newline_after", "duplicate", "duplicate_escaped",
         "metadata_null", "unknown_field"), OPENS,
    ),
}  # fmt: skip

_MORE = "the file does not hold what it declares; whoever believes the size reads other memory"
_WRAPS = "sizes or their product pass 63 bits, and wrap in a C reader"
_SHARED = "two tensors share bytes: one of the two is not what was written"
_BLOCK = "a row is not a whole number of blocks, so its size in bytes is not defined"
_KEYS = "docs/gguf.md gives keys 1 to 65,535 bytes"
_ALIGN = (
    "docs/gguf.md: offsets are multiples of the alignment, a uint32 power of two (here to 2^20)"
)
_BOOL = "docs/gguf.md: a bool is 0 or 1; a value that is neither means damage"
_GAP = "a type without a known layout takes the bytes up to the next tensor, and there are none"
_NEST = "docs/gguf.md allows arrays of arrays; they are read to 16 levels"
_TYPE = "an unknown or removed type does not stop reading the rest: named, copied, not decoded"
_EMPTY = "current ggml allows a size of zero; such a tensor has no bytes"
_COUNT = "a forged count must not size an allocation: it is compared with the bytes left first"
_TWICE = "names and keys are unique by the format's page; which of the two counts is a guess"
_STRICT = "the format's page says `{` first, and spaces alone after the header"

REASONS: Mapping[str, str] = {
    **_each(_RESERVED, _COUNT),
    **_each(_BOOLS, _BOOL),
    **_each((*_UNALIGNED, "TENSORS_BAD_OFFSET", "KV_BAD_ALIGN", "KV_WRONG_TYPE_ALIGN",
             "align_string", "align_2_21", "TENSORS_BAD_ALIGN"), _ALIGN),
    **_each(_UNKNOWN, _GAP),
    **_each(("KV_EMPTY_KEY", "key_too_long"), _KEYS),
    **_each(("KV_DUPLICATE_KEY", "TENSORS_DUPLICATE_NAME", "duplicate", "duplicate_escaped"),
            _TWICE),
    **_each(("string_longer_than_file", "string_of_2_63", "arr_string_passes_the_end",
             "arr_u8_2p32", "DATA_NOT_ENOUGH_DATA", "data_bigger_than_file", "no_data_at_all",
             "zero_size_far_away"), _MORE),
    **_each(("TENSORS_BAD_SHAPE", "TENSORS_NE_TOO_BIG", "TENSORS_NBYTES_TOO_BIG", "dims_2p32x2p32",
             "negative_beside_zero", "dims_wrap_to_8", "offset_2_63", "DATA_MEM_SIZE_OVERFLOW",
             "type_negative"), _WRAPS),
    **_each(("overlap", "overlap_by_half"), _SHARED),
    **_each(("row_no_multiple_of_block", "scalar_q4_0"), _BLOCK),
    **_each(("nested_17_deep", "nested_16_deep", "empty_values"), _NEST),
    **_each(("TENSORS_BAD_TYPE", "type_142", "removed_type"), _TYPE),
    **_each(("TENSORS_ZERO_DIM", "zero_in_the_middle"), _EMPTY),
    **_each(("space_before", "newline_before", "newline_after"), _STRICT),
    "big_endian": "version 3 of the format has big-endian files",
    "string_not_utf8": "a value that is not UTF-8 is shown with escapes; keys and names must be it",
    "metadata_null": "the format's page: `__metadata__` is an object of strings",
    "unknown_field": "an entry has three fields; a fourth is either damage or a format not known",
}  # fmt: skip


def page() -> str:
    """Return the generated page."""
    lines = [
        "# Where other readers decide otherwise",
        "",
        "Generated by `python -m tests.robustness.differences`.",
        "",
        "Hand-made files that aprfmt and another reader judge differently. The format's own page",
        "decides: aprfmt refuses what it forbids, and reads what it allows. If C readers refuse a",
        "file that can be read without doubt, aprfmt opens it with a warning. `no answer` means",
        f"that the reader gave none within {HEAP >> 20} MiB of memory. A test runs the readers",
        "over these files and compares the answers with this page.",
        "",
    ]
    for reader, found in FOUND.items():
        package, version = VERSIONS[reader]
        lines += [
            f"## {reader} ({package} {version})",
            "",
            f"Compared: {WHAT[reader]}.",
            "",
            "| file | we | it | why we decide so |",
            "| --- | --- | --- | --- |",
        ]
        for case in sorted(found, key=str.lower):
            ours = "open it" if found[case] == REFUSES else "refuse it"
            lines.append(f"| `{case}` | {ours} | {found[case]} | {REASONS[case]} |")
        lines.append("")
    return "\n".join(lines)


def cases(reader: str) -> dict[str, tuple[bytes, bool]]:
    """Return the files a reader is compared on: id -> (bytes, whether we open it)."""
    table = safetensors_cases if KINDS[reader] == "safetensors" else gguf_cases
    found = {}
    for level in ("MALFORMED", "WARNED", "LEGAL"):
        for case in getattr(table, level, ()):
            found[case.id] = (case.data, level != "MALFORMED")
    return found


if __name__ == "__main__":
    print(page(), end="")
