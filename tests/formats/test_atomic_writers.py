"""Fail the n-th system call of every writer of the package, for every n."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprfmt.errors import FormatError, OutputError
from aprfmt.formats import atomic
from aprfmt.formats.atomic import complete_renames, pending_journals
from tests.conftest import ROOT
from tests.formats.publishing import CALLS
from tests.formats.test_atomic_faults import Fault, attempts
from tests.formats.writers import WRITERS

EVERY = pytest.mark.parametrize("name", WRITERS)
STRICT = (
    "open", "write", "pwrite", "fsync", "fchmod", "mkdir", "chmod", "link", "replace", "rename",
)  # fmt: skip
READING = frozenset(
    "curdir devnull error fsdecode fsencode fspath getpid getsid kill listdir lstat name path "
    "readlink scandir stat stat_result strerror fstat pread read lseek SEEK_CUR SEEK_SET "
    "urandom supports_dir_fd".split()
)
pytestmark = pytest.mark.usefixtures("notices")
FLAGS = re.compile(r"O_[A-Z]+|[FRWX]_OK")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fsync only be counted; what it does cannot be seen without a power cut."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@EVERY
def test_a_writer_replaces_what_is_there(name: str, tmp_path: Path) -> None:
    writer = WRITERS[name]
    root = tmp_path / "x"
    writer.prepare(root)
    for version in (1, 2, 3, 4):
        writer.write(root, version)
        assert writer.version_of(root) == (version - 1) % 3 + 1
        assert writer.litter(root) == []
    assert len({tuple(writer.expected(version).items()) for version in (1, 2, 3)}) == 3


@pytest.mark.parametrize("call", STRICT)
@EVERY
def test_one_failure_leaves_the_old_files_and_no_litter(
    name: str, call: str, tmp_path: Path
) -> None:
    writer = WRITERS[name]
    for root, error in attempts(writer, call, errno.EIO, 1, tmp_path):
        version = writer.version_of(root)
        if error is None:  # the step was not needed for the result
            assert version == 2
        elif isinstance(error, FormatError):  # a file to read, before, or after to verify
            assert call == "open" and "cannot be opened: " in str(error)
            assert version in (1, 2)
        else:
            assert error.errno == errno.EIO and os.strerror(errno.EIO) in str(error)
            assert str(root) in str(error)
            assert version == (2 if "is written" in str(error) else 1)
        assert writer.litter(root) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["write", "replace", "unlink"])
@EVERY
def test_a_failure_that_stays_is_repaired_by_the_next_run(
    name: str, call: str, number: int, tmp_path: Path
) -> None:
    writer = WRITERS[name]
    for root, error in attempts(writer, call, number, 200, tmp_path):
        target = writer.target(root)
        if pending_journals(target):
            assert error is not None and ".aprfmt-journal-" in str(error)
            complete_renames(target)
        assert pending_journals(target) == []
        assert writer.version_of(root) in (1, 2)
        writer.write(root, 3)
        assert writer.version_of(root) == 3


@pytest.mark.parametrize("name", [n for n, writer in WRITERS.items() if writer.folder])
def test_an_exchange_that_fails_leaves_the_old_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = WRITERS[name]
    writer.prepare(tmp_path / "x")
    assert writer.version_of(tmp_path / "x") == 1  # which writes every version aside, once

    def refuse(a: Path, b: Path) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(atomic, "swap_names", refuse)
    with pytest.raises(OutputError, match="cannot be put in place"):
        writer.write(tmp_path / "x", 2)
    assert writer.version_of(tmp_path / "x") == 1
    assert writer.litter(tmp_path / "x") == []


def test_every_system_call_of_the_writing_modules_is_failed() -> None:
    """A call that is added there must be added to the lists of calls that fail and kill."""
    used: set[str] = set()
    for name in ("atomic", "journal", "output_file", "positional_io", "temporary_files"):
        text = (ROOT / "aprfmt" / "formats" / f"{name}.py").read_text()
        used |= set(re.findall(r"\bos\.([A-Za-z_]+)", text))
    unknown = {call for call in used - READING if not FLAGS.fullmatch(call)}
    unknown.remove("copy_file_range")  # of large files only: test_copied.py fails it
    unknown.remove("fchown")  # of files of another group only: test_atomic_races.py fails it
    assert unknown == {*STRICT, "close", "unlink", "rmdir"}
    assert unknown - {*CALLS} == set()


def test_a_fault_is_seen() -> None:
    """The fault itself works: the n-th call fails, the others do not."""
    real: Callable[..., Any] = os.getpid
    fault = Fault("getpid", 2, errno.EIO, 1)
    assert fault() == real()
    with pytest.raises(OSError):
        fault()
    assert fault() == real()
