"""Text of a file is printed without anything that a terminal or an eye would be fooled by."""

import html
import re
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.base.text_escape import ELLIPSIS, escape, escape_html, guard_text, shorten

# Any code point, surrogates too, with what is near an escape made frequent.
TEXT = st.text(
    st.one_of(st.sampled_from("\\nrtxuU0019afAF10\x1b\u202e\n"), st.characters(codec=None)),
    max_size=60,
)

ESCAPE = re.compile(r"\\(?:[\\nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def unescape(escaped: str) -> str:
    """Undo `escape` called without a limit."""
    short = {"\\\\": "\\", "\\n": "\n", "\\r": "\r", "\\t": "\t"}
    return ESCAPE.sub(lambda match: short.get(match[0]) or chr(int(match[0][2:], 16)), escaped)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("blk.0.attn_q.weight", "blk.0.attn_q.weight"),
        ("naïve ▁é 中文 😀", "naïve ▁é 中文 😀"),
        ("\x1b[31mred\x07", r"\x1b[31mred\x07"),
        ("a\nb\tc\rd\0", r"a\nb\tc\rd\x00"),
        ("\x7f\x80\x9b", r"\x7f\x80\x9b"),
        ("abc\u202edcba\u202c", r"abc\u202edcba\u202c"),
        ("\u2066\u2069\u200e\u200f\u061c", r"\u2066\u2069\u200e\u200f\u061c"),
        ("line\u2028par\u2029", r"line\u2028par\u2029"),
        ("zero\u200bwidth\ufeff\u2060", r"zero\u200bwidth\ufeff\u2060"),
        ("half\ud800", r"half\ud800"),
        ("tag\U000e0041", r"tag\U000e0041"),
        (r"\d+ C:\models", r"\d+ C:\models"),
        (r"\n \x1b \u202e", r"\\n \\x1b \\u202e"),
        ("\\\x1b", r"\\\x1b"),
        (r"\\d", r"\\\d"),
        ("end\\", "end\\"),
    ],
)
def test_notation(text: str, expected: str) -> None:
    assert escape(text) == expected


def test_no_control_or_format_character_passes() -> None:
    # The judge is Python's Unicode database, not our table.
    categories = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    unsafe = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) in categories]
    assert len(unsafe) > 2200
    assert [c for c in unsafe if not escape(c).isascii() or not escape(c).isprintable()] == []


def test_letters_of_all_scripts_pass() -> None:
    # Hangul fillers are letters to Unicode, and show nothing.
    fillers = set("\u115f\u1160\u3164\uffa0")
    letters = [c for c in map(chr, range(0x110000)) if unicodedata.category(c)[0] == "L"]
    assert {c for c in letters if escape(c) != c} == fillers


@given(TEXT)
def test_round_trip(text: str) -> None:
    escaped = escape(text)
    assert unescape(escaped) == text
    assert len(escaped.splitlines()) <= 1
    escaped.encode("utf-8")


@given(TEXT, st.integers(0, 40))
def test_limit_keeps_escapes_whole(text: str, limit: int) -> None:
    whole, cut = escape(text), escape(text, limit)
    assert len(cut) <= limit
    if len(whole) <= limit:
        assert cut == whole
    elif limit:
        assert cut.endswith(ELLIPSIS)
        assert whole.startswith(cut.removesuffix(ELLIPSIS))
        assert text.startswith(unescape(cut.removesuffix(ELLIPSIS)))
        assert len(cut) > limit - 11  # no more is lost than the longest escape


def test_limit_looks_past_its_end() -> None:
    assert escape(r"a\x1bZZZZZZZZZZZZZZ", 4) == "a\\\\…"


def test_limit_bounds_the_work() -> None:
    assert escape("\x1b" * 10_000_000, 9) == r"\x1b\x1b" + ELLIPSIS


@pytest.mark.parametrize(
    ("text", "limit", "expected"),
    [
        ("short", 5, "short"),
        ("model.layers.0.self_attn.q_proj.weight", 21, "model.laye…roj.weight"),
        (r"aaaa\x1bbbbb\x1bcc", 9, "aaaa…cc"),
        ("abcdef", 1, "…"),
        ("abcdef", 0, ""),
    ],
)
def test_shorten(text: str, limit: int, expected: str) -> None:
    assert shorten(text, limit) == expected


def test_html() -> None:
    text = "<script>'\"&\x1b\u202e"
    assert escape_html(text) == "&lt;script&gt;&#x27;&quot;&amp;\\x1b\\u202e"
    assert html.unescape(escape_html(text)) == escape(text)
    assert escape_html("<" * 50, 3) == "&lt;&lt;…"


def test_guard_spells_what_was_forgotten_and_leaves_escapes() -> None:
    assert guard_text("plain \\x1b é\n\\n") == "plain \\x1b é\n\\n"
    assert guard_text("a\x1b[2J\u202e\r\\x1b") == "a\\x1b[2J\\u202e\\r\\x1b"
    for text in (escape("\x1b\\x1b\n"), "", "x"):
        assert guard_text(text) == text
