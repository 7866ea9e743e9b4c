"""Patterns out of files match what Python's engine matches, and never take long."""

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.base import bounded_regex
from aprfmt.base.bounded_regex import MOST, matches_start
from aprfmt.errors import CodecError

_ATOMS = (
    r"a b c . [ab] [.] [:.] [^a] [\d.] \. \d \w [^\s] (a|b) (ab|a) (?:a|) (?=a) (?!b) ^ $ \b \B \Z"
).split()
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


@given(patterns(), st.text("abc.1\n", min_size=1, max_size=7))
def test_as_pythons_own_engine(pattern: str, name: str) -> None:
    expected = re.compile(pattern).match(name) is not None
    assert matches_start(pattern, name) is expected


@pytest.mark.parametrize("pattern", ["(a+)+$", "((a|a)*)*c", ".*a.*a.*a.*a.*a.*c", "(a*a*)*b"])
def test_what_pythons_engine_never_ends_with_ends(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers, or says that it takes too long."""
    monkeypatch.setattr(bounded_regex, "SECONDS", 0.2)
    bounded_regex._compile_matcher.cache_clear()
    for name in ("a" * 240 + "d", "a" * 240 + "c" + "d"):
        with suppress(CodecError):
            assert matches_start(pattern, name) is (pattern.endswith("c") and "c" in name)


def test_a_pattern_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_regex, "SECONDS", 0.05)
    bounded_regex._compile_matcher.cache_clear()
    with pytest.raises(CodecError, match="takes longer than 0 s on a name of 241 characters"):
        matches_start("(?:a|aa|[ab]a)*[bd][cd]$", "a" * 240 + "d")


@pytest.mark.parametrize(
    ("pattern", "says"),
    [("(", "no regular expression"), ("a" * (MOST + 1), "at most"), ("(((a{64}){64}){64})", "4096"),
     (r"\\p{L}", "no count"), ("(?:ab){e<=1}", "no count"), ("[[:alpha:]]", "by name"),
     ("a{5000}", "over 4096")],
)  # fmt: skip
def test_what_is_not_read_is_said(pattern: str, says: str) -> None:
    with pytest.raises(CodecError, match=says):
        matches_start(pattern, "a")


_READ = (r"(a)\1", "(?i)A", "(?<!b)a", r"a\{1", "a{,3}b", "a{2,}", "[.:]?a", "[=.]?b")


@pytest.mark.parametrize("pattern", _READ)
@pytest.mark.parametrize("name", ["aab", "a{1", "A", "b"])
def test_what_python_reads_is_read(pattern: str, name: str) -> None:
    assert matches_start(pattern, name) is (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    "pattern",
    [r"[\d]", r"[^\d]", r"[\s_]", r"[^\w-]", r"[a-f\D]", "[^a-f]", "[xz]", "x", "[^x]", "."],
)
def test_one_character_as_pythons_own_engine(pattern: str) -> None:
    ours = [chr(code) for code in range(128) if not 0x1C <= code <= 0x1F]  # see the module
    for char in [*ours, "é", "٣", "\u2028"]:
        expected = re.fullmatch(pattern, char) is not None
        assert matches_start(rf"{pattern}\Z", char) is expected, repr(char)
