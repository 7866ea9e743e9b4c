"""`aprfmt.testing.assert_same_model`: copies pass, and a failure's message is the diagnosis."""

from pathlib import Path

import pytest

import aprfmt
from aprfmt.diagnosis import diagnose, diagnosis_text
from aprfmt.errors import UsageError
from aprfmt.testing import assert_same_model
from tests.cli.run import aprfmt as command
from tests.models import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("same") / "model"
    save_tiny("llama", path)
    return path


def test_a_copy_passes_and_says_so(folder: Path, tmp_path: Path) -> None:
    aprfmt.convert(folder, tmp_path / "copy.gguf")
    assert assert_same_model(folder, tmp_path / "copy.gguf", within="same").kind == "same"


def test_rounding_passes_only_where_it_may(folder: Path, tmp_path: Path) -> None:
    aprfmt.convert(folder, tmp_path / "f16.gguf", encoding="F16")
    assert assert_same_model(folder, tmp_path / "f16.gguf").kind == "precision"
    with pytest.raises(AssertionError, match=r"^precision: .*rounding"):
        assert_same_model(folder, tmp_path / "f16.gguf", within="same")


def test_a_bug_is_the_message_with_cause_place_and_next_step(folder: Path, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "other", rope_theta=10000.0)
    with pytest.raises(AssertionError) as raised:
        assert_same_model(folder, tmp_path / "other")
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("bug: rope_theta")
    assert "next" in lines and "evidence" in lines
    assert any(line.startswith("      where: rope_theta") for line in lines)


def test_what_cannot_be_compared_is_no_pass(folder: Path, tmp_path: Path) -> None:
    save_tiny("gemma", tmp_path / "gemma", seed=5)
    with pytest.raises(AssertionError, match=r"^not comparable"):
        assert_same_model(folder, tmp_path / "gemma")
    with pytest.raises(UsageError, match="expected one of same, precision"):
        assert_same_model(folder, folder, within="exact")  # type: ignore[arg-type]


def test_the_command_prints_the_same_report(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One home of the words: lines of `words.text`, in order, with the table of points between."""
    monkeypatch.setattr(diagnosis_text, "MOST", 1)
    save_tiny("llama", tmp_path / "other", rope_theta=10000.0)
    printed = iter(command("diagnose", folder, tmp_path / "other", "-v").out.splitlines())
    told = diagnosis_text.report_text(diagnose(str(folder), str(tmp_path / "other"))).splitlines()
    assert any(line.endswith("more (--json)") for line in told)
    assert all(line in printed for line in told)
