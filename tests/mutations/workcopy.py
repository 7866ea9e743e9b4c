"""A copy of the checkout in which mutations are made and tests run; the checkout is only read."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutations.instrument import instrumented
from tests.mutations.mutation import Mutation
from tests.mutations.product import NATIVE, StoppedError, files, product
from tests.mutations.source import Source
from tests.mutations.work import wait

KERNELS = "_kernels*.so"
SEED = "0"  # of hypothesis: the same examples with the mutation and without
_PYTEST = ("-m", "pytest", "-q", "-p", "tests.mutations.plugin", "-p", "no:cacheprovider",
           f"--hypothesis-seed={SEED}", "--no-header", "-rN", "--tb=line")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run of pytest ended.

    `code` is None where it was stopped for its time. `failed` are the tests that failed,
    `current` the one that was running at the end, `said` the last lines it printed.
    """

    code: int | None
    seconds: float
    failed: Sequence[str] = ()
    current: str = ""
    ran: int = 0
    said: str = ""


class WorkCopy:
    """One copy in a folder of its own, with its kernels built."""

    def __init__(self, checkout: Path, place: Path) -> None:
        self.checkout = checkout
        self.place = place
        self.root = place / "copy"
        self.seen = self.root / ".seen"
        for name in files(checkout):
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, target, follow_symlinks=False)
        self._clean_kernels()

    def duplicate(self, place: Path) -> "WorkCopy":
        """Return a second copy below `place` with the same files, those of a traced copy too.

        Writing the numbers of all blocks takes a process seconds: it is done once for all copies.
        """
        second = copy(self)
        second.place, second.root = place, place / self.root.name
        second.seen = second.root / self.seen.name
        shutil.copytree(self.root, second.root, symlinks=True)
        return second

    def _clean_kernels(self) -> None:
        """Take the checkout's built kernels where they are newer than every source, else build."""
        sources = [name for name in product(self.checkout) if name.endswith(NATIVE)]
        newest = max(((self.checkout / name).stat().st_mtime for name in sources), default=0.0)
        built = [path for path in kernels(self.checkout) if path.stat().st_mtime > newest]
        for path in built:
            shutil.copy2(path, self.root / path.relative_to(self.checkout))
        if sources and not built and not self.build():
            raise StoppedError("the C kernels cannot be built; install a C compiler")

    def build(self) -> bool:
        """Build the C kernels anew; False where the compiler refuses."""
        for path in kernels(self.root):
            path.unlink()
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        done = subprocess.run(command, cwd=self.root, capture_output=True, check=False)
        return done.returncode == 0 and bool(kernels(self.root))

    def prime(self) -> None:
        """Compile everything once, as the mutated runs write no compiled files."""
        done = self.pytest((), {"mode": "none"}, limit=1200, extra=("--collect-only",), keep=True)
        if done.code:
            raise StoppedError(f"the tests cannot be collected: {done.said}; mend that first")

    def trace(self) -> None:
        """Make this the traced copy: every block of the product says its number."""
        for name in product(self.checkout):
            if name.endswith(".py"):
                path = self.root / name
                path.write_text(instrumented(Source(name, path.read_text())))
        shutil.copy2(Path(__file__).with_name("seen.py"), self.root / "aprfmt" / "_seen.py")
        self.seen.mkdir()

    @contextlib.contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[bool]:
        """Make the mutation for a while; gives False where a kernel does not build with it."""
        path = self.root / mutation.path
        clean, stat = path.read_text(), path.stat()
        native = path.suffix in NATIVE
        built = {each: each.read_bytes() for each in kernels(self.root)} if native else {}
        try:
            path.write_text(mutation.applied(clean))
            for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
                compiled.unlink()
            yield self.build() if native else True
        finally:
            path.write_text(clean)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            for each, data in built.items():
                each.unlink(missing_ok=True)
                each.write_bytes(data)
                each.chmod(0o755)

    def pytest(
        self,
        where: Sequence[str],
        task: Mapping[str, Any],
        *,
        limit: float,
        extra: Sequence[str] = (),
        keep: bool = False,
    ) -> Ran:
        """Run pytest on some files with a task for the plugin; stopped after `limit` seconds.

        `keep` lets it write compiled files, which only a run without a mutation may.
        """
        told, said = self.place / "task.json", self.place / "said.json"
        told.write_text(json.dumps({**task, "said": str(said), "seen": str(self.seen)}))
        said.unlink(missing_ok=True)
        examples = self.place / "examples"
        shutil.rmtree(examples, ignore_errors=True)
        command = [sys.executable, *_PYTEST, *extra, *where]
        began = time.monotonic()
        with (self.place / "output").open("w+b") as output:
            child = subprocess.Popen(
                command,
                cwd=self.root,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=self._environment(told, examples, keep=keep),
            )
            code = wait(child, limit)
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
        found = json.loads(said.read_text()) if said.is_file() else {}
        return Ran(code, time.monotonic() - began, **found, said=" / ".join(lines[-3:]))

    def _environment(self, told: Path, examples: Path, *, keep: bool) -> dict[str, str]:
        temporary = self.place / "tmp"
        temporary.mkdir(exist_ok=True)
        return {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "" if keep else "1",
            "APRFMT_MUTATIONS": str(told),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(examples),
            "PYTEST_DEBUG_TEMPROOT": str(temporary),
            "OMP_NUM_THREADS": "1",
        }


def kernels(root: Path) -> list[Path]:
    """Return the built kernels of a checkout."""
    return sorted((root / "aprfmt").rglob(KERNELS))
