"""llama.cpp as an engine: every node's values through the library's own evaluation callback.

The library comes with the package llama-cpp-python (its lib folder is used, not its API), or
from a folder named by APRFMT_LLAMA_CPP. Parameter structs change from version to version: they
are passed as blocks larger than any of them, and the fields set here are found by the defaults
around them, which are checked; a library that looks otherwise is refused. A GGUF is opened by
llama.cpp itself; any other container is first written as a GGUF by our converter (`via`). So are
weights decoded to float32 where that dtype is named (`@llama.cpp:float32`): with other weights
llama.cpp rounds activations too.
"""

import ctypes
import os
import struct
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import AprfmtError, ArchError, BackendUnavailableError, UsageError
from aprfmt.inference.device import Choice
from aprfmt.inference.engines.collect import Collector, weights_of
from aprfmt.inference.engines.graph import GraphReader, Node
from aprfmt.inference.forward import LogitRows
from aprfmt.inference.trace import Positions, Trace
from aprfmt.inference.trace_file import Spool

if TYPE_CHECKING:
    from aprfmt.model import Model

Numbers = NDArray[Any]
FOLDER = "APRFMT_LLAMA_CPP"
_WORDS = 256
_AUTO, _OFF = 0xFFFFFFFF, 0  # of flash attention
_MINUS_ONE = 0xBF800000  # -1.0: yarn_ext_factor's default
_F16, _F32 = 1, 0
_ERROR = 4  # of ggml's log levels
# ggml type -> numpy; others are read as nothing.
_TYPES: dict[int, Any] = {0: "<f4", 1: "<f2", 26: "<i4", 27: "<i8", 28: "<f8"}
_BF16 = 30


class _Params(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint32 * _WORDS)]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p), ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]  # fmt: skip


class _Tensor(ctypes.Structure):
    """The head of ggml_tensor; what follows the name is not read."""


_Tensor._fields_ = [
    ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4), ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32), ("src", ctypes.POINTER(_Tensor) * 10),
    ("view_src", ctypes.c_void_p), ("view_offs", ctypes.c_size_t), ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]  # fmt: skip
_Callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.POINTER(_Tensor), ctypes.c_bool, ctypes.c_void_p)
_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def library_folder() -> Path:
    """Return the folder of the shared libraries; BackendUnavailableError where there is none."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    spec = find_spec("llama_cpp")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        if (Path(place) / "lib").is_dir():
            return Path(place) / "lib"
    raise BackendUnavailableError(
        "engine 'llama.cpp' needs its library, found no package with it: pip install "
        f"llama-cpp-python, or set {FOLDER} to a folder with libllama and libggml"
    )


class Library:
    """libllama and libggml, loaded once."""

    _loaded: "dict[Path, Library]" = {}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.base = self._load("ggml-base")
        ggml = self._load("ggml")
        if not any(folder.glob("*ggml-cpu.*")):  # several CPU libraries: let ggml choose
            ggml.ggml_backend_load_all_from_path(str(folder).encode())
        self.llama = self._load("llama")
        self.errors: list[str] = []
        self._log = _Log(self._logged)
        self.llama.llama_log_set(self._log, None)
        self.llama.llama_backend_init()
        self.base.ggml_op_desc.restype = ctypes.c_char_p
        self.base.ggml_nbytes.restype = ctypes.c_size_t
        self.base.ggml_nelements.restype = ctypes.c_int64
        for name in ("ggml_op_desc", "ggml_nbytes", "ggml_nelements"):
            getattr(self.base, name).argtypes = [ctypes.POINTER(_Tensor)]
        self.base.ggml_backend_tensor_get.argtypes = [
            ctypes.POINTER(_Tensor), ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t,
        ]  # fmt: skip
        for name in ("model", "context"):
            getattr(self.llama, f"llama_{name}_default_params").restype = _Params
        for name, first in (
            ("llama_model_load_from_file", ctypes.c_char_p),
            ("llama_init_from_model", ctypes.c_void_p),
        ):
            getattr(self.llama, name).restype = ctypes.c_void_p
            getattr(self.llama, name).argtypes = [first, _Params]
        self.llama.llama_batch_init.restype = _Batch
        self.llama.llama_batch_free.argtypes = [_Batch]
        self.llama.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
        self.llama.llama_print_system_info.restype = ctypes.c_char_p
        for name in ("llama_free", "llama_model_free"):
            getattr(self.llama, name).argtypes = [ctypes.c_void_p]
            getattr(self.llama, name).restype = None

    @classmethod
    def open(cls) -> "Library":
        """Return the library of this machine; BackendUnavailableError where it does not load."""
        folder = library_folder()
        if folder not in cls._loaded:
            try:
                cls._loaded[folder] = cls(folder)
            except (OSError, AttributeError) as error:
                raise BackendUnavailableError(
                    f"engine 'llama.cpp': {folder} holds no library that works here: {error}"
                ) from error
        return cls._loaded[folder]

    def _load(self, name: str) -> Any:
        found = sorted(
            path
            for path in self.folder.iterdir()
            if path.name.startswith((f"lib{name}.", f"{name}.dll"))
        )
        if not found:
            raise BackendUnavailableError(
                f"engine 'llama.cpp': {self.folder} holds no lib{name}; expected libllama, libggml "
                "and libggml-base"
            )
        return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)

    def _logged(self, level: int, text: bytes | None, data: Any) -> None:
        if level == _ERROR and text:
            self.errors = [*self.errors[-4:], text.decode(errors="replace").strip()]

    def why(self) -> str:
        """Return the last errors the library has logged, oldest first, and forget them."""
        said, self.errors = "; ".join(dict.fromkeys(self.errors)), []
        return said or "it does not say why"

    def version(self) -> str:
        """Return what tells this build: its file, and what its processor code is compiled for."""
        name = (self.folder / "libllama.so").resolve().name
        text: bytes = self.llama.llama_print_system_info() or b""
        return f"{name} {text.decode(errors='replace').strip()}"

    def context_params(self, callback: Any, tokens: int) -> _Params:
        """Return parameters for one pass of `tokens` in float32; refuses an unknown layout."""
        params: _Params = self.llama.llama_context_default_params()
        words, raw = params.words, memoryview(params).cast("B")
        anchors = [i for i in range(10, 40) if words[i] == _MINUS_ONE]
        places = [
            offset for offset in range(4 * (anchors[0] if anchors else _WORDS), 256, 8)
            if not any(raw[offset : offset + 16])
            and struct.unpack_from("<II", raw, offset + 16) == (_F16, _F16)
        ]  # fmt: skip
        if not anchors or len(places) != 1 or tuple(words[:3]) != (512, 2048, 512):
            raise BackendUnavailableError(
                f"engine 'llama.cpp': {self.folder}: its context parameters have a layout that is "
                f"not known (they begin with {list(words[:4])}); use another version"
            )
        words[0] = words[1] = words[2] = max(tokens, 32)
        flash = anchors[0] - 3
        if words[flash] == _AUTO:  # the fused form has no scores
            words[flash] = _OFF
        address = ctypes.cast(callback, ctypes.c_void_p).value
        struct.pack_into("<QQII", raw, places[0], address, 0, _F32, _F32)
        return params


@contextmanager
def run(
    model: "Model",
    ids: Sequence[int],
    choice: Choice,
    *,
    wanted: Collection[str] | None = None,
    positions: Positions = "all",
    threads: int | None = None,
    hashes: bool = False,
    logits_rows: LogitRows = "all",
    **_: Any,
) -> Iterator[Trace]:
    """Run a sequence through llama.cpp on the CPU; yields a trace whose values can be fetched.

    Raises BackendUnavailableError without the library, ArchError for a model it does not load.
    """
    if choice.dtype != "float32" or not choice.device.startswith("cpu"):
        raise UsageError(f"{choice}: llama.cpp is run as cpu:float32 here; leave the rest out")
    library = Library.open()
    with ExitStack() as stack:
        exact = choice.requested.endswith("float32")
        path, ran, via = _gguf(model, exact, stack)
        collector = Collector(
            stack.enter_context(Spool()), ran, tokens=len(ids), dtype="float32",
            positions=positions, wanted=wanted, hashes=hashes,
            logits_rows=logits_rows,
        )  # fmt: skip
        reader = GraphReader(collector, ran, len(ids))
        calls = evaluate(library, path, ids, reader, threads or os.cpu_count() or 1)
        facts = {
            "ids": [int(i) for i in ids],
            "model": str(model.path),
            "architecture": model.spec.name,
            "via": via,
            "weights": weights_of(ran),
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


def _gguf(model: "Model", exact: bool, stack: ExitStack) -> "tuple[Path, Model, str]":
    """Return the GGUF that runs, as a path and open, and how it came to be.

    `exact`: with its weights decoded to float32, for llama.cpp rounds activations to fit others.
    """
    stored = {tensor.encoding for tensor in model.roles.values()}
    decoded = exact and not stored <= {"F32"}
    if model.format == "gguf" and not decoded:
        return model.path, model, "the file itself"
    from aprfmt.conversion import Options, convert_model
    from aprfmt.model import open_model

    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aprfmt-gguf-"))
    target = Path(folder) / "model.gguf"
    # A model without a tokenizer is loaded all the same, if the file says that it has none.
    bare = {} if has_tokenizer(model) else {"tokenizer.ggml.model": "no_vocab"}
    options = Options(
        source_hash=False, verify=False, extra_metadata=bare, encoding="F32" if decoded else None
    )
    convert_model(model, target, "gguf", options)
    how = "decoded to float32 and exported" if decoded else "exported"
    return target, stack.enter_context(open_model(target)), f"{model.format} {how} by aprfmt"


def has_tokenizer(model: "Model") -> bool:
    """Say whether a model carries a tokenizer that can be read."""
    try:
        return model.tokenizer is not None
    except AprfmtError:
        return False


def evaluate(
    library: Library, path: Path, ids: Sequence[int], reader: GraphReader, threads: int
) -> int:
    """Run one pass with the callback; return how many nodes it showed."""
    llama, base = library.llama, library.base
    failures: list[BaseException] = []
    calls = 0

    def evaluated(pointer: Any, ask: bool, data: Any) -> bool:
        nonlocal calls
        try:
            node = _node(pointer, base)
            wanted = reader.wants(node)
            if ask:
                return wanted
            calls += 1
            if wanted:
                values = _values(pointer, base)
                if values is None:
                    reader.collector.unknown[node.name] = f"type {pointer.contents.type} of ggml"
                else:
                    reader.add(node, values)
        except BaseException as error:  # nothing may pass through C
            failures.append(error)
            return False
        return True

    callback = _Callback(evaluated)
    loaded = llama.llama_model_load_from_file(
        str(path).encode(), llama.llama_model_default_params()
    )
    if not loaded:
        raise ArchError(f"{path}: llama.cpp does not load it: {library.why()}")
    context = None
    try:
        context = llama.llama_init_from_model(loaded, library.context_params(callback, len(ids)))
        if not context:
            raise ArchError(f"{path}: llama.cpp makes no context: {library.why()}")
        llama.llama_set_n_threads(ctypes.c_void_p(context), threads, threads)
        batch = llama.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for row, token in enumerate(ids):
                batch.token[row], batch.pos[row] = int(token), row
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, 1
            code = llama.llama_decode(context, batch)
        finally:
            llama.llama_batch_free(batch)
    finally:
        if context:
            llama.llama_free(context)
        llama.llama_model_free(loaded)
    if failures:
        raise failures[0]
    if code or not calls:
        raise ArchError(f"{path}: llama.cpp returned {code} after {calls} nodes: {library.why()}")
    return calls


def _node(pointer: Any, base: Any) -> Node:
    t = pointer.contents
    op = base.ggml_op_desc(pointer).decode(errors="replace")
    shape = tuple(int(size) for size in reversed(t.ne))
    sources = tuple(s.contents.name.decode(errors="replace") for s in t.src if s)
    scale = None
    if op == "SOFT_MAX":
        (scale,) = struct.unpack("<f", struct.pack("<i", t.op_params[0]))
    return Node(t.name.decode(errors="replace"), op, shape, sources, scale)


def _values(pointer: Any, base: Any) -> Numbers | None:
    """Return a node's values in its shape; None for a type that is not read.

    Raises BackendUnavailableError where the tensor struct is not the one this file knows.
    """
    t = pointer.contents
    shape, strides = tuple(reversed(t.ne)), tuple(reversed(t.nb))
    count = int(np.prod(shape))
    if count != base.ggml_nelements(pointer) or count < 1:
        raise BackendUnavailableError("engine 'llama.cpp': its tensors have a layout not known")
    size = int(base.ggml_nbytes(pointer))
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
