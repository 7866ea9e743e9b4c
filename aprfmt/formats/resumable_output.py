"""Outputs that a stopped run leaves, and a later run continues.

The files grow in the hidden folder `.NAME.aprfmt-resume` beside the output, under their final
names; the journal `.NAME.aprfmt-resume.jsonl` says what they are and which tensors are whole:

    {"schema": "aprfmt.resume/1", "sources": {name: identity}, "plan": digest, "run": random}
    {"tensor": name, "crc": CRC-32, "counts": [changed, overflowed, underflowed]}
    {"moves": [[temporary name or "", final name, identity], ...]}

Each line ends with its "signature" by this user's key, and a journal with another line is refused:
whoever plants one could choose bytes of any CRC-32. A tensor is kept only where the bytes that lie
there have its checksum, and everything is verified before it is published.
A line that a kill cut short is no line. `moves` are written before the files are put in place, so
that a run that was killed there is told from one that was not.
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.base.crc import crc32
from aprfmt.errors import AprfmtError, FormatError, OutputError
from aprfmt.formats import bounded_json
from aprfmt.formats.atomic import FileSet, OutputFile
from aprfmt.formats.journal import complete_renames
from aprfmt.formats.output_file import take_mode
from aprfmt.formats.positional_io import read_at
from aprfmt.formats.signature import NO_KEY, is_owned_by_user, is_signed, key_path, sign
from aprfmt.formats.temporary_files import (
    as_output_error,
    delay_signals,
    is_temporary,
    open_locked,
    remove,
)
from aprfmt.remote.paths import is_address

SCHEMA = "aprfmt.resume/1"
SUFFIX = ".aprfmt-resume"
_MAX_LINE = 64 << 20  # the names of 100,000 shards
_MAX_JOURNAL = 1 << 30
_WINDOW = 4 << 20
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True)
class FinishedTensor:
    """A tensor that an earlier run wrote: its CRC-32, and how many values changed in it."""

    crc: int
    counts: tuple[int, int, int]


@dataclass(frozen=True)
class EarlierRun:
    """What an earlier run says of itself: its sources, its plan, its tensors, its last moves."""

    sources: Mapping[str, str]
    plan: str
    tensors: Mapping[str, FinishedTensor]
    moves: Sequence[tuple[str, str, str]]
    run: str  # which run began it: no line of another journal is signed for this one
    signed: bool  # all lines, by this user's key


def staging_folder(output: Path) -> Path:
    """Return the hidden folder in which an output grows that may be continued."""
    final = Path(os.path.realpath(output))
    return final.parent / f".{final.name}{SUFFIX}"


def parse_earlier_run(data: bytes, where: str) -> EarlierRun | None:
    """Return what a journal says; None where it has no whole first line. Raises FormatError."""
    lines = data.split(b"\n")[:-1]
    if not lines:
        return None
    head, signature = _line(lines[0], where)
    run = str(head.get("run", ""))
    signed = is_signed(SCHEMA, _payload(head, run), signature)
    sources: Any = head.get("sources")
    plan = head.get("plan")
    if head.get("schema") != SCHEMA or not isinstance(plan, str) or not _texts(sources):
        raise FormatError(
            f"{where}: its first line is not that of a journal of {SCHEMA}; remove it, and begin "
            "anew"
        )
    tensors: dict[str, FinishedTensor] = {}
    moves: list[tuple[str, str, str]] = []
    for line in lines[1:]:
        value, signature = _line(line, where)
        signed = signed and is_signed(SCHEMA, _payload(value, run), signature)
        if "moves" in value:
            moves = _moves(value["moves"], where)
        else:
            name, kept = _kept(value, where)
            tensors[name] = kept
    return EarlierRun(sources, plan, tensors, moves, run, signed)


def _line(line: bytes, where: str) -> tuple[dict[str, Any], object]:
    """Return a line's object, and its signature."""
    try:
        value = bounded_json.loads(line, where, max_bytes=_MAX_LINE, surrogates=True)
    except FormatError as error:
        raise FormatError(f"{error}; remove it, and begin anew") from None
    found = value if isinstance(value, dict) else {}
    signature = found.pop("signature", "")
    return found, signature


def _payload(value: Mapping[str, Any], run: str) -> bytes:
    return bounded_json.dumps([run, value]).encode("utf-8", "surrogateescape")


def _texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _kept(value: Mapping[str, Any], where: str) -> tuple[str, FinishedTensor]:
    name, crc, counts = value.get("tensor"), value.get("crc"), value.get("counts")
    if not (
        isinstance(name, str)
        and type(crc) is int
        and isinstance(counts, list)
        and len(counts) == 3
        and all(type(each) is int and each >= 0 for each in counts)
    ):
        raise FormatError(f"{where}: a line is not that of a tensor; remove it, and begin anew")
    return name, FinishedTensor(crc, (counts[0], counts[1], counts[2]))


def _moves(value: object, where: str) -> list[tuple[str, str, str]]:
    found = []
    for each in value if isinstance(value, list) else [None]:
        if (
            not isinstance(each, list)
            or len(each) != 3
            or not _all_text(each)
            or not _plain(each[1])
            or (each[0] and not is_temporary(each[0]))
        ):
            raise FormatError(f"{where}: its moves name no plain files; remove it, and begin anew")
        found.append((each[0], each[1], each[2]))
    return found


def _all_text(values: Sequence[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _plain(name: str) -> bool:
    return name not in ("", ".", "..") and os.path.basename(name) == name and "\0" not in name


class ResumableFile(OutputFile):
    """A file that may lie there already, whole or in part; what is written again is the same."""

    def open(self, old: os.stat_result | None) -> None:
        """Open the file as it lies there, or make it."""
        self.existed = old is not None
        mode = 0o666 if old is None else stat.S_IMODE(old.st_mode) & 0o777
        self._fd = _open_inside(self.temporary, os.O_RDWR | os.O_CREAT | _NO_FOLLOW, mode)
        facts = os.fstat(self._fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1 or not is_owned_by_user(facts):
            raise OutputError(
                f"{self.temporary}: is no regular file of this user with one name; remove it"
            )
        if old is not None:
            take_mode(self._fd, old)

    def passes(self, nbytes: int, crc: int) -> bool:
        """Go on behind the next bytes, if they are those of a CRC-32; say whether."""
        assert self._fd is not None
        self._flush()
        with self._errors("cannot be continued"):
            if os.fstat(self._fd).st_size < self._written + nbytes:
                return False
            found, at, end = 0, self._written, self._written + nbytes
            while at < end:
                piece = read_at(self._fd, min(_WINDOW, end - at), at)
                found = crc32(piece, found)
                at += len(piece)
            if found != crc:
                return False
            os.lseek(self._fd, end, os.SEEK_SET)
        self._written = end
        return True

    def abandon(self) -> None:
        """Close the file; what was given to it is written, as far as the system lets it."""
        if self._fd is not None and not self._failed:
            with suppress(OutputError):
                self._flush()
        super().abandon()

    def close(self) -> None:
        """Cut off what an earlier run had behind the end; sync and close."""
        if self._fd is not None and not self._failed:
            self._flush()
            with self._errors("cannot be written"):
                os.ftruncate(self._fd, self._written)
        super().close()


def _open_inside(path: Path, flags: int, mode: int) -> int:
    """Open a file of a folder that is no link, whatever comes in its place meanwhile."""
    directory = getattr(os, "O_DIRECTORY", None)
    if directory is None or os.open not in os.supports_dir_fd:
        return os.open(path, flags, mode)
    folder = os.open(path.parent, os.O_RDONLY | directory | _NO_FOLLOW)
    try:
        return os.open(path.name, flags, mode, dir_fd=folder)
    finally:
        os.close(folder)


class ResumableFileSet(FileSet):
    """A set of files that stays where it is when it is not published, to be continued.

    `begin` comes before the first file, `finish` after what was verified has been published.
    """

    def __init__(
        self,
        output: Path,
        *,
        force: bool = False,
        folder: Path | None = None,
        ours: Callable[[str], bool] = lambda name: False,
    ) -> None:
        super().__init__(force=force, folder=folder, ours=ours)
        self.output = output
        self.hidden = staging_folder(output)
        self.published = False  # an earlier run put everything in place
        self.tensors: Mapping[str, FinishedTensor] = {}  # what an earlier run says that it wrote
        self.kept = 0  # how many of them were right
        self._home = Path(os.path.realpath(folder)) if folder else self.hidden.parent
        self._journal = self.hidden.with_name(f"{self.hidden.name}.jsonl")
        self._log: int | None = None
        self._run = os.urandom(8).hex()
        self._worth = False  # there is something to continue

    def begin(self, sources: Mapping[str, str], plan: str) -> None:
        """Lock the journal and read it; OutputError where it is that of another conversion.

        `sources` are the files read, by name, with what changes when they do; `plan` is the digest
        of everything else that decides about the bytes.
        """
        parent = self.hidden.parent
        if is_address(self.output):
            raise OutputError(f"{self.output}: is an address; outputs are files on this machine")
        if not parent.is_dir():
            raise OutputError(f"{self.output}: there is no folder {parent}; make it first")
        if not sign(SCHEMA, b""):
            raise OutputError(f"{self.output}: --resume: {NO_KEY}; leave --resume out")
        with as_output_error(self.output, "cannot be continued"):
            log = self._open_journal(os.O_CREAT)
            try:
                self._log = log
                self._enter(self._read(log), sources, plan)
            except BaseException:
                self._log = None
                os.close(log)
                raise

    def _enter(self, begun: EarlierRun | None, sources: Mapping[str, str], plan: str) -> None:
        """Take over what an earlier run left, or begin the journal."""
        if begun is None:
            remove(self.hidden)
            self._add({"schema": SCHEMA, "sources": dict(sources), "plan": plan, "run": self._run})
            return
        if not begun.signed:
            raise OutputError(
                f"{self._journal}: is not signed by the key of this user ({key_path()}): it came "
                "with the folder, or another user wrote it; remove it to begin anew"
            )
        self._run = begun.run
        self._compare(begun, sources, plan)
        complete_renames(self._home if self._home.is_dir() else self.hidden.parent)
        self.published = self._settle(begun.moves)
        self.tensors, self._worth = begun.tensors, True

    def done(self, name: str, kept: FinishedTensor) -> None:
        """Note that a tensor is written."""
        self._worth = True
        self._add({"tensor": name, "crc": kept.crc, "counts": kept.counts})

    def reject(self) -> None:
        """Have what is staged removed, not continued: it is not what it ought to be."""
        self._worth = False

    def finish(self) -> None:
        """Remove the journal: everything is in place and right.

        It is locked again for that, and left where another run has it by now.
        """
        self.discard()
        with suppress(OSError, AprfmtError):
            log = self._open_journal(0)
            try:
                begun = self._read(log)
                if begun is not None and begun.run == self._run:
                    remove(self.hidden)
                    remove(self._journal)
            finally:
                os.close(log)

    def publish(self) -> None:
        """Put everything in place, unless an earlier run did."""
        if self.published:
            self._files = []
            return
        super().publish()
        self.published = True

    def discard(self) -> None:
        """Close everything; what can be continued stays, anything else is removed."""
        with delay_signals():
            for file in self._files:
                file.abandon()
            self._files = []
            log, self._log = self._log, None
            if log is not None:
                if not self._worth:
                    remove(self.hidden)
                    remove(self._journal)
                os.close(log)
            self._staging = None
            super().discard()

    def _new(self, path: Path, temporary: Path, final: Path) -> OutputFile:
        return ResumableFile(path, temporary, final)

    def _beside(self, path: Path) -> tuple[Path, os.stat_result | None]:
        found = super()._beside(path)
        self._make_hidden()
        return found

    def _stage(self, target: Path, old: os.stat_result | None) -> None:
        self._make_hidden()
        if old is not None:
            os.chmod(self.hidden, stat.S_IMODE(old.st_mode))

    def _prepare_folder(self, folder: Path) -> None:
        super()._prepare_folder(folder)
        if self._staging is None:
            raise OutputError(
                f"{folder}: is the working folder or a mount point, beside which nothing can grow; "
                "resume in a folder of its own"
            )

    def _make_hidden(self) -> None:
        with suppress(FileExistsError):
            os.mkdir(self.hidden)
        facts = os.lstat(self.hidden)
        if not stat.S_ISDIR(facts.st_mode) or not is_owned_by_user(facts):
            raise OutputError(f"{self.hidden}: is no folder of this user; remove it")
        self._staging = self.hidden

    def _swap(self, staging: Path, target: Path) -> bool:
        if self._folder is None:
            return False
        self._drop_others(staging)
        self._add(
            {"moves": [["", file.final.name, _identity(file.temporary)] for file in self._files]}
        )
        return super()._swap(staging, target)

    def _bring(self, target: Path, names: Sequence[str]) -> None:
        pairs = zip(names, self._files, strict=True)
        self._add(
            {"moves": [[name, file.final.name, _identity(file.temporary)] for name, file in pairs]}
        )
        super()._bring(target, names)

    def _drop_others(self, staging: Path) -> None:
        """Remove what an earlier run of another shape left, so that it is not published."""
        names = {file.final.name for file in self._files}
        for name in os.listdir(staging):
            if name not in names:
                remove(staging / name)

    def _settle(self, moves: Sequence[tuple[str, str, str]]) -> bool:
        """Say whether an earlier run put its files in place; take back those it only began with."""
        if moves and all(_identity(self._home / final) == found for _, final, found in moves):
            return True
        for temporary, final, found in moves:
            lying = self._home / temporary
            if temporary and _identity(lying) == found and self.hidden.is_dir():
                os.rename(lying, self.hidden / final)
        return False

    def _compare(self, begun: EarlierRun, sources: Mapping[str, str], plan: str) -> None:
        changed = [
            name
            for name in {**begun.sources, **sources}
            if begun.sources.get(name) != sources.get(name)
        ]
        todo = f"remove {self.hidden.name} and {self._journal.name} to begin anew"
        if changed:
            raise OutputError(
                f"{self.output}: cannot be continued: its source {changed[0]} has changed since it "
                f"was begun; {todo}"
            )
        if begun.plan != plan:
            raise OutputError(
                f"{self.output}: cannot be continued: it was begun with other options, or another "
                f"version; give the same ones, or {todo}"
            )

    def _open_journal(self, flags: int) -> int:
        """Return the journal, open and locked. Raises OutputError where another run has it."""
        flags |= os.O_RDWR | os.O_APPEND | _NO_FOLLOW
        log = open_locked(self._journal, lambda: os.open(self._journal, flags, 0o600), self._lock)
        assert log is not None
        return log

    def _lock(self, log: int) -> None:
        try:
            import fcntl

            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            return
        except BlockingIOError:
            raise OutputError(
                f"{self.output}: another run is writing it; wait for it or end it"
            ) from None
        except OSError:
            return  # a file system without locks

    def _read(self, log: int) -> EarlierRun | None:
        facts = os.fstat(log)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_JOURNAL:
            raise FormatError(f"{self._journal}: is no journal; remove it")
        data = read_at(log, facts.st_size, 0)
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.ftruncate(log, whole)
        return parse_earlier_run(data, str(self._journal))

    def _add(self, value: Mapping[str, Any]) -> None:
        if self._log is None:
            return
        value = {**value, "signature": sign(SCHEMA, _payload(value, self._run))}
        left = memoryview(bounded_json.dumps(value).encode("utf-8", "surrogateescape") + b"\n")
        with as_output_error(self._journal, "cannot be written"):
            while left:
                left = left[os.write(self._log, left) :]


def _identity(path: Path) -> str:
    """Return what identifies a file even after it was renamed; "" if the system has nothing."""
    try:
        facts = os.lstat(path)
    except OSError:
        return ""
    return f"{facts.st_dev}:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}"
