"""Differences of what is done to a text before merging, and of the kind of model.

A *side* is the tokenizer of model A or of model B; `other` is that of the other model.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from aprfmt.causes.row import Cause
from aprfmt.causes.tokenizer.file_places import part_place
from aprfmt.causes.tokenizer.vocabulary_lists import (
    TokenizerDifference,
    is_list_and_json,
    value_text,
)
from aprfmt.tokenizer.engine_defaults import GGUF_MODELS, KIND_NAMES, kind_of_pieces
from aprfmt.tokenizer.keys import MODEL, PRE
from aprfmt.tokenizer.pre_tokenizers import (
    PRE_TOKENIZERS,
    Splitting,
    are_steps_known,
    flatten_steps,
    row_splitting,
    tokenizer_splitting,
)
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer
from aprfmt.tokenizer.vocabulary import BLANK

CAUSE_ROWS = (
    Cause(
        "tokenizer_model",
        "identity",
        "bug",
        "The vocabulary is read as another kind, or its model has other options (byte_fallback, "
        "unk_token).",
        "`tokenizer.ggml.model` or `model` of tokenizer.json.",
    ),
    Cause(
        "pre_tokenizer",
        "identity",
        "bug",
        "Texts are split otherwise before merging: another `tokenizer.ggml.pre`, none, another "
        "regex, digits one by one or in threes.",
        "Steps compared by effect; names that split alike are no difference.",
    ),
    Cause(
        "space_prefix",
        "identity",
        "bug",
        "A blank is put before a text on one side only (`add_space_prefix`, Prepend, Metaspace).",
        "The key or its default, against the normalizer.",
    ),
    Cause(
        "normalizer",
        "identity",
        "bug",
        "Texts are normalised otherwise before splitting: lower case, accents, NFC.",
        "`normalizer` of both tokenizer.json; what GGUF cannot say counts if a probe shows it.",
    ),
    Cause(
        "decoder",
        "identity",
        "bug",
        "Ids become another text: blanks, bytes or the parts of words are put together otherwise.",
        "`decoder` of both tokenizer.json, where a probe text comes back otherwise.",
    ),
)

# Normalizers that GGUF has no key for and llama.cpp leaves out: no fault of a copy.
UNSAID = ("NFC", "NFD", "NFKC", "NFKD", "Precompiled", "Prepend", "Replace", "Strip")
# Options of tokenizer.json's model, with their values where the key is absent.
_OPTIONS: Mapping[str, Any] = {
    "type": None, "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
    "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False,
}  # fmt: skip
# Parts of a tokenizer.json around its model, in which blanks are coded as one kind or another does.
_STEPS = ("pre_tokenizer", "normalizer", "decoder")
_IDLE = ("trim_offsets",)  # settings of a pre-tokenizer that move offsets and no id


def kind_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the kinds of vocabulary (BPE, SPM, ...); nothing for equal kinds.

    Unigram in a tokenizer.json equals SPM in a GGUF.
    """
    x, y = a.vocabulary.kind, b.vocabulary.kind
    if x == y or (is_list_and_json(a, b) and {x, y} == {"unigram", "spm"}):
        return
    says = f"A is read as {x}, B as {y}"
    parts: tuple[str, ...] = (
        "options", "pieces", "merges", "scores", "added", "pre_tokenizer", "normalizer"
    )  # fmt: skip
    if a.framed_roles is not None or b.framed_roles is not None:
        parts += ("begins", "ends", "pair")  # the kind says what is put around a text
    mend: tuple[str, ...] = ()
    for label, side in (("A", a), ("B", b)):
        own = kind_of_pieces(side.vocabulary.tokens, side.vocabulary.types)
        if own and own != side.vocabulary.kind:
            says += f", though {label}'s pieces are those of {KIND_NAMES[own]}"
            if label == "B" and own == x and b.uses_lists and b.carried.model.key_style == "gguf":
                mend = _keys_of_kind(a, b, own)
    yield TokenizerDifference(
        "kind", "tokenizer_model", parts, _places_of_kind(a, b), says, x, y, mend=mend
    )


def _places_of_kind(a: StatedTokenizer, b: StatedTokenizer) -> tuple[str, ...]:
    """Return the files or keys that state the two kinds of vocabulary, B's first.

    For two tokenizer.json of one model type these are the parts that differ, such as the
    normalizer.
    """
    if a.data is not None and b.data is not None:
        left, right = a.data, b.data
        if left["model"].get("type") == right["model"].get("type"):
            steps = [part for part in _STEPS if left.get(part) != right.get(part)]
            if steps:
                return tuple(f"tokenizer.json: {part}" for part in steps)
    return (*part_place(b, "kind"), *part_place(a, "kind"))


def _keys_of_kind(a: StatedTokenizer, b: StatedTokenizer, kind: str) -> tuple[str, ...]:
    """Return KEY=VALUE texts for `aprfmt set` that make B's pieces be read as kind `kind`."""
    keys = {MODEL.gguf: GGUF_MODELS[kind]}
    if (
        kind == "bpe"
        and (name := _splitting_name(a)) in PRE_TOKENIZERS
        and name != b.carried.text_value(PRE)
    ):
        keys[PRE.gguf] = name
    return tuple(f"{key}={value}" for key, value in keys.items())


def option_differences(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield differing options of the models of two tokenizer.json (byte_fallback, unk_token)."""
    if a.data is None or b.data is None:
        return
    left, right = a.data["model"], b.data["model"]
    apart = [
        key
        for key, default in _OPTIONS.items()
        if key != "type" and (left.get(key) or default) != (right.get(key) or default)
    ]
    if apart:
        says = ", ".join(f"{key} {left.get(key)!r} in A, {right.get(key)!r} in B" for key in apart)
        where = tuple(f"tokenizer.json: model.{key}" for key in apart)
        yield TokenizerDifference(
            "model",
            "tokenizer_model",
            ("options",),
            where,
            says,
            str(left.get(apart[0])),
            str(right.get(apart[0])),
        )


def prefix_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the blank put before a text, for two SPM vocabularies."""
    x, y = a.vocabulary.add_space_prefix, b.vocabulary.add_space_prefix
    if x == y or not a.vocabulary.kind == b.vocabulary.kind == "spm":
        return
    stated = b.carried.flag_value("add_space_prefix") if b.uses_lists else True
    absent = " (the key is missing: true is the default)" if b.uses_lists and stated is None else ""
    yield TokenizerDifference(
        "add_space_prefix",
        "space_prefix",
        ("normalizer", "pre_tokenizer"),
        (*part_place(b, "prefix"), *part_place(a, "prefix")),
        f"a blank before the text: {x} in A, {y} in B{absent}",
        x,
        y,
    )


def pre_tokenizer_difference(
    a: StatedTokenizer, b: StatedTokenizer
) -> Iterator[TokenizerDifference]:
    """Yield the difference of how texts are split into words; nothing for equal splittings.

    Two names of one splitting are yielded as without effect (`still`).
    """
    left, right = _splitting_of(a), _splitting_of(b)
    x, y = _splitting_name(a), _splitting_name(b)
    where = (*part_place(b, "pre"), *part_place(a, "pre"))
    if left == right and left is not None:
        if x != y:
            yield TokenizerDifference(
                "pre",
                "pre_tokenizer",
                ("pre_tokenizer",),
                where,
                f"{x} in A, {y} in B, which split alike",
                x,
                y,
                still=True,
            )
        return
    if left is None and right is None and x == y:
        return
    known = all(side is not None and are_steps_known(side[0]) for side in (left, right))
    if _only_ignore_merges_differs(
        left, right
    ):  # every piece's own text is a probe: none shows it, or it has effect
        where, known = (where[0], "ignore_merges", *where[1:]), False
    yield TokenizerDifference(
        "pre",
        "pre_tokenizer",
        ("pre_tokenizer",),
        where,
        f"A splits by {x}, B by {y}{_missing_text(b)}",
        x,
        y,
        sure=known or not (is_list_and_json(a, b) or _only_ignore_merges_differs(left, right)),
    )


def _only_ignore_merges_differs(left: Splitting | None, right: Splitting | None) -> bool:
    """Return whether two splittings have equal steps, so that only `ignore_merges` may differ."""
    return left is not None and right is not None and left[0] == right[0]


def _missing_text(side: StatedTokenizer) -> str:
    """Return a remark on a GGUF that lacks the key of its pre-tokenizer; "" for others."""
    absent = (
        side.uses_lists
        and side.vocabulary.kind == "bpe"
        and side.carried.metadata_value(PRE) is None
    )
    return " (the key is missing; llama.cpp takes default)" if absent else ""


def _splitting_of(side: StatedTokenizer) -> Splitting | None:
    """Return (steps, whether whole words skip the merges) of a side's splitting into words.

    None for a name that is not known here. The steps are () for vocabularies that split nothing.
    """
    if side.vocabulary.kind != "bpe" and (side.uses_lists or side.vocabulary.kind == "spm"):
        return ((), False)
    if side.data is None:
        return row_splitting(side.vocabulary.pre)
    steps, ignores = tokenizer_splitting(side.data)
    if are_steps_known(steps):
        return steps, ignores
    return _cleaned_steps(flatten_steps(side.data.get("pre_tokenizer"), "pretokenizers")), ignores


def _cleaned_steps(nodes: Iterable[Mapping[str, object]]) -> tuple[tuple[str, str], ...]:
    """Return (kind, settings as text) of each step, without settings that change no id."""
    rows = [{key: value for key, value in node.items() if key not in _IDLE} for node in nodes]
    return tuple(("unknown", str(sorted(row.items(), key=str))) for row in rows)


def _splitting_name(side: StatedTokenizer) -> str:
    """Return the name of the splitting as a GGUF has it, or the tokenizer.json's steps as text."""
    if side.data is None:
        return side.vocabulary.pre or side.vocabulary.kind
    own = tokenizer_splitting(side.data)

    names = (name for name in PRE_TOKENIZERS if row_splitting(name) == own)
    steps = [f"{kind} {value_text(argument)}" for kind, argument in own[0]]
    text = next(names, " + ".join(steps) or "nothing")
    return text if len(text) <= 90 else text[:87] + "..."


def metaspace_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the Metaspace pre-tokenizers of two tokenizer.json."""
    if a.data is None or b.data is None or a.vocabulary.kind != "spm" != b.vocabulary.kind:
        return
    left, right = (
        _cleaned_steps(flatten_steps(side.data.get("pre_tokenizer"), "pretokenizers"))
        for side in (a, b)
        if side.data is not None
    )
    if left != right and a.vocabulary.add_space_prefix == b.vocabulary.add_space_prefix:
        yield TokenizerDifference(
            "pre",
            "pre_tokenizer",
            ("pre_tokenizer", "normalizer"),
            part_place(b, "pre"),
            f"A splits by {value_text(left)}, B by {value_text(right)}",
            str(left),
            str(right),
        )


def normalizer_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the normalizers; llama.cpp has none but the blank in front."""
    left, right = _comparable_steps(a, b), _comparable_steps(b, a)
    if left == right:
        return
    shown = [", ".join(step for step, _ in side) or "none" for side in (left, right)]
    yield TokenizerDifference(
        "normalizer",
        "normalizer",
        ("normalizer",),
        (*part_place(b, "normalizer"), *part_place(a, "normalizer")),
        f"normalised by {shown[0]} in A, by {shown[1]} in B",
        shown[0],
        shown[1],
        sure=not is_list_and_json(a, b),
    )


def decoder_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the decoders of two tokenizer.json; it counts if a probe shows it."""
    if a.data is None or b.data is None:
        return
    left, right = a.data.get("decoder"), b.data.get("decoder")
    if left == right:
        return
    shown = [
        ", ".join(str(step.get("type")) for step in flatten_steps(node, "decoders")) or "nothing"
        for node in (left, right)
    ]
    yield TokenizerDifference(
        "decoder",
        "decoder",
        ("decoder",),
        ("tokenizer.json: decoder",),
        f"ids become text by {shown[0]} in A, by {shown[1]} in B",
        shown[0],
        shown[1],
        sure=False,
    )


def _comparable_steps(side: StatedTokenizer, other: StatedTokenizer) -> tuple[tuple[str, str], ...]:
    """Return (type, settings as text) of each normalizer step to compare; () without any.

    Steps that the other side, if a GGUF, cannot state are left out, and so is the blank in front
    where it is a difference by itself.
    """
    if side.data is None:
        return ()
    skip = UNSAID if other.uses_lists else ()
    prefixed = side.vocabulary.add_space_prefix != other.vocabulary.add_space_prefix
    found = []
    for step in flatten_steps(side.data.get("normalizer"), "normalizers"):
        blank = step.get("type") == "Prepend" and step.get("prepend") == BLANK
        if step.get("type") not in skip and not (blank and prefixed):
            found.append((str(step.get("type")), str(sorted(step.items(), key=str))))
    return tuple(found)
