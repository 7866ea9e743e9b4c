"""Tests that need llama.cpp's libraries: CONTRIBUTING.md names a package of them.

APRFMT_LLAMA_CPP=FOLDER python -m pytest -m llama_cpp
"""

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from aprfmt.errors import BackendUnavailableError
from aprfmt.inference.engines.llama_library import library_folder

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
