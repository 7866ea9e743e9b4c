"""`aprfmt import`: any format to APR v2."""

from pathlib import Path

import click

from aprfmt.cli import options
from aprfmt.cli.convert import run


@click.command("import")
@options.model("src")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Default: ./STEM.apr")
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
    src: Path,
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
    """Convert SRC (safetensors, GGUF, a Hugging Face folder) to APR v2 and verify it."""
    dst = output if output is not None else Path(f"{stem(src)}.apr")
    return run(
        "import", src, dst, "apr", quiet, as_json,
        encoding=encoding, tensor_encodings=tensor_encodings, allow_overflow=allow_overflow,
        drop=drop, allow_missing=allow_missing, max_shard_size=max_shard_size, arch=arch,
        force=force, verify=not no_verify, source_hash=not no_source_hash,
    )  # fmt: skip


def stem(src: Path) -> str:
    """Return the name an output gets: a folder's own, else the file's without its extension."""
    import re

    if src.is_dir():
        return src.resolve().name
    name = src.name.removesuffix(".index.json")
    name = re.sub(r"\.(safetensors|gguf|apr)$", "", name)
    return re.sub(r"-\d{5}-of-\d{5}$", "", name)
