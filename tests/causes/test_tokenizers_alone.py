"""Differences of tokenizers, each by itself: how sure they are, and on which side."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aprfmt.causes.tokenizer import (
    comparison,
    pre_tokenizer,
    probe_effects,
    recorded_ids,
    special_ids,
    vocabulary_lists,
)
from aprfmt.causes.tokenizer.comparison import compare_tokens
from aprfmt.model import open_model
from aprfmt.tokenizer.pre_tokenizers import row_splitting

# Splittings of a tokenizer.json: as the table has it, by steps it has, by one it has not.
DIGITS = {"type": "Digits", "individual_digits": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
STRANGE = {"type": "UnicodeScripts"}


def by_json(*steps: dict[str, Any], ignores: bool = False) -> Any:
    data = {
        "model": {"type": "BPE", "ignore_merges": ignores},
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)},
    }
    return side(data, None)


def by_lists(name: str) -> Any:
    return side(None, name)


def side(data: Any, name: str | None) -> Any:
    return SimpleNamespace(
        data=data,
        uses_lists=data is None,
        vocabulary=SimpleNamespace(kind="bpe", pre=name),
        carried=SimpleNamespace(metadata_value=lambda key: name),
    )


@pytest.mark.parametrize(
    ("a", "b", "sure"),
    [
        (by_json(DIGITS, BYTES), by_lists("gpt-2"), True),  # the steps of both are known
        (by_lists("gpt-2"), by_json(DIGITS, BYTES), True),
        (by_json(STRANGE, BYTES), by_lists("gpt-2"), False),  # one side's are not
        (by_lists("gpt-2"), by_json(STRANGE, BYTES), False),
        (by_lists("gpt-2"), by_lists("no such name"), True),  # by the names themselves
        (by_json(STRANGE, BYTES), by_json(DIGITS, BYTES), True),  # by the steps themselves
        (by_json(BYTES, ignores=True), by_json(BYTES), False),  # the merges alone say
    ],
)
def test_a_splitting_is_surely_another_where_both_sides_say_theirs(
    a: Any, b: Any, sure: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pre_tokenizer, "part_place", lambda side, part: (f"{id(side)}",))
    (found,) = pre_tokenizer.pre_tokenizer_difference(a, b)
    assert found.sure is sure and not found.still
    assert found.where[0] == str(id(b))  # B is what is to be mended
    assert found.says.startswith(f"A splits by {found.a}, B by {found.b}")


def test_names_that_split_alike_are_still_one_splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pre_tokenizer, "part_place", lambda side, part: ("x",))
    assert list(pre_tokenizer.pre_tokenizer_difference(by_lists("gpt-2"), by_lists("gpt-2"))) == []
    twins = [
        (x, y) for x in ("gpt-2", "default", "phi-2", "mpt", "olmo") for y in ("jina-es", "gpt-2")
        if x != y and row_splitting(x) == row_splitting(y)
    ]  # fmt: skip
    assert twins
    for x, y in twins:
        (found,) = pre_tokenizer.pre_tokenizer_difference(by_lists(x), by_lists(y))
        assert found.still and found.says == f"{x} in A, {y} in B, which split alike"


def test_words_that_give_the_same_ids_are_another_splitting_all_the_same(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without merges no probe has other ids: the words of the splitting itself are compared."""

    monkeypatch.setattr(probe_effects, "piece_texts", lambda texts: [])

    def made(name: str, steps: list[dict[str, Any]]) -> Path:
        shutil.copytree(demo_model, tmp_path / name, ignore=shutil.ignore_patterns("chat_*"))
        path = tmp_path / name / "tokenizer.json"
        data = json.loads(path.read_text())
        data["model"]["merges"] = []
        own = data["pre_tokenizer"]
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, own]}
        path.write_text(json.dumps(data))
        return tmp_path / name

    letters = {"type": "Split", "pattern": {"String": "e"}, "behavior": "Isolated", "invert": False}
    one, other = made("a", [DIGITS]), made("b", [DIGITS, letters])
    with open_model(one) as a, open_model(other) as b:
        (row,) = compare_tokens(a, b).findings
    assert row.cause == "pre_tokenizer" and row.sure and row.shown
    assert row.before and row.after == 0 and len(row.example) == 2


def test_a_large_difference_includes_those_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of four parts or more is a whole tokenizer's; those that it does not have are said."""

    def row(*parts: str) -> Any:
        return SimpleNamespace(parts=parts)

    for large in (("a", "b", "c"), ("a", "b", "c", "d")):
        rows = [row("a"), row(*large), row("b"), row("a", "c"), row("a", "x"), row("y")]
        monkeypatch.setattr(
            comparison,
            "_LISTED",
            (lambda a, b, rows=rows: rows[:2], lambda a, b, rows=rows: rows[2:]),
        )
        held: Any = None
        found = list(comparison._listed_differences(held, held))
        assert found == ([*rows[:2], *rows[4:]] if len(large) == 4 else rows)


def test_ids_before_a_text_are_padding_unless_they_may_begin_it() -> None:
    def count(
        ids: str, pad: str | None = "p", prefix: str = "", bos: str = "b", chat: str = ""
    ) -> int:
        number = {letter: at for at, letter in enumerate("pbexyz")}
        tokenizer: Any = SimpleNamespace(
            pad_id=None if pad is None else number[pad],
            bos_id=number[bos],
            eos_id=number["e"],
            stop_ids=(number["z"],),
            prefix_ids=tuple(number[each] for each in prefix),
            chat=lambda messages: ("", [number[each] for each in chat]),
        )
        return recorded_ids.leading_padding(tokenizer, [number[each] for each in ids])

    assert count("pxy") == 1 and count("ppxy") == 2 and count("xpy") == 0
    assert count("pxy", None) == 0 and count("pp") == 0 and count("p") == 0
    assert count("pxy", chat="xp") == 1 and count("pxy", chat="px") == 0
    for own in ("b", "e", "z"):  # one may begin the text or end the one before it, two may not
        assert count(f"{own}xy", own) == 0 and count(f"{own}{own}xy", own) == 2
    assert count("bxy", "b", bos="e") == 1
    assert count("bpxy", prefix="b") == 0 and count("pbxy", prefix="b") == 1
    assert count("eeyx", "e", "ey") == 0 and count("eyzx", "e", "yz") == 1
    assert count("exzx", "e", "yz") == 0


def test_how_pieces_moved_is_told_by_their_ids() -> None:
    def told(mine: str, theirs: str) -> str:
        apart = [i for i, (x, y) in enumerate(zip(mine, theirs, strict=True)) if x != y]
        return vocabulary_lists._moved_text(mine, theirs, apart)

    letters = "abcdefghijklmnopqrstuvwxyz"
    assert told("abcd", "acbd") == "ids 1 and 2 are exchanged"
    assert told("abcd", "axbd") == "2 of 4 pieces differ"
    assert told("abcd", "acdb") == "3 of 4 pieces stand at other ids"
    for by in (1, 2, 16):
        moved = letters[:3] + letters[-by:] + letters[3:-by]
        assert told(letters, moved) == f"from id 3 on B's pieces stand +{by} ids away from A's"
        back = f"from id 3 on B's pieces stand -{by} ids away from A's"
        assert told(moved, letters) == (back if by < 13 else told(moved, letters))
    assert "away" in told(letters, letters[-16:] + letters[:-16])
    wider = letters + letters.upper()
    assert (
        told(wider, wider[16:] + wider[:16])
        == "from id 0 on B's pieces stand -16 ids away from A's"
    )
    assert told(wider, wider[17:] + wider[:17]) == "52 of 52 pieces stand at other ids"
    assert told(wider, wider[-17:] + wider[:-17]) == "52 of 52 pieces stand at other ids"
    long = [f"<{i}>" for i in range(600)]
    later = [*long[:4], "x", *long[4:599]]
    assert vocabulary_lists._moved_text(long, later, range(4, 600)).startswith("from id 4 on B's")


def test_of_a_chat_the_text_around_the_first_difference_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty characters before it, and sixty of the text from it on."""
    for same in (0, 5, 20, 21, 300):
        for rest in (0, 10, 200):
            texts = {"A": "".join(chr(97 + at % 26) for at in range(same)) + "X" * (rest + 1)}
            texts["B"] = texts["A"][:same] + "Y" * rest
            monkeypatch.setattr(
                probe_effects,
                "_rendered_chat",
                lambda bench, parts, text, texts=texts: texts[parts],
            )
            shown: Any = SimpleNamespace(labels=[("chat", "two turns")])
            a, b, bench = cast(Any, "A"), cast(Any, "B"), cast(Any, None)
            example = probe_effects._first_example(bench, a, b, shown)
            begin = max(0, same - 20)
            assert example == tuple(
                f"two turns is ...{texts[side][begin : same + 60]!r}" for side in "AB"
            )


# --- lists with scores beside a tokenizer.json ----------------------------------------------------


def splits(
    files: Any, lists: Any, monkeypatch: pytest.MonkeyPatch, *, turned: bool = False
) -> tuple[bool, list[Any]]:
    """Return whether both split alike, and what was encoded: {text: ids} stands for an engine."""
    asked: list[Any] = []

    class Encoder:
        def __init__(self, ids: Any, *given: Any) -> None:
            self.ids, self.added = ids, None

        def add_tokens(self, tokens: Any) -> None:
            self.added = tokens

        def encode(self, text: str, begin: bool, special: bool) -> Any:
            asked.append((text, begin, special, self.added))
            return self.ids[text]

    monkeypatch.setattr(probe_effects, "probe_texts", lambda a, b: ["one", "two", "three"])
    monkeypatch.setattr(probe_effects, "engine_of_text", lambda text, where: Encoder(files.ids))
    monkeypatch.setattr(probe_effects, "SpmEngine", lambda vocabulary, where: Encoder(lists.ids))
    pair = (lists, files) if turned else (files, lists)
    return probe_effects.splits_are_equal(*pair), asked


def split_side(
    *, ids: Any, uses_lists: bool, kind: str = "spm", scores: Any = (1.0,), merges: Any = None
) -> Any:
    carried = SimpleNamespace(tokenizer_json=lambda: "{}", origin="f", where="m")
    vocabulary = SimpleNamespace(kind=kind, scores=scores, merges=merges)
    return SimpleNamespace(
        ids=ids,
        data=None if uses_lists else {},
        uses_lists=uses_lists,
        vocabulary=vocabulary,
        carried=carried,
        added_tokens=("<x>",),
    )


SPLIT = {"one": [1], "two": [2, 3], "three": [4]}


@pytest.mark.parametrize("turned", [False, True])
def test_lists_and_a_file_split_alike_where_every_text_gets_the_same_ids(
    turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, lists = (split_side(ids=SPLIT, uses_lists=way) for way in (False, True))
    same, asked = splits(files, lists, monkeypatch, turned=turned)
    assert same and len(asked) == 6
    assert {one[1:3] for one in asked} == {(False, True)}
    assert [one[3] for one in asked] == [("<x>",), None] * 3  # a file's own engine knows its tokens
    for text in SPLIT:
        other = split_side(ids=SPLIT | {text: [9]}, uses_lists=True)
        assert not splits(files, other, monkeypatch, turned=turned)[0], text
    elsewhere = split_side(ids={text: [9] for text in SPLIT}, uses_lists=True)
    assert not splits(files, elsewhere, monkeypatch, turned=turned)[0]


def test_other_pairs_of_sides_are_not_said_to_split_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    files, lists = (split_side(ids=SPLIT, uses_lists=way) for way in (False, True))
    for first, second in (
        (files, files),
        (lists, lists),
        (files, split_side(ids=SPLIT, uses_lists=True, scores=None)),
        (files, split_side(ids=SPLIT, uses_lists=True, kind="bpe")),
        (files, split_side(ids=SPLIT, uses_lists=True, merges=["a b"])),
    ):
        assert splits(first, second, monkeypatch) == (False, [])


# --- one relation between two vocabularies, and what follows from it ------------------------------


def listed(
    tokens: list[str], types: list[int] | None = None, scores: list[float] | None = None
) -> Any:
    """Return a side that is read from the lists of a GGUF."""
    return SimpleNamespace(
        data=None,
        uses_lists=True,
        added_tokens=[],
        vocabulary=SimpleNamespace(
            kind="spm",
            tokens=tokens,
            types=types or [1] * len(tokens),
            scores=scores,
            merges=None,
            rowless={},
        ),
        carried=SimpleNamespace(metadata_value=lambda key: None),
    )


WORDS = ["\u2581the", "\u2581of", "and", "\u2581na\u00efve", "caf\u00e9", "x"]


@pytest.mark.parametrize(
    ("spell", "says"),
    [
        (lambda x: x.encode().decode("latin-1"), "UTF-8 bytes read as Latin-1"),
        (lambda x: x.replace("\u2581", " "), "blanks in place of \u2581"),
        (lambda x: x.removeprefix("\u2581"), "without the \u2581"),
        (lambda x: x[::-1], "pieces differ"),  # of no spelling that programs make by mistake
    ],
)
def test_pieces_of_another_spelling_are_no_other_model(spell: Any, says: str) -> None:
    """Seen red: without the spellings all of these are pieces that differ."""
    a, b = listed(WORDS), listed([spell(word) for word in WORDS])
    (found,) = vocabulary_lists.vocabulary_difference(a, b)
    assert says in found.says
    (back,) = vocabulary_lists.vocabulary_difference(b, a)
    assert says in back.says
    one = [*WORDS[:-1], "X"]
    (single,) = vocabulary_lists.vocabulary_difference(listed(WORDS), listed(one))
    assert "pieces differ" in single.says  # one piece shows no spelling


def test_what_is_stored_by_id_goes_with_the_pieces() -> None:
    """Types and scores that differ at no other ids are no second difference."""
    scores = [-float(i) for i in range(6)]
    a = listed(WORDS, scores=scores)
    swapped = [WORDS[1], WORDS[0], *WORDS[2:]]
    (found,) = vocabulary_lists.vocabulary_difference(a, listed(swapped, scores=scores))
    assert found.parts == ("pieces", "added", "scores")
    assert list(vocabulary_lists.score_difference(a, listed(swapped, scores=scores))) == []
    # A token that became a filler has another type there, and there alone.
    filled = [*WORDS[:-1], "[PAD5]"]
    (found,) = vocabulary_lists.vocabulary_difference(
        listed(WORDS), listed(filled, [1, 1, 1, 1, 1, 5])
    )
    assert found.parts == ("pieces", "added")
    (found,) = vocabulary_lists.vocabulary_difference(
        listed(WORDS), listed(filled, [1, 1, 3, 1, 1, 5])
    )
    assert found.parts == ("pieces",)
    # A list that ends sooner.
    (found,) = vocabulary_lists.vocabulary_difference(listed(WORDS), listed(WORDS[:4]))
    assert found.parts == ("pieces", "added") and found.says.startswith("B lacks 2 of A's pieces")
    # Scores that differ elsewhere too are another difference.
    others = [9.0, *scores[1:-1], 7.0]
    b = listed(swapped, scores=others)
    assert next(vocabulary_lists.vocabulary_difference(a, b)).parts == ("pieces", "added")
    assert len(list(vocabulary_lists.score_difference(a, b))) == 1


def test_one_score_is_not_one_value_of_all() -> None:
    scores = [-float(i) for i in range(6)]
    for changed, said in (({2: 5.0}, False), ({1: 5.0, 2: 5.0}, True)):
        other = [changed.get(i, score) for i, score in enumerate(scores)]
        (found,) = vocabulary_lists.score_difference(
            listed(WORDS, scores=scores), listed(WORDS, scores=other)
        )
        assert ("B's are one value" in found.says) is said


def test_tokens_that_moved_out_of_the_table_are_told_once() -> None:
    def filed(tokens: list[str], rowless: dict[int, str]) -> Any:
        made = listed(tokens)
        made.uses_lists, made.data = False, {}
        made.carried = SimpleNamespace(tokenizer_config={})
        made.vocabulary.rowless = rowless
        return made

    a = filed(WORDS, {})
    moved = filed(["new", *WORDS[:-1]], {6: WORDS[-1]})
    assert list(vocabulary_lists.rowless_token_difference(a, moved)) == []
    assert list(vocabulary_lists.rowless_token_difference(moved, a)) == []
    for side in (filed(WORDS, {6: "more"}), filed(["new", *WORDS[:-1]], {6: "x", 7: "more"})):
        assert len(list(vocabulary_lists.rowless_token_difference(a, side))) == 1
        assert len(list(vocabulary_lists.rowless_token_difference(side, a))) == 1


def test_a_special_token_whose_row_is_gone_is_still_stated() -> None:
    whole, cut = listed(WORDS), listed(WORDS[:4])
    cut.vocabulary.rowless = {4: WORDS[4], 5: "another"}
    assert special_ids._is_rowless(whole, cut, 4)
    assert not special_ids._is_rowless(whole, cut, 5)  # another token
    assert not special_ids._is_rowless(whole, cut, 3)
    assert not special_ids._is_rowless(whole, cut, None)
    assert not special_ids._is_rowless(cut, whole, 4)
