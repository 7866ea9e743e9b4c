// The page of `diagnose`, from what its `--json` prints.

const MARKS = { confirmed: "bad", explained: "warn", located: "warn" };
const found = data.found, value = (number) => general(number, 4);

// The causes with what confirms them, then the evidence in the order it was found.
function cause(row) {
  const lines = [], many = row.where.length - 8;
  if (row.where.length)
    lines.push(`where: ${row.where.slice(0, 8).join(", ")}${many > 0 ? ` and ${many} more` : ""}`);
  if (row.first) lines.push(`first seen at ${row.first}`);
  if (row.residual_before !== null) lines.push(
    `distance${row.of ? ` of ${row.of}` : ""} ${value(row.residual_before)} as it is, ` +
    `${value(row.residual_after)} with the cause taken away`);
  if (row.kl_before !== null && row.exercised === "shows") lines.push(
    `KL of the next token ${value(row.kl_before)} nats as it is, ${value(row.kl_after)} with the ` +
    "cause taken away");
  if (row.exercised === "not_exercised") lines.push("no probe reached it");
  if (row.next) lines.push(`next: ${row.next}`);
  if (row.values.length) lines.push(row.values.join(", "));
  if (row.also.length) lines.push(`explained as well by ${row.also.join(", ")}`);
  if (row.means) lines.push(row.means);
  const name = `${row.cause || "unknown cause"}${row.side ? ` in ${row.side}` : ""}: `;
  const start = `${row.cause}: `;
  const says = row.says.startsWith(start) ? row.says.slice(start.length) : row.says;
  return link(name + says, row.verdict === "bug" ? MARKS[row.certainty] : "good",
    row.certainty, lines);
}
const evidence = (row) => link(
  row.says + (row.number === null ? "" : ` (${value(row.number)})`), "dim", row.level,
  row.where.length ? [row.where.slice(0, 8).join(", ")] : []);

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
    found.points.map((row) => row.beyond ? "bad" : "")));
  const lists = [["Next", found.next], ["Run", found.coverage.run],
    ["Compared, not run", found.coverage.compared_not_run],
    ["Not reached", found.coverage.not_reached],
    ["Checked", found.checked], ["Not checked", found.not_checked]];
  for (const [title, rows] of lists)
    if (rows.length) made.push(table(title, "", 1, ["what"], rows.map((row) => [row])));
  return made;
}

report({
  verdict: { text: found.sentence, kind: KINDS[found.class] },
  chain: [...found.findings.map(cause), ...found.evidence.map(evidence)],
  maps: [
    ...pointMap(found.points, "direct", "Distance of A and B, layer by point",
      "Relative L2 distance of the two runs; red frames are beyond the point's tolerance.",
      lines, found.first),
    ...pointMap(found.points, "shadow", "Distance of each operation on its own input",
      "What the operation adds by itself: the other side's operation on this side's input. " +
      "A point that is far apart above and equal here was only fed wrong.", lines, null),
  ],
  tables: tables(),
});
