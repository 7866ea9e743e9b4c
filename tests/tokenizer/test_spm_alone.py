"""Texts in pieces of a SentencePiece vocabulary that is written down here, worked by hand."""

from typing import Any

import pytest

from aprfmt.errors import FormatError
from aprfmt.tokenizer.keys import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from aprfmt.tokenizer.spm import SpmEngine
from aprfmt.tokenizer.vocabulary import Vocabulary

B = "\u2581"
Row = tuple[str, int, float]
BASE: tuple[Row, ...] = (
    ("<unk>", UNKNOWN, 0.0),  # 0
    ("<s>", CONTROL, 0.0),
    ("a", NORMAL, -10.0),  # 2
    ("b", NORMAL, -11.0),
    ("c", NORMAL, -12.0),
    (B, NORMAL, -13.0),  # 5
    ("ab", NORMAL, -2.0),
    ("bc", NORMAL, -1.0),
    ("abc", NORMAL, -3.0),  # 8
    (B + "a", NORMAL, -4.0),
    ("<x>", USER_DEFINED, 0.0),  # 10
    ("<xy>", USER_DEFINED, 0.0),
)


def engine(*more: Row, without: tuple[str, ...] = (), **settings: Any) -> SpmEngine:
    """Return the engine of BASE and more rows (text, type, score); `unk` is 0 if not said."""
    rows = [row for row in (*BASE, *more) if row[0] not in without]
    tokens, types, scores = zip(*rows, strict=True)
    settings.setdefault("ids", {"unk": 0})
    vocabulary = Vocabulary("spm", tokens, types, scores=scores, **settings)
    return SpmEngine(vocabulary, "f")


def ids(made: SpmEngine, text: str, *, special: bool = False) -> list[int]:
    return made.encode(text, False, special)


def test_a_vocabulary_without_scores_is_refused() -> None:
    with pytest.raises(FormatError, match=r"^f: a SentencePiece vocabulary without scores"):
        SpmEngine(Vocabulary("spm", ["a"], [NORMAL]), "f")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("a", [2]),
        ("ab", [6]),
        ("abc", [8]),  # bc first, and then a with it
        ("bcb", [7, 3]),
        ("abab", [6, 6]),
        ("cab", [4, 6]),
        (" a", [9]),
        ("b c", [3, 5, 4]),
        ("a a", [2, 9]),
        ("abcabc", [8, 8]),
    ],
)
def test_the_pair_of_the_best_score_is_joined_first(text: str, expected: list[int]) -> None:
    assert ids(engine(), text) == expected


def test_of_equal_scores_the_leftmost_pair_is_joined() -> None:
    made = engine(("aa", NORMAL, -1.5), ("aaa", NORMAL, -1.7))
    assert ids(made, "aaa") == [13]
    assert ids(made, "aaaa") == [12, 12]
    assert ids(made, "aaaaa") == [12, 13]


def test_a_part_that_was_joined_takes_no_old_place_in_the_queue() -> None:
    """Without abc: bc is joined first, and the a before it stays alone."""
    assert ids(engine(without=("abc",)), "abc") == [2, 7]
    assert ids(engine(without=("abc", "bc")), "abcab") == [6, 4, 6]


def test_a_blank_comes_before_the_text_where_the_vocabulary_says_so() -> None:
    assert ids(engine(add_space_prefix=True), "a") == [9]
    assert ids(engine(add_space_prefix=True), "a<x>a") == [9, 10, 9]
    assert ids(engine(add_space_prefix=False), "a<x>a") == [2, 10, 2]


def test_added_tokens_are_split_off_whole() -> None:
    made = engine()
    assert ids(made, "<xy>") == [11]  # the longest
    assert ids(made, "<x>y") == [10, 0]
    assert ids(made, "ab<x>bc") == [6, 10, 7]
    assert ids(made, "<x><xy>") == [10, 11]
    assert ids(made, "<s>a", special=True) == [1, 2]
    assert ids(made, "<s>a") == [0, 2]
    assert ids(made, "<x>", special=True) == [10]
    assert ids(made, "<unk>b", special=True) == [0, 3]


def test_blanks_behind_a_token_of_that_kind_are_taken() -> None:
    made = engine(rstrip=frozenset({10}))
    assert ids(made, "<x>  \t\u3000a") == [10, 2]
    assert ids(made, "<x>") == [10]
    assert ids(made, "<xy> a") == [11, 9]
    assert ids(made, "<x>\x1ca") == [10, 0, 2]  # a blank of Python's, and not of Unicode's


def test_characters_without_a_piece_are_bytes_or_one_unknown() -> None:
    rows = [(f"<0x{byte:02X}>", BYTE, 0.0) for byte in "é".encode()]
    made = engine(*rows)
    assert ids(made, "aé") == [2, 12, 13]
    assert ids(made, "ééa") == [12, 13, 12, 13, 2]
    assert ids(made, "xé") == [0, 12, 13]
    assert ids(made, "xyz") == [0]
    assert ids(made, "xayz") == [0, 2, 0]
    assert ids(made, "xéy") == [0, 12, 13, 0]
    assert ids(engine(rows[0]), "éa") == [0, 2]  # one of two bytes is none
    assert ids(engine(ids={}), "xa") == [2]


def test_what_a_token_is() -> None:
    made = engine()
    assert made.size == 12 and made.id_of("ab") == 6 and made.id_of("zz") is None
    assert made.token(0) == "<unk>" and made.token(11) == "<xy>"
    assert made.token(12) is None and made.token(-1) is None
    assert [made.is_control(i) for i in (-1, 0, 1, 2, 10, 12)] == [0, 1, 1, 0, 0, 0]


def test_ids_are_made_text_again() -> None:
    made = engine(add_space_prefix=True)
    assert made.decode([9, 10, 8, 9], False) == "a<x>abc a"
    assert engine().decode([9, 6], False) == " aab"
    assert made.decode([1, 0, 2, 1, 10], False) == "<s><unk>a<s><x>"
    assert made.decode([1, 0, 2, 1, 10], True) == "a<x>"
    assert made.decode([-1, 2, 12, 99], True) == "a"


def test_bytes_are_made_characters_run_by_run() -> None:
    made = engine(("<0xC3>", BYTE, 0.0), ("<0xA9>", BYTE, 0.0), ("<0x41>", BYTE, 0.0))
    assert made.decode([2, 12, 13, 2], True) == "aéa"
    assert made.decode([12, 2, 13], True) == "\ufffda\ufffd"
    assert made.decode([12, 13, 12], True) == "\ufffd" * 3
    assert made.decode([14], True) == "A"


def test_a_byte_token_of_another_spelling_is_text() -> None:
    made = engine(("<0xZZ>", BYTE, 0.0))
    assert made.decode([12], True) == "<0xZZ>"
