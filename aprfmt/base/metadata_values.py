"""Show metadata values: numbers by the names that llama.cpp and gguf-py give them."""

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.base.protocols import Value

GUESSED = 1024  # llama.cpp's flag of a file type that its loader guessed

# general.file_type (enum llama_ftype of llama.h, without ALL_ and MOSTLY_): what llama-quantize
# calls the type. 4 to 6 and 33 to 35 are of removed types.
FILE_TYPES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0",
}  # fmt: skip

# The end of a key -> what its numbers are called (enums of gguf-py's constants.py).
NAMES: Mapping[str, Mapping[int, str]] = {
    "general.file_type": FILE_TYPES,
    ".pooling_type": {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"},
    ".expert_gating_func": {1: "softmax", 2: "sigmoid"},
}


def file_type_name(value: object) -> str:
    """Return llama-quantize's name of a general.file_type; "" if it is not known."""
    if not isinstance(value, int) or isinstance(value, bool):
        return ""
    return FILE_TYPES.get(value & ~GUESSED, "") if value != GUESSED else ""


def number_name(key: str, value: Any) -> str:
    """Return the name that a metadata number stands for, such as `Q4_K_M`; "" for none."""
    if key == "general.file_type":
        return file_type_name(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return ""
    return next((names.get(value, "") for end, names in NAMES.items() if key.endswith(end)), "")


def short_value(value: Value) -> Value:
    """Return a metadata value for a report; an array of more than 16 becomes "array of N"."""
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 16:
        return f"array of {len(value)}"
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
