"""The DiffReport: all that `diff` found, its verdict, and the next commands."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from aprfmt.base.data_frames import Row, Tabular
from aprfmt.base.object_repr import short_repr
from aprfmt.base.protocols import Damage
from aprfmt.base.sequences import join_first
from aprfmt.causes import CAUSES
from aprfmt.measure.findings import Finding
from aprfmt.measure.item_repairs import (
    inspect_unreadable_command,
    repair_items_command,
    surplus_commands,
)
from aprfmt.measure.named_causes import (
    MISLABELLED,
    REWRITES,
    TRAINED,
    NamedCause,
    completed_command,
    is_repaired_by_rewriting,
    overflows_encoding,
    rewrite_command,
    set_command,
)
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.records import (
    EQUAL,
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
    tensor_beside_tower,
)
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, acceptance_predicate, pronounce

# What a report has besides notes and findings; --only names some of them.
SECTIONS = ("tensors", "hyperparameters", "tokenizer", "metadata")
_ONE_SIDED = ("ONLY_IN_A", "ONLY_IN_B")
METADATA_KEYS = "metadata keys"  # what the section is called in counts
WORDS = VerdictWords("equal", "different", "not decided")
_KEYS_OF = {"tied_embedding": "tied_embeddings"}  # of causes that a key of B's own may mend
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
    findings: tuple[Finding, ...] = ()  # what explains the differing tensors
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
    contradicted: tuple[Finding, ...] = ()  # what one file states and contradicts, the other not
    taken: str = ""  # which layers or channels of A the whole of B is, in words
    other_model: str = ""  # by what A and B are seen to be other models
    item_arguments: Mapping[tuple[str, str], str] = field(default_factory=dict)  # words of `set`
    input_scales: tuple[str, ...] = ()  # endings of A's scales of activations
    of_engine: bool = False  # B is the saved weights of an engine, which `diagnose` does not take
    is_state: bool = False  # B is a state dict without a configuration: no command changes it
    # {key: (A's encoding, B's)} of B's matrices that were not compared; "" where A has none
    left_encodings: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    beside_tower: Collection[str] = ()  # tensors of a model that the other side's tower lacks
    tower_options: Sequence[str] = ()  # of the command that writes a tower alone from A
    unwhole: Collection[str] = ()  # paths of the sides whose files are damaged or incomplete

    def table_rows(self) -> Sequence[Row]:
        """Return one dict per tensor, with its verdict and its distances."""
        return [row.to_json() for row in self.tensors]

    @property
    def causes(self) -> tuple[NamedCause, ...]:
        """All causes that were found, as NamedCause, in the order in which a report names them.

        The order: lost tensors that a relation of names leaves, relations of B's names,
        contradicted statements, causes seen in tensors, relations of A's names. Relations that only
        say that both sides name tensors differently come after the faults of values.
        """
        related = [
            Finding(
                one.cause,
                f"{one.side.upper()}: {one.relation.says}{one.relation.examples_text}",
                "tensor",
                "bug",
                one.relation.where,
                True,
                next=one.relation.remedy,
                proof=unfitted_proof(len(self.tensors), 1.0 - self._one_sided_share),
            ).to_named_cause({})
            for one in self.relations
        ]
        of_a = [
            cause for cause, one in zip(related, self.relations, strict=True) if one.side == "a"
        ]
        no_fault = [
            cause
            for cause, one in zip(related, self.relations, strict=True)
            if one.between and one.side == "b"
        ]
        rows = [one.to_named_cause({}) for one in self.lost_after_relations]
        rows += [one for one in related if one not in of_a and one not in no_fault]
        rows += [one.to_named_cause(self.stored) for one in self.contradicted]
        before = len(rows)
        for one in self.findings:
            mends = is_repaired_by_rewriting(one.cause, one.confirmed, one.values)
            mends = mends and CAUSES[one.cause].verdict == "bug"
            mends = mends and one.cause not in self.own_parts and one.side != "A"
            mends = mends and not one.leaves_side_open
            command = (
                one.next
                or self._own_key_command(one.cause)
                or (self.rewriting_command if mends else "")
            )
            rows.append(replace(one, next=command).to_named_cause(self.stored))
            if CAUSES[one.cause].verdict == "bug":
                before = len(rows)
        rows[before:before] = no_fault
        return tuple(
            one
            if one.remedy is None or self._can_run(one.remedy.command)
            else replace(one, remedy=None)
            for one in (*rows, *of_a)
        )

    @property
    def lost_after_relations(self) -> tuple[Finding, ...]:
        """The tensors that B lacks with all relations applied, as a finding; () without a relation.

        A relation that maps all other names would hide them.
        """
        lost = tuple(row.key for row in self.tensors if row.verdict == "ONLY_IN_A")
        if not (lost and self.relations):
            return ()
        says = f"B lacks {len(lost)} of the tensors: {join_first(lost, 4)}"
        finding = Finding(
            "missing_tensors",
            says,
            "tensor",
            CAUSES["missing_tensors"].verdict,
            lost,
            True,
            side="B",
            proof=unfitted_proof(len(lost)),
        )
        return (finding,)

    def _can_run(self, command: str) -> bool:
        """Return whether a command runs on these files.

        No command changes a state dict, and none writes a damaged side anew. A command that writes
        the model next to a state dict runs.
        """
        words = shlex.split(command)
        changed = Path(words[2])
        if words[1] in REWRITES and not self._is_whole(words[2]):
            return False
        return not self.is_state or Path(self.b) not in (changed, *changed.parents)

    def _is_whole(self, path: str) -> bool:
        """Return whether the model at a path, or in a folder, has nothing damaged or missing."""
        return all(Path(path) not in (Path(side), *Path(side).parents) for side in self.unwhole)

    def _own_key_command(self, cause: str) -> str:
        """Return the command that sets a key of B to what B's tensors show; "" if none is wrong."""
        value = self.own_values.get(_KEYS_OF.get(cause, ""))
        return set_command(self.b, [value]) if value else ""

    @cached_property
    def rewriting_command(self) -> str:
        """The command that writes B again from A in B's encodings; "" if none does.

        "" too if A is damaged, incomplete or B's tower alone, if B was trained further, and if B is
        the state of an engine, which loads A.
        """
        if (
            not self._is_whole(self.a)
            or (self.beside_tower and not self.tower_options)
            or self.of_engine
            or any(one.cause in TRAINED for one in self.findings)
        ):
            return ""
        wrong = {key for one in self.findings if one.cause in MISLABELLED for key in one.keys}
        rows = [
            row
            for row in self.tensors
            if row.shape_b is not None and len(row.shape_b) > 1 and row.key not in wrong
        ]
        mine = {row.key: row.encoding_a for row in rows if row.encoding_a}
        theirs = {row.key: row.encoding_b for row in rows if row.encoding_b}
        # What was not compared is as mislabelled as what was, in the same two encodings.
        mislabelled = {(row.encoding_a, row.encoding_b) for row in self.tensors if row.key in wrong}
        left = {key: pair for key, pair in self.left_encodings.items() if pair not in mislabelled}
        mine |= {key: of_a for key, (of_a, _) in left.items() if of_a}
        theirs |= {key: of_b for key, (_, of_b) in left.items()}
        if any(overflows_encoding(one.values, theirs) for one in self.findings):
            theirs = {}
        return rewrite_command(
            self.a, self.b, mine, theirs, self.file_type, self.input_scales, self.tower_options
        )

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
            tensor_beside_tower(row) if row.name in self.beside_tower else row
            for row in (*of_a, *of_b)
        )

    @property
    def _one_sided_share(self) -> float:
        """The fraction of tensors, 0 to 1, that only one side has with all relations applied."""
        alone = sum(tensor.verdict in _ONE_SIDED for tensor in self.tensors)
        return alone / max(1, len(self.tensors))

    @property
    def next(self) -> tuple[str, ...]:
        """The next commands: those that repair B, else one that shows more; () for equal models."""
        mends = [one.remedy.command for one in self.causes if one.remedy is not None]
        if mends or self.exit_code() == 0:
            return tuple(dict.fromkeys(mends))
        if self._surplus_commands and all(map(self._can_run, self._surplus_commands)):
            return self._surplus_commands
        if self._items_command and self._can_run(self._items_command):
            return (self._items_command,)
        # A file that cannot be read whole cannot be diagnosed.
        if any(one.kind != "codec" for one in self.damage):
            return self._damage_commands
        if self.exit_code() == 2 and any(row.state == LATE for row in self.not_compared):
            return (f"aprfmt diff {shlex.quote(self.a)} {shlex.quote(self.b)}",)
        unreadable = any(row.verdict == "UNREADABLE" for row in self.tensors)
        if self.exit_code() == 2 and not unreadable:  # `diagnose` finds why they do not decode
            return (inspect_unreadable_command(self.not_compared, self.a, self.b),)
        if self.asked and "tensors" not in self.asked:  # `diagnose` sends to these sections
            only = " ".join(f"--only {name}" for name in self.asked)
            return (f"aprfmt diff {shlex.quote(self.a)} {shlex.quote(self.b)} {only} -v",)
        if self.of_engine:
            return (self._worst_command,)
        return (f"aprfmt diagnose {shlex.quote(self.a)} {shlex.quote(self.b)}",)

    @property
    def _worst_command(self) -> str:
        """The command that shows where the tensor differs that differs most, or all of them."""
        rows = [row for row in self.tensors if row.verdict == "DIFFERENT"]
        worst = max(rows, key=lambda row: row.stats.rel_l2 if row.stats else 0.0, default=None)
        picked = "" if worst is None else f" --tensor {shlex.quote(worst.key)}"
        return f"aprfmt diff {shlex.quote(self.a)} {shlex.quote(self.b)}{picked} -v"

    @property
    def _damage_commands(self) -> tuple[str, ...]:
        """The command for a damaged file, as a tuple of one.

        Where B's readable tensors have A's bytes, it completes B's file from A's; else it is
        `aprfmt validate`.
        """
        rows = [row for row in self.tensors if row.verdict != "UNREADABLE"]
        if rows and all(row.verdict == "SAME_BYTES" for row in rows):
            places = {one.where for one in self.damage}
            made = completed_command(places, self.a, self.b)
            if made:
                return (made,)
        return (f"aprfmt validate {shlex.quote(self.damage[0].where)}",)

    @cached_property
    def _items_command(self) -> str:
        """The command that makes B agree where only items of `not_compared` differ; else ""."""
        if self.ledgers is None or replace(self, not_compared=()).exit_code() == 1:
            return ""
        return repair_items_command(self.not_compared, self.item_arguments, self.a, self.b)

    @cached_property
    def _surplus_commands(self) -> tuple[str, ...]:
        """The commands that cut bytes of no tensor from B, if only these bytes differ; else ()."""
        if self.ledgers is None or replace(self, not_compared=()).exit_code() == 1:
            return ()
        return surplus_commands(self.not_compared, self.ledgers[1], self.b)

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
                (name in self.asked or row.decisive) and row.item not in accepted for row in each
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
        done = sum(t.verdict not in (*_ONE_SIDED, "UNREADABLE") for t in self.tensors)
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
