"""SentencePiece BPE that encodes directly by the scores, without building merges.

A *piece* is the text of one token; while a text is merged, its *parts* are characters and what was
joined of them. The text is cut into characters. The two neighbouring parts that join to the best
piece are joined, until no two parts join to a piece; characters without a piece then become byte
tokens. The order of joining is that of `build.merges_from_scores`, so both give the same ids.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import groupby

from aprfmt.tokenizer.build import ids_split_first, piece_priorities
from aprfmt.tokenizer.keys import BYTE, CONTROL, UNKNOWN, USER_DEFINED
from aprfmt.tokenizer.vocabulary import BLANK, BYTE_TOKEN, Vocabulary

# Unicode's White_Space, as in `tokenizers`; Python's own class has four control characters more.
_SPACES = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*")
# An entry of the queue: two keys, -left length, -right length, id of the joined piece, position.
_Pair = tuple[float, int, int, int, int, int]


class SpmEngine:
    """An Engine for a SentencePiece BPE vocabulary; FormatError for one without scores."""

    def __init__(self, vocabulary: Vocabulary, where: str) -> None:
        """Prepare the pieces that merging can make; FormatError without scores.

        `where` begins its message.
        """
        self._vocabulary = vocabulary
        self._keys = piece_priorities(vocabulary, where)
        self._unk = vocabulary.ids.get("unk")

    @cached_property
    def _id_by_token(self) -> dict[str, int]:
        """{token: id} of the vocabulary."""
        tokens = self._vocabulary.tokens
        return dict(zip(tokens, range(len(tokens)), strict=True))

    @cached_property
    def _byte_by_id(self) -> dict[int, int]:
        """{token id: byte}; in a damaged vocabulary two ids may have the same byte."""
        tokens = self._vocabulary.tokens
        return {
            i: int(tokens[i][3:5], 16)
            for i, kind in enumerate(self._vocabulary.types)
            if kind == BYTE and BYTE_TOKEN.fullmatch(tokens[i])
        }

    @cached_property
    def _id_by_byte(self) -> dict[int, int]:
        """{byte: token id}."""
        return {byte: i for i, byte in self._byte_by_id.items()}

    def id_of(self, token: str) -> int | None:
        """Return the id of a token's spelling; None if no token has it."""
        return self._id_by_token.get(token)

    def token(self, i: int) -> str | None:
        """Return a token's spelling in the vocabulary; None for an id out of range."""
        return self._vocabulary.tokens[i] if 0 <= i < self.size else None

    def is_control(self, i: int) -> bool:
        """Return whether a token is special: a control token or the unknown token."""
        return 0 <= i < self.size and self._vocabulary.types[i] in (CONTROL, UNKNOWN)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return len(self._vocabulary.tokens)

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the ids of a text. `add_special` is ignored: the caller adds bos and eos."""
        found: list[int] = []
        for piece in self._split_off_added(text, parse_special):
            if isinstance(piece, int):
                found.append(piece)
                continue
            blank = BLANK if self._vocabulary.add_space_prefix else ""
            self._merge_and_emit(blank + piece.replace(" ", BLANK), found)
        return found

    # --- tokens split off whole -----------------------------------------------------------------

    @cached_property
    def _added_token_index(self) -> dict[bool, dict[str, tuple[list[int], dict[str, int]]]]:
        """{parse_special: {first character: (lengths, {text: id})}} of added tokens.

        User-defined tokens are split off in both cases, control tokens only if `parse_special`. The
        lengths are sorted, longest first.
        """
        tables: dict[bool, dict[str, tuple[list[int], dict[str, int]]]] = {True: {}, False: {}}
        for i in ids_split_first(self._vocabulary):
            token = self._vocabulary.tokens[i]
            user = self._vocabulary.types[i] == USER_DEFINED
            for parse_special in (True, False) if user else (True,):
                _, texts = tables[parse_special].setdefault(token[0], ([], {}))
                texts.setdefault(token, i)
        for table in tables.values():
            for lengths, texts in table.values():
                lengths.extend(sorted(set(map(len, texts)), reverse=True))
        return tables

    def _split_off_added(self, text: str, parse_special: bool) -> Iterator[str | int]:
        """Yield the ids of added tokens (leftmost, then longest) and the texts between them.

        Texts are str, ids are int.
        """
        table = self._added_token_index[parse_special]
        start = at = 0
        while at < len(text):
            lengths, texts = table.get(text[at], ((), {}))
            for length in lengths:
                i = texts.get(text[at : at + length])
                if i is not None:
                    if start < at:
                        yield text[start:at]
                    yield i
                    at += length
                    if i in self._vocabulary.rstrip:
                        at = _SPACES.match(text, at).end()  # type: ignore[union-attr]
                    start = at
                    break
            else:
                at += 1
        if start < at:
            yield text[start:at]

    # --- merging --------------------------------------------------------------------------------

    def _merge_and_emit(self, text: str, found: list[int]) -> None:
        """Append the ids of a text without special tokens to `found`."""
        parts: list[str] = list(text)  # "" once merged into the part on the left
        after = [*range(1, len(parts)), -1]
        before = list(range(-1, len(parts) - 1))
        queue = [
            pair for at in range(len(parts) - 1) if (pair := self._pair_entry(parts, at, at + 1))
        ]
        heapify(queue)
        while queue:
            _, _, left, right, _, at = heappop(queue)
            follower = after[at]
            if follower < 0 or len(parts[at]) != -left or len(parts[follower]) != -right:
                continue  # one of the two is already merged
            parts[at] += parts[follower]
            parts[follower] = ""
            after[at] = after[follower]
            for one, other in ((at, after[at]), (before[at], at)):
                if one >= 0 and other >= 0 and (pair := self._pair_entry(parts, one, other)):
                    heappush(queue, pair)
            if after[at] >= 0:
                before[after[at]] = at
        self._emit_ids((part for part in parts if part), found)

    def _pair_entry(self, parts: Sequence[str], at: int, follower: int) -> _Pair | None:
        """Return the queue's entry for two neighbouring parts; None if they do not make a piece.

        `at` and `follower` are their indices in `parts`.
        """
        left, right = parts[at], parts[follower]
        found = self._keys.get(left + right)
        if found is None or left not in self._keys or right not in self._keys:
            return None
        key, second, i = found
        return key, second, -len(left), -len(right), i, at

    def _emit_ids(self, parts: Iterator[str], found: list[int]) -> None:
        """Append the ids of merged parts to `found`; parts without a piece become bytes or unk."""
        unknown = False  # a run of characters without byte tokens becomes one unknown token
        for part in parts:
            piece = self._keys.get(part)
            if piece is not None:
                found.append(piece[2])
                unknown = False
                continue
            ids = [i for byte in part.encode() if (i := self._id_by_byte.get(byte)) is not None]
            if len(ids) == len(part.encode()):
                found.extend(ids)
                unknown = False
            elif self._unk is not None and not unknown:
                found.append(self._unk)
                unknown = True

    # --- back to text ---------------------------------------------------------------------------

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids, with `skip_special` without special tokens.

        Each byte that is not valid UTF-8 becomes U+FFFD.
        """
        tokens, types = self._vocabulary.tokens, self._vocabulary.types
        hidden = (CONTROL, UNKNOWN) if skip_special else ()
        shown = [i for i in ids if 0 <= i < len(tokens) and types[i] not in hidden]
        text = ""
        for is_byte, run in groupby(shown, self._byte_by_id.__contains__):
            if not is_byte:
                text += "".join(tokens[i] for i in run).replace(BLANK, " ")
                continue
            raw = bytes(self._byte_by_id[i] for i in run)
            try:
                text += raw.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(raw)
        return text.removeprefix(" ") if self._vocabulary.add_space_prefix else text
