"""`aprfmt run`: generate text from a prompt."""

import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

import click

from aprfmt.cli import options, render, running

CONTEXT = 4  # prompt tokens decoded with the output, so that its first word keeps its space


@click.command("run")
@click.argument("model")
@running.what
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True,
              help="Generate at most this many tokens.")  # fmt: skip
@click.option("--temperature", type=float, default=0.0, show_default=True,
              help="0 takes the likeliest token; above it, tokens are drawn.")  # fmt: skip
@click.option("--top-k", type=int, default=0, show_default=True,
              help="Draw from the k likeliest tokens only (0: from all).")  # fmt: skip
@click.option("--top-p", type=float, default=1.0, show_default=True,
              help="Draw from the likeliest tokens that add up to this.")  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the draws.")
@click.option("--ignore-stop", is_flag=True, help="Go on after the model's stop tokens.")
@running.where
@options.arch
@options.common
def command(
    model: str,
    prompt: str | None,
    ids: str | None,
    chat: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    ignore_stop: bool,
    arch: str | None,
    as_json: bool,
    quiet: bool,
    **where: Any,
) -> int:
    """Generate text, greedily unless --temperature says otherwise.

    Generation ends at a stop token of the model, at --max-tokens, or at the end of the context.
    """
    from dataclasses import asdict

    from aprfmt.inference.sampling import Sampler, Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    began = time.perf_counter()
    with running.session(model, arch=arch, **where) as (opened, session, choice):
        tokens, text = running.token_ids(opened, prompt, ids, chat)
        room = context_room(opened, len(tokens))
        with Beside(lambda: running.tokenizer_of(opened)) as tokenizer:
            stop = Stops(tokenizer, running.stated_ends(opened), ignore=ignore_stop)
            writer = Writer(tokenizer, tokens, live=not as_json)
            load = time.perf_counter() - began
            drawn, times = generate(
                session, tokens, Sampler(sampling), min(max_tokens, room), stop, writer
            )
        if tokenizer.result is None:
            known = f"stop tokens as configured: {sorted(stop)}" if stop else "no stop token"
            render.warn(f"{opened.path}: has no tokenizer: ids only; {known}")
        stopped = bool(drawn) and drawn[-1] in stop
        made = drawn[:-1] if stopped else drawn
        reason = "stop_token" if stopped else "max_tokens" if len(made) == max_tokens else "context"
        body: dict[str, Any] = {
            "run": running.run_facts(opened, choice, session),
            "prompt": {"ids": tokens, "text": text},
            "ids": made,
            "text": writer.text(made),
            "stop": {"reason": reason, "token": drawn[-1] if stopped else None},
            "sampling": asdict(sampling),
            "speed": speed(len(tokens), load, times) | {"tokenizer_seconds": tokenizer.seconds},
        }
    if not as_json:
        writer.finish(made)
        if not quiet:
            report(body)
    return render.emit("run", 0, body, as_json)


def context_room(model: Any, used: int) -> int:
    """Return how many tokens fit behind a prompt; UsageError where it fills the context."""
    from aprfmt.errors import UsageError

    context = int(model.hyper["context_length"])
    if used >= context:
        raise UsageError(
            f"{model.path}: the prompt has {used} tokens, the model's context {context}; "
            "give a shorter one"
        )
    return context - used


class Beside:
    """Something made on a thread of its own: the tokenizer, while the prompt runs from its ids.

    Leaving the `with` waits for it, as what it reads is closed then.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.seconds = 0.0
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(self._timed, make)

    def _timed(self, make: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        made = make()
        self.seconds = time.perf_counter() - began
        return made

    def __enter__(self) -> "Beside":
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(wait=True)

    @property
    def result(self) -> Any:
        """What was made, waited for; raises what making it raised."""
        return self._future.result()


class Stops(Collection[int]):
    """The ids that end a generation, asked of the tokenizer when the first token is there.

    `stated` are those of the configuration, for a model without a tokenizer.
    """

    def __init__(self, tokenizer: Beside, stated: frozenset[int], *, ignore: bool) -> None:
        self._tokenizer, self._stated, self._ignore = tokenizer, stated, ignore

    def _ids(self) -> frozenset[int]:
        if self._ignore:
            return frozenset()
        tokenizer = self._tokenizer.result
        ids: frozenset[int] = self._stated if tokenizer is None else tokenizer.stop_ids
        return ids

    def __contains__(self, token: object) -> bool:
        return token in self._ids()

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids())

    def __len__(self) -> int:
        return len(self._ids())


def generate(
    session: Any, tokens: list[int], sampler: Any, limit: int, stop: Collection[int], writer: Any
) -> tuple[list[int], list[float]]:
    """Return the tokens drawn, a stop token included, and the time each was drawn at.

    The first time is the start: times[1] - times[0] is the prompt's pass.
    """
    drawn: list[int] = []
    times = [time.perf_counter()]

    def remember(logits: Any) -> int:
        drawn.append(sampler(logits))
        times.append(time.perf_counter())
        return drawn[-1]

    made: list[int] = []
    for token in session.generate(tokens, remember, limit, stop):
        made.append(token)
        writer.show(made)
    return drawn, times


class Writer:
    """Turns the tokens so far into text, and prints what is new of it as it comes."""

    def __init__(self, tokenizer: Beside, prompt: Sequence[int], *, live: bool) -> None:
        self._later = tokenizer
        self._context = list(prompt[-CONTEXT:])
        self._live = live
        self._shown = 0

    @property
    def _tokenizer(self) -> Any | None:
        return self._later.result

    @cached_property
    def _before(self) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(self._context, skip_special=True))

    def text(self, ids: Sequence[int]) -> str | None:
        """Return the text of generated ids as it reads behind the prompt; None without tokenizer.

        Special tokens are left out.
        """
        if self._tokenizer is None:
            return None
        whole = self._tokenizer.decode([*self._context, *ids], skip_special=True)
        if whole.startswith(self._before):
            return str(whole[len(self._before) :])
        return str(self._tokenizer.decode(ids, skip_special=True))

    def show(self, ids: Sequence[int]) -> None:
        """Print what is new, but for a character that may still be unfinished."""
        if self._live:
            found = self.text(ids)
            if found is None:
                self._print(f"{ids[-1]} ")
            elif not found.endswith(("\ufffd", "\\")):
                self._rest(found)

    def finish(self, ids: Sequence[int]) -> None:
        """Print what is missing, and end the line."""
        found = self.text(ids)
        if found is not None:
            self._rest(found)
        elif not self._live:
            self._print(" ".join(map(str, ids)))
        self._print("\n")

    def _rest(self, text: str) -> None:
        shown = "\n".join(render.escape(line) for line in text.split("\n"))
        self._print(shown[self._shown :])
        self._shown = len(shown)

    def _print(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()


def speed(prompt: int, load: float, times: list[float]) -> dict[str, Any]:
    """Return seconds and rates; the first token comes out of the prompt's pass."""
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
        "steps": step_times([after - before for before, after in pairwise(times[1:])]),
    }


def step_times(seconds: list[float]) -> dict[str, Any]:
    """Return median and range of the steps behind the first, which also warms up, and that one."""
    first, later = seconds[:1], seconds[1:]
    return {
        "first_seconds": first[0] if first else None,
        "later": len(later),
        "median_seconds": median(later) if later else None,
        "range_seconds": [min(later), max(later)] if later else None,
    }


def report(body: dict[str, Any]) -> None:
    """Say on stderr how it ended and how fast it was."""
    took, stop = body["speed"], body["stop"]
    why = {
        "stop_token": f"stop token {stop['token']}",
        "max_tokens": "--max-tokens reached",
        "context": "the context is full",
    }[stop["reason"]]
    made = len(body["ids"])
    parts = [f"{made} token{'' if made == 1 else 's'}, {why}"]
    if took["decode_tokens_per_second"]:
        parts.append(f"{took['decode_tokens_per_second']:.1f} tokens/s")
    steps = took["steps"]
    if steps["range_seconds"]:
        low, high = (f"{1000 * seconds:.3g}" for seconds in steps["range_seconds"])
        parts.append(f"a step {1000 * steps['median_seconds']:.3g} ms ({low} to {high}), the first "
                     f"{1000 * steps['first_seconds']:.3g}")  # fmt: skip
    if took["prefill_tokens_per_second"]:
        parts.append(f"prompt of {took['prefill_tokens']} at "
                     f"{took['prefill_tokens_per_second']:.1f} tokens/s")  # fmt: skip
    parts.append(f"loaded in {took['load_seconds']:.2f} s, tokenizer beside it in "
                 f"{took['tokenizer_seconds']:.2f} s")  # fmt: skip
    parts.append(running.headline(body["run"]))
    click.echo("; ".join(parts), err=True)
