"""The page that `diff`, `diagnose` and `parity` write: one layout, filled from plain data.

Data, all of it optional but `verdict`:
- verdict: {text, kind}; kind is good, warn or bad, as everywhere here.
- chain: [{title, kind, mark, lines}], the evidence in the order it was found.
- maps: [{title, note, scale, rows, columns, cells}]; a cell is {row, column, text, kind or value,
  title, lines} with row and column as indices; `value` is coloured by `scale`
  {low, high, log, label}, `kind` by its name.
- images: [{title, note, rows, columns, height, width, cells}], a number a cell, the cells of
  [height, width] elements of a matrix [rows, columns].
- tables: [{title, note, columns, left, rows, kinds}]; `left` counts the text columns.
"""

from collections.abc import Mapping
from typing import Any

from aprfmt.cli import html

STYLE = """
.verdict { font-size: 1.1rem; padding: .6rem .9rem; border-left: .5rem solid var(--line);
  background: #8881; overflow-wrap: anywhere; max-width: 75rem; }
.verdict.good { border-color: #2a9d55; } .verdict.warn { border-color: #d08700; }
.verdict.bad { border-color: var(--bad); }
#chain { padding-left: 1.6rem; max-width: 75rem; } #chain li { margin: .35rem 0; }
#chain .lines { margin: .1rem 0 0; padding-left: 1rem; list-style: none; }
#chain .lines li { margin: .05rem 0; overflow-wrap: anywhere; opacity: .85; }
.mark { font-size: .78rem; border: 1px solid currentColor; border-radius: .6rem; padding: 0 .5rem;
  margin-left: .5rem; white-space: nowrap; }
.k-good { color: #2a9d55; } .k-warn { color: #d08700; } .k-bad { color: var(--bad); }
.k-dim { opacity: .65; }
table.map td { padding: 0; } table.map thead th { vertical-align: bottom; text-align: center; }
table.map th { font-weight: 500; padding: .1rem .3rem; font-size: .8rem; }
table.map tbody th { position: sticky; left: 0; background: Canvas; z-index: 1; }
table.map button { width: 100%; min-width: 3.4rem; padding: .2rem .15rem; cursor: pointer;
  border: 2px solid transparent; font-size: .75rem; color: inherit; background: #8882; }
table.map button.good { background: #2a9d5540; } table.map button.warn { background: #d0870066; }
table.map button.bad { background: #c22f2f; color: #fff; }
table.map button.flag { border-color: var(--bad); }
table.map button.on { outline: 3px solid Highlight; position: relative; z-index: 2; }
.legend { display: flex; gap: 1rem; flex-wrap: wrap; align-items: center; font-size: .85rem; }
.legend i { display: inline-block; width: 9rem; height: .7rem; vertical-align: middle;
  margin: 0 .4rem; }
.detail { border: 1px solid var(--line); padding: .5rem .8rem; max-width: 75rem; }
.detail h3 { margin: 0 0 .3rem; font-size: 1rem; overflow-wrap: anywhere; }
.detail p { margin: .1rem 0; overflow-wrap: anywhere; }
canvas { image-rendering: pixelated; border: 1px solid var(--line); cursor: crosshair;
  max-width: 100%; background: #8881; }
.rows th button { border: 0; background: none; cursor: pointer; padding: 0; font-weight: 600;
  color: inherit; }
.rows td.l { white-space: normal; overflow-wrap: anywhere; min-width: 7rem; max-width: 34rem; }
.rows tr.r-bad td:first-child { color: var(--bad); font-weight: 600; }
.rows tr.r-warn td:first-child { color: #d08700; font-weight: 600; }
label { margin-right: 1rem; }
"""

BODY = """
<p id="verdict" class="verdict"></p>
%(facts)s
<div id="chainbox"><h2>Evidence</h2><ol id="chain"></ol></div>
<div id="maps"></div>
<div id="imagebox"><h2>Where in the tensor</h2>
<p><label>Tensor <select id="which"></select></label> <span class="dim" id="imagenote"></span></p>
<canvas id="image" width="1" height="1"></canvas>
<p class="legend" id="imagescale"></p>
<p id="readout" class="dim">Move over the image, or click it, to read a cell.</p></div>
<div id="tables"></div>
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
function make(tag, text, parent, name) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (name) node.className = name;
  if (parent) parent.append(node);
  return node;
}
const number = (v) => v === "Infinity" ? Infinity : typeof v === "number" ? v : null;
function show(value) {
  if (value === null || value === undefined) return "-";
  if (value === Infinity || value === "Infinity") return "inf";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return String(value);
  return String(Number(value.toPrecision(4)));
}
function share(value, scale) {
  if (!isFinite(value)) return 1;
  const f = scale.log ? (v) => Math.log10(Math.max(v, 1e-300)) : (v) => v;
  const low = f(scale.low), high = f(scale.high);
  return high > low ? (f(value) - low) / (high - low) : 1;
}
const short = (value) =>
  value >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
function legend(parent, scale, more) {
  const bar = make("span", undefined, parent);
  bar.append(short(scale.low));
  const strip = make("i", undefined, bar);
  strip.style.background = `linear-gradient(to right, ${stops.map((c) => `rgb(${c})`).join(",")})`;
  bar.append(short(scale.high) + " " + (scale.label || ""));
  if (more) make("span", more, parent, "dim");
}

function drawVerdict() {
  $("verdict").textContent = data.verdict.text;
  $("verdict").classList.add(data.verdict.kind);
  const chain = data.chain || [];
  $("chainbox").hidden = !chain.length;
  for (const link of chain) {
    const item = make("li", undefined, $("chain"));
    make("span", link.title, item);
    if (link.mark) make("span", link.mark, item, `mark k-${link.kind || "dim"}`);
    if ((link.lines || []).length) {
      const lines = make("ul", undefined, item, "lines");
      for (const line of link.lines) make("li", line, lines);
    }
  }
}

function drawMap(map) {
  const box = make("section", undefined, $("maps"));
  make("h2", map.title, box);
  if (map.note) make("p", map.note, box, "dim");
  if (map.scale) legend(make("p", undefined, box, "legend"), map.scale);
  const table = make("table", undefined, make("div", undefined, box, "scroll"), "map");
  const detail = make("div", undefined, box, "detail");
  detail.hidden = true;
  const head = make("tr", undefined, make("thead", undefined, table));
  make("th", "", head);
  for (const name of map.columns) make("th", name, head);
  const places = new Map(map.cells.map((cell) => [cell.row + "/" + cell.column, cell]));
  const body = make("tbody", undefined, table);
  map.rows.forEach((name, row) => {
    const line = make("tr", undefined, body);
    make("th", name, line);
    map.columns.forEach((_, column) => {
      const place = make("td", undefined, line), cell = places.get(row + "/" + column);
      if (!cell) return;
      const button = make("button", cell.text, place, cell.kind);
      button.type = "button";
      button.title = cell.title;
      button.dataset.key = cell.title;
      const value = number(cell.value);
      if (value !== null && map.scale) {
        const [r, g, b] = colour(share(value, map.scale));
        button.style.background = `rgb(${r},${g},${b})`;
        button.style.color = 0.3 * r + 0.6 * g + 0.1 * b > 120 ? "#000" : "#fff";
      }
      button.classList.toggle("flag", Boolean(cell.flag));
      button.addEventListener("click", () => {
        for (const other of table.querySelectorAll("button.on")) other.classList.remove("on");
        button.classList.add("on");
        detail.hidden = false;
        detail.replaceChildren();
        make("h3", cell.title, detail);
        for (const text of cell.lines || []) make("p", text, detail);
        const image = (data.images || []).findIndex((one) => one.title === cell.title);
        if (image >= 0) { $("which").value = String(image); drawImage(image); }
      });
    });
  });
  const chosen = map.cells.find((cell) => cell.chosen);
  if (chosen) {
    const buttons = [...table.querySelectorAll("button")];
    buttons.find((button) => button.dataset.key === chosen.title).click();
  }
}

let shown = null;
function drawImage(index) {
  const image = shown = data.images[index], canvas = $("image");
  const down = image.cells.length, across = image.cells[0].length;
  const values = image.cells.flat().map(number);
  // Few wild cells must not hide the others: colours end at the 98th percentile.
  const finite = values.filter((v) => v > 0 && isFinite(v)).sort((a, b) => a - b);
  const part = (share) => finite.length ? finite[Math.floor(share * (finite.length - 1))] : 1;
  const high = part(0.98), most = part(1);
  const scale = { low: Math.max(part(0.02), high * 1e-6), high, log: true,
    label: most > high ? `and more (up to ${short(most)})` : "" };
  canvas.width = across;
  canvas.height = down;
  const zoom = Math.max(1, Math.min(24, Math.floor(Math.min(1000 / across, 560 / down))));
  canvas.style.width = across * zoom + "px";
  canvas.style.height = down * zoom + "px";
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const pixels = context.createImageData(across, down);
  values.forEach((value, i) => {
    const paint = !isFinite(value) ? [255, 0, 255, 255] : value === 0 ? [0, 0, 0, 0]
      : [...colour(share(value, scale)), 255];
    pixels.data.set(paint, 4 * i);
  });
  context.putImageData(pixels, 0, 0);
  $("imagenote").textContent = image.note;
  $("imagescale").replaceChildren();
  legend($("imagescale"), scale, "clear: equal; magenta: NaN or infinity on one side");
  $("readout").textContent = "Move over the image, or click it, to read a cell.";
}
function read(event) {
  const box = $("image").getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left) / box.width * shown.cells[0].length);
  const y = Math.floor((event.clientY - box.top) / box.height * shown.cells.length);
  if (!shown.cells[y] || shown.cells[y][x] === undefined) return;
  const last = (start, size, end) => Math.min(start + size, end) - 1;
  $("readout").textContent =
    `rows ${y * shown.height}-${last(y * shown.height, shown.height, shown.rows)}, ` +
    `columns ${x * shown.width}-${last(x * shown.width, shown.width, shown.columns)}: ` +
    (shown.cells[y][x] === 0 ? "equal" : show(shown.cells[y][x]));
}

function drawTable(table, at) {
  const box = make("section", undefined, $("tables"));
  box.id = "table" + at;
  make("h2", table.title, box);
  const bar = make("p", table.note ? table.note + " " : "", box, "dim");
  const find = make("input", undefined, bar);
  find.placeholder = "filter";
  find.setAttribute("aria-label", "filter " + table.title);
  const place = make("table", undefined, make("div", undefined, box, "scroll"), "rows");
  const rows = table.rows.map((cells, i) => ({ cells, kind: (table.kinds || [])[i] || "" }));
  // A column without a single entry says nothing.
  const empty = (cell) => cell === null || cell === undefined || cell === "";
  const used = [...table.columns.keys()].filter((i) => rows.some((row) => !empty(row.cells[i])));
  let order = { column: -1, down: false };
  function fill() {
    const wanted = find.value.toLowerCase();
    const picked = rows.filter((row) => !wanted
      || row.cells.some((cell) => show(cell).toLowerCase().includes(wanted)));
    if (order.column >= 0) picked.sort((a, b) => {
      let x = a.cells[order.column], y = b.cells[order.column];
      if (number(x) !== null || number(y) !== null) { x = number(x); y = number(y); }
      if (x === y) return 0;
      if (x === null || y === null) return x === null ? 1 : -1;
      return (x < y ? -1 : 1) * (order.down ? -1 : 1);
    });
    place.replaceChildren();
    const head = make("tr", undefined, make("thead", undefined, place));
    for (const i of used) {
      const name = table.columns[i];
      const mark = order.column === i ? (order.down ? " \\u2193" : " \\u2191") : "";
      const cell = make("th", undefined, head, i < table.left ? "l" : "");
      const button = make("button", name + mark, cell);
      button.type = "button";
      button.addEventListener("click", () => {
        order = { column: i, down: order.column === i && !order.down };
        fill();
      });
    }
    const body = make("tbody", undefined, place);
    for (const row of picked) {
      const line = make("tr", undefined, body, row.kind ? "r-" + row.kind : "");
      for (const i of used) make("td", show(row.cells[i]), line, i < table.left ? "l" : "");
    }
  }
  find.hidden = rows.length < 10;
  find.addEventListener("input", fill);
  fill();
}

drawVerdict();
$("imagebox").hidden = !(data.images || []).length;
if (!$("imagebox").hidden) {
  data.images.forEach((image, i) => {
    const option = make("option", image.title, $("which"));
    option.value = String(i);
  });
  $("which").addEventListener("change", () => drawImage(Number($("which").value)));
  for (const kind of ["mousemove", "click"]) $("image").addEventListener(kind, read);
  drawImage(0);
}
(data.maps || []).forEach(drawMap);
(data.tables || []).forEach(drawTable);
"""


def report_page(title: str, facts: Mapping[str, object], data: Mapping[str, Any]) -> str:
    """Return the page; `facts` and `data` may hold a file's text, control characters escaped."""
    given = {name: value for name, value in facts.items() if value not in (None, "", (), [])}
    return html.page(title, BODY % {"facts": html.facts(given)}, data, STYLE, html.COLOURS + SCRIPT)
