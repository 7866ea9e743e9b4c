"""What `aprfmt inspect` prints: a summary line first, then tables of what the file holds.

An *item* is one thing that a model is made of: a file, a tensor, a key, a text.
"""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from aprfmt.cli import render
from aprfmt.cli.inspect.summary import missing_roles, tensors_without_role

if TYPE_CHECKING:
    from aprfmt.cli.inspect.records import InspectBody
    from aprfmt.compare.short_answer import Line

WIDEST = 200  # characters of a metadata value, unless --full


def show(body: "InspectBody", *, verbose: bool, metadata: bool, full: bool) -> None:
    """Print the summary line, then the facts; `verbose`, `metadata` and `full` are the flags.

    `body` is the JSON of `inspect`.
    """
    render.say(body["summary"]["line"], style="head")
    _print_file(body)
    if body["architecture"] is None and body["summary"]["kind"] == "model":
        named = body.get("architecture_named")
        if named:
            render.warn(f"{named}: {body['architecture_error']}", "unread_configuration")
        else:
            render.warn(body["architecture_error"], "unknown_architecture")
    elif body["architecture"] is not None:
        _print_hyperparameters(body, verbose)
        _print_warnings(body)
    _print_encodings(body)
    if verbose:
        render.line("tokenizer", style="head")
        render.print_pairs(sorted(body["tokenizer"].items()) or [("none", "carries no tokenizer")])
    if metadata:
        _print_metadata(body, full)
    if "account" in body:
        _print_account(body["account"])
    for note in body["notes"]:
        if note["level"] == "warning" or note["key"] == "remark":
            render.warn(f"{note['where']}: {note['text']}", note["key"])
        elif verbose:
            render.say(f"note: {note['where']}: {note['text']}", style="dim")
    if not verbose:
        render.line("more: -v, --metadata", style="dim")


def answer(body: "InspectBody") -> "list[Line]":
    """Return the short answer as (text, style) lines: summary, file, hyperparameters, doubts.

    `body` is the JSON of `inspect`.
    """
    config = f", config {body['config']}" if body["config"] else ""
    size = f"{render.size_text(body['file_bytes'])}, {body['tensor_count']} tensors"
    container = f"{body['format']} {body['version']}".rstrip()
    lines: list[Line] = [
        (body["summary"]["line"], "head"),
        (f"  {body['path']}: {container}, {size}{config}", ""),
    ]
    # What the architecture's tables made of the file, with what is wrong first.
    if body["architecture"] is not None:
        rows = body["hyperparameters"]
        said = (f"{name} {_value_cell(rows[name]['value'])}" for name in body["used"])
        lines.append((f"  {', '.join(said)}", ""))
        lines += [(f"  contradiction: {text}", "bad") for text in body["conflicts"]]
        missing = missing_roles(body["roles"])
        if missing:
            lines.append((f"  missing: {', '.join(missing)}", "bad"))
        if body["keys"]["unknown"]:
            lines.append((f"  config keys unknown: {', '.join(body['keys']['unknown'])}", "warn"))
        if body["stored_again"]:
            again = ", ".join(body["stored_again"])
            lines.append((f"  stored a second time, in another layout: {again}", "warn"))
        if others := tensors_without_role(body):
            lines.append((f"  tensors of no role: {', '.join(others)}", "warn"))
        if body["draft"]:
            lines.append((f"  draft head: {len(body['draft'])} tensors", ""))
        lines += [
            (f"  tower: {count} tensors, {name}", "") for name, count in body["towers"].items()
        ]
    elif body["summary"]["kind"] == "model":
        lines.append((f"  {body['architecture_error']}", "warn"))
    # What the file stores, and with --account how each item is read.
    counts = (f"{name} in {row['tensors']} tensors" for name, row in body["encodings"].items())
    lines.append((f"  encodings: {', '.join(counts)}", ""))
    if "account" in body:
        from aprfmt.compare.short_answer import merge_similar_lines

        account, listed = body["account"], cast("list[Line]", [])
        read = ", ".join(
            f"{row['items']} {row['kind']} {row['reading']}" for row in account["kinds"]
        )
        lines.append((f"  {account['items']} items: {read}", ""))
        odd = [(title, one) for title in ("contradicted", "unread") for one in account[title]]
        odd += [("cannot be read", one) for one in account["unreadable"]]
        for title, one in odd:
            why = f": {one['why']}" if one["why"] else ""
            listed.append((f"  {title}: {one['kind']} {one['name']}{why}", "warn"))
        lines += merge_similar_lines(listed)
    elif body["damage"]:
        lines.append((f"next: aprfmt validate {shlex.quote(body['path'])}", "head"))
    return lines


def _print_file(body: "InspectBody") -> None:
    """Print path, format, size, configuration, and what unpickling the file would import.

    `body` is the JSON of `inspect`.
    """
    files = f" in {len(body['files'])} files" if len(body["files"]) > 1 else ""
    rows: list[tuple[str, object]] = [
        ("file", body["path"]),
        ("format", f"{body['format']} {body['version']}".strip()),
        ("size", f"{render.size_text(body['file_bytes'])}{files}, {body['tensor_count']} tensors"),
    ]
    if body["config"]:
        rows.append(("config", body["config"]))
    if body.get("imports"):  # by loaders that unpickle; nothing here does
        rows.append(("pickle imports", ", ".join(body["imports"])))
    render.print_pairs(rows)


def _print_hyperparameters(body: "InspectBody", verbose: bool) -> None:
    """Print the hyperparameters in use, then unknown keys, draft head, towers, unclaimed tensors.

    With `verbose` all hyperparameters are printed, with their keys. `body` is the JSON of
    `inspect`.
    """
    render.line("hyperparameters", style="head")
    rows = body["hyperparameters"]
    names = list(rows) if verbose else body["used"]
    cells = [(name, _value_cell(rows[name]["value"]), rows[name]["origin"]) for name in names]
    headers = ["name", "value", "origin", *["key"] * verbose]
    keys = [[rows[name]["key"]] * verbose for name in names]
    render.table([(*row, *key) for row, key in zip(cells, keys, strict=True)], headers)
    for kind, listed in (
        ("ignored", body["keys"]["ignored"]),
        ("unknown", body["keys"]["unknown"]),
    ):
        if listed and (verbose or kind == "unknown"):
            render.say(f"config keys {kind}: {', '.join(listed)}")
    if body["draft"]:
        runs = "; aprfmt eval --draft runs it" if body["level"] == "full" else ""
        render.line(f"draft head: {len(body['draft'])} tensors{runs}")
    for name, count in body["towers"].items():
        todo = "" if " " in name else f"; aprfmt convert --arch {name} takes it out"
        render.line(f"tower: {count} tensors, {name}{todo}")
    if body["stored_again"]:
        again = ", ".join(body["stored_again"][:6])
        render.say(f"parameters stored twice: {again} hold them again, in another layout")
    if others := tensors_without_role(body):
        render.say(f"tensors of no role: {', '.join(others[:6])}")


def _print_warnings(body: "InspectBody") -> None:
    """Warn of contradictions, and of required tensors that are missing.

    `body` is the JSON of `inspect`.
    """
    for conflict in body["conflicts"]:
        render.warn(f"{body['path']}: {conflict}", "contradiction")
    roles = body["roles"]
    for names, said, key in (
        (missing_roles(roles), "missing", "missing_tensors"),
        (roles["accepted"], "missing and accepted as such", "accepted_missing"),
    ):
        if names:
            render.warn(
                f"{len(names)} of {roles['required']} tensors the configuration demands are "
                f"{said}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}",
                key,
            )


def _print_encodings(body: "InspectBody") -> None:
    """Print a table of encodings with their tensors, parameters and bytes.

    `body` is the JSON of `inspect`.
    """
    render.line("encodings", style="head")
    render.table(
        [
            (name, row["tensors"], f"{row['parameters']:,}", render.size_text(row["bytes"]))
            for name, row in body["encodings"].items()
        ],
        ("encoding", "tensors", "parameters", "bytes"),
        "lrrr",
    )


def _print_account(account: Mapping[str, Any]) -> None:
    """Print a table of the number of items by reading and kind, then items that are doubtful.

    These are the items that are contradicted, not read, or cannot be read.
    """
    render.line("account", style="head")
    rows = [(row["reading"], row["kind"], str(row["items"])) for row in account["kinds"]]
    render.table([*rows, ("all", "", str(account["items"]))], ("reading", "kind", "items"), "llr")
    for title in ("contradicted", "unread"):
        for one in account[title]:
            why = f": {one['why']}" if one["why"] else ""
            render.say(f"  {title}: {one['kind']} {one['name']}{why}", style="warn")
    for one in account["unreadable"]:
        render.say(f"  cannot be read: {one['kind']} {one['name']}: {one['why']}", style="bad")


def _print_metadata(body: "InspectBody", full: bool) -> None:
    """Print all metadata keys with their values, cut to WIDEST characters unless `full`.

    `body` is the JSON of `inspect`.
    """
    render.line("metadata", style="head")
    names = body["metadata_names"]
    rows = []
    for key, value in body["metadata"].items():
        text = f"{value} = {names[key]}" if key in names else str(value)
        if not full and len(text) > WIDEST:
            text = f"{text[:WIDEST]}... ({len(text)} characters; --full)"
        rows.append((key, text))
    render.print_pairs(rows)


def _value_cell(value: object) -> str:
    """Return a hyperparameter's value as the text of a table cell.

    A list of more than 4 equal values becomes "VALUE in all N layers", other booleans a row of 0
    and 1.
    """
    if isinstance(value, (list, tuple)) and len(value) > 4:
        if len(set(map(str, value))) == 1:
            return f"{value[0]} in all {len(value)} layers"
        if all(isinstance(item, bool) for item in value):
            return "".join("1" if item else "0" for item in value)
    return str(value)
