"""`aprfmt quantize`: any format to any, with llama.cpp's mixtures or bitsandbytes' types."""

from pathlib import Path
from typing import Any

import click

from aprfmt.cli import options
from aprfmt.cli.convert import run


class Typed(click.Command):
    """A command whose help ends with every type that has an encoder."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the types, of other packages too, then the example."""
        from aprfmt.quantizing.mixture import SCHEMES, offered

        with formatter.section("Types"):
            formatter.write_text(", ".join((*SCHEMES, *offered())))
        super().format_epilog(ctx, formatter)


@click.command("quantize", cls=Typed)
@options.model("src")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--type", "quantize", required=True, metavar="T",
    help="The type, one of those below.",
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
