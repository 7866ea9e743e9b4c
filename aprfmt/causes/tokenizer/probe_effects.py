"""What a tokenizer does to the probes: ids, renderings, ends; and which part makes it differ.

A *part* is one of the things that a tokenizer consists of, such as pieces or merges. A *probe* is a
text or conversation, a *reading* what a tokenizer makes of it. A *group* is parts that are
exchanged together.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aprfmt.base.text_escape import shorten
from aprfmt.causes.tokenizer.part_exchange import (
    SCORED,
    TokenizerParts,
    control_ids,
    exchange_parts,
    tokenizer_parts,
    vocabulary_of,
)
from aprfmt.causes.tokenizer.probe_texts import (
    piece_texts,
    plain_text,
    probe_texts,
    special_texts_of,
)
from aprfmt.causes.tokenizer.special_ids import SAMPLING
from aprfmt.causes.tokenizer.vocabulary_lists import TokenizerDifference
from aprfmt.errors import AprfmtError
from aprfmt.tokenizer.base import Engine
from aprfmt.tokenizer.conversations import render_conversations
from aprfmt.tokenizer.hf_engine import HfEngine
from aprfmt.tokenizer.isolated import engine_of_data, engine_of_text
from aprfmt.tokenizer.keys import END_ROLES, IDS
from aprfmt.tokenizer.spm import SpmEngine
from aprfmt.tokenizer.stored_tokenizer import StatedTokenizer
from aprfmt.tokenizer.vocabulary import collect_stop_ids

_BY_PIECES = {"pre_tokenizer", "normalizer", "merges", "scores", "options"}
ENGINE = ("pieces", "merges", "scores", "added", "normalizer", "pre_tokenizer", "options")
SideLabel = tuple[str, str]
Readings = dict[SideLabel, Any]
_Encoded = tuple[Engine | None, Readings, TokenizerParts]


@dataclass
class ProbeBench:
    """Probe texts and conversations; every combination of parts is read once.

    `also` are texts that are only encoded (the pieces' own texts), whose ids are one reading each.
    `encodes` is False where the texts cannot be encoded at all. With `decodes` the ids of each text
    are decoded again, which is one reading more.
    """

    texts: Sequence[str]
    special: Sequence[str]
    where: str
    also: Sequence[str] = ()
    encodes: bool = True
    decodes: bool = False
    _engines: dict[tuple[int, ...], _Encoded] = field(default_factory=dict)
    _rendered: dict[tuple[Any, ...], Mapping[str, tuple[str, str]]] = field(default_factory=dict)

    def read(self, parts: TokenizerParts) -> Readings:
        """Return all results of a tokenizer made of these parts: {(kind, probe): result}.

        A result is the ids of a text, a rendered conversation, or a setting.
        """
        engine, found = self._encode_probes(parts)
        found = found | _readings_without_text(parts)
        # Conversations as text, and their ids.
        texts = self.chats(parts)
        for name, (status, text) in texts.items():
            found["chat", name] = (status, text if status == "ok" else "")
            if engine is not None and status == "ok":
                found["chat ids", name] = tuple(engine.encode(text, False, True))
        return found

    def engine(self, parts: TokenizerParts) -> Engine | None:
        """Return the engine that encodes text by these parts of a tokenizer; None if impossible."""
        return self._encode_probes(parts)[0]

    def chats(self, parts: TokenizerParts) -> Mapping[str, tuple[str, str]]:
        """Return {conversation: (status, text)} as the template of these parts renders them.

        {} without a template. If the template cannot be read, one entry holds ("broken", error).
        """
        template = parts["template"]
        if template is None:
            return {}
        variables = {
            f"{role}_token": parts[f"role:{role}"][1]
            for role in IDS
            if parts[f"role:{role}"][1] is not None
        }
        key = (template, *sorted(variables.items()))
        if key not in self._rendered:
            try:
                self._rendered[key] = render_conversations(template, variables, self.where)
            except AprfmtError as error:
                self._rendered[key] = {"every conversation": ("broken", str(error))}
        return self._rendered[key]

    def _encode_probes(self, parts: TokenizerParts) -> tuple[Engine | None, Readings]:
        """Return (engine, readings of all texts) of these parts; made once for each combination.

        The engine is None if none can be made; the only reading is then the error. (None, {}) if
        texts are not to be encoded.
        """
        if not self.encodes:
            return None, {}
        key = tuple(id(parts[name]) for name in (*ENGINE, "decoder"))
        if key not in self._engines:  # the parts are kept, so that ids stay those of these objects
            try:
                engine = build_engine(parts, self.where)
                self._engines[key] = (engine, self._encode_texts(engine), parts)
            except AprfmtError as error:
                self._engines[key] = (None, {("tokenizer", ""): str(error)}, parts)
        return self._engines[key][:2]

    def _encode_texts(self, engine: Engine) -> Readings:
        """Return {(kind, text): ids} of every probe text.

        Kind "text" parses special tokens, "as text" does not. Kind "decoded" is the text of ids.
        """
        found: Readings = {}
        for text in (*self.texts, *self.also):
            found["text", text] = tuple(engine.encode(text, False, True))
        for text in self.texts if self.decodes else ():
            found["decoded", text] = _decoded_text(engine, text)
        for text in self.special:
            found["as text", text] = tuple(engine.encode(text, False, False))
        return found


def build_engine(parts: TokenizerParts, where: str) -> Engine:
    """Return the encoding engine of parts. Raises FormatError if the library refuses them.

    `where` names the source in messages.
    """
    if parts["options"]["type"] == SCORED:
        return SpmEngine(vocabulary_of(parts), where)
    normalizer, (pre, ignores) = parts["normalizer"], parts["pre_tokenizer"]
    model = {**parts["options"], "vocab": parts["pieces"]}
    if model["type"] == "BPE":
        model |= {"merges": [tuple(row) for row in parts["merges"]], "ignore_merges": ignores}
    data = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": parts["added"],
        "normalizer": normalizer, "pre_tokenizer": pre, "post_processor": None,
        "decoder": parts["decoder"],
        "model": model,
    }  # fmt: skip
    if model["type"] == "BPE":
        return engine_of_data(data, where)
    return engine_of_text(json.dumps(data), where)


def _decoded_text(engine: Engine, text: str) -> str:
    """Return what an engine makes of the ids of a text; the error as text if it makes nothing."""
    try:
        return engine.decode(engine.encode(text, False, True), False)
    except AprfmtError as error:
        return str(error)


def _readings_without_text(parts: TokenizerParts) -> Readings:
    """Return {(kind, name): result} of all properties of a tokenizer that need no text.

    They are special ids, stop ids, ids put around a text, and settings of generation.
    """
    found: Readings = {
        (role, ""): parts[f"role:{role}"][0] for role in IDS if role not in ("unk", "sep", "mask")
    }
    ids = {role: parts[f"role:{role}"][0] for role in END_ROLES}
    ids = {role: i for role, i in ids.items() if i is not None}
    for part in ("begins", "ends"):
        found["frame", part] = tuple(
            parts[f"role:{i}"][0] if isinstance(i, str) else i for i in parts[part]
        )
    found["frame", "segments"] = parts["segments"]
    found["frame", "text"], found["frame", "pair"] = parts["text"], str(parts["pair"])
    if parts["listed"]:
        found["ends", ""] = tuple(
            sorted(collect_stop_ids(ids, control_ids(parts).get, frozenset()))
        )
    else:
        said = parts["generation"]["ends"] or parts["config:eos"] or parts["class:eos"]
        found["ends", ""] = tuple(sorted(set(said), key=str))
    settings = dict(parts["generation"]["settings"])
    if not settings["do_sample"]:
        settings = {key: value for key, value in settings.items() if key not in SAMPLING}
    found["hidden", ""] = tuple(sorted(control_ids(parts).values()))
    found["settings", ""] = str(sorted(settings.items()))
    found["generation ids", ""] = str(parts["generation"]["ids"])
    return found


def differing_labels(mine: Readings, theirs: Readings) -> list[SideLabel]:
    """Return the keys of results that differ or are on one side only, those of `mine` first."""
    return [
        label for label in dict.fromkeys((*mine, *theirs)) if mine.get(label) != theirs.get(label)
    ]


@dataclass(frozen=True)
class Effect:
    """What exchanging a group of parts does to the results of a tokenizer.

    `labels` are the results that are not A's if this group of parts alone is B's, `before` their
    fraction of all results. `after` is the fraction that is not A's if every listed part is A's and
    all other parts are B's.
    """

    labels: tuple[SideLabel, ...]
    before: float
    after: float

    @property
    def shown(self) -> bool:
        """Whether exchanging some tokenizer parts changes a result, and all make A and B equal."""
        return bool(self.labels) and self.after == 0.0


def group_effects(
    bench: ProbeBench, a: TokenizerParts, b: TokenizerParts, groups: Sequence[Sequence[str]]
) -> list[Effect]:
    """Return the effect of each group of parts on the probe results, in the order of `groups`.

    `a` and `b` are the parts of both tokenizers. Each group is exchanged alone, and compared with
    what is left when all groups are exchanged.
    """
    reference = bench.read(a)
    every = [name for group in groups for name in group]
    rest = differing_labels(reference, bench.read(exchange_parts(b, a, every)))
    found = []
    for group in groups:
        labels = differing_labels(reference, bench.read(exchange_parts(a, b, group)))
        found.append(
            Effect(
                tuple(labels),
                _share_of_probes(labels, reference),
                _share_of_probes(rest, reference),
            )
        )
    return found


def measure_split_effect(
    bench: ProbeBench, a: TokenizerParts, b: TokenizerParts, group: Sequence[str]
) -> Effect:
    """Return the effect of a group of parts on the words into which texts are split.

    With a vocabulary of short pieces, different words may give the same ids in every probe; the
    words show the difference.
    """
    read = [
        read_words(bench, parts)
        for parts in (a, exchange_parts(a, b, group), exchange_parts(b, a, group))
    ]
    labels, rest = (differing_labels(read[0], other) for other in read[1:])
    return Effect(tuple(labels), _share_of_probes(labels, read[0]), _share_of_probes(rest, read[0]))


def read_words(bench: ProbeBench, parts: TokenizerParts) -> Readings:
    """Return {("words", text): words} of every probe text; {} if the engine does not give words."""
    engine = bench.engine(parts)
    if not isinstance(engine, HfEngine):
        return {}
    return {("words", text): tuple(engine.split_words(text)) for text in bench.texts}


def _share_of_probes(labels: Sequence[SideLabel], reference: Readings) -> float:
    """Return the number of labels over the number of the reference's readings."""
    return len(labels) / max(1, len(reference))


def measure_effects(
    a: StatedTokenizer, b: StatedTokenizer, found: Sequence[TokenizerDifference]
) -> list[TokenizerDifference]:
    """Return the differences, each with its effect on the probe texts filled in.

    Set are `shown`, the fractions of probe results that differ before and after the exchange, and
    one example.
    """
    # Build both sides' parts and the probe texts.
    groups = [row.parts for row in found]
    listed = {name for group in groups for name in group}
    decodes = "decoder" in listed
    splits = decodes or bool(listed & set(ENGINE))
    mine, theirs = tokenizer_parts(a, b, engine=splits), tokenizer_parts(b, a, engine=splits)
    texts = probe_texts(a, b) if splits else []
    # What is not listed is A's, but for what texts are encoded by: that may be told in other forms.
    same = (name for name in mine if name not in listed and not (splits and name in ENGINE))
    theirs |= {name: mine[name] for name in same}
    where = b.carried.where
    special = special_texts_of(texts, a, b)
    bench = ProbeBench(texts, special, where, encodes=splits, decodes=decodes)
    every = group_effects(bench, mine, theirs, groups)
    # Differences that no text shows are tried on the pieces' own texts.
    unseen = any(
        not effect.labels and _BY_PIECES & set(group)
        for effect, group in zip(every, groups, strict=True)
    )
    if unseen:
        tokens = dict.fromkeys((*a.vocabulary.tokens, *b.vocabulary.tokens))
        also = piece_texts(map(plain_text, tokens))
        bench = ProbeBench(texts, special, where, also, decodes=decodes)
        every = group_effects(bench, mine, theirs, groups)
    # A pre-tokenizer that changes no id may still split texts in another way.
    every = [
        measure_split_effect(bench, mine, theirs, row.parts)
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
            example=_first_example(bench, mine, theirs, effect),
        )
        for row, effect in zip(found, every, strict=True)
    ]


# --- what a probe shows, in words ------------------------------------------------------------


def _first_example(
    bench: ProbeBench, a: TokenizerParts, b: TokenizerParts, effect: Effect
) -> tuple[str, ...]:
    """Return (what A makes, what B makes) of the simplest probe that differs; () without one."""
    for label in sorted(effect.labels, key=_label_order):
        kind, text = label
        if kind in ("text", "as text"):
            both = [_encoded_text(bench, parts, text, kind == "text") for parts in (a, b)]
            if both[0] != both[1]:
                return tuple(f"{shorten(repr(text), 80)} is {said}" for said in both)
        if kind == "decoded":
            back = [shorten(repr(bench.read(parts)[label]), 80) for parts in (a, b)]
            return tuple(f"{shorten(repr(text), 80)}, decoded again, is {said}" for said in back)
        if kind == "words":
            shown = [_words_text(bench, parts, text) for parts in (a, b)]
            return tuple(f"{shorten(repr(text), 80)} is {said}" for said in shown)
        if kind == "chat":
            x, y = (_rendered_chat(bench, parts, text) for parts in (a, b))
            at = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q),
                      min(len(x), len(y)))  # fmt: skip
            start = max(0, at - 20)
            return tuple(f"{text} is ...{said[start : at + 60]!r}" for said in (x, y))
    return ()


def _rendered_chat(bench: ProbeBench, parts: TokenizerParts, name: str) -> str:
    """Return conversation `name` as the template renders it, or the reason in brackets why not."""
    every = bench.chats(parts)
    status, text = every.get(name) or next(iter(every.values()), ("none", "no template"))
    return text if status == "ok" else f"({status}: {text})"


def _label_order(label: SideLabel) -> tuple[int, int]:
    """Return a sort key for a result's label, (kind, text): texts before chats, short first."""
    kinds = ("text", "as text", "words", "decoded", "chat", "tokenizer")
    rank = kinds.index(label[0]) if label[0] in kinds else len(kinds)
    return rank, len(label[1]) if rank < 4 else 0


def _encoded_text(bench: ProbeBench, parts: TokenizerParts, text: str, parse_special: bool) -> str:
    """Return the tokens and ids of a text as one line, at most 40 tokens and 8 ids.

    `parse_special`: special tokens in the text are read as such. "nothing" if the parts make no
    engine.
    """
    engine = bench.engine(parts)
    if engine is None:
        return "nothing"
    ids = engine.encode(text, False, parse_special)
    shown = "|".join(_readable_token(engine.token(i) or f"[{i}]") for i in ids[:40])
    return f"{shown}{'|...' if len(ids) > 40 else ''} ({len(ids)} ids: {_short_ids(ids)})"


def _words_text(bench: ProbeBench, parts: TokenizerParts, text: str) -> str:
    """Return, as one line, the words into which a text is split, at most 40."""
    engine = bench.engine(parts)
    assert isinstance(engine, HfEngine)
    found = engine.split_words(text)
    shown = "|".join(map(_readable_token, found[:40]))
    return f"{shown}{'|...' if len(found) > 40 else ''} ({len(found)} words before merging)"


def _readable_token(token: str) -> str:
    """Return a token's text with control characters escaped, without quotes."""
    return repr(plain_text(token) or token)[1:-1]


def _short_ids(ids: Sequence[int]) -> str:
    """Return ids as text, at most 8 of them."""
    return " ".join(map(str, ids[:8])) + (" ..." if len(ids) > 8 else "")


def splits_are_equal(a: StatedTokenizer, b: StatedTokenizer) -> bool:
    """Return whether SPM lists with scores and a tokenizer.json encode all probe texts alike.

    False for any other two kinds of tokenizer.
    """
    files, lists = (b, a) if a.uses_lists else (a, b)
    if files.data is None or not lists.uses_lists or lists.vocabulary.scores is None:
        return False
    if lists.vocabulary.kind != "spm" or lists.vocabulary.merges is not None:
        return False
    texts = probe_texts(a, b)
    own = engine_of_text(files.carried.tokenizer_json() or "", files.carried.origin)
    own.add_tokens(files.added_tokens)
    other = SpmEngine(lists.vocabulary, lists.carried.where)
    return all(own.encode(text, False, True) == other.encode(text, False, True) for text in texts)
