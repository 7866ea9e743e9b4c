"""Of a stack of experts only the stored tensors that differ are named, by `diff` and `diagnose`.

Seen red: all names of the stack; the names of the sound experts.
"""

from collections.abc import Callable
from typing import Any

import pytest

from aprfmt.compare import diff_models
from aprfmt.diagnosis.stored_names import stored_names_of_places
from aprfmt.measure.differing_units import differing_names
from aprfmt.measure.findings import Finding
from aprfmt.model import open_model
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder

EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"
EXPERTS = 6


def changed(*numbers: int, part: str = "w1") -> Callable[[Any], None]:
    """Return a change that negates a matrix of some experts of layer 1."""

    def change(rows: Any) -> None:
        for number in numbers:
            files.edit(EXPERT.format(number, part), lambda x: -x)(rows)

    return change


def names(*numbers: int, part: str = "w1") -> tuple[str, ...]:
    return tuple(EXPERT.format(number, part) for number in numbers)


CASES = {
    "exchanged": (files.swap(EXPERT.format(2, "w1"), EXPERT.format(2, "w3")), (2,)),
    "first and last": (changed(0, 5), (0, 5)),
    "every one": (changed(*range(EXPERTS)), tuple(range(EXPERTS))),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("container", ["folder", "gguf"])
def test_parts_that_differ_are_named(name: str, container: str) -> None:
    change, numbers = CASES[name]
    sound = tiny_folder("mixtral")
    wrong = files.copy(sound, f"units-{name.replace(' ', '-')}", tensors=change)
    other = sound if container == "folder" else files.converted(sound, "units.gguf")
    role = "L1.ffn_gate_exps.weight"
    with open_model(other) as a, open_model(wrong) as b:
        one, pair = b.roles[role], a.roles[role]
        assert differing_names(one, pair) == names(*numbers)
        finding = Finding("scale", "x", "tensor", "bug", (role,), True)
        assert stored_names_of_places([finding], a, b) == {role: names(*numbers)}
        report = diff_models(a, b)
        assert report.stored[role] == names(*numbers)


def test_equal_parts_are_all_named() -> None:
    with open_model(tiny_folder("mixtral")) as a, open_model(tiny_folder("mixtral")) as b:
        role = "L1.ffn_gate_exps.weight"
        assert differing_names(a.roles[role], b.roles[role]) == names(*range(EXPERTS))
        norm = "L1.attn_norm.weight"
        assert differing_names(a.roles[norm], b.roles[norm]) == a.roles[norm].names
