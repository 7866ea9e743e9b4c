"""BOS that stands twice: by the post-processor itself, or by tokenizer and chat template together.

The ids are those of `tokenizers`. The first is wrong in any text; the second is how released models
are made, so that it is said and nothing fails.

Seen red: PASS without a word.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import aprfmt as api
from tests.cli.run import aprfmt

TWICE = "begins with it twice"


def folder(path: Path, begins: Sequence[str], template: str) -> tuple[Path, int]:
    """Write the demo model with a post-processor and a template; return it and BOS's id."""
    assert aprfmt("demo", "--into", path, "--quiet").code == 0
    file = next(path.rglob("tokenizer.json"))
    data = json.loads(file.read_text())
    bos = data["added_tokens"][0]
    ids = {bos["content"]: {"id": bos["content"], "ids": [bos["id"]], "tokens": [bos["content"]]}}
    special = [{"SpecialToken": {"id": bos["content"], "type_id": 0}} for _ in begins]
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            *special,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": ids if begins else {},
    }
    file.write_text(json.dumps(data))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((file.parent / name).read_text())
        (file.parent / name).write_text(json.dumps(config | {"bos_token_id": bos["id"]}))
    said = json.loads((file.parent / "tokenizer_config.json").read_text())
    said |= {"bos_token": bos["content"]}
    said.pop("add_bos_token", None)
    (file.parent / "tokenizer_config.json").write_text(json.dumps(said))
    text = template.replace("BOS", bos["content"])
    (file.parent / "chat_template.jinja").write_text(text)
    return file.parent, bos["id"]


def lines(path: Path, check: str) -> list[str]:
    """Return what `validate` says of a check: its line and those of its findings."""
    found = aprfmt("validate", path, "-v").out.splitlines()
    (at,) = [i for i, line in enumerate(found) if line.split()[1:2] == [check]]
    after = [line for line in found[at + 1 :]]
    return [found[at], *after[: next(i for i, line in enumerate(after) if line[:1].strip())]]


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_a_post_processor_that_repeats_a_token_fails(times: int, tmp_path: Path) -> None:
    path, bos = folder(tmp_path, ["bos"] * times, "{{ messages[0]['content'] }}")
    ids = Tokenizer.from_file(str(path / "tokenizer.json")).encode("hello").ids
    assert ids[:times] == [bos] * times and ids[times] != bos
    said = lines(path, "special_ids")
    assert said[0].startswith("FAIL") is (times > 1)
    assert any("is put twice before every text" in line for line in said) is (times > 1)


BODY = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TEMPLATES = {
    "by-name": ("{{ bos_token }}" + BODY, True),
    "as-text": ("BOS" + BODY, True),
    "not-written": (BODY, False),
}


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("puts", [True, False])
@pytest.mark.parametrize("case", TEMPLATES)
def test_template_and_tokenizer_together_are_said(
    case: str, puts: bool, kind: str, tmp_path: Path
) -> None:
    template, writes = TEMPLATES[case]
    path, _ = folder(tmp_path / "a", ["bos"] * puts, template)
    if kind == "gguf":
        api.convert(path, tmp_path / "b.gguf")
        path = tmp_path / "b.gguf"
    (said, *findings) = lines(path, "chat_template")
    assert said.startswith("PASS") and not findings
    assert (TWICE in said) is (writes and puts)
