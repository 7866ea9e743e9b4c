"""Patterns out of files match what Python's engine matches, and never take long."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.base.bounded_regex import MOST, _Matcher, _single, matches_start
from aprfmt.errors import CodecError

_ATOMS = ["a", "b", "c", ".", "[ab]", "[^a]", r"[\d.]", r"\.", r"\d", r"\w", r"[^\s]", "(a|b)",
          "(ab|a)", "(?:a|)", "(?=a)", "(?!b)", "^", "$", r"\b", r"\B", r"\Z"]  # fmt: skip
_FIXED = ("^", "$", r"\b", r"\B", r"\Z", "(?=a)", "(?!b)")
_TIMES = ["", "", "*", "+", "?", "{1,2}", "*?", "{2}"]


@st.composite
def patterns(draw: st.DrawFn) -> str:
    pattern = ""
    for _ in range(draw(st.integers(1, 5))):
        atom = draw(st.sampled_from(_ATOMS))
        atom += "" if atom in _FIXED else draw(st.sampled_from(_TIMES))
        pattern += (
            f"({atom}){draw(st.sampled_from(['*', '+', '']))}" if draw(st.booleans()) else atom
        )
    return pattern


@given(patterns(), st.text("abc.1\n", max_size=7))
def test_as_pythons_own_engine(pattern: str, name: str) -> None:
    expected = re.compile(pattern).match(name) is not None
    assert matches_start(pattern, name) is expected
    tree = re._parser.parse(pattern).data  # type: ignore[attr-defined]
    assert bool(_Matcher(name).sequence(tree, [0])) is expected  # whichever engine was taken


@pytest.mark.parametrize("pattern", ["(a+)+$", "((a|a)*)*c", ".*a.*a.*a.*a.*a.*c", "(a*a*)*b"])
def test_what_pythons_engine_never_ends_with_ends(pattern: str) -> None:
    assert not matches_start(pattern, "a" * 240 + "d")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("(", "no regular expression"), ("(?i)a", "sets flags"), (r"(a)\1", "groupref"),
     ("(?<=a)b", "assert"), ("a{2,1000}", "more than 64"), ("a" * (MOST + 1), "at most")],
)  # fmt: skip
def test_what_is_not_read_is_said(pattern: str, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        matches_start(pattern, "a")


@pytest.mark.parametrize(
    "pattern",
    [r"[\d]", r"[^\d]", r"[\s_]", r"[^\w-]", r"[a-f\D]", "[^a-f]", "[xz]", "x", "[^x]", "."],
)
def test_one_character_as_pythons_own_engine(pattern: str) -> None:
    node = re._parser.parse(pattern).data[0]  # type: ignore[attr-defined]
    for char in "".join(map(chr, range(128))) + "é٣\u2028":
        assert _single(node)(char) is (re.fullmatch(pattern, char) is not None), repr(char)
