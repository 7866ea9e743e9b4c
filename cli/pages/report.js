// The layout of `diff`, `diagnose` and `parity`. Their scripts end with `report({...})`:
//
// - verdict: see drawVerdict; kind is good, warn or bad, as everywhere here.
// - chain: [{title, kind, mark, lines}], the evidence in the order it was found.
// - maps: [{title, note, scale, rows, columns, cells}]; a cell is {row, column, text, kind or
//   value, title, lines, sides, flag, chosen} with row and column as indices; `value` is coloured
//   by `scale` {low, high, log, label}, or by the cell's `tolerance` and `beyond` where the scale
//   is {tolerance: decades}, `kind` by its name; `sides` are [what, of A, of B]; `keys` are
//   [kind, text] of the legend.
// - images: [{title, note, rows, columns, height, width, cells, a, b}], a number a cell, the cells
//   of [height, width] elements of a matrix [rows, columns]; `a` and `b` are each side's own.
// - heats: [{title, note, label, heats, positions}], see drawHeat.
// - tables: [{title, note, left, columns, rows, kinds, aside}]; `left` counts the text columns,
//   `aside` says of each row whether it does not apply.

// What several of them say in the same way.
const link = (title, kind, mark, lines) => ({ title, kind, mark, lines });
const table = (title, note, left, columns, rows, kinds = [], aside = []) =>
  ({ title, note, left, columns, rows, kinds, aside });
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

// A map of one measure of points; `lines(point)` tells the rest, `first` is the key to begin with,
// `beyond(point)` says whether the measure leaves its tolerance.
function pointMap(points, measure, title, note, lines, first, beyond = (point) => point.beyond) {
  const known = points.filter((point) => point[measure] !== null);
  if (!known.length) return [];
  const { rows, columns, cells } = places(known.map((point) => point.key));
  return [{
    title, note, rows, columns, scale: { tolerance: furthestOf(known.map((p) => [number(p[measure]), p.tolerance])) },
    cells: known.map((point, i) => ({
      ...cells[i], text: general(point[measure], 2), value: point[measure],
      tolerance: point.tolerance, beyond: beyond(point), title: point.key, lines: lines(point),
      flag: beyond(point), chosen: point.key === first,
    })),
  }];
}

function drawChain(chain) {
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
  const box = part($("maps"), map.title, map.note);
  const key = make("p", undefined, box, "legend");
  for (const [kind, text] of map.keys ?? []) {
    const place = make("span", undefined, key);
    const swatch = make("b", undefined, place);
    if (kind === "flag") swatch.style.borderColor = "var(--bad)";
    else swatch.style.background = `var(--${kind}-fill)`;
    place.append(text);
  }
  if (map.scale) legend(key, map.scale);
  const place = make("table", undefined, make("div", undefined, box, "scroll"), "map");
  const detail = make("div", undefined, box, "detail");
  detail.hidden = true;
  const tell = (cell, into) => {
    if (cell.sides) sides(into, cell.sides);
    for (const text of cell.lines) make("p", text, into);
  };
  function choose(cell, button) {
    for (const other of place.querySelectorAll("button.on")) other.classList.remove("on");
    button.classList.add("on");
    detail.hidden = false;
    detail.replaceChildren();
    make("h3", cell.title, detail);
    tell(cell, detail);
    const image = images.findIndex((one) => one.title === cell.title);
    if (image >= 0) { $("which").value = String(image); drawImage(images[image]); }
  }
  const cells = new Map(map.cells.map((cell) => [cell.row + "/" + cell.column, cell]));
  grid(place, "", map.rows, map.columns, (row, column) => {
    const cell = cells.get(row + "/" + column);
    if (!cell) return null;
    const button = cellButton(cell.text, cell.title, cell.flag, cell.kind);
    const value = number(cell.value);
    if (value !== null && map.scale?.tolerance)
      paint(button, toleranceShare(value, cell.tolerance, cell.beyond, map.scale.tolerance),
        "tolerance");
    else if (value !== null && map.scale) paint(button, share(value, map.scale), map.scale.ramp);
    tipped(button, (into) => { make("strong", cell.title, into); tell(cell, into); });
    button.addEventListener("click", () => choose(cell, button));
    return button;
  });
  const chosen = map.cells.find((cell) => cell.chosen);
  if (chosen) [...place.querySelectorAll("button")]
    .find((button) => button.dataset.key === chosen.title).click();
}

// A, B and their difference next to each other under one cursor.
const READ = "Move over an image, click it, or use the arrow keys, to read a cell of both sides.";
const views = [["a", "A", "image-a"], ["b", "B", "image-b"], ["cells", "A - B", "image"]];
const frames = new Map();
function drawImage(image) {
  const down = image.cells.length, across = image.cells[0].length;
  const all = (name) => image[name].flat().map(number);
  const own = scaleOf([...all("a"), ...all("b")]), scale = scaleOf(all("cells"));
  const wide = Math.max(180, $("triple").firstElementChild.clientWidth);
  function moved(x, y) {
    for (const [frame] of frames.values()) point(frame, x, y, across, down);
    const span = (at, size, end) => `${at * size}-${Math.min((at + 1) * size, end) - 1}`;
    const value = image.cells[y][x], place = $("readout");
    place.replaceChildren();
    make("span", `rows ${span(y, image.height, image.rows)}, columns ` +
      `${span(x, image.width, image.columns)}: ${value === 0 ? "equal" : show(value)}`, place);
    sides(place, [["root mean square", show(image.a[y][x]), show(image.b[y][x])]]);
  }
  for (const [name, title] of views) {
    const [frame, canvas] = frames.get(name);
    frame.querySelector(".cursor").hidden = true;
    raster(frame, canvas, { cells: image[name], scale: name === "cells" ? scale : own,
      name: `${image.title}, ${title}`, wide }, moved);
  }
  $("imagenote").textContent = image.note;
  $("imagescale").replaceChildren();
  legend($("imagescale"), { ...own, label: ["A and B", own.label].filter(Boolean).join(", ") });
  legend($("imagescale"), { ...scale, label: ["A - B", scale.label].filter(Boolean).join(", ") },
    "clear: equal; magenta: NaN or infinity on one side");
  $("readout").textContent = READ;
}
function drawImages(images) {
  $("imagebox").hidden = !images.length;
  if (!images.length) return;
  for (const [name, title, id] of views) {
    const figure = make("figure", undefined, $("triple"));
    make("figcaption", title, figure);
    frames.set(name, canvasIn(figure, id));
  }
  images.forEach((one, i) => { make("option", one.title, $("which")).value = String(i); });
  $("which").addEventListener("change", () => drawImage(images[Number($("which").value)]));
  drawImage(images[0]);
}

function drawTable(found, at) {
  const box = part($("tables"), found.title, found.note);
  box.id = "table" + at;
  const find = make("input", undefined, make("div", undefined, box, "bar"));
  find.type = "search";
  find.placeholder = "filter";
  find.setAttribute("aria-label", "filter " + found.title);
  const place = make("table", undefined, make("div", undefined, box, "scroll"), "rows");
  const rows = found.rows.map((cells, i) =>
    ({ cells, kind: found.kinds[i] || "", aside: Boolean(found.aside[i]) }));
  const columns = found.columns
    .map((name, i) => ({ name, left: i < found.left, of: (row) => row.cells[i] ?? null }))
    // A column without a single entry says nothing.
    .filter(({ of }) => rows.some((row) => of(row) !== null && of(row) !== ""));
  const fill = sortable(place, columns, (row, line) => {
    if (row.kind) line.className = "r-" + row.kind;
    for (const { left, of } of columns) make("td", show(of(row)), line, left ? "l" : "");
  }, (row) => row.aside && rows.some((one) => !one.aside));
  function pick() {
    const wanted = find.value.toLowerCase();
    fill(rows.filter((row) => row.cells.some((cell) => show(cell).toLowerCase().includes(wanted))));
  }
  find.hidden = rows.length < 10;
  find.addEventListener("input", pick);
  pick();
}

function report({ verdict, chain, maps, images = [], heats = [], tables }) {
  drawVerdict(verdict);
  drawChain(chain);
  drawImages(images);
  for (const map of maps) drawMap(map, images);
  for (const one of heats)
    drawHeat($("maps"), one.title, one.note, one.heats, one.positions, one.label);
  tables.forEach(drawTable);
}
