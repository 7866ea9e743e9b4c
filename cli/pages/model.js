// The page of `inspect`: `found` is its `--json` without the metadata, `tensors` a row each with
// statistics where they were asked for, `metadata` [key, text], `tokenizer` or null, `report` what
// `validate --json` prints.

const { found, tensors, report, tokenizer: words } = data;

// Colours of encodings: light enough for dark text, by their place among the file's own.
const FILLS = ["#7db3f2", "#f3b562", "#7fcf9c", "#e58fb1", "#b7a2ee", "#8fd3d6", "#d9c36b",
  "#c9a184", "#a9bccb", "#f09a86"];
const byBytes = Object.entries(found.encodings).sort((a, b) => b[1].bytes - a[1].bytes);
const fillOf = new Map(byBytes.map(([name], i) => [name, FILLS[i % FILLS.length]]));
const fill = (row) => fillOf.get(row.encoding) ?? FILLS.at(-1);
const stored = tensors.reduce((sum, row) => sum + row.nbytes, 0);
const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

// What a tensor is part of, by its role or else its own name.
const PARTS = [[/embd|embed|wte|wpe/, "embedding"], [/norm|ln_/, "norms"],
  [/attn|attention/, "attention"], [/ffn|mlp|expert/, "feed-forward"], [/^output|lm_head/, "head"]];
function partOf(row) {
  const name = (row.role || row.name).replace(/^L\d+\./, "");
  return PARTS.find(([known]) => known.test(name))?.[1] ?? "other";
}
function layerOf(row) {
  const known = /^L(\d+)\./.exec(row.role)
    ?? /(?:^|\.)(?:blk|layers|h|block)\.(\d+)\./.exec(row.name);
  return known ? "layer " + known[1] : "outside the layers";
}
const GROUPS = {
  "part, then layer": (row) => [partOf(row), layerOf(row), row.name],
  "layer, then part": (row) => [layerOf(row), partOf(row), row.name],
  "encoding, then part": (row) => [row.encoding, partOf(row), layerOf(row), row.name],
  "name": (row) => row.name.split("."),
};

const firstFault = report.findings.find((one) => one.level === "fail");
function judge() {
  const { PASS, FAIL, NOT_RUN } = report.counts;
  const warned = report.findings.filter((one) => one.level === "warning").length;
  const what = found.architecture ? `A ${found.architecture} model`
    : "A file of no known architecture";
  const failed = report.checks.filter((row) => row.outcome === "FAIL").map((row) => row.name);
  const damaged = found.damage?.length ? `${plural(found.damage.length, "part")} damaged` : "";
  const says = [damaged, failed.length ? `${failed.join(", ")} failed` : `no check failed`,
    warned ? plural(warned, "warning") : ""].filter(Boolean).join(", ");
  drawVerdict({ text: `${what} of ${countText(found.parameters)} parameters in ` +
    `${bytesText(found.file_bytes)}: ${says} (${PASS} passed, ${FAIL} failed, ${NOT_RUN} not run` +
    `${data.stats ? "" : "; --stats reads every tensor"}).`,
    kind: damaged || FAIL ? "bad" : warned ? "warn" : "good", rows: causeRows(firstFault),
    commands: commandsOf(firstFault) });
}

function drawFigures() {
  const hyper = found.hyperparameters ?? {};
  const value = (name) => hyper[name]?.value;
  const rows = [
    [bytesText(found.file_bytes),
      found.files.length > 1 ? `in ${found.files.length} files` : "size"],
    [countText(found.parameters), "parameters"],
    [found.parameters ? general(8 * stored / found.parameters, 3) : "-", "bits per weight"],
    [found.tensor_count, "tensors"],
    ...[["n_layers", "layers"], ["hidden_size", "hidden size"], ["context_length", "context"]]
      .filter(([name]) => value(name) !== undefined).map(([name, says]) => [value(name), says]),
    ...(words?.count ? [[words.count, "tokens"]] : []),
  ];
  for (const [text, says] of rows) {
    const box = make("div", undefined, $("figures"));
    make("b", text, box);
    make("span", says, box);
  }
}

function drawBytes() {
  for (const name of Object.keys(GROUPS)) make("option", name, $("group"));
  const short = (node) => node.row
    ? (node.row.role || node.name).replace(/^L\d+\.|\.weight$/g, "") : node.name;
  const say = (node) => node.row
    ? `${node.row.name}: ${node.row.encoding} ${sizeText(node.row.shape)}, ` +
      `${bytesText(node.size)}, ${percentText(node.size / stored)}`
    : `${node.name}: ${bytesText(node.size)}, ${percentText(node.size / stored)}, ` +
      plural(leaves(node).length, "tensor");
  function group() {
    const tree = treeOf(tensors, GROUPS[$("group").value], (row) => row.nbytes);
    const map = $("map").cloneNode(false);
    $("map").replaceWith(map);
    treemap(map, $("trail"), tree, { fill, say, short, choose });
    $("tree").replaceChildren();
    outline($("tree"), tree, tree.size, { swatch: fill, choose });
  }
  $("group").addEventListener("change", group);
  for (const [name, row] of byBytes) {
    const place = make("span", undefined, $("legend"));
    make("b", undefined, place).style.background = fillOf.get(name);
    place.append(`${name}: ${plural(row.tensors, "tensor")}, ${bytesText(row.bytes)}`);
  }
  group();
}
const sizeText = (shape) => `[${shape.join(", ")}]`;

const STATS = ["mean", "std", "min", "max", "zeros", "nan", "inf"];
const columns = [{ name: "name", left: true, of: (row) => row.name },
  { name: "role", left: true, of: (row) => row.role || null },
  { name: "encoding", left: true, of: (row) => row.encoding },
  { name: "shape", of: (row) => row.shape.reduce((a, b) => a * b, 1),
    text: (row) => sizeText(row.shape) },
  { name: "bytes", of: (row) => row.nbytes, text: (row) => bytesText(row.nbytes) },
  ...(data.stats ? STATS.map((name) => ({ name, of: (row) => row.stats?.[name] ?? null })) : [])];
const fillRows = sortable($("rows"), columns, (row, line) => {
  if (row.damage || row.stats?.nan || row.stats?.inf) line.className = "r-bad";
  columns.forEach(({ left, of, text }, at) => {
    const says = at ? (text ? text(row) : show(of(row))) : undefined;
    const cell = make("td", says, line, left ? "l" : "");
    if (at) return;
    const button = make("button", row.name, cell);
    button.type = "button";
    button.dataset.name = row.name;
    button.addEventListener("click", () => choose(row));
  });
});
function search() {
  const wanted = $("find").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (row) =>
    `${row.name} ${row.role} ${row.encoding} ${sizeText(row.shape)}`.toLowerCase();
  const kept = tensors.filter((row) => wanted.every((one) => text(row).includes(one)));
  const bytes = kept.reduce((sum, row) => sum + row.nbytes, 0);
  $("count").textContent = `${plural(kept.length, "tensor")}, ${bytesText(bytes)}`;
  fillRows(kept);
}

// Everything known of one tensor.
function choose(row) {
  const place = $("one");
  place.hidden = false;
  place.replaceChildren();
  make("h3", row.name, place);
  const facts = [["role", row.role || "none"], ["encoding", row.encoding],
    ["shape", sizeText(row.shape)], ["offset", row.offset],
    ["bytes", `${row.nbytes} (${percentText(row.nbytes / stored)} of all)`],
    ...(row.stats ? STATS.map((name) => [name, show(row.stats[name])]) : [])];
  const chips = make("div", undefined, place, "chips");
  for (const [name, value] of facts) {
    const chip = make("span", undefined, chips, "chip");
    make("b", name + " ", chip);
    chip.append(String(value));
  }
  if (row.damage || row.unread) make("p", row.damage || row.unread, place, "bad");
  if (row.histogram) histogram(row.histogram, row.name, place);
  else if (!data.stats) make("p", "--stats adds statistics and a histogram.", place, "dim");
  place.focus({ preventScroll: true });
  place.scrollIntoView({ block: "nearest" });
}

// A part with a table that can be searched.
function tablePart(title, note, names, rows, left = names.length) {
  const box = part($("more"), title, note);
  const find = make("input", undefined, make("div", undefined, box, "bar"));
  find.type = "search";
  find.placeholder = "search";
  find.setAttribute("aria-label", "search " + title);
  find.hidden = rows.length < 10;
  const place = make("table", undefined, make("div", undefined, box, "scroll"), "rows");
  const fillTable = sortable(place, names.map((name, i) =>
    ({ name, left: i < left, of: (row) => row[i] ?? null })), (row, line) =>
    row.forEach((cell, i) => make("td", show(cell), line, i < left ? "l" : "")));
  const pick = () => {
    const wanted = find.value.toLowerCase();
    fillTable(rows.filter((row) => row.some((cell) => show(cell).toLowerCase().includes(wanted))));
  };
  find.addEventListener("input", pick);
  pick();
  return box;
}
const shortly = (value) => Array.isArray(value) && value.length > 4
  ? new Set(value.map(String)).size === 1 ? `${value[0]} in all ${value.length}` : value.join(" ")
  : Array.isArray(value) ? value.join(", ") : String(value);

function drawTokenizer() {
  const box = part($("more"), "Tokenizer");
  if (!words || words.error) {
    make("p", words?.error ?? "The file carries no tokenizer.", box, words ? "bad" : "dim");
    return;
  }
  make("p", `${words.count} tokens (${words.kind}), ${plural(words.merges, "merge")}` +
    `${words.pre ? `, split by ${words.pre}` : ""}; ` +
    `${words.bos ? "BOS" : "nothing"} is put before a text and ` +
    `${words.eos ? "EOS" : "nothing"} after it.`, box);
  make("h3", `Special tokens: ${words.specials}`, box);
  const chips = make("div", undefined, box, "chips");
  for (const [id, piece, kind, roles] of words.special) {
    const chip = make("span", undefined, chips, "chip");
    make("b", id + " ", chip);
    chip.append(piece);
    make("b", " " + (roles || kind), chip);
  }
  make("h3", words.whole ? "All tokens" : "Some of the tokens (--vocabulary for all)", box);
  const find = make("input", undefined, make("div", undefined, box, "bar"));
  find.type = "search";
  find.placeholder = "id or text";
  find.setAttribute("aria-label", "search tokens");
  const place = make("table", undefined, make("div", undefined, box, "scroll"), "rows");
  place.id = "tokens";
  const fillTokens = sortable(place, [{ name: "id", of: (row) => row[0] },
    { name: "text", left: true, of: (row) => row[1] },
    { name: "kind", left: true, of: (row) => row[2] || null }],
  ([id, piece, kind], line) => {
    make("td", id, line);
    make("span", piece, make("td", undefined, line, "l"), "piece");
    make("td", kind, line, "l");
  });
  const pick = () => fillTokens(words.tokens.filter(([id, piece]) => !find.value ||
    String(id) === find.value || piece.toLowerCase().includes(find.value.toLowerCase())));
  find.addEventListener("input", pick);
  pick();
}

function drawTemplate() {
  if (!words?.template?.length) return;
  const box = part($("more"), "Chat template");
  for (const text of words.suspicious) {
    const line = make("p", undefined, box);
    make("span", "look at this", line, "mark k-warn");
    line.append(" " + text);
  }
  for (const { name, status, lines } of words.previews) {
    make("h3", name, box);
    if (status !== "ok") make("span", status, make("p", undefined, box), "mark k-warn");
    make("pre", lines.join("\n"), box);
  }
  const more = make("details", undefined, box);
  make("summary", "The template itself", more);
  make("pre", words.template.join("\n"), more);
}

judge();
drawFigures();
drawBytes();
$("find").addEventListener("input", search);
search();
drawChecks(part($("more"), "Checks", data.stats ? ""
  : "Those that need no tensor's values; --stats reads every byte."), fileChecks(report, firstFault));
if (found.hyperparameters) tablePart("Hyperparameters", "Each with the place its value comes from.",
  ["name", "value", "from", "key"], Object.entries(found.hyperparameters)
    .map(([name, { value, origin, key }]) => [name, shortly(value), origin, key]));
if (data.metadata.length) tablePart("Metadata", "", ["key", "value"], data.metadata);
const account = found.account;
if (account) {
  const counted = account.kinds.map((row) => [row.reading, row.kind, row.items, ""]);
  const named = ["contradicted", "unread"].flatMap((reading) => account[reading]
    .map((one) => [reading, one.kind, one.name, one.why]));
  tablePart("Account", `${plural(account.items, "item")}: everything the model is made of, by how ` +
    "it is read. What no table lists is unread, and named.",
  ["reading", "kind", "items or name", "why"], [...named, ...counted], 2);
}
drawTokenizer();
drawTemplate();
const notes = (found.notes ?? []).map((note) => [note.level, note.where, note.text]);
if (notes.length) tablePart("Notes", "", ["level", "where", "what"], notes);
