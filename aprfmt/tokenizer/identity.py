"""Facts that identify a tokenizer in every format, for `inspect` and `diff`."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aprfmt.errors import ConversionError, FormatError
from aprfmt.tokenizer.carriers import has_tokenizer
from aprfmt.tokenizer.hf_json import special_texts, vocabulary_from_json
from aprfmt.tokenizer.keys import FLAGS, MERGES, MODEL, PRE, TOKENS
from aprfmt.tokenizer.pre_tokenizers import PRE_TOKENIZERS, pre_name_of
from aprfmt.tokenizer.stored_parts import Carried
from aprfmt.tokenizer.template import scan_template
from aprfmt.tokenizer.template_language import UNREAD_MESSAGES, foreign_template, reads_messages
from aprfmt.tokenizer.turn_ends import find_unstopped_turn
from aprfmt.tokenizer.vocabulary import Vocabulary, vocabulary_from_metadata

if TYPE_CHECKING:
    from aprfmt.model import Model


def tokenizer_facts(model: "Model", quick: bool = False) -> Mapping[str, Any]:
    """Return {fact: value} that identify a tokenizer; {} without one.

    Equal for two formats of one model, key by key; facts that a format does not have are left out.
    `quick` (for `inspect`) gives the facts that need neither the tokens nor tokenizer.json, and the
    static scan of the chat template; its keys describe the file rather than the tokenizer.
    Raises FormatError or UnsupportedError if the tokenizer cannot be read.
    """
    carried = model.carried
    if not has_tokenizer(carried):
        return {}
    if quick:
        return _quick_facts(carried)
    if "facts" not in carried.cache:
        carried.cache["facts"] = token_facts(carried)
    return carried.cache["facts"]


def token_facts(carried: Carried) -> Mapping[str, Any]:
    """Return {fact: value} that need the vocabulary (digests, counts); {} without one."""
    # The vocabulary of tokenizer.json, else of the metadata's lists.
    data = carried.parse_tokenizer_json()
    vocabulary = (
        vocabulary_from_json(carried, data)
        if data is not None
        else vocabulary_from_metadata(carried)
    )
    if vocabulary is None:
        return {}
    # Digests of lists, so that formats can be compared without the lists.
    added = vocabulary.added
    found: dict[str, Any] = {
        "kind": vocabulary.kind,
        "vocab_size": len(vocabulary.tokens),
        "tokens_sha256": _list_sha256(vocabulary.tokens),
        "added_tokens": len(added),
        "added_tokens_sha256": _list_sha256(added),
        "add_bos": vocabulary.add_bos,
        "add_eos": vocabulary.add_eos,
    }
    # Facts that only some tokenizers have.
    pre = _pre_name(carried, vocabulary, data)
    if pre:
        found["pre"] = pre
    for role in ("bos", "eos", "pad"):
        if role in vocabulary.ids:
            found[f"{role}_id"] = vocabulary.ids[role]
    if vocabulary.merges is not None:
        found["merges"] = len(vocabulary.merges)
        found["merges_sha256"] = _list_sha256(vocabulary.merges)
    template = carried.chat_template()
    if template is not None:
        found["chat_template"] = _list_sha256([template])
    return found


def _pre_name(carried: Carried, vocabulary: Vocabulary, data: Mapping[str, Any] | None) -> str:
    """Return the `pre` name of a vocabulary; of names with equal rows in the table, the first.

    For byte-level BPE it is the name that splits text as the tokenizer.json `data` does, "" if no
    name does. Without `data`, and for other kinds, it is the vocabulary's own name.
    """
    name = vocabulary.pre
    if vocabulary.kind == "bpe" and data is not None:
        try:
            name = pre_name_of(data, carried.origin)
        except ConversionError:
            return ""
    row = PRE_TOKENIZERS.get(name)
    return next((other for other, like in PRE_TOKENIZERS.items() if like == row), name)


def _list_sha256(values: Sequence[Any]) -> str:
    """Return the SHA-256 in hex of a list, written as compact JSON."""
    text = json.dumps(list(values), ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _quick_facts(carried: Carried) -> dict[str, Any]:
    """Return the facts that are known without reading tokens: counts, flags, ids, and others.

    Others are the size, the language and the static scan of the chat template.
    """
    # Keys of the metadata, without their lists.
    found: dict[str, Any] = {}
    for name, value in (
        ("model", carried.metadata_value(MODEL)),
        ("pre", carried.metadata_value(PRE)),
        ("entries", carried.list_length(TOKENS)),
        ("merges", carried.list_length(MERGES)),
        *((name, carried.flag_value(name)) for name in FLAGS),
        ("tokenizer.json", carried.origin or None),
    ):
        if value is not None:
            found[name] = value
    found.update((f"{role}_id", i) for role, i in carried.token_ids().items())
    # Special tokens by text, where no ids are stored.
    if not any(name.endswith("_id") for name in found):
        found.update((f"{role}_token", text) for role, text in special_texts(carried).items())
    try:
        template = carried.chat_template()
    except FormatError as error:
        found["chat_template"] = f"unreadable: {error}"
        return found
    # The template: its size, its language, the static scan, and its turn end.
    if template is not None:
        found["chat_template"] = f"{len(template)} characters"
        foreign = foreign_template(template)
        if foreign is not None:
            found["chat_template_language"] = foreign.says
        elif not reads_messages(template):
            found["chat_template_unread"] = UNREAD_MESSAGES
        findings = scan_template(template)
        found["chat_template_scan"] = "; ".join(findings) or "nothing suspicious"
        try:
            unstopped = None if findings else find_unstopped_turn(carried, quick=True)
        except FormatError:
            unstopped = None  # lists that cannot be read: `validate` says which
        if unstopped is not None:
            found["turn_end"] = f"{unstopped.says}; {unstopped.remedy}"
    return found
