"""What a step's verdict is made of: each part of a report alone, and the rules for one gradient."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training.gradient_case import GradientCase
from aprfmt.cli import render
from aprfmt.cli.step import output
from aprfmt.measure.named_causes import NamedCause, name_cause
from aprfmt.model.ledger import NotCompared
from aprfmt.training.gradient_verdict import judge_gradient
from aprfmt.training.report import StepReport, TensorStep

ROW = TensorStep("L0.attn_q.weight", ("q",), (2, 2), "F32", None, verdict="agrees")
DIFFERS = replace(ROW, key="L1.attn_q.weight", verdict="differs", why="x")
OPEN = replace(ROW, key="L2.attn_q.weight", verdict="not compared", why="x")
CAUSE: Any = object.__new__(NamedCause)
NAMED = name_cause("decay_missing", "no decay", ("L1.attn_q.weight",), {}, level="confirmed")
LEFT = NotCompared("tensor", "lm_head.weight", "unreadable", "x")


@pytest.mark.parametrize(
    ("rows", "causes", "left", "code"),
    [
        ((ROW,), (), (), 0),
        ((ROW, DIFFERS), (), (), 1),
        ((DIFFERS, OPEN), (), (), 1),
        ((ROW,), (CAUSE,), (), 1),
        ((ROW, DIFFERS), (CAUSE,), (), 1),
        ((ROW,), (), (LEFT,), 2),
        ((ROW, OPEN), (), (), 2),
        ((ROW, OPEN), (CAUSE,), (), 1),
        ((), (), (), 2),
    ],
)
def test_a_difference_or_a_cause_alone_makes_the_verdict(
    rows: tuple[TensorStep, ...], causes: tuple[Any, ...], left: tuple[Any, ...], code: int
) -> None:
    report = StepReport("a", "b", None, None, rows, causes, left)
    assert report.exit_code == code
    assert sum(report.counts.values()) == len(rows)


@pytest.mark.parametrize(
    ("apart", "flips", "verdict"),
    [
        (0.5, ("L0.experts",), "not compared"),
        (0.5, (), "differs"),
        (2.0, ("L0.experts",), "differs"),  # more than other experts leave
    ],
)
def test_other_experts_leave_a_gradient_open(
    apart: float, flips: tuple[str, ...], verdict: str
) -> None:
    """Seen red: judged by twice the rounding of one pass, which chose other experts."""
    rng = np.random.default_rng(6)
    right, off = (x / np.linalg.norm(x) for x in rng.standard_normal((2, 8, 8)))
    case = GradientCase("k", right + apart * off, right)
    found = judge_gradient(case, 0.1, stated=True, flips=flips)
    assert found.verdict == verdict and ("L0.experts" in found.why) == (verdict == "not compared")
    twice = judge_gradient(GradientCase("k", 2 * right, right), 0.2, stated=True, flips=flips)
    assert twice.guesses, "a mistake that gives it is named all the same"


@pytest.mark.parametrize(
    ("size", "apart", "rounding", "verdict"),
    [
        (1.0, 1e-7, None, "agrees"),  # within the bound of float32
        (1e-9, 0.5, 1e-2, "agrees"),  # zero, but for what rounding leaves
        (1.0, 0.1, 0.2, "agrees"),  # the trainer's own rounding
        (1.0, 0.1, 0.5, "not compared"),  # a rounding as large as the gradient
    ],
)
def test_a_gradient_that_rounding_explains_is_judged_by_all_its_elements(
    size: float, apart: float, rounding: float | None, verdict: str
) -> None:
    rng = np.random.default_rng(5)
    made, off = (x / np.linalg.norm(x) for x in rng.standard_normal((2, 8, 8)))
    scale = size if rounding is None else 1.0
    case = GradientCase("k", size * made + apart * off * (scale if size == 1 else rounding or 1),
                        size * made)  # fmt: skip
    found = judge_gradient(case, rounding)
    assert (found.verdict, found.whole, found.guesses) == (verdict, True, ())


@pytest.mark.parametrize(
    ("rows", "causes", "left", "said"),
    [
        ((ROW,), (), (), False),
        ((ROW, DIFFERS), (), (), True),
        ((ROW, DIFFERS), (NAMED,), (), True),
        ((DIFFERS, OPEN), (NAMED,), (LEFT,), True),
        ((ROW,), (), (LEFT,), False),
        ((ROW, OPEN), (), (), False),
    ],
)
def test_a_wrong_step_says_that_no_command_mends_it(
    rows: tuple[TensorStep, ...],
    causes: tuple[NamedCause, ...],
    left: tuple[NotCompared, ...],
    said: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen red: a command that shows more stood where others have the one that mends."""
    told: list[str] = []
    monkeypatch.setattr(render, "say_lines", lambda lines: told.extend(text for text, _ in lines))
    output.show(StepReport("a", "b", None, None, rows, causes, left), False)
    mends = [text for text in told if text.startswith("no command mends it: the trainer has to")]
    assert len(mends) == said
    if said:
        assert told[told.index(mends[0]) + 1].startswith("next: aprfmt ")
