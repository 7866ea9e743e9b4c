"""In what reads, converts, compares, validates, gates and runs: answers that would be believed."""

from tests.mutations.mutation import Row

ROWS: tuple[Row, ...] = (
    Row(
        "gguf-name-twice", "aprfmt/formats/gguf/parse.py",
        "        seen.add(name)\n        entries.append", "        entries.append",
        "two tensors of one name: the first is gone without a word",
    ),
    Row(
        "overlap", "aprfmt/formats/damage.py",
        "if extents[i][0] < extents[before][1]:", "if extents[i][0] + 1 < extents[before][1]:",
        "tensors may share a byte",
    ),
    Row(
        "gguf-order-of-sizes", "aprfmt/formats/gguf/parse.py",
        "return TableLine(name, dims[::-1],", "return TableLine(name, dims,",
        "shapes are those of the file, fastest first",
    ),
    Row(
        "safetensors-gap", "aprfmt/formats/safetensors/parse.py",
        "        if info.offset != at:\n            inside",
        "        if info.offset < at:\n            inside",
        "bytes that no tensor owns can hide in a file",
    ),
    Row(
        "safetensors-size", "aprfmt/formats/safetensors/parse.py",
        "if end - begin != total // 8:", "if end - begin < total // 8:",
        "a tensor may own more bytes than its shape says",
    ),
    Row(
        "apr-header-checksum", "aprfmt/formats/apr/parse.py",
        "    if not intact:\n", "    if False:\n",
        "a damaged APR header is believed",
    ),
    Row(
        "cursor-count", "aprfmt/formats/cursor.py",
        "if value * smallest > self.remaining:", "if value > self.remaining:",
        "a count that cannot fit is believed",
    ),
    Row(
        "values-nan-on-one-side", "aprfmt/measure/numbers.py",
        "differs = (wide_x != wide_y) & ~(nan_x & nan_y)",
        "differs = (wide_x != wide_y) & ~(nan_x | nan_y)",
        "a NaN that only one model has is no change",
    ),
    Row(
        "values-where", "aprfmt/measure/numbers.py",
        "float(delta[index]), base + index", "float(delta[index]), index",
        "the largest difference is said to be in the first window",
    ),
    Row(
        "bounds-q6-k", "aprfmt/codecs/q6_k.py",
        "return largest_steps(block, block[\"scales\"])",
        "return largest_steps(block, block[\"scales\"]) * 8",
        "a Q6_K weight that is eight steps off is within rounding",
    ),
    Row(
        "convert-underflow", "aprfmt/conversion/change_counts.py",
        "self.underflowed += int(((before != 0) & (after == 0)).sum())", "pass",
        "numbers that became zero are not counted",
    ),
    Row(
        "convert-restored", "aprfmt/tensors/restoration.py",
        "    wrong = np.flatnonzero(source != made)\n",
        "    wrong = np.flatnonzero(source != made)[:1]\n",
        "one element of those that narrowing changes comes back",
    ),
    Row(
        "manifest-decoded", "aprfmt/model/manifest.py",
        'if found["decoded"] != expected["decoded"]:', "if False:",
        "other values than the manifest's pass where only they were recorded",
    ),
    Row(
        "manifest-gone", "aprfmt/model/manifest.py",
        "keys = found if selected else dict.fromkeys((*expected, *found))",
        "keys = found",
        "a tensor that the manifest has and the model lacks is not missed",
    ),
    Row(
        "outcome-nothing-ran", "aprfmt/base/outcome.py",
        "return OUTCOMES.index(outcome)", "return OUTCOMES.index(outcome) % 2",
        "a report in which nothing ran is a pass",
    ),
    Row(
        "qa-baseline-absolute", "aprfmt/checks/gates/baseline.py",
        '(abs(old) if row["kind"] == "relative" else 1)', "max(abs(old), 1)",
        "a baseline's absolute tolerance grows with the number",
    ),
    Row(
        "qa-gate-gone", "aprfmt/checks/gates/baseline.py",
        'worse = old.get("outcome") == "PASS" and outcome != "PASS"',
        'worse = old.get("outcome") == "PASS" and outcome == "FAIL"',
        "a gate that passed before and is gone or did not run is no step back",
    ),
    Row(
        "qa-points", "aprfmt/checks/gates/parity.py",
        "wrong = [key for key, digest in mine.hashes.items() if theirs.hashes.get(key) != digest]",
        "wrong: list[str] = []",
        "a copy in another format may compute something else",
    ),
    Row(
        "causal-window", "inference/masks.py",
        "seen & (key > query - window)", "seen & (key >= query - window)",
        "a sliding window sees one key more in numpy and torch",
    ),
    Row(
        "attention-layer-scale", "inference/attention.py",
        "scale /= layer + 1", "scale /= layer + 2",
        "scores scaled by layer are scaled by the next one's number",
    ),
    Row(
        "cache-length", "inference/kv_cache.py",
        "k, v = self._backend.append((keys, values), (k, v), self.length)",
        "k, v = self._backend.append((keys, values), (k, v), max(self.length - 1, 0))",
        "a step of generation overwrites the last position",
    ),
    Row(
        "loss-by-samples", "inference/loss.py",
        "nats = total / tokens if tokens else math.nan",
        "nats = total / tokens if tokens else 0.0",
        "a loss of no token is 0",
    ),
    Row(
        "router-bias", "inference/routing.py",
        "    weights = _finish_weights(m, m.pick(scores, chosen), hp, tiny)",
        "    weights = _finish_weights(m, m.pick(choice, chosen), hp, tiny)",
        "experts are weighed with the bias that only chooses them",
    ),
    Row(
        "sampling-top-p", "inference/sampling.py",
        "np.searchsorted(np.cumsum(probs), sampling.top_p)) + 1",
        "np.searchsorted(np.cumsum(probs), sampling.top_p))",
        "top-p leaves out the token that crosses it",
    ),
)  # fmt: skip
