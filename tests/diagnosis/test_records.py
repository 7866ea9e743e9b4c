"""What a diagnosis says of itself, made from its records alone."""

import pytest

from aprfmt.diagnosis.records import Diagnosis, PointRow
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
