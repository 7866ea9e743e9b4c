"""Tensors that one rank of a tensor-parallel run held, under the whole model's configuration.

The cuts are those of Megatron: of rows for q, k, v, gate, up and the embedding, of columns for o
and down. A smaller model, a pruned matrix and parts that are alike are no rank's parts.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.run import aprfmt
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

COLUMNS = ("o_proj", "down_proj")
Stored = Mapping[str, tuple[str, tuple[int, ...], bytes]]
SIZES: dict[str, Any] = {
    "hidden": 64,
    "layers": 2,
    "ffn": 128,
    "heads": 4,
    "kv_heads": 4,
    "vocab": 96,
}


def array(stored: Stored, name: str) -> np.ndarray:
    """Return a tensor of float32 as an array."""
    _, shape, raw = stored[name]
    return np.frombuffer(raw, np.float32).reshape(shape)


def cut(stored: Stored, rank: int, ranks: int, only: str = "") -> dict[str, Any]:
    """Return the tensors of one rank; `only` those whose name has this word are cut."""
    made: dict[str, Any] = dict(stored)
    for name in stored:
        whole = array(stored, name)
        if whole.ndim < 2 or only not in name:
            continue
        axis = 1 if any(word in name for word in COLUMNS) else 0
        part = np.ascontiguousarray(np.split(whole, ranks, axis)[rank])
        made[name] = ("F32", part.shape, part.tobytes())
    return made


def diagnosed(folder: Path, change: Callable[[Stored], Mapping[str, Any]], *, b: bool = True,
              config: Mapping[str, Any] | None = None) -> Any:  # fmt: skip
    """Return what `diagnose` says of a model and its changed copy; the copy is A where not `b`."""
    for side in "ab":
        llama_folder(folder / side, "F32", **SIZES)
    changed = folder / ("b" if b else "a")
    write_mixed(changed / "model.safetensors", change(tensors_of(folder / "a")))
    if config is not None:
        path = changed / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return aprfmt("diagnose", folder / "a", folder / "b", "--json").json


@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (0, 4), (2, 4), (3, 4)])
@pytest.mark.parametrize("side", ["A", "B"])
def test_the_part_of_a_rank_is_named(side: str, rank: int, ranks: int, tmp_path: Path) -> None:
    told = diagnosed(tmp_path, lambda stored: cut(stored, rank, ranks), b=side == "B")
    assert told["verdict"] == "bug"
    (found,) = told["causes"]
    assert (found["cause"], found["level"]) == ("rank_part", "confirmed")
    assert f"{side} holds part {rank + 1} of {ranks} of these tensors" in found["says"]
    assert len(found["where"]) == 2 * 7 + 2  # seven matrices a layer, the embedding, the head
    made = [command for command in told["next"] if " convert " in command]
    assert bool(made) == (side == "B")  # what has no other ranks' values makes nothing


def test_the_part_of_tensors_without_the_tables(tmp_path: Path) -> None:
    told = diagnosed(tmp_path, lambda stored: cut(stored, 1, 2, "layers"))
    (found,) = told["causes"]
    assert (found["cause"], found["level"]) == ("rank_part", "confirmed")
    assert len(found["where"]) == 2 * 7


def of_two_ranks(stored: Stored) -> Mapping[str, Any]:
    """Rank 0's attention with rank 1's MLP."""
    first, second = cut(stored, 0, 2, "self_attn"), cut(stored, 1, 2, "mlp")
    return first | {name: row for name, row in second.items() if "mlp" in name}


def test_parts_of_two_ranks_are_two_causes(tmp_path: Path) -> None:
    told = diagnosed(tmp_path, of_two_ranks)
    assert [one["cause"] for one in told["causes"]] == ["rank_part"] * 2
    said = " ".join(one["says"] for one in told["causes"])
    assert "part 1 of 2" in said and "part 2 of 2" in said


def with_other_values(stored: Stored) -> Mapping[str, Any]:
    """Tensors of the shapes of a rank's parts, with one value of each moved."""
    made = cut(stored, 0, 2)
    for name, (kind, shape, raw) in made.items():
        if shape != stored[name][1]:
            values = np.frombuffer(raw, np.float32).copy()
            values[-1] += 1
            made[name] = (kind, shape, values.tobytes())
    return made


def with_alike_halves(stored: Stored) -> dict[str, Any]:
    """Matrices of which every half is the same: no half says which rank's it is."""
    made: dict[str, Any] = dict(stored)
    for name in stored:
        whole = array(stored, name)
        if whole.ndim == 2:
            made[name] = ("F32", whole.shape, np.full_like(whole, 0.25).tobytes())
    return made


def causes(told: Any) -> list[str]:
    return [one["cause"] for one in told["causes"]]


def test_other_values_are_no_part(tmp_path: Path) -> None:
    assert "rank_part" not in causes(diagnosed(tmp_path, with_other_values))


def test_one_kind_of_tensor_alone_is_no_rank(tmp_path: Path) -> None:
    assert "rank_part" not in causes(diagnosed(tmp_path, lambda stored: cut(stored, 0, 2, "up_")))


def test_a_smaller_mlp_that_the_configuration_states_is_no_rank(tmp_path: Path) -> None:
    told = diagnosed(
        tmp_path, lambda stored: cut(stored, 0, 2, "mlp"), config={"intermediate_size": 64}
    )
    assert "rank_part" not in causes(told)
    told = aprfmt("diff", tmp_path / "a", tmp_path / "b", "--json").json
    explained = [row["explanation"] for row in told["tensors"] if row["explanation"]]
    assert explained and all(one["cause"] != "rank_part" for one in explained)


def test_parts_that_are_alike_name_no_rank(tmp_path: Path) -> None:
    for side in "ab":
        llama_folder(tmp_path / side, "F32", **SIZES)
    alike = with_alike_halves(tensors_of(tmp_path / "a"))
    write_mixed(tmp_path / "a" / "model.safetensors", alike)
    write_mixed(tmp_path / "b" / "model.safetensors", cut(alike, 0, 2))
    assert "rank_part" not in causes(
        aprfmt("diagnose", tmp_path / "a", tmp_path / "b", "--json").json
    )


# --- copies of all ranks that were joined ---------------------------------------------------------


def joined(word: str, ranks: int, axis: int = 0) -> Callable[[Stored], Mapping[str, Any]]:
    """Return a change that joins so many copies of the tensors whose name has a word."""

    def change(stored: Stored) -> Mapping[str, Any]:
        made: dict[str, Any] = dict(stored)
        for name in stored:
            if word in name:
                copies = np.concatenate([array(stored, name)] * ranks, axis)
                made[name] = ("F32", copies.shape, copies.tobytes())
        return made

    return change


# What is joined, how often and along which axis, and of how many tensors.
COPIES = {
    "norms": ("norm", 8, 0, 5),
    "embedding": ("embed_tokens", 2, 0, 1),
    "columns": ("o_proj", 4, 1, 2),
}


@pytest.mark.parametrize("case", COPIES)
@pytest.mark.parametrize("side", ["A", "B"])
def test_joined_copies_of_all_ranks_are_named(case: str, side: str, tmp_path: Path) -> None:
    word, ranks, axis, count = COPIES[case]
    told = diagnosed(tmp_path, joined(word, ranks, axis), b=side == "B")
    assert told["verdict"] == "bug"
    (found,) = told["causes"]
    assert (found["cause"], found["level"]) == ("rank_copies", "confirmed")
    assert f"{side} holds these tensors {ranks} times" in found["says"]
    assert len(found["where"]) == count


def with_one_value_apart(stored: Stored) -> Mapping[str, Any]:
    """Norms four times, of which the last copy has another value."""
    made = dict(joined("norm", 4)(stored))
    for name, (kind, shape, raw) in made.items():
        if "norm" in name:
            values = np.frombuffer(raw, np.float32).copy()
            values[-1] += 1
            made[name] = (kind, shape, values.tobytes())
    return made


def test_copies_that_are_not_all_alike_are_none(tmp_path: Path) -> None:
    assert "rank_copies" not in causes(diagnosed(tmp_path, with_one_value_apart))


def test_values_of_one_number_are_neither_parts_nor_copies(tmp_path: Path) -> None:
    """Ones of two lengths: each is a part of the other as well as copies of it."""
    for side, ranks in (("a", 1), ("b", 2)):
        llama_folder(tmp_path / side, "F32", **SIZES)
        rows = dict(tensors_of(tmp_path / side))
        for name in rows:
            if "norm" in name:
                ones = np.ones(64 * ranks, np.float32)
                rows[name] = ("F32", ones.shape, ones.tobytes())
        write_mixed(tmp_path / side / "model.safetensors", rows)
    told = aprfmt("diagnose", tmp_path / "a", tmp_path / "b", "--json").json
    assert not {"rank_part", "rank_copies"}.intersection(causes(told))
