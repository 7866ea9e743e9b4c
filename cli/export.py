"""`aprfmt export`: a model to GGUF or a loadable Hugging Face folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from aprfmt.cli import options
from aprfmt.cli.convert_run import run_conversion
from aprfmt.cli.import_ import output_stem
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.cli.convert_run import ConvertArguments


@click.command("export")
@options.model()
@click.option(
    "--to",
    type=click.Choice(["gguf", "safetensors", "apr"], case_sensitive=False),
    help="Target format.",
)
@click.option(
    "-o",
    "--output",
    type=options.NamedPath(),
    help="Default: ./STEM.gguf, or the folder ./STEM-hf/",
)
@options.encoding
@options.tensor_encodings
@options.leaving
@options.accept()
@options.writing
def command(
    model: Path, to: str | None, output: Path | None, **wishes: "Unpack[ConvertArguments]"
) -> int:
    """Convert MODEL to GGUF, or to safetensors in a folder that transformers loads."""
    from aprfmt.formats import FORMATS

    if output is None:
        if to is None:
            raise UsageError("export: give --to gguf or --to safetensors, or -o OUT")
        spec = FORMATS[to]
        default = (
            f"{output_stem(model)}-hf"
            if spec.weights_name
            else f"{output_stem(model)}{spec.extensions[0]}"
        )
        output = Path(default)
    return run_conversion(model, output, to, **wishes)
