"""The page of ten thousand models shows a part, sorts all, and finds any of them."""

from pathlib import Path

from aprfmt.cli.scan import render_page
from aprfmt.fleet.run import ScanReport
from tests.cli.browser import browser

MANY = 10_000


def report() -> ScanReport:
    models = [
        {
            "model": f"<b>m{number}</b>",
            "bytes": number,
            "places": 1,
            "format": "gguf",
            "architecture": "llama",
            "level": "full",
            "encodings": {"F32": number},
            "PASS": 9,
            "FAIL": number % 2,
            "NOT_RUN": 0,
            "ERROR": 0,
        }
        for number in range(MANY)
    ]
    damage = [
        {
            "model": row["model"],
            "check": "values",
            "outcome": "FAIL",
            "found": "1 NaN",
            "findings": [],
        }
        for row in models
        if row["FAIL"]
    ]
    found = {
        "counts": {"PASS": 9 * MANY, "FAIL": MANY // 2, "NOT_RUN": 0, "ERROR": 0},
        "models": models, "damage": damage, "families": [], "templates": [],
        "faults": [{"check": "values", "outcome": "FAIL", "models": MANY // 2}],
        "copies": {"tensors": 0, "bytes": 0, "groups": []},
    }  # fmt: skip
    return ScanReport(Path("rows.jsonl"), 10 * MANY, 0, 0, 1.0, found)


def test_ten_thousand_models_are_sorted_and_found(tmp_path: Path) -> None:
    page = tmp_path / "scan.html"
    page.write_text(render_page(report(), "FAIL"))
    last = "[...document.querySelectorAll('.part')].find(e => e.textContent.startsWith('Models'))"
    body = f"[...{last}.querySelectorAll('tbody tr')].map(e => e.cells[0].textContent)"
    with browser(tmp_path / "profile") as tab:
        tab.open(page)
        assert len(tab.evaluate("[...document.querySelectorAll('tbody tr')]")) < 1500
        shown = tab.evaluate(body)
        assert shown[0] == "<b>m0</b>" and shown[-1] == f"show all {MANY} rows"
        heads = f"[...{last}.querySelectorAll('th button')]"
        for _ in range(2):
            tab.evaluate(f"{heads}.find(e => e.textContent.startsWith('bytes')).click()")
        assert tab.evaluate(body)[0] == f"<b>m{MANY - 1}</b>"
        tab.evaluate(f"{last}.querySelector('input').value = 'm4321<'")
        tab.evaluate(f"{last}.querySelector('input').dispatchEvent(new Event('input'))")
        assert tab.evaluate(body) == ["<b>m4321</b>"]
        assert tab.evaluate(f"{last}.querySelector('.bar').textContent").endswith("1 of 10000")
        assert tab.complaints() == []
