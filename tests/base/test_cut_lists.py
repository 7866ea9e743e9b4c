"""Lists in sentences: dots stand exactly where something was left out, whichever module says it.

Seen red: dots behind a list that is whole, and a list cut by one without a word.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.base.protocols import Damage
from aprfmt.base.sequences import join_first, join_moves
from aprfmt.causes.forward import rope
from aprfmt.causes.tokenizer import probe_effects
from aprfmt.causes.training import batch_samples
from aprfmt.checks.file.layout import _damage_finding
from aprfmt.conversion import quantize_options
from aprfmt.diagnosis.stored_names import _damage_sentence
from aprfmt.errors import UsageError
from aprfmt.inference.engines import sequences
from aprfmt.measure.trace_rows import positions_text
from aprfmt.model import completeness, patterns
from aprfmt.model.hf_folder import snapshot_of_cache


def outputs(count: int) -> str:
    rows: Any = [
        SimpleNamespace(info=SimpleNamespace(name=f"n{i}"), source_encoding="F32")
        for i in range(count)
    ]
    return quantize_options._shown_outputs(rows)


def matches(count: int) -> str:
    with pytest.raises(UsageError) as caught:
        patterns.one_matching_index([[f"n{i}"] for i in range(count)], "n*", "m")
    return str(caught.value)


def runs(count: int) -> str:
    each = [sequences.Segment(0, 0, i, count, (i,), (0,), (i,)) for i in range(count)]
    return sequences._sequence_list_text([sequences.TokenRun(0, [one]) for one in each])


def ids_of_a_run(count: int) -> str:
    many = tuple(range(count))
    return sequences._sequence_list_text(
        [sequences.TokenRun(0, [sequences.Segment(0, 0, 0, 1, many, many, many)])]
    )


def damaged(count: int) -> str:
    return _damage_finding(Damage("m.gguf", "is cut", tuple(names(count))), ()).found


def not_compared(count: int) -> str:
    report: Any = SimpleNamespace(tensors=range(count + 1))
    return _damage_sentence(report, {"A": ("is cut",), "B": ()}, names(count))


def models_of_a_cache(count: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for i in range(count):
            (Path(folder) / f"models--n{i:02}" / "snapshots" / "0").mkdir(parents=True)
        with pytest.raises(UsageError) as caught:
            snapshot_of_cache(Path(folder))
        return str(caught.value)


def factors(count: int) -> str:
    solved, numbers = [i + 2.5 for i in range(count)], range(1, count + 1)
    return batch_samples._named_factors(solved, [1] * count, numbers)[1]


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


# Who says it -> (how many are shown, the text for so many, one of them, what is between and behind)
LISTS: Mapping[str, tuple[int, Callable[[int], str], Callable[[int], str], str, str]] = {
    "missing roles": (5, lambda n: completeness.list_keys(names(n)), "n{}".format, ", ", ", ..."),
    "any items": (2, lambda n: join_first(names(n), 2), "n{}".format, ", ", ", ..."),
    "positions": (8, lambda n: positions_text([3 * i for i in range(n)]), lambda i: str(3 * i),
                  ", ", ", ..."),
    "frequencies": (8, lambda n: rope._list_values(np.arange(n) + 0.5), "{}.5".format, ", ",
                    ", ..."),
    "token ids": (8, lambda n: probe_effects._short_ids([*range(n)]), str, " ", " ..."),
    "quantized again": (3, outputs, "n{} (F32)".format, ", ", " ..."),
    "matches": (4, matches, "n{}".format, ", ", ", ..."),
    "sequences": (4, runs, "1 tokens {}".format, "; ", "; ..."),
    "damaged tensors": (4, damaged, "n{}".format, ", ", ", ..."),
    "tensors not compared": (4, not_compared, "n{}".format, ", ", ", ..."),
    "a hub cache": (6, models_of_a_cache, "n{:02}".format, ", ", ", ..."),
    "factors of samples": (6, factors, lambda i: f"{i + 2.5:.3g}", ", ", ", ..."),
    "ids of a sequence": (4, ids_of_a_run, str, ",", ",..."),
}  # fmt: skip


@pytest.mark.parametrize("who", LISTS)
def test_dots_stand_where_something_was_left_out(who: str) -> None:
    most, text, item, between, dots = LISTS[who]
    for count in (2, most - 1, most, most + 1, 3 * most):
        if count > 1:
            said = text(count)
            assert between.join(map(item, range(min(count, most)))) in said
            assert said.count("...") == said.count(dots) == (count > most), (count, said)


def test_moves_beyond_the_first_are_counted() -> None:
    """Seen red: the number of all moves in place of those left out."""
    moves = [(0, 3), (1, 0), (2, 1), (3, 2)]
    assert join_moves(moves[:2], 2) == "0 of A is 3 of B, 1 of A is 0 of B"
    assert join_moves(moves, 1) == "0 of A is 3 of B and 3 more"
    assert join_moves(moves, 1, "row {}".format) == "row 0 of A is row 3 of B and 3 more"
