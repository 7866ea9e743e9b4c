"""`trace --reference`: the verdict, then the points beyond tolerance; the rest behind -v.

Seen red: every point of every layer printed before the verdict.
"""

import json
import shutil
from pathlib import Path

import pytest

from aprfmt.cli.trace.reference import SHOWN
from tests.cli.run import aprfmt

IDS = ("--payload", "--ids", "5,80,300,41")


@pytest.fixture(scope="module")
def other(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with another rotary base: wrong from L0.q_rope on."""
    folder = tmp_path_factory.mktemp("against") / "other"
    shutil.copytree(demo_model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_only_what_is_beyond_is_listed(demo_model: Path, other: Path) -> None:
    args = ("trace", other, *IDS, "--points", "all", "--reference", demo_model)
    done, points = aprfmt(*args), aprfmt(*args, "--json").json["reference"]["points"]
    lines = done.out.splitlines()
    at = lines.index(f"against {demo_model}")
    beyond = [point["key"] for point in points if point["beyond"]]
    assert done.code == 1 and beyond[0] == "L0.q_rope" and len(beyond) > 12
    assert lines[at + 1] == (
        f"first point beyond tolerance: L0.q_rope; {len(beyond)} of {len(points)} points beyond"
    )
    rows = [line.split()[0] for line in lines[at + 3 : at + 3 + SHOWN]]
    assert rows == beyond[:SHOWN] and len(lines) <= 12
    assert f"... {len(beyond) - SHOWN} more beyond (-v)" in lines
    assert not any(line.startswith("L0 ") for line in lines)  # no statistics
    shown = aprfmt(*args, "-v").out.splitlines()
    at = shown.index(f"against {demo_model}")
    assert [line.split()[0] for line in shown[at + 3 : at + 3 + len(points)]] == [
        point["key"] for point in points
    ]
    assert any(line.startswith("L0 ") for line in shown)


def test_a_trace_within_tolerance_is_one_line_of_answer(demo_model: Path) -> None:
    done = aprfmt(
        "trace", demo_model, *IDS, "--layers", "0", "--reference", f"{demo_model}@numpy:float64"
    )
    lines = done.out.splitlines()
    at = lines.index(f"against {demo_model}@numpy:float64")
    assert done.code == 0 and len(lines) == at + 3
    assert "points within tolerance; nearest to its tolerance: " in lines[at + 1]
    assert lines[at + 2] == "every point: -v"
