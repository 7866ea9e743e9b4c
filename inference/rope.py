"""Rotary frequencies: every scaling that config files and GGUF metadata name.

A *pair* is the two elements of a head that are rotated together, by one frequency.

`inv_freq` is computed in float32 here, for every backend and dtype, as in transformers
(modeling_rope_utils.py). The powers are correctly rounded here; transformers' vectorised ones
differ in the last bit of about one in fifty. The scalings are those of that file too, after the
papers on position interpolation, NTK, YaRN (2309.00071) and LongRoPE (2402.13753), and Llama 3.1's
code.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

F32 = NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RopeFrequencies:
    """Frequencies of one kind of layer: inv_freq [pairs] float32, and the factor on cos and sin."""

    inv_freq: F32
    factor: float

    def equals(self, other: "RopeFrequencies") -> bool:
        """Return whether both give the same rotations, so that cached keys stay valid."""
        return self.factor == other.factor and np.array_equal(self.inv_freq, other.inv_freq)


@dataclass(frozen=True)
class _ScalingInputs:
    """The inputs of a rope scaling; request[key] is a value of its parameters."""

    theta: float
    dim: int
    scaling: Mapping[str, Value]
    context_length: int
    length: int  # positions of the whole sequence so far

    def __getitem__(self, key: str) -> Any:
        """Return a parameter of the scaling; ArchError if it is missing."""
        value = self.scaling.get(key)
        if value is None:
            raise ArchError(
                f"rope scaling {self.scaling.get('type')!r}: {key!r} is missing; found "
                f"{', '.join(self.scaling)}"
            )
        return value

    def periods(self) -> F32:
        """Return theta^(2i/dim) for i < dim/2, float32 [pairs]."""
        return _powers(self.theta, self.dim)


def _powers(base: float, dim: int) -> F32:
    """Return base^(2i/dim) for i < dim/2, float32 [pairs], computed in float64."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers: F32 = (np.float64(base) ** exponents.astype(np.float64)).astype(np.float32)
    return powers


def _inverse(periods: F32) -> F32:
    """Return 1 / periods, in float32."""
    inverse: F32 = np.float32(1) / periods
    return inverse


def _scale_linear(request: _ScalingInputs) -> RopeFrequencies:
    """Return the frequencies divided by the factor (position interpolation)."""
    return RopeFrequencies(_inverse(request.periods()) / np.float32(request["factor"]), 1.0)


def _scale_dynamic(request: _ScalingInputs) -> RopeFrequencies:
    """Return the frequencies of a base raised for a sequence beyond the trained context (NTK)."""
    factor, dim, longest = np.float32(request["factor"]), request.dim, request.context_length
    length = np.float32(max(request.length, longest))
    stretch = factor * length / np.float32(longest) - (factor - np.float32(1))
    power = np.float32(np.float64(stretch) ** (dim / (dim - 2)))
    theta = np.float32(request.theta) * power
    return RopeFrequencies(_inverse(_powers(float(theta), dim)), 1.0)


def _scale_llama3(request: _ScalingInputs) -> RopeFrequencies:
    """Return the frequencies: high ones unchanged, low ones divided by the factor.

    Those between are interpolated.
    """
    inv_freq = _inverse(request.periods())
    factor, low, high = request["factor"], request["low_freq_factor"], request["high_freq_factor"]
    original = request["original_context_length"]
    # PyTorch divides a number by a tensor as the number times 1 / tensor, rounded twice.
    wavelength = np.float32(2 * math.pi) * _inverse(inv_freq)
    turns = np.float32(original) * _inverse(wavelength)
    blend = (turns - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * inv_freq / np.float32(factor) + blend * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / np.float32(factor), blended)
    return RopeFrequencies(
        np.where(wavelength < original / high, inv_freq, scaled).astype(np.float32), 1.0
    )


def _scale_yarn(request: _ScalingInputs) -> RopeFrequencies:
    """Return frequencies: slow pairs' divided by the factor, fast ones' kept, interpolated between.

    The limits are pair numbers, from how often a pair rotates over the original context.
    """
    factor, theta, dim = request["factor"], request.theta, request.dim
    original = request["original_context_length"]

    def pair_number(rotations: float) -> float:
        """Return the number of the pair that rotates this often over the original context."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_number(request["beta_fast"]), pair_number(request["beta_slow"])
    if request["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width)
    kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    periods = request.periods()
    slow = _inverse(np.float32(factor) * periods)
    inv_freq = slow * (np.float32(1) - kept) + _inverse(periods) * kept
    return RopeFrequencies(inv_freq, float(request["attention_factor"]))


def _scale_longrope(request: _ScalingInputs) -> RopeFrequencies:
    """Return each pair's frequency divided by its number in a list of the model.

    It is the long list for sequences beyond the original context, else the short one.
    """
    original = request["original_context_length"]
    divisors = request["long_factor" if request.length > original else "short_factor"]
    inv_freq = _inverse(_check_divisors(divisors, request) * request.periods())
    return RopeFrequencies(inv_freq, float(request["attention_factor"]))


def _scale_by_factors(request: _ScalingInputs) -> RopeFrequencies:
    """Return each pair's frequency divided by its number (GGUF's rope_freqs.weight)."""
    inv_freq = _inverse(request.periods())
    return RopeFrequencies(inv_freq / _check_divisors(request["factors"], request), 1.0)


def _check_divisors(values: Any, request: _ScalingInputs) -> F32:
    """Return a list of numbers as float32 [pairs]; ArchError if there is not one per pair."""
    divisors = np.asarray(values, np.float32)
    if divisors.shape != (request.dim // 2,):
        raise ArchError(
            f"rope scaling {request.scaling.get('type')!r}: {divisors.size} factors for "
            f"{request.dim} rotated elements; expected {request.dim // 2}"
        )
    return divisors


def _scale_proportional(request: _ScalingInputs) -> RopeFrequencies:
    """Return frequencies of a whole head for the first pairs, and zero for the others.

    The first `rotated` elements of the head turn; frequencies are divided by the factor.
    """
    inv_freq = _inverse(request.periods())
    turned = int(request["rotated"]) // 2
    kept = np.arange(len(inv_freq)) < turned
    scaled = np.where(kept, inv_freq, np.float32(0)) / np.float32(request["factor"])
    return RopeFrequencies(scaled.astype(np.float32), 1.0)


SCALINGS: Mapping[str, Callable[[_ScalingInputs], RopeFrequencies]] = {
    "linear": _scale_linear,
    "dynamic": _scale_dynamic,
    "llama3": _scale_llama3,
    "yarn": _scale_yarn,
    "longrope": _scale_longrope,
    "factors": _scale_by_factors,
    "proportional": _scale_proportional,
}
BY_LENGTH = ("dynamic", "longrope")  # scalings whose frequencies depend on the sequence's length


class RopeKind(NamedTuple):
    """The settings by which the rotations of a model's layers differ.

    The base, whether the scaling applies, and the rotated elements of a head, None for `rope_dim`.
    """

    theta: float
    scaled: bool
    dim: int | None = None


def rotation_of_layer(hp: Mapping[str, Value], layer: int) -> RopeKind | None:
    """Return the kind of rotation of a layer (base, scaling, elements); None without rope."""
    if not hp["rope_layers"][layer]:
        return None
    windowed = bool(hp["window_layers"][layer])
    local = hp["rope_theta_local"]
    theta = local if windowed and local is not None else hp["rope_theta"]
    scaled = hp["rope_scaling"] is not None and not (
        windowed and hp["rope_scaling_layers"] == "full"
    )
    other = None if windowed else hp["global_head_dim"]
    return RopeKind(float(theta), scaled, None if other is None else int(other))


def compute_frequencies(hp: Mapping[str, Value], kind: RopeKind, length: int) -> RopeFrequencies:
    """Return the frequencies of a kind of layer for a sequence of `length` positions.

    Raises ArchError for an unknown scaling or for a missing value.
    """
    theta, scaled = kind.theta, kind.scaled
    dim = int(hp["rope_dim"] if kind.dim is None else kind.dim)
    most = max(int(hp["head_dim"]), int(hp["global_head_dim"] or 0))
    if dim % 2 or not 0 < dim <= most:
        raise ArchError(f"rope_dim is {dim}; expected an even number of at most head_dim, {most}")
    if not scaled:
        return RopeFrequencies(_inverse(_powers(theta, dim)), 1.0)
    scaling: Mapping[str, Value] = hp["rope_scaling"]
    name = str(scaling["type"])
    if name not in SCALINGS:
        raise ArchError(
            f"rope scaling {name!r} is not known; expected one of {', '.join(SCALINGS)}"
        )
    return SCALINGS[name](_ScalingInputs(theta, dim, scaling, int(hp["context_length"]), length))


def all_frequencies(hp: Mapping[str, Value], length: int) -> dict[RopeKind, RopeFrequencies]:
    """Return {kind: frequencies} for every kind of rotating layer, for a sequence of `length`."""
    kinds = {rotation_of_layer(hp, layer) for layer in range(int(hp["n_layers"]))} - {None}
    return {kind: compute_frequencies(hp, kind, length) for kind in kinds if kind is not None}


def depends_on_length(hp: Mapping[str, Value]) -> bool:
    """Return whether the frequencies depend on the sequence's length."""
    scaling = hp["rope_scaling"]
    return scaling is not None and scaling["type"] in BY_LENGTH


def keys_stay_valid(hp: Mapping[str, Value], before: int, after: int) -> bool:
    """Return whether keys cached at length `before` can be used at length `after`."""
    if not depends_on_length(hp):
        return True
    old, new = all_frequencies(hp, before), all_frequencies(hp, after)
    return all(new[kind].equals(rope) for kind, rope in old.items())
