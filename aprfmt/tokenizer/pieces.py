"""Converts vocabulary pieces to readable text: ` of` for the byte-level `Ġof` and for `▁of`."""

from collections.abc import Mapping
from functools import cache

from aprfmt.tokenizer.vocabulary import BLANK, BYTE_TOKEN


@cache
def byte_level_alphabet() -> Mapping[str, int]:
    """Return {character: byte} of a byte-level vocabulary."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


def readable_piece(piece: str, kind: str) -> str:
    r"""Return a token's text in a vocabulary of this `kind` as readable text.

    Bytes that are no UTF-8 by themselves stay visible as `\xHH`. A piece that its kind could not
    have spelled (an added token) is returned unchanged.
    """
    if kind == "bpe":
        table = byte_level_alphabet()
        if all(character in table for character in piece):
            return bytes(table[character] for character in piece).decode(
                "utf-8", "backslashreplace"
            )
        return piece
    return piece if BYTE_TOKEN.fullmatch(piece) else piece.replace(BLANK, " ")
