"""Tensors that belong together are joined here, once, before any architecture is asked.

A quantized weight of bitsandbytes is four to six stored tensors; every later stage sees one
LazyTensor with `parts`. Which ones, its codec says: a weight is found by a tensor beside it that
claims it for an encoding (`Encoding.claim`), or by the dialect that config.json names. A missing
part is an error by name, an unclaimed one stays an ordinary tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from aprfmt.base.encodings import BY_CLAIM, every
from aprfmt.base.protocols import LazyTensor, TensorInfo, Value
from aprfmt.errors import AprfmtError, CodecError

if TYPE_CHECKING:
    from aprfmt.codecs.dialect import Dialect
    from aprfmt.codecs.lattice import PackedWeight

# encoding, shape, and the weight as it is stored where the configuration is needed to decode it
Joined: TypeAlias = "tuple[str, tuple[int, ...], Callable[[], PackedWeight] | None]"


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
        self.info = info
        self.parts = parts
        self.packed = packed
        # float32 of info.shape, where decoding needs the configuration
        self.decode = None if packed is None else lambda: packed().decode()
        self.stored = tuple(part.info.name for part in parts.values())

    def raw(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Refuse: there is no single byte string."""
        raise CodecError(
            f"{self.info.name}: {self.info.encoding} is stored in {len(self.parts)} tensors "
            f"({', '.join(self.stored)}); read them through .parts"
        )

    def drop(self, start: int = 0, stop: int | None = None) -> None:
        """Release the pages of every part."""
        for part in self.parts.values():
            part.drop()


@dataclass(frozen=True, slots=True)
class Family:
    """How the tensors of one quantization family are found and joined.

    `find(tensors, config)` gives {weight name: {suffix: stored name}}, "" being the main part;
    `join(name, parts, config)` gives encoding and shape of the weight, and how to decode it
    where its codec alone cannot.
    """

    name: str
    find: Callable[[Mapping[str, LazyTensor], Mapping[str, Value]], Mapping[str, Mapping[str, str]]]
    join: Callable[[str, Mapping[str, LazyTensor], Mapping[str, Value]], "Joined"]


def _find_claimed(
    tensors: Mapping[str, LazyTensor], config: Mapping[str, Value]
) -> Mapping[str, Mapping[str, str]]:
    """Find the weights beside which a tensor stands that claims them for an encoding."""
    from aprfmt.codecs import CODECS

    if _section(config) is not None:
        every()  # other packages' claims: only what config.json speaks of is worth the look
    stems = {claim.partition("__")[0] for claim in BY_CLAIM}
    found: dict[str, dict[str, str]] = {}
    for name in tensors:
        for stem in stems:
            weight, dot, kind = name.partition(f".{stem}")
            if not dot or (kind and not kind.startswith("__")):
                continue
            row = BY_CLAIM.get(stem + kind)
            marked = f"{weight}@{row.name if row else kind[2:].upper()}"  # in an APR file
            main = next((n for n in (weight, marked) if n in tensors), None)
            if main is not None:
                codec = CODECS[row.name] if row else None
                more = (*codec.parts[1:], *codec.optional_parts) if codec else ()
                beside = {p: f"{weight}.{p}" for p in more if f"{weight}.{p}" in tensors}
                found[weight] = {"": main, stem + kind: name} | beside
    return found


def _join_claimed(
    name: str, parts: Mapping[str, LazyTensor], config: Mapping[str, Value]
) -> Joined:
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
    missing = sorted(f"{name}.{suffix}" for suffix in needed if suffix not in parts)
    if missing:
        raise CodecError(
            f"{name}: {codec.name} weight without {', '.join(missing)}; expected all companions "
            "in the file"
        )
    return codec.name, shape, None


# Where config.json says how its weights are quantized: transformers' key, and MLX's.
SECTIONS = ("quantization_config", "quantization")


def _section(config: Mapping[str, Value]) -> Mapping[str, Value] | None:
    for key in SECTIONS:
        section = config.get(key)
        if isinstance(section, Mapping):
            return section
    return None


def _dialect(config: Mapping[str, Value]) -> "Dialect | None":
    """Return the dialect config.json names; None without one, and for claimed ones."""
    section = _section(config)
    if section is None:
        return None
    from aprfmt.codecs.dialects import dialect_of
    from aprfmt.errors import UnsupportedError

    try:
        return dialect_of(section)
    except UnsupportedError:
        return None  # its tensors stay what they are stored as


def _find_dialect(
    tensors: Mapping[str, LazyTensor], config: Mapping[str, Value]
) -> Mapping[str, Mapping[str, str]]:
    """Find the weights of a dialect: a main part that only it has, or one with its scales."""
    dialect = _dialect(config)
    if dialect is None:
        return {}
    found = {}
    for name in tensors:
        prefix = name.removesuffix(dialect.main)
        if prefix == name:
            continue
        needed = {part: prefix + part for part in dialect.parts}
        missing = sorted(part for part in needed.values() if part not in tensors)
        if missing and dialect.main == dialect.weight:
            continue  # a weight that was left as it is
        if missing:
            raise CodecError(
                f"{name}: {dialect.name} weight without {', '.join(missing)}; expected all of its "
                "tensors in the file"
            )
        optional = {part: prefix + part for part in dialect.optional if prefix + part in tensors}
        found[prefix + dialect.weight] = {"": name, **needed, **optional}
    return found


def _join_dialect(
    name: str, parts: Mapping[str, LazyTensor], config: Mapping[str, Value]
) -> Joined:
    from aprfmt.codecs.dialect import StoredPart
    from aprfmt.codecs.lattice import PackedWeight

    dialect, section = _dialect(config), _section(config)
    assert dialect is not None and section is not None

    def read() -> dict[str, StoredPart]:
        return {
            suffix or dialect.main: StoredPart(part.raw(), part.info.encoding, part.info.shape)
            for suffix, part in parts.items()
        }

    try:
        shape = dialect.shape_of(read(), section)
    except CodecError as error:
        raise CodecError(f"{name}: {error}") from error
    return dialect.name.upper(), shape, lambda: PackedWeight(dialect, read(), section)


FAMILIES: tuple[Family, ...] = (
    Family("claimed", _find_claimed, _join_claimed),
    Family("dialects", _find_dialect, _join_dialect),
)


def join(
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Value] | None = None,
    fault: Callable[[AprfmtError], None] | None = None,
) -> dict[str, LazyTensor]:
    """Return the tensors with every family's companions joined under the weight's name.

    Raises CodecError naming a missing part; with `fault` that is told what is wrong instead, and
    the tensors concerned stay unjoined.
    """
    joined: dict[str, LazyTensor] = dict(tensors)
    for family in FAMILIES:
        for weight, names in _found(family, tensors, config or {}, fault).items():
            parts = {suffix: tensors[stored] for suffix, stored in names.items()}
            try:
                encoding, shape, packed = family.join(weight, parts, config or {})
            except AprfmtError as error:
                if fault is None:
                    raise
                fault(error)
                continue
            main = parts[""].info
            for stored in names.values():
                joined.pop(stored, None)  # an APR file has the main part as `WEIGHT@NF4`
            info = TensorInfo(weight, shape, encoding, main.offset, main.nbytes, None)
            joined[weight] = JoinedTensor(info, parts, packed)
    order = {name: i for i, name in enumerate(tensors)}
    first = {
        name: order[tensor.parts[""].info.name] if tensor.parts else order[name]
        for name, tensor in joined.items()
    }
    return dict(sorted(joined.items(), key=lambda item: first[item[0]]))


def _found(
    family: Family,
    tensors: Mapping[str, LazyTensor],
    config: Mapping[str, Value],
    fault: Callable[[AprfmtError], None] | None,
) -> Mapping[str, Mapping[str, str]]:
    try:
        return family.find(tensors, config)
    except CodecError as error:
        if fault is None:
            raise
        fault(error)
        return {}
