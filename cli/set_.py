"""`aprfmt set`: change metadata, leave every tensor byte alone."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import complete, options, render
from aprfmt.cli.convert import converted, show
from aprfmt.errors import AprfmtError, UsageError

if TYPE_CHECKING:
    from aprfmt.conversion import edits
    from aprfmt.model import Model

WIDEST = 100  # characters of a value in the report
TYPES = """\b
In GGUF a type can be given, KEY:TYPE=VALUE, with u8 i8 u16 i16 u32 i32 u64 i64
f32 f64 bool str. Arrays are JSON or a list with commas (quoted for the shell):
  aprfmt set a.gguf 'my.ids:u32[]=1,2,3' -o b.gguf
  aprfmt set a.gguf 'my.words:str[]=["a","b, c"]' -o b.gguf
  aprfmt set a.gguf 'my.none:f32[]=[]' 'my.rows:i8[][]=[[1,2],[3]]' -o b.gguf
"""


@click.command("set", epilog=TYPES, options_metavar="[OPTIONS] (-o OUTPUT | --in-place)")
@options.model()
@click.argument("changes", nargs=-1, callback=options.first_equals, metavar="[KEY=VALUE]...",
                shell_complete=complete.settings)  # fmt: skip
@click.option("--remove", multiple=True, metavar="KEY", shell_complete=complete.keys,
              help="Leave this key out; may be repeated.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path),
              help="The file to write, of MODEL's format; or a folder.")  # fmt: skip
@click.option("--in-place", is_flag=True,
              help="Change MODEL itself, where no tensor has to move for it.")  # fmt: skip
@options.force
@options.no_verify
@options.common
def command(
    model: Path,
    changes: tuple[tuple[str, str], ...],
    remove: tuple[str, ...],
    output: Path | None,
    in_place: bool,
    force: bool,
    verify: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Set and remove metadata keys in a copy of MODEL; every change is printed as old -> new.

    VALUE is JSON, or text as it stands, or @FILE for what a file holds; KEY="" is empty text. A key
    keeps the type it has in the file, and a key that nobody knows is warned of. --in-place writes
    only the bytes that change, and says so where a copy is needed.
    """
    from aprfmt.conversion import edits, entry
    from aprfmt.model import open_model

    if in_place == (output is not None):
        raise UsageError("give -o OUTPUT for a copy, or --in-place, one of them")
    if in_place:
        finish(model)
    with open_model(model) as opened:
        values, unknown = parsed(opened, changes, remove, output or opened.source.files[0])
        keys = [*values, *remove]
        before = edits.snapshot(opened, keys)
        resolved = trouble(opened) is None
        form = opened.format
        body = changed_in_place(opened, values, remove) if in_place else {}
    target = output or model
    if output is not None:
        report = converted(
            "set", model, output, None, quiet,
            metadata=values, remove=remove, force=force, verify=verify, complete=False,
        )  # fmt: skip
        body, target = report.to_json(), entry(report.files)
    with open_model(target) as written:
        found = edits.changes(keys, before, edits.snapshot(written, keys))
        why = trouble(written)
    warn(output or model, form, unknown, why if resolved else None)
    if not as_json and not quiet:
        if output is not None:
            show(report)
        else:
            render.line(f"changed {body['patched_bytes']} bytes of {render.escape(str(model))} in "
                        "place; every tensor lies where it lay")  # fmt: skip
        for change in found:
            render.line(f"  {said(change)}")
    return render.emit("set", 0, body | {"changes": [asdict(change) for change in found]}, as_json)


def finish(model: Path) -> None:
    """Complete what a run that was killed left half changed."""
    from aprfmt.formats.patched import complete
    from aprfmt.remote.paths import RemotePath

    if not isinstance(model, RemotePath):
        folder = Path(os.path.realpath(model))
        folder = folder if folder.is_dir() else folder.parent
        if folder.is_dir():
            complete(folder)


def changed_in_place(
    opened: "Model", values: dict[str, Any], remove: tuple[str, ...]
) -> dict[str, Any]:
    """Change the file of an open model, which closes it; return the body of the JSON."""
    from aprfmt.conversion import Options
    from aprfmt.conversion.in_place import change

    report, patched = change(opened, Options(metadata=values, remove=remove, complete=False))
    return report.to_json() | {"in_place": True, "patched_bytes": patched}


def parsed(
    opened: "Model", changes: tuple[tuple[str, str], ...], remove: tuple[str, ...], output: Path
) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return (value by key, near names by key that nobody knows) of what was asked for."""
    from aprfmt.conversion import NoFormatError, edits, target_of
    from aprfmt.formats import FORMATS

    if not changes and not remove:
        raise UsageError("nothing to change; give KEY=VALUE, or --remove KEY")
    try:
        target = target_of(opened, output, None).name
    except NoFormatError:
        target = ""
    if target != opened.format:
        wanted = " or ".join(FORMATS[opened.format].extensions)
        raise UsageError(f"{output}: set keeps the format {opened.format}; expected {wanted}")
    values: dict[str, Any] = {}
    for left, text in changes:
        key, kind = edits.split_type(left, opened)
        if key in values or key in remove:
            raise UsageError(f"{key}: is named twice; give one change of a key")
        if not text:
            empty = f"{key}:TYPE" if not kind else left
            array = empty if empty.endswith("[]") else f"{empty}[]"
            raise UsageError(f'{left}: has no value; give {key}="" for empty text, {array}=[] for '
                             "an empty array, or --remove")  # fmt: skip
        values[key] = edits.parse(opened, key, kind, text)
    twice = [key for key in remove if remove.count(key) > 1]
    if twice:
        raise UsageError(f"--remove {twice[0]}: is named twice; give one change of a key")
    edits.check_present(opened, remove)
    arch = values.get("general.architecture")
    also = [str(getattr(arch, "value", arch))] if arch is not None else []
    return values, edits.unknown(opened, list(values), also)


def trouble(opened: "Model") -> str | None:
    """Return why a file is no model whose architecture can be read; None where it is one."""
    try:
        _ = opened.resolution
    except AprfmtError as error:
        return str(error)
    return None


def warn(output: Path, form: str, unknown: dict[str, list[str]], why: str | None) -> None:
    """Warn of keys that nobody knows, and of a file that is no model any more."""
    for key, near in unknown.items():
        names = f"near names: {', '.join(near)}" if near else "near names: none"
        render.warn(f"{output}: {key}: is no key of the file before, and none that readers of "
                    f"{form} know; {names}; written as it stands", "unknown_key")  # fmt: skip
    if why is not None:
        render.warn(f"{output}: cannot be read as a model any more: {why}", "unreadable_output")


def said(change: "edits.Change") -> str:
    """Return `key: old -> new`, with the types where they differ."""
    old = "(new)" if change.how == "added" else short(change.key, change.old)
    new = "(removed)" if change.how == "removed" else short(change.key, change.new)
    types = ""
    if change.how == "added" and change.new_type:
        types = f" ({change.new_type})"
    elif change.how == "set" and change.old_type != change.new_type:
        types = f" ({change.old_type} -> {change.new_type})"
    return f"{render.escape(change.key)}: {old} -> {new}{types}"


def short(key: str, value: object) -> str:
    """Return a value on one line, cut where it is long; a number with the name it stands for."""
    from aprfmt.base.named import meaning

    name = meaning(key, value)
    return render.escape(str(value), WIDEST) + (f" = {name}" if name else "")
