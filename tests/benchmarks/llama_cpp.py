"""llama.cpp for a speed comparison: 1024 tokens on the CPU, its own choice in all but that.

The library is loaded, and its layout checked, by aprfmt.inference.engines.llama_library; a package
that holds it is named in docs/notes/optional_tests.md.
"""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from aprfmt.inference.engines.llama_library import Library, LlamaBatch

TOKENS = 1024


class LlamaCpp:
    """A model and a context that keeps what it was given; `folder` holds the libraries."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        self._library = Library.open(folder)
        self._open = ExitStack()
        loaded = self._open.enter_context(self._library.model(model))
        self._vocab = self._library.vocab_size(loaded)
        self._context = self._open.enter_context(
            self._library.context(loaded, TOKENS, threads, exact=False)
        )

    def run(self, ids: Sequence[int]) -> float:
        """Run tokens behind those so far; return the first logit of the last one."""
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        batch = LlamaBatch(
            n_tokens=len(ids), token=tokens
        )  # positions follow, the last row is wanted
        if self._library.llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama.cpp refuses {len(ids)} tokens")
        return float(self._library.logits(self._context, -1, self._vocab)[0])

    def clear(self) -> None:
        """Forget all tokens."""
        self._library.clear(self._context)
