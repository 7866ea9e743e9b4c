"""The page of `trace --html` in a real headless browser, and what its markup promises.

Seen red: a file's text written as markup, a script error, a histogram that is not the values'.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.cli.histograms import BINS, histogram
from aprfmt.cli.html_page import render_html, script_json
from tests.cli.browser import Page, browser
from tests.cli.run import aprfmt

NASTY = 'It </script><script>window.evil=1</script><img src="http://x.test/a" onerror="evil()">'
TEXT = "document.querySelector({!r}).textContent"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def made(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A page with a nasty prompt, and the JSON of the same run."""
    path = tmp_path_factory.mktemp("page") / "trace.html"
    done = aprfmt("trace", demo_model, "--payload", "--prompt", NASTY, "--html", path, "--json")
    assert done.code == 0 and done.json["html"] == str(path)
    return path, done.json


def held(page: str) -> Any:
    """Return the data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    return json.loads(found[1])


def test_the_page_loads_nothing_and_complains_of_nothing(tab: Page, made: tuple[Path, Any]) -> None:
    tab.open(made[0])
    assert tab.requests() == [made[0].resolve().as_uri()]
    assert tab.complaints() == []
    assert tab.evaluate("typeof window.evil") == "undefined"
    assert tab.evaluate("document.images.length") == 0
    shown = tab.evaluate("[...document.querySelectorAll('.facts td')].map(e => e.textContent)")
    assert NASTY in shown


def test_every_record_has_its_cell_and_its_row(tab: Page, made: tuple[Path, Any]) -> None:
    tab.open(made[0])
    keys = tab.evaluate("[...document.querySelectorAll('#map button')].map(e => e.dataset.key)")
    assert sorted(keys) == sorted(record["key"] for record in made[1]["records"])
    assert tab.evaluate("document.querySelectorAll('#rows tbody tr').length") == len(keys)
    std = {record["key"]: record["stats"]["std"] for record in made[1]["records"]}
    cell = "#map button[data-key='L2.ffn_mul']"
    assert float(tab.evaluate(TEXT.format(cell))) == pytest.approx(std["L2.ffn_mul"], rel=1e-3)
    assert tab.evaluate(f"document.querySelector({cell!r}).style.background").startswith(
        "light-dark("
    )


def test_a_click_shows_the_histogram_of_the_cell(tab: Page, made: tuple[Path, Any]) -> None:
    tab.open(made[0])
    assert tab.evaluate("document.querySelectorAll('#cell rect').length") == 0
    tab.click("#map button[data-key='L1.attn_out']")
    assert tab.evaluate(TEXT.format("#key")).startswith("L1.attn_out")
    assert tab.evaluate("document.querySelectorAll('#cell rect').length") == BINS
    found = next(c for c in held(made[0].read_text())["cells"] if c["key"] == "L1.attn_out")
    titles = tab.evaluate(
        "[...document.querySelectorAll('#cell rect title')].map(e=>e.textContent)"
    )
    assert [int(text.split()[0]) for text in titles] == found["histogram"]["counts"]
    assert sum(found["histogram"]["counts"]) == found["count"]
    tab.click("#map button[data-key='logits']")
    assert tab.evaluate(TEXT.format("#key")).startswith("logits")
    assert tab.complaints() == []


def test_the_statistic_and_the_order_can_be_chosen(tab: Page, made: tuple[Path, Any]) -> None:
    tab.open(made[0])
    tab.evaluate(
        "(() => { const s = document.getElementById('stat'); s.value = 'count' in {} ? '' "
        ": 'max'; s.dispatchEvent(new Event('change')); })()"
    )
    largest = {record["key"]: record["stats"]["max"] for record in made[1]["records"]}
    shown = float(tab.evaluate(TEXT.format("#map button[data-key='L3.out']")))
    assert shown == pytest.approx(largest["L3.out"], rel=1e-3)
    heading = "#rows th:nth-child(4) button"  # std
    values = "[...document.querySelectorAll('#rows td:nth-child(4)')].map(e => +e.textContent)"
    for down in (False, True):
        tab.click(heading)
        column = tab.evaluate(values)
        assert column == sorted(column, reverse=down)
    assert tab.complaints() == []


def test_relative_distance_is_shown_against_a_reference(
    tab: Page, demo_model: Path, tmp_path: Path
) -> None:
    import shutil

    other = tmp_path / "eps"
    shutil.copytree(demo_model, other, ignore=shutil.ignore_patterns("__*"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.01}))
    saved, path = [tmp_path / name for name in ("a.safetensors", "p.html")]
    options = ("--payload", "--ids", "1,2,3")
    aprfmt("trace", demo_model, *options, "--save", saved)
    done = aprfmt("trace", other, *options, "--reference", saved, "--html", path, "--json")
    assert done.code == 1
    rel = {point["key"]: point["rel_l2"] for point in done.json["reference"]["points"]}
    tab.open(path)
    assert tab.complaints() == []
    assert tab.evaluate("document.getElementById('stat').value") == "relL2"
    shown = tab.evaluate(TEXT.format("#map button[data-key='L0.attn_norm']"))
    assert float(shown) == pytest.approx(rel["L0.attn_norm"], rel=1e-3)
    assert tab.evaluate("document.querySelectorAll('#map button.flag').length") == sum(
        point["beyond"] for point in done.json["reference"]["points"]
    )
    assert "First point beyond tolerance: L0.attn_norm" in tab.evaluate(TEXT.format("#verdict"))
    assert tab.evaluate(TEXT.format("#key")).startswith("L0.attn_norm")  # chosen from the start
    loaded = tmp_path / "loaded.html"
    assert aprfmt("trace", "--load", saved, "--reference", saved, "--html", loaded).code == 0
    again = held(loaded.read_text())["cells"]
    assert [cell["rel"] for cell in again] == [0.0] * len(again)
    assert all(cell["histogram"] for cell in again)


def test_text_of_a_file_is_escaped_everywhere() -> None:
    text = render_html(NASTY, {NASTY: NASTY}, {"a": NASTY, "n": float("nan")}, ())
    assert NASTY not in text and text.count("<script") == text.count("</script>") == 2
    assert "<img" not in text and "http" not in re.sub(r"http-equiv|http:\\?/\\?/x\.test", "", text)
    assert held(text) == {"facts": [[NASTY, NASTY]], "a": NASTY, "n": "NaN"}
    assert script_json("<!--</SCRIPT>&") == "\\u003c!--\\u003c/SCRIPT\\u003e\\u0026"
    raw = "\x1b[2J\u202e\n$title ${data}"
    text = render_html(raw, {}, {raw: [{"b": raw}]}, ())
    shown = "\\x1b[2J\\u202e\\n$title ${data}"
    assert held(text) == {"facts": [], shown: [{"b": shown}]}
    assert f"<h1>{shown}</h1>" in text and text.isascii()


def test_facts_that_say_nothing_are_left_out() -> None:
    found = held(render_html("t", {"a": None, "b": "", "c": [], "d": 0, "e": False}, {}, ()))
    assert found == {"facts": [["d", "0"], ["e", "False"]]}


def test_numbers_are_written_as_the_command_prints_them(tab: Page, made: tuple[Path, Any]) -> None:
    """Powers of two have few digits: their exact halves are where roundings part."""
    tab.open(made[0])
    random = np.random.default_rng(0)
    values = [s * 2.0**e * m for s in (1, -1) for e in range(-30, 31) for m in (1, 3, 5, 7)]
    values += [0.0, -0.0, 1e-5, 9.9999e-5, 0.99995, 99999.0, 1e300, 5e-324, 2.675, 123456.5]
    values += list(random.standard_normal(200) * 10.0 ** random.integers(-12, 12, 200))
    for digits in (2, 3, 4, 6):
        written = tab.evaluate(f"{json.dumps(values)}.map((v) => general(v, {digits}))")
        assert written == [f"{value:.{digits}g}" for value in values]
    values = [value for value in values if 1e-9 < abs(value) < 1e12]
    for digits in (1, 3, 9):
        written = tab.evaluate(f"{json.dumps(values)}.map((v) => fixed(v, {digits}))")
        assert written == [f"{value:.{digits}f}" for value in values]
    wild = '["Infinity", "-Infinity", "NaN", null].map((v) => [general(v, 4), fixed(v, 4)].join())'
    assert tab.evaluate(wild) == ["inf,inf", "-inf,-inf", "nan,nan", "-,-"]


def test_histograms_count_every_finite_value() -> None:
    values = np.random.default_rng(0).standard_normal(600_000).astype(np.float32)
    values[:3] = np.nan, np.inf, -np.inf
    found = histogram(values)
    expected, edges = np.histogram(values[3:].astype(np.float64), BINS)
    assert found is not None and sum(found["counts"]) == values.size - 3
    assert np.abs(np.array(found["counts"]) - expected).max() <= 2  # values on an edge
    assert (found["low"], found["high"]) == (edges[0], edges[-1])
    assert histogram(np.full(3, np.nan)) is None
    assert histogram(np.zeros(4)) == {"low": 0.0, "high": 0.0, "counts": [4]}
    wide = histogram(np.array([-3e38, 3e38], np.float32))
    assert wide is not None and wide["counts"][0] == wide["counts"][-1] == 1
