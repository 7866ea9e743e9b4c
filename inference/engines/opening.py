"""Opens a saved trace of any kind as a Trace, by the content of the file or folder.

The reader of a kind is imported once a path may be of that kind, by its name and its first bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.base.dump_names import MAPPING_FILE, SHAPES_FILE
from aprfmt.base.registry import LazyFunction
from aprfmt.errors import FormatError
from aprfmt.formats.mapped_file import first_bytes
from aprfmt.formats.pytorch.layout import is_zip, recognise
from aprfmt.model import Model
from aprfmt.model.hf_folder import INDEX, WEIGHTS, captured_files

if TYPE_CHECKING:
    from aprfmt.inference.trace import Trace

Opener = Callable[[Path, "Sequence[int] | None", "Model | None"], "AbstractContextManager[Trace]"]
# Suffixes of what is no text: nobody has to look for lines in it.
_BINARY = (".gguf", ".safetensors", ".apr", ".npz")


def _is_npz(path: Path) -> bool:
    """Return whether a path is an .npz file, by suffix or content; no torch.save archive is."""
    if not path.is_file():
        return False
    head = first_bytes(path)
    if path.suffix == ".npz":
        return True
    return head[:4] in (b"PK\x03\x04", b"PK\x05\x06") and not is_zip(head)


def _holds_npz(folder: Path) -> bool:
    """Return whether a folder has one .npz file and nothing that is a model's weights."""
    return len(captured_files(folder)) == 1


def _load_only_npz(
    folder: Path, ids: Sequence[int] | None, model: Model | None
) -> "AbstractContextManager[Trace]":
    """Return the trace of the one .npz file that a folder holds."""
    return _load_npz(captured_files(folder)[0], ids, model)


def _load_npz(
    path: Path, ids: Sequence[int] | None, model: Model | None
) -> "AbstractContextManager[Trace]":
    """Return the trace of an .npz file's arrays, named as those of any engine.

    Without a model they are taken for outputs of transformers' modules.
    """
    if model is not None:
        from aprfmt.inference.engines.mapping import load_arrays

        return load_arrays(path, ids, model)
    from aprfmt.inference.engines.npz import load_npz

    return load_npz(path, ids)


def _load_own(
    path: Path, ids: Sequence[int] | None, model: Model | None
) -> "AbstractContextManager[Trace]":
    """Return the trace that aprfmt saved at a path, which has its token ids."""
    from aprfmt.inference.trace_file import load_trace

    return load_trace(path)


def _is_pickled(path: Path) -> bool:
    """Return whether a path is a file of torch.save with a pass's token ids or outputs."""
    if not path.is_file() or not recognise(first_bytes(path), path.stat().st_size):
        return False
    from aprfmt.inference.engines.captures import is_pickled_captures

    return is_pickled_captures(path)


def _is_eval_text(path: Path) -> bool:
    """Return whether a path is the text that llama-eval-callback prints."""
    if not path.is_file() or path.suffix in _BINARY:
        return False
    from aprfmt.inference.engines.llama_text import is_eval_text

    return is_eval_text(path)


def _load_aprt(
    path: Path, ids: Sequence[int] | None, model: Model | None
) -> "AbstractContextManager[Trace]":
    """Return the trace of an APRT folder; `ids` and `model` are not needed."""
    from aprfmt.inference.aprt import load_aprt

    return nullcontext(load_aprt(path))


def _is_model_folder(path: Path) -> bool:
    """Return whether a folder is a model's by its config.json, and has no captured array."""
    if not (path / "config.json").is_file() or captured_files(path):
        return False
    try:
        names = [each.name for each in path.iterdir()]
    except OSError:
        return False  # who reads it says why it cannot be listed
    if not {INDEX, WEIGHTS} & {*names} and any(name.endswith(".safetensors") for name in names):
        from aprfmt.inference.engines.captures import stored_capture_files

        if stored_capture_files(path):
            return False
    return not any(name in (MAPPING_FILE, SHAPES_FILE) or name.endswith(".npy") for name in names)


@dataclass(frozen=True, slots=True)
class TraceKind:
    """A kind of saved trace: whether a path is one, by its content, and how it is opened.

    `suffixes` are those of its files, None for any, () where it is no file. `folder`: it may be a
    folder.
    """

    fits: Callable[[Path], bool]
    open: Opener
    suffixes: tuple[str, ...] | None = None
    folder: bool = False

    def may_be(self, path: Path) -> bool:
        """Return whether a path may be a saved trace of this kind, by its suffix or as a folder."""
        if path.is_dir():
            return self.folder
        return self.suffixes is None or path.suffix in self.suffixes


_ENGINES = "aprfmt.inference.engines."
# In this order.
TRACES: Mapping[str, TraceKind] = {
    "captures": TraceKind(
        LazyFunction(_ENGINES + "mapping:is_mapped"),
        LazyFunction(_ENGINES + "mapping:load_mapped"),
        (".json",),
        folder=True,
    ),
    "statistics": TraceKind(
        LazyFunction(_ENGINES + "statistics:is_table"),
        LazyFunction(_ENGINES + "statistics:load_table"),
        (".csv", ".json"),
    ),
    "aprt": TraceKind(LazyFunction("aprfmt.inference.aprt:is_aprt"), _load_aprt, (), folder=True),
    "folder of an npz": TraceKind(_holds_npz, _load_only_npz, (), folder=True),
    "npz": TraceKind(_is_npz, _load_npz),
    "pt": TraceKind(_is_pickled, LazyFunction(_ENGINES + "mapping:load_arrays")),
    "aprfmt": TraceKind(LazyFunction("aprfmt.inference.trace_file:is_trace_file"), _load_own),
    "safetensors": TraceKind(
        LazyFunction(_ENGINES + "captures:is_stored_captures"),
        LazyFunction(_ENGINES + "mapping:load_arrays"),
        (".safetensors",),
    ),
    "llama-eval-callback": TraceKind(
        _is_eval_text, LazyFunction(_ENGINES + "llama_text:load_eval_text")
    ),
    "logprobs": TraceKind(
        LazyFunction(_ENGINES + "logprobs:is_logprobs"),
        LazyFunction(_ENGINES + "logprobs:refuse_logprobs"),
        (".json", ".jsonl"),
    ),
}


def trace_kind(path: Path) -> str | None:
    """Return the kind of saved trace a path is; None for anything else, such as a model."""
    if path.is_dir() and _is_model_folder(path):
        return None
    return next((kind for kind, row in TRACES.items() if row.may_be(path) and row.fits(path)), None)


def is_trace(path: Path) -> bool:
    """Return whether a path holds a saved trace of a known kind."""
    return trace_kind(path) is not None


def open_trace(
    path: Path, ids: Sequence[int] | None = None, model: Model | None = None
) -> "AbstractContextManager[Trace]":
    """Open a saved trace of any kind; its values and statistics can be read inside the `with`.

    `ids` are its tokens where the file does not say, `model` what it was made from: its sizes name
    what a foreign file leaves open (a joined qkv, adjacent pairs, whether an embedding is the
    scaled one). Raises FormatError for a file that is not a trace, or is damaged.
    """
    kind = trace_kind(path)
    if kind is None:
        raise FormatError(
            f"{path}: is no saved trace; expected .safetensors of aprfmt trace --save, .npz of "
            "module outputs, .safetensors or .pt of them, the text of llama-eval-callback, an APRT "
            "folder, a mapping file, a folder of .npy or .pt files, or a table of "
            "statistics (.csv, .json)"
        )
    return TRACES[kind].open(path, ids, model)
