"""`aprfmt inspect`: what a file is, without reading its tensors."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.base.protocols import Source
from aprfmt.cli import options, render
from aprfmt.cli.captured_activations import refuse_captures
from aprfmt.cli.damage_report import report_damage
from aprfmt.cli.inspect.page import PageRequest, write_inspect_page
from aprfmt.errors import UsageError
from aprfmt.formats import checksum_matches, checksum_notes

if TYPE_CHECKING:
    from aprfmt.base.outcome import Outcome


@click.command("inspect")
@options.gather_options(paged=PageRequest)
@options.model()
@options.verbose("All hyperparameters and their keys, tokenizer, notes.")
@click.option("--metadata", "all_metadata", is_flag=True, help="Print every metadata key.")
@click.option("--full", is_flag=True, help="With --metadata: arrays and long texts whole.")
@click.option("--account", is_flag=True, help="Everything the model is made of, by how it is read.")
@click.option("--partial", is_flag=True, help="A cut file, or a missing one of a set, is no error.")
@click.option("--verify", is_flag=True, help="Read every byte and check the file's own checksum.")
@options.html("Write a page: where the bytes are, tensors, metadata, tokenizer, checks.")
@click.option("--stats", is_flag=True, help="With --html: read all; statistics, histograms.")
@click.option("--vocabulary", is_flag=True, help="With --html: every token, not some of them.")
@options.arch
@options.force
@options.common
def command(
    model: Path,
    verbose: bool,
    all_metadata: bool,
    full: bool,
    account: bool,
    partial: bool,
    verify: bool,
    arch: str | None,
    paged: PageRequest,
) -> int:
    """Say what a file is: in one line, then by part.

    Reads no tensor. A damaged file is shown as far as it can be read: exit 2. With --verify a
    wrong checksum is exit 1, a file that carries none exit 2.
    """
    from aprfmt.cli.inspect import facts, output
    from aprfmt.model import open_model

    paged.check()
    if full and not all_metadata:
        raise UsageError("--full goes with --metadata")
    refuse_captures(model, arch=arch)
    # Facts come from headers; only --verify and a page with --stats read tensors.
    with open_model(model, arch=arch, partial=partial, damaged=True) as opened:
        body = facts.inspect_facts(opened, full)
        body["damage"], code = report_damage(opened.damage, partial=partial)
        if account or paged.html is not None:
            from aprfmt.model.ledger import make_ledger

            body["account"] = make_ledger(opened).to_json()
        if paged.html is not None:
            write_inspect_page(opened, body, paged)
        if verify:
            from aprfmt.base.outcome import exit_code

            body["checksum"] = verify_checksum(opened.source)
            code = code or exit_code(body["checksum"])

    def show() -> None:
        """Print the facts about the file as tables."""
        output.show(body, verbose=verbose, metadata=all_metadata, full=full)

    whole = verbose or all_metadata
    answer = None if whole else lambda: output.answer(body)
    return render.emit(body, code, show, answer=answer)


def verify_checksum(source: Source) -> "Outcome":
    """Return PASS or FAIL for a file's own checksum; NOT_RUN, with a warning, if it has none.

    Reads every byte of the file.
    """
    matches = checksum_matches(source)
    if matches is None:
        render.warn(
            f"{source.path}: carries no checksum of its bytes, so nothing was verified; "
            "aprfmt hash --write makes a manifest next to it",
            "no_checksum",
        )
        return "NOT_RUN"
    for note in checksum_notes(source, matches):
        render.warn_note(note)
    return "PASS" if matches else "FAIL"
