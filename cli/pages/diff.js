// The page of `diff`, from what its `--json` prints; besides, `code` is the exit code, `worst` the
// keys of the tensors, worst first, and `images` where tensors differ.

const SHOWN = 3; // tensors of a finding whose own numbers are shown in the chain
const LEFT = 12; // unexplained tensors that are named
const VERDICTS = {
  SAME_BYTES: "good", SAME_VALUES: "good", WITHIN: "warn", DIFFERENT: "bad", SHAPE_DIFFERS: "bad",
  UNREADABLE: "bad", ONLY_IN_A: "warn", ONLY_IN_B: "warn",
};
const EXPECTED = ["rounding", "quantisation"]; // causes of a difference that somebody asked for
// A pair's colour: amber where rounding is all that keeps the two apart.
const kindOf = (tensor) => tensor.explanation?.confirmed &&
  EXPECTED.includes(tensor.explanation.cause) ? "warn" : VERDICTS[tensor.verdict];
const SHORT = {
  SAME_BYTES: "=", SAME_VALUES: "= values", SHAPE_DIFFERS: "shape", UNREADABLE: "unread",
  ONLY_IN_A: "A only", ONLY_IN_B: "B only",
};
const found = data.found;
const byKey = new Map(found.tensors.map((tensor) => [tensor.key, tensor]));
const worst = data.worst.map((key) => byKey.get(key));
const plural = (count) => count > 1 ? "s" : "";

// Red only where more was found than rounding that was expected.
const expected = data.code === 1 && found.tensors.length > 0 &&
  ![...found.hyperparameters, ...found.tokenizer].some((row) => row.decisive) &&
  worst.every((one) => kindOf(one) !== "bad" && !one.verdict.startsWith("ONLY_IN"));

// The first cause and its place, or how many tensors do what; `data.command` finds out more.
function verdict() {
  const [first] = found.findings, keys = first?.keys ?? [], more = keys.length - SHOWN;
  return {
    text: sentence(), kind: expected ? "warn" : ["good", "bad", "bad"][data.code],
    rows: first ? [["cause", first.text],
      ["place", keys.slice(0, SHOWN).join(", ") + (more > 0 ? ` and ${more} more` : "")]] : [],
    commands: data.command && !expected ? [{ name: "next", text: data.command }] : [],
  };
}
function sentence() {
  const said = Object.entries(found.counts).filter(([, count]) => count)
    .map(([name, count]) => `${count} ${name}`).join(", ");
  const counted = found.tensors.length ? `${found.tensors.length} tensors: ${said}`
    : "no tensor compared";
  const start = ["Equal", expected ? "Different by rounding that was expected" : "Different",
    found.not_compared ? "Not compared" : "A tensor could not be read"][data.code];
  if (found.findings.length) {
    const [first, ...others] = found.findings, sure = first.certainty === "confirmed" ? "" : ` (${first.certainty})`;
    const more = others.length ? `, and ${others.length} more finding${plural(others.length)}` : "";
    return `${start} - ${first.cause}${sure}${more}. ${counted}.`;
  }
  const fields = [...found.hyperparameters, ...found.tokenizer].filter((row) => row.decisive);
  if (!fields.length) return `${start}. ${counted}.`;
  return `${start} - ${fields.slice(0, 4).map((row) => row.name).join(", ")} differ. ${counted}.`;
}

// What decides besides tensors, the findings, and the tensors that none of them explains.
function chain() {
  const links = [];
  for (const [title, rows] of [
    ["Hyperparameters that change the forward pass", found.hyperparameters],
    ["Tokenizer", found.tokenizer],
  ]) {
    const lines = rows.filter((row) => row.decisive).map((row) => row.whole);
    if (lines.length) links.push(link(title, "bad", "differs", lines));
  }
  links.push(...found.findings.map(finding));
  const left = worst.filter((row) => kindOf(row) === "bad" && !row.explanation)
    .map((row) => `${row.verdict} ${row.key}`);
  const more = left.length > LEFT ? [`... ${left.length - LEFT} more`] : [];
  if (left.length) links.push(link(
    `${left.length} tensor${plural(left.length)} that no cause explains`, "bad", "unexplained",
    [...left.slice(0, LEFT), ...more]));
  return links;
}
const kindOfCause = (row) => row.confirmed && !EXPECTED.includes(row.cause) ? "bad" : "warn";
function finding(row) {
  const first = byKey.get(row.keys[0]).explanation;
  const lines = row.keys.slice(0, row.cause === "layer_order" ? 1 : SHOWN).flatMap((key) =>
    byKey.get(key).explanation.evidence.filter((text) => !row.text.includes(text))
      .map((text) => `${key}: ${text}`));
  if (first.residual_after !== null) {
    const before = first.residual_before === null ? "shapes differ"
      : general(first.residual_before, 3);
    lines.push(`distance ${before} as stored, ${general(first.residual_after, 3)} with the cause ` +
      "taken away");
  }
  const above = row === found.findings[0]; // its text stands in the verdict
  return link(above ? row.cause : `${row.cause}: ${row.text}`, kindOfCause(row),
    row.certainty, lines);
}

function map() {
  const { rows, columns, cells } = places(found.tensors.map((tensor) => tensor.key));
  const size = (tensor) => number(tensor.stats?.rel_l2) ?? 0;
  const chosen = found.tensors.filter((tensor) => kindOf(tensor) === "bad")
    .reduce((most, tensor) => most && size(most) >= size(tensor) ? most : tensor, null);
  // What rounding does not account for has its colour from the scale, and a red frame.
  const far = (tensor) => kindOf(tensor) === "bad" && size(tensor) > 0 && isFinite(size(tensor));
  const apart = found.tensors.filter(far).map(size);
  const scale = apart.length ? { low: Math.min(...apart), high: Math.max(...apart), log: true,
    ramp: "beyond", label: "relative L2 of the different, logarithmic" } : null;
  const short = (tensor) => SHORT[tensor.verdict]
    ?? (tensor.stats ? general(tensor.stats.rel_l2, 3) : tensor.verdict.toLowerCase());
  return {
    title: "Tensors by layer and role",
    note: "The number is the relative L2 distance. Point at a cell for A and B side by side, " +
      "click it to keep them.",
    keys: [["good", "equal"], ["warn", "rounding that was expected, or on one side only"],
      ["flag", "different"]],
    scale, rows, columns: columns.map((role) => role.replace(/\.weight$/, "")),
    cells: found.tensors.map((tensor, i) => ({
      ...cells[i], text: short(tensor), kind: kindOf(tensor), title: tensor.key,
      value: far(tensor) ? size(tensor) : null, flag: kindOf(tensor) === "bad",
      sides: both(tensor), lines: describe(tensor), chosen: tensor === chosen,
    })),
  };
}

// Everything known of a pair, a line each.
function describe(tensor) {
  const lines = [tensor.verdict + (tensor.cause ? ` (${tensor.cause})` : "")];
  if (tensor.layout.length) lines.push(tensor.layout.join(", "));
  if (tensor.stats) lines.push(...measures(tensor.stats));
  if (tensor.steps_off !== null)
    lines.push(`at most ${general(tensor.steps_off, 3)} steps of the coarser encoding apart`);
  if (tensor.first_byte !== null) lines.push(`first differing byte ${tensor.first_byte}`);
  for (const one of tensor.derivations) lines.push(`${one.side.toUpperCase()}: ${one.text}`);
  const why = tensor.explanation;
  if (why) lines.push(`${certainty(why)} ${why.cause}:`,
    ...why.evidence);
  return lines;
}
// How sure an explanation is: what was done, where that is less than "confirmed" says.
function certainty({ confirmed, reached }) {
  return confirmed ? reached || "confirmed" : reached === "explained" ? reached : "located";
}
// What each side is, next to the other.
function both({ stats, ...tensor }) {
  return [["name", tensor.name_a || "-", tensor.name_b || "-"],
    ["encoding", tensor.encoding_a || "-", tensor.encoding_b || "-"],
    ["shape", sizes(tensor.shape_a), sizes(tensor.shape_b)],
    ...(stats ? [["norm", general(stats.norm_a, 6), general(stats.norm_b, 6)]] : []),
    ...(stats?.nan_a || stats?.nan_b || stats?.inf_a || stats?.inf_b ? [["NaN, infinity",
      `${stats.nan_a}, ${stats.inf_a}`, `${stats.nan_b}, ${stats.inf_b}`]] : [])];
}
function measures(stats) {
  return [
    `${stats.changed} of ${stats.count} values differ, relative L2 ${general(stats.rel_l2, 4)}, ` +
    `cosine ${fixed(stats.cosine, 9)}, largest difference ${general(stats.max_abs_diff, 6)} at ` +
    `${sizes(stats.max_at)}, ${stats.ulp} ulp`,
  ];
}

const picture = (image) => ({
  ...image, title: image.key,
  note: `[${image.rows}, ${image.columns}], a cell is ${image.height} x ${image.width} values; ` +
    "the number of A - B is the root mean square of the difference over that of all of A",
});

function tables() {
  const made = [], kinds = worst.map(kindOf);
  if (worst.length) made.push(table("All tensors", "Worst first; click a heading to sort.", 5,
    ["verdict", "role", "cause", "encodings", "shape", "relL2", "changed", "max abs", "cosine",
      "ulp"],
    worst.map(({ stats, ...tensor }) => [
      tensor.verdict, tensor.key, tensor.cause,
      `${tensor.encoding_a || "-"} | ${tensor.encoding_b || "-"}`,
      sizes(tensor.shape_a?.length ? tensor.shape_a : tensor.shape_b),
      stats?.rel_l2, stats?.changed, stats?.max_abs_diff, stats?.cosine, stats?.ulp,
    ]),
    kinds.map((kind) => kind === "good" ? "" : kind)));
  for (const [title, rows] of [
    ["Hyperparameters that differ", found.hyperparameters],
    ["Tokenizer facts that differ", found.tokenizer], ["Metadata that differs", found.metadata],
  ]) if (rows.length) made.push(table(title,
    "Red ones change the forward pass or the token ids.", 5,
    ["name", "A", "B", "from (A)", "from (B)"],
    rows.map((row) => [row.name, row.a, row.b, row.origin_a, row.origin_b]),
    rows.map((row) => row.decisive ? "bad" : "")));
  if (found.notes.length)
    made.push(table("Notes", "", 1, ["note"], found.notes.map((note) => [note])));
  return made;
}

report({
  verdict: verdict(),
  chain: chain(), maps: found.tensors.length ? [map()] : [], images: data.images.map(picture),
  tables: tables(),
});
