"""Every bound of the gates but those of weights, which are in weight_bounds.py.

Comparisons of runs are in thresholds.py.

Calibrated on models that work: the demo model (Qwen2, BF16), SmolLM2-135M (llama, Q4_1) and
Gemma-3-270M (Q4_K_M), and on the published figures of Qwen2.5-0.5B.
"""

from dataclasses import dataclass

from aprfmt.validation.weight_bounds import Bound

# --- rows of the embedding -----------------------------------------------------------------

DEAD_ROWS = Bound(0, 0.25, "share of rows", "rows of zeros are padding; a quarter is a lost part")
DEAD_ROW_L2 = 1e-6

# --- hyperparameters --------------------------------------------------------------------------

EPS = Bound(1e-12, 1e-3, "added to the mean square", "models in use: 1e-12 (BERT) to 1e-5")
THETA = Bound(1e2, 1e9, "rotary base", "models in use: 10000 to 5e7")
CONTEXT = Bound(8, 1 << 27, "tokens", "below 8 no prompt fits; the longest in use is 1e7")
HEAD_DIM = Bound(2, 1024, "elements", "models in use: 32 to 576")
VOCAB_SHARE = Bound(0.5, 1.0, "tokens of embedding rows", "rows are padded by less than half")

# --- the forward pass -------------------------------------------------------------------------

LOSS_GIVEN = 0.02  # nats a stated loss may be off where weights and arithmetic are plain floats
LOSS_QUANTIZED = 0.5  # nats where weights are quantized: a working 4-bit copy stays far below
LEAD = 0.1  # logits: below this lead, the next best token may win by rounding


@dataclass(frozen=True, slots=True)
class Gibberish:
    """When a text is none. Lengths in characters (fragments in bytes), shares of 1."""

    foreign_share: float = 0.6  # of non-ASCII characters, from foreign_length on
    foreign_length: int = 16
    fragment: tuple[int, int] = (4, 16)  # bytes of a fragment that stands three times in a row
    times: int = 3
    broken_every: int = 32  # more than one U+FFFD in so many characters
    same_share: float = 0.9  # of one character, from same_length non-space ones on
    same_length: int = 8


GIBBERISH = Gibberish()
