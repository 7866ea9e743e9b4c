"""Every bound of the checks; those on comparing runs are aprfmt.measure.tolerances.

Calibrated on models that work: the demo model (Qwen2, BF16), SmolLM2-135M (llama, Q4_1) and
Gemma-3-270M (Q4_K_M), and on the published figures of Qwen2.5-0.5B.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aprfmt.tensors.stats import Stats


@dataclass(frozen=True, slots=True)
class UsualRange:
    """A range in which a number of a working model lies, both ends included."""

    low: float
    high: float
    unit: str
    reason: str

    def holds(self, value: float) -> bool:
        """Return whether a value is in the range; NaN never is."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


# --- statistics of weights, by role -----------------------------------------------------------

# Number of a tensor (see `bounded_numbers`) -> its bound. A number without one is not judged.
RoleBounds = Mapping[str, UsualRange]

_ZEROS = UsualRange(0, 0.8, "share of zeros", "a tensor of zeros was never filled")
EMBEDDING: RoleBounds = {
    "mean": UsualRange(-1, 1, "weight", "seen: -0.0022 to 0.0001"),
    "std": UsualRange(0.005, 0.5, "weight", "seen: 0.015 to 0.14"),
    "zeros": UsualRange(0, 0.5, "share of zeros", "half a vocabulary of zeros was never filled"),
}
LINEAR: RoleBounds = {
    "mean": UsualRange(-0.1, 0.1, "weight", "seen: -0.002 to 0.002"),
    "std": UsualRange(1e-3, 1.0, "weight", "seen: 0.012 to 0.40"),
    "zeros": _ZEROS,
}
NORM: RoleBounds = {
    "rms": UsualRange(0.01, 100, "weight", "seen: 0.03 to 7.5, gemma's own row aside"),
    "zeros": _ZEROS,
}
# Biases may be as large as they like: Qwen's reach 128, with a deviation of 29 on keys.
BIAS: RoleBounds = {"absmax": UsualRange(0, 1e4, "weight", "seen: up to 128 in Qwen2.5")}

FEW_VALUES = 256  # of a matrix, below which its mean and its deviation say nothing

# Kind of a role by its last words; the first that fits.
KINDS: tuple[tuple[str, RoleBounds], ...] = (
    ("bias", BIAS),
    ("attn_sinks", BIAS),
    ("ssm_conv1d", BIAS),  # few taps a channel, around any mean
    ("ssm_a.", BIAS),  # logarithms of rates
    ("ssm_d.", BIAS),  # what skips the state: one, before training
    ("ffn_act.", BIAS),  # single numbers of an activation
    ("norm", NORM),
    ("token_embd", EMBEDDING),
    ("position_embd", EMBEDDING),
    ("", LINEAR),
)
_GEMMA_NORM: RoleBounds = {
    "rms": UsualRange(0.01, 5000, "weight", "Gemma-3-270M: up to 376 in post_ffw_norm"),
    "zeros": _ZEROS,
}
_T5_EMBEDDING: RoleBounds = {
    **EMBEDDING,
    "std": UsualRange(
        0.005, 100, "weight", "T5's begins with 1, and its training does not hold it"
    ),
}
_T5 = {"token_embd": _T5_EMBEDDING}
# architecture -> word of a role -> bounds that replace the kind's.
BY_ARCH: Mapping[str, Mapping[str, RoleBounds]] = {
    "gemma": {"norm": _GEMMA_NORM},
    "gemma2": {"norm": _GEMMA_NORM},
    "gemma3": {"norm": _GEMMA_NORM},
    "t5": _T5,
    "t5_gated": _T5,
    "umt5": _T5,
    "t5_encoder": _T5,
    "t5_gated_encoder": _T5,
    "umt5_encoder": _T5,
}


def role_bounds(arch: str, role: str) -> RoleBounds:
    """Return the bounds of the statistics of a role's tensors in an architecture.

    They are those of the first word of KINDS that is in the role; an architecture may have its own
    for that word (BY_ARCH). The last word fits every role; AssertionError if it does not.
    """
    own = BY_ARCH.get(arch, {})
    for word, bounds in KINDS:
        if word in role:
            return own.get(word, bounds)
    raise AssertionError("the last kind fits every role")


def tensor_bounds(arch: str, role: str, shape: Sequence[int]) -> RoleBounds:
    """Return the bounds of a tensor's statistics: those of its role, or BIAS for a small tensor.

    A linear layer's tensor that is a vector or has fewer than FEW_VALUES values gets BIAS: factors
    and coefficients of a layer (gemma3n's altup, gemma4's output scales) are a few numbers around
    any mean.
    """
    limits = role_bounds(arch, role)
    vector = sum(size > 1 for size in shape) < 2
    few = vector or math.prod(shape) < FEW_VALUES
    return BIAS if limits is LINEAR and few else limits


def bounded_numbers(stats: "Stats", offset: float) -> Mapping[str, float]:
    """Return the statistics that a RoleBounds limits: {"mean", "std", "rms", "absmax", "zeros"}.

    `offset` is added to the mean (gemma stores norms less 1). All are NaN where no value is finite.
    `zeros` is a fraction of the values; with an offset it is 0.
    """
    if stats.mean is None or stats.std is None or stats.absmax is None:
        return dict.fromkeys(("mean", "std", "rms", "absmax", "zeros"), math.nan)
    mean = stats.mean + offset
    return {
        "mean": mean,
        "std": stats.std,
        "rms": math.hypot(mean, stats.std),
        "absmax": stats.absmax,
        "zeros": stats.zeros / stats.count if not offset else 0.0,
    }


# --- rows of the embedding -----------------------------------------------------------------

DEAD_ROWS = UsualRange(
    0, 0.25, "share of rows", "rows of zeros are padding; a quarter is a lost part"
)
DEAD_ROW_L2 = 1e-6
MEAN_ROW = UsualRange(0, 0.02, "of the mean's length", "BF16 rounds a row to 0.004 of itself")
SMALL_ROW = UsualRange(
    0.01,
    float("inf"),
    "of a usual row's length",
    "trained rows are 0.3 of it and more; new rows of a grown vocabulary are noise of any size",
)
LOST_ROW = 2.0**-24  # of a usual row's length: float32 rounds more away next to such a row
SPREAD = 0.01  # of a usual row's distance from the mean: nearer rows are the mean
MEAN_OF_ROWS_FROM = 64  # rows: of few the mean says nothing
PIECES_FROM = 64  # pieces: a share of fewer says nothing
PIECES_MADE = UsualRange(
    0.95, 1.0, "of the pieces", "merges make every piece of two characters and more"
)

# --- hyperparameters --------------------------------------------------------------------------

EPS = UsualRange(1e-12, 1e-3, "added to the mean square", "models in use: 1e-12 (BERT) to 1e-5")
THETA = UsualRange(1e2, 1e9, "rotary base", "models in use: 10000 to 5e7")
CONTEXT = UsualRange(8, 1 << 27, "tokens", "below 8 no prompt fits; the longest in use is 1e7")
HEAD_DIM = UsualRange(2, 1024, "elements", "models in use: 32 to 576")
VOCAB_SHARE = UsualRange(0.5, 1.0, "tokens of embedding rows", "rows are padded by less than half")

STATED: Mapping[str, UsualRange] = {"norm_eps": EPS, "rope_theta": THETA}

# --- settings: what transformers' GenerationConfig and its processors, and llama.cpp, take -----

_SHARE = UsualRange(0, 1, "of probability", "it is a share of the probability")
_COUNT = UsualRange(0, 1 << 31, "", "it is a count")
SETTINGS: Mapping[str, UsualRange] = {
    "temperature": UsualRange(0, 100, "", "logits are divided by it; 0 is the best token"),
    "top_k": UsualRange(-1, 1 << 31, "tokens", "it is a count; 0 and -1 take all"),
    "top_p": _SHARE, "min_p": _SHARE, "typical_p": _SHARE,
    "repetition_penalty": UsualRange(1e-3, 100, "", "logits are divided by it"),
    "no_repeat_ngram_size": _COUNT, "min_length": _COUNT, "max_length": _COUNT,
    "max_new_tokens": UsualRange(1, 1 << 31, "tokens", "it is a count"),
    "num_beams": UsualRange(1, 1 << 20, "beams", "it is a count"),
    "model_max_length": UsualRange(1, 1e31, "tokens", "transformers cuts texts there"),
}  # fmt: skip

# --- the forward pass -------------------------------------------------------------------------

LOSS_GIVEN = 0.02  # nats a golden loss may be off where weights and arithmetic are plain floats
LOSS_QUANTIZED = 0.5  # nats where weights are quantized: a working 4-bit copy stays far below
LEAD = 0.1  # logits: below this lead, the next best token may win by rounding


@dataclass(frozen=True, slots=True)
class Gibberish:
    """The limits beyond which a text is gibberish.

    Lengths are in characters (those of fragments in bytes), fractions of the text are between 0 and
    1.
    """

    foreign_share: float = 0.6  # of non-ASCII characters, from foreign_length on
    foreign_length: int = 16
    fragment: tuple[int, int] = (4, 16)  # bytes of a fragment that is three times in a row
    longest: float = 0.25  # of the whole answer: longer fragments than these 16 bytes too
    times: int = 3
    tokens: int = 8  # that a loop of tokens has at least
    line: int = 32  # characters of a loop without letters: shorter ones are numbers, rules, lists
    broken_every: int = 32  # more than one U+FFFD in so many characters
    same_share: float = 0.9  # of one character, from same_length non-space ones on
    same_length: int = 8
    blanks: int = 32  # at the end of a text, and half of it: line feeds until the limit


GIBBERISH = Gibberish()
