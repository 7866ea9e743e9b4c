// Checks, each PASS, FAIL or NOT-RUN, with what was found: for `inspect`, `validate` and `qa`. Those
// that failed come first.
//
// Rows are {outcome, name, says, proves, seconds, lines, numbers, aside}; a line is {kind, text},
// numbers are [name, text]; what is `aside` does not apply or was not asked for, and is folded away.

const OUTCOMES = { PASS: "good", FAIL: "bad", NOT_RUN: "dim" };
const word = (outcome) => outcome.replace("_", "-");
const sentence = (row) => [`${row.where ? row.where + ": " : ""}${row.found}`,
  row.expected ? `expected ${row.expected}` : "", row.todo].filter(Boolean).join(" - ");

const ABOVE = "in the verdict above";
// What failed, for the verdict: the cause, the place and what to do.
const causeRows = (row) => !row ? [] : [
  ["cause", `${row.found}${row.expected ? ` - expected ${row.expected}` : ""}`],
  ["place", row.where], ["to do", row.todo]];
// The commands that stand in words in backticks.
const commandsOf = (row) => [...(row?.todo ?? "").matchAll(/`(aprfmt [^`]+)`/g)]
  .map(([, text]) => ({ name: "next", text }));

function drawChecks(box, rows) {
  const bar = make("div", undefined, box, "bar");
  const list = make("ul", undefined, box, "checks");
  const folded = make("details", undefined, box, "folded");
  const away = rows.filter((row) => row.aside).length;
  folded.hidden = !away || away === rows.length;
  make("summary", `${away} that do not apply or were not asked for`, folded, "dim");
  const others = make("ul", undefined, folded, "checks");
  const chosen = new Set(["FAIL", "PASS", "NOT_RUN"]);
  const failed = (row) => row.outcome === "FAIL";
  const ordered = [...rows.filter(failed), ...rows.filter((row) => !failed(row))];
  const items = ordered.map((row) =>
    [row, check(row.aside && !folded.hidden ? others : list, row)]);
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
      folded.hidden = !items.some(([, item]) => item.parentElement === others && !item.hidden);
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

// The checks of `validate`: a Check each, and their findings.
// `above` is the finding that the verdict says.
function fileChecks(report, above) {
  return report.checks.map((row) => ({
    outcome: row.outcome, name: row.name, proves: "",
    says: row.outcome !== "FAIL" ? row.found : above?.check === row.name ? ABOVE : "",
    seconds: 0, numbers: [], aside: row.outcome === "NOT_RUN",
    lines: report.findings.filter((one) => one.check === row.name && one !== above).map((one) => ({
      mark: one.level === "fail" || report.strict ? "fails" : "warning",
      kind: one.level === "fail" || report.strict ? "bad" : "warn", text: sentence(one),
    })),
  }));
}
