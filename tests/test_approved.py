"""Approved answers: what counts as another answer, and that each belongs to a case."""

from pathlib import Path

import pytest

from tests import approved
from tests.approved import WRITE, differences, leaves, near, settled
from tests.conftest import not_run
from tests.scope import SAMPLED, SCOPE

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        ("0.0233", "0.0229", True),
        ("0.0233", "0.03", False),
        ("12", "13", False),
        ("12", "12", True),
        ("0", "3.1e-07", True),
        ("0", "0.001", False),
        ("-1.36", "1.36", False),
        ("5e-324", "0", True),
    ],
)
def test_numbers_are_near_but_whole_ones_are_equal(a: str, b: str, equal: bool) -> None:
    assert near(a, b) is near(b, a) is equal


def test_words_lines_and_counts_are_held() -> None:
    text = "bug: norm_eps - eps 1e-06, first seen at L0.attn_norm\n0.0228 apart in 3 of 4 rows\n"
    assert differences(text, text.replace("0.0228", "0.0229")) == []
    for old, new in (("bug", "same"), ("L0.", "L1."), ("3 of 4", "2 of 4"), ("0.0228", "0.0282")):
        assert len(differences(text, text.replace(old, new))) == 2
    assert differences(text, text + "more\n") == ["- (no line)", "+ more"]
    assert differences(text, text.splitlines()[0]) != []


def test_folders_and_times_are_no_part_of_an_answer() -> None:
    said = settled("/tmp/x/aprfmt-diagnose-ab12cd34/m.gguf   in 1.5 s\n/a/b/c", {"/a/b": "B"})
    assert said == "TMP/m.gguf in TIME\nB/c\n"


def test_every_value_has_a_line_and_long_lists_their_ends() -> None:
    body = {"a": [1.25, None, "x"], "b": {"c": True}}
    assert list(leaves(body)) == ["/a: 3", "/a/0: 1.25", "/a/1: None", "/a/2: 'x'", "/b/c: True"]
    assert list(leaves(list(range(9)), most=4)) == [": 9", "/0: 0", "/1: 1", "/7: 7", "/8: 8"]


def test_a_case_of_the_default_run_needs_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(WRITE, raising=False)
    monkeypatch.setenv(SCOPE, SAMPLED)
    with pytest.raises(AssertionError, match="not approved yet"):
        approved.check(tmp_path / "x.txt", "one 1.0")
    monkeypatch.setenv(WRITE, "1")
    approved.check(tmp_path / "x.txt", "one 1.0")
    monkeypatch.delenv(WRITE)
    approved.check(tmp_path / "x.txt", "one 1.01")
    with pytest.raises(AssertionError, match="says something else"):
        approved.check(tmp_path / "x.txt", "two 1.0")


def test_every_file_belongs_to_a_case() -> None:
    try:
        from tests.diagnosis.faults import FAULTS
        from tests.training.test_judged_steps import EVERY
    except ImportError as error:
        not_run(str(error))
    steps = {row.name for row in EVERY}
    for folder, names in (
        ("diagnosis/answers", set(FAULTS)),
        ("diagnosis/answers_of_diff", set(FAULTS)),
        ("training/answers", steps),
    ):
        found = {path.stem for path in (HERE / folder).iterdir()}
        assert found and found <= names, found - names
