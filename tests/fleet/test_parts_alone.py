"""Parts of a scan, each by itself; the cluster is one of ours, which runs nothing at once."""

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from aprfmt.errors import BackendUnavailableError, FormatError, OutputError, UsageError
from aprfmt.fleet import model_search, questions, ray_tasks, results
from aprfmt.fleet import workers as workers_module
from aprfmt.fleet.answer_lines import RowFacts, encode_answer
from aprfmt.fleet.model_search import FleetModel, file_identity
from aprfmt.fleet.results import Results, check_results_path, latest_rows, read_parquet, read_rows
from aprfmt.fleet.summary import Summary
from aprfmt.fleet.tasks import DERIVES, ERROR, OPEN, Task, make_row
from aprfmt.fleet.workers import Limits, Workers, _Waiting
from aprfmt.recovery import evidence

LIMITS = Limits(seconds=60, memory=1 << 30)


def subject(name: str, size: int = 1) -> FleetModel:
    return FleetModel(name, name, size, (name, f"{name}-again", f"{name}-a-third-time"))


def test_a_row_names_the_first_place_of_the_model_and_of_its_base() -> None:
    row = make_row(Task(subject("a"), (OPEN,), subject("b")), OPEN, None, why="lost")
    assert (row["model"], row["base"], row["base_identity"]) == ("a", "b", "b")
    assert row["places"] == ["a", "a-again", "a-a-third-time"]
    assert (row["outcome"], row["found"]) == (ERROR, "lost")
    assert "base" not in make_row(Task(subject("a"), (OPEN,)), OPEN, None)


class Cluster:
    """Ray as a scan sees it: tasks lie until they are waited for; the most at a time is kept."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, cpus: int) -> None:
        self.cpus, self.lying, self.most = cpus, 0, 0

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": float(self.cpus)}

    def remote(self, **of: object) -> Any:
        def begin(task: Task, limits: Limits) -> object:
            self.lying += 1
            self.most = max(self.most, self.lying)
            return SimpleReference(task)

        return lambda unit: SimpleNamespace(remote=begin)

    def wait(self, running: Sequence[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        self.lying -= 1
        return [running[0]], list(running[1:])

    def get(self, reference: "SimpleReference") -> list[Any]:
        task = reference.task
        facts = SimpleNamespace(outcome=ERROR if task.subject.path == "bad" else "PASS")
        return [SimpleNamespace(facts=facts, name=(task.subject.path, task.names[0]))]


class SimpleReference:
    def __init__(self, task: Task) -> None:
        self.task = task


@pytest.mark.parametrize("cpus", [1, 3])
def test_a_cluster_has_so_many_units_and_asks_what_opens(
    cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(cpus)
    monkeypatch.setattr(ray_tasks, "_connect_ray", lambda address: cluster)
    models = [*(f"m{i}" for i in range(20)), "bad"]
    tasks = iter([Task(subject(name), (OPEN, "layout", "values")) for name in models])
    found: list[Any] = [
        answer.name for answer in cast(Any, ray_tasks.ray_answers(tasks, "", LIMITS))
    ]
    wanted = {(name, check) for name in models for check in (OPEN, "layout", "values")}
    assert sorted(found) == sorted(wanted - {("bad", "layout"), ("bad", "values")})
    assert cluster.most == ray_tasks.AHEAD * cpus


@pytest.mark.parametrize("address", ["auto", ":1", "ray://host", "ray://host:port"])
def test_an_address_without_host_and_port_is_rays_own(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("socket.create_connection", lambda *of, **named: asked.append(of))
    ray_tasks._check_reachable(address)
    assert asked == []


def test_a_cluster_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*of: object, **named: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr("socket.create_connection", refuses)
    with pytest.raises(BackendUnavailableError, match="host:1: no Ray cluster answers"):
        ray_tasks._check_reachable("ray://host:1")


class Worker:
    """A process that takes tasks and answers none."""

    def __init__(self, takes: int) -> None:
        self.tasks: list[Task] = []
        self.most = takes

    def takes(self, task: Task) -> bool:
        return len(self.tasks) < self.most

    def give(self, task: Task) -> None:
        self.tasks.append(task)


def tasks(count: int) -> Iterator[Task]:
    return iter([Task(subject(f"m{i}"), ("layout",)) for i in range(count)])


@pytest.mark.parametrize(("ahead", "given"), [(True, [2, 2]), (False, [1, 1])])
def test_a_worker_gets_one_task_more_only_ahead(ahead: bool, given: list[int]) -> None:
    workers = Workers(2, LIMITS, ahead)
    own = [Worker(2), Worker(2)]
    workers._all = cast(Any, list(own))
    waiting = _Waiting(tasks(9))
    workers._assign_tasks(waiting)
    workers._assign_tasks(waiting)
    assert [len(worker.tasks) for worker in own] == given
    assert waiting.first is not None


def test_a_model_has_its_answers_by_outcome_and_none_is_0() -> None:
    """Questions of two models are not answers about one."""
    given = {"a": ("PASS", "PASS", "FAIL"), "b": ("ERROR", "NOT_RUN"), "c": ()}
    with Summary([subject(name) for name in given]) as summary:
        for name, outcomes in given.items():
            for at, outcome in enumerate(outcomes):
                summary.add(RowFacts(name, f"q{at}", outcome))
            summary.add(RowFacts(name, DERIVES, "PASS", "a", details="{}"))
        found = {row["model"]: row for row in summary.models()}
        counts = summary.counts()
    outcomes = ("PASS", "FAIL", "NOT_RUN", ERROR)
    for name, each in given.items():
        assert [found[name][one] for one in outcomes] == [each.count(one) for one in outcomes]
    every = [one for each in given.values() for one in each]
    assert counts == {one: every.count(one) for one in outcomes}


def test_results_are_on_the_disk_when_a_scan_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, real = tmp_path / "rows.jsonl", list[int](), os.fsync
    answer = encode_answer(make_row(Task(subject("a"), (OPEN,)), OPEN, None, why="lost"))

    def fsync(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with Results(path, lambda row: None) as results:
        results.add(answer)
        assert path.read_bytes() == answer.line
        results.finish()
    assert synced == [len(answer.line)]


def test_a_table_without_pyarrow_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    says = r"Parquet needs pyarrow, which is not installed; .*, or name a \.jsonl file"
    with pytest.raises(OutputError, match=says):
        check_results_path(tmp_path / "rows.parquet")
    with pytest.raises(OutputError, match=says):
        list(read_parquet(tmp_path / "rows.parquet"))
    check_results_path(tmp_path / "rows.jsonl")


@pytest.mark.parametrize("name", ["rows.txt", "rows", "rows.json", "m.gguf", "rows.jsonl.gz"])
def test_rows_are_written_under_the_two_extensions_alone(name: str, tmp_path: Path) -> None:
    near = re.escape(str((tmp_path / name).with_suffix(".jsonl")))
    with pytest.raises(UsageError, match=rf"\(\.jsonl\) or as \.parquet; give -o {near}$"):
        check_results_path(tmp_path / name)


class Answering:
    """A process that answers a task at once; the first ends, or is silent, at its second name."""

    first: ClassVar[list[str]] = []

    def __init__(self, limits: Limits, heard: Any) -> None:
        self.heard, self.tasks, self.done, self.until = heard, list[Task](), 0, math.inf
        self.fate = self.first.pop() if self.first else ""
        self.process = SimpleNamespace(kill=lambda: None)

    def takes(self, task: Task) -> bool:
        return not self.tasks

    def give(self, task: Task) -> None:
        self.tasks.append(task)
        self.done = 0
        self.heard.put((self, b"answers"))
        if self.fate == "ends":
            self.heard.put((self, b""))

    def messages(self, some: bytes) -> Iterator[Any]:
        for name in self.tasks[0].names[: 1 if self.fate else None] if some else ():
            self.done += 1
            yield encode_answer(make_row(self.tasks[0], name, None, why="answered"))
        if not self.fate:
            self.tasks.clear()
        if self.fate == "is silent":
            self.until = 0.0

    def end(self) -> int:
        return -9


@pytest.mark.parametrize(
    ("fate", "why"), [("", None), ("ends", "ended with -9"), ("is silent", "--unit-time")]
)
@pytest.mark.parametrize("names", [("a", "b"), ("a", "b", "c")])
def test_a_process_that_is_lost_costs_the_one_answer_it_was_at(
    fate: str, why: str | None, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answering, "first", [fate] if fate else [])
    monkeypatch.setattr(workers_module, "_Worker", Answering)
    task = Task(subject("m"), names)
    with Workers(1, LIMITS) as workers:
        rows = [json.loads(answer.line) for answer in workers.answers(iter([task]))]
    assert [row["check"] for row in rows] == list(names)
    lost = [row["found"] for row in rows if row["found"] != "answered"]
    assert len(lost) == (why is not None) and (why is None or why in lost[0])
    assert {row["outcome"] for row in rows} == {ERROR}


DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("name", "blob"),
    [(f"blobs/{DIGEST}", True), (f"files/{DIGEST}", False), ("blobs/m.gguf", False)],
)
def test_only_what_a_cache_names_by_its_digest_is_known_by_its_name(
    name: str, blob: bool, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.parent.mkdir()
    found = []
    for data in (b"one", b"two"):
        path.write_bytes(data)
        os.utime(path, ns=(5, 5))
        found.append(file_identity(path))
    assert (found[0] == found[1]) is blob
    assert found[0].startswith(f"{DIGEST} 3" if blob else "3 5 ")


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_digests_say_how_many_tensors_cannot_be_read(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"key": f"t{i}", "encoding": "F32", "shape": (2,), "names": ("t",),
         "raw": [] if i < lost else [DIGEST], "decoded": None if i < lost else DIGEST}
        for i in range(3)
    ]  # fmt: skip
    monkeypatch.setattr(questions, "tensor_rows", lambda model: rows)
    monkeypatch.setattr(questions, "_stored_bytes", lambda model, names: 8)
    answer = questions.tensor_digests(cast(Any, SimpleNamespace(model=None)))
    assert answer.outcome == ("NOT_RUN" if lost == 3 else "PASS")
    assert answer.found == "3 tensors" + (f", {lost} cannot be read" if lost else "")
    assert answer.details is not None
    assert [row[4] is None for row in answer.details["tensors"]] == [i < lost for i in range(3)]


@pytest.mark.parametrize("rest", [1, 30, -1, 0])
def test_a_row_that_was_cut_off_is_taken_away(rest: int, tmp_path: Path) -> None:
    """A scan that was killed while it wrote: its last line ends nowhere, and is asked again."""
    first, second = (
        encode_answer(make_row(Task(subject(name), (OPEN,)), OPEN, None, why="lost"))
        for name in "ab"
    )
    path, seen = tmp_path / "rows.jsonl", list[Any]()
    path.write_bytes(first.line + second.line[:rest])
    with Results(path, seen.append) as results:
        assert path.read_bytes() == first.line
        results.add(second)
        results.finish()
    assert path.read_bytes() == first.line + second.line
    assert [row["model"] for row in seen] == ["a"]  # those that were there before


def test_what_is_asked_again_is_what_has_no_answer_of_this_version(tmp_path: Path) -> None:
    """The last row of a question counts; an ERROR is no answer, and rows behind one are read."""
    path, seen = tmp_path / "rows.jsonl", list[Any]()
    answer: Any = SimpleNamespace(outcome="PASS", found="", findings=(), details=None)
    task = Task(subject("a"), ("x", "y", "z", "w", OPEN))
    rows = [make_row(task, name, given) for name, given in (
        ("x", None), ("y", answer), ("x", answer), ("z", answer), ("z", None), (OPEN, answer),
        ("w", answer),
    )]  # fmt: skip
    rows[-1]["version"] = "0.0.1"
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    with Results(path, seen.append) as results:
        assert seen == rows
        names = ("x", "y", "z", "w", "v", OPEN)
        assert results.wanted(subject("a"), names) == ["z", "w", "v"]
        assert results.wanted(subject("b"), names) == list(names)
        assert results.wanted(subject("a"), names, subject("b")) == list(names)
        moved = FleetModel("a", "a", 1, ("elsewhere", *subject("a").places))
        assert results.wanted(moved, names) == ["z", "w", "v", OPEN]
    assert [row["check"] for row in latest_rows(path)] == ["y", "x", "z", OPEN, "w"]
    assert [row["outcome"] for row in latest_rows(path)][2] == ERROR
    assert list(read_rows(path)) == rows


@pytest.mark.parametrize("damage", ["no table", "cut short", "a list that is no JSON"])
def test_a_file_that_is_no_table_of_a_scan_is_named(damage: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    tables = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    path = tmp_path / "rows.parquet"
    rows = [{"model": "m", "findings": "[" if damage.startswith("a list") else "[]"}]
    tables.write_table(pyarrow.Table.from_pylist(rows), path)
    data = path.read_bytes()
    if damage == "no table":
        path.write_bytes(b"not a table of anything")
    elif damage == "cut short":
        path.write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match=r"rows\.parquet: no Parquet file of a scan: "):
        list(read_rows(path))


class Arrow:
    """pyarrow as reading a table uses it, where it is not installed: it reads nothing."""

    class ArrowException(Exception):
        """The library's own."""

    def __init__(self, error: type[Exception]) -> None:
        self.parquet = SimpleNamespace(ParquetFile=partial(self.fail, error))

    def fail(self, error: type[Exception], path: Path) -> None:
        raise error("Parquet magic bytes not found")


@pytest.mark.parametrize("error", [Arrow.ArrowException, ValueError])
def test_what_the_library_of_tables_says_is_one_line(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "_import_pyarrow", lambda: Arrow(error))
    with pytest.raises(FormatError, match="no Parquet file of a scan: Parquet magic bytes not"):
        list(read_parquet(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("names", [(OPEN,), ("layout", "values")])
def test_a_task_that_the_cluster_gave_up_is_an_error_of_its_first_question(
    names: tuple[str, ...],
) -> None:
    def lost(reference: object) -> Any:
        raise RuntimeError("a node is gone")

    ray = SimpleNamespace(get=lost, exceptions=Cluster.exceptions)
    (answer,) = ray_tasks._fetch_answers(ray, None, Task(subject("a"), names))
    row = json.loads(answer.line)
    assert (row["model"], row["check"], row["outcome"]) == ("a", names[0], ERROR)
    assert row["found"] == f"Ray gave it up after {ray_tasks.RETRIES} more tries: RuntimeError"
    assert answer == encode_answer(
        make_row(Task(subject("a"), names), names[0], None, why=row["found"])
    )


def test_a_worker_of_the_cluster_keeps_one_process_for_its_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    class Kept:
        def __init__(self, count: int, limits: Limits) -> None:
            made.append((count, limits))

        def answers(self, tasks: Any) -> Iterator[Any]:
            return iter([("answer", task) for task in tasks])

    monkeypatch.setattr(ray_tasks, "Workers", Kept)
    monkeypatch.setattr(ray_tasks, "_asking", {})
    other = Limits(seconds=1, memory=1 << 20)
    for limits in (LIMITS, LIMITS, other, LIMITS):
        answers: Any = ray_tasks._answer_unit(cast(Any, "t"), limits)
        assert answers == [("answer", "t")]
    assert made == [(1, LIMITS), (1, other)]


def test_models_of_equal_tensors_are_told_from_those_that_share_most() -> None:
    def of(name: str, *tensors: str) -> RowFacts:
        rows = [(f"{key}-{value}", value or None, 8, key) for key, value in map(tuple, tensors)]
        return RowFacts(name, OPEN, "PASS", tensors=rows)

    with Summary([subject(name) for name in "abcdef"]) as summary:
        summary.add(of("a", "p1", "q2", "r3", "s4"))
        summary.add(of("b", "p1", "q2", "r3", "s4"))
        summary.add(of("c", "p1", "q2", "r8", "s9"))  # half, which is enough
        summary.add(of("d", "p1", "q7", "r8", "s9"))  # one of a, but most of c
        summary.add(of("e", "q1", "p2", "s3", "r4"))  # the same values under other names
        summary.add(of("f", "p1", "q2", "r3", "s4", "t5"))
        rows = [(row["model"], row["base"], row["proof"]) for row in summary._equal_models()]
    all_, most = "all tensors equal", "most tensors equal"
    assert rows == [("b", "a", all_), ("c", "a", most), ("f", "a", most), ("d", "c", most)]


def test_models_of_ollama_are_the_blobs_that_its_manifests_name(tmp_path: Path) -> None:
    """Layers that are no model are passed over; a manifest that cannot be read is listed so."""
    digest, kind = "a" * 64, model_search.OLLAMA_MODEL

    def manifest(name: str, content: Any) -> None:
        path = tmp_path / "manifests" / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def layer(named: str, of: str = kind) -> dict[str, str]:
        return {"digest": named, "mediaType": of}

    manifest("b", {"layers": [layer(f"sha256:{digest}"), layer("sha256:x", "template")]})
    manifest("a", {"layers": [layer(f"sha256:{'b' * 40}"), layer("c" * 64)]})
    manifest("empty", {"layers": []})
    for name, content in (
        ("odd1", {"layers": [layer("sha256:../../etc")]}),
        ("odd2", "{"),
        ("odd3", {"layers": 3}),
        ("odd4", {"none": []}),
        ("odd5", {"layers": [layer(digest), layer("sha256:x")]}),
    ):
        manifest(name, content)
    found = list(model_search._find_ollama(tmp_path))
    blobs = [(blob, shown) for blob, shown in found if isinstance(blob, Path)]
    assert blobs == [
        (tmp_path / "blobs" / f"sha256-{'b' * 40}", "ollama:lib/a"),
        (tmp_path / "blobs" / ("c" * 64), "ollama:lib/a"),
        (tmp_path / "blobs" / f"sha256-{digest}", "ollama:lib/b"),
    ]
    odd = [shown for blob, shown in found if not isinstance(blob, Path)]
    assert odd == [f"ollama:lib/odd{i}" for i in range(1, 6)]


class Held:
    """A file's bytes, in windows of three."""

    def __init__(self, data: bytes) -> None:
        self.view, self.size = memoryview(data), len(data)
        self.dropped: list[tuple[int, int]] = []

    def windows(self, start: int, stop: int) -> Iterator[memoryview]:
        for at in range(start, stop, 3):
            yield self.view[at : min(at + 3, stop)]

    def drop(self, start: int, stop: int) -> None:
        self.dropped.append((start, stop))


def test_blocks_and_tensors_of_a_broken_file_are_held_to_their_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    good = bytes(range(25))

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    digests = [digest(good[at : at + 10]) for at in (0, 10, 20)]

    def differing(data: bytes) -> list[tuple[int, int]]:
        broken: Any = Held(data)
        blocks = {"size": 10, "sha256": digests}
        return [(one.start, one.stop) for one in evidence.differing_blocks(broken, blocks, 25)]

    assert differing(good) == [] and differing(good + b"more") == []
    assert differing(b"x" + good[1:]) == [(0, 10)]
    assert differing(good[:24] + b"x") == [(20, 25)] == differing(good[:24])
    assert differing(good[:20]) == [] and differing(good[:21]) == [(20, 25)]
    assert differing(good[:9]) == [(0, 10)] and differing(b"") == []
    infos = {
        "a": SimpleNamespace(offset=2, nbytes=7),
        "b": SimpleNamespace(offset=9, nbytes=16),
        "late": SimpleNamespace(offset=20, nbytes=6),
    }
    monkeypatch.setattr(evidence, "header_tensors", lambda file: infos)
    rows = [
        {"names": ["a", "gone"], "raw": [digest(good[2:9]), "x"]},
        {"names": ["b", "late"], "raw": [digest(good[9:25]), "x"]},
    ]
    for data, right in ((good, [True, True]), (good[:5] + b"x" + good[6:], [False, True])):
        broken: Any = Held(data)
        found = evidence.check_tensor_digests(broken, broken, rows)
        assert [(one.start, one.stop, one.why) for one, _ in found] == [
            (2, 9, "tensor a"),
            (9, 25, "tensor b"),
        ]
        assert [one for _, one in found] == right
    cut: Any = Held(good[:24])
    assert [one.why for one, _ in evidence.check_tensor_digests(cut, cut, rows)] == ["tensor a"]


ENCODINGS: dict[str, tuple[list[tuple[str, int]], str]] = {
    "none": ([], "no tensors"),
    "one": ([("F32", 8), ("F32", 4)], "F32"),
    "by size": ([("F32", 8), ("BF16", 4), ("F32", 8), ("F16", 32)], "F16, F32, BF16"),
    "three of four": ([("Q8_0", 9), ("F32", 8), ("Q4_0", 4), ("F16", 32)], "F16, Q8_0, F32"),
}


@pytest.mark.parametrize("held", ENCODINGS)
def test_the_three_encodings_of_most_bytes_are_named(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The details have all of them, in bytes and in numbers of values."""
    tensors, most = ENCODINGS[held]
    model = {
        f"t{at}": SimpleNamespace(encoding=encoding, shape=(2, 3), size=size)
        for at, (encoding, size) in enumerate(tensors)
    }
    monkeypatch.setattr(questions, "all_bytes", lambda view: view.size)
    found = questions.bytes_by_encoding(cast(Any, SimpleNamespace(model=model)))
    names = {encoding for encoding, _ in tensors}
    assert (found.outcome, found.found) == ("PASS", most)
    assert found.details == {
        "bytes": {name: sum(size for other, size in tensors if other == name) for name in names},
        "parameters": {name: 6 * [other for other, _ in tensors].count(name) for name in names},
        "quantized": any(name.startswith("Q") for name in names),
    }
