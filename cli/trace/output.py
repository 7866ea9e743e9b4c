"""Prints a trace for `aprfmt trace`, and makes its JSON.

A *slot* is what `apr` prints as one row: one capture point, or several of a layer joined, as q, k
and v.
"""

from collections.abc import Mapping
from statistics import median
from typing import Any, TypedDict

from aprfmt.base.number_ranges import number_ranges
from aprfmt.base.protocols import Value
from aprfmt.base.sequences import join_first
from aprfmt.cli import render, run_options
from aprfmt.inference.capture import ENTERING, NEIGHBOUR_SLOTS, SLOTS
from aprfmt.inference.trace import Trace

SPIKE = 10.0  # a slot's deviation over the median of all layers: an observation, never a verdict


class SlotRow(TypedDict):
    """One of apr's slots in one layer, with the points that it stands for."""

    layer: int
    slot: str
    points: list[str]
    positions: list[int] | None
    dtype: str
    form: str | None
    device: str
    stats: dict[str, Value]


def trace_to_json(trace: Trace) -> dict[str, Value]:
    """Return a trace as JSON: records, apr's slots, logits, pooled embedding, observations."""
    layers = sorted({record.layer for record in trace.records.values() if record.layer >= 0})
    rows: list[SlotRow] = []
    for layer in layers:
        for slot in SLOTS:
            stats = trace.slot_stats(slot, layer)
            if stats is None:
                continue  # not captured is absent, never zero
            found, neighbour = (
                [trace.find_record(f"L{layer}.{point}") for point in SLOTS[name]]
                for name in (slot, NEIGHBOUR_SLOTS.get(slot, slot))
            )
            if slot in NEIGHBOUR_SLOTS and found == neighbour:
                continue
            first = found[0]
            assert first is not None  # it has statistics
            rows.append(
                SlotRow(
                    layer=layer,
                    slot=slot,
                    points=list(SLOTS[slot]),
                    positions=None if first.positions is None else list(first.positions),
                    dtype=first.dtype,
                    form=first.form,
                    device=first.device,
                    stats=stats.to_json(),
                )
            )
    return trace.to_json() | {
        "slots": rows,
        "logits": top_logits(trace),
        "embedding": pooled_embedding(trace),
        "observations": describe_spikes(rows),
    }


def pooled_embedding(trace: Trace) -> list[float] | None:
    """Return the pooled embedding as a list of numbers, None where the trace has none."""
    values = trace.recorded_values("pooled")
    return None if values is None else [float(value) for value in values.reshape(-1)]


def top_logits(trace: Trace) -> dict[str, object] | None:
    """Return {stats, top} of the logits, `top` being the last row's five highest.

    None where logits were not recorded; `top` is [] where only their statistics were.
    """
    record, values = trace.find_record("logits"), trace.recorded_values("logits")
    if record is None or record.stats is None:
        return None
    found: dict[str, Any] = {"stats": record.stats.to_json(), "top": []}
    if values is not None and values.ndim == 2 and len(values):
        found["top"] = run_options.top_tokens(values[-1], None)
    return found


def describe_spikes(rows: list[SlotRow]) -> list[str]:
    """Return a sentence for each slot whose std is far above the median of the layers.

    Massive activations in early layers are normal, so that it is no verdict. `rows` are the slots
    of all layers.
    """
    return [
        f"L{layer} {'/'.join(points)}: std {std:.4g} is {times:.0f} times the median of the layers "
        "(an observation, no verdict)"
        for (layer, points), (std, times) in find_spikes(rows).items()
    ]


Points = tuple[str, ...]


def find_spikes(rows: list[SlotRow]) -> dict[tuple[int, Points], tuple[float, float]]:
    """Return {(layer, points): (std, std / median)} of the slots with a very large std.

    The median is that of the same slot in all layers; a std above SPIKE times it is very large.
    `rows` are the slots of all layers.
    """
    found = {}
    for points in dict.fromkeys(tuple(row["points"]) for row in rows):
        stds = {row["layer"]: row["stats"]["std"] for row in rows if tuple(row["points"]) == points}
        known = [std for std in stds.values() if std is not None]
        middle = median(known) if known else 0.0
        for layer, std in stds.items():
            if std is not None and middle and std > SPIKE * middle:
                found[layer, points] = (std, std / middle)
    return found


COLUMNS = ("count", "mean", "std", "min", "max", "absmax", "l2", "zeros", "nan", "inf")


def _stat_cells(stats: Mapping[str, Value]) -> list[str]:
    """Return the statistics named in COLUMNS as table cells; "-" for None."""
    cells = []
    for name in COLUMNS:
        value = stats[name]
        cells.append(
            "-" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
        )
    return cells


def show_trace(trace: Trace, found: Mapping[str, Value], table: bool = True) -> None:
    """Print the run, the tokens, the table of points if `table`, and the first NaN.

    `found` is the JSON of the trace.
    """
    where = found.get("run")
    if where:
        render.line(run_options.run_headline(where), style="head")
    for text in _scope_lines(trace):
        render.say(text, style="dim")
    if table:
        _print_table(trace, found)
        for text in found["observations"]:
            render.say(text, style="warn")
    if found["nonfinite"]:
        where = render.escape(found["nonfinite"])
        end = "the pass stopped there"
        if found["nonfinite"] not in trace.records:
            seen = next(reversed(list(trace.records)), "")
            end = f"of what was asked for, {render.escape(seen)} shows it"
        render.line(f"first NaN or infinity: {where}; {end}", style="bad")
    for path in found.get("saved", []):
        render.line(f"saved {render.escape(path)}")


def _print_table(trace: Trace, found: Mapping[str, Value]) -> None:
    """Print the statistics of every point, the pooled embedding, and the likeliest tokens.

    `found` is the JSON of the trace.
    """
    rows = []
    for key in ENTERING:
        rows += _model_row(trace, key)
    odd = {(layer, point) for layer, points in find_spikes(found["slots"]) for point in points}
    styles = {}
    for record in trace.records.values():
        if record.layer >= 0 and record.stats is not None:
            if (record.layer, record.point) in odd:
                styles[len(rows)] = "warn"
            rows.append([f"L{record.layer}", record.point, *_stat_cells(record.stats.to_json())])
    for key in ("final_norm", "pooled", "logits_raw", "logits"):
        rows += _model_row(trace, key)
    styles |= {i: "bad" for i, row in enumerate(rows) if row[-2:] != ["0", "0"]}
    render.table(rows, ("layer", "point", *COLUMNS), "ll" + "r" * len(COLUMNS), styles)
    render.line("std divides by n", style="dim")
    if found["embedding"]:
        first = ", ".join(f"{value:.5g}" for value in found["embedding"][:5])
        render.line(
            f"embedding: {len(found['embedding'])} numbers, not scaled to length 1: "
            f"{first}, ... (--json prints all, -o saves)"
        )
    if found["logits"] and found["logits"]["top"]:
        row = trace.find_record("logits")
        places = row.positions if row is not None else None
        where = "the last row" if not places else f"the row at {places[-1]}"
        run_options.show_top(found["logits"]["top"], f"top 5 of {where}")


def _scope_lines(trace: Trace) -> list[str]:
    """Return lines on a trace: its first tokens, then positions, dtype and device of its records.

    Records that share these three are named in one line.
    """
    said = []
    ids = trace.run.get("ids")
    if ids:
        some = join_first(ids, 8)
        said.append(f"{len(ids)} token{'' if len(ids) == 1 else 's'}: {some}")
    scopes: dict[tuple[Any, str, str], list[str]] = {}
    for record in trace.records.values():
        scope = record.positions, record.dtype, record.device
        scopes.setdefault(scope, []).append(record.point)
    for (positions, dtype, device), points in sorted(scopes.items(), key=lambda s: -len(s[1])):
        names = list(dict.fromkeys(points))
        what = "rows" if len(said) < 2 else ", ".join(names[:4]) + (" ..." if names[4:] else "")
        at = (
            "unknown positions" if positions is None else f"at {number_ranges(positions) or 'none'}"
        )
        said.append(f"{what}: {at}, {dtype}{f' on {device}' if device else ''}")
    return said


def _model_row(trace: Trace, key: str) -> list[list[str]]:
    """Return [the table row] of a point outside of layers; [] where it was not recorded.

    `key` is the name of the point.
    """
    record = trace.find_record(key) if key in trace.records or key in trace.aliases else None
    if record is None or record.stats is None:
        return []
    return [["", key, *_stat_cells(record.stats.to_json())]]


def show_plan(found: Mapping[str, Value], details: bool) -> None:
    """Print a model's capture points by layer; with `details` what each point means.

    Details include the names that other engines have for it. `found` is what `plan_points` returns.
    """
    render.say(f"{found['model']} ({found['architecture']})", style="head")
    if details:
        seen = set()
        rows = []
        for row in found["points"]:
            if row["point"] in seen or row["absent"]:
                continue
            seen.add(row["point"])
            rows.append(
                (row["point"], row["shape"], row["says"], row["llama_cpp"], row["apr"], row["hf"])
            )
        render.table(rows, ("point", "shape", "what it is", "llama.cpp", "apr", "transformers"))
        return
    by_layer: dict[Any, list[str]] = {}
    for row in found["points"]:
        if not row["absent"]:
            by_layer.setdefault(row["layer"], []).append(row["point"])
    for layer, names in by_layer.items():
        label = "model" if layer is None else f"L{layer}"
        render.say(f"  {label:6} {' '.join(names)}")
    render.line("nothing was run; --payload runs the model", style="dim")
