"""`python -m tests.field`: every row diagnosed once, a line each, then counts and the matrix.

python -m tests.field --open              the open rows
python -m tests.field --frozen --write    the frozen ones, and their matrix into the page
python -m tests.field --all --jobs 2 --json answers.json
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from tests.diagnosis.table import END, PAGE, START
from tests.field.judge import Answer, counts, counts_table, matrix, measured
from tests.field.row import Row
from tests.field.rows import BY_NAME, FROZEN, OPEN, ROWS

NAME = "field"


def main(arguments: Sequence[str]) -> int:
    """Run the rows that were asked for; return 0 if all are answered as they should be."""
    options = parser().parse_args(arguments)
    rows: Sequence[Row] = ROWS if options.all else FROZEN if options.frozen else OPEN
    if options.only:
        rows = [row for row in rows if row.name in options.only]
    if options.write and (not options.frozen or options.only):
        print("--write takes --frozen, all of it", file=sys.stderr)
        return 2
    if not rows:
        print("no such row: see tests/field/open_*.py", file=sys.stderr)
        return 2
    answers = []
    for answer in answered([row.name for row in rows], options.jobs):
        print(line(answer), flush=True)
        answers.append(answer)
    print()
    for name, count in counts(answers).items():
        print(f"{count:5} {name}")
    print(f"\n{matrix(answers)}")
    if options.json:
        Path(options.json).write_text(
            json.dumps([answer.to_json() for answer in answers], indent=1)
        )
    if options.write:
        write(answers)
    good = all(answer.right if answer.kind == "control" else answer.whole for answer in answers)
    return 0 if good else 1


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    made = argparse.ArgumentParser(prog="python -m tests.field", description=__doc__)
    which = made.add_mutually_exclusive_group()
    which.add_argument("--open", action="store_true", help="the open rows (the default)")
    which.add_argument("--frozen", action="store_true", help="the frozen rows")
    which.add_argument("--all", action="store_true", help="both")
    made.add_argument("--only", action="append", metavar="NAME", help="one row; may be repeated")
    made.add_argument("--json", metavar="FILE", help="write the answers")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    made.add_argument("--write", action="store_true", help="the matrix into docs/notes/faults.md")
    return made


def answered(names: Sequence[str], jobs: int) -> Iterator[Answer]:
    """Return the answers in order; each process uses one thread."""
    if jobs < 2:
        yield from map(measured, names)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(measured, names)


def line(answer: Answer) -> str:
    """Return a row's line: what is right of it, what was expected and what came."""
    row = BY_NAME[answer.name]
    marks = "".join(
        letter if good else "-"
        for letter, good in (("r", answer.right), ("p", answer.placed), ("c", answer.confirmed))
    )
    wanted = " + ".join(cause.names[0] for cause in row.causes) or "nothing"
    got = ", ".join(answer.named) or answer.says[:80] or "nothing"
    wrong = f"  WRONG {', '.join(answer.wrong)}" if answer.wrong else ""
    alarm = "  ALARM" if answer.alarm else ""
    return (
        f"{marks} {answer.name:32} {row.verdicts[0]}: {wanted} | {answer.verdict}: {got} "
        f"({answer.confidence or '-'}; {', '.join(answer.where) or '-'}) exit {answer.exit_code}"
        f"{wrong}{alarm}  {answer.seconds:.1f} s"
    )


def write(answers: Sequence[Answer]) -> None:
    """Write counts and matrix into docs/notes/faults.md, between the markers."""
    page = PAGE.read_text()
    start, end = START.format(NAME), END.format(NAME)
    head, tail = page[: page.index(start) + len(start)], page[page.index(end) :]
    PAGE.write_text(f"{head}\n{counts_table(answers)}\n\n{matrix(answers)}\n{tail}")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
