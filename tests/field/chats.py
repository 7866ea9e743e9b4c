"""Edits of what turns text into tokens: GGUF's arrays, tokenizer files, templates, stop tokens."""

from collections.abc import Callable
from typing import Any

Keys = dict[str, Any]
G = "tokenizer.ggml."


def key(name: str, value: Any) -> Callable[[Keys], None]:
    """Return an edit that sets a key."""

    def run(keys: Keys) -> None:
        keys[name] = value

    return run


def merges_cut(part: float) -> Callable[[Keys], None]:
    """Return an edit that keeps the first merges only."""

    def run(keys: Keys) -> None:
        merges = keys[G + "merges"]
        keys[G + "merges"] = merges[: int(part * len(merges))]

    return run


def typed(text: str, kind: int) -> Callable[[Keys], None]:
    """Return an edit of the type of tokens that contain a text."""

    def run(keys: Keys) -> None:
        types = list(keys[G + "token_type"])
        chosen = [i for i, token in enumerate(keys[G + "tokens"]) if text in token]
        assert chosen
        for i in chosen:
            types[i] = kind
        keys[G + "token_type"] = types

    return run


def renamed(text: str, other: str) -> Callable[[Keys], None]:
    """Return an edit of a token's text."""

    def run(keys: Keys) -> None:
        keys[G + "tokens"] = [other if token == text else token for token in keys[G + "tokens"]]

    return run


def template(change: Callable[[str], str]) -> Callable[[Keys], None]:
    """Return an edit of the GGUF's chat template."""

    def run(keys: Keys) -> None:
        keys["tokenizer.chat_template"] = change(keys["tokenizer.chat_template"])

    return run


LLAMA3 = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
    "'<|end_header_id|>\\n\\n' + message['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{% endif %}"
)


def pair(merge: Any) -> Any:
    """Return a merge as one string, as older files have it."""
    return merge if isinstance(merge, str) else " ".join(merge)
