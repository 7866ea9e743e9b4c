"""Texts that show how a tokenizer splits: fixed ones, and some made of pieces that differ.

A *side* is the tokenizer of model A or of model B. A *piece* is the text of one token.
"""

from collections.abc import Iterable, Sequence

from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer
from aprfmt.tokenizer.vocabulary import BLANK

# One reason each: scripts, runs of digits, blanks, code, contractions, emoji, combining marks.
TEXTS: tuple[str, ...] = (
    "Hello world, this is a test.", "hello HELLO Hello hELLO", " leading", "trailing ",
    "two  blanks   three    four", "a" + " " * 23 + "b", "a\nb\n\nc\n\n\nd\r\ne\r\rf",
    "\tif x:\n\t\treturn\t\ty", " \n \n\n \t x \n", "7 42 123 1234 12345 1234567890",
    "3.14159 1,000,000 2024-01-31 0x1F 1e-05 12:34:56", "abc123def 4x4 x86_64 v2.0.1",
    "\u0663\u0664\u0665 \u00bd \u216b \u00b2 \uff11\uff12\uff13",
    "I'm sure they'll say it's fine, don't you? We've; he'd; you're 'tis",
    "I'M THEY'LL IT'S DON'T WE'VE HE'D", "it\u2019s \u201cquoted\u201d \u2013 \u2014 \u2026",
    "def f(x):\n    if x > 0:\n        return x ** 2  # done\n",
    "for (int i=0;i<n;++i) { a[i] += b->c; } // ok", "{\"key\": [1, 2.5, null], \"b\": \"c\\n\"}",
    "https://example.org/a/b?c=d&e=f#g", "user@example.com C:\\Users\\me ~/x/y.txt",
    "!!! ??? ... --- <=> (a)[b]{c} $x^2$ `y` ~z|", "camelCaseHTTPServer snake_case_name",
    "Caf\u00e9 na\u00efve r\u00e9sum\u00e9 \u00c5ngstr\u00f6m stra\u00dfe",
    "Cafe\u0301 nai\u0308ve A\u030angstro\u0308m e\u0301\u0323",
    "\ufb01ne \u212bngstr\u00f6m \uff21\uff22\uff23 \u2460",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u8fd9\u662f\u4e00\u4e2a\u6d4b\u8bd5\u3002",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 "
    "\u05e9\u05dc\u05d5\u05dd", "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440!",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u1781\u17d2\u1798\u17c2\u179a",
    "\U0001f680 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea "
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "a\u00a0b\u2003c\u3000d\u200be\ufefff", "a\x00b\x01c\x7fd\x85e",
    "Donaudampfschifffahrtsgesellschaft", "pneumonoultramicroscopicsilicovolcanoconiosis",
    "=" * 40 + "-" * 33 + "_" * 9, "\u2581a \u2581\u2581 b\u2581 \u0120hello \u010a",
    "The year 1999, the years 2000-2010: 100% of $5,000 (or #7).",
)  # fmt: skip
_MOST = 64  # texts made of one list's differences
_SAMPLE = 6_000  # pieces whose own text is encoded
_LONG = 200  # characters of a piece


def probe_texts(a: StatedTokenizer, b: StatedTokenizer) -> list[str]:
    """Return texts that may be split differently by two tokenizers: fixed ones, and some made.

    The latter contain special tokens, and pieces and merges that differ.
    """
    found = dict.fromkeys(TEXTS)
    specials = _special_texts(a) | _special_texts(b)
    for token in list(specials)[:_MOST]:
        found[f"a{token}b"] = None
        found[f"x {token} y"] = None
    found.update(dict.fromkeys(_merge_texts(a, b)))
    found.update(dict.fromkeys(_differing_piece_texts(a, b)))
    return [text for text in found if _is_valid_text(text)]


def piece_texts(texts: Iterable[str]) -> list[str]:
    """Return about _SAMPLE of the texts of pieces, spread evenly, without long ones."""
    every = [text for text in texts if text and "\ufffd" not in text and len(text) <= _LONG]
    step = max(1, len(every) // _SAMPLE)
    return every[::step]


def plain_text(token: str) -> str:
    """Return the text that a piece stands for; "" if its bytes are no text.

    Pieces are in byte-level or SentencePiece spelling; others are returned unchanged.
    """
    if BLANK in token:
        return token.replace(BLANK, " ")
    if all(character in _BYTES for character in token):
        try:
            return bytes(_BYTES[character] for character in token).decode()
        except UnicodeDecodeError:
            return ""
    return token


def special_texts_of(texts: Sequence[str], a: StatedTokenizer, b: StatedTokenizer) -> list[str]:
    """Return those of `texts` that contain an added token of either side."""
    specials = _special_texts(a) | _special_texts(b)
    return [text for text in texts if any(token in text for token in specials)]


def _byte_alphabet() -> dict[str, int]:
    """Return {character: byte}: the characters by which GPT-2's vocabulary spells bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found = {chr(byte): byte for byte in shown}
    hidden = (byte for byte in range(256) if byte not in shown)
    found.update({chr(256 + i): byte for i, byte in enumerate(hidden)})
    return found


_BYTES = _byte_alphabet()


def _special_texts(side: StatedTokenizer) -> dict[str, None]:
    """Return the texts of a side's added tokens as the keys of a dict, in order."""
    rows = side.added_tokens
    if rows:
        return {row["content"]: None for row in rows if row["content"].strip()}
    tokens = side.vocabulary.tokens
    return {tokens[i]: None for i in side.vocabulary.added if tokens[i].strip(" " + BLANK)}


def _merge_texts(a: StatedTokenizer, b: StatedTokenizer) -> list[str]:
    """Return the texts of some merges that one side lacks, or that have another rank.

    [] where the merges are equal.
    """
    left, right = (list(side.vocabulary.merges or ()) for side in (a, b))
    if left == right:
        return []
    sets = set(left), set(right)
    chosen = [m for m in left if m not in sets[1]][:_MOST]
    chosen += [m for m in right if m not in sets[0]][:_MOST]
    chosen += [x for x, y in zip(left, right, strict=False) if x != y][:_MOST]
    return [plain_text(merge.replace(" ", "")) for merge in chosen]


def _differing_piece_texts(a: StatedTokenizer, b: StatedTokenizer) -> list[str]:
    """Return the texts of some pieces with another id, score or type, or on one side only."""
    rows = []
    for side in (a, b):
        v = side.vocabulary
        scores = [*(v.scores or ()), *[0.0] * len(v.tokens)]
        triples = enumerate(zip(v.tokens, v.types, scores, strict=False))
        rows.append({token: (i, kind, score) for i, (token, kind, score) in triples})
    apart = [token for token, row in rows[0].items() if rows[1].get(token) != row]
    apart += [token for token in rows[1] if token not in rows[0]]
    step = max(1, len(apart) // _MOST)
    return [plain_text(token) for token in [*apart[:_MOST], *apart[::step][:_MOST]]]


def _is_valid_text(text: str) -> bool:
    """Return whether a text is not empty and can be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return bool(text)
