"""Compares what hyperparameters result in: rope frequencies, masks, activations, scales.

A and B are the two models, runs or traces that are compared; a *side* is one of them.

Two files may spell one computation in two ways: a window no smaller than the context, a scaling by
1, a base that no layer uses. What a pass computes with is compared here up to the context length,
without a pass: equal quantities are a proof, other ones say from which position on they differ.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aprfmt.arch.value_checks import same_value
from aprfmt.base.protocols import Value
from aprfmt.errors import AprfmtError
from aprfmt.inference.backends.numpy_backend import ACTIVATIONS
from aprfmt.inference.rope import BY_LENGTH, compute_frequencies, rotation_of_layer

ByName = Mapping[str, Value]
ROUNDED = 1e-6  # some roundings of float32: two ways to compute one frequency
STEP = 4096  # points at which an activation is compared, and
REACH = 12.0  # how far from zero


@dataclass(frozen=True)
class Quantity:
    """The comparison of one quantity that two models' passes compute with, such as a mask.

    `says` is a sentence, `where` are layers. `position` is the first token position at which it
    differs (0: already the first token), None where it is equal.
    """

    name: str
    says: str
    position: int | None
    where: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether both sides compute with the same numbers."""
        return self.position is None

    @property
    def length(self) -> int:
        """The number of tokens that a pass needs to reach the difference; 0 if there is none."""
        return 0 if self.position is None else self.position + 1


def compare_quantity(name: str, a: ByName, b: ByName, *, rotates: bool = True) -> Quantity | None:
    """Return the comparison of what a hyperparameter results in, such as rope's frequencies.

    None if no row of TABLE covers it, or its value is one that no pass could use. `rotates`: the
    architecture has rope.
    """
    for names, row in TABLE:
        if name in names:
            if row is compare_frequencies and not rotates:
                return Quantity("inverse frequencies", "nothing is rotated", None)
            try:
                return row(a, b)
            except (AprfmtError, TypeError, ValueError, ZeroDivisionError, OverflowError):
                return None  # a value that no pass could use either
    return None


def longest_context(a: ByName, b: ByName) -> int:
    """Return the longer of both context lengths, up to which quantities are compared."""
    return max(int(a["context_length"]), int(b["context_length"]))


# --- rope ----------------------------------------------------------------------------------------


def compare_frequencies(a: ByName, b: ByName) -> Quantity:
    """Return the comparison of rope's inverse frequencies in every layer at every length."""
    # For each layer the first length at which the frequencies differ.
    longest = longest_context(a, b)
    found: dict[int, list[int]] = {}
    worst = 0.0
    for layer in range(int(a["n_layers"])):
        for length in _critical_lengths(a, b, longest):
            apart = _frequency_distance(a, b, layer, length)
            if apart > ROUNDED:
                worst = max(worst, apart)
                # Rope leaves position 0 as it is, unless its factor differs.
                position = max(length - 1, 0 if math.isinf(apart) else 1)
                found.setdefault(position, []).append(layer)
                break
    if not found:
        return Quantity(
            "inverse frequencies",
            f"the inverse frequencies of all layers are equal up to the context of {longest}",
            None,
        )
    # Report the layers that differ first.
    first = min(found)
    layers = tuple(f"L{layer}" for layer in found[first])
    size = "in kind or factor" if math.isinf(worst) else f"by {worst:.3g} of their size at most"
    return Quantity(
        "inverse frequencies",
        f"the inverse frequencies differ {size}, in {_layer_count_text(layers)} and "
        f"for {'any sequence' if first < 2 else f'sequences of more than {first} tokens'}",
        first,
        layers,
    )


def _critical_lengths(a: ByName, b: ByName, longest: int) -> list[int]:
    """Return the sequence lengths at which to compare two models' rope frequencies, ascending.

    They are 1, `longest`, and one more than each context length at which a scaling that depends on
    the length changes. No length is above `longest`.
    """
    found = {1}
    for hp in (a, b):
        scaling = hp["rope_scaling"]
        if scaling is not None and scaling["type"] in BY_LENGTH:
            found |= {int(hp["context_length"]) + 1, longest}
            original = scaling.get("original_context_length")
            if original is not None:
                found.add(int(original) + 1)
    return sorted(length for length in found if 0 < length <= max(longest, 1))


def _frequency_distance(a: ByName, b: ByName, layer: int, length: int) -> float:
    """Return the largest relative difference of a layer's rope frequencies at a sequence length.

    Infinite if only one model rotates there, or their factors or numbers of pairs differ.
    """
    kinds = [rotation_of_layer(hp, layer) for hp in (a, b)]
    if kinds[0] is None or kinds[1] is None:
        return 0.0 if kinds[0] is kinds[1] else math.inf
    x, y = compute_frequencies(a, kinds[0], length), compute_frequencies(b, kinds[1], length)
    if x.inv_freq.shape != y.inv_freq.shape or not same_value(x.factor, y.factor):
        return math.inf
    apart = np.abs(x.inv_freq - y.inv_freq)
    with np.errstate(divide="ignore"):  # a pair that turns in one model only is infinitely far
        return float(np.max(np.divide(apart, np.abs(x.inv_freq), out=apart, where=apart > 0)))


# --- masks ---------------------------------------------------------------------------------------


def compare_masks(a: ByName, b: ByName) -> Quantity:
    """Return the comparison of how many tokens back attention sees, layer by layer.

    Windows that are larger than the context are equal.
    """
    longest = longest_context(a, b)
    reach = [_window_of_layers(hp, longest) for hp in (a, b)]
    apart = [i for i, pair in enumerate(zip(*reach, strict=True)) if pair[0] != pair[1]]
    if not apart:
        return Quantity(
            "masks", f"the masks of all layers are equal up to the context of {longest}", None
        )
    # The token at position w is the first that a window of w tokens keeps from seeing token 0.
    first = min(min(reach[0][i], reach[1][i]) for i in apart)
    layers = tuple(f"L{i}" for i in apart)
    return Quantity(
        "masks",
        f"the masks differ in {_layer_count_text(layers)}, from position {first} on",
        first,
        layers,
    )


def _window_of_layers(hp: ByName, longest: int) -> list[int]:
    """Return how many tokens back each layer attends, at most `longest`."""
    window = hp["sliding_window"]
    size = longest if window is None else min(int(window), longest)
    return [size if windowed else longest for windowed in hp["window_layers"]]


# --- functions and factors -----------------------------------------------------------------------


def compare_activations(a: ByName, b: ByName) -> Quantity:
    """Return the comparison of the two activation functions, at 8193 points, and their clamps."""
    x = np.linspace(-REACH, REACH, 2 * STEP + 1, dtype=np.float32)
    names = [str(hp["activation"]) for hp in (a, b)]
    first, second = (ACTIVATIONS[name](x.copy()) for name in names)
    apart = np.abs(first - second)
    at = int(np.argmax(apart))
    other = [hp[key] for key in ("swiglu_limit", "swiglu_alpha") for hp in (a, b)]
    clamps = same_value(other[0], other[1]) and same_value(other[2], other[3])
    if not apart[at] and clamps:
        return Quantity("activation", f"{names[0]} and {names[1]} are one function", None)
    says = f"{names[0]} and {names[1]} differ by up to {apart[at]:.3g}, at {x[at]:.3g}"
    return Quantity("activation", says if apart[at] else "the clamps of the gate differ", 0)


def compare_score_scales(a: ByName, b: ByName) -> Quantity:
    """Return the comparison, layer by layer, of the factor of the attention scores."""
    rows = [_score_scales(hp) for hp in (a, b)]
    apart = [
        i for i, pair in enumerate(zip(*rows, strict=True)) if not math.isclose(*pair, rel_tol=1e-7)
    ]
    if not apart:
        return Quantity("attention scale", "the factor on the scores is equal in all layers", None)
    i = apart[0]
    return Quantity(
        "attention scale",
        f"scores are multiplied by {rows[0][i]:.6g} in A, {rows[1][i]:.6g} in B (layer {i})",
        0,
        tuple(f"L{i}" for i in apart),
    )


def _score_scales(hp: ByName) -> Sequence[float]:
    """Return the factor of the attention scores of every layer."""
    own = float(hp["attn_scale"])
    return [own / (i + 1 if hp["attn_scale_by_layer"] else 1) for i in range(int(hp["n_layers"]))]


def compare_routing(a: ByName, b: ByName) -> Quantity | None:
    """Return the Quantity that routing is equal if no model has experts; else None.

    Only passes tell whether two models with experts route alike.
    """
    if not a["n_experts"] and not b["n_experts"]:
        return Quantity("routing", "no layer routes to experts", None)
    return None


def _layer_count_text(layers: Iterable[str]) -> str:
    """Return how many layers there are and the first one's name, such as "2 layers (L0, ...)"."""
    names = list(layers)
    more = ", ..." if len(names) > 1 else ""
    return f"{len(names)} layer{'s' if more else ''} ({names[0]}{more})"


TABLE: tuple[tuple[tuple[str, ...], Callable[[ByName, ByName], Quantity | None]], ...] = (
    (("rope_theta", "rope_theta_local", "rope_scaling", "rope_scaling_layers", "rope_layers",
      "context_length"), compare_frequencies),
    (("sliding_window", "window_layers"), compare_masks),
    (("activation",), compare_activations),
    (("attn_scale", "attn_scale_by_layer"), compare_score_scales),
    (("n_experts_used", "norm_topk", "routed_scale", "n_expert_groups", "n_expert_groups_used",
      "router"), compare_routing),
)  # fmt: skip
