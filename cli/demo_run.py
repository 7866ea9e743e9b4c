"""The steps of `aprfmt demo`: the shipped model written out, and commands run on it."""

import contextlib
import io
import shlex
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import click

from aprfmt.cli import output_format, render

SUFFIXES = (".json", ".jinja", ".safetensors")  # the model's files; the package's own are not
OPENING = "It is a truth universally acknowledged, that a single man in possession"


def write_model(folder: Path, force: bool) -> dict[Path, int]:
    """Write the shipped model's files into `folder`, all or none; return their bytes by path.

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
    """Return the folder of the shipped model."""
    return Path(str(files("aprfmt.demo_model")))


def demo_steps(folder: Path) -> list[tuple[str, list[str], int]]:
    """Return (why, arguments, expected exit code) of every step."""
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
    """Run every step in this process and return what came of it."""
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
    """Return the command a user would type."""
    return shlex.join(["aprfmt", *args])


def run_command(group: click.Group, args: Sequence[str], silent: bool) -> int:
    """Run one command in this process; its output is shown unless `silent`."""
    with contextlib.ExitStack() as stack:
        if silent:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        code = group.main(args=list(args), prog_name="aprfmt", standalone_mode=False)
    return int(code or 0)
