"""Rules of samplers that change the logits of some tokens: which one is named, and with its number.

Seen red: a text's tokens counted from its start where a server counts its answer alone; a rule
without the others' bound, which named a temperature a penalty; a number that was not judged on
other positions.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aprfmt.measure.logprob_tables import LogprobTable, compare_logprobs, rows_from_logits
from aprfmt.measure.softmax import log_softmax
from aprfmt.measure.tolerances import Threshold

ROWS, TOKENS, PROMPT = 12, 400, 4
FINE = Threshold(1e-4, 1e-3, "float32", "a test")
COARSE = Threshold(0.05, 0.5, "bfloat16", "a test")
IDS = (11, 12, 13, 14, 5, 6, 5, 7, 11, 6, 8, 5, 9, 12)  # some stand twice, before and in the answer
Array = np.ndarray[Any, np.dtype[np.float64]]


def logits(seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(1, 4, (ROWS, TOKENS))


def penalized(rule: Callable[[Array, Array], Array], first: int = 0) -> Array:
    """Return logits under a rule of (logits, how often each token stands in the text)."""
    made = logits()
    for at in range(ROWS):
        counts = np.bincount(IDS[first : at + 1], minlength=TOKENS).astype(float)
        held = counts > 0
        made[at, held] = rule(made[at, held], counts[held])
    return made


def compare(x: Array, y: Array) -> LogprobTable:
    here, reference = (rows_from_logits(IDS, each, range(ROWS), "a run") for each in (x, y))
    return compare_logprobs(here, reference, COARSE, FINE)


RULES: dict[str, Callable[[Array, Array], Array]] = {
    "a presence penalty of 0.7": lambda x, n: x - 0.7,
    "a frequency penalty of 0.4": lambda x, n: x - 0.4 * n,
    "a presence penalty of 0.5 and a frequency penalty of 0.3": lambda x, n: x - 0.5 - 0.3 * n,
    "a repetition penalty of 1.3": lambda x, n: np.where(x > 0, x / 1.3, x * 1.3),
    "a repetition penalty of 1.2, which divides negative logits too": lambda x, n: x / 1.2,
}


@pytest.mark.parametrize("first", [0, PROMPT], ids=["all", "answer"])
@pytest.mark.parametrize("noise", [0.0, 0.004], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_a_penalty_of_what_the_text_holds_is_named(rule: str, noise: float, first: int) -> None:
    """Seen red: within tolerance where bfloat16's bound hides what few tokens show."""
    plain = logits() + np.random.default_rng(2).normal(0, noise, (ROWS, TOKENS))
    changed = penalized(RULES[rule], first)
    for table, side in (
        (compare(plain, changed), "the reference"),
        (compare(changed, plain), "this side"),
    ):
        found = table.relation
        assert found is not None and table.beyond and not table.undecided
        assert (found.kind, found.side, found.positions) == ("penalty", side, ROWS)
        number = rule.split(" of ")[1].split(",")[0].split(" and ")[0]
        said = found.says.split(rule.split(" of ")[0] + " of ")[1].split(" and ")[0].split(",")[0]
        assert float(said) == pytest.approx(float(number), rel=0.03 if noise else 1e-3)
        assert rule.replace(number, said, 1) in found.says or noise, found.says


def test_log_probabilities_against_logits_show_a_repetition_penalty() -> None:
    """One side's logits are enough: the other's sums are fitted."""
    changed = penalized(RULES["a repetition penalty of 1.3"])
    found = compare(logits(), log_softmax(changed)).relation
    assert found is not None and "a repetition penalty of 1.3" in found.says
    found = compare(log_softmax(logits()), log_softmax(changed)).relation
    assert found is None or found.kind != "penalty"  # no side says its logits


def test_a_bias_of_tokens_is_named_with_its_number() -> None:
    changed = logits()
    changed[:, [7, 90]] += np.array([2.5, -1.0])
    found = compare(logits(), changed).relation
    assert found is not None and found.kind == "penalty"
    assert "2 tokens" in found.says and "+2.5 for token 7" in found.says


def test_what_no_rule_gives_has_none() -> None:
    rng = np.random.default_rng(3)
    noisy = penalized(lambda x, n: x + rng.normal(0, 1, len(x)))
    drifting = logits()
    drifting[:, 7] += rng.normal(0, 2, ROWS)
    one = logits()
    one[3, IDS[:3]] -= 0.7
    for changed in (noisy, drifting, one, logits() / 0.8, logits(5)):
        found = compare(logits(), changed).relation
        assert found is None or found.kind != "penalty", found
