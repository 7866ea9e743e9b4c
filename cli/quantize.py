"""`aprfmt quantize`: any format to any, with llama.cpp's mixtures or bitsandbytes' types."""

from pathlib import Path

import click

from aprfmt.cli import options
from aprfmt.cli.convert import run


@click.command("quantize")
@options.model("src")
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--type", "scheme", required=True, metavar="T",
    help="Q4_K_M, Q8_0, IQ4_XS, F16, NF4-double ...; an unknown one lists all.",
)  # fmt: skip
@click.option("--to", help="Target format, where DST's extension does not say it.")
@options.tensor_encodings
@options.quantization
@options.allow_overflow
@options.drop
@options.allow_missing
@options.max_shard_size
@click.option("--threads", type=click.IntRange(min=1), help="Threads (default: all processors).")
@click.option("--dry-run", is_flag=True, help="Report every tensor's size; write nothing.")
@options.arch
@options.force
@options.no_verify
@options.no_hash
@options.common
def command(
    src: Path,
    dst: Path,
    scheme: str,
    to: str | None,
    tensor_encodings: tuple[tuple[str, str], ...],
    pure: bool,
    imatrix: Path | None,
    fma: str,
    allow_requantize: bool,
    allow_overflow: bool,
    drop: tuple[str, ...],
    allow_missing: tuple[str, ...],
    max_shard_size: int | None,
    threads: int | None,
    dry_run: bool,
    arch: str | None,
    force: bool,
    no_verify: bool,
    no_source_hash: bool,
    as_json: bool,
    quiet: bool,
) -> int:
    """Quantize SRC to DST, by DST's extension or --to.

    Q4_K_M and its kind follow llama.cpp's mixtures; NF4 and FP4 go to safetensors as bitsandbytes
    stores them. Scheme, arithmetic, encoder version and importance matrix are recorded in DST.
    """
    return run(
        "quantize", src, dst, to, quiet, as_json,
        quantize=scheme, tensor_encodings=tensor_encodings, pure=pure, imatrix=imatrix, fma=fma,
        allow_requantize=allow_requantize, allow_overflow=allow_overflow, drop=drop,
        allow_missing=allow_missing, max_shard_size=max_shard_size, threads=threads,
        dry_run=dry_run, arch=arch, force=force, verify=not no_verify,
        source_hash=not no_source_hash,
    )  # fmt: skip
