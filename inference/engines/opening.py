"""Opens a saved trace of any kind as a Trace, by the content of the file or folder."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from aprfmt.errors import FormatError
from aprfmt.formats.pytorch.layout import is_zip
from aprfmt.inference.aprt import is_aprt, load_aprt
from aprfmt.inference.engines.captures import is_pickled_captures
from aprfmt.inference.engines.llama_text import is_eval_text, load_eval_text
from aprfmt.inference.engines.logprobs import is_logprobs, refuse_logprobs
from aprfmt.inference.engines.mapping import is_mapped, load_arrays, load_mapped
from aprfmt.inference.engines.npz import load_npz
from aprfmt.inference.engines.statistics import is_table, load_table
from aprfmt.inference.trace import Trace
from aprfmt.inference.trace_file import is_trace_file, load_trace
from aprfmt.model import Model

Opener = Callable[[Path, "Sequence[int] | None", "Model | None"], AbstractContextManager[Trace]]


def _is_npz(path: Path) -> bool:
    """Return whether a path is an .npz file, by suffix or content; no torch.save archive is."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(512)
    if path.suffix == ".npz":
        return True
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06") and not is_zip(head)


# Kind of saved trace -> (whether a path is one, by content; how it is opened). In this order.
TRACES: Mapping[str, tuple[Callable[[Path], bool], Opener]] = {
    "captures": (is_mapped, load_mapped),
    "statistics": (is_table, load_table),
    "aprt": (is_aprt, lambda path, ids, model: nullcontext(load_aprt(path))),
    "npz": (_is_npz, load_npz),
    "pt": (is_pickled_captures, load_arrays),
    "aprfmt": (is_trace_file, lambda path, ids, model: load_trace(path)),
    "llama-eval-callback": (is_eval_text, load_eval_text),
    "logprobs": (is_logprobs, refuse_logprobs),
}


def trace_kind(path: Path) -> str | None:
    """Return the kind of saved trace a path is; None for anything else, such as a model."""
    return next((kind for kind, (fits, _) in TRACES.items() if fits(path)), None)


def is_trace(path: Path) -> bool:
    """Return whether a path holds a saved trace of a known kind."""
    return trace_kind(path) is not None


def open_trace(
    path: Path, ids: Sequence[int] | None = None, model: Model | None = None
) -> AbstractContextManager[Trace]:
    """Open a saved trace of any kind; its values can be fetched inside the `with`.

    `ids` are its tokens where the file does not say, `model` what it was made from: its sizes name
    what a foreign file leaves open (a joined qkv, adjacent pairs, whether an embedding is the
    scaled one). Raises FormatError for a file that is not a trace, or is damaged.
    """
    kind = trace_kind(path)
    if kind is None:
        raise FormatError(
            f"{path}: is no saved trace; expected .safetensors of aprfmt trace --save, .npz of "
            "module outputs, .pt of module outputs and input_ids, the text of llama-eval-callback, "
            "an APRT folder, a mapping file, a folder of .npy or .pt files, or a table of "
            "statistics (.csv, .json)"
        )
    return TRACES[kind][1](path, ids, model)
