"""What `aprfmt trace --reference` prints: the verdict, points beyond tolerance, a summary."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from aprfmt.cli import render, run_options
from aprfmt.measure.traces import PointDiff, TraceDiff
from aprfmt.model.ledger import OPEN
from aprfmt.model.verdict import items_clause

if TYPE_CHECKING:
    from aprfmt.compare.short_answer import Line

LISTED = 6  # of those, in the form for agents
SHOWN = 2  # points beyond tolerance, so that the answer has 12 lines; with -v all


def show_difference(difference: TraceDiff, reference: str, show_all: bool) -> None:
    """Print the verdict, then the points beyond tolerance, or with `show_all` all.

    `reference` is the name of the trace or model compared with.
    """
    render.say(f"against {reference}", style="head")
    text, style = reference_verdict(difference)
    render.say(text, style=style)
    # The table: points beyond tolerance, or all of them.
    beyond = [point for point in difference.points if point.beyond]
    ratios = difference.rounding_ratios
    shown = list(difference.points) if show_all or ratios else beyond[:SHOWN]
    if shown:
        headers = ["point", "relL2", "max abs", "verdict", "tolerance or reason"]
        rows = [_point_row(point) for point in shown]
        if ratios:
            headers.append("R")
            rows = [
                (*row, f"{ratios[point.key]:.3g}" if point.key in ratios else "-")
                for row, point in zip(rows, shown, strict=True)
            ]
        render.table(rows, headers, "lrrllr"[: len(headers)])
    if not show_all and len(beyond) > len(shown):
        render.line(f"... {len(beyond) - len(shown)} more beyond (-v)", style="dim")
    # What no table of distances shows: tokens, NaN, odd statistics, points on one side.
    if difference.first_token is not None:
        render.say(difference.first_token.text, style="bad")
    run_options.show_nonfinite(difference.points, "this trace")
    for point in difference.points:
        if point.outside:
            render.say(
                f"{point.key}: std is {point.std_ratio:.3g} times the reference's (an "
                "observation: statistics say where to look)",
                style="warn",
            )
    for label, keys in (("here", difference.only_in_a), ("the reference", difference.only_in_b)):
        if keys:
            render.line(f"only in {label}: {', '.join(keys[:8])}{' ...' if len(keys) > 8 else ''}")
    for one in difference.repeats:
        render.say(one.says, style="bad" if one.differs(difference.exact) else "")
    for text in difference.not_checked:
        render.say(f"NOT-RUN  {text}", style="warn")
    said = len(beyond) > len(shown)
    if not show_all and not said and len(difference.points) > len(shown):
        render.line("every point: -v", style="dim")


def reference_answer(difference: TraceDiff, reference: str, model: str) -> "list[Line]":
    """Return the short answer as (text, style) lines: verdict, points beyond, next command.

    `reference` is the name of the trace or model compared with, `model` the model that was run.
    """
    text, style = reference_verdict(difference)
    lines: list[Line] = [(f"{text} (against {reference})", style)]
    if difference.first_token is not None:
        lines.append((f"  {difference.first_token.text}", "bad"))
    beyond = [point for point in difference.points if point.beyond]
    for point in beyond[:LISTED]:
        row = _point_row(point)
        said = f"relL2 {row[1]}, max abs {row[2]}, tolerance {row[4]}" if not point.why else row[4]
        lines.append((f"  {point.key}: {said}", "bad"))
    if len(beyond) > LISTED:
        lines.append((f"  {len(beyond) - LISTED} more points beyond (-v)", "dim"))
    if difference.rounding_ratios:
        key = max(difference.rounding_ratios, key=difference.rounding_ratios.__getitem__)
        lines.append((f"  largest R: {difference.rounding_ratios[key]:.3g} at {key}", ""))
    lines += [(f"  {one.says}", "") for one in difference.repeats if one.says not in text]
    lines += [(f"  NOT-RUN: {text}", "warn") for text in difference.not_checked]
    other = reference.partition("@")[0]
    same = Path(other).resolve() in (Path(model).resolve(), Path(model).resolve().parent)
    if beyond and model and other and not same:
        names = f"{shlex.quote(other)} {shlex.quote(model)}"
        lines.append((f"next: aprfmt diagnose {names}", "head"))
    return lines


def reference_verdict(difference: TraceDiff) -> tuple[str, str]:
    """Return (sentence with the verdict on two traces, its style).

    The sentence ends with the arrays that could not be compared and those that nothing reads.
    """
    said, style = _points_verdict(difference)
    open_ones = [row for row in difference.left if row.state in OPEN]
    rest = [row for row in difference.left if row.state not in OPEN]
    if open_ones and style == "good":
        said, style = f"no verdict: {said}", "warn"
    lost = items_clause(open_ones, "; could not be compared")
    return said + lost + items_clause(rest, "; not read here"), style


def _points_verdict(difference: TraceDiff) -> tuple[str, str]:
    """Return (sentence on the capture points of two traces, its style).

    The sentence says the first of these that holds: points hold other rows, none could be compared,
    a point is beyond its tolerance, values differ that must be equal, or all are within tolerance.
    """
    points, every = difference.points, len(difference.points)
    if difference.other_rows:
        count, key = len(difference.other_rows), difference.other_rows[0]
        why = next(point.why for point in points if point.key == key)
        return (
            f"no verdict: {count} of {every} points hold other rows, the first is {key} "
            f"({why}); trace both with the same --positions"
        ), "bad"
    if not difference.compared:
        reasons = dict.fromkeys(point.why for point in points if point.why)
        why = f": {next(iter(reasons))}" if reasons else ""
        return f"no point could be compared{why}", "bad"
    if difference.first:
        beyond = sum(point.beyond for point in points)
        why = f"; {difference.overflow}" if difference.overflow else ""
        return (
            f"first point beyond tolerance: {difference.first}; {beyond} of {every} points "
            f"beyond{why}"
        ), "bad"
    if difference.unequal_ranks:
        more = len(difference.unequal_ranks) - 1
        rest = f", and {more} more" if more else ""
        return f"ranks of one dump differ: {difference.unequal_ranks[0]}{rest}", "bad"
    differing = [one for one in difference.repeats if one.differs(difference.exact)]
    if differing:
        rest = f", and {len(differing) - 1} more pairs" if len(differing) > 1 else ""
        return f"{differing[0].says}{rest}", "bad"
    unlike = len(difference.unequal)
    if difference.exact and unlike:
        return (
            f"values differ at {unlike} of {every} points, first at {difference.unequal[0]}",
            "bad",
        )
    far = max((point for point in points if point.rel_l2 is not None), key=_tolerance_share)
    nearest = f"; nearest to its tolerance: {far.key}, relL2 {far.rel_l2:.3g} of {far.tolerance:g}"
    nearest += f"; values differ at {unlike} of {every} points" if unlike else "; every value equal"
    if difference.compared == every:
        return f"all {every} points within tolerance{nearest}", "good"
    return (
        f"{difference.compared} of {every} points compared, all within tolerance; "
        f"{every - difference.compared} NOT-RUN{nearest}"
    ), "warn"


def _tolerance_share(point: PointDiff) -> float:
    """Return the point's relative L2 over its tolerance; the relative L2 for tolerance 0."""
    assert point.rel_l2 is not None
    return point.rel_l2 / point.tolerance if point.tolerance else point.rel_l2


def _point_row(point: PointDiff) -> tuple[str, ...]:
    """Return table cells of a point: key, relL2, max abs, verdict, tolerance or reason."""
    if point.why:
        return point.key, "-", "-", "BEYOND" if point.beyond else "not comparable", point.why
    word = "BEYOND" if point.beyond else "within"
    return (
        point.key,
        f"{point.rel_l2:.3g}",
        f"{point.max_abs_diff:.3g}",
        word,
        f"{point.tolerance:g}",
    )
