"""Lines of answers, each by itself: distances of runs, large layers, points around the first."""

import math
import statistics
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.cli import diagnose, render
from aprfmt.cli.ci_reports import ReportCase, junit_xml, sarif_log
from aprfmt.cli.diagnose import _solved_text
from aprfmt.cli.histograms import BINS, tensor_histogram
from aprfmt.cli.parity.output import distance_text, distance_texts, run_label
from aprfmt.cli.trace.output import SPIKE, find_spikes

# --- how far a run is ---------------------------------------------------------------------------


def distance(rel_l2: Mapping[str, float], ce: float | None = None, **more: Any) -> Any:
    return SimpleNamespace(what="the arbiter", rel_l2=rel_l2, ce=ce, **more)


DISTANCES = [
    ({"L0.q": 0.25, "logits": 0.125}, None, "largest relL2 0.25 at L0.q, logits 0.125"),
    (
        {"L0.q": 0.25, "logits": 0.5},
        -0.5,
        "largest relL2 0.5 at logits, logits 0.5, loss -0.5 nats",
    ),
    ({"L0.q": math.nan, "L1.q": 0.0001234}, 0.0, "largest relL2 0.000123 at L1.q, loss +0 nats"),
    ({"logits": math.nan}, None, "no point could be compared"),
    ({}, 2.0, "no point could be compared, loss +2 nats"),
]


@pytest.mark.parametrize(("rel_l2", "ce", "says"), DISTANCES)
def test_the_largest_distance_of_a_run_is_named(rel_l2: Any, ce: float | None, says: str) -> None:
    assert distance_text(distance(rel_l2, ce), "the run") == f"the run from the arbiter: {says}"


@pytest.mark.parametrize("noise", [True, False])
def test_each_run_has_its_distance(noise: bool) -> None:
    runs = [SimpleNamespace(requested=each, ran=ran) for each, ran in (("a", "a"), ("b", "b:cpu"))]
    assert [run_label(run) for run in runs] == ["a", "b (b:cpu)"]  # type: ignore[arg-type]
    found: Any = SimpleNamespace(
        noise=distance({"logits": 1.0}) if noise else None,
        runs=runs,
        arbiter=[distance({"logits": 2.0}, of=1), distance({"logits": 3.0}, of=0)],
    )
    said = [text.partition(" from ")[0] for text in distance_texts(found)]
    assert said == ["the reference"] * noise + ["b (b:cpu)", "a"]


# --- slots with large values --------------------------------------------------------------------

SIZES = st.sampled_from([0.0, 1.0, 9.0, 10.0, 11.0, 100.0])
STDS = st.lists(st.one_of(st.none(), SIZES), max_size=7)


@settings(max_examples=150, deadline=None)
@given(STDS, STDS)
def test_a_slot_stands_out_beside_those_of_its_kind_alone(
    one: list[float | None], other: list[float | None]
) -> None:
    rows: Any = [
        {"layer": layer, "points": list(points), "stats": {"std": std}}
        for points, stds in ((("q", "k"), one), (("out",), other))
        for layer, std in enumerate(stds)
    ]
    wanted = {}
    for points, stds in ((("q", "k"), one), (("out",), other)):
        known = [std for std in stds if std is not None]
        middle = statistics.median(known) if known else 0.0
        for layer, std in enumerate(stds):
            if std is not None and middle and std / middle > SPIKE:
                wanted[layer, points] = (std, std / middle)
    assert find_spikes(rows) == wanted


# --- diagnose -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.123456, "0.1235"), (1.0, "1"), (7, "7"), ("x", "x"), (True, "True"),
     ({"a": None, "b": {"c": 2.5}}, "a -, b c 2.5")],
)  # fmt: skip
def test_a_solved_value_is_shown_with_four_digits(value: object, text: str) -> None:
    assert _solved_text(value) == text


@pytest.mark.parametrize("first", [*range(8), None])
def test_three_points_on_either_side_of_the_first_are_shown(
    first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [
        SimpleNamespace(key=f"p{i}", direct=0.1 * i, shadow=None, gain=2.0, tolerance=1e-5,
                        beyond=i == first)
        for i in range(8)
    ]  # fmt: skip
    shown: list[Any] = []
    monkeypatch.setattr(render, "line", lambda *of, **named: None)
    monkeypatch.setattr(render, "table", lambda rows, *of: shown.extend(rows))
    result: Any = SimpleNamespace(points=points, first="" if first is None else f"p{first}")
    diagnose._print_points(result)
    if first is None:
        assert shown == []
        return
    wanted = range(max(0, first - 3), min(8, first + 4))
    assert [row[0] for row in shown] == [f"{'> ' if i == first else '  '}p{i}" for i in wanted]
    assert [row[1] for row in shown] == [f"{0.1 * i:.3g}" for i in wanted]
    assert {row[2:5] for row in shown} == {("-", "2", "1e-05")}
    assert [row[5] for row in shown] == ["beyond" if i == first else "" for i in wanted]


# --- reports ------------------------------------------------------------------------------------

LEVELS: dict[Any, str] = {"fail": "failure", "error": "error", "not run": "skipped"}


@pytest.mark.parametrize("level", ["pass", "warning", *LEVELS])
def test_a_junit_report_has_each_answer_once(level: Any) -> None:
    cases = [
        ReportCase("check", "m.gguf", level, "why & <how>", "t.weight", 0.25),
        ReportCase("check", "m.gguf", "pass", seconds=1.0),
    ]
    text = junit_xml("validate", cases)
    assert text.startswith("<testsuites>"), "the declaration is the writer's"
    (suite,) = ElementTree.fromstring(text)
    wanted = {"tests": "2", "failures": "0", "errors": "0", "skipped": "0"}
    counted = {"fail": "failures", "error": "errors", "not run": "skipped"}.get(level)
    if counted:
        wanted[counted] = "1"
    assert suite.attrib == {"name": "aprfmt validate", "time": "1.250", **wanted}
    one, other = suite
    assert one.attrib == {"classname": "m.gguf", "name": "check: t.weight", "time": "0.250"}
    assert other.attrib["name"] == "check" and len(other) == 0
    if level in LEVELS:
        assert [(row.tag, row.attrib["message"]) for row in one] == [(LEVELS[level], "why & <how>")]
    else:
        said = [(row.tag, row.text) for row in one]
        assert said == ([("system-out", "warning: why & <how>")] if level == "warning" else [])


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_sarif_log_has_results_and_says_what_did_not_run(code: int) -> None:
    levels: list[Any] = ["pass", "warning", "fail", "error", "not run"]
    cases = [ReportCase(f"c-{level}", "m.gguf", level, "why") for level in levels]
    (run,) = sarif_log("validate", cases, code)["runs"]
    (invocation,) = run["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (code != 2, code)
    (note,) = invocation["toolExecutionNotifications"]
    assert (note["level"], note["message"]["text"]) == ("note", "NOT-RUN c-not run: why")
    assert [row["ruleId"] for row in run["results"]] == ["c-warning", "c-fail", "c-error"]
    rules = run["tool"]["driver"]["rules"]
    assert {row["id"] for row in rules} >= {row["ruleId"] for row in run["results"]}
    assert all(row["name"] == f"aprfmt validate: {row['id']}" for row in rules)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from([0.0, 0.25, 0.5, 1.0, 3.0, math.inf, math.nan]), min_size=1, max_size=9
    )
)
def test_a_histogram_has_each_finite_value_once(values: list[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    stats: Any = SimpleNamespace(min=min(finite, default=None), max=max(finite, default=None))
    data = np.array(values, np.float32)[:, None]
    tensor: Any = SimpleNamespace(
        shape=data.shape, rows=lambda start, stop: data[start:stop], drop=lambda: None
    )
    found = tensor_histogram(tensor, stats)
    if not finite:
        assert found is None
        return
    assert found is not None and found["of"] == len(values)
    if stats.min == stats.max:
        assert found["counts"] == [len(finite)]
    else:
        wanted, _ = np.histogram(finite, BINS, (stats.min, stats.max))
        assert found["counts"] == wanted.tolist()
    assert (found["low"], found["high"]) == (stats.min, stats.max)
