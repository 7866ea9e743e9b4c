"""How long the work of a diagnosis takes, and how far it is: what a user is told of it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aprfmt.arch.role_vocabulary import split_key
from aprfmt.base.budget import Budget, BudgetSpent
from aprfmt.model import Model

PER_SECOND = 3e10  # multiplications and additions of a pass on two cores, decoding included
VALUES_PER_SECOND = 2e7  # two sides of another encoding decoded and compared, on one core


@dataclass(frozen=True)
class ProgressReporter:
    """Reports the progress of passes to a user, and announces passes that take minutes."""

    progress: Callable[[int, int], None] | None = None
    notice: Callable[[str], None] | None = None
    budget: Budget = field(default_factory=Budget)

    def announce_passes(self, flops: float) -> None:
        """Notify the user how long passes of `flops` operations take, if over half a minute."""
        seconds = flops / PER_SECOND
        if self.notice is not None and seconds > 30:
            self.notice(
                f"passes of {flops:.2g} operations follow, about {max(1, round(seconds / 60))} "
                "minutes on two cores"
            )

    def announce_comparison(self, values: int) -> None:
        """Notify the user how long comparing so many stored values takes, if over half a minute."""
        seconds = values / VALUES_PER_SECOND
        if self.notice is not None and seconds > 30:
            self.notice(
                f"{values:.2g} stored values are compared, which takes about "
                f"{max(1, round(seconds / 60))} minutes"
            )

    def report_progress(self, done: int, total: int) -> None:
        """Report that `done` stages of `total` are finished; BudgetSpent if no time is left."""
        if not self.budget.has_time():
            raise BudgetSpent(self.budget.reason)
        if self.progress is not None:
            self.progress(done, total)


def multiplications_per_token(model: Model) -> float:
    """Return about how many multiplications one token takes in all layers."""
    hp: Mapping[str, Any] = model.hyper
    share = int(hp["n_experts_used"]) / int(hp["n_experts"]) if hp["n_experts"] else 1.0
    total = 0.0
    for key, view in model.roles.items():
        if split_key(key)[0] is not None:
            total += math.prod(view.shape) * (share if "_exps" in key else 1.0)
    return total


def count_values(model: Model) -> int:
    """Return the number of values in all tensors."""
    return sum(math.prod(view.shape) for view in model.values())
