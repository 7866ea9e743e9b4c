"""What `aprfmt run` prints: the text as it comes, then how it ended and how fast it was."""

import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import click

from aprfmt.cli import render, run_options

if TYPE_CHECKING:
    from aprfmt.inference.generating import MadeBeside, Speed
    from aprfmt.tokenizer import Tokenizer

CONTEXT = 4  # prompt tokens decoded with the output, so that its first word keeps its space


class TextWriter:
    """Turns the tokens so far into text, and prints what is new of it as it comes."""

    def __init__(
        self, tokenizer: "MadeBeside[Tokenizer | None]", prompt: Sequence[int], *, live: bool
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
        render.STATUS.end()  # what is written stays in its line
        sys.stdout.write(text)
        sys.stdout.flush()


def report_speed(
    run: run_options.RunLocation, made: int, end: str, took: "Speed", tokenizer: float
) -> None:
    """Say on stderr how it ended and how fast it was; the tokenizer came after so many seconds."""
    why = {"max_tokens": "--max-tokens reached", "context": "the context is full"}.get(end, end)
    parts = [f"{made} token{'' if made == 1 else 's'}, {why}"]
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
        f"loaded in {took['load_seconds']:.2f} s, tokenizer beside it in {tokenizer:.2f} s"
    )
    parts.append(run_options.run_headline(run))
    click.echo("; ".join(parts), err=True)
