"""All pages in a real headless browser: one look, readable at 390 and 1280 px, light and dark.

Seen red: text of a contrast below 4.5, a page wider than its window, a part outside it or over
another, a control that Tab does not reach or that shows no focus, a picture in the wrong scheme,
a cell inside its tolerance painted red, a cause said twice, an observation given as the verdict.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from tests.causes.faults import flipped
from tests.cli.browser import Page, browser
from tests.cli.run import aprfmt as command
from tests.compare.damage import patched

WIDTHS, SCHEMES = (390, 1280), ("light", "dark")
pytestmark = pytest.mark.xdist_group("pages")  # one browser, and what it shows is made once
IDS = "1417,362,258,1168,1529,457,72"
NAMES = (
    "inspect",
    "diff",
    "rounding",
    "diagnose",
    "parity",
    "trace",
    "reference",
    "validate",
    "qa",
    "scan",
)
# The model of a page's run, the dtype of its reference's, and the points that both recorded: with
# all of them every operation is taken step by step.
OF = {"reference": ("q4", "float32", ["out"]), "parity": ("clean", "float64", ["all"])}
# Every text with its colour and what lies behind it, colours by the browser's own arithmetic.
CONTRAST = """(() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (text) => {
    if (!known.has(text)) {
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = text;
      context.fillRect(0, 0, 1, 1);
      known.set(text, [...context.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(text);
  };
  const over = ([r, g, b, a], below) => {
    const share = a / 255;
    return [r, g, b].map((c, i) => c * share + below[i] * (1 - share));
  };
  const ground = (node) => {
    if (!node) return [255, 255, 255];
    const own = rgba(getComputedStyle(node).backgroundColor);
    return own[3] === 255 ? own.slice(0, 3) : over(own, ground(node.parentElement));
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => c / 255).map((c) =>
      c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const poor = new Map();
  let seen = 0;
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walk.nextNode(); text; text = walk.nextNode()) {
    const node = text.parentElement;
    if (!text.data.trim() || node.closest("script, [hidden], option") ||
      !node.checkVisibility({ opacityProperty: true })) continue;
    const behind = ground(node), own = over(rgba(getComputedStyle(node).color), behind);
    const [low, high] = [light(own), light(behind)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05);
    seen += 1;
    if (ratio < 4.5) poor.set(`${node.tagName}.${node.className}`, [ratio, text.data.slice(0, 40)]);
  }
  return [seen, [...poor]];
})()"""
# Parts that leave the window, or lie over the one before; text that its own box cuts off; two
# parts that the contents call the same.
LAYOUT = """(() => {
  const wrong = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width) wrong.push("the page is wider than its window");
  const links = [...document.querySelectorAll("#contents a")].map((link) => link.textContent);
  if (new Set(links).size < links.length) wrong.push(`one name for two parts: ${links}`);
  let below = 0;
  for (const part of document.querySelectorAll(".verdict, .part")) {
    if (part.closest("[hidden]")) continue;
    const box = part.getBoundingClientRect(), name = part.id || part.textContent.slice(0, 30);
    if (box.left < 8 || box.right > width - 8) wrong.push(`${name} leaves the window`);
    if (box.top < below) wrong.push(`${name} lies over the part before`);
    if (box.height < 30) wrong.push(`${name} is empty`);
    below = box.bottom;
    for (const node of part.querySelectorAll("h2, h3, p, li, dd, .mark, .bar > *, figcaption")) {
      const at = node.getBoundingClientRect();
      if (at.width && !node.closest(".scroll, .scrollx, [hidden], .treemap") &&
        (at.right > box.right + 0.5 || at.left < box.left - 0.5))
        wrong.push(`${node.textContent.slice(0, 40)} leaves ${name}`);
    }
  }
  return wrong;
})()"""
# A picture's most frequent colour with its share, how many colours there are, and whether the
# outermost columns are of that colour alone below the heading.
PICTURE = """(async () => {
  const bytes = Uint8Array.from(atob(%s), (c) => c.charCodeAt(0));
  const map = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = new OffscreenCanvas(map.width, map.height);
  const context = canvas.getContext("2d");
  context.drawImage(map, 0, 0);
  const { data, width, height } = context.getImageData(0, 0, map.width, map.height);
  const counts = new Map();
  for (let i = 0; i < data.length; i += 4) {
    const key = data[i] << 16 | data[i + 1] << 8 | data[i + 2];
    counts.set(key, (counts.get(key) ?? 0) + 1);
  }
  const [most, count] = [...counts].reduce((a, b) => b[1] > a[1] ? b : a);
  const edge = new Set();
  const top = Math.ceil(document.getElementById("contents").getBoundingClientRect().bottom) + 1;
  for (let y = Math.max(150, top); y < height; y++) for (const x of [0, 1, 2, 3]) {
    const i = 4 * (y * width + x);
    edge.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  }
  return { width, height, most, share: count / (width * height), colours: counts.size,
    edge: edge.size };
})()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A page of each kind, with something wrong where a kind can say so."""
    folder = tmp_path_factory.mktemp("pages")
    clean, broken, q4 = (folder / f"{name}.gguf" for name in ("clean", "broken", "q4"))
    aprfmt.convert(demo_model, clean)
    aprfmt.convert(demo_model, q4, encoding="Q4_K")

    def change(data: dict[str, bytes]) -> None:
        data["blk.3.ffn_up.weight"] = flipped(4321, 6)(data["blk.3.ffn_up.weight"])
        data["blk.1.attn_q.bias"] = np.full(256, np.nan, np.float32).tobytes()

    patched(clean, broken, change)
    runs: Mapping[str, tuple[tuple[object, ...], int]] = {
        "inspect": (("inspect", q4, "--stats"), 0),
        "diff": (("diff", demo_model, broken), 1),
        "rounding": (("diff", demo_model, q4), 1),
        "diagnose": (("diagnose", clean, broken), 1),
        "parity": (("parity", clean, "--between", "numpy:float64", "numpy", "--ids", IDS), 0),
        "trace": (("trace", clean, "--payload", "--ids", IDS), 0),
        "reference": (("trace", q4, "--payload", "--ids", IDS, "--reference", clean), 1),
        "validate": (("validate", broken), 1),
        "qa": (("qa", broken, "--only", "metadata", "--only", "init-statistics"), 1),
        "scan": (("scan", folder, "-o", folder / "rows.jsonl", "--jobs", "2"), 1),
    }
    assert set(runs) == set(NAMES)
    found = {}
    for name, (words, code) in runs.items():
        found[name] = folder / f"{name}.html"
        done = command(*words, "--html", found[name], "--quiet")
        assert done.code == code, (name, done.err)
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_readable(
    tab: Page, pages: Mapping[str, Path], name: str, width: int, scheme: str
) -> None:
    tab.show(width, scheme)
    tab.open(pages[name])
    assert tab.complaints() == [] and tab.requests() == [pages[name].resolve().as_uri()]
    seen, poor = tab.evaluate(CONTRAST)
    assert seen > 20 and poor == []
    assert tab.evaluate(LAYOUT) == []
    found = tab.evaluate(PICTURE % json.dumps(base64_of(tab.picture())))
    assert (found["width"], found["height"]) == (width, 1000)
    light = sum((found["most"] >> shift & 255) for shift in (0, 8, 16)) / (3 * 255)
    assert light > 0.9 if scheme == "light" else light < 0.2
    assert found["share"] > 0.3 and found["colours"] > 20 and found["edge"] == 1


def base64_of(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()


@pytest.mark.parametrize("name", NAMES)
def test_tab_reaches_every_control_and_shows_where_it_is(
    tab: Page, pages: Mapping[str, Path], name: str
) -> None:
    """Tab goes from the skip link through every control that is not one of a group's arrows."""
    tab.show(1280)
    tab.open(pages[name])
    wanted = tab.evaluate(
        "(async () => { let seen = [];"  # until the page has drawn everything
        "while (seen.length < 4 || new Set(seen.slice(-4)).size > 1) {"
        "await new Promise(drawn => requestAnimationFrame(drawn));"
        "const all = [...document.querySelectorAll('a, button, select, input, summary,"
        ' [tabindex="0"]\')].filter(e => e.tabIndex >= 0 && e.checkVisibility());'
        "all.forEach((e, i) => { e.dataset.at = i; }); seen.push(all.length); }"
        "return seen.at(-1); })()"
    )
    assert wanted >= 4
    here = (
        "(() => { const e = document.activeElement, s = getComputedStyle(e);"
        "const shown = s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2;"
        "return [e.dataset.at ?? null, shown, e.checkVisibility()]; })()"
    )
    reached = set()
    for _ in range(min(wanted, 60)):
        tab.press("Tab")
        at, outlined, visible = tab.evaluate(here)
        assert at is not None and outlined and visible, at
        reached.add(at)
    assert reached == {str(i) for i in range(min(wanted, 60))}
    assert tab.complaints() == []


def test_arrows_move_in_a_map_and_a_and_b_stand_side_by_side(
    tab: Page, pages: Mapping[str, Path]
) -> None:
    tab.show(1280)
    tab.open(pages["diff"])
    tab.evaluate("document.querySelector('.map button[data-key=\"L1.attn_q.weight\"]').focus()")
    key = "document.activeElement.dataset.key"
    tab.press("ArrowRight")
    assert tab.evaluate(key) == "L1.attn_q.bias"
    tab.press("ArrowDown")
    assert tab.evaluate(key) == "L2.attn_q.bias"
    tab.press("ArrowLeft")
    tab.press("ArrowUp")
    assert tab.evaluate(key) == "L1.attn_q.weight"
    tip = "document.querySelector('.tip')"
    assert tab.evaluate(f"{tip}.hidden") is False
    cells = tab.evaluate(
        f"[...{tip}.querySelectorAll('.sides tr')].map(r => [...r.children]"
        ".map(c => c.textContent))"
    )
    assert cells[0] == ["", "A", "B"]
    assert ["name", "model.layers.1.self_attn.q_proj.weight", "blk.1.attn_q.weight"] in cells
    tab.press("Escape")
    assert tab.evaluate(f"{tip}.hidden") is True
    tab.press("Enter")
    assert tab.evaluate("document.querySelector('.detail h3').textContent") == "L1.attn_q.weight"
    where = tab.evaluate(
        "(() => { const e = document.querySelector('.map button[data-key=\"L3.ffn_up.weight\"]');"
        "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
        "return [r.x + 5, r.y + 5]; })()"
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=where[0], y=where[1])
    assert "L3.ffn_up.weight" in tab.evaluate(f"{tip}.textContent")


def test_red_is_a_verdict_amber_was_expected_and_distances_have_a_scale(
    tab: Page, pages: Mapping[str, Path]
) -> None:
    classes = (
        "Object.fromEntries([...document.querySelectorAll('.map button')].map(e =>"
        "[e.dataset.key, [e.className, e.style.background]]))"
    )
    tab.open(pages["rounding"])
    cells = tab.evaluate(classes)
    assert {kind for kind, _ in cells.values()} == {"good", "warn"}
    assert all(not painted for _, painted in cells.values())
    assert tab.evaluate("document.querySelector('#verdict').className") == "verdict warn"
    assert tab.evaluate("document.querySelectorAll('.r-bad, .k-bad').length") == 0
    tab.open(pages["diff"])
    cells = tab.evaluate(classes)
    assert cells["L3.ffn_up.weight"][0].split()[:2] == ["bad", "flag"]
    assert cells["L3.ffn_up.weight"][1].startswith("light-dark(rgb(")
    assert cells["L2.ffn_up.weight"] == ["good", ""]
    assert tab.evaluate("document.querySelector('#verdict').className") == "verdict bad"
    tab.open(pages["reference"])  # colours are distances; what is beyond a tolerance has a frame
    assert len({painted for _, painted in tab.evaluate(classes).values()}) > 20


@pytest.mark.parametrize("name", ["trace", "reference", "parity"])
def test_every_token_has_its_number_layer_by_layer(
    tab: Page, pages: Mapping[str, Path], demo_model: Path, name: str
) -> None:
    tab.show(1280)
    tab.open(pages[name])
    data = json.loads(tab.evaluate("document.getElementById('data').textContent"))
    heat = data["heats"][0] if name != "trace" else data["heats"][1]
    assert [len(row) for one in heat["heats"] for row in one["values"]] == [7] * sum(
        len(one["rows"]) for one in heat["heats"]
    )
    assert heat["positions"] == [str(i) for i in range(7)]
    out = next(one for one in heat["heats"] if one["point"] == "out")
    assert out["rows"] == ["L0", "L1", "L2", "L3"]
    if name == "trace":
        ids = [int(i) for i in IDS.split(",")]
        found = aprfmt.trace(demo_model, ids=ids, points=["out"]).recorded_values("L2.out")
        assert found is not None
        expected = np.sqrt(np.mean(np.float64(found) ** 2, axis=1))
        assert out["values"][2] == pytest.approx(list(expected), rel=1e-3)
    else:  # relative L2 of each token's row against the reference's, by numpy alone
        mine, dtype, points = OF[name]
        ids = [int(i) for i in IDS.split(",")]
        folder = pages[name].parent
        a = aprfmt.trace(folder / f"{mine}.gguf", ids=ids, points=points)
        b = aprfmt.trace(folder / "clean.gguf", ids=ids, points=points, dtype=dtype)
        for layer, row in enumerate(out["values"]):
            x, y = (np.float64(side.recorded_values(f"L{layer}.out")) for side in (a, b))
            apart = np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)
            assert row == pytest.approx(list(apart), rel=1e-3)
    sizes = tab.evaluate(
        "[...document.querySelectorAll('.heat canvas')].map(c => [c.width, c.height])"
    )
    assert [7, 4] in sizes
    box = "document.querySelector('.heat canvas')"
    tab.evaluate(f"{box}.focus()")
    tab.press("ArrowRight")
    tab.press("ArrowDown")
    shown = tab.evaluate("document.querySelector('.heat [aria-live]').textContent")
    value = out["values"][1][1]
    assert shown.startswith("L1, position 1: ")
    assert math.isclose(float(shown.split(": ")[1].split(" ")[0]), value, rel_tol=1e-3)


def test_the_checks_of_a_page_are_those_of_the_command(
    tab: Page, pages: Mapping[str, Path]
) -> None:
    marks = (
        "Object.fromEntries([...document.querySelectorAll('.checks li')].map(e =>"
        "[e.dataset.check, e.querySelector('.mark').textContent]))"
    )
    broken = pages["validate"].parent / "broken.gguf"
    for name, words, rows in (
        ("validate", (), "checks"),
        ("qa", ("--only", "metadata", "--only", "init-statistics"), "gates"),
    ):
        body: Any = command(name, broken, *words, "--json").json
        tab.open(pages[name])
        first = "document.querySelector('.checks li > .mark').textContent"
        assert tab.evaluate(first) == "FAIL"  # those that failed come first
        expected = {row["name"]: row["outcome"].replace("_", "-") for row in body[rows]}
        assert tab.evaluate(marks) == expected and "FAIL" in expected.values()
        assert tab.evaluate("document.querySelector('#verdict').className") == "verdict bad"
        # What does not apply is folded away, and one click shows it.
        seen = (
            "[...document.querySelectorAll('.checks li > .mark')].filter(e =>"
            "e.checkVisibility({contentVisibilityAuto: true})).map(e => e.textContent)"
        )
        assert "NOT-RUN" in expected.values() and "NOT-RUN" not in tab.evaluate(seen)
        tab.click(".folded > summary")
        assert tab.evaluate(seen).count("NOT-RUN") == list(expected.values()).count("NOT-RUN")
    tab.click(".toggle:nth-child(1)")  # without those that failed
    hidden = "[...document.querySelectorAll('.checks li[hidden] > .mark')].map(e => e.textContent)"
    assert set(tab.evaluate(hidden)) == {"FAIL"}
    assert tab.complaints() == []


@pytest.mark.parametrize("ramp", ["amount", "tolerance", "beyond"])
def test_the_least_is_nearest_to_the_ground(
    tab: Page, pages: Mapping[str, Path], ramp: str
) -> None:
    """On a light page more is darker all the way, on a dark page brighter."""
    tab.open(pages["parity"])
    for scheme, sign in (("light", -1), ("dark", 1)):
        colours = tab.evaluate(
            f"[...Array(201)].map((_, i) => colour(i / 200, {ramp!r}, {scheme!r}))"
        )
        linear = np.where(
            (c := np.array(colours) / 255) <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4
        )
        light = linear @ np.array([0.2126, 0.7152, 0.0722])
        steps = sign * np.diff(light)
        assert steps.min() >= -1e-3 and steps.sum() > 0.5, (scheme, steps.min())
        assert light[0] > 0.6 if scheme == "light" else light[0] < 0.15


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("times", [0.0, 1e-6, 1e-3, 1 / 7, 0.999, 1.001, 7.0, 1e3, 1e9])
def test_colours_mean_tolerance(
    tab: Page, pages: Mapping[str, Path], tmp_path: Path, times: float, scheme: str
) -> None:
    """A run inside its bound is pale whatever else the map holds; red is beyond it."""
    from aprfmt.cli.parity.page import render_page

    tab.open(pages["parity"])
    body = json.loads(tab.evaluate("JSON.stringify(data.found)"))
    (pair,) = body["pairs"]
    one = next(row for row in pair["points"] if row["key"] == "L2.out")
    other = next(row for row in pair["points"] if row["key"] == "L3.out")
    other |= {"rel_l2": other["tolerance"] * 1e-9, "by_position": None}  # nearly equal
    one["rel_l2"] = one["tolerance"] * times
    one["by_position"] = [one["rel_l2"]] * 7
    one["beyond"] = times > 1
    page = tmp_path / "p.html"
    page.write_text(render_page(body))
    tab.show(1280, scheme)
    tab.open(page)
    button = "document.querySelector('.map button[data-key=\"L2.out\"]')"
    assert tab.evaluate(f"{button}.classList.contains('flag')") is one["beyond"]
    painted = tab.evaluate(f"getComputedStyle({button}).backgroundColor")
    red, green, blue = (int(part) for part in re.findall(r"\d+", painted)[:3])
    panel = re.findall(r"\d+", tab.evaluate(
        "getComputedStyle(document.querySelector('.part')).backgroundColor"))  # fmt: skip
    away = max(abs(int(a) - b) for a, b in zip(panel, (red, green, blue), strict=True))
    if times > 1:
        assert red > green + 30 and red > blue + 30 and away > 40
    else:
        assert green >= red and away <= 60
    pixel = tab.evaluate(
        "[...document.querySelector('.heat canvas').getContext('2d').getImageData(3, 2, 1, 1).data]"
    )
    assert tab.evaluate("document.querySelector('.heat select').selectedOptions[0].text") == "out"
    assert pixel[:3] == [red, green, blue] if times else pixel[3] == 0
    assert tab.complaints() == []


BOX = (
    "Object.fromEntries([...document.querySelectorAll('#verdict .facts tr')].map(e =>"
    "[e.cells[0].textContent, e.cells[1].textContent]))"
)
COMMANDS = "[...document.querySelectorAll('#verdict .command code')].map(e => e.textContent)"


@pytest.mark.parametrize("name", ["diff", "diagnose", "validate", "qa", "reference"])
def test_the_verdict_has_the_cause_the_place_and_the_command_and_nothing_twice(
    tab: Page, pages: Mapping[str, Path], name: str
) -> None:
    tab.show(1280, "light")
    tab.open(pages[name])
    rows, commands = tab.evaluate(BOX), tab.evaluate(COMMANDS)
    assert {"place"} <= set(rows) and ("cause" in rows) == (name != "reference")
    place = {"reference": "embd", "qa": "4 tensors", "validate": "blk.1.attn_q.bias"}
    assert place.get(name, "L1.attn_q.bias") in rows["place"]
    assert bool(commands) == (name not in ("validate", "qa")) or "to do" in rows
    assert all(command.startswith("aprfmt ") for command in commands)
    # Lines of the page outside the tables of everything, which hold the record.
    lines = tab.evaluate(
        "[...document.querySelectorAll('#verdict td, #verdict code, #verdict .says, #facts td,"
        " #chain li > span:first-child, #chain .lines li, .checks .line > span')]"
        ".map(e => e.textContent.trim())"
    )
    said = [text for text in (rows.get("cause"), *commands) if text]
    for text in said:
        assert sum(text in line for line in lines) == 1, text
    assert len(set(lines)) > len(said)


def test_a_command_is_copied_with_and_without_a_clipboard(
    tab: Page, pages: Mapping[str, Path]
) -> None:
    tab.open(pages["diagnose"])
    (command, *_) = tab.evaluate(COMMANDS)
    took = "navigator.clipboard.writeText = async (text) => { window.took = text; }"
    refuses = "navigator.clipboard.writeText = async () => { throw new Error('no'); }"
    asked = (
        "document.execCommand = (what) => {"
        "window.took = what === 'copy' ? document.activeElement.value : null; return true; }"
    )
    for way in (took, f"{refuses}; {asked}"):
        tab.open(pages["diagnose"])
        tab.evaluate(f"{way}; 0")
        tab.click("#verdict .command button")
        done = (
            "(async () => { while (document.querySelector('#verdict .command button')"
            ".textContent !== 'copied') await new Promise((f) => setTimeout(f, 5));"
            "return window.took; })()"
        )
        assert tab.evaluate(done) == command
        assert tab.evaluate("document.querySelectorAll('textarea').length") == 0
    assert tab.complaints() == []


def test_observations_of_a_trace_are_no_verdict(
    tab: Page, pages: Mapping[str, Path], tmp_path: Path
) -> None:
    text = pages["trace"].read_text()
    assert text.count('"observations":[') == 1
    said = "L2.out: 40 times the spread of the layer before"
    start = text.index('"observations":[') + len('"observations":[')
    end = text.index("]", start)
    page = tmp_path / "p.html"
    page.write_text(f"{text[:start]}{json.dumps(said)}{text[end:]}")
    tab.open(page)
    assert tab.evaluate("document.querySelector('#verdict').className") == "verdict"
    verdict = tab.evaluate("document.querySelector('#verdict').textContent")
    assert said not in verdict and "no verdict" in verdict and "Top tokens" not in verdict
    notes = "document.querySelector('#notes').textContent"
    assert said in tab.evaluate(notes) and "Top tokens" in tab.evaluate(notes)


def test_rows_that_do_not_apply_are_folded_away(
    tab: Page, pages: Mapping[str, Path], tmp_path: Path
) -> None:
    from aprfmt.cli.parity.page import render_page

    tab.open(pages["parity"])
    body = json.loads(tab.evaluate("JSON.stringify(data.found)"))
    points = body["pairs"][0]["points"]
    for row in points[3:8]:
        row |= {"rel_l2": None, "max_abs_diff": None, "why": "only in A", "by_position": None}
    page = tmp_path / "p.html"
    page.write_text(render_page(body))
    tab.open(page)
    table = "[...document.querySelectorAll('#tables section')].at(-1)"
    rows = f"[...{table}.querySelectorAll('tbody tr:not(.more) td:first-child')]"
    keys = f"{rows}.map(e => e.textContent)"
    gone = {row["key"] for row in points[3:8]}
    assert tab.evaluate(keys) == [row["key"] for row in points if row["key"] not in gone]
    tab.evaluate(f"{table}.querySelector('tr.more button').click()")
    assert tab.evaluate(keys) == [row["key"] for row in points]
    assert tab.complaints() == []


def test_light_and_dark_can_be_switched(tab: Page, pages: Mapping[str, Path]) -> None:
    tab.show(1280, "dark")
    tab.open(pages["validate"])
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = tab.evaluate(ground)
    assert tab.evaluate("document.getElementById('scheme').textContent") == "Light"
    tab.click("#scheme")
    assert tab.evaluate(ground) != dark
    assert tab.evaluate("document.getElementById('scheme').textContent") == "Dark"
    assert tab.evaluate(CONTRAST)[1] == []
    tab.open(pages["parity"])  # what is drawn on a canvas changes too
    pixel = (
        "[...document.querySelector('.heat canvas').getContext('2d').getImageData(3, 2, 1, 1).data]"
    )
    before = tab.evaluate(pixel)
    tab.click("#scheme")
    after = tab.evaluate(pixel)
    assert sum(before[:3]) < 300 < 600 < sum(after[:3])


def test_a_page_is_refused_before_the_work(demo_model: Path, tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    page.write_text("mine")
    for words in (("validate", demo_model), ("qa", demo_model, "--only", "metadata")):
        done = command(*words, "--html", page)
        assert done.code == 2 and "p.html" in done.err and not done.out
        assert page.read_text() == "mine"
    done = command("validate", demo_model, "--html", page, "--force", "--json")
    assert done.code == 0 and done.json["html"] == str(page)
