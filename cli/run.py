"""`aprfmt run`: generate text from a prompt."""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING

import click

from aprfmt.cli import dry_run as dry
from aprfmt.cli import options, output_format, render, run_options

if TYPE_CHECKING:
    from aprfmt.inference.generation import BackgroundValue, Speed
    from aprfmt.tokenizer.base import Tokenizer


CONTEXT = 4  # prompt tokens decoded with the output, so that its first word keeps its space


class TextWriter:
    """Decodes generated tokens to text, and prints the text as it comes (`live`).

    `tokenizer` is loaded in the background. `prompt` are the prompt's ids.
    """

    def __init__(
        self, tokenizer: "BackgroundValue[Tokenizer | None]", prompt: Sequence[int], *, live: bool
    ) -> None:
        """Remember the last prompt tokens; with `live` text is printed as it comes."""
        self._later = tokenizer
        self._context = list(prompt[-CONTEXT:])
        self._live = live
        self._shown = 0

    @property
    def _tokenizer(self) -> "Tokenizer | None":
        """The tokenizer, once it is loaded; None where the model has none."""
        return self._later.result

    @cached_property
    def _context_text(self) -> str:
        """The text of the last CONTEXT prompt tokens."""
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(self._context, skip_special=True))

    def text(self, ids: Sequence[int]) -> str | None:
        """Return the text of generated ids as it reads after the prompt; None without a tokenizer.

        Special tokens are left out.
        """
        if self._tokenizer is None:
            return None
        whole = self._tokenizer.decode([*self._context, *ids], skip_special=True)
        if whole.startswith(self._context_text):
            return str(whole[len(self._context_text) :])
        return str(self._tokenizer.decode(ids, skip_special=True))

    def show(self, ids: Sequence[int]) -> None:
        """Print what is new in the text of `ids`, unless its last character may be unfinished.

        Without a tokenizer the last id is printed.
        """
        if self._live:
            found = self.text(ids)
            if found is None:
                self._print(f"{ids[-1]} ")
            elif not found.endswith(("\ufffd", "\\")):
                self._print_rest(found)

    def finish(self, ids: Sequence[int]) -> None:
        """Print the text that was not printed yet, and end the line."""
        found = self.text(ids)
        if found is not None:
            self._print_rest(found)
        elif not self._live:
            self._print(" ".join(map(str, ids)))
        self._print("\n")

    def _print_rest(self, text: str) -> None:
        """Print what of a text was not printed yet, escaped."""
        shown = "\n".join(render.escape(line) for line in text.split("\n"))
        self._print(shown[self._shown :])
        self._shown = len(shown)

    def _print(self, text: str) -> None:
        """Write to stdout at once, after the status line is erased for good."""
        render.STATUS.end()  # what is written stays in its line
        sys.stdout.write(text)
        sys.stdout.flush()


def report_speed(
    run: run_options.RunLocation, count: int, end: str, took: "Speed", tokenizer: float
) -> None:
    """Print on stderr why generation ended, its speed, and where it ran.

    `count` is the number of tokens, `end` the reason, `tokenizer` the seconds its loading took.
    """
    why = {"max_tokens": "--max-tokens reached", "context": "the context is full"}.get(end, end)
    parts = [f"{count} token{'' if count == 1 else 's'}, {why}"]
    if took["decode_tokens_per_second"]:
        parts.append(f"{took['decode_tokens_per_second']:.1f} tokens/s")
    steps = took["steps"]
    median, first = steps["median_seconds"], steps["first_seconds"]
    if steps["range_seconds"] and median is not None and first is not None:
        low, high = (f"{1000 * seconds:.3g}" for seconds in steps["range_seconds"])
        parts.append(
            f"a step {1000 * median:.3g} ms ({low} to {high}), the first {1000 * first:.3g}"
        )
    if took["prefill_tokens_per_second"]:
        parts.append(
            f"prompt of {took['prefill_tokens']} at "
            f"{took['prefill_tokens_per_second']:.1f} tokens/s"
        )
    parts.append(
        f"loaded in {took['load_seconds']:.2f} s, tokenizer meanwhile in {tokenizer:.2f} s"
    )
    parts.append(run_options.run_headline(run))
    click.echo("; ".join(parts), err=True)


@click.command("run")
@options.gather_options(tokens=run_options.TokenOptions, where=run_options.WhereOptions)
@click.argument("model", type=options.MODEL_RUN)
@run_options.what
@click.option(
    "--max-tokens",
    type=options.WholeNumber(1),
    default=128,
    show_default=True,
    help="Generate at most this many tokens.",
)
@click.option(
    "--temperature",
    type=options.RealNumber(0, 1e6),
    default=0.0,
    show_default=True,
    help="0 takes the likeliest token; above it, tokens are drawn.",
)
@click.option(
    "--top-k",
    type=options.WholeNumber(0),
    default=0,
    show_default=True,
    help="Draw from the k likeliest tokens only (0: from all).",
)
@click.option(
    "--top-p",
    type=options.RealNumber(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Draw from the likeliest tokens that add up to this.",
)
@click.option(
    "--seed", type=options.WholeNumber(0), default=0, show_default=True, help="Seed of the draws."
)
@click.option("--ignore-stop", is_flag=True, help="Go on after the model's stop tokens.")
@dry.option
@run_options.where
@options.arch
@options.common
def command(
    model: str,
    max_tokens: int,
    ignore_stop: bool,
    dry_run: bool,
    tokens: run_options.TokenOptions,
    where: run_options.WhereOptions,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> int:
    """Generate text, greedily unless --temperature says otherwise.

    Generation ends at a stop token of the model, at --max-tokens, or at the end of the context.
    """
    if dry_run:
        return dry.report_run(model, tokens, where, max_tokens)
    from aprfmt.inference.generation import (
        BackgroundValue,
        StopIds,
        generate,
        room_in_context,
        run_speed,
    )
    from aprfmt.inference.sampling import Sampler, Sampling
    from aprfmt.tokenizer.absent_keys import absent_ids
    from aprfmt.tokenizer.loading import try_load_tokenizer
    from aprfmt.tokenizer.turn_ends import find_unstopped_turn

    sampling = Sampling(temperature, top_k, top_p, seed)
    began = time.perf_counter()
    with run_options.open_session(model, where) as run:
        opened = run.model
        ids, text = run_options.token_ids(opened, tokens)
        limit = min(max_tokens, room_in_context(opened, len(ids)))
        with BackgroundValue(lambda: try_load_tokenizer(opened)) as tokenizer:
            stop = StopIds(tokenizer, run_options.stop_token_ids(opened), ignore=ignore_stop)
            writer = TextWriter(tokenizer, ids, live=output_format.answer_format() != "json")
            load = time.perf_counter() - began
            found, times = generate(run.session, ids, Sampler(sampling), limit, stop, writer.show)
        if tokenizer.result is None:
            known = f"stop tokens as configured: {sorted(stop)}" if stop else "no stop token"
            render.warn(f"{opened.path}: has no tokenizer: ids only; {known}", "no_tokenizer")
        # Warn of what makes other programs go on after the end of a turn.
        unstopped = find_unstopped_turn(opened.carried) if tokens.chat is not None else None
        if unstopped is not None and not ignore_stop:
            here = "; this run stops there all the same" if unstopped.id in stop else ""
            render.warn(f"{unstopped.says}{here}; {unstopped.remedy}", "turn_end")
        for absent in () if opened.carried.origin else absent_ids(opened.carried):
            render.warn(f"{absent.says}; so does this run; {absent.todo}", "absent_key")
        # Say why generation ended; the stop token itself is no part of the answer.
        stopped = bool(found) and found[-1] in stop
        made = found[:-1] if stopped else found
        full = "max_tokens" if len(made) == max_tokens else "context"
        ran, took = run_options.run_facts(run), run_speed(len(ids), load, times)
        body = {
            "run": ran,
            "prompt": {"ids": ids, "text": text},
            "ids": made,
            "text": writer.text(made),
            "stop": {"reason": "stop_token" if stopped else full,
                     "token": found[-1] if stopped else None},
            "sampling": asdict(sampling),
            "speed": {**took, "tokenizer_seconds": tokenizer.seconds},
        }  # fmt: skip

    def show() -> None:
        """Print the rest of the generated text, and the speed unless --quiet."""
        writer.finish(made)
        if not render.is_flag_set("quiet"):
            end = f"stop token {found[-1]}" if stopped else full
            report_speed(ran, len(made), end, took, tokenizer.seconds)

    return render.emit(body, 0, show)
