// What every page has: the data, elements, numbers, colours, maps and tables.

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// Text of a file becomes a text node and nothing else.
function make(tag, text, parent, name) {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (name) node.className = name;
  if (parent) parent.append(node);
  return node;
}

// Numbers. JSON has no infinities and no NaN: they come as strings.
const number = (v) => v === "Infinity" ? Infinity : typeof v === "number" ? v : null;
function show(value, whole = 1e15) {
  if (value === null || value === undefined) return "-";
  if (value === Infinity || value === "Infinity") return "inf";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < whole) return String(value);
  return String(Number(value.toPrecision(4)));
}

const NAMES = { "Infinity": "inf", "-Infinity": "-inf", "NaN": "nan" };
// A number as the command prints it: exact halves are rounded to the even digit.
function digits(value, form, count) {
  const [long, power] = value[form](count + 40).split("e");
  const kept = long.slice(0, -40);
  if (!/^50+$/.test(long.slice(-40)) || !"02468".includes(kept.at(-1))) return value[form](count);
  return power === undefined ? kept : `${kept}e${power}`;
}
// `count` digits after the point.
function fixed(value, count) {
  return typeof value === "number" ? digits(value, "toFixed", count) : NAMES[value] ?? "-";
}
// `count` digits that say something, as C's %g.
function general(value, count) {
  if (typeof value !== "number") return NAMES[value] ?? "-";
  if (value === 0) return Object.is(value, -0) ? "-0" : "0";
  const [mantissa, power] = digits(value, "toExponential", count - 1).split("e");
  const trim = (text) => text.includes(".") ? text.replace(/\.?0+$/, "") : text;
  if (power >= -4 && power < count)
    return trim(Number(`${mantissa}e${power}`).toFixed(count - 1 - power));
  return `${trim(mantissa)}e${power[0]}${power.slice(1).padStart(2, "0")}`;
}

// Colours of numbers, [r, g, b] from the least to the most. The least is nearest to the ground: the
// lightest on a light page, the darkest on a dark one. `amount` is of a number alone; `tolerance`
// has its lower half within a tolerance, pale, and its upper half beyond it, red.
const RAMPS = {
  amount: {
    light: [[[240, 245, 250], [183, 206, 231], [108, 158, 205], [42, 103, 165], [10, 42, 90]]],
    dark: [[[30, 36, 46], [32, 64, 104], [44, 108, 160], [112, 172, 220], [222, 238, 252]]],
  },
  tolerance: {
    light: [[[250, 252, 251], [206, 232, 214]], [[250, 206, 170], [220, 96, 70], [120, 14, 22]]],
    dark: [[[30, 35, 42], [36, 70, 54]], [[120, 62, 32], [218, 96, 70], [255, 190, 172]]],
  },
};
const SCHEMES = ["light", "dark"];
// Of what has no tolerance and is wrong: the upper half of `tolerance`.
RAMPS.beyond = Object.fromEntries(SCHEMES.map((name) => [name, [RAMPS.tolerance[name][1]]]));
function colour(share, ramp = "amount", scheme = nowDark() ? "dark" : "light") {
  const parts = RAMPS[ramp][scheme], whole = Math.min(Math.max(share, 0), 1);
  const upper = parts.length > 1 && whole > 0.5;
  const stops = parts[upper ? 1 : 0];
  const at = (parts.length > 1 ? 2 * whole - (upper ? 1 : 0) : whole) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2), part = at - low;
  return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * part));
}
const css = (share, ramp) =>
  `light-dark(${SCHEMES.map((scheme) => `rgb(${colour(share, ramp, scheme)})`).join(",")})`;
// WCAG's relative luminance of a colour.
function luminance([r, g, b]) {
  const f = (c) => c <= 10 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  return 0.2126 * f(r) + 0.7152 * f(g) + 0.0722 * f(b);
}
// The text on it is black or white, whichever has the greater contrast.
function paint(button, share, ramp) {
  const inks = SCHEMES.map((scheme) =>
    luminance(colour(share, ramp, scheme)) > 0.179 ? "#000" : "#fff");
  button.style.background = css(share, ramp);
  button.style.color = `light-dark(${inks.join(",")})`;
}
// Where a distance stands to its tolerance: up to 0.5 within, above it beyond. What decides is the
// verdict, `beyond` (true, false, or null where there is none): a point has other bounds too. The
// colours within are the same everywhere; those beyond end at the furthest of a map, `most`.
const DECADES = 3; // within
const decades = (value, tolerance) =>
  isFinite(value) && tolerance > 0 ? Math.log10(value / tolerance) : Infinity;
function toleranceShare(value, tolerance, beyond, most) {
  if (!value && !beyond) return 0;
  const ratio = value ? decades(value, tolerance) : 0;
  if (beyond ?? ratio > 0) return 0.5 + Math.min(Math.max(ratio / most, 1e-6), 1) / 2;
  return 0.5 + Math.min(Math.max(ratio / DECADES, -1), 0) / 2;
}
// The decades beyond its tolerance of the furthest; `rows` are [value, tolerance].
function furthestOf(rows) {
  const known = rows.map(([value, tolerance]) => value ? decades(value, tolerance) : 0);
  return Math.ceil(Math.max(1, ...known.filter(isFinite)));
}
function toleranceLegend(parent, most) {
  const bar = make("span", "equal", parent), strip = make("i", undefined, bar);
  const places = [[0, 0], [0.5, 50], [0.5 + 1e-6, 50], [0.75, 75], [1, 100]];
  strip.style.background = `linear-gradient(to right, ${places.map(([share, at]) =>
    `${css(share, "tolerance")} ${at}%`).join(",")})`;
  bar.append(`${general(10 ** most, 6)} times the tolerance; the tolerance is in the middle: ` +
    "pale is within it, red beyond");
}

const layerName = (layer) => layer === null ? "model" : `L${layer}`;

// A map: `cell(row, column)`, of two indices, returns a button or nothing.
function grid(table, corner, rows, columns, cell) {
  const head = make("tr", undefined, make("thead", undefined, table));
  make("th", corner, head);
  for (const name of columns) make("th", name, head);
  const body = make("tbody", undefined, table);
  rows.forEach((name, row) => {
    const line = make("tr", undefined, body);
    make("th", name, line);
    columns.forEach((_, column) => {
      const button = cell(row, column);
      make("td", undefined, line).append(...(button ? [button] : []));
    });
  });
  roving(table, (from, [right, down]) => {
    const place = from.closest("td"), lines = [...body.children];
    let row = lines.indexOf(place.parentElement), column = place.cellIndex;
    for (;;) {
      row += down;
      column += right;
      const next = lines[row]?.cells[column];
      if (!next || column < 1) return null;
      const button = next.querySelector("button");
      if (button) return button;
    }
  });
}

// Of many buttons one is reached by Tab, the others from it by the arrow keys: `next(from, step)`
// returns the button that lies [right, down] of one, or null.
const STEPS = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
function roving(place, next) {
  const first = (wanted) => {
    for (const button of place.querySelectorAll("button[tabindex='0']")) button.tabIndex = -1;
    if (wanted) wanted.tabIndex = 0;
  };
  for (const button of place.querySelectorAll("button")) button.tabIndex = -1;
  first(place.querySelector("button"));
  place.onfocusin = (event) => { if (event.target.matches("button")) first(event.target); };
  place.onkeydown = (event) => {
    const step = STEPS[event.key], from = event.target.closest("button");
    if (!step || !from) return;
    event.preventDefault();
    next(from, step)?.focus();
  };
}
function cellButton(text, key, flag, kind) {
  const button = make("button", text, undefined, kind);
  button.type = "button";
  button.dataset.key = key;
  button.classList.toggle("flag", Boolean(flag));
  return button;
}

// A table whose headings sort it, empty cells last. `columns` are {name, left, of}, `of(row)` being
// the value; `draw(row, line)` makes the cells. Returns the function that fills it with rows; of
// many it shows the first, and a button for the others. Rows that `aside(row)` says do not apply
// are hidden until a button is pressed too.
const SHOWN_ROWS = 500;
function sortable(table, columns, draw, aside = () => false) {
  let order = { of: null, down: false }, last = [], most = SHOWN_ROWS, whole = false;
  function compare(a, b) {
    let x = order.of(a), y = order.of(b);
    if (number(x) !== null || number(y) !== null) { x = number(x); y = number(y); }
    if (x === y) return 0;
    if (x === null || y === null) return x === null ? 1 : -1;
    return (x < y ? -1 : 1) * (order.down ? -1 : 1);
  }
  function fill(rows) {
    last = rows;
    table.replaceChildren();
    const head = make("tr", undefined, make("thead", undefined, table));
    for (const { name, left, of } of columns) {
      const mark = order.of === of ? (order.down ? " \u2193" : " \u2191") : "";
      const place = make("th", undefined, head, left ? "l" : "");
      if (mark) place.setAttribute("aria-sort", order.down ? "descending" : "ascending");
      const button = make("button", name + mark, place);
      button.type = "button";
      button.addEventListener("click", () => {
        order = { of, down: order.of === of && !order.down };
        fill(last);
        table.querySelectorAll("th button")[columns.findIndex((one) => one.of === of)].focus();
      });
    }
    const body = make("tbody", undefined, table);
    const shown = whole ? rows : rows.filter((row) => !aside(row));
    const ordered = order.of ? [...shown].sort(compare) : shown;
    for (const row of ordered.slice(0, most)) draw(row, make("tr", undefined, body));
    const left = rows.length - shown.length;
    if (shown.length > most)
      more(body, `show all ${shown.length} rows`, () => { most = Infinity; });
    if (left) more(body, `${left} that do not apply`, () => { whole = true; });
  }
  function more(body, text, change) {
    const cell = make("td", undefined, make("tr", undefined, body, "more"), "l");
    cell.colSpan = columns.length;
    const button = make("button", text, cell);
    button.type = "button";
    button.addEventListener("click", () => { change(); fill(last); });
  }
  return fill;
}

// A part of the page under a heading, and the line that leads to all of them.
function part(parent, title, note) {
  const box = make("section", undefined, parent, "part");
  make("h2", title, box);
  if (note) make("p", note, box, "dim");
  return box;
}
function contents() {
  const heads = [...document.querySelectorAll(".part > h2")].filter((h) => !h.closest("[hidden]"));
  const names = heads.map((head) => head.dataset.short ?? head.textContent.split(": ")[0]);
  heads.forEach((head, at) => {
    const box = head.parentElement;
    if (!box.id) box.id = "part" + at;
    const alone = names.filter((name) => name === names[at]).length === 1;
    make("a", alone ? names[at] : head.textContent, $("contents")).href = "#" + box.id;
  });
  $("contents").hidden = heads.length < 2;
}

// What floats next to a cell that is pointed at or reached by the keyboard; `fill(box)` writes it.
const tip = make("div", undefined, document.body, "tip");
tip.hidden = true;
function tipped(node, fill) {
  const open = () => {
    tip.replaceChildren();
    fill(tip);
    tip.hidden = false;
    const at = node.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const below = at.bottom + 8 + size.height < innerHeight;
    tip.style.left = Math.max(8, Math.min(at.left, innerWidth - size.width - 8)) + "px";
    tip.style.top = Math.max(8, below ? at.bottom + 8 : at.top - size.height - 8) + "px";
  };
  const close = () => { tip.hidden = true; };
  node.addEventListener("mouseenter", open);
  node.addEventListener("mouseleave", close);
  node.addEventListener("focus", () => { if (node.matches(":focus-visible")) open(); });
  node.addEventListener("blur", close);
}
addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });

// The verdict: `text` in a sentence; `rows` [name, text], the cause and the place; `commands`
// {name, text}, each with a button that copies it. What stands here stands nowhere else.
function drawVerdict({ text, kind, rows = [], commands = [] }) {
  const box = $("verdict");
  if (kind) box.classList.add(kind);
  make("p", text, box, "says");
  const said = rows.filter(([, value]) => value);
  if (said.length) {
    const body = make("tbody", undefined, make("table", undefined, box, "facts"));
    for (const [name, value] of said) {
      const line = make("tr", undefined, body);
      make("th", name, line, "l");
      make("td", value, line);
    }
  }
  for (const { name, text: command } of commands) {
    const line = make("div", undefined, box, "command");
    make("span", name, line, "dim");
    make("code", command, line);
    const button = make("button", "copy", line, "plain");
    button.type = "button";
    button.setAttribute("aria-label", `copy: ${command}`);
    button.addEventListener("click", () => copy(command, button));
  }
}
// A page that was opened as a file may have no clipboard: then the old way, which needs none.
async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea", text, document.body);
    field.select();
    document.execCommand("copy");
    field.remove();
    button.focus();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy"; }, 2000);
}

// A and B side by side: rows are [what, of A, of B].
function sides(parent, rows) {
  const place = make("table", undefined, parent, "sides");
  const head = make("tr", undefined, make("thead", undefined, place));
  for (const name of ["", "A", "B"]) make("th", name, head);
  const body = make("tbody", undefined, place);
  for (const [what, a, b] of rows) {
    const line = make("tr", undefined, body);
    make("th", what, line);
    make("td", a, line);
    make("td", b, line);
  }
}

// Bytes for people, in powers of 1000 as the commands print them.
function bytesText(count) {
  let value = count;
  for (const unit of ["B", "kB", "MB", "GB", "TB"]) {
    if (value < 1000 || unit === "TB")
      return unit === "B" ? `${count} B` : `${fixed(value, 1)} ${unit}`;
    value /= 1000;
  }
}
// 268.1M, 2.8M, 1536.
function countText(count) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"]])
    if (count >= size) return `${general(count / size, 3)}${unit}`;
  return String(count);
}
const percentText = (share) => share >= 0.0995 ? `${Math.round(100 * share)} %`
  : share >= 0.0005 ? `${general(100 * share, 2)} %` : "< 0.1 %";

// Light or dark is the system's; the button turns it round for this page.
const dark = matchMedia("(prefers-color-scheme: dark)");
const nowDark = () => (document.documentElement.style.colorScheme ||
  (dark.matches ? "dark" : "light")) === "dark";
const repaints = new Map(); // what paints a canvas again, whose colours are no style, by canvas
const nameScheme = () => {
  $("scheme").textContent = nowDark() ? "Light" : "Dark";
  for (const again of repaints.values()) again();
};
$("scheme").addEventListener("click", () => {
  document.documentElement.style.colorScheme = nowDark() ? "light" : "dark";
  nameScheme();
});
dark.addEventListener("change", nameScheme);
nameScheme();

for (const [name, value] of data.facts) {
  const line = make("tr", undefined, $("facts"));
  make("th", name, line, "l");
  make("td", value, line);
}
