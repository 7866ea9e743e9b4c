"""The Tokenizer that callers get, and the Engine protocol that does its work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from aprfmt.errors import FormatError, UsageError
from aprfmt.tokenizer.template import render
from aprfmt.tokenizer.vocabulary import filler_text


class Engine(Protocol):
    """Converts text to token ids and back; a Tokenizer delegates to it."""

    @property
    def size(self) -> int:
        """Number of tokens, without fillers for unused ids."""
        ...

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        """Return the ids of a text.

        `add_special` adds the special tokens that the engine itself knows, `parse_special` reads
        special tokens written in the text as tokens.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special: bool) -> str:
        """Return the text of ids; ids without a token are left out."""
        ...

    def token(self, i: int) -> str | None:
        """Return a token's spelling in the vocabulary (`Ġhello`, `▁hello`); None without one."""
        ...

    def id_of(self, token: str) -> int | None:
        """Return the id of a spelling; None if no token has it."""
        ...

    def is_control(self, i: int) -> bool:
        """Return whether a token is special: matched whole, and left out by `skip_special`."""
        ...


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a model, whichever format it came from.

    `origin` names the file or key it was built from. `frame` are the ids to put before and after a
    text, if the file's metadata give them; None leaves that to the engine. `texts` are the special
    tokens that a chat template can use (`bos_token`). `template_origin` is the file or key of the
    chat template.
    """

    engine: Engine
    origin: str
    ids: Mapping[str, int]
    stop_ids: frozenset[int]
    chat_template: str | None
    texts: Mapping[str, str]
    frame: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    template_origin: str = ""

    def __repr__(self) -> str:
        from aprfmt.base.object_repr import short_repr

        return short_repr(self, self.origin, f"{self.vocab_size} tokens")

    @property
    def vocab_size(self) -> int:
        """Number of tokens; the embedding may have more rows."""
        return self.engine.size

    @property
    def bos_id(self) -> int | None:
        """Id of the token that begins a text; None without one."""
        return self.ids.get("bos")

    @property
    def eos_id(self) -> int | None:
        """Id of the token that ends a text or turn; None without one.

        `stop_ids` has all ids that end one.
        """
        return self.ids.get("eos")

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token; None without one."""
        return self.ids.get("pad")

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the ids of a text, as the Hugging Face tokenizer gives them.

        `add_special` adds bos and eos if the model uses them; `parse_special` reads special tokens
        written in the text as tokens, not as characters. Raises UsageError for a text with lone
        surrogates, which is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text holds half of a surrogate pair at character {error.start}; "
                "give valid UTF-8"
            ) from None
        if self.frame is None:
            return self.engine.encode(text, add_special, parse_special)
        ids = self.engine.encode(text, False, parse_special)
        before, after = self.frame if add_special else ((), ())
        return [*before, *ids, *after]

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids that `encode` puts before a text: BOS if the model adds it, else empty."""
        if self.frame is not None:
            return self.frame[0]
        framed, plain = (self.engine.encode("a", special, False) for special in (True, False))
        starts = range(len(framed) - len(plain) + 1)
        count = next((n for n in starts if framed[n : n + len(plain)] == plain), 0)
        return tuple(framed[:count])

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of ids; ids beyond the vocabulary are left out."""
        return self.engine.decode([int(i) for i in ids], skip_special)

    def token(self, i: int) -> str:
        """Return a token's spelling in the vocabulary; `[PAD123]` for an id without a token.

        Raises UsageError for a negative id.
        """
        if i < 0:
            raise UsageError(f"{i} is not a token id; ids begin at 0")
        found = self.engine.token(int(i))
        return filler_text(i) if found is None else found

    def piece(self, i: int) -> str:
        """Return a token's text as it reads after other text: ` of` for `Ġof` and `▁of`.

        Special tokens and bytes of a character are returned as the vocabulary spells them. Raises
        UsageError for a negative id.
        """
        spelling = self.token(i)
        before = self.engine.encode("a", False, False)[-1:]
        if not before or self.engine.token(int(i)) is None or self.engine.is_control(int(i)):
            return spelling
        start = self.engine.decode(before, False)
        text = self.engine.decode([*before, int(i)], False)
        found = text[len(start) :]
        whole = text.startswith(start) and found and "\ufffd" not in found
        return found if whole else spelling

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> str:
        """Return the messages rendered by the model's chat template, in a child process.

        With `add_generation_prompt` the text ends where the answer begins. Raises FormatError if
        there is no template, or it is broken, unsafe or exceeds a limit; UsageError if it rejects
        the messages.
        """
        if self.chat_template is None:
            raise FormatError(
                f"{self.origin}: carries no chat template; looked for tokenizer.chat_template, "
                "chat_template.jinja and tokenizer_config.json"
            )
        return render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            variables=self.texts,
            where=self.template_origin or self.origin,
        )

    def chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> tuple[str, list[int]]:
        """Return (text of the rendered chat, its ids).

        A message is {"role", "content"}. With `add_generation_prompt` the text ends where the
        answer begins. `encode` adds no special tokens here, because the template writes them itself
        (transformers does the same).
        """
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
        return text, self.encode(text, add_special=False)
