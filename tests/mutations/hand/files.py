"""Mistakes in writing, reading back and hashing files that a user would not notice."""

from tests.mutations.mutation import Row

ROWS: tuple[Row, ...] = (
    Row(
        "counts-infinite-before", "aprfmt/conversion/change_counts.py",
        "(np.isfinite(before) & ~np.isfinite(after))",
        "(~np.isfinite(after))",
        "values that were infinite before count as overflow",
    ),
    Row(
        "counts-nan-stays", "aprfmt/conversion/change_counts.py",
        "differs &= ~(np.isnan(before) & np.isnan(after))",
        "pass",
        "NaN that stays NaN counts as changed",
    ),
    Row(
        "counts-negative-underflow", "aprfmt/conversion/change_counts.py",
        "((before != 0) & (after == 0))",
        "((before > 0) & (after == 0))",
        "negative values that underflow are not counted",
    ),
    Row(
        "convert-incomplete", "aprfmt/conversion/plan.py",
        "    check_complete(model, options, drops, known=model.format != target.name, "
        "copied=copied)\n", "",
        "incomplete models are converted",
    ),
    Row(
        "convert-no-place", "aprfmt/conversion/plan.py",
        '        raise ConversionError(\n            f"{model.path}: tensor {name!r} has no '
        "place",
        '        continue\n        raise ConversionError(\n            f"{model.path}: '
        "tensor {name!r} has no place",
        "tensors without a place are lost in silence",
    ),
    Row(
        "convert-two-of-one-name", "aprfmt/conversion/plan.py",
        "        if name in seen:\n",
        "        if False:\n",
        "two tensors of one name are written",
    ),
    Row(
        "restore-damaged-base64", "aprfmt/tensors/restoration.py",
        "base64.b64decode(patch, validate=True)",
        "base64.b64decode(patch)",
        "damaged base64 of a record is taken",
    ),
    Row(
        "convert-source-checksum", "aprfmt/conversion/__init__.py",
        "        damage = verifier.notes(hashed.checksums if hashed is not None else dict)\n",
        "        damage = []\n",
        "a source whose checksum is wrong is converted in silence",
    ),
    Row(
        "convert-to-against-extension", "aprfmt/conversion/output_format.py",
        "    if to is not None and found is not None and to != found:",
        "    if False:",
        "--to against the extension",
    ),
    Row(
        "verify-shape", "aprfmt/conversion/__init__.py",
        "            if found != (output.info.shape, output.info.encoding, output.info.nbytes):",
        "            if False:",
        "shape and encoding read back are not compared",
    ),
    Row(
        "verify-beside-place", "aprfmt/conversion/verification.py",
        "        return location[0].identity == file.identity and location[1] == at",
        "        return location[0].identity == file.identity",
        "bytes proven in one place count for another",
    ),
    Row(
        "verify-beside-changed", "aprfmt/conversion/verification.py",
        "        return location[0].identity == file.identity and location[1] == at",
        "        return location[1] == at",
        "bytes proven in a file count for another one in its place",
    ),
    Row(
        "verify-tensor-gone", "aprfmt/conversion/__init__.py",
        "            if tensor is None:",
        "            if False:",
        "a tensor that is not there on reading",
    ),
    Row(
        "digest-companions", "aprfmt/tensors/runs.py",
        "[tensor.parts[key] for key in sorted(tensor.parts)] or [tensor]",
        "[tensor]",
        "companions are not hashed",
    ),
    Row(
        "digest-float64", "aprfmt/tensors/digest.py",
        'wide = values.astype("<f8" if size == 8 else "<f4")',
        'wide = values.astype("<f4")',
        "float64 is hashed as float32",
    ),
    Row(
        "digest-shapes", "aprfmt/tensors/digest.py",
        "f\"{','.join(map(str, shape))}\\n\".encode()",
        'b"\\n"',
        "shapes are not hashed",
    ),
    Row(
        "manifest-outside", "aprfmt/model/manifest.py",
        '        elif before["outside"] != now["outside"]:',
        "        elif False:",
        "damage outside of tensors, beside damaged tensors, is not named",
    ),
    Row(
        "manifest-new-text", "aprfmt/model/manifest.py",
        "not in texts[0]:\n",
        "not in texts[0] and False:\n",
        "a new text beside the model",
    ),
    Row(
        "journal-left-out", "aprfmt/formats/journal.py",
        "        if len(moves) == 1 and not removes:",
        "        if len(moves) >= 1 and not removes:",
        "a set is published without a journal",
    ),
    Row(
        "journal-files-unsynced", "aprfmt/formats/journal.py",
        "            lock.sync()  # after a power",
        "            pass  # after a power",
        "files are not synced before their journal",
    ),
    Row(
        "journal-unsynced", "aprfmt/formats/journal.py",
        "            os.fsync(fd)\n",
        "            pass\n",
        "the journal is not synced",
    ),
    Row(
        "journal-any-file", "aprfmt/formats/journal.py",
        "        and all(is_temporary(source) for source, _ in moves)\n",
        "",
        "a journal may move any file",
    ),
    Row(
        "journal-other-folders", "aprfmt/formats/journal.py",
        "        and os.path.basename(name) == name\n",
        "",
        "a journal may name files of other folders",
    ),
    Row(
        "journal-no-way-back", "aprfmt/formats/journal.py",
        "            _roll_back(lock, journal, backups, error)",
        "            pass",
        "a set that failed half way stays half way",
    ),
    Row(
        "atomic-made-meanwhile", "aprfmt/formats/atomic.py",
        "            if not self._force and not file.existed and os.path.lexists(file.final):",
        "            if False:",
        "a file that somebody made meanwhile is replaced",
    ),
    Row(
        "atomic-foreign-files", "aprfmt/formats/atomic.py",
        "        if foreign is not None:",
        "        if False:",
        "a folder with other people's files is replaced",
    ),
    Row(
        "atomic-two-folders", "aprfmt/formats/atomic.py",
        "        elif self._target != final.parent:",
        "        elif False:",
        "files of one set in two folders",
    ),
    Row(
        "output-unsynced", "aprfmt/formats/output_file.py",
        "                os.fsync(self._fd)\n                self.identity",
        "                self.identity",
        "files are not synced",
    ),
    Row(
        "output-failed-published", "aprfmt/formats/output_file.py",
        "        if self._failed:",
        "        if False:",
        "a write that failed is published",
    ),
    Row(
        "validate-strict", "aprfmt/checks/records.py",
        'if strict or one.level == "fail"]',
        'if one.level == "fail"]',
        "--strict fails nothing more",
    ),
    Row(
        "imatrix-other-model", "aprfmt/conversion/encoding_choice.py",
        "        if found.size not in (columns, shape[-1]):",
        "        if False:",
        "an importance matrix of another model is taken",
    ),
    Row(
        "imatrix-unnamed", "aprfmt/conversion/encoding_choice.py",
        '        plan.notes.append(Note("warning", matrix_text(options), text, "imatrix_gaps"))',
        "        pass",
        "tensors an importance matrix says nothing about are not named",
    ),
)  # fmt: skip
