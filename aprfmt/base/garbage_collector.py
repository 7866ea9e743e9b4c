"""Pause the collector of cyclic garbage where its walks cost much or what it frees does harm."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
    """Disable the cyclic garbage collector inside the `with`; reference counting goes on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
