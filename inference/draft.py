"""A draft head run behind its model, and how many of its drafts the model itself would choose.

The head is a model of one layer (model/draft.py) whose pass begins with the hidden rows of the
model; a trace of it has the points of that layer, and `draft_hidden` to `draft_in` before them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from aprfmt.errors import ArchError, UsageError
from aprfmt.inference.backends.base import Array
from aprfmt.inference.capture import WHOLE
from aprfmt.inference.context import PassFacts, Recorder
from aprfmt.inference.forward import LogitRows, Span, forward
from aprfmt.inference.kv_cache import KVCache
from aprfmt.inference.rows import Rows, StoredRows
from aprfmt.inference.session import Numbers, Session
from aprfmt.inference.weights import Weights
from aprfmt.model import Model
from aprfmt.model.draft import draft_head


class DraftSession(Session):
    """A draft head as a session: row i of its logits guesses the token after the next one, i + 2.

    Every pass runs the model first; the head has one row less than there are tokens.
    """

    def __init__(self, model: Model, main: Session) -> None:
        if main.spec.forward:
            raise ArchError(f"{model.path}: {main.spec.name} has a forward pass of its own; "
                            "expected the common one, which runs draft heads")  # fmt: skip
        head = draft_head(model)
        shared = {key: model.roles[theirs] for key, theirs in head.shared.items()}
        rows: dict[str, Rows] = {
            key: StoredRows(view) for key, view in {**head.roles, **shared}.items()
        }
        weights = Weights(rows, main.weights.holder.budget, f"{model.path}: draft head")
        for key, theirs in head.shared.items():
            weights.share(key, main.weights[theirs])
        super().__init__(head.spec, head.hyper, weights, main.backend)
        self.main = main
        self._graphs = None  # the hidden rows are no fixed input of a recorded pass

    def _pass(
        self, ids: Sequence[int], cache: KVCache | None, recorder: Recorder | None, rows: LogitRows
    ) -> Any:
        if cache is not None:
            raise UsageError("a draft head runs whole sequences; expected no cache")
        hidden, _ = self.hidden(ids)
        span = Span(hidden=hidden[:-1])
        return self._part(ids[1:], span, rows, recorder)

    def hidden(self, ids: Sequence[int]) -> tuple[Array, Array]:
        """Return the model's rows behind its last norm, and the stream before it.

        Raises UsageError for a sequence of fewer than two tokens.
        """
        if len(ids) < 2:
            raise UsageError(f"{len(ids)} tokens; a draft head needs two")
        stop = int(self.main.hp["n_layers"]) + 1
        stream = self._main_part(ids, Span(stop=stop))
        taken = _Taken("final_norm")
        self._main_part(ids, Span(stop, stream=stream), recorder=taken)
        return taken.value, stream

    def both(self, ids: Sequence[int], most: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield logits of the model and of the head for the same tokens, `most` rows at a time.

        Row r of the first is the model's choice behind token r + 1; the same row of the second is
        the head's draft for that place, made one token earlier.
        """
        hidden, stream = self.hidden(ids)
        entered = self._part(ids[1:], Span(stop=2, hidden=hidden[:-1]), "last", None)
        after = int(self.main.hp["n_layers"]) + 1
        for first in range(0, len(ids) - 1, most):
            rows = range(first, min(first + most, len(ids) - 1))
            mine = self._main_part(ids, Span(after, stream=stream), [row + 1 for row in rows])
            drafts = self._part(ids[1:], Span(2, stream=entered), list(rows), None)
            yield self.backend.to_numpy(mine), self.backend.to_numpy(drafts)

    def _part(
        self, ids: Sequence[int], span: Span, rows: LogitRows, recorder: Recorder | None
    ) -> Array:
        return forward(
            self.backend, self.spec, self.hp, self.weights, ids,
            recorder=recorder, logits_rows=rows, span=span,
        )  # fmt: skip

    def _main_part(
        self, ids: Sequence[int], span: Span, rows: LogitRows = "last",
        recorder: Recorder | None = None,
    ) -> Array:  # fmt: skip
        main = self.main
        return forward(
            main.backend, main.spec, main.hp, main.weights, ids,
            recorder=recorder, logits_rows=rows, span=span,
        )  # fmt: skip


class _Taken:
    """A recorder that takes one whole-model point as it lies on the device."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.value: Array = None

    def begin(self, facts: PassFacts) -> None:
        """Nothing to do."""

    def wants(self, point: str, layer: int) -> bool:
        """Say whether it is the point."""
        return layer == WHOLE and point == self.point

    def capture(self, point: str, layer: int, x: Array) -> Array:
        """Take it."""
        self.value = x
        return x
