"""`aprfmt diagnose` as a command: exit codes, JSON, what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.causes import CAUSES
from aprfmt.diagnosis import Diagnosis, diagnose, forward_level
from aprfmt.diagnosis.diagnosis_order import DiagnosisRun
from aprfmt.errors import UsageError
from aprfmt.inference.aprt import save_aprt
from aprfmt.inference.trace_file import load_trace
from aprfmt.model import open_model
from tests.cli.run import aprfmt as command
from tests.diagnosis.engines import place, tiny_folder, trace
from tests.diagnosis.faults import FAULTS
from tests.diagnosis.test_diagnosis_order import wrong_theta
from tests.models import IDS

FIELDS = (
    "verdict", "cause", "where", "first", "confidence", "residual_before", "residual_after",
    "evidence", "checked", "not_checked",
)  # fmt: skip


@pytest.mark.parametrize("name", ["theta", "clean-trace", "torch", "other-ids", "demo-eps"])
def test_exit_codes_and_json(name: str) -> None:
    fault = FAULTS[name]
    a, b = fault.make()
    done = command("diagnose", a, b, "--json")
    body = done.json
    assert tuple(field for field in body if field in FIELDS) == FIELDS
    assert body["schema"] == "aprfmt.diagnose/3" and body["exit"] == done.code
    assert body["verdict"] == fault.verdict
    assert done.code == {"same": 0, "precision": 0, "bug": 1, "not_comparable": 2}[fault.verdict]
    assert body["ok"] is (done.code == 0)
    text = command("diagnose", a, b)
    assert text.code == done.code
    assert text.out.startswith(body["sentence"].split(",")[0][:20])


def test_empty_tokens_are_refused_in_one_line() -> None:
    folder = tiny_folder("llama")
    done = command("diagnose", folder, f"{folder}@numpy:float64", "--ids", "")
    assert (done.code, done.err.count("\n")) == (2, 1) and "no token id" in done.err


def test_an_exploded_value_is_not_lost(tmp_path: Path) -> None:
    """One value whose square overflows float32 makes the distance infinite, not zero."""
    folder = tiny_folder("llama")

    def explode(values: dict[str, Any]) -> dict[str, Any]:
        values["logits"][-1, 5] = 4e25
        return values

    found = diagnose(str(folder), str(trace(folder, "exploded", rename=explode)))
    assert (found.verdict, found.first) == ("bug", "logits")


def test_joined_stages_of_a_folder_against_a_trace_without_the_model(tmp_path: Path) -> None:
    folder = tiny_folder("llama")
    saved = trace(folder, "joined-stages")
    with load_trace(saved) as kept:
        save_aprt(tmp_path / "aprt", kept)
    found = diagnose(str(tmp_path / "aprt"), str(saved), ids=IDS)
    assert found.verdict == "same"
    assert any(text.startswith("L0.qkv: several points") for text in found.not_checked)
    assert diagnose(str(folder), str(tmp_path / "aprt"), ids=IDS).verdict == "same"


def test_every_unknown_key_of_a_foreign_trace_is_listed_with_the_reason() -> None:
    folder = tiny_folder("llama")
    with load_trace(trace(folder, "unknown-keys")) as known:
        logits = np.array(known.recorded_values("logits"))
    strange: dict[str, Any] = {f"model.layers.1.mystery{i}": np.zeros(3) for i in range(30)}
    path = place("unknown-keys.npz")
    np.savez(path, logits=logits, input_ids=np.array(IDS), **strange)
    found = diagnose(str(folder), str(path))
    assert found.verdict in ("same", "precision")  # one operation here, in steps there
    assert {f"B: {key}: not a capture point" for key in strange} <= set(found.not_checked)


def test_the_human_output_has_the_chain_and_what_was_not_checked() -> None:
    a, b = FAULTS["theta"].make()
    out = command("diagnose", a, b, "-v").out
    for word in ("rope_theta", "evidence", "checked", "not checked", "residual", "where"):
        assert word in out
    assert "the model says 5000" in out


def test_unreadable_sides_are_errors_not_verdicts(tmp_path: Path) -> None:
    folder = tiny_folder("llama")
    missing = command("diagnose", folder, tmp_path / "nothing", "--json")
    assert (missing.code, missing.json["error"]["kind"]) == (2, "usage")
    cut = tmp_path / "cut.safetensors"
    whole = (folder / "model.safetensors").read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    truncated = command("diagnose", folder, cut, "--json")
    # Upstream 35: 95 % gone, "valid".
    assert truncated.code == 2 and truncated.json["verdict"] == "not_comparable"
    assert "a file is not whole" in truncated.json["sentence"]
    absent = command("diagnose", folder, f"{folder}@torch:cuda:7", "--json")
    assert absent.code == 2 and "error" in absent.json  # upstream 38: asked for, never replaced


@pytest.mark.parametrize("cause", CAUSES)
def test_explain_tells_every_cause(cause: str) -> None:
    done = command("explain", cause, "--json")
    assert done.code == 0
    texts = [row["text"] for row in done.json["found"] if row["section"] == "cause"]
    assert len(texts) == 1 and CAUSES[cause].means in texts[0]


def test_the_public_function_and_its_record() -> None:
    folder = tiny_folder("llama")
    found = aprfmt.diagnose(folder, wrong_theta(), ids=IDS)
    assert isinstance(found, Diagnosis)
    again = json.loads(json.dumps(found.to_json(), default=str))
    assert again["cause"] == "rope_theta" and again["findings"][0]["confidence"] == "confirmed"
    with pytest.raises(AttributeError):
        found.a = "other"  # type: ignore[misc]
    worse = replace(found, reason="of other tokens")
    assert (worse.verdict, worse.exit_code, worse.lead) == ("not_comparable", 2, None)


def test_ids_that_a_trace_was_not_run_on_are_refused() -> None:
    folder = tiny_folder("llama")
    found = diagnose(str(folder), str(wrong_theta()), ids=(1, 2, 3))
    assert found.exit_code == 2 and "other token ids" in found.reason
    assert place("anything").parent.exists()


@pytest.fixture
def other_template(demo_model: Path, tmp_path: Path) -> Path:
    """Return the model with another chat template: both compute the same."""
    for file in demo_model.iterdir():
        if file.is_file() and file.name != "chat_template.jinja":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path


@pytest.mark.parametrize(
    ("a", "b", "passes"),
    [("", "", False), ("@numpy:float64", "", True), ("", "@numpy:float64", True),
     ("@numpy", "@numpy:float64", True)],
)  # fmt: skip
def test_a_run_that_was_asked_for_is_looked_at_though_models_compute_the_same(
    a: str, b: str, passes: bool, demo_model: Path, other_template: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    looked: list[str] = []
    monkeypatch.setattr(forward_level, "compare_passes", lambda run: looked.append("forward"))
    found = diagnose(f"{demo_model}{a}", f"{other_template}{b}", ids=IDS[:3])
    assert [one.cause for one in found.findings] == ["chat_template"]
    assert bool(looked) is passes


def test_a_prompt_is_encoded_by_the_models_own_tokenizer(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DiagnosisRun, "run", lambda self: self.ids)
    with open_model(demo_model) as model:
        ids = tuple(model.tokenizer.encode("What is 2+2?"))
    sides = (str(demo_model), str(demo_model))
    found: Any = diagnose(*sides, prompt="What is 2+2?")
    assert found == ids and len(ids) > 2
    found = diagnose(*sides, ids=ids)
    assert found == ids
    with pytest.raises(UsageError, match="one of ids and prompt"):
        diagnose(*sides, prompt="x", ids=ids)


@pytest.mark.parametrize("first", [True, False])
def test_a_file_without_a_tensor_accuses_no_weight(first: bool, tmp_path: Path) -> None:
    """As a server's answers that were saved by torch.save."""
    torch = pytest.importorskip("torch")
    torch.save({"prompt_token_ids": [1, 2]}, tmp_path / "x.pt")
    paths = [tmp_path / "x.pt", tiny_folder("llama")]
    given = paths if first else paths[::-1]
    done = command("diagnose", *given, "--json")
    assert done.code == 2 and not done.json["causes"], done.out
    said = command("diagnose", *given).out
    assert f"not comparable: {'A' if first else 'B'} holds no tensor" in said
