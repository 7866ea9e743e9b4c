"""What notebooks show: the example notebook, and a card of every result.

Seen red: a cell whose output is another one, a tensor's name written as markup, a card that grows
with the model.
"""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.base.notebook import Card, Table
from aprfmt.checks.gates import running as qa
from tests.conversion.folders import write_mixed
from tests.docs import notebook

NASTY = 'x</div><script>evil()</script><img src="http:x" onerror="evil()">'
ALLOWED = {"style", "div", "b", "p", "table", "tr", "th", "td"}


class Tags(HTMLParser):
    """Every tag with its attributes, and whether all that were opened are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, attrs))
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data + "\n"


def card(value: Any) -> Tags:
    """Return what a notebook shows of a value: small, plain, by itself."""
    text = value._repr_html_()
    found = Tags(text)
    assert {tag for tag, _ in found.found} <= ALLOWED and len(text) < 12_000
    assert all(name == "class" for _, attributes in found.found for name, _ in attributes)
    assert "url(" not in text and "http" not in text.replace(NASTY, "").replace("http:x", "")
    return found


def numberless(value: Any) -> Any:
    """Return an output with its numbers taken out: their last digits differ by machine."""
    return re.sub(r"\d[\d.,e+-]*", "0", json.dumps(value, sort_keys=True))


def test_the_example_notebook_shows_what_it_holds(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")
    cells = notebook.cells()
    assert len(cells) >= 10
    shown = list(notebook.run(tmp_path))
    for number, (cell, outputs) in enumerate(zip(cells, shown, strict=True), 1):
        assert numberless(cell["outputs"]) == numberless(outputs), f"cell {number}"
    text = json.dumps(shown)
    for word in ("rope_theta", "WITHIN", "torch.bfloat16", "equal, ", "0 FAIL"):
        assert word in text, word


def test_a_notebook_that_shows_something_else_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "n.ipynb"
    path.write_text(
        json.dumps(
            {
                "cells": [
                    {"cell_type": "markdown", "source": ["text"]},
                    {
                        "cell_type": "code",
                        "source": ["x = 2\n", "print(x)\n", "x * 3"],
                        "outputs": [],
                    },
                    {
                        "cell_type": "code",
                        "source": ["!echo $((x + 1))\n", "import nothing_of_that_name"],
                    },
                ]
            }
        )
    )
    monkeypatch.setattr(notebook, "NOTEBOOK", path)
    running = notebook.run(tmp_path)
    stream, result = next(running)
    assert stream["text"] == ["2\n"] and result["data"] == {"text/plain": ["6"]}
    with pytest.raises(ModuleNotFoundError):
        next(running)


@pytest.fixture(scope="module")
def files(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cards")
    found = {"demo": demo_model, "q4": folder / "q4.gguf", "odd": folder / "odd"}
    aprfmt.convert(demo_model, found["q4"], encoding="Q4_K")
    found["odd"].mkdir()
    (found["odd"] / "config.json").write_text(json.dumps({"model_type": NASTY}))
    raw = np.array([1.5, np.nan, 3.0, np.inf], np.float32).tobytes()
    rows = {NASTY: ("F32", (2, 2), raw)} | {f"t{i}": ("F32", (4,), raw) for i in range(400)}
    write_mixed(found["odd"] / "model.safetensors", rows)
    return found


CARDS: dict[str, tuple[Callable[[dict[str, Path]], Any], tuple[str, ...]]] = {
    "diff": (lambda f: aprfmt.diff(f["demo"], f["q4"]), ("tensors: 29 WITHIN", "L1.attn_v")),
    "equal": (lambda f: aprfmt.diff(f["demo"], f["demo"]), ("equal, 50 tensors: 50 SAME_BYTES",)),
    "trace": (lambda f: aprfmt.trace(f["demo"], ids=[1, 2, 3], points=["out"]),
              ("Trace of", "qwen2", "L3.out", "[3, 256]")),
    "diagnosis": (lambda f: aprfmt.diagnose(f["demo"], f["q4"], ids=[5, 80, 300]),
                  ("Diagnosis of", "precision", "quantisation", "confirmed")),
    "qa": (lambda f: qa.run(f["demo"], only=["metadata"]), ("PASS: 1 PASS", "metadata")),
    "validation": (lambda f: aprfmt.validate(f["odd"]), ("FAIL: ", "values", "NaN")),
}  # fmt: skip


@pytest.mark.parametrize("name", CARDS)
def test_every_result_has_a_card(name: str, files: dict[str, Path]) -> None:
    make, words = CARDS[name]
    text = card(make(files)).text
    for word in words:
        assert word in text, word


def test_a_models_and_a_tensors_card(files: dict[str, Path]) -> None:
    with aprfmt.open(files["q4"]) as model:
        text = card(model).text
        for word in ("qwen2", "2,756,864", "Q4_K", "29", "token_embd.weight", "... 42 more"):
            assert word in text, word
        values = model["blk.0.attn_q.bias"].numpy()
        text = card(model["blk.0.attn_q.bias"]).text
        assert " ".join(f"{value:.6g}" for value in values[:6].tolist()) + " ..." in text
        role = card(model.roles["L0.attn_q.weight"]).text
        assert "blk.0.attn_q.weight" in role and "Q4_K" in role and "[256, 256]" in role


def test_text_of_a_file_is_text_in_a_card(files: dict[str, Path]) -> None:
    with aprfmt.open(files["odd"]) as model:
        found = card(model)
        assert NASTY in found.text and "... 393 more" in found.text
        assert "1.5 nan 3 inf" in card(model["t3"]).text
        assert NASTY in card(model[NASTY]).text
    report = aprfmt.diff(files["odd"], files["odd"])
    assert "401 SAME_BYTES" in card(report).text
    shown = Card(NASTY, NASTY, "bad", [(NASTY, NASTY)], [Table((NASTY,), [(NASTY,)], 1)]).html()
    assert shown.count("<script") == 0 and Tags(shown).text.count(NASTY) == 6
