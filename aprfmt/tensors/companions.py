"""Join stored tensors that are one weight, once, before any architecture is asked.

A *part* is one of the stored tensors of a weight, named by its suffix; the *main part* has the
codes. A quantized weight of bitsandbytes is four to six stored tensors; every later stage sees one
LazyTensor with `parts`. Which ones, its codec says: a weight is found by a tensor next to it that
claims it for an encoding (`Encoding.claim`), or by the dialect that config.json names. A missing
part is an error by name, an unclaimed one stays an ordinary tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from aprfmt.base.encodings import BY_CLAIM, all_encodings
from aprfmt.base.protocols import LazyTensor, TensorInfo, Value
from aprfmt.errors import AprfmtError, CodecError, MissingPartError, UnsupportedError

if TYPE_CHECKING:
    from aprfmt.codecs.dialect import Dialect, StoredPart
    from aprfmt.codecs.lattice import PackedWeight
    from aprfmt.tensors.view import View

# encoding, shape, and the weight as it is stored where the configuration is needed to decode it
Joined: TypeAlias = "tuple[str, tuple[int, ...], Callable[[], PackedWeight] | None]"


def all_bytes(tensor: "View") -> int:
    """Return the stored size of a tensor in bytes, companions included."""
    return tensor.nbytes + sum(part.info.nbytes for part in tensor.parts.values())


_WINDOW = 1 << 20  # bytes of codes that are looked at together


class JoinedTensor(LazyTensor):
    """Several stored tensors as one logical weight.

    `info.shape` is the weight's own shape; `info.nbytes` counts the main part only. `raw()`
    raises CodecError and names the parts: read them through `parts[suffix].raw()`.
    """

    __slots__ = ("decode", "info", "packed", "parts", "stored")

    info: TensorInfo
    parts: Mapping[str, LazyTensor]
    decode: Callable[[], Any] | None
    packed: "Callable[[], PackedWeight] | None"

    def __init__(
        self,
        info: TensorInfo,
        parts: Mapping[str, LazyTensor],
        packed: "Callable[[], PackedWeight] | None" = None,
    ) -> None:
        """Join `parts` (by suffix) as the weight `info`.

        `packed` returns the weight in its dialect; None where a codec alone can decode it.
        """
        self.info = info
        self.parts = parts
        self.packed = packed
        # float32 of info.shape, where decoding needs the configuration
        self.decode = None if packed is None else lambda: packed().decode()
        self.stored = tuple(part.info.name for part in parts.values())

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Raise CodecError: there is no single byte string."""
        raise CodecError(
            f"{self.info.name}: {self.info.encoding} is stored in {len(self.parts)} tensors "
            f"({', '.join(self.stored)}); read them through .parts"
        )

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the memory pages of every part."""
        for part in self.parts.values():
            part.drop()


def constant_codes(tensor: LazyTensor) -> int | None:
    """Return the byte that fills all codes of a packed weight; None for codes that differ.

    None too for a weight that is a single tensor.
    """
    codes = tensor.parts.get("") if len(tensor.parts) > 1 else None
    if codes is None or codes.info.nbytes < 2:
        return None
    first: int | None = None
    for start in range(0, codes.info.nbytes, _WINDOW):
        piece = bytes(codes.raw(start, min(codes.info.nbytes, start + _WINDOW)))
        first = piece[0] if first is None else first
        if piece.count(first) != len(piece):
            codes.drop()
            return None
    codes.drop()
    return first


class FoundWeight(NamedTuple):
    """A weight that was found: its stored names by suffix, "" being the main part.

    `join(parts)` returns (encoding, shape, function that returns the packed weight where its codec
    alone cannot decode it, else None). It raises CodecError for parts that do not fit.
    """

    names: Mapping[str, str]
    join: Callable[[Mapping[str, LazyTensor]], "Joined"]


# Encodings in which a module of a quantized model holds codes; I64 is for positions and counts.
CODED = frozenset({
    "I8", "U8", "I16", "U16", "I32", "U32", "F4",
    "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
})  # fmt: skip
# Last parts of names that are codes whatever their encoding and axes: HQQ's, which may view them as
# floats, and SpQR's.
_CODES = ("W_q", "dense_weights")


Fault: TypeAlias = Callable[[AprfmtError], None]
Tensors: TypeAlias = Mapping[str, LazyTensor]
# Finds the weights of one quantization family by their names; what is wrong with one is told.
Family: TypeAlias = Callable[[Tensors, Mapping[str, Value], Fault], Mapping[str, FoundWeight]]


def _find_claimed(
    tensors: Tensors, config: Mapping[str, Value], fault: Fault
) -> Mapping[str, FoundWeight]:
    """Return {weight: its stored tensors} for encodings that a companion's name identifies.

    Those are bitsandbytes' 4-bit weights, and weights in encodings that other packages add. `fault`
    is not used.
    """
    if quantization_section(config) is not None:
        all_encodings()  # other packages' claims: only what config.json speaks of is worth the look
    stems = {claim.partition("__")[0] for claim in BY_CLAIM}
    found: dict[str, FoundWeight] = {}
    for stem in stems:
        for name in [name for name in tensors if f".{stem}" in name]:
            weight, dot, kind = name.partition(f".{stem}")
            if not dot or (kind and not kind.startswith("__")):
                continue
            row = BY_CLAIM.get(stem + kind)
            marked = f"{weight}@{row.name if row else kind[2:].upper()}"  # in an APR file
            main = next((n for n in (weight, marked) if n in tensors), None)
            if main is not None:
                from aprfmt.codecs import CODECS

                codec = CODECS[row.name] if row else None
                more = (*codec.parts[1:], *codec.optional_parts) if codec else ()
                companions = {p: f"{weight}.{p}" for p in more if f"{weight}.{p}" in tensors}
                names = {"": main, stem + kind: name} | companions
                found[weight] = FoundWeight(names, partial(_join_claimed, weight))
    return found


def _join_claimed(name: str, parts: Tensors) -> Joined:
    """Return (encoding, shape, None) of a weight found by `_find_claimed`.

    Raises MissingPartError if a part is missing.
    """
    from aprfmt.codecs import CODECS

    claim = list(parts)[1]
    if claim not in BY_CLAIM:
        raise CodecError(f"{name}: has {claim}; expected {' or '.join(BY_CLAIM)}")
    codec = CODECS[BY_CLAIM[claim].name]
    said = {claim: parts[claim].raw()}
    try:
        shape, needed = codec.shape_of(said), codec.needed(said)
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error
    missing = sorted(suffix for suffix in needed if suffix not in parts)
    if missing:
        names = ", ".join(f"{name}.{suffix}" for suffix in missing)
        raise MissingPartError(
            f"{name}: {codec.name} weight without {names}; expected all companions in the file",
            tuple(f".{suffix}" for suffix in missing),
            name,
            tuple(part.info.name for part in parts.values()),
        )
    return codec.name, shape, None


_SCALED = "NVFP4"
_FP8 = ("F8_E4M3", "F8_E5M2")
_MARKED = ".marker"  # suffix of a tensor that marks all weights of a file, and is shared by them


def _find_scaled(
    tensors: Tensors, config: Mapping[str, Value], fault: Fault
) -> Mapping[str, FoundWeight]:
    """Return {weight: its stored tensors} of NVFP4 blocks with a scale in a tensor NAME.scale.

    `config` and `fault` are not used.
    """
    found: dict[str, FoundWeight] = {}
    for name, tensor in tensors.items():
        if tensor.info.encoding != _SCALED:
            continue
        stem = name.removesuffix(".weight")
        companions = {
            p: f"{stem}.{p}" for p in ("scale", "input_scale") if f"{stem}.{p}" in tensors
        }
        if "scale" in companions:
            found[name] = FoundWeight({"": name, **companions}, partial(_join_scaled, name))
    return found


def _join_scaled(name: str, parts: Tensors) -> Joined:
    """Return (encoding, shape, None) of NVFP4 blocks with a scale tensor.

    Raises CodecError for a scale that does not fit.
    """
    shape, scale = parts[""].info.shape, parts["scale"].info
    counts = (1, shape[0]) if len(shape) > 2 else (1,)
    if scale.encoding != "F32" or math.prod(scale.shape) not in counts:
        raise CodecError(
            f"{name}: its scale {scale.name} is {scale.encoding} {list(scale.shape)}; expected "
            f"{' or '.join(map(str, counts))} numbers in F32"
        )
    return _SCALED, shape, None


# Where config.json says how its weights are quantized: transformers' key, and MLX's.
SECTIONS = ("quantization_config", "quantization")
# Keys of a quantization section that list modules which are left as they are. Sources:
# transformers' quantization configs (bitsandbytes, FP8, compressed-tensors, AWQ), ModelOpt.
MODULE_LISTS = (
    "ignore", "modules_to_not_convert", "llm_int8_skip_modules", "exclude_modules",
    "ignored_layers",
)  # fmt: skip
_TEXT = "text_config"  # of a model with towers, which may have the section of its text part


def quantization_section(config: Mapping[str, Value]) -> Mapping[str, Value] | None:
    """Return the quantization section of a configuration; None without one.

    That of the text model's section counts where the configuration itself has none.
    """
    inner = config.get(_TEXT)
    for place in (config, inner if isinstance(inner, Mapping) else {}):
        for key in SECTIONS:
            section = place.get(key)
            if isinstance(section, Mapping):
                return section
    return None


def key_of_section(config: Mapping[str, Value]) -> str:
    """Return the key of the configuration that holds the quantization section.

    "" where there is no section, or where it is in the text model's section.
    """
    section = quantization_section(config)
    return next((key for key in SECTIONS if section is not None and config.get(key) is section), "")


def _find_dialect(
    tensors: Tensors, config: Mapping[str, Value], fault: Fault
) -> Mapping[str, FoundWeight]:
    """Return {weight: its stored tensors} for the dialects (GPTQ, AWQ, ...) that config.json names.

    `fault` is called with each error; the tensors concerned are left out. {} where config.json
    names none that is known.
    """
    section = quantization_section(config)
    if section is None:
        return {}
    from aprfmt.codecs.dialects import dialects_at, dialects_of, unmistakable_dialects

    try:
        rows = dialects_of(section)
    except UnsupportedError:
        return {}  # its tensors stay what they are stored as
    except CodecError as error:
        fault(error)
        return {}
    # Other dialects are tried too, so that a contradiction to config.json is found.
    others, said = unmistakable_dialects(rows), cache(partial(dialects_at, section))
    found: dict[str, FoundWeight] = {}
    for name in tensors:
        for dialect in (*rows, *others):
            prefix = dialect.prefix_of(name)
            if prefix is None:
                continue
            try:
                stored = _section_for(dialect, prefix, tensors, said)
            except AprfmtError as error:
                fault(error)
                continue
            if stored is not None:
                weight = prefix + dialect.weight
                names = _stored_names(dialect, prefix, tensors)
                found[weight] = FoundWeight(names, partial(_join_dialect, weight, dialect, stored))
    return found


def _section_for(
    dialect: "Dialect",
    prefix: str,
    tensors: Tensors,
    sections_of: "Callable[[str], tuple[Sequence[Dialect], Mapping[str, Value]] | None]",
) -> Mapping[str, Value] | None:
    """Return the quantization section that applies to a weight; None if it is not of this dialect.

    `prefix` is the weight's name before the suffix. `sections_of(module)` returns the dialects and
    the section that config.json has for a module. Raises MissingPartError if parts are missing, and
    CodecError if config.json contradicts the tensors.
    """
    name = prefix + dialect.main
    missing = [p for p in dialect.parts if dialect.stored(prefix, p, tensors) is None]
    packed = dialect.packs(tensors[name].info.encoding)
    if missing and (not packed or not dialect.main):
        return None  # a weight that was left as it is
    found = sections_of(prefix.removesuffix("."))
    rows = [] if found is None else found[0]
    if found is not None and dialect in rows:
        if not missing:
            return found[1]
        raise MissingPartError(
            f"{name}: {dialect.name} weight without {', '.join(prefix + p for p in missing)}; "
            "expected all of its tensors in the file",
            tuple(missing),
            prefix + dialect.weight,
            tuple(_stored_names(dialect, prefix, tensors).values()),
        )
    if missing or not packed or any(prefix + row.main in tensors for row in rows):
        return None
    claimed = " or ".join(row.name for row in rows) or "one that is left as it is"
    raise CodecError(
        f"{name}: is a packed weight ({tensors[name].info.encoding}, with "
        f"{', '.join(dialect.parts)} next to it); config.json says it is {claimed}"
    )


def _stored_names(dialect: "Dialect", prefix: str, tensors: Tensors) -> Mapping[str, str]:
    """Return {suffix: stored name} of a weight's tensors that exist, "" for the main part."""
    every = (*dialect.parts, *dialect.optional)
    stored = {part: dialect.stored(prefix, part, tensors) for part in every}
    companions = {part: name for part, name in stored.items() if name is not None}
    return {"": prefix + dialect.main, **companions}


def stored_part(tensor: LazyTensor) -> "StoredPart":
    """Return a stored tensor as (bytes, encoding, shape) for a dialect."""
    from aprfmt.codecs.dialect import StoredPart

    return StoredPart(tensor.raw(), tensor.info.encoding, tensor.info.shape)


def _join_dialect(
    name: str, dialect: "Dialect", section: Mapping[str, Value], parts: Tensors
) -> Joined:
    """Return (encoding, shape, function that returns the packed weight) of a dialect's weight.

    `section` is its quantization section. Raises CodecError for parts that do not fit.
    """
    from aprfmt.codecs.lattice import PackedWeight

    def read() -> "dict[str, StoredPart]":
        """Return {suffix: stored part with its bytes} of one packed weight."""
        return {suffix or dialect.main: stored_part(part) for suffix, part in parts.items()}

    try:
        shape = dialect.shape_of(read(), section)
    except MissingPartError as error:
        stored = tuple(part.info.name for part in parts.values())
        raise MissingPartError(f"{name}: {error}", error.parts, name, stored) from error
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error
    return dialect.name.upper(), shape, lambda: PackedWeight(dialect, read(), section)


def _find_unclaimed(
    tensors: Tensors, config: Mapping[str, Value], fault: Fault
) -> Mapping[str, FoundWeight]:
    """Return {weight: its stored tensors} of FP8 weights with a scale and no quantization section.

    With a configuration that says nothing of quantization only weights are taken that ComfyUI's
    markers claim, since these say by themselves that the codes have scales. `fault` is not used.
    """
    coded = any(tensor.info.encoding in _FP8 for tensor in tensors.values())
    if not coded or quantization_section(config) is not None:
        return {}
    from aprfmt.codecs.fp8_block import DIALECT, EXPERTS, MARKER, OWN_MARKER

    markers = [name for name in tensors if name.rpartition(".")[2] == MARKER]
    found: dict[str, FoundWeight] = {}
    for name, tensor in tensors.items():
        dialect = DIALECT if name.endswith(DIALECT.main) else EXPERTS
        prefix = dialect.prefix_of(name)
        if tensor.info.encoding not in _FP8 or prefix is None:
            continue
        if dialect.stored(prefix, dialect.parts[0], tensors) is None:
            continue  # what it is, `model/unsupported_packing.py` says
        names = dict(_stored_names(dialect, prefix, tensors))
        marker = max(
            (m for m in markers if name.startswith(m.removesuffix(MARKER))), key=len, default=""
        )
        if config and not marker and OWN_MARKER not in names:
            continue
        if marker:
            names[_MARKED] = marker
        found[name] = FoundWeight(names, partial(_join_unclaimed, name, dialect))
    return found


def _join_unclaimed(name: str, dialect: "Dialect", parts: Tensors) -> Joined:
    """Return (encoding, shape, function that returns the packed weight) of FP8 codes with a scale.

    Raises UnsupportedError where the scale does not show how it is applied.
    """
    from aprfmt.codecs.fp8_block import UNCLAIMED, has_multiplying_scale

    held = {suffix or dialect.main: stored_part(part) for suffix, part in parts.items()}
    try:
        if has_multiplying_scale(held):
            return _join_dialect(name, dialect, UNCLAIMED, parts)
    except CodecError as error:
        raise UnsupportedError(str(error)) from error
    scale = parts[dialect.parts[0]].info
    raise UnsupportedError(
        f"{name}: its scale {scale.name} {scale.encoding} {list(scale.shape)} does not say how it "
        "is applied"
    )


FAMILIES: tuple[Family, ...] = (_find_claimed, _find_scaled, _find_dialect, _find_unclaimed)


def holds_codes(tensors: Tensors) -> bool:
    """Return whether any tensor holds a packed weight's codes; fast for a million names."""
    if any(map(methodcaller("endswith", _CODES), tensors)):
        return any(is_coded(tensor.info) for tensor in tensors.values())
    kinds = set(map(attrgetter("info.encoding"), tensors.values())) & CODED
    return bool(kinds) and any(is_coded(tensor.info) for tensor in tensors.values())


def is_coded(info: TensorInfo) -> bool:
    """Return whether a tensor holds a weight's codes, by its name, encoding and axes."""
    named = info.name.rpartition(".")[2] in _CODES
    return named or (info.encoding in CODED and len(info.shape) > 1)


def has_parts(tensors: Tensors) -> bool:
    """Return whether any tensor is made of several stored tensors.

    A file may hold a million tensors, most of a class that has none: classes are looked at first.
    """
    classes = {
        kind
        for kind in set(map(type, tensors.values()))
        if getattr(kind, "parts", None) is not LazyTensor.parts
    }
    return bool(classes) and any(
        type(tensor) in classes and tensor.parts for tensor in tensors.values()
    )


def _raise_fault(error: AprfmtError) -> None:
    """Raise `error`: what happens to a fault where the caller gives no function for faults."""
    raise error


def join_companions(
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Value] | None = None,
    fault: Fault | None = None,
    unread: Fault | None = None,
) -> dict[str, LazyTensor]:
    """Return the tensors by name, with the parts of each packed weight joined under its name.

    Raises CodecError naming a missing part. With `fault`, that is called with the error instead,
    and the tensors concerned are not joined. Weights of a kind that is not decoded are not joined
    either: `unread` is called with the error, or UnsupportedError is raised without it.
    """
    joined: dict[str, LazyTensor] = dict(tensors)
    tell = fault or _raise_fault
    # Join the weights that each family finds.
    for family in FAMILIES:
        for weight, found in family(tensors, config or {}, tell).items():
            parts = {suffix: tensors[stored] for suffix, stored in found.names.items()}
            try:
                encoding, shape, packed = found.join(parts)
            except UnsupportedError as error:
                (unread or tell)(error)
                continue
            except AprfmtError as error:
                tell(error)
                continue
            main = parts[""].info
            for stored in found.names.values():
                joined.pop(stored, None)  # an APR file has the main part as `WEIGHT@NF4`
            info = TensorInfo(weight, shape, encoding, main.offset, main.nbytes, None)
            joined[weight] = JoinedTensor(info, parts, packed)
    if joined.keys() == tensors.keys() and not has_parts(joined):
        return joined
    # A joined weight takes the place of its main part.
    order = {name: i for i, name in enumerate(tensors)}
    first = {
        name: order[tensor.parts[""].info.name] if tensor.parts else order[name]
        for name, tensor in joined.items()
    }
    return dict(sorted(joined.items(), key=lambda item: first[item[0]]))
