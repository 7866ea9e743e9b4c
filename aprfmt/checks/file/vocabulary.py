"""Checks of the tokenizer as stored: lists, sizes, ids, merges, and the chat template.

A *piece* is the text of one token; a *kind* of vocabulary is BPE, unigram and the like.

What is read here is the file's own lists, fillers and ids beyond the end included: building the
tokenizer forgives some of that.
"""

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from aprfmt.base.text_escape import shorten
from aprfmt.checks.bounds import PIECES_FROM, PIECES_MADE, VOCAB_SHARE
from aprfmt.checks.context import CheckContext
from aprfmt.checks.file.stored_vocabulary import StoredVocabulary, read_vocabulary
from aprfmt.checks.records import CheckFinding, Level, NotRun, Result, list_names
from aprfmt.errors import AprfmtError, FormatError
from aprfmt.measure import named_causes
from aprfmt.tokenizer.absent_keys import absent_ids, set_command
from aprfmt.tokenizer.base import Engine
from aprfmt.tokenizer.conversations import missing_template_tokens, unrendered_reason
from aprfmt.tokenizer.engine_defaults import (
    DEFAULTS,
    GGUF_MODELS,
    KIND_NAMES,
    SPELLED_KINDS,
    kind_of_pieces,
)
from aprfmt.tokenizer.hf_json import token_statements
from aprfmt.tokenizer.keys import BYTE, MODEL, NORMAL, PRE, TOKENS, TYPES
from aprfmt.tokenizer.loading import engine_of_lists, load_tokenizer
from aprfmt.tokenizer.named_roles import contradicted_ids, misnamed_roles
from aprfmt.tokenizer.other_vocabularies import other_vocabularies
from aprfmt.tokenizer.pieces import byte_level_alphabet
from aprfmt.tokenizer.pre_tokenizers import PRE_TOKENIZERS, flatten_steps
from aprfmt.tokenizer.quick_checks import PLACEHOLDER
from aprfmt.tokenizer.stored_parts import Carried
from aprfmt.tokenizer.stored_tokenizer import DEFAULT_PRE, StatedTokenizer, stale_post_processor_ids
from aprfmt.tokenizer.template import scan_template
from aprfmt.tokenizer.template_language import (
    TODO,
    UNREAD_MESSAGES,
    foreign_template,
    reads_messages,
)
from aprfmt.tokenizer.turn_ends import find_unstopped_turn
from aprfmt.tokenizer.vocabulary import NO_VOCABULARY, Vocabulary
from aprfmt.tokenizer.wrong_ends import find_wrong_ends

_MANY = 20  # findings of one kind; the rest is counted


def _limit_findings(findings: Iterable[CheckFinding]) -> list[CheckFinding]:
    """Return the first few findings, and one more that counts the others, if there are any."""
    every = list(findings)
    if len(every) <= _MANY:
        return every
    last = every[_MANY]
    return [
        *every[:_MANY],
        CheckFinding(
            last.where, f"{len(every) - _MANY} more of this kind", last.expected, "", last.level
        ),
    ]


def check_lists(ctx: CheckContext) -> Result:
    """Return a Result with findings on wrong list lengths, duplicates, and pieces spelled wrongly.

    Raises AprfmtError where none of these is wrong and the tokenizer cannot be built.
    """
    words = read_vocabulary(ctx.carried)
    findings = [
        CheckFinding(
            where,
            f"{length} elements",
            f"{len(words.tokens)}, one a token",
            "the vocabulary is damaged",
        )
        for where, length in words.lists.items()
        if length != len(words.tokens)
    ]
    counts = Counter(token for token in words.tokens if token is not None)
    twice = [token for token, count in counts.items() if count > 1]
    findings += _limit_findings(
        CheckFinding(
            words.where,
            f"token {token!r} stands {counts[token]} times",
            "each token once",
            level="warning",
        )
        for token in twice
    )
    findings += _find_wrong_kind(ctx) + _find_untyped_bytes(ctx) + find_unknown_names(ctx)
    findings += _find_other_vocabularies(ctx)
    failed = any(one.level == "fail" for one in findings)
    if not failed and not _wrong_merges(words) and _ids_are_numbers(ctx.carried):
        load_tokenizer(ctx.model)  # else the check of what is wrong says it
        side = ctx.stated  # as other programs read it: what a GGUF embeds next to its lists is ours
        if side is not None and side.lacks_list:
            findings.append(
                CheckFinding(
                    ctx.where,
                    f"{TOKENS.gguf} is not there, only a tokenizer.json, which aprfmt alone reads",
                    "the list that other programs read",
                    "convert the source again",
                )
            )
    return Result(f"{len(words.tokens)} tokens", findings)


def _find_wrong_kind(ctx: CheckContext) -> list[CheckFinding]:
    """Return [finding] where pieces are spelled as in another kind of vocabulary than stated.

    Kinds are BPE, unigram and the like. [] where they agree or nothing can be read.
    """
    side = ctx.readable
    if side is None or side.vocabulary.kind not in SPELLED_KINDS:
        return []
    own = kind_of_pieces(side.vocabulary.tokens, side.vocabulary.types)
    if not own or own == side.vocabulary.kind:
        return []
    read, pieces = KIND_NAMES[side.vocabulary.kind], KIND_NAMES[own]
    if not side.uses_lists:
        where, todo = f"{ctx.carried.origin}: model", "use the tokenizer.json of the source"
    else:
        where, model = ctx.carried.key_text(MODEL), GGUF_MODELS[own]
        todo = set_command(ctx.carried, f"{MODEL.gguf}={model}")
        if own == "bpe" and ctx.carried.text_value(PRE) in (None, DEFAULT_PRE):
            todo += f", and {PRE.gguf} to the source's"
    return [
        CheckFinding(
            where,
            f"says that the vocabulary is {read}; its pieces are those of {pieces}",
            "the kind of the pieces, or every blank is cut otherwise",
            todo,
        )
    ]


def _find_other_vocabularies(ctx: CheckContext) -> list[CheckFinding]:
    """Return a warning for each file beside tokenizer.json that gives ids to other tokens."""
    side = ctx.readable
    folder = None if side is None else side.carried.model.folder
    if side is None or folder is None:
        return []
    return [
        CheckFinding(
            str(folder.path / one.name),
            one.says,
            "the ids of tokenizer.json",
            "programs that read this file make other ids of a text: take both files from the "
            "source, or leave this one out",
            "warning",
        )
        for one in other_vocabularies(side)
    ]


_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def _find_untyped_bytes(ctx: CheckContext) -> list[CheckFinding]:
    """Return [finding] where a GGUF has a piece for every byte and not all are of type BYTE.

    Characters without a piece of their own are then lost. [] where nothing can be read.
    """
    side = ctx.readable
    if side is None or not side.uses_lists or side.vocabulary.kind != "spm":
        return []
    rows = zip(side.vocabulary.tokens, side.vocabulary.types, strict=True)
    kinds = {token: kind for token, kind in rows if token in _BYTES}
    plain = [token for token, kind in kinds.items() if kind != BYTE]
    if len(kinds) < len(_BYTES) or not plain:
        return []
    return [
        CheckFinding(
            ctx.carried.key_text(TYPES),
            f"{len(plain)} of the 256 pieces of bytes are not of type BYTE, the first {plain[0]!r}",
            "type BYTE, or characters without a piece of their own become the unknown token",
            "convert again from the source",
        )
    ]


def find_unknown_names(ctx: CheckContext) -> list[CheckFinding]:
    """Return a warning for each name of a GGUF's tokenizer that llama.cpp is not known to take.

    aprfmt reads the tokenizer.json that such a file carries; llama.cpp reads these keys alone, and
    opens no file with a name that it does not know.
    """
    carried = ctx.model.carried
    if ctx.model.key_style != "gguf" or carried.list_length(TOKENS) is None:
        return []
    kind, pre = carried.text_value(MODEL), carried.text_value(PRE)
    kinds = (*DEFAULTS, *NO_VOCABULARY)
    asked = [(MODEL, kind, kinds)]
    if kind == "gpt2":
        asked.append((PRE, pre, tuple(PRE_TOKENIZERS)))
    return [
        CheckFinding(
            carried.key_text(key),
            f"is {name!r}",
            f"a name that llama.cpp opens a file with, such as "
            f"{', '.join(get_close_matches(name, known, 3) or known[:3])}",
            "set it to that of the source, or use a llama.cpp that knows it",
            "warning",
        )
        for key, name, known in asked
        if name is not None and name not in known
    ]


def _ids_are_numbers(carried: Carried) -> bool:
    """Return whether the special ids in the metadata are numbers, where they are stated."""
    try:
        carried.token_ids()
    except FormatError:
        return False
    return True


def check_size(ctx: CheckContext) -> Result:
    """Return a Result with a finding unless every token has a row of the embedding.

    In GGUF every row must have a token as well. Added placeholders without a row are a warning.
    """
    rows, origin = _embedding_rows(ctx)
    words = ctx.words
    count = len(words.tokens)
    said = f"{count} tokens, {rows} rows"
    dense = words.dense and ctx.model.format in _DENSE
    few = not VOCAB_SHARE.low <= count / max(rows, 1)  # padding is less than that
    if count <= rows and not few and not (dense and count < rows):
        return Result(said)
    beyond = [(i, t) for i, t in enumerate(words.tokens[rows:], rows) if t is not None]
    # Placeholders of other models of a family are added after the embedding (gemma 3's image).
    level: Level = "fail"
    if not (dense or few or words.plain > rows) and all(PLACEHOLDER.search(t) for _, t in beyond):
        level = "warning"
    todo = "the tokenizer is not of this model, or one of the two is cut"
    expected = f"{rows}, the rows of {origin}"
    found = f"{count} tokens"
    if beyond:
        shown = list_names([f"{t!r} ({i})" for i, t in beyond])
        found += f"; without a row: {shown}"
        todo = "a text that has one cannot be computed; resize the embedding, or leave them out"
    return Result(said, [CheckFinding(words.where, found, expected, todo, level)])


# Formats whose readers size the embedding by the list of tokens; others may pad the embedding.
_DENSE = ("gguf",)


def _embedding_rows(ctx: CheckContext) -> tuple[int, str]:
    """Return (number of tokens that the stored embedding has, its stored name); NotRun without one.

    Its rows are tokens, unless the other sizes of the model say that its axes are exchanged.
    """
    resolution = ctx.resolution
    logical = resolution.roles.get("token_embd.weight")
    if logical is None or not logical.shape:
        raise NotRun("the model stores no token embedding")
    if len(logical.shape) < 2:
        raise NotRun("the token embedding is no matrix, so that it has no rows")
    turned = logical.shape == (resolution.hyper["hidden_size"], resolution.hyper["vocab_size"])
    return logical.shape[-1 if turned else 0], logical.stored[0].info.name


def check_ids(ctx: CheckContext) -> Result:
    """Return a Result with a finding for each special id that has no token or is missing.

    Ids are those of metadata, config.json and generation_config.json. An end of turn that stops no
    generation is a finding too. Raises NotRun where there are no ids.
    """
    words = ctx.words
    count = len(words.tokens)
    stated = [(ctx.carried.where + f": {role}", i) for role, i in ctx.carried.token_ids().items()]
    stated += _configured_ids(ctx)
    findings = _find_invalid_ids(ctx)
    for where, i in stated:
        if i >= count or words.tokens[i] is None:
            findings.append(
                CheckFinding(
                    where,
                    f"id {i}",
                    f"an id below {count} that has a token",
                    "generation would not stop, or would begin wrongly",
                )
            )
    findings += [
        CheckFinding(ctx.carried.where, one.says, "the id of a special token", one.todo, one.level)
        for one in (absent_ids(ctx.carried) if _ids_are_numbers(ctx.carried) else ())
    ]
    findings += _find_stale_ids(ctx)
    findings += _find_empty_tokens(ctx)
    findings += _find_repeated_frame(ctx)
    findings += _find_wrong_ends(ctx)
    findings += _find_misnamed_roles(ctx, {one.where for one in findings})
    if not stated and not findings:
        raise NotRun("neither metadata nor configuration state a special id")
    if not any(one.level == "fail" for one in findings):
        findings += _find_unstopped_turn(ctx)
    findings += [
        CheckFinding(
            where, "-1", "an id, or null", "readers that know no -1 look up token -1", "warning"
        )
        for where, value in _id_values(ctx)
        if type(value) is int and value == -1 and not where.endswith("pad_token_id")
    ]
    return Result(f"{len(stated)} ids", findings)


def _find_empty_tokens(ctx: CheckContext) -> list[CheckFinding]:
    """Return a finding for each special token that a file states as an empty text.

    Null is how files say that there is none, and a finding only for an eos that the chat template
    writes. All are warnings.
    """
    try:
        stated = token_statements(ctx.carried)
        template = ctx.carried.readable_template() or ""
    except AprfmtError:
        return []
    findings = []
    for role, (text, place) in stated.items():
        if text is not None:
            continue
        name, _, key = place.partition(": ")
        written = role in ("bos", "eos") and key in template
        stored = ctx.carried.parse_file(name).get(key)
        if stored is None and not (role == "eos" and written):
            continue
        effect = f"the tokenizer has no {role} id" + written * ", and the chat template writes it"
        findings.append(
            CheckFinding(
                f"{ctx.carried.where}: {place}",
                f"is {'null' if stored is None else repr('')}: {effect}",
                "a token of the vocabulary, or null where there is none",
                f"set {key} to the token of the source",
                "warning",
            )
        )
    return findings


def _find_repeated_frame(ctx: CheckContext) -> list[CheckFinding]:
    """Return a failure for a special token that the tokenizer puts twice around every text.

    It is twice in a row, before the text or after it. [] where the tokenizer cannot be read or is
    absent.
    """
    side = ctx.readable
    if side is None:
        return []
    findings = []
    for ids, where in zip(side.frame, ("before", "after"), strict=True):
        twice = next((i for i, other in pairwise(ids) if i == other), None)
        if twice is None:
            continue
        tokens = side.vocabulary.tokens
        name = f" {tokens[twice]!r}" if twice < len(tokens) else ""
        findings.append(
            CheckFinding(
                side.carried.origin or side.carried.where,
                f"{twice}{name} is put twice {where} every text",
                "each special token once",
                "take one of them out of the post-processor, or turn off the flag that adds it",
            )
        )
    return findings


def _find_stale_ids(ctx: CheckContext) -> list[CheckFinding]:
    """Return a failure for each id in the post-processor that is not its token's id.

    [] where the tokenizer cannot be read, is absent, or is stored as lists, without a
    tokenizer.json.
    """
    side = ctx.readable
    if side is None or side.uses_lists:
        return []
    tokens = side.vocabulary.tokens
    findings = []
    for text, i, right in stale_post_processor_ids(side):
        held = f"{tokens[i]!r}" if i < len(tokens) else "no token"
        own = "has no id" if right is None else f"is {right}"
        findings.append(
            CheckFinding(
                f"{ctx.carried.origin}: post_processor",
                f"puts {i} ({held}) around a text for {text!r}, which {own}",
                "the id of the token that it names",
                f"set it to {right}" if right is not None else "take the token out",
            )
        )
    return _limit_findings(findings)


def _find_wrong_ends(ctx: CheckContext) -> list[CheckFinding]:
    """Return a failure for each id that should end a generation and whose token cannot be an end.

    Such a token is ordinary text, or begins a turn. The ids are eos_token_id and the like. [] where
    the tokenizer cannot be read or is absent.
    """
    try:
        side = ctx.stated
        found = [] if side is None else find_wrong_ends(side)
    except AprfmtError:
        return []
    expected = "the token that ends an answer"
    return [CheckFinding(one.place, one.says, expected, one.command) for one in found]


def _find_misnamed_roles(ctx: CheckContext, told: set[str]) -> list[CheckFinding]:
    """Return a finding for each special id whose token is named as that of another role.

    Ids that config.json and the tokenizer's files state differently are warnings. `told` are keys
    that have a finding already. [] where the tokenizer cannot be read or is absent.
    """
    try:
        side = ctx.stated
        misnamed = [] if side is None else misnamed_roles(side)
        others = [] if side is None else list(contradicted_ids(side))
    except AprfmtError:
        return []
    commands = [shlex.quote(one.assignment) for one in misnamed]
    todo = named_causes.set_command(ctx.model.path, commands) if commands else ""
    findings = [
        CheckFinding(
            one.place,
            one.says,
            "the id of the token with the role's own name",
            todo,
            "fail" if one.fails else "warning",
        )
        for one in misnamed
        if one.place not in told
    ]
    told = told | {one.place for one in misnamed}
    return findings + [
        CheckFinding(
            place,
            says,
            "the same ids in all files of a model",
            "which is right shows in the source: programs read the one or the other",
            "warning",
        )
        for place, says in others
        if place not in told
    ]


def _find_unstopped_turn(ctx: CheckContext) -> list[CheckFinding]:
    """Return [finding] where the chat template ends a turn with a token that stops no generation.

    It is a failure where another file or key of the model contradicts that, else a warning: base
    models come with a chat template too, and their eos is another token. [] if there is nothing to
    say.
    """
    try:
        found = find_unstopped_turn(ctx.carried)
    except AprfmtError:
        return []  # the checks of the lists and of the template say it
    if found is None:
        return []
    level: Level = "fail" if found.contradicted else "warning"
    todo = found.remedy  # of a base model nothing may be wrong
    if found.contradicted and found.assignments:
        words = [shlex.quote(one) for one in found.assignments]
        todo = named_causes.set_command(ctx.model.path, words)
    return [
        CheckFinding(
            ctx.carried.where, found.says, "a turn's end that stops a generation", todo, level
        )
    ]


def _configured_ids(ctx: CheckContext) -> list[tuple[str, int]]:
    """Return (file and key, id) of the ids that config.json and generation_config.json set."""
    return [(where, i) for where, i in _id_values(ctx) if type(i) is int and i >= 0]


def _find_invalid_ids(ctx: CheckContext) -> list[CheckFinding]:
    """Return a failure for each special id's key whose value is no token id."""
    return [
        CheckFinding(
            where,
            shorten(repr(value), 80),
            "an id, a list of ids, or null",
            "what reads it stops nowhere, or not at all",
        )
        for where, value in _id_values(ctx)
        if value is not None and (type(value) is not int or value < -1)
    ]


def _id_values(ctx: CheckContext) -> list[tuple[str, Any]]:
    """Return (file and key, value) of bos, eos and pad in both configuration files.

    None where a key is missing; -1 means none in these files. A list gives an item for each value.
    """
    found = []
    for name, source in (
        ("config.json", ctx.model.config or {}),
        ("generation_config.json", ctx.carried.parse_file("generation_config.json")),
    ):
        for role in ("bos", "eos", "pad"):
            value = source.get(f"{role}_token_id")
            every = value if isinstance(value, list) else [value]
            found += [(f"{name}: {role}_token_id", i) for i in every]
    return found


def check_merges(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each merge that does not join two tokens to a third.

    Many pieces that no merge makes are a failure too. Raises NotRun for a vocabulary without
    merges.
    """
    words = ctx.words
    if words.merges is None:
        raise NotRun("the vocabulary has no merges")
    wrong = _wrong_merges(words)
    expected = "two tokens that make a third"
    findings = _limit_findings(
        CheckFinding(
            f"{words.where}: merge {number}", repr(merge), expected, "the tokenizer is not whole"
        )
        for number, merge in wrong
    )
    if not wrong:
        findings += _find_missing_merges(ctx)
    return Result(f"{len(words.merges)} merges", findings)


def _find_missing_merges(ctx: CheckContext) -> list[CheckFinding]:
    """Return [finding] where many pieces are made by no merge, so that merges were lost; else [].

    Only for byte-level BPE, in which merges alone make a piece of several characters.
    """
    side = ctx.readable
    if side is None or side.vocabulary.kind != "bpe" or not side.vocabulary.merges:
        return []
    own = side.vocabulary
    made = {"".join(merge.split(" ", 1)) for merge in own.merges or ()}
    long = [
        t for t, kind in zip(own.tokens, own.types, strict=True) if kind == NORMAL and len(t) > 1
    ]
    if len(long) < PIECES_FROM:
        return []
    unmade = [token for token in long if token not in made]
    share = 1 - len(unmade) / max(len(long), 1)
    if PIECES_MADE.holds(share):
        return []
    return [
        CheckFinding(
            ctx.words.where,
            f"{len(unmade)} of {len(long)} pieces are made by no merge, the first {unmade[0]!r}",
            f"{PIECES_MADE} {PIECES_MADE.unit}: {PIECES_MADE.reason}",
            "the merges are cut; take them from the source",
        )
    ]


def check_round_trip(ctx: CheckContext) -> Result:
    """Return a Result with a failure for each sample text that its token ids do not give back.

    Raises NotRun for a tokenizer that changes texts, or that does not build.
    """
    try:
        side = ctx.stated
        engine = None if side is None else _build_engine(ctx, side)
    except AprfmtError as error:
        raise NotRun("the tokenizer does not build; see the check tokenizer") from error
    if side is None or engine is None:
        raise NotRun("a tokenizer of this kind does not keep texts as they are")
    # Only texts that the normalizer keeps and the vocabulary can spell must come back.
    steps = flatten_steps((side.data or {}).get("normalizer"), "normalizers")
    changing = [str(step.get("type")) for step in steps if step.get("type") not in _KEEPING]
    if changing:
        raise NotRun(f"the tokenizer changes texts: {', '.join(changing)}")
    texts = [text for text in ROUND_TRIPS if _can_spell(text, side.vocabulary)]
    if not texts:
        raise NotRun("the vocabulary lacks characters of every text that is tried")
    findings = []
    for text in texts:
        back = engine.decode(engine.encode(text, False, False), False)
        if back == text or (side.vocabulary.kind == "spm" and back.strip(" ") == text):
            continue
        findings.append(
            CheckFinding(
                ctx.words.where,
                f"{text!r} comes back as {shorten(repr(back), 60)}",
                "the text that was encoded",
                "compare the tokenizer with its source: aprfmt diff SOURCE FILE --only tokenizer",
            )
        )
    return Result(f"{len(texts)} texts", findings)


def _can_spell(text: str, vocabulary: Vocabulary) -> bool:
    """Return whether a vocabulary has a piece for every character of a text, or byte pieces.

    Blanks are not looked for: a vocabulary spelled as the wrong kind lacks their piece.
    """
    if vocabulary.kind == "bpe":
        letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
        wanted = {letters[byte] for byte in text.encode() if byte != 0x20}
    else:
        wanted = set() if BYTE in vocabulary.types else set(text) - {" "}
    return wanted <= set(vocabulary.tokens)


def _build_engine(ctx: CheckContext, side: StatedTokenizer) -> Engine | None:
    """Return the tokenizer engine that programs reading this format would use.

    None for a kind of tokenizer that alters texts, or for broken merges. `side` is the tokenizer as
    it is stored.
    """
    if not side.encodes or side.vocabulary.kind not in SPELLED_KINDS or _wrong_merges(ctx.words):
        return None
    if side.uses_lists:
        return engine_of_lists(side.vocabulary, ctx.carried.where)
    return ctx.model.tokenizer.engine


# Steps of a normalizer that change none of the texts, or what decoding turns back.
_KEEPING = ("NFC", "Prepend", "Replace", "Strip", "Precompiled")
ROUND_TRIPS = ("Hello world, this is a test.", "7 42 1234 x**2", "na\u00efve caf\u00e9",
               "\u4f60\u597d")  # fmt: skip


def _wrong_merges(words: StoredVocabulary) -> list[tuple[int, Any]]:
    """Return (index, merge) of the merges that do not join two tokens to a third."""
    known = {token for token in words.tokens if token is not None}
    wrong: list[tuple[int, Any]] = []
    for number, merge in enumerate(words.merges or ()):
        parts: Sequence[Any] = merge
        if isinstance(merge, str):  # at the first space that is not its first character
            at = merge.find(" ", 1)
            parts = (merge[:at], merge[at + 1 :]) if at > 0 else (merge,)
        good = len(parts) == 2 and all(isinstance(part, str) and part in known for part in parts)
        if not good or "".join(parts) not in known:
            wrong.append((number, merge))
    return wrong


def check_template(ctx: CheckContext) -> Result:
    """Return a Result with a failure for chat template code that does more than join texts.

    A template that is not jinja2 or renders no chat fails, and so does a control token that the
    vocabulary lacks.
    Raises NotRun without a template.
    """
    text = ctx.model.carried.chat_template()
    if text is None:
        raise NotRun("the model carries no chat template")
    foreign = foreign_template(text)
    if foreign is not None:
        where, expected = f"chat template, line {foreign.line}", "a jinja2 template"
        todo = f"engines refuse it or use another; {TODO}"
        one = CheckFinding(where, f"is {foreign.says}", expected, todo)
        return Result(f"{len(text)} characters", [one])
    findings = [
        CheckFinding(
            f"chat template, {line}",
            what,
            "a template that joins texts",
            "read it before you let a program render it",
        )
        for line, _, what in (sentence.partition(": ") for sentence in scan_template(text))
    ]
    findings += _find_unrendered_chats(ctx, text, findings)
    findings += _find_unknown_tokens(ctx)
    return Result(f"{len(text)} characters{_begun_twice_text(ctx)}", findings)


def _find_unrendered_chats(
    ctx: CheckContext, template: str, others: Sequence[CheckFinding]
) -> list[CheckFinding]:
    """Return [finding] where a chat template renders no chat at all; [] where it may render one.

    Its code reads no messages, or fails on every test conversation, with contents as text and as a
    list of parts. Nothing is rendered where `others` already speak of what it does.
    """
    expected = "a template that renders the messages of a chat"
    if not reads_messages(template):
        return [CheckFinding("chat template", UNREAD_MESSAGES, expected, TODO)]
    if others:
        return []
    try:
        side = ctx.stated
        variables = {} if side is None else side.special_token_texts
        reason = unrendered_reason(template, variables, ctx.where)
    except AprfmtError:
        return []  # other checks say it
    if not reason:
        return []
    said = f"fails on every test conversation: {reason}"
    return [CheckFinding("chat template", said, expected, TODO)]


def _begun_twice_text(ctx: CheckContext) -> str:
    """Return a clause on BOS if chat template and tokenizer both put it before a text; else ""."""
    side = ctx.readable
    if side is None or not side.chat_begins_as_text:
        return ""
    return (
        "; it writes BOS, which the tokenizer puts before a text, too: a rendered chat that is "
        "tokenized with special tokens begins with it twice"
    )


def _find_unknown_tokens(ctx: CheckContext) -> list[CheckFinding]:
    """Return a failure for each control token of the template that the vocabulary lacks.

    [] where the tokenizer cannot be read, which another check reports.
    """
    side = ctx.readable
    return _limit_findings(
        CheckFinding(
            "chat template",
            f"writes {token!r}",
            "tokens of the model's own vocabulary",
            "the template is another model's, or the vocabulary lost its added tokens",
        )
        for token in (missing_template_tokens(side) if side is not None else [])
    )
