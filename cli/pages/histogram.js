// Histograms: {low, high, counts}, heights by the logarithm so that tails are seen.

const SVG = "http://www.w3.org/2000/svg";
function shape(tag, attributes, parent, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
const told = (value) => value === Infinity ? "Infinity" : show(value, 1e6);
function histogram({ low, high, counts, of }, name, place) {
  const width = 720, height = 200, bar = width / counts.length, step = (high - low) / counts.length;
  const most = Math.max(...counts), tallest = Math.log10(1 + most);
  const box = make("figure", undefined, place, "histogram");
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
    preserveAspectRatio: "none",
    "aria-label": `histogram of ${name}, ${told(low)} to ${told(high)}` }, box);
  counts.forEach((n, i) => {
    const tall = tallest ? height * Math.log10(1 + n) / tallest : 0;
    const rect = shape("rect", { x: i * bar, y: height - tall, width: Math.max(bar - 1, 1),
      height: tall }, svg);
    shape("title", {}, rect,
      `${n} values from ${told(low + i * step)} to ${told(low + (i + 1) * step)}`);
  });
  if (low < 0 && high > 0) {
    const zero = width * -low / (high - low);
    shape("line", { x1: zero, x2: zero, y1: 0, y2: height }, svg);
  }
  const ends = make("div", undefined, box, "ends");
  for (const text of [told(low), `highest bar ${most} values${of ? ` of ${of} counted` : ""}`,
    told(high)]) make("span", text, ends);
  make("figcaption", "heights are log(1 + count)", box, "dim");
}
