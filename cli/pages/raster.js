// Numbers in rows and columns as an image with a cursor: the mouse moves it, and the arrow keys.
// Cells are squares where there is room, and never so narrow that they cannot be told apart.

// Colours of some numbers: from the 2nd to the 98th percentile, so that few wild ones do not hide
// the others; logarithmic.
function scaleOf(values, label) {
  const finite = values.filter((v) => v > 0 && isFinite(v)).sort((a, b) => a - b);
  const part = (share) => finite.length ? finite[Math.floor(share * (finite.length - 1))] : 1;
  const high = part(0.98), most = part(1);
  const more = most > high ? `and more (up to ${short(most)})` : "";
  return { low: Math.max(part(0.02), high * 1e-6), high, log: true,
    label: [label, more].filter(Boolean).join(", ") };
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
  if (scale.tolerance) toleranceLegend(parent, scale.tolerance);
  else {
    const bar = make("span", undefined, parent);
    bar.append(short(scale.low));
    const strip = make("i", undefined, bar);
    const places = [0, 0.25, 0.5, 0.75, 1].map((share) => css(share, scale.ramp));
    strip.style.background = `linear-gradient(to right, ${places.join(",")})`;
    bar.append(short(scale.high) + " " + (scale.label || ""));
  }
  if (more) make("span", more, parent, "dim");
}

const WIDE = 900, TALL = 480, LEAST_SIDE = 0.25; // pixels; of the longer side
// The size that `across` x `down` cells are shown in: [width, height].
function shownSize(across, down, wide) {
  const zoom = Math.max(1, Math.min(28, wide / across, TALL / down));
  const width = across * zoom, height = down * zoom, least = LEAST_SIDE * Math.max(width, height);
  return [Math.max(width, least), Math.max(height, least)];
}
// Draw cells into a canvas inside `frame`; `moved(x, y)` is told of the cursor. `scale` gives the
// colours; with `shares`, a share of the tolerance ramp for every cell, those do.
function raster(frame, canvas, { cells, scale, name, shares, wide = WIDE }, moved) {
  const down = cells.length, across = cells[0].length;
  canvas.width = across;
  canvas.height = down;
  const [width, height] = shownSize(across, down, wide);
  frame.style.width = `min(100%, ${width}px)`;
  canvas.style.aspectRatio = `${width} / ${height}`;
  canvas.setAttribute("aria-label",
    `${name}: ${down} rows of ${across} cells; arrow keys read them`);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const drawn = () => {
    const pixels = context.createImageData(across, down), known = shares?.flat();
    cells.flat().map(number).forEach((value, i) => {
      const rgb = known ? () => colour(known[i], "tolerance")
        : () => colour(share(value, scale), scale.ramp);
      const pixel = value === null ? [0, 0, 0, 0] : !isFinite(value) ? [255, 0, 255, 255]
        : value === 0 ? [0, 0, 0, 0] : [...rgb(), 255];
      pixels.data.set(pixel, 4 * i);
    });
    context.putImageData(pixels, 0, 0);
  };
  drawn();
  repaints.set(canvas, drawn);
  let at = [0, 0];
  const go = (x, y) => {
    at = [Math.min(Math.max(x, 0), across - 1), Math.min(Math.max(y, 0), down - 1)];
    moved(...at);
  };
  canvas.onmousemove = canvas.onclick = (event) => {
    const box = canvas.getBoundingClientRect();
    go(Math.floor((event.clientX - box.left) / box.width * across),
      Math.floor((event.clientY - box.top) / box.height * down));
  };
  canvas.onkeydown = (event) => {
    const step = STEPS[event.key];
    if (!step) return;
    event.preventDefault();
    go(at[0] + step[0], at[1] + step[1]);
  };
  canvas.onfocus = () => { if (canvas.matches(":focus-visible")) go(...at); };
}
// A canvas with a cursor: returns [frame, canvas].
function canvasIn(parent, id) {
  const frame = make("div", undefined, parent, "raster");
  const canvas = make("canvas", undefined, frame);
  if (id) canvas.id = id;
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  make("i", undefined, frame, "cursor").hidden = true;
  return [frame, canvas];
}
function point(frame, x, y, across, down) {
  const cursor = frame.querySelector(".cursor");
  cursor.hidden = false;
  Object.assign(cursor.style, { left: 100 * x / across + "%", top: 100 * y / down + "%",
    width: 100 / across + "%", height: 100 / down + "%" });
}

// Per token: `heats` are {point, rows, values}, a row a layer and a column a position, and of
// distances `tolerances` and `beyond`, those of each row's point; `positions` say which tokens of
// the text they are.
function drawHeat(parent, title, note, heats, positions, label) {
  if (!heats.length) return;
  const box = part(parent, title, note);
  box.classList.add("heat");
  const bar = make("div", undefined, box, "bar");
  const which = make("select", undefined, make("label", "Point ", bar));
  heats.forEach((one, i) => { make("option", one.point, which).value = String(i); });
  const [frame, canvas] = canvasIn(make("div", undefined, box, "scrollx"));
  const key = make("p", undefined, box, "legend");
  const said = make("p", "Move over it, or use the arrow keys, to read a token.", box, "dim");
  said.setAttribute("aria-live", "polite");
  function draw() {
    const one = heats[Number(which.value)], down = one.rows.length, across = positions.length;
    const held = one.tolerances?.every((bound) => bound !== null);
    const most = held && furthestOf(one.values.flatMap((row, y) =>
      row.map((value) => [number(value), one.tolerances[y]])));
    const scale = held ? { tolerance: most }
      : scaleOf(one.values.flat().map(number).filter((v) => v !== null), label);
    const shares = held ? one.values.map((row, y) => row.map((value) =>
      toleranceShare(number(value) ?? 0, one.tolerances[y], one.beyond[y] ? null : false,
        most))) : null;
    frame.querySelector(".cursor").hidden = true;
    const cells = { cells: one.values, scale, shares, name: `${title}, ${one.point}` };
    raster(frame, canvas, cells, (x, y) => {
      point(frame, x, y, across, down);
      const value = one.values[y][x];
      said.textContent = `${one.rows[y]}, position ${positions[x]}: ` +
        `${value === null ? "not recorded" : show(value)}`;
      if (held) said.textContent += ` (tolerance of the point ${show(one.tolerances[y])})`;
    });
    key.replaceChildren();
    legend(key, scale, `rows ${one.rows[0]} to ${one.rows.at(-1)}, columns position ` +
      `${positions[0]} to ${positions.at(-1)}; clear: zero; magenta: NaN or infinity`);
  }
  which.addEventListener("change", draw);
  const tall = Math.max(...heats.map((one) => one.rows.length));
  const out = heats.findIndex((one) => one.point === "out");
  which.value = String(out >= 0 ? out : heats.findIndex((one) => one.rows.length === tall));
  draw();
}
