"""Output files that a stopped run leaves incomplete, and a later run completes.

The files grow in the hidden folder `.NAME.aprfmt-resume` in the output's folder, under their
final names. The journal `.NAME.aprfmt-resume.jsonl` says what they are and which tensors are
complete:

    {"schema": "aprfmt.resume/1", "sources": {name: identity}, "plan": digest, "run": random}
    {"tensor": name, "crc": CRC-32, "counts": [changed, overflowed, underflowed]}
    {"moves": [[temporary name or "", final name, identity], ...]}

Each line ends with its "signature" by this user's key, and a journal with another line is
refused: whoever plants one could choose bytes of any CRC-32. A tensor is kept only where the
bytes in the file have its checksum, and everything is verified before it is published.

A line that a kill cut short is no line. `moves` are written before the files are put in place,
so that a run that was killed while doing so is told from one that was not.
"""

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aprfmt.base.crc import crc32
from aprfmt.errors import FormatError, OutputError
from aprfmt.formats import bounded_json
from aprfmt.formats.atomic import FileSet, OutputFile
from aprfmt.formats.journal import complete_renames, is_plain_name, reserved_names
from aprfmt.formats.output_file import copy_mode
from aprfmt.formats.positional_io import PLAIN_FILE, read_at
from aprfmt.formats.signature import NO_KEY, is_owned_by_user, is_signed, key_path, sign
from aprfmt.formats.temporary_files import (
    as_output_error,
    delay_signals,
    is_temporary,
    open_inside,
    open_locked,
    remove,
)
from aprfmt.remote.paths import is_address

SCHEMA = "aprfmt.resume/1"
SUFFIX = ".aprfmt-resume"
_MAX_LINE = 64 << 20  # the names of 100,000 shards
_MAX_JOURNAL = 1 << 30
_WINDOW = 4 << 20


@dataclass(frozen=True)
class FinishedTensor:
    """A tensor that an earlier run wrote: its CRC-32, and how many values changed in it.

    `counts` are (changed, overflowed, underflowed).
    """

    crc: int
    counts: tuple[int, int, int]


@dataclass(frozen=True)
class EarlierRun:
    """The parsed journal of an earlier run: its sources, plan, finished tensors and last moves."""

    sources: Mapping[str, str]
    plan: str
    tensors: Mapping[str, FinishedTensor]
    moves: Sequence[tuple[str, str, str]]
    run: str  # which run began it: no line of another journal is signed for this one
    signed: bool  # all lines, by this user's key


def staging_folder(output: Path) -> Path:
    """Return the hidden folder in which a resumable output is written."""
    final = Path(os.path.realpath(output))
    return final.parent / f".{final.name}{SUFFIX}"


def parse_earlier_run(data: bytes, where: str) -> EarlierRun | None:
    """Return the parsed journal of an earlier run; None if it has no complete first line.

    Raises FormatError for lines that are not those of a journal. `where` begins the messages.
    """
    lines = data.split(b"\n")[:-1]
    if not lines:
        return None
    head, signature = _parse_line(lines[0], where)
    run = str(head.get("run", ""))
    signed = is_signed(SCHEMA, _signed_payload(head, run), signature)
    sources: Any = head.get("sources")
    plan = head.get("plan")
    if head.get("schema") != SCHEMA or not isinstance(plan, str) or not _is_text_mapping(sources):
        raise FormatError(
            f"{where}: its first line is not that of a journal of {SCHEMA}; remove it, and begin "
            "anew"
        )
    # Further lines are finished tensors, and the moves before publishing.
    tensors: dict[str, FinishedTensor] = {}
    moves: list[tuple[str, str, str]] = []
    for line in lines[1:]:
        value, signature = _parse_line(line, where)
        signed = signed and is_signed(SCHEMA, _signed_payload(value, run), signature)
        if "moves" in value:
            moves = _parse_moves(value["moves"], where)
        else:
            name, kept = _parse_tensor_line(value, where)
            tensors[name] = kept
    return EarlierRun(sources, plan, tensors, moves, run, signed)


def _parse_line(line: bytes, where: str) -> tuple[dict[str, Any], object]:
    """Return (the JSON object of a line without its signature, the signature or "").

    Raises FormatError for a line that is not JSON or is too long.
    """
    try:
        value = bounded_json.loads(line, where, max_bytes=_MAX_LINE, surrogates=True)
    except FormatError as error:
        raise FormatError(f"{error}; remove it, and begin anew") from None
    found = value if isinstance(value, dict) else {}
    signature = found.pop("signature", "")
    return found, signature


def _signed_payload(value: Mapping[str, Any], run: str) -> bytes:
    """Return the bytes of a journal line that its signature covers: run and value as JSON."""
    return bounded_json.dumps([run, value]).encode("utf-8", "surrogateescape")


def _is_text_mapping(value: object) -> bool:
    """Return whether a value is a dict whose values are all texts."""
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def _parse_tensor_line(value: Mapping[str, Any], where: str) -> tuple[str, FinishedTensor]:
    """Return (tensor name, FinishedTensor) of a journal line; FormatError if it is not of one."""
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


def _parse_moves(value: object, where: str) -> list[tuple[str, str, str]]:
    """Return [(temporary name or "", final name, identity)] of a journal's moves.

    Raises FormatError unless all names are plain file names.
    """
    found = []
    for each in value if isinstance(value, list) else [None]:
        if (
            not isinstance(each, list)
            or len(each) != 3
            or not all(isinstance(value, str) for value in each)
            or not is_plain_name(each[1])
            or (each[0] and not is_temporary(each[0]))
        ):
            raise FormatError(f"{where}: its moves name no plain files; remove it, and begin anew")
        found.append((each[0], each[1], each[2]))
    return found


class ResumableFile(OutputFile):
    """An output file that may exist, whole or in part; a second run writes the same bytes."""

    def open(self, old: os.stat_result | None) -> None:
        """Open the staged file of an earlier run, or create it, with the mode of `old`.

        `old` is the file that the output replaces, or None. Sets `existed` to whether there is one.
        Raises OutputError for anything but a regular file of this user with one link.
        """
        self.existed = old is not None
        mode = 0o666 if old is None else stat.S_IMODE(old.st_mode) & 0o777
        self._fd = open_inside(self.temporary, os.O_RDWR | os.O_CREAT | PLAIN_FILE, mode)
        facts = os.fstat(self._fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1 or not is_owned_by_user(facts):
            raise OutputError(
                f"{self.temporary}: is no regular file of this user with one name; remove it"
            )
        if old is not None:
            copy_mode(self._fd, old)

    def skip_finished(self, nbytes: int, crc: int) -> bool:
        """Move past the next `nbytes` if they have the CRC-32 `crc`; return whether they have.

        False, and nothing moved, if the file is too short or its bytes are others.
        """
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
        """Close the file and leave it on disk, flushed as far as the system can."""
        if self._fd is not None and not self._failed:
            with suppress(OutputError):
                self._flush()
        super().abandon()

    def close(self) -> None:
        """Cut off what an earlier run had after the end; sync and close the file."""
        if self._fd is not None and not self._failed:
            self._flush()
            with self._errors("cannot be written"):
                os.ftruncate(self._fd, self._written)
        super().close()


class ResumableFileSet(FileSet):
    """A set of output files that stays on disk if it is not published, for a later run to complete.

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
        """Prepare the output `output`; the other arguments are those of FileSet."""
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
        self._continuable = False  # there is something to continue

    def begin(self, sources: Mapping[str, str], plan: str) -> None:
        """Lock the journal and read it; OutputError where it is that of another conversion.

        `sources` are the files read: name to identity, which changes when their bytes do. `plan` is
        the digest of everything else that decides about the output's bytes.
        """
        parent = self.hidden.parent
        if is_address(self.output):
            raise OutputError(f"{self.output}: is an address; outputs are files on this machine")
        if not parent.is_dir():
            raise OutputError(f"{self.output}: there is no folder {parent}; make it first")
        if not sign(SCHEMA, b""):
            raise OutputError(f"{self.output}: --resume: {NO_KEY}; leave --resume out")
        # The journal is the lock: it is opened, locked, then read.
        with as_output_error(self.output, "cannot be continued"):
            log = self._open_journal(os.O_CREAT)
            try:
                self._log = log
                self._adopt_earlier_run(self._read_journal(log), sources, plan)
            except BaseException:
                self._log = None
                os.close(log)
                raise

    def _adopt_earlier_run(
        self, begun: EarlierRun | None, sources: Mapping[str, str], plan: str
    ) -> None:
        """Take over what the journal `begun` says; None: write a new journal's first line.

        Sets `published` and `tensors`. Raises OutputError if the journal is unsigned or of another
        conversion.
        """
        if begun is None:
            remove(self.hidden)
            self._add_line(
                {"schema": SCHEMA, "sources": dict(sources), "plan": plan, "run": self._run}
            )
            return
        if not begun.signed:
            raise OutputError(
                f"{self._journal}: is not signed by the key of this user ({key_path()}): it came "
                "with the folder, or another user wrote it; remove it to begin anew"
            )
        self._run = begun.run
        self._refuse_other_conversion(begun, sources, plan)
        complete_renames(self._home if self._home.is_dir() else self.hidden.parent)
        self.published = self._settle_moves(begun.moves)
        self.tensors, self._continuable = begun.tensors, True

    def done(self, name: str, tensor: FinishedTensor) -> None:
        """Record in the journal that a tensor is written completely."""
        self._continuable = True
        self._add_line({"tensor": name, "crc": tensor.crc, "counts": tensor.counts})

    def reject(self) -> None:
        """Mark the staged files as wrong, so that `discard` removes them."""
        self._continuable = False

    def finish(self) -> None:
        """Remove the journal and the hidden folder: everything is in place and verified.

        The journal was locked all the time, so that no other run could take the output for that of
        a run that was killed. Without file locks the journal of another run is left.
        """
        with suppress(OSError), delay_signals():
            if self._log is not None and os.path.samestat(
                os.fstat(self._log), os.lstat(self._journal)
            ):
                remove(self.hidden)
                remove(self._journal)
        self.discard()
        self.release()

    def release(self) -> None:
        """Close the journal, so that another run may have it."""
        log, self._log = self._log, None
        if log is not None:
            os.close(log)

    def publish(self) -> None:
        """Rename all files to their final names, unless an earlier run did."""
        if self.published:
            self._files = []
            return
        super().publish()
        self.published = True

    def discard(self) -> None:
        """Close all files; keep the journal and the folder if a later run can use them.

        What is published keeps the lock on the journal until `finish` or `release`.
        """
        with delay_signals():
            for file in self._files:
                file.abandon()
            self._files = []
            if self._log is not None and not self.published:
                if not self._continuable:
                    remove(self.hidden)
                    remove(self._journal)
                self.release()
            self._staging = None
            super().discard()

    def _new_file(self, path: Path, temporary: Path, final: Path) -> OutputFile:
        """Return a new ResumableFile."""
        return ResumableFile(path, temporary, final)

    def _prepare_file(self, path: Path) -> tuple[Path, os.stat_result | None]:
        """Make the hidden folder; return (path, status of the file that is replaced or None)."""
        found = super()._prepare_file(path)
        self._make_hidden_folder()
        return found

    def _make_staging_folder(self, target: Path, old: os.stat_result | None) -> None:
        """Make the hidden folder the staging folder, with the mode of the replaced folder.

        `old` is the status of that folder, or None. `target` is not used: the hidden folder is
        fixed.
        """
        self._make_hidden_folder()
        if old is not None:
            os.chmod(self.hidden, stat.S_IMODE(old.st_mode))

    def _prepare_folder(self, folder: Path) -> None:
        """Prepare the output folder; OutputError where nothing can be staged."""
        super()._prepare_folder(folder)
        if self._staging is None:
            raise OutputError(
                f"{folder}: is the working folder or a mount point, next to which nothing can "
                "grow; resume in a separate folder"
            )

    def _make_hidden_folder(self) -> None:
        """Make the hidden folder if missing and stage in it; OutputError if it is not ours."""
        with suppress(FileExistsError):
            os.mkdir(self.hidden)
        facts = os.lstat(self.hidden)
        if not stat.S_ISDIR(facts.st_mode) or not is_owned_by_user(facts):
            raise OutputError(f"{self.hidden}: is no folder of this user; remove it")
        self._staging = self.hidden

    def _swap_folder(self, staging: Path, target: Path) -> bool:
        """Exchange the staged folder for the output folder; return whether that was possible.

        False for a set that does not make a whole folder. Before the exchange, files of other runs
        are removed and the moves are written to the journal.
        """
        if self._folder is None:
            return False
        self._drop_others(staging)
        self._add_line(
            {
                "moves": [
                    ["", file.final.name, _renamed_identity(file.temporary)] for file in self._files
                ]
            }
        )
        return super()._swap_folder(staging, target)

    def _move_into_target(self, target: Path, names: Sequence[str]) -> None:
        """Write the moves to the journal, then move the staged files into `target`."""
        pairs = zip(names, self._files, strict=True)
        self._add_line(
            {
                "moves": [
                    [name, file.final.name, _renamed_identity(file.temporary)]
                    for name, file in pairs
                ]
            }
        )
        super()._move_into_target(target, names)

    def _publish_inside(self, target: Path) -> None:
        """Publish into an existing folder; where that is refused, take the staged files back.

        Raises OutputError as the base class does. Files that a journal of renames still needs, or
        that its way back has removed, stay as they are.
        """
        try:
            super()._publish_inside(target)
        except BaseException:
            needed = reserved_names(target)
            for file in self._files:
                moved = file.temporary
                if needed is not None and moved.parent == target and moved.name not in needed:
                    with suppress(OSError):
                        os.rename(moved, self.hidden / file.final.name)
            raise

    def _drop_others(self, staging: Path) -> None:
        """Remove staged files that are no output of this run, so that they are not published."""
        names = {file.final.name for file in self._files}
        for name in os.listdir(staging):
            if name not in names:
                remove(staging / name)

    def _settle_moves(self, moves: Sequence[tuple[str, str, str]]) -> bool:
        """Return whether an earlier run gave all its files their final names.

        If it moved only some, those that still have temporary names go back to the hidden folder.
        """
        if moves and all(
            _renamed_identity(self._home / final) == found for _, final, found in moves
        ):
            return True
        for temporary, final, found in moves:
            staged = self._home / temporary
            if temporary and _renamed_identity(staged) == found and self.hidden.is_dir():
                os.rename(staged, self.hidden / final)
        return False

    def _refuse_other_conversion(
        self, begun: EarlierRun, sources: Mapping[str, str], plan: str
    ) -> None:
        """Raise OutputError if the earlier run had other sources or another plan."""
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
        flags |= os.O_RDWR | os.O_APPEND | PLAIN_FILE
        log = open_locked(self._journal, lambda: os.open(self._journal, flags, 0o600), self._lock)
        assert log is not None
        return log

    def _lock(self, log: int) -> None:
        """Lock the journal; OutputError if another run has it; nothing without file locks."""
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

    def _read_journal(self, log: int) -> EarlierRun | None:
        """Return the parsed journal, None if it is empty; cuts off a half-written line.

        Raises FormatError for something that is not a journal: no regular file, or too large.
        """
        facts = os.fstat(log)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > _MAX_JOURNAL:
            raise FormatError(f"{self._journal}: is no journal; remove it")
        data = read_at(log, facts.st_size, 0)
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            os.ftruncate(log, whole)
        return parse_earlier_run(data, str(self._journal))

    def _add_line(self, value: Mapping[str, Any]) -> None:
        """Append a signed line to the journal; nothing without an open journal."""
        if self._log is None:
            return
        value = {**value, "signature": sign(SCHEMA, _signed_payload(value, self._run))}
        left = memoryview(bounded_json.dumps(value).encode("utf-8", "surrogateescape") + b"\n")
        with as_output_error(self._journal, "cannot be written"):
            while left:
                left = left[os.write(self._log, left) :]


def _renamed_identity(path: Path) -> str:
    """Return device, inode, size and time of change of a file, which renaming does not change.

    "" if there is no file.
    """
    try:
        facts = os.lstat(path)
    except OSError:
        return ""
    return f"{facts.st_dev}:{facts.st_ino}:{facts.st_size}:{facts.st_mtime_ns}"
