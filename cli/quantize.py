"""`aprfmt quantize`: any format to any, with llama.cpp's mixtures or bitsandbytes' types."""

from pathlib import Path
from typing import Any

import click

from aprfmt.cli import options
from aprfmt.cli.convert import run


@click.command("quantize")
@options.model("src")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--type", "quantize", required=True, metavar="T",
    help="Q4_K_M, Q8_0, IQ4_XS, F16, NF4-double ...; an unknown one lists all.",
)  # fmt: skip
@options.to
@options.tensor_encodings
@options.quantization
@options.leaving
@click.option("--threads", type=click.IntRange(min=1), help="Threads (default: all processors).")
@click.option("--dry-run", is_flag=True, help="Report every tensor's size; write nothing.")
@options.writing
def command(src: Path, dst: Path, to: str | None, as_json: bool, quiet: bool, **wishes: Any) -> int:
    """Quantize SRC to DST, by DST's extension or --to.

    Q4_K_M and its kind follow llama.cpp's mixtures; NF4 and FP4 go to safetensors as bitsandbytes
    stores them. Scheme, arithmetic, encoder version and importance matrix are recorded in DST.
    """
    return run("quantize", src, dst, to, quiet, as_json, **wishes)
