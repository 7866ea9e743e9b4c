"""Lists that are cut say how many entries are left, and what is printed of an entry is its own.

Counts are held for every length around the limit: a sum with a wrong sign passes at some of them.
"""

from typing import Any

import pytest

from aprfmt.cli import diff
from aprfmt.cli.diff import FINDINGS
from aprfmt.cli.trace import dumped_arrays, reference
from aprfmt.measure.sampling import DifferingRange, SampleReport, Unsampled
from aprfmt.measure.traces import PointDiff, TraceDiff

LENGTHS = (0, 1, FINDINGS - 1, FINDINGS, FINDINGS + 1, FINDINGS + 3)


def sampled(differing: int, unlike: int) -> SampleReport:
    return SampleReport(
        "a", "b", 1, 4, 9, 4 << 16, 9 << 16, 0,
        tuple(DifferingRange(f"d{i}", 0, 8, i) for i in range(differing)),
        tuple(Unsampled(f"u{i}", "only in A") for i in range(unlike)),
        (),
    )  # fmt: skip


@pytest.mark.parametrize("unlike", LENGTHS)
@pytest.mark.parametrize("differing", LENGTHS)
def test_a_sample_counts_every_finding(
    differing: int, unlike: int, capsys: pytest.CaptureFixture[str]
) -> None:
    diff.show_samples(sampled(differing, unlike), "aprfmt diff a b")
    lines = capsys.readouterr().out.splitlines()
    listed = sum("differs" in line or "only in A" in line for line in lines if "range" not in line)
    left = [int(line.split()[1]) for line in lines if line.strip().endswith("more (--json)")]
    assert listed + sum(left) == differing + unlike
    assert left != [0]


def points(count: int, beyond: int) -> TraceDiff:
    made = tuple(
        PointDiff(f"L{i}.out", 0.5 if i < beyond else 0.0, 0.5, (0,), 0.1, i < beyond)
        for i in range(count)
    )
    return TraceDiff(made, made[0].key if beyond else None, (), ())


@pytest.mark.parametrize("beyond", [0, 1, reference.SHOWN, reference.SHOWN + 2])
@pytest.mark.parametrize("within", [0, 1, 5])
def test_more_points_are_offered_where_there_are_more(
    beyond: int, within: int, capsys: pytest.CaptureFixture[str]
) -> None:
    reference.show_difference(points(beyond + within, beyond), "R", False)
    out = capsys.readouterr().out
    shown = min(beyond, reference.SHOWN)
    assert ("every point: -v" in out) == (beyond == shown and within > 0)
    assert (f"... {beyond - shown} more beyond" in out) == (beyond > shown)


def test_a_mapped_array_says_how_certain_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        {"name": "x", "shape": [2], "key": "L0.out", "certainty": "measured", "distance": 0.25},
        {"name": "y", "shape": [3], "key": None},
    ]
    dumped_arrays.show_mapping({"names": rows, "file": ""})
    out = capsys.readouterr().out.splitlines()
    mapped = next(line.split() for line in out if line.split()[:1] == ["x"])
    assert mapped[-2:] == ["measured", "0.25"]
