"""The official libraries read the file too, and a disagreement names who is outside the format.

Seen red: a shape turned round, a type not compared, a digest of the first window only, tensors that
nobody read counted as read, a library's crash as a pass, a fault of the library that fails a file.
"""

import json
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from aprfmt.base.child_process import start_library_child
from aprfmt.base.encodings import BY_GGML, BY_SAFETENSORS, all_encodings
from aprfmt.base.protocols import OrderedSink, TensorInfo
from aprfmt.checks import Validation, validate
from aprfmt.checks.context import CheckContext
from aprfmt.checks.file import second_reader, second_reader_child
from aprfmt.checks.file.second_reader import SecondReading
from aprfmt.checks.gates import structure
from aprfmt.checks.records import NotRun
from aprfmt.formats import open_sink
from aprfmt.model import open_model
from tests.checks.file import bases
from tests.cli.run import aprfmt
from tests.formats import gguf_cases, safetensors_cases
from tests.formats.gguf_files import DATA, File

CASES = [
    pytest.param(case.data, suffix, id=f"{suffix}-{case.id}")
    for suffix, tables in (
        ("gguf", (gguf_cases.MALFORMED, gguf_cases.WARNED, gguf_cases.LEGAL)),
        ("safetensors", (safetensors_cases.MALFORMED, safetensors_cases.LEGAL)),
    )
    for table in tables
    for case in table
]
Rows = Iterator[Mapping[str, Any]]


def here(kind: str, file: Any) -> Rows:
    """Return what the child says, without a child: tables of small files need many."""
    yield from second_reader_child.answer_request(kind, str(file.path), 1 << 30)


def reading_of(report: Validation) -> SecondReading:
    assert report.second_reading is not None
    return report.second_reading


def answer(report: Validation) -> tuple[str, str]:
    (found,) = [one for one in report.answers if one.name == "second_reader"]
    return found.outcome, found.why


def written(path: Path, rows: Mapping[str, tuple[str, tuple[int, ...]]]) -> Path:
    """Write tensors of encodings, every byte another one."""
    infos = []
    for name, (encoding, shape) in rows.items():
        row = all_encodings()[encoding]
        infos.append(TensorInfo(name, shape, encoding, 0, row.nbytes(shape), None))
    options = {"carry": True} if path.suffix == ".safetensors" else {}
    with open_sink(path, path.suffix[1:], **options) as sink:
        if isinstance(sink, OrderedSink):
            infos = sink.order(infos)
        sink.plan({}, infos)
        for number, info in enumerate(infos):
            data = bytes((i * 7 + number) % 251 for i in range(info.nbytes))
            sink.write(info.name, [memoryview(data)])
    return path


def test_every_type_of_gguf(tmp_path: Path) -> None:
    """Each row of the table with a ggml type: compared where the library has it, counted else.

    gguf 0.19 takes a block of Q8_1 for 40 bytes; the C struct has 36 (two halves and 32 int8).
    """
    rows = {row.name: row for row in BY_GGML.values() if row.known and not row.row_layout}
    path = written(tmp_path / "a.gguf", {name: (name, (2, 512)) for name in rows})
    report = validate(path, second_reader=True)
    found = reading_of(report)
    theirs = {int(kind) for kind in gguf.GGMLQuantizationType}
    lacking = {name for name, row in rows.items() if row.ggml not in theirs}
    wrong = {(one.tensor, one.outside) for one in found.disagreements}
    assert wrong <= {("Q8_1", found.library)}
    assert {one.tensor for one in found.not_read} == lacking
    assert (found.tensors, found.agreed) == (len(rows), len(rows) - len(lacking) - len(wrong))
    assert found.agreed >= 30
    assert answer(report)[0] == ("NOT_RUN" if lacking else "PASS")


def test_a_type_that_the_library_has_not_is_counted_and_leaves_the_verdict_open(
    tmp_path: Path,
) -> None:
    lacking = next(r for r in BY_GGML.values() if r.known and r.ggml not in _theirs() and r.ggml)
    rows = {"norm": ("F32", (32,)), "there": ("Q8_0", (2, 256)), "not": (lacking.name, (2, 512))}
    report = validate(written(tmp_path / "a.gguf", rows), second_reader=True)
    outcome, why = answer(report)
    assert outcome == "NOT_RUN"
    assert "2 of 3 tensors; not read: gguf " in why and f"type {lacking.ggml}" in why
    assert report.exit_code == 2


def _theirs() -> set[int]:
    return {int(kind) for kind in gguf.GGMLQuantizationType}


def test_every_type_of_safetensors(tmp_path: Path) -> None:
    """All 22 dtypes, scalars, an empty tensor, and bytes carried for a type the format lacks."""
    rows = {name: (row.name, (4, 24)) for name, row in BY_SAFETENSORS.items()}
    more = {"scalar": ("F32", ()), "none": ("BF16", (0, 8)), "carried": ("Q5_0", (2, 64))}
    report = validate(written(tmp_path / "a.safetensors", rows | more), second_reader=True)
    found = reading_of(report)
    assert found.disagreements == []
    assert {one.tensor for one in found.not_read} <= {"F4", "F6_E2M3", "F6_E3M2"}
    assert found.tensors == found.agreed + len(found.not_read) == len(rows) + len(more)


@pytest.mark.parametrize("base", ["q8", "nf4", "shards"])
def test_models_agree(base: str, tmp_path: Path) -> None:
    report = validate(bases.MAKERS[base](tmp_path), second_reader=True)
    assert answer(report) == ("PASS", "") and report.exit_code == 0
    found = reading_of(report)
    assert found.agreed == found.tensors > 40 and found.disagreements == []


def test_a_big_endian_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_reader, "_rows_of_child", here)
    path = tmp_path / "big.gguf"
    path.write_bytes(
        File(order=">", data=DATA).tensor("a", [8]).tensor("b", [32], offset=32).build()
    )
    report = validate(path, second_reader=True)
    assert reading_of(report).disagreements == [] and answer(report)[0] == "PASS"


@pytest.mark.parametrize(("data", "suffix"), CASES)
def test_who_breaks_a_rule_is_the_file(
    data: bytes, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both read the table of legal, odd and malformed files: nobody innocent is accused."""
    monkeypatch.setattr(second_reader, "_rows_of_child", here)
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(data)
    try:
        model = open_model(path, partial=True, damaged=True)
    except Exception:  # nothing can be read: there is nothing to compare
        return
    with model:
        found = second_reader.read_again(CheckContext(model))
        assert {one.outside for one in found.disagreements} <= {"the file"}
        assert bool(found.disagreements) == bool(model.damage)
        assert found.agreed <= found.tensors


# --- disagreements ----------------------------------------------------------------------------


def _ours_wrong(**change: Any) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        parsed = model.source.shards[0].parsed
        info = parsed.infos["a"]
        found = {key: value(info) for key, value in change.items()}
        parsed.infos["a"] = replace(info, **found)

    return edit


def _lost(model: Any) -> None:
    del model.source.shards[0].parsed.infos["a"]


OURS = {
    "type": _ours_wrong(encoding=lambda info: "I32"),
    "shape": _ours_wrong(shape=lambda info: info.shape[::-1]),
    "place": _ours_wrong(offset=lambda info: info.offset + 32),
    "present": _lost,
}


@pytest.mark.parametrize("suffix", ["gguf", "safetensors"])
@pytest.mark.parametrize("what", OURS)
def test_we_are_named_where_we_are_wrong(
    what: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_reader, "_rows_of_child", here)
    path = written(tmp_path / f"x.{suffix}", {"a": ("F32", (2, 8)), "b": ("F32", (4,))})
    with open_model(path, partial=True) as model:
        OURS[what](model)
        (one,) = second_reader.read_again(CheckContext(model)).disagreements
    seen = "bytes" if (what, suffix) == ("place", "safetensors") else what
    assert (one.tensor, one.what) == ("a", seen)
    assert one.outside == "aprfmt"


def _theirs_wrong(key: str, value: Any) -> Callable[[str, Any], Rows]:
    def rows(kind: str, file: Any) -> Rows:
        for row in here(kind, file):
            if row.get("name") == "a":
                if value is None:
                    continue
                row = {**row, key: value}
            yield row
            if key == "twice" and row.get("name") == "a":
                yield row

    return rows


THEIRS: Mapping[str, tuple[str, Any, str]] = {
    "type": ("encoding", 26, "type"),
    "shape": ("shape", [8, 2], "shape"),
    "place": ("offset", 64, "place"),
    "bytes": ("sha256", "00" * 32, "bytes"),
    "lost": ("name", None, "present"),
    "renamed": ("name", "c", "present"),
    "twice": ("twice", 1, "present"),
}


@pytest.mark.parametrize("what", THEIRS)
def test_a_library_that_is_wrong_is_named_and_fails_no_file(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, value, seen = THEIRS[what]
    monkeypatch.setattr(second_reader, "_rows_of_child", _theirs_wrong(key, value))
    path = written(tmp_path / "x.gguf", {"a": ("F32", (2, 8)), "b": ("F32", (4,))})
    report = validate(path, second_reader=True)
    found = reading_of(report)
    assert {one.what for one in found.disagreements} == {seen}
    assert {one.outside for one in found.disagreements} == {found.library}
    assert [one.finding.level for one in report.findings if one.check == "second_reader"] == [
        "warning"
    ] * len(found.disagreements)
    assert validate(path, second_reader=True, strict=True).exit_code == 1


def test_a_refusal_of_a_file_that_we_find_right_is_not_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(kind: str, file: Any) -> Rows:
        yield {"library": "gguf 9"}
        yield {"stopped": "ValueError: no", "raised": True}

    monkeypatch.setattr(second_reader, "_rows_of_child", refuses)
    report = validate(written(tmp_path / "x.gguf", {"a": ("F32", (8,))}), second_reader=True)
    (one,) = reading_of(report).disagreements
    assert (one.what, one.outside, report.exit_code) == ("opens", "not decided", 1)
    assert reading_of(report).not_read[0].tensor == "1 tensors"


# --- the child ---------------------------------------------------------------------------------

CHILDREN = {
    "crashes": "import os; os.abort()",
    "no memory": "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 26, 1 << 26))\n"
    "x = [bytes(1 << 20) for _ in range(1 << 20)]",
    "says little": 'print(\'{"library": "gguf 1"}\')',
    "half a line": "import sys; sys.stdout.write('{\"name\"')",
}


@pytest.mark.parametrize("early", [False, True], ids=["later", "before it is asked"])
@pytest.mark.parametrize("name", CHILDREN)
def test_a_library_that_dies_has_compared_nothing(
    name: str, early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(script: Path) -> Any:
        child = start_library_child(script)
        child.wait()
        return child

    if early:
        monkeypatch.setattr(second_reader, "start_library_child", ended)
    script = tmp_path / "child.py"
    script.write_text(CHILDREN[name])
    monkeypatch.setattr(second_reader, "_CHILD", script)
    report = validate(written(tmp_path / "x.gguf", {"a": ("F32", (8,))}), second_reader=True)
    outcome, why = answer(report)
    assert outcome == "NOT_RUN" and "its process ended" in why and "0 of 1 tensors" in why
    assert report.exit_code == 2


def test_a_library_that_is_dead_before_the_request_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pipe is broken when the request is written, and again when the pipe is closed."""
    start = start_library_child

    def start_and_wait(script: Path) -> "subprocess.Popen[bytes]":
        child = start(script)
        child.wait()
        return child

    script = tmp_path / "child.py"
    script.write_text(CHILDREN["crashes"])
    monkeypatch.setattr(second_reader, "_CHILD", script)
    monkeypatch.setattr(second_reader, "start_library_child", start_and_wait)
    report = validate(written(tmp_path / "x.gguf", {"a": ("F32", (8,))}), second_reader=True)
    outcome, why = answer(report)
    assert outcome == "NOT_RUN" and "its process ended" in why and report.exit_code == 2


STOPS = {
    "memory": (MemoryError(), "needs more than 64 MiB of memory", False),
    "library": (ImportError("no module"), "cannot be imported: no module", False),
    "error": (ValueError("bad magic"), "ValueError: bad magic", True),
    "long": (KeyError("k" * 400), f"KeyError: '{'k' * 289}", True),
}


@pytest.mark.parametrize("why", STOPS)
def test_why_a_library_did_not_read_all_is_said_behind_what_it_read(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, stopped, raised = STOPS[why]

    def read(path: str) -> Rows:
        yield {"name": path}
        raise error

    monkeypatch.setitem(second_reader_child.READERS, "gguf", read)
    rows = list(second_reader_child.answer_request("gguf", "x.gguf", 64 << 20))
    assert rows[1:] == [{"name": "x.gguf"}, {"stopped": stopped, "raised": raised}]
    assert list(rows[0]) == ["library"] and rows[0]["library"].startswith("gguf ")


def test_memory_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("resource", reason="NOT-RUN: this system has no resource limits")
    monkeypatch.setattr(second_reader, "_MEMORY", 1 << 20)
    report = validate(written(tmp_path / "x.gguf", {"a": ("F32", (8,))}), second_reader=True)
    assert answer(report)[0] == "NOT_RUN" and reading_of(report).agreed == 0


def test_large_tensors_are_compared_to_their_last_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows and bands of rows: one bit at the end of a tensor of several of them."""
    monkeypatch.setattr(second_reader_child, "WINDOW", 1 << 10)
    monkeypatch.setattr(second_reader, "_rows_of_child", here)
    for suffix in ("gguf", "safetensors"):
        path = written(tmp_path / f"x.{suffix}", {"a": ("F32", (37, 64)), "b": ("F32", (4,))})
        assert reading_of(validate(path, second_reader=True)).agreed == 2
        rows = list(here(suffix, _At(path)))
        with open_model(path, partial=True) as model:
            info = model.source.tensors["a"].info
        data = bytearray(path.read_bytes())
        data[info.offset + info.nbytes - 1] ^= 1
        path.write_bytes(data)
        monkeypatch.setattr(second_reader, "_rows_of_child", lambda *_, rows=rows: iter(rows))
        (one,) = reading_of(validate(path, second_reader=True)).disagreements
        assert (one.tensor, one.what) == ("a", "bytes")
        monkeypatch.setattr(second_reader, "_rows_of_child", here)


class _At:
    def __init__(self, path: Path) -> None:
        self.path = path


# --- commands ----------------------------------------------------------------------------------


def test_the_command_and_its_json(tmp_path: Path) -> None:
    path = bases.MAKERS["hf"](tmp_path)
    done = aprfmt("validate", path, "--second-reader", "--json")
    assert done.code == 0
    found = done.json["second_reader"]
    assert found["library"].startswith("safetensors ") and found["agreed"] == found["tensors"]
    assert aprfmt("validate", path, "--json").json["second_reader"] is None


def test_a_format_without_a_library_is_not_run(tmp_path: Path) -> None:
    path = bases.small_apr(tmp_path)
    report = validate(path, second_reader=True)
    assert answer(report) == ("NOT_RUN", "a check of gguf and safetensors files")
    assert report.exit_code == 2
    with open_model(path) as model, pytest.raises(NotRun, match="no official library"):
        second_reader.read_again(CheckContext(model))


def test_the_headers_own_entries(tmp_path: Path) -> None:
    """The third reading is independent of ours: written here by struct and json alone."""
    header = {"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}}
    raw = json.dumps(header).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(12))
    with open_model(path, partial=True) as model:
        source: Any = model.source
        ((stored, count),) = second_reader.header_entries("safetensors", source.shards[0]).values()
    assert (stored.encoding, stored.shape, stored.offset) == ("BF16", (2, 3), 8 + len(raw))
    assert (stored.nbytes, count) == (12, 1)


def test_a_gate_without_an_official_library_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "repeat_result", lambda *given, **options: iter(()))
    subject: Any = SimpleNamespace(
        request=SimpleNamespace(strict=False), model=SimpleNamespace(format="apr"), shared={}
    )
    with pytest.raises(NotRun, match="no official library of the format apr"):
        structure.check_official_library(subject)


@pytest.mark.parametrize("raised", [False, True])
@pytest.mark.parametrize("damage", [(), ("a tensor is cut off", "and more")])
@pytest.mark.parametrize("level", ["", "note", "warning"])
def test_a_library_that_stopped_disagrees_where_it_raised_or_aprfmt_complains(
    raised: bool, damage: tuple[str, ...], level: str
) -> None:
    """Without room or time it has decided nothing. Seen red: the file's name for a tensor's."""
    reading: Any = SimpleNamespace(not_read=[], disagreements=[])
    notes = [SimpleNamespace(text="an odd key", level=level)] if level else []
    parsed = SimpleNamespace(
        faults=SimpleNamespace(damage=[SimpleNamespace(text=text) for text in damage]), notes=notes
    )
    stopped: Any = SimpleNamespace(
        _reading=reading, _file="x.gguf", _left={"b"}, _ours={"a": 1, "b": 2},
        _shard=SimpleNamespace(parsed=parsed),
    )  # fmt: skip
    second_reader._Comparison._report_stopped(stopped, "no room", raised)
    (left,) = reading.not_read
    assert (left.file, left.tensor, left.reason) == ("x.gguf", "1 tensors", "no room")
    own = [*damage, *(["an odd key"] if level == "warning" else [])]
    if not (own or raised):
        assert reading.disagreements == []
        return
    (said,) = reading.disagreements
    assert (said.file, said.tensor, said.what) == ("x.gguf", "", "opens")
    assert (said.ours, said.theirs) == ("2 tensors", "no room")
    assert said.outside == ("the file" if own else "not decided")
    says = f"aprfmt says: {own[0]}" if own else "aprfmt finds nothing wrong with it"
    assert said.because == says
