"""Tokenizers of all formats: load one, write one in another format, list its facts.

    tokenizer = load_tokenizer(model)
    tokenizer.encode("Hello"), tokenizer.decode([1, 2, 3])

Nothing heavy is imported before `load_tokenizer` builds a tokenizer.
"""

from aprfmt.tokenizer.base import Tokenizer
from aprfmt.tokenizer.carriers import to_apr, to_gguf, to_hf
from aprfmt.tokenizer.identity import tokenizer_facts
from aprfmt.tokenizer.loading import (
    load_tokenizer,
    metadata_stop_ids,
    render_messages,
    try_load_tokenizer,
)
from aprfmt.tokenizer.template import scan_template

__all__ = [
    "Tokenizer",
    "load_tokenizer",
    "metadata_stop_ids",
    "render_messages",
    "scan_template",
    "to_apr",
    "to_gguf",
    "to_hf",
    "tokenizer_facts",
    "try_load_tokenizer",
]  # fmt: skip
