"""The one table of causes: what can make two models, runs or traces differ, in words.

Strings only, so that anything may import it. What tests for a cause and what confirms it lives
with the evidence it needs (tensors: aprfmt.causes.tensor, forward passes: aprfmt.causes.forward);
both name causes from here, and a test compares the lists. Other packages add rows through the
entry-point group `aprfmt.causes`.
"""

from aprfmt.base.registry import Registry
from aprfmt.causes.row import Cause
from aprfmt.causes.words.computed import COMPUTED
from aprfmt.causes.words.engine import ENGINE
from aprfmt.causes.words.looked import LOOKED
from aprfmt.causes.words.moved import MOVED
from aprfmt.causes.words.packed import PACKED
from aprfmt.causes.words.stored import STORED
from aprfmt.causes.words.tokens import TOKENS
from aprfmt.causes.words.walk import WALK
from aprfmt.measure.verdicts import (
    CERTAINTIES,
    LEVELS,
    VERDICTS,
    Certainty,
    Level,
    Verdict,
    certainty_of,
)

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
