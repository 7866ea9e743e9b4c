"""`aprfmt convert`: any format to any; import, export, split, merge are mappings onto it."""

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from aprfmt.cli import options
from aprfmt.cli.convert_run import run_conversion

if TYPE_CHECKING:
    from aprfmt.cli.convert_run import ConvertArguments


@click.command("convert")
@options.model("src")
@click.argument("dst", type=options.NamedPath())
@options.to
@options.encoding
@click.option("--quantize", metavar="T", help="As `aprfmt quantize --type T`.")
@options.tensor_encodings
@options.quantization
@options.leaving
@options.rename
@click.option(
    "--adapter",
    type=options.PathOrAddress(),
    metavar="DIR",
    help="Merge this LoRA adapter (PEFT, GGUF, kohya, MLX) into SRC.",
)
@click.option(
    "--base",
    type=options.PathOrAddress(),
    metavar="MODEL",
    help="SRC is an adapter for MODEL: write it as .gguf, a PEFT folder, or kohya's .safetensors.",
)
@click.option("--generic", is_flag=True, help="Copy names and bytes, whatever the architecture.")
@click.option(
    "--alignment",
    type=options.WholeNumber(1, 1 << 20),
    help="Data alignment of a GGUF output (default 32).",
)
@click.option(
    "--threads", type=options.WORKERS, help="Threads that encode (default: all processors)."
)
@click.option("--dry-run", is_flag=True, help="Say sizes, memory, disk and time; write nothing.")
@options.accept()
@options.writing
def command(
    src: Path,
    dst: Path,
    to: str | None,
    adapter: Path | None,
    base: Path | None,
    **wishes: "Unpack[ConvertArguments]",
) -> int:
    """Convert SRC to DST, by DST's extension or --to.

    Every tensor keeps its encoding and bytes unless the target's rules or a flag say otherwise.
    Each such change is listed. The output is opened again and compared with the source. Exit 1: it
    is written and verified, but lacks something of SRC that nothing reads (--accept). --rename
    gives tensors the names that readers look for, and changes nothing else. --generic needs no
    known architecture: names and bytes go from container to container, and the output is marked, so
    that no loader takes it for a model.
    """
    return run_conversion(src, dst, to, adapter, base, **wishes)
