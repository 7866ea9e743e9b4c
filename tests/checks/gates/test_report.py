"""Outcomes, exit codes, baselines, and the command.

Seen red: a NOT-RUN counted by --min-run, an asked gate that goes missing with exit 0, an error in
a gate reported as NOT-RUN, a baseline that compares outcomes only.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from aprfmt.base.outcome import Check, Outcome
from aprfmt.checks.gates import running as qa
from aprfmt.checks.gates.baseline import compare_baseline
from aprfmt.checks.gates.baseline_file import read_baseline, report_to_baseline
from aprfmt.checks.records import Answer, Measure, QaReport, pronounce_checks
from aprfmt.errors import FormatError, OutputError, UsageError
from aprfmt.inference.device import choose_device
from tests.cli.run import aprfmt

QUICK = ("tensor-contract", "metadata", "init-statistics")


def gate(name: str, outcome: Any, asked: bool = False, **measures: float) -> Answer:
    rows = {
        key: Measure(value, "nats", 0.1, "absolute", "rounding") for key, value in measures.items()
    }
    return Answer(name, "", outcome, 0.0, measures=rows, asked=asked)


@pytest.mark.parametrize(
    ("gates", "min_run", "code"),
    [
        ([gate("a", "PASS"), gate("b", "NOT_RUN")], 0, 0),
        ([gate("a", "PASS"), gate("b", "NOT_RUN")], 1, 0),
        ([gate("a", "PASS"), gate("b", "NOT_RUN")], 2, 1),
        ([gate("a", "PASS"), gate("b", "FAIL")], 0, 1),
        ([gate("a", "FAIL"), gate("b", "NOT_RUN", asked=True)], 0, 1),
        ([gate("a", "PASS"), gate("b", "NOT_RUN", asked=True)], 0, 2),
        ([gate("a", "NOT_RUN"), gate("b", "NOT_RUN")], 0, 2),
        ([], 0, 2),
    ],
)
def test_a_not_run_is_never_a_pass(gates: list[Answer], min_run: int, code: int) -> None:
    assert QaReport("m", tuple(gates), choose_device(), min_run).exit_code == code


def test_an_error_in_a_gate_is_a_failure(
    demo_model: Path, golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aprfmt.checks.gates import structure

    def broken(subject: Any) -> Any:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(structure, "check_metadata", broken)
    report = qa.run(demo_model, only=("metadata", "tensor-contract"), golden=golden)
    assert report.gate("metadata").outcome == "FAIL" and report.exit_code == 1
    assert "RuntimeError: out of luck" in report.gate("metadata").failed[0].found


def test_a_gate_whose_ground_is_gone_gives_no_answer(
    demo_model: Path, golden: Path, tmp_path: Path
) -> None:
    from tests.checks.gates.faults import copied, no_biases, tensors

    folder = copied(demo_model, tmp_path / "model")
    tensors(no_biases)(folder)
    report = qa.run(folder, golden=golden, skip=("init-statistics",))
    for name in ("logits", "loss", "state-isolation", "format-parity", "golden-output"):
        assert report.gate(name).outcome == "NOT_RUN"
        assert report.gate(name).why == "tensor-contract failed"
    found = report.gate("tensor-contract")
    missing = found.details["missing"]
    assert len(missing) == 12 and "L0.attn_q.bias" in missing
    assert found.checks[0].found.startswith("38 of 50 (the head is the embedding); missing 12: ")


def test_completeness_is_counted_from_the_configuration(demo_model: Path) -> None:
    """4 layers x 12 tensors, the embedding and the last norm; the head is the embedding."""
    found = qa.run(demo_model, only=("tensor-contract",)).gate("tensor-contract")
    assert found.details == {"expected": 4 * 12 + 2, "found": 50, "missing": [], "accepted": []}
    head = next(each for each in found.checks if each.name == "head-resolved")
    assert "1536 logits from token_embd.weight (tied)" in head.found


def test_names_that_are_no_gate_are_refused(demo_model: Path) -> None:
    for option in ("--only", "--skip"):
        done = aprfmt("qa", demo_model, option, "tensors")
        assert done.code == 2 and "known: tensor-contract" in done.err
    with pytest.raises(UsageError):
        qa.run(demo_model, only=("tensors",))


def test_a_device_that_is_not_there_is_exit_2(demo_model: Path, golden: Path) -> None:
    done = aprfmt("qa", demo_model, "--device", "cuda:99", "--only", "metadata")
    assert done.code == 2 and done.out == ""
    done = aprfmt(
        "qa",
        demo_model,
        "--only",
        "metadata",
        "--only",
        "device-parity",
        "--also",
        "cuda:99",
        "--json",
    )
    assert done.code == 2 and "device 'cuda:99'" in done.err, "before any gate has run"
    assert done.json["exit"] == 2 and "gates" not in done.json


def test_the_command_prints_a_line_a_gate_and_its_json_is_the_report(demo_model: Path) -> None:
    args = ("qa", demo_model, *(word for name in QUICK for word in ("--only", name)))
    done = aprfmt(*args, "-v")
    assert done.code == 0 and done.out.endswith("PASS: 3 PASS, 0 FAIL, 8 NOT-RUN\n")
    lines = [line.split()[:2] for line in done.out.splitlines()[1:-1]]
    assert lines == [
        ["PASS" if spec.name in QUICK else "NOT-RUN", spec.name] for spec in qa.gates()
    ]
    short = aprfmt(*args).out.splitlines()  # seen red: the names alone of what did not run
    left = [f"  NOT-RUN {spec.name}: " for spec in qa.gates() if spec.name not in QUICK]
    assert len(short) == len(left) + 2 and short[-1].startswith("  PASS 3 gates")
    assert all(
        line.startswith(name) and len(line) > len(name)
        for name, line in zip(left, short[1:-1], strict=True)
    )
    body = aprfmt(*args, "--json").json
    assert body["counts"] == {"PASS": 3, "FAIL": 0, "NOT_RUN": 8} and body["gates_run"] == 3
    assert [row["name"] for row in body["gates"]] == [spec.name for spec in qa.gates()]
    assert all(row["seconds"] >= 0 for row in body["gates"])
    assert aprfmt(*args, "--min-run", 3).code == 0
    assert aprfmt(*args, "--min-run", 4).code == 1


def test_a_baseline_is_saved_and_holds(demo_model: Path, golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    args = ("qa", demo_model, "--golden", golden, "--skip", "format-parity")
    assert aprfmt(*args, "--save-baseline", path).code == 0
    assert aprfmt(*args, "--save-baseline", path).code == 2  # it is there
    assert aprfmt(*args, "--baseline", path).code == 0
    data = json.loads(path.read_text())
    row = data["gates"]["loss"]["measures"]["loss held_out"]
    assert row["unit"] == "nats per token" and row["reason"] and row["tolerance"] == 0.01
    row["value"] -= 0.02  # it was better once
    path.write_text(json.dumps(data))
    body = aprfmt(*args, "--baseline", path, "--json").json
    failing = {each["name"] for each in body["gates"] if each["outcome"] == "FAIL"}
    assert failing == {"baseline"} and body["exit"] == 1
    assert aprfmt("qa", demo_model, "--baseline", tmp_path / "none.json").code == 2


def test_a_baseline_in_bits_is_recognised(demo_model: Path, golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    args = ("qa", demo_model, "--golden", golden, "--only", "loss")
    assert aprfmt(*args, "--save-baseline", path).code == 0
    saved = json.loads(path.read_text())
    nats = saved["gates"]["loss"]["measures"]["loss held_out"]["value"]
    # (value, unit): what the todo of the failing check says
    for value, unit, said in (
        (nats / math.log(2), "nats per token", "1.4427 times the measured nats: a loss in bits"),
        (nats / math.log(2), "bits per token", "state it in nats per token"),
        (nats, "bits per token", "state it in nats per token"),
        (nats + 0.5, "nats per token", "the model got another one"),
    ):
        row = saved["gates"]["loss"]["measures"]["loss held_out"]
        row |= {"value": value, "unit": unit}
        path.write_text(json.dumps(saved))
        done = aprfmt(*args, "--baseline", path, "--json")
        (gate,) = (each for each in done.json["gates"] if each["name"] == "baseline")
        (failed,) = (each for each in gate["checks"] if each["outcome"] == "FAIL")
        assert done.code == 1 and failed["name"] == "loss held_out" and said in failed["todo"]


def test_a_baseline_of_another_text_says_so(demo_model: Path, golden: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "base.json", tmp_path / "other.json"
    args = ("qa", demo_model, "--only", "logits", "--only", "baseline", "--json")
    aprfmt(*args, "--golden", golden, "--save-baseline", path)
    data = json.loads(path.read_text())
    data["gates"] = {"logits": data["gates"]["logits"]}
    path.write_text(json.dumps(data))
    assert aprfmt(*args, "--golden", golden, "--baseline", path).code == 0
    other.write_text(json.dumps({"losses": [{"name": "o", "ids": [5, 6, 7, 8], "nats": 9.0}]}))
    done = aprfmt(*args, "--golden", other, "--baseline", path)
    (gate,) = (each for each in done.json["gates"] if each["name"] == "baseline")
    failed = [row["name"] for row in gate["checks"] if row["outcome"] == "FAIL"]
    assert done.code == 1 and failed[0] == "logits probe"
    assert "give the --golden file of the baseline" in str(gate["checks"])


def test_a_baseline_misses_what_is_gone_and_tolerates_what_it_says() -> None:
    before = report_to_baseline(
        QaReport("m", (gate("a", "PASS", x=1.0, y=math.nan),), choose_device())
    )["gates"]

    def failing(*now: Answer) -> set[str]:
        checks: list[Check] = list(compare_baseline(before, now))
        return {each.name for each in checks if each.outcome == "FAIL"}

    assert failing(gate("a", "PASS", x=1.09, y=math.nan)) == set()
    assert failing(gate("a", "PASS", x=1.11, y=math.nan)) == {"x"}
    assert failing(gate("a", "PASS", x=0.89, y=0.0)) == {"x", "y"}
    assert failing(gate("a", "PASS", x=math.nan)) == {"x"}
    assert failing(gate("a", "PASS")) == {"x"}
    assert failing(gate("a", "NOT_RUN")) == {"a-outcome"}
    assert failing() == {"a-outcome"}


def test_what_was_given_is_asked_beside_only(demo_model: Path, tmp_path: Path) -> None:
    """A baseline that no gate reads must not exit as a pass."""
    path = tmp_path / "base.json"
    assert aprfmt("qa", demo_model, "--only", "metadata", "--save-baseline", path).code == 0
    args = ("qa", demo_model, "--only", "metadata", "--baseline", path)
    done = aprfmt(*args, "--json")
    gates = {row["name"]: row for row in done.json["gates"]}
    assert done.code == 0 and gates["baseline"]["outcome"] == "PASS"
    outcomes = {row["name"]: row["outcome"] for row in gates["baseline"]["checks"]}
    assert outcomes["metadata-outcome"] == "PASS" and outcomes["loss-outcome"] == "NOT_RUN"
    data = json.loads(path.read_text())
    data["gates"] = {"loss": data["gates"]["loss"] | {"outcome": "PASS"}}
    path.write_text(json.dumps(data))
    done = aprfmt(*args)  # nothing of this baseline was looked at
    assert done.code == 2 and "gate baseline (asked for and without an answer)" in done.out
    done = aprfmt("qa", demo_model, "--skip", "baseline", "--baseline", path)
    assert done.code == 2 and "leaves out the gate that --baseline is for" in done.err


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"format": 2}',
        '{"format": 1, "gates": {"a": 3}}',
        '{"format": 1, "gates": {"a": {"measures": {"x": {}}}}}',
    ],
)
def test_a_file_that_is_no_baseline_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(FormatError):
        read_baseline(path)


def test_saving_needs_force_to_overwrite(tmp_path: Path) -> None:
    report = QaReport("m", (), choose_device())
    qa.save_baseline(report, tmp_path / "b.json")
    with pytest.raises(OutputError):
        qa.save_baseline(report, tmp_path / "b.json")
    qa.save_baseline(report, tmp_path / "b.json", force=True)


def test_another_copy_is_held_against_the_original(
    demo_model: Path, golden: Path, tmp_path: Path
) -> None:
    """A quantized copy is within its bounds; the same copy of other weights is not."""
    from tests.checks.gates.faults import copied, random_weights, tensors

    small = tmp_path / "small.gguf"
    args = ("convert", demo_model, small, "--encoding", "Q8_0", "--no-verify")
    assert aprfmt(*args).code == 0
    options: dict[str, Any] = {"only": ("format-parity",), "golden": golden}
    report = qa.run(small, against=demo_model, **options)
    names = {each.name: each.outcome for each in report.gate("format-parity").checks}
    assert report.exit_code == 0 and names["against-loss"] == names["against-tensors"] == "PASS"
    other = copied(demo_model, tmp_path / "other")
    tensors(random_weights)(other)
    report = qa.run(small, against=other, **options)
    failed = {each.name for each in report.gate("format-parity").failed}
    assert report.exit_code == 1 and failed == {"against-tensors", "against-loss"}
    equal = qa.run(demo_model, against=demo_model, **options).gate("format-parity")
    assert {"against-points", "against-logits"} <= {each.name for each in equal.checks}


def test_what_cannot_be_opened_is_exit_2(demo_model: Path, tmp_path: Path) -> None:
    from tests.checks.gates.faults import config, copied

    cut = tmp_path / "cut.gguf"
    assert aprfmt("convert", demo_model, cut, "--no-verify").code == 0
    cut.write_bytes(cut.read_bytes()[:-4096])
    unknown = copied(demo_model, tmp_path / "unknown")
    config(model_type="nothing", architectures=["NothingForCausalLM"])(unknown)
    for path in (cut, unknown, tmp_path / "absent.gguf"):
        done = aprfmt("qa", path, "--json")
        assert done.code == 2 and done.json["error"]["message"]


def test_every_gate_is_announced_before_it_is_asked(demo_model: Path) -> None:
    said: list[tuple[str, int, int]] = []
    rows = [row.name for row in qa.gates()]
    report = qa.run(demo_model, only=[rows[0]], progress=lambda *of: said.append(of))
    assert said == [(name, at, len(rows)) for at, name in enumerate(rows)]
    assert [each.name for each in report.answers] == rows


@pytest.mark.parametrize(
    ("passed", "failed", "unrun", "word", "code"),
    [
        (0, 0, 3, "NOT-RUN", 2),
        (0, 0, 0, "NOT-RUN", 2),
        (1, 0, 3, "PASS", 0),
        (0, 1, 3, "FAIL", 1),
        (1, 1, 0, "FAIL", 1),
    ],
)
def test_no_word_but_not_run_is_said_where_nothing_ran(
    passed: int, failed: int, unrun: int, word: str, code: int
) -> None:
    """Seen red: rows that did not run counted as compared, and PASS said over them."""
    outcome: Outcome = "FAIL" if failed else "PASS" if passed else "NOT_RUN"
    counts = {"PASS": passed, "FAIL": failed, "NOT_RUN": unrun}
    found = pronounce_checks(outcome, counts, "the checks")
    assert (found.word, found.exit) == (word, code) and found.says.startswith(word)
