// The page of a training step: the verdict, the causes, what moved where, every tensor.

const found = data.step;
const KIND = { agrees: "good", differs: "bad", "not compared": "warn" };

const moving = found.tensors.filter((row) => row.update !== null);
const grid = places(moving.map((row) => row.key));
const moved = {
  title: "What moved", note: "The share of each tensor's elements that the step changed as stored.",
  rows: grid.rows, columns: grid.columns, scale: { low: 0, high: 1, log: false, label: "moved" },
  cells: moving.map((row, i) => ({
    ...grid.cells[i], value: row.update.moved / Math.max(1, row.update.elements),
    text: general(row.update.moved / Math.max(1, row.update.elements), 2), title: row.key,
    lines: [row.names.join(", "), row.verdict, row.why].filter(Boolean),
    flag: row.verdict === "differs",
  })),
};

report({
  verdict: {
    text: found.says, kind: KIND[found.verdict] ?? "warn",
    rows: found.causes.map((cause) => [cause.cause, `${cause.says} (${cause.level})`]),
  },
  chain: [], maps: moving.length ? [moved] : [],
  tables: [table("Tensors", "Before the step, its gradient, and what the step changed.", 4,
    ["tensor", "in the file", "verdict", "why", "weight", "gradient", "computed", "distance",
      "update", "step", "decay"],
    found.tensors.map((row) => [row.key, row.names.join(", "), row.verdict, row.why, row.norm,
      row.gradient?.norm ?? null, row.computed?.norm ?? null, row.distance,
      row.update?.norm ?? null, row.update?.step ?? null, row.update?.decay ?? null]),
    found.tensors.map((row) => KIND[row.verdict] === "good" ? "" : KIND[row.verdict]))],
});
