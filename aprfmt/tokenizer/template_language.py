"""Recognises chat templates of other languages than jinja2, and those that render no chat."""

import re
from dataclasses import dataclass

STATEMENT = "{%"
TODO = (
    "take the source model's jinja2 template (chat_template.jinja, or chat_template of its "
    "tokenizer_config.json)"
)
# Names that llama.cpp takes for --chat-template (src/llama-chat.cpp, LLM_CHAT_TEMPLATES).
BUILT_IN = frozenset(
    "chatml llama2 llama2-sys llama2-sys-bos llama2-sys-strip llama3 llama4 mistral-v1 mistral-v3 "
    "mistral-v3-tekken mistral-v7 mistral-v7-tekken phi3 phi4 falcon3 zephyr monarch gemma orion "
    "openchat vicuna vicuna-orca deepseek deepseek2 deepseek3 command-r chatglm3 chatglm4 glmedge "
    "minicpm exaone3 exaone4 rwkv-world granite gigachat megrez yandex bailing smolvlm hunyuan-moe "
    "gpt-oss kimi-k2 seed_oss".split()
)


@dataclass(frozen=True)
class TemplateLanguage:
    """A row: a language's name, words for it, and the regular expression that recognises it."""

    name: str
    says: str
    marks: re.Pattern[str]


LANGUAGES: tuple[TemplateLanguage, ...] = (
    # https://pkg.go.dev/text/template: actions, fields, variables and comments
    TemplateLanguage(
        "go",
        "a Go template (as Ollama has it)",
        re.compile(
            r"\{\{-?\s{0,8}(?:\.[A-Za-z]|\$|/\*|(?:if|else|range|with|end|block|define|template)\b)"
        ),
    ),
    # https://handlebarsjs.com/guide: blocks, partials, whitespace control
    TemplateLanguage("handlebars", "a Handlebars template", re.compile(r"\{\{~?[#/^>]")),
    # https://docs.ruby-lang.org/en/master/ERB.html; EJS has the same tags
    TemplateLanguage("erb", "an ERB or EJS template", re.compile(r"<%[-=#_]?\s")),
    TemplateLanguage(
        "format",
        "a text with one placeholder for the prompt",
        re.compile(
            r"(?<!\{)\{(?:prompt|instruction|input|query|question|system|user|system_message"
            r"|system_prompt|user_message|0)\}(?!\})"
        ),
    ),
)


@dataclass(frozen=True)
class ForeignTemplate:
    """A template of another language: its name, what it is in words, and the line that shows it."""

    name: str
    says: str
    line: int


# What opens or closes jinja2 code, and the name of the list of messages.
_CODE = re.compile(r"(?P<opens>\{[{%])|(?P<closes>[}%]\})|\bmessages\b")


def foreign_template(template: str) -> ForeignTemplate | None:
    """Return what language a chat template is in that is not jinja2; None if it may be jinja2."""
    if STATEMENT in template:
        return None
    name = template.strip()
    if name in BUILT_IN:
        says = f"the name of a template that llama.cpp has built in ({name})"
        return ForeignTemplate("name", says, 1)
    for row in LANGUAGES:
        found = row.marks.search(template)
        if found is not None:
            return ForeignTemplate(row.name, row.says, template.count("\n", 0, found.start()) + 1)
    return None


UNREAD_MESSAGES = "has no code that reads `messages`: it renders one text whatever is said"


def reads_messages(template: str) -> bool:
    """Return whether `messages` stands in jinja2 code, as it has to for a chat to be rendered."""
    inside = False
    for found in _CODE.finditer(template):
        if found["opens"] or found["closes"]:
            inside = bool(found["opens"])
        elif inside:
            return True
    return False
