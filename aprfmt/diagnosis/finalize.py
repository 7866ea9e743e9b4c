"""What a finding's effect on the passes makes of it: confirmed, in doubt, or not exercised."""

import math
from dataclasses import replace

from aprfmt.diagnosis.mixing import Share
from aprfmt.measure.findings import Exercised, Finding
from aprfmt.measure.proofs import unfitted_proof


def finalize_finding(finding: Finding, share: Share, bound: float) -> Finding:
    """Return a finding with its effect on the pass; `bound` is the rounding of the logits.

    Confirmed means that removing it removes the difference, measured on finite numbers and from a
    distance beyond the bound; or that the stored values prove it. NaN or infinite logits on one
    side only are always a bug.
    """
    before, after = share.before, share.after
    finite = math.isfinite(before)
    odd = share.odd is not None and share.odd.alone > 0
    shows = odd or not before <= bound
    gone = after <= bound
    own = finding.residual_before is not None and finding.of == "stored values"
    # Replacing a tensor removes any difference, so this does not show what is wrong with it.
    proof = finding.level != "tensor" or finding.cause == "missing_bias"
    removed = shows and finite and not odd and gone and proof and share.alone
    confirmed = removed or (finding.confirmed and (gone or own))
    if (removed and finding.level == "config") or (removed and finding.cause == "missing_bias"):
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
        finding, confirmed=confirmed, first=share.first if shows else "",
        kl_before=share.kl_before, kl_after=share.kl_after,
        exercised=exercised(share, shows),
    )  # fmt: skip
    if own and finding.residual_after is not None and finding.confirmed:
        return found
    return replace(found, residual_before=before, residual_after=after, of="logits")


def exercised(share: Share, shows: bool) -> Exercised:
    """Say whether the passes reached a difference."""
    if shows:
        return "shows"
    return "not_exercised" if share.exact else "below_rounding"
