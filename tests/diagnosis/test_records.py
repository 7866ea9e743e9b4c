"""What a diagnosis says of itself, made from its records alone."""

from aprfmt.diagnosis.records import Diagnosis, PointRow
from aprfmt.measure.findings import Finding


def point(key: str, beyond: bool) -> PointRow:
    return PointRow(key, key.rpartition(".")[2], 0, 0.1, None, 0.01, beyond=beyond)


def test_the_first_point_is_the_causes_or_the_first_beyond() -> None:
    points = (point("L0.q", False), point("L0.k", True), point("L0.v", True))
    bare = Diagnosis("a", "b", (), (), (), (), points=points)
    assert bare.first == "L0.k"
    found = Finding("scale", "x", "tensor", "bug", ("L0.attn_v.weight",), True, "L0.v")
    assert Diagnosis("a", "b", (found,), (), (), (), points=points).first == "L0.v"
    assert Diagnosis("a", "b", (), (), (), (), points=points[:1]).first is None
