"""A line that says how many more there are, or repeats what was found, counts what was left out."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.base.protocols import Note
from aprfmt.checks import check_runner
from aprfmt.checks.records import LISTED, CheckFinding, Result
from aprfmt.cli import diff, render
from aprfmt.cli.ci_reports import cases_of_gates
from aprfmt.cli.diff import FINDINGS
from aprfmt.cli.hex import hex_lines
from aprfmt.cli.inspect import summary
from aprfmt.cli.parity import output as parity_output
from aprfmt.cli.trace import dumped_arrays, reference
from aprfmt.model import Model
from tests.cli.run import aprfmt


@pytest.mark.parametrize("differing", [0, 3, FINDINGS, FINDINGS + 2])
@pytest.mark.parametrize("unlike", [0, 1, FINDINGS, FINDINGS + 3])
def test_what_sampling_shows_and_leaves_out_is_all_it_found(
    differing: int, unlike: int, capsys: pytest.CaptureFixture[str]
) -> None:
    report: Any = SimpleNamespace(
        bytes=1, of_bytes=2, ranges=1, of_ranges=2, seed=0, settled=0, unsampled=[], share=None,
        all_settled=False,
        different=bool(differing or unlike), pronounced=SimpleNamespace(says="said"),
        differing=[SimpleNamespace(tensor=f"d{i}", byte=i) for i in range(differing)],
        unlike=[SimpleNamespace(tensor=f"u{i}", why="shape") for i in range(unlike)],
    )  # fmt: skip
    diff.show_samples(report, "aprfmt diff a b")
    lines = capsys.readouterr().out.splitlines()
    shown = sum(line.startswith(("  d", "  u")) for line in lines)
    more = [int(line.split()[1]) for line in lines if line.startswith("  ... ")]
    assert len(more) <= 1 and shown + sum(more) == differing + unlike
    assert shown == min(differing, FINDINGS) + min(unlike, FINDINGS)


@pytest.mark.parametrize("count", [1, LISTED, LISTED + 1, LISTED + 4])
def test_a_gate_repeats_as_many_findings_as_a_sentence_holds(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [CheckFinding(f"t{i}", f"found {i}", f"expected {i}") for i in range(count)]
    monkeypatch.setattr(
        check_runner, "check_result", lambda row, context: (Result(findings=findings), "")
    )
    context: Any = SimpleNamespace(model=SimpleNamespace(format="gguf"))
    (found,) = check_runner.repeat_result(context, "shapes", "gate")
    assert found.found.split("; ") == [f"t{i}: found {i}" for i in range(min(count, LISTED))]
    assert found.expected.split("; ") == [f"expected {i}" for i in range(min(count, LISTED))]


def test_a_mapping_shows_how_certain_each_row_is(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"name": "first", "shape": [2], "key": "L0.q", "certainty": "values", "distance": 0.25},
        {"name": "second", "shape": [3], "key": None, "certainty": None, "why": "no point"},
    ]
    dumped_arrays.show_mapping({"names": rows, "file": ""})
    first, second = (line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert first == ["first", "[2]", "L0.q", "values", "0.25"]
    assert second == ["second", "[3]", "-", "-", "no", "point"]


@pytest.mark.parametrize(("every", "points", "said"), [(False, 2, True), (False, 0, False),
                                                      (True, 2, False)])  # fmt: skip
def test_every_point_is_offered_where_some_are_not_shown(
    every: bool, points: int, said: bool, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(reference, "_point_row", lambda point: (point.key, "", "", "", ""))
    monkeypatch.setattr(reference, "reference_verdict", lambda difference: ("differs", "bad"))
    monkeypatch.setattr("aprfmt.cli.run_options.show_nonfinite", lambda *_: None)
    rows = [SimpleNamespace(key=f"L{i}.q", beyond=False, outside=False) for i in range(points)]
    difference: Any = SimpleNamespace(
        points=rows,
        only_in_a=(),
        only_in_b=(),
        not_checked=(),
        first_token=None,
        rounding_ratios={},
        repeats=(),
    )
    reference.show_difference(difference, "R", every)
    assert ("every point: -v" in capsys.readouterr().out) == said
    for row in rows:
        row.beyond = True
    reference.show_difference(difference, "R", every)
    assert "every point: -v" not in capsys.readouterr().out  # all of them are shown


def test_tensors_says_warnings_and_remarks_alone(
    demo_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = [Note("note", "m", "quiet one", "assumed"), Note("note", "m", "a remark", "remark"),
             Note("warning", "m", "a warning", "index")]  # fmt: skip
    monkeypatch.setattr(Model, "notes", property(lambda self: notes))
    err = aprfmt("tensors", demo_model, "--limit", "1").err
    assert "a remark" in err and "a warning" in err and "quiet one" not in err


@pytest.mark.parametrize("warnings", [0, 1, 2])
def test_the_first_line_counts_warnings_that_it_does_not_say(
    warnings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = {"level": "warning", "key": "x", "text": ""}
    body: Any = {
        "architecture": "llama", "metadata_names": {}, "encodings": {}, "unread": [],
        "unreadable": [],
        "tokenizer": {}, "relations": [{"says": "another name"}],
        "notes": [*[note] * warnings, {**note, "level": "note"}, {**note, "key": "relation"}],
    }  # fmt: skip
    opened: Any = SimpleNamespace(
        damage=(), unread=None, lone_codes={}, folder=None, path=Path("m.gguf")
    )
    said = [] if not warnings else [f"{warnings} warning{'s' * (warnings > 1)}"]
    assert summary._list_oddities(opened, body) == ["another name", *said]


def test_every_point_is_explained_once(demo_model: Path) -> None:
    rows = [
        row for row in aprfmt("trace", demo_model, "--json").json["points"] if not row["absent"]
    ]
    points = {row["point"] for row in rows}
    lines = aprfmt("trace", demo_model, "--list-points").out.splitlines()
    first = [word for line in lines for word in line.split()[:1] if word in points]
    assert sorted(first) == sorted(points) and len(rows) > len(points)


def test_the_reference_is_named_and_runs_are_numbered_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(render, "say", lambda text, style="": said.append(text))
    monkeypatch.setattr(render, "say_verdict", lambda text, style: None)
    runs = [SimpleNamespace(via=None, unknown=None, points=7, ran=name, requested=name)
            for name in ("numpy", "torch", "cupy")]  # fmt: skip
    found: Any = SimpleNamespace(
        through=None, architecture="llama", weights_class="plain", model="m", ids=(1,), runs=runs,
        pairs=(), noise=None, arbiter=(), conclusion=SimpleNamespace(says="nothing compared"),
    )  # fmt: skip
    parity_output.show(found, show_all=False)
    names = [text.strip().partition(":")[0] for text in said[1:]]
    assert names == ["reference", "run 1", "run 2"]


def test_a_dump_shows_what_prints_and_a_dot_for_all_else() -> None:
    lines = list(hex_lines(bytes(range(256)) + b"end", 16))
    assert len(lines) == 17 and lines[0].startswith("00000010  00 01 02")
    shown = "".join(line[10 + 47 + 2 :] for line in lines)
    assert shown == "".join(chr(b) if chr(b).isascii() and chr(b).isprintable() else "."
                            for b in range(256)) + "end"  # fmt: skip


def test_every_gate_has_its_case_whatever_stands_before_it() -> None:
    def gate(name: str, outcome: str, *checks: str) -> dict[str, Any]:
        texts = dict.fromkeys(("todo", "expected", "found", "where"), "")
        rows = [{"name": f"c{at}", "outcome": each, **texts} for at, each in enumerate(checks)]
        facts = {"why": "", "proves": "p", "seconds": 1.0}
        return {"name": name, "outcome": outcome, "checks": rows, **facts}

    gates = [
        gate("a", "PASS", "PASS"),
        gate("b", "NOT_RUN"),
        gate("c", "FAIL", "PASS", "FAIL", "FAIL"),
        gate("d", "PASS"),
        gate("e", "FAIL", "NOT_RUN"),
    ]
    cases = cases_of_gates({"model": "m", "gates": gates})
    assert [case.check for case in cases] == ["a", "b", "c: c1", "c: c2", "d", "e: c0"]


def test_what_nothing_proves_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = SimpleNamespace(
        unproven=((0, 1000), (5000, 7000)), size=9000, taken=6000, ranges=(), proof="none", notes=()
    )
    monkeypatch.setattr("aprfmt.recovery.repair", lambda *of, **more: found)
    for name in ("broken", "copy"):
        (tmp_path / name).touch()
    done = aprfmt("repair", tmp_path / "broken", "--from", tmp_path / "copy", "-o", tmp_path / "o")
    assert f": {render.size_text(3000)} were taken" in done.err
