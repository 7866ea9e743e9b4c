"""Recorded ends that are ordinary text or begin a turn, and ids that have no token.

Seen red: `validate` silent on all of these, and `diagnose` "same" where a GGUF's id has no token.
"""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import aprfmt
from aprfmt.diagnosis import diagnose
from tests.cli.run import aprfmt as command

TEXT_END, START, END = 1533, 1534, 1535
GENERATION = "generation_config.json"


@pytest.fixture(scope="module")
def gguf(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ends") / "m.gguf"
    aprfmt.convert(demo_model, made, source_hash=False)
    return made


def folder_with(source: Path, target: Path, name: str, **values: Any) -> Path:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__*"))
    said = json.loads((target / name).read_text()) | values
    (target / name).write_text(json.dumps(said))
    return target


def gguf_with(source: Path, target: Path, assigned: str) -> Path:
    assert command("set", source, f"tokenizer.ggml.{assigned}", "-o", target).code == 0
    return target


def failed(path: Path) -> list[str]:
    """Return what the check of special ids finds, and the commands that mend it."""
    (row,) = [row for row in aprfmt.validate(path).checks if row.name == "special_ids"]
    return [f"{row.found} | {row.todo}"] if row.outcome == "FAIL" else []


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0, "0 is '!', a piece of ordinary text: answers are cut there"),
        ([END, 17], "17 is '2', a piece of ordinary text"),
        (START, "1534 is '<|im_start|>', which begins a turn; '<|im_end|>' ends one"),
        ([START, TEXT_END], "1534 is '<|im_start|>', which begins a turn"),
    ],
)
@pytest.mark.parametrize("name", [GENERATION, "config.json"])
def test_an_end_that_no_answer_has(
    name: str, value: Any, says: str, demo_model: Path, tmp_path: Path
) -> None:
    bad = folder_with(demo_model, tmp_path / "m", name, eos_token_id=value)
    (found,) = failed(bad)
    assert says in found and f"aprfmt set {bad}" in found
    words = shlex.split(found.partition(" | ")[2])
    words[-1] = str(tmp_path / "fixed")
    assert command(*words[1:]).code == 0
    assert not failed(tmp_path / "fixed")


@pytest.mark.parametrize(
    ("assigned", "says"),
    [
        ("eos_token_id=0", "a piece of ordinary text"),
        ("eos_token_id=1534", "which begins a turn"),
        ("eot_token_id=1", "a piece of ordinary text"),
    ],
)
def test_an_end_of_a_gguf_that_no_answer_has(
    assigned: str, says: str, gguf: Path, tmp_path: Path
) -> None:
    (found,) = failed(gguf_with(gguf, tmp_path / "bad.gguf", assigned))
    key = assigned.partition("=")[0]
    assert says in found and f"tokenizer.ggml.{key}={END} -o bad-fixed.gguf" in found


@pytest.mark.parametrize("role", ["eos", "padding", "bos"])
def test_an_id_of_a_gguf_without_a_token_is_no_same(role: str, gguf: Path, tmp_path: Path) -> None:
    bad = gguf_with(gguf, tmp_path / "bad.gguf", f"{role}_token_id=5000")
    answer = diagnose(str(gguf), str(bad))
    (finding,) = answer.findings
    assert (finding.cause, answer.exit_code) == ("special_ids", 1)
    assert "5000 (no token) in B" in finding.says
    assert f"tokenizer.ggml.{role}_token_id=15" in finding.next


def test_an_end_of_config_json_that_stops_nothing_is_no_same(
    demo_model: Path, tmp_path: Path
) -> None:
    """One that the generation's own list has too is without effect."""
    stray = folder_with(demo_model, tmp_path / "stray", "config.json", eos_token_id=151645)
    answer = diagnose(str(demo_model), str(stray))
    assert answer.exit_code == 1 and "config.json:eos_token_id=1535" in answer.findings[0].next
    listed = folder_with(demo_model, tmp_path / "listed", "config.json", eos_token_id=TEXT_END)
    assert diagnose(str(demo_model), str(listed)).exit_code == 0


# Templates of honest models, with the ids at which these stop.
HONEST = {
    "chatml": (None, [END]),
    "GLM's, which end where the next turn begins": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}",
        [START, TEXT_END],
    ),
    "both": (None, [START, END]),
    "without a template": ("", [TEXT_END]),
    "one that ends turns with eos": (
        "{% for m in messages %}<|im_start|>{{ m['content'] }}{{ eos_token }}{% endfor %}",
        [END],
    ),
}


@pytest.mark.parametrize("case", HONEST)
def test_ends_of_honest_models_are_right(case: str, demo_model: Path, tmp_path: Path) -> None:
    template, ids = HONEST[case]
    good = folder_with(demo_model, tmp_path / "m", GENERATION, eos_token_id=ids)
    if template is not None:
        (good / "chat_template.jinja").write_text(template)
    assert not failed(good)
