"""`aprfmt demo`: the main job on the model that ships with the package."""

import contextlib
import io
import shlex
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aprfmt.cli import options, output_format, render
from aprfmt.errors import OutputError, UsageError

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line


SUFFIXES = (".json", ".jinja", ".safetensors")  # the model's files; the package's own are not
OPENING = "It is a truth universally acknowledged, that a single man in possession"


def write_model(folder: Path, force: bool) -> dict[Path, int]:
    """Write the shipped model's files into `folder`, all or none; return {path: bytes written}.

    Raises OutputError for a folder that is not empty without `force`, and for one that holds files
    of another name.
    """
    from aprfmt.formats.atomic import FileSet

    shipped = {
        path.name: path for path in sorted(model_folder().iterdir()) if path.suffix in SUFFIXES
    }
    sizes: dict[Path, int] = {}
    with FileSet(force=force, folder=folder, ours=lambda name: name in shipped) as files:
        for name, path in shipped.items():
            data = path.read_bytes()
            files.create(folder / name).write(data)
            sizes[folder / name] = len(data)
    return sizes


def model_folder() -> Path:
    """Return the folder of the demo model that ships with the package."""
    return Path(str(files("aprfmt.demo_model")))


def demo_steps(folder: Path) -> list[tuple[str, list[str], int]]:
    """Return (what it shows, arguments of aprfmt, expected exit code) of every step, in order.

    The steps write into `folder`.
    """
    source, apr, gguf = str(model_folder()), str(folder / "demo.apr"), str(folder / "demo.gguf")
    return [
        ("what the model is", ["inspect", source], 0),
        ("safetensors to APR v2, every bit kept", ["import", source, "-o", apr], 0),
        ("APR v2 to GGUF", ["export", apr, "--to", "gguf", "-o", gguf], 0),
        ("the two files hold the same model", ["diff", apr, gguf], 0),
        ("and so does the original", ["diff", source, gguf], 0),
        ("the tensors of one layer", ["tensors", gguf, "blk.0"], 0),
        (
            "activations of one layer, and what comes next",
            ["trace", gguf, "--payload", "--layers", "0", "--prompt", OPENING],
            0,
        ),
    ]


def run_steps(folder: Path) -> list[dict[str, object]]:
    """Run the demo's steps on files in `folder`; return a row for each.

    It ends after the first unexpected exit code. A row has the keys why, command, exit, expected.
    """
    from aprfmt.cli.main import group

    results = []
    silent = output_format.answer_format() in ("json", "agent")
    for why, args, expected in demo_steps(folder):
        text = command_line(args)
        if not silent:
            render.line()
            render.line(f"# {why}", style="dim")
            render.line(f"$ {text}", style="head")
        exit_code = run_command(group, args, silent)
        results.append({"why": why, "command": text, "exit": exit_code, "expected": expected})
        if exit_code != expected:
            break
    return results


def command_line(args: Sequence[str]) -> str:
    """Return the command of aprfmt with these arguments, as a user would type it in a shell."""
    return shlex.join(["aprfmt", *args])


def run_command(group: click.Group, args: Sequence[str], silent: bool) -> int:
    """Run one command in this process and return its exit code; `silent` hides its output."""
    with contextlib.ExitStack() as stack:
        if silent:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        code = group.main(args=list(args), prog_name="aprfmt", standalone_mode=False)
    return int(code or 0)


@click.command("demo")
@click.option(
    "--into",
    type=options.NamedPath(file_okay=False),
    metavar="DIR",
    help="Write the model itself into this folder, and run nothing.",
)
@click.option(
    "--out",
    type=options.NamedPath(file_okay=False),
    metavar="DIR",
    help="Keep the files of the steps in this folder.",
)
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
    # --into only writes the model; --out keeps what the steps write.
    if into is not None:
        return write_demo_model(into, force)
    if out is not None:
        if out.exists() and any(out.iterdir()):
            raise OutputError(f"{out}: exists and is not empty; name a new folder")
        out.mkdir(parents=True, exist_ok=True)
        steps = run_steps(out)
    else:
        with tempfile.TemporaryDirectory(prefix="aprfmt-demo-") as folder:
            steps = run_steps(Path(folder))
    code = 0 if all(step["exit"] == step["expected"] for step in steps) else 1

    def show() -> None:
        """Print that the demo's files were in a temporary folder, unless --out kept them."""
        if out is None:
            render.line(
                "(the files were in a temporary folder; keep them with --out DIR)", style="dim"
            )

    def answer() -> "list[Line]":
        """Return the demo's short answer as (text, style) lines: verdict, unexpected exit codes."""
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


def write_demo_model(folder: Path, force: bool) -> int:
    """Write the shipped model into `folder`, print its size, and return the exit code."""
    sizes = write_model(folder, force)

    def show() -> None:
        """Print the folder of the demo model, its number of files and their total size."""
        total = render.size_text(sum(sizes.values()))
        render.line(f"wrote {render.escape(str(folder))}: {len(sizes)} files, {total}")

    body = {"folder": str(folder), "steps": [], "files": [str(path) for path in sizes]}
    return render.emit(body, 0, show, written=True)
