"""Dumped arrays that are no capture point: "same" is not said over values that differ.

Seen red: "same: nothing that was compared differs", exit 0, where the one array that differed was
no point; layers of a tower taken for those of the language model, which was accused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import Diagnosis, diagnose
from aprfmt.inference.engines.mapping import load_arrays
from aprfmt.inference.engines.modules import parse_module
from aprfmt.measure.traces import TraceDiff, compare_traces
from tests.conversion.folders import write_mixed
from tests.diagnosis import files
from tests.diagnosis.faults import DEMO

Arrays = Mapping[str, Any]
RNG = np.random.default_rng(5)
VALUES = RNG.normal(size=(25, 64)).astype(np.float32)
LAYER = RNG.normal(size=(25, 64)).astype(np.float32)


def dump(path: Path, arrays: Arrays) -> Path:
    """Write a dump; a name with .npz takes numpy's format."""
    if path.suffix == ".npz":
        np.savez(path, **arrays)
    else:
        stored = {"float32": "F32", "int64": "I64"}
        write_mixed(
            path, {n: (stored[x.dtype.name], x.shape, x.tobytes()) for n, x in arrays.items()}
        )
    return path


def both(folder: Path, mine: Any, theirs: Any, name: str = "visual", kind: str = "") -> Diagnosis:
    """Return what is said of two dumps with one equal point, and an array that is none."""
    kind = kind or ".safetensors"
    a, b = (
        dump(folder / f"{side}{kind}", {"model.layers.0": LAYER, name: values})
        for side, values in (("a", mine), ("b", theirs))
    )
    return diagnose(str(a), str(b))


@pytest.mark.parametrize("kind", [".safetensors", ".npz"])
@pytest.mark.parametrize("name", ["visual", "some.module", "hidden"])
def test_rows_in_another_order_are_a_difference(name: str, kind: str, tmp_path: Path) -> None:
    order = [0, 4, 1, 3, 2, *range(5, 25)]
    report = both(tmp_path, VALUES, VALUES[order], name, kind)
    assert report.exit_code == 1 and report.verdict == "bug"
    (found,) = report.findings
    assert (found.cause, found.certainty, found.where) == ("capture_rows", "confirmed", (name,))
    assert f"{name}: B has A's 25 rows in another order: row 1 of A is row 2 of B" in found.says
    assert name not in {row.name for row in report.left}


RELATED = {
    "a factor": (VALUES * np.float32(1.01), "its value times 1.01", "explained"),
    "a vector": (VALUES + LAYER[0], "the same vector added to every row", "explained"),
    "pooled": (VALUES[:24].reshape(12, 2, 64).mean(1), "has other values", "located"),
    "a part": (VALUES[5:25], "B has only 20 of A's 25 rows: 5, 6, 7, ...", "explained"),
    "others": (LAYER[::-1].copy(), "has other values (1.4", "located"),
    "one row twice": (VALUES[[0, 0, *range(2, 25)]], "has other values", "located"),
}


@pytest.mark.parametrize("name", RELATED)
def test_other_values_are_a_difference(name: str, tmp_path: Path) -> None:
    theirs, says, level = RELATED[name]
    report = both(tmp_path, VALUES, theirs)
    (found,) = report.findings
    assert report.exit_code == 1 and says in found.says
    assert (found.cause, found.certainty, found.where) == ("", level, ("visual",))
    assert "another order" not in report.sentence


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("turned", [False, True])
def test_pooled_rows_are_said_to_be_means(count: int, turned: bool, tmp_path: Path) -> None:
    mine = RNG.normal(size=(20, 64)).astype(np.float32)
    sides = [mine, mine.reshape(-1, count, 64).mean(1)]
    (found,) = both(tmp_path, *sides[:: -1 if turned else 1]).findings
    names = ("A", "B") if turned else ("B", "A")
    assert f"each row of {names[0]} is the mean of {count} rows of {names[1]}" in found.says
    assert found.certainty == "explained"


def test_several_arrays_are_one_finding(tmp_path: Path) -> None:
    """With the others of the same names that are equal."""
    names = [f"visual.blocks.{at}" for at in range(6)]
    mine = {name: VALUES * (at + 1) for at, name in enumerate(names)}
    theirs = mine | {name: mine[name][::-1].copy() for name in names[2:]}
    report = diagnose(
        str(dump(tmp_path / "a.safetensors", mine)), str(dump(tmp_path / "b.safetensors", theirs))
    )
    (found,) = report.findings
    assert (found.cause, found.where) == ("capture_rows", tuple(names[2:]))
    assert "1 more arrays; 2 other arrays are equal" in found.says


def test_behind_a_point_that_differs_an_array_is_evidence(tmp_path: Path) -> None:
    """It may follow from the point, so that it is no second cause."""
    a, b = (
        dump(tmp_path / f"{side}.safetensors", {"model.layers.0": LAYER * by, "own": VALUES * by})
        for side, by in (("a", np.float32(1)), ("b", np.float32(2)))
    )
    report = diagnose(str(a), str(b))
    assert report.findings and all("own" not in one.where for one in report.findings)
    assert any("own: B has A's: its value times 2" in row.says for row in report.evidence)


NOISE = RNG.normal(size=VALUES.shape).astype(np.float32)
NUMBERS = np.arange(25)


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (VALUES, VALUES),
        (VALUES, VALUES + np.float32(1e-6) * NOISE),  # the rounding of a run
        (NUMBERS, NUMBERS[::-1].copy()),  # an engine's own numbers, such as cache slots
    ],
)
def test_rounding_and_numbers_of_an_engine_are_none(mine: Any, theirs: Any, tmp_path: Path) -> None:
    report = both(tmp_path, mine, theirs, "slot_mapping")
    assert report.exit_code == 0 and report.verdict == "same"
    assert "slot_mapping" in report.sentence


def compared(a: Path, b: Path) -> TraceDiff:
    """Return how the arrays of two dumps compare, as `trace --load A --reference B` does it."""
    with load_arrays(a) as mine, load_arrays(b) as other:
        return compare_traces(mine, other)


@pytest.mark.parametrize("equal", [True, False])
def test_two_runs_of_a_trace_are_compared_alike(equal: bool, tmp_path: Path) -> None:
    """The values of a tower alone are no point at all: exit 2 where they are equal."""
    names = ("visual.merger", "visual.blocks.0")
    a = dump(tmp_path / "a.safetensors", dict.fromkeys(names, VALUES))
    other = {names[0]: VALUES if equal else VALUES[::-1].copy(), names[1]: VALUES}
    b = dump(tmp_path / "b.safetensors", other)
    report = compared(a, b)
    assert report.exit_code == (2 if equal else 1)
    assert ("another order" in report.pronounced.says) != equal
    assert diagnose(str(a), str(b)).exit_code == (2 if equal else 1)


@pytest.mark.parametrize(
    "name",
    ["visual.blocks.0", "model.visual.blocks.1.attn", "vision_tower.encoder.layers.0.mlp",
     "audio_tower.layers.3", "vision_model.encoder.layers.1.self_attn#q", "visual_blocks_0"],
)  # fmt: skip
def test_layers_of_a_tower_are_none_of_the_language_model(name: str) -> None:
    assert parse_module(name) is None


@pytest.mark.parametrize(
    "name", ["model.language_model.layers.0", "encoder.layer.0", "layers.0.mlp", "model_layers_0"]
)
def test_other_layers_are_those_of_the_model(name: str) -> None:
    assert parse_module(name) is not None


def test_a_dump_of_a_tower_alone_accuses_no_layer(tmp_path: Path) -> None:
    """Token ids would not help: none of its arrays is a point of the language model."""
    made = dump(tmp_path / "dump.safetensors", {"visual.blocks.0": VALUES, "visual": VALUES})
    model = files.copy(DEMO, "beside a tower's dump")
    for ids in (None, [*range(1, 26)]):
        report = diagnose(str(model), str(made), ids=ids)
        assert report.exit_code == 2 and not report.findings
        assert "audio tower" in report.reason and "--ids" not in report.reason
    assert "--ids" not in diagnose(str(model), str(made)).way_on
