// The pages of `validate` and `qa`: `report` is what `validate --json` prints, or `gates` what
// `qa --json` prints with its verdict in `outcome`, `code` and `sentence`.

const TITLES = { PASS: "Nothing failed", FAIL: "Something failed", NOT_RUN: "Nothing was checked" };

// A gate with its checks, without `above`, which the verdict says: those that did not pass, and
// every number that a baseline keeps.
function gate(row, above) {
  const failed = row.checks.filter((one) => one.outcome !== "PASS" && one !== above);
  const lines = failed.filter((one) => one.outcome === "FAIL" || row.outcome !== "NOT_RUN")
    .map((one) => ({ mark: word(one.outcome), kind: OUTCOMES[one.outcome],
      text: `${one.name}: ${sentence(one)}` }));
  const numbers = [
    ...row.checks.filter((one) => one.outcome === "PASS")
      .map((one) => [one.name + (one.where ? ` (${one.where})` : ""), one.found]),
    ...Object.entries(row.measures).map(([name, { value, unit, tolerance, kind }]) => [name,
      `${general(value, 6)} ${unit}, may move by ${general(tolerance, 3)}` +
      (kind === "relative" ? " of itself" : "")]),
  ];
  const says = row.outcome === "NOT_RUN" ? row.why
    : row.outcome === "FAIL" ? `${row.checks.filter((one) => one.outcome === "FAIL").length} of ` +
      `${row.checks.length} checks failed${row.checks.includes(above) ? `, one ${ABOVE}` : ""}`
      : row.proves;
  return { outcome: row.outcome, name: row.name, says, seconds: row.seconds, lines, numbers,
    aside: row.outcome === "NOT_RUN" && !row.asked,
    proves: row.outcome === "FAIL" ? row.proves : "" };
}

// `row` is the first check that failed, if one did: {name, where, found, expected, todo}.
function verdict(outcome, text, row, kind) {
  drawVerdict({ text: `${TITLES[outcome]}: ${text}`, rows: causeRows(row),
    commands: commandsOf(row), kind: kind ?? { PASS: "good", FAIL: "bad", NOT_RUN: "warn" }[outcome] });
}

if (data.gates) {
  const failed = data.gates.filter((row) => row.outcome === "FAIL").map((row) => row.name);
  const first = data.gates.flatMap((row) => row.checks).find((row) => row.outcome === "FAIL");
  verdict(data.outcome, `${failed.length ? failed.join(", ") + " - " : ""}${data.sentence}.`, first,
    data.code === 2 ? "warn" : undefined);
  drawChecks(part($("checks"), "Gates"), data.gates.map((row) => gate(row, first)));
} else {
  const { outcome, counts, checks, findings } = data.report;
  const failed = checks.filter((row) => row.outcome === "FAIL").map((row) => row.name);
  const first = findings.find((one) => one.level === "fail");
  const warned = findings.filter((one) => one.level === "warning").length;
  verdict(outcome, `${failed.length ? failed.join(", ") + " - " : ""}${counts.PASS} passed, ` +
    `${counts.FAIL} failed, ${counts.NOT_RUN} not run, ` +
    `${warned} warning${warned === 1 ? "" : "s"}.`, first,
    outcome === "PASS" && warned ? "warn" : undefined);
  drawChecks(part($("checks"), "Checks"), fileChecks(data.report, first));
}
