r"""Make text that came out of a file safe to print.

Names, metadata and templates of a file may hold characters that move the cursor, recolour the
terminal, reverse the reading direction or cannot be seen at all. All of them pass `escape`.
Notation: `\n`, `\r`, `\t`, else `\xHH`, `\uHHHH` or `\UHHHHHHHH`, the code point in lower-case
hexadecimal. A backslash of the text stays, unless the characters after it would make it look like
an escape: then it is doubled. So `\d+` and `C:\models` stay, `\n` (two characters) becomes `\\n`,
and `unescape(escape(text)) == text` for every text.
"""

import re

# Controls (Cc), formats (Cf: bidirectional controls, joiners, tags), surrogates (Cs), line and
# paragraph separators (Zl, Zp), and what Unicode calls Default_Ignorable_Code_Point (fillers,
# variation selectors and the like, which show nothing). Unicode 17; a test compares.
_UNSAFE_RANGES = (
    (0x0000, 0x001F), (0x007F, 0x009F), (0x00AD, 0x00AD), (0x034F, 0x034F), (0x0600, 0x0605),
    (0x061C, 0x061C), (0x06DD, 0x06DD), (0x070F, 0x070F), (0x0890, 0x0891), (0x08E2, 0x08E2),
    (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x200B, 0x200F), (0x2028, 0x202E),
    (0x2060, 0x206F), (0x3164, 0x3164), (0xD800, 0xDFFF), (0xFE00, 0xFE0F), (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0), (0xFFF0, 0xFFFB), (0x110BD, 0x110BD), (0x110CD, 0x110CD),
    (0x13430, 0x1343F), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF),
)  # fmt: skip
_UNSAFE = "".join(f"\\U{first:08x}-\\U{last:08x}" for first, last in _UNSAFE_RANGES)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# What makes a backslash an escape.
_CODE = r"[nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4}"
_LONGEST = 10  # characters of the longest escape

_ESCAPED = re.compile(rf"[{_UNSAFE}]|\\(?=\\|{_CODE}|[{_UNSAFE}])")
_RAW = re.compile(rf"(?!\n)[{_UNSAFE}]")
_UNIT = re.compile(rf"\\(?:\\|{_CODE})|.", re.DOTALL)  # of escaped text: never cut inside one
ELLIPSIS = "…"
LONGEST = 100  # characters of one name in an answer; of a longer one the middle is left out
_LONG_WORD = re.compile(rf"[^\s,;:()/]{{{LONGEST + 1},}}")


def escape(text: str, limit: int | None = None) -> str:
    """Return `text` on one line with everything invisible or dangerous spelled out.

    With `limit`, at most that many characters, the last being an ellipsis if something is missing.
    """
    if limit is not None and len(text) > limit + _LONGEST:
        return _shorten_escaped(_escape(text[: limit + _LONGEST]), limit)
    escaped = _escape(text)
    return escaped if limit is None or len(escaped) <= limit else _shorten_escaped(escaped, limit)


def guard_text(text: str) -> str:
    """Return `text` with unsafe characters spelled out; line breaks and existing escapes stay.

    It is for text that should be escaped already, in case some of it is not.
    """
    return text if text.isprintable() else _RAW.sub(_spell, text)


def escape_html(text: str, limit: int | None = None) -> str:
    """Return `escape(text, limit)` for HTML, in text and between quotes of an attribute."""
    import html

    return html.escape(escape(text, limit), quote=True)


def shorten(text: str, limit: int) -> str:
    """Return `text` in at most `limit` characters, its middle replaced by an ellipsis.

    The end of a tensor name says as much as its beginning, so both are shown. Escapes are not cut,
    and nothing is escaped.
    """
    if len(text) <= limit:
        return text
    if limit < 1:
        return ""
    tail = (limit - 1) // 2
    head = _shorten_escaped(text[: limit + _LONGEST], limit - tail)
    units = _UNIT.findall(text[max(0, len(text) - 4 * (tail + _LONGEST)) :])
    kept = ""
    while units and len(units[-1]) + len(kept) <= tail:
        kept = units.pop() + kept
    return head + kept


def shorten_names(text: str) -> str:
    """Return a sentence in which every name longer than LONGEST has an ellipsis in its middle.

    A name ends at a blank, a bracket, a slash or a mark, so that each component of a path is one.
    """
    return _LONG_WORD.sub(lambda found: shorten(found[0], LONGEST), text)


def _escape(text: str) -> str:
    """Return `text` with everything invisible or dangerous escaped."""
    if text.isascii() and text.isprintable() and "\\" not in text:
        return text
    return _ESCAPED.sub(_spell, text)


def _spell(match: re.Match[str]) -> str:
    """Return the escape of a matched character, a doubled backslash for a backslash."""
    return "\\\\" if match[0] == "\\" else spell_character(match[0])


def spell_character(character: str) -> str:
    """Return one character as its escape."""
    code = ord(character)
    if code < 0x100:
        return _SHORT.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _shorten_escaped(escaped: str, limit: int) -> str:
    """Return the beginning of escaped text and an ellipsis, at most `limit` characters.

    No escape is cut in two.
    """
    length = 0
    for match in _UNIT.finditer(escaped):
        if match.end() > limit - 1:
            break
        length = match.end()
    return (escaped[:length] + ELLIPSIS)[: max(limit, 0)]
