"""The one table of causes: what can make two models, runs or traces differ, in words.

Strings only, so that anything may import it. What tests for a cause and what confirms it lives
beside the evidence it needs (tensors: aprfmt.compare.explain, forward passes: aprfmt.diagnosis);
both name causes from here, and a test compares the lists. Other packages add rows through the
entry-point group `aprfmt.causes`.
"""

from aprfmt.base.registry import Registry
from aprfmt.compare.causes.computed import COMPUTED
from aprfmt.compare.causes.engine import ENGINE
from aprfmt.compare.causes.looked import LOOKED
from aprfmt.compare.causes.moved import MOVED
from aprfmt.compare.causes.packed import PACKED
from aprfmt.compare.causes.row import (
    CERTAINTIES,
    LEVELS,
    VERDICTS,
    Cause,
    Certainty,
    Level,
    Verdict,
    certainty_of,
)
from aprfmt.compare.causes.stored import STORED
from aprfmt.compare.causes.tokens import TOKENS
from aprfmt.compare.causes.walk import WALK

__all__ = [
    "CAUSES", "CERTAINTIES", "LEVELS", "VERDICTS", "Cause", "Certainty", "Level", "Verdict",
    "certainty_of", "describe",
]  # fmt: skip

_ROWS = (*STORED, *MOVED, *PACKED, *COMPUTED, *TOKENS, *ENGINE, *LOOKED, *WALK)

CAUSES: Registry[Cause] = Registry("causes", {}, held={row.name: row for row in _ROWS})


def describe(name: str) -> str:
    """Return a cause's row as one paragraph.

    Raises AprfmtError for a name that is not in the table.
    """
    row = CAUSES[name]
    return (
        f"{row.means} Level: {row.level} ({LEVELS[row.level]}). Verdict: {row.verdict}. "
        f"Seen by: {row.signature} Confirmed when: {row.confirms}"
    )
