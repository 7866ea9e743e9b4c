// Where bytes are: a tree of {name, size, children, row}, drawn as areas and as an outline.

// Rectangles of sizes (largest first) in [x, y, w, h]: rows along the shorter side, each as long as
// its rectangles get closer to squares by it (Bruls, Huizing and van Wijk, 2000).
function squares(sizes, [x, y, w, h]) {
  const all = sizes.reduce((sum, size) => sum + size, 0), found = [];
  if (!all || w <= 0 || h <= 0) return sizes.map(() => [x, y, 0, 0]);
  const areas = sizes.map((size) => size * w * h / all);
  const worst = (sum, least, most, side) =>
    Math.max(side * side * most / (sum * sum), sum * sum / (side * side * least));
  let start = 0;
  while (start < areas.length) {
    const side = Math.min(w, h);
    let end = start + 1, sum = areas[start];
    while (end < areas.length && areas[end] > 0 &&
      worst(sum + areas[end], areas[end], areas[start], side) <=
      worst(sum, areas[end - 1], areas[start], side)) sum += areas[end++];
    const thick = side ? sum / side : 0;
    let at = 0;
    for (const area of areas.slice(start, end)) {
      const long = sum ? area / sum * side : 0;
      found.push(w < h ? [x + at, y, long, thick] : [x, y + at, thick, long]);
      at += long;
    }
    if (w < h) { y += thick; h -= thick; } else { x += thick; w -= thick; }
    start = end;
  }
  return found;
}

// A tree of rows by the names that `path(row)` gives, sizes added up, largest first.
function treeOf(rows, path, size) {
  const top = { name: "", size: 0, children: new Map() };
  for (const row of rows) {
    let node = top;
    const names = path(row);
    names.forEach((name, depth) => {
      node.size += size(row);
      if (!node.children.has(name)) node.children.set(name, { name, size: 0, children: new Map() });
      node = node.children.get(name);
      if (depth === names.length - 1) { node.row = row; node.size += size(row); }
    });
  }
  const sorted = (node, above) => {
    node.above = above;
    node.children = [...node.children.values()].sort((a, b) => b.size - a.size);
    node.children.forEach((child) => sorted(child, node));
    return node;
  };
  return sorted(top, null);
}
const leaves = (node) => node.children.length ? node.children.flatMap(leaves) : [node];

// The areas: groups with a heading, tensors in them coloured by `fill(row)`. A click on a group
// makes it the whole, one on a tensor is `choose(row)`.
const HEAD = 20, LEAST = 2; // pixels: a group's heading, the smallest side that is drawn
function treemap(place, trail, tree, { fill, say, short, choose }) {
  let shown = tree, width = 0;
  function open(node, focus) {
    shown = node;
    width = place.clientWidth;
    trail.replaceChildren();
    for (let up = node, way = []; up; up = up.above) {
      way.unshift(up);
      if (!up.above) for (const one of way) crumb(one, one === node);
    }
    place.replaceChildren();
    const box = place.getBoundingClientRect();
    draw(node, [0, 0, box.width, box.height], 0);
    roving(place, nextArea);
    if (focus) (place.querySelector("button") ?? place).focus();
  }
  function crumb(node, last) {
    const text = `${node.name || "all"} ${bytesText(node.size)}`;
    const button = make("button", text, trail, "plain");
    button.type = "button";
    if (last) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => open(node, true));
  }
  function draw(node, rect, depth) {
    const kept = node.children.filter((child) => child.size > 0);
    squares(kept.map((child) => child.size), rect).forEach((area, i) => {
      const child = kept[i], [x, y, w, h] = area;
      if (w < LEAST || h < LEAST) return;
      const group = child.children.length > 0;
      if (group && depth && (w < 34 || h < HEAD + 12)) { draw(child, area, depth + 1); return; }
      const button = make("button", undefined, place, group ? "group" : "leaf");
      button.type = "button";
      Object.assign(button.style,
        { left: x + "px", top: y + "px", width: w + "px", height: h + "px" });
      const label = say(child);
      button.setAttribute("aria-label", label);
      if (w > 44 && h > 15) make("span", short(child), button);
      tipped(button, (box) => make("div", label, box));
      if (!group) button.style.background = fill(child.row);
      button.addEventListener("click", () => group ? open(child, true) : choose(child.row));
      if (group) draw(child, [x + 2, y + HEAD, w - 4, h - HEAD - 2], depth + 1);
    });
  }
  // The nearest area that begins further in a direction.
  function nextArea(from, [right, down]) {
    const at = from.getBoundingClientRect();
    let best = null, least = Infinity;
    for (const other of place.querySelectorAll("button")) {
      const to = other.getBoundingClientRect(), dx = to.x - at.x, dy = to.y - at.y;
      const along = right ? dx * right : dy * down, across = Math.abs(right ? dy : dx);
      if (other === from || along <= 0.5) continue;
      const far = along + 2 * across;
      if (far < least) { least = far; best = other; }
    }
    return best;
  }
  place.addEventListener("keyup", (event) => {
    const buttons = trail.querySelectorAll("button");
    if (event.key === "Escape" && buttons.length > 1) buttons[buttons.length - 2].click();
  });
  // Another width: the same areas, and the keyboard stays where it was.
  function again() {
    const held = document.activeElement, crumb = [...trail.children].indexOf(held);
    const label = place.contains(held) ? held.getAttribute("aria-label") : null;
    open(shown, false);
    const same = [...place.children].find((one) => one.getAttribute("aria-label") === label);
    (crumb < 0 ? same : trail.children[crumb])?.focus({ preventScroll: true });
  }
  open(tree, false);
  new ResizeObserver(() => {
    if (Math.abs(place.clientWidth - width) >= 2) again();
  }).observe(place);
}

// The same as an outline that opens and closes.
function outline(place, node, most, { swatch, choose }) {
  for (const child of node.children) {
    const group = child.children.length > 0;
    const box = make(group ? "details" : "div", undefined, place, "branch");
    const line = make(group ? "summary" : "button", undefined, box, "twig");
    if (!group) { line.type = "button"; line.addEventListener("click", () => choose(child.row)); }
    make("span", child.name, line, "name");
    make("span", bytesText(child.size), line, "size");
    const bar = make("span", undefined, line, "share");
    const full = make("i", undefined, bar);
    full.style.width = Math.max(0.5, 100 * child.size / most) + "%";
    if (!group) full.style.background = swatch(child.row);
    if (group) box.addEventListener("toggle", () => {
      if (box.open && box.children.length === 1)
        outline(make("div", undefined, box, "inner"), child, most, { swatch, choose });
    });
  }
}
