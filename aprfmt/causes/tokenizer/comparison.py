"""Two models' tokenizers as one subject: what differs, and whether any text or chat shows it.

A *side* is the tokenizer of model A or of model B. A *part* is one of the things it consists of:
pieces, scores, merges, splitting, special ids and so on.

Pieces, scores, types, merges, splitting, special ids, BOS and EOS, chat template and generation
settings are listed part by part. Then probe texts are encoded and conversations rendered by both
tokenizers, and by A's with one part of B's at a time. `diff` and `diagnose` print what this says.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from aprfmt.base.budget import end_where_time_is_over
from aprfmt.causes.row import Cause
from aprfmt.causes.tokenizer import pre_tokenizer, special_ids, vocabulary_lists
from aprfmt.causes.tokenizer.file_places import part_place
from aprfmt.causes.tokenizer.vocabulary_lists import TokenizerDifference, value_text
from aprfmt.errors import AprfmtError
from aprfmt.measure.texts import COMPARED, TokensReport
from aprfmt.model import Model
from aprfmt.model.ledger import NotCompared
from aprfmt.tokenizer.engine_defaults import overridden_types
from aprfmt.tokenizer.keys import CONTROL, TOKENS
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer, read_tokenizer_parts
from aprfmt.tokenizer.vocabulary import Vocabulary, special_and_added_ids

CAUSE_ROWS = (
    Cause(
        "carried_tokenizer", "identity", "bug",
        "A GGUF carries a tokenizer.json that says otherwise than its own lists, which other "
        "engines read.",
        "The lists against `tokenizer.huggingface.json` in the same file.",
    ),
)  # fmt: skip

# In the order in which findings are named. Where the kind or the whole vocabulary is another one,
# it covers the later rows whose parts it holds.
_LISTED = (
    pre_tokenizer.kind_difference,
    vocabulary_lists.vocabulary_difference,
    vocabulary_lists.rowless_token_difference,
    vocabulary_lists.added_token_difference,
    vocabulary_lists.type_difference,
    pre_tokenizer.pre_tokenizer_difference,
    pre_tokenizer.metaspace_difference,
    pre_tokenizer.prefix_difference,
    pre_tokenizer.normalizer_difference,
    pre_tokenizer.decoder_difference,
    vocabulary_lists.merge_difference,
    vocabulary_lists.score_difference,
    pre_tokenizer.option_differences,
    special_ids.special_id_differences,
    special_ids.framing_differences,
    special_ids.processed_text_differences,
    special_ids.segment_difference,
    special_ids.template_difference,
    special_ids.generation_differences,
    special_ids.config_id_differences,
)


def compare_tokens(a: Model, b: Model) -> TokensReport:
    """Return the comparison of two open models' tokenizers.

    What cannot be read is listed in `not_checked`, not raised. Between its parts it ends where the
    time of a budget in force is over.
    """
    sides: list[StatedTokenizer | None] = []
    for label, model in (("A", a), ("B", b)):
        if model.carried.origin or model.carried.list_length(TOKENS):
            end_where_time_is_over()  # a large vocabulary takes seconds to read, and to compare
        try:
            sides.append(read_tokenizer_parts(model))
        except AprfmtError as error:
            why = f"tokenizer: {label}'s cannot be read: {error}"
            return TokensReport(not_checked=(why,), unreadable=label)
    # A side without a tokenizer is not compared.
    mine, theirs = sides
    if mine is None or theirs is None:
        lacking = " and ".join(label for label, side in zip("AB", sides, strict=True) if not side)
        verb = "carry" if lacking == "A and B" else "carries"
        has = "".join(label for label, side in zip("AB", sides, strict=True) if side)
        return TokensReport(
            not_checked=(f"tokenizer: {lacking} {verb} none; not compared",), carried=has
        )
    try:
        mine, theirs = with_engine_types(mine, theirs), with_engine_types(theirs, mine)
        end_where_time_is_over()
        report = compare_tokenizers(mine, theirs)
        rows = (*report.findings, *_lost_lists(mine, theirs))
        report = replace(report, findings=_with_unlisted_tokens(rows, mine, theirs))
        end_where_time_is_over()
        own = compare_carried(theirs, b)
        if own is not None and compare_carried(mine, a) is None:
            report = _join_reports(report, own)
        end_where_time_is_over()
        vocabularies = (
            replace(side.vocabulary, tokens=vocabulary_lists.comparable_pieces(side, other))
            for side, other in ((mine, theirs), (theirs, mine))
        )
        return replace(
            report,
            added=special_and_added_ids(mine.vocabulary, theirs.vocabulary),
            counts=count_differences(*vocabularies),
            left=tuple(_without_counterpart(mine, theirs)),
        )
    except AprfmtError as error:
        return TokensReport(not_checked=(f"tokenizer: not compared: {error}",))


def _lost_lists(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference that one GGUF has no list of tokens, though it embeds a tokenizer.json.

    aprfmt reads the embedded file; other programs read only the list.
    """
    lacking = {label: side.lacks_list for label, side in (("A", a), ("B", b))}
    if lacking["A"] == lacking["B"]:
        return
    label = "A" if lacking["A"] else "B"
    yield TokenizerDifference(
        "tokens_list",
        "carried_tokenizer",
        (),
        (TOKENS.gguf,),
        f"{label} has no {TOKENS.gguf}: other programs read no tokenizer there, and only aprfmt "
        "the tokenizer.json that it embeds",
        None if label == "A" else len(a.vocabulary.tokens),
        None if label == "B" else len(b.vocabulary.tokens),
        shown=True,  # by every text: programs that go by the list have no tokens
        before=1.0,
        after=0.0,
    )


def _with_unlisted_tokens(
    rows: Sequence[TokenizerDifference], a: StatedTokenizer, b: StatedTokenizer
) -> tuple[TokenizerDifference, ...]:
    """Return the differences, with those of added tokens that only one tokenizer.json lists.

    Where no other added token differs, being unlisted is why ids or flags of added tokens differ,
    and one difference says both.
    """
    found = list(rows)
    for label, side, other in (("B", b, a), ("A", a, b)):
        cut = _unlisted_tokens(side, other)
        if not cut:
            continue
        places = _token_places(a, b, next(iter(cut)))
        one = _unlisted_difference(label, side, other, cut, places)
        at = next((i for i, row in enumerate(found) if row.name == one.name), None)
        if at is None or not _differing_added_tokens(a, b) <= cut.keys():
            found.append(one)
        else:
            found[at] = replace(found[at], says=f"{one.says}; {found[at].says}", a=one.a, b=one.b)
    return tuple(found)


def _unlisted_tokens(side: StatedTokenizer, other: StatedTokenizer) -> dict[str, list[int]]:
    """Return {added token: ids that tokenizer.json alone makes of it} of those a side has lost.

    The other side's tokenizer.json lists them. This side's does not, and its tokenizer_config.json
    names them, so programs that read both files agree. A token that tokenizer.json alone keeps in
    one piece is left out.
    """
    if side.data is None or other.data is None:
        return {}
    stated = {row["content"] for row in side.added_tokens}
    listed = side.listed_tokens
    lost = [text for text in other.listed_tokens if text not in listed and text in stated]
    return side.split_without_config(lost)


def _unlisted_difference(
    label: str,
    side: StatedTokenizer,
    other: StatedTokenizer,
    cut: Mapping[str, Sequence[int]],
    places: tuple[str, ...],
) -> TokenizerDifference:
    """Return the difference of the added tokens `cut`, which a side's tokenizer.json has lost.

    `label` is the side's, "A" or "B"; `other` is the other side, `cut` the result of
    `_unlisted_tokens`, `places` are where both sides list added tokens.
    """
    first, ids = next(iter(cut.items()))
    stated = next(row["id"] for row in side.added_tokens if row["content"] == first)
    many = "" if len(cut) == 1 else f" and {len(cut) - 1} more"
    counts = len(other.listed_tokens), len(side.listed_tokens)
    of_a, of_b = counts if label == "B" else counts[::-1]
    return TokenizerDifference(
        "added_tokens",
        "added_tokens",
        (),
        places,
        f"{label}'s tokenizer.json does not list {value_text(first)}{many} among its added "
        f"tokens, the other side's does; tokenizer_config.json alone names it: programs that "
        f"read tokenizer.json alone (tokenizers, AutoTokenizer of transformers 5) make "
        f"{len(ids)} tokens of it, {list(ids)}, not {stated}",
        of_a,
        of_b,
        shown=True,  # by every text with such a token
        before=1.0,
        after=0.0,
    )


def _token_places(a: StatedTokenizer, b: StatedTokenizer, token: str) -> tuple[str, ...]:
    """Return where both sides list added tokens, B's first, with the token that is meant."""
    of_b, *rest = (*part_place(b, "added"), *part_place(a, "added"))
    return of_b, f"token {token}", *rest


def _differing_added_tokens(a: StatedTokenizer, b: StatedTokenizer) -> set[str]:
    """Return the added tokens that one side lacks, or that have other ids or flags there."""
    left, right = ({row["content"]: row for row in side.added_tokens} for side in (a, b))
    return {text for text in {*left, *right} if left.get(text) != right.get(text)}


def with_engine_types(side: StatedTokenizer, other: StatedTokenizer) -> StatedTokenizer:
    """Return a GGUF's tokenizer with the token types that llama.cpp gives it when it loads.

    llama.cpp makes control tokens of plain ones that look like the end of a turn. Here a token
    becomes one only if it is a control token of the other side too. A tokenizer of another format
    is returned unchanged.
    """
    if not side.uses_lists or side.carried.model.key_style != "gguf":
        return side
    own = side.vocabulary
    rows = zip(other.vocabulary.tokens, other.vocabulary.types, strict=True)
    control = {token for token, kind in rows if kind == CONTROL}
    types = overridden_types(own.tokens, own.types, control.__contains__)
    return side if types == list(own.types) else replace(side, vocabulary=replace(own, types=types))


def _without_counterpart(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[NotCompared]:
    """Yield a NotCompared for each side with tokens that the other side, a GGUF, cannot hold.

    These are tokens without an embedding row. A GGUF's lists are as long as the embedding: its
    writers leave such tokens out.
    """
    for label, side, other in (("A", a, b), ("B", b, a)):
        rowless = side.vocabulary.rowless
        if not rowless or not other.uses_lists:
            continue
        first = next(iter(rowless.items()))
        yield NotCompared(
            "tokenizer part", f"{len(rowless)} tokens without a row", "no counterpart",
            f"the first is {first[0]} {vocabulary_lists.value_text(first[1])}; lists end with the "
            "embedding",
            label,
        )  # fmt: skip


def compare_tokenizers(mine: StatedTokenizer, theirs: StatedTokenizer) -> TokensReport:
    """Return the comparison of two tokenizers. Raises FormatError for one that cannot be read."""
    # Differences known to have no effect become notes.
    every = list(_listed_differences(mine, theirs))
    still = tuple(row for row in every if row.still)
    aside = tuple(row.says for row in still if row.told)
    found = [row for row in every if not row.still]
    checked = (f"tokenizer: {COMPARED}",)
    if not found:
        return TokensReport(
            notes=still, checked=checked, remarks=(*_unknown_template_tokens(mine, theirs), *aside)
        )
    from aprfmt.causes.tokenizer.part_exchange import with_empty_merges
    from aprfmt.causes.tokenizer.probe_effects import ENGINE, measure_effects, splits_are_equal

    mine, theirs = with_empty_merges(mine), with_empty_merges(theirs)
    unseen: list[TokenizerDifference] = []
    missing: tuple[str, ...] = ()
    # Where texts cannot be encoded, no probe can show a difference of encoding.
    if not _can_encode(mine, theirs):
        unseen = [row for row in found if set(row.parts) & set(ENGINE)]
        missing = (f"tokenizer: texts were not encoded: {_kinds_text(mine, theirs)}",)
    # Where all probes are split alike, unsure differences are notes, too.
    unsure = [row for row in found if not row.sure and set(row.parts) <= set(ENGINE)]
    if unsure and (unseen or splits_are_equal(mine, theirs)):
        still = (*still, *unsure)
    else:
        unsure = []
    found = [row for row in found if row not in unsure and row not in unseen]
    # Measure the effect of the others on the probes.
    findings = [replace(row, probed=False) for row in unseen if row not in unsure]
    try:
        findings += measure_effects(mine, theirs, found) if found else []
    except AprfmtError as error:  # lists that an engine refuses still differ as they are stored
        findings += [replace(row, probed=False) for row in found]
        missing = (*missing, f"tokenizer: texts were not encoded: {error}")
    kept = tuple(row for row in findings if row.shown or row.sure)
    notes = tuple(row for row in findings if row not in kept)
    remarks = (*_unknown_template_tokens(mine, theirs), *aside)
    return TokensReport(kept, (*still, *notes), remarks, checked, missing)


def _can_encode(a: StatedTokenizer, b: StatedTokenizer) -> bool:
    """Return whether texts can be encoded on both sides in comparable ways.

    Two tokenizer.json always can. If a side has a GGUF's lists, both must be BPE or SPM.
    """
    if not a.uses_lists and not b.uses_lists:
        return True
    return all(side.encodes and side.vocabulary.kind in ("bpe", "spm") for side in (a, b))


def _kinds_text(a: StatedTokenizer, b: StatedTokenizer) -> str:
    """Return the clause that names the two sides' splittings, which are not implemented here."""
    names = (side.vocabulary.pre or side.vocabulary.kind for side in (a, b))
    return " and ".join(dict.fromkeys(names)) + ", which aprfmt does not split by"


def _listed_differences(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield all differences of two tokenizers that their files show.

    A difference of more than three parts, such as another vocabulary, covers these parts: later
    differences of them alone are left out.
    """
    held: set[str] = set()
    for rows in _LISTED:
        for row in rows(a, b):
            if held and set(row.parts) <= held:
                continue
            if len(row.parts) > 3:
                held |= set(row.parts)
            yield row


# --- a template and its own vocabulary, a file and the tokenizer.json in it ------------------


def _unknown_template_tokens(a: StatedTokenizer, b: StatedTokenizer) -> tuple[str, ...]:
    """Return a sentence for each side whose template names tokens that its vocabulary lacks.

    () where both sides have the same template and tokens.
    """
    if a.template == b.template and a.vocabulary.tokens == b.vocabulary.tokens:
        return ()
    from aprfmt.tokenizer.conversations import missing_template_tokens

    return tuple(
        f"{label}'s chat template names tokens that its vocabulary lacks: {', '.join(missing)}"
        for label, side in (("A", a), ("B", b))
        if (missing := missing_template_tokens(side))
    )


def compare_carried(side: StatedTokenizer, model: Model) -> TokensReport | None:
    """Return the comparison of a GGUF's embedded tokenizer.json with its lists; None if they agree.

    None too for a side without lists, or without such a file.
    """
    if not side.uses_lists:
        return None
    own = read_tokenizer_parts(model, carried_json=True)
    if own is None:
        return None
    report = compare_tokenizers(own, side)
    kept = tuple(row for row in report.findings if row.name in _CARRIED)
    return TokensReport(kept) if kept else None


_CARRIED = ("tokens", "kind", "token_type", "pre", "add_space_prefix", "normalizer", "merges",
            "scores")  # fmt: skip


def _join_reports(report: TokensReport, own: TokensReport) -> TokensReport:
    """Return a report with a last finding: the embedded tokenizer.json contradicts the lists.

    `own` is the comparison of the embedded file with the lists.
    """
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


def count_differences(a: Vocabulary, b: Vocabulary) -> Mapping[str, int]:
    """Return {kind of entry: number that differ} of two vocabularies; zeros are left out.

    Tokens are compared id by id; those after the shorter list are in one vocabulary only. A merge
    counts as moved where it has to move to bring the merges of both into one order.
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
    """Return the length of the longest rising subsequence of distinct numbers."""
    ends: list[int] = []
    for value in values:
        at = bisect_left(ends, value)
        ends[at : at + 1] = [value]
    return len(ends)
