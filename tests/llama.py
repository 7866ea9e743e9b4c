"""Tests that need llama.cpp's libraries: docs/notes/optional_tests.md names a package of them.

APRFMT_LLAMA_CPP=FOLDER python -m pytest -m llama_cpp
"""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.engines.llama_library import Library, library_folder
from tests.arch.mtmd import found

F = TypeVar("F", bound=Callable[..., Any])


def named() -> bool:
    """Say whether a library is named or installed; one that is and does not work is a failure."""
    try:
        library_folder()
    except BackendUnavailableError:
        return False
    return True


def needs_llama(test: F) -> F:
    """Mark a test as one of llama.cpp's; NOT-RUN without its libraries."""
    absent = pytest.mark.skipif(
        not named(),
        reason="NOT-RUN: APRFMT_LLAMA_CPP names no folder with llama.cpp's libraries, and "
        "llama-cpp-python is not installed",
    )
    marked: F = pytest.mark.llama_cpp(absent(test))
    return marked


def needs_mtmd(test: F) -> F:
    """Mark a test of towers; NOT-RUN where llama.cpp's libraries are without libmtmd."""
    absent = pytest.mark.skipif(
        found() is None,
        reason="NOT-RUN: APRFMT_LLAMA_CPP names no folder with libmtmd beside libllama",
    )
    marked: F = pytest.mark.llama_cpp(absent(test))
    return marked


def tokenized(library: Library, model: int, text: str) -> tuple[list[int], int | None]:
    """Return llama.cpp's own tokens of a text, and the BOS it adds (None: it adds none)."""
    import ctypes

    llama = library.llama
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    for name, result, arguments in (
        ("llama_vocab_get_add_bos", ctypes.c_bool, [pointer]),
        ("llama_vocab_bos", number, [pointer]),
        (
            "llama_tokenize",
            number,
            [
                pointer,
                ctypes.c_char_p,
                number,
                ctypes.POINTER(number),
                number,
                ctypes.c_bool,
                ctypes.c_bool,
            ],
        ),
    ):
        getattr(llama, name).restype, getattr(llama, name).argtypes = result, arguments
    vocab = llama.llama_model_get_vocab(model)
    raw, room = text.encode(), (number * (len(text.encode()) + 8))()
    count = llama.llama_tokenize(vocab, raw, len(raw), room, len(room), True, False)
    assert count > 0
    added = llama.llama_vocab_get_add_bos(vocab)
    return list(room[:count]), int(llama.llama_vocab_bos(vocab)) if added else None
