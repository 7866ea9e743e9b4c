"""A chat template's process is asked a question once in a worker, and each time where it is tested.

Seen red: an answer kept for another template, for other limits, or as long as it likes.
"""

import subprocess
from typing import Any
from unittest.mock import Mock

import pytest

from aprfmt.errors import FormatError
from aprfmt.tokenizer import template
from aprfmt.tokenizer.limits import MEMORY
from tests import rendered


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What starts processes, counting."""
    counted = Mock(side_effect=subprocess.Popen)
    monkeypatch.setattr(subprocess, "Popen", counted)
    return counted


def said(text: str) -> str:
    options: dict[str, Any] = {"add_generation_prompt": False, "variables": {}}
    messages = [{"role": "user", "content": "of test_rendered"}]
    return template.render(text, messages, where="x", **options)


def test_a_question_is_asked_once(processes: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said("{{ messages[0].content }}1") == said("{{ messages[0].content }}1")
    assert processes.call_count == 1
    assert said("{{ messages[0].content }}2") == "of test_rendered2"
    assert processes.call_count == 2
    monkeypatch.setattr(template, "MEMORY", MEMORY + 1)
    assert said("{{ messages[0].content }}2") == "of test_rendered2"
    assert processes.call_count == 3


def test_errors_and_long_answers_are_not_kept(
    processes: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        with pytest.raises(FormatError, match="line 1"):
            said("{% broken")
    monkeypatch.setattr(rendered, "KEPT", 3)
    assert said("{{ messages[0].role }}3") == said("{{ messages[0].role }}3")
    assert processes.call_count == 4


@pytest.mark.usefixtures("rendered_each_time")
def test_where_the_process_is_tested_it_is_asked_each_time(processes: Mock) -> None:
    assert said("{{ messages[0].role }}4") == said("{{ messages[0].role }}4") == "user4"
    assert processes.call_count == 2
