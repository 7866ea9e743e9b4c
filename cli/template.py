"""`aprfmt template`: the model's chat template, rendered."""

from pathlib import Path
from typing import Any

import click

from aprfmt.cli import options, render
from aprfmt.cli.template_text import given, read_messages, rendered
from aprfmt.errors import UsageError


@click.command("template")
@options.model()
@click.option("--user", metavar="TEXT", help="The user's message.")
@click.option("--system", metavar="TEXT", help="The system message before it.")
@click.option("--messages", "file", type=options.NamedPath(), metavar="FILE.json",
              help="A JSON list of {role, content} instead.")  # fmt: skip
@click.option("--no-generation-prompt", is_flag=True, help="Do not open the assistant's turn.")
@options.common
def command(
    model: Path, user: str | None, system: str | None, file: Path | None, no_generation_prompt: bool
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

    def show() -> None:
        for line in body["text"].split("\n"):
            render.say(line)
        if ids is not None:
            render.line(f"{len(ids)} tokens: {' '.join(map(str, ids))}", style="dim")

    return render.emit(body, 0, show)
