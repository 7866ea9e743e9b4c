"""Every fault diagnosed once, and the tables of docs/notes/faults.md made from the answers.

`python -m tests.diagnosis.table` writes them anew, `--only NAME` diagnoses these alone and leaves
the lines of the others as they are.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from aprfmt.causes import CAUSES
from aprfmt.diagnosis import Diagnosis, diagnose
from tests.diagnosis.fault import Fault
from tests.diagnosis.faults import CONTROLS, ENGINES, FAULTS, FILES, ROOT

PAGE = ROOT / "docs" / "notes" / "faults.md"
FLOAT32 = 1e-5  # where runs in float32 are furthest apart, as that is: another point by processor
START, END = "<!-- table: {} -->", "<!-- end: {} -->"


@cache
def answer(name: str) -> Diagnosis:
    """Return what `diagnose` says of a fault."""
    fault = FAULTS[name]
    a, b = fault.make()
    return diagnose(str(a), str(b), **fault.options)


def row(fault: Fault, found: Diagnosis) -> str:
    """Return a fault's line: what was broken, and what was said of it."""
    named = list(dict.fromkeys(finding.cause for finding in found.findings))
    lead = found.lead
    where = ", ".join(lead.where[:1]) if lead is not None else ""
    if lead is not None and (lead.cause, lead.level) == ("rounding", "forward"):
        where = where if (lead.residual_before or 1) > FLOAT32 else ""
    also = f" or {', '.join(lead.also)}" if lead is not None and lead.also else ""
    numbers = ", ".join(map(str, fault.upstream))
    seeded = ", ".join(fault.causes) or "none"
    return (
        f"| {fault.name} | {fault.base} | {fault.says} | {numbers} | {seeded} | {found.verdict} | "
        f"{(', '.join(named) or found.cause or '-') + also} | {found.confidence} | {where} |"
    )


HEAD = (
    "| fault | model | what is broken | upstream | seeded | verdict | named | confidence | "
    "where |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def listing(faults: Iterable[Fault], held: Mapping[str, str]) -> str:
    """Return the table of some faults; a line that is `held` is not made anew."""
    lines = [held.get(fault.name) or row(fault, answer(fault.name)) for fault in faults]
    return "\n".join([HEAD, *lines])


def cells(line: str) -> list[str]:
    """Return a table line's cells."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def confusion(lines: Sequence[str]) -> str:
    """Return seeded against named causes, counted over listed lines; every seeded one has a row."""
    counts: dict[str, dict[str, int]] = {cause: {} for cause in sorted(CAUSES)}
    for line in lines:
        _, _, _, _, seeded, verdict, named, *_ = cells(line)
        first = seeded.split(", ")[0]
        said = (
            "not comparable" if verdict == "not_comparable" else named.split(",")[0].split(" ")[0]
        )
        counts[first][said] = counts[first].get(said, 0) + 1
    made = ["| seeded first | times | first named |", "| --- | --- | --- |"]
    for cause, found in counts.items():
        if not found:
            continue
        said = ", ".join(f"{name} {count}" for name, count in sorted(found.items()))
        made.append(f"| {cause} | {sum(found.values())} | {said or '-'} |")
    return "\n".join(made)


KINDS: Mapping[str, Sequence[Fault]] = {"engines": ENGINES, "files": FILES, "controls": CONTROLS}


def parts(held: Mapping[str, str]) -> dict[str, str]:
    """Return every generated part of the page by name."""
    made = {name: listing(faults, held) for name, faults in KINDS.items()}
    lines = [line for text in made.values() for line in text.splitlines()[2:]]
    return made | {"confusion": confusion(lines)}


def between(page: str, name: str) -> str:
    """Return a generated part as the page has it."""
    start, end = START.format(name), END.format(name)
    return page[page.index(start) + len(start) : page.index(end)].strip()


def main() -> None:
    """Write the parts into the page."""
    made = argparse.ArgumentParser(prog="python -m tests.diagnosis.table", description=__doc__)
    made.add_argument("--only", action="append", metavar="NAME", choices=list(FAULTS))
    only, page = made.parse_args().only, PAGE.read_text()
    lines = [line for name in KINDS for line in between(page, name).splitlines()[2:]]
    held = {cells(line)[0]: line for line in lines if cells(line)[0] not in (only or FAULTS)}
    for name, text in parts(held).items():
        start, end = START.format(name), END.format(name)
        head, tail = page[: page.index(start) + len(start)], page[page.index(end) :]
        page = f"{head}\n{text}\n{tail}"
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
