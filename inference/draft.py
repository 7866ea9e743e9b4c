"""A draft head run after its model, and how many of its drafts the model itself would choose.

The head is a model of one layer (model/draft.py) whose pass begins with the hidden rows of the
model; a trace of it has the points of that layer, and `draft_hidden` to `draft_in` before them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aprfmt.base.outcome import Check
from aprfmt.errors import ArchError, UsageError
from aprfmt.inference.backends.base import Array
from aprfmt.inference.capture import WHOLE
from aprfmt.inference.context import PassFacts, Recorder
from aprfmt.inference.forward import LogitRows, Span, forward
from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.rows import RowSource, StoredRows
from aprfmt.inference.session import Numbers, Session
from aprfmt.inference.weights import Weights
from aprfmt.model import Model
from aprfmt.model.draft import draft_head

# Field reports of dead heads are of 0 to 1 %, of sound ones 40 to 90 %.
ALIVE = 0.05


class DraftSession(Session):
    """A draft head as a session: row i of its logits predicts token i + 2, the one after the next.

    Every pass runs the model first; the head has one row less than there are tokens.
    """

    def __init__(self, model: Model, main: Session) -> None:
        """Open the draft head of a model; `main` is the model's session, which this one closes.

        Raises ArchError if the architecture has a special forward pass.
        """
        if main.spec.forward:
            raise ArchError(
                f"{model.path}: {main.spec.name} has a forward pass of its own; "
                "expected the common one, which runs draft heads"
            )
        head = draft_head(model)
        shared = {key: model.roles[theirs] for key, theirs in head.shared.items()}
        rows: dict[str, RowSource] = {
            key: StoredRows(view) for key, view in {**head.roles, **shared}.items()
        }
        weights = Weights(rows, main.weights.holder.budget, f"{model.path}: draft head")
        for key, theirs in head.shared.items():
            weights.use_handle(key, main.weights[theirs])
        super().__init__(head.spec, head.hyper, weights, main.backend)
        self.main = main
        self._graphs = None  # the hidden rows are no fixed input of a recorded pass

    def close(self) -> None:
        """Stop reading weights ahead, of the head and of the model."""
        super().close()
        self.main.close()

    def _run_pass(
        self, ids: Sequence[int], cache: KVCache | None, recorder: Recorder | None, rows: LogitRows
    ) -> Any:
        """Return the head's logits of `rows` for tokens `ids`, after the model's pass.

        Raises UsageError for a cache, which the head cannot use.
        """
        if cache is not None:
            raise UsageError("a draft head runs whole sequences; expected no cache")
        hidden, _ = self.run_main(ids)
        span = Span(hidden=hidden[:-1])
        return self._run_head_part(ids[1:], span, rows, recorder)

    def run_main(self, ids: Sequence[int]) -> tuple[Array, Array]:
        """Return the model's (rows after the last norm, residual stream before it).

        Raises UsageError for a sequence of fewer than two tokens.
        """
        if len(ids) < 2:
            raise UsageError(f"{len(ids)} tokens; a draft head needs two")
        stop = int(self.main.hp["n_layers"]) + 1
        stream = self._run_main_part(ids, Span(stop=stop))
        taken = _PointTap("final_norm")
        self._run_main_part(ids, Span(stop, stream=stream), recorder=taken)
        return taken.value, stream

    def logits_of_both(
        self, ids: Sequence[int], rows: range, limit: int
    ) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield (model's logits, head's logits) of some rows, at most `limit` rows at a time.

        The head's logits are aligned with the model's: both of row r predict token r + 1. The
        head read token r - 1 last, so that it has no logits of row 0.
        """
        hidden, stream = self.run_main(ids)
        entered = self._run_head_part(ids[1:], Span(stop=2, hidden=hidden[:-1]), "last", None)
        after = int(self.main.hp["n_layers"]) + 1
        for first in range(rows.start, rows.stop, limit):
            part = range(first, min(first + limit, rows.stop))
            mine = self.backend.to_numpy(self._run_main_part(ids, Span(after, stream=stream), part))
            earlier = [row - 1 for row in part if row]
            if not earlier:
                yield mine, mine[:0]
                continue
            drafts = self._run_head_part(ids[1:], Span(2, stream=entered), earlier, None)
            yield mine, self.backend.to_numpy(drafts)

    def _run_head_part(
        self, ids: Sequence[int], span: Span, rows: LogitRows, recorder: Recorder | None
    ) -> Array:
        """Run the draft head over `ids`, or its stages in `span`; return the logits of `rows`.

        If `span` stops before the output, the residual stream [tokens, hidden] is returned in their
        place.
        """
        return forward(
            self.backend,
            self.spec,
            self.hp,
            self.weights,
            ids,
            recorder=recorder,
            logits_rows=rows,
            span=span,
        )

    def _run_main_part(
        self,
        ids: Sequence[int],
        span: Span,
        rows: LogitRows = "last",
        recorder: Recorder | None = None,
    ) -> Array:
        """Run the model over `ids`, or the stages in `span`; return the logits of `rows`.

        If `span` stops before the output, the residual stream [tokens, hidden] is returned in their
        place.
        """
        main = self.main
        return forward(
            main.backend,
            main.spec,
            main.hp,
            main.weights,
            ids,
            recorder=recorder,
            logits_rows=rows,
            span=span,
        )


@dataclass(frozen=True)
class DraftCounts:
    """How many drafts there were, and how many of them the model would choose itself.

    A draft counts as accepted where its likeliest token is also the model's likeliest one there,
    given the text before; nothing is sampled, and only the first token that a head drafts counts.
    """

    drafts: int = 0
    accepted: int = 0

    @property
    def acceptance_rate(self) -> float:
        """The accepted drafts divided by all drafts, NaN without drafts."""
        return self.accepted / self.drafts if self.drafts else math.nan

    def add_rows(self, mine: Numbers, drafts: Numbers) -> "DraftCounts":
        """Return new counts, with the drafts for these rows added to those of this object.

        `mine` and `drafts` are logits [rows, vocab] of model and head; the head's are the last of
        the model's rows. A row with a NaN or an infinity is not accepted.
        """
        mine = mine[len(mine) - len(drafts) :]
        sound = np.isfinite(mine).all(-1) & np.isfinite(drafts).all(-1)
        same = sound & (mine.argmax(-1) == drafts.argmax(-1))
        return DraftCounts(self.drafts + len(drafts), self.accepted + int(same.sum()))

    def check_acceptance(self, least: float, where: str) -> Check:
        """Return the check that at least the fraction `least` of drafts is accepted.

        Its status is NOT_RUN without drafts. `where` is what the check is reported to be of.
        """
        expected = f"at least {100 * least:g} %"
        if not self.drafts:
            return Check("drafts-accepted", "NOT_RUN", where, "no draft was scored", expected)
        alive = self.acceptance_rate >= least
        todo = "compare the head with its source: aprfmt diff SOURCE MODEL"
        return Check(
            "drafts-accepted",
            "PASS" if alive else "FAIL",
            where,
            f"{100 * self.acceptance_rate:.1f} % of {self.drafts} drafts",
            expected,
            "" if alive else todo,
        )


class _PointTap:
    """A recorder that stores the value of one whole-model point, left on the device."""

    def __init__(self, point: str) -> None:
        """Take the point's name; `value` is None until the point was captured."""
        self.point = point
        self.value: Array = None

    def begin(self, facts: PassFacts) -> None:
        """Do nothing: the facts of the pass are not needed."""

    def wants(self, point: str, layer: int) -> bool:
        """Return whether a point is the one to store."""
        return layer == WHOLE and point == self.point

    def capture(self, point: str, layer: int, x: Array) -> Array:
        """Store the value, and return it unchanged for the pass."""
        self.value = x
        return x
