"""The order of a diagnosis: identity, hyperparameters, tensors, token ids, forward pass.

A and B are the two models, runs or traces that are compared; a *side* is one of them. An *item* is
one thing that a model is made of: a tensor, a key, a text. A *level* is one stage of the order.
"""

import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aprfmt.base.budget import BudgetSpent
from aprfmt.causes.restored_keys import architecture_name, refusal_reason
from aprfmt.diagnosis.model_comparison import compare_models
from aprfmt.diagnosis.model_pair import ModelPair
from aprfmt.diagnosis.next_commands import MOST_IDS, mapping_command, with_next_commands
from aprfmt.diagnosis.progress import ProgressReporter, count_values
from aprfmt.diagnosis.records import Diagnosis, Evidence, PointRow
from aprfmt.diagnosis.renumbered_tokens import NUMBERED
from aprfmt.diagnosis.sides import Side, open_side_trace, trace_ids
from aprfmt.diagnosis.static_findings import Levels
from aprfmt.diagnosis.stored_names import stored_names_of_places
from aprfmt.diagnosis.zero_values import zero_points_of_trace
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.measure.findings import Finding
from aprfmt.measure.item_repairs import inspect_unreadable_command, item_arguments
from aprfmt.model import Model
from aprfmt.model.completeness import check_runnable
from aprfmt.model.ledger import (
    LATE,
    OF_A_PASS,
    Kind,
    Ledger,
    NotCompared,
    join_ledgers,
    list_not_compared,
    make_ledger,
)

if TYPE_CHECKING:
    from aprfmt.diagnosis.forward import JudgedTrace
    from aprfmt.diagnosis.probes import ChosenProbes
    from aprfmt.inference.trace import Trace
    from aprfmt.measure.trace_view import TraceLike
    from aprfmt.measure.traces import FirstToken, PointDiff


@dataclass
class DiagnosisRun:
    """One diagnosis in progress: the two sides, and all findings so far."""

    a: Side
    b: Side
    stack: ExitStack
    reference: Model | None
    ids: tuple[int, ...] | None
    memory: int | None = None
    reporter: ProgressReporter = field(default_factory=ProgressReporter)
    levels: Levels = field(default_factory=Levels)
    traces: "dict[str, Trace]" = field(default_factory=dict)
    judged: "dict[str, JudgedTrace]" = field(default_factory=dict)
    points: list[PointRow] = field(default_factory=list)
    relation: Finding | None = None  # the one under which B's packed weights are read
    rows_apart: Finding | None = None  # two traces compared on the rows that both have
    pairs: "Sequence[PointDiff]" = ()
    first: "FirstToken | None" = None  # the earliest token that differs between two runs
    pair: ModelPair | None = None  # two different models
    chosen: "ChosenProbes | None" = None  # their probes
    embedded: tuple[str, ...] = ()  # sides whose recorded embedding says the ids

    def make_diagnosis(self, reason: str = "") -> Diagnosis:
        """Return the diagnosis with all findings so far; `reason` is why it ended early, or ""."""
        levels = self.levels
        levels.close()
        lengths = {} if self.pair is None else self.pair.lengths_needed()
        left, ledgers = self._uncompared_items()
        left = (*left, *_unexplained_points(levels.findings))
        findings = with_next_commands(
            self.a, self.b, self.ids or (), levels.findings, lengths, self._sides_with_ids()
        )
        return Diagnosis(
            self.a.text, self.b.text, tuple(findings),
            tuple(dict.fromkeys(levels.evidence)),
            tuple(levels.checked), tuple(dict.fromkeys(levels.not_checked)),
            reason or levels.reason, self.ids or (), tuple(self.points), self.facts(),
            levels.complete, levels.remainder, levels.coverage, left, ledgers,
            stored=stored_names_of_places(findings, self.a.model, self.b.model),
            item_arguments={} if ledgers is None else item_arguments(left, *ledgers),
            other_model=levels.other_model and not reason,
            way_on=self._command_after_end(reason or levels.reason, left),
        )  # fmt: skip

    def _sides_with_ids(self) -> list[str]:
        """Return the labels of the sides whose trace says its token ids."""
        if not self.traces:
            return [*self.embedded]
        from aprfmt.measure.trace_view import records_token_ids

        held = [label for label, trace in self.traces.items() if records_token_ids(trace)]
        return [*held, *self.embedded]

    def _command_after_end(self, reason: str, left: Sequence[NotCompared]) -> str:
        """Return the next command to advise where two sides cannot be compared completely.

        `reason` is what ended the comparison, `left` what was not compared. The command shows by
        how much two models differ, records or maps a trace on the other side's ids, asks for what
        is missing, continues without a budget, or lists what cannot be read. What only the user
        knows is in capitals.
        """
        a, b = (shlex.quote(str(side.path)) for side in (self.a, self.b))
        side = next((one for one in (self.b, self.a) if one.kind == "trace"), None)
        if not reason:
            if any(row.state == LATE for row in left):
                return f"aprfmt diagnose {shlex.quote(self.a.text)} {shlex.quote(self.b.text)}"
            return inspect_unreadable_command(left, str(self.a.path), str(self.b.path))
        if self._unrunnable_reason():
            return ""  # no command runs the model
        if self.levels.other_model or side is None:
            return f"aprfmt diff {a} {b} --top 20"
        trace = self.traces.get(side.label)
        if trace is not None and len(self.traces) == 1 and _has_no_point(trace):
            return f"aprfmt trace --load {shlex.quote(str(side.path))}"
        other = self.traces.get("A" if side.label == "B" else "B")
        recorded = [trace_ids(one) for one in (other, trace) if one is not None]
        ids = self.ids or next(filter(None, recorded), None)
        opened = self.model_of(side)
        named = "" if trace is None else str(trace.run.get("model") or "")
        model = str(opened.path) if opened is not None else named if Path(named).exists() else ""
        if not ids or not model:
            both = self.a.kind == self.b.kind == "trace"
            given = f" --model {shlex.quote(model) if model else 'MODEL'}" if both else ""
            return f"aprfmt diagnose {a} {b}{given} --ids IDS"
        shown = ",".join(map(str, ids)) if len(ids) <= MOST_IDS else "IDS"
        path, again = shlex.quote(model), shlex.quote(f"{side.path.stem}-again.safetensors")
        if trace is not None and "aprfmt" in trace.run:
            return f"aprfmt trace {path} --payload --points all --ids {shown} -o {again}"
        if trace is None or trace.records or not trace.run.get("unknown"):
            return mapping_command(path, shown, again)
        # No array has a point's name: their values may tell which points they are.
        from aprfmt.measure.trace_view import records_token_ids

        given = "" if records_token_ids(trace) else shown
        return mapping_command(path, given, again, shlex.quote(str(side.path)))

    def _uncompared_items(self) -> tuple[tuple[NotCompared, ...], tuple[Ledger, Ledger] | None]:
        """Return (items that were not compared, (A's ledger, B's ledger)).

        A ledger lists all items of a model's files. The ledgers are None unless two models were
        compared.
        """
        a, b = self.a.model, self.b.model
        report = self.levels.report
        named = {key for one in self.levels.findings for key in one.where}
        arrays = tuple(row for row in self.unread_arrays() if row.name not in named)
        said = any(
            one.cause == "capture_rows" and one.verdict == "same" for one in self.levels.findings
        )
        if a is None and b is None and len(self.traces) > 1 and not said:
            from aprfmt.diagnosis import trace_pair
            from aprfmt.measure.trace_rows import CHOSEN, rows_of_one_side

            first, second = self.traces["A"], self.traces["B"]
            shared = [key for key in trace_pair.shared_keys(first, second) if key in CHOSEN]
            arrays = (*rows_of_one_side(second, first, shared), *arrays)
        if a is None or b is None or report is None:
            sides_run = [each for each in (self.a, self.b) if each.kind != "trace"]
            unread = [
                replace(row, side=side.label)
                for side in sides_run
                if side.model is not None
                for row in make_ledger(side.model, OF_A_PASS).not_compared
            ]
            if len(sides_run) > 1:  # two runs of one file, or the file twice
                unread = [
                    replace(row, side="", state="equal" if row.state == "unread" else row.state)
                    for row in unread
                    if row.side == "A"
                ]
            return (*self.levels.left, *arrays, *unread), None
        kinds: tuple[Kind, ...] = ("tokenizer part", "generation setting")
        sides = make_ledger(a, kinds), make_ledger(b, kinds)
        left = (*report.not_compared, *self.levels.left, *list_not_compared(*sides, kinds), *arrays)
        whole = report.ledgers or ()
        joined = [join_ledgers(one, more) for one, more in zip(whole, sides, strict=False)]
        return left, (joined[0], joined[1]) if joined else None

    def unread_arrays(self) -> tuple[NotCompared, ...]:
        """Return the arrays of the traces that are no point; of two traces, whether they differ."""
        traces = list(self.traces.values())
        if not traces:
            return ()
        from aprfmt.measure.trace_view import unread_arrays
        from aprfmt.measure.unread_arrays import compare_unread_arrays

        return compare_unread_arrays(*traces) if len(traces) == 2 else unread_arrays(*traces)

    def facts(self) -> dict[str, Any]:
        """Return facts on both sides under "a" and "b", and the first differing token.

        Each side has kind, format, architecture and backend; "first_token" is there if one
        differs.
        """
        found: dict[str, Any] = {}
        for side in (self.a, self.b):
            row: dict[str, Any] = {"text": side.text, "kind": side.kind}
            if side.model is not None:
                row |= {"format": side.model.format, "architecture": architecture_name(side.model)}
            if side.device_choice is not None:
                row["run"] = str(side.device_choice)
            trace = self.traces.get(side.label)
            if trace is not None:
                row["backend"] = trace.run.get("backend")
                row["model"] = trace.run.get("model")
                row["points"] = len(trace.records)
            found[side.label.lower()] = row
        if self.first is not None:
            found["first_token"] = asdict(self.first)
        return found

    def add_evidence(self, level: Any, text: str, *where: str, number: float | None = None) -> None:
        """Add a piece of evidence to `levels`: level, sentence, places, and a number if any."""
        self.levels.evidence.append(Evidence(level, text, tuple(where), number))

    # --- the order of the levels -------------------------------------------------------------

    def run(self) -> Diagnosis:
        """Return the diagnosis: compare level after level until one explains all differences."""
        # A trace may have one part of another checkpoint than its model.
        if self._find_mixed_checkpoint():
            return self.make_diagnosis()
        empty = self._empty_model_reason()
        if empty:
            return self.make_diagnosis(empty)
        # Two models: configuration and tensors first, since no pass may be needed.
        if self.a.model is not None and self.b.model is not None:
            self.reporter.announce_comparison(count_values(self.a.model))
            self.levels = compare_models(self.a.model, self.b.model, self.reporter.budget)
            if self.relation is not None:
                self.levels.stated.insert(0, self.relation)
            for side in (self.a, self.b):
                side.model = self.levels.models.get(side.label, side.model)
            if self.levels.reason:
                self.levels.not_checked.append("forward pass: the levels before it stop here")
                return self.make_diagnosis()
            alone = self.a.kind == self.b.kind == "model"
            if not alone and any(one.cause == NUMBERED for one in self.levels.findings):
                return self.make_diagnosis(
                    "the ids of the two mean other tokens; compare the run with the model that ran"
                )
            if self.levels.ended or (self.levels.unmoved and self.levels.stated and alone):
                return self.make_diagnosis()
            if self.a.kind == self.b.kind == "model" and self._has_same_model():
                self._record_same_file()
                return self.make_diagnosis()
            report = self.levels.report
            if report is not None and any(row.state == LATE for row in report.not_compared):
                self._record_omitted_pass()
                return self.make_diagnosis()
            if self.has_two_models():
                self.pair = ModelPair(self.a.model, self.b.model, self.levels)
                self.pair.compare_quantities()
                if self.a.kind == self.b.kind == "model" and self.pair.prove_equal():
                    return self.make_diagnosis()
        self._choose_sequence()
        for side in (self.a, self.b):
            if side.kind == "trace":
                self._load_trace(side)
        if self.levels.reason:
            return self.make_diagnosis()
        if self._has_tower_alone():
            return self.make_diagnosis()
        reason = self._unrunnable_reason() or self._settle_ids()
        if reason:
            return self.make_diagnosis(reason)
        if self.ids is None:
            return self._compare_without_ids()
        if self._judge_other_sequences():
            return self.make_diagnosis()
        self._judge_recorded_ids()
        if self._find_seen_padding():
            return self.make_diagnosis()
        from aprfmt.diagnosis import forward_level

        try:
            with self.reporter.budget.in_force() as reading:
                if self._has_budget():
                    forward_level.compare_passes(self)
                else:
                    self._record_omitted_pass()
            if reading.over:
                self._record_omitted_pass()
        except BudgetSpent:
            self._record_omitted_pass()
        except AprfmtError as error:
            if not self.levels.findings:
                raise
            self.levels.not_checked.append(f"forward pass: {error}")
        if not self.judged and not self.points and not self.levels.findings:
            if not self.levels.checked:
                return self.make_diagnosis("there is nothing that both sides have")
        return self.make_diagnosis(forward_level.incomparable_reason(self))

    def _empty_model_reason(self) -> str:
        """Return a sentence if a side's file holds no tensor, with what it does hold; else ""."""
        for side in (self.a, self.b):
            source = None if side.model is None else side.model.source
            if source is None or source.tensors:
                continue
            held = [note.text for note in source.notes if "holds objects" in note.text]
            return f"{side.label} holds no tensor" + (f"; {held[0]}" if held else "")
        return ""

    def _has_budget(self) -> bool:
        """Return whether the budget has time for passes, and memory for the weights they read."""
        models = {id(m): m for m in (self.a.model, self.b.model, self.reference) if m is not None}
        nbytes = sum(tensor.nbytes for model in models.values() for tensor in model.values())
        budget = self.reporter.budget
        return budget.has_time() and budget.has_room(nbytes)

    def _record_same_file(self) -> None:
        """Add evidence that no forward pass is needed, since both sides are one file."""
        self.levels.checked.append("forward pass: not needed, of the same file")
        self.levels.coverage.run.append("no pass: both sides are the same file")
        self.levels.complete, self.levels.remainder = True, 0.0

    def _record_omitted_pass(self) -> None:
        """Add evidence that the budget had no time or memory for a forward pass."""
        why = self.reporter.budget.reason
        self.levels.not_checked.append(f"forward pass: {why}")
        self.levels.left += (NotCompared("level", "forward pass", LATE, why),)

    def _has_tower_alone(self) -> bool:
        """Return whether one of two models is a tower of pictures or sounds, which reads no tokens.

        Token ids cannot be run on it; that is added as evidence.
        """
        if self.traces:
            return False
        for side in (self.a, self.b):
            if side.model is not None and not int(side.model.hyper["vocab_size"]):
                name = side.model.resolution.spec.name
                self.levels.not_checked.append(
                    f"forward pass: {side.label}, {name}, has no row for a token id"
                )
                return True
        return False

    def _find_mixed_checkpoint(self) -> bool:
        """Return whether a run used some weights of another checkpoint; if so, add the finding.

        Only for a trace compared with a model, where `reference` is another model.
        """
        sides = sorted((self.a, self.b), key=lambda side: side.kind)
        model, run = sides[0].model, sides[1]
        if [side.kind for side in sides] != ["model", "trace"] or self.reference is None:
            return False
        if model is None or self._has_same_model() or refusal_reason(self.reference):
            return False
        self._load_trace(run)
        if self.levels.reason or self._settle_ids() or self.ids is None:
            return False
        from aprfmt.causes.forward.mixed_checkpoints import find_mixture

        found = find_mixture(
            model, self.reference, self.traces[run.label], self.ids, self.pass_dtype(), run.label
        )
        if found is None:
            return False
        self.levels.findings.append(found)
        self.levels.checked.append(f"{run.label}: with each part of {self.reference.path.name}")
        return True

    def model_of(self, side: Side) -> Model | None:
        """Return the model that a side's trace ran on: its own, the given or the other side's.

        They are tried in this order. None if there is none of these.
        """
        other = self.b if side is self.a else self.a
        return side.model or self.reference or other.model

    def store_trace(self, side: Side, trace: "Trace") -> "Trace":
        """Store a side's trace and return it; set `levels.reason` if all its values are zero."""
        self.traces[side.label] = trace
        zeros = zero_points_of_trace(trace)
        if zeros:
            self.levels.reason = (
                f"all values of {side.label} are zero, at {zeros} points: nothing was measured"
            )
        return trace

    def _load_trace(self, side: Side) -> None:
        """Open a side's saved trace and add evidence about it."""
        from aprfmt.measure.repeated_tokens import repeated_tokens
        from aprfmt.measure.trace_view import backend_name, dump_sentences

        trace = self.store_trace(
            side, open_side_trace(side, self.ids, self.stack, self.model_of(side))
        )
        held = sum(trace.recorded_values(key) is not None for key in list(trace.records)[:1])
        engine = backend_name(trace)
        name = f", run by {engine}" if engine else ""
        self.add_evidence(
            "identity",
            f"{side.label}: a trace of {len(trace.records)} points{name}"
            + (f" from {trace.run['model']}" if trace.run.get("model") else ""),
        )
        for says in (*dump_sentences(trace), *(one.says for one in repeated_tokens(trace))):
            self.add_evidence("identity", f"{side.label}: {says}")
        if not held:
            self.levels.not_checked.append(f"{side.label}: holds statistics, no values")
        unknown = trace.run.get("unknown")
        rows = unknown.items() if isinstance(unknown, Mapping) else ()
        self.levels.not_checked += [f"{side.label}: {key}: {_entry_text(why)}" for key, why in rows]
        if trace.nonfinite:
            where = trace.nonfinite
            self.add_evidence(
                "forward", f"{side.label} has a NaN or an infinity, first at {where}", where
            )

    def _settle_ids(self) -> str:
        """Set `ids` to the token ids to compare on; return why they cannot be used, or "".

        They are those recorded in traces, else the given ones, else chosen ones.
        """
        from aprfmt.diagnosis.recorded_ids import hidden_causes, id_mismatch_sentence
        from aprfmt.inference.probe_ids import choose_ids
        from aprfmt.measure.trace_view import records_token_ids

        reason = self._take_ids_of_embeddings()
        if reason:
            return reason
        # The ids recorded in traces win, and must agree with each other and the given ones.
        named = {
            side.label: found
            for side in (self.a, self.b)
            if side.label in self.traces
            and (found := trace_ids(self.traces[side.label])) is not None
        }
        reason = id_mismatch_sentence(self.ids, named)
        if reason:
            return reason
        if named:
            self.ids = next(iter(named.values()))
            self.levels.checked.append(f"token ids: {len(self.ids)}, the same on both sides")
        self.levels.not_checked += [
            f"{label}: token ids: not recorded in it; taken to be those of this pass"
            for label, trace in self.traces.items()
            if self.ids is not None and not records_token_ids(trace) and label not in self.embedded
        ]
        # Without any, ids are chosen that reach what differs.
        if self.ids is None and not self.traces:
            if self.pair is not None:
                runs = any(side.kind == "run" for side in (self.a, self.b))
                self.chosen = self.pair.choose_probes_for_pair(runs)
                self.ids = self.chosen.ids
            else:
                models = [side.model for side in (self.a, self.b) if side.model is not None]
                runs = any(side.kind == "run" for side in (self.a, self.b))
                self.ids = choose_ids([model.hyper for model in models], long=runs)
            self.add_evidence("identity", f"token ids: {len(self.ids)} chosen, the same for both")
        for side in (self.a, self.b):
            model = self.model_of(side)
            if model is not None and self.ids is not None:
                self.levels.not_checked += hidden_causes(model.hyper, len(self.ids))
                size = int(model.hyper["vocab_size"])
                if max(self.ids) >= size:
                    return f"token id {max(self.ids)}; {side.label}'s embedding has {size} rows"
        return ""

    def _take_ids_of_embeddings(self) -> str:
        """Set `ids` to those that recorded embeddings show, where none are stated.

        Returns a sentence if two traces' embeddings belong to different ids, else "".
        """
        from aprfmt.diagnosis.recorded_ids import id_mismatch_sentence, ids_of_embedding

        sides = [side for side in (self.a, self.b) if side.label in self.traces]
        if self.ids is not None or any(trace_ids(self.traces[side.label]) for side in sides):
            return ""
        shown = {
            side.label: found
            for side in sides
            if (found := ids_of_embedding(self.traces[side.label], self.model_of(side))) is not None
        }
        reason = id_mismatch_sentence(None, shown)
        if reason or not shown:
            return reason
        self.ids, self.embedded = next(iter(shown.values())), (*shown,)
        labels = " and ".join(shown)
        self.levels.checked.append(
            f"token ids: {len(self.ids)}, those whose rows the recorded embedding of {labels} has"
        )
        for side in sides:  # read again, since the ids say how many rows a point has
            trace = open_side_trace(side, self.ids, self.stack, self.model_of(side))
            self.store_trace(side, trace)
        return ""

    def _choose_sequence(self) -> None:
        """Set `ids` to those of the first differing sequence, if both sides are dumps of many."""
        from aprfmt.measure.trace_view import sequence_name

        if self.ids is not None or not self.a.kind == self.b.kind == "trace":
            return
        from aprfmt.diagnosis.batch_sequences import first_differing_sequence

        models = {side.label: self.model_of(side) for side in (self.a, self.b)}
        self.ids = first_differing_sequence((self.a, self.b), models, self.stack)
        if self.ids is not None:
            self.levels.checked.append(
                f"of the sequences of both dumps the one {sequence_name(self.ids)}, the first that "
                "differs, if any does"
            )

    def _judge_other_sequences(self) -> bool:
        """Compare the other sequences of two dumps; return whether they explain all differences.

        Adds the finding that one side has another sequence's rows. Where that dump has the right
        rows too, these are compared from then on.
        """
        from aprfmt.measure.trace_view import other_sequences

        assert self.ids is not None
        if not self.traces:
            return False
        from aprfmt.diagnosis.batch_sequences import (
            BatchSequences,
            rows_of_another_sequence,
            rows_of_other_ids,
        )

        if len(self.traces) < 2:
            self.levels.left = (*self.levels.left, *other_sequences(*self.traces.values()))
            for side in (self.a, self.b):
                trace, model = self.traces.get(side.label), self.model_of(side)
                if trace is not None and model is not None:
                    dtype = self.pass_dtype()
                    rows = rows_of_other_ids(side.label, trace, model, self.ids, dtype)
                    if rows is not None:
                        self.levels.findings.append(rows)
                        self.levels.complete = True
                        return True
            return False
        models = {side.label: self.model_of(side) for side in (self.a, self.b)}
        sides = {side.label: side for side in (self.a, self.b)}
        batch = BatchSequences(sides, self.traces, models, self.ids, self.stack)
        if not batch.others("A") and not batch.others("B"):
            return False
        found = rows_of_another_sequence(batch, self.pass_dtype())
        left = tuple(batch.not_compared(frozenset() if found is None else found.explained))
        self.levels.left = (*self.levels.left, *left)
        agree = [
            ids for ids in batch.others("A")
            if ids in batch.others("B") and batch.is_beyond(ids) is False
        ]  # fmt: skip
        if agree:
            self.levels.checked.append(f"{len(agree)} other sequences of both dumps, which agree")
        if found is not None:
            self.traces = dict(found.traces)
            self.levels.stated.append(found.finding)
            if found.unfit:
                self.levels.not_checked.append(
                    "forward pass: no rows of these ids are in the dump that departs"
                )
        return found is not None and found.unfit

    def _judge_recorded_ids(self) -> None:
        """Add findings on wrong special tokens or padding around recorded ids.

        Padding that no later row sees is removed from ids and traces. Rows of a trace that are in
        another order than its tokens are put in order.
        """
        from aprfmt.diagnosis.recorded_ids import (
            exchanged_rows,
            frame_finding,
            hidden_padding,
            without_leading_rows,
        )
        from aprfmt.measure.trace_view import records_token_ids

        for side in (self.a, self.b):
            trace = self.traces.get(side.label)
            if trace is None or self.ids is None:
                continue
            ordered = exchanged_rows(self.model_of(side), trace, self.ids, self.pass_dtype())
            if ordered is not None:
                self.traces[side.label], finding = ordered
                self.levels.stated.append(finding)
        sides = [
            side
            for side in (self.a, self.b)
            if side.label in self.traces and records_token_ids(self.traces[side.label])
        ]
        if not sides or self.ids is None or len(sides) < len(self.traces):
            return
        model = self.model_of(sides[0])
        hidden = hidden_padding(model, self.traces, self.ids, self.pass_dtype())
        if hidden is not None:
            count, finding = hidden
            for label, trace in list(self.traces.items()):
                self.traces[label] = without_leading_rows(trace, len(self.ids), count)
            self.ids = self.ids[count:]
            self.levels.stated.append(finding)
        for side in sides:
            chosen = "aprfmt" in self.traces[side.label].run  # a text's ids have their frame there
            wrong = frame_finding(self.model_of(side), side.label, self.ids, chosen=chosen)
            if wrong is not None:
                self.levels.stated.append(wrong)

    def _find_seen_padding(self) -> bool:
        """Return whether a trace counts padding that its mask hides; add the finding then."""
        from aprfmt.diagnosis.padded_rows import counted_padding, seen_padding

        for side in (self.a, self.b):
            trace, model = self.traces.get(side.label), self.model_of(side)
            if trace is None or self.ids is None:
                continue
            about = (model, trace, side.label, self.ids, self.pass_dtype())
            found = seen_padding(*about) or counted_padding(*about)
            if found is not None:
                self.levels.findings.append(found)
                self.levels.checked.append(f"{side.label}: the pass that counts the padding")
                self.levels.complete, self.levels.remainder = True, 0.0
                return True
        return False

    def _unrunnable_reason(self) -> str:
        """Return why no forward pass of the model for a single trace is known; "" if one is.

        Of a vision tower and others only names and shapes are known: token ids would not help.
        """
        for side in (self.a, self.b) if len(self.traces) == 1 else ():
            model = self.model_of(side) if side.kind == "model" else None
            if model is not None and model.resolution.spec.level != "full":
                try:
                    check_runnable(model.resolution, model.path)
                except ArchError as error:
                    return str(error)
        return ""

    def _compare_without_ids(self) -> Diagnosis:
        """Return the diagnosis of traces without token ids: compared point by point only."""
        from aprfmt.diagnosis import forward_level

        self.levels.not_checked.append(
            "token ids: the trace does not say them; give --ids for shadowing and causes"
        )
        if len(self.traces) < 2:
            (trace,) = self.traces.values()
            if _has_no_point(trace):
                says = "none of the trace's arrays is a capture point of a language model"
                return self.make_diagnosis(f"{says}{forward_level.unread_clause(trace)}")
            return self.make_diagnosis("the trace does not say its token ids; give --ids")
        forward_level.compare_runs(self)
        options = "--ids" if self.model_of(self.a) is not None else "--model and --ids"
        needed = f"the traces do not say their token ids: {options} would let it find the cause"
        self.levels.findings = [
            replace(one, says=f"{one.says}; {needed}")
            if one.verdict == "bug" and one.level == "forward" and not one.confirmed
            else one
            for one in self.levels.findings
        ]
        return self.make_diagnosis(forward_level.incomparable_reason(self))

    def has_two_models(self) -> bool:
        """Return whether both sides have a model, and not the same one."""
        return self.a.model is not None and self.b.model is not None and not self._has_same_model()

    def _has_same_model(self) -> bool:
        """Return whether both sides have the same model file."""
        a, b = self.a.model, self.b.model
        return a is not None and b is not None and a.path.resolve() == b.path.resolve()

    def pass_dtype(self) -> str:
        """Return the dtype of passes to run: "float64" if a side's run had it, else "float32"."""
        wide = any(
            side.device_choice is not None and side.device_choice.dtype == "float64"
            for side in (self.a, self.b)
        )
        for trace in self.traces.values():
            wide |= any(record.dtype == "float64" for record in trace.records.values())
        return "float64" if wide else "float32"


def _has_no_point(trace: "TraceLike") -> bool:
    """Return whether none of a trace's arrays is a capture point by its name."""
    return not trace.records and not trace.run.get("lost")


def _unexplained_points(findings: Sequence[Finding]) -> tuple[NotCompared, ...]:
    """Return a NotCompared for each captured value that a finding calls harmless without a proof.

    What is computed from such values agrees, but nothing says what they are: a verdict of "same"
    does not cover them.
    """
    why = "nothing here gives these values"
    return tuple(
        NotCompared("captured array", key, "unreadable", why)
        for finding in findings
        if (finding.level, finding.verdict, finding.certainty) == ("capture", "same", "located")
        for key in finding.where
    )


def _entry_text(value: Any) -> str:
    """Return a value of the trace's metadata as text."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {text}" for key, text in value.items())
    if isinstance(value, (list, tuple)):
        return " - ".join(map(str, value))
    return str(value)
