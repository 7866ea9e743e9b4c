"""Seconds and rates of a run by the times of its tokens."""

from aprfmt.inference.generation import run_speed


def test_a_run_is_as_fast_as_its_tokens_come() -> None:
    """The first token is the prompt's; each later one is a step."""
    found = run_speed(6, 0.5, [10.0, 12.0, 12.5, 13.5])
    assert (found["load_seconds"], found["prefill_seconds"], found["decode_seconds"]) == (
        0.5,
        2.0,
        1.5,
    )
    assert (found["prefill_tokens"], found["prefill_tokens_per_second"]) == (6, 3.0)
    assert (found["decode_tokens"], found["decode_tokens_per_second"]) == (2, 2 / 1.5)


def test_a_rate_without_steps_or_without_time_is_none() -> None:
    one = run_speed(6, 0.0, [10.0, 12.0])
    assert (one["decode_tokens"], one["decode_seconds"]) == (0, 0.0)
    assert one["decode_tokens_per_second"] is None and one["prefill_tokens_per_second"] == 3.0
    quick = run_speed(6, 0.0, [10.0, 10.0, 10.0])
    assert quick["prefill_tokens_per_second"] is quick["decode_tokens_per_second"] is None
    assert quick["decode_tokens"] == 1
