"""Generating text: the tokens, when each was drawn, and what makes a generation end."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Generic, TypedDict, TypeVar

from aprfmt.errors import UsageError
from aprfmt.inference.sampling import DeviceLogits, Sampler
from aprfmt.inference.session import Numbers, Session
from aprfmt.model import Model
from aprfmt.tokenizer.base import Tokenizer

T = TypeVar("T")


def room_in_context(model: Model, used: int) -> int:
    """Return how many tokens fit after a prompt of `used`; UsageError where none do."""
    context = int(model.hyper["context_length"])
    if used >= context:
        raise UsageError(
            f"{model.path}: the prompt has {used} tokens, the model's context {context}; "
            "give a shorter one"
        )
    return context - used


class BackgroundValue(Generic[T]):
    """A value made on another thread: the tokenizer, while the prompt runs from its ids.

    Leaving the `with` waits for the thread, as the files that it reads are closed after that.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        """Start making the value by `make()` on another thread."""
        self.seconds = 0.0
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(self._make_timed, make)

    def _make_timed(self, make: Callable[[], T]) -> T:
        """Return make(), and store how long it took in `seconds`."""
        began = time.perf_counter()
        made = make()
        self.seconds = time.perf_counter() - began
        return made

    def __enter__(self) -> "BackgroundValue[T]":
        return self

    def __exit__(self, *exc: object) -> None:
        """Wait until the value is made; an error of making it is not raised here."""
        self._pool.shutdown(wait=True)

    @property
    def result(self) -> T:
        """The value, waited for if it is not made yet; raises what `make` raised."""
        return self._future.result()


class StopIds(Collection[int]):
    """The ids that end a generation, read from the tokenizer when the first token is there.

    `stated` are those of the configuration, for a model without a tokenizer.
    """

    def __init__(
        self,
        tokenizer: BackgroundValue[Tokenizer | None],
        configured: frozenset[int],
        *,
        ignore: bool,
    ) -> None:
        """Take the tokenizer, and `configured`: the ids in the configuration that end a generation.

        With `ignore` no id ends a generation.
        """
        self._tokenizer, self._stated, self._ignore = tokenizer, configured, ignore

    def _stop_ids(self) -> frozenset[int]:
        """Return the ids that end a generation; waits until the tokenizer is there."""
        if self._ignore:
            return frozenset()
        tokenizer = self._tokenizer.result
        ids: frozenset[int] = self._stated if tokenizer is None else tokenizer.stop_ids
        return ids

    def __contains__(self, token: object) -> bool:
        """Return whether a token ends a generation; waits until the tokenizer is there."""
        return token in self._stop_ids()

    def __iter__(self) -> Iterator[int]:
        return iter(self._stop_ids())

    def __len__(self) -> int:
        return len(self._stop_ids())


def generate(
    session: Session,
    tokens: Sequence[int],
    sampler: Sampler,
    limit: int,
    stop: Collection[int],
    show: Callable[[Sequence[int]], object],
) -> tuple[list[int], list[float]]:
    """Return (tokens drawn, a stop token included; the time each was drawn at, in seconds).

    At most `limit` tokens are drawn by `sampler`, up to one of `stop`. `show` gets the tokens made
    so far, after each. The times have one entry more, the start: times[1] - times[0] is the
    prompt's pass.
    """
    drawn: list[int] = []
    times = [time.perf_counter()]

    def sample_and_record(logits: Numbers | DeviceLogits) -> int:
        """Return the token drawn from the logits; append it and the time to the lists."""
        drawn.append(sampler(logits))
        times.append(time.perf_counter())
        return drawn[-1]

    made: list[int] = []
    for token in session.generate(tokens, sample_and_record, limit, stop):
        made.append(token)
        show(made)
    return drawn, times


class StepTimes(TypedDict):
    """Seconds of decoding steps; None where there were none.

    `first_seconds` is the first step's, `later` the number of steps after it, which the median and
    the range are of.
    """

    first_seconds: float | None
    later: int
    median_seconds: float | None
    range_seconds: list[float] | None


class Speed(TypedDict):
    """Tokens, seconds and tokens per second of a run's prefill and decoding."""

    load_seconds: float
    prefill_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float | None
    decode_tokens: int
    decode_seconds: float
    decode_tokens_per_second: float | None
    steps: StepTimes


def run_speed(prompt: int, load: float, times: list[float]) -> Speed:
    """Return tokens, seconds and rates of a run; the prompt's pass gives the first token.

    `times` are those of `generate`: the start, then the time of each token.
    """
    prefill = times[1] - times[0]
    steps, decode = len(times) - 2, times[-1] - times[1]
    return {
        "load_seconds": load,
        "prefill_tokens": prompt,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": prompt / prefill if prefill else None,
        "decode_tokens": steps,
        "decode_seconds": decode,
        "decode_tokens_per_second": steps / decode if steps and decode else None,
        "steps": summarize_steps([after - before for before, after in pairwise(times[1:])]),
    }


def summarize_steps(seconds: list[float]) -> StepTimes:
    """Return the first step's seconds, and median and range of the steps after it.

    The first is left out of these, for it also warms up.
    """
    first, later = seconds[:1], seconds[1:]
    return {
        "first_seconds": first[0] if first else None,
        "later": len(later),
        "median_seconds": median(later) if later else None,
        "range_seconds": [min(later), max(later)] if later else None,
    }
