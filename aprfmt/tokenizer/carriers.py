"""Writes the tokenizer in the keys and files of a target format.

A *piece* is the text of one token.

Every target gets the verbatim tokenizer.json if there is one, and the format's own keys, so that
other readers of the format understand it too.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aprfmt.base.protocols import TypedValue, Value
from aprfmt.errors import ConversionError, FormatError, UnsupportedError
from aprfmt.model.carried_files import json_object
from aprfmt.tokenizer import keys
from aprfmt.tokenizer.build import is_blank_run, tokenizer_json
from aprfmt.tokenizer.hf_json import configured_stop_ids, post_processor_ids, vocabulary_from_json
from aprfmt.tokenizer.pre_tokenizers import pre_name_of
from aprfmt.tokenizer.stored_parts import DEFAULT_TEMPLATE, Carried, templates_by_name
from aprfmt.tokenizer.vocabulary import (
    BLANK,
    NO_VOCABULARY,
    Vocabulary,
    collect_stop_ids,
    pad_vocabulary,
    vocabulary_from_metadata,
)

if TYPE_CHECKING:
    from aprfmt.model import Model

_PREFIX = "tokenizer."
_MODEL_NAMES: Mapping[str, str] = {"bpe": "gpt2", "spm": "llama", "wordpiece": "bert"}
_SPM_PRE = "default"  # what llama.cpp's converter writes for a SentencePiece vocabulary
_ADDED_SCORE = -1000.0  # likewise, for tokens that merging does not make
_BY_GGUF: Mapping[str, keys.Key] = {key.gguf: key for key in keys.KEYS}


def has_tokenizer(carried: Carried) -> bool:
    """Return whether a model has a tokenizer, without parsing anything."""
    if carried.origin:
        return True
    return (
        bool(carried.list_length(keys.TOKENS))
        and carried.metadata_value(keys.MODEL) not in NO_VOCABULARY
    )


Rowless = Callable[[Mapping[int, str]], None]  # called with tokens that lists leave out, if any


# --- GGUF -----------------------------------------------------------------------------------


def to_gguf(model: "Model", told: Rowless | None = None) -> dict[str, Value | TypedValue]:
    """Return the `tokenizer.*` keys of a GGUF, with their types; {} without a tokenizer.

    `told` is called with {id: token} of tokens without a row of the embedding: they are left out.

    The keys of a GGUF are kept unchanged, also after a conversion to APR. Raises ConversionError
    if GGUF cannot express the tokenizer, FormatError if it is damaged.
    """
    carried = model.carried
    if model.key_style == "gguf":
        return {key: value for key, value in model.typed.items() if key.startswith(_PREFIX)}
    recorded = _gguf_keys_from_apr(carried)
    if recorded or not has_tokenizer(carried):
        return recorded
    data = carried.parse_tokenizer_json()
    found: dict[str, Value | TypedValue] = {}
    if data is not None:
        vocabulary = _vocabulary_of(carried, data, told)
        found.update(_gguf_vocabulary(carried, vocabulary, data))
        found[keys.HF_JSON] = carried.tokenizer_json()
    else:
        listed = vocabulary_from_metadata(carried)
        assert listed is not None
        found.update(_gguf_vocabulary(carried, listed, None))
    template = carried.chat_template()
    if template is not None:
        found[keys.CHAT_TEMPLATE] = template
    named = _named_template_keys(carried)
    if named:
        found.update(named)
        names = [key.rpartition(".")[2] for key in named]
        found[keys.CHAT_TEMPLATES] = TypedValue(names, "array:string")
    return found


def _named_template_keys(carried: Carried) -> dict[str, str]:
    """Return {key: text} of the chat templates besides the default one."""
    named = carried.named_templates()
    return {f"{keys.CHAT_TEMPLATE}.{name}": text for name, text in named.items()}


def _gguf_vocabulary(
    carried: Carried, vocabulary: Vocabulary, data: Mapping[str, Any] | None
) -> dict[str, Value | TypedValue]:
    """Return the GGUF keys of a vocabulary that did not come from a GGUF.

    `data` is the parsed tokenizer.json, None where there is none. Raises ConversionError for a kind
    of tokenizer that GGUF cannot store.
    """
    if vocabulary.kind not in _MODEL_NAMES:
        raise ConversionError(
            f"{carried.origin or carried.where}: a tokenizer of kind {vocabulary.kind[:40]!r}; "
            "GGUF from this package holds byte-level BPE, SentencePiece BPE and WordPiece"
        )
    # Fillers make as many tokens as the embedding has rows.
    size = max(carried.vocab_size() or 0, len(vocabulary.tokens))
    tokens, types = pad_vocabulary(vocabulary, size)
    found: dict[str, Value | TypedValue] = {keys.MODEL.gguf: _MODEL_NAMES[vocabulary.kind]}
    # What each kind of vocabulary needs besides tokens and types.
    if vocabulary.kind == "spm":
        scores = vocabulary.scores or scores_from_merges(vocabulary)
        found[keys.PRE.gguf] = _SPM_PRE
        found[keys.SCORES.gguf] = TypedValue(
            [*scores, *[_ADDED_SCORE] * (size - len(scores))], keys.SCORES.type
        )
        found[keys.FLAGS["add_space_prefix"].gguf] = vocabulary.add_space_prefix
        tokens = [
            token.replace(BLANK, " ") if kind == keys.USER_DEFINED else token
            for token, kind in zip(tokens, types, strict=True)
        ]
    elif vocabulary.kind == "wordpiece":
        found[keys.PRE.gguf] = _SPM_PRE
        found.update(_frame_keys(data))
        tokens = [_wordpiece_as_llama_cpp(token) for token in tokens]
    else:
        found[keys.PRE.gguf] = vocabulary.pre or _pre_name_of(carried, data)
        found[keys.MERGES.gguf] = TypedValue(list(vocabulary.merges or ()), keys.MERGES.type)
    # The keys that all kinds share.
    found[keys.TOKENS.gguf] = TypedValue(tokens, keys.TOKENS.type)
    found[keys.TYPES.gguf] = TypedValue(types, keys.TYPES.type)
    found.update(
        {
            key: TypedValue(value, _BY_GGUF[key].type)
            for key, value in _special_id_keys(carried, vocabulary)
        }
    )
    if vocabulary.kind != "wordpiece":  # always framed by [CLS] and [SEP]
        found[keys.FLAGS["add_bos_token"].gguf] = vocabulary.add_bos
        found[keys.FLAGS["add_eos_token"].gguf] = vocabulary.add_eos
    return found


def _frame_keys(data: Mapping[str, Any] | None) -> dict[str, Value | TypedValue]:
    """Return the GGUF keys of the one id before and the one after every text: bos; eos and sep.

    They are the post-processor's in the tokenizer.json `data`. No key is given for the beginning or
    the end if no id, or several, stand there.
    """
    found: dict[str, Value | TypedValue] = {}
    for roles, ids in zip((("bos",), ("eos", "sep")), post_processor_ids(data or {}), strict=True):
        for role in roles if len(ids) == 1 else ():
            found[keys.IDS[role].gguf] = TypedValue(next(iter(ids)), keys.IDS[role].type)
    return found


def _wordpiece_as_llama_cpp(token: str) -> str:
    """Return a WordPiece token as llama.cpp's converter spells it: U+2581 begins a word."""
    if token.startswith("[") and token.endswith("]"):
        return token
    return token.removeprefix("##") if token.startswith("##") else BLANK + token


def _pre_name_of(carried: Carried, data: Mapping[str, Any] | None) -> str:
    """Return the `tokenizer.ggml.pre` name of a byte-level tokenizer.

    `data` is the parsed tokenizer.json. Raises ConversionError without one, or if no name fits it.
    """
    if data is None:
        raise ConversionError(
            f"{carried.key_text(keys.PRE)}: missing; GGUF readers refuse a vocabulary that does "
            "not say how its text is split; set it, or give the original tokenizer.json"
        )
    return pre_name_of(data, carried.origin)


def _special_id_keys(carried: Carried, vocabulary: Vocabulary) -> list[tuple[str, int]]:
    """Return (GGUF key, id) of special tokens; a second stop token becomes eot."""
    ids = dict(vocabulary.ids)
    others = sorted(configured_stop_ids(carried) - {ids.get("eos"), ids.get("eom"), ids.get("eot")})
    if others and others[0] < len(vocabulary.tokens):
        ids.setdefault("eot", others[0])
    return [(keys.IDS[role].gguf, ids[role]) for role in keys.IDS if role in ids]


def scores_from_merges(vocabulary: Vocabulary) -> list[float]:
    """Return a SentencePiece score per token, so that pieces join in the order of the merges.

    A piece gets minus the rank of its best merge; pieces that no merge makes come last, in id
    order.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(vocabulary.merges or ()):
        ranks.setdefault("".join(merge.split(" ", 1)), rank)
    after = len(ranks)
    scores = []
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        plain = kind == keys.NORMAL or (kind == keys.USER_DEFINED and is_blank_run(token))
        score = -float(ranks.get(token, after + i)) if plain else _ADDED_SCORE
        scores.append(0.0 if kind == keys.BYTE else score)
    return scores


# --- APR ------------------------------------------------------------------------------------


def to_apr(model: "Model", told: Rowless | None = None) -> dict[str, Value]:
    """Return the `tokenizer.*` keys and chat template of an APR; {} without a tokenizer.

    `told` is called with {id: token} of tokens without a row of the embedding: they are left out.
    Raises FormatError for a damaged tokenizer.
    """
    carried = model.carried
    if model.key_style == "apr":
        kept = (_PREFIX, keys.APR_CHAT_TEMPLATE, "special_tokens", keys.APR_GGUF)
        return {key: value for key, value in model.metadata.items() if key.startswith(kept)}
    has_gguf_keys = model.key_style == "gguf" and any(
        key.startswith(_PREFIX) for key in model.metadata
    )
    if not has_gguf_keys and not has_tokenizer(carried):
        return {}
    found = _apr_keys_from_gguf(model) if has_gguf_keys else _apr_keys_from_json(carried, told)
    template = carried.chat_template()
    if template is not None:
        found[keys.CHAT_TEMPLATE] = found[keys.APR_CHAT_TEMPLATE] = template
    return {**found, **_named_template_keys(carried)}


def _apr_keys_from_gguf(model: "Model") -> dict[str, Value]:
    """Return a GGUF's tokenizer keys under APR's names, with a record to convert them back."""
    found: dict[str, Value] = {}
    recorded: dict[str, list[Value]] = {}
    for key, value in model.metadata.items():
        if not key.startswith(_PREFIX):
            continue
        row = _BY_GGUF.get(key)
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        as_json = list(value) if is_list else value
        if row is not None:
            found[row.apr] = as_json
        recorded[key] = [model.source.types.get(key, ""), None if row is not None else as_json]
    tokens = found.get(keys.TOKENS.apr)
    if isinstance(tokens, list):
        found["tokenizer.vocab_size"] = len(tokens)
    found[keys.APR_GGUF] = json.dumps(recorded, ensure_ascii=True, separators=(",", ":"))
    return found


def _gguf_keys_from_apr(carried: Carried) -> dict[str, Value | TypedValue]:
    """Return the GGUF keys that an APR was made from, with current values; {} for others.

    Raises FormatError for a damaged record of them.
    """
    text = carried.model.metadata.get(keys.APR_GGUF)
    if carried.model.key_style != "apr" or not isinstance(text, str):
        return {}
    from aprfmt.formats.bounded_json import loads

    where = f"{carried.where}: {keys.APR_GGUF}"
    rows = loads(text, where, max_bytes=256 << 20, nonfinite=True, surrogates=True)
    found: dict[str, Value | TypedValue] = {}
    for key, row in rows.items() if isinstance(rows, Mapping) else ():
        if not isinstance(row, list) or len(row) != 2 or not isinstance(row[0], str):
            raise FormatError(f"{where}: {key!r} is not [type, value]; it is damaged")
        type_name, value = row
        known = _BY_GGUF.get(key)
        if known is not None:
            value = carried.model.metadata.get(known.apr)
        if value is not None:
            found[key] = TypedValue(value, type_name) if type_name else value
    return found


def _vocabulary_of(carried: Carried, data: Mapping[str, Any], told: Rowless | None) -> Vocabulary:
    """Return the vocabulary of a tokenizer.json; `told` is called with its tokens without a row."""
    found = vocabulary_from_json(carried, data)
    if found.rowless and told is not None:
        told(found.rowless)
    return found


def _apr_keys_from_json(carried: Carried, told: Rowless | None) -> dict[str, Value]:
    """Return the APR keys of a tokenizer that is given by a tokenizer.json."""
    # The vocabulary itself.
    data = carried.parse_tokenizer_json()
    assert data is not None
    vocabulary = _vocabulary_of(carried, data, told)
    found: dict[str, Value] = {
        keys.TOKENS.apr: list(vocabulary.tokens),
        "tokenizer.vocab_size": len(vocabulary.tokens),
        keys.TYPES.apr: list(vocabulary.types),
        "tokenizer.model_type": str(data["model"].get("type") or vocabulary.kind),
    }
    # What the kind needs: model name, merges, scores, flags.
    if vocabulary.kind in _MODEL_NAMES:
        found[keys.MODEL.apr] = _MODEL_NAMES[vocabulary.kind]
    if vocabulary.merges is not None:
        found[keys.MERGES.apr] = list(vocabulary.merges)
    if vocabulary.kind == "spm":
        found[keys.SCORES.apr] = list(vocabulary.scores or scores_from_merges(vocabulary))
        found[keys.FLAGS["add_space_prefix"].apr] = vocabulary.add_space_prefix
    elif vocabulary.kind == "bpe":
        try:
            found[keys.PRE.apr] = pre_name_of(data, carried.origin)
        except ConversionError:
            pass  # optional in APR: the verbatim tokenizer.json says it
    found.update((_BY_GGUF[key].apr, i) for key, i in _special_id_keys(carried, vocabulary))
    found[keys.FLAGS["add_bos_token"].apr] = vocabulary.add_bos
    found[keys.FLAGS["add_eos_token"].apr] = vocabulary.add_eos
    # Special tokens by text, and the file verbatim.
    names = {role: vocabulary.tokens[i] for role, i in vocabulary.ids.items()}
    roles = ("bos", "eos", "unk", "pad")
    found["special_tokens"] = {f"{role}_token": names.get(role) for role in roles}
    found[keys.HF_JSON] = carried.tokenizer_json()
    return found


# --- Hugging Face ---------------------------------------------------------------------------


def to_hf(model: "Model") -> dict[str, str]:
    """Return {file name: text} of a Hugging Face folder's tokenizer; {} without one.

    Existing files are returned verbatim. Without them, tokenizer.json is built, and a
    tokenizer_config.json with which AutoTokenizer loads it. Raises UnsupportedError for an
    unknown pre-tokenizer or kind.
    """
    carried = model.carried
    if not has_tokenizer(carried):
        return {}
    # The files that exist, and tokenizer.json: verbatim or built.
    found = {name: text for name, text in carried.files.items() if name != "config.json"}
    text = carried.tokenizer_json()
    lists = (
        None
        if text is not None and "tokenizer_config.json" in found
        else _vocabulary_of_lists(carried)
    )
    if text is not None:
        found[keys.TOKENIZER_JSON] = text
    else:
        assert lists is not None
        data = tokenizer_json(lists, carried.where)
        found[keys.TOKENIZER_JSON] = json.dumps(data, ensure_ascii=False) + "\n"
    if lists is not None:  # a tokenizer.json does not say which tokens begin and end a text
        found.setdefault("tokenizer_config.json", _tokenizer_config(lists))
        stops = sorted(vocabulary_stop_ids(carried, lists))
        if len(stops) > 1 and not configured_stop_ids(carried):
            found[keys.GENERATION_CONFIG] = json.dumps({"eos_token_id": stops}, indent=2) + "\n"
    # A template that no file has yet gets its own.
    template = carried.chat_template()
    file = keys.TEMPLATE_FILE
    if template is not None and (
        file in found or carried.tokenizer_config.get("chat_template") != template
    ):
        found[file] = template
    add_named_templates(found, carried)
    return found


def add_named_templates(found: dict[str, str], carried: Carried) -> None:
    """Add the chat templates that have names to the texts of a folder, in place.

    They become the list of tokenizer_config.json, with the default one. transformers reads it only
    where the folder has no chat_template.jinja, so that this file is left out.
    """
    named = dict(carried.named_templates())
    file = "tokenizer_config.json"
    config = json_object(found.get(file, "{}"), f"{carried.where}: {file}")
    stored = config.get("chat_template")
    listed = templates_by_name(stored) if isinstance(stored, (list, Mapping)) else {}
    taken = carried.chat_template()
    every = named if taken is None else {DEFAULT_TEMPLATE: taken, **named}
    if not named or (keys.TEMPLATE_FILE not in found and listed == every):
        return
    config["chat_template"] = [{"name": name, "template": every[name]} for name in every]
    found[file] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    found.pop(keys.TEMPLATE_FILE, None)


def _vocabulary_of_lists(carried: Carried) -> Vocabulary | None:
    """Return the vocabulary of the metadata's lists; None if there are none.

    None too for lists of an unsupported kind where there is a tokenizer.json; else that raises
    UnsupportedError.
    """
    try:
        return vocabulary_from_metadata(carried)
    except UnsupportedError:
        if carried.tokenizer_json() is None:
            raise
        return None


def vocabulary_stop_ids(carried: Carried, vocabulary: Vocabulary) -> frozenset[int]:
    """Return the ids at which a generation ends, for a vocabulary that metadata lists give."""
    control = {
        vocabulary.tokens[i]: i for i, kind in enumerate(vocabulary.types) if kind == keys.CONTROL
    }
    return collect_stop_ids(vocabulary.ids, control.get, configured_stop_ids(carried))


def _tokenizer_config(vocabulary: Vocabulary) -> str:
    """Return the text of a tokenizer_config.json for a built tokenizer.json."""
    roles = ("bos", "eos", "unk", "sep", "pad", "mask")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role in roles:
        if role in vocabulary.ids:
            config[f"{role}_token"] = vocabulary.tokens[vocabulary.ids[role]]
    return json.dumps(config, ensure_ascii=False, indent=2) + "\n"
