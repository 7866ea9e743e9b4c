"""Test conversations that show what a chat template does, and the tokens it writes."""

import json
import re
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from aprfmt.errors import AprfmtError
from aprfmt.tokenizer.keys import END_TEXTS
from aprfmt.tokenizer.template import render_several
from aprfmt.tokenizer.vocabulary import BLANK

if TYPE_CHECKING:
    from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer

_USER = {"role": "user", "content": "What is 2 + 2?"}
_ANSWER = {"role": "assistant", "content": "It is 4."}
_MORE = {"role": "user", "content": "  Why?\n"}
_SYSTEM = {"role": "system", "content": "You are brief."}

# name -> messages and whether the model is asked to answer; without tools.
CONVERSATIONS: Mapping[str, Mapping[str, Any]] = {
    "one question": {"messages": [_USER], "add_generation_prompt": True},
    "a system message": {"messages": [_SYSTEM, _USER], "add_generation_prompt": True},
    "two turns": {"messages": [_USER, _ANSWER, _MORE], "add_generation_prompt": True},
    "an answer, no prompt": {"messages": [_USER, _ANSWER], "add_generation_prompt": False},
    "a system message and two turns": {
        "messages": [_SYSTEM, _USER, _ANSWER, _MORE],
        "add_generation_prompt": False,
    },
}

_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first one."},
                "b": {"type": "integer", "description": "The other one."},
            },
            "required": ["a", "b"],
        },
    },
}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function",
         "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    ],
}  # fmt: skip
_RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "4"}
_REASONED = {**_ANSWER, "reasoning_content": "Two and two make four."}

# Those rendered by two engines: also with tools and reasoning.
ENGINE_CONVERSATIONS: Mapping[str, Mapping[str, Any]] = {
    **CONVERSATIONS,
    "many turns": {
        "messages": [_SYSTEM, *[_USER, _ANSWER] * 3, _MORE], "add_generation_prompt": True
    },
    "a tool offered": {"messages": [_USER], "tools": [_TOOL], "add_generation_prompt": True},
    "a tool called": {
        "messages": [_USER, _CALL, _RESULT], "tools": [_TOOL], "add_generation_prompt": True
    },
    "a tool called and answered": {
        "messages": [_SYSTEM, _USER, _CALL, _RESULT, _ANSWER, _MORE], "tools": [_TOOL],
        "add_generation_prompt": True,
    },
    "an answer with reasoning": {
        "messages": [_USER, _REASONED, _MORE], "add_generation_prompt": True
    },
    "no thinking": {
        "messages": [_USER], "enable_thinking": False, "add_generation_prompt": True
    },
}  # fmt: skip

# What control tokens look like. Words in pointed brackets alone are none: <tools> is text.
_MARKED = re.compile(r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>\s]{1,40}\uff5c>")
_PLAIN = tuple(
    text for text in (*END_TEXTS, "<start_of_turn>", "<s>", "<bos>") if not _MARKED.fullmatch(text)
)
# Zephyr and similar templates write their roles as text that no vocabulary has as a token.
_ROLES = frozenset(f"<|{role}|>" for role in "system user assistant tool prompter human".split())


def render_conversations(
    template: str, variables: Mapping[str, str], where: str
) -> dict[str, tuple[str, str]]:
    """Return {conversation: (status, text)}; status "ok" with the rendered text.

    `variables` are bos_token and the like; `where` begins messages. Raises FormatError if the
    template is not one, or if rendering exceeds a limit.
    """
    found = render_several(template, list(CONVERSATIONS.values()), variables, where)
    return dict(zip(CONVERSATIONS, found, strict=True))


def unrendered_reason(template: str, variables: Mapping[str, str], where: str) -> str:
    """Return why a template renders none of the conversations; "" if it renders, or refuses, one.

    Contents are tried as text, then as a list of one part, which models of images and sound are
    given. `variables` are bos_token and the like; `where` begins messages. Raises FormatError if
    the template is not one, or if rendering exceeds a limit.
    """
    found = list(render_conversations(template, variables, where).values())
    if any(status != "error" for status, _ in found):
        return ""
    parts = [
        {**row, "messages": [_with_parts(one) for one in row["messages"]]}
        for row in CONVERSATIONS.values()
    ]
    listed = render_several(template, parts, variables, where)
    return "" if any(status != "error" for status, _ in listed) else found[0][1]


def _with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose content is a list of one part of text."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def answer_end(
    template: str, variables: Mapping[str, str], tokens: Iterable[str], where: str
) -> str | None:
    """Return the longest of `tokens` that the template writes directly after a final answer.

    None if it writes another text or nothing there. `variables` are bos_token and the like; `where`
    begins messages. Raises FormatError if the template is not one, or if rendering exceeds a limit.
    """
    conversation = CONVERSATIONS["an answer, no prompt"]
    ((status, text),) = render_several(template, [conversation], variables, where)
    _, answered, following = text.rpartition(_ANSWER["content"])
    if status != "ok" or not answered:
        return None
    following = following.lstrip()
    return max((t for t in tokens if t and following.startswith(t)), key=len, default=None)


def turn_tokens(
    template: str, variables: Mapping[str, str], tokens: Iterable[str], where: str
) -> tuple[str | None, frozenset[str]]:
    """Return (which of `tokens` ends an answer, those that begin it) in a rendered conversation.

    The token that ends the question before the answer is none of them. (None, empty) where the
    template writes no token after an answer. Raises FormatError if the template is not one, or if
    rendering exceeds a limit.
    """
    special = list(tokens)
    end = answer_end(template, variables, special, where)
    if end is None:
        return None, frozenset()
    conversation = CONVERSATIONS["an answer, no prompt"]
    ((_, text),) = render_several(template, [conversation], variables, where)
    between = text.rpartition(_ANSWER["content"])[0].rpartition(_USER["content"])[2]
    after_question = between.lstrip()
    closing = (
        {t for t in special if t and after_question.startswith(t)} if end in between else set()
    )
    return end, frozenset(t for t in special if t and t in between) - closing - {end}


def named_tokens(texts: Mapping[str, tuple[str, str]]) -> list[str]:
    """Return the texts like control tokens that a template adds to the conversations, each once.

    `texts` is what `render_conversations` returns.
    """
    inputs = json.dumps(list(CONVERSATIONS.values()))
    found: dict[str, None] = {}
    for status, text in texts.values():
        if status == "ok":
            found.update(dict.fromkeys(_MARKED.findall(text)))
            found.update(dict.fromkeys(word for word in _PLAIN if word in text))
    return [token for token in found if token not in inputs]


def missing_template_tokens(side: "StatedTokenizer") -> list[str]:
    """Return the control tokens that a model's template writes and its vocabulary lacks.

    [] without a template, and for one that cannot be rendered: other checks report that.
    """
    if side.template is None:
        return []
    try:
        texts = render_conversations(side.template, side.special_token_texts, side.carried.where)
    except AprfmtError:
        return []
    return unknown_tokens(named_tokens(texts), frozenset(side.vocabulary.tokens))


def unknown_tokens(named: list[str], vocabulary: Container[str]) -> list[str]:
    """Return the named tokens that a vocabulary lacks; [] if only role names are missing."""
    missing = [t for t in named if t not in vocabulary and BLANK + t not in vocabulary]
    return missing if set(missing) - _ROLES else []
