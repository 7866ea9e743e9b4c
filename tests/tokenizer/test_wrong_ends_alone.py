"""Ids that are recorded as an end and end nothing: which are said, and what sets the right one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.errors import FormatError
from aprfmt.tokenizer import wrong_ends
from aprfmt.tokenizer.keys import CONTROL, NORMAL, USER_DEFINED
from aprfmt.tokenizer.wrong_ends import WrongEnd, find_wrong_ends

TOKENS = ("<|start|>", "hello", "<|im_end|>", "</s>", "<u>", "<|assistant|>")
TYPES = (CONTROL, NORMAL, CONTROL, NORMAL, USER_DEFINED, CONTROL)


def side(
    *,
    generation: Any = None,
    config: Any = None,
    listed: dict[str, int] | None = None,
    path: str = "folder/model",
    folder: bool = True,
    types: tuple[int, ...] = TYPES,
    eos: int | None = None,
    template: str | None = None,
) -> Any:
    """Return a tokenizer of TOKENS: of a GGUF with `listed` {role: id}, else of two files."""
    model = SimpleNamespace(
        path=Path(path),
        folder=SimpleNamespace(path=Path(path)) if folder else None,
        config=None if config is None else {"eos_token_id": config},
    )
    files = {"generation_config.json": {} if generation is None else {"eos_token_id": generation}}
    carried = SimpleNamespace(
        model=model, where="w", parse_file=files.__getitem__, token_ids=lambda: listed
    )
    ids = {} if eos is None else {"eos": eos}
    return SimpleNamespace(
        vocabulary=SimpleNamespace(tokens=TOKENS, types=types, ids=ids),
        carried=carried,
        template=template,
        special_token_texts={"bos_token": "<|start|>"},
        uses_lists=listed is not None,
    )


GENERATES, CONFIG = "generation_config.json:eos_token_id", "config.json:eos_token_id"


def test_ends_of_control_tokens_are_right() -> None:
    assert not find_wrong_ends(side(generation=2, config=[2, 0]))
    assert not find_wrong_ends(side(generation=4))
    assert not find_wrong_ends(side(generation=3))  # a known text, whatever its type says
    assert not find_wrong_ends(side())


def test_an_end_of_ordinary_text_is_said_of_each_file() -> None:
    found = find_wrong_ends(side(generation=1, config=[2, 1]))
    says = "1 is 'hello', a piece of ordinary text: answers are cut there"
    start = "aprfmt set folder/model "
    assert found == [
        WrongEnd(GENERATES, says, f"{start}{GENERATES}=2 -o model-fixed"),
        WrongEnd(CONFIG, says, f"{start}'{CONFIG}=[2]' -o model-fixed"),
    ]


def test_a_vocabulary_without_control_tokens_says_nothing() -> None:
    assert find_wrong_ends(side(generation=1, types=(NORMAL,) * 6)) == []


@pytest.mark.parametrize("other", [6, 99, -1, "x", True, None])
def test_ids_without_a_token_are_left_to_others(other: Any) -> None:
    assert not find_wrong_ends(side(generation=[2, other], config=other))


@pytest.mark.parametrize(("eos", "value"), [(None, 2), (1, 2), (0, 0), (2, 2), (4, 4)])
def test_the_tokenizers_own_end_is_set_unless_it_is_wrong(eos: int | None, value: int) -> None:
    (found,) = find_wrong_ends(side(generation=1, eos=eos))
    assert found.command.endswith(f"{GENERATES}={value} -o model-fixed")


def test_without_a_right_end_there_is_no_command() -> None:
    types = (CONTROL, NORMAL, NORMAL, NORMAL, USER_DEFINED, CONTROL)
    (found,) = find_wrong_ends(side(generation=1, types=types))
    assert found.command == ""


def test_other_ends_of_a_list_stay_behind_the_right_one() -> None:
    (found,) = find_wrong_ends(side(generation=[0, 1, 2, 4]))
    assert f"{GENERATES}=[2, 0, 4]" in found.command


def test_the_keys_of_a_gguf_are_set_in_a_copy_of_the_file() -> None:
    """Unknown and padding are no ends; each key of an end is looked at."""
    made = side(listed={"eos": 1, "eot": 2, "eom": 1, "pad": 1}, path="x y.gguf", folder=False)
    found = find_wrong_ends(made)
    keys = [f"tokenizer.ggml.{role}_token_id" for role in ("eos", "eom")]
    assert [one.place for one in found] == keys
    assert found[0].command == f"aprfmt set 'x y.gguf' {keys[0]}=2 -o 'x y-fixed.gguf'"


def rendered(monkeypatch: pytest.MonkeyPatch, end: str | None, begins: tuple[str, ...]) -> None:
    """Let a template end an answer with `end` and begin one with `begins`."""

    def turns(template: str, texts: Any, special: Any, where: str) -> Any:
        assert (template, where) == ("t", "w") and texts == {"bos_token": "<|start|>"}
        assert special["<u>"] == 4 and "hello" not in special
        return end, frozenset(begins)

    monkeypatch.setattr(wrong_ends, "turn_tokens", turns)


def test_what_begins_a_turn_ends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered(monkeypatch, "<|im_end|>", ("<|assistant|>",))
    (found,) = find_wrong_ends(side(generation=5, template="t", eos=0))
    assert found.says == "5 is '<|assistant|>', which begins a turn; '<|im_end|>' ends one"
    assert found.command.endswith(f"{GENERATES}=2 -o model-fixed")
    assert not find_wrong_ends(side(generation=[5, 2], template="t"))
    assert not find_wrong_ends(side(generation=0, template="t"))
    (found,) = find_wrong_ends(side(generation=[5, 1], template="t"))
    assert found.says.startswith("5 is") and "; 1 is 'hello'" in found.says
    rendered(monkeypatch, None, ("<|assistant|>",))
    assert not find_wrong_ends(side(generation=5, template="t"))


def test_a_template_that_fails_leaves_the_ordinary_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise FormatError("no")

    monkeypatch.setattr(wrong_ends, "turn_tokens", fails)
    (found,) = find_wrong_ends(side(generation=[1, 5], template="t"))
    assert found.says.startswith("1 is 'hello'") and ";" not in found.says
