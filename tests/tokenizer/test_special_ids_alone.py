"""Rules for the special ids of two tokenizers, each by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.causes.tokenizer import special_ids

TOKENS = ["a", "<s>", "<e>", "<m>"]


def side(
    *, lists: bool = False, style: str = "hf", folder: bool = True, config: Any = None, **more: Any
) -> Any:
    """A side of a comparison: a folder, or (`lists`) a file whose lists state ids."""
    usual = {
        "tokens": TOKENS,
        "ids": {},
        "engine_defaults": {},
        "engine_ids": {},
        "stated": {},
        "adds_bos": False,
        "template": None,
    }
    held = SimpleNamespace(**usual | more)
    vocabulary = SimpleNamespace(
        **{name: getattr(held, name) for name in ("tokens", "ids", "engine_defaults", "engine_ids")}
    )
    model = SimpleNamespace(
        key_style=style, folder=SimpleNamespace() if folder else None, config=config
    )
    carried = SimpleNamespace(model=model, token_ids=lambda: held.stated)
    return SimpleNamespace(
        uses_lists=lists,
        carried=carried,
        vocabulary=vocabulary,
        adds_bos=held.adds_bos,
        template=held.template,
    )


FOLDER, LISTS = side(), side(lists=True, style="gguf", folder=False)
TOKEN = "tokenizer_config.json:eos_token=<e>"
# what -> (A, B, the wanted id, what `aprfmt set` is given)
MENDS: dict[str, tuple[Any, Any, int | None, tuple[str, ...]]] = {
    "a folder": (FOLDER, FOLDER, 2, (TOKEN,)),
    "config.json has another": (
        side(config={"eos_token_id": [2, 3]}),
        side(config={"eos_token_id": 1}),
        2,
        (TOKEN, "config.json:eos_token_id=[2, 3]"),
    ),
    "config.json has the same": (
        side(config={"eos_token_id": [2]}),
        side(config={"eos_token_id": 2}),
        2,
        (TOKEN,),
    ),
    "config.json of A alone": (side(config={"eos_token_id": 2}), side(config={}), 2, (TOKEN,)),
    "config.json of B alone": (FOLDER, side(config={"eos_token_id": 1}), 2, (TOKEN,)),
    "nothing wanted": (FOLDER, FOLDER, None, ()),
    "nothing wanted of lists": (FOLDER, LISTS, None, ()),
    "another token there": (side(tokens=["a", "<s>", "x", "<m>"]), FOLDER, 2, ()),
    "no token there": (FOLDER, FOLDER, 9, ()),
    "the last token": (FOLDER, FOLDER, 3, ("tokenizer_config.json:eos_token=<m>",)),
    "A has lists": (LISTS, FOLDER, 2, ()),
    "no folder": (FOLDER, side(folder=False), 2, ()),
    "a GGUF": (FOLDER, LISTS, 2, ("tokenizer.ggml.eos_token_id=2",)),
    "another file with lists": (FOLDER, side(lists=True, style="apr"), 2, ()),
}


def test_an_id_is_set_where_its_file_states_it() -> None:
    for what, (a, b, wanted, expected) in MENDS.items():
        assert special_ids._mending_assignment(a, b, "eos", wanted) == expected, what


def test_a_token_that_moved_is_no_other_token() -> None:
    """Where both name one text and only its id differs, and nothing else stands at either id."""
    moved = side(tokens=["a", "<e>", "x", "<m>"])
    for a, b, x, y, expected in (
        (FOLDER, moved, 2, 1, True),
        (moved, FOLDER, 1, 2, True),
        (FOLDER, moved, 2, 2, False),  # another text
        (FOLDER, FOLDER, 2, 1, False),
        (FOLDER, side(tokens=["a", "<e>", "<e>", "<m>"]), 2, 1, False),  # it stands there as well
        (side(tokens=["a", "<e>", "<e>", "<m>"]), moved, 2, 1, False),
        (FOLDER, moved, 4, 1, False),
        (FOLDER, moved, 2, 4, False),
        (LISTS, moved, 2, 1, False),
        (FOLDER, side(lists=True, tokens=moved.vocabulary.tokens), 2, 1, False),
    ):
        assert special_ids._same_text_moved(a, b, x, y) is expected, (x, y)


DEFAULTS: dict[str, Any] = {"engine_defaults": {"bos": 1, "eos": 2, "pad": 3}, "ids": {"pad": 3}}


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ({"ids": {"bos": 0, "eos": 1}}, {}, (0, 1, None)),
        (DEFAULTS, {}, (None, None, 3)),  # nobody has one: nothing was lost
        (DEFAULTS, {"bos": 1, "eos": 2, "pad": 3}, (None, 2, 3)),
        (DEFAULTS | {"adds_bos": True}, {"bos": 1, "eos": 2}, (1, 2, 3)),
        (DEFAULTS | {"template": "{{ bos_token }}"}, {"bos": 1}, (1, None, 3)),
        (DEFAULTS | {"template": "{{ eos_token }}"}, {"bos": 1}, (None, None, 3)),
        ({"stated": {"bos": 4, "eos": 3}}, {}, (4, None, None)),  # an id that no token has
    ],
)
def test_the_id_in_effect_is_the_stated_one_or_the_engines_default(
    own: dict[str, Any], other: dict[str, int], expected: tuple[int | None, ...]
) -> None:
    a, b = side(lists=True, **own), side(engine_ids=other)
    roles = ("bos", "eos", "pad")
    assert tuple(special_ids._effective_id(a, b, role) for role in roles) == expected
    folder = side(stated={"bos": 4})
    assert special_ids._effective_id(folder, b, "bos") is None  # it has no lists


def test_what_is_used_without_an_id_is_said_with_its_effect() -> None:
    one = side(lists=True, **DEFAULTS)
    says = special_ids._role_text
    assert says(one, "eos", None) == "not stated"
    assert says(one, "eos", 2) == "not stated, and llama.cpp takes 2 (<e>)"
    assert (says(one, "eos", 3), says(one, "eos", 4)) == ("3 (<m>)", "4 (no token)")
    effect = special_ids._effect_of_default
    assert effect(one, "eos", 2) == "; a generation ends there"
    assert effect(one, "bos", 1) == "; texts begin with it"
    assert effect(one, "eos", None) == effect(FOLDER, "eos", 2) == ""


def test_ids_are_listed_as_json_and_one_without_brackets() -> None:
    texts = [special_ids._listed_text(ids) for ids in ((), (0,), (7, 9))]
    assert texts == ["not stated", "0", "[7, 9]"]
