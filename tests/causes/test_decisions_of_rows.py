"""What a cause's row decides: the command that repairs B, and what else its finding explains.

Seen red: any values taken for lost ones; a cause of another name taken for a lost one; a head that
is no copy of an embedding taken for a trained one; the rows read beyond the sample.
"""

import ast
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes import CAUSES
from aprfmt.causes.forward.mismatch import Change
from aprfmt.causes.remedies import (
    has_weights,
    is_lost,
    is_repaired_by_rewriting,
    is_trained_part,
    trained_command,
)
from aprfmt.causes.tensor.other_tensors import _ROWS, _table_correlation
from aprfmt.diagnosis.forward import _is_same_cause
from aprfmt.diagnosis.records import Touched
from aprfmt.diagnosis.tensors import explained_findings
from aprfmt.measure.findings import Finding
from aprfmt.measure.records import TensorDiff
from tests.test_imports import parsed, product


def test_damage_is_repaired_by_the_side_that_still_has_the_values() -> None:
    def odd(a: int, both: int) -> Any:
        return {"nonfinite": {"k": {"a": a, "both": both}}}

    for cause, confirmed, values, mended in (
        ("nonfinite", False, odd(1, 1), True),  # all of A's are B's too: A holds them
        ("nonfinite", False, odd(2, 1), False),
        ("nonfinite", False, odd(0, 0), True),
        ("nonfinite", False, {}, False),
        ("nonfinite", False, None, False),
        ("other", False, odd(1, 1), False),
        ("other", True, None, True),
        ("bit_rot", False, None, True),
    ):
        found = is_repaired_by_rewriting(cause, confirmed, values)
        assert found is mended, (cause, confirmed, values)
    two = {"nonfinite": {"k": {"a": 1, "both": 1}, "v": {"a": 2, "both": 1}}}
    assert not is_repaired_by_rewriting("nonfinite", False, two)


@pytest.mark.parametrize("rows", [1, 2, _ROWS, _ROWS + 3])
def test_tables_are_alike_by_their_first_rows(rows: int) -> None:
    """All of them, the first too; what comes after the sample is not read."""
    random = np.random.default_rng(rows)
    x, y = random.normal(size=(2, rows, 8))
    x[0], y[0] = 5 * x[0], 5 * x[0] + y[0]

    def stored(table: Any) -> Any:
        return SimpleNamespace(shape=table.shape, rows=lambda a, b: table[a:b])

    model: Any = SimpleNamespace(roles={"x": stored(x), "y": stored(y), "z": stored(x[:, :4])})
    a, b = x[:_ROWS], y[:_ROWS]
    wanted = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
    assert _table_correlation(model, "x", "y") == pytest.approx(wanted, rel=1e-12)
    assert _table_correlation(model, "x", "x") == pytest.approx(1.0)
    assert _table_correlation(model, "x", "z") == _table_correlation(model, "x", "none") == 0.0


@pytest.mark.parametrize("name", ["", "of no table"])
def test_nothing_is_known_of_a_difference_without_a_cause(name: str) -> None:
    model: Any = SimpleNamespace(hyper={"tied_embeddings": False})
    finding = Finding(name, "", "identity", "bug", (), True, values={"eos_id": {"a": 1, "b": 2}})
    assert not any(has_weights(name, kind) for kind in ("lost", "trained", "exchanged"))
    assert not is_lost(name, {"nonfinite": {"k": {"a": 1, "both": 1}}})
    assert not is_trained_part(name, model, model)
    assert trained_command(model, finding, "A B") == ""


@pytest.mark.parametrize(
    ("tied", "lost"), [((False, True), True), ((True, False), False), ((False, False), False)]
)
def test_a_head_that_b_lacks_is_lost_whatever_its_key_says(
    tied: tuple[bool, bool], lost: bool
) -> None:
    values = {"tied_embeddings": dict(zip("ab", tied, strict=True))}
    assert is_lost("tied_embedding", values) is lost
    assert not is_lost("norm_eps", values) and not is_lost("tied_embedding", {})


@pytest.mark.parametrize("known", ["", "a", "b", "ab"])
def test_a_head_that_grew_from_the_embedding_was_trained(known: str) -> None:
    table = np.random.default_rng(0).normal(size=(4, 8))

    def model(head: Any, tied: bool) -> Any:
        held = {"token_embd.weight": table, "output.weight": head}
        roles = {
            name: SimpleNamespace(shape=value.shape, rows=lambda i, j, x=value: x[i:j])
            for name, value in held.items()
        }
        return SimpleNamespace(hyper={"tied_embeddings": tied}, roles=roles)

    a, trained, new = model(table, True), model(table + 0.1, False), model(table[::-1], False)
    given = a if "a" in known else None
    for b, wanted in ((trained, True), (new, False), (a, False)):
        found = is_trained_part("tied_embedding", given, b if "b" in known else None)
        assert found is (wanted and known == "ab")
        assert not is_trained_part("norm_eps", given, b)
    assert not is_trained_part("tied_embedding", trained, trained)  # A has a head of its own


@pytest.mark.parametrize(
    "module",
    ["causes.remedies", "compare.repairs", "compare.exchanged_names", "diagnosis.next_commands",
     "measure.named_causes", "measure.item_repairs"],
)  # fmt: skip
def test_what_chooses_a_command_knows_no_cause_by_its_name(module: str) -> None:
    """What is to be done about one cause stands in its row, in its own file.

    Seen red: a cause in a list of names in the module, one compared with a name.
    """
    tree = parsed(product()[f"aprfmt.{module}"])
    texts = {one.value for one in ast.walk(tree) if isinstance(one, ast.Constant)}
    keys = {"none", "nonfinite"}  # a word of options, and a key of a finding's values
    assert not texts & {*CAUSES.own} - keys


def test_each_kind_of_weights_is_said_by_a_cause_of_tensors_or_of_another_model() -> None:
    said = {row.weights: row for row in CAUSES.values() if row.weights}
    assert {*said} == {"lost", "mislabelled", "exchanged", "trained", "rank"}
    assert {row.level for row in said.values()} == {"tensor", "identity"}


def test_a_value_taken_at_another_point_is_no_other_computation() -> None:
    """Seen red: every change taken for one of the recording; none."""
    found = {
        cause: Change(cause, "", ()).is_of_recording for cause in ("capture_point", "mask", "")
    }
    assert found == {"capture_point": True, "mask": False, "": False}


@pytest.mark.parametrize(("cause", "one"), [("rope_layers", True), ("mask", False), ("", False)])
def test_several_places_are_one_finding_where_the_row_says_so(cause: str, one: bool) -> None:
    """Seen red: `by_place` of no row read; read as set in each."""
    places = [Finding(cause, "x", "forward", "bug", (key,), True, values={key: 1}) for key in "ab"]
    assert _is_same_cause(*places) is one


@pytest.mark.parametrize(
    ("cause", "sizes"), [("padded_vocabulary", ("vocab_size",)), ("scale", ())]
)
def test_a_finding_takes_the_sizes_with_it_that_its_row_names(
    cause: str, sizes: tuple[str, ...]
) -> None:
    """Seen red: the sizes of no row read."""
    row = TensorDiff("w", "DIFFERENT")
    finding = Finding(cause, "x", "tensor", "same", ("w",), True, keys=("w",))
    report: Any = SimpleNamespace(findings=(finding,), tensors=(row,))
    ((_, touched),) = explained_findings(report, set())
    assert touched == Touched(sizes, ("w",))
