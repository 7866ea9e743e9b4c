"""Malformed files of which nothing, or nothing further, can be read: ids of the tables, by format.

All others are read past their fault with `damaged=True`. Those in `NO_MODEL` do not even count as
damaged models: another kind of file, or an unknown version or layout.
"""

from collections.abc import Mapping

NO_MODEL: Mapping[str, frozenset[str]] = {
    "apr": frozenset({
        "empty", "magic_other", "magic_v1", "magic_v1_bad_crc", "magic_apr1",
        "magic_apr2_other", "magic_documents_only", "version_3", "version_1", "column_major",
        "index_json",
    }),
    "gguf": frozenset({
        "HEADER_BAD_MAGIC", "HEADER_BAD_VERSION_0", "HEADER_BAD_VERSION_1",
        "HEADER_BAD_VERSION_FUTURE", "version_future_big_endian", "empty_file",
    }),
    "safetensors": frozenset({
        "empty", "too_small", "length_only", "header_array", "header_string", "bom",
    }),
}  # fmt: skip
FATAL: Mapping[str, frozenset[str]] = {
    "apr": NO_MODEL["apr"] | {
        "trunc_header", "count_max", "count_forged", "index_beyond", "index_over_header",
        "trunc_index", "lz4_garbage",
    },
    "gguf": NO_MODEL["gguf"] | {
        "HEADER_BAD_N_TENSORS", "HEADER_BAD_N_KV", "n_tensors_beyond_file", "n_keys_beyond_file",
        "magic_only", "half_a_header", "KV_BAD_KEY_SIZE", "KV_BAD_TYPE", "key_too_long", "key_cut",
        "string_longer_than_file", "string_of_2_63", "arr_u8_2p32", "arr_5_million_in_1_kb",
        "arr_count_wraps", "arr_bad_element_type", "arr_string_passes_the_end",
        "arr_string_of_2_63", "nested_17_deep", "nested_and_cut", "n_dims_max",
        "name_longer_than_file", "name_length_minus_1", "table_cut",
    },
    "safetensors": NO_MODEL["safetensors"] | {
        "length_over_limit", "length_2p63", "length_beyond", "header_cut", "zero_after",
        "text_after", "not_utf8", "not_json", "nan", "deep", "lone_surrogate",
    },
}  # fmt: skip
