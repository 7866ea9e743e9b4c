"""Tokenizers of all formats: load one, write one in another format, list its facts.

    tokenizer = load(model)
    tokenizer.encode("Hello"), tokenizer.decode([1, 2, 3])

Nothing heavy is imported before `load` builds a tokenizer.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import Typed, Value
from aprfmt.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from aprfmt.model import Model

__all__ = [
    "Tokenizer", "facts", "load", "render_alone", "scan_template", "stated_ends", "to_apr",
    "to_gguf", "to_hf",
]  # fmt: skip


def load(model: "Model") -> Tokenizer:
    """Build the tokenizer of a model: from its tokenizer.json, else from its vocabulary.

    Raises FormatError if the model has no tokenizer or a damaged one, UnsupportedError for an
    unknown pre-tokenizer or kind.
    """
    from aprfmt.tokenizer.loading import load as run

    return run(model)


def render_alone(
    model: "Model", messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
) -> str | None:
    """Return the messages rendered by the model's chat template; needs no working tokenizer.

    None without a template. Raises FormatError if the template is broken, unsafe or exceeds a
    limit, UsageError if it rejects the messages.
    """
    from aprfmt.tokenizer.loading import render_alone as run

    return run(model, messages, add_generation_prompt=add_generation_prompt)


def stated_ends(model: "Model") -> frozenset[int]:
    """Return the ids that end a text by metadata, generation_config.json and config.json alone.

    For a model without a tokenizer. Raises FormatError if a value is not a token id.
    """
    from aprfmt.tokenizer.loading import stated_ends as run

    return run(model)


def facts(model: "Model", quick: bool = False) -> Mapping[str, Any]:
    """Return what identifies a model's tokenizer; {} without one.

    Equal for two formats of one model, key by key. `quick` touches neither the tokens nor
    tokenizer.json and is meant for `inspect`. Raises FormatError, UnsupportedError.
    """
    from aprfmt.tokenizer.identity import facts as run

    return run(model, quick)


def to_gguf(model: "Model") -> dict[str, Value | Typed]:
    """Return the `tokenizer.*` keys of a GGUF; {} without a tokenizer.

    Raises ConversionError if GGUF cannot express the tokenizer, FormatError if it is damaged.
    """
    from aprfmt.tokenizer.carriers import to_gguf as run

    return run(model)


def to_apr(model: "Model") -> dict[str, Value]:
    """Return the tokenizer's keys of an APR; {} without one. Raises FormatError."""
    from aprfmt.tokenizer.carriers import to_apr as run

    return run(model)


def to_hf(model: "Model") -> dict[str, str]:
    """Return the tokenizer's files of a Hugging Face folder, name -> text; {} without one.

    Raises UnsupportedError for a foreign vocabulary whose pre-tokenizer or kind is not known.
    """
    from aprfmt.tokenizer.carriers import to_hf as run

    return run(model)


def scan_template(template: str) -> list[str]:
    """Return a sentence for each suspicious part of a chat template, which is not rendered."""
    from aprfmt.tokenizer.template import scan_template as run

    return run(template)
