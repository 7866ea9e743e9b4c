"""Dumps of ranks of which one computes, or records, in a shorter type than the others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.causes.forward.rank_rounding import _ranks_with
from aprfmt.causes.forward.rounding import round_to_type
from aprfmt.causes.forward.shards import role_of
from tests.cli.run import aprfmt
from tests.diagnosis.engines import broken, tiny_folder
from tests.inference.engines.test_rank_dumps import two_ranks, written

SHARED = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")


def rounding(dtype: str, ranks: slice) -> Any:
    """Return an engine whose ranks, of two, round their part of each product to a type."""

    def linear(op: Any, x: Any, w: Any, *rest: Any) -> Any:
        y = op(x, w, *rest)
        if role_of(w.key) not in SHARED:
            return y
        parts = np.split(np.array(y), 2, -1)
        parts[ranks] = [round_to_type(part, dtype) for part in parts[ranks]]
        return np.concatenate(parts, -1)

    return lambda: broken("linear", linear)


def said(folder: Path) -> Any:
    """Return what `diagnose` says of a dump of the tiny llama."""
    return aprfmt("diagnose", tiny_folder("llama"), folder, "--json")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_computes_in_a_shorter_type_is_precision(
    rank: int, dtype: str, tmp_path: Path
) -> None:
    """Seen red: "no cause of the table fits", of a weight that may be wrong."""
    found = written(backend=rounding(dtype, slice(rank, rank + 1)))
    done = said(two_ranks(tmp_path / "d", found))
    (cause,) = done.json["causes"]
    assert (cause["cause"], cause["level"], done.json["verdict"]) == (
        "rounding", "confirmed", "precision",
    )  # fmt: skip
    assert cause["says"].startswith(f"results are rounded to {dtype} by rank {rank} of 2")


def test_ranks_that_all_compute_in_a_shorter_type_are_not_told_apart(tmp_path: Path) -> None:
    done = said(two_ranks(tmp_path / "d", written(backend=rounding("bfloat16", slice(0, 2)))))
    assert done.json["verdict"] == "precision" and "by rank" not in done.out


@pytest.mark.parametrize("saved", [torch.bfloat16, torch.float32])
def test_a_rank_that_records_in_a_shorter_type_is_named(saved: Any, tmp_path: Path) -> None:
    """Seen red: "what it is instead is not known", and the type in the notes alone."""
    folder = two_ranks(tmp_path / "d", written())
    (path,) = (folder / "TP1").glob("*.pt")
    held = torch.load(path)
    for name, value in held.items():
        if isinstance(value, list):
            held[name] = [one.bfloat16().to(saved) for one in value]
        elif value.is_floating_point():
            held[name] = value.bfloat16().to(saved)
    torch.save(held, path)
    done = said(folder)
    (cause,) = done.json["causes"]
    assert (done.code, done.json["verdict"], cause["cause"]) == (
        2, "not_comparable", "capture_point",
    )  # fmt: skip
    assert cause["says"].startswith(
        "some ranks recorded what was computed in a shorter type: q is rounded to bfloat16 by rank "
        "1 of 2"
    )


def test_only_ranks_that_round_the_references_own_values_are_short() -> None:
    """Other values that are numbers of the type are none of it, nor are values of all ranks."""
    mine = np.random.RandomState(0).standard_normal((5, 8)).astype(np.float32)
    short = round_to_type(mine, "bfloat16")

    def ranks(theirs: Any, count: int = 4) -> list[int]:
        view: Any = SimpleNamespace(mine=mine, theirs=theirs, tolerance=2e-5)
        return _ranks_with(view, count, "bfloat16")

    def parts(*chosen: int) -> Any:
        made = mine.copy()
        for rank in chosen:
            made[:, 2 * rank : 2 * rank + 2] = short[:, 2 * rank : 2 * rank + 2]
        return made

    assert ranks(parts(1)) == [1] and ranks(parts(0, 3)) == [0, 3]
    assert ranks(mine) == [] and ranks(short) == []
    assert ranks(parts(1), 3) == [] and ranks(parts(1), 2) == []
    other = parts(1)
    other[:, 6:] += 1
    assert ranks(other) == []
    assert ranks(round_to_type(parts(1) * 2, "bfloat16")) == []
