"""Compares how jinja2 and llama.cpp render the same chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from aprfmt.base.text_escape import shorten
from aprfmt.tokenizer.conversations import ENGINE_CONVERSATIONS
from aprfmt.tokenizer.llama_server import render_by_llama_cpp
from aprfmt.tokenizer.template import render_several

CAUSE = "chat_template"  # of compare/causes
_SHOWN = 40  # characters of each side


def _llama_cpp_variables() -> dict[str, Any]:
    """Return {name: value} of variables that only llama.cpp gives every template.

    transformers gives none of them. Source: llama.cpp, common/chat.cpp (2026-10).
    """
    return {"enable_thinking": True, "date_string": datetime.now().strftime("%d %b %Y")}


@dataclass(frozen=True, slots=True)
class EngineRendering:
    """What both engines rendered of one conversation.

    A text is None where an engine refused it, and its reason is in `jinja2_refuses` or
    `llama_cpp_refuses`. `at` is the first character that differs, None where none does. `given` are
    variables that only llama.cpp gives the template, where jinja2 renders the same with them.
    """

    conversation: str
    same: bool
    at: int | None
    jinja2: str | None
    llama_cpp: str | None
    jinja2_refuses: str = ""
    llama_cpp_refuses: str = ""
    given: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The difference in a sentence, or that both engines render alike or refuse."""
        if self.same:
            return "rendered alike" if self.jinja2 is not None else "refused by both"
        if self.jinja2 is None or self.llama_cpp is None:
            name, why = ("jinja2", self.jinja2_refuses)
            if self.jinja2 is not None:
                name, why = "llama.cpp", self.llama_cpp_refuses
            return f"{name} alone refuses it: {shorten(why, 200)}"
        at = self.at or 0
        one, other = (
            repr(text[at : at + _SHOWN]) if at < len(text) else "its end"
            for text in (self.jinja2, self.llama_cpp)
        )
        why = f": only llama.cpp sets {' and '.join(self.given)}" if self.given else ""
        return f"from character {at} on jinja2 has {one}, llama.cpp {other}{why}"


@dataclass(frozen=True)
class TemplateEngines:
    """What both engines rendered of every conversation; `engine` says which llama.cpp."""

    engine: str
    rows: tuple[EngineRendering, ...]

    @property
    def differing(self) -> tuple[EngineRendering, ...]:
        """The conversations that the engines render differently."""
        return tuple(row for row in self.rows if not row.same)

    @property
    def text(self) -> str:
        """The answer in a sentence: whether any conversation is rendered otherwise."""
        count = len(self.rows)
        if not self.differing:
            return f"same: jinja2 and {self.engine} render {count} conversations alike"
        return (
            f"different: {CAUSE} - {self.engine} renders {len(self.differing)} of {count} "
            "conversations otherwise than jinja2"
        )


def compare_engines(template: str, variables: Mapping[str, str], where: str) -> TemplateEngines:
    """Return how jinja2 and llama.cpp render test conversations with tools and reasoning.

    `variables` are the special tokens that a template can write. Raises BackendUnavailableError
    without a llama.cpp that renders templates, FormatError for what is no template.
    """
    conversations: list[Mapping[str, Any]] = list(ENGINE_CONVERSATIONS.values())
    ours = render_several(template, conversations, variables, where)
    engine, theirs = render_by_llama_cpp(template, variables, conversations, where)
    rows = [
        _make_rendering(name, one, other)
        for name, one, other in zip(ENGINE_CONVERSATIONS, ours, theirs, strict=True)
    ]
    apart = [at for at, row in enumerate(rows) if not row.same and row.llama_cpp is not None]
    given = {name: value for name, value in _llama_cpp_variables().items() if name in template}
    if apart and given:
        again = render_several(
            template, [{**given, **conversations[at]} for at in apart], variables, where
        )
        for at, (status, text) in zip(apart, again, strict=True):
            if status == "ok" and text == rows[at].llama_cpp:
                names = tuple(name for name in given if name not in conversations[at])
                rows[at] = replace(rows[at], given=names)
    return TemplateEngines(engine, tuple(rows))


def _make_rendering(name: str, ours: tuple[str, str], theirs: tuple[str, str]) -> EngineRendering:
    """Return the EngineRendering of one conversation, from (status, text) of each engine."""
    one, other = (text if status == "ok" else None for status, text in (ours, theirs))
    at = None
    if one is not None and other is not None and one != other:
        pairs = enumerate(zip(one, other, strict=False))
        at = next((i for i, (x, y) in pairs if x != y), min(len(one), len(other)))
    return EngineRendering(
        name,
        one == other,
        at,
        one,
        other,
        "" if one is not None else ours[1],
        "" if other is not None else theirs[1],
    )
