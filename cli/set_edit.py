"""How `aprfmt set` works: what was asked for, the change in place, the warnings."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import Typed
from aprfmt.cli import render
from aprfmt.errors import AprfmtError, UsageError

if TYPE_CHECKING:
    from aprfmt.conversion import edits
    from aprfmt.model import Model

WIDEST = 100  # characters of a value in the report


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
    opened: "Model", values: dict[str, object], remove: tuple[str, ...]
) -> tuple[dict[str, object], int]:
    """Change the file of an open model, which closes it; return the JSON, and how many bytes."""
    from aprfmt.conversion import Options
    from aprfmt.conversion.in_place import change

    report, patched = change(opened, Options(metadata=values, remove=remove, complete=False))
    return report.to_json() | {"in_place": True, "patched_bytes": patched}, patched


def parsed(
    opened: "Model", changes: tuple[tuple[str, str], ...], remove: tuple[str, ...], output: Path
) -> tuple[dict[str, object], dict[str, list[str]]]:
    """Return (new values by key, near names by unknown key) of the changes asked for."""
    from aprfmt.conversion import edits
    from aprfmt.conversion.target import NoFormatError, target_of
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
            raise UsageError(
                f'{left}: has no value; give {key}="" for empty text, {array}=[] for '
                "an empty array, or --remove"
            )
        values[key] = edits.parse(opened, key, kind, text)
    twice = [key for key in remove if remove.count(key) > 1]
    if twice:
        raise UsageError(f"--remove {twice[0]}: is named twice; give one change of a key")
    edits.check_present(opened, remove)
    arch = values.get("general.architecture")
    also = [str(arch.value if isinstance(arch, Typed) else arch)] if arch is not None else []
    return values, edits.unknown(opened, list(values), also)


def trouble(opened: "Model") -> str | None:
    """Return why a file is no model whose architecture can be read; None where it is one."""
    try:
        _ = opened.resolution
    except AprfmtError as error:
        return str(error)
    return None


def warn(output: Path, form: str, unknown: dict[str, list[str]], why: str | None) -> None:
    """Warn of unknown keys, and of a file that can no longer be read as a model."""
    for key, near in unknown.items():
        names = f"near names: {', '.join(near)}" if near else "near names: none"
        render.warn(f"{output}: {key}: is no key of the file before, and none that readers of "
                    f"{form} know; {names}; written as it stands", "unknown_key")  # fmt: skip
    if why is not None:
        render.warn(f"{output}: cannot be read as a model any more: {why}", "unreadable_output")


def show(found: "Iterable[edits.KeyChange]", model: Path, patched: int | None) -> None:
    """Print every change, below how many bytes of a file were `patched` in place, if it was."""
    if patched is not None:
        render.line(
            f"changed {patched} bytes of {render.escape(str(model))} in place; every "
            "tensor lies where it lay"
        )
    for change in found:
        render.line(f"  {said(change)}")


def said(change: "edits.KeyChange") -> str:
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
