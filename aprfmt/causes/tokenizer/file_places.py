"""Where a part of a tokenizer is stored, in the words of its format.

A *part* is one of the things that a tokenizer consists of, such as pieces or merges. A *side* is
the tokenizer of one of the two models that are compared.
"""

from collections.abc import Mapping

from aprfmt.tokenizer.keys import (
    CHAT_TEMPLATE,
    FLAGS,
    IDS,
    MERGES,
    PRE,
    SCORES,
    TEMPLATE_FILE,
    TOKENS,
    TYPES,
)
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer

# What confirms a cause of two tokenizers, whichever part it is.

_LISTS: Mapping[str, str] = {
    "tokens": TOKENS.gguf, "merges": MERGES.gguf, "scores": SCORES.gguf, "types": TYPES.gguf,
    "pre": PRE.gguf, "normalizer": PRE.gguf, "added": TYPES.gguf, "options": "tokenizer.ggml.model",
    "kind": "tokenizer.ggml.model", "prefix": FLAGS["add_space_prefix"].gguf,
    "begins": FLAGS["add_bos_token"].gguf, "ends": FLAGS["add_eos_token"].gguf,
    "template": CHAT_TEMPLATE, **{f"role:{role}": key.gguf for role, key in IDS.items()},
}  # fmt: skip
_JSON: Mapping[str, str] = {
    "tokens": "tokenizer.json: model.vocab", "merges": "tokenizer.json: model.merges",
    "scores": "tokenizer.json: model.vocab", "types": "tokenizer.json: added_tokens",
    "pre": "tokenizer.json: pre_tokenizer", "normalizer": "tokenizer.json: normalizer",
    "prefix": "tokenizer.json: normalizer", "added": "tokenizer.json: added_tokens",
    "options": "tokenizer.json: model", "kind": "tokenizer.json: model.type",
}  # fmt: skip


def part_place(side: StatedTokenizer, part: str) -> tuple[str, ...]:
    """Return (key,): where a tokenizer's part is stored, its GGUF key, or `FILE: KEY`."""
    if side.uses_lists:
        return (_LISTS[part],)
    config = side.carried.tokenizer_config
    if part == "template":
        _, where = side.carried.template_and_origin()
        return (where.rpartition(": ")[2] or TEMPLATE_FILE,)
    if part in ("begins", "ends"):
        key = f"add_{'bos' if part == 'begins' else 'eos'}_token"
        stated = isinstance(config.get(key), bool)
        return (f"tokenizer_config.json: {key}" if stated else "tokenizer.json: post_processor",)
    if part.startswith("role:"):
        role = part.removeprefix("role:")
        named = config.get(f"{role}_token") is not None
        return (
            f"tokenizer_config.json: {role}_token" if named else f"config.json: {role}_token_id",
        )
    return (_JSON[part],)
