"""In the ledger and the verdict over it: a word that is said of what nobody looked at."""

from tests.mutations.mutation import Row

_LEDGER = "aprfmt/model/ledger.py"
_RECORDS = "aprfmt/checks/records.py"
ROWS: tuple[Row, ...] = (
    Row(
        "ledger-tensor-read", _LEDGER,
        'reading, of = readings.get(weight, ("unread", ""))',
        'reading, of = readings.get(weight, ("role", ""))',
        "a tensor of no role counts as read",
    ),
    Row(
        "ledger-key-read", _LEDGER,
        '        return Item(kind, name, "unread", "", value)\n',
        '        return Item(kind, name, "text", "", value)\n',
        "a key that no table lists counts as read",
    ),
    Row(
        "ledger-one-side", _LEDGER,
        'APART: frozenset[State] = frozenset({"unequal", "only in A", "only in B"})',
        'APART: frozenset[State] = frozenset({"unequal", "only in A"})',
        "what B alone has is equal",
    ),
    Row(
        "ledger-unread-unequal", _LEDGER,
        'state: State = "equal" if same_content(x.holds, y.holds) else "unequal"',
        'state: State = "equal"',
        "what nothing reads is equal, whatever it holds",
    ),
    Row(
        "ledger-unreadable-equal", _LEDGER,
        "    if unreadable or not (counted or known or passed):\n",
        "    if not (counted or known or passed):\n",
        "a section that cannot be read is equal",
        ("tests/model/ledger/test_verdict.py::test_every_combination_has_the_exit_of_the_table*",),
    ),
    Row(
        "ledger-nothing-compared", _LEDGER,
        "    if unreadable or not (counted or known or passed):\n",
        "    if unreadable:\n",
        "a comparison of nothing is equal",
    ),
    Row(
        "ledger-accept-all", _LEDGER,
        '        return any(matches(name, row.kind != "file") '
        "for matches in wanted for name in names)\n",
        "        return bool(wanted)\n",
        "accepting one item accepts every other",
    ),
    Row(
        "ledger-surplus", _LEDGER,
        "        yield from self._surplus_bytes()\n",
        "        yield from ()\n",
        "bytes behind the last tensor are nowhere",
    ),
    Row(
        "ledger-embedded", _LEDGER,
        "            found = self.model.embedded_files\n",
        "            found = {}\n",
        "a file that is embedded in the metadata is nowhere",
    ),
    Row(
        "ledger-left-of-one", _LEDGER,
        "        return (*rows, *self.unreadable)\n",
        "        return self.unreadable\n",
        "PASS over tensors that nothing reads, without a word",
        ("tests/model/ledger/test_commands.py::test_one_model*",),
    ),
    Row(
        "unread-tensor-passes", _LEDGER,
        ' or (self.state == "unread" and self.kind in OF_WEIGHTS)\n',
        "\n",
        "PASS, and exit code 0, over a tensor of no role",
        ("tests/model/ledger/test_commands.py::test_one_model*",),
    ),
    Row(
        "unread-tensor-of-no-model", _LEDGER,
        "        return self.spec is not None or self.model.kind is not None or bool(names)\n",
        "        return self.spec is not None\n",
        "PASS over all tensors of an architecture that no table lists",
        ("tests/cli/test_exit_table.py::test_the_exit_code_of_the_table*",),
    ),
    Row(
        "scan-unread-weights", "aprfmt/fleet/questions.py",
        '        details={"items": kinds.total(), "weights": len(weights | lost)},\n',
        '        details={"items": kinds.total(), "weights": len(lost)},\n',
        "a scan passes over a model with tensors of no role",
        ("tests/model/ledger/test_commands.py::test_one_model*",),
    ),
    Row(
        "undecoded-passes", "aprfmt/checks/__init__.py",
        "{name: row.unread for name, row in context.scanned.items() if row.unread}",
        "{}",
        "PASS over a tensor of a type that no codec decodes",
        ("tests/checks/file/test_validate.py::test_a_tensor_nobody_can_decode_*",),
    ),
    Row(
        "verdict-of-gates", _RECORDS,
        '    return pronounce(_WORDS if counts["PASS"] else _NOTHING_RAN, compared, accept)\n',
        "    return pronounce(_WORDS, compared, (*accept, 'unread:*'))\n",
        "every unread item is accepted by the gates themselves",
    ),
    Row(
        "conversion-left", "aprfmt/conversion/accounting.py",
        "            if entry.state is not None and entry.state in APART | OPEN\n",
        "            if entry.state is not None and entry.state in OPEN\n",
        "a conversion says verified, and a file of the source is in no copy",
        ("tests/model/ledger/test_commands.py::test_a_conversion*",),
    ),
    Row(
        "captures-unknown", "aprfmt/measure/trace_view.py",
        '            found[name] = NotCompared("captured array", str(name), state, said)\n',
        "            del said\n",
        "arrays that were never compared are not named",
    ),
    Row(
        "captures-files", "inference/engines/mapping.py",
        "dict.fromkeys(captures.others, ",
        "dict.fromkeys((), ",
        "files of a capture that hold no array are not named",
        ("tests/model/ledger/test_commands.py::test_captured_arrays*",),
    ),
    Row(
        "batch-unread", "cli/eval/scoring.py",
        '        left = array_items("batch array", body["batch"]["unread"])\n',
        "        left = ()\n",
        "arrays of a batch that nothing reads are not in the verdict",
    ),
    Row(
        "adapter-unread", "aprfmt/adapters/answers.py",
        "        left = (*report.not_compared, *_unread_items(opened, found, model))\n",
        "        left = ()\n",
        "merged is said while a file beside differs",
    ),
    Row(
        "input-scale-one-sided", "aprfmt/measure/activation_scales.py",
        'state = "only in A" if other is None else "only in B"',
        'state = "equal"',
        "a scale of activations on one side only is equal",
        ("tests/model/ledger/test_verdict.py::test_a_scale_of_activations_on_one_side_only*",),
    ),
    Row(
        "generation-one-sided", "aprfmt/measure/texts.py",
        '        yield NotCompared("part", GENERATION_PART, state)\n        return\n',
        "        return\n",
        "a lost generation config is equal",
    ),
    Row(
        "budget-left", "aprfmt/compare/__init__.py",
        "    undone += late\n",
        "",
        "equal is said of tensors that a budget left",
    ),
    Row(
        "budget-unmoved", "aprfmt/diagnosis/walk.py",
        "            if report is not None and "
        "any(row.state == LATE for row in report.not_compared):\n",
        "            if report is None:\n",
        "equal logits are proven by tensors of which a budget left some",
    ),
    Row(
        "budget-checks", "aprfmt/checks/__init__.py",
        "            asked.append(row.name)\n",
        "            pass\n",
        "PASS over checks that a budget left",
    ),
    Row(
        "budget-runs", "inference/parity/between.py",
        "            (*late, *make_ledger(model, OF_A_PASS).not_compared),\n",
        "            make_ledger(model, OF_A_PASS).not_compared,\n",
        "a run that a budget left is not in the verdict",
    ),
    Row(
        "budget-attest", "aprfmt/attestation/__init__.py",
        '            if row.state in ("not tried", "not reached")\n',
        '            if row.state == "not tried"\n',
        "derived is said of weights that a budget left",
    ),
    Row(
        "budget-hash", "cli/hash_.py",
        "        return render.emit(body, 2 if left else damaged, lambda: show(body))\n",
        "        return render.emit(body, damaged, lambda: show(body))\n",
        "a list of hashes lacks tensors and exits 0",
    ),
    Row(
        "budget-trace", "cli/trace/modes.py",
        "            return replace(found, "
        "left=tuple(dict.fromkeys((*found.left, *late, *unread))))\n",
        "            return replace(found, left=tuple(dict.fromkeys((*found.left, *unread))))\n",
        "points that a budget left are within tolerance",
    ),
    Row(
        "field-of-item", "aprfmt/compare/diffs.py",
        "                (name in self.asked or row.decisive) and row.item not in accepted "
        "for row in each\n",
        "                (name in self.asked or row.decisive) for row in each\n",
        "an accepted part of the ledger differs all the same, by its field",
    ),
    Row(
        "share-printed-whole", "aprfmt/measure/proofs.py",
        "    if proof.share < 1.0 or proof.accused or not proof.judged:\n",
        "    if proof.accused or not proof.judged:\n",
        "what holds for 10 of 12 experts is confirmed of all",
    ),
    Row(
        "bound-of-the-accused", "aprfmt/measure/proofs.py",
        "    if proof.share < 1.0 or proof.accused or not proof.judged:\n",
        "    if proof.share < 1.0 or not proof.judged:\n",
        "damage is confirmed within the steps of the damaged side",
    ),
    Row(
        "share-of-several-whole", "aprfmt/causes/tensor/summary.py",
        "    return replace(least, share=given / max(1, sum(sizes)), accused=accused)\n",
        "    return replace(least, share=1.0, accused=accused)\n",
        "what holds for half of one tensor is confirmed of all tensors",
        ("tests/causes/test_explained_parts.py::test_the_share_of_several_tensors_*",),
    ),
    Row(
        "bound-of-one-accused", "aprfmt/causes/tensor/summary.py",
        "    accused = any(one.accused for one in proofs)\n",
        "    accused = all(one.accused for one in proofs)\n",
        "a tensor held to the damaged side's own steps is confirmed with another that is not",
        ("tests/causes/test_explained_parts.py::test_the_share_of_several_tensors_*",),
    ),
    Row(
        "confirmed-unjudged", "aprfmt/measure/proofs.py",
        "    if proof.share < 1.0 or proof.accused or not proof.judged:\n",
        "    if proof.share < 1.0 or proof.accused:\n",
        "a change is confirmed by the values that its numbers were found on",
    ),
    Row(
        "confirmed-unmade", "aprfmt/measure/proofs.py",
        "    if proof is None or proof.share < MOST or",
        "    if proof is None:\n        return \"confirmed\"\n    if proof.share < MOST or",
        "what was only measured or replaced is confirmed without a reproduction",
    ),
    Row(
        "rows-relate-nothing", "aprfmt/diagnosis/capture_point.py",
        '    if view.recorded is None or np.ptp(view.recorded.values) == 0:\n        return ""\n',
        '    if view.recorded is None or view.recorded.rows is not None:\n'
        '        return "some rows of another point"\n',
        "noise in some rows is confirmed as values of another point",
        (
            "tests/diagnosis/test_walk.py::"
            "test_values_that_no_relation_gives_are_not_confirmed_as_another_point",
        ),
    ),
    Row(
        "amplified-unjudged", "aprfmt/diagnosis/conclusion.py",
        "    judged = residuals.all_right and all(row.shadow is not None for row in beyond)\n",
        "    judged = bool(residuals.found) and all(row.shadow is not None for row in beyond)\n",
        "rounding is said of a difference that a wrong operation makes",
        (
            "tests/compare/test_nonfinite.py::"
            "test_rounding_beyond_the_bounds_asks_for_operations_that_were_judged",
        ),
    ),
)  # fmt: skip
