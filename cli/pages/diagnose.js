// The page of `diagnose`, from what its `--json` prints.

const MARKS = { confirmed: "bad", explained: "warn", located: "warn" };
const found = data.found, value = (number) => general(number, 4);

// Every cause with what was measured of it, the one that the sentence names first: `causes` has the
// record for the outside, `findings` the same in our names with distances.
const left = [...found.findings];
const of = (names) => [...new Set(names)].join("\n");
const causes = found.causes.map((named) => {
  const at = left.findIndex((row) =>
    row.cause === named.cause && of(row.where) === of(named.roles));
  return { ...left.splice(at, 1)[0], ...named };
});
const lead = causes.length && found.sentence.includes(` - ${causes[0].says}`) ? causes[0] : null;
const listed = (names) => names.slice(0, 8).join(", ") +
  (names.length > 8 ? ` and ${names.length - 8} more` : "");
// The file's own names, with ours where they are one and the same place, but those in `said`.
function place(row, said = "") {
  const ours = row.where.length === row.roles.length;
  return listed(row.where.map((name, i) => [name, ours ? row.roles[i] : name])
    .filter(([name]) => name !== row.cause && !said.includes(name))
    .map(([name, role]) => role === name ? name : `${name} (${role})`));
}
// What it is, without the place that it begins with.
const what = (row) => row.says.startsWith(`${place(row)} - `)
  ? row.says.slice(place(row).length + 3) : row.says;

function verdict() {
  const kind = KINDS[found.class];
  const mends = causes.map((row) => row.remedy?.command);
  const commands = [...new Set(found.next)].filter(runs)
    .map((text) => ({ name: mends.includes(text) ? "repair" : "next", text }));
  if (!lead) return { text: found.sentence, kind, commands };
  const [start, ...rest] = found.sentence.split(` - ${lead.says}`);
  const seen = lead.first ? `, first seen at ${lead.first}` : "";
  return {
    text: start, kind, commands,
    rows: [["cause", what(lead)],
      ["place", [place(lead, what(lead)),
        lead.first ? `first seen at ${lead.first}` : ""].filter(Boolean).join("; ")],
      ["left", rest.join(` - ${lead.says}`).replace(seen, "").replace(/^; /, "")]],
  };
}
const runs = (text) => /^(aprfmt|mv) /.test(text);

// The causes with what confirms them, then the evidence in the order it was found; of the cause
// above only what is not said there.
function cause(row) {
  const lines = [], above = row === lead;
  if (row.where.length && !above) lines.push(`where: ${place(row)}`);
  if (row.first && !above) lines.push(`first seen at ${row.first}`);
  if (row.residual_before !== null) lines.push(
    `distance${row.of ? ` of ${row.of}` : ""} ${value(row.residual_before)} as it is, ` +
    `${value(row.residual_after)} with the cause taken away`);
  if (row.kl_before !== null && row.exercised === "shows") lines.push(
    `KL of the next token ${value(row.kl_before)} nats as it is, ${value(row.kl_after)} with the ` +
    "cause taken away");
  if (row.exercised === "not_exercised") lines.push("no probe reached it");
  if (row.next && !found.next.includes(row.next)) lines.push(`next: ${row.next}`);
  lines.push(...row.details.filter((text) => !row.says.includes(text)));
  if (row.values.length) lines.push(row.values.join(", "));
  if (row.also.length) lines.push(`explained as well by ${row.also.join(", ")}`);
  if (row.means) lines.push(row.means);
  const name = `${row.cause || "unknown cause"}${row.side ? ` in ${row.side}` : ""}`;
  return link(above ? name : `${name}: ${what(row)}`,
    row.verdict === "bug" ? MARKS[row.level] : "good", row.level, lines);
}
const evidence = (row) => link(row.says, "dim", row.level,
  row.where.some((where) => !row.says.includes(where)) ? [listed(row.where)] : []);
// Evidence that says no more than a cause does, after the name of its tensor.
const known = (row) => {
  const texts = [row.says, ...row.where.map((name) => row.says.replace(`${name}: `, ""))];
  return causes.some((one) => texts.some((text) => one.says.includes(text)));
};

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
  const others = found.next.filter((text) => !runs(text));
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
  chain: [...causes.map(cause), ...found.evidence.filter((row) => !known(row)).map(evidence)],
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
