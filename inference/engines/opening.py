"""Opening a saved trace of any kind as a Trace."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.errors import FormatError
from aprfmt.inference.aprt import is_aprt, load_aprt
from aprfmt.inference.trace import Trace
from aprfmt.inference.trace_file import is_trace_file, load_trace

if TYPE_CHECKING:
    from aprfmt.model import Model

Opener = Callable[[Path, "Sequence[int] | None", "Model | None"], AbstractContextManager[Trace]]


def _own(
    path: Path, ids: Sequence[int] | None, model: "Model | None"
) -> AbstractContextManager[Trace]:
    return load_trace(path)


def _aprt(
    path: Path, ids: Sequence[int] | None, model: "Model | None"
) -> AbstractContextManager[Trace]:
    return nullcontext(load_aprt(path))


def _npz(
    path: Path, ids: Sequence[int] | None, model: "Model | None"
) -> AbstractContextManager[Trace]:
    from aprfmt.inference.engines.npz import load_npz

    return load_npz(path, ids, model)


def _text(
    path: Path, ids: Sequence[int] | None, model: "Model | None"
) -> AbstractContextManager[Trace]:
    from aprfmt.inference.engines.llama_text import load_eval_text

    return load_eval_text(path, ids, model)


def _mapped(
    path: Path, ids: Sequence[int] | None, model: "Model | None"
) -> AbstractContextManager[Trace]:
    from aprfmt.inference.engines.mapping import load_mapped

    return load_mapped(path, ids, model)


def _table(
    path: Path, ids: Sequence[int] | None, model: "Model | None"
) -> AbstractContextManager[Trace]:
    from aprfmt.inference.engines.statistics import load_table

    return load_table(path, ids, model)


def _is_table(path: Path) -> bool:
    from aprfmt.inference.engines.statistics import is_table

    return is_table(path)


def _is_mapped(path: Path) -> bool:
    from aprfmt.inference.engines.mapping import is_mapped

    return is_mapped(path)


def _is_npz(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(4) in (b"PK\x03\x04", b"PK\x05\x06") or path.suffix == ".npz"


def _is_text(path: Path) -> bool:
    from aprfmt.inference.engines.llama_text import is_eval_text

    return path.is_file() and is_eval_text(path)


# Kind of saved trace -> (whether a path is one, by content; how it is opened). In this order.
TRACES: Mapping[str, tuple[Callable[[Path], bool], Opener]] = {
    "captures": (_is_mapped, _mapped),
    "statistics": (_is_table, _table),
    "aprt": (is_aprt, _aprt),
    "npz": (_is_npz, _npz),
    "aprfmt": (is_trace_file, _own),
    "llama-eval-callback": (_is_text, _text),
}


def trace_kind(path: Path) -> str | None:
    """Return the kind of saved trace a path is, None for what is none (a model, say)."""
    return next((kind for kind, (fits, _) in TRACES.items() if fits(path)), None)


def is_trace(path: Path) -> bool:
    """Say whether a path holds a saved trace of a known kind."""
    return trace_kind(path) is not None


def open_trace(
    path: Path, ids: Sequence[int] | None = None, model: "Model | None" = None
) -> AbstractContextManager[Trace]:
    """Open a saved trace of any kind; its values can be fetched until the `with` is left.

    `ids` are what it is of where it does not say, `model` what it was made from: its sizes name
    what a foreign file leaves open (a joined qkv, adjacent pairs, whether an embedding is the
    scaled one). Raises FormatError for a file that is no trace or is damaged.
    """
    kind = trace_kind(path)
    if kind is None:
        raise FormatError(
            f"{path}: is no saved trace; expected .safetensors of aprfmt trace --save, .npz of "
            "module outputs, the text of llama-eval-callback, an APRT folder, a mapping file, "
            "a folder of .npy files, or a table of statistics (.csv, .json)"
        )
    return TRACES[kind][1](path, ids, model)
