"""Pieces of a vocabulary as people read them: ` of` for the byte-level `Ġof` and for `▁of`.

Byte-level vocabularies spell every byte as a printable character (GPT-2's table: printable bytes
of Latin-1 as they are, the others from U+0100 on); SentencePiece spells a space as `▁`.
"""

from collections.abc import Mapping
from functools import cache

from aprfmt.tokenizer.vocabulary import BLANK, BYTE_TOKEN


@cache
def byte_level_alphabet() -> Mapping[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


def readable_piece(piece: str, kind: str) -> str:
    r"""Return a piece of a vocabulary of this `kind` as text.

    Bytes that are no UTF-8 by themselves stay visible as `\xHH`; a piece that its kind could not
    have spelled (an added token) is returned as it is.
    """
    if kind == "bpe":
        table = byte_level_alphabet()
        if all(character in table for character in piece):
            return bytes(table[character] for character in piece).decode(
                "utf-8", "backslashreplace"
            )
        return piece
    return piece if BYTE_TOKEN.fullmatch(piece) else piece.replace(BLANK, " ")
