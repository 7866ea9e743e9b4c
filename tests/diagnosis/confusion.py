"""The confusion tables of the five sets of seeded faults, and every answer they are counted from.

python -m tests.diagnosis.confusion --write FILE          the tables and a line each, as a page
python -m tests.diagnosis.confusion --every 4 --set packed --set engines
python -m tests.diagnosis.confusion --json FILE           complete answers, to compare by machine
python -m tests.diagnosis.confusion --same-as FILE        exit 1 if an answer differs from FILE's

A change that must move no verdict is run before and after with the same `--every` and `--set`.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from aprfmt.diagnosis import Finding, diagnose
from aprfmt.errors import AprfmtError
from tests.causes.seeded import seeded
from tests.diagnosis.controls_tokens import CONTROLS_TOKENS
from tests.diagnosis.faults import ENGINES, FAULTS
from tests.diagnosis.faults_packed import PACKED_CONTROLS, PACKED_FAULTS
from tests.diagnosis.table import FLOAT32
from tests.field.rows import BY_NAME, ROWS
from tests.scope import chosen

_TOKENIZER = [fault.name for fault in (*seeded("tokenizer", "FILE_FAULTS"), *CONTROLS_TOKENS)]
_PACKED = [fault.name for fault in (*PACKED_FAULTS, *PACKED_CONTROLS)]
_ENGINES = [fault.name for fault in ENGINES]
_OTHER = {*_TOKENIZER, *_PACKED, *_ENGINES}
SETS: Mapping[str, Sequence[str]] = {
    "field": [row.name for row in ROWS],
    "faults": [name for name in FAULTS if name not in _OTHER],
    "tokenizer": _TOKENIZER,
    "packed": _PACKED,
    "engines": _ENGINES,
}
# Numbers of a complete answer have so many digits, and what is smaller is rounding: both are the
# processor's. Folders of a path are those of the run.
DIGITS, LEAST = 2, 2e-4
_NUMBER, _FOLDER = re.compile(r"-?\d+\.?\d*(?:e[-+]?\d+)?"), re.compile(r"/[^\s,:'\"]*/")


@dataclass(frozen=True)
class Row:
    """One answer: what was seeded, and what `diagnose` said of it.

    `named`, `confidences` and `where` are of the findings in their order; `digest` is the complete
    JSON of the answer. Frozen rows of the field are counted and not listed.
    """

    set: str
    name: str
    seeded: str
    verdict: str
    exit: int
    named: tuple[str, ...]
    confidences: tuple[str, ...]
    where: tuple[str, ...]
    complete: str
    frozen: bool
    digest: Any


def answered(task: tuple[str, str]) -> Row:
    """Return what `diagnose` says of one fault of a set."""
    import torch

    torch.set_num_threads(1)
    kind, name = task
    fault = BY_NAME[name] if kind == "field" else FAULTS[name]
    if kind == "field":
        seeded = BY_NAME[name].counted_as or "nothing wrong"
    else:
        seeded = (*FAULTS[name].causes, "none")[0]
    frozen = kind == "field" and BY_NAME[name].frozen
    a, b = fault.make()
    try:
        found = diagnose(str(a), str(b), **fault.options)
    except AprfmtError as error:
        said = f"error {type(error).__name__}"
        return Row(kind, name, seeded, said, 2, (), (), (), "", frozen, rounded(str(error)))
    return Row(
        kind, name, seeded, found.verdict, found.exit_code,
        tuple(row.cause or "unknown" for row in found.findings),
        tuple(row.confidence for row in found.findings),
        tuple(map(place_of, found.findings)),
        str(found.complete), frozen, rounded(found.to_json()),
    )  # fmt: skip


def rounded(value: Any) -> Any:
    """Return plain data with its numbers cut to DIGITS and without folders, also inside text."""
    if isinstance(value, float):
        return "rounding" if 0 < abs(value) < LEAST else f"{value:.{DIGITS}g}"
    if isinstance(value, str):
        return _NUMBER.sub(lambda found: str(rounded(float(found[0]))), _FOLDER.sub("", value))
    if isinstance(value, Mapping):
        return {str(key): rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value if value is None or isinstance(value, bool | int) else str(value)


def place_of(found: Finding) -> str:
    """Return where a finding is; "" where float32 runs are furthest apart by rounding alone."""
    rounding = (found.cause, found.level) == ("rounding", "forward")
    if rounding and (found.residual_before or 1) <= FLOAT32:
        return ""
    return ", ".join(found.where[:3])


def rows_of(tasks: Sequence[tuple[str, str]], jobs: int) -> Iterator[Row]:
    """Return the answers in order; each process uses one thread."""
    if jobs < 2:
        yield from map(answered, tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(answered, tasks, chunksize=4)


def table(rows: Sequence[Row]) -> str:
    """Return seeded against first named causes of one set, counted."""
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        first = row.named[0] if row.named else "none" if row.verdict == "same" else row.verdict
        said = first.replace("_comparable", " comparable")
        sure = f" {row.confidences[0]}" if row.confidences[:1] not in ((), ("confirmed",)) else ""
        counts.setdefault(row.seeded, Counter())[said + sure] += 1
    made = ["| seeded first | times | first named |", "| --- | --- | --- |"]
    for cause in sorted(counts):
        said = ", ".join(f"{name} {count}" for name, count in sorted(counts[cause].items()))
        made.append(f"| {cause} | {counts[cause].total()} | {said} |")
    return "\n".join(made)


def listing(rows: Sequence[Row]) -> str:
    """Return a line for each answer that may be looked at."""
    made = ["| row | seeded | verdict | exit | named | complete |",
            "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for row in rows:
        named = [
            f"{cause} ({sure}; {where})"
            for cause, sure, where in zip(row.named, row.confidences, row.where, strict=True)
        ]
        more = f"; {len(named) - 4} more" if len(named) > 4 else ""
        made.append(
            f"| {row.name} | {row.seeded} | {row.verdict} | {row.exit} | "
            f"{'; '.join(named[:4])}{more} | {row.complete} |"
        )
    return "\n".join(made)


def page(rows: Sequence[Row], every: int) -> str:
    """Return the page: a confusion table and the answers of each set."""
    part = "every row" if every == 1 else f"one row in {every}, chosen by the hash of its name"
    made = [
        "# Confusion tables\n",
        "What `diagnose` names for each seeded fault, by set: the field's own, files, tokenizers, "
        f"packed encodings, engines. Of each set {part}. Frozen rows of the field are counted "
        "and not listed. Written by `python -m tests.diagnosis.confusion "
        f"{f'--every {every} ' if every > 1 else ''}--write docs/notes/confusion.md`.\n",
    ]
    for name in SETS:
        own = [row for row in rows if row.set == name]
        if own:
            made += [f"## {name}: {len(own)}\n", table(own) + "\n"]
            made += [listing([row for row in own if not row.frozen]) + "\n"]
    return "\n".join(made).rstrip() + "\n"


def differences(before: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> list[str]:
    """Return a line for every answer that is not what it was, or was not asked before."""
    then = {(row["set"], row["name"]): row for row in before}
    found = []
    for row in rows:
        old = then.get((row.set, row.name))
        if old is None:
            found.append(f"{row.set}/{row.name}: not in the file")
            continue
        now = json.loads(json.dumps(asdict(row)))
        keys = [key for key in now if now[key] != old[key] and key != "digest"]
        if isinstance(now["digest"], dict) and isinstance(old["digest"], dict):
            keys += [f"digest.{key}" for key, value in now["digest"].items()
                     if old["digest"].get(key) != value]  # fmt: skip
        found += [f"{row.set}/{row.name}: {', '.join(keys)}"] if keys else []
    return found


def main(arguments: Sequence[str]) -> int:
    """Ask the rows that were asked for; return 1 if `--same-as` finds a difference."""
    options = parser().parse_args(arguments)
    tasks = [
        (kind, name)
        for kind, names in SETS.items()
        for name in names
        if kind in (options.set or SETS) and chosen(f"{kind}/{name}", options.every)
    ]
    rows = []
    for row in rows_of(tasks, options.jobs):
        print(f"{row.set:9} {row.name:36} {row.verdict:14} {', '.join(row.named)}", flush=True)
        rows.append(row)
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows]))
    if options.write:
        Path(options.write).parent.mkdir(parents=True, exist_ok=True)
        Path(options.write).write_text(page(rows, options.every))
    if options.same_as:
        found = differences(json.loads(Path(options.same_as).read_text()), rows)
        print("\n".join(found or [f"{len(rows)} answers are as they were"]))
        return 1 if found else 0
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the command's options."""
    made = argparse.ArgumentParser(
        prog="python -m tests.diagnosis.confusion", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--set", action="append", choices=list(SETS), help="may be repeated")
    made.add_argument("--every", type=int, default=1, metavar="N", help="one row in N")
    made.add_argument("--jobs", type=int, default=1, metavar="N", help="processes")
    made.add_argument("--json", metavar="FILE", help="write the complete answers")
    made.add_argument("--write", metavar="FILE", help="write the page")
    made.add_argument("--same-as", metavar="FILE", help="compare with a file of --json")
    return made


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
