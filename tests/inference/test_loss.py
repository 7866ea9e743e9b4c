"""Losses against torch, window arithmetic by brute force, and the verdicts on losses and logits.

Seen red: labels not shifted, a label never scored, log2 for ln, 0.0 accepted, a skipped sample
counted as 0.0, max/mean for the peak.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aprfmt.errors import UsageError
from aprfmt.inference.evaluation import Sample, no_label_reason
from aprfmt.inference.logits_checks import check_logits
from aprfmt.inference.loss import (
    LossWindow,
    MeanLoss,
    assess_loss,
    compare_distributions,
    cross_entropy,
    is_in_bits,
    mean_loss,
    plan_loss_windows,
    sample_window,
    window_size,
)

RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.standard_normal((11, 97)).astype(np.float32) * 4
LABELS = RANDOM.integers(0, 97, 11)


def outcomes(loss: MeanLoss, weights: str = "trained") -> dict[str, str]:
    return {check.name: check.outcome for check in assess_loss(loss, weights)}  # type: ignore[arg-type]


def measured(nats: float, vocab: int = 1000) -> MeanLoss:
    return MeanLoss(nats, 10, vocab, 1)


def test_cross_entropy_is_torchs_in_nats() -> None:
    expected = torch.nn.functional.cross_entropy(
        torch.tensor(LOGITS, dtype=torch.float64), torch.tensor(LABELS), reduction="none"
    )
    np.testing.assert_allclose(cross_entropy(LOGITS, LABELS), expected.numpy(), rtol=1e-12)
    uniform = cross_entropy(np.zeros((1, 151936), np.float32), [0])[0]
    assert uniform == pytest.approx(11.931, abs=5e-4)  # ln, not log2 (17.213)


def test_labels_outside_the_vocabulary_or_of_another_count_are_refused() -> None:
    with pytest.raises(UsageError, match="outside the vocabulary of 97"):
        cross_entropy(LOGITS[:1], [97])
    with pytest.raises(UsageError, match="a row each"):
        cross_entropy(LOGITS, LABELS[:4])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 60), st.integers(2, 20), st.integers(0, 70), st.data())
def test_every_label_is_scored_once_and_predicted_inside_its_window(
    tokens: int, capacity: int, prompt: int, data: st.DataObject
) -> None:
    prefix = data.draw(st.integers(0, min(2, capacity - 1)))
    overlap = data.draw(st.integers(0, capacity - prefix - 1))
    scored: list[int] = []
    sequence = list(range(100, 100 + tokens))
    found = plan_loss_windows(tokens, capacity, prompt=prompt, overlap=overlap, prefix=prefix)
    for window in found:
        assert prefix <= window.start <= window.first < window.stop <= tokens
        ids = window.ids(sequence)
        assert len(ids) <= capacity and ids[:prefix] == sequence[:prefix]
        assert window.first - window.start >= min(overlap, window.first - prefix)
        assert [ids[row + 1] - 100 for row in window.rows] == list(range(window.first, window.stop))
        assert window.label_count == len(window.rows) > 0 and window.rows.start >= 0
        scored += range(window.first, window.stop)
    if prefix or overlap:
        assert scored == list(range(max(prompt, prefix, 1), tokens))
    else:  # disjoint with nothing before: the first token of a window is no label
        starts = [window.start for window in found]
        assert scored == sorted(scored)
        assert all(b.start == a.stop for a, b in pairwise(found))
        missing = set(range(max(prompt, 1), tokens)) - set(scored)
        assert missing <= {*starts, tokens - 1}


def test_windows_are_the_stated_ones() -> None:
    """Literals: 10 tokens in windows of 4."""
    assert plan_loss_windows(10, 4) == [
        LossWindow(0, 4, 1),
        LossWindow(4, 8, 5),
        LossWindow(8, 10, 9),
    ]
    assert plan_loss_windows(9, 4) == [
        LossWindow(0, 4, 1),
        LossWindow(4, 8, 5),
    ]  # the last token stands alone
    assert plan_loss_windows(10, 4, overlap=1) == [
        LossWindow(0, 4, 1),
        LossWindow(3, 7, 4),
        LossWindow(6, 10, 7),
    ]
    behind = plan_loss_windows(
        10, 4, prefix=1
    )  # the first token is BOS, and stands before every window
    assert behind == [LossWindow(1, 4, 1, 1), LossWindow(4, 7, 4, 1), LossWindow(7, 10, 7, 1)]
    assert behind[1].ids("B123456789") == ["B", "4", "5", "6"]  # type: ignore[arg-type, comparison-overlap]
    assert [window_size(size) for size in (512, 2048, 32768)] == [512, 2048, 2048]


def test_llama_perplexitys_windows_score_their_second_half() -> None:
    """Its source: rows from n_ctx/2 to n_ctx - 2 of each whole chunk, whose first token is BOS."""
    found = plan_loss_windows(26, 8, prefix=1, convention="llama.cpp")
    assert [window.start for window in found] == [1, 9, 17]
    for chunk, window in enumerate(found):
        sequence = list(range(26))
        assert window.ids(sequence) == [0, *range(8 * chunk + 1, 8 * chunk + 8)]
        assert window.rows == range(4, 7) and window.label_count == 3
        assert window.first == 8 * chunk + 5
    assert plan_loss_windows(26, 7, convention="llama.cpp")[1] == LossWindow(7, 14, 11)
    assert plan_loss_windows(7, 8, convention="llama.cpp") == []
    assert window_size(8192, "llama.cpp") == 512


def test_a_window_as_large_as_the_forward_keeps_the_whole_response() -> None:
    """The contract's case: prompt 600, response 100, capacity 2048 gives 100 loss tokens."""
    window = sample_window(600, 100, 2048)
    assert window is not None and window.label_count == 100
    assert sample_window(600, 100, 512) is None
    cut = sample_window(600, 100, 640)
    assert cut is not None and cut.label_count == 40
    with pytest.raises(UsageError, match="windows of 1"):
        plan_loss_windows(10, 1)


def test_the_mean_is_weighted_by_tokens_and_leaves_skipped_samples_out() -> None:
    losses = [np.array([1.0, 2.0, 3.0]), np.empty(0), np.array([10.0])]
    loss = mean_loss(losses, 1000, skipped=["sample 1: prompt 600, window 512"])
    assert (loss.nats, loss.tokens, loss.samples) == (4.0, 4, 2)
    assert loss.perplexity == pytest.approx(math.exp(4))
    assert loss.uniform_loss == pytest.approx(6.9078, abs=1e-4)
    nothing = mean_loss([np.empty(0)], 1000)
    assert math.isnan(nothing.nats)
    assert outcomes(nothing) == {"loss-measured": "NOT_RUN"}


@pytest.mark.parametrize(
    ("nats", "failing"),
    [
        (2.0, set()),
        (0.0, {"loss-not-zero", "loss-plausible"}),
        (0.00081, {"loss-plausible"}),
        (6.95, {"loss-below-uniform"}),
        (math.nan, {"loss-finite"}),
        (math.inf, {"loss-finite"}),
    ],
)
def test_a_trained_models_loss_has_two_sides(nats: float, failing: set[str]) -> None:
    found = outcomes(measured(nats))
    assert {name for name, outcome in found.items() if outcome == "FAIL"} == failing
    others = {outcome for name, outcome in found.items() if name not in failing}
    assert others <= ({"PASS"} if math.isfinite(nats) else {"NOT_RUN"})


@pytest.mark.parametrize(
    ("nats", "passes"), [(6.91, True), (10.3, True), (10.5, False), (0.4, False)]
)
def test_a_random_models_loss_stays_near_uniform(nats: float, passes: bool) -> None:
    assert ("FAIL" not in outcomes(measured(nats), "random").values()) == passes


def test_divergence_is_torchs_kl_and_counts_agreement() -> None:
    other = LOGITS + RANDOM.standard_normal(LOGITS.shape).astype(np.float32)
    a, b = (torch.log_softmax(torch.tensor(x, dtype=torch.float64), -1) for x in (LOGITS, other))
    expected = torch.nn.functional.kl_div(b, a, log_target=True, reduction="batchmean")
    found = compare_distributions(LOGITS, other, LABELS)
    assert found.kl == pytest.approx(float(expected), rel=1e-12)
    assert found.top1 == float((a.argmax(-1) == b.argmax(-1)).double().mean())
    same = compare_distributions(LOGITS, LOGITS, LABELS)
    assert (same.kl, same.top1, same.correct_change) == (0.0, 1.0, 0.0)
    with pytest.raises(UsageError, match="equal shapes"):
        compare_distributions(LOGITS, other[:, :50], LABELS)


def test_the_logits_gate_passes_a_working_head_and_fails_dead_ones() -> None:
    def failing(logits: np.ndarray) -> set[str]:
        return {check.name for check in check_logits(logits) if check.outcome == "FAIL"}

    assert failing(LOGITS[0]) == set()
    assert failing(np.zeros(97, np.float32)) == {"logits-std", "logits-peak"}
    flat = np.where(np.arange(97) % 2, 1.0, -1.0).astype(np.float32)
    assert failing(flat) == {"logits-peak"}
    broken = LOGITS[0].copy()
    broken[3] = np.nan
    assert failing(broken) == {"logits-no-nan", "logits-argmax"}
    broken[3] = np.inf
    assert failing(broken) == {"logits-no-inf"}
    assert failing(np.full(5, np.nan)) == {"logits-no-nan", "logits-std"}
    names = [[check.name for check in check_logits(x)] for x in (LOGITS[0], np.full(5, np.nan))]
    assert names[0] == names[1]  # what could not be judged is NOT-RUN, never left out


def test_the_peak_is_max_minus_mean_over_the_deviation() -> None:
    """5.68 in the source follows from max 11.72, mean -3.33, deviation 2.65."""
    assert (11.72 + 3.33) / 2.65 == pytest.approx(5.679, abs=1e-3)
    peak = next(check for check in check_logits(LOGITS[0]) if check.name == "logits-peak")
    wide = LOGITS[0].astype(np.float64)
    assert float(peak.found) == pytest.approx((wide.max() - wide.mean()) / wide.std(), rel=1e-3)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 40])
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("prompt", [0, 2, 3])
def test_why_a_text_has_no_loss_token(count: int, cut: bool, prompt: int) -> None:
    """Two tokens have one label: what they lack is a window, never a longer text alone."""
    sample = Sample("s", list(range(count)), min(prompt, count), cut)
    said = no_label_reason(sample, 64, "llama")
    if count < 2 or sample.prompt == count:
        assert said.startswith(f"{count} tokens leave no loss token")
        assert said.endswith("a response" if cut and sample.prompt == count else "a longer text")
    elif cut:
        assert f"its prompt of {sample.prompt} tokens fills the window of 64" in said
    else:
        assert said.startswith(f"{count} tokens fill no window of 64, and llama scores no other")


def test_a_loss_at_its_bound_is_within_it() -> None:
    """The uniform loss itself passes, and so does the least that is plausible."""
    uniform = measured(1.0).uniform_loss
    for weights, low, high in (("trained", 0.05, uniform), ("random", 0.5, 1.5 * uniform)):
        for nats, failing in (
            (high, set()),
            (np.nextafter(high, 99), {"loss-below-uniform"}),
            (low, set()),
            (np.nextafter(low, 0), {"loss-plausible"}),
        ):
            found = outcomes(measured(float(nats)), weights)
            assert {name for name, outcome in found.items() if outcome == "FAIL"} == failing
    for share, said in ((0.981, True), (1.019, True), (0.979, False), (1.021, False)):
        assert is_in_bits(share * 2.0 / math.log(2), 2.0) is said
    assert not is_in_bits(0.0, 0.0) and not is_in_bits(-1.0, -math.log(2))
