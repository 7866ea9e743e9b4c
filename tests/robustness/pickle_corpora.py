"""Reads the hostile pickles of other projects: nothing runs, nothing is imported, each is refused.

    python tests/robustness/pickle_corpora.py FOLDER...

A FOLDER is a copy of a project's repository, such as picklescan, fickling or modelscan. Every file
that is a pickle, a zip or of torch is opened as it is, and a pickle also as the `data.pkl` of an
archive of torch.save. An audit hook counts what would be an execution: an import, a process, a
socket, compiled code, a file opened for writing. Prints a table; exit 1 for any execution, for an
error that is none of ours, and for a file that takes more than 5 s of processor time.
"""

import io
import resource
import sys
import time
import zipfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aprfmt.errors import AprfmtError
from aprfmt.formats import open_source
from aprfmt.formats.mapped_file import BufferFile
from aprfmt.formats.pytorch import reader

ENDINGS = (
    ".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".dat", ".dill", ".joblib", ".npy", ".zip",
)  # fmt: skip
WATCHED = ("import", "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "os.fork",
           "subprocess.Popen", "socket.", "shutil.", "ctypes.dlopen", "webbrowser.")  # fmt: skip
MEMORY = 4 << 30
SECONDS = 5.0


class Watch:
    """Notes what happens between `start` and `stop` that reading a file must not do."""

    def __init__(self) -> None:
        """Install the audit hook, which cannot be removed."""
        self.active = False
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, given: tuple[object, ...]) -> None:
        """Note an event of the list, and files opened for writing."""
        if not self.active:
            return
        writes = event == "open" and len(given) > 1 and any(m in str(given[1]) for m in "wax+")
        if event.startswith(WATCHED) or (writes and given[1] is not None):
            self.seen.append(f"{event} {str(given)[:120]}")


def archive(data: bytes) -> bytes:
    """Return an archive of torch.save whose pickle is `data`."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", b"3\n")
        for key in range(4):
            file.writestr(f"archive/data/{key}", b"\0" * 64)
    return made.getvalue()


def read_all(path: Path) -> None:
    """Open a file with aprfmt and read every tensor."""
    with open_source(path) as source:
        for tensor in source.tensors.values():
            tensor.raw()


def read_wrapped(path: Path) -> None:
    """Read a file's bytes as the pickle of an archive of torch.save."""
    opened = reader.PickledFile(BufferFile(archive(path.read_bytes()), path))
    for tensor in opened.tensors.values():
        tensor.raw()


def main(folders: list[Path]) -> int:
    """Read every file of the folders; return 1 if anything ran."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    watch = Watch()
    bad = 0
    for folder in folders:
        files = sorted(one for one in folder.rglob("*") if one.is_file() and one.suffix in ENDINGS)
        # Once without counting, so that modules of our own are imported before.
        for counted in (False, True):
            said: Counter[str] = Counter()
            for path in files:
                for how, read in (("as it is", read_all), ("in an archive", read_wrapped)):
                    if how == "in an archive" and path.read_bytes()[:2] == b"PK":
                        continue
                    watch.seen.clear()
                    began = time.process_time()
                    watch.active = counted
                    try:
                        read(path)
                        answer = "read"
                    except (AprfmtError, OSError) as error:
                        answer = "refused"
                        if isinstance(error, OSError):
                            raise
                    except Exception as error:
                        answer = f"{type(error).__name__}: {str(error)[:80]}"
                        bad += counted
                    finally:
                        watch.active = False
                    if counted and watch.seen:
                        print(f"{path}, {how}: {watch.seen[0]}")
                        bad += 1
                    if time.process_time() - began > SECONDS:
                        print(f"{path}, {how}: {time.process_time() - began:.1f} s")
                        bad += counted
                    said[f"{how}: {answer}"] += 1
        print(f"{folder.name}: {len(files)} files; " + ", ".join(
            f"{count} {what}" for what, count in sorted(said.items())))  # fmt: skip
    print(f"{bad} executions, imports, other errors or slow files")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main([Path(one) for one in sys.argv[1:]]))
