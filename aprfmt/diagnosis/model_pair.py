"""Two models: proves equal logits without a pass, else measures every finding by passes.

A *part* is the weights and hyperparameters of B that one finding is about. A *probe* is token ids
on which both models are run. A and B are the two models, runs or traces that are compared; a *side*
is one of them.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.causes import CAUSES, find_cause
from aprfmt.diagnosis.progress import ProgressReporter, multiplications_per_token
from aprfmt.diagnosis.records import Evidence
from aprfmt.diagnosis.static_findings import POSITIONS, DifferingRows, Levels, join_findings
from aprfmt.measure.findings import Exercised, Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.measure.records import EQUAL
from aprfmt.model import Model

if TYPE_CHECKING:
    from aprfmt.diagnosis.derived_quantities import Quantity
    from aprfmt.diagnosis.finding_effects import MixedResult, PartMeasurement, Share
    from aprfmt.diagnosis.paired_pass import Probe
    from aprfmt.diagnosis.probes import ChosenProbes
    from aprfmt.measure.traces import PointDiff

EQUIVALENT = "equal_quantities"
ROUTERS = ("ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias")  # choose experts
LAYERS = 3  # whose tokens are counted in a sentence
TRIES = 6  # probes of other ids, to reach experts
TRY_LENGTH = 48
CHEAP = 1e10  # multiplications and additions: a long probe costs nothing


@dataclass
class ModelPair:
    """Two models, the findings on their files, and what the differing hyperparameters result in.

    `quantities` are by number of the finding, `differing` the rows in which the models differ.
    """

    a: Model
    b: Model
    levels: Levels
    differing: DifferingRows = field(default_factory=DifferingRows)
    quantities: "dict[int, list[Quantity]]" = field(default_factory=dict)
    points: "Mapping[str, PointDiff]" = field(default_factory=dict)

    # --- without a pass -------------------------------------------------------------------------

    def compare_quantities(self) -> None:
        """Compare what differing hyperparameters result in, such as rope frequencies or masks.

        The comparisons are put into `quantities`. A finding whose results are all equal becomes
        EQUIVALENT. Sentences are added to the coverage.
        """
        levels, coverage = self.levels, self.levels.coverage
        for i, (finding, part) in enumerate(zip(levels.findings, levels.parts, strict=True)):
            if finding.level != "config" or not part.hyper or part.keys:
                continue
            from aprfmt.diagnosis.derived_quantities import compare_quantity

            changed = {name: self.b.hyper[name] for name in part.hyper if name in self.b.hyper}
            mixed = self.a.hyper.with_values(**changed)
            rotates = "rope" in (self.a.spec.block.position, self.b.spec.block.position)
            rows = [
                compare_quantity(name, self.a.hyper, mixed, rotates=rotates) for name in part.hyper
            ]
            known = [row for row in rows if row is not None]
            self.quantities[i] = known
            coverage.compared += [row.says for row in known]
            if known and len(known) == len(rows) and all(row.equal for row in known):
                says = "; ".join(dict.fromkeys(row.says for row in known))
                levels.findings[i] = replace(
                    finding,
                    cause=EQUIVALENT,
                    verdict=CAUSES[EQUIVALENT].verdict,
                    confirmed=True,
                    proof=unfitted_proof(len(known)),
                    says=f"{finding.says}; yet {says}",
                )

    def lengths_needed(self) -> dict[int, int]:
        """Return {finding's number: tokens that a pass needs to show it}; 0 for no least length."""
        found = {
            i: max((row.length for row in rows), default=0) for i, rows in self.quantities.items()
        }
        positions = self.differing.rows.get(POSITIONS, [])
        for i, part in enumerate(self.levels.parts):
            if POSITIONS in part.keys and positions:
                found[i] = positions[0] + 1
        return found

    def live_findings(self) -> list[int]:
        """Return the numbers of the findings that a pass can show; EQUIVALENT ones are left out."""
        rows = zip(self.levels.findings, self.levels.parts, strict=True)
        return [
            i
            for i, (finding, part) in enumerate(rows)
            if (part.hyper or part.keys) and finding.cause != EQUIVALENT
        ]

    def prove_equal(self) -> bool:
        """Return whether A and B give equal logits because all that passes read of them is equal.

        Without a pass: stored values, and what hyperparameters result in, are compared. If so,
        evidence and coverage are added, and the diagnosis is complete with remainder 0.
        """
        report, a, b = self.levels.report, self.a, self.b
        if (
            report is None
            or self.live_findings()
            or (a.spec.block, a.spec.forward) != (b.spec.block, b.spec.forward)
        ):
            return False
        both = [row for row in report.tensors if not row.verdict.startswith("ONLY_IN")]
        roles = {*a.roles, *b.roles}
        apart = [
            row
            for row in report.tensors
            if row not in both and row.key in roles and row.key != "output.weight"
        ]
        if apart or not both or any(row.verdict not in EQUAL for row in both):
            return False
        same = sum(row.verdict == "SAME_BYTES" for row in both)
        says = (
            f"proven without a pass: {same} tensors have equal bytes, {len(both) - same} equal "
            "values, and every quantity that a pass computes with is equal"
        )
        self.levels.evidence.append(Evidence("tensor", says))
        self.levels.checked.append("forward pass: not needed, equal logits are proven")
        self.levels.coverage.run.append("no pass: equal logits are proven by bytes and quantities")
        self.levels.complete, self.levels.remainder = True, 0.0
        return True

    # --- tokens ---------------------------------------------------------------------------------

    def choose_probes_for_pair(self, runs: bool) -> "ChosenProbes":
        """Return probes whose token ids and length reach what differs between the models.

        `runs`: one side is an engine's run, so that probes are as long as every attention window.
        """
        from aprfmt.diagnosis.probes import choose_probes, differing_rows
        from aprfmt.inference.probe_ids import LONGEST, MARGIN, critical_lengths

        models = [self.a, self.b]
        self.differing = differing_rows(self.a, self.b, self.levels.report)
        hypers = [model.hyper for model in models]
        length = max((reach for hp in hypers for reach in critical_lengths(hp)), default=0)
        cheap = 2 * 2.0 * 1.5 * length * multiplications_per_token(self.a) <= CHEAP
        wanted = [
            row.length + MARGIN
            for rows in self.quantities.values()
            for row in rows
            if row.length <= LONGEST
        ]
        least = max(wanted, default=0)
        return choose_probes(
            models, self.differing, long=runs or cheap, least=least, added=self.levels.added
        )

    def probe_given_ids(self, ids: Sequence[int]) -> "ChosenProbes":
        """Return one probe of the user's ids, with the differing embedding rows among them."""
        from aprfmt.diagnosis.probes import ChosenProbes, differing_rows, make_probe

        self.differing = differing_rows(self.a, self.b, self.levels.report)
        rows = set(self.differing.rows.get("token_embd.weight", ())) & set(ids)
        one = make_probe(ids, [self.a.hyper, self.b.hyper], "given")
        return ChosenProbes((one,), tuple(sorted(rows)))

    # --- with passes ----------------------------------------------------------------------------

    def measure_findings(
        self, chosen: "ChosenProbes", dtype: str, memory: int | None, reporter: ProgressReporter
    ) -> float:
        """Confirm or reject each finding by its effect on passes; return what no finding explains.

        That is the relative L2 of the logits with all findings' parts replaced, 0.0 if within the
        tolerance.
        """
        from aprfmt.diagnosis.finding_effects import PartMeasurement, make_run_pair
        from aprfmt.diagnosis.paired_pass import PairedPass

        # Weights that are equal on both sides need no second copy.
        report = self.levels.report
        rows = () if report is None else report.tensors
        equal = frozenset(
            row.key for row in rows if row.verdict in EQUAL and row.key in self.a.roles
        )
        pair = make_run_pair(self.a, self.b)
        bound = pair.threshold_of("logits", (dtype, dtype)).rel_l2
        with closing(PairedPass(self.a, self.b, equal, pair, dtype, memory, reporter)) as passes:
            # The effect of each finding, with more probes where experts were not reached.
            measuring = PartMeasurement(passes, self.levels.parts, list(chosen.probes))
            neutral = [i for i, row in enumerate(self.levels.findings) if row.verdict == "same"]
            found = measuring.measure_shares(neutral)
            found = self._reach_experts(measuring, found, neutral)
            if self._join_equal_parts(measuring, found, bound):
                neutral = [i for i, row in enumerate(self.levels.findings) if row.verdict == "same"]
                measuring = PartMeasurement(passes, self.levels.parts, measuring.probes)
                found = measuring.measure_shares(neutral)
            self.points = found.points
            # Confirm findings, then remove the confirmed ones, then say what was covered.
            self._finalize_findings(found.shares, bound)
            self._add_other_choices(measuring)
            self._remove_confirmed_causes(measuring, neutral, bound)
            self._add_coverage(measuring, chosen)
        tokens = len(chosen.ids)
        self.levels.checked.append(
            f"forward pass: numpy {dtype} of both models on {tokens} tokens, with each finding "
            "taken away"
        )
        return found.rest if found.rest > bound or math.isnan(found.rest) else 0.0

    def _join_equal_parts(
        self, measuring: "PartMeasurement", found: "MixedResult", bound: float
    ) -> bool:
        """Return whether findings cancel each other; then one says that the function is equal."""
        from aprfmt.diagnosis.equal_functions import find_equal_parts

        equal = find_equal_parts(measuring, found, self.levels, self.differing, bound)
        if equal is None:
            return False
        moved = join_findings(self.levels, *equal)
        self.quantities = {moved[i]: rows for i, rows in self.quantities.items() if i in moved}
        return True

    def _reach_experts(
        self, measuring: "PartMeasurement", found: "MixedResult", neutral: Sequence[int]
    ) -> "MixedResult":
        """Return `found`, the measured effects, or new ones with probes that use more experts.

        The new probes are chosen to reach experts that differ between the models. `neutral` are
        the findings whose parts A's replace in every pass.
        """
        from aprfmt.diagnosis.finding_effects import BUDGET, PartMeasurement
        from aprfmt.diagnosis.probes import make_probe, probe_other_ids, unrouted_experts

        passes, hp = measuring.passes, self.a.hyper
        left = unrouted_experts(self.differing, passes.routed)
        if not left:
            return found
        more: list[Probe] = []
        for ids in probe_other_ids(int(hp["vocab_size"]), TRY_LENGTH, TRIES):
            one = make_probe(ids, [hp, self.b.hyper], "other ids, for experts")
            if passes.flops + 2 * passes.pass_flops(one) > BUDGET:
                break
            passes.stage_inputs(one)
            now = unrouted_experts(self.differing, passes.routed)
            if sum(map(len, now.values())) < sum(map(len, left.values())):
                more.append(one)
            left = now
            if not left:
                break
        if not more:
            return found
        again = PartMeasurement(passes, measuring.parts, [*measuring.probes, *more])
        measuring.probes, measuring.known = again.probes, {}
        return measuring.measure_shares(neutral)

    def _finalize_findings(self, shares: "Sequence[Share]", bound: float) -> None:
        """Replace each finding by one with its measured effect; add evidence for each.

        `bound` is the tolerance of the logits (relative L2).
        """
        levels = self.levels
        for i, (finding, part, share) in enumerate(
            zip(levels.findings, levels.parts, shares, strict=True)
        ):
            if not (part.hyper or part.keys):
                continue
            levels.findings[i] = finalize_finding(finding, share, bound)
            levels.evidence.append(
                Evidence(
                    "forward",
                    _effect_sentence(finding, share, bound),
                    finding.where[:4],
                    share.before if share.alone else None,
                )
            )

    def _add_other_choices(self, measuring: "PartMeasurement") -> None:
        """Add to findings on rounded routers for how many tokens they choose other experts.

        The tokens are those of the first probe. The size of a router's difference does not show it,
        since rounding may make experts equal that are not. Such a finding becomes more than
        precision where A's scores are further apart than a sound run moves them.
        """
        from aprfmt.diagnosis.blended_model import count_stages

        levels = self.levels
        for i, part in enumerate(levels.parts):
            finding, probe = levels.findings[i], measuring.probes[0]
            keys = [key for key in part.keys if split_key(key)[1] in ROUTERS]
            if finding.verdict != "precision" or not keys or count_stages(self.a, self.b) == 1:
                continue
            if not measuring.is_affordable():
                levels.coverage.not_reached.append("whether rounded routers choose other experts")
                return
            rounded = {
                key
                for other, row in zip(levels.parts, levels.findings, strict=True)
                if row.verdict == "precision"
                for key in other.keys
                if key not in keys
            }
            found = measuring.passes.count_rerouted_tokens(keys, rounded, probe)
            if found:
                where = ", ".join(
                    f"{count} of {len(probe.ids)} in layer {layer}"
                    for layer, (count, _) in sorted(found.items(), key=lambda one: -one[1][0])[
                        :LAYERS
                    ]
                )
                more = f", and some in {len(found) - LAYERS} more layers" * (len(found) > LAYERS)
                said = f"the routers so rounded choose other experts for tokens: {where}{more}"
                sure = sum(surely for _, surely in found.values())
                if sure:
                    said += f"; {sure} of them by gaps wider than rounding moves a sound run"
                finding = replace(finding, says=f"{finding.says}; {said}")
                levels.findings[i] = replace(finding, verdict="bug") if sure else finding

    def _remove_confirmed_causes(
        self, measuring: "PartMeasurement", neutral: Sequence[int], bound: float
    ) -> None:
        """Measure B with the parts of the confirmed causes replaced by A's, one after the other.

        Sets `remainder`, the distance left, and `complete`, and adds the distances as evidence.
        `neutral` are findings whose parts are replaced in every pass. `bound` is the tolerance of
        the logits.
        """
        levels = self.levels
        order = [i for i in measuring.live if levels.findings[i].confirmed and i not in neutral]
        order.sort(key=lambda i: levels.findings[i].verdict != "bug")
        bare = measuring.without(neutral)
        steps = measuring.measure_removals(neutral, order)
        last = steps[-1][1] if steps else bare
        levels.remainder = last.distance if math.isfinite(last.distance) else None
        if not bare.distance <= bound:  # else there was nothing to explain
            levels.complete = last.distance <= bound
        if len(steps) > 1:
            names = [f"{_distance_text(bare.distance, bare.kl)} as it is"]
            names += [
                f"{_distance_text(one.distance, one.kl)} without {levels.findings[i].cause}"
                for i, one in steps
            ]
            levels.evidence.append(
                Evidence(
                    "forward",
                    "the logits' distance, the confirmed causes taken away one "
                    "after the other: " + ", ".join(names),
                    (),
                    last.distance,
                )
            )

    def _add_coverage(self, measuring: "PartMeasurement", chosen: "ChosenProbes") -> None:
        """Add sentences on what the probes covered, and which differences they did not reach."""
        from aprfmt.diagnosis.probes import unrouted_experts

        coverage, passes = self.levels.coverage, measuring.passes
        # Sequence lengths and added tokens of the probes.
        for one in measuring.probes:
            rows = "all rows" if one.rows is None else f"{len(one.rows)} rows"
            coverage.run.append(
                f"lengths 1 to {len(one.ids)} in one causal pass ({one.why}), logits of {rows}"
            )
        added = set(self.levels.added)
        if added:
            held = len(added & {i for one in measuring.probes for i in one.ids})
            coverage.run.append(f"{held} of {len(added)} special and added tokens")
        # Differing rows of tables: which of them were among the ids.
        for key, rows_apart in self.differing.rows.items():
            ids = set(chosen.rows) if key == "token_embd.weight" else set(range(len(chosen.ids)))
            hit = len(ids & set(rows_apart))
            text = f"{hit} of {len(rows_apart)} rows that differ in {key}"
            coverage.run.append(text)
            if hit < len(rows_apart):
                left = [row for row in rows_apart if row not in ids]
                coverage.not_reached.append(
                    f"{key}: {len(left)} of its differing rows, the first is row {left[0]}"
                )
        # Differing experts: which of them some token was routed to.
        missing = unrouted_experts(self.differing, passes.routed)
        for key, experts in self.differing.experts.items():
            left = missing.get(key, [])
            coverage.run.append(
                f"{len(experts) - len(left)} of {len(experts)} experts that differ in {key}"
            )
            if left:
                coverage.not_reached.append(
                    f"{key}: no token of these probes is routed to expert"
                    f"{'s' if len(left) > 1 else ''} {', '.join(map(str, left[:8]))}"
                )
        self._add_unreached_quantities(len(chosen.ids))

    def _add_unreached_quantities(self, tokens: int) -> None:
        """Add to the coverage what two models compute differently beyond the longest probe only.

        A quantity is what a hyperparameter results in, such as rope's angles or a mask. `tokens`
        is the length of the longest probe; the sentences go to the coverage's `not_reached`.
        """
        for i, rows in self.quantities.items():
            for row in rows:
                if not row.equal and row.length > tokens:
                    cause = self.levels.findings[i].cause
                    self.levels.coverage.not_reached.append(
                        f"{cause}: {row.says}; the longest probe has {tokens} tokens"
                    )


def _effect_sentence(finding: Finding, share: "Share", bound: float) -> str:
    """Return a sentence about a finding's effect on the logits; `bound` is their tolerance."""
    if not share.alone:
        return f"{finding.cause} was not taken away alone: passes of this size take too long"
    if not share.before <= bound:
        at = f", first at {share.first}" if share.first else ""
        return (
            f"with everything else as in A, {finding.cause} makes the logits differ by "
            f"{_distance_text(share.before, share.kl_before)}{at}; taken over too: "
            f"{share.after:.3g}"
        )
    if finding.verdict == "same":
        return f"{finding.cause} leaves the logits as they are: {share.before:.3g} apart"
    if share.exact:
        return f"{finding.cause} does not show in the logits of these tokens: they are equal bits"
    return (
        f"{finding.cause} does not show in the logits of these tokens beyond rounding: "
        f"{share.before:.3g} apart"
    )


def _distance_text(distance: float, kl: float | None) -> str:
    """Return a relative L2 distance and a KL divergence (if known) as text."""
    return f"{distance:.3g}" + ("" if kl is None else f" (KL {kl:.3g})")


def finalize_finding(finding: Finding, share: "Share", bound: float) -> Finding:
    """Return a finding with its measured effect; `bound` is the tolerance of the logits.

    It is confirmed if A's part in place of B's removes a finite difference beyond the bound, or if
    the stored values prove it. NaN or infinite logits on one side only are always a bug.
    """
    before, after = share.before, share.after
    finite = math.isfinite(before)
    odd = share.odd is not None and share.odd.alone > 0
    shows = odd or not before <= bound
    gone = after <= bound
    own = finding.residual_before is not None and finding.of == "stored values"
    # Replacing a tensor removes any difference, so this does not show what is wrong with it.
    row = find_cause(finding.cause)
    by_pass = row is not None and row.shown_by_pass
    proof = finding.level != "tensor" or by_pass
    removed = shows and finite and not odd and gone and proof and share.alone
    confirmed = removed or (finding.confirmed and (gone or own))
    if removed and (finding.level == "config" or by_pass):
        # The pass with B's value in A's place is B's: nothing was found on the values it gives.
        finding = replace(finding, proof=finding.proof or unfitted_proof())
    if (finding.verdict == "same" and shows) or (odd and finding.verdict == "precision"):
        finding, confirmed = replace(finding, verdict="bug"), False
    if finding.verdict == "precision" and not finite:
        finding, confirmed = replace(finding, verdict="bug"), False
    if finding.level == "config" and not removed and finding.verdict != "same":
        confirmed = False
    if not share.alone:
        return replace(finding, confirmed=confirmed)
    found = replace(
        finding,
        confirmed=confirmed,
        first=share.first if shows else "",
        kl_before=share.kl_before,
        kl_after=share.kl_after,
        exercised=exercised_level(share, shows),
    )
    if own and finding.residual_after is not None and finding.confirmed:
        return found
    return replace(found, residual_before=before, residual_after=after, of="logits")


def exercised_level(share: "Share", shows: bool) -> Exercised:
    """Return how far passes showed a difference: "shows", "below_rounding" or "not_exercised".

    `shows` is whether it is beyond the bound; "not_exercised" means that the logits have equal
    bits.
    """
    if shows:
        return "shows"
    return "not_exercised" if share.exact else "below_rounding"
