"""Find the encoding, quantization type or dtype that a user's spelling means.

Sources: llama-quantize's table of types (it takes a name in any case, and `Q4_K` for `Q4_K_M`), the
dtype names of PyTorch (`torch.float16`, `half`), NumPy (`double`), safetensors (`F8_E4M3`) and
transformers (`fp16`, `bf16`). Every other name is one of the tables' own, in any case and with or
without `_` and `-`.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from aprfmt.base.encodings import ENCODINGS
from aprfmt.base.metadata_values import FILE_TYPES

# Folded spelling -> name of the encoding. A dtype of arithmetic is its encoding's numpy name.
ALIASES: Mapping[str, str] = {
    "float": "F32", "float32": "F32", "fp32": "F32", "single": "F32",
    "float16": "F16", "fp16": "F16", "half": "F16",
    "bfloat16": "BF16",
    "float64": "F64", "fp64": "F64", "double": "F64",
    "fp8": "F8_E4M3", "f8": "F8_E4M3", "float8": "F8_E4M3", "e4m3": "F8_E4M3", "e5m2": "F8_E5M2",
    "float8e4m3fn": "F8_E4M3", "float8e4m3": "F8_E4M3", "fp8e4m3": "F8_E4M3",
    "fp8e4m3fn": "F8_E4M3", "f8e4m3fn": "F8_E4M3",
    "float8e5m2": "F8_E5M2", "fp8e5m2": "F8_E5M2",
    "float8e4m3fnuz": "F8_E4M3FNUZ", "float8e5m2fnuz": "F8_E5M2FNUZ", "float8e8m0fnu": "F8_E8M0",
}  # fmt: skip
# What llama-quantize takes a bare K-quant for.
TYPE_ALIASES: Mapping[str, str] = {"q3k": "Q3_K_M", "q4k": "Q4_K_M", "q5k": "Q5_K_M"}
_BEFORE = re.compile(r"^(?:torch|np|numpy|mx|jnp|ggml_type|llama_ftype|mostly|all)[._]", re.I)
_BETWEEN = re.compile(r"[-_. ]")


def _dash_name(name: str) -> str:
    """Return a name in lower case with dashes for separators, such as `q4-k`.

    The name of a library in front is removed.
    """
    text = name.strip().lower()
    while (shorter := _BEFORE.sub("", text)) != text:
        text = shorter
    return _BETWEEN.sub("-", text)


def fold_name(name: str) -> str:
    """Return a name in lower case, without separators or a library in front: `float16`, `q4k`."""
    return _dash_name(name).replace("-", "")


def find_name(text: str, names: Iterable[str], aliases: Mapping[str, str] = ALIASES) -> str | None:
    """Return which of `names` a user's spelling means; None where it means none of them.

    `aliases` is {spelling: name}; case and punctuation do not matter.
    """
    offered = list(names)
    if text in offered:
        return text
    dashed = _dash_name(text)
    for spelled, form in ((dashed, _dash_name), (fold_name(text), fold_name)):
        found = [name for name in offered if form(name) == spelled]
        if len(found) == 1:  # Q8_KR8 and Q8_K_R8 are two types of ik_llama.cpp
            return found[0]
    meant = aliases.get(fold_name(text))
    return meant if meant in offered else None


def encoding_name(text: str) -> str:
    """Return the key of ENCODINGS that a user's spelling means; the text where it means none."""
    found = find_name(text, ENCODINGS)
    return text if found is None else found


def nearest_names(text: str, names: Iterable[str]) -> list[str]:
    """Return the three names nearest to a spelling, best first; case does not matter.

    Names that contain the spelling come first (`AWQ`: `AWQ-g32`).
    """
    key = fold_name(text)
    folded = {fold_name(name): name for name in names}
    parts = [each for each in folded if len(key) > 2 and key in each]
    likes = get_close_matches(key, folded, 3, cutoff=0.0)
    return [folded[each] for each in dict.fromkeys((*parts, *likes))][:3]


def unknown_name_message(text: str, names: Iterable[str]) -> str:
    """Return what is wrong with a name that is none of `names`, and the three nearest of them.

    The message says so if the name is a type of llama-quantize, or a tensor type of ggml or of
    ik_llama.cpp, so that nobody looks for a misspelling.
    """
    offered = list(names)
    near = ", ".join(nearest_names(text, offered))
    key = fold_name(text)
    if sum(fold_name(name).startswith(key) for name in offered) > 1:
        return f"names several; near names: {near}"
    for known, what in (
        (find_name(text, (*FILE_TYPES.values(), "COPY"), {}), "a type of llama-quantize"),
        (find_name(text, ENCODINGS), "an encoding that is read"),
    ):
        if known is not None:
            which = "" if fold_name(known) == key else f"{known}, "
            return f"is {which}{what}, not offered here; near names: {near}"
    return f"is not known; near names: {near}"
