"""`aprfmt import`: any format to APR v2."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from aprfmt.cli import options
from aprfmt.cli.convert_run import run_conversion

if TYPE_CHECKING:
    from aprfmt.cli.convert_run import ConvertArguments


@click.command("import")
@options.model("src")
@click.option("-o", "--output", type=options.NamedPath(), help="Default: ./STEM.apr")
@options.encoding
@options.tensor_encodings
@options.leaving
@options.accept()
@options.writing
def command(src: Path, output: Path | None, **wishes: "Unpack[ConvertArguments]") -> int:
    """Convert SRC (safetensors, GGUF, a Hugging Face folder) to APR v2 and verify it."""
    dst = output if output is not None else Path(f"{output_stem(src)}.apr")
    return run_conversion(src, dst, "apr", **wishes)


def output_stem(src: Path) -> str:
    """Return the stem of an output's name: the folder's name, or the file's without extension.

    A shard number is left out too.
    """
    if src.is_dir():
        return src.resolve().name
    name = src.name.removesuffix(".index.json")
    name = re.sub(r"\.(safetensors|gguf|apr)$", "", name)
    return re.sub(r"-\d{5}-of-\d{5}$", "", name)
