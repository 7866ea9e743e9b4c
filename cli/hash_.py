"""`aprfmt hash`: ordered SHA-256 of every tensor; a manifest to find damage by."""

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

import click

from aprfmt.base.budget import Budget
from aprfmt.cli import options, render
from aprfmt.cli.damage_report import report_damage
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.model.manifest import Failure, TensorRow
    from aprfmt.model.verdict import Pronounced


_SHOWN = 3  # tensors that a budget left and that are named
_FAILURES = 8  # failures of a short answer


class HashResult(TypedDict):
    """The JSON of `aprfmt hash`; `written` and `failures` are there where it wrote or compared."""

    model: str
    tensors: "list[TensorRow]"
    damage: NotRequired[list[dict[str, object]]]
    written: NotRequired[str]
    failures: NotRequired["list[Failure]"]


def show(body: HashResult, found: "Pronounced | None" = None) -> None:
    """Print the hash of every tensor, or what differs from a manifest, if compared with one.

    `found` is the verdict of that comparison. `body` is the JSON of `hash`.
    """
    if found is not None:
        for row in body.get("failures", ()):
            render.say(f"FAIL {row['key']}: {row['what']}", style="bad")
        render.say_verdict(found.says, render.EXIT_STYLES[found.exit])
        return
    late = [row for row in body["tensors"] if "not_reached" in row]
    for row in body["tensors"]:
        if "not_reached" in row:
            continue
        render.say(
            f"{row.get('decoded') or '-':64}  {(row['raw'] or ['-'])[0][:16]:16}  "
            f"{row['encoding']:8} "
            f"{row['key']}"
        )
    if late:
        names = ", ".join(row["key"] for row in late[:_SHOWN])
        more = f" and {len(late) - _SHOWN} more" if len(late) > _SHOWN else ""
        render.say(
            f"{len(late)} tensors not hashed, {late[0]['not_reached']}: {names}{more}", style="warn"
        )
    if "written" in body:
        render.line(f"wrote {render.escape(body['written'])}")


def answer(
    body: HashResult, found: "Pronounced", manifest: "Path | None"
) -> "list[tuple[str, str]]":
    """Return the short answer of a comparison with a manifest as (text, style) lines.

    They are the verdict, the first failures, and a command: the one that repairs a file from a good
    copy; for a folder, or where nothing failed, the one that checks it.
    """
    rows = body.get("failures", ())
    from aprfmt.measure.named_causes import fixed_name
    from aprfmt.model.hf_folder import WEIGHTS

    lines = [(found.says, render.EXIT_STYLES[found.exit])]
    lines += [(f"  FAIL {row['key']}: {row['what']}", "bad") for row in rows[:_FAILURES]]
    if len(rows) > _FAILURES:
        lines.append((f"  ... {len(rows) - _FAILURES} more (-v, --json)", "dim"))
    if found.exit:
        path = Path(body["model"])
        todo = f"aprfmt validate {shlex.quote(body['model'])}"
        if rows and path.is_file() and path.name != WEIGHTS and isinstance(manifest, Path):
            todo = (
                f"aprfmt repair {shlex.quote(str(path))} --from SOURCE --manifest "
                f"{shlex.quote(str(manifest))} -o {fixed_name(path)}"
            )
        lines.append((f"next: {todo}", "head"))
    return lines


@click.command("hash")
@options.model()
@options.tensor
@click.option("--raw-only", is_flag=True, help="Stored bytes only; nothing is decoded.")
@click.option("--write", is_flag=True, help="Write MODEL.aprfmt-hash.json next to the model.")
@click.option(
    "--blocks", is_flag=True, help="With --write: SHA-256 of every MiB too, to repair by."
)
@click.option("--roles", is_flag=True, help="Write MODEL.aprfmt-roles.json next to the model: a "
              "digest of each parameter by the name an engine has for it.")  # fmt: skip
@click.option("--ranks", type=options.WholeNumber(1), default=1, show_default=True, metavar="N",
              help="With --roles: of each tensor-parallel rank's share.")  # fmt: skip
@click.option("--check", type=options.PathOrAddress(), metavar="MANIFEST",
              help="Compare with a manifest; exit 1 names everything that differs.")  # fmt: skip
@options.verbose("With --check: everything that differs.")
@options.accept()
@options.budget
@options.arch
@options.force
@options.common
def command(
    model: Path, patterns: tuple[str, ...], raw_only: bool, write: bool, blocks: bool,
    roles: bool, ranks: int, check: Path | None, verbose: bool, accept: tuple[str, ...],
    budget: Budget | None, arch: str | None, force: bool,
) -> int:  # fmt: skip
    """SHA-256 per tensor: of the stored bytes, and of the decoded logical values.

    The decoded hash is equal across formats: over `shape` and little-endian float32 values
    (float64 for F64, int64 for integers) with all layout steps undone. A manifest holds hashes of
    whole files as well, so that damage to headers, metadata and padding is found.
    """
    from aprfmt.model import manifest, open_model
    from aprfmt.remote.stream_hash import checked_by_published_digests

    if verbose and check is None:
        raise UsageError("-v lists what differs from a manifest; give --check MANIFEST")
    if accept and check is None:
        raise UsageError("--accept is of a comparison with a manifest; give --check MANIFEST")
    if budget is not None and (write or roles):
        raise UsageError("a manifest is of the whole model; leave --budget out")
    if roles:
        if write or check is not None or patterns or raw_only:
            raise UsageError(
                "--roles writes a manifest of its own; leave --write, --check, --tensor and "
                "--raw-only out"
            )
        return _write_role_manifest(model, arch, ranks, force)
    if write and patterns:
        raise UsageError("--write is of the whole model; leave --tensor out")
    expected = manifest.read_manifest(check) if check is not None else None
    # A manifest says what a file is to be: none is made of a damaged one.
    with open_model(model, arch=arch, damaged=not write) as opened:
        if write:
            manifest.check_manifest_writable(opened.path, force=force)
        whole = budget is None and not patterns
        with (
            render.ProgressLine("hash") as progress,
            checked_by_published_digests(opened.source.files if whole else ()),
        ):
            rows = manifest.tensor_rows(
                opened, patterns, raw_only=raw_only, budget=budget, progress=progress
            )
        body: HashResult = {"model": str(opened.path), "tensors": rows}
        if write:
            body["written"] = str(manifest.write_manifest(opened, rows, force=force, blocks=blocks))
        late = manifest.unread_files_reason(opened, budget)
        if expected is not None:
            compared = partial(
                manifest.compare_manifest, expected, opened, rows, selected=bool(patterns)
            )
            limit = budget or Budget()
            with limit.in_force() as reading:
                body["failures"] = compared(files=not late)
            if reading.over:
                late = limit.reason
                body["failures"] = compared(files=False)
        body["damage"], damaged = report_damage(opened.damage)
        found = None
        if expected is not None:
            found = manifest.pronounce_manifest(
                expected,
                body["failures"],
                rows,
                opened,
                selected=bool(patterns),
                late=late,
                accept=accept,
            )
    if found is None:
        left = any("not_reached" in row for row in rows)
        return render.emit(body, 2 if left else damaged, lambda: show(body))
    return render.emit(
        {**body, **found.to_json()},
        found.exit,
        lambda: show(body, found) if verbose else render.say_lines(answer(body, found, check)),
        answer=lambda: answer(body, found, check),
    )


def _write_role_manifest(path: Path, arch: str | None, ranks: int, force: bool) -> int:
    """Write the digests of parameters by engine names, print the path, and return exit code 0.

    A script inside an engine compares its parameters with them. `ranks` is the number of
    tensor-parallel ranks. The output is created once first, so that a file that may not be replaced
    stops it before the work.
    """
    from aprfmt.formats.atomic import FileSet
    from aprfmt.model import open_model, role_manifest

    with open_model(path, arch=arch) as opened:
        files = FileSet(force=force)
        try:
            files.create(role_manifest.roles_path(opened.path))
        finally:
            files.discard()
        with render.ProgressLine("hash") as progress:
            rows = role_manifest.parameter_rows(opened, ranks, progress)
        written = role_manifest.write_role_manifest(opened, ranks, rows, force=force)
        body: HashResult = {
            "model": str(opened.path),
            "tensors": [],
            "damage": [],
            "written": str(written),
        }

    def print_written() -> None:
        """Print the path written, and the number of parameters and ranks."""
        render.line(
            f"wrote {render.escape(str(written))}: {len(rows)} parameters of {ranks} "
            f"rank{'s' if ranks != 1 else ''}"
        )

    return render.emit(body, 0, print_written)
