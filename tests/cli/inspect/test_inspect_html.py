"""The page of `inspect --html` in a real headless browser.

Seen red: a file's text written as markup, a tensor without its area, a group whose bytes are not
those of its tensors, a histogram that is not the values', checks that read what was not asked for.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.cli.histograms import tensor_histogram
from aprfmt.tensors.stats import tensor_stats
from aprfmt.tokenizer.pieces import byte_level_alphabet, readable_piece
from tests.cli.browser import Page, browser
from tests.cli.run import aprfmt as command
from tests.cli.run import process
from tests.conversion.folders import write_mixed

NASTY = 'x</script><script>window.evil=1</script><img src="http:x" onerror="window.evil=1">'
TEXT = "document.querySelector({!r}).textContent"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.show(1280)
        yield opened


@pytest.fixture(scope="module")
def made(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The page of a quantized demo model with everything in it, and the JSON of the same run."""
    folder = tmp_path_factory.mktemp("inspect")
    aprfmt.convert(demo_model, folder / "q.gguf", encoding="Q4_K")
    page = folder / "q.html"
    done = command(
        "inspect", folder / "q.gguf", "--stats", "--vocabulary", "--html", page, "--json"
    )
    assert done.code == 0 and done.json["html"] == str(page)
    return page, done.json


def held(page: Path) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found is not None
    return json.loads(found[1])


def typed(tab: Page, selector: str, text: str) -> None:
    tab.evaluate(
        f"(() => {{ const e = document.querySelector({selector!r}); e.value = {json.dumps(text)};"
        "e.dispatchEvent(new Event('input')); })()"
    )


def test_the_page_loads_nothing_and_says_the_verdict_first(
    tab: Page, made: tuple[Path, Any]
) -> None:
    tab.open(made[0])
    assert tab.requests() == [made[0].resolve().as_uri()] and tab.complaints() == []
    first = tab.evaluate("document.querySelector('main').firstElementChild.id")
    said = tab.evaluate(TEXT.format("#verdict"))
    assert first == "verdict" and "qwen2" in said and "2.76M parameters" in said
    assert "no check failed" in said
    parts = tab.evaluate("[...document.querySelectorAll('#contents a')].map(e => e.textContent)")
    assert parts == [
        "Overview",
        "Where the bytes are",
        "Tensors",
        "Checks",
        "Hyperparameters",
        "Metadata",
        "Account",
        "Tokenizer",
        "Chat template",
    ]
    links = "[...document.querySelectorAll('#contents a')].map(e => e.getAttribute('href'))"
    for link in tab.evaluate(links):
        assert tab.evaluate(f"document.querySelector({link!r}) !== null"), link


def test_every_tensor_has_an_area_of_its_bytes(tab: Page, made: tuple[Path, Any]) -> None:
    tab.open(made[0])
    areas = tab.evaluate(
        "[...document.querySelectorAll('#map .leaf')].map((e) => [e.getAttribute('aria-label'),"
        "parseFloat(e.style.width) * parseFloat(e.style.height)])"
    )
    sizes = {row["name"]: row["nbytes"] for row in held(made[0])["tensors"]}
    found = {label.partition(": ")[0]: area for label, area in areas}
    large = [name for name, size in sizes.items() if size > 10_000]
    assert set(large) <= set(found) <= set(sizes) and len(large) == 29
    whole = tab.evaluate(
        "(() => { const r = document.querySelector('#map').getBoundingClientRect();"
        "return r.width * r.height; })()"
    )
    total = sum(sizes.values())
    for name in large:  # headings and frames take some of the room, of small groups more
        assert 0.4 * sizes[name] / total < found[name] / whole < 1.3 * sizes[name] / total, name
    groups = tab.evaluate(
        "[...document.querySelectorAll('#map > .group')].map(e => e.getAttribute('aria-label'))"
    )
    embedding = next(text for text in groups if text.startswith("embedding: "))
    assert f"{sizes['token_embd.weight'] / 1e3:.1f} kB" in embedding
    assert "1 tensor" in embedding


def test_areas_are_reached_and_opened_by_the_keyboard(tab: Page, made: tuple[Path, Any]) -> None:
    tab.open(made[0])
    focus = "document.activeElement.getAttribute('aria-label')"
    tab.evaluate("document.querySelector('#trail button').focus()")
    tab.press("Tab")
    first = tab.evaluate(focus)
    assert first.startswith("feed-forward: ")
    assert tab.evaluate("document.querySelectorAll('#map [tabindex=\"0\"]').length") == 1
    tab.press("ArrowRight")
    assert tab.evaluate(focus) not in (None, first)
    assert tab.evaluate("document.querySelector('.tip').hidden") is False
    tab.press("ArrowLeft")
    tab.evaluate("document.querySelector('#map .group').focus()")
    tab.press("Enter")
    crumbs = "[...document.querySelectorAll('#trail button')].map(e => e.textContent)"
    assert [text.split()[0] for text in tab.evaluate(crumbs)] == ["all", "feed-forward"]
    assert tab.evaluate(focus).startswith("layer ")
    tab.press("Escape")
    assert len(tab.evaluate(crumbs)) == 1
    tab.evaluate("document.querySelector('#map .leaf').focus()")
    name = tab.evaluate(focus).partition(": ")[0]
    tab.press("Enter")
    assert tab.evaluate(TEXT.format("#one h3")) == name
    assert tab.evaluate("document.activeElement.id") == "one"
    assert tab.complaints() == []


def test_another_width_keeps_the_area_and_the_focus(tab: Page, made: tuple[Path, Any]) -> None:
    tab.open(made[0])
    focus = "document.activeElement.getAttribute('aria-label')"
    right = (
        "Math.max(...[...document.querySelectorAll('#map button')]"
        ".map(e => e.getBoundingClientRect().right))"
    )
    tab.evaluate("document.querySelector('#map .group').click()")
    before, wide = tab.evaluate(focus), tab.evaluate(right)
    assert before.startswith("layer ")
    tab.show(700)
    tab.settle()
    assert tab.evaluate(right) < 700 < wide
    assert tab.evaluate(focus) == before
    assert tab.evaluate("document.querySelectorAll('#trail button').length") == 2


@pytest.mark.parametrize("group", ["layer, then part", "encoding, then part", "name"])
def test_every_grouping_and_the_tree_have_all_bytes(
    tab: Page, made: tuple[Path, Any], group: str
) -> None:
    tab.open(made[0])
    tab.evaluate(
        f"(() => {{ const e = document.getElementById('group'); e.value = {group!r};"
        "e.dispatchEvent(new Event('change'));"
        "document.querySelector('#bytes details').open = true; })()"
    )
    for _ in range(4):  # a branch is drawn when it is opened
        tab.evaluate("document.querySelectorAll('#tree details').forEach(e => { e.open = true; })")
        tab.evaluate("new Promise(r => setTimeout(r))")
    rows = "[...document.querySelectorAll('#tree button.twig .size')].map(e => e.textContent)"
    sizes = [row["nbytes"] for row in held(made[0])["tensors"]]
    shown = tab.evaluate(rows)
    assert len(shown) == len(sizes)
    tops = tab.evaluate(
        "[...document.querySelectorAll('#tree > .branch > summary .size')].map(e=>e.textContent)"
    )
    units = {"B": 1.0, "kB": 1e3, "MB": 1e6}
    found = [float(text.split()[0]) * units[text.split()[1]] for text in tops]
    assert sum(found) == pytest.approx(sum(sizes), rel=0.06)  # of two digits
    assert found == sorted(found, reverse=True)
    assert tab.complaints() == []


def test_tensors_are_searched_sorted_and_told(tab: Page, made: tuple[Path, Any]) -> None:
    tab.open(made[0])
    names = "[...document.querySelectorAll('#rows tbody button')].map(e => e.dataset.name)"
    rows = held(made[0])["tensors"]
    assert tab.evaluate(names) == [row["name"] for row in rows]
    typed(tab, "#find", "ffn q4_k")
    picked = tab.evaluate(names)
    wanted = [r["name"] for r in rows if "ffn" in r["name"] and r["encoding"] == "Q4_K"]
    assert picked == wanted and len(wanted) == 12
    assert tab.evaluate(TEXT.format("#count")).startswith("12 tensors, ")
    typed(tab, "#find", "")
    heads = tab.evaluate("[...document.querySelectorAll('#rows th')].map(e => e.textContent)")
    tab.click(f"#rows th:nth-child({heads.index('std') + 1}) button")
    std = {row["name"]: row["stats"]["std"] for row in rows}
    assert tab.evaluate(names) == sorted(std, key=lambda name: std[name])
    assert "ascending" in tab.evaluate("document.querySelector('[aria-sort]').ariaSort")
    tab.click("#rows tbody tr:nth-child(1) button")
    name = min(std, key=lambda each: std[each])
    assert tab.evaluate(TEXT.format("#one h3")) == name
    bars = tab.evaluate(
        "[...document.querySelectorAll('#one rect title')].map(e => +e.textContent.split(' ')[0])"
    )
    assert bars == next(row["histogram"]["counts"] for row in rows if row["name"] == name)
    assert tab.complaints() == []


def test_the_histogram_is_of_the_tensors_values(made: tuple[Path, Any]) -> None:
    rows = {row["name"]: row for row in held(made[0])["tensors"]}
    with aprfmt.open(made[0].with_suffix(".gguf")) as model:
        for name in ("blk.1.ffn_up.weight", "token_embd.weight", "blk.0.attn_q.bias"):
            found, values = rows[name]["histogram"], model[name].numpy().astype(np.float64)
            expected, _ = np.histogram(values, 48)
            assert (found["low"], found["high"]) == (values.min(), values.max())
            assert sum(found["counts"]) == found["of"] == values.size
            assert np.abs(np.array(found["counts"]) - expected).max() <= 2  # values on an edge
            assert rows[name]["stats"]["std"] == pytest.approx(float(values.std()), rel=1e-6)


def test_of_a_large_tensor_rows_between_are_counted(
    made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aprfmt.cli.histograms.COUNTED", 1 << 14)
    monkeypatch.setattr("aprfmt.cli.histograms.RUN", 1 << 10)
    with aprfmt.open(made[0].with_suffix(".gguf")) as model:
        tensor = model["token_embd.weight"]
        values = tensor.numpy()
        found = tensor_histogram(tensor, tensor_stats(tensor.stored[0]))
    assert found is not None and sum(found["counts"]) == found["of"] < values.size // 16
    assert found["of"] >= 1 << 13
    expected, _ = np.histogram(values[::24], 48, (found["low"], found["high"]))
    share = np.array(found["counts"]) / found["of"] - expected / expected.sum()
    assert np.abs(share).max() < 0.02


def test_the_vocabulary_the_template_and_the_checks(tab: Page, made: tuple[Path, Any]) -> None:
    tab.open(made[0])
    with aprfmt.open(made[0].with_suffix(".gguf")) as model:
        ids = model.tokenizer.encode(" single man", add_special=False)
        pieces = [model.tokenizer.decode([i]) for i in ids]
        text = model.tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is 2 + 2?"}], add_generation_prompt=True
        )
    words = held(made[0])["tokenizer"]
    assert words["whole"] and [row[0] for row in words["tokens"]] == list(range(words["count"]))
    assert [words["tokens"][i][1] for i in ids] == pieces and pieces[0].startswith(" ")
    find = "#tokens"
    assert tab.evaluate(f"document.querySelectorAll('{find} tbody tr').length") == 501
    box = "input[aria-label='search tokens']"
    typed(tab, box, str(ids[0]))
    assert tab.evaluate(TEXT.format("#tokens .piece")) == pieces[0]
    shown = tab.evaluate("[...document.querySelectorAll('pre')].map(e => e.textContent)")
    assert shown[0] == text
    checks = "[...document.querySelectorAll('.checks li')].map(e => [e.dataset.check, "
    found = dict(tab.evaluate(checks + "e.querySelector('.mark').textContent])"))
    report = command("validate", made[0].with_suffix(".gguf"), "--json").json
    assert found == {row["name"]: row["outcome"].replace("_", "-") for row in report["checks"]}
    assert tab.complaints() == []


def test_without_stats_no_tensor_is_read(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("a tensor is read")

    monkeypatch.setattr("aprfmt.tensors.view.decode_tensor", read)
    monkeypatch.setattr("aprfmt.checks.file.value_pass.scan_values", read)
    monkeypatch.setattr("aprfmt.checks.file.layout.check_checksum", read)
    page = tmp_path / "p.html"
    done = command("inspect", demo_model, "--html", page, "--json")
    assert done.code == 0, done.err
    found = held(page)
    outcomes = {row["name"]: row["outcome"] for row in found["report"]["checks"]}
    assert outcomes["values"] == outcomes["role_bounds"] == outcomes["manifest"] == "NOT_RUN"
    assert outcomes["completeness"] == outcomes["tokenizer"] == "PASS"
    assert all("stats" not in row for row in found["tensors"])
    assert not found["tokenizer"]["whole"] and len(found["tokenizer"]["tokens"]) < 100
    assert page.stat().st_size < 120_000


def test_what_a_page_alone_needs_is_refused_without_one(demo_model: Path, tmp_path: Path) -> None:
    for option in ("--stats", "--vocabulary"):
        done = command("inspect", demo_model, option)
        assert done.code == 2 and option in done.err and "--html" in done.err
    page = tmp_path / "p.html"
    page.write_text("mine")
    done = command("inspect", demo_model, "--html", page)
    assert done.code == 2 and page.read_text() == "mine"
    assert command("inspect", demo_model, "--html", page, "--force").code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_a_files_own_text_is_text_and_damage_is_shown(tab: Page, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": NASTY}))
    raw = np.array([1.0, np.nan, 3.0, np.inf], np.float32).tobytes()
    write_mixed(
        folder / "model.safetensors", {NASTY: ("F32", (2, 2), raw), "b": ("F32", (4,), raw)}
    )
    page = tmp_path / "p.html"
    assert command("inspect", folder, "--html", page, "--stats").code == 0
    tab.open(page)
    assert tab.complaints() == [] and tab.evaluate("typeof window.evil") == "undefined"
    assert tab.evaluate("document.images.length") == 0
    assert page.read_text().count("<script") == 2
    assert NASTY in tab.evaluate(
        "[...document.querySelectorAll('#rows button')].map(e=>e.textContent)"
    )
    assert "values failed" in tab.evaluate(TEXT.format("#verdict"))
    assert tab.evaluate("document.querySelectorAll('#rows tr.r-bad').length") == 2
    tab.click("#rows tbody tr:nth-child(1) button")
    assert tab.complaints() == []


def test_of_a_damaged_file_the_rest_is_shown(
    tab: Page, made: tuple[Path, Any], tmp_path: Path
) -> None:
    whole = made[0].with_suffix(".gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) - 600_000])
    page = tmp_path / "p.html"
    done = command("inspect", tmp_path / "cut.gguf", "--stats", "--html", page, "--json")
    assert done.code == 2 and done.json["html"] == str(page) and done.json["damage"]
    tab.open(page)
    assert tab.complaints() == []
    said = tab.evaluate(TEXT.format("#verdict"))
    assert "damaged" in said and "layout failed" in said
    assert tab.evaluate("document.querySelector('#verdict').className") == "verdict bad"
    rows = held(page)["tensors"]
    damaged = [row for row in rows if row["damage"]]
    assert 0 < len(damaged) < len(rows)
    assert all((row["stats"] is None) == bool(row["damage"]) for row in rows)
    assert tab.evaluate("document.querySelectorAll('#rows tr.r-bad').length") == len(damaged)
    typed(tab, "#find", damaged[0]["name"])
    tab.click("#rows tbody tr:nth-child(1) button")
    assert damaged[0]["damage"] in tab.evaluate(TEXT.format("#one"))


def test_a_page_of_another_process_is_the_same(demo_model: Path, tmp_path: Path) -> None:
    """No page without torch, transformers or a network: the plain command writes the same file."""
    done = process("inspect", demo_model, "--html", tmp_path / "a.html")
    assert done.code == 0, done.err
    assert command("inspect", demo_model, "--html", tmp_path / "b.html").code == 0
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_gemma_fits_in_a_megabyte(gemma: Path, tab: Page, tmp_path: Path) -> None:
    page = tmp_path / "g.html"
    assert command("inspect", gemma, "--html", page, "--stats").code == 0
    assert page.stat().st_size < 1_000_000
    tab.open(page)
    assert tab.complaints() == []
    assert tab.evaluate("document.querySelectorAll('#rows tbody tr').length") == 236
    assert tab.evaluate("document.querySelectorAll('#map .leaf').length") > 120


def test_pieces_are_read_as_the_tokenizer_reads_them(demo_model: Path) -> None:
    """Every piece of a byte-level vocabulary against the bytes that the tokenizer library gives."""
    assert readable_piece("\u0120of", "bpe") == " of" and readable_piece("\u2581of", "spm") == " of"
    assert (
        readable_piece("<0x0A>", "spm") == "<0x0A>"
        and readable_piece("<|im_start|>", "bpe") == "<|im_start|>"
    )
    assert readable_piece("\u00e2\u0122", "bpe") == "\\xe2\\x80"
    from tokenizers import Tokenizer, pre_tokenizers

    assert set(byte_level_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert readable_piece("\u0144", "bpe") == "\u0144"  # the first behind the alphabet
    theirs = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    special = {i for i, token in theirs.get_added_tokens_decoder().items() if token.special}
    compared = 0
    for piece, i in theirs.get_vocab().items():
        text = theirs.decode([i], skip_special_tokens=False)
        if i not in special and "\ufffd" not in text:
            assert readable_piece(piece, "bpe") == text, piece
            compared += 1
    assert compared > 1200
