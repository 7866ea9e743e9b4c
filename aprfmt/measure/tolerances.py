"""The tolerances for comparing two runs: number, unit, reason.

A tolerance is a relative L2 distance of a whole capture point. The base depends on the coarser
arithmetic of the two runs; errors of float arithmetic grow slowly with depth, and expert choices
make them jump. Measured: float32 runs of an 8-layer model are within 1.2e-6 of each other and of
float64, f16 3.9e-3, bf16 1.5e-2; the smallest real bug seen is 2.7e-4.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from aprfmt.model import Model


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A bound on relative L2, and the reason for it."""

    rel_l2: float
    reason: str


# arithmetic dtype -> bound at every point
BASE: dict[str, Tolerance] = {
    "float64": Tolerance(1e-9, "float64 on both sides; rope tables are float32 everywhere"),
    "float32": Tolerance(2e-5, "float32 reductions in another order, ten times the measured"),
    "tf32": Tolerance(5e-3, "products in TF32: five times the measured 9.4e-4"),
    "float16": Tolerance(2e-2, "float16 arithmetic, five times the measured"),
    "bfloat16": Tolerance(8e-2, "bfloat16 arithmetic, five times the measured"),
}
# The smallest real bug seen, gelu by erf for gelu by tanh: a tolerance above it may hide one.
SMALLEST_BUG = 2.7e-4
# Points that are choices or differences of near values: a rounding may flip them.
DISCRETE = ("experts", "router_margin", "index_keys", "index_margin")
# A mixture of experts amplifies rounding: another expert is another function.
MOE_FACTOR = 5.0


def run_tolerance(dtype_a: str, dtype_b: str, *, moe: bool = False) -> Tolerance:
    """Return the tolerance of two whole runs, by the coarser of both dtypes.

    `moe`: the model has experts, whose choice rounding may change in 16-bit arithmetic.
    """
    worst = max((BASE[dtype_a], BASE[dtype_b]), key=lambda row: row.rel_l2)
    if not moe or worst.rel_l2 < 1e-3:
        return worst
    return Tolerance(worst.rel_l2 * MOE_FACTOR, worst.reason + ", experts may flip")


# One operation, or the few between two recorded points, on equal inputs: no error accumulates.
# A cast to bfloat16 is 1.7e-3, half a step of relative 2^-8; a softmax over scores of 10 to 20
# makes ten times that of it.
ONE_OPERATION: dict[str, Tolerance] = {
    "float64": Tolerance(1e-9, "float64 on both sides; rope tables are float32 everywhere"),
    "float32": Tolerance(2e-5, "float32 reductions in another order"),
    "tf32": Tolerance(2e-3, "one product in TF32"),
    "float16": Tolerance(4e-3, "roundings to float16 inside one block's operations"),
    "bfloat16": Tolerance(3e-2, "roundings to bfloat16 inside one block's operations"),
}
# Operations that transformers computes in float32 whatever the run's dtype, in all models or some:
# norms, softmaxes, rope's tables, factors of the stream, routers, scans and decays.
IN_FLOAT32 = (
    "rms_norm", "layer_norm", "gated_norm", "probs", "rope", "scale", "router", "scan",
    "gated_scan", "decay", "decay_rates", "time_step", "delta",
)  # fmt: skip
# It, and dumps of it: their traces do not say which engine made them.
FLOAT32_ENGINES = ("transformers", "npz", "captures")
_FLOAT32 = Tolerance(
    ONE_OPERATION["float32"].rel_l2, "transformers computes it in float32 in a float64 model too"
)
# (engine, class of the weight or name of the operation) -> bound of one operation, where an engine
# computes it otherwise than its dtype says.
ENGINE_OPERATION: dict[tuple[str, str], Tolerance] = {
    **{(engine, op): _FLOAT32 for engine in FLOAT32_ENGINES for op in IN_FLOAT32},
    ("llama.cpp", "quantized"): Tolerance(
        4e-2, "activations are quantized to 8 bits: 6e-3 a product, measured up to 1.8e-2"
    ),
    ("llama.cpp", "half"): Tolerance(5e-3, "activations are rounded to the weights' 16 bits"),
    ("llama.cpp", "activate"): Tolerance(2e-3, "gelu is looked up in a table of float16 values"),
}

# The operations among the names of that table.
SPECIAL_OPERATIONS = frozenset(kind for _, kind in ENGINE_OPERATION) - {"quantized", "half"}


def operation_tolerance(
    dtype_a: str, dtype_b: str, engine: str = "", kinds: Sequence[str] = ()
) -> Tolerance:
    """Return the tolerance of one operation on equal inputs, by the coarser of both dtypes.

    `kinds` are the classes of the weights it multiplies and the names of operations that it
    consists of. They count where `engine` computes these in a special way.
    """
    rows = [ONE_OPERATION[dtype_a], ONE_OPERATION[dtype_b]]
    rows += [ENGINE_OPERATION[engine, k] for k in kinds if (engine, k) in ENGINE_OPERATION]
    return max(rows, key=lambda row: row.rel_l2)


# Where rounding is amplified, another order of the same operations may be this many times further
# off than the order that was measured.
AMPLIFIED = 3.0
# Statistics are printed with few digits: this many times the tolerance of the values, at least so
# much of their size.
STATISTICS, LEAST_STATISTICS = 5.0, 2e-3


def statistics_tolerance(dtype_a: str, dtype_b: str) -> float:
    """Return the relative difference that statistics of two runs may have, by the coarser dtype."""
    return max(LEAST_STATISTICS, STATISTICS * run_tolerance(dtype_a, dtype_b).rel_l2)


ALL_PRODUCTS = 4  # products that must be off before an arithmetic is said to be
# A product of n terms in arithmetic of unit roundoff u: with the factors rounded, each term is off
# by up to 2u and independently, so the sum by about u of its norm, whatever n; with the sum held in
# u as well, by up to u times the root of n. Measured on tiny models: TF32 0.4 u to 0.8 u, results
# rounded to 16 bits 0.3 u to 0.6 u. Errors of one arithmetic are alike in all products: the
# smallest and the largest are within ALIKE_PRODUCTS of the middle one; a wrong weight is not.
LEAST_ROUNDED, ALIKE_PRODUCTS = 0.1, 6.0


def arithmetic_of_errors(largest: float, middle: float, smallest: float) -> str:
    """Return the dtype in which products were computed, judged by their errors; "" if unclear.

    `largest`, `middle` (the median) and `smallest` are relative L2 errors of all products.
    """
    if not smallest * ALIKE_PRODUCTS >= middle or not largest <= ALIKE_PRODUCTS * middle:
        return ""
    for dtype in ("tf32", "float16", "bfloat16"):
        least = LEAST_ROUNDED * ROUNDOFF[dtype]
        if least <= middle and largest <= ONE_OPERATION[dtype].rel_l2:
            return dtype
    return ""


# --- losses, in nats ------------------------------------------------------------------------------

# Unit roundoff of an arithmetic: half the distance of its numbers from 1 to the next.
ROUNDOFF: Mapping[str, float] = {
    "float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}  # fmt: skip
# Every backend adds up a vocabulary in float32 at least, in this many running sums or more.
LANES = 8


# Root mean square of the relative error of one rounding, in unit roundoffs: the error is uniform
# over half a step, and mantissas m are spread as 1/m: 1/m squared has the mean 3 / (8 ln 2).
RMS_ROUNDING = math.sqrt(3 / (8 * math.log(2)) / 3)
# Roundings between the stream before a layer and after it: norm 2, products 1, rope 2, scores 1,
# softmax 1, values 1, output 1, sum 1; norm 2, products 1, activation 1, gate 1, product 1, sum 1.
ROUNDINGS_OF_LAYER = 17
ROUNDINGS_OUTSIDE = 3  # the embedding's scale and the last norm's two; the head's is counted apart
PRODUCTS_OF_LAYER = 6  # products whose sums have as many terms as the stream is wide
DEVIATIONS = 3.0  # standard deviations allowed: one draw in 370 is beyond


def logit_bound(dtype: str, layers: int, width: int, size: float, *, moe: bool = False) -> float:
    """Return how far logits computed in `dtype` may be off, in units of their spread.

    It follows from the type and the number of roundings, and from no run. Each of n roundings errs
    by u RMS_ROUNDING of what it rounds, independently, and no operation makes relative errors
    larger: together by the root of n. The head's rounding is of the logits' own size, `size` times
    their spread. Sums of `width` terms are added up in float32 at least, each addition one more
    rounding there. A softmax over large scores amplifies errors, the branches of a layer are
    smaller than the stream that each is counted against: neither is counted.
    """
    u, sums = ROUNDOFF[dtype], min(ROUNDOFF[dtype], ROUNDOFF["float32"])
    count = layers * ROUNDINGS_OF_LAYER + ROUNDINGS_OUTSIDE + size**2
    count += (sums / u) ** 2 * (layers * PRODUCTS_OF_LAYER + 1) * width
    found = DEVIATIONS * RMS_ROUNDING * u * math.sqrt(count)
    return found * MOE_FACTOR if moe and u > ROUNDOFF["float32"] else found


def label_loss_bound(nats: float, dtype: str, vocab: int) -> float:
    """Return how far one label's loss may be off, in nats, for being computed in `dtype`.

    The loss of logits z is l = r + s: r = max z - z[label], s = ln S, S = sum of exp(z - max z).
    With unit roundoff u, each result rounded once and exp and ln within one unit in the last place
    (2u), to first order:
    - the differences z - max z are off by u times their size: u r at the label, and in s by u times
    their mean under the softmax, which is its entropy less s, so at most u (ln vocab - s);
    - exp adds 2u to s, ln 2u s, and the last sum u l.
    Together at most u (l + r + s + ln vocab + 2) = u (2 l + ln vocab + 2); u l more allows for
    one rounding of the value that is handed back. S itself is added up in float32 at least, in
    LANES running sums: vocab / LANES additions, each off by 2^-24 of S at most. The float64 loss
    that it is compared with errs in the same way.
    """
    bound = 0.0
    for u in (ROUNDOFF[dtype], ROUNDOFF["float64"]):
        bound += u * (3 * nats + math.log(vocab) + 2)
        bound += min(u, ROUNDOFF["float32"]) * vocab / LANES
    return bound


def loss_bound(rel_l2: float, size: float) -> float:
    """Return how far the mean losses of two runs may be apart, in nats.

    `rel_l2` is the tolerance of their logits, which depends on the dtype, and `size` the root mean
    square of the reference's logits. A loss is ln(sum exp z) - z[label], so that logits off by e
    move it by (sum of p e) - e[label] to first order (p: the softmax), and by max e - min e at
    most: by two logits' errors. Logits within their tolerance are off by rel_l2 times `size` each,
    in the mean over squares; text that a model finds unlikely changes z[label], not its error.
    """
    return 2 * rel_l2 * size


# A recomputed loss may differ this much from the reported one: a training run's arithmetic is
# coarser than ours (bfloat16 logits move a loss by about 1e-3 of it), and prints four digits.
REPORTED = 2e-3
# A mistake that comes this near gives the number. Dozens are tried, so that one of them comes
# within the wider bound of any number: what only does that is seldom worth a word.
REPORTED_SURELY = 2e-4
# Relative L2 of full logits on quantized weights; seen on a toy with NF4: 0.047. Where the
# tolerance of the runs' arithmetic is larger, it counts.
MAX_LOGITS = 0.10
MIN_COSINE = 0.999  # of two devices' logits, or what their tolerance makes of it
# What a change of device or of encoding may cost at most, in nats, whatever rounding explains.
MAX_CE = 0.05  # between two devices on the same tokens; seen 0.0005
MAX_CE_LOSSY = 0.5  # for another encoding of the weights, or arithmetic that is as coarse as one
COARSE = 0.1  # tolerance of logits from which two runs are no closer than two encodings


def device_loss_bound(rel_l2: float, size: float) -> float:
    """Return how far the mean losses of one model on two devices may be apart, in nats.

    `rel_l2` is the tolerance of their logits, `size` the root mean square of the reference's
    logits. The bound is the smaller of what rounding explains (`loss_bound`) and MAX_CE, or
    MAX_CE_LOSSY where `rel_l2` is COARSE or more. Rounding alone would bound nothing in 16 bits:
    logits have an offset that no loss sees, so that those of GPT-2, near -100 each, are 16 nats
    wide in bfloat16.
    """
    return min(loss_bound(rel_l2, size), MAX_CE if rel_l2 < COARSE else MAX_CE_LOSSY)


# --- screens by statistics ----------------------------------------------------------------------

# Ratio of two standard deviations of one point on equal rows: what is outside is worth a look.
# Both bands are symmetric in logarithm. The gate's product is where a wrong weight shows first.
RATIO_BAND = (0.5, 2.0)
FIRST_CAUSE_BAND: dict[str, tuple[float, float]] = {"ffn_gate": (0.7, 1.4)}


def ratio_band(point: str) -> tuple[float, float]:
    """Return (low, high), the range for the ratio of two runs' standard deviations of a point."""
    return FIRST_CAUSE_BAND.get(point, RATIO_BAND)


# --- keyed by backend pair, weight encoding and point -------------------------------------------

WeightClass = Literal["exact", "half", "quantized"]
UNIT = "relative L2 distance of the point's values"
MAX_UNIT = "largest absolute difference over the root mean square of the reference"
# A point's largest difference against its L2: measured up to 60 where activations are massive.
MAX_FACTOR = 200.0
# Errors of equal operations grow with the root of the depth; the table is for this many layers.
DEPTH = 32


@dataclass(frozen=True, slots=True)
class Threshold:
    """The bound of the difference of two runs at one point, and the reason."""

    rel_l2: float
    max_over_rms: float
    reason: str
    source: str = "the table"
    unit: str = UNIT
    max_unit: str = MAX_UNIT


@dataclass(frozen=True, slots=True)
class ThresholdRow:
    """One measured bound; "" in `point`, `weights` or `dtype` stands for all.

    `backend` is the one of the two that explains the bound, `dtype` that of the coarser arithmetic.
    Of several rows that fit, the most specific is used.
    """

    backend: str
    weights: str
    point: str
    rel_l2: float
    reason: str
    dtype: str = ""


_TABLE_GELU = "ggml looks gelu up in a table of float16 values: measured 3.5e-4 after one MLP"
ROWS: tuple[ThresholdRow, ...] = (
    ThresholdRow("llama.cpp", "exact", "", 2e-3, _TABLE_GELU + ", four layers later 1e-3"),
    ThresholdRow("llama.cpp", "half", "", 3e-2, "activations are rounded to the weights' 16 bits"),
    ThresholdRow("llama.cpp", "quantized", "", 2e-1,
        "activations are quantized to 8 bits: 6e-3 a product, measured 7.7e-2 in 30 layers"),
    ThresholdRow("llama.cpp", "quantized", "embd", 1e-6, "a lookup: no product"),
    ThresholdRow("transformers", "", "", 5e-6,
        "its norms, softmax and rope stay float32 in a float64 model", "float64"),
    *(ThresholdRow(dump, "", "", 5e-6,
        "norms, softmax and rope of transformers stay float32 in a float64 model", "float64")
      for dump in ("npz", "captures")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CalibratedBound:
    """A bound measured for one pair of backends, weight class, point and dtype, and from what.

    `largest` is the largest relative L2 distance seen in `runs` comparisons.
    """

    pair: tuple[str, str]
    weights: str
    point: str
    dtype: str
    rel_l2: float
    max_over_rms: float
    largest: float
    runs: int
    evidence: str


def weights_class(encodings: Sequence[str]) -> WeightClass:
    """Return the coarsest class that a tenth of the matrices have: exact, half or quantized.

    "half" are 16-bit floats, "exact" float32 and float64.
    """
    exact = [name for name in encodings if name in ("F32", "F64")]
    half = [name for name in encodings if name in ("F16", "BF16")]
    other = len(encodings) - len(exact) - len(half)
    if other * 10 >= max(len(encodings), 1):
        return "quantized"
    return "half" if len(half) * 10 >= max(len(encodings), 1) else "exact"


def ordered_backends(a: str, b: str) -> tuple[str, str]:
    """Return (a, b) in alphabetical order, as keys of calibrated rows have two backends."""
    return (a, b) if a <= b else (b, a)


def point_threshold(
    point: str,
    backends: tuple[str, str],
    dtypes: tuple[str, str],
    weights: str,
    *,
    moe: bool = False,
    depth: int = 0,
    calibrated: Sequence[CalibratedBound] = (),
) -> Threshold:
    """Return the bound of a point for two runs.

    A calibrated row of this pair of backends, weight class, point and dtype comes first, then the
    measured ROWS, then the bound of the coarser arithmetic, which grows with `depth`, the layer's
    number. `moe`: the model has experts.
    """
    base = run_tolerance(*dtypes, moe=moe)
    coarser = max(dtypes, key=lambda dtype: BASE[dtype].rel_l2)
    pair = ordered_backends(*backends)
    for row in calibrated:
        if (row.pair, row.weights, row.point, row.dtype) == (pair, weights, point, coarser):
            return Threshold(row.rel_l2, row.max_over_rms, row.evidence, "calibrated")
    found = [
        row
        for row in ROWS
        if row.backend in backends
        and row.weights in ("", weights)
        and row.point in ("", point)
        and row.dtype in ("", coarser)
    ]
    growth = max(1.0, (depth / DEPTH) ** 0.5)
    if found:
        best = max(found, key=lambda row: (bool(row.point), bool(row.weights)))
        bound = max(best.rel_l2, base.rel_l2 if not best.point else 0.0)
        return Threshold(bound, MAX_FACTOR * bound, best.reason)
    bound = base.rel_l2 * growth
    grown = "" if growth == 1 else f", times the root of {depth}/{DEPTH} layers"
    return Threshold(bound, MAX_FACTOR * bound, base.reason + grown)


def weights_class_of(model: "Model") -> str:
    """Return the class of a model's matrices (by encoding) that tolerances depend on."""
    matrices = [tensor.encoding for tensor in model.roles.values() if len(tensor.shape) > 1]
    return weights_class(matrices)
