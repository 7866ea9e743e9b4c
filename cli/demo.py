"""`aprfmt demo`: the main job on the model that ships with the package."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import demo_run, options, render
from aprfmt.errors import OutputError, UsageError

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line


@click.command("demo")
@click.option("--into", type=options.NamedPath(file_okay=False), metavar="DIR",
              help="Write the model itself into this folder, and run nothing.")  # fmt: skip
@click.option("--out", type=options.NamedPath(file_okay=False), metavar="DIR",
              help="Keep the files of the steps in this folder.")  # fmt: skip
@options.force
@options.common
def command(into: Path | None, out: Path | None, force: bool) -> int:
    """Import the demo model to APR v2, export it to GGUF, compare, show tensors, trace.

    Every step prints the aprfmt command it stands for. With --into the model is written as a
    Hugging Face folder, for commands of your own.
    """
    if into is not None and out is not None:
        raise UsageError("--into writes the model, --out keeps what the steps write; give one")
    if force and into is None:
        raise UsageError("--force goes with --into; --out names a new folder")
    if into is not None:
        return write(into, force)
    if out is not None:
        if out.exists() and any(out.iterdir()):
            raise OutputError(f"{out}: exists and is not empty; name a new folder")
        out.mkdir(parents=True, exist_ok=True)
        steps = demo_run.run_steps(out)
    else:
        with tempfile.TemporaryDirectory(prefix="aprfmt-demo-") as folder:
            steps = demo_run.run_steps(Path(folder))
    code = 0 if all(step["exit"] == step["expected"] for step in steps) else 1

    def show() -> None:
        if out is None:
            render.line(
                "(the files were in a temporary folder; keep them with --out DIR)", style="dim"
            )

    def answer() -> "list[Line]":
        count = sum(step["exit"] == step["expected"] for step in steps)
        word = "PASS" if code == 0 else "FAIL"
        first = f"{word}: {count} of {len(steps)} steps gave the exit code that they should"
        odd = [step for step in steps if step["exit"] != step["expected"]]
        lines: list[Line] = [(first, "good" if code == 0 else "bad")]
        lines += [
            (f"  exit {step['exit']}, expected {step['expected']}: {step['command']}", "bad")
            for step in odd
        ]
        if out is None:
            lines.append(("  --into DIR writes the model, --out DIR keeps the files", "dim"))
        return lines

    body = {"folder": None if out is None else str(out), "steps": steps}
    return render.emit(body, code, show, answer=answer)


def write(folder: Path, force: bool) -> int:
    """Write the shipped model into `folder` and say so."""
    sizes = demo_run.write_model(folder, force)

    def show() -> None:
        total = render.size_text(sum(sizes.values()))
        render.line(f"wrote {render.escape(str(folder))}: {len(sizes)} files, {total}")

    body = {"folder": str(folder), "steps": [], "files": [str(path) for path in sizes]}
    return render.emit(body, 0, show, written=True)
