"""The tokenizer engine that uses the `tokenizers` library, for any tokenizer.json."""

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from aprfmt.errors import FormatError
from aprfmt.tokenizer.hf_json import FLAGS

_STDERR = 2
_LOCK = threading.RLock()  # guards stderr's descriptor, which _unheard replaces
_MAX_ID = (1 << 32) - 1  # token ids are u32 there


@contextmanager
def _library_errors(where: str, what: str) -> Iterator[None]:
    """Inside the `with`, turn errors and panics of `tokenizers` into FormatError.

    `where` and `what` begin its message.
    """
    try:
        with _silence_panics():
            yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic is not an Exception
        raise FormatError(f"{where}: {what}: {error}") from None


@contextmanager
def _silence_panics() -> Iterator[None]:
    """Inside the `with`, discard what is written to stderr: the lines of a panic."""
    with _LOCK, open(os.devnull, "wb") as nothing:
        try:
            kept = os.dup(_STDERR)
        except OSError:  # closed: nothing can be written there
            yield
            return
        try:
            os.dup2(nothing.fileno(), _STDERR)
            yield
        finally:
            os.dup2(kept, _STDERR)
            os.close(kept)


def _reading_errors(where: str) -> AbstractContextManager[None]:
    """Return the context manager that raises errors of reading tokenizer.json as FormatError."""
    return _library_errors(where, "not a tokenizer that can be read")


class HfEngine:
    """An Engine on a tokenizers.Tokenizer; `where` begins the messages of FormatError."""

    def __init__(self, tokenizer: Any, where: str) -> None:
        """Wrap a tokenizers.Tokenizer, with truncation and padding switched off."""
        self._tokenizer = tokenizer
        self._where = where
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._special = self._special_ids()

    @classmethod
    def from_text(cls, text: str, where: str) -> "HfEngine":
        """Return the engine of a tokenizer.json, run in this process without limits.

        `isolated` judges whether that is safe. Raises FormatError if the library cannot read the
        file.
        """
        from tokenizers import Tokenizer

        with _reading_errors(where):
            return cls(Tokenizer.from_str(text), where)

    @classmethod
    def from_data(cls, data: Mapping[str, Any], where: str) -> "HfEngine":
        """Return the engine of a parsed BPE tokenizer.json; twice as fast as from its text."""
        from tokenizers import Tokenizer, models

        model = data["model"]
        options = {k: v for k, v in model.items() if k != "type" and v is not None}
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        shell = {**data, "model": empty, "added_tokens": []}
        with _reading_errors(where):
            parts = Tokenizer.from_str(json.dumps(shell))
            made = Tokenizer(models.BPE(**options))
            for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
                if getattr(parts, name) is not None:
                    setattr(made, name, getattr(parts, name))
            engine = cls(made, where)
            engine.add_tokens(data["added_tokens"])
            return engine

    def _special_ids(self) -> frozenset[int]:
        """Return the ids of the added tokens that are special."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def added_token_flags(self) -> dict[str, Mapping[str, bool]]:
        """Return {token: {flag: value}} of the added tokens, which are split off whole."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return {t.content: {flag: getattr(t, flag) for flag in FLAGS} for t in added}

    def add_tokens(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add tokens given by content and flags, or change the flags of existing ones."""
        from tokenizers import AddedToken

        tokens = [AddedToken(row["content"], **{f: row[f] for f in FLAGS}) for row in rows]
        if tokens:
            self._tokenizer.add_tokens(tokens)
            self._special = self._special_ids()

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        return self._special

    @property
    def size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the ids of a text; with `add_special`, also those that the post-processor adds."""
        self._tokenizer.encode_special_tokens = not parse_special
        with _library_errors(self._where, "cannot encode this text"):  # no unk token, say
            return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def split_words(self, text: str) -> list[str]:
        """Return the normalised words that a text is split into before merging."""
        parts = self._tokenizer
        with _library_errors(self._where, "cannot split this text"):
            if parts.normalizer is not None:
                text = parts.normalizer.normalize_str(text)
            if parts.pre_tokenizer is None:
                return [text]
            return [word for word, _ in parts.pre_tokenizer.pre_tokenize_str(text)]

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids, with `skip_special` without special tokens.

        Ids out of range are left out.
        """
        known = [i for i in ids if 0 <= i <= _MAX_ID]
        with _library_errors(self._where, "cannot decode these ids"):
            return str(self._tokenizer.decode(known, skip_special_tokens=skip_special))

    def token(self, i: int) -> str | None:
        """Return a token's spelling in the vocabulary; None without one."""
        found = self._tokenizer.id_to_token(i) if i <= _MAX_ID else None
        return None if found is None else str(found)

    def id_of(self, token: str) -> int | None:
        """Return the id of a spelling; None if no token has it."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def is_control(self, i: int) -> bool:
        """Return whether a token is special."""
        return i in self._special
