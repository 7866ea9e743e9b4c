"""The exchangeable parts of a tokenizer: one of B's can replace A's, and the reverse.

A *part* is one of the things that a tokenizer consists of, such as pieces or merges. A *side* is
the tokenizer of one of the two models that are compared; `other` is that of the other model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aprfmt.causes.tokenizer.pre_tokenizer import UNSAID
from aprfmt.causes.tokenizer.vocabulary_lists import LOOKS_SPECIAL, comparable_pieces
from aprfmt.tokenizer import pre_tokenizers
from aprfmt.tokenizer.build import is_blank_run, merges_from_scores, tokenizer_json
from aprfmt.tokenizer.generation import generation_settings, has_file, settings_by_keys, shortest
from aprfmt.tokenizer.hf_json import FLAGS, configured_ids, id_list
from aprfmt.tokenizer.keys import (
    CONTROL,
    GENERATION,
    GENERATION_CONFIG,
    GENERATION_KEYS,
    IDS,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
)
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer, frame_roles
from aprfmt.tokenizer.vocabulary import BLANK, Vocabulary

TokenizerParts = dict[str, Any]


def tokenizer_parts(
    side: StatedTokenizer, other: StatedTokenizer, *, engine: bool = True
) -> TokenizerParts:
    """Return a side's tokenizer as {part name: value}, to be exchanged with the other side's.

    What a GGUF's lists cannot state is filled in from the other side's tokenizer.json. Without
    `engine` only the parts are made that can be read without building an engine. Raises
    FormatError or UnsupportedError where the vocabulary cannot be built.
    """
    if not engine:
        made: TokenizerParts = {
            "pieces": side.vocabulary.tokens, "merges": None, "added": side.vocabulary.types,
            "options": {"type": SCORED},
        }  # fmt: skip
    elif side.data is not None:
        made = _parts_from_json(side)
    elif other.data is not None and side.vocabulary.kind == other.vocabulary.kind:
        made = _parts_in_json_form(side, other)
    else:
        made = _parts_from_lists(side)
    source = side if side.data is not None else other  # lists do not say how ids become text
    made["decoder"] = (source.data or {}).get("decoder")
    return made | _end_parts(side, other)


def _merge_pairs(merges: Sequence[str] | None) -> list[tuple[str, str]]:
    """Return merges as pairs, split at the first space that is not the first character."""
    found = []
    for merge in merges or ():
        at = merge.find(" ", 1)
        found.append((merge[:at], merge[at + 1 :]) if at > 0 else (merge, ""))
    return found


def _parts_from_json(side: StatedTokenizer) -> TokenizerParts:
    """Return {part name: value} of what a tokenizer.json encodes with."""
    assert side.data is not None
    model = side.data["model"]
    raw = model.get("merges")
    pairs = [tuple(row) if isinstance(row, list) else tuple(row.split(" ", 1)) for row in raw or ()]
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        vocab = {token: i for i, token in enumerate(side.vocabulary.tokens)}
    rest = {
        key: value
        for key, value in model.items()
        if key not in ("vocab", "merges", "ignore_merges")
    }
    rest.setdefault("type", {"bpe": "BPE", "spm": "BPE"}.get(side.vocabulary.kind, ""))
    return {
        "pieces": vocab,
        "merges": pairs,
        "scores": None,
        "added": side.added_tokens,
        "normalizer": side.data.get("normalizer"),
        "pre_tokenizer": (side.data.get("pre_tokenizer"), bool(model.get("ignore_merges"))),
        "options": rest,
    }


def _parts_from_lists(side: StatedTokenizer) -> TokenizerParts:
    """Return {part name: value} of what llama.cpp encodes with, from a GGUF's lists.

    For two sides that both have lists.
    """
    if side.vocabulary.kind == "spm" and side.vocabulary.merges is None:
        return _parts_with_scores(side)
    data = tokenizer_json(side.vocabulary, side.carried.where)
    model = data["model"]
    rest = {
        key: value
        for key, value in model.items()
        if key not in ("vocab", "merges", "ignore_merges")
    }
    return {
        "pieces": model["vocab"],
        "merges": model["merges"],
        "scores": None,
        "added": data["added_tokens"],
        "normalizer": data["normalizer"] if side.vocabulary.kind == "spm" else None,
        "pre_tokenizer": (data["pre_tokenizer"], bool(model.get("ignore_merges"))),
        "options": rest,
    }


SCORED = "scores"  # the type of a vocabulary that joins by scores; SpmEngine reads it as it is


def _parts_with_scores(side: StatedTokenizer) -> TokenizerParts:
    """Return {part name: value} of a GGUF's lists whose pieces are joined by scores (SPM)."""
    own = side.vocabulary
    return {
        "pieces": own.tokens,
        "merges": None,
        "scores": own.scores,
        "added": own.types,
        "normalizer": own.add_space_prefix,
        "pre_tokenizer": None,
        "options": {"type": SCORED, "unk": own.ids.get("unk"), "rstrip": own.rstrip},
    }


def vocabulary_of(parts: TokenizerParts) -> Vocabulary:
    """Return the SPM vocabulary of parts whose pieces are joined by scores.

    Types and scores are cut or filled to the number of pieces.
    """
    count = len(parts["pieces"])
    kinds = [*parts["added"][:count], *[NORMAL] * (count - len(parts["added"]))]
    scores = parts["scores"]
    if scores is not None:
        scores = [*scores[:count], *[0.0] * (count - len(scores))]
    unk = parts["options"]["unk"]
    return Vocabulary(
        "spm",
        parts["pieces"],
        kinds,
        None,
        scores,
        "",
        {} if unk is None else {"unk": unk},
        add_space_prefix=parts["normalizer"],
        rstrip=parts["options"]["rstrip"],
    )


def control_ids(parts: TokenizerParts) -> dict[str, int]:
    """Return {text: id} of the control tokens."""
    if parts["options"]["type"] == SCORED:
        rows = zip(parts["pieces"], parts["added"], strict=False)
        return {token: i for i, (token, kind) in enumerate(rows) if kind == CONTROL}
    return {row["content"]: row["id"] for row in parts["added"] if row["special"]}


# --- lists compared with a tokenizer.json --------------------------------------------------------


def _parts_in_json_form(side: StatedTokenizer, other: StatedTokenizer) -> TokenizerParts:
    """Return {part name: value} of a GGUF's lists, in the form that a tokenizer.json has.

    What lists cannot state is taken from the other side's tokenizer.json.
    """
    like = _parts_from_json(other)
    vocabulary = side.vocabulary
    made = dict(like)
    tokens = _pieces_as_in_json(side, other)
    # Pieces in the form of the tokenizer.json: a mapping, or pairs with scores.
    if isinstance(like["pieces"], Mapping):
        made["pieces"] = {token: i for i, token in enumerate(tokens)}
    elif tokens[: len(like["pieces"])] != [row[0] for row in like["pieces"]]:
        scores = vocabulary.scores or [0.0] * len(tokens)
        count = len(like["pieces"])
        made["pieces"] = [list(row) for row in zip(tokens, scores, strict=True)][:count]
    # Merges of the lists, or made from their scores.
    if vocabulary.merges is not None:
        made["merges"] = _merge_pairs(vocabulary.merges)
    elif vocabulary.scores is not None and like["merges"] and vocabulary.kind == "spm":
        made["merges"] = merges_from_scores(vocabulary, side.carried.where)
    elif like["merges"]:
        made["merges"] = []
    made["added"] = _added_tokens(side, like["added"])
    made["normalizer"] = _comparable_normalizer(side, other, like["normalizer"])
    # A pre-tokenizer that differs is built from llama.cpp's rules.
    if vocabulary.kind == "bpe" and other.data is not None:
        if pre_tokenizers.tokenizer_splitting(other.data) != pre_tokenizers.row_splitting(
            vocabulary.pre
        ):
            row = pre_tokenizers.PRE_TOKENIZERS[vocabulary.pre]
            made["pre_tokenizer"] = (pre_tokenizers.pre_tokenizer_json(row), row.ignore_merges)
    elif vocabulary.add_space_prefix != other.vocabulary.add_space_prefix:
        made["pre_tokenizer"] = (
            _with_blank_prefix(like["pre_tokenizer"][0], vocabulary.add_space_prefix),
            like["pre_tokenizer"][1],
        )
    return made


def _pieces_as_in_json(side: StatedTokenizer, other: StatedTokenizer) -> list[str]:
    """Return the GGUF's pieces by id, spelled as the other side's tokenizer.json spells them."""
    own = other.vocabulary.tokens
    return [
        own[i] if i < len(own) and token == like else token
        for i, (token, like) in enumerate(
            zip(
                side.vocabulary.tokens,
                _pieces_with_fillers(comparable_pieces(other, side), side),
                strict=True,
            )
        )
    ]


def _pieces_with_fillers(tokens: Sequence[str], side: StatedTokenizer) -> list[str]:
    """Return the pieces, cut to the size of the side's vocabulary or filled up with ""."""
    size = len(side.vocabulary.tokens)
    return [*tokens[:size], *[""] * (size - len(tokens))]


def _added_tokens(
    side: StatedTokenizer, rows: Sequence[Mapping[str, object]]
) -> list[dict[str, object]]:
    """Return a GGUF's tokens that are never split, as `added_tokens` of a tokenizer.json.

    `rows` are the other side's, whose flags are used where lists cannot state them.
    """
    known = {row["content"]: row for row in rows}
    found = []
    for i, (token, kind) in enumerate(
        zip(side.vocabulary.tokens, side.vocabulary.types, strict=True)
    ):
        like = known.get(token)
        if kind not in (UNKNOWN, CONTROL, USER_DEFINED) and not (like and is_blank_run(token)):
            continue
        if like is None and is_blank_run(token):
            continue
        flags = {flag: bool(like[flag]) if like else False for flag in FLAGS}
        less = bool(like and like["special"]) and kind == USER_DEFINED
        if like is None or less or not LOOKS_SPECIAL.fullmatch(token):
            flags["special"] = kind != USER_DEFINED if not is_blank_run(token) else flags["special"]
        found.append({"id": i, "content": token, **flags})
    return found


def _comparable_normalizer(side: StatedTokenizer, other: StatedTokenizer, node: object) -> object:
    """Return the other side's normalizer as the GGUF would have it, in the JSON of tokenizer.json.

    `node` is the other side's normalizer. Only steps that a GGUF cannot state are kept, and the
    blank in front by the GGUF's own flag. None if no step is left.
    """
    steps = [
        dict(step)
        for step in pre_tokenizers.flatten_steps(node, "normalizers")
        if step.get("type") in UNSAID
    ]
    want = side.vocabulary.add_space_prefix
    if want != other.vocabulary.add_space_prefix and side.vocabulary.kind == "spm":
        steps = [step for step in steps if step.get("prepend") != BLANK]
        spelled_there = any(step.get("content") == BLANK for step in steps)
        if want and spelled_there:
            steps.insert(0, {"type": "Prepend", "prepend": BLANK})
    return {"type": "Sequence", "normalizers": steps} if steps else None


def _with_blank_prefix(node: object, want: bool) -> object:
    """Return a pre-tokenizer whose Metaspace step puts a blank in front if `want`, else not.

    `node` is the pre-tokenizer in the JSON of tokenizer.json.
    """
    steps = [dict(step) for step in pre_tokenizers.flatten_steps(node, "pretokenizers")]
    for step in steps:
        if step.get("type") == "Metaspace":
            step.pop("add_prefix_space", None)
            step["prepend_scheme"] = "always" if want else "never"
    return {"type": "Sequence", "pretokenizers": steps} if steps else node


# --- ids, frame, template, generation -----------------------------------------------------------


def _end_parts(side: StatedTokenizer, other: StatedTokenizer) -> TokenizerParts:
    """Return the parts that encoding does not use, as {part name: value}.

    They are the special ids, the ids put around a text, the chat template and generation settings.
    """
    crossed = side.uses_lists and not other.uses_lists
    made: TokenizerParts = {}
    # Special ids with their texts.
    for role in IDS:
        i = side.vocabulary.engine_ids.get(role)
        text = side.special_token_texts.get(f"{role}_token")
        if side.uses_lists != other.uses_lists and i == other.vocabulary.engine_ids.get(role):
            text = (other if side.uses_lists else side).special_token_texts.get(f"{role}_token")
        made[f"role:{role}"] = (i, text)
    before, after = frame_roles(side)
    made |= {"begins": before, "ends": after, "template": side.template}
    pair = other.pair if side.pair is None else side.pair
    judged = side.judges_pairs or other.judges_pairs
    made |= {"segments": side.segments, "text": side.text_names, "pair": pair if judged else None}
    # Settings that a GGUF has no keys for are the other side's.
    source = other if crossed else side
    said = source.carried.parse_file(GENERATION_CONFIG) if not source.uses_lists else {}
    stated = {**said, **settings_by_keys(side.carried, other.carried)}
    if has_file(side.carried):
        stated = generation_settings(side.carried)
    made["generation"] = {
        "ends": id_list(said.get("eos_token_id")),
        "settings": {
            key: shortest(stated.get(key, default))
            for key, default in {**dict.fromkeys(GENERATION_KEYS), **GENERATION}.items()
        },
        "ids": {key: id_list(said.get(f"{key}_token_id")) for key in ("bos", "pad")},
    }
    config = (source.carried.model.config or {}) if not source.uses_lists else {}
    made["class:eos"] = sorted(source.stop_ids)
    for role in ("bos", "eos", "pad"):
        made[f"config:{role}"] = configured_ids(config, f"{role}_token_id")[0]
    made["listed"] = side.uses_lists and other.uses_lists
    return made


def exchange_parts(
    mine: TokenizerParts, theirs: TokenizerParts, names: Sequence[str]
) -> TokenizerParts:
    """Return the parts `mine` with the parts named in `names` replaced by those of `theirs`.

    If only pieces or only merges are exchanged, merges of pieces that are missing are left out.
    """
    made = mine | {name: theirs[name] for name in names if name in theirs}
    vocab = made["pieces"]
    alone = ("pieces" in names) != ("merges" in names)
    if alone and isinstance(vocab, Mapping) and made["merges"]:
        made["merges"] = [
            (x, y) for x, y in made["merges"] if x in vocab and y in vocab and x + y in vocab
        ]
    return made


def with_empty_merges(side: StatedTokenizer) -> StatedTokenizer:
    """Return a BPE tokenizer of lists that lacks merges with an empty list of them.

    An engine can be built of that. Any other tokenizer is returned unchanged.
    """
    if side.uses_lists and side.vocabulary.kind == "bpe" and side.vocabulary.merges is None:
        return replace(side, vocabulary=replace(side.vocabulary, merges=[]))
    return side
