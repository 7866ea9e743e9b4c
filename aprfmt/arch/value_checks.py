"""Checks of configuration values from JSON or GGUF; each returns the value or raises ArchError."""

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from reprlib import repr as short_repr
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Value
from aprfmt.errors import ArchError

if TYPE_CHECKING:
    from aprfmt.arch.spec import Facts

MAX_SIZE = (1 << 31) - 1
MAX_LAYERS = 1 << 12  # per-layer lists are built from the layer count
MAX_ROTATED = 1 << 16  # lists with one number per rotated pair have at most half this length


def whole_number(value: Value, key: str, low: int = 0, high: int = MAX_SIZE) -> int:
    """Return an integer between the bounds (12.0 counts as one); ArchError otherwise.

    `key` names the value in the message.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not low <= value <= high:
        raise ArchError(f"{key}: is {short_repr(value)}; expected a whole number, {low} to {high}")
    return value


def finite_number(value: Value, key: str) -> float:
    """Return a finite number as float; ArchError, naming `key`, otherwise."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if math.isfinite(found):
            return found
    raise ArchError(f"{key}: is {short_repr(value)}; expected a finite number")


def positive_number(value: Value, key: str) -> float:
    """Return a number above zero as float; ArchError, naming `key`, otherwise."""
    found = finite_number(value, key)
    if found <= 0:
        raise ArchError(f"{key}: is {short_repr(value)}; expected a number above zero")
    return found


def boolean(value: Value, key: str) -> bool:
    """Return `value` if it is a bool; ArchError, naming `key`, otherwise."""
    if not isinstance(value, bool):
        raise ArchError(f"{key}: is {short_repr(value)}; expected true or false")
    return value


def text(value: Value, key: str) -> str:
    """Return `value` if it is a str; ArchError, naming `key`, otherwise."""
    if not isinstance(value, str):
        raise ArchError(f"{key}: is {short_repr(value)}; expected a name")
    return value


def sequence(value: Value, key: str, at_least: int = 0) -> Sequence[Value]:
    """Return `value` if it is a list or GGUF array of `at_least` entries; ArchError otherwise."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence):
        raise ArchError(f"{key}: is {short_repr(value)}; expected a list")
    if len(value) < at_least:
        raise ArchError(f"{key}: has {len(value)} entries; expected {at_least}")
    return value


def divisors(value: Value, key: str) -> tuple[float, ...]:
    """Return a list of numbers above zero (divisors of frequencies); ArchError otherwise."""
    return tuple(positive_number(item, key) for item in sequence(value, key, 1))


def nearest_float32(value: float) -> float:
    """Return the float32 nearest to a number, an infinity where it is too large."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded


def shortest_decimal(value: float) -> float:
    """Return the number with the fewest digits that rounds to the same float32.

    GGUF keeps 1e-6 as the float32 9.99999997e-07; this gives 1e-6 back, so that equal models
    have equal hyperparameters in every format. A number that is not a float32 is returned as given.
    """
    if not math.isfinite(value) or nearest_float32(value) != value:
        return value
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if nearest_float32(candidate) == value:
            return candidate
    return value


def inverse(value: float, key: str) -> float:
    """Return 1/value, or a neighbouring float whose inverse is exactly `value`, if there is one.

    ArchError, naming `key`, for 0.
    """
    value = finite_number(value, key)
    if value == 0:
        raise ArchError(f"{key}: is 0; expected a divisor")
    quotient = finite_number(1 / value, key)
    for candidate in (
        float(f"{quotient:.12g}"),
        quotient,
        math.nextafter(quotient, 0),
        math.nextafter(quotient, math.inf),
    ):
        if candidate and 1 / candidate == value:
            return candidate
    return quotient


def same_value(a: Value, b: Value) -> bool:
    """Return whether two values are equal, floats up to float32 rounding (2^-23 relative).

    True is not 1: formats keep booleans and numbers apart, and no rule takes one for the other.
    """
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=2.0**-23, abs_tol=0.0)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same_value(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


DERIVED = 1e-5  # relative distance of values that converters compute in float32


def same_derived_values(a: Sequence[float] | None, b: Sequence[float] | None) -> bool:
    """Return whether two lists of divisors or the like are equal up to float32 rounding.

    Converters compute them in float32. None equals only None.
    """
    if a is None or b is None:
        return a is b
    pairs = zip(a, b, strict=False)
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=DERIVED) for x, y in pairs)


def object_under(facts: "Facts", key: str) -> Mapping[str, Value]:
    """Return the object that config.json has under `key`; {} without the key.

    Raises ArchError for a value that is no object.
    """
    found = facts.first(key)
    if found is None:
        return {}
    if not isinstance(found[0], Mapping):
        raise ArchError(f"{found[1]}: is {short_repr(found[0])}; expected an object")
    return found[0]


def listed_kinds(value: Value, key: str, layers: int, known: Collection[Value]) -> list[Value]:
    """Return the kinds of the first `layers` layers, which config.json lists under `key`.

    Raises ArchError for a list of fewer, and for a kind that is not among `known`.
    """
    kinds = list(sequence(value, key, layers)[:layers])
    every = tuple(known)  # a kind may be a list, which no mapping can be asked for
    for layer, kind in enumerate(kinds):
        if kind not in every:
            raise ArchError(
                f"{key}: layer {layer} is {short_repr(kind)}; the layers of this architecture are "
                f"one of: {', '.join(map(str, every))}"
            )
    return kinds
