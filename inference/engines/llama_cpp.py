"""llama.cpp as an engine: every node's values through the library's own evaluation callback.

llama_library.py loads the library. llama.cpp opens a GGUF itself; any other container is first
converted to GGUF by aprfmt (`via`). If the dtype float32 is named (`@llama.cpp:float32`), weights
are also decoded to float32: with other weights llama.cpp rounds activations too.
"""

import ctypes
import os
import struct
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.conversion import Options, convert_model
from aprfmt.errors import AprfmtError, ArchError, BackendUnavailableError, UsageError
from aprfmt.inference.device import DeviceChoice
from aprfmt.inference.engines.graph import GraphNode, GraphReader
from aprfmt.inference.engines.llama_library import Callback, Library
from aprfmt.inference.engines.record_collector import Collector
from aprfmt.inference.forward import LogitRows
from aprfmt.inference.trace import Positions, Trace
from aprfmt.inference.trace_file import Spool
from aprfmt.measure.tolerances import weights_class_of
from aprfmt.model import Model, open_model
from aprfmt.remote.paths import is_remote

Numbers = NDArray[Any]
# ggml type -> numpy; nodes of other types are skipped.
_TYPES: dict[int, Any] = {0: "<f4", 1: "<f2", 26: "<i4", 27: "<i8", 28: "<f8"}
_BF16 = 30


@contextmanager
def run_llama_cpp(
    model: Model,
    ids: Sequence[int],
    choice: DeviceChoice,
    *,
    wanted: Collection[str] | None = None,
    positions: Positions = "all",
    threads: int | None = None,
    hashes: bool = False,
    logits_rows: LogitRows = "all",
) -> Iterator[Trace]:
    """Run a sequence through llama.cpp on the CPU; yield the trace of its nodes' values.

    Values can be fetched inside the `with`. `wanted` are the keys to record (None: all),
    `positions` and `logits_rows` the rows of them. `threads` is the number of threads (None: all
    cores). `hashes`: also record the SHA-256 of values. Raises UsageError for another `choice` than
    cpu:float32, BackendUnavailableError without the library, ArchError for a model it does not
    load.
    """
    if choice.dtype != "float32" or not choice.device.startswith("cpu"):
        raise UsageError(f"{choice}: llama.cpp is run as cpu:float32 here; leave the rest out")
    library = Library.open()
    with ExitStack() as stack:
        exact = choice.requested.endswith("float32")
        path, ran, via = _gguf_to_run(model, exact, stack)
        collector = Collector(
            stack.enter_context(Spool()),
            ran,
            tokens=len(ids),
            dtype="float32",
            positions=positions,
            wanted=wanted,
            hashes=hashes,
            logits_rows=logits_rows,
        )
        reader = GraphReader(collector, ran, len(ids))
        calls = evaluate_nodes(library, path, ids, reader, threads or os.cpu_count() or 1)
        facts = {
            "ids": [int(i) for i in ids],
            "model": str(model.path),
            "architecture": model.spec.name,
            "via": via,
            "weights": weights_class_of(ran),
            "backend": {
                "backend": "llama.cpp", "device": "cpu", "dtype": "float32",
                "deterministic": False, "versions": {"llama.cpp": library.version()},
                "nodes": calls, "cache": "F32", "flash": False,
                "activations": "quantized to 8 bits for products with quantized weights, rounded "
                "to F16 or BF16 for such weights",
            },
            "derived": ["scores"],
        }  # fmt: skip
        yield collector.trace(facts)


def _gguf_to_run(model: Model, exact: bool, stack: ExitStack) -> tuple[Path, Model, str]:
    """Return (path of the GGUF to run, the model open from it, how it was made, in words).

    `exact`: with weights decoded to float32, because llama.cpp rounds activations for others. A
    file that is made here is deleted when `stack` closes.
    """
    stored = {tensor.encoding for tensor in model.roles.values()}
    decoded = exact and not stored <= {"F32"}
    if model.format == "gguf" and not decoded and not is_remote(model.path):
        return model.path, model, "the file itself"

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aprfmt-gguf-"))
    target = Path(folder) / "model.gguf"
    # llama.cpp loads a model without a tokenizer if the file says that it has none.
    bare = {} if has_tokenizer(model) else {"tokenizer.ggml.model": "no_vocab"}
    options = Options(
        source_hash=False, verify=False, extra_metadata=bare, encoding="F32" if decoded else None
    )
    convert_model(model, target, "gguf", options)
    how = "decoded to float32 and exported" if decoded else "exported"
    return target, stack.enter_context(open_model(target)), f"{model.format} {how} by aprfmt"


def has_tokenizer(model: Model) -> bool:
    """Return whether a model has a tokenizer that can be read."""
    try:
        return model.tokenizer is not None
    except AprfmtError:
        return False


def evaluate_nodes(
    library: Library, path: Path, ids: Sequence[int], reader: GraphReader, threads: int
) -> int:
    """Run one pass, pass wanted nodes to `reader`, and return how many nodes the library gave.

    ArchError if the library fails or gives none.
    """
    base = library.base
    failures: list[BaseException] = []
    calls = 0

    def evaluated(pointer: Any, ask: bool, data: Any) -> bool:
        """Return whether ggml is to continue, or, with `ask`, whether a node is wanted.

        It is ggml's callback, called before (`ask`) and after a node is computed. Errors are stored
        until the library returns.
        """
        nonlocal calls
        try:
            library.check_tensor(pointer)
            node = _read_node(pointer, base)
            wanted = reader.wants(node)
            if ask:
                return wanted
            calls += 1
            if wanted:
                values = _node_values(pointer, base)
                if values is None:
                    reader.collector.unknown[node.name] = f"type {pointer.contents.type} of ggml"
                else:
                    reader.add(node, values)
        except BaseException as error:  # no exception may pass through C
            failures.append(error)
            return False
        return True

    # Run one batch; the callback sees every node.
    with library.model(path) as loaded:
        made = library.context(loaded, len(ids), threads, callback=Callback(evaluated))
        with made as context:
            code = library.decode(context, ids)
    if failures:
        raise failures[0]
    if code or not calls:
        raise ArchError(
            f"{path}: llama.cpp returned {code} after {calls} nodes: {library.last_errors()}"
        )
    return calls


def _read_node(pointer: Any, base: Any) -> GraphNode:
    """Return the graph node at a pointer, without its values."""
    t = pointer.contents
    op = base.ggml_op_desc(pointer).decode(errors="replace")
    shape = tuple(int(size) for size in reversed(t.ne))
    sources = tuple(s.contents.name.decode(errors="replace") for s in t.src if s)
    scale = None
    if op == "SOFT_MAX":
        (scale,) = struct.unpack("<f", struct.pack("<i", t.op_params[0]))
    return GraphNode(t.name.decode(errors="replace"), op, shape, sources, scale)


def _node_values(pointer: Any, base: Any) -> Numbers | None:
    """Return a node's values in its shape; None for a type that is not read.

    Raises BackendUnavailableError if the tensor struct has an unknown layout.
    """
    t = pointer.contents
    shape, strides = tuple(reversed(t.ne)), tuple(reversed(t.nb))
    count = int(np.prod(shape))
    if count != base.ggml_nelements(pointer) or count < 1:
        raise BackendUnavailableError("engine 'llama.cpp': its tensors have a layout not known")
    size = int(base.ggml_nbytes(pointer))
    # Copy the bytes, then read them by the node's strides.
    raw = ctypes.create_string_buffer(size)
    base.ggml_backend_tensor_get(pointer, raw, 0, size)
    if t.type == _BF16:
        bits = np.ndarray(shape, "<u2", raw.raw, strides=strides).astype(np.uint32) << 16
        return bits.view(np.float32)
    if t.type not in _TYPES:
        return None
    found = np.ndarray(shape, _TYPES[t.type], raw.raw, strides=strides)
    if found.dtype.kind == "i":
        return found.astype(np.int64)
    return found.astype(np.float64 if found.dtype.itemsize == 8 else np.float32)
