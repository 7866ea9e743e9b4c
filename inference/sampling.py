"""Chooses the next token: greedy, or at random with temperature, top-k, top-p and a seed."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aprfmt.errors import AprfmtError, UsageError

Logits = NDArray[Any]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0 and top_p 1 exclude no token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise UsageError for values outside their range."""
        warm = 0 <= self.temperature < np.inf
        if not (warm and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise UsageError(
                f"temperature {self.temperature}, top-k {self.top_k}, top-p {self.top_p}; "
                "expected temperature (a number) and top-k not negative, top-p above 0 and at most "
                "1"
            )
        if self.seed < 0:
            raise UsageError(f"seed {self.seed}; expected a number not negative")


class DeviceLogits(Protocol):
    """Logits on a device: `greedy` gives the likeliest token without copying all logits."""

    def argmax_or_none(self) -> int | None:
        """Return the first index of the highest logit; None if a logit is NaN."""
        ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Logits:
        """Return the logits copied to the host."""


class Sampler:
    """Draws tokens one after the other; equal seeds and logits give equal tokens."""

    def __init__(self, sampling: Sampling) -> None:
        """Take the settings, and seed the generator of random numbers."""
        self.sampling = sampling
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def __call__(self, logits: "Logits | DeviceLogits") -> int:
        """Return the next token for logits [vocab], the highest where the temperature is 0.

        Raises AprfmtError if a logit is NaN or infinity, or all are minus infinity.
        """
        if self.sampling.temperature == 0 and not isinstance(logits, np.ndarray):
            best = logits.argmax_or_none()
            if best is not None:
                return best
        logits = np.asarray(logits)
        bad = np.isnan(logits) | (logits == np.inf)
        if bad.any() or logits.max() == -np.inf:
            nans = int(np.isnan(logits).sum())
            raise AprfmtError(
                f"logits hold {nans} NaN and {int(np.isinf(logits).sum())} infinities of "
                f"{logits.size}; trace the model to find where they begin"
            )
        if self.sampling.temperature == 0:
            return int(np.argmax(logits))
        ids, probs = token_probabilities(logits, self.sampling)
        edges = np.cumsum(probs)
        draw = self._random.random() * edges[-1]
        return int(ids[min(int(np.searchsorted(edges, draw, side="right")), len(ids) - 1)])


def token_probabilities(logits: Logits, sampling: Sampling) -> tuple[NDArray[np.int64], Logits]:
    """Return (tokens that may be drawn, likeliest first; their probabilities, which sum to 1).

    They are computed from logits [vocab]. Applied in this order: temperature; the top_k highest;
    the fewest tokens whose probabilities reach top_p together. The remaining probabilities are
    renormalised.
    """
    wide = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature keeps only the highest
        scaled = (wide - wide.max()) / sampling.temperature
    ids = np.argsort(-scaled, kind="stable")
    if sampling.top_k:
        ids = ids[: sampling.top_k]
    probs = np.exp(scaled[ids])
    probs /= probs.sum()
    if sampling.top_p < 1:
        kept = int(np.searchsorted(np.cumsum(probs), sampling.top_p)) + 1
        ids, probs = ids[:kept], probs[:kept]
        probs = probs / probs.sum()
    return ids, probs
