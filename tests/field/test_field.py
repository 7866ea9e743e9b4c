"""The set's own invariants: counts, kinds, addresses, the split, and that its rows are true.

What `diagnose` answers is asked elsewhere: of the open rows by tests, of the frozen ones by
`python -m tests.field --frozen` alone, because a test that is to pass would be tuned to.
"""

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from aprfmt.diagnosis import Diagnosis, Finding
from aprfmt.measure.verdicts import VERDICTS
from tests.diagnosis.table import PAGE, between
from tests.field import __main__ as command
from tests.field.judge import Answer, counts, judged, matrix
from tests.field.reference import distance
from tests.field.row import KINDS, NO_THREAD, Row, cause, fault, is_frozen
from tests.field.rows import BY_NAME, FROZEN, OPEN, ROWS

HERE = Path(__file__).parent
ADDRESS = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+")


def test_there_are_enough_of_each() -> None:
    faults = [row for row in ROWS if not row.control and row.thread != NO_THREAD]
    engines = [row for row in faults if row.kind == "engine"]
    assert len(faults) >= 60 and sum(row.control for row in ROWS) >= 60
    assert len(engines) >= 30
    assert sum(2 <= len(row.causes) <= 4 for row in engines) >= 10
    assert sum(row.coarse for row in engines) >= 10
    assert sum(row.kind == "tokens" for row in faults) >= 9
    assert len({row.base.partition("-")[0] for row in faults}) >= 12


def test_names_are_unique_and_rows_whole() -> None:
    assert len(BY_NAME) == len(ROWS)
    for row in ROWS:
        assert row.says and row.kind in KINDS
        assert row.control or row.causes, row.name
        assert set(row.verdicts) <= {*VERDICTS, "derived"}, row.name


def test_every_fault_says_where_it_was_met() -> None:
    for row in ROWS:
        threads = [] if row.thread in ("", NO_THREAD) else row.thread.split()
        assert all(ADDRESS.fullmatch(thread) for thread in threads), row.name
        assert row.control or row.thread, row.name


def test_a_third_is_frozen_and_every_kind_has_its_share() -> None:
    assert all(not is_frozen(row.name) for row in OPEN)
    assert all(is_frozen(row.name) for row in FROZEN)
    assert 0.25 < len(FROZEN) / len(ROWS) < 0.42
    frozen = Counter(row.kind for row in FROZEN)
    for kind, count in Counter(row.kind for row in ROWS).items():
        assert frozen[kind] >= count / 6, kind
    engines = [row for row in FROZEN if row.kind == "engine"]
    assert any(row.coarse for row in engines) and any(len(row.causes) > 1 for row in engines)


def test_rows_stand_in_the_files_their_names_decide() -> None:
    seen = set()
    for path in HERE.glob("*.py"):
        part = path.name.partition("_")[0]
        if part not in ("open", "frozen"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("fault", "control"):
                name = ast.literal_eval(node.args[0])
                assert is_frozen(name) == (part == "frozen"), name
                seen.add(name)
    assert seen <= BY_NAME.keys() and len(seen) > 200


def test_no_test_asks_a_frozen_row() -> None:
    for path in HERE.parent.rglob("test_*.py"):
        if path != Path(__file__):
            assert "tests.field.frozen" not in path.read_text(), path


@pytest.mark.parametrize("name", BY_NAME)
def test_both_sides_can_be_made_and_differ_as_the_row_says(name: str) -> None:
    row = BY_NAME[name]
    first, second = (Path(str(side)) for side in row.make())
    assert first != second and first.exists() and second.exists()
    found = distance(first, second)
    if row.kind in ("engine", "file", "config") and found is not None:
        assert found > 5e-5, "transformers computes the same"
    if row.control and row.verdicts[0] == "same" and found is not None:
        assert found < 1e-5, "transformers computes something else"


def test_the_judge_reads_folders_and_dumps_and_nothing_else() -> None:
    kinds = {
        "layers-gelu": True,
        "norms-saved-plus-one": True,
        "heads-permuted": True,
        "no-permutation-at-all": False,
        "gptq": False,
    }
    for name, read in kinds.items():
        first, second = (Path(str(side)) for side in BY_NAME[name].make())
        assert (distance(first, second) is not None) == read, name


# --- the judge -----------------------------------------------------------------------------------


def answer(
    name: str,
    kind: str = "file",
    seeded: str = "scale",
    verdict: str = "bug",
    named: tuple[str, ...] = ("scale",),
    right: bool = True,
    placed: bool = True,
    confirmed: bool = True,
    wrong: tuple[str, ...] = (),
) -> Answer:
    return Answer(
        name,
        kind,
        True,
        seeded,
        verdict,
        named,
        (),
        "confirmed",
        1,
        right,
        placed,
        confirmed,
        wrong,
        "",
    )


def test_counts_tell_what_was_named_placed_confirmed_and_invented() -> None:
    answers = (
        answer("a"),
        answer("b", placed=False, confirmed=False),
        answer("c", named=("mask",), right=False, placed=False, confirmed=False, wrong=("mask",)),
        answer("d", kind="control", verdict="same", named=()),
        answer("e", kind="control", named=("scale",), right=False, wrong=("scale",)),
        answer("f", verdict="crash", right=False, placed=False, confirmed=False),
    )
    found = dict(counts(answers))
    assert found == {
        "faults": 4,
        "called a bug": 3,
        "named": 2,
        "named and placed": 1,
        "named, placed and confirmed": 1,
        "answers with a wrong cause confirmed": 2,
        "controls": 2,
        "controls answered rightly": 1,
        "controls called a bug": 1,
        "crashes": 1,
    }
    lines = matrix(answers).splitlines()
    assert lines[2] == "| scale | 4 | crash 1, mask 1, scale 2 | 1 |"
    assert lines[3] == "| nothing wrong | 2 | none 1, scale 1 | 1 |"


def diagnosed(causes: str, where: tuple[str, ...], confirmed: bool) -> Answer:
    row: Row = fault(
        "x",
        "file",
        "llama",
        "y",
        "none found",
        lambda: ("", ""),
        ("scale", "factor"),
        "L?.ffn_up.weight",
    )
    findings = [Finding(name, "", "tensor", "bug", where, confirmed) for name in causes.split()]
    return judged(row, Diagnosis("a", "b", tuple(findings), (), (), ()))


def test_a_cause_is_right_under_any_of_its_names_at_any_of_its_places() -> None:
    assert diagnosed("factor", ("L1.ffn_up.weight",), True).whole
    assert not diagnosed("factor", ("L1.ffn_up.weight",), False).confirmed
    assert diagnosed("factor", ("L1.ffn_up.weight",), False).placed
    elsewhere = diagnosed("scale", ("L1.attn_q.weight",), True)
    assert elsewhere.right and not elsewhere.placed and not elsewhere.wrong
    other = diagnosed("scale mask", ("L1.ffn_up.weight",), True)
    assert other.wrong == ("mask",) and other.confirmed and not other.whole
    assert diagnosed("mask", ("L1.ffn_up.weight",), False).wrong == ()
    assert not diagnosed("", (), True).right


@pytest.mark.parametrize(
    ("also", "whole"),
    [((), False), (("factor",), True), (("mask",), False), (("factor", "mask"), False)],
)
def test_causes_that_give_the_same_values_are_all_named(also: tuple[str, ...], whole: bool) -> None:
    row = fault("x", "file", "llama", "y", NO_THREAD, lambda: ("", ""),
                cause(("scale", "factor"), alike=True))  # fmt: skip
    found = (Finding("scale", "", "tensor", "bug", ("ffn",), True, also=also),)
    assert judged(row, Diagnosis("a", "b", found, (), (), ())).whole == whole


def test_the_page_has_the_frozen_rows_counts() -> None:
    part = between(PAGE.read_text(), command.NAME)
    faults = sum(not row.control for row in FROZEN)
    assert f"| faults | {faults} |" in part
    assert f"| controls | {len(FROZEN) - faults} |" in part
    listed = re.findall(
        r"^\| ([\w-]+|nothing wrong) \| (\d+) \|", part.partition("seeded")[2], re.M
    )
    assert sum(int(count) for _, count in listed) == len(FROZEN)
    assert {name for name, _ in listed} == {
        "nothing wrong" if row.control else row.counted_as for row in FROZEN
    }


# --- the command ---------------------------------------------------------------------------------


def test_the_command_prints_a_line_counts_and_the_matrix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "answers.json"
    assert command.main(["--only", "gguf-f32", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rpc gguf-f32 ") and "    1 controls answered rightly" in out
    assert out.endswith("| nothing wrong | 1 | none 1 | 1 |\n")
    (said,) = json.loads(file.read_text())
    assert said["name"] == "gguf-f32" and said["whole"] and not said["alarm"]


def test_rows_are_asked_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("--only", "gguf-f32", "--only", "gguf-f16")
    assert command.main([*names, "--jobs", "2"]) == 0
    assert "    2 controls answered rightly" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [
    ["--open", "--write"], ["--frozen", "--only", "gguf-f16", "--write"], ["--only", "no-such-row"],
])  # fmt: skip
def test_the_page_is_written_from_all_frozen_rows_only(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(arguments) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_counts_and_matrix_stand_between_the_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: field -->\nold\n<!-- end: field -->\nafter\n")
    monkeypatch.setattr(command, "PAGE", page)
    command.write([answer("a"), answer("b", kind="control", verdict="same", named=())])
    text = page.read_text()
    assert text.startswith("before\n<!-- table: field -->\n| of the frozen rows | |\n")
    assert text.endswith("| nothing wrong | 1 | none 1 | 1 |\n<!-- end: field -->\nafter\n")
    assert "old" not in text
