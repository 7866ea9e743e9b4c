"""Compares the texts of two models: chat template line by line, generation config by key.

A *part* is a text that comes with a model: tokenizer, chat template, generation config. A *side* is
model A or model B. An *item* is one thing that a model is made of, as its ledger lists it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aprfmt.base.budget import end_where_time_is_over
from aprfmt.errors import AprfmtError
from aprfmt.model.key_readings import FILES, KeyPattern, matching_row
from aprfmt.model.ledger import NotCompared, State, same_content
from aprfmt.tokenizer.generation import (
    differing_settings,
    generation_settings,
    has_keys_alone,
    placeless_settings,
    same_setting,
)
from aprfmt.tokenizer.keys import (
    APR_CHAT_TEMPLATE,
    CHAT_TEMPLATE,
    GENERATION,
    GENERATION_CONFIG,
    HF_JSON,
    KEYS,
)
from aprfmt.tokenizer.stored_parts import are_read_from_equal_texts
from aprfmt.tokenizer.stored_tokenizer import read_tokenizer_parts
from aprfmt.tokenizer.vocabulary import special_and_added_ids

if TYPE_CHECKING:
    from aprfmt.causes.tokenizer.vocabulary_lists import TokenizerDifference
    from aprfmt.model import Model

_AROUND = 2  # equal lines shown before and after
# What a key does to a generation; others are listed without words.
EFFECTS: Mapping[str, str] = {
    "temperature": "how evenly tokens are drawn",
    "top_k": "of how many tokens one is drawn",
    "top_p": "of what share of probability one is drawn",
    "min_p": "how improbable a token may be",
    "do_sample": "whether tokens are drawn, or the best one taken",
    "repetition_penalty": "how much tokens that were there are avoided",
    "max_new_tokens": "after how many tokens it ends",
    "max_length": "at what length it ends",
    "bos_token_id": "what it begins with",
    "eos_token_id": "what ends it",
    "pad_token_id": "what fills shorter rows of a batch",
}
ALIKE = ("equal", "none")  # verdicts that no line has to be said about
STORED_OTHERWISE = "stored otherwise"  # lists that differ, and that give the same ids
DIFFERING = ("different", "only in A", "only in B")
_OTHERS = ("chat_template", "generation_config")  # rows of the tokenizers' report, judged apart
_OF_THE_WRITER = ("transformers_version", "_from_model_config")

COMPARED = (
    "pieces, types, merges or scores, splitting, special ids, BOS and EOS, chat template, "
    "generation settings"
)
TOKENIZER_PART, GENERATION_PART = "tokenizer", "generation config"  # parts in the ledger
TOKENIZER_ITEM, GENERATION_ITEM = f"part {TOKENIZER_PART}", f"part {GENERATION_PART}"


@dataclass(frozen=True, slots=True)
class KeyDiff:
    """A key of the generation config that differs; the value is None where it is absent."""

    name: str
    a: object
    b: object
    effect: str = ""


@dataclass(frozen=True, slots=True)
class SideVerdicts:
    """Verdicts on tokenizer, template and generation config, and how much of each differs.

    A verdict is one of equal, different, only in A, only in B, none, not compared. That on the
    tokenizer may be "stored otherwise" too: its lists differ, and give the same ids.
    """

    tokenizer: str
    template: str
    generation: str
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def differing(self) -> tuple[str, ...]:
        """The ledger items of the parts that differ, or that only one model has."""
        verdicts = {
            TOKENIZER_ITEM: self.tokenizer,
            "part chat template": self.template,
            GENERATION_ITEM: self.generation,
        }
        return tuple(item for item, verdict in verdicts.items() if verdict in DIFFERING)

    @property
    def text(self) -> str:
        """The verdicts on parts that are not equal, with counts; "" if all are equal or absent."""
        parts = [
            f"{name} {verdict}{self._counts_text(begins)}"
            for name, verdict, begins in (
                ("tokenizer", self.tokenizer, ("tokens", "merges")),
                ("chat template", self.template, ("lines",)),
                ("generation config", self.generation, ("keys",)),
            )
            if verdict not in ALIKE
        ]
        return "; ".join(parts)

    def _counts_text(self, begins: tuple[str, ...]) -> str:
        """Return the counts whose names begin with one of `begins`, in brackets; "" without any."""
        rows = [
            f"{count} {name.replace('_', ' ').replace('in a', 'in A').replace('in b', 'in B')}"
            for name, count in self.counts.items()
            if name.startswith(begins)
        ]
        return f" ({', '.join(rows)})" if rows else ""


@dataclass(frozen=True)
class TokensReport:
    """The comparison of two tokenizers: findings that count, harmless notes, what was compared.

    `carried` are the labels of the sides that carry a tokenizer; `remarks` are sentences about a
    template and the vocabulary next to it, and about ids that only one config.json states. `added`
    are the ids of special and of added tokens. `unreadable` is the label of the side whose
    tokenizer cannot be read.
    """

    findings: "tuple[TokenizerDifference, ...]" = ()
    notes: "tuple[TokenizerDifference, ...]" = ()
    remarks: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    carried: str = "AB"
    unreadable: str = ""
    added: tuple[int, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)  # of tokens and merges that differ
    left: tuple[NotCompared, ...] = ()  # tokens for which the other format has no place


def compare_equal_tokenizers(a: "Model", b: "Model") -> TokensReport | None:
    """Return the comparison of two tokenizers that are read from equal texts; None for others.

    One of them is read, with all that a comparison looks at: equal texts that cannot be read are no
    equal tokenizers. None for those too. The time of a budget in force ends it.
    """
    try:
        if not are_read_from_equal_texts(a.carried, b.carried):
            return None
        end_where_time_is_over()
        side = read_tokenizer_parts(a)
        if side is None:
            return None
        end_where_time_is_over()
        _ = side.template, side.stop_ids  # of files that `read_tokenizer_parts` leaves alone
    except AprfmtError:
        return None  # the comparison part by part says what cannot be read
    added = special_and_added_ids(side.vocabulary)
    return TokensReport(checked=(f"tokenizer: {COMPARED}",), added=added)


def compare_texts(a: "Model", b: "Model", tokens: TokensReport) -> SideVerdicts:
    """Return the verdicts on tokenizer, chat template and generation config of two models.

    `tokens` is the comparison of the tokenizers. Where only one side has a part, its verdict is
    "only in A" or "only in B".
    """
    lines, keys = template_diff(a, b)[2:], differing_generation_keys(a, b)
    counts = {
        **tokens.counts,
        "lines_only_in_a": sum(line.startswith("-") for line in lines),
        "lines_only_in_b": sum(line.startswith("+") for line in lines),
        "keys_changed": len(keys),
    }
    own = [row for row in tokens.findings if row.name not in _OTHERS]
    judged = "different" if own else STORED_OTHERWISE if tokens.counts else "equal"
    if tokens.carried != "AB":
        judged = _one_sided_text("A" in tokens.carried, "B" in tokens.carried)
    elif not tokens.checked:
        judged = "not compared"
    x, y = a.carried.readable_template(), b.carried.readable_template()
    texts = "different" if x != y else "equal"
    mine, theirs = bool(_generation_config(a)), bool(_generation_config(b))
    return SideVerdicts(
        judged,
        texts if x is not None and y is not None else _one_sided_text(x is not None, y is not None),
        ("different" if keys else "equal") if mine and theirs else _one_sided_text(mine, theirs),
        {name: count for name, count in counts.items() if count},
    )


def uncompared_tokenizers(a: "Model", b: "Model", tokens: TokensReport) -> tuple[NotCompared, ...]:
    """Return the tokenizer parts and the generation config that were not compared.

    A tokenizer of a kind that is not read here is compared by its bytes. The generation config is
    listed where only one side has it, and the keys that only other programs read where they differ.
    """
    settings = (*_one_sided_generation(a, b), *_keys_of_others(a, b, tokens))
    if tokens.checked:
        return (*tokens.left, *settings)
    if not tokens.carried:
        return (*tokens.left, *settings, *_unequal_settings(a, b))
    if len(tokens.carried) == 1:
        state: State = "only in A" if tokens.carried == "A" else "only in B"
        return (NotCompared("part", TOKENIZER_PART, state), *settings)
    why = "; ".join(tokens.not_checked).removeprefix("tokenizer: ")
    x, y = _stored_tokenizer(a), _stored_tokenizer(b)
    stored: State = "equal" if x and x == y else "unreadable"
    unequal = _unequal_settings(a, b)
    side = tokens.unreadable if stored == "unreadable" else ""
    return (NotCompared("part", TOKENIZER_PART, stored, why, side), *settings, *unequal)


def _keys_of_others(a: "Model", b: "Model", report: TokensReport) -> Iterator[NotCompared]:
    """Yield the tokenizer's keys that only other programs read, and that differ between A and B.

    aprfmt reads embedded files in their place: tokenizer.json for the keys of an APR file,
    chat_template.jinja for those of the chat template. Both containers have to use one style of
    keys. Nothing is yielded for a difference that `report` has as a finding.
    """
    style = a.key_style
    if style != b.key_style or style not in ("gguf", "apr"):
        return
    found = {part for one in report.findings for part in (one.name, *one.parts)}
    templates = (CHAT_TEMPLATE, *((APR_CHAT_TEMPLATE,) if style == "apr" else ()))
    keys = () if "chat_template" in found else templates
    if style == "apr" and HF_JSON in a.metadata and HF_JSON in b.metadata and not report.findings:
        keys = (*keys, *(key.apr for key in KEYS if key.gguf not in (HF_JSON, CHAT_TEMPLATE)))
    for key in keys:
        if key not in a.metadata and key not in b.metadata:
            continue
        spellings = (key, *templates) if key in templates else (key,)
        x, y = (
            [model.metadata[each] for each in spellings if each in model.metadata]
            for model in (a, b)
        )
        if x and y and same_content(x[0], y[0]):
            continue
        state: State = "unequal" if x and y else "only in A" if x else "only in B"
        why = "other programs read it, and aprfmt the file that is embedded"
        yield NotCompared("metadata key", key, state, why)


def _unequal_settings(a: "Model", b: "Model") -> Iterator[NotCompared]:
    """Yield the settings with unequal values next to two tokenizers of a kind that is not read.

    Only settings that programs act on count, and that no ledger lists. Files that only one side
    has, or that cannot be read, are listed elsewhere.
    """
    for one in differing_generation_keys(a, b):
        row = matching_row(FILES[GENERATION_CONFIG], one.name)
        default = GENERATION.get(one.name)
        mine, theirs = (default if value is None else value for value in (one.a, one.b))
        if row is None or not _is_acted_on(row) or same_setting(mine, theirs):
            continue
        both = one.a is not None and one.b is not None
        state: State = "unequal" if both else "only in B" if one.a is None else "only in A"
        yield NotCompared("generation setting", f"{GENERATION_CONFIG}: {one.name}", state)
    file = "tokenizer_config.json"
    try:
        left, right = a.carried.parse_file(file), b.carried.parse_file(file)
    except AprfmtError:
        return
    if any(not keys and side.folder is None for side, keys in ((a, left), (b, right))):
        return  # a file that embeds none
    for key in dict.fromkeys((*left, *right)):
        row = matching_row(FILES[file], key)
        if row is None or not _is_acted_on(row):
            continue
        name = f"{file}: {key}"
        if key not in left or key not in right:
            yield NotCompared("tokenizer part", name, "only in A" if key in left else "only in B")
        elif not same_content(left[key], right[key]):
            yield NotCompared("tokenizer part", name, "unequal")


def _is_acted_on(row: KeyPattern) -> bool:
    """Return whether programs act on a key of these files, and no ledger lists its differences."""
    return not row.as_stored and row.reading not in ("text", "without effect")


def _one_sided_generation(a: "Model", b: "Model") -> Iterator[NotCompared]:
    """Yield the generation config as NotCompared if only one side has it.

    Only folders can have one: writers of single files leave it out.
    """
    mine, theirs = _has_generation_config(a), _has_generation_config(b)
    if (
        mine != theirs
        and a.key_style == b.key_style != "safetensors"
        and _has_keys_alone(a if mine else b)
    ):
        return  # a difference of the keys
    if mine == theirs:
        yield from _placeless_generation(a, b)
        return
    lacks = b if mine else a
    state: State = "only in A" if mine else "only in B"
    if lacks.folder is not None and not _config_gives(lacks, a if mine else b):
        yield NotCompared("part", GENERATION_PART, state)
        return
    why = f"writers of {lacks.format} have no keys for it"
    if lacks.folder is not None:
        why = "config.json of the other side gives the same settings"
    yield NotCompared("part", GENERATION_PART, "no counterpart", why, state[-1])


def _placeless_generation(a: "Model", b: "Model") -> Iterator[NotCompared]:
    """Yield the generation settings of one side for which the other's format has no keys."""
    for lacks, has, side in ((b, a, "A"), (a, b, "B")):
        try:
            names = placeless_settings(lacks.carried, has.carried)
        except AprfmtError:
            return
        if names:
            why = f"writers of {lacks.format} have no keys for {', '.join(names)}"
            yield NotCompared("part", GENERATION_PART, "no counterpart", why, side)


def _config_gives(lacks: "Model", has: "Model") -> bool:
    """Return whether config.json of `lacks` has the same settings as `has`'s generation config.

    `lacks` has no generation config. Source: transformers' generation/utils.py: without the file,
    the settings are made from config.json, and a file that was made so says `_from_model_config`.
    """
    settings, config = _generation_config(has), lacks.config or {}
    made = settings.get("_from_model_config") is True
    return bool(settings) and all(
        config.get(key) == value
        for key, value in settings.items()
        if key not in _OF_THE_WRITER and (not made or key.endswith("_token_id"))
    )


def _stored_tokenizer(model: "Model") -> Mapping[str, object]:
    """Return a tokenizer's stored content as {file name or metadata key: content}.

    {} if it cannot be read.
    """
    try:
        files = {
            name: model.carried.files[name]
            for name in model.carried.files
            if "token" in name or name.startswith(("vocab", "merges"))
        }
    except AprfmtError:
        return {}
    keys = {
        key: getattr(value, "tolist", lambda value=value: value)()
        for key, value in model.metadata.items()
        if key.startswith("tokenizer.")
    }
    return {**files, **keys}


def _one_sided_text(a: bool, b: bool) -> str:
    """Return "only in A", "only in B" or "none", by which side has something."""
    return "only in A" if a else "only in B" if b else "none"


def template_diff(a: "Model", b: "Model") -> tuple[str, ...]:
    """Return the lines of a unified diff of both chat templates; () if equal or missing."""
    x, y = a.carried.readable_template(), b.carried.readable_template()
    if x is None or y is None or x == y:
        return ()
    from difflib import unified_diff

    lines = unified_diff(x.splitlines(), y.splitlines(), "A", "B", lineterm="", n=_AROUND)
    return tuple(lines)


def differing_generation_keys(a: "Model", b: "Model") -> tuple[KeyDiff, ...]:
    """Return the keys in which both generation configs differ; () if a side has none."""
    if _has_keys_alone(a) or _has_keys_alone(b):
        rows = differing_settings(a.carried, b.carried)
        return tuple(KeyDiff(*row, EFFECTS.get(row[0], "")) for row in rows)
    x, y = _generation_config(a), _generation_config(b)
    if not x or not y:
        return ()
    return tuple(
        KeyDiff(key, x.get(key), y.get(key), EFFECTS.get(key, ""))
        for key in dict.fromkeys((*x, *y))
        if key not in _OF_THE_WRITER and not same_setting(x.get(key), y.get(key))
    )


def _has_generation_config(model: "Model") -> bool:
    """Return whether a model has a generation config, even one that cannot be read.

    A file without any known key does not count: its keys are unread items of the ledger.
    """
    try:
        found = generation_settings(model.carried)
    except AprfmtError:
        return True
    return any(matching_row(FILES[GENERATION_CONFIG], key) is not None for key in found)


def _generation_config(model: "Model") -> Mapping[str, object]:
    """Return {key: value} of a model's generation config; {} without one."""
    try:
        return generation_settings(model.carried)
    except AprfmtError:
        return {}


def _has_keys_alone(model: "Model") -> bool:
    """Return whether only a GGUF's keys state the generation settings; False if not readable."""
    try:
        return has_keys_alone(model.carried)
    except AprfmtError:
        return False
