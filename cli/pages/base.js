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
// `count` digits behind the point.
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

// Colours of a heat map, dark to bright as in viridis: [r, g, b] of a share.
const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2), part = at - low;
  return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * part));
}
function paint(button, share) {
  const [r, g, b] = colour(share);
  button.style.background = `rgb(${r},${g},${b})`;
  button.style.color = 0.3 * r + 0.6 * g + 0.1 * b > 120 ? "#000" : "#fff";
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
}
function cellButton(text, key, flag, kind) {
  const button = make("button", text, undefined, kind);
  button.type = "button";
  button.dataset.key = key;
  button.classList.toggle("flag", Boolean(flag));
  return button;
}

// A table whose headings sort it, empty cells last. `columns` are {name, left, of}, `of(row)` being
// the value; `draw(row, line)` makes the cells. Returns the function that fills it with rows.
function sortable(table, columns, draw) {
  let order = { of: null, down: false }, last = [];
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
      const button = make("button", name + mark, make("th", undefined, head, left ? "l" : ""));
      button.type = "button";
      button.addEventListener("click", () => {
        order = { of, down: order.of === of && !order.down };
        fill(last);
      });
    }
    const body = make("tbody", undefined, table);
    for (const row of order.of ? [...rows].sort(compare) : rows)
      draw(row, make("tr", undefined, body));
  }
  return fill;
}

for (const [name, value] of data.facts) {
  const line = make("tr", undefined, $("facts"));
  make("th", name, line, "l");
  make("td", value, line);
}
