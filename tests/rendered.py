"""What the process of chat templates answers, asked once in a worker.

Most commands ask it something of the shipped model's template, each in a process of its own: that
took a third of the time of their tests. Those of the process itself (tests/tokenizer, tests/fuzz)
take `rendered_each_time`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from aprfmt.tokenizer import template

Ask = Callable[[str, Mapping[str, Any], str], str]
LIMITS = ("CPU_SECONDS", "WALL_SECONDS", "MEMORY", "OUTPUT")
KEPT = 1 << 16  # characters of an answer: longer ones are those of tests of limits


@pytest.fixture(scope="session", autouse=True)
def rendered_once() -> Iterator[Ask]:
    """Give the answer to a question that was answered before; the one who asks is given back."""
    asking, answers = template._run_child, dict[str, str]()

    def ask(task: str, request: Mapping[str, Any], where: str) -> str:
        limits = [vars(template)[name] for name in LIMITS]
        try:
            key = json.dumps([task, request, limits])
        except (TypeError, ValueError, RecursionError):
            return asking(task, request, where)
        if key in answers:
            return answers[key]
        said = asking(task, request, where)
        if len(said) <= KEPT:
            answers[key] = said
        return said

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "_run_child", ask)
        yield asking


@pytest.fixture
def rendered_each_time(rendered_once: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a process started for every question."""
    monkeypatch.setattr(template, "_run_child", rendered_once)
