"""`aprfmt set`: change metadata, leave every tensor byte alone."""

from pathlib import Path
from typing import Any

import click

from aprfmt.cli import options
from aprfmt.cli.convert import run

MAX_VALUE = 64 << 20  # bytes of a value; a file of ours carries a tokenizer.json in one


@click.command("set")
@options.model()
@click.argument("changes", nargs=-1, required=True, callback=options.first_equals,
                metavar="KEY=VALUE...")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@options.force
@options.no_verify
@options.common
def command(
    model: Path,
    changes: tuple[tuple[str, str], ...],
    output: Path,
    force: bool,
    no_verify: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Set metadata keys in a copy of MODEL; VALUE is JSON, or text as it stands, or @FILE.

    A key keeps the type it has in the file; `KEY=` (nothing) is an error, `KEY=""` empty text.
    """
    from aprfmt.errors import UsageError
    from aprfmt.model import open_model

    with open_model(model) as opened:
        if opened.format != _target(output):
            raise UsageError(f"{output}: set keeps the format {opened.format}; name it so")
        values = {key: parse(opened, key, text) for key, text in changes}
    return run(
        "set", model, output, None, quiet, as_json,
        metadata=values, force=force, verify=not no_verify, complete=False,
    )  # fmt: skip


def _target(output: Path) -> str:
    from aprfmt.conversion import target_format

    return target_format(output, None).name


def parse(opened: Any, key: str, text: str) -> Any:
    """Return the value for a key: of the key's present type, else what JSON makes of it."""
    from aprfmt.errors import FormatError, UsageError
    from aprfmt.formats.jsonio import loads
    from aprfmt.hf_folder import read_text

    if text.startswith("@"):
        text = read_text(Path(text[1:]))
        present = opened.metadata.get(key)
        return text if present is None or isinstance(present, str) else _json(text, key)
    present = opened.metadata.get(key)
    if isinstance(present, str):
        return text[1:-1] if len(text) >= 2 and text[0] == text[-1] == '"' else text
    try:
        value = loads(text, key, max_bytes=MAX_VALUE, nonfinite=True)
    except FormatError:
        value = text
    if present is not None and _kind(present) != _kind(value):
        raise UsageError(
            f"{key}: is {_kind(present)} in the file, {text!r} is {_kind(value)}; give a value of "
            "that kind"
        )
    return value


def _json(text: str, key: str) -> Any:
    from aprfmt.errors import FormatError, UsageError
    from aprfmt.formats.jsonio import loads

    try:
        return loads(text, key, max_bytes=MAX_VALUE, nonfinite=True)
    except FormatError as error:
        raise UsageError(f"{error}; expected JSON") from None


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, (int, float)):
        return "a number"
    return "text" if isinstance(value, str) else "an array or object"
