"""`aprfmt export`: a model to GGUF or a loadable Hugging Face folder."""

from pathlib import Path

import click

from aprfmt.cli import options
from aprfmt.cli.convert import run
from aprfmt.cli.import_ import stem


@click.command("export")
@options.model()
@click.option("--to", type=click.Choice(["gguf", "safetensors", "apr"]), help="Target format.")
@click.option("-o", "--output", type=click.Path(path_type=Path),
              help="Default: ./STEM.gguf, or the folder ./STEM-hf/")  # fmt: skip
@options.encoding
@options.tensor_encodings
@options.allow_overflow
@options.drop
@options.allow_missing
@options.max_shard_size
@options.arch
@options.force
@options.no_verify
@options.no_hash
@options.common
def command(
    model: Path,
    to: str | None,
    output: Path | None,
    encoding: str | None,
    tensor_encodings: tuple[tuple[str, str], ...],
    allow_overflow: bool,
    drop: tuple[str, ...],
    allow_missing: tuple[str, ...],
    max_shard_size: int | None,
    arch: str | None,
    force: bool,
    no_verify: bool,
    no_source_hash: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Convert MODEL to GGUF, or to safetensors in a folder that transformers loads."""
    from aprfmt.errors import UsageError
    from aprfmt.formats import FORMATS

    if output is None:
        if to is None:
            raise UsageError("export: give --to gguf or --to safetensors, or -o OUT")
        spec = FORMATS[to]
        default = f"{stem(model)}-hf" if spec.weights_name else f"{stem(model)}{spec.extensions[0]}"
        output = Path(default)
    return run(
        "export", model, output, to, quiet, as_json,
        encoding=encoding, tensor_encodings=tensor_encodings, allow_overflow=allow_overflow,
        drop=drop, allow_missing=allow_missing, max_shard_size=max_shard_size, arch=arch,
        force=force, verify=not no_verify, source_hash=not no_source_hash,
    )  # fmt: skip
