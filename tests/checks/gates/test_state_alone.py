"""What calls of a session leave behind, each kind of call by itself, in sessions of a few lines."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.checks.gates.forward import check_state
from aprfmt.checks.records import NotRun

IDS = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3)
CALLS = ("another-prompt", "steps-of-generation", "a-whole-pass", "in-a-fresh-session")


class Session:
    """A session whose logits say which tokens came before; `after` is a call that spoils the next.

    With `flaw` it has a fault of another kind: "blind" sees no token, "blind at last" none in the
    last row, "forgetful" steps see only their own, "infinite" has a logit that is not finite.
    """

    def __init__(self, after: str = "", flaw: str = "") -> None:
        self.backend = SimpleNamespace(dtype="float32")
        self.hp = {"n_experts": 0}
        self.after, self.flaw = after, flaw
        self.spoiled = False
        self.seen: list[int] = []

    def row(self, ids: Sequence[int]) -> Any:
        found = [len(ids), *(sum(t == token for t in ids) for token in range(10)), ids[-1]]
        if self.flaw == "blind":
            found = [1] * len(found)
        made = np.asarray(found, np.float32) + np.float32(self.spoiled)
        if self.flaw == "infinite":
            made[0] = np.inf
        return made

    def prefill(self, ids: Sequence[int]) -> Any:
        self.seen = list(ids)
        rows = np.stack([self.row(ids[: n + 1]) for n in range(len(ids))])
        if self.flaw == "blind at last":
            rows[-1] = 1
        self.spoiled = self.spoiled or (self.after == "prefill" and tuple(ids) != IDS)
        return rows

    def step(self, token: int) -> Any:
        self.seen = [token] if self.flaw == "forgetful" else [*self.seen, token]
        row = self.row(self.seen)
        self.spoiled = self.spoiled or self.after == "step"
        return row

    def logits(self, ids: Sequence[int]) -> Any:
        self.spoiled = self.spoiled or self.after == "logits"
        return np.stack([self.row(ids[: n + 1]) for n in range(len(ids))])


def failed(session: Session, ids: tuple[int, ...] = IDS, *, fresh: bool = True) -> set[str]:
    """Return the names of the checks that fail; `fresh`: a fresh session gives equal logits."""
    model = object()

    @contextmanager
    def open_session(given: Any) -> Iterator[Session]:
        assert given is model
        other = Session(flaw=session.flaw)
        other.spoiled = not fresh
        yield other

    subject: Any = SimpleNamespace(
        session=session, probe=ids, model=model, open_session=open_session
    )
    checks = check_state(subject).checks
    assert len(checks) == len(CALLS) + 2
    return {one.name for one in checks if one.outcome == "FAIL"}


def test_a_session_without_a_fault_passes() -> None:
    assert failed(Session()) == set()
    assert failed(Session(), IDS[:4]) == set()


@pytest.mark.parametrize(
    ("after", "first"), [("prefill", 0), ("step", 1), ("logits", 2)], ids=lambda value: str(value)
)
def test_what_a_call_leaves_is_seen_by_the_calls_behind_it(after: str, first: int) -> None:
    assert {name for name in failed(Session(after)) if name.startswith("same-")} == {
        f"same-after-{name}" for name in CALLS[first:3]
    }


def test_a_fresh_session_is_compared_too() -> None:
    assert failed(Session(), fresh=False) == {f"same-after-{CALLS[3]}"}


def test_logits_depend_on_the_tokens_and_steps_on_earlier_ones() -> None:
    assert failed(Session(flaw="blind")) == {"input-matters"}
    assert "input-matters" in failed(Session(flaw="blind at last"))
    assert failed(Session(flaw="forgetful")) == {"steps-are-prefill"}


def test_too_few_tokens_and_logits_that_are_not_finite_are_no_answer() -> None:
    with pytest.raises(NotRun, match=r"^the probe has 3 tokens; give a golden text of at least 4$"):
        failed(Session(), IDS[:3])
    with pytest.raises(NotRun, match=r"^the logits are not finite; see the gate logits$"):
        failed(Session(flaw="infinite"))
