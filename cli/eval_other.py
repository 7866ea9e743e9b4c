"""The other model of `aprfmt eval --against`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from aprfmt.cli import running
from aprfmt.errors import UsageError

if TYPE_CHECKING:
    from aprfmt.inference.evaluation import Sample
    from aprfmt.inference.running import Run


@contextmanager
def opened(
    text: str, here: "Run", samples: "list[Sample]", where: running.Where
) -> "Iterator[Run]":
    """Open the model to compare with, on the same device unless @RUN names one.

    UsageError where it has another vocabulary.
    """
    from aprfmt.inference.device import split_run

    with running.session(text, where.elsewhere(run=split_run(text)[1] is not None)) as there:
        model, other = here.model, there.model
        sizes = [int(each.hyper["vocab_size"]) for each in (model, other)]
        if sizes[0] != sizes[1]:
            raise UsageError(
                f"{other.path}: {sizes[1]} tokens in the vocabulary, {model.path} has "
                f"{sizes[0]}; distributions over different tokens cannot be compared"
            )
        mine, theirs = running.tokenizer_of(model), running.tokenizer_of(other)
        if mine is not None and theirs is not None:
            for i in sorted({i for sample in samples for i in sample.ids}):
                if mine.token(i) != theirs.token(i):
                    raise UsageError(
                        f"{other.path}: token {i} is {theirs.token(i)!r}, in {model.path} "
                        f"{mine.token(i)!r}; their ids mean other things"
                    )
        yield there
