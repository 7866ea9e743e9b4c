"""The page of `aprfmt trace --html`: heat map, histogram of a cell, sortable table."""

from collections.abc import Mapping
from typing import Any

from aprfmt.cli import html
from aprfmt.text import escape

BINS = 48
CHUNK = 1 << 18  # values put into bins at a time

BODY = """
<p id="said"></p>
<p><label>Statistic <select id="stat"></select></label>
<label>Colours over <select id="over"><option value="point">each point</option>
<option value="all">the whole map</option></select></label>
<span class="dim">darker is less, brighter is more; red frames: NaN, infinity, or beyond
tolerance; click a cell for its histogram</span></p>
<div class="scroll"><table id="map"></table></div>
<h2 id="key">No cell chosen</h2>
<div id="cell"></div>
<h2>All points</h2>
<p class="dim">Click a heading to sort.</p>
<div class="scroll"><table id="rows"></table></div>
"""

STYLE = """
#map td { padding: 0; } #map thead th { text-align: center; }
#map th { font-weight: 500; padding: .1rem .3rem; font-size: .8rem; }
#map tbody th { position: sticky; left: 0; background: Canvas; }
#map button { width: 100%; min-width: 3.6rem; padding: .2rem .15rem; border: 2px solid transparent;
  font-size: .75rem; cursor: pointer; }
#map button.flag { border-color: var(--bad); } #map button.on { outline: 3px solid Highlight;
  position: relative; z-index: 1; }
#rows th button { border: 0; background: none; cursor: pointer; padding: 0; font-weight: 600; }
#cell svg { max-width: 60rem; width: 100%; height: auto; background: #8881; }
#cell rect { fill: #3b76b8; } #cell text { fill: CanvasText; font-size: 11px; }
label { margin-right: 1rem; }
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const stats = data.statistics, cells = data.cells;
const byKey = new Map(cells.map((cell) => [cell.key, cell]));
const $ = (id) => document.getElementById(id);
function make(tag, text, parent) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}
function valueOf(cell, stat) {
  const value = stat === "relL2" ? cell.rel : cell.stats[stat];
  return value === "Infinity" ? Infinity : typeof value === "number" ? value : null;
}
function show(value) {
  if (value === null) return "-";
  if (!isFinite(value) || Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  return String(Number(value.toPrecision(4)));
}
// Signed logarithm: activations span decades on both sides of zero.
const spread = (v) => Math.sign(v) * Math.log10(1 + Math.abs(v) * 1e9);
const ranges = new Map();
function range(stat, group) {
  if (!ranges.has(group)) {
    const found = cells.filter((c) => group === "" || c.point === group)
      .map((c) => valueOf(c, stat)).filter((v) => v !== null && isFinite(v)).map(spread);
    ranges.set(group, [Math.min(...found), Math.max(...found)]);
  }
  return ranges.get(group);
}
const flagged = (cell) => cell.fault || cell.beyond;

function paint() {
  const stat = $("stat").value, over = $("over").value;
  ranges.clear();
  for (const button of document.querySelectorAll("#map button")) {
    const cell = byKey.get(button.dataset.key), value = valueOf(cell, stat);
    button.textContent = show(value);
    button.title = `${cell.key} ${stat} ${show(value)}`;
    if (value === null) { button.style.background = "#8883"; button.style.color = ""; continue; }
    const [low, high] = range(stat, over === "all" ? "" : cell.point);
    const share = !isFinite(value) ? 1 : high > low ? (spread(value) - low) / (high - low) : 0.5;
    const [r, g, b] = colour(share);
    button.style.background = `rgb(${r},${g},${b})`;
    button.style.color = 0.3 * r + 0.6 * g + 0.1 * b > 120 ? "#000" : "#fff";
  }
}

function draw() {
  const points = [...new Set(cells.map((c) => c.point))];
  const layers = [...new Set(cells.map((c) => c.layer))].sort((a, b) => (a ?? -1) - (b ?? -1));
  const head = make("tr", undefined, make("thead", undefined, $("map")));
  make("th", "layer", head);
  for (const point of points) make("th", point, head);
  const body = make("tbody", undefined, $("map"));
  for (const layer of layers) {
    const row = make("tr", undefined, body);
    make("th", layer === null ? "model" : `L${layer}`, row);
    for (const point of points) {
      const place = make("td", undefined, row);
      const cell = cells.find((c) => c.layer === layer && c.point === point);
      if (!cell) continue;
      const button = make("button", "", place);
      button.type = "button";
      button.dataset.key = cell.key;
      button.classList.toggle("flag", flagged(cell));
      button.addEventListener("click", () => choose(cell));
    }
  }
}

const SVG = "http://www.w3.org/2000/svg";
function shape(tag, attributes, parent, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
function choose(cell) {
  for (const button of document.querySelectorAll("#map button"))
    button.classList.toggle("on", button.dataset.key === cell.key);
  $("key").textContent = `${cell.key}: ${cell.shape.join(" x ")} values`;
  const place = $("cell");
  place.replaceChildren();
  make("p", cell.says, place);
  const found = stats.map((s) => `${s} ${show(valueOf(cell, s))}`);
  make("p", [...found, cell.dtype, cell.form ?? "", cell.device].filter(Boolean).join(", "), place);
  const hist = cell.histogram;
  if (!hist) {
    make("p", "No histogram: its values were not kept, or none is finite.", place);
    return;
  }
  const width = 720, height = 220, bar = width / hist.counts.length;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height + 34}`, role: "img",
    "aria-label": `histogram of ${cell.key}` }, place);
  const most = Math.max(...hist.counts.map((n) => Math.log10(1 + n)));
  hist.counts.forEach((n, i) => {
    const tall = most ? height * Math.log10(1 + n) / most : 0;
    const rect = shape("rect", { x: i * bar, y: height - tall, width: Math.max(bar - 1, 1),
      height: tall }, svg);
    const step = (hist.high - hist.low) / hist.counts.length;
    shape("title", {}, rect,
      `${n} values from ${show(hist.low + i * step)} to ${show(hist.low + (i + 1) * step)}`);
  });
  shape("text", { x: 0, y: height + 14 }, svg, show(hist.low));
  shape("text", { x: width, y: height + 14, "text-anchor": "end" }, svg, show(hist.high));
  shape("text", { x: width / 2, y: height + 28, "text-anchor": "middle" }, svg,
    `value; heights are log(1 + count), the highest bar ${Math.max(...hist.counts)} values`);
}

const columns = [["layer", (c) => c.layer], ["point", (c) => c.point],
  ["count", (c) => c.count], ...stats.map((s) => [s, (c) => valueOf(c, s)])];
let order = { column: -1, down: false };
function fill() {
  const rows = [...cells];
  if (order.column >= 0) {
    const get = columns[order.column][1];
    rows.sort((a, b) => {
      const x = get(a), y = get(b);
      if (x === y) return 0;
      if (x === null || y === null) return x === null ? 1 : -1;
      return (x < y ? -1 : 1) * (order.down ? -1 : 1);
    });
  }
  const table = $("rows");
  table.replaceChildren();
  const head = make("tr", undefined, make("thead", undefined, table));
  columns.forEach(([name], i) => {
    const mark = order.column === i ? (order.down ? " \\u2193" : " \\u2191") : "";
    const button = make("button", name + mark, make("th", undefined, head));
    button.type = "button";
    if (i < 2) button.parentNode.className = "l";
    button.addEventListener("click", () => {
      order = { column: i, down: order.column === i && !order.down };
      fill();
    });
  });
  const body = make("tbody", undefined, table);
  for (const cell of rows) {
    const row = make("tr", undefined, body);
    columns.forEach(([name, get], i) => {
      const value = get(cell), place = make("td", undefined, row);
      const named = i === 0 && value !== null ? `L${value}` : value ?? "";
      place.textContent = i < 2 ? named : show(value);
      if (i < 2) place.className = flagged(cell) ? "l bad" : "l";
    });
  }
}

for (const stat of stats) make("option", stat, $("stat"));
$("stat").value = stats.includes("relL2") ? "relL2" : "std";
$("over").value = stats.includes("relL2") ? "all" : "point";
for (const id of ["stat", "over"]) $(id).addEventListener("change", paint);
for (const text of data.said) { make("span", text, $("said")); make("br", undefined, $("said")); }
draw();
paint();
fill();
const first = cells.find(flagged);
if (first) choose(first);
"""

STATISTICS = ("std", "mean", "min", "max", "absmax", "l2", "zeros", "nan", "inf")


class Histograms:
    """Histograms of the finite values of every record, taken as they come."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    def add(self, key: str, values: Any) -> None:
        """Count values into BINS equal parts of their range."""
        found = histogram(values)
        if found is not None:
            self.found[key] = found


def histogram(values: Any) -> dict[str, Any] | None:
    """Return {low, high, counts} of the finite values; None where there is none."""
    import numpy as np

    flat = np.asarray(values).reshape(-1)
    flat = flat[np.isfinite(flat)]
    if not flat.size:
        return None
    low, high = float(flat.min()), float(flat.max())
    if low == high:
        return {"low": low, "high": high, "counts": [int(flat.size)]}
    counts = np.zeros(BINS, np.int64)
    for start in range(0, flat.size, CHUNK):
        share = (flat[start : start + CHUNK].astype(np.float64) - low) / (high - low)
        counts += np.bincount(np.minimum((share * BINS).astype(np.int64), BINS - 1), minlength=BINS)
    return {"low": low, "high": high, "counts": counts.tolist()}


def render_page(
    trace: Any, body: Mapping[str, Any], histograms: Histograms, difference: Any | None
) -> str:
    """Return the page of a trace: `body` is what `--json` prints, `difference` a TraceDiff."""
    from aprfmt.inference.capture import POINTS

    points = {} if difference is None else {point.key: point for point in difference.points}
    cells = []
    for record in body["records"]:
        if record["stats"] is None:
            continue
        point = points.get(record["key"])
        row = POINTS.get(record["point"])
        cells.append(
            {
                **{name: record[name] for name in
                   ("key", "point", "layer", "shape", "count", "dtype", "form", "device")},
                "says": "" if row is None else row.sentence,
                "stats": {name: record["stats"][name] for name in STATISTICS},
                "rel": None if point is None else point.rel_l2,
                "fault": (row is None or row.finite)
                and record["stats"]["nan"] + record["stats"]["inf"] > 0,
                "beyond": point is not None and point.beyond,
                "histogram": histograms.found.get(record["key"]),
            }
        )  # fmt: skip
    statistics = [*(["relL2"] if points else []), *STATISTICS]
    data = {"statistics": statistics, "cells": cells, "said": said(body)}
    name = str(trace.run.get("model") or trace.run.get("path") or "a saved trace")
    script = html.COLOURS + SCRIPT
    return html.page(f"Trace of {name}", facts(trace, body) + BODY, data, STYLE, script)


def facts(trace: Any, body: Mapping[str, Any]) -> str:
    """Return what identifies the run."""
    run, ids = trace.run, trace.run.get("ids")
    backend = run.get("backend") or {}
    rows: dict[str, object] = {
        "architecture": run.get("architecture"),
        "ran on": ":".join(str(backend[key]) for key in ("backend", "device", "dtype")
                           if key in backend),
        "prompt": run.get("prompt"),
        "tokens": None if ids is None else f"{len(ids)}: {' '.join(map(str, ids[:64]))}"
        + (" ..." if len(ids) > 64 else ""),
        "reference": (body.get("reference") or {}).get("against"),
        "aprfmt": run.get("aprfmt"),
    }  # fmt: skip
    return html.facts({name: value for name, value in rows.items() if value})


def said(body: Mapping[str, Any]) -> list[str]:
    """Return the sentences above the map: verdicts first, then observations and the top tokens."""
    found = []
    if body["nonfinite"]:
        found.append(f"First NaN or infinity: {body['nonfinite']}; the pass stopped there.")
    reference = body.get("reference")
    if reference is not None:
        first = reference["first"]
        found.append(f"First point beyond tolerance: {first}." if first else
                     f"All {reference['compared']} compared points are within tolerance."
                     if reference["compared"] else "No point could be compared.")  # fmt: skip
    found += body["observations"]
    top = (body["logits"] or {}).get("top") or []
    if top:
        words = ", ".join(f"{row['id']} {row.get('token', '')} ({row['logit']:.3f})" for row in top)
        found.append(f"Top tokens of the last row: {words}.")
    return [escape(text) for text in found]
