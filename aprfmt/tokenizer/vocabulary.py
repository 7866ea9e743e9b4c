"""The Vocabulary, one type for all formats: tokens by id, types, merges or scores, flags."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.tokenizer import keys
from aprfmt.tokenizer.pre_tokenizers import BY_ARCHITECTURE, PRE_TOKENIZERS
from aprfmt.tokenizer.stored_parts import Carried

BLANK = "\u2581"  # how SentencePiece spells a space
PADDING = re.compile(
    r"\[PAD\d+\]|<\|pad_\d+\|>"
)  # llama.cpp's and the reference importer's fillers
BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")

# Values of `tokenizer.ggml.model` (APR: tokenizer.model, tokenizer.model_type) to kinds: "bpe" is
# byte-level, "spm" uses SentencePiece's spelling.
KINDS: Mapping[str, str] = {
    "gpt2": "bpe",
    "bpe": "bpe",
    "BPE": "bpe",
    "llama": "spm",
    "gemma4": "spm",
}
NO_VOCABULARY = ("none", "no_vocab")
_SPM_IDS: Mapping[str, int] = {"unk": 0, "bos": 1, "eos": 2}  # llama.cpp's defaults for absent keys
_MODEL_TYPE = keys.Key("", "string", "tokenizer.model_type")  # APR from safetensors


@dataclass(frozen=True)
class Vocabulary:
    """A vocabulary by token id.

    `kind`: "bpe" (byte-level), "spm", or another model type of tokenizer.json in lower case.
    `merges` are `"left right"`, best first; `scores` of SentencePiece, higher is better. Fillers
    at the end (`[PAD151666]`) are not part of it. `added` are the ids that are split off the text
    first: control and user-defined tokens; those in `rstrip` also remove blanks after them.
    `engine_defaults` are the ids that llama.cpp uses for roles which a GGUF does not set. `rowless`
    are {id: token} of a tokenizer.json's tokens after the embedding's rows, which are not in
    `tokens`: loaders that go by the rows drop them, others fail when a text has one.
    """

    kind: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str] | None = None
    scores: Sequence[float] | None = None
    pre: str = ""
    ids: Mapping[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    rstrip: frozenset[int] = frozenset()
    engine_defaults: Mapping[str, int] = field(default_factory=dict)
    rowless: Mapping[int, str] = field(default_factory=dict, compare=False)

    @property
    def engine_ids(self) -> dict[str, int]:
        """{role: id} that an engine uses: those of the file, and its defaults for the others."""
        return {**self.engine_defaults, **self.ids}

    @property
    def added(self) -> list[int]:
        """Ids of control and user-defined tokens (and of the unknown token), ascending."""
        wanted = (keys.UNKNOWN, keys.CONTROL, keys.USER_DEFINED)
        return [i for i, kind in enumerate(self.types) if kind in wanted]


def special_and_added_ids(*vocabularies: Vocabulary) -> tuple[int, ...]:
    """Return the ids of special tokens, then of all added tokens, of vocabularies, each once."""
    special = [i for v in vocabularies for i in v.ids.values()]
    return tuple(dict.fromkeys([*special, *(i for v in vocabularies for i in v.added)]))


def vocabulary_from_metadata(carried: Carried) -> Vocabulary | None:
    """Return the vocabulary in a GGUF's or APR's own keys; None if it has no such keys.

    Raises FormatError for damaged keys, UnsupportedError for a kind other than byte-level BPE and
    SentencePiece BPE.
    """
    tokens = carried.list_value(keys.TOKENS, str)
    if not tokens:
        return None
    from aprfmt.tokenizer.engine_defaults import BLANK_PRE, default_ids

    kind = vocabulary_kind(carried)
    count = count_without_fillers(tokens)
    del tokens[count:]
    # The lists, cut to the tokens before the fillers.
    merges = carried.list_value(keys.MERGES, str)
    scores = carried.list_value(keys.SCORES, (float, int))
    types = carried.list_value(keys.TYPES, int)
    for key, values in ((keys.SCORES, scores), (keys.TYPES, types)):
        if values is not None and len(values) < count:
            raise FormatError(
                f"{carried.key_text(key)}: {len(values)} elements for {count} tokens; "
                "the file is damaged"
            )
    # Kind and types, with llama.cpp's defaults for a GGUF that lacks them.
    stated_ids = carried.token_ids()
    is_gguf = carried.model.key_style == "gguf"
    spells_blanks = carried.text_value(keys.PRE) in BLANK_PRE if is_gguf else "<0x00>" in tokens
    kind = "spm" if kind == "bpe" and merges is not None and spells_blanks else kind
    if types is None:
        types = _default_types(kind, tokens) if is_gguf else []
        types = types or _guess_types(kind, tokens, merges, stated_ids.values())
    del types[count:]
    # Special ids: those of the keys, and llama.cpp's for absent keys.
    pre = _pre_name(carried, kind)
    engine_ids: dict[str, int] = {}
    if is_gguf:
        defaults = default_ids(carried.text_value(keys.MODEL) or "", pre, count)
        engine_ids = {role: i for role, i in defaults.items() if role not in stated_ids}
    if kind == "spm":
        stated_ids = {**_SPM_IDS, **stated_ids}
        _spell_blanks_as_u2581(tokens, types)
    # Flags: those of the keys, else the defaults of kind and pre-tokenizer.
    row = PRE_TOKENIZERS.get(pre)
    add_bos, add_eos = carried.flag_value("add_bos_token"), carried.flag_value("add_eos_token")
    prefix = carried.flag_value("add_space_prefix")
    default_bos = kind == "spm" and merges is None if row is None else row.add_bos
    return Vocabulary(
        kind,
        tokens,
        types,
        merges,
        None if scores is None else scores[:count],
        pre,
        {role: i for role, i in stated_ids.items() if i < count},
        default_bos if add_bos is None else add_bos,
        bool(add_eos),
        (kind == "spm" and merges is None) if prefix is None else prefix,
        _blank_removing_ids(carried, tokens, types) if kind == "spm" else frozenset(),
        engine_ids,
    )


def vocabulary_kind(carried: Carried) -> str:
    """Return "bpe" or "spm" for the metadata's vocabulary.

    Raises UnsupportedError for another kind, FormatError without a kind.
    """
    name = carried.text_value(keys.MODEL)
    if name is None and carried.model.key_style == "apr":
        name = carried.text_value(_MODEL_TYPE)
    if name is None:
        raise FormatError(
            f"{carried.key_text(keys.MODEL)}: missing next to the tokens; expected "
            f"{', '.join(KINDS)}"
        )
    if name not in KINDS:
        raise UnsupportedError(
            f"{carried.key_text(keys.MODEL)}: {name!r}; this package reads byte-level BPE and "
            f"SentencePiece BPE ({', '.join(KINDS)}); use the original tokenizer.json"
        )
    return KINDS[name]


def _pre_name(carried: Carried, kind: str) -> str:
    """Return the metadata's `pre` name, or the one that another key implies; "" for none."""
    model, name = carried.text_value(keys.MODEL) or "", carried.text_value(keys.PRE) or ""
    if model in PRE_TOKENIZERS:
        return model  # gemma4's model name is also its `pre` name
    if kind == "spm":
        return name if name in PRE_TOKENIZERS and PRE_TOKENIZERS[name].style == "blank" else ""
    if not name and carried.model.key_style == "apr":
        architecture = carried.model.metadata.get("architecture")
        return BY_ARCHITECTURE.get(architecture, "") if isinstance(architecture, str) else ""
    return name


def _blank_removing_ids(
    carried: Carried, tokens: Sequence[str], types: Sequence[int]
) -> frozenset[int]:
    """Return the ids of control tokens after which the tokenizer removes blanks.

    Only architectures in SWALLOWING have such tokens.
    """
    architecture = carried.model.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in keys.SWALLOWING:
        return frozenset()
    plain = keys.SWALLOWING[architecture]
    return frozenset(i for i, t in enumerate(tokens) if types[i] == keys.CONTROL and t not in plain)


def count_without_fillers(tokens: Sequence[str]) -> int:
    """Return the number of tokens before the `[PAD...]` fillers at the end."""
    count = len(tokens)
    while count and PADDING.fullmatch(tokens[count - 1]):
        count -= 1
    return count


def _spell_blanks_as_u2581(tokens: list[str], types: Sequence[int]) -> None:
    """Replace spaces in user-defined tokens by U+2581, in place.

    llama.cpp's converter had replaced U+2581 by spaces.
    """
    for i, kind in enumerate(types[: len(tokens)]):
        if kind == keys.USER_DEFINED and " " in tokens[i]:
            tokens[i] = tokens[i].replace(" ", BLANK)


def _default_types(kind: str, tokens: Sequence[str]) -> list[int]:
    """Return the types that llama.cpp uses for a GGUF without types.

    llama.cpp finds the byte tokens of SentencePiece by their text, whatever their type.
    """
    from aprfmt.tokenizer.engine_defaults import default_types

    types = default_types(tokens)
    if kind == "spm":
        types = [
            keys.BYTE if BYTE_TOKEN.fullmatch(t) else x for t, x in zip(tokens, types, strict=True)
        ]
    return types


def _guess_types(
    kind: str, tokens: Sequence[str], merges: Sequence[str] | None, special: Iterable[int]
) -> list[int]:
    """Return likely token types for a file that has none; `special` ids are control tokens.

    In BPE, a token of several characters that no merge makes counts as a control token. Byte
    tokens of SentencePiece are recognised by their spelling.
    """
    if kind == "spm":
        types = [keys.BYTE if BYTE_TOKEN.fullmatch(token) else keys.NORMAL for token in tokens]
    else:
        made = {"".join(merge.split(" ", 1)) for merge in merges or ()}
        types = [keys.CONTROL if len(t) > 1 and t not in made else keys.NORMAL for t in tokens]
    for i in special:
        if i < len(types):
            types[i] = keys.CONTROL
    return types


def collect_stop_ids(
    ids: Mapping[str, int], control: Callable[[str], int | None], configured: frozenset[int]
) -> frozenset[int]:
    """Return the ids that end a generation: those in `configured`, eos, eot and eom.

    If `configured` is empty, the control tokens of END_TEXTS too, since most GGUFs name only one
    end. `ids` are special ids by role, `control` returns the id of a control token by its text.
    """
    found = {ids[role] for role in keys.END_ROLES if role in ids} | configured
    if not configured:
        texts = {text: i for text in keys.END_TEXTS if (i := control(text)) is not None}
        if {"<|return|>", "<|call|>"} <= texts.keys():
            texts.pop("<|end|>", None)  # gpt-oss: ends a part of the turn, not the turn
        found.update(texts.values())
    return frozenset(found)


def filler_text(i: int) -> str:
    """Return the text of an id without a token, as llama.cpp's converter writes it."""
    return f"[PAD{i}]"


def pad_vocabulary(vocabulary: Vocabulary, size: int) -> tuple[list[str], list[int]]:
    """Return (tokens, types), cut to `size` ids or filled up with `[PAD...]` fillers."""
    tokens, types = list(vocabulary.tokens[:size]), list(vocabulary.types[:size])
    for i in range(len(tokens), size):
        tokens.append(filler_text(i))
        types.append(keys.UNUSED)
    return tokens, types
