"""What goes with a model as text: its chat template, line by line, and its generation config."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import unified_diff
from typing import TYPE_CHECKING

from aprfmt.errors import AprfmtError

if TYPE_CHECKING:
    from aprfmt.model import Model

_FILE = "generation_config.json"
_AROUND = 2  # equal lines shown before and after
# What a key does to a generation; others are listed without words.
EFFECTS: Mapping[str, str] = {
    "temperature": "how evenly tokens are drawn",
    "top_k": "of how many tokens one is drawn",
    "top_p": "of what share of probability one is drawn",
    "min_p": "how improbable a token may be",
    "do_sample": "whether tokens are drawn, or the best one taken",
    "repetition_penalty": "how much tokens that were there are avoided",
    "max_new_tokens": "after how many tokens it ends",
    "max_length": "at what length it ends",
    "bos_token_id": "what it begins with",
    "eos_token_id": "what ends it",
    "pad_token_id": "what fills shorter rows of a batch",
}
_OF_THE_WRITER = ("transformers_version", "_from_model_config")


@dataclass(frozen=True, slots=True)
class KeyDiff:
    """A key of the generation config that differs; None is an absent one."""

    name: str
    a: object
    b: object
    effect: str = ""


def template_lines(a: "Model", b: "Model") -> tuple[str, ...]:
    """Return the unified diff of both chat templates; empty for equal ones, or without both."""
    x, y = _template(a), _template(b)
    if x is None or y is None:
        return ()
    lines = unified_diff(x.splitlines(), y.splitlines(), "A", "B", lineterm="", n=_AROUND)
    return tuple(lines)


def generation(a: "Model", b: "Model") -> tuple[KeyDiff, ...]:
    """List the keys of both generation configs that differ; none where a side has no such file."""
    x, y = _generation(a), _generation(b)
    if not x or not y:
        return ()
    return tuple(
        KeyDiff(key, x.get(key), y.get(key), EFFECTS.get(key, ""))
        for key in dict.fromkeys((*x, *y))
        if key not in _OF_THE_WRITER and x.get(key) != y.get(key)
    )


def _template(model: "Model") -> str | None:
    try:
        return model.carried.chat_template()
    except AprfmtError:
        return None  # the tokenizers' comparison says what is wrong with it


def _generation(model: "Model") -> Mapping[str, object]:
    try:
        return model.carried.parse(_FILE)
    except AprfmtError:
        return {}
