"""Name templates matched both ways: `blk.{L}.attn_q.weight` <-> `blk.3.attn_q.weight`, layer 3.

A name is looked up with its numbers replaced by a mark, so matching takes time linear in the
name's length, for any number of templates.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from aprfmt.errors import ArchError

T = TypeVar("T")

# Prefixes of Hugging Face names before the part that says the role, the longest first.
# Early APR files leave `model.` out, the first gpt2 checkpoints `transformer.`, and multimodal
# checkpoints put the language model below another module.
PREFIXES: dict[str, tuple[str, ...]] = {
    "hf": ("model.language_model.", "language_model.model.", "language_model.", "model.",
           "transformer.", "bert.", "roberta.", "distilbert.transformer.", "distilbert.", "mpnet.",
           "vision_model.", "vision_tower.vision_model.", "backbone."),
    "gguf": (),
}  # fmt: skip

# Prefixes of tensors that do not belong to the model: optimiser state in training checkpoints.
NO_MODEL = ("__training__.",)

# Prefixes by which a naming style is recognised. Other names (vision towers, optimiser state) do
# not count.
_PREFIXES: dict[str, tuple[str, ...]] = {
    "gguf": (
        "blk.",
        "token_embd.",
        "output_norm.",
        "output.",
        "position_embd.",
        "enc.blk.",
        "dec.blk.",
        "v.",
        "a.",
        "mm.",
    ),
    "hf": (
        *PREFIXES["hf"],
        "vision_tower.",
        "visual.",
        "audio_tower.",
        "multi_modal_projector.",
        "gpt_neox.",
        "biogpt.",
        "rwkv.",
        "shared.",
        "decoder.",
        "post_layernorm.",
        "encoder.",
        "embeddings.",
        "layers.",
        "h.",
        "embed_tokens.",
        "wte.",
        "wpe.",
        "lm_head.",
        "norm.",
    ),
}


def strip_prefix(name: str, style: str) -> str:
    """Return a name without the prefix that names of its style may have."""
    for prefix in PREFIXES.get(style, ()):
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def expand_template(template: str, layer: int | None = None, element: int | None = None) -> str:
    """Return a template with {L} replaced by a layer number and {E} by an element number."""
    return template.replace("{L}", str(layer)).replace("{E}", str(element))


def detect_style(names: Iterable[str]) -> str | None:
    """Return the naming style of most names ("hf" or "gguf"), or None if no name shows one."""
    votes = dict.fromkeys(_PREFIXES, 0)
    for name in names:
        for style, starts in _PREFIXES.items():
            if name.startswith(starts):
                votes[style] += 1
                break
    best = max(votes, key=lambda style: votes[style])
    return best if votes[best] else None


@dataclass(frozen=True, slots=True)
class Match(Generic[T]):
    """A name that matches a template: the template's value, and the numbers in the name."""

    value: T
    layer: int | None
    element: int | None


class NameIndex(Generic[T]):
    """The templates of one style, each with a value; {L} and {E} match whole dot-components.

    A number in a template (t5's `layer.0`) matches itself alone.
    """

    def __init__(self, style: str, rows: Iterable[tuple[str, T]]) -> None:
        """Take (template, value) rows; ArchError if two templates match the same names."""
        self._style = style
        self._rows: dict[str, list[tuple[tuple[str, ...], T]]] = {}
        for template, value in rows:
            parts = strip_prefix(template, style).split(".")
            marks = tuple(part for part in parts if _is_mark(part))
            key = ".".join("#" if _is_mark(part) else part for part in parts)
            others = self._rows.setdefault(key, [])
            if any(_overlap(marks, other) for other, _ in others):
                raise ArchError(
                    f"name template {template!r}: another one matches the same names; expected "
                    "distinct templates"
                )
            others.append((marks, value))
        self._endings = {".".join(key.split(".")[-2:]) for key in self._rows}

    def can_end(self, name: str) -> bool:
        """Return whether the last one or two components of a name are those of some template.

        False means that no template matches the name, nor any end of it from a dot on. This is
        faster than `find`, which fails on most names of an unknown file.
        """
        last = name.rsplit(".", 2)[-2:]
        ends = ["#" if part.isascii() and part.isdigit() else part for part in last]
        return ".".join(ends) in self._endings or ends[-1] in self._endings

    def find(self, name: str) -> Match[T] | None:
        """Return the value of the template that matches, with the layer and element in the name.

        None if no template matches.
        """
        if not self.can_end(name):
            return None
        numbers: list[str] = []
        parts = strip_prefix(name, self._style).split(".")
        for i, part in enumerate(parts):
            if part.isascii() and part.isdigit():
                # Numbers without leading zeros only, so that no two names mean the same tensor.
                if len(part) > 6 or (part[0] == "0" and len(part) > 1):
                    return None
                numbers.append(part)
                parts[i] = "#"
        for marks, value in self._rows.get(".".join(parts), ()):
            if len(marks) == len(numbers) and _overlap(marks, numbers):
                found = dict(zip(marks, map(int, numbers), strict=True))
                return Match(value, found.get("{L}"), found.get("{E}"))
        return None


def _is_mark(part: str) -> bool:
    """Return whether a component of a template stands for a number: {L}, {E} or a number itself."""
    return part in ("{L}", "{E}") or (part.isascii() and part.isdigit())


def _overlap(marks: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether two lists of numbers are equal where neither has a mark.

    A mark, {L} or {E}, stands for any number.
    """
    return all(
        a == b or a.startswith("{") or b.startswith("{")
        for a, b in zip(marks, others, strict=False)
    )
