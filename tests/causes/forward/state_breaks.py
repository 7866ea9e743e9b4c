"""Seeded faults of `aprfmt/causes/forward/state_breaks.py`.

Seen red: without the hypotheses these are placed, and not named.
"""

from typing import Any

import numpy as np

from tests.diagnosis.engines import broken
from tests.diagnosis.making import engine
from tests.model_values import IDS

CHUNK, PLACES = 5, (4, 11, 13)


def _begin_anew(starts: tuple[int, ...]) -> Any:
    """Return an operation on rows and a state that loses the state at some tokens."""

    def change(op: Any, *given: Any) -> Any:
        *rows, state = given
        read = []
        for token in range(len(rows[0])):  # token by token, as in decoding
            here = None if token in starts else state
            each, state = op(*(x[token : token + 1] for x in rows), here)
            read.append(each)
        return np.concatenate(read), state

    return change


def _chunked(op: Any, x: Any, step: Any, rate: Any, b: Any, c: Any, skip: Any, state: Any) -> Any:
    """Scan in chunks that do not hand their state on."""
    parts = [slice(at, at + CHUNK) for at in range(0, len(x), CHUNK)]
    read = [op(x[s], step[s], rate, b[s], c[s], skip, None) for s in parts]
    return np.concatenate([each for each, _ in read]), read[-1][1]


def _short(op: Any, window: Any, kernel: Any, *bias: Any) -> Any:
    """Convolve chunks that each begin with zeros."""
    back = kernel.shape[1] - 1
    found = []
    for at in range(0, len(window) - back, CHUNK):
        rows = np.array(window[at : at + CHUNK + back])
        rows[:back] = 0
        found.append(op(rows, kernel, *bias))
    return np.concatenate(found)


ENGINE_FAULTS = (
    engine("mamba2-chunks", "mamba2", f"the state lost at every chunk of {CHUNK}", "ssm_state",
           "ssm_state", backend=lambda: broken("scan", _chunked)),
    engine("qwen3-next-breaks", "qwen3_next", f"the state lost at tokens {PLACES}", "ssm_state",
           "delta", fine=True, backend=lambda: broken("delta", _begin_anew(PLACES))),
    engine("lfm2-chunks", "lfm2", f"the convolution begun anew at every chunk of {CHUNK}",
           "conv_state", "shortconv", fine=True, backend=lambda: broken("convolve", _short)),
)  # fmt: skip
assert len(IDS) > 2 * CHUNK
