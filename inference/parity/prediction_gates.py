"""The outer gates of a pair: whether its predictions differ by no more than rounding.

Points that are compared one by one come first and name the place; these ask for the outcome. Text
that a model finds unlikely fails none of them: every bound is of the two runs' difference.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aprfmt.base.outcome import Check, Outcome
from aprfmt.inference.parity.cells import ExpertFlip, Losses, Outcomes
from aprfmt.measure.tolerances import MAX_LOGITS, loss_bound

# A text shorter than this says little about a loss.
MIN_LABELS = 16


@dataclass(frozen=True)
class _Gate:
    """Makes the checks of one run, named by `where`."""

    where: str

    def make_check(
        self, name: str, passed: bool | None, found: str, expected: str, todo: str = ""
    ) -> Check:
        """Return one check; `passed` None: it could not be made, which is NOT_RUN.

        `found` and `expected` are its texts, `todo` is the advice if it failed.
        """
        outcome: Outcome = "NOT_RUN" if passed is None else "PASS" if passed else "FAIL"
        return Check(name, outcome, self.where, found, expected, todo if passed is False else "")


def check_outcomes(
    outcomes: Outcomes | None,
    losses: Losses,
    experts: Sequence[ExpertFlip],
    *,
    quantized: bool,
    text: bool,
    vocab: int,
    where: str,
) -> list[Check]:
    """Return the checks of a pair: its loss always, logits and losses on quantized weights.

    Expert flips are checked too. `outcomes` compares the predictions of both runs, None if that was
    not possible. `vocab` is the number of tokens. `text` says that the ids are text; `where` names
    the run.
    """
    gate = _Gate(where)
    checks = []
    if experts:
        unexplained = [flip for flip in experts if not flip.explained]
        checks.append(
            gate.make_check(
                "experts",
                not unexplained,
                f"{len(experts)} tokens to other experts, {len(unexplained)} of them with a "
                "margin that rounding cannot close",
                "margins of at most twice the router's difference",
                "compare the router's inputs and its rule",
            )
        )
    if outcomes is None:
        found = "no logits on both sides"
        return [*checks, gate.make_check("logits", None, found, "logits of every row")]
    checks.append(_check_backend_loss(gate, losses))
    if quantized:
        checks += _check_quantized(gate, outcomes, text, vocab)
    return checks


def _check_backend_loss(gate: _Gate, losses: Losses) -> Check:
    """Return the check of a run's loss against the float64 loss of the same logits."""
    if losses.own is None or losses.forward is None or losses.own_off is None:
        return gate.make_check("own-loss", None, losses.why, "a run that computes a loss")
    bound = losses.own_bound or 0.0
    return gate.make_check(
        "own-loss",
        losses.own_off <= bound,
        f"{losses.own - losses.forward:+.3g} nats from the float64 loss, {losses.own_off:.3g} at "
        "the label that is furthest beyond rounding",
        f"at most {bound:.3g} nats there on the same logits",
        "the loss is wrong, not the forward",
    )


def _check_quantized(gate: _Gate, found: Outcomes, text: bool, vocab: int) -> list[Check]:
    """Return the checks of logits and losses on the rows that are comparable.

    `found` has the distance of the logits and both losses. `text` says that the ids are text.
    """
    rows = "over all rows" if found.rows is None else f"over the first {found.rows} rows"
    most = max(MAX_LOGITS, found.tolerance)
    checks = [
        gate.make_check(
            "quantized-logits", None if found.rel_l2 is None else found.rel_l2 <= most,
            f"no row before the flip of an expert ({found.rows})" if found.rel_l2 is None
            else f"relative L2 {found.rel_l2:.3g}",
            f"at most {most:g} {rows}", "find the first point that is off",
        )
    ]  # fmt: skip
    if found.reference is None or found.forward is None:
        return [*checks, gate.make_check("quantized-loss", None, "no label to score", "two tokens")]
    difference = found.forward - found.reference
    bound = loss_bound(found.tolerance, found.size)
    checks.append(
        gate.make_check(
            "quantized-loss",
            abs(difference) <= bound,
            f"{difference:+.4g} nats",
            f"at most {bound:.3g} nats apart {rows}: logits of size {found.size:.3g} within "
            f"{found.tolerance:.3g}",
            "find the first point that is off",
        )
    )
    return [*checks, _check_bounded(gate, found, text, vocab, bound)]


def _check_bounded(gate: _Gate, found: Outcomes, text: bool, vocab: int, bound: float) -> Check:
    """Return the check that a run is not worse than guessing where the reference is not.

    NOT_RUN for a short text or ids that are no text, or where the reference is worse than guessing
    too. `bound` is how far the two losses may be apart.
    """
    name, limit = "quantized-loss-bounded", math.log(vocab)
    assert found.forward is not None and found.reference is not None
    expected = f"below ln({vocab}) = {limit:.4f} nats"
    if not text or found.labels < MIN_LABELS:
        why = "ids that are not known to be text" if not text else f"{found.labels} labels"
        return gate.make_check(name, None, why, f"a text of at least {MIN_LABELS} labels")
    if found.forward >= limit and found.forward - found.reference <= bound:
        why = f"{found.forward:.4f} nats, the reference's {found.reference:.4f}"
        return gate.make_check(name, None, why, f"{expected}, for the reference at least")
    return gate.make_check(
        name,
        found.forward < limit,
        f"{found.forward:.4f} nats",
        expected,
        "the run does worse than guessing, and the reference does not",
    )
