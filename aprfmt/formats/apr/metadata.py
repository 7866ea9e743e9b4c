"""APR v2 metadata: the typed keys, their aliases, and JSON text as the reference writes it.

One compact JSON object: typed keys in the order of TYPED, then everything else in insertion
order at the top level. Source: the metadata struct of the aprender project and its serializer
(floats in shortest round-trip form of their own width, as the ryu algorithm prints them).
"""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from aprfmt.base.protocols import TypedValue, Value
from aprfmt.errors import ConversionError
from aprfmt.formats.bounded_json import dumps

_MAX_DEPTH = 64  # same limit as in reading
_SIMPLE = frozenset((str, int, bool, type(None)))


@dataclass(frozen=True, slots=True)
class TypedKey:
    """One key of the reference's struct: its JSON kind and what is written when it is absent.

    `absent` is a JSON text, or "" where the key is left out. `fields` are the keys of a nested
    object in writing order; those the mapping lacks are written as null.
    """

    name: str
    kind: str
    absent: str = ""
    fields: tuple[str, ...] = ()


def _is_uint(value: Value) -> bool:
    """Return whether a value is an int from 0 to 2^64 - 1, not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def _is_number(value: Value) -> bool:
    """Return whether a value is an int or a float, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


KINDS: dict[str, Callable[[Value], bool]] = {
    "string": lambda value: isinstance(value, str),
    "unsigned integer": _is_uint,
    "float32": _is_number,
    "object": lambda value: isinstance(value, Mapping),
}

TYPED: tuple[TypedKey, ...] = (
    TypedKey("model_type", "string", '""'),
    TypedKey("name", "string"),
    TypedKey("description", "string"),
    TypedKey("author", "string"),
    TypedKey("license", "string", "null"),
    TypedKey("data_source", "string", "null"),
    TypedKey("data_license", "string", "null"),
    TypedKey("version", "string"),
    TypedKey("source", "string"),
    TypedKey("original_format", "string"),
    TypedKey("created_at", "string"),
    TypedKey("total_size", "unsigned integer", "0"),
    TypedKey("param_count", "unsigned integer", "0"),
    TypedKey("quantization", "object", fields=("quant_type", "bits", "block_size", "symmetric")),
    TypedKey("sharding", "object", fields=("shard_count", "shard_index", "total_size", "pattern")),
    TypedKey("chat_template", "string"),
    TypedKey("chat_format", "string"),
    TypedKey(
        "special_tokens",
        "object",
        fields=(
            "bos_token",
            "eos_token",
            "unk_token",
            "pad_token",
            "im_start_token",
            "im_end_token",
        ),
    ),
    TypedKey("architecture", "string"),
    TypedKey("hf_architecture", "string"),
    TypedKey("hf_model_type", "string"),
    TypedKey("hidden_size", "unsigned integer"),
    TypedKey("num_layers", "unsigned integer"),
    TypedKey("num_heads", "unsigned integer"),
    TypedKey("num_kv_heads", "unsigned integer"),
    TypedKey("vocab_size", "unsigned integer"),
    TypedKey("intermediate_size", "unsigned integer"),
    TypedKey("max_position_embeddings", "unsigned integer"),
    TypedKey("rope_theta", "float32"),
    TypedKey("rope_type", "unsigned integer"),
    TypedKey("rms_norm_eps", "float32"),
    TypedKey("head_dim", "unsigned integer"),
    TypedKey("num_experts", "unsigned integer"),
    TypedKey("num_experts_per_tok", "unsigned integer"),
    TypedKey("moe_intermediate_size", "unsigned integer"),
)
TYPED_NAMES = frozenset(key.name for key in TYPED)

# Aliases: names that one loader reads as the same field. If a file has two names of a group, that
# loader drops all metadata.
ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_dim", "d_model", "n_embd"),
    "num_layers": ("n_layers", "num_hidden_layers", "n_layer"),
    "num_heads": ("n_heads", "num_attention_heads", "n_head"),
    "num_kv_heads": ("n_kv_heads", "num_key_value_heads"),
    "vocab_size": ("n_vocab",),
    "intermediate_size": ("ffn_dim", "intermediate_dim", "n_inner"),
    "max_position_embeddings": ("max_seq_len", "context_length", "n_ctx"),
    "rms_norm_eps": ("layer_norm_eps", "norm_eps"),
}
_NAMES = (*(key.name for key in TYPED), *(alias for group in ALIASES.values() for alias in group))


def typed_keys(architectures: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return {typed key or alias: ()}: every key that APR gives a type.

    The tuple is for the value types that a key may have, of which GGUF has several and APR none.
    `architectures` changes nothing here: GGUF's keys depend on them.
    """
    return dict.fromkeys(_NAMES, ())


def type_mismatches(metadata: Mapping[str, Value]) -> list[str]:
    """Return a sentence for every typed key whose value has another JSON type than it should.

    The reference refuses such a file; here it is a warning.
    """
    found: list[str] = []
    for key in TYPED:
        value = metadata.get(key.name)
        if value is not None and not KINDS[key.kind](value):
            found.append(f"metadata key {key.name!r} is {type(value).__name__}, not {key.kind}")
    return found


def canonical_metadata(metadata: Mapping[str, Value | TypedValue], where: str) -> dict[str, Value]:
    """Return the metadata for writing: plain values, one name per alias group.

    Left out are nulls of typed keys and of aliases, and an alias that repeats the value of its
    canonical name. Raises ConversionError if both have different values, and for typed keys of
    another type.
    """
    plain = {
        name: value.value if isinstance(value, TypedValue) else value
        for name, value in metadata.items()
    }
    for name in _NAMES:
        if name in plain and plain[name] is None:
            del plain[name]
    for field, aliases in ALIASES.items():
        present = [name for name in (field, *aliases) if name in plain]
        for alias in present[1:]:
            if plain[alias] != plain[present[0]]:
                raise ConversionError(
                    f"{where}: metadata says {present[0]} = {plain[present[0]]!r} and "
                    f"{alias} = {plain[alias]!r}, which name the same field; drop one of them"
                )
            del plain[alias]
    for sentence in type_mismatches(plain):
        raise ConversionError(f"{where}: {sentence}; APR readers refuse such a file")
    return plain


def metadata_json(metadata: Mapping[str, Value], where: str) -> bytes:
    """Return the JSON bytes of canonical metadata, as the reference writes them.

    Raises ConversionError for values JSON cannot express (NaN, infinities, foreign types).
    """
    parts: list[str] = []
    for key in TYPED:
        value = metadata.get(key.name)
        if value is None:
            text = key.absent
        elif key.kind == "float32":
            text = float32_text(float(value), where, key.name)
        elif key.fields:
            ordered = {name: value.get(name) for name in key.fields}
            text = _json_text({**ordered, **value}, where, key.name, 1)
        else:
            text = _json_text(value, where, key.name, 1)
        if text:
            parts.append(f'"{key.name}":{text}')
    # All other keys follow, in their order.
    for name, value in metadata.items():
        if name not in TYPED_NAMES:
            parts.append(f"{dumps(name)}:{_json_text(value, where, name, 1)}")
    return ("{" + ",".join(parts) + "}").encode("utf-8")


def float32_text(value: float, where: str, key: str) -> str:
    """Return the shortest decimal that reads back as this float32, as ryu prints it.

    ConversionError, naming `where` and `key`, for NaN and infinities.
    """
    try:
        narrow: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        narrow = math.inf
    _refuse_non_finite(narrow, where, key)
    if narrow == 0:
        return "-0.0" if math.copysign(1, narrow) < 0 else "0.0"
    digits, exponent = _shortest_digits(abs(narrow))
    return "-" * (narrow < 0) + _decimal_text(digits, exponent, -6, 13)


def float64_text(value: float, where: str, key: str) -> str:
    """Return the shortest decimal that reads back as this float64, as ryu prints it.

    ConversionError, naming `where` and `key`, for NaN and infinities.
    """
    _refuse_non_finite(value, where, key)
    if value == 0:
        return "-0.0" if math.copysign(1, value) < 0 else "0.0"
    mantissa, _, power = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).lstrip("0")
    exponent = int(power or "0") - len(fraction)
    trimmed = digits.rstrip("0")
    return "-" * (value < 0) + _decimal_text(trimmed, exponent + len(digits) - len(trimmed), -5, 16)


def _refuse_non_finite(value: float, where: str, key: str) -> None:
    """Raise ConversionError for NaN and infinities, which JSON cannot express."""
    if not math.isfinite(value):
        raise ConversionError(
            f"{where}: metadata key {key!r} holds {value}, which JSON cannot say; "
            "APR metadata is JSON: change or drop the key"
        )


def _shortest_digits(value: float) -> tuple[str, int]:
    """Return (digits, power of ten) of the shortest decimal of a positive float32.

    Nine digits are always enough. AssertionError if they are not.
    """
    for precision in range(1, 10):
        mantissa, _, power = f"{value:.{precision - 1}e}".partition("e")
        nearest = int(mantissa.replace(".", ""))
        exponent = int(power) - (precision - 1)
        # Just below a power of two floats lie closer together: the nearest decimal may read back as
        # another float, and the next one is right.
        for candidate in (nearest, nearest + 1, nearest - 1):
            try:
                back: float = struct.unpack(
                    "<f", struct.pack("<f", float(f"{candidate}e{exponent}"))
                )[0]
            except OverflowError:
                continue
            if back == value:
                digits = str(candidate)
                trimmed = digits.rstrip("0")
                return trimmed, exponent + len(digits) - len(trimmed)
    raise AssertionError("nine digits always tell a float32")


def _decimal_text(digits: str, exponent: int, low: int, high: int) -> str:
    """Return digits x 10^exponent as text, without an exponent for numbers of usual size.

    It is plain if the number of digits before the decimal point (negative for zeros after it) is
    above `low` and at most `high`; else it has one digit before the point and an exponent.
    """
    point = len(digits) + exponent
    if exponent >= 0 and point <= high:
        return digits + "0" * exponent + ".0"
    if 0 < point <= high:
        return f"{digits[:point]}.{digits[point:]}"
    if low < point <= 0:
        return "0." + "0" * -point + digits
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{digits[0]}{fraction}e{point - 1}"


def _json_text(value: Value, where: str, key: str, depth: int) -> str:
    """Return a value as JSON text, floats as ryu prints them; ConversionError if it has none.

    `depth` is how deep the value is nested, 1 at the top. `where` and `key` are for messages.
    """
    if depth > _MAX_DEPTH:
        raise ConversionError(
            f"{where}: metadata key {key!r} nests deeper than {_MAX_DEPTH}; drop it"
        )
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return dumps(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return float64_text(value, where, key)
    if isinstance(value, Mapping):
        items = (
            f"{dumps(str(name))}:{_json_text(item, where, key, depth + 1)}"
            for name, item in value.items()
        )
        return "{" + ",".join(items) + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        if _SIMPLE.issuperset(map(type, value)):  # vocabularies: the C encoder is 10 times faster
            return dumps(list(value))
        return "[" + ",".join([_json_text(item, where, key, depth + 1) for item in value]) + "]"
    raise ConversionError(
        f"{where}: metadata key {key!r} holds a {type(value).__name__}, which JSON cannot say"
    )
