// The layout of `diff`, `diagnose` and `parity`. Their scripts end with `report({...})`:
//
// - verdict: {text, kind}; kind is good, warn or bad, as everywhere here.
// - chain: [{title, kind, mark, lines}], the evidence in the order it was found.
// - maps: [{title, note, scale, rows, columns, cells}]; a cell is {row, column, text, kind or
//   value, title, lines, flag, chosen} with row and column as indices; `value` is coloured by
//   `scale` {low, high, log, label}, `kind` by its name.
// - images: [{title, note, rows, columns, height, width, cells}], a number a cell, the cells of
//   [height, width] elements of a matrix [rows, columns].
// - tables: [{title, note, left, columns, rows, kinds}]; `left` counts the text columns.

// What several of them say in the same way.
const link = (title, kind, mark, lines) => ({ title, kind, mark, lines });
const table = (title, note, left, columns, rows, kinds = []) =>
  ({ title, note, left, columns, rows, kinds });
const sizes = (found) => found ? `[${found.join(", ")}]` : "-";
const KINDS = { same: "good", precision: "good", derived: "warn", not_exercised: "bad",
  bug: "bad", not_comparable: "warn" };

// Where keys stand in a map, a row a layer and a column a point or role.
function places(keys) {
  const split = keys.map((key) => {
    const found = /^L(\d+)(?:\.|$)/.exec(key);
    return found ? [Number(found[1]), key.slice(found[0].length)] : [null, key];
  });
  const layers = [...new Set(split.map(([layer]) => layer))].sort((a, b) => (a ?? -1) - (b ?? -1));
  const columns = [...new Set(split.map(([, name]) => name))];
  const cells = split.map(([layer, name]) =>
    ({ row: layers.indexOf(layer), column: columns.indexOf(name) }));
  return { rows: layers.map(layerName), columns, cells };
}

// A map of one measure of points; `lines(point)` tells the rest, `first` is the key to begin with.
function pointMap(points, measure, title, note, lines, first) {
  const known = points.filter((point) => point[measure] !== null);
  if (!known.length) return [];
  const { rows, columns, cells } = places(known.map((point) => point.key));
  const above = known.map((p) => number(p[measure])).filter((v) => v > 0 && isFinite(v));
  const high = above.length ? Math.max(...above) : 1;
  const low = Math.max(above.length ? Math.min(...above) : high, high * 1e-10);
  return [{
    title, note, rows, columns,
    scale: { low, high, log: true, label: "relative L2, logarithmic" },
    cells: known.map((point, i) => ({
      ...cells[i], text: general(point[measure], 2), value: point[measure] || null,
      title: point.key, lines: lines(point), flag: point.beyond, chosen: point.key === first,
    })),
  }];
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

function drawVerdict(verdict, chain) {
  $("verdict").textContent = verdict.text;
  $("verdict").classList.add(verdict.kind);
  $("chainbox").hidden = !chain.length;
  for (const found of chain) {
    const item = make("li", undefined, $("chain"));
    make("span", found.title, item);
    make("span", found.mark, item, `mark k-${found.kind}`);
    if (found.lines.length) {
      const lines = make("ul", undefined, item, "lines");
      for (const line of found.lines) make("li", line, lines);
    }
  }
}

function drawMap(map, images) {
  const box = make("section", undefined, $("maps"));
  make("h2", map.title, box);
  if (map.note) make("p", map.note, box, "dim");
  if (map.scale) legend(make("p", undefined, box, "legend"), map.scale);
  const place = make("table", undefined, make("div", undefined, box, "scroll"), "map");
  const detail = make("div", undefined, box, "detail");
  detail.hidden = true;
  function choose(cell, button) {
    for (const other of place.querySelectorAll("button.on")) other.classList.remove("on");
    button.classList.add("on");
    detail.hidden = false;
    detail.replaceChildren();
    make("h3", cell.title, detail);
    for (const text of cell.lines) make("p", text, detail);
    const image = images.findIndex((one) => one.title === cell.title);
    if (image >= 0) { $("which").value = String(image); drawImage(images[image]); }
  }
  const cells = new Map(map.cells.map((cell) => [cell.row + "/" + cell.column, cell]));
  grid(place, "", map.rows, map.columns, (row, column) => {
    const cell = cells.get(row + "/" + column);
    if (!cell) return null;
    const button = cellButton(cell.text, cell.title, cell.flag, cell.kind);
    button.title = cell.title;
    const value = number(cell.value);
    if (value !== null && map.scale) paint(button, share(value, map.scale));
    button.addEventListener("click", () => choose(cell, button));
    return button;
  });
  const chosen = map.cells.find((cell) => cell.chosen);
  if (chosen) [...place.querySelectorAll("button")]
    .find((button) => button.dataset.key === chosen.title).click();
}

const READ = "Move over the image, or click it, to read a cell.";
let image = null;
function drawImage(found) {
  image = found;
  const canvas = $("image"), down = image.cells.length, across = image.cells[0].length;
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
    const pixel = !isFinite(value) ? [255, 0, 255, 255] : value === 0 ? [0, 0, 0, 0]
      : [...colour(share(value, scale)), 255];
    pixels.data.set(pixel, 4 * i);
  });
  context.putImageData(pixels, 0, 0);
  $("imagenote").textContent = image.note;
  $("imagescale").replaceChildren();
  legend($("imagescale"), scale, "clear: equal; magenta: NaN or infinity on one side");
  $("readout").textContent = READ;
}
function read(event) {
  const box = $("image").getBoundingClientRect();
  const x = Math.floor((event.clientX - box.left) / box.width * image.cells[0].length);
  const y = Math.floor((event.clientY - box.top) / box.height * image.cells.length);
  const value = image.cells[y]?.[x];
  if (value === undefined) return;
  const span = (at, size, end) => `${at * size}-${Math.min((at + 1) * size, end) - 1}`;
  $("readout").textContent =
    `rows ${span(y, image.height, image.rows)}, columns ${span(x, image.width, image.columns)}: ` +
    (value === 0 ? "equal" : show(value));
}
function drawImages(images) {
  $("imagebox").hidden = !images.length;
  if (!images.length) return;
  images.forEach((one, i) => { make("option", one.title, $("which")).value = String(i); });
  $("which").addEventListener("change", () => drawImage(images[Number($("which").value)]));
  for (const kind of ["mousemove", "click"]) $("image").addEventListener(kind, read);
  drawImage(images[0]);
}

function drawTable(found, at) {
  const box = make("section", undefined, $("tables"));
  box.id = "table" + at;
  make("h2", found.title, box);
  const bar = make("p", found.note ? found.note + " " : "", box, "dim");
  const find = make("input", undefined, bar);
  find.placeholder = "filter";
  find.setAttribute("aria-label", "filter " + found.title);
  const place = make("table", undefined, make("div", undefined, box, "scroll"), "rows");
  const rows = found.rows.map((cells, i) => ({ cells, kind: found.kinds[i] || "" }));
  const columns = found.columns
    .map((name, i) => ({ name, left: i < found.left, of: (row) => row.cells[i] ?? null }))
    // A column without a single entry says nothing.
    .filter(({ of }) => rows.some((row) => of(row) !== null && of(row) !== ""));
  const fill = sortable(place, columns, (row, line) => {
    if (row.kind) line.className = "r-" + row.kind;
    for (const { left, of } of columns) make("td", show(of(row)), line, left ? "l" : "");
  });
  function pick() {
    const wanted = find.value.toLowerCase();
    fill(rows.filter((row) => row.cells.some((cell) => show(cell).toLowerCase().includes(wanted))));
  }
  find.hidden = rows.length < 10;
  find.addEventListener("input", pick);
  pick();
}

function report({ verdict, chain, maps, images = [], tables }) {
  drawVerdict(verdict, chain);
  drawImages(images);
  for (const map of maps) drawMap(map, images);
  tables.forEach(drawTable);
}
