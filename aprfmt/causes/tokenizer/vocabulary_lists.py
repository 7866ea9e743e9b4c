"""Differences of two tokenizers, part by part, as their lists and files say them.

A *side* is the tokenizer of model A or of model B; `other` is that of the other model. A *part* is
one of the things it consists of, such as pieces or merges.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aprfmt.base.protocols import Value
from aprfmt.base.text_escape import shorten
from aprfmt.causes.row import Cause
from aprfmt.causes.tokenizer.file_places import part_place
from aprfmt.tokenizer.keys import BYTE, CONTROL, NORMAL, TYPES, UNKNOWN, UNUSED, USER_DEFINED
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer
from aprfmt.tokenizer.vocabulary import BLANK

CAUSE_ROWS = (
    Cause(
        "tokenizer_pieces", "identity", "bug",
        "Pieces stand at other ids: shifted, exchanged, cut, or those of another model.",
        "Pieces compared id by id; fillers such as [PAD7] do not count.",
    ),
    Cause(
        "token_numbering", "identity", "same",
        "Tokens have other ids, and the rows of their tables stand there too: one model under "
        "another numbering.",
        "Pieces at other ids, and tables of tokens whose rows are in another order.",
        "Every row is, bit for bit, the row of the same token of the other side.",
        next="nothing",
    ),
    Cause(
        "added_tokens", "identity", "bug",
        "Tokens split off whole are missing, stand at other ids or have other flags (lstrip, "
        "rstrip, normalized, single_word, special).",
        "`added_tokens` of both tokenizer.json, with those tokenizer_config.json adds.",
    ),
    Cause(
        "token_types", "identity", "bug",
        "Tokens have another type: control tokens marked normal are read as text, byte tokens "
        "marked normal are lost.",
        "`tokenizer.ggml.token_type` by token.",
    ),
    Cause(
        "tokenizer_merges", "identity", "bug",
        "Merges are missing, cut to the first n, or stand in another order.",
        "The two lists; a prefix and a reordering are named as such.",
    ),
    Cause(
        "tokenizer_scores", "identity", "bug",
        "Scores of pieces differ, so that pieces are joined in another order.",
        "Scores by piece; where only their order matters, the order.",
    ),
)  # fmt: skip

AddedTokens = Mapping[str, Mapping[str, object]]  # added tokens by their text, with their flags
_FILLER = re.compile(r"\[PAD\d+\]|<\|pad_\d+\|>|<dummy\d+>")
# Other spellings of a vocabulary's pieces, by what makes one of the other.
_RESPELLINGS: Mapping[str, Callable[[str], str]] = {
    "with their UTF-8 bytes read as Latin-1 characters": lambda x: x.encode().decode("latin-1"),
    "with blanks in place of the byte-level \u0120": lambda x: x.replace("\u0120", " "),
    "with blanks in place of \u2581": lambda x: x.replace(BLANK, " "),
    "without the \u0120 that begins a word": lambda x: x.removeprefix("\u0120"),
    "without the \u2581 that begins a word": lambda x: x.removeprefix(BLANK),
    "without the ## that continues a word": lambda x: x.removeprefix("##"),
    "in lower case": str.lower,
}
_OTHER_SHARE = 0.5  # of the pieces: with more of them apart it is the tokenizer of another model
_TYPE_NAMES = {NORMAL: "normal", UNKNOWN: "unknown", CONTROL: "control", BYTE: "byte",
               USER_DEFINED: "user-defined", UNUSED: "unused"}  # fmt: skip
# Added tokens that llama.cpp's converter takes for control tokens whatever their flag says.
LOOKS_SPECIAL = re.compile(
    r"<pad>|<mask>|<2mass>|\[@BOS@\]|<\|.*\|>|<\uff5c.*\uff5c>|<unused.*>", re.DOTALL
)


@dataclass(frozen=True)
class TokenizerDifference:
    """One difference that the lists or files of two tokenizers show.

    `name` is the fact's name in `diff`, `parts` are the parts (causes.tokenizer.part_exchange) that
    taking it away replaces, `where` the files or keys that state it, B's first. `sure` says that it
    is a difference whether a probe shows it or not; otherwise it counts only if one does: two
    formats spell one thing apart. `still` is a difference known to have no effect, `told` one that
    answers name all the same. `mend` are KEY=VALUE for `aprfmt set`, which give B what A has.

    What it does is measured later. `shown`: a probe shows it, and none is left once all differences
    are taken away. `probed` is False where texts could not be encoded, so that nothing could show
    it. `before` and `after` are the fractions of readings (ids of a text, a rendering, an end) that
    are not A's: with this difference alone, and with every listed one taken away. `example` are the
    two answers to the first probe that shows it, each with the probe.
    """

    name: str
    cause: str
    parts: tuple[str, ...]
    where: tuple[str, ...]
    says: str
    a: Value
    b: Value
    sure: bool = True
    still: bool = False
    told: bool = False
    mend: tuple[str, ...] = ()
    shown: bool = False
    probed: bool = True
    before: float | None = None
    after: float | None = None
    example: tuple[str, ...] = ()


def value_text(value: object) -> str:
    """Return a value as text of at most 60 characters."""
    return shorten(repr(value), 60)


def is_list_and_json(a: StatedTokenizer, b: StatedTokenizer) -> bool:
    """Return whether one side is read by lists and the other by a tokenizer.json."""
    return a.uses_lists != b.uses_lists


# --- pieces ----------------------------------------------------------------------------------


def comparable_pieces(side: StatedTokenizer, other: StatedTokenizer) -> list[str]:
    """Return the pieces by id, in the spelling in which the two sides can be compared.

    llama.cpp's converter writes WordPiece's `##ing` as `ing` and `walk` as U+2581 and `walk`.
    """
    tokens = list(side.vocabulary.tokens)
    if side.vocabulary.kind != "wordpiece" or side.uses_lists or not other.uses_lists:
        return tokens
    return [
        token[2:]
        if token.startswith("##")
        else token
        if token.startswith("[") and token.endswith("]")
        else BLANK + token
        for token in tokens
    ]


def vocabulary_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield one difference for all ids whose pieces differ; nothing if no piece does.

    Fillers such as [PAD0] and added tokens are left out. If most pieces differ, it covers all parts
    of the tokenizer, as that of another model.
    """
    mine, theirs = comparable_pieces(a, b), comparable_pieces(b, a)
    skip = (
        {row["content"] for row in (*a.added_tokens, *b.added_tokens)}
        if not is_list_and_json(a, b)
        else set()
    )
    size = max(len(mine), len(theirs))
    # Fill both lists to one length.
    mine += ["[PAD0]"] * (size - len(mine))
    theirs += ["[PAD0]"] * (size - len(theirs))
    # Ids whose pieces differ, without fillers and added tokens.
    apart = [
        i
        for i, (x, y) in enumerate(zip(mine, theirs, strict=True))
        if x != y
        and not (_FILLER.fullmatch(x) and _FILLER.fullmatch(y))
        and x not in skip
        and y not in skip
    ]
    if not apart:
        return
    first = apart[0]
    shared = len(set(mine) & set(theirs))
    spelled = _respelling_text(mine, theirs, apart)
    # Mostly other pieces are another model's tokenizer, unless one spelling makes one of the other.
    if not spelled and min(len(apart), size - shared) > _OTHER_SHARE * size:
        what = f"B has the tokenizer of another model: {len(apart)} of {size} pieces differ"
        parts: tuple[str, ...] = ("pieces", "merges", "scores", "added", "pre_tokenizer",
                                  "normalizer", "options")  # fmt: skip
    else:
        # What stands by id is replaced with the pieces, where it differs at their ids alone.
        parts = ("pieces",)
        if (a.uses_lists or b.uses_lists) and _equal_elsewhere(
            a.vocabulary.types, b.vocabulary.types, apart
        ):
            parts += ("added",)
        if _scores_differ_by_pieces_alone(a, b, apart):
            parts += ("scores",)
        what = spelled or _moved_text(mine, theirs, apart)
    says = (
        f"{what}; the first at id {first}: A {value_text(mine[first])}, B "
        f"{value_text(theirs[first])}"
    )
    yield TokenizerDifference(
        "tokens",
        "tokenizer_pieces",
        parts,
        (*part_place(b, "tokens"), f"id {first}", *part_place(a, "tokens")),
        says,
        f"{first}: {mine[first]}",
        f"{first}: {theirs[first]}",
    )


def _equal_elsewhere(mine: Sequence[object], theirs: Sequence[object], ids: Sequence[int]) -> bool:
    """Return whether two lists by id are equal at all ids that both have but `ids`."""
    skip = set(ids)
    rows = enumerate(zip(mine, theirs, strict=False))
    return all(x == y for i, (x, y) in rows if i not in skip)


def _scores_differ_by_pieces_alone(
    a: StatedTokenizer, b: StatedTokenizer, apart: Sequence[int]
) -> bool:
    """Return whether two lists have equal scores by id but at `apart`, where the pieces differ."""
    mine, theirs = a.vocabulary.scores, b.vocabulary.scores
    if mine is None or theirs is None or not (a.uses_lists and b.uses_lists):
        return False
    return _equal_elsewhere(mine, theirs, apart)


def rowless_token_difference(
    a: StatedTokenizer, b: StatedTokenizer
) -> Iterator[TokenizerDifference]:
    """Yield the difference of tokens that have no embedding row, for two tokenizer.json.

    Added tokens are not compared here, nor are tokens that have a row on the other side.
    """
    if a.uses_lists or b.uses_lists:
        return
    stated = {
        row["content"] for row in (*a.added_tokens, *b.added_tokens)
    }  # `added_token_difference` compares those
    left, right = (
        {i: token for i, token in side.vocabulary.rowless.items() if token not in stated}
        for side in (a, b)
    )
    if left == right:
        return
    apart = [i for i in (*left, *right) if left.get(i) != right.get(i)]
    rows = ((left, {*b.vocabulary.tokens}), (right, {*a.vocabulary.tokens}))
    if all(own[i] in known for own, known in rows for i in apart if i in own):
        return  # they moved: `vocabulary_difference` says it
    first = apart[0]
    yield TokenizerDifference(
        "tokens_without_row",
        "tokenizer_pieces",
        ("pieces",),
        (*part_place(b, "tokens"), f"id {first}", *part_place(a, "tokens")),
        f"tokens without a row of the embedding differ: {len(left)} in A, {len(right)} in B; the "
        f"first at id {first}: A {value_text(left.get(first))}, B {value_text(right.get(first))}",
        len(left),
        len(right),
    )


def _respelling_text(mine: Sequence[str], theirs: Sequence[str], apart: Sequence[int]) -> str:
    """Return in words which other spelling makes one side's pieces `apart` of the other's; or "".

    At least two pieces have to differ: of one, many a spelling would be true.
    """
    if len(apart) < 2:
        return ""
    for how, spell in _RESPELLINGS.items():
        for label, other, x, y in (("B", "A", mine, theirs), ("A", "B", theirs, mine)):
            if all(spell(x[i]) == y[i] for i in apart):
                return f"{len(apart)} of {label}'s pieces are {other}'s {how}"
    return ""


def _moved_text(mine: Sequence[str], theirs: Sequence[str], apart: Sequence[int]) -> str:
    """Return in words how pieces differ by id: missing, shifted, exchanged, reordered or different.

    `mine` and `theirs` are the pieces by id, `apart` the ids that differ.
    """
    first, size = apart[0], len(mine)
    if all(_FILLER.fullmatch(theirs[i]) for i in apart):
        return f"B lacks {len(apart)} of A's pieces"
    if all(_FILLER.fullmatch(mine[i]) for i in apart):
        return f"B has {len(apart)} pieces more than A"
    if len(apart) == 2 and mine[apart[0]] == theirs[apart[1]] and mine[apart[1]] == theirs[first]:
        return f"ids {apart[0]} and {apart[1]} are exchanged"
    for by in (*range(1, 17), *range(-16, 0)):
        near = [i for i in apart[:256] if 0 <= i + by < size]
        if len(near) > 3 and sum(mine[i] == theirs[i + by] for i in near) > 0.9 * len(near):
            return f"from id {first} on B's pieces stand {by:+d} ids away from A's"
    if set(mine) == set(theirs):
        return f"{len(apart)} of {size} pieces stand at other ids"
    return f"{len(apart)} of {size} pieces differ"


# --- merges and scores -----------------------------------------------------------------------


def merge_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the merges; nothing if they are equal.

    Where only one side has merges and a side joins by scores, the difference counts only if a
    probe text shows it.
    """
    mine, theirs = a.vocabulary.merges, b.vocabulary.merges
    if mine == theirs:
        return
    if (mine is None or theirs is None) and "spm" in (a.vocabulary.kind, b.vocabulary.kind):
        yield TokenizerDifference(
            "merges",
            "tokenizer_scores",
            ("merges",),
            (*part_place(b, "scores"), *part_place(a, "merges")),
            "one side joins pieces by merges, the other by scores",
            mine and len(mine),
            theirs and len(theirs),
            sure=False,
        )
        return
    # Find the first merge that differs.
    where = (*part_place(b, "merges"), *part_place(a, "merges"))
    left, right = list(mine or ()), list(theirs or ())
    first = next(
        (i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y),
        min(len(left), len(right)),
    )
    yield TokenizerDifference(
        "merges",
        "tokenizer_merges",
        ("merges",),
        (where[0], f"merge {first}", *where[1:]),
        _merges_text(left, right, first),
        len(left),
        len(right),
    )


def _merges_text(mine: Sequence[str], theirs: Sequence[str], first: int) -> str:
    """Return in words how two lists of merges differ, from index `first` on."""
    if not theirs:
        return f"B has no merges, A has {len(mine)}"
    if first == len(theirs):
        return f"the merges of A cut to the first {first} of {len(mine)}"
    if first == len(mine):
        return f"B has {len(theirs) - first} merges after A's {first}"
    at = f"merge {first} is {value_text(mine[first])} in A, {value_text(theirs[first])} in B"
    if list(theirs) == list(reversed(mine)):
        return f"the merges of A in reverse; {at}"
    lost, new = Counter(mine) - Counter(theirs), Counter(theirs) - Counter(mine)
    if not lost and not new:
        return f"the same {len(mine)} merges in another order; {at}"
    counts = f"{lost.total()} of A's {len(mine)} merges are missing, {new.total()} are others"
    return f"{counts}; {at}"


def score_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the scores of normal pieces that both sides have.

    Nothing for lists that are equal by id: what differs are the pieces.
    """
    if a.vocabulary.scores is None or b.vocabulary.scores is None:
        if a.vocabulary.scores is not None and b.uses_lists and not b.vocabulary.merges:
            yield TokenizerDifference(
                "scores",
                "tokenizer_scores",
                ("merges", "scores"),
                part_place(b, "scores"),
                f"B has no scores, A has {len(a.vocabulary.scores)}",
                len(a.vocabulary.scores),
                0,
            )
        return
    by_id = zip(a.vocabulary.scores, b.vocabulary.scores, strict=False)
    if a.uses_lists and b.uses_lists and all(x == y for x, y in by_id):
        return
    # Pieces that both sides have, with other scores.
    left, right = _scores_by_piece(a, b), _scores_by_piece(b, a)
    apart = [
        token
        for token, score in left.items()
        if token in right and abs(right[token] - score) > 1e-6 * max(1.0, abs(score))
    ]
    if not apart:
        return
    first = apart[0]
    # Where only their order matters and is equal, nothing differs in effect.
    both = [token for token in left if token in right]
    still = a.vocabulary.kind == "spm" and _score_ranks(left, both) == _score_ranks(right, both)
    flat = len(apart) > 1 and len({right[token] for token in apart}) == 1
    what = f"{len(apart)} of {len(left)} scores differ" + ("; B's are one value" * flat)
    yield TokenizerDifference(
        "scores",
        "tokenizer_scores",
        # the vocabulary of a Unigram tokenizer.json holds each piece with its score
        ("pieces",) if a.data and b.data else ("merges", "scores"),
        (*part_place(b, "scores"), f"piece {first}", *part_place(a, "scores")),
        f"{what}; of {value_text(first)} A has {left[first]:g}, B {right[first]:g}",
        left[first],
        right[first],
        still=still,
    )


def _score_ranks(scored: Mapping[str, float], tokens: Sequence[str]) -> list[int]:
    """Return each token's rank among the distinct scores, which decide how pieces are joined."""
    places = {score: i for i, score in enumerate(sorted({scored[token] for token in tokens}))}
    return [places[scored[token]] for token in tokens]


def _scores_by_piece(side: StatedTokenizer, other: StatedTokenizer) -> dict[str, float]:
    """Return {piece: score} of the normal pieces, spelled as in the other side."""
    rows = zip(
        comparable_pieces(side, other),
        side.vocabulary.types,
        side.vocabulary.scores or (),
        strict=False,
    )
    return {token: float(score) for token, kind, score in rows if kind == NORMAL}


# --- types and added tokens --------------------------------------------------------------------


def type_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of token types, where at least one side has lists."""
    if not a.uses_lists and not b.uses_lists:
        return
    # Tokens that both sides have, with types that disagree.
    left = dict(zip(comparable_pieces(a, b), a.vocabulary.types, strict=True))
    right = dict(zip(comparable_pieces(b, a), b.vocabulary.types, strict=True))
    apart = [
        token
        for token, kind in left.items()
        if token in right
        and not _types_agree(token, kind, right[token], a.uses_lists, b.uses_lists)
    ]
    if not apart:
        yield from _overridden_difference(a, b)
        return
    if list(a.vocabulary.types) == list(b.vocabulary.types):
        return  # equal by id: what differs are the pieces
    counts = Counter((left[token], right[token]) for token in apart)
    shown = ", ".join(
        f"{count} {_TYPE_NAMES.get(x, x)} in A, {_TYPE_NAMES.get(y, y)} in B"
        for (x, y), count in counts.most_common(3)
    )
    first = apart[0]
    yield TokenizerDifference(
        "token_type",
        "token_types",
        ("added",),
        (*part_place(b, "types"), f"token {first}", *part_place(a, "types")),
        f"tokens of another type: {shown}; the first is {value_text(first)}{_untyped_text(b)}"
        f"{_overridden_text(b)}",
        f"{first}: {left[first]}",
        f"{first}: {right[first]}",
        sure=not is_list_and_json(a, b),
    )


def _untyped_text(b: StatedTokenizer) -> str:
    """Return a remark on a GGUF that has no token types; "" for others."""
    absent = (
        b.uses_lists
        and b.carried.model.key_style == "gguf"
        and b.carried.metadata_value(TYPES) is None
    )
    return " (the key is missing: llama.cpp takes every token for a normal one)" if absent else ""


def _overridden_types(side: StatedTokenizer) -> dict[str, int]:
    """Return {token: stored type} of the tokens whose type llama.cpp overrides when it loads.

    {} for a tokenizer that is not stored as lists.
    """
    stored = side.carried.metadata_value(TYPES) if side.uses_lists else None
    if not isinstance(stored, Sequence) or len(stored) != len(side.vocabulary.types):
        return {}
    rows = zip(side.vocabulary.tokens, stored, side.vocabulary.types, strict=True)
    return {token: own for token, own, taken in rows if own != taken}


def _overridden_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of stored types that agree only since llama.cpp overrides one side's.

    Other engines read the stored type, and cut such a token into pieces.
    """
    left, right = _overridden_types(a), _overridden_types(b)
    apart = [token for token in {**left, **right} if left.get(token) != right.get(token)]
    if not apart:
        return
    first = apart[0]
    stored = (_TYPE_NAMES.get(kinds.get(first, CONTROL)) for kinds in (left, right))
    x, y = stored
    yield TokenizerDifference(
        "token_type",
        "token_types",
        ("added",),
        (*part_place(b, "types"), f"token {first}", *part_place(a, "types")),
        f"{len(apart)} tokens are stored with another type: {value_text(first)} is {x} in A, {y} "
        "in B; llama.cpp overrides it, other engines do not",
        f"{first}: {left.get(first, CONTROL)}",
        f"{first}: {right.get(first, CONTROL)}",
    )


def _overridden_text(b: StatedTokenizer) -> str:
    """Return a clause on tokens of B whose stored type llama.cpp overrides; "" for none."""
    apart = list(_overridden_types(b).items())
    if not apart:
        return ""
    token, own = apart[0]
    return (
        f"; {len(apart)} more as stored, of which llama.cpp overrides the type, the first "
        f"{value_text(token)} ({_TYPE_NAMES.get(own, own)})"
    )


def _types_agree(token: str, x: int, y: int, lists_a: bool, lists_b: bool) -> bool:
    """Return whether two types of a token mean the same in a GGUF's lists and in a tokenizer.json.

    `x` and `y` are the types in A and B; `lists_a` and `lists_b` say which side is a GGUF. A
    tokenizer.json's special token is a control token. A token that looks special may be a control
    token in the lists and a user-defined one in the tokenizer.json; the reverse is a difference.
    """
    if x == y or _FILLER.fullmatch(token):
        return True
    if lists_a == lists_b:
        return False
    listed, filed = (x, y) if lists_a else (y, x)
    whole = (CONTROL, UNKNOWN)
    if listed in whole and filed in whole:
        return True
    more = listed in whole and filed == USER_DEFINED
    return more and bool(LOOKS_SPECIAL.fullmatch(token))


def added_token_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the added tokens, which are never split, of two tokenizer.json."""
    if a.uses_lists or b.uses_lists:
        return
    left, right = ({row["content"]: row for row in side.added_tokens} for side in (a, b))
    if left == right:
        return
    where = (*part_place(b, "added"), *part_place(a, "added"))
    # Tokens that B lacks, that it adds, and that have other flags or ids.
    lost = [text for text in left if text not in right]
    new = [text for text in right if text not in left]
    other = [text for text in left if text in right and left[text] != right[text]]
    what = []
    if lost:
        what.append(f"B lacks {len(lost)} added tokens, the first {value_text(lost[0])}")
    if new:
        what.append(f"B adds {len(new)}, the first {value_text(new[0])}")
    if other:
        x, y = left[other[0]], right[other[0]]
        flags = ", ".join(f"{key} {x[key]} in A, {y[key]} in B" for key in x if x[key] != y[key])
        what.append(f"{len(other)} differ, the first {value_text(other[0])}: {flags}")
    first = (lost or new or other)[0]
    yield TokenizerDifference(
        "added_tokens",
        "added_tokens",
        ("added", "pieces"),
        (where[0], f"token {first}", *where[1:]),
        "; ".join(what),
        len(left),
        len(right),
        still=not (lost or new) and _only_normalized_differs(a, b, left, right, other),
    )


def _only_normalized_differs(
    a: StatedTokenizer,
    b: StatedTokenizer,
    left: AddedTokens,
    right: AddedTokens,
    other: Sequence[str],
) -> bool:
    """Return whether added tokens differ only in the flag `normalized`, and it has no effect.

    It has none if no side has a normalizer. `other` are the texts of tokens that differ; `left`
    and `right` are {text: row of added_tokens} of A and B.
    """
    if any(side.data and side.data.get("normalizer") for side in (a, b)):
        return False
    return all(
        {**left[text], "normalized": 0} == {**right[text], "normalized": 0} for text in other
    )
