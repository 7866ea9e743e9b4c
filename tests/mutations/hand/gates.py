"""Mistakes in gates, exit codes, tokenizers and mixtures that a user would not notice."""

from tests.mutations.mutation import Row

ROWS: tuple[Row, ...] = (
    Row(
        "parity-changed-tensors", "aprfmt/checks/gates/parity.py",
        "    same = all(t.verdict in EQUAL for t in report.tensors)",
        '    same = all(t.verdict in (*EQUAL, "DIFFERENT") for t in report.tensors)',
        "format parity lets changed tensors through",
    ),
    Row(
        "parity-points", "aprfmt/checks/gates/parity.py",
        "if theirs.hashes.get(key) != digest]",
        "if theirs.hashes.get(key, digest) != digest and False]",
        "format parity does not compare capture points",
    ),
    Row(
        "parity-logits", "aprfmt/checks/gates/parity.py",
        "same = mine.logits.shape == theirs.logits.shape and bool(",
        "same = mine.logits.shape == theirs.logits.shape or bool(",
        "format parity does not compare logits",
    ),
    Row(
        "parity-format-left-out", "aprfmt/checks/gates/parity.py",
        'checks.append(not_run(f"{name}-converts", str(error)))',
        "pass",
        "a format that cannot hold the model is left out in silence",
    ),
    Row(
        "outcome-nothing-passed", "aprfmt/base/outcome.py",
        'return "PASS" if "PASS" in outcomes else "NOT_RUN"',
        'return "PASS"',
        "a report in which nothing ran passed",
    ),
    Row(
        "hash-exit-code", "cli/hash_.py",
        "        found.exit,\n        lambda: show(body, found) if verbose",
        "        damaged,\n        lambda: show(body, found) if verbose",
        "a manifest that does not fit is exit 0",
    ),
    Row(
        "interrupt-exit-code", "cli/main.py",
        "        code = 130\n",
        "        code = 1\n",
        "an interrupt is an answer",
        ("tests/formats/test_atomic_kills.py::test_a_whole_command_is_interrupted*SIGINT*",),
    ),
    Row(
        "cli-exit-2", "cli/main.py",
        "    raise SystemExit(code or 0)",
        "    raise SystemExit(min(code or 0, 1))",
        "what could not be done is an answer",
    ),
    Row(
        "qa-asked-and-not-run", "aprfmt/checks/records.py",
        'lost = _unanswered_rows(self.answers, "gate", asked)',
        "lost: tuple[NotCompared, ...] = ()",
        "a gate that was asked for and did not run is exit 0",
    ),
    Row(
        "qa-min-run", "aprfmt/checks/records.py",
        'return "FAIL" if found == "PASS" and self.ran < self.min_run else found',
        'return found',
        "--min-run is not held",
    ),
    Row(
        "spm-unknown-run", "aprfmt/tokenizer/spm.py",
        "and not unknown:",
        "and True:",
        "a run of unknown characters is many tokens",
    ),
    Row(
        "spm-leading-space", "aprfmt/tokenizer/spm.py",
        'return text.removeprefix(" ") if self._vocabulary.add_space_prefix else text',
        "return text",
        "the space in front of a decoded text stays",
    ),
    Row(
        "spm-swallowed-spaces", "aprfmt/tokenizer/spm.py",
        "                    if i in self._vocabulary.rstrip:",
        "                    if False:",
        "tokens that swallow spaces behind them do not",
    ),
    Row(
        "spm-longest-token", "aprfmt/tokenizer/spm.py",
        "lengths.extend(sorted(set(map(len, texts)), reverse=True))",
        "lengths.extend(sorted(set(map(len, texts))))",
        "the shortest of two whole tokens wins",
    ),
    Row(
        "template-environment", "aprfmt/base/child_process.py",
        'environment={}, stderr',
        'stderr',
        "a template's process sees the environment",
    ),
    Row(
        "template-memory", "aprfmt/base/resource_limits.py",
        "        (resource.RLIMIT_AS, memory),\n",
        "",
        "a template's memory has no bound",
    ),
    Row(
        "template-namespace", "aprfmt/tokenizer/render_child.py",
        "            refuse_private_name(name)\n            Namespace.__setitem__",
        "            Namespace.__setitem__",
        "a namespace takes names that lead into Python",
    ),
    Row(
        "template-output-pieces", "aprfmt/tokenizer/render_child.py",
        "        if size > limit:",
        "        if len(pieces) > limit:",
        "a template's output is bounded in pieces, not in bytes",
    ),
    Row(
        "template-output-characters", "aprfmt/tokenizer/render_child.py",
        'len(piece.encode("utf-8", "surrogatepass"))',
        "len(piece)",
        "a template's output is counted in characters",
        ("tests/tokenizer/test_template.py",),  # what a child process does stands in no map
    ),
    Row(
        "tokens-pad", "aprfmt/tokenizer/identity.py",
        '    for role in ("bos", "eos", "pad"):',
        '    for role in ("bos", "eos"):',
        "the padding token is no fact",
    ),
    Row(
        "tokens-add-eos", "aprfmt/tokenizer/identity.py",
        '        "add_eos": vocabulary.add_eos,\n',
        "",
        "whether eos is added is no fact",
    ),
    Row(
        "tokens-merges", "aprfmt/tokenizer/identity.py",
        '        found["merges_sha256"] = _list_sha256(vocabulary.merges)\n',
        "",
        "merges are compared by their number",
    ),
    Row(
        "mixture-last-eighth", "aprfmt/quantizing/mixture.py",
        "self.number >= 7 * self.total // 8",
        "self.number > 7 * self.total // 8",
        "the first layer of the last eighth gets fewer bits",
    ),
    Row(
        "mixture-every-third", "aprfmt/quantizing/mixture.py",
        "(self.number - eighth) % 3 == 2",
        "(self.number - eighth) % 3 == 1",
        "every third layer between",
    ),
    Row(
        "mixture-tied", "aprfmt/quantizing/mixture.py",
        '        if base == "output" or (embedding and not self._has_output):',
        '        if base == "output":',
        "a tied embedding is treated like another matrix",
    ),
    Row(
        "mixture-wide-v", "aprfmt/quantizing/mixture.py",
        'if kind == "attn_v" and self._wide_v and chosen in ("Q3_K", "Q4_K"):',
        "if False:",
        "70B models get narrow values",
    ),
    Row(
        "mixture-fallback", "aprfmt/quantizing/mixture.py",
        '"Q5_K": "Q5_1",',
        '"Q5_K": "Q5_0",',
        "the fallback of Q5_K",
    ),
    Row(
        "mixture-ones", "aprfmt/quantizing/mixture.py",
        "    while count > 1 and shape[len(shape) - count] == 1:",
        "    while False:",
        "outer dimensions of 1 count",
    ),
)  # fmt: skip
