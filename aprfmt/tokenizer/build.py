"""Builds a tokenizer.json from a vocabulary: for `tokenizers`, and for a Hugging Face folder.

A *piece* is the text of one token.

Byte-level BPE takes normalizer and splitting from the table by `pre` name. SentencePiece BPE gets
its merges from the scores, in the order transformers' converter gives them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from aprfmt.errors import FormatError, UnsupportedError
from aprfmt.tokenizer.keys import BYTE, CONTROL, UNKNOWN, USER_DEFINED
from aprfmt.tokenizer.pre_tokenizers import find_pre_tokenizer, normalizer_json, pre_tokenizer_json
from aprfmt.tokenizer.vocabulary import BLANK, Vocabulary

_NEVER_MADE = (UNKNOWN, CONTROL, USER_DEFINED, BYTE)  # merging never makes them
_BYTE_LEVEL_DECODER = {
    "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True
}  # fmt: skip


def tokenizer_json(vocabulary: Vocabulary, where: str) -> dict[str, Any]:
    """Return the tokenizer.json, as an object, that encodes as this vocabulary does.

    Raises UnsupportedError for an unknown pre-tokenizer or kind, FormatError for damaged merges.
    """
    if vocabulary.kind not in BUILDERS:
        raise UnsupportedError(
            f"{where}: a vocabulary of kind {vocabulary.kind!r}; a tokenizer.json is built for "
            f"{' and '.join(BUILDERS)}; use the original one"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(vocabulary, i) for i in ids_split_first(vocabulary)],
        **BUILDERS[vocabulary.kind](vocabulary, where),
        "post_processor": bos_eos_post_processor(vocabulary),
    }


def ids_split_first(vocabulary: Vocabulary) -> list[int]:
    """Return the ids of the added tokens that are split off before merging: all but blank runs."""
    return [i for i in vocabulary.added if not is_blank_run(vocabulary.tokens[i])]


def _added_token(vocabulary: Vocabulary, i: int) -> dict[str, Any]:
    """Return an id's row of `added_tokens` in tokenizer.json."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    flags["rstrip"] = i in vocabulary.rstrip
    special = vocabulary.types[i] != USER_DEFINED
    return {"id": i, "content": vocabulary.tokens[i], **flags, "special": special}


def _bpe_model(
    vocab: Mapping[str, int], merges: Sequence[Sequence[str]], **more: Any
) -> dict[str, Any]:
    """Return the "model" object of a BPE tokenizer.json; `more` overrides its defaults."""
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
        "ignore_merges": False,
    }  # fmt: skip
    return {**model, **more, "vocab": dict(vocab), "merges": merges}


def _byte_level_json(vocabulary: Vocabulary, where: str) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model of a byte-level vocabulary.

    Raises UnsupportedError for a vocabulary that does not name its pre-tokenizer.
    """
    if not vocabulary.pre:
        raise UnsupportedError(
            f"{where}: does not say how its text is split (tokenizer.ggml.pre); set it, or use the "
            "original tokenizer.json"
        )
    row = find_pre_tokenizer(vocabulary.pre, where)
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    return {
        "normalizer": normalizer_json(row),
        "pre_tokenizer": pre_tokenizer_json(row),
        "decoder": dict(_BYTE_LEVEL_DECODER),
        "model": _bpe_model(
            vocab, split_merges(vocabulary, vocab, where), ignore_merges=row.ignore_merges
        ),
    }


def split_merges(
    vocabulary: Vocabulary, vocab: Mapping[str, int], where: str
) -> list[tuple[str, str]]:
    """Return merges as (left, right), each once; FormatError for none or for unknown tokens.

    `vocab` is {token: id}; `where` begins messages. A pair is split at the first space that is not
    its first character, as llama.cpp does.
    """
    if vocabulary.merges is None:
        raise FormatError(f"{where}: a BPE vocabulary without merges; the file is damaged")
    pairs: dict[tuple[str, str], None] = {}
    for merge in vocabulary.merges:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if at < 0 or left not in vocab or right not in vocab or left + right not in vocab:
            raise FormatError(
                f"{where}: merge {merge[:60]!r} does not join two tokens to a third; "
                "the file is damaged"
            )
        pairs[left, right] = None
    return list(pairs)


def _metaspace_json(vocabulary: Vocabulary, where: str) -> dict[str, Any]:
    """Return normalizer, pre_tokenizer, decoder and model of a SentencePiece vocabulary.

    It spells blanks as U+2581.
    """
    # Merges are stored, or derived from the scores.
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    if vocabulary.merges is not None:
        merges = split_merges(vocabulary, vocab, where)
    else:
        merges = merges_from_scores(vocabulary, where)
    # The normalizer puts U+2581 for blanks, and one before the text if configured.
    replace: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": BLANK}
    prepend = [{"type": "Prepend", "prepend": BLANK}] if vocabulary.add_space_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prepend else []
    # The decoder reverses that.
    unk = vocabulary.ids.get("unk")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": BLANK}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _bpe_model(
            vocab,
            merges,
            unk_token=None if unk is None else vocabulary.tokens[unk],
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        ),
    }


BUILDERS = {"bpe": _byte_level_json, "spm": _metaspace_json}


def is_blank_run(token: str) -> bool:
    """Return whether a piece consists of blanks (U+2581) only."""
    return not token.strip(BLANK)


def piece_priorities(vocabulary: Vocabulary, where: str) -> dict[str, tuple[float, int, int]]:
    """Return {piece: (key, second key, id)} of all pieces that merging can make.

    Lower keys are merged first: the key is the negative score. User-defined runs of blanks come
    first of all, in id order: SentencePiece matches them before merging, and the merges in Gemma's
    tokenizer.json have the same effect. Control and byte tokens are left out. Raises FormatError
    for missing scores.
    """
    scores = vocabulary.scores
    if scores is None:
        raise FormatError(f"{where}: a SentencePiece vocabulary without scores or merges")
    found = {}
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == USER_DEFINED and is_blank_run(token):
            found[token] = (float("-inf"), i, i)
        elif kind not in _NEVER_MADE:
            found[token] = (-float(scores[i]), 0, i)
    return found


def merges_from_scores(vocabulary: Vocabulary, where: str) -> list[tuple[str, str]]:
    """Return every (left, right) of pieces that join to a piece, best first.

    Order: keys of the joined piece, longer left piece, longer right piece, id (transformers'
    `generate_merges`). A token of n characters has n - 1 candidates, so 262,144 tokens take about a
    second.
    """
    pieces = piece_priorities(vocabulary, where)
    found = []
    for piece, (key, second, _) in pieces.items():
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in pieces and right in pieces:
                found.append((key, second, -at, at - len(piece), left, right))
    found.sort(key=lambda row: row[:4])  # stable: equal rows keep the order of ids
    return [(left, right) for *_, left, right in found]


def bos_eos_post_processor(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Return the post_processor object that adds bos and eos; None if neither is added."""
    roles = {"bos": vocabulary.add_bos, "eos": vocabulary.add_eos}
    used = {role: vocabulary.ids[role] for role in roles if roles[role] and role in vocabulary.ids}
    if not used:
        return None
    texts = {role: vocabulary.tokens[i] for role, i in used.items()}

    def template_rows(sequence: str, type_id: int) -> list[dict[str, Any]]:
        """Return tokenizer.json's template of sequence "A" or "B": bos, the text, eos.

        Only those of bos and eos that the vocabulary adds.
        """
        pieces: dict[str, dict[str, Any]] = {
            role: {"SpecialToken": {"id": text, "type_id": type_id}} for role, text in texts.items()
        }
        pieces["text"] = {"Sequence": {"id": sequence, "type_id": type_id}}
        return [pieces[name] for name in ("bos", "text", "eos") if name in pieces]

    entries = {t: {"id": t, "ids": [used[role]], "tokens": [t]} for role, t in texts.items()}
    return {
        "type": "TemplateProcessing",
        "single": template_rows("A", 0),
        "pair": template_rows("A", 0) + template_rows("B", 1),
        "special_tokens": entries,
    }
