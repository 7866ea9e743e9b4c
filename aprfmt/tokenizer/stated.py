"""What a model's tokenizer is to those who read this format, part by part.

A GGUF is read by its `tokenizer.ggml.*` lists, as llama.cpp reads them, whatever tokenizer.json it
carries beside them; everything else by its tokenizer.json, if it has one.
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
    post_processor_pieces,
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

Frame = tuple[tuple[int, ...], tuple[int, ...]]  # ids before a text, and behind it
DEFAULT_PRE = "default"  # llama.cpp's for a byte-level vocabulary that names none
# Values of tokenizer.ggml.model that aprfmt does not encode with -> model type of tokenizer.json.
_OTHER_KINDS: Mapping[str, str] = {"bert": "wordpiece", "t5": "unigram"}
# Classes of transformers whose input may be two texts, by the end of their names.
_OF_PAIRS = (
    "ForSequenceClassification",
    "ForNextSentencePrediction",
    "ForMultipleChoice",
    "ForQuestionAnswering",
)


@dataclass(frozen=True)
class StatedTokenizer:
    """One model's tokenizer. `data` is its tokenizer.json, None where the lists count.

    `encodes` is False for a vocabulary whose texts aprfmt cannot encode from the lists alone.
    """

    carried: Carried
    vocabulary: Vocabulary
    data: Mapping[str, Any] | None
    encodes: bool = True

    @property
    def lists(self) -> bool:
        """True if the metadata's lists count, not a tokenizer.json."""
        return self.data is None

    @cached_property
    def added(self) -> list[dict[str, Any]]:
        """Tokens split off whole, with their flags; [] for lists, whose types say it."""
        if self.data is None:
            return []
        vocab, _ = stored_vocab(self.data["model"], self.carried.origin)
        return effective_added(self.data, self.carried, vocab)

    @cached_property
    def begins(self) -> bool:
        """True if a text gets bos in front."""
        return self._framed("bos", self.vocabulary.add_bos)

    @cached_property
    def ends(self) -> bool:
        """True if a text gets eos behind it."""
        return self._framed("eos", self.vocabulary.add_eos)

    def _framed(self, role: str, processed: bool) -> bool:
        """Return tokenizer_config.json's flag, else what the post-processor or the lists say.

        gguf-py and the classes of transformers take the flag first, too.
        """
        said = self.carried.tokenizer_config.get(f"add_{role}_token") if self.data else None
        given = self.carried.flag(f"add_{role}_token") if self.data else None
        if isinstance(given, bool):
            return given
        return said if isinstance(said, bool) else processed

    @cached_property
    def processed(self) -> Frame:
        """Ids that the post-processor puts before and after a text; empty for lists."""
        return ((), ()) if self.data is None else frame(self.data)

    @cached_property
    def text_names(self) -> tuple[str | int, ...]:
        """The texts that come of one text, by name, without ids: ("A",) but for odd templates."""
        if self.data is None:
            return ("A",)
        return tuple(each for each in post_processor_pieces(self.data)[0] if isinstance(each, str))

    @cached_property
    def pair(self) -> tuple[str | int, ...] | None:
        """Ids and texts, by name, that come of two texts; None for lists, which do not say it."""
        return None if self.data is None else post_processor_pieces(self.data)[1]

    @cached_property
    def judges_pairs(self) -> bool:
        """Whether config.json names a class that is given two texts: a reranker, say."""
        names = (self.carried.model.config or {}).get("architectures")
        return isinstance(names, list) and any(str(each).endswith(_OF_PAIRS) for each in names)

    @cached_property
    def frame(self) -> Frame:
        """Ids that stand before and behind every text, in their order.

        Flags of tokenizer_config.json add BOS and EOS to the post-processor's, or take them away.
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
        """The special tokens that a chat template can use: `bos_token` and the like."""
        found = {} if self.lists else special_texts(self.carried)
        tokens = self.vocabulary.tokens
        found = found or {role: tokens[i] for role, i in self.vocabulary.ids.items()}
        return {f"{role}_token": text for role, text in found.items()}

    @cached_property
    def template(self) -> str | None:
        """The chat template; FormatError if it is no text."""
        return self.carried.chat_template()

    @cached_property
    def stops(self) -> frozenset[int]:
        """Ids that end a generation: those of generation_config.json first, as transformers does.

        llama.cpp takes the lists' ids and every control token of a known end text.
        """
        ids = self.vocabulary.engine_ids
        if self.lists:
            tokens, types = self.vocabulary.tokens, self.vocabulary.types
            control = {t: i for i, t in enumerate(tokens) if types[i] == CONTROL}
            return stop_ids(ids, control.get, frozenset())
        return transformers_stops(self.carried)


def stated_tokenizer(model: "Model", *, carried_json: bool = False) -> StatedTokenizer | None:
    """Return a model's tokenizer as programs that read its format take it; None without one.

    With `carried_json`, the tokenizer.json that a file carries beside its lists; None without one.
    Raises FormatError for a damaged tokenizer, UnsupportedError for a kind of lists not known.
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
    """Return (token's text, id, the vocabulary's id of it) where a post-processor has another."""
    if side.data is None:
        return []
    known = {token: i for i, token in enumerate(side.vocabulary.tokens)}
    known |= {row["content"]: row["id"] for row in side.added}
    return [
        (text, i, known.get(text)) for text, i in processor_ids(side.data) if known.get(text) != i
    ]


def _plain_vocabulary(carried: Carried, kind: str) -> Vocabulary:
    """Return the lists of a vocabulary of another kind, unchanged."""
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
