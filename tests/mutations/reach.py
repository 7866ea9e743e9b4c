"""Which tests reach which block of the product: made by running them once, kept between runs."""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.mutation import Mutation
from tests.mutations.names import bound, mentioned, run_at_import, users
from tests.mutations.product import STATE, product, test_key, tests
from tests.mutations.source import Source
from tests.mutations.work import in_parallel
from tests.mutations.workcopy import WorkCopy

TOGETHER = 4  # test files of one process: starting one costs seconds, a crash loses all of them
LIMIT = 2400.0  # seconds of one such process
PRODUCT = "product.json"  # the files that were there when the map was begun
QUICK = 4.0  # seconds of tests in the first round, which ends most mutations ...
FEW = 4  # ... and the files they stand in
START = 0.05  # seconds a test costs beside its own


@dataclass(frozen=True, slots=True)
class Known:
    """A test that passes without a mutation; `blocks` is what it runs."""

    id: str
    seconds: float
    blocks: frozenset[int]

    @property
    def file(self) -> str:
        """The file it stands in."""
        return self.id.partition("::")[0]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tests of a mutation in the order of rounds; `left` reach it too and cost too much."""

    rounds: tuple[tuple[Known, ...], ...]
    left: int = 0

    @property
    def count(self) -> int:
        """How many run."""
        return sum(map(len, self.rounds))


class Reach:
    """The map, and the product and tests it is asked about."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / STATE / "map"
        self.sources = {
            name: Source(name, (root / name).read_text())
            for name in product(root)
            if name.endswith(".py")
        }
        self.texts = {name: (root / name).read_text() for name in tests(root)}
        self.tests: dict[str, Known] = {}
        self.unused: dict[str, str] = {}  # tests that failed or were skipped when the map was made
        self.known: set[str] = set()  # product files that were there when the map was begun
        self.load()

    def load(self) -> None:
        """Read what is there."""
        listed = self.folder / PRODUCT
        self.known = set(json.loads(listed.read_text())) if listed.is_file() else set()
        for path in sorted(self.folder.glob("tests+*.json")):
            found = json.loads(path.read_text())
            if found["file"] not in self.texts:
                continue
            blocks = found["blocks"]
            sets = [frozenset(blocks[i] for i in chosen) for chosen in found["sets"]]
            for name, (seconds, outcome, which) in found["tests"].items():
                if outcome == "passed":
                    self.tests[name] = Known(name, seconds, sets[which])
                else:
                    self.unused[name] = outcome

    def stale(self) -> list[str]:
        """Return the test files that changed since they were run, or never were."""
        old = []
        for name in self.texts:
            path = self._key(name)
            if not path.is_file() or path.read_text() != test_key(self.root, name):
                old.append(name)
        return old

    def _key(self, name: str) -> Path:
        return self.folder / f"{name.replace('/', '+')}.key"

    def make(self, place: Path, jobs: int, say: Callable[[str], None], *, afresh: bool) -> None:
        """Run the stale test files, or all of them, in traced copies below `place`."""
        if afresh:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / PRODUCT).is_file():
            (self.folder / PRODUCT).write_text(json.dumps(sorted(self.sources)))
        names = self.stale()
        if not names:
            return
        say(f"map: {len(names)} test files to run once, traced")
        copies: SimpleQueue[WorkCopy] = SimpleQueue()
        first = WorkCopy(self.root, place / "traced0")
        first.trace()
        for job in range(1, min(jobs, len(names))):
            copies.put(first.duplicate(place / f"traced{job}"))
        copies.put(first)
        groups = [names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)]
        for line in in_parallel(jobs, lambda group: self._run(group, copies), groups):
            say(line)
        self.load()

    def _run(self, names: Sequence[str], copies: "SimpleQueue[WorkCopy]") -> str:
        copy = copies.get()
        into = copy.place / "map"
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir()
        keys = {name: test_key(self.root, name) for name in names}
        ran = copy.pytest(names, {"mode": "map", "into": str(into)}, limit=LIMIT, keep=True)
        copies.put(copy)
        missing = []
        for name, key in keys.items():
            made = into / f"{name.replace('/', '+')}.json"
            if made.is_file():
                shutil.copyfile(made, self.folder / made.name)
                self._key(name).write_text(key)
            else:
                missing.append(name)
        lost = f"; NOT mapped: {', '.join(missing)}: {ran.said}" if missing else ""
        return f"map: {len(names) - len(missing)} files in {ran.seconds:.0f} s{lost}"

    # --- asking -----------------------------------------------------------------------------

    def covering(self, mutation: Mutation) -> list[Known]:
        """Return the tests that reach a mutation, in no particular order."""
        if mutation.tests:
            return [
                test
                for test in self.tests.values()
                if any(
                    fnmatch(test.id if "::" in glob else test.file, glob) for glob in mutation.tests
                )
            ]
        source = self.sources[mutation.path]
        block = source.block_at(mutation.start)
        every = {each.number for each in source.blocks}
        if block is not None:
            if block.function in run_at_import(source):  # by whichever test imports it first
                return self._reaching(every)
            same = {each.number for each in source.blocks if each.function == block.function}
            found = self._reaching({block.number}) or self._reaching(same)
        else:
            names = bound(source, mutation.start)
            by_name = mentioned(names, self.texts)
            reaching = {test.id for test in self._reaching(users(names, self.sources))}
            found = [t for t in self.tests.values() if t.id in reaching or t.file in by_name]
        # A file that runs as a script of its own is reached through whoever names it.
        by_file = {Path(mutation.path).stem}
        return found or self._reaching(every) or self._reaching(users(by_file, self.sources))

    def _reaching(self, blocks: set[int]) -> list[Known]:
        return [test for test in self.tests.values() if not blocks.isdisjoint(test.blocks)]

    def choose(self, mutation: Mutation, budget: float) -> Chosen:
        """Return the tests of a mutation within seconds: quick ones that are about it come first.

        A test is about a file if much of what it runs stands there. Variants of one test see
        mostly the same, so that each is ranked behind those before it.
        """
        source = self.sources.get(mutation.path)
        there = {block.number for block in source.blocks} if source else set[int]()
        ranked = []
        variants: Counter[str] = Counter()
        covering = self.covering(mutation)
        for test in sorted(covering, key=lambda test: test.seconds):
            about = len(test.blocks & there) / max(len(test.blocks), 1) + 0.005
            variants[test.id.partition("[")[0]] += 1
            cost = (test.seconds + START) * variants[test.id.partition("[")[0]] / about
            ranked.append((cost, test))
        rounds: tuple[list[Known], list[Known]] = ([], [])
        spent, files = 0.0, set[str]()
        for _, test in sorted(ranked, key=lambda row: (row[0], row[1].id)):
            if spent + test.seconds > budget and spent:
                continue
            spent += test.seconds
            quick = spent <= QUICK and (test.file in files or len(files) < FEW)
            files |= {test.file} if quick else set()
            rounds[not quick].append(test)
        count = sum(map(len, rounds))
        return Chosen(tuple(tuple(each) for each in rounds if each), len(covering) - count)


def unknown(reach: Reach, mutation: Mutation) -> str:
    """Say why the map cannot judge a mutation, "" where it can."""
    if mutation.tests or mutation.path in reach.known:
        return ""
    return f"the map was made before {mutation.path} was there; make it anew with --map"
