"""llama.cpp through ctypes, without its headers: what a speed comparison needs and no more.

Needs a folder with libllama, libggml and its CPU backends, for example that of the npm package
@node-llama-cpp/linux-x64. The parameter structs change from version to version; they are passed
as blocks of bytes larger than any of them (on x86-64 and arm64 a struct of this size goes by
address or on the stack, where the callee reads its own part), and of their fields only the first
is set, after the ones that follow it have been seen to hold the documented defaults.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_BLOCK = 1024
# llama_context_default_params: n_ctx, n_batch, n_ubatch, n_seq_max.
_DEFAULTS = (512, 2048, 512, 1)


class _Params(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint32 * (_BLOCK // 4))]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32), ("token", ctypes.c_void_p), ("embd", ctypes.c_void_p),
        ("pos", ctypes.c_void_p), ("n_seq_id", ctypes.c_void_p), ("seq_id", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
    ]  # fmt: skip


def _one(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if not found:
        raise RuntimeError(f"{folder}: holds no {pattern}")
    return found[0]


class LlamaCpp:
    """A model and a context of 1024 tokens on the CPU."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        for pattern in ("libggml-base*", "libggml.*", "libllama.*"):
            library = ctypes.CDLL(str(_one(folder, pattern)), mode=ctypes.RTLD_GLOBAL)
            if pattern == "libggml.*":
                library.ggml_backend_load_all_from_path(str(folder).encode())
        self._library: Any = library
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._quiet = quiet(lambda level, text, data: None)
        library.llama_log_set(self._quiet, None)
        library.llama_backend_init()
        for name in ("llama_model_default_params", "llama_context_default_params"):
            getattr(library, name).restype = _Params
        for name, argument in (
            ("llama_model_load_from_file", ctypes.c_char_p),
            ("llama_init_from_model", ctypes.c_void_p),
        ):
            getattr(library, name).restype = ctypes.c_void_p
            getattr(library, name).argtypes = [argument, _Params]
        library.llama_batch_get_one.restype = _Batch
        library.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
        library.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
        library.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        library.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
        loaded = library.llama_model_load_from_file(
            str(model).encode(), library.llama_model_default_params()
        )
        if not loaded:
            raise RuntimeError(f"llama.cpp does not load {model}")
        params = library.llama_context_default_params()
        if tuple(params.words[:4]) != _DEFAULTS:
            raise RuntimeError(
                f"this llama.cpp's context parameters begin with {params.words[:4]}; expected "
                f"{_DEFAULTS}"
            )
        params.words[0] = 1024
        self._context = library.llama_init_from_model(loaded, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context")
        library.llama_set_n_threads(self._context, threads, threads)

    def run(self, ids: Sequence[int]) -> float:
        """Run tokens behind those so far; return the highest logit of the last one."""
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        batch = self._library.llama_batch_get_one(tokens, len(ids))
        if self._library.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp refuses {len(ids)} tokens")
        return float(self._library.llama_get_logits_ith(self._context, -1)[0])

    def clear(self) -> None:
        """Forget all tokens."""
        memory = self._library.llama_get_memory
        memory.restype, memory.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        clear = self._library.llama_memory_clear
        clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
        clear(memory(self._context), True)
