"""A model's tokenizer as the usual programs for its format read it: lists or tokenizer.json.

A GGUF is read by its `tokenizer.ggml.*` lists, as llama.cpp reads them, whatever tokenizer.json it
embeds; everything else by its tokenizer.json, if it has one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aprfmt.errors import UnsupportedError
from aprfmt.tokenizer.hf_json import (
    effective_added_tokens,
    post_processor_ids,
    post_processor_pieces,
    post_processor_tokens,
    segment_numbers,
    special_texts,
    stored_vocab,
    transformers_stop_ids,
    vocabulary_from_json,
)
from aprfmt.tokenizer.keys import CONTROL, MERGES, MODEL, NORMAL, PRE, SCORES, TOKENS, TYPES
from aprfmt.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from aprfmt.tokenizer.stored_parts import Carried
from aprfmt.tokenizer.vocabulary import (
    Vocabulary,
    collect_stop_ids,
    count_without_fillers,
    vocabulary_from_metadata,
)

if TYPE_CHECKING:
    from aprfmt.model import Model

Frame = tuple[tuple[int, ...], tuple[int, ...]]  # ids before a text, and after it
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
    """One model's tokenizer as read. `data` is its tokenizer.json, None where the lists count.

    `encodes` is False for a vocabulary whose texts aprfmt cannot encode from the lists alone.
    """

    carried: Carried
    vocabulary: Vocabulary
    data: Mapping[str, Any] | None
    encodes: bool = True

    @property
    def uses_lists(self) -> bool:
        """Whether the tokenizer is read from the metadata's lists, not from a tokenizer.json."""
        return self.data is None

    @property
    def lacks_list(self) -> bool:
        """Whether a GGUF has no list of tokens, though it names its kind or has its merges.

        aprfmt then reads it by the tokenizer.json that it embeds; other programs cannot read it.
        """
        if self.uses_lists or self.carried.model.key_style != "gguf":
            return False
        return any(key.gguf in self.carried.model.metadata for key in (MODEL, MERGES, TYPES))

    @cached_property
    def added_tokens(self) -> list[dict[str, Any]]:
        """The tokens that are split off a text whole, with flags; [] without a tokenizer.json.

        For vocabulary lists the token types say which these are.
        """
        if self.data is None:
            return []
        vocab, _ = stored_vocab(self.data["model"], self.carried.origin)
        return effective_added_tokens(self.data, self.carried, vocab)

    @cached_property
    def listed_tokens(self) -> dict[str, int]:
        """{text: id} of the added tokens that tokenizer.json itself lists; {} without one."""
        rows = (self.data or {}).get("added_tokens") or ()
        return {row["content"]: row["id"] for row in rows}

    def split_without_config(self, texts: Sequence[str]) -> dict[str, list[int]]:
        """Return {text: ids} of the texts that tokenizer.json alone encodes as several tokens.

        Programs that do not take added tokens from tokenizer_config.json encode them so. {}
        without a tokenizer.json. Raises FormatError where the library cannot read it.
        """
        if self.data is None or not texts:
            return {}
        from aprfmt.tokenizer.isolated import engine_of_text

        engine = engine_of_text(json.dumps(self.data), self.carried.origin)
        return {text: ids for text in texts if len(ids := engine.encode(text, False, True)) > 1}

    @cached_property
    def adds_bos(self) -> bool:
        """Whether BOS is put before a text, by the flags or else the post-processor."""
        return self._adds_token("bos", self.vocabulary.add_bos)

    @cached_property
    def adds_eos(self) -> bool:
        """Whether EOS is put after a text, by the flags or else the post-processor."""
        return self._adds_token("eos", self.vocabulary.add_eos)

    def _adds_token(self, role: str, processed: bool) -> bool:
        """Return whether the tokenizer adds bos or eos (`role`): by a flag, else by `processed`.

        A flag that the file embeds comes before that of tokenizer_config.json, as for gguf-py and
        the classes of transformers. `processed` is whether the post-processor, or a GGUF's
        vocabulary lists, add it. Without a tokenizer.json (`data`) flags are not read.
        """
        config_flag = self.carried.tokenizer_config.get(f"add_{role}_token") if self.data else None
        metadata_flag = self.carried.flag_value(f"add_{role}_token") if self.data else None
        if isinstance(metadata_flag, bool):
            return metadata_flag
        return config_flag if isinstance(config_flag, bool) else processed

    @cached_property
    def post_processor_ids(self) -> Frame:
        """(ids before, ids after) that the post-processor adds to a text; empty for lists."""
        return ((), ()) if self.data is None else post_processor_ids(self.data)

    @cached_property
    def text_names(self) -> tuple[str | int, ...]:
        """The names of the texts in the post-processor's template for one text: ("A",) usually."""
        if self.data is None:
            return ("A",)
        return tuple(each for each in post_processor_pieces(self.data)[0] if isinstance(each, str))

    @cached_property
    def pair(self) -> tuple[str | int, ...] | None:
        """What the post-processor makes of two texts: their names "A" and "B", and ids of tokens.

        None for vocabulary lists, which do not say it.
        """
        return None if self.data is None else post_processor_pieces(self.data)[1]

    @cached_property
    def segments(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The token types of the parts of one text, and of two; None if the model has no table.

        None for vocabulary lists, too, which do not say them.
        """
        sizes = (self.carried.model.config or {}).get("type_vocab_size")
        if self.data is None or type(sizes) is not int or sizes < 2:
            return None
        return segment_numbers(self.data)

    @cached_property
    def judges_pairs(self) -> bool:
        """Whether config.json names a class that is given pairs of texts, such as a reranker."""
        names = (self.carried.model.config or {}).get("architectures")
        return isinstance(names, list) and any(str(each).endswith(_OF_PAIRS) for each in names)

    @property
    def chat_begins_as_text(self) -> bool:
        """Whether the chat template writes BOS and the tokenizer puts it before a text, too.

        Nothing is wrong with it: who tokenizes a rendered chat has to leave one of them out.
        """
        bos = self.vocabulary.engine_ids.get("bos")
        if bos is None or self.frame[0][:1] != (bos,) or not self.template:
            return False
        tokens = self.vocabulary.tokens
        own = tokens[bos] if bos < len(tokens) else ""
        return "bos_token" in self.template or bool(own and own in self.template)

    @cached_property
    def framed_roles(self) -> tuple[str, str] | None:
        """The roles whose ids are put before and after a text by the kind of a GGUF's vocabulary.

        A flag that is false takes one of them off. None where flags alone say whether BOS and EOS
        are put, and for a tokenizer.json.
        """
        if not self.uses_lists:
            return None
        from aprfmt.tokenizer.engine_defaults import DEFAULTS

        row = DEFAULTS.get(self.carried.text_value(MODEL) or "")
        return None if row is None else row.framed

    @cached_property
    def frame(self) -> Frame:
        """(ids before, ids after) that are added to every text, in order.

        Flags that say whether BOS and EOS are added come before the post-processor.
        """
        ids = self.vocabulary.engine_ids
        if self.framed_roles is not None:
            first, last = (
                (ids[role],)
                if role in ids and self.carried.flag_value(f"add_{role}_token") is not False
                else ()
                for role in self.framed_roles
            )
            return first, last
        sides = []
        for at, (role, puts) in enumerate((("bos", self.adds_bos), ("eos", self.adds_eos))):
            i, found = ids.get(role), self.post_processor_ids[at]
            if puts and i is not None and i not in found:
                found = (i, *found) if at == 0 else (*found, i)
            elif not puts:
                found = tuple(each for each in found if each != i)
            sides.append(found)
        return sides[0], sides[1]

    @cached_property
    def special_token_texts(self) -> dict[str, str]:
        """{variable: text} of the special tokens that a chat template can use, as `bos_token`."""
        found = {} if self.uses_lists else special_texts(self.carried)
        tokens = self.vocabulary.tokens
        found = found or {role: tokens[i] for role, i in self.vocabulary.ids.items()}
        return {f"{role}_token": text for role, text in found.items()}

    @cached_property
    def template(self) -> str | None:
        """The chat template, None without one. Raises FormatError if it is no text."""
        return self.carried.chat_template()

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a generation, as transformers or llama.cpp takes them.

        transformers: generation_config.json first. llama.cpp, where the lists are used: the ids of
        the metadata and every control token with a known end text.
        """
        ids = self.vocabulary.engine_ids
        if self.uses_lists:
            tokens, types = self.vocabulary.tokens, self.vocabulary.types
            control = {t: i for i, t in enumerate(tokens) if types[i] == CONTROL}
            return collect_stop_ids(ids, control.get, frozenset())
        return transformers_stop_ids(self.carried)


def has_listed_tokens(model: "Model") -> bool:
    """Return whether the usual programs read a model's tokenizer from the lists of its metadata.

    They do of a GGUF with tokens, and of every file without a tokenizer.json.
    """
    carried = model.carried
    has_lists = bool(carried.list_length(TOKENS))
    return has_lists and (model.key_style == "gguf" or not carried.origin)


def read_tokenizer_parts(model: "Model", *, carried_json: bool = False) -> StatedTokenizer | None:
    """Return the tokenizer as the usual programs for this format read it; None without one.

    A GGUF is read by its lists. With `carried_json` it is read by the tokenizer.json that it embeds
    next to them, and None without that. A kind that aprfmt cannot encode has `encodes` False.
    Raises FormatError for a damaged tokenizer, UnsupportedError where the lists name no kind.
    """
    carried = model.carried
    has_lists = bool(carried.list_length(TOKENS))
    if carried.origin and (carried_json or not has_listed_tokens(model)):
        data = carried.parse_tokenizer_json()
        assert data is not None
        return StatedTokenizer(carried, vocabulary_from_json(carried, data), data)
    if carried_json or not has_lists:
        return None
    try:
        vocabulary = vocabulary_from_metadata(carried)
    except UnsupportedError:
        kind = _OTHER_KINDS.get(carried.text_value(MODEL) or "", carried.text_value(MODEL) or "")
        if not kind:
            raise
        return StatedTokenizer(carried, _plain_vocabulary(carried, kind), None, encodes=False)
    if vocabulary is None:
        return None
    if vocabulary.kind == "bpe" and not vocabulary.pre:
        vocabulary = replace(vocabulary, pre=DEFAULT_PRE)
    known = vocabulary.kind == "spm" or vocabulary.pre in PRE_TOKENIZERS
    return StatedTokenizer(carried, vocabulary, None, encodes=known)


FrameIds = tuple[int | str, ...]


def frame_roles(side: StatedTokenizer) -> tuple[FrameIds, FrameIds]:
    """Return (ids before a text, ids after it), the side's own special ids by their roles.

    Roles are "bos" and "eos", else "cls" and "sep". Where a kind of GGUF puts the ids of two roles
    around every text, it is these.
    """
    ids = side.vocabulary.engine_ids
    names = {ids[role]: role for role in ("sep", "cls", "eos", "bos") if role in ids}
    before, after = side.frame
    if side.framed_roles is not None:
        first, last = side.framed_roles
        return (first,) * len(before), (last,) * len(after)
    return (
        tuple(names.get(i, i) for i in before),
        tuple("eos" if i == ids.get("eos") else names.get(i, i) for i in after),
    )


def same_frame(a: StatedTokenizer, b: StatedTokenizer, at: int) -> bool:
    """Return whether two tokenizers put the same ids before a text (`at` 0), or after it (1).

    BOS and EOS are the same by their roles. A GGUF also agrees with a tokenizer.json whose
    post-processor puts its ids, though a flag of tokenizer_config.json may say otherwise to other
    loaders.
    """
    if a.frame[at] == b.frame[at] or frame_roles(a)[at] == frame_roles(b)[at]:
        return True
    files, lists = (b, a) if a.uses_lists else (a, b)
    return a.uses_lists != b.uses_lists and lists.frame[at] == files.post_processor_ids[at]


def stale_post_processor_ids(side: StatedTokenizer) -> list[tuple[str, int, int | None]]:
    """Return (token's text, id, vocabulary's id or None) of wrong ids in the post-processor."""
    if side.data is None:
        return []
    known = {token: i for i, token in enumerate(side.vocabulary.tokens)}
    known |= {row["content"]: row["id"] for row in side.added_tokens}
    return [
        (text, i, known.get(text))
        for text, i in post_processor_tokens(side.data)
        if known.get(text) != i
    ]


def _plain_vocabulary(carried: Carried, kind: str) -> Vocabulary:
    """Return the lists as a Vocabulary, for a kind that aprfmt does not encode with."""
    from aprfmt.tokenizer.engine_defaults import (
        DEFAULTS,
        EngineDefaults,
        default_ids,
        default_types,
    )

    tokens = carried.list_value(TOKENS, str) or []
    count = count_without_fillers(tokens)
    is_gguf = carried.model.key_style == "gguf"
    model, pre = carried.text_value(MODEL) or "", carried.text_value(PRE) or ""
    row = DEFAULTS.get(model, EngineDefaults()) if is_gguf else EngineDefaults()
    stated_ids = carried.token_ids()
    defaults = default_ids(model, pre, count) if is_gguf else {}
    add_bos, add_eos = carried.flag_value("add_bos_token"), carried.flag_value("add_eos_token")
    types = carried.list_value(TYPES, int) or (default_types(tokens[:count]) if is_gguf else [])
    types += [NORMAL] * (count - len(types))
    scores = carried.list_value(SCORES, (float, int))
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
        bool(carried.flag_value("add_space_prefix")),
        engine_defaults={role: i for role, i in defaults.items() if role not in stated_ids},
    )
