"""The type `Dialect`, one way of storing a packed weight in several tensors, and its readers.

A *part* is one of the tensors that a weight is stored as, named by its suffix; the *main part*
holds the codes.

A dialect is a row: which stored names make one weight, which facts of config.json it needs, and how
the numbers come out. Nothing is read here: whoever joins tensors hands in `Part`s. Results are
float32 products rounded once; the libraries round them again, to the dtype of the scales.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aprfmt.base.encodings import ENCODINGS
from aprfmt.codecs import decode, fp8
from aprfmt.codecs.base import U8, Array, Bytes, check_length
from aprfmt.codecs.minifloat import MinifloatCodec
from aprfmt.codecs.weight_layout import GroupNumbers, WeightLayout, as_group_numbers
from aprfmt.errors import CodecError, MissingPartError

# one byte a number: what it is by its encoding; plain bytes are powers of two
SMALL: Mapping[str, MinifloatCodec] = {
    "U8": fp8.E8M0,
    **{kind.name: kind for kind in (fp8.E8M0, *fp8.OF_TWO_SIGNS)},
}

# The end of the name of a part that scales what goes into a layer, and no value of its weight.
OF_INPUTS = re.compile(r"(input_|activation_|act_per_tensor_|act_quant_)\w+$")
# The names of one number, the scale of what goes in, and whether a tool divides by it: the NVFP4 of
# compressed-tensors stores 448 * 6 / amax, ModelOpt amax / (448 * 6).
INPUT_SCALES: Mapping[str, bool] = {
    "input_scale": False, "activation_scale": False, "input_global_scale": True,
}  # fmt: skip

Config: TypeAlias = Mapping[str, Any]  # the quantization section of config.json


class StoredPart(NamedTuple):
    """A stored tensor: its bytes, its encoding as the file names it, its shape."""

    raw: Bytes
    encoding: str
    shape: tuple[int, ...]


Parts: TypeAlias = Mapping[str, StoredPart]


class CodeTable(NamedTuple):
    """The bits of a code, and the number that every pattern of these bits stands for.

    A value is its code's number times a scale, plus something; a pattern that is no number is NaN.
    """

    bits: int
    values: Array  # float [2**bits]


@dataclass(frozen=True)
class Dialect:
    """One way of storing a weight PREFIX + `weight` in several tensors.

    `main` is the suffix of the tensor that holds the codes; `parts` are the suffixes that must
    exist with it, `optional` those that may. `facts` are the keys of the configuration that
    decoding needs. `recognises(config)` is true where the configuration names this dialect.
    `shape_of` and `laid_out` (with the shape) take parts by suffix and raise CodecError where they
    do not fit; `codes` gives the number of each code of the main part, which bounds what a copy may
    be off by. `coded` are the encodings of a main part that mean nothing without the others; it is
    for dialects whose main part has the weight's own name, and may be a weight that is not
    quantized. `called` has other suffixes of a part. An empty `main` is a tensor whose name does
    not end in `.weight`. Scales of a `signed` dialect may be negative.
    """

    name: str
    main: str
    weight: str
    parts: tuple[str, ...]
    optional: tuple[str, ...]
    facts: tuple[str, ...]
    recognises: Callable[[Config], bool]
    shape_of: Callable[[Parts, Config], tuple[int, ...]]
    laid_out: "Callable[[Parts, Config, tuple[int, ...]], WeightLayout]"
    codes: Callable[[Parts, Config], CodeTable] | None = None
    coded: tuple[str, ...] = ()
    called: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    signed: bool = False

    def prefix_of(self, name: str) -> str | None:
        """Return a tensor's name without the main part's suffix; None if it lacks the suffix.

        Where the main part has no suffix the whole name is the prefix, unless it ends in ".weight".
        """
        if self.main:
            return name.removesuffix(self.main) if name.endswith(self.main) else None
        return None if name.endswith(".weight") else name

    def stored(self, prefix: str, part: str, names: Container[str]) -> str | None:
        """Return the name, among `names`, of the part with suffix `part`; None if it is missing.

        `prefix` is the weight's name before the suffix. Other spellings of the suffix count too.
        """
        spellings = (part, *self.called.get(part, ()))
        return next((prefix + one for one in spellings if prefix + one in names), None)

    def packs(self, encoding: str) -> bool:
        """Return whether a tensor named like the main part, in this encoding, must hold codes.

        False where it may as well be a plain weight of that name.
        """
        return self.main != self.weight or encoding in self.coded


def whole_numbers(bits: int, *, signed: bool = False) -> CodeTable:
    """Return the table of codes that are integers of `bits` bits.

    `signed` codes are two's complement; others count from 0.
    """
    values = np.arange(1 << bits, dtype=np.float64)
    if signed:
        values[1 << bits - 1 :] -= 1 << bits
    return CodeTable(bits, values)


def required_part(name: str, parts: Parts, suffix: str) -> StoredPart:
    """Return the part `suffix`; MissingPartError if it is not there.

    `name` is the dialect, named in the error.
    """
    if suffix not in parts:
        text = f"{name}: part {suffix!r} is missing; found {', '.join(parts)}"
        raise MissingPartError(text, (suffix,))
    return parts[suffix]


def part_array(name: str, parts: Parts, suffix: str, encodings: Sequence[str] = ()) -> Array:
    """Return a part as an array of its shape: float32 for floats, its own dtype for integers.

    `encodings` are those the dialect allows there. Raises CodecError for another one, or for
    bytes that do not fit the shape.
    """
    part = required_part(name, parts, suffix)
    if encodings and part.encoding not in encodings:
        raise CodecError(
            f"{name}: part {suffix!r} is {part.encoding}, expected {' or '.join(encodings)}"
        )
    try:
        return decode(part.encoding, part.raw, part.shape)
    except CodecError as error:
        raise CodecError(f"{name}: part {suffix!r}: {error}") from error


def part_raw(name: str, parts: Parts, suffix: str, encodings: Sequence[str]) -> U8:
    """Return a part's bytes, uint8 [bytes]; CodecError for another encoding or a wrong length."""
    part = required_part(name, parts, suffix)
    if part.encoding not in encodings:
        raise CodecError(
            f"{name}: part {suffix!r} is {part.encoding}, expected {' or '.join(encodings)}"
        )
    held: U8 = np.frombuffer(part.raw, np.uint8) if len(part.raw) else np.empty(0, np.uint8)
    expected = ENCODINGS[part.encoding].nbytes(part.shape)
    check_length(f"{name}: part {suffix!r}", held.size, expected, f"a shape of {list(part.shape)}")
    return held


def part_words(name: str, parts: Parts, suffix: str, encodings: Sequence[str]) -> Array:
    """Return the part `suffix` of 32-bit integers as uint32 of its stored shape.

    `encodings` are those it may have, `name` begins messages. Raises CodecError for another
    encoding, or for bytes that do not fit the shape.
    """
    held: Array = part_raw(name, parts, suffix, encodings).view("<u4")
    return held.reshape(parts[suffix].shape)


def part_scales(name: str, parts: Parts, suffix: str, encodings: Sequence[str]) -> Array:
    """Return scales as float32 of their part's shape; bytes and E8M0 are read as powers of two.

    `suffix` names the part, `encodings` are those it may have, `name` begins messages. Raises
    CodecError also for scales that are NaN, infinite or negative.
    """
    found = part_scale_numbers(name, parts, suffix, encodings)
    scale: Array = found.array if found.table is None else found.table[0][found.array]
    return scale


def part_scale_numbers(
    name: str, parts: Parts, suffix: str, encodings: Sequence[str]
) -> GroupNumbers:
    """Return scales of their part's shape: floats, or bytes with a table of the bytes' values.

    `suffix` names the part, `encodings` are those it may have, `name` begins messages. Raises
    CodecError for another encoding, and for scales that are NaN, infinite or negative.
    """
    part = required_part(name, parts, suffix)
    kind = SMALL.get(part.encoding)
    if kind is None or (encodings and part.encoding not in encodings):
        return as_group_numbers(
            part_array(name, parts, suffix, encodings), None, f"{name}: part {suffix!r}"
        )
    stored = part_raw(name, parts, suffix, (part.encoding,)).reshape(part.shape)
    return as_group_numbers(stored, kind.values, f"{name}: part {suffix!r}")


def part_numbers(name: str, parts: Parts, suffix: str, encodings: Sequence[str]) -> Array:
    """Return scales or offsets as float32 of their part's shape; they may be negative.

    Those of MLX and AutoRound are. `suffix` names the part, `encodings` are those it may have,
    `name` begins messages. Raises CodecError for a NaN or an infinity.
    """
    found = part_array(name, parts, suffix, encodings)
    if found.size and not (np.isfinite(found.min()) and np.isfinite(found.max())):
        at = [int(index) for index in np.argwhere(~np.isfinite(found))[0]]
        raise CodecError(
            f"{name}: part {suffix!r} holds {found[tuple(at)]} at {at}, expected scales that are "
            "finite"
        )
    return found


def config_integer(
    name: str, config: Config, key: str, allowed: Sequence[int], default: Any = None
) -> int:
    """Return an integer of the configuration; CodecError unless it is one of `allowed`."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
        one_of = " or ".join(map(str, allowed)) if not isinstance(allowed, range) else ""
        shown = f"{allowed.start} to {allowed.stop - 1}" if isinstance(allowed, range) else one_of
        raise CodecError(f"{name}: config says {key} {value!r}, expected {shown}")
    return value


def check_shape(name: str, suffix: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Raise CodecError unless the part `suffix` has the shape that follows from the others.

    `found` is its shape and `expected` the one it should have; `name` begins the message.
    """
    if tuple(found) != tuple(expected):
        raise CodecError(
            f"{name}: part {suffix!r} has shape {list(found)}, expected {list(expected)}"
        )


GROUP_SIZES = range(1, 1 << 20)
