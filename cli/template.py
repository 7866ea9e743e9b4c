"""`aprfmt template`: the model's chat template, rendered."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.base.protocols import Value
from aprfmt.cli import options, render
from aprfmt.errors import AprfmtError, FormatError, UsageError

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line
    from aprfmt.model import Model


def render_template(
    opened: "Model", messages: Sequence[Mapping[str, Value]], open_turn: bool
) -> dict[str, object]:
    """Return {tokenizer, text, ids} of messages rendered by the model's chat template.

    Where the tokenizer cannot be built, `ids` is None and `no_ids` says why. `open_turn` begins the
    assistant's turn.
    """
    from aprfmt.tokenizer.loading import render_messages

    try:
        tokenizer = opened.tokenizer
    except AprfmtError as error:
        text = render_messages(opened, messages, add_generation_prompt=open_turn)
        if text is None:
            raise
        return {"tokenizer": None, "text": text, "ids": None, "no_ids": str(error)}
    text, ids = tokenizer.chat(messages, add_generation_prompt=open_turn)
    return {"tokenizer": tokenizer.origin, "text": text, "ids": ids}


def messages_from_options(user: str | None, system: str | None) -> list[dict[str, str]]:
    """Return the chat messages of --system and --user; UsageError without a user's."""
    if user is None:
        raise UsageError("template: no message; give --user TEXT or --messages FILE.json")
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": user}]


def read_messages(path: Path) -> list[dict[str, object]]:
    """Return the chat messages of a JSON file; FormatError where it holds anything else."""
    from aprfmt.formats.bounded_json import load_file

    found = load_file(path, max_bytes=4 << 20)
    if not isinstance(found, list) or not all(
        isinstance(row, Mapping) and isinstance(row.get("role"), str) for row in found
    ):
        raise FormatError(f"{path}: expected a list of objects with role and content")
    return [dict(row) for row in found]


@click.command("template")
@options.model()
@click.option("--user", metavar="TEXT", help="The user's message.")
@click.option("--system", metavar="TEXT", help="The system message before it.")
@click.option(
    "--messages",
    "file",
    type=options.NamedPath(),
    metavar="FILE.json",
    help="A JSON list of {role, content} instead.",
)
@click.option("--no-generation-prompt", is_flag=True, help="Do not open the assistant's turn.")
@click.option(
    "--against",
    type=click.Choice(["llama.cpp"]),
    metavar="llama.cpp",
    help="Render set conversations by this engine too; say what differs.",
)
@options.common
def command(
    model: Path,
    user: str | None,
    system: str | None,
    file: Path | None,
    no_generation_prompt: bool,
    against: str | None,
) -> int:
    """Render the chat template, in a child process with limits, and show its token ids.

    If the tokenizer cannot be built the text is shown without ids. With --against conversations
    with tools, reasoning and several turns are rendered by jinja2 and by llama.cpp. Exit 0: all are
    equal; 1: one is not; 2: llama.cpp's server is not installed.
    """
    from aprfmt.model import open_model
    from aprfmt.tokenizer.template import scan_template

    # --against compares two engines on fixed conversations; nothing else is rendered.
    if against is not None:
        if file is not None or user is not None or system is not None or no_generation_prompt:
            raise UsageError("template: --against renders conversations of its own; give no others")
        return report_engines(model)

    if file is not None and (user is not None or system is not None):
        raise UsageError("template: --messages holds every message; leave --user and --system out")
    messages = read_messages(file) if file is not None else messages_from_options(user, system)
    with open_model(model) as opened:
        body: dict[str, Any] = {
            "model": str(opened.path),
            "messages": messages,
            **render_template(opened, messages, not no_generation_prompt),
            "suspicious": scan_template(opened.carried.chat_template() or ""),
        }
    for finding in body["suspicious"]:
        render.warn(f"chat template, {finding}", "template")
    ids = body["ids"]
    if ids is None:
        render.warn(f"no token ids: {body['no_ids']}", "no_tokenizer")

    def show() -> None:
        """Print the text that the chat template gives, and its token ids if there are any."""
        for line in body["text"].split("\n"):
            render.say(line)
        if ids is not None:
            render.line(f"{len(ids)} tokens: {' '.join(map(str, ids))}", style="dim")

    return render.emit(body, 0, show)


def report_engines(model: Path) -> int:
    """Render fixed conversations by jinja2 and llama.cpp, print what differs, return the code.

    It is 1 where a conversation differs, else 0. Raises FormatError for a model without a tokenizer
    or chat template.
    """
    from aprfmt.model import open_model
    from aprfmt.tokenizer.stored_tokenizer import read_tokenizer_parts
    from aprfmt.tokenizer.template_engines import CAUSE, compare_engines

    with open_model(model) as opened:
        side = read_tokenizer_parts(opened)
        template = opened.carried.chat_template()
        if side is None or template is None:
            raise FormatError(f"{opened.path}: carries no chat template; nothing can be rendered")
        found = compare_engines(template, side.special_token_texts, str(opened.path))
        body = {
            "model": str(opened.path),
            "cause": CAUSE if found.differing else None,
            "engine": found.engine,
            "says": found.text,
            "conversations": [asdict(row) | {"says": row.text} for row in found.rows],
        }

    def show() -> None:
        """Print whether the two template engines agree, and each conversation that differs."""
        render.say(found.text, style="bad" if found.differing else "good")
        for row in found.differing:
            render.say(f"  {row.conversation}: {row.text}", style="bad")

    def answer() -> "list[Line]":
        """Return the short answer on two template engines as (text, style) lines."""
        from aprfmt.compare.short_answer import merge_similar_lines

        lines: list[Line] = [
            (f"  {row.conversation}: {row.text}", "bad") for row in found.differing
        ]
        return [(found.text, "bad" if found.differing else "good"), *merge_similar_lines(lines)]

    return render.emit(body, int(bool(found.differing)), show, answer=answer)
