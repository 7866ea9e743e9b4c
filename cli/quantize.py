"""`aprfmt quantize`: any format to any, with llama.cpp's mixtures or other libraries' types."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from aprfmt.cli import options, render
from aprfmt.cli.convert_run import run_conversion
from aprfmt.cli.eval.windows import read_text, whole_text_sample
from aprfmt.cli.run_options import check_ids
from aprfmt.errors import OutputError, UsageError

if TYPE_CHECKING:
    from aprfmt.cli.convert_run import ConvertArguments


@contextmanager
def write_importance_matrix(
    src: Path, text: Path, output: Path | None, chunks: int | None, arch: str | None, *, force: bool
) -> Iterator[Path]:
    """Yield the path of an importance matrix measured by running the text through SRC.

    It is written to `output`, or to a temporary file that is deleted afterwards. `chunks` limits
    the number of windows of 512 tokens. Raises UsageError for a text without tokens, ArchError for
    a model that does not run, OutputError where `output` exists and `force` is not given.
    """
    from aprfmt.inference.importance import collect_imatrix
    from aprfmt.model import open_model

    if output is not None and output.exists() and not force:
        raise OutputError(f"{output}: exists; leave --calibrate out to use it, or give --force")
    temporary = tempfile.TemporaryDirectory(prefix="aprfmt-")
    with temporary as folder, open_model(src, arch=arch) as model:
        ids = check_ids(model, model.tokenizer.encode(read_text(text, "--calibrate")))
        name = "stdin" if text == Path("-") else text.name
        sample = whole_text_sample(model, name, ids)
        with render.ProgressLine("calibrating") as progress:
            found = collect_imatrix(
                model, ids, name, prefix=sample.prefix, chunks=chunks, progress=progress
            )
        path = output or Path(folder) / f"{Path(name).stem}.imatrix.gguf"
        found.write(path, force=force)
        yield path


class TypesInHelp(click.Command):
    """A command whose help ends with every type that has an encoder."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write all types, those of other packages included, then the example."""
        from aprfmt.quantizing.mixture import SCHEMES, offered_schemes

        with formatter.section("Types"):
            formatter.write_text(", ".join((*SCHEMES, *offered_schemes())))
        super().format_epilog(ctx, formatter)


@click.command("quantize", cls=TypesInHelp)
@options.model("src")
@click.argument("dst", type=options.NamedPath())
@click.argument("named", required=False, metavar="[TYPE]")
@click.option("--type", "quantize", metavar="T", help="The type, one of those below; also as TYPE.")
@options.to
@options.tensor_encodings
@options.quantization
@options.leaving
@click.option(
    "--calibrate",
    type=options.FILE,
    metavar="TEXT",
    help="Make the importance matrix of this UTF-8 text (- is stdin), in float32 on the "
    "CPU; --imatrix then names where it is kept.",
)
@click.option(
    "--chunks",
    type=options.WholeNumber(1),
    metavar="N",
    help="Of --calibrate, the first N pieces of 512 tokens (default: all).",
)
@click.option("--threads", type=options.WORKERS, help="Threads (default: all processors).")
@click.option("--dry-run", is_flag=True, help="Report every tensor's size; write nothing.")
@options.accept()
@options.writing
def command(
    src: Path,
    dst: Path,
    named: str | None,
    to: str | None,
    calibrate: Path | None,
    chunks: int | None,
    **wishes: "Unpack[ConvertArguments]",
) -> int:
    """Quantize SRC to DST; GPTQ, AWQ and the like round to nearest, uncalibrated.

    Q4_K_M and the like follow llama.cpp's mixtures. NF4 and FP4 go to safetensors as bitsandbytes
    stores them. COMPRESSED, MODELOPT, GPTQ, AWQ and MLX are the layouts of those libraries. Every
    weight is rounded to the nearest value, without the calibration of GPTQ and AWQ. Scheme,
    rounding, arithmetic, encoder version and importance matrix are recorded in DST. DST's format is
    that of its extension, or --to. TYPE may stand after DST, as llama-quantize takes it.
    """
    wishes["quantize"] = one_type(src, dst, named, wishes["quantize"])
    with ExitStack() as stack:
        if calibrate is not None:
            made = write_importance_matrix(
                src, calibrate, wishes["imatrix"], chunks, wishes["arch"], force=wishes["force"]
            )
            wishes["imatrix"] = stack.enter_context(made)
        elif chunks is not None:
            raise UsageError("--chunks counts pieces of a text; give --calibrate TEXT with it")
        return run_conversion(src, dst, to, **wishes)


def one_type(src: Path, dst: Path, named: str | None, option: str | None) -> str:
    """Return the type asked for, as TYPE or --type; UsageError for both or neither.

    `named` is TYPE and `option` --type; `src` and `dst` are looked at for a type given in the wrong
    place.
    """
    from aprfmt.quantizing.mixture import SCHEMES, type_name

    if named is not None and option is not None:
        raise UsageError(f"TYPE {named} and --type {option}: give one of them")
    found = named or option
    if named is not None and type_name(named) not in SCHEMES:
        words = [str(src), str(dst), named]
        types = [word for word in words if type_name(word) in SCHEMES and not os.path.exists(word)]
        if len(types) == 1:
            words.remove(types[0])
            raise UsageError(
                f"{types[0]}: is a type, which stands after SRC and DST: {' '.join(words)} "
                f"{types[0]}"
            )
    if found:
        return found
    meant = type_name(str(dst))
    if meant in SCHEMES:
        raise UsageError(
            f"{dst}: is a type, and DST is missing; give SRC, DST and then the type: OUT.gguf {dst}"
        )
    raise UsageError("give the type: --type Q4_K_M, or Q4_K_M after DST (quantize --help has all)")
