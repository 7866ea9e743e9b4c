"""Finds the recipes by which a quantized model may have been made from its base.

They come from the file's record, from its tensors, or from the user. Every tensor keeps the
encoding that the file stores it in. What is left open is how an encoding of several tensors lays
them out (size of groups, version) and how the searches of blocks round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import raw_parts
from aprfmt.codecs import CODECS, codec, quant_state
from aprfmt.conversion.options import Options
from aprfmt.conversion.outputs import Plan
from aprfmt.conversion.packed_weights import has_companions
from aprfmt.conversion.plan import build_plan
from aprfmt.errors import ArchError, CodecError, ConversionError, UsageError
from aprfmt.formats import FORMATS
from aprfmt.measure.requantization import WAYS, QuantRecipe
from aprfmt.model import Model
from aprfmt.model.resolve import spellings_by_name
from aprfmt.quantizing.mixture import SCHEMES, scheme_of, type_name

if TYPE_CHECKING:
    from aprfmt.quantizing.imatrix import ImportanceMatrix

# Keys of what `quantize` and llama-quantize record in their output.
_TYPE, _FMA = "aprfmt.quantize.type", "aprfmt.quantize.fma"
_MATRIX, _MATRIX_FILE = "aprfmt.quantize.imatrix", "quantize.imatrix.file"


@dataclass(frozen=True)
class Recipe:
    """How to make the tensors of a quantized model again from its base.

    `type` is the scheme where the file or the user names one, "" where each tensor's encoding is
    all that is known. `ways` are the kinds of rounding that are tried. `lacks` names an importance
    matrix that the file was made with and that was not given. `plan` has the tensors that the base
    gives by this recipe.
    """

    type: str
    ways: tuple[QuantRecipe, ...]
    imatrix: "ImportanceMatrix | None" = field(default=None, repr=False)
    lacks: str = ""
    drop: tuple[str, ...] = ()
    options: Options = field(default_factory=Options, repr=False)
    plan: Plan | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return {type, ways, imatrix, drop}, which say how to make the file again from its base.

        `ways` are the kinds of rounding that are tried.
        """
        matrix = self.imatrix
        return {
            "type": self.type,
            "ways": [str(way) for way in self.ways],
            "imatrix": None
            if matrix is None
            else {"name": matrix.path.name, "sha256": matrix.sha256},
            "drop": list(self.drop),
        }


def find_recipes(
    base: Model,
    quantized: Model,
    *,
    scheme: str | None,
    imatrix: "ImportanceMatrix | None",
    drop: Sequence[str],
) -> list[Recipe]:
    """Return the recipes by which `quantized` may have been made from `base`, the likeliest first.

    The likeliest is the one whose tensors are most like the file's own, by name, shape and dtype.
    `scheme`, `imatrix` and `drop` are what the user says of it. Raises ConversionError where no
    layout can be planned.
    """
    facts = quantized.metadata
    named = scheme if scheme is None else type_name(scheme)
    if named is not None:
        scheme_of(named)  # UsageError for an unknown one
    recorded = str(facts.get(_TYPE, ""))
    if named is not None:
        _refuse_other_type(quantized, named, recorded)
    wanted = named or (recorded if recorded in SCHEMES else "")
    fma = facts.get(_FMA)
    recipe = Recipe(
        wanted,
        tuple(way for way in WAYS if fma in (None, way.fma)) or WAYS,
        imatrix,
        _missing_imatrix(quantized, imatrix),
        tuple(drop),
    )
    options = Options(
        choose=_OwnEncodings(quantized).choose,
        importance=None if imatrix is None else imatrix.of,
        drop=tuple(drop),
        allow_inexact=True,
        allow_overflow=True,
        allow_requantize=True,
    )
    found: list[tuple[int, Recipe]] = []
    refused: ConversionError | None = None
    for name, asked in _possible_layouts(base, quantized, wanted, options):
        try:
            plan = build_plan(base, FORMATS[quantized.format], asked)
        except ConversionError as error:
            refused = refused or error
            continue
        row = replace(recipe, type=wanted or name, options=asked, plan=plan)
        found.append((_count_alike(plan, quantized), row))
    if not found:
        assert refused is not None
        raise refused
    found.sort(key=lambda row: -row[0])
    return [row for _, row in found]


def _refuse_other_type(quantized: Model, named: str, recorded: str) -> None:
    """Raise UsageError if the user names another type than the file, or one it does not hold.

    `named` is the user's. `recorded` is the type that `quantize` recorded in the file, "" for
    none; general.file_type counts where it is the number of a scheme.
    """
    number: Any = quantized.metadata.get("general.file_type")
    types: dict[Any, str] = {
        row.file_type: name for name, row in SCHEMES.items() if row.file_type is not None
    }
    for key, said in ((_TYPE, recorded), ("general.file_type", types.get(number, ""))):
        if said in SCHEMES and said != named:
            raise UsageError(
                f"{quantized.path}: {key} says {said}, --type says {named}; leave --type out "
                "where the file says its type"
            )
    base = scheme_of(named).base
    encodings = dict.fromkeys(view.encoding for view in quantized.values())
    if base not in encodings:
        raise UsageError(
            f"{quantized.path}: --type {named} stores weights as {base}, and no tensor is; found "
            f"{', '.join(encodings)}"
        )


def _missing_imatrix(quantized: Model, imatrix: "ImportanceMatrix | None") -> str:
    """Return the importance matrix that a file names and that was not given; "" for none.

    Raises UsageError where another one was given.
    """
    digest, name = quantized.metadata.get(_MATRIX), quantized.metadata.get(_MATRIX_FILE)
    if imatrix is None:
        return str(name or digest or "")
    if digest is not None and digest != imatrix.sha256:
        raise UsageError(
            f"{imatrix.path}: is not the importance matrix that {quantized.path} was made with: "
            f"SHA-256 {imatrix.sha256}, expected {digest}"
        )
    return ""


class _OwnEncodings:
    """The encoding in which a file stores each weight, by each name the weight can have."""

    def __init__(self, quantized: Model) -> None:
        """Store the encoding of every weight of `quantized`, by its names and its role.

        The names are the stored one and, of a known architecture, those of other formats.
        """
        every = spellings_by_name(quantized) if _has_known_arch(quantized) else {}
        self._by_name: dict[str, str] = {}
        for name, view in quantized.items():
            for each in (name, *every.get(name, ())):
                self._by_name.setdefault(each, view.encoding)
        if _has_known_arch(quantized):
            self._by_name.update({key: view.encoding for key, view in quantized.roles.items()})

    def choose(self, name: str, shape: tuple[int, ...], source: str) -> str | None:
        """Return the encoding that the file stores a tensor in; None to keep the base's.

        `name` is the tensor's, `source` its encoding in the base; `shape` is not used (the
        converter passes it to every such function). None also stands for an encoding that cannot be
        written.
        """
        wished = self._by_name.get(name)
        if wished is None or wished == source:
            return wished
        return (
            wished
            if _schemes_with_base(wished) or (wished in CODECS and codec(wished).has_encoder)
            else None
        )


def _has_known_arch(model: Model) -> bool:
    """Return whether the roles of a model's tensors are known."""
    try:
        return model.roles is not None
    except ArchError:
        return False


def _schemes_with_base(name: str) -> list[str]:
    """Return the names of the dialects' schemes that store a weight in this packed encoding."""
    return [scheme for scheme, row in SCHEMES.items() if row.base == name and row.dialect]


def _possible_layouts(
    base: Model, quantized: Model, wanted: str, options: Options
) -> Iterator[tuple[str, Options]]:
    """Yield (scheme, options) of each conversion of the base that may have made the file.

    The scheme is "" where none is needed. `wanted` is the scheme that is named, "" for none;
    `options` are those without a packing.
    """
    found = False
    for name, packing in _possible_packings(quantized, wanted):
        found = True
        yield name, replace(options, packing=packing)
    if not found:
        yield "", options
    if any(view.parts for view in base.values()):  # a repack: no encoding is asked for there
        yield "", replace(options, choose=None)


def _possible_packings(quantized: Model, wanted: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (scheme, encoder options) of the layouts that a file's packed weights may have.

    `wanted` is the scheme that is named, or "".
    """
    packed = {view.encoding: view for view in quantized.values() if view.parts}
    # The record stays when a file is converted again: it may be of an earlier layout.
    if wanted and scheme_of(wanted).dialect and scheme_of(wanted).base in packed:
        yield wanted, scheme_of(wanted).options
        return
    for name, view in packed.items():
        if has_companions(name):
            try:
                state = quant_state.read_state(name, raw_parts(view.stored[0]))
            except CodecError:
                continue
            yield (
                name,
                {"blocksize": state.blocksize, "double_quantization": bool(state.nested_blocksize)},
            )
        yield from ((scheme, SCHEMES[scheme].options) for scheme in _schemes_with_base(name))


def _count_alike(plan: Plan, quantized: Model) -> int:
    """Return how many planned tensors have the name, shape and dtype of one of the file."""
    stored = quantized.source.tensors
    return sum(
        (held := stored.get(one.info.name)) is not None
        and (held.info.shape, held.info.encoding) == (one.info.shape, one.info.encoding)
        for one in plan.outputs
    )
