// The page of `parity`, from what its `--json` prints: every run against the first.

const WORDS = {
  same: "The runs agree", precision: "The runs agree within rounding",
  bug: "The runs do not agree", not_comparable: "The runs could not be compared",
};
const GATES = { PASS: "good", FAIL: "bad", NOT_RUN: "warn" };
const found = data.found, value = (number) => general(number, 4);
const names = found.runs.map((run) => run.requested);
const against = (pair) => `${names[pair.b]} against ${names[pair.a]}`;

// The verdict, with the first bad pair's cause and place; `data.command` shows it again.
const worst = found.pairs.find((pair) => pair.verdict === found.verdict);
function verdict() {
  const kind = KINDS[found.verdict], words = WORDS[found.verdict];
  if (!worst) return { text: `${words}.`, kind };
  const operation = worst.first_operation;
  return {
    text: kind === "good" ? `${words}.` : `${words}: ${against(worst)}.`, kind,
    rows: [["cause", worst.cause],
      ["place", [worst.first ? `first beyond its tolerance at ${worst.first}` : "",
        operation ? `the first operation that is wrong by itself is ${operation.key}` : ""]
        .filter(Boolean).join("; ")]],
    commands: data.command ? [{ name: "reproduce", text: data.command }] : [],
  };
}

// What was found of one pair, in the order of the evidence.
function chain(pair) {
  const lines = [`${pair.compared} points compared`], above = pair === worst;
  if (pair.first && !above) lines.push(`first point beyond its tolerance: ${pair.first}`);
  const cause = above ? "" : `: ${pair.cause || pair.verdict}`;
  const links = [link(against(pair) + cause, KINDS[pair.verdict], pair.verdict, lines),
    ...pair.operations.map(operation)];
  if (pair.logits) links.push(logits(pair.logits));
  return links;
}
const operation = (one) => link(
  `${one.key} on equal inputs: ${value(one.residual)}, rounding may do ${value(one.bound)}`,
  one.wrong ? "bad" : "good", one.wrong ? "wrong by itself" : "fed wrong, or rounding",
  [
    `in the whole runs ${value(one.output_rel_l2)} apart, inputs ${value(one.input_rel_l2)} ` +
    `apart, gain ${value(one.gain)}`,
    `inputs ${one.inputs.join(", ")}; weights ${one.weights.join(", ") || "none"}`,
  ]);
const percent = (share) => `${fixed(100 * share, 1)}%`;
const logits = (row) => link(
  "Logits", row.flips.some((flip) => !flip.explained) ? "bad" : "dim", "logits",
  [
    `relative L2 ${value(row.rel_l2)}, largest difference ${value(row.max_abs)}`,
    `argmax equal in ${percent(row.argmax)} of ${row.rows} rows, top ${row.k} in ` +
    percent(row.top_k),
    `KL mean ${value(row.kl_mean)}, largest ${value(row.kl_max)} nats; loss ${value(row.ce_a)} ` +
    `| ${value(row.ce_b)} nats`,
  ]);

const index = (at) => at === null ? "None" : `(${at.join(", ")}${at.length === 1 ? "," : ""})`;
function map(pair) {
  const wrong = new Set(pair.operations.filter((one) => one.wrong).map((one) => one.key));
  const lines = (row) => [
    `relative L2 ${value(row.rel_l2)}, tolerance ${value(row.tolerance)}: ` +
    (row.beyond ? "beyond" : "within"),
    `largest difference ${value(row.max_abs_diff)} at ${index(row.max_at)}`,
    ...(row.reason ? [row.reason] : []),
    ...(wrong.has(row.key) ? ["this operation is wrong by itself"] : []),
  ];
  return pointMap(pair.points, "rel_l2", `Layer by point: ${against(pair)}`,
    "Relative L2 distance by layer and point, coloured by the point's tolerance.", lines,
    pair.first);
}

// The point with the largest distance, and the distance.
function furthest(distances) {
  const rows = Object.entries(distances), size = ([, distance]) => number(distance) ?? -1;
  return rows.length ? rows.reduce((best, row) => size(row) > size(best) ? row : best) : ["", null];
}

function tables() {
  const made = [table("Runs", "The first is the reference.", 4,
    ["asked for", "ran", "weights", "first NaN or infinity", "points"],
    found.runs.map((run) =>
      [run.requested, run.ran, run.weights, run.nonfinite ?? "", run.points]))];
  const oracles = [found.noise, ...found.arbiter].filter(Boolean);
  if (oracles.length) made.push(table("Distances from an oracle",
    "How far each run is from float weights or from float64 arithmetic.", 3,
    ["run", "from", "furthest point", "relL2 there", "loss (nats)"],
    oracles.map((one) => [names[one.of], one.what, ...furthest(one.rel_l2), one.ce])));
  return [...made, ...found.pairs.flatMap(pairTables)];
}
function pairTables(pair) {
  const made = [], checks = pair.gate.checks, flips = pair.logits?.flips ?? [];
  if (checks.length) made.push(table(`Gates: ${against(pair)}`, "", 5,
    ["outcome", "check", "where", "found", "expected"],
    checks.map((row) => [row.outcome, row.name, row.where, row.found, row.expected]),
    checks.map((row) => GATES[row.outcome])));
  if (flips.length) made.push(table(`Tokens that flipped: ${against(pair)}`, "", 0,
    ["position", "token", "other token", "margin", "other's margin", "largest difference",
      "explained"],
    flips.map((row) => [row.position, row.a, row.b, row.margin_a, row.margin_b, row.largest,
      row.explained ? "True" : "False"]),
    flips.map((row) => row.explained ? "" : "bad")));
  made.push(table(`All points: ${against(pair)}`, "In execution order; click a heading to sort.", 2,
    ["point", "note", "relL2", "tolerance", "max abs", "max over rms"],
    pair.points.map((row) => [row.key, row.why, row.rel_l2, row.tolerance, row.max_abs_diff,
      row.max_over_rms]),
    pair.points.map((row) => row.beyond ? "bad" : ""),
    pair.points.map((row) => row.rel_l2 === null)));
  return made;
}

report({
  verdict: verdict(),
  chain: found.pairs.flatMap(chain), maps: found.pairs.flatMap(map),
  heats: found.pairs.map((pair, i) => ({
    title: `Token by layer: ${against(pair)}`, label: "relative L2", ...data.heats[i],
    note: "Relative L2 distance of each token position alone, coloured by the tolerance of the " +
      "whole point: a strong column is a token, a strong row a layer.",
  })),
  tables: tables(),
});
