"""What a diagnosis says of itself, made from its records alone."""

import pytest

from aprfmt.diagnosis.conclusion import rounding_finding
from aprfmt.diagnosis.records import Diagnosis, PointRow
from aprfmt.inference.replay.shadow import OperationResiduals
from aprfmt.measure.findings import Finding
from aprfmt.measure.proofs import unfitted_proof
from aprfmt.model.ledger import NotCompared, State


def point(key: str, beyond: bool) -> PointRow:
    return PointRow(key, key.rpartition(".")[2], 0, 0.1, None, 0.01, beyond=beyond)


STATES: dict[State, tuple[str, int]] = {
    "only in A": ("bug", 1), "unequal": ("bug", 1), "unreadable": ("not_comparable", 2),
    "not reached": ("not_comparable", 2), "equal": ("same", 0), "no counterpart": ("same", 0),
}  # fmt: skip


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("rounded", [False, True])
def test_what_was_not_compared_takes_the_word_from_what_was(state: State, rounded: bool) -> None:
    """Seen red: "same", though one side alone has a file or a section cannot be read."""
    found = Finding("rounding", "x", "forward", "precision", ("logits",), True)
    left = (NotCompared("file", "x.bin", state),)
    made = Diagnosis("a", "b", (found,) * rounded, (), ("tensors",), (), left=left)
    verdict, code = STATES[state]
    plain = "precision" if rounded else "same"
    assert (made.verdict, made.exit_code) == (plain if code == 0 else verdict, code)
    assert made.sentence.startswith("same: ") == (not code and not rounded)


@pytest.mark.parametrize("after", [None, 0.0, 0.3, 0.5, 0.7])
def test_a_cause_that_leaves_as_much_as_there_was_is_only_located(after: float | None) -> None:
    """Seen red: confirmed by a proof, though the difference stayed as it was without the cause."""
    found = Finding(
        "scale", "x", "tensor", "bug", ("L0.attn_v.weight",), True,
        residual_before=0.5, residual_after=after, proof=unfitted_proof(),
    )  # fmt: skip
    wanted = "located" if after is not None and after >= 0.5 else "confirmed"
    assert found.certainty == wanted
    assert found.to_named_cause({}).level == wanted


def test_the_first_point_is_the_causes_or_the_first_beyond() -> None:
    points = (point("L0.q", False), point("L0.k", True), point("L0.v", True))
    bare = Diagnosis("a", "b", (), (), (), (), points=points)
    assert bare.first == "L0.k"
    found = Finding("scale", "x", "tensor", "bug", ("L0.attn_v.weight",), True, "L0.v")
    assert Diagnosis("a", "b", (found,), (), (), (), points=points).first == "L0.v"
    assert Diagnosis("a", "b", (), (), (), (), points=points[:1]).first is None


@pytest.mark.parametrize(
    ("complete", "said"),
    [
        (True, "; complete: without it nothing but rounding is left"),
        (False, "; not complete: what is confirmed leaves a difference, 0.25 of the logits"),
        (None, ""),
    ],
)
def test_a_cause_is_complete_only_where_nothing_else_was_left(
    complete: bool | None, said: str
) -> None:
    """Seen red: "complete" of causes that leave a quarter of the logits."""
    found = Finding("scale", "x", "tensor", "bug", ("w",), True, proof=unfitted_proof())
    made = Diagnosis("a", "b", (found,), (), (), (), complete=complete, remainder=0.25)
    assert made.sentence.endswith(said) and ("complete" in made.sentence) == bool(said)


@pytest.mark.parametrize("supposed", ["", "bfloat16 products"])
def test_an_arithmetic_that_is_supposed_is_not_confirmed(supposed: str) -> None:
    """Seen red: rounding confirmed where a fault of that size would look the same."""
    rows = [PointRow("L0.q", "q", 0, 0.1, 1e-3, 0.01, apart=True)]
    held = OperationResiduals({"L0.q": (1e-3, 1e-2)})
    found = rounding_finding(rows, (), (), held, supposed)
    assert found is not None and (found.verdict, found.confirmed) == ("precision", not supposed)
    assert found.certainty == ("located" if supposed else "confirmed")
    assert supposed in found.says
