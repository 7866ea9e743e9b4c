"""An importance matrix made of a text, for `aprfmt quantize --calibrate`."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aprfmt.cli import render
from aprfmt.cli.eval.windows import read_text, whole_text_sample
from aprfmt.cli.run_options import check_ids
from aprfmt.errors import OutputError


@contextmanager
def write_importance_matrix(
    src: Path, text: Path, kept: Path | None, chunks: int | None, arch: str | None, *, force: bool
) -> Iterator[Path]:
    """Run the text through SRC, write the matrix to `kept` or a temporary file, yield its path.

    Raises UsageError for a text without tokens, ArchError for a model that does not run,
    OutputError where `kept` exists and `force` is not given.
    """
    from aprfmt.inference.importance import collect
    from aprfmt.model import open_model

    if kept is not None and kept.exists() and not force:
        raise OutputError(f"{kept}: exists; leave --calibrate out to use it, or give --force")
    temporary = tempfile.TemporaryDirectory(prefix="aprfmt-")
    with temporary as folder, open_model(src, arch=arch) as model:
        ids = check_ids(model, model.tokenizer.encode(read_text(text, "--calibrate")))
        name = "stdin" if text == Path("-") else text.name
        sample = whole_text_sample(model, name, ids)
        with render.ProgressLine("calibrating") as progress:
            found = collect(
                model, ids, name, prefix=sample.prefix, chunks=chunks, progress=progress
            )
        path = kept or Path(folder) / f"{Path(name).stem}.imatrix.gguf"
        found.write(path, force=force)
        yield path
