"""A model's tokenizer as the usual programs for its format read it, part by part.

A GGUF is read by its `tokenizer.ggml.*` lists, as llama.cpp reads them, whatever tokenizer.json
it embeds; everything else by its tokenizer.json, if it has one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aprfmt.errors import UnsupportedError
from aprfmt.tokenizer.carried import Carried
from aprfmt.tokenizer.engine_defaults import DEFAULTS, EngineDefaults, default_ids, default_types
from aprfmt.tokenizer.hf_json import (
    effective_added,
    frame,
    from_json,
    processor_ids,
    special_texts,
    stored_vocab,
    transformers_stops,
)
from aprfmt.tokenizer.keys import CONTROL, MODEL, NORMAL, PRE, SCORES, TOKENS, TYPES
from aprfmt.tokenizer.pre import PRE_TOKENIZERS
from aprfmt.tokenizer.vocabulary import Vocabulary, count_without_fillers, from_metadata, stop_ids

if TYPE_CHECKING:
    from aprfmt.model import Model

Frame = tuple[tuple[int, ...], tuple[int, ...]]  # ids before a text, and after it
DEFAULT_PRE = "default"  # llama.cpp's for a byte-level vocabulary that names none
# Values of tokenizer.ggml.model that aprfmt does not encode with -> model type of tokenizer.json.
_OTHER_KINDS: Mapping[str, str] = {"bert": "wordpiece", "t5": "unigram"}


@dataclass(frozen=True)
class StatedTokenizer:
    """One model's tokenizer as read. `data` is its tokenizer.json, None where the lists count.

    `encodes` is False for a vocabulary whose texts aprfmt cannot encode from the lists alone.
    """

    carried: Carried
    vocabulary: Vocabulary
    data: Mapping[str, Any] | None
    encodes: bool = True

    @property
    def lists(self) -> bool:
        """Whether the metadata's lists count, not a tokenizer.json."""
        return self.data is None

    @cached_property
    def added(self) -> list[dict[str, Any]]:
        """The tokens split off whole, with their flags; [] for lists, whose types say it."""
        if self.data is None:
            return []
        vocab, _ = stored_vocab(self.data["model"], self.carried.origin)
        return effective_added(self.data, self.carried, vocab)

    @cached_property
    def begins(self) -> bool:
        """Whether BOS is put before a text."""
        return self._framed("bos", self.vocabulary.add_bos)

    @cached_property
    def ends(self) -> bool:
        """Whether EOS is put after a text."""
        return self._framed("eos", self.vocabulary.add_eos)

    def _framed(self, role: str, processed: bool) -> bool:
        """Return whether bos or eos (`role`) is added: by a flag, else by `processed`.

        `processed` is what the post-processor or the lists say. gguf-py and the classes of
        transformers take the flag first, too.
        """
        said = self.carried.tokenizer_config.get(f"add_{role}_token") if self.data else None
        given = self.carried.flag(f"add_{role}_token") if self.data else None
        if isinstance(given, bool):
            return given
        return said if isinstance(said, bool) else processed

    @cached_property
    def processed(self) -> Frame:
        """(ids before, ids after) that the post-processor adds to a text; empty for lists."""
        return ((), ()) if self.data is None else frame(self.data)

    @cached_property
    def frame(self) -> Frame:
        """(ids before, ids after) that are added to every text, in order.

        Flags of tokenizer_config.json add BOS and EOS to the post-processor's, or remove them.
        """
        ids = self.vocabulary.engine_ids
        row = DEFAULTS.get(self.carried.text(MODEL) or "") if self.lists else None
        if row is not None and row.framed is not None:
            first, last = (ids.get(role) for role in row.framed)
            return (() if first is None else (first,), () if last is None else (last,))
        sides = []
        for at, (role, puts) in enumerate((("bos", self.begins), ("eos", self.ends))):
            i, found = ids.get(role), self.processed[at]
            if puts and i is not None and i not in found:
                found = (i, *found) if at == 0 else (*found, i)
            elif not puts:
                found = tuple(each for each in found if each != i)
            sides.append(found)
        return sides[0], sides[1]

    @cached_property
    def texts(self) -> dict[str, str]:
        """{variable: text} of the special tokens that a chat template can use, as `bos_token`."""
        found = {} if self.lists else special_texts(self.carried)
        tokens = self.vocabulary.tokens
        found = found or {role: tokens[i] for role, i in self.vocabulary.ids.items()}
        return {f"{role}_token": text for role, text in found.items()}

    @cached_property
    def template(self) -> str | None:
        """The chat template, None without one. Raises FormatError if it is no text."""
        return self.carried.chat_template()

    @cached_property
    def stops(self) -> frozenset[int]:
        """The ids that end a generation, as transformers or llama.cpp takes them.

        transformers: generation_config.json first. llama.cpp: the lists' ids and every control
        token
        with a known end text.
        """
        ids = self.vocabulary.engine_ids
        if self.lists:
            tokens, types = self.vocabulary.tokens, self.vocabulary.types
            control = {t: i for i, t in enumerate(tokens) if types[i] == CONTROL}
            return stop_ids(ids, control.get, frozenset())
        return transformers_stops(self.carried)


def stated_tokenizer(model: "Model", *, carried_json: bool = False) -> StatedTokenizer | None:
    """Return the tokenizer as programs for this format read it; None if there is none.

    With `carried_json`, by the tokenizer.json that a file embeds beside its lists, None without.
    A kind that aprfmt cannot encode has `encodes` False. Raises FormatError for a damaged
    tokenizer, UnsupportedError where the lists name no kind.
    """
    carried = model.carried
    has_lists = bool(carried.length(TOKENS))
    if carried.origin and (carried_json or not (model.key_style == "gguf" and has_lists)):
        data = carried.parse_tokenizer_json()
        assert data is not None
        return StatedTokenizer(carried, from_json(carried, data), data)
    if carried_json or not has_lists:
        return None
    try:
        vocabulary = from_metadata(carried)
    except UnsupportedError:
        kind = _OTHER_KINDS.get(carried.text(MODEL) or "", carried.text(MODEL) or "")
        if not kind:
            raise
        return StatedTokenizer(carried, _plain_vocabulary(carried, kind), None, encodes=False)
    if vocabulary is None:
        return None
    if vocabulary.kind == "bpe" and not vocabulary.pre:
        vocabulary = replace(vocabulary, pre=DEFAULT_PRE)
    known = vocabulary.kind == "spm" or vocabulary.pre in PRE_TOKENIZERS
    return StatedTokenizer(carried, vocabulary, None, encodes=known)


def stale_ids(side: StatedTokenizer) -> list[tuple[str, int, int | None]]:
    """Return (token's text, id, vocabulary's id or None) of wrong ids in the post-processor."""
    if side.data is None:
        return []
    known = {token: i for i, token in enumerate(side.vocabulary.tokens)}
    known |= {row["content"]: row["id"] for row in side.added}
    return [
        (text, i, known.get(text)) for text, i in processor_ids(side.data) if known.get(text) != i
    ]


def _plain_vocabulary(carried: Carried, kind: str) -> Vocabulary:
    """Return the lists of a kind that aprfmt does not encode with as a Vocabulary, unchanged."""
    tokens = carried.sequence(TOKENS, str) or []
    count = count_without_fillers(tokens)
    engine = carried.model.key_style == "gguf"
    model, pre = carried.text(MODEL) or "", carried.text(PRE) or ""
    row = DEFAULTS.get(model, EngineDefaults()) if engine else EngineDefaults()
    stated_ids = carried.ids()
    taken = default_ids(model, pre, count) if engine else {}
    add_bos, add_eos = carried.flag("add_bos_token"), carried.flag("add_eos_token")
    types = carried.sequence(TYPES, int) or (default_types(tokens[:count]) if engine else [])
    types += [NORMAL] * (count - len(types))
    scores = carried.sequence(SCORES, (float, int))
    return Vocabulary(
        kind,
        tokens[:count],
        types[:count],
        None,
        scores and scores[:count],
        "",
        {role: i for role, i in stated_ids.items() if i < count},
        row.add_bos if add_bos is None else add_bos,
        row.add_eos if add_eos is None else add_eos,
        bool(carried.flag("add_space_prefix")),
        taken={role: i for role, i in taken.items() if role not in stated_ids},
    )
