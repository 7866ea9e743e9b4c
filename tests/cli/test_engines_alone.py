"""The comparison of engines that render a chat template: what it needs, and its exit code."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.cli import render, template
from aprfmt.errors import FormatError
from aprfmt.tokenizer import stored_tokenizer, template_engines
from aprfmt.tokenizer.template_engines import EngineRendering, TemplateEngines


def rendering(name: str, ours: str, theirs: str) -> EngineRendering:
    return EngineRendering(name, ours == theirs, None if ours == theirs else 0, ours, theirs)


def test_engines_are_compared_on_the_template_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    side: Any = SimpleNamespace(special_token_texts={"eos_token": "</s>"})
    held: dict[str, Any] = {"side": side, "template": "{{ x }}"}
    carried = SimpleNamespace(chat_template=lambda: held["template"])
    opened = SimpleNamespace(carried=carried, path=Path("m.gguf"))
    rows: list[EngineRendering] = []
    asked: list[Any] = []

    def compared(*given: Any) -> TemplateEngines:
        asked.append(given)
        return TemplateEngines("llama.cpp b1", tuple(rows))

    monkeypatch.setattr("aprfmt.model.open_model", lambda path: nullcontext(opened))
    monkeypatch.setattr(stored_tokenizer, "read_tokenizer_parts", lambda model: held["side"])
    monkeypatch.setattr(template_engines, "compare_engines", compared)
    emitted: list[Any] = []

    def emit(body: Any, code: int, show: Any, answer: Any) -> int:
        emitted.append((body, answer()))
        return code

    monkeypatch.setattr(render, "emit", emit)
    for rows[:], code in (
        ([rendering("tools", "a", "a")], 0),
        ([rendering("tools", "a", "a"), rendering("turns", "a", "b")], 1),
    ):
        assert template.report_engines(Path("m.gguf")) == code
        body, lines = emitted[-1]
        assert body["cause"] == (template_engines.CAUSE if code else None)
        assert [row["conversation"] for row in body["conversations"]] == [
            row.conversation for row in rows
        ]
        assert len(lines) == 1 + code and lines[0][1] == ("bad" if code else "good")
    assert asked == [("{{ x }}", {"eos_token": "</s>"}, "m.gguf")] * 2
    for lacking in ("side", "template"):
        monkeypatch.setitem(held, lacking, None)
        with pytest.raises(FormatError, match=r"^m.gguf: carries no chat template"):
            template.report_engines(Path("m.gguf"))
        monkeypatch.setitem(held, lacking, side if lacking == "side" else "{{ x }}")
    assert len(asked) == 2
