"""The exit code of `diff`: every verdict, and the facts that change the output.

Seen red: roles that only B has left out, an unreadable tensor reported as a difference, the
tokenizer's comparison ignored.
"""

import json
import shlex
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

import aprfmt
from aprfmt.base.protocols import SURPLUS, Damage
from aprfmt.compare import DiffReport
from aprfmt.compare.diffs import SECTIONS
from aprfmt.measure.records import (
    TENSOR_VERDICTS,
    FieldDiff,
    SpellingDiff,
    TensorDiff,
    TensorVerdict,
)
from aprfmt.measure.texts import SideVerdicts
from tests.checks.gates.faults import copied, other_template, swapped_tokens
from tests.cli.run import aprfmt as command
from tests.conversion.folders import llama_folder, tensors_of, write_mixed
from tests.formats.gguf_files import File

UP = "model.layers.0.mlp.up_proj.weight"


def report(*verdicts: TensorVerdict, **facts: tuple[FieldDiff, ...]) -> DiffReport:
    tensors = tuple(TensorDiff(f"t{i}", verdict) for i, verdict in enumerate(verdicts))
    hyper, tokenizer = facts.get("hyperparameters", ()), facts.get("tokenizer", ())
    return DiffReport("a", "b", tensors, hyper, tokenizer, facts.get("metadata", ()))


@pytest.mark.parametrize("verdict", TENSOR_VERDICTS)
def test_every_verdict_has_its_exit_code(verdict: TensorVerdict) -> None:
    found = report("SAME_BYTES", verdict, "SAME_VALUES")
    expected = {"SAME_BYTES": 0, "SAME_VALUES": 0, "UNREADABLE": 2}.get(verdict, 1)
    assert found.exit_code() == expected
    assert found.exit_code(["within"]) == (0 if verdict == "WITHIN" else expected)
    assert found.equal is (expected == 0)
    assert report("DIFFERENT", verdict).exit_code() == 1  # what is established beats what is not


def test_tensors_of_one_side_and_unreadable_ones_were_not_compared() -> None:
    found = report("SAME_BYTES", "ONLY_IN_A", "ONLY_IN_B", "UNREADABLE", "DIFFERENT")
    assert found.pronounced().says.startswith("different, 2 of 5 tensors: ")


def test_another_context_length_is_a_difference(demo_model: Path, tmp_path: Path) -> None:
    """No forward pass reads it, and engines take their limit from it."""
    copy = tmp_path / "copy"
    shutil.copytree(demo_model, copy)
    config = json.loads((copy / "config.json").read_text())
    longer = 2 * config["max_position_embeddings"]
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": longer}))
    done = command("diff", demo_model, copy)
    assert done.code == 1 and f"context_length: {longer // 2} and {longer}" in done.out


@pytest.mark.parametrize(
    ("kind", "decisive"),  # metadata is reported only: none of it is ever decisive
    [("hyperparameters", True), ("tokenizer", True), ("hyperparameters", False),
     ("tokenizer", False), ("metadata", False)],
)  # fmt: skip
def test_a_fact_that_changes_the_output_is_a_difference(kind: str, decisive: bool) -> None:
    found = report("SAME_BYTES", **{kind: (FieldDiff("x", 1, 2, decisive=decisive),)})
    assert found.exit_code() == int(decisive)


@pytest.mark.parametrize("kind", ["format", "truncated", "unsupported", SURPLUS])
def test_a_damaged_file_is_not_equal_though_all_its_tensors_are(kind: str) -> None:
    """Bytes of no tensor are an item of the ledger, and compared there."""
    left = 0 if kind == SURPLUS else 2
    damage = Damage("a", "a rule is broken", kind=kind)
    for verdict, code in (("SAME_BYTES", left), ("WITHIN", 1), ("DIFFERENT", 1)):
        found = replace(report(verdict), damage=(damage,))  # type: ignore[arg-type]
        assert (found.exit_code(), found.equal) == (code, not code)
        assert ("a rule is broken" in found.pronounced().says) == bool(left)


def test_a_wrong_checksum_is_told_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage in both, byte for byte, is no difference, but said. Seen red: "equal" and no word."""
    monkeypatch.chdir(tmp_path)
    folder = llama_folder(tmp_path / "m", "BF16")
    a, b, twin, other = (tmp_path / f"{name}.apr" for name in ("a", "b", "twin", "other"))
    assert command("convert", folder, a).code == 0
    whole = a.read_bytes()
    for path, last in ((b, 1), (twin, 1), (other, 2)):
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ last]))
    said = "of weights with a wrong checksum"
    for left, right, code, where in (
        (a, b, 1, " only in B"),
        (b, folder, 1, " only in A"),
        (b, other, 1, " unequal"),
        (b, twin, 0, " ("),
    ):
        for name in ("diff", "diagnose"):
            done = command(name, left, right)
            assert done.code == code and f"{said}{where}" in done.out, (name, left, right)
    assert said not in command("diff", a, folder).out
    (step,) = aprfmt.diff(a, b).next
    assert command(*shlex.split(step)[1:]).code == 0
    assert aprfmt.diff(a, tmp_path / "b-fixed.apr").equal


def test_of_files_without_a_tensor_nothing_is_said(tmp_path: Path) -> None:
    """Seen red: PASS, "equal" and "same", exit 0."""
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({}, a)
    save_file({}, b, {"format": "pt"})
    for args in (("validate", a), ("diff", a, b), ("diagnose", a, b)):
        done = command(*args)
        assert done.code == 2, args
        assert "holds no tensor" in done.out or args[0] == "diagnose"


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


@pytest.fixture(scope="module")
def gguf_pair(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("sections")
    assert command("convert", demo_model, folder / "a.gguf").code == 0
    return folder


@pytest.mark.parametrize("section", SECTIONS)
def test_the_headline_is_the_worst_of_the_sections_asked_for(
    section: str, gguf_pair: Path, tmp_path: Path
) -> None:
    """One change in each section; only that section's answer is no, and it says so first."""
    a, b = gguf_pair / "a.gguf", tmp_path / "b.gguf"
    key, value = {
        "metadata": ("general.organization", "another"),
        "hyperparameters": ("qwen2.context_length", "77"),
        "tokenizer": ("tokenizer.chat_template", "{{ messages[0].content }}"),
        "tensors": ("", ""),
    }[section]
    if section == "tensors":
        data = bytearray(a.read_bytes())
        data[-1] ^= 0x40
        b.write_bytes(data)
    else:
        done = command("set", a, f"{key}={value}", "-o", b)
        assert done.code == 0, done.err
    for asked in SECTIONS:
        done = command("diff", a, b, "--only", asked)
        found = command("diff", a, b, "--only", asked, "--json")
        # Both of a template's and a length's keys are metadata of the file, too.
        apart = asked == section or (asked == "metadata" and section != "tensors")
        assert (done.code, found.code, found.json["equal"]) == (int(apart), int(apart), not apart)
        assert done.out.startswith("different" if apart else "equal"), done.out
        listed = [row for name in SECTIONS[1:] for row in found.json[name]]
        assert apart or not (listed or found.json["template"] or found.json["generation"])


@pytest.mark.parametrize("key", ["general.organization", "general.name"])
def test_without_sections_only_what_changes_the_output_counts(
    key: str, gguf_pair: Path, tmp_path: Path
) -> None:
    """Seen red: another general.name was "equal" where metadata was asked for."""
    a, b = gguf_pair / "a.gguf", tmp_path / "b.gguf"
    assert command("set", a, f"{key}=another", "-o", b).code == 0
    assert command("diff", a, b).code == 0
    assert command("diff", a, b, "--only", "metadata").code == 1
    assert aprfmt.diff(a, b).equal
    assert command("diff", a, b, "--only", "metadata", "--only", "tensors").code == 1


@pytest.mark.parametrize("accept", [(), ("--accept", "within")])
def test_a_section_that_cannot_be_compared_is_not_equal(
    gguf_pair: Path, tmp_path: Path, demo_model: Path, accept: tuple[str, ...]
) -> None:
    """Keys of two formats have nothing in common, so their equality was never looked at."""
    a, b = gguf_pair / "a.gguf", tmp_path / "b.apr"
    assert command("convert", demo_model, b).code == 0
    done = command("diff", a, b, "--only", "metadata", *accept)
    assert (done.code, done.out.split(";")[0].strip()) == (2, "not decided")
    assert "A is gguf, B is apr" in done.out
    found = command("diff", a, b, "--only", "metadata", "--json").json
    assert (found["equal"], found["not_compared"][0]["name"]) == (False, "metadata")
    assert command("diff", a, b).code == 0  # nobody asked for it
    both = command("diff", a, b, "--only", "metadata", "--only", "tokenizer")
    assert both.code == 2
    assert command("diff", a, b, "--only", "tokenizer").code == 0


def test_what_two_formats_spell_otherwise_counts_nowhere() -> None:
    """Merges for scores, or names that split alike: a sound conversion is equal."""
    for section in SECTIONS[1:]:
        facts = {section: (SpellingDiff("x", 1, 2),)}
        found = replace(report("SAME_BYTES", **facts), asked=(section,))
        assert (found.exit_code(), found.count_differing_fields()) == (0, {})
    assert asdict(SpellingDiff("x", 1, 2)) == asdict(FieldDiff("x", 1, 2))


def test_every_section_of_fields_counts_where_it_is_named() -> None:
    for section in SECTIONS[1:]:
        facts = {section: (FieldDiff("x", 1, 2),)}
        found = replace(report("SAME_BYTES", **facts), asked=(section,))
        assert (found.exit_code(), found.count_differing_fields()) == (1, {section: 1})
        assert f"fields that differ: {section}: 1" in found.pronounced().says
        others = tuple(name for name in SECTIONS if name != section)
        assert replace(found, asked=others).exit_code() == 0


@pytest.mark.parametrize("verdict", ["different", "only in A", "only in B"])
@pytest.mark.parametrize("part", ["tokenizer", "template", "generation"])
def test_what_has_no_fact_of_its_own_counts_too(part: str, verdict: str) -> None:
    """A template may differ where neither side carries a tokenizer, and so no fact is compared."""
    verdicts: dict[str, Any] = dict.fromkeys(("tokenizer", "template", "generation"), "equal")
    found = replace(
        report("SAME_BYTES"),
        beside=SideVerdicts(**verdicts | {part: verdict}),
        asked=("tokenizer",),
    )
    assert (found.exit_code(), found.count_differing_fields()) == (1, {"tokenizer": 1})
    assert replace(found, asked=()).exit_code() == 0
