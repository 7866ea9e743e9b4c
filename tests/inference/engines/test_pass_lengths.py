"""Passes whose seq_lens say that they continue, and arrays of heads of a pass of one token.

Seen red: four sequences of a prompt and three decode steps; "rows of 2 shapes" of the heads.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aprfmt.inference.engines import dump_folders, sequences
from aprfmt.inference.engines.rank_joining import JoinedArray


def array(name: str, values: Any) -> JoinedArray:
    return JoinedArray(name, values.shape, "F32", lambda: values)


def passed(
    step: int, ids: Sequence[int], lengths: Sequence[int], **arrays: Any
) -> dump_folders.Pass:
    """Return a pass that gives its token ids and seq_lens, and no positions."""
    made = dump_folders.Pass(step, 0, {name: array(name, one) for name, one in arrays.items()})
    made.batch["ids"] = array("ids", np.array(ids))
    made.batch["lengths"] = array("lengths", np.array(lengths))
    return made


def found_in(passes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[int]]:
    """Return the token ids of the sequences of passes, each (token ids, seq_lens)."""
    made = [passed(step, *one) for step, one in enumerate(passes)]
    return [list(run.ids or ()) for run in sequences._join_sequences(made, [])]


@pytest.mark.parametrize(
    ("passes", "wanted"),
    [
        ([([5, 6, 7], [3]), ([8], [4]), ([9], [5])], [[5, 6, 7, 8, 9]]),
        ([([5, 6, 7], [3]), ([8, 9], [5]), ([4], [6])], [[5, 6, 7, 8, 9, 4]]),
        ([([5, 6, 7, 8, 9], [3, 2]), ([1, 2], [4, 3])], [[5, 6, 7, 1], [8, 9, 2]]),
    ],
    ids=["decode steps", "a chunked prompt", "two requests"],
)
def test_lengths_say_that_a_pass_continues_a_sequence(
    passes: Sequence[tuple[Sequence[int], Sequence[int]]], wanted: list[list[int]]
) -> None:
    assert found_in(passes) == wanted


@pytest.mark.parametrize("length", [1, 3, 6])
def test_lengths_that_continue_nothing_begin_a_sequence(length: int) -> None:
    """Those of the pass alone, those without its token, and those of tokens that no pass has."""
    passes = [passed(0, [5, 6, 7], [3]), passed(1, [8], [length])]
    first, second = sequences._join_sequences(passes, [])
    assert (first.segments[0].positions, second.segments[0].positions) == ((0, 1, 2), (0,))


@pytest.mark.parametrize("batched", [False, True], ids=["[tokens, heads]", "[1, tokens]"])
def test_the_row_of_a_decode_step_has_the_shape_of_the_prompts_rows(batched: bool) -> None:
    values = np.arange(5 * 4 * 2, dtype=np.float32).reshape(5, 4, 2)
    passes = []
    for step, (first, stop) in enumerate([(0, 3), (3, 4), (4, 5)]):
        part = values[first:stop].reshape(1, stop - first, 8) if batched else values[first:stop]
        passes.append(passed(step, range(first, stop), [stop], k_norm=part))
    (run,) = sequences._join_sequences(passes, [])
    found = sequences._align_sequence(passes, run, None, [])
    assert not found.left
    wanted = values.reshape(5, 8) if batched else values
    assert np.array_equal(found.arrays["k_norm"].read(), wanted)
