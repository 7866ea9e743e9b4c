"""What comparing two models gives: frozen records with numbers, no sentences."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, get_args

from aprfmt.base.protocols import Damage, Value
from aprfmt.base.shown import short_repr
from aprfmt.compare.causes import CAUSES, Certainty, certainty_of
from aprfmt.compare.named_causes import Effect, NamedCause, convert_again, name_cause, written_anew
from aprfmt.compare.nonfinite import NonFinite
from aprfmt.compare.texts import KeyDiff, SideVerdicts
from aprfmt.model.ledger import Compared, Ledger, NotCompared, Pronounced, Words, pronounce
from aprfmt.model.relations import Relation

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
VERDICTS: tuple[TensorVerdict, ...] = get_args(TensorVerdict)
# What a report has besides notes and findings; --only names some of them.
SECTIONS = ("tensors", "hyperparameters", "tokenizer", "metadata")
EQUAL: frozenset[TensorVerdict] = frozenset({"SAME_BYTES", "SAME_VALUES"})
_ONE_SIDED = ("ONLY_IN_A", "ONLY_IN_B")
WORDS = Words("equal", "different", "not decided")
_ELSEWHERE = Words("equal", "equal values, but not where readers look for them", "not decided")


@dataclass(frozen=True, slots=True)
class ValueStats:
    """Element-wise measures of two decoded tensors; a is the first file.

    `rel_l2` is ||a-b|| / ||a||, over the elements finite on both sides; `max_abs_diff` with the
    multi-index where it occurs; `norm_a` and `norm_b` are ||a|| and ||b||; `ulp` the largest
    distance in float32 representations; `changed` counts elements whose values differ (NaN equals
    NaN); `nan_*` and `inf_*` are each side's own census. A NaN or infinity on one side only counts
    as changed and makes max_abs_diff infinite; `nonfinite` has the places, None where all values
    are finite.
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

    @property
    def alone(self) -> bool:
        """Say whether one side is not finite where the other holds something else."""
        return self.nonfinite is not None and self.nonfinite.alone > 0


@dataclass(frozen=True, slots=True)
class Derivation:
    """Whether one quantized side is what encoding the base's values again gives.

    `derives` is None where that could not be decided; `mode` is how it was made, or nearly so.
    `block` is the first that differs, in row `row`, beginning at `element` of the row.
    """

    derives: bool | None
    mode: str
    text: str
    block: int | None = None
    row: int | None = None
    element: int | None = None
    side: str = ""  # "a" or "b"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why two tensors of one role differ.

    `cause` is a name of causes/. `where` is the role key, then the roles it was confused with,
    if any. `evidence` are sentences: the first is the same for every tensor with the same
    defect, the later ones have this tensor's own numbers. `residual_before` and `residual_after`
    are ||a-b|| / max(||a||, ||b||) as stored and after the transformation (infinite where a NaN or
    infinity stands on one side only); `residual_after` is None where nothing was transformed.
    `confirmed` says that the transformation was applied to all the values it speaks of and made
    them equal: to the bit, or within the rounding of the coarser encoding.
    `reached` is how far that goes where it is less: `located` where nothing was transformed (damage
    that was only measured), `explained` where `share` of the values came out. None: as `confirmed`.
    """

    cause: str
    where: tuple[str, ...]
    evidence: tuple[str, ...]
    residual_before: float | None
    residual_after: float | None
    confirmed: bool
    reached: Certainty | None = None
    share: float | None = None

    @property
    def certainty(self) -> Certainty:
        """How sure it is: located, explained or confirmed."""
        return certainty_of(self.confirmed, self.reached)


@dataclass(frozen=True, slots=True)
class CauseGroup:
    """One cause and every tensor it explains, in one sentence.

    `certainty` is the least that holds for all of them, `share` that of their values which the
    stated change gives, None where it is only located. `detail` is what the first tensor alone
    shows: the row, the element, the byte.
    """

    cause: str
    text: str
    keys: tuple[str, ...]
    confirmed: bool
    certainty: Certainty = "located"
    share: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """One role of the union of both files, with one verdict.

    `layout` names what the formats did to the same values (rows permuted, widened, ...);
    `cause` names a defect that was confirmed or the bound that held; `explanation` is what the
    hypotheses found; `first_byte` is the first
    differing byte of the logical tensor's stored bytes, where both sides have comparable bytes.
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
    derivations: tuple[Derivation, ...] = ()  # of the quantized sides, where a base was given
    explanation: Explanation | None = None

    def unexplained(self, weak: Collection[str] = ()) -> bool:
        """Say whether it differs and nothing certain explains that, or only one of these causes."""
        found = self.explanation
        certain = found is not None and found.confirmed and found.cause not in weak
        return self.verdict == "DIFFERENT" and not certain


@dataclass(frozen=True, slots=True)
class Image:
    """Where a tensor differs: one number a cell of [height, width] elements.

    `rows` and `columns` are those of the tensor seen as a matrix. A number is the root mean square
    of a - b over that of all of a, infinite where one side alone is not finite. `a` and `b` have
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


@dataclass(frozen=True, slots=True)
class SideRelation:
    """A change under which one side ("a" or "b") is read, and the other is not."""

    side: str
    relation: Relation

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {"side": self.side, **self.relation.to_json()}


@dataclass(frozen=True)
class DiffReport:
    """Everything `diff` found; `to_json` gives all of it but the images.

    `asked` are the sections that the user named: there every difference counts, since nothing else
    was asked. Where none is named, all are looked at, and those of fields count that change the
    output.
    """

    a: str
    b: str
    tensors: tuple[TensorDiff, ...]
    hyperparameters: tuple[FieldDiff, ...]
    tokenizer: tuple[FieldDiff, ...]
    metadata: tuple[FieldDiff, ...]
    notes: tuple[str, ...] = ()
    findings: tuple[CauseGroup, ...] = ()  # what explains the differing tensors
    images: tuple[Image, ...] = ()  # of the worst tensors, where they were asked for
    damage: tuple[Damage, ...] = ()  # what is wrong with either file, whatever was compared
    template: tuple[str, ...] = ()  # the chat templates as a unified diff
    generation: tuple[KeyDiff, ...] = ()
    relations: tuple[SideRelation, ...] = ()  # changes under which one side alone is read
    beside: SideVerdicts | None = None  # verdicts on tokenizer, template and generation config
    asked: tuple[str, ...] = ()
    not_compared: tuple[NotCompared, ...] = ()  # items that no comparison by meaning covers
    ledgers: tuple[Ledger, Ledger] | None = None
    compared: Mapping[str, int] = field(default_factory=dict)  # things of the other sections
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # file's names of keys

    @property
    def causes(self) -> tuple[NamedCause, ...]:
        """Every cause as the record for the outside: relations first, then what tensors show."""
        rows = [
            name_cause(
                "tensor_names" if one.relation.kind != "axes" else "transpose",
                f"{one.side.upper()}: {one.relation.says}{one.relation.shown}", one.relation.where,
                {}, level="explained" if self._lacking else "confirmed",
                share=1.0 - self._lacking, command=one.relation.remedy,
            )
            for one in self.relations
        ]  # fmt: skip
        by_key = {tensor.key: tensor.explanation for tensor in self.tensors}
        for group in self.findings:
            found = [one for key in group.keys if (one := by_key.get(key)) is not None]
            sizes = [one.residual_before for one in found if one.residual_before is not None]
            mends = written_anew(group.cause, group.confirmed)
            mends = mends and CAUSES[group.cause].verdict == "bug"
            rows.append(name_cause(
                group.cause, group.text, group.keys, self.stored, level=group.certainty,
                share=group.share, effect=Effect(max(sizes, default=None)), detail=group.detail,
                command=convert_again(self.a, self.b) if mends else "",
            ))  # fmt: skip
        return tuple(rows)

    @property
    def _lacking(self) -> float:
        """The share of tensors that one side alone has under the relations."""
        alone = sum(tensor.verdict in _ONE_SIDED for tensor in self.tensors)
        return alone / max(1, len(self.tensors))

    @property
    def next(self) -> tuple[str, ...]:
        """The next commands: those that mend B, else the one that says more; none where equal."""
        mends = [one.remedy.command for one in self.causes if one.remedy is not None]
        if mends or self.exit_code() == 0:
            return tuple(dict.fromkeys(mends))
        if self.damage:  # a file that cannot be read whole cannot be diagnosed
            return (f"aprfmt validate {shlex.quote(self.damage[0].where)}",)
        if self.exit_code() == 2:
            return (f"aprfmt inspect {shlex.quote(self.b)} --account",)
        return (f"aprfmt diagnose {shlex.quote(self.a)} {shlex.quote(self.b)}",)

    @property
    def fields_apart(self) -> Mapping[str, int]:
        """Differences of fields that count, by section; sections without one are left out."""
        rows = {name: getattr(self, name) for name in SECTIONS if name != "tensors"}
        found = {
            name: sum(name in self.asked or row.decisive for row in each)
            for name, each in rows.items()
        }
        if "tokenizer" in self.asked and self.beside is not None:
            # A template, or a generation config, may differ where no fact of the tokenizer does.
            found["tokenizer"] = max(found["tokenizer"], len(self.beside.apart))
        return {name: count for name, count in found.items() if count}

    def __repr__(self) -> str:
        found = (f"{count} {verdict}" for verdict, count in self.counts.items() if count)
        return short_repr(self, f"{self.a} and {self.b}", ", ".join(found))

    @property
    def counts(self) -> Mapping[str, int]:
        """Tensors by verdict; every verdict is named."""
        counts: dict[str, int] = dict.fromkeys(VERDICTS, 0)
        for tensor in self.tensors:
            counts[tensor.verdict] += 1
        return counts

    def worst(self, count: int | None = None) -> Sequence[TensorDiff]:
        """Return tensors worst first: by verdict, those with NaN on one side, by relative L2."""
        order = {verdict: i for i, verdict in enumerate(VERDICTS)}
        ranked = sorted(
            self.tensors,
            key=lambda t: (
                order[t.verdict],
                not (t.stats and t.stats.alone),
                -(t.stats.rel_l2 if t.stats else 0.0),
            ),
        )
        return ranked[:count]

    def pronounced(self, accept: Collection[str] = ()) -> Pronounced:
        """Return the verdict over both ledgers and what was compared.

        `accept`: "within" takes WITHIN for equal, `unread:PATTERN` items that were not compared.
        """
        fine = EQUAL | ({"WITHIN"} if "within" in accept else set()) | {"UNREADABLE"}
        apart = self.fields_apart
        values = bool(apart) or any(tensor.verdict not in fine for tensor in self.tensors)
        done = sum(t.verdict not in (*_ONE_SIDED, "UNREADABLE") for t in self.tensors)
        counts = {"tensors": (done, len(self.tensors))}
        if not self.tensors:
            counts = {name: (count, count) for name, count in self.compared.items()}
        unreadable = [
            NotCompared("tensor", tensor.key, "unreadable")
            for tensor in self.tensors
            if tensor.verdict == "UNREADABLE"
        ]
        broken = [NotCompared("file", one.where, "unreadable", one.text) for one in self.damage]
        said = [f"{count} {verdict}" for verdict, count in self.counts.items() if count]
        if apart and self.asked:
            fields = "; ".join(f"{name}: {count}" for name, count in apart.items())
            said.append(f"fields that differ: {fields}")
        left = (*self.not_compared, *unreadable, *broken)
        words = WORDS if values or not self.relations else _ELSEWHERE
        differs = values or bool(self.relations)
        return pronounce(words, Compared(differs, counts, left, ", ".join(said)), accept)

    def exit_code(self, accept: Collection[str] = ()) -> int:
        """0 equal, 1 different (WITHIN too unless accepted), 2 if that could not be decided."""
        return self.pronounced(accept).exit

    @property
    def differs(self) -> bool:
        """True if a value, a hyperparameter or the tokenizer differs under the relations."""
        return replace(self, relations=()).exit_code() == 1

    @property
    def equal(self) -> bool:
        """True if exit code 0 without accepting anything."""
        return self.exit_code() == 0

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the verdict, the findings, the worst tensors."""
        from aprfmt.base.notebook import ROWS, Card, Table

        found = self.pronounced()
        within = self.exit_code(["within"]) == 0
        apart = [one for one in self.worst() if one.verdict not in EQUAL]
        rows = (*self.hyperparameters, *self.tokenizer, *self.metadata)
        fields = [row for row in rows if row.decisive or self.asked]
        return Card(
            f"{self.a} | {self.b}", found.says,
            "good" if self.equal else "warn" if within else "bad", (),
            [Table(("finding", ""), [(one.cause, one.text) for one in self.findings],
                   len(self.findings)),
             Table(("field", "A", "B"), [(row.name, row.a, row.b) for row in fields], len(fields)),
             Table(("tensor", "verdict", "relative L2"), [
                 (one.key, one.verdict, f"{one.stats.rel_l2:.3g}" if one.stats else "-")
                 for one in apart[:ROWS]], len(apart))],
        ).html()  # fmt: skip

    def to_json(self) -> dict[str, object]:
        """Return plain data for `--json`."""
        found = self.pronounced()
        ledgers = zip("ab", self.ledgers or (), strict=False)
        return {
            "a": self.a,
            "b": self.b,
            "verdict": found.word,
            "equal": self.equal,
            "says": found.says,
            "causes": [row.to_json() for row in self.causes],
            "next": list(self.next),
            "not_compared": [asdict(row) for row in found.not_compared],
            "ledger": {side: each.to_json() for side, each in ledgers},
            "counts": dict(self.counts),
            "hyperparameters": [asdict(row) for row in self.hyperparameters],
            "tokenizer": [asdict(row) for row in self.tokenizer],
            "metadata": [asdict(row) for row in self.metadata],
            "notes": list(self.notes),
            "findings": [asdict(row) for row in self.findings],
            "relations": [row.to_json() for row in self.relations],
            "tensors": [asdict(row) for row in self.tensors],
            "damage": [asdict(row) for row in self.damage],
            "template": list(self.template),
            "generation": [asdict(row) for row in self.generation],
            **({} if self.beside is None else {"beside": asdict(self.beside)}),
        }
