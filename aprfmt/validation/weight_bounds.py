"""What statistics of trained weights stay inside, by role: low, high, unit, reason.

Calibrated on models that work: the demo model (Qwen2, BF16), SmolLM2-135M (llama, Q4_1) and
Gemma-3-270M (Q4_K_M).
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bound:
    """What a working model's number stays inside, both ends included."""

    low: float
    high: float
    unit: str
    reason: str

    def holds(self, value: float) -> bool:
        """Say whether a value is inside; NaN never is."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class RoleBounds:
    """Bounds of a kind of tensor: mean, standard deviation, root mean square, largest magnitude.

    None: the number says nothing about tensors of this kind.
    """

    mean: Bound | None = None
    std: Bound | None = None
    rms: Bound | None = None
    absmax: Bound | None = None
    zeros: Bound | None = None


_ZEROS = Bound(0, 0.8, "share of zeros", "a tensor of zeros was never filled")
EMBEDDING = RoleBounds(
    mean=Bound(-1, 1, "weight", "seen: -0.0022 to 0.0001"),
    std=Bound(0.005, 0.5, "weight", "seen: 0.015 to 0.14; BF16 read as F16 gives 1.2"),
    zeros=Bound(0, 0.5, "share of zeros", "half a vocabulary of zeros was never filled"),
)
LINEAR = RoleBounds(
    mean=Bound(-0.1, 0.1, "weight", "seen: -0.002 to 0.002"),
    std=Bound(1e-3, 1.0, "weight", "seen: 0.012 to 0.40; BF16 read as F16 gives 1.2"),
    zeros=_ZEROS,
)
NORM = RoleBounds(
    rms=Bound(0.01, 100, "weight", "seen: 0.03 to 7.5, gemma's own row aside"),
    zeros=_ZEROS,
)
# Biases may be as large as they like: Qwen's reach 128, with a deviation of 29 on keys.
BIAS = RoleBounds(absmax=Bound(0, 1e4, "weight", "seen: up to 128 in Qwen2.5"))

# Kind of a role by its last words; the first that fits.
KINDS: tuple[tuple[str, RoleBounds], ...] = (
    ("bias", BIAS),
    ("attn_sinks", BIAS),
    ("norm", NORM),
    ("token_embd", EMBEDDING),
    ("position_embd", EMBEDDING),
    ("", LINEAR),
)
_GEMMA_NORM = RoleBounds(
    rms=Bound(0.01, 5000, "weight", "Gemma-3-270M: up to 376 in post_ffw_norm"), zeros=_ZEROS
)
# architecture -> word of a role -> bounds that replace the kind's.
BY_ARCH: Mapping[str, Mapping[str, RoleBounds]] = {
    "gemma": {"norm": _GEMMA_NORM},
    "gemma2": {"norm": _GEMMA_NORM},
    "gemma3": {"norm": _GEMMA_NORM},
}


def role_bounds(arch: str, role: str) -> RoleBounds:
    """Return the bounds of a role: the architecture's own row, else the kind's."""
    own = BY_ARCH.get(arch, {})
    for word, bounds in KINDS:
        if word in role:
            return own.get(word, bounds)
    raise AssertionError("the last kind fits every role")
