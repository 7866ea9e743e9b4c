"""`python -m tests.mutations`: do the tests notice what small mistakes in the product do?

    python -m tests.mutations                     all mutations, continuing where a run stopped
    python -m tests.mutations --only ID ... --budget 600
    python -m tests.mutations --fresh 200         one in each of so many functions, by a new seed
    python -m tests.mutations --list
    python -m tests.mutations --report

Exit code 0: every mutation is killed, or its row in docs/notes/mutations.md says why no test can.
1: one survived, or a row has no place any more. 2: it could not be done.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.mutations import judge
from tests.mutations.draw import COUNT, SEED, drawn, one_of_each
from tests.mutations.hand import ROWS
from tests.mutations.mutation import Gone, Mutation, placed
from tests.mutations.product import ROOT, StoppedError, commit_seed, product
from tests.mutations.reach import Reach
from tests.mutations.report import report
from tests.mutations.results import Results


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Do what the command line says and return the exit code."""
    options = _parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _run(options, root)
    except KeyboardInterrupt:
        print("tests.mutations: stopped; run it again and it goes on", file=sys.stderr)
        return 130
    except StoppedError as error:
        print(f"tests.mutations: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--hand", action="store_true", help="only those written by hand")
    parser.add_argument("--drawn", action="store_true", help="only those drawn by the seed")
    parser.add_argument(
        "--fresh", type=int, metavar="N",
        help="one in each of N functions, by the seed of the last commit or --seed",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="ID", help="only these")
    parser.add_argument("--list", action="store_true", help="name them and what they mean")
    parser.add_argument("--report", action="store_true", help="say what is known; run nothing")
    parser.add_argument("--map", action="store_true", help="make the map of tests anew, first")
    parser.add_argument("--map-only", action="store_true", help="bring the map up to date, no more")
    parser.add_argument("--jobs", type=int, default=2, help="processes side by side")
    parser.add_argument(
        "--budget", type=float, default=judge.BUDGET, help="seconds of tests for one mutation"
    )
    parser.add_argument("--count", type=int, default=COUNT, help="how many are drawn")
    parser.add_argument("--seed", type=int, help="the seed of what is drawn")
    parser.add_argument("--again", action="store_true", help="forget earlier verdicts")
    return parser


def _run(options: argparse.Namespace, root: Path) -> int:
    reach = Reach(root)
    chosen = _chosen(options, root, reach)
    mutations = [each for each in chosen if isinstance(each, Mutation)]
    if options.list:
        for each in chosen:
            place = f"{each.path}: {each.means}" if isinstance(each, Mutation) else each.why
            print(f"{each.id}  {place}")
        return 0
    results = Results(root)
    todo = [each for each in mutations if options.again or not results.get(each, options.budget)]
    if not options.report:
        with tempfile.TemporaryDirectory(prefix="aprfmt-mutations-") as folder:
            reach.make(Path(folder), options.jobs, _say, afresh=options.map)
            if options.map_only:
                return 0
            if todo:
                session = judge.Session(reach, results, options.budget, _say)
                session.start(Path(folder), min(options.jobs, len(todo)))
                session.judge_all(todo)
    return report(root, chosen, results, options.budget)


def _chosen(options: argparse.Namespace, root: Path, reach: Reach) -> list[Mutation | Gone]:
    """Return the mutations that the options name."""
    texts = {name: (root / name).read_text() for name in product(root)}
    chosen: list[Mutation | Gone] = []
    if options.fresh:
        seed = commit_seed(root) if options.seed is None else options.seed
        _say(f"seed {seed}")
        return [*one_of_each(list(reach.sources.values()), options.fresh, seed)]
    seed = SEED if options.seed is None else options.seed
    if options.hand or not options.drawn:
        chosen += placed(ROWS, texts)
    if options.drawn or not options.hand:
        chosen += drawn(list(reach.sources.values()), options.count, seed)
    if options.only:
        missing = set(options.only) - {each.id for each in chosen}
        if missing:
            raise StoppedError(f"no such mutation: {', '.join(sorted(missing))}; see --list")
        chosen = [each for each in chosen if each.id in options.only]
    return chosen


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
