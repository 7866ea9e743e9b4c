"""How long a comparison may take, and how many bytes it may read; what it leaves is named."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from aprfmt.errors import AprfmtError

LEFT_BY = "left by the budget of"  # what `Budget.reason` begins with
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


class BudgetSpent(AprfmtError):
    """The time of a budget is over; who gave it says what was left."""


class TimeOver(Exception):
    """The time of a budget in force was over between two reads of a file; see `in_force`.

    No AprfmtError: what was being read is not damaged, and says nothing of its own.
    """

    def __init__(self, budget: "Budget") -> None:
        """Store the budget whose time is over."""
        super().__init__(budget.reason)
        self.budget = budget


@dataclass
class Reading:
    """What a budget in force ended: `over` is True if its time was over before all was read."""

    over: bool = False


@dataclass
class Budget:
    """A limit of seconds, of stored bytes, of both or of none (None), and what is used of it.

    The time begins when it is made. `clock` gives seconds that only grow.
    """

    seconds: float | None = None
    nbytes: int | None = None
    clock: Callable[[], float] = time.monotonic
    _used: int = field(default=0, init=False)
    _began: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self._began = self.clock()

    @property
    def elapsed(self) -> float:
        """The seconds since the budget was made."""
        return self.clock() - self._began

    def has_time(self) -> bool:
        """Return whether the time limit is not reached; always True without one."""
        return self.seconds is None or self.elapsed < self.seconds

    def has_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more fit into the byte limit; they are then counted as used."""
        if self.nbytes is not None and self._used + nbytes > self.nbytes:
            return False
        self._used += nbytes
        return True

    @contextmanager
    def in_force(self) -> Iterator[Reading]:
        """Apply the budget to a `with` block, which ends at its next read once the time is over.

        The block is left where this thread next calls `end_where_time_is_over`, as it does before
        each read of a file. The Reading that `with` gives says afterwards whether that happened. A
        budget of an outer block stays in force, and ends that block.
        """
        reading = Reading()
        token = _in_force.set((*_in_force.get(), self))
        try:
            yield reading
        except TimeOver as over:
            if over.budget is not self:
                raise
            reading.over = True
        finally:
            _in_force.reset(token)

    @property
    def reason(self) -> str:
        """The text that says why something was not compared: the limits; "" without any limit."""
        limits = [] if self.nbytes is None else [_size_text(self.nbytes)]
        limits += [] if self.seconds is None else [f"{self.seconds:g} s"]
        return f"{LEFT_BY} {' and '.join(limits)}" if limits else ""


_in_force: ContextVar[tuple[Budget, ...]] = ContextVar("budgets in force", default=())


def end_where_time_is_over() -> None:
    """Raise TimeOver if a budget in force has no time left; called before each read of a file.

    Nothing is done without a budget in force.
    """
    for budget in _in_force.get():
        if budget.seconds is not None and budget.elapsed >= budget.seconds:
            raise TimeOver(budget)


def _size_text(nbytes: int) -> str:
    """Return a number of bytes with four digits and its unit, `1.5 GB`."""
    for size, unit in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} bytes"
