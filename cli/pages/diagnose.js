// The page of `diagnose`, from what its `--json` prints.

const MARKS = { confirmed: "bad", explained: "warn", located: "warn" };
const found = data.found, value = (number) => general(number, 4);

// The sentence taken apart: what it is, then the cause, the place, and what is left without it.
const lead = found.findings.find((row) => row.verdict === found.verdict &&
  row.cause === found.cause && row.first === found.first && found.sentence.includes(saysOf(row)));
function saysOf(row) {
  const start = `${row.cause}: `;
  return row.says.startsWith(start) ? row.says.slice(start.length) : row.says;
}
const listed = (where) => where.slice(0, 8).join(", ") +
  (where.length > 8 ? ` and ${where.length - 8} more` : "");
function verdict() {
  const kind = KINDS[found.class];
  const commands = [...new Set(found.next)].map((text) => ({ name: "next", text }))
    .filter(({ text }) => text.startsWith("aprfmt "));
  if (!lead) return { text: found.sentence, kind, commands };
  const says = saysOf(lead), at = found.sentence.indexOf(` - ${says}`);
  const seen = lead.first ? `, first seen at ${lead.first}` : "";
  const rest = found.sentence.slice(at + 3 + says.length).replace(seen, "").replace(/^; /, "");
  return {
    text: at < 0 ? found.sentence : found.sentence.slice(0, at), kind, commands,
    rows: [["cause", at < 0 ? "" : says],
      ["place", [listed(lead.where.filter((name) => name !== lead.cause)), lead.first ? `first seen at ${lead.first}` : ""]
        .filter(Boolean).join("; ")],
      ["left", at < 0 ? "" : rest]],
  };
}

// The causes with what confirms them, then the evidence in the order it was found; of the cause
// above only what is not said there.
function cause(row) {
  const lines = [], above = row === lead;
  if (row.where.length && !above) lines.push(`where: ${listed(row.where)}`);
  if (row.first && !above) lines.push(`first seen at ${row.first}`);
  if (row.residual_before !== null) lines.push(
    `distance${row.of ? ` of ${row.of}` : ""} ${value(row.residual_before)} as it is, ` +
    `${value(row.residual_after)} with the cause taken away`);
  if (row.kl_before !== null && row.exercised === "shows") lines.push(
    `KL of the next token ${value(row.kl_before)} nats as it is, ${value(row.kl_after)} with the ` +
    "cause taken away");
  if (row.exercised === "not_exercised") lines.push("no probe reached it");
  if (row.next && !found.next.includes(row.next)) lines.push(`next: ${row.next}`);
  if (row.values.length) lines.push(row.values.join(", "));
  if (row.also.length) lines.push(`explained as well by ${row.also.join(", ")}`);
  if (row.means) lines.push(row.means);
  const name = `${row.cause || "unknown cause"}${row.side ? ` in ${row.side}` : ""}`;
  return link(above ? name : `${name}: ${saysOf(row)}`, row.verdict === "bug" ? MARKS[row.certainty] : "good",
    row.certainty, lines);
}
const evidence = (row) => link(row.says, "dim", row.level,
  row.where.some((where) => !row.says.includes(where)) ? [listed(row.where)] : []);
const known = new Set(found.findings.map((row) => row.says)); // said above as a cause

const lines = (row) => [
  `A to B ${value(row.direct)}, on its own input ${value(row.shadow)}, gain over the layer's ` +
  `input ${value(row.gain)}`,
  `tolerance ${value(row.tolerance)}: ${row.beyond ? "beyond" : "within"}`,
  ...(row.side ? [`the operation is ${row.side}'s`] : []), ...(row.note ? [row.note] : []),
];

function tables() {
  const made = [];
  if (found.points.length) made.push(table(
    "All capture points", "In execution order; click a heading to sort.", 3,
    ["point", "side", "note", "A to B", "own input", "gain", "tolerance"],
    found.points.map((row) => [row.key, row.side, row.note, row.direct, row.shadow, row.gain,
      row.tolerance]),
    found.points.map((row) => row.beyond ? "bad" : ""),
    found.points.map((row) => row.direct === null && row.shadow === null)));
  const others = found.next.filter((text) => !text.startsWith("aprfmt "));
  const lists = [["Next", others], ["Run", found.coverage.run],
    ["Compared, not run", found.coverage.compared_not_run],
    ["Not reached", found.coverage.not_reached],
    ["Checked", found.checked], ["Not checked", found.not_checked]];
  for (const [title, rows] of lists)
    if (rows.length) made.push(table(title, "", 1, ["what"], rows.map((row) => [row])));
  return made;
}

report({
  verdict: verdict(),
  chain: [...found.findings.map(cause),
    ...found.evidence.filter((row) => !known.has(row.says)).map(evidence)],
  maps: [
    ...pointMap(found.points, "direct", "Distance of A and B, layer by point",
      "Relative L2 distance of the two runs, coloured by the point's tolerance.",
      lines, found.first, (row) => row.apart),
    ...pointMap(found.points, "shadow", "Distance of each operation on its own input",
      "What the operation adds by itself: the other side's operation on this side's input. " +
      "A point that is far apart above and equal here was only fed wrong.", lines,
      null, (row) => row.beyond && !row.apart),
  ],
  tables: tables(),
});
