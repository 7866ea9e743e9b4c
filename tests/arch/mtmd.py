"""llama.cpp's library for what sees and hears (libmtmd), by ctypes, beside libllama.

Its parameters are a struct that grows at the end: it is passed as a block, whose first fields are
those of mtmd.h in llama.cpp v0.5.0.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.errors import ArchError, BackendUnavailableError
from aprfmt.inference.engines.llama_library import Library, library_folder

WORDS = 64
IMAGE, AUDIO = 1, 2
_Pointer, _Size = ctypes.c_void_p, ctypes.c_size_t


class Params(ctypes.Structure):
    """mtmd_context_params."""

    _fields_ = [
        ("use_gpu", ctypes.c_bool), ("device", _Pointer), ("timings", ctypes.c_bool),
        ("threads", ctypes.c_int), ("image_marker", ctypes.c_char_p),
        ("marker", ctypes.c_char_p), ("flash", ctypes.c_int), ("warmup", ctypes.c_bool),
        ("rest", ctypes.c_uint32 * WORDS),
    ]  # fmt: skip


class Text(ctypes.Structure):
    """mtmd_input_text."""

    _fields_ = [("text", ctypes.c_char_p), ("length", _Size), ("special", ctypes.c_bool),
                ("parse", ctypes.c_bool)]  # fmt: skip


_CALLS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("mtmd_log_set", None, [_Pointer, _Pointer]),
    ("mtmd_context_params_default", Params, []),
    ("mtmd_init_from_file", _Pointer, [ctypes.c_char_p, _Pointer, Params]),
    ("mtmd_bitmap_init", _Pointer, [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_char_p]),
    ("mtmd_bitmap_init_from_audio", _Pointer, [_Size, _Pointer]),
    ("mtmd_input_chunks_init", _Pointer, []),
    ("mtmd_input_chunks_size", _Size, [_Pointer]),
    ("mtmd_input_chunks_get", _Pointer, [_Pointer, _Size]),
    ("mtmd_input_chunk_get_type", ctypes.c_int, [_Pointer]),
    ("mtmd_input_chunk_get_n_tokens", _Size, [_Pointer]),
    ("mtmd_tokenize", ctypes.c_int32, [_Pointer, _Pointer, ctypes.POINTER(Text),
                                       ctypes.POINTER(_Pointer), _Size]),
    ("mtmd_encode_chunk", ctypes.c_int32, [_Pointer, _Pointer]),
    ("mtmd_get_output_embd", ctypes.POINTER(ctypes.c_float), [_Pointer]),
)  # fmt: skip


def found() -> Path | None:
    """Return libmtmd of the folder of llama.cpp's libraries, None where it has none."""
    try:
        folder = library_folder()
    except BackendUnavailableError:
        return None
    names = sorted(folder.glob("libmtmd*.so")) or sorted(folder.glob("*mtmd.d*"))
    return names[0] if names else None


def encoded(mmproj: Path, text: Path, given: Any, width: int) -> Any:
    """Return the rows [tokens, width] that a file makes of an image [y, x, 3] or of a sound.

    `text` is a model with a vocabulary whose embedding has the width. Raises ArchError for a file
    that is not loaded; what the library does not expect ends the process.
    """
    path = found()
    assert path is not None
    library = Library.open()
    run: Any = ctypes.CDLL(str(path))
    for name, result, arguments in _CALLS:
        getattr(run, name).restype, getattr(run, name).argtypes = result, arguments
    run.mtmd_log_set(ctypes.cast(library._log, _Pointer), None)
    params = run.mtmd_context_params_default()
    assert params.marker == b"<__media__>" and params.threads > 0, "another layout of parameters"
    params.use_gpu, params.flash, params.warmup, params.threads = False, 0, False, 1
    with library.model(text) as loaded:
        context = run.mtmd_init_from_file(str(mmproj).encode(), loaded, params)
        if not context:
            raise ArchError(f"{mmproj}: llama.cpp does not load it: {library.last_errors()}")
        if given.ndim == 3:
            bitmap = run.mtmd_bitmap_init(given.shape[1], given.shape[0], given.tobytes())
        else:
            bitmap = run.mtmd_bitmap_init_from_audio(len(given), given.ctypes.data)
        chunks = run.mtmd_input_chunks_init()
        text_of = Text(params.marker, len(params.marker), False, True)
        asked = run.mtmd_tokenize(context, chunks, text_of, (_Pointer * 1)(bitmap), 1)
        assert asked == 0, library.last_errors()
        rows = []
        for at in range(run.mtmd_input_chunks_size(chunks)):
            chunk = run.mtmd_input_chunks_get(chunks, at)
            if run.mtmd_input_chunk_get_type(chunk) in (IMAGE, AUDIO):
                assert run.mtmd_encode_chunk(context, chunk) == 0, library.last_errors()
                count = run.mtmd_input_chunk_get_n_tokens(chunk)
                made = np.ctypeslib.as_array(run.mtmd_get_output_embd(context), (count, width))
                rows.append(made.copy())
        return np.concatenate(rows)
