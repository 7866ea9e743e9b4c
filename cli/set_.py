"""`aprfmt set`: change metadata, leave every tensor byte alone."""

from dataclasses import asdict
from pathlib import Path

import click

from aprfmt.cli import convert_show, options, render, shell_completion
from aprfmt.cli.convert_run import convert_with_warnings
from aprfmt.errors import UsageError

TYPES = """\b
In GGUF a type can be given, KEY:TYPE=VALUE, with u8 i8 u16 i16 u32 i32 u64 i64
f32 f64 bool str. Arrays are JSON or a list with commas (quoted for the shell):
  aprfmt set a.gguf 'my.ids:u32[]=1,2,3' -o b.gguf
  aprfmt set a.gguf 'my.words:str[]=["a","b, c"]' -o b.gguf
  aprfmt set a.gguf 'my.none:f32[]=[]' 'my.rows:i8[][]=[[1,2],[3]]' -o b.gguf
"""


@click.command("set", epilog=TYPES, options_metavar="[OPTIONS] (-o OUTPUT | --in-place)")
@options.model()
@click.argument("changes", nargs=-1, callback=options.parse_key_values, metavar="[KEY=VALUE]...",
                shell_complete=shell_completion.complete_settings)  # fmt: skip
@click.option(
    "--remove",
    multiple=True,
    metavar="KEY",
    shell_complete=shell_completion.complete_keys,
    help="Leave this key out; may be repeated.",
)
@click.option("-o", "--output", type=options.NamedPath(),
              help="The file to write, of MODEL's format; or a folder.")  # fmt: skip
@click.option("--in-place", is_flag=True,
              help="Change MODEL itself, where no tensor has to move for it.")  # fmt: skip
@options.accept()
@options.force
@options.no_verify
@options.common
def command(
    model: Path, changes: tuple[tuple[str, str], ...], remove: tuple[str, ...],
    output: Path | None, in_place: bool, accept: tuple[str, ...], force: bool, verify: bool,
) -> int:  # fmt: skip
    """Set and remove metadata keys in a copy of MODEL; every change is printed as old -> new.

    Of a Hugging Face folder the value changes where readers take it from: config.json,
    generation_config.json, tokenizer_config.json (FILE:KEY names one), or chat_template.jinja. In
    GGUF and APR a key may have the name it has elsewhere (rope_theta, eos_token_id).

    VALUE is JSON, or text as it stands, or @FILE for what a file holds; KEY="" is empty text. A key
    keeps the type it has in the file, and a key that nobody knows is warned of. --in-place writes
    only the bytes that change, and says so where a copy is needed.
    """
    from aprfmt.cli import set_edit
    from aprfmt.conversion import edits, entry_file
    from aprfmt.model import open_model

    if in_place == (output is not None):
        raise UsageError("give -o OUTPUT for a copy, or --in-place, one of them")
    if in_place:
        set_edit.complete_interrupted(model)
    with open_model(model) as opened:
        asked = set_edit.parse_changes(opened, changes, remove, output or opened.source.files[0])
        before = edits.read_values(opened, asked.keys)
        resolved = set_edit.read_problem(opened) is None
        doubtful = set_edit.check_stated_values(opened, asked.template) if resolved else {}
        form = opened.format
        body: dict[str, object] = {}
        code = 0
        patched = None
        if in_place:
            body, patched = set_edit.change_in_place(opened, asked)
    target = output or model
    if output is not None:
        report = convert_with_warnings(
            model, output, None, metadata=asked.values, remove=asked.remove, texts=asked.texts,
            force=force, verify=verify, complete=False,
        )  # fmt: skip
        body, target = report.to_json(), entry_file(report.files)
        verdict = report.pronounced(accept)
        if verdict is not None:
            body, code = body | verdict.to_json(), verdict.exit
    with open_model(target) as written:
        found = edits.key_changes(asked.keys, before, edits.read_values(written, asked.keys))
        if asked.files is not None and written.folder is not None:
            found += asked.files.changes(written.folder.path)
        why = set_edit.read_problem(written) if resolved else None
        new = (
            set_edit.check_stated_values(written, asked.template)
            if resolved and why is None
            else {}
        )
    set_edit.warn_of_changes(
        output or model, form, asked.unknown, why, set_edit.new_doubts(doubtful, new)
    )

    def show() -> None:
        if output is not None:
            convert_show.show_report(report, accept=accept)
        set_edit.show_changes(found, model, patched)

    body |= {"changes": [asdict(change) for change in found]}
    return render.emit(body, code, show, written=code == 0)
