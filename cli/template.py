"""`aprfmt template`: the model's chat template, rendered."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import options, render
from aprfmt.errors import AprfmtError, FormatError, UsageError

if TYPE_CHECKING:
    from aprfmt.model import Model


@click.command("template")
@options.model()
@click.option("--user", metavar="TEXT", help="The user's message.")
@click.option("--system", metavar="TEXT", help="The system message before it.")
@click.option("--messages", "file", type=click.Path(path_type=Path), metavar="FILE.json",
              help="A JSON list of {role, content} instead.")  # fmt: skip
@click.option("--no-generation-prompt", is_flag=True, help="Do not open the assistant's turn.")
@options.common
def command(
    model: Path,
    user: str | None,
    system: str | None,
    file: Path | None,
    no_generation_prompt: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Render the chat template, in a child process with limits, and show its token ids.

    Where the tokenizer cannot be built the text is shown without ids.
    """
    from aprfmt.model import open_model
    from aprfmt.tokenizer import scan_template

    if file is not None and (user is not None or system is not None):
        raise UsageError("template: --messages holds every message; leave --user and --system out")
    messages = read_messages(file) if file is not None else given(user, system)
    with open_model(model) as opened:
        body: dict[str, Any] = {
            "model": str(opened.path),
            "messages": messages,
            **rendered(opened, messages, not no_generation_prompt),
            "suspicious": scan_template(opened.carried.chat_template() or ""),
        }
    for finding in body["suspicious"]:
        render.warn(f"chat template, {finding}", "template")
    ids = body["ids"]
    if ids is None:
        render.warn(f"no token ids: {body['no_ids']}", "no_tokenizer")
    if not as_json:
        for line in body["text"].split("\n"):
            render.line(render.escape(line))
        if ids is not None:
            render.line(f"{len(ids)} tokens: {' '.join(map(str, ids))}", style="dim")
    return render.emit("template", 0, body, as_json)


def rendered(opened: "Model", messages: list[dict[str, Any]], open_turn: bool) -> dict[str, Any]:
    """Return the text, its ids, and the tokenizer's origin; `no_ids` says why there are none."""
    from aprfmt.tokenizer import render_alone

    try:
        tokenizer = opened.tokenizer
    except AprfmtError as error:
        text = render_alone(opened, messages, add_generation_prompt=open_turn)
        if text is None:
            raise
        return {"tokenizer": None, "text": text, "ids": None, "no_ids": str(error)}
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=open_turn)
    ids = tokenizer.encode(text, add_special=False)
    return {"tokenizer": tokenizer.origin, "text": text, "ids": ids}


def given(user: str | None, system: str | None) -> list[dict[str, Any]]:
    """Return the messages of --system and --user; UsageError without a user's."""
    if user is None:
        raise UsageError("template: no message; give --user TEXT or --messages FILE.json")
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": user}]


def read_messages(path: Path) -> list[dict[str, Any]]:
    """Return the messages of a JSON file. Raises FormatError for what is no list of messages."""
    from aprfmt.formats.jsonio import load_file

    found = load_file(path, max_bytes=4 << 20)
    if not isinstance(found, list) or not all(
        isinstance(row, Mapping) and isinstance(row.get("role"), str) for row in found
    ):
        raise FormatError(f"{path}: expected a list of objects with role and content")
    return [dict(row) for row in found]
