"""`aprfmt run`: generate text from a prompt."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from aprfmt.cli import dry_run as dry
from aprfmt.cli import options, render, running

if TYPE_CHECKING:
    from aprfmt.inference.generating import Beside
    from aprfmt.tokenizer import Tokenizer

CONTEXT = 4  # prompt tokens decoded with the output, so that its first word keeps its space


@dataclass(frozen=True)
class Drawn:
    """How tokens are drawn, and when that ends."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_stop: bool


@click.command("run")
@options.gathered(drawn=Drawn, tokens=running.Tokens, where=running.Where)
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
@dry.option
@running.where
@options.arch
@options.common
def command(
    model: str, as_json: bool, quiet: bool, dry_run: bool,
    drawn: Drawn, tokens: running.Tokens, where: running.Where,
) -> int:  # fmt: skip
    """Generate text, greedily unless --temperature says otherwise.

    Generation ends at a stop token of the model, at --max-tokens, or at the end of the context.
    """
    if dry_run:
        return dry.of_run(model, tokens, where, drawn.max_tokens, as_json)
    from aprfmt.inference.generating import Beside, Stops, context_room, generate, speed
    from aprfmt.inference.sampling import Sampler, Sampling

    sampling = Sampling(drawn.temperature, drawn.top_k, drawn.top_p, drawn.seed)
    began = time.perf_counter()
    with running.session(model, where) as run:
        opened = run.model
        ids, text = running.token_ids(opened, tokens)
        limit = min(drawn.max_tokens, context_room(opened, len(ids)))
        with Beside(lambda: running.tokenizer_of(opened)) as tokenizer:
            stop = Stops(tokenizer, running.stated_ends(opened), ignore=drawn.ignore_stop)
            writer = Writer(tokenizer, ids, live=not as_json)
            load = time.perf_counter() - began
            found, times = generate(run.session, ids, Sampler(sampling), limit, stop, writer.show)
        if tokenizer.result is None:
            known = f"stop tokens as configured: {sorted(stop)}" if stop else "no stop token"
            render.warn(f"{opened.path}: has no tokenizer: ids only; {known}", "no_tokenizer")
        stopped = bool(found) and found[-1] in stop
        made = found[:-1] if stopped else found
        full = "max_tokens" if len(made) == drawn.max_tokens else "context"
        body: dict[str, Any] = {
            "run": running.run_facts(run),
            "prompt": {"ids": ids, "text": text},
            "ids": made,
            "text": writer.text(made),
            "stop": {"reason": "stop_token" if stopped else full,
                     "token": found[-1] if stopped else None},
            "sampling": asdict(sampling),
            "speed": speed(len(ids), load, times) | {"tokenizer_seconds": tokenizer.seconds},
        }  # fmt: skip
    if not as_json:
        writer.finish(made)
        if not quiet:
            report(body)
    return render.emit("run", 0, body, as_json)


class Writer:
    """Turns the tokens so far into text, and prints what is new of it as it comes."""

    def __init__(
        self, tokenizer: "Beside[Tokenizer | None]", prompt: Sequence[int], *, live: bool
    ) -> None:
        self._later = tokenizer
        self._context = list(prompt[-CONTEXT:])
        self._live = live
        self._shown = 0

    @property
    def _tokenizer(self) -> "Tokenizer | None":
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
