// The page of a scan: the verdict, then what is damaged, stored twice, derived, and drifted.

const found = data.found;
const bad = found.counts.FAIL, open = found.counts.ERROR + found.left;
drawVerdict({ text: data.verdict, kind: bad ? "bad" : open ? "warn" : "good" });

const none = []; // parts without a row, which share a line at the end
// A table of its own part, with a field that picks the rows that hold a text.
function listed(title, note, rows, columns, kind) {
  if (!rows.length) { none.push(title.toLowerCase()); return; }
  const box = part($("parts"), title, note);
  const bar = make("div", undefined, box, "bar"), label = make("label", "Find ", bar);
  const field = make("input", undefined, label), count = make("span", "", bar, "dim");
  field.type = "search";
  const table = make("table", undefined, make("div", undefined, box, "scroll"), "rows");
  const fill = sortable(table, columns, (row, line) => {
    if (kind) line.classList.add(...kind(row));
    for (const { of, left, show: shown } of columns)
      make("td", shown ? shown(row) : show(of(row)), line, left ? "l" : "");
  });
  const texts = rows.map((row) =>
    columns.map(({ of }) => String(of(row) ?? "")).join("\n").toLowerCase());
  const pick = () => {
    const wanted = field.value.toLowerCase();
    const kept = rows.filter((_, at) => texts[at].includes(wanted));
    count.textContent = `${kept.length} of ${rows.length}`;
    fill(kept);
  };
  field.addEventListener("input", pick);
  pick();
}

const column = (name, of, more = {}) => ({ name, of, ...more });
const left = (name, of) => column(name, of, { left: true });
const size = (name, of) => column(name, of, { show: (row) => bytesText(of(row)) });
const first = (row) => row.findings.length ?
  `${row.findings[0].where}: ${row.findings[0].found}` : row.found;

listed("Damage", "Every check that failed, and every question without an answer.", found.damage, [
  left("model", (row) => row.model), left("check", (row) => row.check),
  left("outcome", (row) => row.outcome), left("what", first),
], (row) => [row.outcome === "FAIL" ? "r-bad" : "r-warn"]);
listed("Faults by cause", "How many models fail each check.", found.faults, [
  left("check", (row) => row.check), left("outcome", (row) => row.outcome),
  column("models", (row) => row.models),
]);
listed("Stored more than once",
  `${found.copies.tensors} tensors; ${bytesText(found.copies.bytes)} could be saved.` +
  (found.copies.tensors > found.copies.groups.length ?
    ` The ${found.copies.groups.length} that would save most are listed.` : ""),
  found.copies.groups, [
    left("where", (row) => row.where.map(({ model, tensor }) => `${model}: ${tensor}`).join("; ")),
    size("bytes", (row) => row.bytes), column("copies", (row) => row.copies),
    column("models", (row) => row.models),
    size("to save", (row) => row.bytes * (row.copies - 1)),
  ]);
listed("Families", "Which model derives from which, as far as it is proven.", found.families, [
  left("model", (row) => row.model), left("from", (row) => row.base),
  left("proof", (row) => row.proof), left("found", (row) => row.found),
]);
listed("Templates", "Vocabularies that are used with several chat templates.",
  found.templates.flatMap((group) => group.templates.map((one) => ({ ...one, group }))), [
    left("vocabulary", (row) => row.group.vocabulary.slice(0, 12)),
    left("template", (row) => row.template.slice(0, 12)),
    column("models", (row) => row.models), left("for example", (row) => row.example),
  ]);
listed("Models", "", found.models, [
  left("model", (row) => row.model), left("architecture", (row) => row.architecture),
  left("format", (row) => row.format),
  left("encodings", (row) => Object.keys(row.encodings).join(" ")),
  size("bytes", (row) => row.bytes), column("places", (row) => row.places),
  column("passed", (row) => row.PASS), column("failed", (row) => row.FAIL),
  column("not run", (row) => row.NOT_RUN), column("errors", (row) => row.ERROR),
], (row) => row.FAIL ? ["r-bad"] : row.ERROR ? ["r-warn"] : []);
if (none.length) make("p", `Nothing found: ${none.join(", ")}.`, $("parts"), "dim");
