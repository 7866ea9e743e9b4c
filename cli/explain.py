"""`aprfmt explain`: an error kind, a role, an encoding, an exit code, a verdict, in a paragraph."""

import json

import click

from aprfmt.cli import options, render, shell_completion
from aprfmt.cli.explain_topics import all_topics
from aprfmt.errors import UsageError


def _completed(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return shell_completion.matching_names(
        (key for rows in all_topics().values() for key in rows), incomplete
    )


@click.command("explain")
@click.argument("name", required=False, shell_complete=_completed)
@click.option("--schema", metavar="COMMAND", help="Print the JSON schema of a command's --json.")
@options.common
def command(name: str | None, schema: str | None) -> int:
    """Explain NAME: a warning, error kind, verdict, role, encoding, capture point, exit code.

    A section's name (exit-codes) explains all of it. Without NAME, list every topic.
    """
    if schema is not None:
        return print_schema(name, schema)
    if name is None:
        listed = {section: list(rows) for section, rows in all_topics().items()}

        def show_all() -> None:
            for section, keys in listed.items():
                render.line(section, style="head")
                render.line("  " + ", ".join(keys))

        return render.emit({"topics": listed}, 0, show_all)
    found = find_topics(name)

    def show() -> None:
        for section, key, text in found:
            render.line(f"{key} ({section})", style="head")
            render.line(f"  {text}")

    rows = [{"section": s, "name": k, "text": t} for s, k, t in found]
    return render.emit({"found": rows}, 0, show)


def find_topics(name: str) -> list[tuple[str, str, str]]:
    """Return (section, name, text) of what a name means; UsageError with near names for none."""
    from aprfmt.model.patterns import near

    every = all_topics()
    if name not in every:
        name = _usual_spelling(name)
    if name.endswith("Error"):
        name = name.removesuffix("Error").lower()
    wanted = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    whole = name.lower().replace("-", " ").removesuffix("s")
    found = [
        (section, key, text)
        for section, rows in every.items()
        for key, text in rows.items()
        if key.lower() in (name.lower(), wanted.lower()) or section == whole
    ]
    if not found:
        keys = [*every, *(key for rows in every.values() for key in rows)]
        raise UsageError(f"nothing to explain about {name!r}; near: {', '.join(near(name, keys))}")
    return found


def _usual_spelling(name: str) -> str:
    """Return the encoding or type that a spelling of the field means (`fp16`, `q4km`); else it."""
    from aprfmt.base.encoding_names import find_name
    from aprfmt.base.encodings import ENCODINGS
    from aprfmt.quantizing.mixture import type_name

    return find_name(name, ENCODINGS) or type_name(name)


def print_schema(name: str | None, command: str) -> int:
    """Print the schema of a command's `--json`; with --json, inside the usual object."""
    from aprfmt.schemas import schema

    if name is not None:
        raise UsageError(f"--schema {command} explains one thing, {name!r} another; give one")
    found = schema(command)
    return render.emit({"json_schema": found}, 0, lambda: click.echo(json.dumps(found, indent=1)))
