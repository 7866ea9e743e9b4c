"""Judging mutations: the tests that reach one run in a copy that has it, until one fails."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from tests.mutations.mutation import Mutation
from tests.mutations.reach import Chosen, Known, Reach, unknown
from tests.mutations.results import Results, Verdict
from tests.mutations.work import in_parallel
from tests.mutations.workcopy import Ran, WorkCopy

BUDGET = 40.0  # seconds of tests, by what they take without a mutation
SLOWER = 6.0  # times what they should take, and ...
PATIENCE = 90.0  # ... seconds for the start, before a run is stopped
CLEARLY = 4.0  # a hang is one where the test ends so many times sooner without the mutation


def run(copy: WorkCopy, tests: Sequence[Known], *, to_the_end: bool = False) -> Ran:
    """Run tests in a copy, until the first failure."""
    files = list(dict.fromkeys(test.file for test in tests))
    task = {"mode": "judge", "tests": [test.id for test in tests]}
    extra = () if to_the_end else ("-x",)
    return copy.pytest(files, task, limit=limit(tests), extra=extra)


def limit(tests: Sequence[Known]) -> float:
    """Return after how many seconds a run of tests is stopped."""
    return PATIENCE + SLOWER * sum(test.seconds for test in tests)


def judge(copy: WorkCopy, mutation: Mutation, chosen: Chosen) -> Verdict:
    """Return how a mutation ends by the chosen tests."""
    if not chosen.count:
        return Verdict(mutation.id, "survived", how="no test reaches it")
    done = Verdict(mutation.id, "survived", left=chosen.left)
    if chosen.left:
        done = replace(done, how=f"{chosen.left} more tests reach it; a larger --budget runs them")
    stopped: tuple[Ran, Sequence[Known]] | None = None
    with copy.mutated(mutation) as built:
        if not built:
            return Verdict(mutation.id, "error", how="the kernels do not build with it")
        for tests in chosen.rounds:
            ran = run(copy, tests)
            done = replace(done, ran=done.ran + ran.ran, seconds=done.seconds + ran.seconds)
            if ran.code is None:
                stopped = ran, tests
            elif ran.code:
                return _ended(done, ran)
            if stopped:
                break
    return _hung(copy, done, *stopped) if stopped else done


def _ended(done: Verdict, ran: Ran) -> Verdict:
    """Read the exit code of a run that did not pass."""
    if ran.failed:
        return replace(done, ending="killed", by=ran.failed[0], how="")
    if ran.code is not None and ran.code < 0:
        return replace(done, ending="killed", by=ran.current, how=f"signal {-ran.code}")
    if ran.code == 2:
        return replace(done, ending="killed", by="", how="the tests cannot be imported")
    return replace(done, ending="error", how=f"pytest ended with {ran.code}: {ran.said}")


def _hung(copy: WorkCopy, done: Verdict, ran: Ran, tests: Sequence[Known]) -> Verdict:
    """Count a stopped run as a kill only where its last test ends well without the mutation."""
    last = [test for test in tests if test.id == ran.current]
    if not last:
        return replace(done, ending="error", how=f"stopped after {ran.seconds:.0f} s in no test")
    clean = run(copy, last)
    if clean.code == 0 and clean.seconds * CLEARLY < ran.seconds:
        return replace(done, ending="killed", by=ran.current, how="hangs")
    return replace(done, ending="error", how=f"stopped after {ran.seconds:.0f} s: {ran.current}")


class Session:
    """All that judging several mutations needs."""

    def __init__(
        self, reach: Reach, results: Results, budget: float, say: Callable[[str], None]
    ) -> None:
        self.reach = reach
        self.results = results
        self.budget = budget
        self.say = say
        self._copies: SimpleQueue[WorkCopy] = SimpleQueue()

    def start(self, place: Path, jobs: int) -> None:
        """Make the copies, one for each job."""

        def primed(job: int) -> WorkCopy:
            copy = WorkCopy(self.reach.root, place / f"job{job}")
            copy.prime()
            return copy

        for copy in in_parallel(jobs, primed, range(jobs)):
            self._copies.put(copy)

    def judge_all(self, mutations: Collection[Mutation]) -> None:
        """Judge mutations, and again those that only a test killed that fails without them too."""
        by_id = {mutation.id: mutation for mutation in mutations}
        todo = list(mutations)
        while todo:
            verdicts = list(in_parallel(self._copies.qsize(), self._one, todo))
            flaky = self._flaky({row.by for row in verdicts if row.ending == "killed"})
            for test in flaky:
                self.reach.unused[test] = "fails without a mutation"
                del self.reach.tests[test]
            todo = [by_id[row.id] for row in verdicts if row.by in flaky]

    def _one(self, mutation: Mutation) -> Verdict:
        why = unknown(self.reach, mutation)
        chosen = Chosen(()) if why else self.reach.choose(mutation, self.budget)
        copy = self._copies.get()
        try:
            row = Verdict(mutation.id, "error", how=why) if why else judge(copy, mutation, chosen)
        finally:
            self._copies.put(copy)
        of = self.results.of(mutation, row.by)
        row = replace(row, budget=self.budget, seconds=round(row.seconds, 1), of=of)
        self.results.put(row)
        self.say(line(row))
        return row

    def _flaky(self, killers: Collection[str]) -> set[str]:
        """Return those of the killing tests that fail in a copy without any mutation."""
        tests = [self.reach.tests[each] for each in sorted(killers) if each in self.reach.tests]
        if not tests:
            return set()
        copy = self._copies.get()
        ran = run(copy, tests, to_the_end=True)
        self._copies.put(copy)
        failed = set(ran.failed) | ({ran.current} if ran.code not in (0, 1) else set())
        self.say(f"{len(tests)} killing tests without a mutation: {len(failed)} fail")
        return failed & set(killers)


def line(row: Verdict) -> str:
    """Return a verdict on one line."""
    said = "; ".join(part for part in (row.by, row.how) if part)
    return f"{row.ending:9} {row.id}  {said}  ({row.ran} tests, {row.seconds:.0f} s)"
