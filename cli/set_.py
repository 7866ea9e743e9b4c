"""`aprfmt set`: change metadata, leave every tensor byte alone."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import convert_run, options, render, shell_completion
from aprfmt.cli.convert_run import convert_with_warnings
from aprfmt.errors import AprfmtError, CodecError, FormatError, OutputError, UsageError

if TYPE_CHECKING:
    from aprfmt.conversion import edits
    from aprfmt.conversion.edit_request import EditRequest
    from aprfmt.model import Model


# Checks of stated values; those of vocabularies as a whole would take longer than the change.
DOUBTS = (
    "architecture", "completeness", "shapes", "hyperparameters", "vocabulary_size", "special_ids",
    "file_type", "quantization", "dtype", "ranges",
)  # fmt: skip
TEMPLATE = "chat_template"
SHOWN = 2  # doubtful values of one check that are warned of; a line counts the rest
WIDEST = 100  # characters of a value in the report


def complete_interrupted(model: Path) -> None:
    """Finish what a killed run left half done in the model's folder, and remove its leftovers.

    Otherwise a file that such a run left under a second name would look like another user's link.
    """
    from aprfmt.formats.atomic import clean_folder
    from aprfmt.remote.paths import RemotePath

    if not isinstance(model, RemotePath):
        folder = Path(os.path.realpath(model))
        folder = folder if folder.is_dir() else folder.parent
        if folder.is_dir():
            clean_folder(folder)


def open_to_edit(model: Path, in_place: bool) -> "Model":
    """Return the model opened; for --in-place even if its weights do not decode.

    config.json may be what is wrong, and is to be changed. Raises CodecError where a copy is asked
    for, which would need the weights.
    """
    from aprfmt.model import open_model

    try:
        return open_model(model)
    except CodecError as error:
        if in_place:
            return open_model(model, damaged=True)
        raise CodecError(f"{error}; --in-place changes the text files alone") from None


def change_in_place(opened: "Model", request: "EditRequest") -> tuple[dict[str, object], int]:
    """Change the metadata or text files of a model in place; return (JSON, bytes written).

    Closes the model. Raises UsageError for changes of both at once.
    """
    from aprfmt.conversion import Options
    from aprfmt.conversion.in_place import change_metadata, change_texts

    texts = request.texts
    if texts and request.keys:
        raise UsageError(
            f"{request.keys[0]}: is metadata of the weights, and {next(iter(texts))} is a file of "
            "its own; change them in two commands, or write a copy with -o"
        )
    options = Options(metadata=request.values, remove=request.remove, complete=False)
    if texts:
        report, written = change_texts(opened, texts, options)
    else:
        report, written = change_metadata(opened, options)
    return report.to_json() | {"in_place": True, "patched_bytes": written}, written


def check_metadata_values(opened: "Model", template: bool) -> dict[str, list[str]]:
    """Return {check: what is wrong with the metadata}, a text each; no weight is read.

    `template` runs the check of the chat template too, which renders it in a child process.
    """
    from aprfmt.checks.check_runner import run_check
    from aprfmt.checks.context import CheckContext
    from aprfmt.checks.file.vocabulary import find_unknown_names
    from aprfmt.checks.table import file_checks
    from aprfmt.model.resolve import OWN_KEY_USED

    context = CheckContext(opened, opened.forced, None, None)
    findings = {
        row.name: run_check(row, context).findings
        for row in file_checks()
        if row.name in DOUBTS or (template and row.name == TEMPLATE)
    }
    # The check of the tokenizer builds it, which takes seconds.
    findings["names of the tokenizer"] = tuple(find_unknown_names(context))
    found = {
        name: [
            f"{f.where}: {f.found}; expected {f.expected}".removeprefix(f"{opened.path}: ")
            for f in rows
            if not f.found.endswith(OWN_KEY_USED)  # the set key, unlike a verbatim copy
        ]
        for name, rows in findings.items()
    }
    found["names of the architecture"] = list(conflicting_architectures(opened))
    return found


def conflicting_architectures(opened: "Model") -> Iterator[str]:
    """Yield one sentence if the keys that name a model's architecture name different ones.

    These are the metadata key of its format, and `model_type` and `architectures` of config.json.
    """
    from aprfmt.arch.aliases import CALLED
    from aprfmt.conversion.metadata import ARCH_KEY_OF

    config, key = opened.config or {}, ARCH_KEY_OF.get(opened.key_style, "")
    classes = config.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    named = [
        (f"{label} is {name}", found)
        for label, name, style in (
            (key, opened.metadata.get(key), opened.key_style),
            ("model_type", config.get("model_type"), "hf"),
            ("architectures", first, "hf"),
        )
        if (found := {a for a, names in CALLED.items() if name in names.get(style, ())})
    ]
    if named and not set.intersection(*(found for _, found in named)):
        yield f"{', '.join(label for label, _ in named)}; expected one architecture"


def new_doubts(before: Mapping[str, list[str]], after: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield what is wrong `after` a change and was not `before`; at most SHOWN texts per check.

    Both are {check: texts}. A last text counts those left out.
    """
    for check, texts in after.items():
        new = [text for text in texts if text not in before.get(check, ())]
        yield from new[:SHOWN] if len(new) > SHOWN + 1 else new
        if len(new) > SHOWN + 1:
            yield f"and {len(new) - SHOWN} more of the check {check} (aprfmt validate)"


def read_problem(opened: "Model") -> str | None:
    """Return why a file cannot be read as a model of its architecture; None where it can.

    The text of a relation where its tensors fit only after a change that other loaders do not make.
    """
    try:
        found = opened.resolution
    except AprfmtError as error:
        return str(error)
    if found.relations:  # only under a change that other readers do not make
        return found.relations[0].text
    return None


def warn_of_changes(
    output: Path,
    form: str,
    unknown: dict[str, list[str]],
    why: str | None,
    doubtful: "Iterable[str]",
) -> None:
    """Warn of unknown keys, of a file that is no model any more, of doubtful values.

    `unknown` is {key: near names}, `form` the format, `why` the reason it cannot be read or None.
    """
    for key, near in unknown.items():
        names = f"near names: {', '.join(near)}" if near else "near names: none"
        render.warn(
            f"{output}: {key}: is no key of the file before, and none that readers of "
            f"{form} know; {names}; written as it stands",
            "unknown_key",
        )
    if why is not None:
        render.warn(f"{output}: cannot be read as a model any more: {why}", "unreadable_output")
    for text in doubtful:
        render.warn(f"{output}: {text}", "doubtful_value")


def show_changes(found: "Iterable[edits.KeyChange]", model: Path, patched: int | None) -> None:
    """Print every changed key; of a change in place also the number of bytes `patched`.

    `found` are the changes.
    """
    if patched is not None:
        render.line(
            f"changed {patched} bytes of {render.escape(str(model))} in place; every "
            "tensor lies where it lay"
        )
    for change in found:
        render.line(f"  {change_line(change)}")


def change_line(change: "edits.KeyChange") -> str:
    """Return `key: old -> new`, with the types where they differ."""
    old = "(new)" if change.how == "added" else short_value(change.key, change.old)
    new = "(removed)" if change.how == "removed" else short_value(change.key, change.new)
    types = ""
    if change.how == "added" and change.new_type:
        types = f" ({change.new_type})"
    elif change.how == "set" and change.old_type != change.new_type:
        types = f" ({change.old_type} -> {change.new_type})"
    return f"{render.escape(change.key)}: {old} -> {new}{types}"


def short_value(key: str, value: object) -> str:
    """Return a value cut to WIDEST characters, with the name that its number stands for.

    `key` is the metadata key of `value`.
    """
    from aprfmt.base.metadata_values import number_name

    name = number_name(key, value)
    return render.escape(str(value), WIDEST) + (f" = {name}" if name else "")


TYPES = """\b
In GGUF a type can be given, KEY:TYPE=VALUE, with u8 i8 u16 i16 u32 i32 u64 i64
f32 f64 bool str. Arrays are JSON or a list with commas (quoted for the shell):
  aprfmt set a.gguf 'my.ids:u32[]=1,2,3' -o b.gguf
  aprfmt set a.gguf 'my.words:str[]=["a","b, c"]' -o b.gguf
  aprfmt set a.gguf 'my.none:f32[]=[]' 'my.rows:i8[][]=[[1,2],[3]]' -o b.gguf
"""


@click.command("set", epilog=TYPES, options_metavar="[OPTIONS] (-o OUTPUT | --in-place)")
@options.model()
@click.argument(
    "changes",
    nargs=-1,
    callback=options.parse_key_values,
    metavar="[KEY=VALUE]...",
    shell_complete=shell_completion.complete_settings,
)
@click.option(
    "--remove",
    multiple=True,
    metavar="KEY",
    shell_complete=shell_completion.complete_keys,
    help="Leave this key out; may be repeated.",
)
@click.option(
    "-o",
    "--output",
    type=options.NamedPath(),
    help="The file to write, of MODEL's format; or a folder.",
)
@click.option(
    "--in-place", is_flag=True, help="Change MODEL itself, where no tensor has to move for it."
)
@options.accept()
@options.force
@options.no_verify
@options.common
def command(
    model: Path,
    changes: tuple[tuple[str, str], ...],
    remove: tuple[str, ...],
    output: Path | None,
    in_place: bool,
    accept: tuple[str, ...],
    force: bool,
    verify: bool,
) -> int:
    """Set and remove metadata keys in a copy of MODEL; every change is printed as old -> new.

    In a Hugging Face folder the value changes in the file that readers take it from: config.json,
    generation_config.json, tokenizer_config.json (FILE:KEY names one), or chat_template.jinja. In
    GGUF and APR a key may be given by its name elsewhere (rope_theta, eos_token_id).

    VALUE is JSON, plain text, or @FILE for the content of a file; KEY="" is empty text. A key keeps
    the type it has in the file, and an unknown key gives a warning. --in-place writes only the
    bytes that change, and says so if a copy is needed.
    """
    from aprfmt.conversion import edits, entry_file
    from aprfmt.conversion.edit_request import parse_edits
    from aprfmt.model import open_model

    if in_place == (output is not None):
        raise UsageError("give -o OUTPUT for a copy, or --in-place, one of them")
    if output is not None and not force and output.is_file() and output.samefile(model):
        raise OutputError(
            f"{output}: is MODEL itself; use --in-place to change only the bytes that differ, or "
            "--force to write the whole file again"
        )
    if in_place:
        complete_interrupted(model)
    # Read the old values and doubts first, to tell later what this change made worse.
    with open_to_edit(model, in_place) as opened:
        asked = parse_edits(opened, changes, remove, output or opened.source.files[0])
        if opened.damage and asked.keys:
            raise FormatError(f"{model}: {opened.damage[0].text}; only its text files are changed")
        before = edits.read_values(opened, asked.keys)
        resolved = read_problem(opened) is None
        doubtful = check_metadata_values(opened, asked.template) if resolved else {}
        form = opened.format
        body: dict[str, object] = {}
        code = 0
        patched = None
        if in_place:
            body, patched = change_in_place(opened, asked)
    # A copy is a conversion with other metadata.
    target = output or model
    if output is not None:
        report = convert_with_warnings(
            model,
            output,
            None,
            metadata=asked.values,
            remove=asked.remove,
            texts=asked.texts,
            force=force,
            verify=verify,
            complete=False,
        )
        body, target = report.to_json(), entry_file(report.files)
        verdict = report.pronounced(accept)
        if verdict is not None:
            body, code = body | verdict.to_json(), verdict.exit
    # Read the result back: what changed, and whether it is still a model.
    with open_model(target) as written:
        inside = asked.embedded.metadata() if asked.embedded is not None else {}
        keys = [key for key in asked.keys if key not in inside]
        found = edits.key_changes(keys, before, edits.read_values(written, keys))
        if asked.embedded is not None:
            found += asked.embedded.changes(written)
        if asked.files is not None and written.folder is not None:
            found += asked.files.changes(written.folder.path)
        why = read_problem(written) if resolved else None
        new = check_metadata_values(written, asked.template) if resolved and why is None else {}
    if output is not None:
        doubtful.pop("shapes", None)  # a copy of impossible shapes is warned of, old as they are
    warn_of_changes(output or model, form, asked.unknown, why, new_doubts(doubtful, new))

    def show() -> None:
        """Print the report of the copy if there is one, then every changed metadata key."""
        if output is not None:
            convert_run.show_report(report, accept=accept)
        show_changes(found, model, patched)

    body |= {"changes": [asdict(change) for change in found]}
    return render.emit(body, code, show, written=code == 0)
