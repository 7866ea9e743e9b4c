"""The DiffReport: all that `diff` found, its verdict, and the next commands.

A and B are the two models; a *side* is one of them. An *item* is one thing that a model is made of:
a tensor, a key, a text.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from aprfmt.base.data_frames import Row, Tabular
from aprfmt.base.protocols import Damage
from aprfmt.measure.records import (
    EQUAL,
    ONE_SIDED,
    TENSOR_VERDICTS,
    DifferenceImage,
    FieldDiff,
    SideRelation,
    TensorDiff,
)
from aprfmt.measure.texts import KeyDiff, SideVerdicts
from aprfmt.model.ledger import (
    DIFFERING,
    LATE,
    OPEN,
    SIDES,
    Ledger,
    NotCompared,
    damaged_files,
    one_sided_tensors,
    tensor_outside_tower,
)
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, acceptance_predicate, pronounce

if TYPE_CHECKING:
    from aprfmt.measure.findings import Finding
    from aprfmt.measure.named_causes import NamedCause

# What a report has besides notes and findings; --only names some of them.
SECTIONS = ("tensors", "hyperparameters", "tokenizer", "metadata")
METADATA_KEYS = "metadata keys"  # what the section is called in counts
WORDS = VerdictWords("equal", "different", "not decided")
_ELSEWHERE = VerdictWords("equal", "different to readers, though of equal values", "not decided")


@dataclass(frozen=True)
class DiffReport(Tabular):
    """Everything `diff` found; `to_json` gives all of it but the images.

    `asked` are the sections that the user named: there every difference counts, since nothing else
    was asked. Where none is named, all are compared, and those of fields count that change the
    output.
    """

    a: str
    b: str
    tensors: tuple[TensorDiff, ...]
    hyperparameters: tuple[FieldDiff, ...]
    tokenizer: tuple[FieldDiff, ...]
    metadata: tuple[FieldDiff, ...]
    notes: tuple[str, ...] = ()
    findings: "tuple[Finding, ...]" = ()  # what explains the differing tensors
    images: tuple[DifferenceImage, ...] = ()  # of the worst tensors, where they were asked for
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
    file_type: object = None  # what a GGUF at B says of itself
    own_values: Mapping[str, str] = field(default_factory=dict)  # KEY=VALUE that B's tensors show
    own_parts: Collection[str] = ()  # causes that speak of a part that B alone has
    not_tried: tuple[str, ...] = ()  # explanations that could not be tried, and why
    contradicted: "tuple[Finding, ...]" = ()  # what one file states and contradicts, the other not
    taken: str = ""  # which layers or channels of A the whole of B is, in words
    other_model: str = ""  # by what A and B are seen to be other models
    item_arguments: Mapping[tuple[str, str], str] = field(default_factory=dict)  # words of `set`
    input_scales: tuple[str, ...] = ()  # endings of A's scales of activations
    of_engine: bool = False  # B is the saved weights of an engine, which `diagnose` does not take
    is_state: bool = False  # B is a state dict without a configuration: no command changes it
    # {key: (A's encoding, B's)} of B's matrices that were not compared; "" where A has none
    left_encodings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    outside_tower: Collection[str] = ()  # tensors of a model that the other side's tower lacks
    copy_options: Sequence[str] = ()  # of the command that writes B from A: a tower alone, no names
    unwhole: Collection[str] = ()  # paths of the sides whose files are damaged or incomplete

    def table_rows(self) -> Sequence[Row]:
        """Return one dict per tensor, with its verdict and its distances."""
        return [row.to_json() for row in self.tensors]

    @property
    def causes(self) -> "tuple[NamedCause, ...]":
        """All causes that were found, as NamedCause, in the order in which a report names them."""
        if not (self.relations or self.contradicted or self.findings):
            return ()
        from aprfmt.compare.repairs import named_causes

        return named_causes(self)

    @property
    def lost_after_relations(self) -> "tuple[Finding, ...]":
        """The tensors that B lacks with all relations applied, as a finding; () without a relation.

        A relation that maps all other names would hide them.
        """
        if not self.relations:
            return ()
        from aprfmt.compare.repairs import lost_tensors

        return lost_tensors(self)

    @cached_property
    def rewriting_command(self) -> str:
        """The command that writes B again from A in B's encodings; "" if none does."""
        from aprfmt.compare.repairs import rewriting_command

        return rewriting_command(self)

    @property
    def next(self) -> tuple[str, ...]:
        """The next commands: those that repair B, else one that shows more; () for equal models."""
        mends = [one.remedy.command for one in self.causes if one.remedy is not None]
        if mends or self.exit_code() == 0:
            return tuple(dict.fromkeys(mends))
        from aprfmt.compare.repairs import next_commands

        return next_commands(self)

    @cached_property
    def unlisted_tensors(self) -> tuple[NotCompared, ...]:
        """The tensors on one side only that the architecture does not list, as NotCompared."""
        if self.ledgers is None:
            return ()
        of_a, of_b = (
            one_sided_tensors(
                (row.key for row in self.tensors if row.verdict == f"ONLY_IN_{side}"), side, ledger
            )
            for side, ledger in zip(SIDES, self.ledgers, strict=True)
        )
        return tuple(
            tensor_outside_tower(row) if row.name in self.outside_tower else row
            for row in (*of_a, *of_b)
        )

    def count_differing_fields(self, accept: Collection[str] = ()) -> Mapping[str, int]:
        """Return {section: number of differences that count}, without the tensors' section.

        `accept` are items to be taken for equal, as in `--accept`: a field of such an item does
        not count.
        """
        taken = acceptance_predicate(accept)
        accepted = {f"{row.kind} {row.name}" for row in self.not_compared if taken(row)}
        rows = {name: getattr(self, name) for name in SECTIONS if name != "tensors"}
        found = {
            name: sum(
                (row.decisive or (name in self.asked and row.counts_if_asked))
                and row.item not in accepted
                for row in each
            )
            for name, each in rows.items()
        }
        if "tokenizer" in self.asked and self.beside is not None:
            # A template, or a generation config, may differ where no fact of the tokenizer does.
            apart = sum(item not in accepted for item in self.beside.differing)
            found["tokenizer"] = max(found["tokenizer"], apart)
        if self.contradicted:
            found["hyperparameters"] += len(self.contradicted)
        return {name: count for name, count in found.items() if count}

    def differing_tensors(self, accept: Collection[str] = ()) -> Sequence[str]:
        """Return the keys of the tensors that count as different, in order.

        `accept` says what to take for equal: "within" tensors that differ by the rounding of
        their encodings or were rounded or quantized again, `unread:PATTERN` tensors on one side
        only that no table lists.
        """
        fine = EQUAL | ({"WITHIN"} if "within" in accept else set()) | {"UNREADABLE"}
        taken = acceptance_predicate(accept)
        accepted = {row.name for row in self.unlisted_tensors if taken(row)}
        if "within" in accept:
            accepted |= {row.key for row in self.tensors if row.is_rounded}
        return [
            row.key for row in self.tensors if row.verdict not in fine and row.key not in accepted
        ]

    def __repr__(self) -> str:
        found = (f"{count} {verdict}" for verdict, count in self.counts.items() if count)
        from aprfmt.base.object_repr import short_repr

        return short_repr(self, f"{self.a} and {self.b}", ", ".join(found))

    @property
    def counts(self) -> Mapping[str, int]:
        """{verdict: number of tensors}, with zero for verdicts that do not occur."""
        counts: dict[str, int] = dict.fromkeys(TENSOR_VERDICTS, 0)
        for tensor in self.tensors:
            counts[tensor.verdict] += 1
        return counts

    def worst(self, count: int | None = None) -> Sequence[TensorDiff]:
        """Return the `count` worst tensors, None for all.

        They are ordered by verdict, then NaN on one side, then relative L2.
        """
        order = {verdict: i for i, verdict in enumerate(TENSOR_VERDICTS)}
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
        """Return the verdict (word, sentence, exit code) over what was compared and what was not.

        `accept` says what to take for equal: "within" tensors that differ by the rounding of
        their encodings or were rounded or quantized again, `unread:PATTERN` items that were not
        compared.
        """
        # What counts as different, after what the user accepted.
        apart = self.count_differing_fields(accept)
        alone = {row.name for row in self.unlisted_tensors}
        values = bool(apart) or not alone.issuperset(self.differing_tensors(accept))
        # How much was compared: tensors, or the other sections.
        done = sum(t.verdict not in (*ONE_SIDED, "UNREADABLE") for t in self.tensors)
        late = sum(row.kind == "tensor" and row.state == LATE for row in self.not_compared)
        counts: Mapping[str, tuple[int, int]] = {"tensors": (done, len(self.tensors) + late)}
        if not self.tensors and not late:
            counts = self._section_counts
        # What could not be read, of tensors and of files.
        unreadable = [
            NotCompared("tensor", tensor.key, "unreadable", tensor.cause)
            for tensor in self.tensors
            if tensor.verdict == "UNREADABLE"
        ]
        # The words of the headline.
        rounded = sum(row.is_rounded for row in self.tensors) if "within" in accept else 0
        counted = {**self.counts, "DIFFERENT": self.counts["DIFFERENT"] - rounded}
        said = [f"{count} {verdict}" for verdict, count in counted.items() if count]
        if rounded:
            said.append(f"{rounded} made again by rounding or quantizing")
        if apart and self.asked:
            fields = "; ".join(f"{name}: {count}" for name, count in apart.items())
            said.append(f"fields that differ: {fields}")
        left = (
            *self.not_compared,
            *self.unlisted_tensors,
            *unreadable,
            *damaged_files(self.damage),
        )
        taken = acceptance_predicate(accept)
        alike = not values and all(map(taken, self.unlisted_tensors))
        words = _ELSEWHERE if alike and self.relations else WORDS
        differs = values or bool(self.relations)
        return pronounce(words, Compared(differs, counts, left, ", ".join(said)), accept)

    @property
    def _section_counts(self) -> Mapping[str, tuple[int, int]]:
        """{section: (items compared, items)} of the sections of the report that are not of tensors.

        A metadata key that differs and that no reader uses counts as not compared.
        """
        left = sum(
            row.kind == "metadata key" and row.state in DIFFERING | OPEN
            for row in self.not_compared
        )
        return {
            name: (max(0, count - left) if name == METADATA_KEYS else count, count)
            for name, count in self.compared.items()
        }

    def exit_code(self, accept: Collection[str] = ()) -> int:
        """Return 0 for equal, 1 for different, 2 if that could not be decided.

        WITHIN counts as different unless `accept` has "within".
        """
        return self.pronounced(accept).exit

    @property
    def differs(self) -> bool:
        """Whether a value, a hyperparameter or the tokenizer differs once renaming is undone."""
        return replace(self, relations=()).exit_code() == 1

    @property
    def equal(self) -> bool:
        """Whether the exit code is 0 without accepting anything."""
        return self.exit_code() == 0

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the verdict, the findings, the worst tensors."""
        from aprfmt.base.notebook import ROWS, Card, Table

        # The verdict, differing tensors, and the fields that count.
        found = self.pronounced()
        within = self.exit_code(["within"]) == 0
        apart = [one for one in self.worst() if one.verdict not in EQUAL]
        rows = (*self.hyperparameters, *self.tokenizer, *self.metadata)
        fields = [row for row in rows if row.decisive or self.asked]
        return Card(
            f"{self.a} | {self.b}",
            found.says,
            "good" if self.equal else "warn" if within else "bad",
            (),
            [
                Table(
                    ("finding", ""),
                    [(one.cause, one.says) for one in self.findings],
                    len(self.findings),
                ),
                Table(
                    ("field", "A", "B"), [(row.name, row.a, row.b) for row in fields], len(fields)
                ),
                Table(
                    ("tensor", "verdict", "relative L2"),
                    [
                        (one.key, one.verdict, f"{one.stats.rel_l2:.3g}" if one.stats else "-")
                        for one in apart[:ROWS]
                    ],
                    len(apart),
                ),
            ],
        ).html()

    def to_json(self, accept: Collection[str] = ()) -> dict[str, object]:
        """Return plain data for `--json`; the verdict takes what `accept` names for equal."""
        found = self.pronounced(accept)
        ledgers = zip("ab", self.ledgers or (), strict=False)
        return {
            "a": self.a,
            "b": self.b,
            "verdict": found.word,
            "equal": found.exit == 0,
            "says": found.says,
            "causes": [row.to_json() for row in self.causes],
            "next": list(self.next) if found.exit or self.equal else [],
            "not_compared": [asdict(row) for row in found.not_compared],
            "ledger": {side: each.to_json() for side, each in ledgers},
            "counts": dict(self.counts),
            "hyperparameters": [asdict(row) for row in self.hyperparameters],
            "tokenizer": [asdict(row) for row in self.tokenizer],
            "metadata": [asdict(row) for row in self.metadata],
            "notes": list(self.notes),
            "other_model": self.other_model,
            "findings": [row.to_diff_json() for row in (*self.contradicted, *self.findings)],
            "relations": [row.to_json() for row in self.relations],
            "tensors": [row.to_json() for row in self.tensors],
            "damage": [asdict(row) for row in self.damage],
            "template": list(self.template),
            "generation": [asdict(row) for row in self.generation],
            **({} if self.beside is None else {"beside": asdict(self.beside)}),
            **found.to_json(),
        }
