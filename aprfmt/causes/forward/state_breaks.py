"""States that are lost several times in one pass: at every chunk of a scan, or at some tokens.

A *break* is a token at which a recurrence begins with zeros in place of the state of the tokens
before it. The first break is the first token that differs. The others follow from it: every so many
tokens, as where a scan in chunks loses its state between them, or each at the first token that
still differs once the breaks before it are made. So one number, or one a break, is read from the
rows, and all rows after it judge it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from aprfmt.base.sequences import join_first
from aprfmt.causes.forward.convolution import WHERE, mixer_kinds, starts_to_try
from aprfmt.causes.forward.mismatch import Change, Hypothesis, Mismatch, Patch, differing_rows
from aprfmt.causes.forward.state_restarts import restart_convolution, restart_rule, restart_scan
from aprfmt.inference.point_placement import mixer_of_layer

MOST = 12  # breaks that are looked for one by one
SHOWN = 4
# (Kinds of mixers, the operation that carries their state, its name, what it is in, its patch.)
STATES: tuple[tuple[tuple[str, ...], str, str, str, Callable[[Sequence[int]], Patch]], ...] = (
    (("mamba", "mamba2", "lightning"), "scan", "the scan", "ssm_state", restart_scan),
    (("gated_delta", "kimi_delta"), "delta", "the delta rule", "delta", restart_rule),
)


def try_lost_states(case: Mismatch) -> Iterator[Change]:
    """Yield changes that lose the state of a mixer, of its convolution or both, at some tokens.

    Nothing where the first token differs. Only single losses where the trace lacks rows.
    """
    patched = case.patched
    if case.layer < 0:
        return
    kind = mixer_of_layer(patched.spec.block, patched.hp, case.layer)
    late = differing_rows(case)
    if kind == "none" or not len(late) or late[0] == 0:
        return
    # Single breaks of these are proposed by the tables of their operations.
    single = [("convolve",)] if kind == "lightning" else [("convolve",), ("scan",)]
    for ops, make in _breaking_changes(case, kind):
        if any(case.call(op) is None for op in ops):
            continue
        if ops not in single:
            yield from (make([first]) for first in dict.fromkeys(starts_to_try(case)))
        if len(case.rows) == case.tokens:
            yield from _several_breaks(case, make, int(late[0]))


def _breaking_changes(
    case: Mismatch, kind: str
) -> Iterator[tuple[tuple[str, ...], Callable[[Sequence[int]], Change]]]:
    """Yield (operations, function from break tokens to a change) of the states of a mixer.

    They are the state, the last inputs of the convolution, and both, as where a pass begins
    without what an earlier one left.
    """

    def changed(cause: str, what: str, where: tuple[str, ...], patch: Callable[..., Patch]) -> Any:
        """Return the function that makes the change of a state lost at some tokens."""
        return lambda starts: Change(
            cause,
            f"no state is carried {_breaks_text(starts, case.tokens)}: {what} "
            f"{'begin' if ' and ' in what else 'begins'} with zeros there",
            where,
            patch(starts),
            {"restarted": list(starts)},
        )

    where = WHERE if "short_conv" in mixer_kinds(case.patched) else ("ssm_conv1d",)
    yield ("convolve",), changed("conv_state", "the convolution", where, restart_convolution)
    state = next((one for one in STATES if kind in one[0]), None)
    if state is None:
        return
    _, op, what, named, patch = state
    yield (op,), changed("ssm_state", what, (named,), patch)
    if kind != "lightning":  # which has no convolution
        both = partial(_restart_with_convolution, patch)
        what = f"{what} and the convolution"
        yield (op, "convolve"), changed("ssm_state", what, (named, *where), both)


def _restart_with_convolution(
    restart: Callable[[Sequence[int]], Patch], starts: Sequence[int]
) -> Patch:
    """Return a patch: a state, by the patch of `restart`, and the convolution begin with zeros."""
    state, convolution = restart(starts), restart_convolution(starts)
    return lambda patched, layers: convolution(state(patched, layers), layers)


def _several_breaks(
    case: Mismatch, make: Callable[[Sequence[int]], Change], first: int
) -> Iterator[Change]:
    """Yield the changes with breaks every `first` tokens, and with those found one by one."""
    every = list(range(first, case.tokens, first))
    if first > 1 and len(every) > 1:  # at every token it is "no state is carried"
        yield make(every)
    starts = [first]
    while len(starts) <= MOST:
        view = case.attempt(make(starts))
        if view is None or view.residual is None:
            return
        late = differing_rows(case, view)
        if not len(late):
            break
        if late[0] <= starts[-1]:
            return
        starts.append(int(late[0]))
    if len(starts) > 1 and starts != every:
        yield make(starts)


def _breaks_text(starts: Sequence[int], tokens: int) -> str:
    """Return in words at which tokens of a pass a state is lost."""
    if len(starts) == 1:
        return f"to token {starts[0]}"
    if list(starts) == list(range(starts[0], tokens, starts[0])):
        return f"over every {starts[0]} tokens, as between the chunks of a scan"
    return f"to tokens {join_first([str(at) for at in starts], SHOWN)}"


HYPOTHESES = (
    Hypothesis("ssm_state", try_lost_states, 351, "after single breaks of the same states"),
    Hypothesis("conv_state", try_lost_states, 361, "after single breaks of the same states"),
)
