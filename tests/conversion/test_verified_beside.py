"""Tensors are read back while others are written; what differs then is never published.

Seen red: comparisons that nobody waits for, a place that counts for every file, a tensor compared
with the memory it was written from.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.base.protocols import TensorInfo
from aprfmt.conversion import verification
from aprfmt.conversion.source_hash import SourceHash
from aprfmt.errors import ConversionError
from aprfmt.formats import open_source
from aprfmt.formats.mapped_file import (
    BufferFile,
    MappedFile,
    MemoryTensor,
    StoredTensor,
    in_mapped_file,
)
from aprfmt.formats.output_file import OutputFile
from tests.conversion.dialect_folders import write_folder
from tests.conversion.folders import llama_folder
from tests.conversion.test_verified import UP, a_bit

KINDS = {None: rf"{UP}: byte 77 differs from the source", "Q8_0": rf"{UP}: reads back with other"}


@pytest.fixture(autouse=True)
def every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "LARGE", 1)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of tensors compared, in order."""
    names: list[str] = []
    real = verification.compare_written

    def noted(output: Any, *rest: Any) -> None:
        names.append(output.info.name)
        real(output, *rest)

    monkeypatch.setattr(verification, "compare_written", noted)
    yield names


def damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change a bit of one tensor before it is read back."""
    real = verification._compare

    def damaging(file: Any, at: int, output: Any, record: Any) -> None:
        if output.info.name == UP:
            with file.temporary.open("r+b") as other:
                other.seek(at + 77)
                byte = other.read(1)[0]
                other.seek(at + 77)
                other.write(bytes([byte ^ 4]))
        real(file, at, output, record)

    monkeypatch.setattr(verification, "_compare", damaging)


@pytest.mark.parametrize("suffix", ["gguf", "apr", "safetensors"])
@pytest.mark.parametrize("encoding", KINDS)
def test_every_tensor_is_compared_once(
    encoding: str | None, suffix: str, compared: list[str], tmp_path: Path
) -> None:
    if encoding and suffix == "safetensors":
        encoding = "F16"
    wishes: dict[str, Any] = {} if encoding is None else {"encoding": encoding, "jobs": 2}
    source = llama_folder(tmp_path / "source", "BF16")
    report = aprfmt.convert(source, tmp_path / f"m.{suffix}", **wishes)
    assert report.verified == len(report.tensors) == 21
    assert sorted(compared) == sorted({row.name for row in report.tensors})


@pytest.mark.parametrize("encoding", KINDS)
def test_a_bit_that_changed_before_it_is_read_back_is_found(
    encoding: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged(monkeypatch)
    source = llama_folder(tmp_path / "source", "BF16")
    wishes: dict[str, Any] = {} if encoding is None else {"encoding": encoding}
    with pytest.raises(ConversionError, match=KINDS[encoding]):
        aprfmt.convert(source, tmp_path / "m.gguf", **wishes)
    assert [path.name for path in tmp_path.iterdir()] == ["source"], "nothing is published"


def test_a_repack_is_proven_before_it_is_published(
    tmp_path: Path, compared: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "source", "mlx")
    report = aprfmt.convert(tmp_path / "source", tmp_path / "m.gguf")
    assert sorted(compared) == sorted(row.name for row in report.tensors), "each once"
    (tmp_path / "m.gguf").unlink()
    damaged(monkeypatch)
    with pytest.raises(ConversionError, match=f"{UP}: reads back with other"):
        aprfmt.convert(tmp_path / "source", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["source"], "nothing is published"


def test_another_file_in_its_place_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = aprfmt.conversion._verify

    def verify(files: Any, *rest: Any) -> Any:
        with open_source(files[0]) as written:
            place = written.tensors[UP].info.offset
        raw = bytearray(files[0].read_bytes())
        a_bit(raw, place)
        other = tmp_path / "other"
        other.write_bytes(raw)
        other.replace(files[0])
        return real(files, *rest)

    monkeypatch.setattr(aprfmt.conversion, "_verify", verify)
    source = llama_folder(tmp_path / "source", "BF16")
    with pytest.raises(ConversionError, match=f"{UP}: byte 77 differs"):
        aprfmt.convert(source, tmp_path / "m.gguf")


def test_a_split_and_a_continued_run_are_compared_too(compared: list[str], tmp_path: Path) -> None:
    source = llama_folder(tmp_path / "source", "BF16", layers=3)
    options: dict[str, Any] = {"resume": True, "max_shard_size": 60_000}
    report = aprfmt.convert(source, tmp_path / "m.gguf", **options)
    assert len(report.files) > 2
    assert sorted(compared) == sorted(row.name for row in report.tensors)


def test_bytes_are_proven_in_one_place_of_one_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcdabcd")
    mapped = MappedFile(tmp_path / "a")
    written = OutputFile(tmp_path / "a", tmp_path / "a", tmp_path / "a")
    with open_source(llama_folder(tmp_path / "s", "BF16") / "model.safetensors") as source:
        with verification.Verifier(source) as verifier:
            verifier._places["a"] = written, 0
            at = [StoredTensor(mapped, TensorInfo("a", (4,), "U8", n, 4, 4)) for n in (0, 4)]
            assert not verifier.is_proved("a", at[0]), "it is not closed"
            written.identity = mapped.identity
            assert [verifier.is_proved("a", tensor) for tensor in at] == [True, False]
            assert not verifier.is_proved("b", at[0])


def test_only_mapped_bytes_are_read_by_another_thread(tmp_path: Path) -> None:
    info = TensorInfo("a", (4,), "U8", 0, 4, 4)
    assert not in_mapped_file(MemoryTensor(info, b"abcd"))
    assert in_mapped_file(StoredTensor(BufferFile(b"abcd", tmp_path), info))


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
def test_the_disk_works_while_a_digest_is_awaited(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written is synced before the digest is asked for, where that is not there yet."""
    source = llama_folder(tmp_path / "m", "BF16", hidden=64)
    asked: list[int] = []
    synced: list[int] = []
    real_sync, real_result = os.fsync, SourceHash.result

    def sync(fd: int) -> None:
        synced.append(os.fstat(fd).st_size)
        real_sync(fd)

    def result(self: SourceHash) -> str:
        asked.append(len(synced))
        return real_result(self)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(SourceHash, "result", result)
    monkeypatch.setattr(SourceHash, "done", lambda self: not late)
    monkeypatch.setattr(verification.Verifier, "done", lambda self: True)
    report = aprfmt.convert(source, tmp_path / "x.gguf")
    size = (tmp_path / "x.gguf").stat().st_size
    assert asked[0] == int(late)
    assert synced[: asked[0]] == [size] * late
    assert aprfmt.open(tmp_path / "x.gguf").metadata["aprfmt.source.sha256"] == report.source_sha256
