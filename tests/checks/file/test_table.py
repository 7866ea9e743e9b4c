"""The one table of checks: rows of other packages, and who asks which row.

Seen red: a row of another package in place of one of ours, a gate asked by `validate`, findings of
a gate that fail nothing, a session asked for of a model whose tensors are not whole.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aprfmt.checks
from aprfmt.base.registry import Registry
from aprfmt.checks import CheckFinding, CheckRow, NotRun, Result, check_runner, table, validate
from aprfmt.checks.context import CheckContext
from aprfmt.checks.file import stated_facts, template_tokens, vocabulary
from aprfmt.checks.gates import parity as parity_gate
from aprfmt.checks.gates import running as qa
from aprfmt.checks.records import LISTED, list_names
from aprfmt.errors import UsageError
from aprfmt.inference import loss
from tests.checks.file import bases
from tests.checks.gates.faults import tensors
from tests.models import save_tiny

HERE = "tests.checks.file.test_table"
asked: list[str] = []


def odd(context: CheckContext) -> Result:
    assert np.isinf(np.full(1, 3e38, np.float32) * np.float32(9))  # seen red: a warning of numpy's
    return Result("looked", [CheckFinding(context.where, "odd", "even", level="warning")])


def wrong(subject: Any) -> Result:
    return Result("looked", [CheckFinding(subject.where, "wrong", "right", "mend it")])


def stopped(subject: Any) -> Result:
    raise NotRun("nothing to look at")


def needs_a_session(subject: Any) -> Result:
    asked.append(subject.where)
    return Result("ran")


ODD = CheckRow("odd", "it is even", f"{HERE}:odd")
OURS = CheckRow("layout", "nothing", f"{HERE}:odd")
ELSEWHERE = CheckRow("elsewhere", "nothing", f"{HERE}:odd", formats=("gguf",))
WRONG = CheckRow("wrong", "it is right", f"{HERE}:wrong", needs="model")
STOPPED = CheckRow("stopped", "nothing", f"{HERE}:stopped", needs="model")
RUNS = CheckRow("runs", "it runs", f"{HERE}:needs_a_session", needs="session")


def breaks(context: CheckContext) -> Result:
    raise KeyError("oops")


def says_nothing(context: CheckContext) -> None:
    return None


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        name: f"{HERE}:{name}" for name in ("ODD", "OURS", "ELSEWHERE", "WRONG", "STOPPED", "RUNS")
    }
    monkeypatch.setattr(table, "_OTHERS", Registry[CheckRow]("checks", rows))
    asked.clear()


def test_every_name_stands_once_and_every_function_is_there() -> None:
    names = [row.name for row in table.CHECKS]
    assert len(set(names)) == len(names)
    assert all(callable(row.load()) for row in table.CHECKS)
    files = table.file_checks(source=True, second_reader=True)
    assert {*files, *table.gates()} == {*table.CHECKS}


@pytest.mark.usefixtures("others")
def test_validate_asks_rows_of_other_packages_that_need_a_file(tmp_path: Path) -> None:
    path = bases.small_apr(tmp_path)
    report = validate(path)
    checks = {check.name: check for check in report.checks}
    assert len(checks) == len(report.checks)
    assert (checks["odd"].outcome, checks["odd"].found) == ("PASS", "looked; 1 warning")
    assert checks["elsewhere"].found == "a check of gguf files"
    assert checks["layout"].found == "3 tensors in 1 files"  # ours, and not replaced
    assert not {"wrong", "runs", "tensor-contract"} & checks.keys()
    strict = validate(path, strict=True)
    assert [check.name for check in strict.checks if check.outcome == "FAIL"] == ["odd"]


@pytest.mark.usefixtures("others")
def test_qa_asks_the_others_before_the_baseline(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    names = [row.name for row in table.gates()]
    assert names[-4:] == ["wrong", "stopped", "runs", "baseline"]
    report = qa.run(tmp_path, only=("wrong", "stopped", "runs"), random_weights=True)
    assert [gate.name for gate in report.gates] == names
    (one,) = report.gate("wrong").failed
    assert (one.found, one.expected, one.todo) == ("wrong", "right", "mend it")
    assert report.gate("stopped").why == "nothing to look at"
    assert not report.gate("stopped").checks
    assert report.gate("runs").outcome == "PASS" and asked and report.exit_code == 1


@pytest.mark.usefixtures("others")
def test_a_session_is_not_asked_for_where_the_tensors_are_not_whole(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    tensors(lambda found: {k: v for k, v in found.items() if "up_proj" not in k})(tmp_path)
    report = qa.run(tmp_path, random_weights=True, skip=("init-statistics",))
    assert report.gate("tensor-contract").outcome == "FAIL"
    assert report.gate("runs").why == "tensor-contract failed" and not asked
    assert report.gate("wrong").outcome == "FAIL"  # which needs no session


@pytest.mark.parametrize(("name", "found"), [
    ("breaks", "KeyError: 'oops'"),
    ("says_nothing", f"TypeError: {HERE}:says_nothing returned NoneType; expected a Result"),
    ("not_there", f"AttributeError: module '{HERE}' has no attribute 'not_there'"),
])  # fmt: skip
def test_a_row_of_another_package_that_breaks_fails_alone(
    name: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = CheckRow("broken", "nothing", f"{HERE}:{name}")
    monkeypatch.setattr(table, "_OTHERS", Registry("checks", {}, held={"broken": row}))
    report = validate(bases.small_apr(tmp_path))
    (check,) = [check for check in report.checks if check.name == "broken-finishes"]
    assert (check.outcome, check.found) == ("FAIL", found)
    assert HERE in check.todo and report.exit_code == 1
    assert len(report.answers) == len(table.file_checks())


def test_a_row_needs_what_there_is() -> None:
    said = "check 'x': needs 'files'; expected one of file, source, second_reader, model"
    with pytest.raises(UsageError, match=said):
        CheckRow("x", "nothing", f"{HERE}:odd", needs="files")  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, LISTED, LISTED + 1, LISTED + 4])
@pytest.mark.parametrize("note", ["", "12 tensors"])
def test_findings_of_a_repeated_check_are_one_line_of_the_first(
    note: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that say the same are one; so many different ones are named."""
    findings = [CheckFinding(f"t{i}", f"is {i}", f"not {i}") for i in range(count)]
    findings += [CheckFinding("u", "is 0", "not 0")] * bool(count)
    row = SimpleNamespace(name="x", formats=(), proves="all is well")
    monkeypatch.setattr(check_runner, "CHECKS", (row,))
    monkeypatch.setattr(
        check_runner, "check_result", lambda row, context: (Result(note, findings), "")
    )
    context: Any = SimpleNamespace(model=SimpleNamespace(format="gguf"))
    (found,) = check_runner.repeat_result(context, "x", "named")
    said = [f"t{i}: is {i}" for i in range(count)]
    if said:
        said[0] = f"is 0 {list_names(['t0', 'u'])}"
    assert found.found == ("; ".join([*filter(None, [note]), *said[:LISTED]]) or "none")
    wanted = "; ".join(f"not {i}" for i in range(min(count, LISTED)))
    assert (found.name, found.expected) == ("named", wanted or "all is well")


@pytest.mark.parametrize("plain", [99, 100, 101])
@pytest.mark.parametrize("format", ["gguf", "safetensors"])
@pytest.mark.parametrize("word", ["<image_soft_token>", "hello"])
def test_added_placeholders_behind_the_embedding_are_a_warning(
    word: str, format: str, plain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the words themselves are more than the rows, nor in GGUF, which has all."""
    monkeypatch.setattr(vocabulary, "_embedding_rows", lambda ctx: (100, "embed"))
    words = SimpleNamespace(tokens=["a"] * 100 + [word], dense=True, plain=plain, where="w")
    context: Any = SimpleNamespace(words=words, model=SimpleNamespace(format=format))
    (found,) = vocabulary.check_size(context).findings
    mild = word != "hello" and format != "gguf" and plain <= 100
    assert found.level == ("warning" if mild else "fail")
    assert f"{word!r} (100)" in found.found


@pytest.mark.parametrize("count", [None, 0, 12, 13])
@pytest.mark.parametrize("shape", [None, [3, 4], [4, 3]])
def test_counts_that_a_file_states_are_held_to_its_tensors(
    shape: list[int] | None, count: int | None
) -> None:
    """Zero is what importers that stream leave: no statement."""
    stated: dict[str, Any] = {} if count is None else {"param_count": count}
    if shape is not None:
        stated["tensor_shapes"] = {"w": shape}
    tensor = SimpleNamespace(shape=(3, 4), info=SimpleNamespace(shape=(3, 4)))
    model = SimpleNamespace(
        metadata=stated, items=lambda: [("w", tensor)],
        source=SimpleNamespace(tensors={"w": tensor}),
    )  # fmt: skip
    context: Any = SimpleNamespace(model=model, where="m.apr")
    seen = bool(count) + (shape is not None)
    if not seen:
        with pytest.raises(NotRun, match="the file states no counts"):
            stated_facts.check_counts(context)
        return
    found = stated_facts.check_counts(context)
    assert found.found == f"{seen} statements"
    wrong = [count] * (count == 13) + [shape] * (shape == [4, 3])
    assert [one.found for one in found.findings] == [str(each) for each in wrong]


@pytest.mark.parametrize("nats", [0.0, 0.5, 3.0, 5.0, math.nan, math.inf])
@pytest.mark.parametrize("weights", ["trained", "random"])
def test_bounds_of_a_loss_are_inside(weights: Any, nats: float) -> None:
    vocab = 100
    low, high = loss.RANDOM_BOUNDS
    bounds = {
        "trained": (loss.IMPLAUSIBLY_GOOD, math.log(vocab)),
        "random": (low, high * math.log(vocab)),
    }[weights]
    for value in (nats, *bounds):
        measured: Any = SimpleNamespace(
            nats=value, tokens=3, vocab=vocab, uniform_loss=math.log(vocab)
        )
        found = {row.name: row.outcome for row in loss.assess_loss(measured, weights, "here")}
        finite = math.isfinite(value)
        assert (found["loss-finite"] == "PASS") is finite
        for name, good in (
            ("loss-not-zero", value != 0), ("loss-below-uniform", value <= bounds[1]),
            ("loss-plausible", value >= bounds[0]),
        ):  # fmt: skip
            assert found[name] == ("NOT_RUN" if not finite else "PASS" if good else "FAIL")
    nothing: Any = SimpleNamespace(nats=1.0, tokens=0, vocab=vocab, uniform_loss=4.6)
    assert [row.name for row in loss.assess_loss(nothing, weights)] == ["loss-measured"]


@pytest.mark.parametrize("rows", [[1, 2, 3], [1, 1, 3], [1, 0, 0], [2, 2, 2]])
def test_rows_that_nothing_trained_are_those_of_zeros_and_equal_ones(rows: list[int]) -> None:
    values = np.array([[each, each * 2.0] for each in rows], np.float32)
    tensor: Any = SimpleNamespace(
        shape=values.shape, stored=[SimpleNamespace(info=SimpleNamespace(name="embd"))],
        chunks=lambda size: iter([(0, len(rows), values)]),
    )  # fmt: skip
    found = [
        one.found
        for one in template_tokens._find_untrained_rows(tensor, {i: f"<t{i}>" for i in range(3)})
    ]
    zero = [i for i, each in enumerate(rows) if not each]
    alike = [i for i, each in enumerate(rows) if each and rows.count(each) > 1]
    assert len(found) == bool(zero) + bool(alike)
    for text, begin, group in (
        (found[:1], "rows of zeros", zero),
        (found[-1:], "one row for", alike),
    ):
        if group:
            assert text[0].startswith(begin) and all(f"<t{i}>" in text[0] for i in group)


@pytest.mark.parametrize("decisive", [0, 1, 2])
def test_facts_that_decide_are_listed_or_equal(decisive: int) -> None:
    row = SimpleNamespace(name="eps", a=1, b=2, decisive=False)
    rows = [SimpleNamespace(name=f"n{i}", a=i, b=9, decisive=True) for i in range(decisive)]
    report: Any = SimpleNamespace(hyperparameters=[row, *rows[:1]], tokenizer=[row, *rows[1:]])
    found = parity_gate._check_facts(report, "against")
    assert found.name == "against-facts"
    assert (found.outcome, found.found) == (
        ("PASS", "equal") if not decisive
        else ("FAIL", list_names([f"n{i} {i} | 9" for i in range(decisive)]))
    )  # fmt: skip


@pytest.mark.parametrize("more", [-20, -1, 0, 1, 30])
@pytest.mark.parametrize("level", ["fail", "warning"])
def test_findings_of_one_kind_that_are_not_shown_are_counted(more: int, level: Any) -> None:
    most = vocabulary._MANY
    every = [
        CheckFinding(f"token {i}", "is wrong", "right", "mend it", level)
        for i in range(most + more)
    ]
    shown = vocabulary._limit_findings(iter(every))
    assert shown[:most] == every[:most]
    assert [one.found for one in shown[most:]] == (
        [f"{more} more of this kind"] if more > 0 else []
    )
    assert all(one.level == level for one in shown)


def test_the_name_that_findings_of_checks_had_in_0_1_works_with_a_warning() -> None:
    """Seen red: the old name left out; no warning; a name that never was, given all the same."""
    before: Any = aprfmt.checks
    with pytest.warns(DeprecationWarning, match="is called CheckFinding"):
        assert before.Finding is CheckFinding
    with pytest.raises(AttributeError, match="has no attribute 'Findings'"):
        _ = before.Findings
