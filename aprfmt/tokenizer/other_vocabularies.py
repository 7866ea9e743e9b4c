"""Files of a folder that list tokens by id, next to the tokenizer.json that most programs read.

Slow tokenizers of transformers, llama.cpp's converter and other programs read vocab.json,
vocab.txt, added_tokens.json or a SentencePiece model. Where such a file gives another id to a
token, the same text gets other ids there, and a conversion another vocabulary.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aprfmt.errors import AprfmtError
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer

_LARGEST = 64 << 20  # bytes of a file that is read
_APART = 0.5  # of a file's ids with another token: with more it numbers tokens in another way,
_KNOWN = 0.9  # where tokenizer.json has that share of its tokens, else it is of another vocabulary
_PIECES, _TEXT, _LENGTH_DELIMITED = 1, 1, 2  # protobuf: ModelProto.pieces, SentencePiece.piece


@dataclass(frozen=True, slots=True)
class OtherVocabulary:
    """A file that lists tokens otherwise.

    `apart` has {id: (its token, tokenizer.json's token of that id, or None where that has no such
    id)}, and `moved` has {id: tokenizer.json's id of the token} of the latter.
    """

    name: str
    apart: Mapping[int, tuple[str, str | None]]
    moved: Mapping[int, int]

    @property
    def says(self) -> str:
        """The number of ids with another token, and the first of them."""
        first, (theirs, own) = next(iter(self.apart.items()))
        count = len(self.apart)
        there = repr(own) if own is not None else f"of id {self.moved[first]}"
        return (
            f"{count} {'id has' if count == 1 else 'ids have'} another token than in "
            f"tokenizer.json, the first {first}: {theirs!r}, there {there}"
        )


def other_vocabularies(side: StatedTokenizer) -> Iterator[OtherVocabulary]:
    """Yield each file beside a folder's tokenizer.json that gives ids to other tokens.

    Tokens added to a vocabulary may rename its unused pieces, so that only added_tokens.json speaks
    of these. An id that tokenizer.json lacks counts where that has its token under another id.
    A file that numbers the same tokens in another way, as fairseq does, is left out, and so is one
    that cannot be read.
    """
    folder = side.carried.model.folder
    if folder is None or side.uses_lists:
        return
    own = dict(enumerate(side.vocabulary.tokens)) | dict(side.vocabulary.rowless)
    ids = {text: i for i, text in own.items()}
    added = {row["id"] for row in side.added_tokens}
    for name, read in _READERS.items():
        path = folder.path / name
        try:
            if not path.is_file() or path.stat().st_size > _LARGEST:
                continue
            stated = read(path)
        except (OSError, ValueError, RecursionError, AprfmtError):
            continue
        whole = name == "added_tokens.json"
        listed = {i: text for i, text in stated.items() if whole or i not in added}
        moved = {i: ids[text] for i, text in listed.items() if i not in own and text in ids}
        common = {i: text for i, text in listed.items() if i in own or i in moved}
        apart = {i: (text, own.get(i)) for i, text in sorted(common.items()) if text != own.get(i)}
        known = len(ids.keys() & common.values()) >= _KNOWN * len(common)
        foreign = not known and len(common) > _APART * len(own)
        if apart and (whole or len(apart) <= _APART * len(common) or foreign):
            yield OtherVocabulary(name, apart, moved)


def _read_json(path: Path) -> dict[int, str]:
    """Return {id: token} of a JSON file that holds {token: id}."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, Mapping):
        return {}
    return {i: text for text, i in data.items() if type(i) is int}


def _read_lines(path: Path) -> dict[int, str]:
    """Return {number of the line: text} of a file with a token a line."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return dict(enumerate(line.removesuffix("\r") for line in lines if line))


def _read_sentencepiece(path: Path) -> dict[int, str]:
    """Return {id: piece} of a SentencePiece model (sentencepiece_model.proto)."""
    return {
        i: text.decode("utf-8")
        for i, piece in enumerate(_fields(path.read_bytes(), _PIECES))
        for text in _fields(piece, _TEXT)[:1]
    }


def _fields(data: bytes, number: int) -> Sequence[bytes]:
    """Return the values of a length-delimited protobuf field, in their order.

    Raises ValueError for bytes that are no message.
    """
    found, at = [], 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _LENGTH_DELIMITED:
            length, at = _varint(data, at)
            if at + length > len(data):
                raise ValueError("a field that is longer than its message")
            if key >> 3 == number:
                found.append(data[at : at + length])
            at += length
        elif kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            raise ValueError("no field of protobuf")
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return (number, the offset after it) of a protobuf varint at `at`; ValueError for none."""
    number = 0
    for shift in range(0, 64, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
    raise ValueError("a varint without an end")


_READERS = {
    "vocab.json": _read_json,
    "vocab.txt": _read_lines,
    "added_tokens.json": _read_json,
    "tokenizer.model": _read_sentencepiece,
    "spiece.model": _read_sentencepiece,
}
