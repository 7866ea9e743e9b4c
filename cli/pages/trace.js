// The page of `trace`: a map of one statistic, the histogram of a cell, all points as a table.
//
// Data: `statistics`, their names; `cells`, {key, point, layer, shape, count, dtype, form, device,
// says, stats, rel, fault, beyond, histogram} each; `nonfinite`, `reference` {first, compared} or
// null, `observations`, `top`, the last row's tokens {id, piece, logit}, and `heats`, see drawHeat.

const { statistics: stats, cells } = data;
const byKey = new Map(cells.map((cell) => [cell.key, cell]));
const flagged = (cell) => cell.fault || cell.beyond;
const valueOf = (cell, stat) => number(stat === "relL2" ? cell.rel : cell.stats[stat]);
const shown = told;

// Verdicts first, then observations and the top tokens.
function sentences() {
  const said = [], found = data.reference;
  if (data.nonfinite)
    said.push(`First NaN or infinity: ${data.nonfinite}; the pass stopped there.`);
  if (found) said.push(found.first ? `First point beyond tolerance: ${found.first}.`
    : found.compared ? `All ${found.compared} compared points are within tolerance.`
    : "No point could be compared.");
  said.push(...data.observations);
  const top = data.top.map((row) => `${row.id} "${row.piece ?? ""}" (${fixed(row.logit, 3)})`);
  if (top.length) said.push(`Top tokens of the last row: ${top.join(", ")}.`);
  return said;
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
  const stat = $("stat").value, over = $("over").value;
  ranges.clear();
  for (const button of document.querySelectorAll("#map button")) {
    const cell = byKey.get(button.dataset.key), value = valueOf(cell, stat);
    button.textContent = shown(value);
    if (value === null) { button.style.background = "#8883"; button.style.color = ""; continue; }
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
$("over").value = stats.includes("relL2") ? "all" : "point";
for (const id of ["stat", "over"]) $(id).addEventListener("change", colours);
$("said").classList.add(cells.some(flagged) || data.nonfinite ? "bad" : "good");
for (const { what, label, heats, positions } of data.heats)
  drawHeat($("heats"), `Token by layer: ${what}`, "One bright column is a token that stands out, " +
    "one bright row a layer.", heats, positions, label);
for (const text of sentences()) { make("span", text, $("said")); make("br", undefined, $("said")); }
draw();
colours();
fill(cells);
const first = cells.find(flagged);
if (first) choose(first);
