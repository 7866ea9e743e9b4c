"""Mistakes that once went by unnoticed, with others like them in the same places."""

from tests.mutations.mutation import Row

ROWS: tuple[Row, ...] = (
    Row(
        "align-only-in-b", "aprfmt/measure/alignment.py",
        "for key in dict.fromkeys((*roles_a, *roles_b)):",
        "for key in dict.fromkeys(roles_a):",
        "roles only in B are ignored",
    ),
    Row(
        "unreadable-exit-1", "aprfmt/compare/diffs.py",
        '            if tensor.verdict == "UNREADABLE"\n        ]',
        "            if False\n        ]",
        "UNREADABLE is no longer exit 2",
    ),
    Row(
        "verify-bytes", "aprfmt/conversion/verification.py",
        "        if at is not None:\n",
        "        if False:\n",
        "bytes that differ after writing are not noticed",
    ),
    Row(
        "verify-checksum", "aprfmt/conversion/verification.py",
        "    elif tensor_checksum(stored) != record.crc:",
        "    elif False:",
        "checksums that differ after writing are not noticed",
    ),
    Row(
        "lost-warnings", "aprfmt/conversion/plan.py",
        '        plan.notes.append('
        'Note("warning", loss.name, loss.consequence, "not_expressible"))',
        "        pass",
        "warnings of what a target cannot hold are dropped",
    ),
    Row(
        "tokenizer-exit-code", "aprfmt/compare/diffs.py",
        "for name in SECTIONS if name != \"tensors\"}",
        "for name in SECTIONS[:2] if name != \"tensors\"}",
        "another tokenizer does not change the exit code",
    ),
    Row(
        "format-parity-facts", "aprfmt/checks/gates/parity.py",
        "    rows = [row for row in (*report.hyperparameters, *report.tokenizer) if row.decisive]",
        "    rows = [row for row in report.hyperparameters[:0] if row.decisive]",
        "format parity looks at no fact",
    ),
    Row(
        "nan-first-window", "aprfmt/checks/file/value_pass.py",
        "            total.add_stats(tensor_stats(window))",
        "            if not first:\n                total.add_stats(tensor_stats(window))",
        "NaN is counted in the first 16 MiB only",
    ),
    Row(
        "overflow-one", "aprfmt/conversion/run.py",
        "    if counts.overflowed and not options",
        "    if counts.overflowed > 1 and not options",
        "one overflowing value is let through",
    ),
    Row(
        "nvfp4-negative", "aprfmt/checks/file/scales.py",
        'blocks["d"] >= 0x7F',
        'blocks["d"] == 0x7F',
        "negative NVFP4 scales are not noticed",
    ),
    Row(
        "mode-of-old-file", "aprfmt/formats/output_file.py",
        "            copy_mode(self._fd, old)\n",
        "            pass\n",
        "a replaced file loses its mode",
    ),
    Row(
        "mode-of-umask", "aprfmt/formats/output_file.py",
        "mode = 0o666 if old is None",
        "mode = 0o600 if old is None",
        "a new file has not the mode of the umask",
    ),
    Row(
        "qwen2-window-key", "aprfmt/arch/qwen2.py",
        "        first = usual if found is None else whole_number(*found)",
        "        first = usual",
        "qwen2's max_window_layers is not read",
    ),
    Row(
        "qwen2-window-default", "aprfmt/arch/qwen2.py",
        "MAX_WINDOW_LAYERS = 28",
        "MAX_WINDOW_LAYERS = 0",
        "qwen2's default of max_window_layers",
    ),
    Row(
        "qwen2-window-first", "aprfmt/arch/qwen2.py",
        "tuple(i >= first for",
        "tuple(i > first for",
        "qwen2's first windowed layer is one late",
    ),
    Row(
        "yarn-upper-clip", "inference/rope.py",
        "max(low, 0), min(high, dim - 1)",
        "max(low, 0), high",
        "yarn's upper clip",
    ),
    Row(
        "yarn-lower-clip", "inference/rope.py",
        "max(low, 0), min(high, dim - 1)",
        "low, min(high, dim - 1)",
        "yarn's lower clip",
    ),
    Row(
        "qa-whole-pass", "aprfmt/checks/gates/forward.py",
        '("a whole pass", after_whole)',
        '("a whole pass", first)',
        "qa does not look at what a whole pass leaves",
    ),
    Row(
        "qa-fresh-session", "aprfmt/checks/gates/forward.py",
        '("in a fresh session", fresh)',
        '("in a fresh session", first)',
        "qa does not compare with a fresh session",
    ),
    Row(
        "qa-device-loss", "aprfmt/checks/gates/parity.py",
        "abs(change) <= most,",
        "abs(change) <= 1e9,",
        "qa's bound on the loss of two devices",
    ),
    Row(
        "qa-copy-loss", "aprfmt/checks/gates/parity.py",
        "abs(change) <= tolerances.MAX_CE_LOSSY,",
        "abs(change) <= 1e9,",
        "qa's bound on the loss of a coarser copy",
    ),
    Row(
        "qa-exact-loss", "aprfmt/measure/tolerances.py",
        "MAX_CE if rel_l2 < COARSE else MAX_CE_LOSSY)",
        "MAX_CE_LOSSY)",
        "qa's bound on the loss of two exact devices",
    ),
    Row(
        "qa-loss-of-rounding", "aprfmt/measure/tolerances.py",
        "return min(loss_bound(rel_l2, size), MAX_CE",
        "return min(1e9, MAX_CE",
        "qa's bound on the loss of two devices does not follow from dtype and size",
    ),
    Row(
        "qa-device-finite", "aprfmt/checks/gates/parity.py",
        "    odd = count_nonfinite(a, b)\n",
        "    odd = None\n",
        "a NaN on one device has a distance",
    ),
    Row(
        "mode-set-id", "aprfmt/formats/output_file.py",
        "    mode = stat.S_IMODE(old.st_mode) & 0o777\n",
        "    mode = stat.S_IMODE(old.st_mode)\n",
        "set-id bits survive in a file that somebody else wrote",
    ),
    Row(
        "mode-of-programs", "aprfmt/formats/output_file.py",
        "    mode = stat.S_IMODE(old.st_mode) & 0o777\n",
        "    mode = stat.S_IMODE(old.st_mode) & 0o666\n",
        "a program's bits are lost",
    ),
    Row(
        "format-parity-hyper", "aprfmt/checks/gates/parity.py",
        "*report.hyperparameters, *report.tokenizer) if row.decisive]",
        "*report.tokenizer,) if row.decisive]",
        "format parity looks at no hyperparameter",
    ),
    Row(
        "qa-max-ce", "aprfmt/measure/tolerances.py",
        "MAX_CE = 0.05",
        "MAX_CE = 0.06",
        "qa's bound on the loss of two devices is wider",
    ),
    Row(
        "qa-max-ce-lossy", "aprfmt/measure/tolerances.py",
        "MAX_CE_LOSSY = 0.5",
        "MAX_CE_LOSSY = 0.6",
        "qa's bound on the loss of coarse arithmetic is wider",
    ),
    Row(
        "qa-loss-given", "aprfmt/checks/bounds.py",
        "LOSS_GIVEN = 0.02",
        "LOSS_GIVEN = 0.03",
        "a stated loss may be off by more",
    ),
    Row(
        "unreadable-exit-none", "aprfmt/compare/diffs.py",
        ' else set()) | {"UNREADABLE"}\n        taken',
        " else set())\n        taken",
        "an unreadable tensor is a difference like another",
    ),
    Row(
        "nan-last-window", "aprfmt/checks/file/value_pass.py",
        "            total.add_stats(tensor_stats(window))",
        "            total = Accumulator()\n            total.add_stats(tensor_stats(window))",
        "only the last window of a tensor counts",
    ),
)  # fmt: skip
