"""The one record of something found: a cause, its places, and how sure it is.

`diff` and `diagnose` collect them, and `named_causes` gives them to the outside.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from aprfmt.measure.named_causes import Effect, NamedCause, name_cause
from aprfmt.measure.verdicts import Certainty, Level, Verdict, certainty_of

Confidence = Literal["confirmed", "ambiguous", "unconfirmed"]
# Whether passes reached a difference: beyond the bound, inside it, not at all; "": not measured.
Exercised = Literal["", "shows", "below_rounding", "not_exercised"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, its places, and how certain it is.

    `cause` is a name of CAUSES, "" if none fits. `where` are tensor names, config keys or
    operations; `first` is the first capture point that shows it, "" if no pass was needed.
    Residuals are relative L2 distances (`of` says of what) before and after removing the cause.
    `values` are the solved values. `side` is the side that departs from the model, "" if it is not
    known which side is right. `also` are causes that explain it equally well. `after`: if there is
    no explanation, the last points that agree before `first`. `reached` is what was done to show it
    where that is less than `confirmed` says, `share` the share of elements that came out.
    `counted`: the residuals are shares of things counted, no distances. `detail` is where in the
    first tensor: the row, the element, the byte. `keys` are the differing tensors that it explains,
    where it was found in stored tensors; `where` also has those they were confused with.
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
    reached: Certainty | None = None
    share: float | None = None
    counted: bool = False
    detail: str = ""
    keys: tuple[str, ...] = ()

    @property
    def certainty(self) -> Certainty:
        """How sure it is: located, explained or confirmed."""
        found = certainty_of(self.confirmed, self.reached)
        # What two causes differ by is not decided.
        return "explained" if found == "confirmed" and self.also else found

    def named(self, stored: Mapping[str, tuple[str, ...]]) -> NamedCause:
        """Return it as the record for the outside; `stored` are the file's names of its places."""
        effect = Effect(None if self.counted else self.residual_before, self.kl_before)
        return name_cause(
            self.cause, self.says.removeprefix(f"{self.cause}: "), self.where, stored,
            level=self.certainty, share=self.share, effect=effect, command=self.next,
            detail=self.detail,
        )  # fmt: skip

    @property
    def confidence(self) -> Confidence:
        """Confirmed if applying it removes the difference, ambiguous if others do so too."""
        if not self.confirmed:
            return "unconfirmed"
        return "ambiguous" if self.also else "confirmed"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as `diagnose` gives it."""
        return {**asdict(self), "confidence": self.confidence, "certainty": self.certainty}

    def of_tensors(self) -> dict[str, Any]:
        """Return plain data as `diff` gives it: what tensors show, and how sure it is."""
        return {
            "cause": self.cause, "text": self.says, "keys": self.keys,
            "confirmed": self.confirmed, "certainty": self.certainty, "share": self.share,
            "detail": self.detail,
        }  # fmt: skip
