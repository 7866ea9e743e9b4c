"""Of two captures of one model the one that departs from it is named, and the other one's state."""

from typing import Any

import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import broken, tiny_folder, trace

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no cap": ("gemma2", {"hp": {"final_softcap": None}}, "softcap"),
    "another base": ("llama", {"hp": {"rope_theta": 1e6}}, "rope_theta"),
    "another epsilon": ("llama", {"hp": {"norm_eps": 1e-2}}, "norm_eps"),
    "a factor": ("cohere", {"hp": {"logit_scale": 1.0}}, "multiplier"),
}


@pytest.mark.parametrize("side", "AB")
@pytest.mark.parametrize("name", WRONG)
def test_the_capture_that_departs_is_named(name: str, side: str) -> None:
    """Seen red: one sentence for both orders, and a command that took the second for the wrong."""
    base, how, cause = WRONG[name]
    folder = tiny_folder(base)
    right = str(trace(folder, "departs-right"))
    wrong = str(trace(folder, f"departs-{name.replace(' ', '-')}", **how))
    a, b = (wrong, right) if side == "A" else (right, wrong)
    found = diagnose(a, b, model=str(folder))
    other = "B" if side == "A" else "A"
    assert (found.kind, found.cause) == ("bug", cause), found.sentence
    assert found.lead is not None and found.lead.side == side
    assert f" - {side}: " in found.sentence
    assert f"; {other} has at {found.lead.first} what the model makes" in found.sentence
    assert all(f"--reference {wrong}" in step for step in found.next), found.next


@pytest.mark.parametrize("side", "AB")
def test_what_no_cause_explains_is_named_with_its_side_in_few_words(side: str) -> None:
    """Seen red: a first line of 1,200 characters, thirteen weights one by one."""
    folder = tiny_folder("llama")

    def bent(op: Any, a: Any, b: Any) -> Any:
        y = op(a, b)
        return y + 0.3 * abs(y) ** 1.5

    points = frozenset({"embd", "L0.out", "L1.out", "final_norm", "logits"})
    right = str(trace(folder, "few-right", points=points))
    wrong = str(trace(folder, "few-wrong", points=points, backend=lambda: broken("mul", bent)))
    a, b = (wrong, right) if side == "A" else (right, wrong)
    found = diagnose(a, b, model=str(folder))
    assert found.exit_code == 1 and found.lead is not None
    assert found.lead.side == side and len(found.sentence) < 700, found.sentence
    if not found.lead.cause:
        assert len(found.lead.where) > 10 and "weights from " in found.sentence
