"""A scan answers every question of every model once, whatever files and processes do.

Seen red: a torn line kept, an answer asked again, a dead worker's other questions lost, a process
that may take any memory, a copy counted twice, a derivation taken from names.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aprfmt.errors import FormatError
from aprfmt.fleet.answer_lines import AnswerLine
from aprfmt.fleet.model_search import FleetModel, describe_model, find_models
from aprfmt.fleet.questions import select_questions
from aprfmt.fleet.results import latest_rows, read_lines, read_parquet
from aprfmt.fleet.run import ScanBudget, ScanRequest, scan
from aprfmt.fleet.tasks import DERIVES, ERROR, OPEN, SCHEMA, Task
from aprfmt.fleet.workers import Limits, Workers
from tests.cli.run import aprfmt
from tests.fleet.stores import LLAMA, folder, hub, sparse

FEW = ("layout", "digests", "encodings", "support")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a GGUF of it, one quantized from it, one of another seed, and a damaged file."""
    root = tmp_path_factory.mktemp("zoo")
    base = folder(root / "base")
    assert aprfmt("convert", base, root / "base.gguf", "--no-source-hash").code == 0
    big = root / "wide"
    shutil.copytree(base, big)
    other = folder(root / "other", seed=1)
    assert aprfmt("convert", other, root / "cut.gguf").code == 0
    with (root / "cut.gguf").open("r+b") as file:
        file.truncate((root / "cut.gguf").stat().st_size - 40)
    (root / "page.gguf").write_text("<!doctype html><title>404</title>")
    return root


def request(root: Path, out: Path, **more: Any) -> ScanRequest:
    return ScanRequest((str(root),), out, **{"jobs": 2, "checks": FEW, **more})


def asked(out: Path) -> Counter[tuple[str, str]]:
    return Counter((row["identity"], row["check"]) for row, _ in read_lines(out))


def told(answers: Iterable[AnswerLine]) -> list[dict[str, Any]]:
    return [json.loads(answer.line) for answer in answers]


def test_every_question_of_every_model_has_one_row(zoo: Path, tmp_path: Path) -> None:
    report = scan(request(zoo, tmp_path / "r.jsonl", checks=()))
    rows = list(latest_rows(tmp_path / "r.jsonl"))
    assert set(asked(tmp_path / "r.jsonl").values()) == {1}
    opened = [row for row in rows if row["check"] == OPEN]
    whole = [row for row in opened if row["outcome"] == "PASS"]
    assert len(opened) == 5 and len(whole) == 4  # base and wide are one
    each = Counter(row["model"] for row in rows if row["check"] != DERIVES)
    assert {each[row["model"]] for row in whole} == {1 + len(select_questions())}
    assert {row["schema"] for row in rows} == {SCHEMA}
    failed = {(Path(row["model"]).name, row["check"]) for row in report.found["damage"]}
    assert ("cut.gguf", "layout") in failed and ("page.gguf", OPEN) in failed
    assert not any(name in ("base", "base.gguf", "other") for name, _ in failed)
    assert report.exit_code == 1


def test_validate_and_scan_agree(zoo: Path, tmp_path: Path) -> None:
    scan(request(zoo / "cut.gguf", tmp_path / "r.jsonl", checks=()))
    told = {row["check"]: row["outcome"] for row in latest_rows(tmp_path / "r.jsonl")}
    alone = {
        row["name"]: row["outcome"]
        for row in aprfmt("validate", zoo / "cut.gguf", "--json").json["checks"]
    }
    assert alone.items() <= told.items() and alone["layout"] == "FAIL"


def test_a_second_scan_asks_only_what_is_new_or_changed(zoo: Path, tmp_path: Path) -> None:
    root, out = tmp_path / "zoo", tmp_path / "r.jsonl"
    shutil.copytree(zoo, root)
    first = scan(request(root, out))
    again = scan(request(root, out))
    errors = first.found["counts"][ERROR]
    assert again.asked == errors and again.found == first.found
    (root / "base.gguf").rename(root / "moved.gguf")
    moved = scan(request(root, out))
    assert moved.asked == errors + 1  # where it lies now
    assert any(each["model"].endswith("moved.gguf") for each in moved.found["models"])
    (root / "other" / "config.json").write_text(json.dumps(LLAMA | {"rope_theta": 3e4}))
    changed = scan(request(root, out))
    assert changed.asked == errors + 1 + len(FEW)


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_a_line_that_a_kill_cut_off_is_asked_again(zoo: Path, tmp_path: Path, cut: int) -> None:
    out = tmp_path / "r.jsonl"
    first = scan(request(zoo / "base", out))
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) - cut])
    again = scan(request(zoo / "base", out))
    assert again.asked == 1 and again.found == first.found
    assert len(list(read_lines(out))) == len(whole.splitlines())


def test_answers_of_another_version_are_asked_again(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.jsonl"
    first = scan(request(zoo / "base", out))
    monkeypatch.setattr("aprfmt.fleet.results.__version__", "9.9")
    again = scan(request(zoo / "base", out))
    assert again.asked == 1 + len(FEW) and again.found == first.found


@pytest.mark.parametrize("text", ["{}\n", "not json\n", '{"schema": "x/1"}\n', "[1]\n"])
def test_a_file_that_is_no_results_is_refused_and_kept(
    zoo: Path, tmp_path: Path, text: str
) -> None:
    out = tmp_path / "mine.jsonl"
    out.write_text(text)
    with pytest.raises(FormatError, match="line 1"):
        scan(request(zoo / "base", out))
    assert out.read_text() == text


def test_a_file_that_vanishes_is_one_row(zoo: Path, tmp_path: Path) -> None:
    gone = folder(tmp_path / "gone")
    subject = describe_model(gone, str(gone))
    shutil.rmtree(gone)
    base = describe_model(zoo / "base", "base")
    with Workers(1, Limits()) as workers:
        rows = told(workers.answers([Task(subject, (OPEN, *FEW)), Task(base, (OPEN,))]))
    assert [row["outcome"] for row in rows] == [ERROR, "PASS"]


def test_a_question_that_takes_too_long_is_one_row(tmp_path: Path) -> None:
    subject = describe_model(sparse(tmp_path / "s.safetensors", 256 << 30), "endless")
    with Workers(1, Limits(seconds=5.0)) as workers:  # opening it has time on a busy machine
        rows = told(workers.answers([Task(subject, (OPEN, "values", "encodings"))]))
    assert [(row["check"], row["outcome"]) for row in rows] == [
        (OPEN, "PASS"),
        ("values", ERROR),
        ("encodings", "PASS"),
    ]
    assert "--unit-time" in rows[1]["found"]


def test_a_question_that_takes_too_much_memory_is_one_row(tmp_path: Path) -> None:
    subject = describe_model(sparse(tmp_path / "s.safetensors", 1 << 30), "greedy")
    with Workers(1, Limits(memory=384 << 20)) as workers:
        rows = told(workers.answers([Task(subject, (OPEN, "digests", "encodings"))]))
    assert [(row["check"], row["outcome"]) for row in rows] == [
        (OPEN, "PASS"),
        ("digests", ERROR),
        ("encodings", "PASS"),
    ]


def test_a_worker_that_is_killed_loses_one_answer(tmp_path: Path, zoo: Path) -> None:
    slow = describe_model(sparse(tmp_path / "s.safetensors", 64 << 30), "slow")
    base = describe_model(zoo / "base", "base")
    names = (OPEN, "values", "encodings", "support")
    rows = []
    with Workers(1, Limits()) as workers:
        for answer in workers.answers([Task(slow, names), Task(base, names)]):
            row = json.loads(answer.line)
            rows.append(row)
            if row["check"] == OPEN and row["model"] == "slow":
                workers._all[0].process.kill()
    assert [(row["model"], row["check"]) for row in rows] == [
        (model, name) for model in ("slow", "base") for name in names
    ]
    assert [row["outcome"] == ERROR for row in rows] == [name == 1 for name in range(8)]


def test_a_worker_that_is_killed_gives_back_the_small_model_it_had_waiting(zoo: Path) -> None:
    base = describe_model(zoo / "base", "base")
    tasks = [Task(replace(base, places=(f"{n}",)), (OPEN, *select_questions())) for n in range(30)]
    rows, kills = [], 0
    with Workers(2, Limits()) as workers:
        for answer in workers.answers(tasks):
            rows.append(json.loads(answer.line))
            two = [worker for worker in workers._all if len(worker.tasks) == 2]
            if two and len(rows) > 250 * kills:
                two[0].process.kill()
                kills += 1
    wanted = {(task.subject.places[0], name) for task in tasks for name in task.names}
    lost = {row["model"] for row in rows if row["check"] == OPEN and row["outcome"] == ERROR}
    found = Counter((row["model"], row["check"]) for row in rows)
    assert kills > 1 and set(found.values()) == {1}
    assert {model for model, _ in wanted - set(found)} <= lost
    assert sum(row["outcome"] == ERROR for row in rows) <= kills


def test_a_budget_of_requests_gives_no_model_ahead(zoo: Path) -> None:
    base = describe_model(zoo / "base", "base")
    with Workers(1, Limits(), ahead=False) as workers:
        for _ in workers.answers([Task(base, (OPEN, *FEW))] * 4):
            assert len(workers._all[0].tasks) <= 1


def test_an_interrupt_ends_the_workers_and_keeps_the_rows(
    zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, given = tmp_path / "r.jsonl", Workers.answers
    all_of: list[Any] = []

    def stopped(self: Workers, tasks: Any) -> Iterator[Any]:
        for number, row in enumerate(given(self, tasks)):
            all_of[:] = self._all
            if number == 6:
                raise KeyboardInterrupt
            yield row

    with monkeypatch.context() as patched:
        patched.setattr(Workers, "answers", stopped)
        with pytest.raises(KeyboardInterrupt):
            scan(request(zoo, out))
    first = [row for row, _ in read_lines(out)]
    assert len(first) == 6
    assert all_of and all(worker.process.poll() is not None for worker in all_of)
    scan(request(zoo, out, families=False))
    again = {(row["identity"], row["check"]) for row in first if row["outcome"] == ERROR}
    assert all(count == 1 + (key in again) for key, count in asked(out).items())


def test_budgets_leave_questions_and_say_so(zoo: Path, tmp_path: Path) -> None:
    first = next(one for one in find_models([str(zoo)]) if isinstance(one, FleetModel))
    some = scan(request(zoo, tmp_path / "a.jsonl", budget=ScanBudget(bytes=first.bytes)))
    assert some.left and some.exit_code == 2 and len(list(read_lines(tmp_path / "a.jsonl"))) == 5
    none = scan(request(zoo, tmp_path / "b.jsonl", budget=ScanBudget(seconds=1e-9)))
    assert none.asked == 0 and none.exit_code == 2
    rest = scan(request(zoo, tmp_path / "a.jsonl"))
    assert rest.left == 0 and rest.kept == 5


def test_copies_are_counted_over_models_and_once_a_blob(zoo: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    hub(cache, "a/one", zoo / "base", revisions=3)
    hub(cache, "b/two", zoo / "other")
    once = scan(request(cache, tmp_path / "a.jsonl")).found
    assert len(once["models"]) == 2 and once["copies"]["tensors"] == 0
    shutil.copytree(zoo / "base", cache / "again")
    twice = scan(request(cache, tmp_path / "b.jsonl")).found["copies"]
    assert twice["tensors"] == 11
    values = sum(group["bytes"] * (group["copies"] - 1) for group in twice["groups"])
    assert twice["bytes"] == values == 4 * (16 * 8 + 3 * 8 + 2 * 64 + 2 * 32 + 3 * 96)


def test_pairs_are_asked_about_where_families_are_wanted(demo_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "models"
    shutil.copytree(demo_model, root / "base")
    assert aprfmt("quantize", demo_model, root / "q8.gguf", "--type", "Q8_0").code == 0
    for families in (False, True):  # the second scan asks what the first left out
        scan(request(root, tmp_path / "r.jsonl", families=families))
        pairs = [one for one, check in asked(tmp_path / "r.jsonl") if check == DERIVES]
        assert len(pairs) == families


def test_a_derivation_is_proven_and_another_seed_is_not(demo_model: Path, tmp_path: Path) -> None:
    root = tmp_path / "models"
    shutil.copytree(demo_model, root / "base")
    assert aprfmt("quantize", demo_model, root / "q8.gguf", "--type", "Q8_0").code == 0
    found = scan(request(root, tmp_path / "r.jsonl")).found
    (one,) = found["families"]
    assert one["proof"] == "encoded again" and one["model"].endswith("q8.gguf")
    assert one["base"].endswith("base") and one["details"]["does_not"] == 0
    with (root / "q8.gguf").open("r+b") as file:
        file.seek(-1000, 2)
        file.write(bytes(900))
    changed = scan(request(root, tmp_path / "r.jsonl")).found
    assert not [one for one in changed["families"] if one["proof"] == "encoded again"]


def test_templates_of_one_vocabulary_that_differ_are_listed(
    demo_model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    for name in ("a", "b", "c"):
        shutil.copytree(demo_model, root / name)
        (root / name / "config.json").touch()
    (root / "c" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (one,) = scan(request(root, tmp_path / "r.jsonl", checks=("template",))).found["templates"]
    assert sorted(each["models"] for each in one["templates"]) == [1, 2]


def test_the_command_says_the_verdict_first(zoo: Path, tmp_path: Path) -> None:
    done = aprfmt("scan", zoo, "-o", tmp_path / "r.jsonl", "--jobs", 2, *ONLY)
    first = done.out.splitlines()[0]
    assert done.code == 1 and first.startswith("FAIL: 5 models: ")
    again = aprfmt("scan", zoo, "-o", tmp_path / "r.jsonl", "--json", *ONLY)
    assert again.json["kept"] and again.json["counts"]["FAIL"] == 1
    sound = aprfmt("scan", zoo / "base", "-o", tmp_path / "s.jsonl", "--quiet", *ONLY)
    assert sound.code == 0 and sound.out.startswith("PASS: 1 models: ")


ONLY = tuple(word for name in FEW for word in ("--checks", name))


@pytest.mark.parametrize(("arguments", "says"), [
    (("nowhere", "-o", "x.jsonl"), "no such file or folder"),
    ((".", "--checks", "nothing", "-o", "x.jsonl"), "no check 'nothing'"),
    ((".", "--unit-time", "0"), "unit-time"),
    ((), "ROOT"),
])  # fmt: skip
def test_wrong_arguments_are_one_line(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = aprfmt("scan", *arguments)
    assert done.code == 2 and says in done.err and not list(tmp_path.iterdir())


def test_parquet_holds_the_same_rows(zoo: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="NOT-RUN: no pyarrow")
    table = tmp_path / "r.parquet"
    first = scan(request(zoo, table))
    lines = scan(request(zoo, tmp_path / "r.jsonl"))
    assert first.found == lines.found and not table.with_name("r.parquet.part").exists()
    again = scan(request(zoo, table))
    assert again.asked == first.found["counts"][ERROR] and again.found == first.found
    assert {row["check"] for row in read_parquet(table)} >= {OPEN, *FEW}
