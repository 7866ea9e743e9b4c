"""Every operation of a run judged on the run's own inputs, in one pass of the reference.

At each point the reference's value is compared with the one that the run recorded, and the pass
goes on with the run's. So rounding that earlier operations amplified is not held against a later
one, and an operation that is wrong by little shows where it is, not where its error has grown.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aprfmt.compare.measured import rel_l2
from aprfmt.compare.thresholds import DISCRETE, one_operation
from aprfmt.compare.traced import backend_name, weights_between
from aprfmt.inference.backends.base import Backend
from aprfmt.inference.capture import instances, key_name
from aprfmt.inference.parity.cell import Stepped, given_as
from aprfmt.inference.parity.matched import matched_weights
from aprfmt.inference.parity.operations import arithmetics
from aprfmt.inference.parity.request import ParityRequest
from aprfmt.inference.session import load_forward
from aprfmt.inference.trace import Trace
from aprfmt.inference.weights import free_budget, model_weights
from aprfmt.model import Model

Numbers = NDArray[Any]


@dataclass
class Survey:
    """What each operation gave on the run's own inputs: (relative L2 distance, bound) by key."""

    found: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """The points whose operation is beyond its bound, in execution order."""
        return [key for key, (residual, bound) in self.found.items() if not residual <= bound]

    @property
    def clean(self) -> bool:
        """Operations were judged, and none is wrong."""
        return bool(self.found) and not self.wrong

    @property
    def worst(self) -> str:
        """The point that comes nearest to its bound."""
        return max(self.found, key=lambda key: self.found[key][0] / self.found[key][1])


def survey(model: Model, reference: Backend, a: Trace, b: Trace, request: ParityRequest) -> Survey:
    """Judge every operation of the run `b` by `reference`, which ran `a`."""
    if request.through is not None:
        weights = matched_weights(model, request.through, request.memory)
    else:
        memory = request.memory
        weights = model_weights(model, free_budget() if memory is None else memory)
    recorder = _Follower(reference, a, b, instances(model.spec.block, model.hyper, weights))
    with closing(weights):
        load_forward(model.spec)(
            reference, model.spec, model.hyper, weights, list(request.ids), recorder=recorder,
            logits_rows="all",
        )  # fmt: skip
    return recorder.survey


class _Follower(Stepped):
    """Compares what the reference makes of the run's inputs with what the run made of them."""

    def __init__(self, backend: Backend, a: Trace, b: Trace, known: Mapping[str, Any]) -> None:
        super().__init__(backend, known)
        self._a, self._b = a, b
        self._kinds = (weights_between(a, b), "activate")
        self._alike: Numbers | None = None  # tokens that the reference sends to the same experts
        self.survey = Survey()

    def capture(self, point: str, layer: int, x: Any) -> Any:
        """Judge the operation, and return the run's value."""
        key = key_name(point, layer)
        theirs = self._b.values(key) if key in self._b.records else None
        mine = np.array(self._backend.to_numpy(x))
        if theirs is None or theirs.size != mine.size or self._b.mask(key) is not None:
            return x  # what was not recorded whole is judged at the next point
        if point == "experts":
            self._alike = (np.sort(mine, -1) == np.sort(theirs, -1)).all(-1)
        if point not in DISCRETE:
            rows = self._alike if point == "expert_w" else None
            whole = theirs.reshape(mine.shape)
            residual = rel_l2(whole, mine) if rows is None else rel_l2(whole[rows], mine[rows])
            self.survey.found[key] = residual, self._bound(key)
        return given_as(x, theirs, self._backend)

    def _bound(self, key: str) -> float:
        dtypes = arithmetics(key, self._a, self._b)
        return one_operation(*dtypes, backend_name(self._b), self._kinds).rel_l2
