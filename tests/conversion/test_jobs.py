"""`--jobs`: several workers make and write pieces; the bytes and the counts are those of one.

Seen red: counts of the last piece only, a checksum of pieces joined the wrong way round, a piece
put at the beginning of its tensor; repacks by one worker; one shard after the other, or all at a
time; a wait for the oldest piece where another ended.
"""

import errno
import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.codecs.weight_layout import WeightLayout
from aprfmt.conversion import convert, run, scheduling
from aprfmt.conversion.repacking import RepackedTensor
from aprfmt.errors import ConversionError, OutputError
from aprfmt.formats.output_file import OutputFile
from tests.cli.run import aprfmt
from tests.conversion.dialect_folders import write_folder
from tests.conversion.folders import llama_folder
from tests.patience import PATIENCE


def digests(*places: Path) -> Mapping[str, str]:
    files = [
        file
        for place in places
        for file in (sorted(place.iterdir()) if place.is_dir() else [place])
    ]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors cut into many pieces, and workers wait for room."""
    monkeypatch.setattr(scheduling, "CHUNK", 1 << 12)
    monkeypatch.setattr(scheduling, "BUDGET", 1 << 19)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", [
    {"encoding": "F16", "allow_overflow": True}, {"quantize": "Q4_0"}, {"quantize": "Q4_K_M"},
    {"encoding": "F32", "max_shard_size": 200_000}, {},
], ids=str)  # fmt: skip
def test_the_bytes_are_those_of_one(options: Mapping[str, Any], tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "m", "BF16", hidden=256, layers=3, vocab=300)
    found, made = [], []
    for jobs in (1, 4):
        folder = tmp_path / str(jobs)
        folder.mkdir()
        found.append(convert(source, folder / "x.gguf", jobs=jobs, **options))
        made.append(digests(folder))
    assert made[0] == made[1] and made[0]
    assert found[0].tensors == found[1].tensors
    assert found[1].verified == len(found[1].tensors)


@pytest.mark.usefixtures("small")
def test_a_dialect_is_decoded_by_several(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "fp8_block")
    found = [
        aprfmt(
            "convert",
            tmp_path / "m",
            tmp_path / f"{jobs}.gguf",
            "--encoding",
            "BF16",
            "--jobs",
            jobs,
            "--json",
        ).json
        for jobs in (1, 3)
    ]
    assert found[0]["tensors"] == found[1]["tensors"]
    one, several = digests(tmp_path / "1.gguf", tmp_path / "3.gguf").values()
    assert one == several


def test_two_weights_are_repacked_at_a_time_without_being_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "m", "modelopt")
    expected = convert(tmp_path / "m", tmp_path / "one.gguf").files[0].read_bytes()
    both, real = threading.Barrier(2, timeout=PATIENCE), RepackedTensor.raw

    def met(self: RepackedTensor, start: int = 0, stop: int | None = None) -> memoryview:
        both.wait()  # raises where nobody else comes
        return real(self, start, stop)

    monkeypatch.setattr(RepackedTensor, "raw", met)
    convert(tmp_path / "m", tmp_path / "two.gguf")
    assert (tmp_path / "two.gguf").read_bytes() == expected


@pytest.mark.usefixtures("small")
def test_an_error_of_a_worker_ends_the_run(tmp_path: Path) -> None:
    huge = np.full(256 * 256, 3e38, np.float32).view(np.uint16)[1::2].tobytes()
    name = "model.layers.1.self_attn.o_proj.weight"
    source = llama_folder(tmp_path / "m", "BF16", hidden=256, replaced={name: huge})
    with pytest.raises(ConversionError, match="overflow F16"):
        convert(source, tmp_path / "x.gguf", encoding="F16", jobs=3)
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.usefixtures("small")
def test_a_stopped_run_is_continued_by_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = llama_folder(tmp_path / "m", "BF16", hidden=256, layers=3)
    expected = convert(source, tmp_path / "one.gguf", quantize="Q4_0").files
    real = run.encode_piece

    def failing(output: Any, *rest: Any) -> Any:
        if output.info.name == "blk.2.ffn_up.weight":
            raise ConversionError("stopped")
        return real(output, *rest)

    with monkeypatch.context() as stop:
        stop.setattr(scheduling, "encode_piece", failing)
        with pytest.raises(ConversionError, match="stopped"):
            convert(source, tmp_path / "x.gguf", quantize="Q4_0", jobs=2, resume=True)
    report = convert(source, tmp_path / "x.gguf", quantize="Q4_0", jobs=3, resume=True)
    assert report.resumed_tensors > 4
    assert (tmp_path / "x.gguf").read_bytes() == expected[0].read_bytes()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("suffix", ["gguf", "apr", "safetensors"])
def test_split_and_merge_give_the_bytes_of_one(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        scheduling, "WINDOW", 5000
    )  # many pieces of a tensor, few of them whole rows
    source = tmp_path / f"m.{suffix}"
    convert(llama_folder(tmp_path / "m", "BF16", hidden=256, layers=3, vocab=300), source)
    made = []
    for jobs in (1, 2, 5):
        folder = tmp_path / str(jobs)
        folder.mkdir()
        parts = aprfmt(
            "split",
            source,
            folder / f"x.{suffix}",
            "--max-shard-size",
            "300K",
            "--jobs",
            jobs,
            "--json",
        )
        assert parts.json["verified"] == len(parts.json["tensors"]), parts.err
        files = sorted(folder.iterdir())
        assert len(files) > 3
        whole = aprfmt("merge", files[0], folder / f"y.{suffix}", "--jobs", jobs)
        assert whole.code == 0, whole.err
        made.append(digests(folder))
    assert made[0] == made[1] == made[2]


@pytest.mark.usefixtures("small")
def test_a_full_disk_ends_a_run_of_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = llama_folder(tmp_path / "m", "BF16", hidden=256, layers=3)
    writes = itertools.count()

    def full(fd: int, data: memoryview, offset: int) -> int:
        if next(writes) == 9:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OutputError, match="No space left"):
        convert(source, tmp_path / "x.gguf", quantize="Q8_0", jobs=3)
    assert os.listdir(tmp_path) == ["m"]


class AtOnce:
    """An executor that does what it is given before it returns."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, work: Callable[[], object]) -> Future[object]:
        done: Future[object] = Future()
        done.set_result(work())
        return done

    def shutdown(self, **_: object) -> None: ...


@pytest.mark.usefixtures("small")
def test_workers_take_a_piece_of_each_shard_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    def noted(self: OutputFile, offset: int, data: memoryview) -> None:
        written.append(self.path.name)
        real(self, offset, data)

    real, jobs = OutputFile.place, 3
    source = llama_folder(tmp_path / "m", "BF16", hidden=256, layers=3, vocab=300)
    monkeypatch.setattr(OutputFile, "place", noted)
    monkeypatch.setattr(scheduling, "ThreadPoolExecutor", AtOnce)
    convert(source, tmp_path / "x.apr", max_shard_size=600_000, encoding="F16", jobs=jobs)
    shards = list(dict.fromkeys(written))
    assert len(shards) > jobs + 1
    assert written[: 4 * jobs] == shards[:jobs] * 4
    ends = [len(written) - written[::-1].index(shard) for shard in shards]
    for number, shard in enumerate(shards[jobs:], jobs):  # one for each worker at a time
        assert written.index(shard) >= sorted(ends)[number - jobs]


@pytest.mark.usefixtures("small")
def test_a_slow_piece_keeps_no_other_worker_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, calls, many = 2, itertools.count(1), threading.Event()
    waited: list[bool] = []
    real = run.encode_piece

    def slow(*rest: Any) -> Any:
        call = next(calls)
        if call == 1:
            waited.append(many.wait(PATIENCE))
        elif call > 2 * jobs * scheduling.EACH:  # more than are handed out at a time
            many.set()
        return real(*rest)

    monkeypatch.setattr(scheduling, "encode_piece", slow)
    source = llama_folder(tmp_path / "m", "BF16", hidden=256, layers=3, vocab=300)
    convert(source, tmp_path / "x.gguf", quantize="Q4_0", jobs=jobs)
    assert waited == [True]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("wanted", ["BF16", "F16"])
def test_a_kernel_that_decodes_and_encodes_changes_no_byte_and_no_count(
    wanted: str, jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "m", "fp8_block")
    options: Mapping[str, Any] = {"encoding": wanted, "jobs": jobs, "allow_overflow": True}
    found = [convert(tmp_path / "m", tmp_path / "one.gguf", **options)]
    used: list[str] = []

    def never(self: WeightLayout, encoding: str) -> bool:
        used.append(encoding)
        return False

    monkeypatch.setattr(WeightLayout, "recodes", never)
    found.append(convert(tmp_path / "m", tmp_path / "two.gguf", **options))
    assert wanted in used
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    assert found[0].tensors == found[1].tensors
    assert any(tensor.changed for tensor in found[0].tensors)
