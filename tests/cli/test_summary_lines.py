"""Lines of a summary: what two models are apart, what a conversion takes, whose a heat map is."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.cli import convert_run, render
from aprfmt.cli.eval import output
from tests.cli.run import aprfmt

APART = {"kl": 0.25, "max_kl": 1.5, "top1": 0.5, "correct_change": 0.0, "tokens": 3}
LOSS: dict[str, Any] = {
    "run": {"model": "m", "ran": "numpy:float32 on cpu"}, "loss": 1.0, "perplexity": 2.718281828,
    "loss_tokens": 3, "samples": 1, "uniform_loss": 7.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("against", "says"),
    [
        (None, []),
        ({**LOSS, "divergence": None}, []),
        (
            {**LOSS, "divergence": APART},
            ["  mean KL 0.25 nats per token, max 1.5, same top token 50.00 %"],
        ),
    ],
    ids=["alone", "not measured", "measured"],
)
def test_a_distance_is_said_where_there_is_one(against: Any, says: list[str]) -> None:
    body: Any = LOSS
    lines = [text for text, _ in output.answer(body, None, against)]
    losses = [text for text in lines if text.startswith("  m on numpy:float32 on cpu: 1.000000 ")]
    assert len(losses) == (1 if against is None else 2)
    assert [text for text in lines if text not in losses] == says


@pytest.mark.parametrize(
    ("drafts", "acceptance", "says"),
    [
        (0, 0.0, "draft head not measured: no draft was scored"),
        (8, 0.5, "draft head alive: 50.0 % of 8 drafts accepted"),
        (8, 0.375, "draft head dead: 37.5 % of 8 drafts accepted"),
    ],
)
def test_a_draft_head_is_alive_from_its_least_share_on(
    drafts: int, acceptance: float, says: str
) -> None:
    body: Any = LOSS
    draft: Any = {"drafts": drafts, "acceptance": acceptance, "least": 0.5}
    assert output.answer(body, draft, None)[0] == (says, "")


@pytest.mark.parametrize(
    ("free", "room", "style"),
    [
        (None, "", ""),
        (999, " of 999 B free", "bad"),
        (1000, " of 1.0 kB free", ""),
        (1001, " of 1.0 kB free", ""),
    ],
)
def test_a_disk_is_too_small_only_where_less_is_free_than_needed(
    free: int | None, room: str, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[tuple[str, str]] = []
    monkeypatch.setattr(render, "line", lambda text="", *, style="": lines.append((text, style)))
    for total, write, time in (
        (2.0, 1.0, "about 2.0 s"),
        (None, None, "unknown: nothing can be written there"),
        (None, 1.0, "unknown: the source is cached"),
    ):
        lines.clear()
        seconds = {"total": total, "write": write}
        estimate = {
            "memory_bytes": 2000, "disk_bytes": 1000, "disk_free_bytes": free, "seconds": seconds,
        }  # fmt: skip
        report: Any = SimpleNamespace(estimate=estimate)
        convert_run._print_estimate(report)
        assert lines == [(f"  memory at most 2.0 kB; disk 1.0 kB{room}; time {time}", style)]
    lines.clear()
    nothing: Any = SimpleNamespace(estimate=None)
    convert_run._print_estimate(nothing)
    assert lines == []


def test_columns_of_a_heat_map_are_positions(demo_model: Path, tmp_path: Path) -> None:
    """Where no browser is found, too: the page holds its numbers as JSON.

    A saved trace has the page of the pass that made it, the histograms of its points too.
    """
    page, loaded, saved = (tmp_path / name for name in ("t.html", "again.html", "t.safetensors"))
    ids = "1,2,3,4,5,6,7,8,9"
    points = ("--payload", "--ids", ids, "--points", "out,q")
    assert aprfmt("trace", demo_model, *points, "--save", saved, "--html", page).code == 0
    assert aprfmt("trace", "--load", saved, "--html", loaded).code == 0
    found = []
    for path in (page, loaded):
        held = re.search(r'<script[^>]* id="data"[^>]*>(.*?)</script>', path.read_text(), re.DOTALL)
        assert held is not None
        found.append(json.loads(held[1]))
    assert found[0]["heats"] == found[1]["heats"]
    drawn = [{cell["key"]: cell["histogram"] for cell in one["cells"]} for one in found]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 8 and all(drawn[0].values())
    assert all(sum(one["histogram"]["counts"]) == one["count"] for one in found[0]["cells"])
    (heat,) = (one for one in found[0]["heats"] if one["heats"])
    assert heat["positions"] == [str(i) for i in range(9)]
    assert {one["point"] for one in heat["heats"]} == {"out", "q"}
    assert {len(row) for one in heat["heats"] for row in one["values"]} == {9}
