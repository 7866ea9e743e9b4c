"""Fail the n-th system call, for every n: the old files stay whole and nothing is left behind."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aprfmt.errors import FormatError, OutputError
from aprfmt.formats.atomic import FileSet, complete_renames, pending_journals
from aprfmt.formats.temporary_files import temporary_name
from tests.formats.publishing import SCENARIOS, Scenario
from tests.formats.writers import Writer

STRICT = ("open", "write", "fsync", "fchmod", "mkdir", "chmod", "link", "replace", "rename")
MAX_CALLS = 200


class Fault:
    """Raises `number` from the n-th call on, `times` times; counts all calls."""

    def __init__(self, call: str, n: int, number: int, times: int) -> None:
        self.count = 0
        self._range = range(n, n + times)
        self._number = number
        self._real: Callable[..., Any] = getattr(os, call)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count in self._range:
            raise OSError(self._number, os.strerror(self._number))
        return self._real(*args, **kwargs)


def attempts(
    scenario: Scenario | Writer, call: str, number: int, times: int, tmp_path: Path
) -> list[tuple[Path, OutputError | FormatError | None]]:
    """Write version 2 over version 1 with a fault at every n; return the folders and the errors."""
    done: list[tuple[Path, OutputError | FormatError | None]] = []
    for n in range(1, MAX_CALLS):
        root = tmp_path / str(n)
        scenario.prepare(root)
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(call, n, number, times)
            patch.setattr(os, call, fault)
            error: OutputError | FormatError | None = None
            try:
                scenario.write(root, 2)
            except (OutputError, FormatError) as raised:  # FormatError: a source that is not read
                error = raised
        if fault.count < n:
            assert error is None
            assert scenario.version_of(root) == 2
            return done
        done.append((root, error))
    raise AssertionError(f"more than {MAX_CALLS} calls of os.{call}")


pytestmark = pytest.mark.usefixtures("notices")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fsync only be counted; what it does cannot be seen without a power cut."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.mark.parametrize("call", STRICT)
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_one_failure_leaves_the_old_files_and_no_litter(
    scenario: Scenario, call: str, tmp_path: Path
) -> None:
    for root, error in attempts(scenario, call, errno.EIO, 1, tmp_path):
        if error is None:  # the step was not needed for the result
            assert scenario.version_of(root) == 2
        else:
            assert str(root) in str(error) and os.strerror(errno.EIO) in str(error)
            assert isinstance(error, OutputError) and error.errno == errno.EIO
            assert scenario.version_of(root) == (2 if "is written" in str(error) else 1)
        assert scenario.litter(root) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("call", ["write", "replace", "fsync", "unlink", "link"])
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_failure_that_stays_is_repaired_by_the_next_run(
    scenario: Scenario, call: str, number: int, tmp_path: Path
) -> None:
    for root, error in attempts(scenario, call, number, MAX_CALLS, tmp_path):
        target = scenario.target(root)
        if pending_journals(target):
            assert error is not None and ".aprfmt-journal-" in str(error)
            complete_renames(target)
        assert pending_journals(target) == []
        assert scenario.version_of(root) in (1, 2)
        if error is not None:
            assert os.strerror(number) in str(error)
        scenario.write(root, 4)
        assert scenario.version_of(root) == 4


def test_without_hard_links_the_journal_stays_and_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = SCENARIOS["shards"]

    def no_link(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_link)
    stuck = 0
    for root, error in attempts(scenario, "replace", errno.EIO, 1, tmp_path):
        assert error is not None
        left = pending_journals(root)
        stuck += bool(left)
        assert left == [root / name for name in scenario.names(2) if left]
        complete_renames(root)
        assert scenario.version_of(root) == (2 if left else 1)
        assert scenario.litter(root) == []
    assert stuck == 3  # the first call is the journal's own


def test_full_disk(tmp_path: Path) -> None:
    # A limit on the size of files is the one full disk that needs no privileges.
    scenario = SCENARIOS["single"]
    scenario.prepare(tmp_path / "x")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with (
            pytest.raises(OutputError, match=r"m\.apr: cannot be written: .*ulimit -f") as caught,
            FileSet(force=True) as files,
        ):
            out = files.create(tmp_path / "x" / "m.apr")
            out.write(bytes(150_000))
            assert out.tell() == 150_000
            out.write(memoryview(bytes(150_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert scenario.version_of(tmp_path / "x") == 1
    assert scenario.litter(tmp_path / "x") == []


def test_a_swallowed_error_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.apr"
    path.write_bytes(b"old")
    with pytest.raises(OutputError, match="earlier write failed"), FileSet(force=True) as files:
        out = files.create(path)
        with monkeypatch.context() as patch, pytest.raises(OutputError):
            patch.setattr(os, "write", Fault("write", 1, errno.ENOSPC, 1))
            out.write(bytes(100_000))
        out.write(bytes(100_000))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["m.apr"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"schema":"aprfmt.journal/2","moves":[],"removes":[]}',
        '{"schema":"aprfmt.journal/1","moves":[["a","b"]],"removes":[]}',
        '{"schema":"aprfmt.journal/1","moves":[],"removes":["../precious"]}',
        '{"schema":"aprfmt.journal/1","moves":[],"removes":["/precious"]}',
        '{"schema":"aprfmt.journal/1","moves":[],"removes":[".."]}',
        '{"schema":"aprfmt.journal/1","moves":[["%s","../precious"]],"removes":[]}',
        '{"schema":"aprfmt.journal/1","moves":[["../%s","x"]],"removes":[]}',
        '{"schema":"aprfmt.journal/1","moves":[["%s"]],"removes":[]}',
        '{"schema":"aprfmt.journal/1","moves":[["%s",7]],"removes":[]}',
        '{"schema":"aprfmt.journal/1","moves":[],"removes":[],"files":[]}',
        '{"schema":"aprfmt.journal/1","moves":[],"removes":[],"files":{"a":1}}',
        '{"schema":"aprfmt.journal/1","moves":[],"removes":[],"signature":1}',
        "a link",
        "a folder",
        "a pipe",
    ],
)
def test_a_journal_of_somebody_else_reaches_nothing_outside(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "download"
    folder.mkdir()
    temporary = temporary_name("x")
    for precious in (tmp_path / "precious", folder / temporary):
        precious.write_bytes(b"kept")
    name = folder / ".aprfmt-journal-0123456789abcdef.json"
    if text == "a link":
        name.symlink_to(tmp_path / "precious")
    elif text == "a folder":
        name.mkdir()
    elif text == "a pipe":
        os.mkfifo(name)
    else:
        name.write_text(text.replace("%s", temporary))
    for refuse in (complete_renames, pending_journals):
        with pytest.raises(FormatError, match=str(name)):
            refuse(folder)
    with pytest.raises(FormatError, match=str(name)), FileSet() as files:
        files.create(folder / "new.gguf")
    assert (tmp_path / "precious").read_bytes() == b"kept"
    assert len(os.listdir(folder)) == 2
