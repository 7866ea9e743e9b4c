"""What `aprfmt scan` prints: the verdict, then damage, copies, families and templates."""

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aprfmt.base.protocols import Value
from aprfmt.cli import render

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line
    from aprfmt.fleet.run import ScanReport

DERIVED = "encoded again"  # the proof of a quantized model
_LINES = 20  # of each list; --json and the results have all


def show(report: "ScanReport") -> None:
    """Print the verdict, then what is damaged, stored twice, derived and drifted."""
    found = report.found
    style = "bad" if found["counts"]["FAIL"] else "warn" if report.exit_code else "good"
    render.line(verdict(report), style=style)
    _listed("damage", [_damage(row) for row in found["damage"]], "bad")
    copies = found["copies"]
    if copies["tensors"]:
        render.line(f"{copies['tensors']} tensors stored more than once: {copies['bytes']:,} bytes "
                    "could be saved", style="head")  # fmt: skip
    _listed("families", [
        f"{row['model']}: {'from' if row['proof'] == DERIVED else 'like'} {row['base']}: "
        f"{row['found']}" for row in found["families"]
    ])  # fmt: skip
    _listed("vocabularies with several templates", [
        "; ".join(f"{one['models']} like {one['example']}" for one in row["templates"])
        for row in found["templates"]
    ])  # fmt: skip
    left = f", {report.left} left (budget)" if report.left else ""
    render.line(
        f"{report.asked} asked now, {report.kept} known before{left}; rows in "
        f"{render.escape(str(report.out))}"
    )


def answer(report: "ScanReport") -> "list[Line]":
    """Return the verdict, what is damaged, what is stored twice, and the next command."""
    from aprfmt.compare.short_answer import merge_alike

    found = report.found
    lines: list[Line] = [(verdict(report), "bad" if report.exit_code else "good")]
    lines += merge_alike([(f"  {_damage(row)}", "bad") for row in found["damage"]])
    copies = found["copies"]
    if copies["tensors"]:
        size = render.size_text(copies["bytes"])
        lines.append((f"{copies['tensors']} tensors stored more than once: {size}", ""))
    lists = {"families": found["families"],
             "vocabularies with several templates": found["templates"]}  # fmt: skip
    lines += [(f"{title}: {len(rows)} (--json)", "") for title, rows in lists.items() if rows]
    left = f", {report.left} left (budget)" if report.left else ""
    lines.append((f"{report.asked} asked now{left}; rows in {report.out}", ""))
    if found["damage"]:
        model = shlex.quote(found["damage"][0]["model"])
        lines.append((f"next: aprfmt validate {model}", "head"))
    return lines


def verdict(report: "ScanReport") -> str:
    """Return the first line: the outcome, and how many answers of which kind."""
    return report.pronounced.says


def _damage(row: Mapping[str, Value]) -> str:
    first = next(iter(row["findings"]), None)
    said = f"{first['where']}: {first['found']}" if first else row["found"]
    return f"{row['outcome']} {row['model']}: {row['check']}: {said}"


def _listed(title: str, lines: list[str], style: str = "") -> None:
    if not lines:
        return
    render.line(f"{title}: {len(lines)}", style="head")
    for line in render.first_rows(lines, _LINES, "  "):
        render.line("  " + render.escape(line, 1000), style=style)
