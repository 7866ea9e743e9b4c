"""llama.cpp's shared libraries through ctypes, without its headers.

They come from a folder named by APRFMT_LLAMA_CPP that holds libllama, libggml, libggml-base and
libggml-cpu (one, or one for each kind of processor), or from the lib folder of the package
llama-cpp-python, whose API is not used.

Parameter structs change from version to version. They are passed as blocks larger than any of
them (on x86-64 and arm64 such a struct is passed by address or on the stack, and the callee reads
only its part). The fields set here are located by the documented defaults around them; a library
with other defaults, or with another layout of tensors, is refused.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import ArchError, BackendUnavailableError

Numbers = NDArray[Any]
FOLDER = "APRFMT_LLAMA_CPP"
PACKAGE = "llama-cpp-python"
WORDS = 256  # size of a block of parameters, in words of 32 bits
AUTO, OFF = 0xFFFFFFFF, 0  # values of flash attention
F32, F16 = 0, 1
_ERROR = 4  # ggml's log level
# Defaults of llama_context_params as words; the first are n_ctx, n_batch, n_ubatch, n_seq_max.
_FIRST = (512, 2048, 512, 1)
_UNSPECIFIED = AUTO  # -1: of rope scaling, pooling, attention
_MINUS_ONE = 0xBF800000  # -1.0: "from the model", or off
_ONE, _THIRTY_TWO = 0x3F800000, 0x42000000


class ParamBlock(ctypes.Structure):
    """Memory for llama_model_params or llama_context_params, larger than any version's struct."""

    _fields_ = [("words", ctypes.c_uint32 * WORDS)]


class LlamaBatch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32), ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p), ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]  # fmt: skip


class GgmlTensor(ctypes.Structure):
    """The first fields of ggml_tensor; those after the name are not read."""


GgmlTensor._fields_ = [
    ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4), ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32), ("src", ctypes.POINTER(GgmlTensor) * 10),
    ("view_src", ctypes.c_void_p), ("view_offs", ctypes.c_size_t), ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]  # fmt: skip
Callback = ctypes.CFUNCTYPE(
    ctypes.c_bool, ctypes.POINTER(GgmlTensor), ctypes.c_bool, ctypes.c_void_p
)
_Log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_Pointer, _Node = ctypes.c_void_p, ctypes.POINTER(GgmlTensor)
# The functions that are called: (library, name, result, arguments).
_CALLS: tuple[tuple[str, str, Any, list[Any]], ...] = (
    ("base", "ggml_op_desc", ctypes.c_char_p, [_Node]),
    ("base", "ggml_nbytes", ctypes.c_size_t, [_Node]),
    ("base", "ggml_nelements", ctypes.c_int64, [_Node]),
    ("base", "ggml_get_name", _Pointer, [_Node]),
    ("base", "ggml_backend_tensor_get", None, [_Node, _Pointer, ctypes.c_size_t, ctypes.c_size_t]),
    ("llama", "llama_model_default_params", ParamBlock, []),
    ("llama", "llama_context_default_params", ParamBlock, []),
    ("llama", "llama_model_load_from_file", _Pointer, [ctypes.c_char_p, ParamBlock]),
    ("llama", "llama_model_free", None, [_Pointer]),
    ("llama", "llama_model_get_vocab", _Pointer, [_Pointer]),
    ("llama", "llama_vocab_n_tokens", ctypes.c_int32, [_Pointer]),
    ("llama", "llama_init_from_model", _Pointer, [_Pointer, ParamBlock]),
    ("llama", "llama_free", None, [_Pointer]),
    ("llama", "llama_n_ctx", ctypes.c_uint32, [_Pointer]),
    ("llama", "llama_n_ubatch", ctypes.c_uint32, [_Pointer]),
    ("llama", "llama_set_n_threads", None, [_Pointer, ctypes.c_int32, ctypes.c_int32]),
    ("llama", "llama_batch_init", LlamaBatch, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int32]),
    ("llama", "llama_batch_free", None, [LlamaBatch]),
    ("llama", "llama_decode", ctypes.c_int32, [_Pointer, LlamaBatch]),
    ("llama", "llama_get_logits_ith", ctypes.POINTER(ctypes.c_float), [_Pointer, ctypes.c_int32]),
    ("llama", "llama_get_memory", _Pointer, [_Pointer]),
    ("llama", "llama_memory_clear", None, [_Pointer, ctypes.c_bool]),
    ("llama", "llama_print_system_info", ctypes.c_char_p, []),
)


def library_folder() -> Path:
    """Return the folder of the shared libraries; BackendUnavailableError if there is none."""
    named = os.environ.get(FOLDER)
    if named:
        return Path(named)
    spec = find_spec("llama_cpp")
    for place in spec.submodule_search_locations or () if spec is not None else ():
        if (Path(place) / "lib").is_dir():
            return Path(place) / "lib"
    raise BackendUnavailableError(
        "engine 'llama.cpp' needs its library, found no package with it: pip install "
        f"{PACKAGE}, or set {FOLDER} to a folder with libllama and libggml"
    )


@dataclass(frozen=True)
class Fields:
    """Offsets in llama_context_params, in words. `flash` is None in a version without the field."""

    flash: int | None
    callback: int  # two pointers: the callback and its data
    cache: int  # types of keys and values


def context_fields(words: Sequence[int]) -> Fields | None:
    """Return the offsets of the fields, found by the defaults of llama_context_params.

    Documented order: three or four enums (rope scaling, ...; the fourth is flash attention), two
    frequencies, four numbers of YaRN and its context, the defragmentation threshold, the evaluation
    callback, the cache's types, the abort callback. None unless exactly one offset fits.
    """
    if tuple(words[: len(_FIRST)]) != _FIRST:
        return None
    found = [
        fields
        for at in range(len(_FIRST) + 4, WORDS // 2)
        if (fields := _fields_after(words, at)) is not None
    ]
    return found[0] if len(found) == 1 else None


def _fields_after(words: Sequence[int], at: int) -> Fields | None:
    """Return the offsets if the two frequencies begin at word `at`, after the enums; else None.

    `words` are the default parameters as 32-bit words.
    """
    yarn = words[at + 2 : at + 8]
    allowed = ((_MINUS_ONE,), (_MINUS_ONE, _ONE), (_MINUS_ONE, _THIRTY_TWO), (_MINUS_ONE, _ONE),
               (0,), (0, _MINUS_ONE))  # fmt: skip
    if any(words[at : at + 2]) or any(
        word not in some for word, some in zip(yarn, allowed, strict=True)
    ):
        return None
    if any(word != _UNSPECIFIED for word in words[at - 3 : at]):
        return None
    flash = at - 1 if words[at - 4] == _UNSPECIFIED else None
    callback = at + 7 + (words[at + 7] == _MINUS_ONE)
    callback += callback % 2  # pointers are 8-byte aligned
    cache = callback + 4
    if any(words[callback:cache]) or tuple(words[cache : cache + 2]) != (F16, F16):
        return None
    return None if any(words[cache + 2 : cache + 6]) else Fields(flash, callback, cache)


class Library:
    """libllama and libggml of one folder, loaded once."""

    _loaded: "dict[Path, Library]" = {}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        """Load the libraries of a folder, silence their logs and declare the functions called."""
        self.folder = folder
        self.errors: list[str] = []
        self._log = _Log(self._store_error)
        self.base = self._load("ggml-base")
        self.base.ggml_log_set(self._log, None)
        ggml = self._load("ggml")
        if not any(folder.glob("*ggml-cpu.*")):  # several CPU libraries: ggml chooses
            ggml.ggml_backend_load_all_from_path(str(folder).encode())
        self.llama = self._load("llama")
        self.llama.llama_log_set(self._log, None)
        self.llama.llama_backend_init()
        for library, name, result, arguments in _CALLS:
            function = getattr(getattr(self, library), name)
            function.restype, function.argtypes = result, arguments
        self.fields = self._checked_fields()

    @classmethod
    def open(cls, folder: Path | None = None) -> "Library":
        """Return llama.cpp's library in a folder, or the one installed on this machine.

        Raises BackendUnavailableError if there is none, or if it does not load or is not known.
        """
        folder = library_folder() if folder is None else folder
        if folder not in cls._loaded:
            try:
                cls._loaded[folder] = cls(folder)
            except (OSError, AttributeError) as error:
                raise BackendUnavailableError(
                    f"engine 'llama.cpp': {folder} holds no library that works here: {error}"
                ) from error
        return cls._loaded[folder]

    def _load(self, name: str) -> Any:
        """Return llama.cpp's shared library of this name, loaded by ctypes.

        Raises BackendUnavailableError if it is missing.
        """
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

    def _checked_fields(self) -> Fields:
        """Return the offsets of struct fields in this llama.cpp.

        BackendUnavailableError if unknown.
        """
        words = self.llama.llama_context_default_params().words
        fields = context_fields(words)
        if fields is None:
            raise BackendUnavailableError(
                f"engine 'llama.cpp': {self.folder}: its context parameters have a layout that is "
                f"not known (they begin with {list(words[:4])}, expected {list(_FIRST)} and the "
                "documented defaults after them); use another version"
            )
        return fields

    def _store_error(self, level: int, text: bytes | None, data: Any) -> None:
        """Append a logged error to `errors`, which holds the last five; ignore other messages."""
        if level == _ERROR and text:
            self.errors = [*self.errors[-4:], text.decode(errors="replace").strip()]

    def last_errors(self) -> str:
        """Return the last errors that llama.cpp has logged, oldest first, and forget them.

        Without any, words that say that it gives no reason.
        """
        said, self.errors = "; ".join(dict.fromkeys(self.errors)), []
        return said or "it does not say why"

    def version(self) -> str:
        """Return a text that identifies this llama.cpp build: file, version, processor features."""
        name = Path(self.llama._name).resolve().name
        build = []
        for call in ("ggml_version", "ggml_commit"):  # newer builds only
            if hasattr(self.base, call):
                function = getattr(self.base, call)
                function.restype = ctypes.c_char_p
                build.append((function() or b"").decode(errors="replace"))
        system: bytes = self.llama.llama_print_system_info() or b""
        ggml = [f"ggml {' '.join(filter(None, build))}"] if any(build) else []
        return " ".join([name, *ggml, system.decode(errors="replace").strip()]).strip()

    @contextmanager
    def model(self, path: Path) -> Iterator[int]:
        """Yield the address of the loaded GGUF, freed after; ArchError if llama.cpp refuses it."""
        params = self.llama.llama_model_default_params()
        loaded = self.llama.llama_model_load_from_file(str(path).encode(), params)
        if not loaded:
            raise ArchError(f"{path}: llama.cpp does not load it: {self.last_errors()}")
        try:
            yield loaded
        finally:
            self.llama.llama_model_free(loaded)

    def vocab_size(self, model: int) -> int:
        """Return the size of a loaded model's vocabulary."""
        return int(self.llama.llama_vocab_n_tokens(self.llama.llama_model_get_vocab(model)))

    @contextmanager
    def context(
        self, model: int, tokens: int, threads: int, *, callback: Any = None, exact: bool = True
    ) -> Iterator[int]:
        """Yield the address of a context for one pass of `tokens`, freed after the `with`.

        `model` is the model's address, `callback` ggml's evaluation callback. `exact`: one batch,
        keys and values in float32, attention with visible scores; otherwise the library's defaults.
        Raises ArchError if the library makes no context, and BackendUnavailableError if the context
        has other sizes than requested.
        """
        params = self.llama.llama_context_default_params()
        words = params.words
        # Set the fields at the offsets that were found.
        words[0] = max(tokens, 32)
        if exact:
            words[1] = words[2] = words[0]
            words[self.fields.cache] = words[self.fields.cache + 1] = F32
            if self.fields.flash is not None:  # the fused form has no scores
                words[self.fields.flash] = OFF
        if callback is not None:
            address = ctypes.cast(callback, ctypes.c_void_p)
            ctypes.memmove(ctypes.byref(params, 4 * self.fields.callback), ctypes.byref(address), 8)
        made = self.llama.llama_init_from_model(model, params)
        if not made:
            raise ArchError(f"llama.cpp makes no context for {tokens} tokens: {self.last_errors()}")
        try:
            # A wrong offset shows in other sizes.
            taken = self.llama.llama_n_ctx(made), self.llama.llama_n_ubatch(made)
            if taken[0] < words[0] or taken[1] != min(words[2], words[0]):
                raise BackendUnavailableError(
                    f"engine 'llama.cpp': {self.folder}: a context of {words[0]} tokens in batches "
                    f"of {words[2]} has {taken[0]} and {taken[1]}; use another version"
                )
            self.llama.llama_set_n_threads(made, threads, threads)
            yield made
        finally:
            self.llama.llama_free(made)

    def decode(self, context: int, ids: Sequence[int]) -> int:
        """Run a sequence from its start, with logits of every row.

        Return llama.cpp's code, 0 if well.
        """
        batch = self.llama.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for row, token in enumerate(ids):
                batch.token[row], batch.pos[row] = int(token), row
                batch.n_seq_id[row], batch.seq_id[row][0], batch.logits[row] = 1, 0, 1
            return int(self.llama.llama_decode(context, batch))
        finally:
            self.llama.llama_batch_free(batch)

    def clear(self, context: int) -> None:
        """Remove all tokens from a llama.cpp context."""
        self.llama.llama_memory_clear(self.llama.llama_get_memory(context), True)

    def logits(self, context: int, row: int, vocab: int) -> Numbers:
        """Return a copy of a row's logits, float32 [vocab]; row -1 is the last one."""
        found = self.llama.llama_get_logits_ith(context, row)
        return np.ctypeslib.as_array(found, (vocab,)).copy()

    def check_tensor(self, pointer: Any) -> None:
        """Raise BackendUnavailableError if ggml_tensor has its name field at another offset."""
        here = ctypes.addressof(pointer.contents) + GgmlTensor.name.offset
        if self.base.ggml_get_name(pointer) != here:
            raise BackendUnavailableError(
                f"engine 'llama.cpp': {self.folder}: its tensors have a layout that is not known; "
                "use another version"
            )
