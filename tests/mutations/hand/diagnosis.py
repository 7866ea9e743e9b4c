"""Mistakes in diagnosis, in the comparison of traces, and in the bounds of both."""

from tests.mutations.mutation import Row

ROWS: tuple[Row, ...] = (
    Row(
        "bound-float32", "aprfmt/measure/tolerances.py",
        '"float32": Tolerance(2e-5, "float32 reductions in another order, ten',
        '"float32": Tolerance(2e-2, "float32 reductions in another order, ten',
        "bugs a thousand times the bound pass as float32 rounding",
    ),
    Row(
        "bound-bfloat16", "aprfmt/measure/tolerances.py",
        '"bfloat16": Tolerance(8e-2, "bfloat16 arithmetic, five',
        '"bfloat16": Tolerance(8e-1, "bfloat16 arithmetic, five',
        "in bfloat16 nothing is ever wrong",
    ),
    Row(
        "bound-one-operation", "aprfmt/measure/tolerances.py",
        '"float32": Tolerance(2e-5, "float32 reductions in another order"),',
        '"float32": Tolerance(2e-3, "float32 reductions in another order"),',
        "one wrong operation is taken for rounding",
    ),
    Row(
        "bound-experts", "aprfmt/measure/tolerances.py",
        "if not moe or worst.rel_l2 < 1e-3:", "if not moe:",
        "models with experts are given five times the float32 bound",
    ),
    Row(
        "bound-finer-arithmetic", "aprfmt/measure/tolerances.py",
        "worst = max((BASE[dtype_a], BASE[dtype_b]), key=lambda row: row.rel_l2)",
        "worst = min((BASE[dtype_a], BASE[dtype_b]), key=lambda row: row.rel_l2)",
        "float32 against bfloat16 is held to float32",
    ),
    Row(
        "bound-depth", "aprfmt/measure/tolerances.py",
        "growth = max(1.0, (depth / DEPTH) ** 0.5)", "growth = 1.0",
        "deep layers are held to the bound of shallow ones",
    ),
    Row(
        "bound-calibrated", "aprfmt/measure/tolerances.py",
        "== (pair, weights, point, coarser):", "== (backends, weights, point, coarser):",
        "a calibrated bound counts in one order of the backends only",
    ),
    Row(
        "traces-infinite", "aprfmt/measure/distances.py",
        "np.where(finite, np.abs(x - y), np.inf)", "np.where(finite, np.abs(x - y), 0.0)",
        "a NaN on one side of two traces is no difference",
    ),
    Row(
        "traces-peak", "aprfmt/measure/traces.py",
        "not (found.rel <= limit and peak <= max_limit)", "not found.rel <= limit",
        "one value that is far off drowns in a large point",
    ),
    Row(
        "traces-nothing-compared", "aprfmt/measure/traces.py",
        'counts = {"points": (self.compared, len(self.points))}',
        'counts = {"points": (1, len(self.points))}',
        "two traces without a common value are equal",
    ),
    Row(
        "traces-other-rows", "aprfmt/measure/traces.py",
        "and a.positions != b.positions:", "and len(a.positions) != len(b.positions):",
        "rows of other tokens are compared",
    ),
    Row(
        "traces-printed", "aprfmt/measure/traces.py",
        "coarse = max(a.resolution, b.resolution)", "coarse = a.resolution",
        "values printed to few decimals on the reference's side are a bug",
    ),
    Row(
        "traces-other-ids", "aprfmt/measure/traces.py",
        "    check_ids(a, b)\n    if same_dtype is not None:", "    if same_dtype is not None:",
        "traces of other tokens are compared",
    ),
    Row(
        "traces-own-bound-of-diagnose", "aprfmt/diagnosis/trace_pair.py",
        "between = RunPair.from_traces(actual, right, moe=moe)",
        'between = RunPair(("", ""), moe=moe)',
        "diagnose holds points to a bound of its own",
    ),
    Row(
        "traces-experts-not-seen", "aprfmt/measure/traces.py",
        "mixture = moe or shows_routing(a) or shows_routing(b)", "mixture = moe",
        "only commands that have the model know that experts amplify rounding",
    ),
    Row(
        "walk-tokens-not-recorded", "aprfmt/diagnosis/diagnosis_order.py",
        "if self.ids is not None and not records_token_ids(trace)", "if self.ids is None",
        "nobody hears that a trace's tokens were taken on trust",
    ),
    Row(
        "walk-zeros", "aprfmt/diagnosis/diagnosis_order.py",
        "        if zeros:\n            self.levels.reason",
        "        if False:\n            self.levels.reason",
        "a buffer that nobody filled is compared",
        ("tests/diagnosis/test_honesty.py::test_zeros_are_no_verdict",),
    ),
    Row(
        "measure-lone-nan", "aprfmt/measure/distances.py",
        "if not (same | (np.isfinite(x) & np.isfinite(y))).all():",
        "if not (same | (np.isfinite(x) | np.isfinite(y))).all():",
        "a NaN on one side is measured as a number",
    ),
    Row(
        "measure-last-rows", "inference/replay/recorded_trace.py",
        "chosen = list(range(shape[axis] - count, shape[axis]))", "chosen = list(range(count))",
        "rows without positions are taken as the first ones",
    ),
    Row(
        "conclude-not-shadowed", "aprfmt/diagnosis/conclusion.py",
        "explained = judged or not beyond", "explained = True",
        "what is beyond every bound is confirmed rounding, though no operation was judged",
    ),
    Row(
        "shadow-flagged", "inference/replay/shadow.py",
        "return self.residual is not None and not self.residual <= self.tolerance",
        "return self.residual is not None and self.residual > self.whole_tolerance",
        "one operation is held to the bound of a whole pass",
    ),
    Row(
        "shadow-fed-its-own", "inference/replay/shadow.py",
        "                mine = view.theirs if own else value.fill_into(mine, token_axis(key))\n",
        "                pass\n",
        "the pass goes on with its own values, so every later point is blamed",
    ),
    Row(
        "examine-holds-further", "aprfmt/diagnosis/wrong_operations.py",
        "if reach <= here or _spoils_layer(case, found, layers, change.scoped):\n"
        "            continue\n        if best is None or (reach, -left)",
        "if reach < here or _spoils_layer(case, found, layers, change.scoped):\n"
        "            continue\n        if best is None or (reach, -left)",
        "a change that explains nothing is a confirmed cause",
    ),
    Row(
        "examine-name-last", "aprfmt/diagnosis/wrong_operations.py",
        "not change.general, there, made,",
        "not change.general, not there, made,",
        "a wrong name of a point is preferred to the wrong operation",
    ),
)  # fmt: skip
