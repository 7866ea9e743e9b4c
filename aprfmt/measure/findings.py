"""The Finding record: a cause, where it was found, and how certain it is.

A and B are the two models or runs that are compared; a *side* is one of them. A *place* is a
tensor, a configuration key or an operation.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypedDict

from aprfmt.measure.named_causes import Effect, NamedCause, name_cause
from aprfmt.measure.proofs import Proof, certainty_of
from aprfmt.measure.verdicts import Certainty, Level, Verdict

Confidence = Literal["confirmed", "ambiguous", "unconfirmed"]
# Whether passes reached a difference: beyond the bound, inside it, not at all; "": not measured.
Exercised = Literal["", "shows", "below_rounding", "not_exercised"]


class PairCause(TypedDict):
    """The JSON that `diff` gives for one tensor: why its two sides differ."""

    cause: str
    where: tuple[str, ...]
    evidence: tuple[str, ...]
    residual_before: float | None
    residual_after: float | None
    confirmed: bool
    reached: Certainty | None
    share: float | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, its places, and how certain it is.

    `cause` is a name of CAUSES, "" if none fits. `where` are tensor names, config keys or
    operations; `first` is the first capture point that shows it, "" if no pass was needed.
    `confirmed` says that it accounts for all that was seen there, so that nothing else is searched
    for; the `certainty` follows from `proof` alone: what was done to show it, None where it was
    only seen or measured. Residuals are relative L2 distances (`of` says of what) before and after
    removing the cause: of two tensors ||a-b|| / max(||a||, ||b||), infinite where a NaN or infinity
    is on one side only; the second is None where nothing was transformed. `values` are the solved
    values. `side` is the side that departs from the model, "" if it is not known which side is
    right. `also` are causes that explain it equally well. `after`: if there is no explanation, the
    last points that agree before `first`. `counted`: the residuals are shares of things counted, no
    distances. `detail` is where in the first tensor: the row, the element, the byte. `keys` are the
    differing tensors that it explains, where it was found in stored tensors; `where` also has those
    they were confused with. `evidence` are sentences of a pair of tensors: the first is the same
    for every tensor with the same defect, the later ones have this tensor's own numbers.
    `leaves_side_open`: either side may be the wrong one, and the files do not say which.
    """

    cause: str
    says: str
    level: Level
    verdict: Verdict
    where: tuple[str, ...]
    confirmed: bool
    first: str = ""
    residual_before: float | None = None
    residual_after: float | None = None
    of: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    side: str = ""
    also: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    kl_before: float | None = None
    kl_after: float | None = None
    exercised: Exercised = ""
    next: str = ""
    proof: Proof | None = None
    counted: bool = False
    detail: str = ""
    keys: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    leaves_side_open: bool = False

    @property
    def certainty(self) -> Certainty:
        """How certain it is: "located", "explained" or "confirmed".

        It is the certainty of the proof, with three exceptions. It is "located" where removing the
        cause leaves as large a difference, and where a proof would confirm the cause and passes
        contradict it. It is "explained" where a proof would confirm it and another cause explains
        it as well.
        """
        found = certainty_of(self.proof)
        if self._leaves_everything:
            return "located"
        if found == "confirmed" and not self.confirmed:
            return "located"  # passes or other values say otherwise
        # What two causes differ by is not decided.
        return "explained" if found == "confirmed" and self.also else found

    @property
    def _leaves_everything(self) -> bool:
        """Whether removing the cause leaves a difference as large as before, or larger."""
        before, after = self.residual_before, self.residual_after
        return before is not None and after is not None and 0 < before <= after

    @property
    def share(self) -> float | None:
        """The fraction of affected items that the change reproduces; None without a proof."""
        return None if self.proof is None else self.proof.share

    @property
    def reached(self) -> Certainty | None:
        """The proof's certainty where JSON's `confirmed` alone would mislead a reader, else None.

        A reader takes True for "confirmed" and False for "located". So it is "explained" for
        either, and "located" for True; a proof of "confirmed" needs no word.
        """
        found = certainty_of(self.proof)
        bare = found == "located" and not self.confirmed
        return None if found == "confirmed" or bare else found

    def to_named_cause(self, stored: Mapping[str, tuple[str, ...]]) -> NamedCause:
        """Return the finding as a NamedCause; `stored` maps its places to the file's own names.

        Sound tensors that were only confused with the wrong tensors are left out.
        """
        effect = Effect(None if self.counted else self.residual_before, self.kl_before)
        return name_cause(
            self.cause,
            self.says.removeprefix(f"{self.cause}: "),
            self.keys or self.where,
            stored,
            level=self.certainty,
            share=self.share,
            effect=effect,
            command=self.next,
            detail=self.detail,
        )

    @property
    def confidence(self) -> Confidence:
        """How certain it is in one word: "confirmed", "ambiguous" or "unconfirmed".

        "ambiguous" if other causes explain it as well.
        """
        if not self.confirmed:
            return "unconfirmed"
        return "ambiguous" if self.also else "confirmed"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `diagnose`."""
        rest = asdict(replace(self, proof=None))
        del rest["proof"], rest["evidence"], rest["leaves_side_open"]
        rest |= {"reached": self.reached, "share": self.share}
        return {**rest, "confidence": self.confidence, "certainty": self.certainty}

    def to_diff_json(self) -> dict[str, Any]:
        """Return plain data of a finding of `diff`: a cause, the tensors, and how certain it is."""
        return {
            "cause": self.cause,
            "text": self.says,
            "keys": self.keys,
            "confirmed": self.confirmed,
            "certainty": self.certainty,
            "share": self.share,
            "detail": self.detail,
        }

    def to_pair_json(self) -> PairCause:
        """Return plain data for `diff` of one tensor: why its two sides differ."""
        return {
            "cause": self.cause,
            "where": self.where,
            "evidence": self.evidence,
            "residual_before": self.residual_before,
            "residual_after": self.residual_after,
            "confirmed": self.confirmed,
            "reached": self.reached,
            "share": self.share,
        }
