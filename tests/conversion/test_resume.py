"""`--resume`: a conversion that was stopped goes on, and gives the bytes of one run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aprfmt.base.crc import crc32
from aprfmt.base.protocols import TensorInfo
from aprfmt.conversion import convert, scheduling
from aprfmt.conversion.run import output_chunks
from aprfmt.errors import AprfmtError, OutputError, UsageError
from aprfmt.formats import open_sink, open_source, resumable_output
from aprfmt.formats.resumable_output import (
    SCHEMA,
    SUFFIX,
    FinishedTensor,
    ResumableFile,
    ResumableFileSet,
    parse_earlier_run,
    staging_folder,
)
from aprfmt.formats.signature import sign
from aprfmt.formats.temporary_files import remove
from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder
from tests.conversion.resume_driver import SUBJECTS
from tests.formats.writers import contents
from tests.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
KILLS = 6
HALF = ("blk.1.attn_q.weight", "model.layers.1.self_attn.q_proj.weight")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama_folder(tmp_path / "source", "BF16", layers=3)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_kills_and_resumes_give_the_bytes_of_one_run(subject: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.conversion.resume_driver",
            subject,
            str(tmp_path / "x"),
            str(KILLS),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)) >= KILLS


def stop_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a conversion fail when it comes to a tensor of its second layer."""
    real = output_chunks

    def failing(output: Any, *rest: Any) -> Iterator[memoryview]:
        if output.info.name in HALF:
            raise AprfmtError("the end of the world")
        return real(output, *rest)

    monkeypatch.setattr(scheduling, "output_chunks", failing)


def stopped(source: Path, dst: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    with monkeypatch.context() as patch:
        stop_half_way(patch)
        with pytest.raises(AprfmtError, match="end of the world"):
            convert(source, dst, resume=True, **options)


@pytest.mark.parametrize("name", ["x.gguf", "x.apr"])
def test_what_is_written_is_not_written_again(
    name: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(source, tmp_path / name, monkeypatch)
    assert not (tmp_path / name).exists()
    assert staging_folder(tmp_path / name).is_dir()
    report = convert(source, tmp_path / name, resume=True)
    assert 0 < report.resumed_tensors < len(report.tensors)
    assert report.verified == len(report.tensors)
    convert(source, tmp_path / f"one-{name}")
    assert (tmp_path / name).read_bytes() == (tmp_path / f"one-{name}").read_bytes()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["x.gguf", "x.apr"])
def test_it_goes_on_beside_its_source_too_whatever_else_lies_there(
    name: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes and goes in the folder is no part of the model, nor is its name in the output."""
    stopped(source, source / name, monkeypatch, arch="none")
    (source / "notes-of-mine.txt").write_text("private")
    report = convert(source, source / name, resume=True, arch="none")
    assert 0 < report.resumed_tensors < len(report.tensors)
    assert b"notes-of-mine" not in (source / name).read_bytes()


def test_counts_of_changed_values_are_those_of_one_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(source, tmp_path / "x.gguf", monkeypatch, quantize="Q8_0")
    report = convert(source, tmp_path / "x.gguf", resume=True, quantize="Q8_0")
    assert report.resumed_tensors
    assert report.tensors == convert(source, tmp_path / "y.gguf", quantize="Q8_0").tensors


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_a_tensor_whose_bytes_are_not_right_is_written_again(
    damage: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "x.gguf"
    stopped(source, dst, monkeypatch)
    part = staging_folder(dst) / dst.name
    data = bytearray(part.read_bytes())
    if damage == "flip":
        data[-7] ^= 1
        part.write_bytes(data)
    elif damage == "cut":
        part.write_bytes(data[: len(data) // 2])
    else:
        part.unlink()
    convert(source, dst, resume=True, verify=False)
    convert(source, tmp_path / "y.gguf")
    assert dst.read_bytes() == (tmp_path / "y.gguf").read_bytes()


def test_a_changed_source_is_refused_with_one_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "x.gguf"
    stopped(source, dst, monkeypatch)
    weights = source / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = aprfmt("convert", source, dst, "--resume")
    assert done.code == 2
    assert len(done.err.splitlines()) == 1
    assert "its source model.safetensors has changed" in done.err
    assert not dst.exists()
    assert staging_folder(dst).is_dir(), "nothing is lost by being refused"


def test_a_run_without_resume_begins_anew_and_says_what_is_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "x.gguf"
    stopped(source, dst, monkeypatch)
    done = aprfmt("convert", source, dst)
    assert done.code == 0
    assert f".x.gguf{SUFFIX} next to it is of an earlier run" in done.err
    assert staging_folder(dst).is_dir()


def test_an_interrupt_says_that_the_same_command_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*of: Any) -> Iterator[memoryview]:
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduling, "output_chunks", interrupted)
    done = aprfmt("convert", source, tmp_path / "x.gguf", "--resume")
    assert done.code == 130
    assert "the same command goes on" in done.err


def test_other_options_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "x.gguf"
    stopped(source, dst, monkeypatch)
    with pytest.raises(OutputError, match="begun with other options"):
        convert(source, dst, resume=True, encoding="F16")
    with pytest.raises(OutputError, match="begun with other options"):
        convert(source, dst, resume=True, metadata={"general.name": "x"})
    assert convert(source, dst, resume=True, verify=False, threads=1).resumed_tensors


def test_functions_cannot_be_recognised(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="choose and importance"):
        convert(source, tmp_path / "x.gguf", resume=True, choose=lambda *of: None)


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 60_000}])
def test_a_run_that_another_forestalls_takes_its_files_back(
    options: dict[str, Any], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, whole = tmp_path / "place", tmp_path / "whole"
    for folder in (place, whole):
        folder.mkdir()
    convert(source, whole / "x.gguf", **options)
    theirs = place / max(os.listdir(whole))
    real = ResumableFileSet._move_into_target

    def forestalled(files: ResumableFileSet, target: Path, names: Any) -> None:
        real(files, target, names)
        theirs.write_bytes(b"theirs")

    with monkeypatch.context() as patch:
        patch.setattr(ResumableFileSet, "_move_into_target", forestalled)
        with pytest.raises(OutputError, match="somebody else"):
            convert(source, place / "x.gguf", resume=True, **options)
    hidden = staging_folder(place / "x.gguf")
    assert set(os.listdir(place)) == {theirs.name, hidden.name, f"{hidden.name}.jsonl"}
    assert theirs.read_bytes() == b"theirs"
    assert contents(hidden) == contents(whole)
    convert(source, place / "x.gguf", resume=True, force=True, **options)
    assert contents(place) == contents(whole)


def test_two_runs_at_once_are_refused(source: Path, tmp_path: Path) -> None:
    files = ResumableFileSet(tmp_path / "x.gguf")
    files.begin({"a": "1"}, "plan")
    with pytest.raises(OutputError, match="another run is writing it"):
        ResumableFileSet(tmp_path / "x.gguf").begin({"a": "1"}, "plan")
    files.discard()
    assert not list(tmp_path.glob(".*")), "nothing was written, nothing is left"


def test_a_run_that_ends_before_the_next_has_its_lock_counts_as_ended(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found no output; the second has opened the journal that the first then removes."""
    target = tmp_path / "x.gguf"
    real = ResumableFileSet._lock

    def later(files: ResumableFileSet, log: int) -> None:
        monkeypatch.setattr(ResumableFileSet, "_lock", real)
        convert(source, target, resume=True)
        real(files, log)

    monkeypatch.setattr(ResumableFileSet, "_lock", later)
    with pytest.raises(OutputError, match="exists; use --force"):
        convert(source, target, resume=True)
    assert sorted(os.listdir(tmp_path)) == ["source", "x.gguf"]


def test_no_other_run_has_the_journal_between_publishing_and_its_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else both would end well: the second takes the output for that of a run that was killed."""
    target, told = tmp_path / "x.gguf", []
    real = ResumableFileSet.finish

    def later(files: ResumableFileSet) -> None:
        monkeypatch.setattr(ResumableFileSet, "finish", real)
        with pytest.raises(OutputError) as refused:
            convert(source, target, resume=True)
        told.append(str(refused.value))
        real(files)

    monkeypatch.setattr(ResumableFileSet, "finish", later)
    convert(source, target, resume=True)
    assert told == [f"{target}: another run is writing it; wait for it or end it"]
    assert sorted(os.listdir(tmp_path)) == ["source", "x.gguf"]


def test_a_run_removes_its_journal_while_nobody_else_has_it(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def watched(path: Path) -> None:
        if path.name.endswith(f"{SUFFIX}.jsonl"):
            with pytest.raises(OutputError, match="another run is writing it"):
                ResumableFileSet(tmp_path / "x.gguf").begin({"a": "1"}, "plan")
            tried.append(path)
        remove(path)

    monkeypatch.setattr(resumable_output, "remove", watched)
    convert(source, tmp_path / "x.gguf", resume=True)
    assert tried and sorted(os.listdir(tmp_path)) == ["source", "x.gguf"]


def test_a_run_killed_after_it_published_is_verified_and_ended(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "x"
    with monkeypatch.context() as patch:
        patch.setattr(ResumableFileSet, "finish", lambda *of: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, dst, to="safetensors", resume=True, max_shard_size=60_000)
    before = contents(dst)
    assert tmp_path.joinpath(f".x{SUFFIX}.jsonl").exists()
    report = convert(source, dst, to="safetensors", resume=True, max_shard_size=60_000)
    assert report.verified == len(report.tensors)
    assert contents(dst) == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("folder", [True, False])
def test_renames_that_an_earlier_run_left_are_completed_before_its_journal_is_read(
    folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "x"
    completed: list[Path] = []
    monkeypatch.setattr(resumable_output, "complete_renames", completed.append)
    for there in (False, True):
        if there:
            home.mkdir()
        files = ResumableFileSet(home, folder=home if folder else None)
        files.begin({"a": "1"}, "plan")
        files.done("t", FinishedTensor(7, (1, 2, 3)))
        files.discard()
        again = ResumableFileSet(home, folder=home if folder else None)
        again.begin({"a": "1"}, "plan")
        assert again.tensors == {"t": FinishedTensor(7, (1, 2, 3))} and not again.published
        again.finish()
        assert completed.pop() == (home if folder and there else tmp_path) and not completed


@pytest.mark.parametrize("kind", ["link", "name", "folder"])
def test_links_in_place_of_the_growing_file_are_refused(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dst = tmp_path / "x.gguf"
    stopped(source, dst, monkeypatch)
    part = staging_folder(dst) / dst.name
    part.unlink()
    (tmp_path / "elsewhere").mkdir()
    mine = tmp_path / "elsewhere" / dst.name
    mine.write_bytes(b"mine")
    if kind == "link":
        part.symlink_to(mine)
    elif kind == "name":
        os.link(mine, part)
    else:
        part.parent.rmdir()
        part.parent.symlink_to(mine.parent)
    with pytest.raises(OutputError):
        convert(source, dst, resume=True)
    assert mine.read_bytes() == b"mine" and not dst.exists()


def test_a_folder_that_is_exchanged_for_a_link_while_it_grows_leads_nowhere(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the hidden folder and the first file in it."""
    dst = tmp_path / "x.gguf"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / dst.name).write_bytes(b"mine")
    real = ResumableFile.open

    def exchanging(file: ResumableFile, old: os.stat_result | None) -> None:
        file.temporary.parent.rmdir()
        file.temporary.parent.symlink_to(elsewhere)
        real(file, old)

    monkeypatch.setattr(ResumableFile, "open", exchanging)
    with pytest.raises(OutputError):
        convert(source, dst, resume=True)
    assert (elsewhere / dst.name).read_bytes() == b"mine" and not dst.exists()


def journal_of(dst: Path) -> Path:
    return staging_folder(dst).with_name(f"{staging_folder(dst).name}.jsonl")


@pytest.fixture
def staged(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An output of which all tensors are staged, a bit of the last one wrong.

    The journal, signed, has the checksum of the wrong bytes.
    """
    dst = tmp_path / "x.gguf"
    with monkeypatch.context() as patch:
        patch.setattr("aprfmt.conversion._verify", lambda *of: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            convert(source, dst, resume=True)
    part, journal = staging_folder(dst) / dst.name, journal_of(dst)
    with open_source(part) as opened:
        name, stored = max(opened.tensors.items(), key=lambda item: item[1].info.offset)
        data = bytearray(stored.raw())
        at = stored.info.offset
    data[7] ^= 1
    whole = bytearray(part.read_bytes())
    whole[at : at + len(data)] = data
    part.write_bytes(whole)
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
    for line in lines:
        del line["signature"]
        if line.get("tensor") == name:
            line["crc"] = crc32(bytes(data))
    write_lines(journal, lines)
    return dst


def write_lines(journal: Path, lines: list[dict[str, Any]]) -> None:
    run = lines[0]["run"]
    payloads = [json.dumps([run, line], separators=(",", ":")).encode() for line in lines]
    signed = [
        line | {"signature": sign(SCHEMA, data)} for line, data in zip(lines, payloads, strict=True)
    ]
    journal.write_text("".join(f"{json.dumps(line)}\n" for line in signed))


def test_what_is_staged_is_verified_before_it_is_published(
    staged: Path, source: Path, tmp_path: Path
) -> None:
    """A tensor that has the checksum of the journal, and not the bytes of the source."""
    done = aprfmt("convert", source, staged, "--resume")
    assert done.code == 2, done.err
    assert "differs from the source; nothing is published" in done.err
    assert done.err.count("\n") == 1
    assert not staged.exists()
    assert not list(tmp_path.glob(".*")), "the same command begins anew"
    assert aprfmt("convert", source, staged, "--resume").code == 0
    convert(source, tmp_path / "y.gguf")
    assert staged.read_bytes() == (tmp_path / "y.gguf").read_bytes()


def test_an_old_output_stays_where_the_new_one_is_wrong(staged: Path, source: Path) -> None:
    staged.write_bytes(b"old")
    assert aprfmt("convert", source, staged, "--resume").code == 2, "it exists"
    assert staged.read_bytes() == b"old"


@pytest.mark.parametrize("change", ["unsigned", "another key", "one line", "another run"])
def test_a_planted_journal_is_refused(
    change: str, staged: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = journal_of(staged)
    lines = [json.loads(line) for line in journal.read_bytes().splitlines()]
    if change == "one line":
        lines[-1]["crc"] ^= 1
    elif change == "another run":
        lines[0]["run"] = "0"
    elif change == "unsigned":
        for line in lines:
            del line["signature"]
    if change == "another key":
        for line in lines:
            del line["signature"]
        with monkeypatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
            write_lines(journal, lines)
    else:
        journal.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    done = aprfmt("convert", source, staged, "--resume")
    assert done.code == 2 and "is not signed by the key of this user" in done.err
    assert not staged.exists() and staging_folder(staged).is_dir()


def test_without_a_state_folder_nothing_can_be_continued(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null/state")
    done = aprfmt("convert", source, tmp_path / "x.gguf", "--resume")
    assert done.code == 2 and "leave --resume out" in done.err
    assert not list(tmp_path.glob(".x*"))


SOURCES = {"a": "1:2:3:4 5", "b": "6:7:8:9 5"}


@pytest.mark.parametrize(
    ("sources", "plan", "said"),
    [
        (SOURCES, "plan", None),
        (dict(reversed(SOURCES.items())), "plan", None),
        (SOURCES | {"c": "1:2:3:4 5"}, "plan", "its source c has changed"),
        ({"a": SOURCES["a"]}, "plan", "its source b has changed"),
        (SOURCES | {"b": "6:7:8:0 5"}, "plan", "its source b has changed"),
        ({"a": SOURCES["a"], "d": SOURCES["b"]}, "plan", "its source b has changed"),
        ({}, "plan", "its source a has changed"),
        (SOURCES, "plam", "other options"),
    ],
    ids=["same", "order", "added", "removed", "changed", "renamed", "none", "plan"],
)
def test_a_run_goes_on_with_the_same_sources_only(
    sources: dict[str, str], plan: str, said: str | None, tmp_path: Path
) -> None:
    first = ResumableFileSet(tmp_path / "x.gguf")
    first.begin(SOURCES, "plan")
    first.done("t", FinishedTensor(7, (0, 0, 0)))
    first.discard()
    again = ResumableFileSet(tmp_path / "x.gguf")
    if said is None:
        again.begin(sources, plan)
        assert again.tensors == {"t": FinishedTensor(7, (0, 0, 0))}
    else:
        with pytest.raises(OutputError, match=said):
            again.begin(sources, plan)
    again.discard()
    assert journal_of(tmp_path / "x.gguf").exists()


def test_a_shard_that_was_added_to_the_source_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, dst = tmp_path / "parts", tmp_path / "x.gguf"
    convert(source, parts, to="safetensors", max_shard_size=60_000)
    stopped(parts, dst, monkeypatch)
    (index,) = parts.glob("*.index.json")
    table = json.loads(index.read_text())
    name = next(iter(table["weight_map"]))
    old = parts / table["weight_map"][name]
    with open_source(old) as opened:
        assert name in opened.tensors
    moved = "model-added.safetensors"
    (parts / moved).write_bytes(old.read_bytes())
    shard = table["weight_map"][name]
    table["weight_map"] = {
        key: moved if held == shard else held for key, held in table["weight_map"].items()
    }
    index.write_text(json.dumps(table))
    with pytest.raises(OutputError, match=r"its source .* has changed since it was begun"):
        convert(parts, dst, resume=True)
    assert not dst.exists()


@pytest.mark.parametrize(
    "lines",
    [
        b'{"schema": "aprfmt.resume/2", "sources": {}, "plan": ""}\n',
        b"[]\n",
        b'{"schema": "aprfmt.resume/1", "sources": {"a": 1}, "plan": ""}\n',
        b'{"schema":"aprfmt.resume/1","sources":{},"plan":""}\n{"moves":[["","../x",""]]}\n',
        b'{"schema":"aprfmt.resume/1","sources":{},"plan":""}\n{"moves":[["x","y",""]]}\n',
        b'{"schema":"aprfmt.resume/1","sources":{},"plan":""}\n{"tensor":"a","crc":1}\n',
        b"\xff\n",
    ],
)
def test_a_journal_is_not_believed(lines: bytes) -> None:
    with pytest.raises(AprfmtError, match=r"^journal: .*; remove it, and begin anew$"):
        parse_earlier_run(lines, "journal")


def test_a_line_cut_short_is_no_line() -> None:
    assert parse_earlier_run(b'{"schema": "aprfmt.resume/1", "sou', "x") is None
    data = b'{"schema":"aprfmt.resume/1","sources":{},"plan":"p"}\n{"tensor":"a","crc":1,"cou'
    begun = parse_earlier_run(data, "x")
    assert begun is not None
    assert not begun.tensors


def test_split_and_merge_go_on_too(source: Path, tmp_path: Path) -> None:
    split = aprfmt("split", source, tmp_path / "s", "--max-shard-size", "60K", "--resume")
    assert split.code == 0, split.err
    merged = aprfmt("merge", tmp_path / "s", tmp_path / "m.safetensors", "--resume", "--json")
    assert merged.json["resumed_tensors"] == 0
    assert not list(tmp_path.glob(".*"))


def test_a_sink_keeps_nothing_in_a_new_file(tmp_path: Path) -> None:
    info = TensorInfo("a", (4,), "U8", 0, 4, 4)
    with open_sink(tmp_path / "x.safetensors", "safetensors") as sink:
        sink.plan({}, [info])
        assert not sink.keep("a", 0)  # type: ignore[attr-defined]
        sink.write("a", [memoryview(b"abcd")])
