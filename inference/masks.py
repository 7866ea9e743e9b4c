"""Which keys a query may see: one table [tokens, keys] of booleans for the layers of a pass."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
Causal = tuple[int, int | None]  # (cached, window), from which `causal_mask` follows


@lru_cache(maxsize=2)  # the layers of a pass use at most two
def causal_mask(cached: int, tokens: int, keys: int, window: int | None) -> Mask:
    """Return the mask [tokens, keys]: True where key j may be seen by token i.

    Token i is at position cached + i and sees keys up to it, with a window of w the last w of
    them, itself included; None means no window.
    """
    query = np.arange(cached, cached + tokens)[:, None]
    key = np.arange(keys)
    seen: Mask = key <= query
    return seen if window is None else seen & (key > query - window)


@lru_cache(maxsize=2)
def chunk_mask(cached: int, tokens: int, keys: int, chunk: int) -> Mask:
    """Return the mask [tokens, keys] of chunked attention: earlier keys of the token's own chunk.

    A *chunk* is `chunk` positions, counted from position 0. Token i is at position cached + i.
    """
    query = np.arange(cached, cached + tokens)[:, None]
    begins = query // chunk * chunk
    seen: Mask = causal_mask(cached, tokens, keys, None) & (np.arange(keys) >= begins)
    return seen


@lru_cache(maxsize=2)
def window_mask(tokens: int, window: int | None) -> Mask:
    """Return the mask [tokens, tokens]: True for keys at most half a window before or after.

    Without a window all is True.
    """
    places = np.arange(tokens)
    apart = np.abs(places[:, None] - places)
    seen: Mask = apart <= (tokens if window is None else window // 2)
    return seen


@lru_cache(maxsize=2)
def ended_windows_mask(cached: int, tokens: int, windows: int, rate: int) -> Mask:
    """Return the mask [tokens, windows]: True where window j of `rate` positions has ended.

    It ends with position (j + 1) * rate - 1, which may be token i's own; token i is at position
    cached + i.
    """
    ended = (np.arange(cached, cached + tokens) + 1) // rate
    seen: Mask = np.arange(windows) < ended[:, None]
    return seen
