"""aprfmt: the toolkit for model files that are wrong (APR v2, GGUF, safetensors).

    with aprfmt.open("model.gguf") as model:
        model["blk.0.attn_q.weight"].numpy()
    aprfmt.convert("model.safetensors", "model.apr")
    aprfmt.diff("a.apr", "b.gguf").equal
    aprfmt.validate("model.apr").outcome

Importing the package imports nothing heavy; every function imports what it needs when called.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.version import __version__

if TYPE_CHECKING:
    from aprfmt.checks import Validation
    from aprfmt.compare import DiffReport
    from aprfmt.conversion import ConversionReport
    from aprfmt.diagnosis import Diagnosis
    from aprfmt.inference.trace import Trace
    from aprfmt.model import Model

__all__ = ["__version__", "convert", "diagnose", "diff", "open", "trace", "validate"]


def __dir__() -> list[str]:
    return sorted([*__all__, "errors"])


def open(
    path: "Path | str", *, arch: str | None = None, allow_missing: Sequence[str] = ()
) -> "Model":
    """Open a model file, a shard index, a Hugging Face folder, or `org/name` in the hub cache.

    Or an address: `hf://owner/name`, `https://`, `s3://` (docs/reference/addresses.md).

    The result is a context manager and a mapping from the file's own tensor names to tensors with
    `.name .shape .encoding .nbytes .offset`, `.raw()` (a read-only view of the stored bytes) and
    `.numpy()` (decoded, row-major); it has `.metadata`, `.config` and `.tokenizer`.
    `allow_missing` are patterns of required tensors: the model may be run without them.
    Raises aprfmt.errors.FormatError if the file is not a valid model file, UsageError if a folder
    holds several models and does not say which one to open.
    """
    from aprfmt.model import open_model

    return open_model(path, arch=arch, allow_missing=allow_missing)


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


def diagnose(
    a: "Path | str",
    b: "Path | str",
    *,
    model: "Path | str | None" = None,
    ids: Sequence[int] | None = None,
    arch: str | None = None,
) -> "Diagnosis":
    """Find where two models, runs (`MODEL@torch:cpu:bfloat16`) or saved traces differ, and why.

    `model` is the model that saved traces were made with. `ids` are the token ids both sides are
    run on; without them aprfmt chooses some.
    The result has `.verdict`, `.cause`, `.findings`, `.sentence` and `.to_json()`. Raises
    UsageError if a path does not exist, FormatError if a file is damaged.
    """
    from aprfmt.diagnosis import diagnose as run

    return run(str(a), str(b), model=None if model is None else str(model), ids=ids, arch=arch)


def diff(
    a: "Path | str", b: "Path | str", *, tensors: Sequence[str] = (), arch: str | None = None
) -> "DiffReport":
    """Compare two models in any formats; `tensors` are PATTERNs in any spelling.

    A tensor that cannot be read is UNREADABLE in the report; a file that cannot be opened raises
    FormatError.
    """
    from aprfmt.compare import diff as run

    return run(a, b, tensors=tensors, arch=arch)


def trace(model: "Path | str", **options: Any) -> "Trace":
    """Run tokens through MODEL[@RUN] and return every wanted capture point with its values.

    `options` are the arguments of aprfmt.inference.api.trace: prompt or ids, points, layers,
    positions, device, backend, dtype, ... The result has `.records`, `.values(key)` and
    `.to_json()`.
    """
    from aprfmt.inference.api import trace as run

    return run(model, **options)


def validate(
    path: "Path | str",
    *,
    arch: str | None = None,
    strict: bool = False,
    allow_missing: Sequence[str] = (),
) -> "Validation":
    """Check every byte of a model; the result has `.outcome`, `.checks` and `.findings`.

    `strict` makes warnings failures; `allow_missing` are patterns of required tensors whose absence
    is a warning only. Raises FormatError for a file that cannot be opened.
    """
    from aprfmt.checks import validate as run

    return run(path, arch=arch, strict=strict, allow_missing=allow_missing)
