"""The exit code of `diff`: every verdict, and the facts that change the output.

Seen red: roles that only B has left out, an unreadable tensor reported as a difference, the
tokenizer's comparison ignored.
"""

from pathlib import Path

import pytest

import aprfmt
from aprfmt.compare import DiffReport
from aprfmt.compare.diffs import VERDICTS, FieldDiff, TensorDiff, TensorVerdict
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.formats.gguf_files import File
from tests.qa.faults import copied, other_template, swapped_tokens

UP = "model.layers.0.mlp.up_proj.weight"


def report(*verdicts: TensorVerdict, **facts: tuple[FieldDiff, ...]) -> DiffReport:
    tensors = tuple(TensorDiff(f"t{i}", verdict) for i, verdict in enumerate(verdicts))
    hyper, tokenizer = facts.get("hyperparameters", ()), facts.get("tokenizer", ())
    return DiffReport("a", "b", tensors, hyper, tokenizer, facts.get("metadata", ()))


@pytest.mark.parametrize("verdict", VERDICTS)
def test_every_verdict_has_its_exit_code(verdict: TensorVerdict) -> None:
    found = report("SAME_BYTES", verdict, "SAME_VALUES")
    expected = {"SAME_BYTES": 0, "SAME_VALUES": 0, "UNREADABLE": 2}.get(verdict, 1)
    assert found.exit_code() == expected
    assert found.exit_code(["within"]) == (0 if verdict == "WITHIN" else expected)
    assert found.equal is (expected == 0)
    assert report("DIFFERENT", verdict).exit_code() == 1  # what is established beats what is not


@pytest.mark.parametrize(
    ("kind", "decisive"),  # metadata is reported only: none of it is ever decisive
    [("hyperparameters", True), ("tokenizer", True), ("hyperparameters", False),
     ("tokenizer", False), ("metadata", False)],
)  # fmt: skip
def test_a_fact_that_changes_the_output_is_a_difference(kind: str, decisive: bool) -> None:
    found = report("SAME_BYTES", **{kind: (FieldDiff("x", 1, 2, decisive=decisive),)})
    assert found.exit_code() == int(decisive)


def test_what_only_one_file_has_is_found_from_both_sides(tmp_path: Path) -> None:
    whole = llama_folder(tmp_path / "whole", "BF16")
    part = llama_folder(tmp_path / "part", "BF16")
    rows = tensors_of(whole)
    del rows[UP]
    write_mixed(part / "model.safetensors", rows)
    for a, b, verdict in ((whole, part, "ONLY_IN_A"), (part, whole, "ONLY_IN_B")):
        found = aprfmt.diff(a, b)
        assert {t.key: t.verdict for t in found.tensors if t.verdict != "SAME_BYTES"} == {
            "L0.ffn_up.weight": verdict
        }
        assert len(found.tensors) == len(rows) + 1
        assert (found.exit_code(), command("diff", a, b).code) == (1, 1)


def test_a_tensor_that_nobody_can_read_is_exit_2(tmp_path: Path) -> None:
    """Type 142 has no codec and the bytes differ, so it is not known whether the values do."""
    for name, last in (("a", 0), ("b", 1)):
        file = File(data=bytes(63) + bytes([last])).tensor("w", [8], 142)
        (tmp_path / f"{name}.gguf").write_bytes(file.build())
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    done = command("diff", a, b, "--json")
    assert done.json["counts"]["UNREADABLE"] == 1
    assert done.json["says"].startswith("not decided") and not done.json["equal"]
    assert (done.code, command("diff", a, b).code, command("diff", a, a).code) == (2, 2, 0)


def test_another_tokenizer_and_another_template_are_differences(
    demo_model: Path, tmp_path: Path
) -> None:
    for name, change in (("ids", swapped_tokens), ("template", other_template)):
        other = copied(demo_model, tmp_path / name)
        change(other)
        done = command("diff", demo_model, other, "--json")
        assert done.json["tokenizer"], name
        assert {t["verdict"] for t in done.json["tensors"]} == {"SAME_BYTES"}
        assert any(row["decisive"] for row in done.json["tokenizer"]), name
        assert done.code == 1, name
