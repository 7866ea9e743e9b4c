"""aprfmt: the toolkit for model files that are wrong (APR v2, GGUF, safetensors).

    with aprfmt.open("model.gguf") as model:
        model["blk.0.attn_q.weight"].numpy()
    aprfmt.convert("model.safetensors", "model.apr")
    aprfmt.diff("a.apr", "b.gguf").equal

Importing the package imports nothing heavy; every function imports what it needs when called.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aprfmt.compare import DiffReport
    from aprfmt.conversion import ConversionReport
    from aprfmt.model import Model

__version__ = "0.1.0"
__all__ = ["__version__", "convert", "diff", "open"]


def open(path: "Path | str", *, arch: str | None = None) -> "Model":
    """Open a model file, a shard index, a Hugging Face folder, or `org/name` in the hub cache.

    The result is a context manager and a mapping from the file's own tensor names to tensors with
    `.name .shape .encoding .nbytes .offset`, `.raw()` (a read-only view of the stored bytes) and
    `.numpy()` (decoded, row-major); it has `.metadata`, `.config` and `.tokenizer`.
    Raises aprfmt.errors.FormatError for a file that is none, UsageError where the choice in a
    folder is not clear.
    """
    from aprfmt.model import open_model

    return open_model(path, arch=arch)


def convert(
    src: "Path | str", dst: "Path | str", *, to: str | None = None, **options: Any
) -> "ConversionReport":
    """Convert any format to any; the format of `dst` is `to`, or its extension's.

    `options` are the fields of aprfmt.conversion.Options (encoding, force, verify, ...). Raises
    ConversionError where the target cannot hold the model as asked, OutputError where `dst`
    exists and `force` is not given.
    """
    from aprfmt.conversion import convert as run

    return run(src, dst, to=to, **options)


def diff(
    a: "Path | str", b: "Path | str", *, tensors: Sequence[str] = (), arch: str | None = None
) -> "DiffReport":
    """Compare two models in any formats; `tensors` are PATTERNs in any spelling.

    A tensor that cannot be read is UNREADABLE in the report; a file that cannot be opened raises
    FormatError.
    """
    from aprfmt.compare import diff as run

    return run(a, b, tensors=tensors, arch=arch)
