// Checks, each PASS, FAIL or NOT-RUN, with what was found: for `inspect`, `validate` and `qa`.
//
// Rows are {outcome, name, says, proves, seconds, lines, numbers}; a line is {kind, text}, numbers
// are [name, text].

const OUTCOMES = { PASS: "good", FAIL: "bad", NOT_RUN: "dim" };
const word = (outcome) => outcome.replace("_", "-");
const sentence = (row) => [`${row.where ? row.where + ": " : ""}${row.found}`,
  row.expected ? `expected ${row.expected}` : "", row.todo].filter(Boolean).join(" - ");

function drawChecks(box, rows) {
  const bar = make("div", undefined, box, "bar");
  const list = make("ul", undefined, box, "checks");
  const chosen = new Set(["FAIL", "PASS", "NOT_RUN"]);
  const items = rows.map((row) => [row, check(list, row)]);
  for (const outcome of ["FAIL", "PASS", "NOT_RUN"]) {
    const count = rows.filter((row) => row.outcome === outcome).length;
    if (!count) continue;
    const button = make("button", `${count} ${word(outcome)}`, bar, "plain toggle");
    button.type = "button";
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (!chosen.delete(outcome)) chosen.add(outcome);
      button.setAttribute("aria-pressed", String(chosen.has(outcome)));
      for (const [row, item] of items) item.hidden = !chosen.has(row.outcome);
    });
  }
}

function check(list, row) {
  const item = make("li", undefined, list);
  item.dataset.check = row.name;
  make("span", word(row.outcome), item, `mark k-${OUTCOMES[row.outcome]}`);
  const text = make("div", undefined, item);
  const head = make("div", undefined, text, "head");
  make("strong", row.name, head);
  make("span", row.says, head, row.outcome === "NOT_RUN" ? "dim" : "");
  if (row.seconds && row.outcome !== "NOT_RUN")
    make("span", `${fixed(row.seconds, 2)} s`, head, "dim");
  for (const line of row.lines) {
    const place = make("p", undefined, text, "line");
    make("span", line.mark, place, `mark k-${line.kind}`);
    make("span", " " + line.text, place);
  }
  if (row.numbers.length || (row.proves && row.outcome !== "NOT_RUN")) {
    const more = make("details", undefined, text);
    make("summary", row.numbers.length ? "numbers" : "what it proves", more, "dim");
    if (row.proves) make("p", row.proves, more, "dim");
    const place = make("table", undefined, more, "facts");
    for (const [name, value] of row.numbers) {
      const line = make("tr", undefined, make("tbody", undefined, place));
      make("th", name, line, "l");
      make("td", value, line);
    }
  }
  return item;
}

// The checks of `validate`: a Check each, and the findings behind them.
function fileChecks(report) {
  return report.checks.map((row) => ({
    outcome: row.outcome, name: row.name, says: row.outcome === "FAIL" ? "" : row.found, proves: "",
    seconds: 0, numbers: [],
    lines: report.findings.filter((one) => one.check === row.name).map((one) => ({
      mark: one.level === "fail" || report.strict ? "fails" : "warning",
      kind: one.level === "fail" || report.strict ? "bad" : "warn", text: sentence(one),
    })),
  }));
}
