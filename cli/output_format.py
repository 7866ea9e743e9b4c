"""The form of an answer, by --format, --json or the environment: human, agent, json and others."""

import os
import sys

import click

from aprfmt.base.sequences import NAMED

FORMS = ("human", "agent", "json")  # of every command
CI_FORMS = (*FORMS, "sarif", "junit")  # of those whose answers a CI server shows
AGENT_NAMES = 64  # names of a place in that form
LINES = 12  # lines of an answer in the form for agents

# Variables that coding agents set for the commands they run. Sources: the pages of each on the
# shell it opens, and the lists of Vercel's detect-agent and unjs' std-env (2026-11).
AGENT_VARIABLES = (
    "AI_AGENT",  # any
    "AGENT",  # goose, amp
    "CLAUDECODE",
    "CLAUDE_CODE",
    "CODEX_SANDBOX",
    "CODEX_THREAD_ID",
    "CODEX_CI",
    "GEMINI_CLI",
    "CURSOR_AGENT",
    "AUGMENT_AGENT",
    "OPENCODE",
    "OPENCODE_CLIENT",
    "CLINE_ACTIVE",
    "ANTIGRAVITY_AGENT",
    "QWEN_CODE",
    "COPILOT_CLI",
)
_OFF = ("", "0", "false")
_KEY = f"{__name__}.asked"
_JSON = f"{__name__}.json"


def run_by_agent() -> bool:
    """Return whether a coding agent reads stdout, by its environment variables.

    It does not where stdout is a terminal.
    """
    set_by = any(os.environ.get(name, "").lower() not in _OFF for name in AGENT_VARIABLES)
    return set_by and not sys.stdout.isatty()


def set_format(context: click.Context, option: click.Parameter, value: str | None) -> None:
    """Store the value of --format for `answer_format`; click calls it."""
    context.meta[_KEY] = value


def set_json_format(context: click.Context, option: click.Parameter, value: bool) -> None:
    """Store the flag --json for `answer_format`; click calls it."""
    context.meta[_JSON] = value


def answer_format() -> str:
    """Return the form of the running command's answer, one of CI_FORMS.

    --format wins over --json, except that --json wins over `--format human`. Without either it is
    "agent" where an agent reads stdout, else "human". Outside of a command only the environment
    decides.
    """
    context = click.get_current_context(silent=True)
    meta = {} if context is None else context.meta
    asked = meta.get(_KEY)
    if asked == "human" and meta.get(_JSON):
        return "json"
    if asked is not None:
        return str(asked)
    if meta.get(_JSON):
        return "json"
    return "agent" if run_by_agent() else "human"


def shown_names() -> int:
    """Return how many tensor names an answer lists for one finding; more for an agent."""
    return AGENT_NAMES if answer_format() == "agent" else NAMED
