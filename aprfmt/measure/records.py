"""The records of comparing two tensors: verdicts and numbers, without sentences.

A and B (`a` and `b`) are the two files that are compared; a *side* is one of them, or its tensor.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from aprfmt.base.protocols import Value
from aprfmt.measure.nonfinite import HasNonFinite, NonFinite
from aprfmt.model.relations import Relation

if TYPE_CHECKING:
    from aprfmt.measure.findings import Finding

# Worst first: the order of human output.
TensorVerdict = Literal[
    "UNREADABLE",
    "SHAPE_DIFFERS",
    "DIFFERENT",
    "ONLY_IN_A",
    "ONLY_IN_B",
    "WITHIN",
    "SAME_VALUES",
    "SAME_BYTES",
]
TENSOR_VERDICTS: tuple[TensorVerdict, ...] = get_args(TensorVerdict)
EQUAL: frozenset[TensorVerdict] = frozenset({"SAME_BYTES", "SAME_VALUES"})
ONE_SIDED: tuple[TensorVerdict, ...] = ("ONLY_IN_A", "ONLY_IN_B")


FLOATS = frozenset({"F64", "F32", "F16", "BF16"})  # encodings that units in the last place suit


def ulp_type(encoding_a: str, encoding_b: str) -> str:
    """Return the float type whose units in the last place two tensors are compared in.

    It is BF16 or F16 where both tensors have that encoding, else F32.
    """
    return encoding_a if encoding_a == encoding_b and encoding_a in ("BF16", "F16") else "F32"


@dataclass(frozen=True, slots=True)
class ValueStats(HasNonFinite):
    """Element-wise measures of two decoded tensors; a is the first file.

    `rel_l2` is ||a-b|| / ||a||, over the elements finite on both sides; `max_abs_diff` with the
    multi-index where it occurs; `norm_a` and `norm_b` are ||a|| and ||b||; `ulp` the largest
    distance in representations of `ulp_type`; `changed` counts elements whose values differ (NaN
    equals NaN); `nan_*` and `inf_*` are each side's own census. A NaN or infinity on one side only
    counts as changed and makes max_abs_diff infinite; `nonfinite` says where they are, None where
    all values are finite. `count` is the number of elements, `cosine` the cosine similarity.
    """

    count: int
    changed: int
    max_abs_diff: float
    max_at: tuple[int, ...] | None
    rel_l2: float
    cosine: float
    ulp: int
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    norm_a: float = 0.0
    norm_b: float = 0.0
    nonfinite: NonFinite | None = None


@dataclass(frozen=True, slots=True)
class DerivationResult:
    """Whether one quantized side has the bytes that encoding the base's values again gives.

    `derives` is None where that could not be decided. `mode` is the recipe that gives the side's
    bytes, or nearly so. `block` is the first that differs, in row `row`, beginning at `element` of
    the row.
    """

    derives: bool | None
    mode: str
    text: str
    block: int | None = None
    row: int | None = None
    element: int | None = None
    side: str = ""  # "a" or "b"


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """The comparison of one tensor of both files, with one verdict.

    `layout` names what the formats did to the same values (rows permuted, widened, ...);
    `cause` names a defect that was confirmed or the bound that held; `explanation` is what the
    hypotheses found; `first_byte` is the first differing byte of the logical tensor's stored bytes,
    where both sides have comparable bytes.
    """

    key: str
    verdict: TensorVerdict
    name_a: str = ""
    name_b: str = ""
    encoding_a: str = ""
    encoding_b: str = ""
    shape_a: tuple[int, ...] | None = None
    shape_b: tuple[int, ...] | None = None
    layout: tuple[str, ...] = ()
    cause: str = ""
    first_byte: int | None = None
    stats: ValueStats | None = None
    steps_off: float | None = None  # largest |a-b| in steps of the coarser encoding
    derivations: tuple[DerivationResult, ...] = ()  # of the quantized sides, where a base was given
    explanation: "Finding | None" = None

    @property
    def is_rounded(self) -> bool:
        """Whether it is DIFFERENT, and rounding or quantizing one side gives the other exactly."""
        found = self.explanation
        return (
            self.verdict == "DIFFERENT"
            and found is not None
            and found.cause in ("rounding", "quantisation")
            and found.certainty == "confirmed"
            and found.share == 1.0
        )

    def to_json(self) -> dict[str, object]:
        """Return plain data for JSON, with the explanation as `diff` prints it."""
        found = self.explanation
        rest = asdict(replace(self, explanation=None))
        return {**rest, "explanation": None if found is None else found.to_pair_json()}

    def is_unexplained(self, weak: Collection[str] = ()) -> bool:
        """Return whether it is DIFFERENT without a confirmed explanation.

        Explanations with a cause in `weak` do not count.
        """
        return self.verdict == "DIFFERENT" and not self.is_explained(weak)

    def is_explained(self, weak: Collection[str] = ()) -> bool:
        """Return whether it has a confirmed explanation; a cause in `weak` does not count."""
        found = self.explanation
        return found is not None and found.confirmed and found.cause not in weak


@dataclass(frozen=True, slots=True)
class DifferenceImage:
    """Where a tensor differs: one number per cell of [height, width] elements.

    `rows` and `columns` are those of the tensor seen as a matrix. A number is the root mean square
    of a - b over that of all of a, infinite where only one side is not finite. `a` and `b` have
    the root mean square of each side's finite values in the same cells.
    """

    key: str
    rows: int
    columns: int
    height: int
    width: int
    cells: tuple[tuple[float, ...], ...]
    a: tuple[tuple[float, ...], ...]
    b: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class FieldDiff:
    """One hyperparameter, tokenizer fact or metadata key that differs."""

    name: str
    a: Value
    b: Value
    origin_a: str = ""
    origin_b: str = ""
    decisive: bool = False  # changes the forward pass or the token ids
    item: str = ""  # kind and name of the ledger's item that it speaks of, if that is not compared
    counts_if_asked: ClassVar[bool] = True  # a difference of its section where that is asked for


class SpellingDiff(FieldDiff):
    """A fact that two formats spell otherwise, without effect: it is listed and never counts."""

    __slots__ = ()
    counts_if_asked: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class SideRelation:
    """A Relation (renamed keys, say) under which one model, "a" or "b", is read, the other not.

    `cause` is the name of the cause that it is. `between`: it was found by comparing the names of
    both models, so that neither need be wrong.
    """

    side: str
    relation: Relation
    cause: str = "tensor_names"
    between: bool = False

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {"side": self.side, **self.relation.to_json()}
