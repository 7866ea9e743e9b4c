"""Two models' tokenizers as one subject: what differs, and whether any text or chat shows it.

Pieces, scores, types, merges, splitting, special ids, BOS and EOS, chat template and generation
settings are listed part by part; then probe texts are encoded and conversations rendered on both
sides, and with one part of B at a time in A's place. `diff` and `diagnose` print what this says.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aprfmt.base.text_escape import shorten
from aprfmt.causes.row import Cause
from aprfmt.causes.tokenizer import pre_tokenizer, special_ids, vocabulary_lists
from aprfmt.causes.tokenizer.effect import ENGINE, Bench, Effect, SideLabel, effects, split_effect
from aprfmt.causes.tokenizer.file_places import EXCHANGED
from aprfmt.causes.tokenizer.part_exchange import TokenizerParts, parts_of, without_merges
from aprfmt.causes.tokenizer.probe_texts import piece_texts, plain_text, special_texts_of, texts_for
from aprfmt.causes.tokenizer.vocabulary_lists import Difference
from aprfmt.errors import AprfmtError
from aprfmt.model import Model
from aprfmt.model.ledger import NotCompared
from aprfmt.tokenizer.conversations import lacking
from aprfmt.tokenizer.engine_defaults import healed_types
from aprfmt.tokenizer.hf_engine import HfEngine
from aprfmt.tokenizer.isolated import engine_of_text
from aprfmt.tokenizer.keys import CONTROL
from aprfmt.tokenizer.spm import SpmEngine
from aprfmt.tokenizer.stated import Stated, stated
from aprfmt.tokenizer.vocabulary import Vocabulary

CAUSE_ROWS = (
    Cause(
        "carried_tokenizer", "identity", "bug",
        "A GGUF carries a tokenizer.json that says otherwise than its own lists, which other "
        "engines read.",
        "The lists against `tokenizer.huggingface.json` in the same file.", EXCHANGED,
    ),
)  # fmt: skip

# In the order in which findings are named. Where the kind or the whole vocabulary is another one,
# it stands for the rows behind it whose parts it holds.
_LISTED = (
    pre_tokenizer.kind, vocabulary_lists.pieces, vocabulary_lists.beyond, vocabulary_lists.added,
    vocabulary_lists.types, pre_tokenizer.pre_tokenizer, pre_tokenizer.metaspace,
    pre_tokenizer.prefix, pre_tokenizer.normalizer, vocabulary_lists.merges,
    vocabulary_lists.scores, pre_tokenizer.options, special_ids.roles, special_ids.framing,
    special_ids.template, special_ids.generation, special_ids.configured,
)  # fmt: skip
_BY_PIECES = {"pre_tokenizer", "normalizer", "merges", "scores", "options"}
COMPARED = (
    "pieces, types, merges or scores, splitting, special ids, BOS and EOS, chat template, "
    "generation settings"
)


@dataclass(frozen=True)
class TokensReport:
    """Findings (what counts), differences without effect, and what was and was not compared.

    `carried` are the labels of the sides that carry a tokenizer; `remarks` are sentences about a
    template and the vocabulary beside it. `added` are the ids of special and of added tokens.
    """

    findings: tuple[Difference, ...] = ()
    notes: tuple[Difference, ...] = ()
    remarks: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    carried: str = "AB"
    added: tuple[int, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)  # of tokens and merges that differ
    left: tuple[NotCompared, ...] = ()  # tokens for which the other format has no place


def compare_tokens(a: Model, b: Model) -> TokensReport:
    """Compare the tokenizers of two open models; what cannot be read is said, not raised."""
    sides: list[Stated | None] = []
    for label, model in (("A", a), ("B", b)):
        try:
            sides.append(stated(model))
        except AprfmtError as error:
            return TokensReport(not_checked=(f"tokenizer: {label}'s cannot be read: {error}",))
    mine, theirs = sides
    if mine is None or theirs is None:
        lacking = " and ".join(label for label, side in zip("AB", sides, strict=True) if not side)
        verb = "carry" if lacking == "A and B" else "carries"
        has = "".join(label for label, side in zip("AB", sides, strict=True) if side)
        return TokensReport(
            not_checked=(f"tokenizer: {lacking} {verb} none; not compared",), carried=has
        )
    try:
        mine, theirs = as_engines_type(mine, theirs), as_engines_type(theirs, mine)
        report = between(mine, theirs)
        own = carried_otherwise(theirs, b)
        if own is not None and carried_otherwise(mine, a) is None:
            report = _joined(report, own)
        vocabularies = mine.vocabulary, theirs.vocabulary
        return replace(
            report,
            added=_added(mine, theirs),
            counts=counts(*vocabularies),
            left=tuple(_without_counterpart(mine, theirs)),
        )
    except AprfmtError as error:
        return TokensReport(not_checked=(f"tokenizer: not compared: {error}",))


def as_engines_type(side: Stated, other: Stated) -> Stated:
    """Return lists with the types that llama.cpp gives to what looks like an end of a turn.

    Only where the other side has a control token: what both leave a plain piece stays one.
    """
    if not side.lists or side.carried.model.key_style != "gguf":
        return side
    own = side.vocabulary
    rows = zip(other.vocabulary.tokens, other.vocabulary.types, strict=True)
    control = {token for token, kind in rows if kind == CONTROL}
    types = healed_types(own.tokens, own.types, control.__contains__)
    return side if types == list(own.types) else replace(side, vocabulary=replace(own, types=types))


def _without_counterpart(a: Stated, b: Stated) -> Iterator[NotCompared]:
    """Yield the tokens without a row of each side, where the other side has lists.

    A GGUF's lists are as long as the embedding: its writers leave such tokens out.
    """
    for label, side, other in (("A", a, b), ("B", b, a)):
        rowless = vocabulary_lists.without_row(side)
        if not rowless or not other.lists:
            continue
        first = next(iter(rowless.items()))
        yield NotCompared(
            "tokenizer part", f"{len(rowless)} tokens without a row", "no counterpart",
            f"the first is {first[0]} {vocabulary_lists.said(first[1])}; lists end with the "
            "embedding",
            label,
        )  # fmt: skip


def _added(*sides: Stated) -> tuple[int, ...]:
    """Return the ids of special tokens, then of all that are split off whole, each once."""
    vocabularies = [side.vocabulary for side in sides]
    special = [i for v in vocabularies for i in v.ids.values()]
    return tuple(dict.fromkeys([*special, *(i for v in vocabularies for i in v.added)]))


def between(mine: Stated, theirs: Stated) -> TokensReport:
    """Compare two tokenizers. Raises FormatError for one that cannot be read."""
    every = list(_differences(mine, theirs))
    still = tuple(row for row in every if row.still)
    found = [row for row in every if not row.still]
    checked = (f"tokenizer: {COMPARED}",)
    if not found:
        return TokensReport(notes=still, checked=checked, remarks=_unnamed(mine, theirs))
    mine, theirs = without_merges(mine), without_merges(theirs)
    unseen: list[Difference] = []
    missing: tuple[str, ...] = ()
    if not _encodable(mine, theirs):
        unseen = [row for row in found if set(row.parts) & set(ENGINE)]
        missing = (f"tokenizer: texts were not encoded: {_kinds(mine, theirs)}",)
    unsure = [row for row in found if not row.sure and set(row.parts) <= set(ENGINE)]
    if unsure and (unseen or split_alike(mine, theirs)):
        still = (*still, *unsure)
    else:
        unsure = []
    found = [row for row in found if row not in unsure and row not in unseen]
    findings = [replace(row, probed=False) for row in unseen if row not in unsure]
    findings += _measured(mine, theirs, found) if found else []
    kept = tuple(row for row in findings if row.shown or row.sure)
    notes = tuple(row for row in findings if row not in kept)
    return TokensReport(kept, (*still, *notes), _unnamed(mine, theirs), checked, missing)


def _encodable(a: Stated, b: Stated) -> bool:
    """Say whether texts can be encoded on both sides; beside lists, only what GGUF's lists say."""
    if not a.lists and not b.lists:
        return True
    return all(side.encodes and side.vocabulary.kind in ("bpe", "spm") for side in (a, b))


def _kinds(a: Stated, b: Stated) -> str:
    names = (side.vocabulary.pre or side.vocabulary.kind for side in (a, b))
    return " and ".join(dict.fromkeys(names)) + ", which aprfmt does not split by"


def split_alike(a: Stated, b: Stated) -> bool:
    """Say whether scores and a tokenizer.json, each read in its own way, split all probes alike."""
    files, lists = (b, a) if a.lists else (a, b)
    if files.data is None or not lists.lists or lists.vocabulary.scores is None:
        return False
    if lists.vocabulary.kind != "spm" or lists.vocabulary.merges is not None:
        return False
    texts = texts_for(a, b)
    own = engine_of_text(files.carried.tokenizer_json() or "", files.carried.origin)
    own.add(files.added)
    other = SpmEngine(lists.vocabulary, lists.carried.where)
    return all(own.encode(text, False, True) == other.encode(text, False, True) for text in texts)


def _differences(a: Stated, b: Stated) -> Iterator[Difference]:
    """Yield the listed differences, without those that an earlier one includes."""
    held: set[str] = set()
    for rows in _LISTED:
        for row in rows(a, b):
            if held and set(row.parts) <= held:
                continue
            if len(row.parts) > 3:
                held |= set(row.parts)
            yield row


def _measured(a: Stated, b: Stated, found: Sequence[Difference]) -> list[Difference]:
    """Return each difference with its effect on the probes."""
    groups = [row.parts for row in found]
    listed = {name for group in groups for name in group}
    splits = bool(listed & set(ENGINE))
    mine, theirs = parts_of(a, b, engine=splits), parts_of(b, a, engine=splits)
    texts = texts_for(a, b) if splits else []
    theirs |= {name: mine[name] for name in mine if name not in listed and name not in ENGINE}
    where = b.carried.where
    special = special_texts_of(texts, a, b)
    bench = Bench(texts, special, where, encodes=splits)
    every = effects(bench, mine, theirs, groups)
    unseen = any(
        not effect.labels and _BY_PIECES & set(group)
        for effect, group in zip(every, groups, strict=True)
    )
    if unseen:
        tokens = dict.fromkeys((*a.vocabulary.tokens, *b.vocabulary.tokens))
        also = piece_texts(map(plain_text, tokens))
        bench = Bench(texts, special, where, also)
        every = effects(bench, mine, theirs, groups)
    every = [
        split_effect(bench, mine, theirs, row.parts)
        if row.cause == "pre_tokenizer" and row.sure and not effect.labels
        else effect
        for row, effect in zip(found, every, strict=True)
    ]
    return [
        replace(
            row,
            shown=effect.shown,
            before=effect.before,
            after=effect.after,
            example=_example(bench, mine, theirs, effect),
        )
        for row, effect in zip(found, every, strict=True)
    ]


# --- what a probe shows, in words ------------------------------------------------------------


def _example(bench: Bench, a: TokenizerParts, b: TokenizerParts, effect: Effect) -> tuple[str, ...]:
    """Return what both sides make of the first probe that shows a difference; () without one."""
    for label in sorted(effect.labels, key=_telling):
        kind, text = label
        if kind in ("text", "as text"):
            both = [_splits(bench, parts, text, kind == "text") for parts in (a, b)]
            if both[0] != both[1]:
                return tuple(f"{shorten(repr(text), 80)} is {said}" for said in both)
        if kind == "words":
            shown = [_words(bench, parts, text) for parts in (a, b)]
            return tuple(f"{shorten(repr(text), 80)} is {said}" for said in shown)
        if kind == "chat":
            x, y = (_answer(bench, parts, text) for parts in (a, b))
            at = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q),
                      min(len(x), len(y)))  # fmt: skip
            start = max(0, at - 20)
            return tuple(f"{text} is ...{said[start : at + 60]!r}" for said in (x, y))
    return ()


def _answer(bench: Bench, parts: TokenizerParts, name: str) -> str:
    every = bench.chats(parts)
    status, text = every.get(name) or next(iter(every.values()), ("none", "no template"))
    return text if status == "ok" else f"({status}: {text})"


def _telling(label: SideLabel) -> tuple[int, int]:
    """Return the order of labels: texts before chats, short ones first."""
    kinds = ("text", "as text", "words", "chat", "tokenizer")
    rank = kinds.index(label[0]) if label[0] in kinds else len(kinds)
    return rank, len(label[1]) if rank < 3 else 0


def _splits(bench: Bench, parts: TokenizerParts, text: str, parse_special: bool) -> str:
    engine = bench.engine(parts)
    if engine is None:
        return "nothing"
    ids = engine.encode(text, False, parse_special)
    shown = "|".join(_readable(engine.token(i) or f"[{i}]") for i in ids[:40])
    return f"{shown}{'|...' if len(ids) > 40 else ''} ({len(ids)} ids: {_few(ids)})"


def _words(bench: Bench, parts: TokenizerParts, text: str) -> str:
    engine = bench.engine(parts)
    assert isinstance(engine, HfEngine)
    found = engine.words(text)
    shown = "|".join(map(_readable, found[:40]))
    return f"{shown}{'|...' if len(found) > 40 else ''} ({len(found)} words before merging)"


def _readable(token: str) -> str:
    return repr(plain_text(token) or token)[1:-1]


def _few(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids[:8])) + (" ..." if len(ids) > 8 else "")


# --- a template and its own vocabulary, a file and the tokenizer.json in it ------------------


def _unnamed(a: Stated, b: Stated) -> tuple[str, ...]:
    """Return a sentence for each side whose template names tokens that its vocabulary lacks."""
    if a.template == b.template and a.vocabulary.tokens == b.vocabulary.tokens:
        return ()
    return tuple(
        f"{label}'s chat template names tokens that its vocabulary lacks: {', '.join(missing)}"
        for label, side in (("A", a), ("B", b))
        if (missing := lacking(side))
    )


def carried_otherwise(side: Stated, model: Model) -> TokensReport | None:
    """Return what a carried tokenizer.json says otherwise than the lists; None if nothing."""
    if not side.lists:
        return None
    own = stated(model, carried_json=True)
    if own is None:
        return None
    report = between(own, side)
    kept = tuple(row for row in report.findings if row.name in _CARRIED)
    return TokensReport(kept) if kept else None


_CARRIED = ("tokens", "kind", "token_type", "pre", "add_space_prefix", "normalizer", "merges",
            "scores")  # fmt: skip


def _joined(report: TokensReport, own: TokensReport) -> TokensReport:
    """Return a report with the finding about the carried tokenizer.json behind its own."""
    first = own.findings[0]
    name = "tokenizer.huggingface.json"
    says = "; ".join(
        row.says.replace("in A", f"in {name}").replace("in B", "in the lists")
        for row in own.findings[:3]
    )
    finding = replace(
        first, name="carried", cause="carried_tokenizer", where=(name, *first.where), sure=True,
        says=f"B carries a {name} that says otherwise than its lists: {says}",
    )  # fmt: skip
    return TokensReport(
        (*report.findings, finding), report.notes, report.remarks, report.checked,
        report.not_checked,
    )  # fmt: skip


def counts(a: Vocabulary, b: Vocabulary) -> Mapping[str, int]:
    """Return what differs of two vocabularies by number; only what is not zero.

    Tokens are compared id by id, those behind the shorter list are on one side only. A merge counts
    as moved where it has to change its place to bring the merges of both sides into one order.
    """
    mine, theirs = list(a.merges or ()), list(b.merges or ())
    left, right = {*mine}, {*theirs}
    rank = {merge: i for i, merge in enumerate(mine)}
    common = [rank[merge] for merge in dict.fromkeys(theirs) if merge in left]
    found = {
        "tokens_changed": sum(x != y for x, y in zip(a.tokens, b.tokens, strict=False)),
        "tokens_only_in_a": max(0, len(a.tokens) - len(b.tokens)),
        "tokens_only_in_b": max(0, len(b.tokens) - len(a.tokens)),
        "merges_only_in_a": len(left - right),
        "merges_only_in_b": len(right - left),
        "merges_moved": len(common) - _longest_rising(common),
    }
    return {name: count for name, count in found.items() if count}


def _longest_rising(values: Sequence[int]) -> int:
    """Return how many of some distinct numbers rise in their order, at most."""
    ends: list[int] = []
    for value in values:
        at = bisect_left(ends, value)
        ends[at : at + 1] = [value]
    return len(ends)
