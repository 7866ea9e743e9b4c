"""The records of a diagnosis: findings, evidence, points and the Diagnosis itself.

A and B are the two models, runs or traces that are compared; a *side* is one of them. An *item* is
one thing that a model or a trace is made of: a tensor, a key, a text, a point. A *level* is one
stage of a comparison: identity, configuration, tensors, forward pass and so on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from aprfmt.base.data_frames import Row, Tabular
from aprfmt.causes import CAUSES
from aprfmt.causes.remedies import has_weights
from aprfmt.measure.findings import Confidence, Finding
from aprfmt.measure.item_repairs import repair_items_command, surplus_commands
from aprfmt.measure.named_causes import MENDS, NamedCause
from aprfmt.measure.nonfinite import NonFinite
from aprfmt.measure.verdicts import Level, Verdict, worst_verdict
from aprfmt.model.ledger import Ledger, NotCompared
from aprfmt.model.verdict import Compared, Pronounced, VerdictWords, items_clause, pronounce
from aprfmt.tokenizer.keys import STATED_ELSEWHERE

if TYPE_CHECKING:
    from aprfmt.base.notebook import Tone

# The class of an answer, finer than its verdict: the first words of the report.
DivergenceKind = Literal["same", "precision", "derived", "not_exercised", "bug", "not_comparable"]
KINDS: Mapping[DivergenceKind, str] = {
    "same": "same", "precision": "precision", "derived": "derived",
    "not_exercised": "differs, not exercised", "bug": "bug", "not_comparable": "not comparable",
}  # fmt: skip
EXIT: Mapping[DivergenceKind, Literal[0, 1, 2]] = {
    "same": 0, "precision": 0, "derived": 1, "not_exercised": 1, "bug": 1, "not_comparable": 2,
}  # fmt: skip
OF_A_RUN = ("forward", "capture")  # levels of faults that no file of a model holds
ABSENT_POINTS = "points are not in the trace"  # of what was not checked
ALSO_EXPLAINS = "explains it as well"  # of the evidence on a cause that is as good
CANNOT_TELL = "these tokens and points cannot tell the two apart"
ALL_ZERO = "all values of A and B are zero: nothing was written there"  # of the evidence


@dataclass(frozen=True)
class Touched:
    """The hyperparameters and role keys of weights that a finding is about.

    Both are empty if a pass reads none of them.
    """

    hyper: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


@dataclass
class CoverageText:
    """Sentences of the report: what was run, compared without a run, and not reached by a probe."""

    run: list[str] = field(default_factory=list)
    compared: list[str] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, list[str]]:
        """Return {"run", "compared_not_run", "not_reached"}: lists of distinct sentences."""
        return {
            "run": list(dict.fromkeys(self.run)),
            "compared_not_run": list(dict.fromkeys(self.compared)),
            "not_reached": list(dict.fromkeys(self.not_reached)),
        }


@dataclass(frozen=True, slots=True)
class Evidence:
    """One piece of evidence: the level, a sentence, its places, and a number if there is one."""

    level: Level
    says: str
    where: tuple[str, ...] = ()
    number: float | None = None


@dataclass(frozen=True, slots=True)
class PointRow:
    """One capture point of both sides.

    `direct` is the relative L2 distance of the two runs, `shadow` that of the reference's operation
    on the run's own input from the run's value. `gain` is `direct` divided by that of the layer's
    input. `apart`: the two runs do not agree. `beyond`: they do not, or an operation does not.
    `side` is the side that `shadow` is about. `nonfinite` locates NaN and infinities: of the two
    runs, or of the shadow pass, in which A is the model and B the run.
    """

    key: str
    point: str
    layer: int | None
    direct: float | None
    shadow: float | None
    tolerance: float
    gain: float | None = None
    side: str = ""
    beyond: bool = False
    note: str = ""
    nonfinite: NonFinite | None = None
    apart: bool = False


def _cause_names(findings: Sequence[Finding]) -> str:
    """Return the causes of findings as one text, each once; "the unknown cause" for no name."""
    return ", ".join(dict.fromkeys(one.cause or "the unknown cause" for one in findings))


@dataclass(frozen=True)
class Diagnosis(Tabular):
    """The result of `diagnose`: where two models, traces or runs first differ, and why.

    `complete`: with the confirmed causes removed nothing but rounding is left; None where that
    was not measured. `coverage` says what was run, compared without a run, and not reached.
    """

    a: str
    b: str
    findings: tuple[Finding, ...]
    evidence: tuple[Evidence, ...]
    checked: tuple[str, ...]
    not_checked: tuple[str, ...]
    reason: str = ""  # why the two sides cannot be compared
    ids: tuple[int, ...] = ()
    points: tuple[PointRow, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    complete: bool | None = None
    remainder: float | None = None  # of the logits, with the confirmed causes taken away
    coverage: CoverageText = field(default_factory=CoverageText)
    left: tuple[NotCompared, ...] = ()  # of two models: what was not compared by its meaning
    ledgers: tuple[Ledger, Ledger] | None = None
    accept: tuple[str, ...] = ()  # `unread:PATTERN`s: items that count as equal all the same
    stored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # file's names of places
    item_arguments: Mapping[tuple[str, str], str] = field(default_factory=dict)  # words of `set`
    other_model: bool = False  # `reason` is an established difference: A and B are two models
    way_on: str = ""  # the command to run next where the comparison ended with a `reason`

    def __repr__(self) -> str:
        from aprfmt.base.object_repr import short_repr

        return short_repr(self, f"{self.a} and {self.b}", self.verdict, self.cause or "")

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the findings, or a worse one if not all was compared.

        "not_comparable" if there is a `reason`, or nothing differs and something could not be
        compared. "bug" if an item that was not compared is on one side only or unequal.
        """
        if self._end_reason:
            return "not_comparable"
        exit_code = self.pronounced.exit
        if self._findings_verdict in ("same", "precision") and exit_code:
            return "bug" if exit_code == 1 else "not_comparable"
        return self._findings_verdict

    @property
    def underived_faults(self) -> tuple[Finding, ...]:
        """The confirmed bugs in weights or keys that B's training or merging from A cannot explain.

        () where neither model is derived from the other. Other tokens, templates and stops are
        left out, as many trainings change them.
        """
        others = [row for row in self.findings if row.verdict == "not_comparable"]
        if not others or not all(has_weights(row.cause, "trained") for row in others):
            return ()
        if self.reason and not self.reason.startswith(KINDS["derived"]):
            return ()
        return tuple(
            row
            for row in self.findings
            if row.verdict == "bug"
            and row.certainty == "confirmed"
            and row.level in ("config", "tensor")
        )

    @property
    def _end_reason(self) -> str:
        """Why the comparison ended early; "" where it did not, or confirmed faults were found."""
        return "" if self.underived_faults else self.reason

    @property
    def _findings_verdict(self) -> Verdict:
        """The worst verdict of the findings; "same" if there are none.

        "bug" where a derived model has confirmed faults that its derivation does not explain.
        """
        if self.underived_faults:
            return "bug"
        return worst_verdict(finding.verdict for finding in self.findings)

    @property
    def pronounced(self) -> Pronounced:
        """The verdict over the findings and over all items that were not compared."""
        found = self._findings_verdict
        differs = found not in ("same", "precision") or self.other_model
        # That nothing at all was compared is `reason`: where it is "", something was.
        compared = Compared(differs, {"levels": (max(1, len(self.checked)),) * 2}, self.left)
        words = VerdictWords("same" if differs else found, KINDS[found])
        # Where the comparison ended early, no item was listed that a pattern could match.
        return pronounce(words, compared, () if self._end_reason else self.accept)

    @property
    def lead(self) -> Finding | None:
        """The most important finding of the verdict's kind; None if there are no such findings.

        Of faults it is the first, which makes later ones differ too. Of roundings, which are
        independent, it is the one that moves the logits most, else the one of most tensors. Where
        only what was not compared makes the verdict, it is the finding that names that.
        """
        rows = [finding for finding in self.findings if finding.verdict == self.verdict]
        rows = list(self.underived_faults) or rows
        if not rows and self.verdict != self._findings_verdict:
            left = {item.name for item in self.pronounced.not_compared}
            rows = [finding for finding in self.findings if left.intersection(finding.where)]
        if self.verdict == "precision":
            return max(
                rows,
                key=lambda row: (row.cause != "", row.residual_before or 0.0, len(row.where)),
                default=None,
            )
        return rows[0] if rows else None

    @property
    def causes(self) -> tuple[NamedCause, ...]:
        """Every cause as a NamedCause, in the files' own names, the leading one first."""
        rows = sorted(self.findings, key=lambda row: row is not self.lead)
        return tuple(row.to_named_cause(self.stored) for row in rows)

    def table_rows(self) -> Sequence[Row]:
        """Return the causes as rows of a table, one dict per cause, the leading one first."""
        return [cause.to_json() for cause in self.causes]

    @property
    def cause(self) -> str | None:
        """The leading cause; None if it is not known, "none" for equal sides without findings."""
        if self.lead is not None:
            return self.lead.cause or None
        return None if self._end_reason or self.verdict != "same" else "none"

    @property
    def first(self) -> str | None:
        """The capture point that shows the leading cause first, else the first beyond tolerance.

        None if there is neither.
        """
        if self.lead is not None and self.lead.first:
            return self.lead.first
        return next((row.key for row in self.points if row.beyond), None)

    @property
    def confidence(self) -> Confidence:
        """The confidence of the leading cause: "confirmed", "ambiguous" or "unconfirmed".

        Without findings "confirmed" if the sides are the same or not comparable.
        """
        if self.lead is None:
            return "confirmed" if self.verdict in ("same", "not_comparable") else "unconfirmed"
        return self.lead.confidence

    @property
    def kind(self) -> DivergenceKind:
        """The class of the answer: the verdict, or "derived" or "not_exercised".

        "derived": one model was trained or merged from the other. "not_exercised": the bugs found
        change no logits of the probes.
        """
        if self.verdict == "not_comparable":
            derived = self.lead is not None and has_weights(self.lead.cause, "trained")
            said = not self.reason or self.reason.startswith(KINDS["derived"])
            return "derived" if derived and said else "not_comparable"
        if self.verdict == "bug" and self._findings_verdict != "bug":
            return "not_exercised"
        bugs = [finding for finding in self.findings if finding.verdict == "bug"]
        if self.underived_faults:
            return "bug"  # no pass that would show it is made of other weights
        if bugs and all(finding.exercised == "not_exercised" for finding in bugs):
            return "not_exercised"
        return self.verdict

    @property
    def exit_code(self) -> Literal[0, 1, 2]:
        """0 for same or precision, 1 for bug, derived or not exercised, 2 for not comparable.

        1 too for two models that are not comparable because they are seen to differ.
        """
        return 1 if self.kind == "not_comparable" and self.other_model else EXIT[self.kind]

    @property
    def next(self) -> tuple[str, ...]:
        """The commands to run next, without duplicates, in the order of the findings."""
        rows = [row.next for row in self.findings if row.next]
        if not rows and self.ledgers is not None and self.verdict == "bug":
            left = self.pronounced.not_compared
            surplus = surplus_commands(left, self.ledgers[1], self.b)
            if surplus:
                return surplus
            made = repair_items_command(left, self.item_arguments, self.a, self.b)
            return (made,) if made else ()
        if not rows and self.way_on and self.verdict == "not_comparable":
            return (self.way_on,)
        if (
            self.kind == "derived" or self.underived_faults
        ):  # what mends the rest goes before a look at the training
            rows.sort(key=lambda command: not command.startswith(MENDS))
        return tuple(dict.fromkeys(rows))

    @property
    def unrepaired_text(self) -> str:
        """A sentence on faults that no command repairs, or that B is another model; else "".

        What an engine computes, and what is recorded of it, is in no file that a command writes.
        """
        if self.other_model and self.verdict == "not_comparable":
            return "no command mends B: it is another model than A"
        if self.kind not in ("bug", "not_exercised"):
            return ""
        faults = [one for one in self.findings if one.verdict not in ("same", "precision")]
        if not faults:
            told = "no command mends B: what differs is in no key of its files"
            return "" if self.next or self.ledgers is None else told
        left = [one for one in faults if one.to_named_cause({}).remedy is None]
        if not left:
            return ""
        runs = [one for one in left if one.level in OF_A_RUN]
        if runs:
            what = runs[0].side or "B"
            if len(left) < len(faults):
                what = _cause_names(left)
            return f"no command mends {what}: what an engine computes or records is in no file"
        unsided = [one for one in left if one.leaves_side_open]
        if unsided:
            what = "A or B" if len(unsided) == len(faults) else _cause_names(left)
            of = "" if len(unsided) == len(left) else f" of {_cause_names(unsided)}"
            return f"no command mends {what}: the files do not say{of} which side is wrong"
        if all(one.side == "A" for one in left):
            told = "no command mends A: it is the side that departs"
            seen = all(one.certainty != "located" for one in left)
            return f"{told}, and B has the right values" if seen else told
        known = all(one.certainty != "located" for one in left)
        why = (
            "it has to be made again by what made it"
            if known
            else ("what would undo it is not known")
        )
        if len(left) == len(faults):
            return f"no command mends B: {why}"
        return f"no command mends {_cause_names(left)}: {why}"

    @property
    def sentence(self) -> str:
        """The verdict, the leading cause and what was not compared, in one sentence."""
        lead = self.lead
        if self._end_reason:
            reason = self.reason.removeprefix(f"{KINDS[self.kind]}: ")
            return f"{KINDS[self.kind]}: {reason}{self._untrained_clause()}"
        if lead is None and self.verdict != "same":
            held = f"{self._findings_verdict} in what was compared"
            if not self.checked:
                held = "nothing was compared"
            return f"{KINDS[self.kind]}: {held}{self._not_compared_clause()}"
        if lead is None:
            proof = "" if not self.proven else f"; {self.proven}"
            left = proof or self._absent_points_clause()
            if any(row.says == ALL_ZERO for row in self.evidence):
                left += f"; {ALL_ZERO}"
            aside = [row.says for row in self.evidence if STATED_ELSEWHERE in row.says]
            left += "".join(f"; {text}" for text in aside)
            return f"same: nothing that was compared differs{left}{self._not_compared_clause()}"
        words = {
            "precision": "precision: the same computation in other rounding",
            "same": "same: the same computation",
        }.get(self.kind, KINDS[self.kind])
        name = lead.cause or "no cause of the table fits"
        says = lead.to_named_cause(self.stored).says.removeprefix(f"{name}: ")
        known = "" if lead.certainty == "confirmed" else f" ({lead.certainty})"
        also = "".join(self._also_clause(name) for name in dict.fromkeys(lead.also))
        at = f", first seen at {lead.first}" if lead.first else ""
        more = len({f.cause for f in self.findings if f.verdict == self.verdict}) - 1
        others = f"; {more} more cause{'s' if more > 1 else ''} after it" if more > 0 else ""
        left = f"{self._remainder_clause()}{self._accepted_clause()}"
        if self.underived_faults:
            made = [row.says for row in self.findings if has_weights(row.cause, "trained")]
            left = f"; apart from that B is derived: {'; '.join(dict.fromkeys(made))}{left}"
        return f"{words}: {name}{known} - {says}{at}{also}{others}{left}"

    def _also_clause(self, cause: str) -> str:
        """Return the end of a sentence: another `cause` would explain the leading finding as well.

        What it would be, and what more of the run would tell, is read from the evidence.
        """
        begin = f"{cause} {ALSO_EXPLAINS} ("
        told = [row.says for row in self.evidence if row.says.startswith(begin)]
        what, _, end = told[0].removeprefix(begin).rpartition("): ") if told else ("", "", "")
        more = end.removeprefix(CANNOT_TELL)
        tell = f"{more} tell which" if end.startswith(CANNOT_TELL) and more else ""
        return f"; {cause} would explain it as well" + (f" ({what}){tell}" if what else "")

    def _untrained_clause(self) -> str:
        """Return a clause on the faults that B's training cannot explain; "" if there are none.

        "" for any other kind of answer than "derived".
        """
        if self.kind != "derived":
            return ""
        faults = [
            one
            for one in self.findings
            if one.verdict not in ("same", "precision") and not has_weights(one.cause, "trained")
        ]
        names = dict.fromkeys(
            f"{one.cause} ({one.says})" if one.level == "tensor" else one.cause or "unknown"
            for one in faults
        )
        place = "that" if any(one.level == "tensor" for one in faults) else "the weights"
        return f"; apart from {place}: {', '.join(names)}" if names else ""

    def _absent_points_clause(self) -> str:
        """Return the end of a sentence about points that a trace lacks; "" if it has all."""
        return "".join(f"; {text}" for text in self.not_checked if ABSENT_POINTS in text)

    def _not_compared_clause(self) -> str:
        """Return the end of a sentence about items not compared or accepted as such; "" if none."""
        return items_clause(self.pronounced.not_compared) + self._accepted_clause()

    def _accepted_clause(self) -> str:
        """Return the end of a sentence on items accepted as not compared; "" if there are none."""
        left = self.pronounced.not_compared
        taken = [row for row in self.left if row not in left]
        return items_clause(taken, "; accepted, not compared")

    @property
    def proven(self) -> str:
        """The sentence that proves both sides equal without a pass; "" if there is none."""
        return next((row.says for row in self.evidence if row.says.startswith("proven")), "")

    def _remainder_clause(self) -> str:
        """Return the end of a sentence on the difference left without the confirmed causes.

        "" for other verdicts than a bug, or where that was not measured.
        """
        lead = self.lead
        if lead is not None and lead.exercised == "below_rounding" and self.kind == "bug":
            return "; its effect on the logits of these probes is inside rounding"
        if self.kind != "bug" or self.complete is None:
            return ""
        if self.complete:
            return "; complete: without it nothing but rounding is left"
        left = "" if self.remainder is None else f", {self.remainder:.3g} of the logits"
        if not any(row.certainty == "confirmed" for row in self.findings):
            return f"; not complete: no cause is confirmed{left and ', which leaves'}{left[1:]}"
        return f"; not complete: what is confirmed leaves a difference{left}"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the sentence, the causes, the next commands."""
        from aprfmt.base.notebook import Card, Table

        tones: Mapping[str, Tone] = {"same": "good", "precision": "good", "bug": "bad"}
        rows = [
            (one.cause or "unknown", one.confidence, ", ".join(one.where[:4]), one.first)
            for one in self.findings
        ]
        return Card(
            f"Diagnosis of {self.a} | {self.b}",
            self.sentence,
            tones.get(self.kind, "warn"),
            (),
            [
                Table(("cause", "", "where", "first seen at"), rows, len(rows)),
                Table(("next",), [(command,) for command in self.next], len(self.next)),
            ],
        ).html()

    def to_json(self) -> dict[str, Any]:
        """Return plain data: the verdict's fields first, then findings, evidence and points."""
        lead = self.lead
        spoken = replace(
            self.pronounced, word=KINDS[self.kind], says=self.sentence, exit=self.exit_code
        )
        return {
            "verdict": self.verdict,
            "cause": self.cause,
            "where": list(lead.where) if lead is not None else [],
            "first": self.first,
            "confidence": self.confidence,
            "residual_before": None if lead is None else lead.residual_before,
            "residual_after": None if lead is None else lead.residual_after,
            "evidence": [asdict(row) for row in self.evidence],
            "checked": list(self.checked),
            "not_checked": list(self.not_checked),
            "class": self.kind,
            "complete": self.complete,
            "remainder": self.remainder,
            "coverage": self.coverage.to_json(),
            "not_compared": [asdict(row) for row in spoken.not_compared],
            **spoken.to_json(),
            "ledger": {
                side: each.to_json() for side, each in zip("ab", self.ledgers or (), strict=False)
            },
            "next": list(self.next),
            "unmended": self.unrepaired_text,
            "a": self.a,
            "b": self.b,
            "sentence": self.sentence,
            "reason": self.reason,
            "causes": [row.to_json() for row in self.causes],
            "findings": [
                {**row.to_json(), "means": cause_description(row.cause)} for row in self.findings
            ],
            "ids": list(self.ids),
            "points": [asdict(row) for row in self.points],
            "facts": dict(self.facts),
        }


def cause_description(cause: str) -> str:
    """Return what a cause means, from the table of causes; "" for a name that is not in it."""
    return CAUSES[cause].means if cause in CAUSES else ""
