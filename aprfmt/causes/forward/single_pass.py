"""Changes for the tokens of one pass only: a later chunk, or one step that ran otherwise."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from aprfmt.causes.forward.mismatch import Array, Change, Layers
from aprfmt.inference.replay.patched_model import Override, PassLocation, PatchedModel

# Operations whose second axis counts tokens, after that of heads.
BY_HEADS = ("scores", "probs")
# What a change of operations alone leaves as it is.
KEPT = ("spec", "hp", "weights", "backend", "ids", "positions", "taps", "own")


def tokens_of_one_pass(late: Array) -> tuple[int, int] | None:
    """Return (first, last) of the differing rows, if they may be those of one later pass.

    `late` are their numbers. None where the first token differs, or a row between them agrees.
    """
    if not len(late) or not late[0] or len(late) != late[-1] - late[0] + 1:
        return None
    return int(late[0]), int(late[-1])


def changes_of_one_pass(
    changes: Iterable[tuple[Change, Layers]], patched: PatchedModel, first: int, last: int
) -> Iterator[tuple[Change, Layers]]:
    """Yield (change, layers) of the changes that only wrap operations, limited to some tokens.

    The tokens are `first` to `last`, those of one pass of the run.
    """
    for change, layers in changes:
        if change.drop or change.gives is not None:
            continue
        made = change.make(patched, layers)
        if all(getattr(made, part) is getattr(patched, part) for part in KEPT):
            yield limit_to_tokens(change, first, last, len(patched.ids)), layers


def limit_to_tokens(change: Change, first: int, last: int, total: int) -> Change:
    """Return a change that acts on tokens `first` to `last` alone, both included.

    `total` is the number of tokens of the run, which decides the wording. What the change replaces
    must be operations. A result of several arrays is not limited.
    """
    which = f"token {first}" if first == last else f"tokens {first} to {last}"
    if last == total - 1:
        which = f"token {first} on" if first < last else f"the last token, {first},"
        says = f"from {which}" if first < last else f"for {which}"
    else:
        says = f"in the pass of {which} alone"

    def make(patched: PatchedModel, layers: Layers) -> PatchedModel:
        """Return the model with the change, its operations changed for some tokens only.

        These are the tokens from `first` to `last`.
        """
        made = change.make(patched, layers)
        overrides = dict(made.overrides)
        for op, wraps in made.overrides.items():
            known = patched.overrides.get(op, ())
            overrides[op] = tuple(
                wrap if wrap in known else _for_tokens(op, wrap, first, last) for wrap in wraps
            )
        return replace(made, overrides=overrides)

    values = {**change.values, "tokens": [first, last]}
    return replace(change, says=f"{says} {change.says}", make=make, values=values)


def _for_tokens(op: str, wrap: Override, first: int, last: int) -> Override:
    """Return an override of operation `op` that applies `wrap` to these tokens' results only."""
    axis = int(op in BY_HEADS)

    def override(beneath: Any, at: PassLocation, *args: Any, **kwargs: Any) -> Any:
        """Return the operation's result, with the change's rows for tokens `first` to `last`.

        A result of several arrays is taken from the change as a whole.
        """
        own, theirs = beneath(*args, **kwargs), wrap(beneath, at, *args, **kwargs)
        if own is theirs or isinstance(own, tuple):
            return theirs
        made = np.array(own)
        rows = (slice(None),) * axis + (slice(first, last + 1),)
        made[rows] = np.asarray(theirs)[rows]
        return made

    return override
