// The page of `trace`: a map of one statistic, the histogram of a cell, all points as a table.
//
// Data: `statistics`, their names; `cells`, {key, point, layer, shape, count, dtype, form, device,
// says, stats, rel, tolerance, fault, beyond, histogram} each; `nonfinite`, `reference`
// {first, compared} or null, `command`, what finds the cause, `observations`, `top`, the last row's
// tokens {id, piece, logit}, and `heats`, see drawHeat.

const { statistics: stats, cells } = data;
const byKey = new Map(cells.map((cell) => [cell.key, cell]));
const flagged = (cell) => cell.fault || cell.beyond;
const valueOf = (cell, stat) => number(stat === "relL2" ? cell.rel : cell.stats[stat]);
const shown = told;

// The verdict, where there is one: of values that are no numbers, and of a reference.
function verdict() {
  const found = data.reference, faults = cells.filter((cell) => cell.fault);
  const first = found?.first ? byKey.get(found.first) : null;
  const commands = data.command && (found?.first || faults.length)
    ? [{ name: "next", text: data.command }] : [];
  if (data.nonfinite) return { kind: "bad", commands,
    text: "NaN or infinity; the pass stopped there.", rows: [["place", data.nonfinite]] };
  if (found?.first) return { kind: "bad", commands,
    text: `Beyond tolerance at ${cells.filter((cell) => cell.beyond).length} of ` +
      `${found.compared} compared points.`,
    rows: [["place", `First point beyond tolerance: ${found.first}` + (first
      ? `, relative L2 ${shown(number(first.rel))}, tolerance ${shown(first.tolerance)}` : "")]] };
  if (faults.length) return { kind: "bad", commands,
    text: `NaN or infinity at ${faults.length} of ${cells.length} points.`,
    rows: [["place", `first at ${faults[0].key}`]] };
  if (found) return found.compared
    ? { kind: "good", text: `All ${found.compared} compared points are within tolerance.` }
    : { kind: "warn", text: "No point could be compared." };
  return { text: `${cells.length} points, all finite; compared with nothing, so there is no ` +
    "verdict." };
}
// What stands out is no verdict: it has a separate part, as the likeliest tokens do.
function notes() {
  if (data.observations.length) {
    const box = part($("notes"), "Observations", "What stands out in the numbers; no verdict.");
    const list = make("ul", undefined, box, "lines");
    for (const text of data.observations) make("li", text, list);
  }
  if (!data.top.length) return;
  const box = part($("notes"), "Top tokens of the last row");
  const place = make("table", undefined, box, "facts");
  const body = make("tbody", undefined, place);
  for (const row of data.top) {
    const line = make("tr", undefined, body);
    make("th", `${row.id}`, line, "l");
    make("td", `"${row.piece ?? ""}" (${fixed(row.logit, 3)})`, line);
  }
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
function colours() {
  const stat = $("stat").value, over = $("over").value, held = stat === "relL2";
  ranges.clear();
  $("over").parentElement.hidden = held;
  $("scale").replaceChildren();
  const most = held && furthestOf(cells.map((cell) => [number(cell.rel), cell.tolerance]));
  if (held) toleranceLegend($("scale"), most);
  for (const button of document.querySelectorAll("#map button")) {
    const cell = byKey.get(button.dataset.key), value = valueOf(cell, stat);
    button.textContent = shown(value);
    if (value === null) { button.style.background = "#8883"; button.style.color = ""; continue; }
    if (held) {
      paint(button, toleranceShare(value, cell.tolerance, cell.beyond, most), "tolerance");
      continue;
    }
    const [low, high] = range(stat, over === "all" ? "" : cell.point);
    paint(button, !isFinite(value) ? 1 : high > low ? (spread(value) - low) / (high - low) : 0.5);
  }
}

function draw() {
  const points = [...new Set(cells.map((c) => c.point))];
  const layers = [...new Set(cells.map((c) => c.layer))].sort((a, b) => (a ?? -1) - (b ?? -1));
  grid($("map"), "layer", layers.map(layerName), points, (row, column) => {
    const cell = cells.find((c) => c.layer === layers[row] && c.point === points[column]);
    if (!cell) return null;
    const button = cellButton("", cell.key, flagged(cell));
    tipped(button, (box) => {
      make("strong", cell.key, box);
      make("div", `${$("stat").value} ${shown(valueOf(cell, $("stat").value))}`, box);
      make("div", cell.says, box, "dim");
    });
    button.addEventListener("click", () => choose(cell));
    return button;
  });
}

function choose(cell) {
  for (const button of document.querySelectorAll("#map button"))
    button.classList.toggle("on", button.dataset.key === cell.key);
  $("key").textContent = `${cell.key}: ${cell.shape.join(" x ")} values`;
  const place = $("cell");
  $("one").hidden = false;
  place.replaceChildren();
  make("p", cell.says, place);
  const found = stats.map((s) => `${s} ${shown(valueOf(cell, s))}`);
  make("p", [...found, cell.dtype, cell.form ?? "", cell.device].filter(Boolean).join(", "), place);
  if (cell.histogram) histogram(cell.histogram, cell.key, place);
  else make("p", "No histogram: its values were not kept, or none is finite.", place);
}
const columns = [{ name: "layer", left: true, of: (c) => c.layer },
  { name: "point", left: true, of: (c) => c.point }, { name: "count", of: (c) => c.count },
  ...stats.map((stat) => ({ name: stat, of: (c) => valueOf(c, stat) }))];
const fill = sortable($("rows"), columns, (cell, line) => {
  for (const { left, of } of columns) {
    const value = of(cell);
    const text = !left ? shown(value)
      : of === columns[0].of && value !== null ? `L${value}` : value;
    make("td", text ?? "", line, left ? (flagged(cell) ? "l bad" : "l") : "");
  }
});

for (const stat of stats) make("option", stat, $("stat"));
$("stat").value = stats.includes("relL2") ? "relL2" : "std";
for (const id of ["stat", "over"]) $(id).addEventListener("change", colours);
drawVerdict(verdict());
notes();
for (const { what, label, heats, positions } of data.heats)
  drawHeat($("heats"), `Token by layer: ${what}`, "A strong column is a token that stands out, " +
    "a strong row a layer.", heats, positions, label);
draw();
colours();
fill(cells);
const first = cells.find(flagged);
if (first) choose(first);
