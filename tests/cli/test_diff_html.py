"""The pages of `diff`, `diagnose` and `parity` in a real headless browser.

Seen red: a file's text written as markup, a cell that shows another tensor's evidence, an image
whose cells are not the tensor's, a map without the first point.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.base.encodings import find_encoding
from aprfmt.measure.difference_image import make_image
from tests.causes.faults import flipped
from tests.cli.browser import Page, browser
from tests.cli.run import aprfmt as command
from tests.compare.damage import patched
from tests.conversion.folders import write_mixed

NASTY = 'x</script><script>window.evil=1</script><img src="http:x" onerror="window.evil=1">'
TEXT = "document.querySelector({!r}).textContent"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def embedded(path: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
    assert found is not None
    return json.loads(found[1])


@pytest.fixture(scope="module")
def broken(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The page of the demo model against a GGUF with two faults, and the JSON of the same run."""
    folder = tmp_path_factory.mktemp("diff")
    aprfmt.convert(demo_model, folder / "clean.gguf")

    def change(data: dict[str, bytes]) -> None:
        up, q = "blk.3.ffn_up.weight", "blk.0.attn_q.weight"
        data[up] = flipped(4321, 6)(data[up])
        heads = np.frombuffer(data[q], np.uint8).reshape(4, -1)
        data[q] = heads[[1, 0, 2, 3]].tobytes()

    patched(folder / "clean.gguf", folder / "broken.gguf", change)
    page = folder / "diff.html"
    done = command("diff", demo_model, folder / "broken.gguf", "--html", page, "--json")
    assert done.code == 1 and done.json["html"] == str(page)
    fits(done.json, "diff")
    return page, done.json


def test_the_page_loads_nothing_and_complains_of_nothing(
    tab: Page, broken: tuple[Path, Any]
) -> None:
    tab.open(broken[0])
    assert tab.requests() == [broken[0].resolve().as_uri()]
    assert tab.complaints() == []
    said = tab.evaluate(TEXT.format("#verdict"))
    assert said.startswith("Different - ") and "50 tensors" in said
    chain = tab.evaluate("[...document.querySelectorAll('#chain > li')].map(e => e.textContent)")
    assert len(chain) == 2
    assert any("head_order" in text and "confirmed" in text for text in chain)
    assert any("bit 14 of the BF16 value at [8, 112]" in text for text in chain)


def test_every_tensor_has_a_cell_and_a_click_tells_its_own_story(
    tab: Page, broken: tuple[Path, Any]
) -> None:
    tab.open(broken[0])
    keys = tab.evaluate("[...document.querySelectorAll('.map button')].map(e => e.dataset.key)")
    assert sorted(keys) == sorted(row["key"] for row in broken[1]["tensors"])
    kinds = tab.evaluate("[...document.querySelectorAll('.map button.bad')].map(e=>e.dataset.key)")
    assert sorted(kinds) == ["L0.attn_q.weight", "L3.ffn_up.weight"]
    for row in broken[1]["tensors"]:
        if row["key"] not in ("L0.attn_q.weight", "L1.ffn_up.weight"):
            continue
        tab.click(f".map button[data-key='{row['key']}']")
        assert tab.evaluate(TEXT.format(".detail h3")) == row["key"]
        detail = tab.evaluate(TEXT.format(".detail"))
        assert row["verdict"] in detail and row["name_b"] in detail
        assert ("1, 0, 2, 3" in detail) == (row["key"] == "L0.attn_q.weight")
    assert tab.complaints() == []


def test_the_image_has_the_tensors_cells_and_reads_them(
    tab: Page, broken: tuple[Path, Any]
) -> None:
    tab.open(broken[0])
    names = tab.evaluate("[...document.querySelectorAll('#which option')].map(e => e.textContent)")
    assert names[0] == "L3.ffn_up.weight" and "L0.attn_q.weight" in names
    assert tab.evaluate("document.getElementById('imagebox').hidden") is False
    pixels = (
        "(() => { const c = document.getElementById('image');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "const f = []; for (let i = 3; i < d.length; i += 4) if (d[i]) f.push((i - 3) / 4);"
        "return [c.width, c.height, f]; })()"
    )
    width, height, painted = tab.evaluate(pixels)
    found = embedded(broken[0])["images"][0]
    assert (height, width) == (len(found["cells"]), len(found["cells"][0]))
    expected = [i for i, value in enumerate(np.ravel(found["cells"])) if value]
    assert painted == expected and len(painted) == 1
    at = divmod(painted[0], width)
    assert at == (8 // found["height"], 112 // found["width"])
    where = tab.evaluate(
        "(() => { const e = document.getElementById('image'); e.scrollIntoView({block: 'center'});"
        "const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; })()"
    )
    x = where[0] + (at[1] + 0.5) * where[2] / width
    y = where[1] + (at[0] + 0.5) * where[3] / height
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    said = tab.evaluate(TEXT.format("#readout"))
    assert said.startswith("rows 8-15, columns 111-113: ") and "equal" not in said
    shown = tab.evaluate("[...document.querySelectorAll('#readout td')].map(e => +e.textContent)")
    row, column = at
    assert shown == pytest.approx([found["a"][row][column], found["b"][row][column]], rel=1e-3)
    marks = "[...document.querySelectorAll('#triple .cursor')].filter(e => !e.hidden).length"
    assert tab.evaluate(marks) == 3
    tab.click(".map button[data-key='L0.attn_q.weight']")
    assert tab.evaluate("document.getElementById('which').selectedOptions[0].textContent") == (
        "L0.attn_q.weight"
    )
    _, rows, painted = tab.evaluate(pixels)
    assert max(painted) < len(painted) + 1 and len(painted) * 2 <= rows * width
    assert tab.complaints() == []


def test_the_table_sorts_and_filters(tab: Page, broken: tuple[Path, Any]) -> None:
    tab.open(broken[0])
    rows = "[...document.querySelectorAll('#table0 tbody tr')]"
    assert tab.evaluate(f"{rows}.length") == len(broken[1]["tensors"])
    heads = tab.evaluate("[...document.querySelectorAll('#table0 th')].map(e => e.textContent)")
    column = heads.index("relL2") + 1
    values = f"{rows}.map(e => e.children[{column - 1}].textContent).filter(t => t !== '-')"
    for down in (False, True):
        tab.click(f"#table0 th:nth-child({column}) button")
        found = [float(text) for text in tab.evaluate(values)]
        assert found == sorted(found, reverse=down) and len(found) > 2
    tab.evaluate(
        "(() => { const e = document.querySelector('#table0 input'); e.value = 'L2.attn';"
        "e.dispatchEvent(new Event('input')); })()"
    )
    picked = tab.evaluate(f"{rows}.map(e => e.children[1].textContent)")
    assert picked and all(name.startswith("L2.attn") for name in picked)
    assert tab.complaints() == []


def test_a_files_own_text_is_text(tab: Page, tmp_path: Path) -> None:
    """Names and paths out of files reach the page as text, nothing of them as markup."""
    sides = []
    for label, value in (("a", 1.0), (NASTY.replace("/", "_"), 2.0)):
        folder = tmp_path / label
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "no_such_model"}')
        raw = (value * np.arange(64, dtype=np.float32)).tobytes()
        write_mixed(folder / "model.safetensors", {NASTY: ("F32", (8, 8), raw)})
        sides.append(folder)
    page = tmp_path / "p.html"
    done = command("diff", *sides, "--html", page)
    assert done.code == 1
    tab.open(page)
    assert tab.complaints() == []
    assert tab.evaluate("typeof window.evil") == "undefined"
    assert tab.evaluate("document.images.length") == 0
    assert tab.evaluate(TEXT.format(".detail h3")) == NASTY
    assert NASTY.replace("/", "_") in tab.evaluate("document.body.textContent")
    assert page.read_text().count("<script") == 2


def test_equal_models_say_so_and_a_page_is_not_overwritten(
    tab: Page, demo_model: Path, tmp_path: Path
) -> None:
    page = tmp_path / "p.html"
    assert command("diff", demo_model, demo_model, "--html", page).code == 0
    tab.open(page)
    assert tab.evaluate(TEXT.format("#verdict")).startswith("Equal. 50 tensors")
    assert tab.evaluate("document.getElementById('imagebox').hidden") is True
    assert tab.evaluate("document.getElementById('chainbox').hidden") is True
    assert tab.complaints() == []
    again = command("diff", demo_model, demo_model, "--html", page)
    assert again.code == 2 and "p.html" in again.err
    assert command("diff", demo_model, demo_model, "--html", page, "--force").code == 0


def test_image_cells_are_the_blocks_of_the_tensor(demo_model: Path, tmp_path: Path) -> None:
    aprfmt.convert(demo_model, tmp_path / "q.gguf", encoding="Q8_0")
    with aprfmt.open(demo_model) as a, aprfmt.open(tmp_path / "q.gguf") as b:
        for key in ("L1.ffn_down.weight", "L0.attn_q.bias", "token_embd.weight"):
            image = make_image(a.roles[key], b.roles[key], key)
            assert image is not None
            x, y = (np.asarray(m.roles[key].numpy(), np.float64) for m in (a, b))
            norm = float(np.sqrt(np.mean(x * x)))
            x, y = (np.resize(v, (image.rows, image.columns)) for v in (x, y))
            delta = (x - y) ** 2
            for i, row in enumerate(image.cells):
                for j, cell in enumerate(row):
                    part = delta[
                        i * image.height : (i + 1) * image.height,
                        j * image.width : (j + 1) * image.width,
                    ]
                    if part.size != image.height * image.width:
                        continue  # an edge, padded
                    assert cell == pytest.approx(float(np.sqrt(part.mean())) / norm, abs=1e-12)
                    for grid, side in ((image.a, x), (image.b, y)):
                        own = side[
                            i * image.height : (i + 1) * image.height,
                            j * image.width : (j + 1) * image.width,
                        ]
                        assert grid[i][j] == pytest.approx(float(np.sqrt((own**2).mean())))
            if key == "L1.ffn_down.weight":
                assert 32 % image.width == 0  # blocks of Q8_0
        key = "L1.ffn_down.weight"
        assert make_image(a.roles[key], b.roles["L1.ffn_up.weight"], key) is None


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_a_cell_holds_whole_blocks_or_shares_one_evenly(
    demo_model: Path, tmp_path: Path, kind: str
) -> None:
    """A [128, 256] tensor in blocks of 256 is no column of cells: as many across as there fit."""
    aprfmt.convert(demo_model, tmp_path / "q.gguf", encoding=kind)
    block = find_encoding(kind).block_size
    with aprfmt.open(demo_model) as a, aprfmt.open(tmp_path / "q.gguf") as b:
        for key in ("L1.attn_v.weight", "L0.ffn_down.weight", "token_embd.weight"):
            image = make_image(a.roles[key], b.roles[key], key)
            assert image is not None
            assert block % image.width == 0 or image.width % block == 0
            assert 32 <= len(image.cells[0]) <= 96 and 32 <= len(image.cells) <= 64


def test_no_image_is_a_sliver(tab: Page, demo_model: Path, tmp_path: Path) -> None:
    """In the page no side is shorter than a quarter of the other, however long a tensor is."""
    names = {"tall": (640, 2), "wide": (2, 640), "one": (1, 9), "flat": (300,)}
    sides = []
    for label, factor in (("a", 1.0), ("b", 1.5)):
        folder = tmp_path / label
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "no_such_model"}')
        rows = {}
        for name, shape in names.items():
            values = factor * np.sin(np.arange(math.prod(shape), dtype=np.float32) + 1)
            rows[name] = ("F32", shape, values.tobytes())
        write_mixed(folder / "model.safetensors", rows)
        sides.append(folder)
    page = tmp_path / "p.html"
    assert command("diff", *sides, "--html", page).code == 1
    for width in (390, 1280):
        tab.show(width)
        tab.open(page)
        shown = tab.evaluate("[...document.querySelectorAll('#which option')].map(e => e.value)")
        assert len(shown) == len(names)
        for value in shown:
            sizes = tab.evaluate(
                f"(() => {{ const w = document.getElementById('which'); w.value = {value!r};"
                "w.dispatchEvent(new Event('change'));"
                "return [...document.querySelectorAll('#triple canvas')].map((c) => {"
                "const r = c.getBoundingClientRect(); return [r.width, r.height]; }); })()"
            )
            assert len(sizes) == 3
            for across, down in sizes:
                assert min(across, down) >= 0.24 * max(across, down) and max(across, down) > 150
    assert tab.complaints() == []
    tab.show(1400)


def fits(body: Any, name: str) -> None:
    """Validate an object against the command's schema."""
    from tests.schemas.validation import faults

    assert not faults(body, name)


def test_the_page_of_a_diagnosis(tab: Page, demo_model: Path, tmp_path: Path) -> None:
    other = tmp_path / NASTY.replace("/", "_")
    shutil.copytree(demo_model, other, ignore=shutil.ignore_patterns("__*"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.001}))
    page = tmp_path / "p.html"
    done = command("diagnose", demo_model, other, "--html", page, "--json")
    assert done.code == 1, done.err
    body = done.json
    assert body["html"] == str(page)
    fits(body, "diagnose")
    tab.open(page)
    assert tab.complaints() == [] and tab.requests() == [page.resolve().as_uri()]
    assert tab.evaluate("typeof window.evil") == "undefined"
    # The sentence, taken apart: every word of it is in the verdict.
    says = tab.evaluate(TEXT.format("#verdict .says"))
    cells = tab.evaluate("[...document.querySelectorAll('#verdict td')].map(e => e.textContent)")
    assert body["sentence"] == f"{says} - {cells[0]}, {cells[1]}; {cells[2]}"
    assert tab.evaluate(TEXT.format("#verdict code")) == body["next"][0]
    links = tab.evaluate("document.querySelectorAll('#chain > li').length")
    known = {row["says"] for row in body["findings"]}
    others = [row for row in body["evidence"] if row["says"] not in known]
    assert links == len(body["findings"]) + len(others)
    measured = [row["key"] for row in body["points"] if row["direct"] is not None]
    keys = "[...document.querySelectorAll('#maps section:first-child button')]"
    assert sorted(tab.evaluate(f"{keys}.map(e => e.dataset.key)")) == sorted(measured)
    flagged = tab.evaluate(f"{keys}.filter(e => e.classList.contains('flag')).length")
    assert flagged == sum(row["apart"] for row in body["points"]) > 0
    assert tab.evaluate(TEXT.format(".detail h3")) == body["first"]
    tab.click(".map button[data-key='L2.mid']")
    assert tab.evaluate(TEXT.format(".detail h3")) == "L2.mid"
    assert tab.complaints() == []


def test_the_page_of_parity(tab: Page, demo_model: Path, tmp_path: Path) -> None:
    from aprfmt.cli.parity.page import render_page

    page = tmp_path / "p.html"
    words = ("parity", demo_model, "--between", "numpy:float64", "numpy:float32")
    done = command(*words, "--ids", "1,5,9,200", "--arbiter", "--json", "--html", page)
    assert done.code == 0, done.err
    body = done.json
    assert body["html"] == str(page)
    fits(body, "parity")
    refused = command(*words, "--ids", "1,2", "--calibrate", tmp_path / "c", "--html", page)
    assert refused.code == 2 and "--html" in refused.err
    tab.open(page)
    assert tab.complaints() == [] and tab.requests() == [page.resolve().as_uri()]
    assert tab.evaluate(TEXT.format("#verdict")).startswith("The runs agree within rounding")
    (pair,) = body["pairs"]
    measured = [row["key"] for row in pair["points"] if row["rel_l2"] is not None]
    keys = tab.evaluate("[...document.querySelectorAll('.map button')].map(e => e.dataset.key)")
    assert sorted(keys) == sorted(measured) and len(keys) > 50
    assert tab.evaluate("document.querySelectorAll('.map button.flag').length") == 0
    heads = tab.evaluate("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert "Distances from an oracle" in heads and "Runs" in heads
    # The same record with one wrong operation, and what the page has to show for it.
    at = next(row for row in pair["points"] if row["key"] == "L2.ffn_act")
    at |= {"beyond": True, "rel_l2": 0.5, "why": NASTY}
    body["verdict"] = pair["verdict"] = "bug"
    pair |= {"cause": "one operation is wrong", "first": at["key"]}
    operation = {
        "key": at["key"],
        "residual": 0.5,
        "bound": 1e-5,
        "wrong": True,
        "inputs": ["ffn_gate"],
        "weights": [NASTY],
        "input_rel_l2": 1e-7,
        "output_rel_l2": 0.5,
        "gain": 5e6,
        "shadow": False,
    }
    pair |= {"operations": [operation], "first_operation": operation}
    page.write_text(render_page(body))
    tab.open(page)
    assert tab.complaints() == [] and tab.evaluate("typeof window.evil") == "undefined"
    said = tab.evaluate(TEXT.format("#verdict"))
    assert said.startswith("The runs do not agree") and "by itself is L2.ffn_act" in said
    assert "one operation is wrong" in said and "--bundle bug.npz" in said
    assert "wrong by itself" in tab.evaluate(TEXT.format("#chain"))
    flags = "[...document.querySelectorAll('.map button.flag')].map(e => e.dataset.key)"
    assert tab.evaluate(flags) == ["L2.ffn_act"]
    assert tab.evaluate(TEXT.format(".detail h3")) == "L2.ffn_act"
    assert "wrong by itself" in tab.evaluate(TEXT.format(".detail"))
