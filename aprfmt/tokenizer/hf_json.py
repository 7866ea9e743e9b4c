"""Reads tokenizer.json and the files next to it into a Vocabulary, without `tokenizers`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from aprfmt.errors import FormatError
from aprfmt.tokenizer.keys import (
    BYTE,
    CONTROL,
    GENERATION_CONFIG,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
)
from aprfmt.tokenizer.pre_tokenizers import flatten_steps
from aprfmt.tokenizer.stored_parts import MAX_TOKENS, Carried
from aprfmt.tokenizer.vocabulary import BLANK, BYTE_TOKEN, Vocabulary, filler_text

ROLES = ("bos", "eos", "unk", "sep", "pad", "mask")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MAX_HOLES = 1 << 20  # ids without a token that are filled in


def vocabulary_from_json(carried: Carried, data: Mapping[str, Any]) -> Vocabulary:
    """Return the Vocabulary of a parsed tokenizer.json and of the files next to it.

    Raises FormatError if the file is not one that `tokenizers` writes.
    """
    where = carried.origin
    # The vocabulary, with the added tokens over it.
    model = data.get("model")
    if not isinstance(model, Mapping):
        raise FormatError(f"{where}: has no object `model`; it is not a tokenizer.json")
    kind = _vocabulary_kind(data, model)
    vocab, scores = stored_vocab(model, where)
    added = effective_added_tokens(data, carried, vocab)
    by_id = {i: token for token, i in vocab.items()}
    by_id.update((token["id"], token["content"]) for token in added)
    # Fillers beyond the configured vocabulary are cut off.
    size = _checked_size(by_id, where)
    limit = carried.vocab_size()
    if limit is not None:
        size = min(size, limit)
    # Token types: bytes, normal ones, the unknown token, then added tokens.
    types = [UNUSED] * size
    for token, i in vocab.items():
        if i < size:
            types[i] = BYTE if kind == "spm" and BYTE_TOKEN.fullmatch(token) else NORMAL
    unk = model.get("unk_token")
    if isinstance(unk, str) and vocab.get(unk, size) < size:
        types[vocab[unk]] = UNKNOWN
    for row in added:
        if row["id"] < size:
            types[row["id"]] = CONTROL if row["special"] else USER_DEFINED
    # Whether bos and eos are put around a text, by the post-processor.
    begins, ends = post_processor_ids(data)
    texts = {token: i for i, token in by_id.items()}
    ids = {role: i for role, i in special_ids(carried, texts.get).items() if i < size}
    return Vocabulary(
        kind,
        [by_id.get(i) or filler_text(i) for i in range(size)],
        types,
        _merge_lines(model, where),
        scores,
        "",
        ids,
        ids.get("bos") in begins,
        ids.get("eos") in ends,
        kind == "spm" and _prepends_blank(data),
        rowless={i: by_id[i] for i in sorted(i for i in by_id if i >= size)},
    )


def _vocabulary_kind(data: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Return the vocabulary's kind: "bpe", "spm", "unigram", "wordpiece" or another type."""
    name = model.get("type")
    if name is None:  # files from before the tag
        vocab = model.get("vocab")
        name = "BPE" if "merges" in model else "Unigram" if isinstance(vocab, list) else "WordPiece"
    if name == "BPE" and _spells_blanks(data):
        return "spm"
    return str(name).lower()


def _spells_blanks(data: Mapping[str, Any]) -> bool:
    """Return whether spaces become U+2581 before merging, as in SentencePiece."""
    for step in flatten_steps(data.get("normalizer"), "normalizers"):
        if step.get("type") == "Replace" and step.get("content") == BLANK:
            return True
    steps = flatten_steps(data.get("pre_tokenizer"), "pretokenizers")
    return any(step.get("type") == "Metaspace" for step in steps)


def _prepends_blank(data: Mapping[str, Any]) -> bool:
    """Return whether the normalizer or pre-tokenizer puts a blank before the text."""
    for step in flatten_steps(data.get("normalizer"), "normalizers"):
        if step.get("type") == "Prepend" and step.get("prepend") == BLANK:
            return True
    for step in flatten_steps(data.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never") and bool(
                step.get("add_prefix_space", True)
            )
    return False


def stored_vocab(model: Mapping[str, Any], where: str) -> tuple[dict[str, int], list[float] | None]:
    """Return ({token: id}, scores); scores are None unless it is a Unigram model.

    `model` is the object of that key. Raises FormatError for a damaged vocabulary.
    """
    vocab = model.get("vocab")
    if isinstance(vocab, Mapping):
        for token, i in vocab.items():
            if type(i) is not int or not 0 <= i < MAX_TOKENS:
                raise FormatError(f"{where}: token {token!r} has the id {i!r}; it is damaged")
        return dict(vocab), None
    if isinstance(vocab, list):
        pairs = [row for row in vocab if isinstance(row, list) and len(row) == 2]
        if len(pairs) == len(vocab) and all(
            type(row[0]) is str and type(row[1]) in (int, float) for row in pairs
        ):
            return {row[0]: i for i, row in enumerate(pairs)}, [float(row[1]) for row in pairs]
    raise FormatError(f"{where}: model.vocab is neither tokens with ids nor a list; it is damaged")


def _checked_size(by_id: Mapping[int, str], where: str) -> int:
    """Return the highest id plus one; FormatError where too many ids have no token."""
    size = max(by_id, default=-1) + 1
    if size - len(by_id) > _MAX_HOLES:
        raise FormatError(
            f"{where}: ids go up to {size - 1} for {len(by_id)} tokens; it is damaged"
        )
    return size


def _merge_lines(model: Mapping[str, Any], where: str) -> list[str] | None:
    """Return merges as `"left right"`, None without any; FormatError for invalid ones.

    A space inside a piece is spelled as byte-level BPE does.
    """
    merges = model.get("merges")
    if merges is None:
        return None
    if not isinstance(merges, list):
        raise FormatError(f"{where}: model.merges is {type(merges).__name__}; expected a list")
    if all(type(merge) is str for merge in merges):
        return list(merges)
    try:
        return [f"{a.replace(' ', 'Ġ')} {b.replace(' ', 'Ġ')}" for a, b in merges]
    except (AttributeError, TypeError, ValueError):
        raise FormatError(
            f"{where}: model.merges has an entry that is not a pair; it is damaged"
        ) from None


def effective_added_tokens(
    data: Mapping[str, Any], carried: Carried, vocab: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Return {content, id, flags} of the tokens split off whole, in id order.

    `data` is the parsed tokenizer.json, `carried` has the files next to it, `vocab` is {token: id}.
    These are tokenizer.json's own, and those that transformers adds from tokenizer_config.json:
    `added_tokens_decoder` (its flags win) and special tokens named there that are not yet added.
    Raises FormatError where the list or the id of a token is damaged.
    """
    found: dict[str, dict[str, Any]] = {}
    rows = data.get("added_tokens") or []
    if not isinstance(rows, list):
        raise FormatError(f"{carried.origin}: added_tokens is not a list; it is damaged")
    for row in rows:
        token = _added_token(row, carried.origin)
        if type(row.get("id")) is not int or not 0 <= row["id"] < MAX_TOKENS:
            raise FormatError(f"{carried.origin}: an added token has the id {row.get('id')!r}")
        found[token["content"]] = {**token, "id": row["id"]}
    for extra in config_added_tokens(carried, found):
        known = found.get(extra["content"], {}).get("id", vocab.get(extra["content"]))
        if known is None:
            last = max((token["id"] for token in found.values()), default=-1)
            known = max(last, max(vocab.values(), default=-1)) + 1
        found[extra["content"]] = {**extra, "id": known}
    return sorted(found.values(), key=lambda token: int(token["id"]))


def config_added_tokens(
    carried: Carried, known: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield {content, flags} of each token that tokenizer_config.json adds or changes.

    `known` is {content: flags} of the tokens that are there already.
    """
    config = carried.tokenizer_config
    seen = {content: {flag: bool(row[flag]) for flag in FLAGS} for content, row in known.items()}
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        for i in sorted(decoder, key=lambda i: (len(i), i)):
            token = _added_token(decoder[i], f"{carried.where}: tokenizer_config.json")
            flags = {flag: token[flag] for flag in FLAGS}
            if seen.get(token["content"]) != flags:
                seen[token["content"]] = flags
                yield token
    for content in (*special_texts(carried).values(), *_extra_special_texts(config)):
        if content not in seen:
            token = _added_token({"content": content, "special": True, "normalized": False}, "")
            seen[content] = {flag: token[flag] for flag in FLAGS}
            yield token


def _added_token(row: Any, where: str) -> dict[str, Any]:
    """Return {content, flags} of a row, with defaults for missing flags; FormatError if damaged."""
    if not isinstance(row, Mapping) or not isinstance(row.get("content"), str):
        raise FormatError(f"{where}: an added token has no content; it is damaged")
    token: dict[str, Any] = {"content": row["content"]}
    defaults = {"normalized": not row.get("special", False)}
    token.update({flag: bool(row.get(flag, defaults.get(flag, False))) for flag in FLAGS})
    return token


def _token_content(value: Any) -> str | None:
    """Return the text of a token given as a string or an object; None for anything else."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def special_texts(carried: Carried) -> dict[str, str]:
    """Return {role: text} of special tokens, such as {"bos": "<s>"}.

    They are read from tokenizer_config.json first, then from special_tokens_map.json.
    """
    found: dict[str, str] = {}
    for source in (carried.tokenizer_config, carried.parse_file("special_tokens_map.json")):
        for role in ROLES:
            text = _token_content(source.get(f"{role}_token"))
            if text is not None:
                found.setdefault(role, text)
    return found


def token_statements(carried: Carried) -> dict[str, tuple[str | None, str]]:
    """Return {role: (text, "FILE: KEY")} of the special tokens that files state, `cls` included.

    The text is None where a file states that there is none: null, or an empty text, which has no
    id. A role that no file names is left out. special_tokens_map.json comes first, as transformers
    reads them (5.23, tried); its null states nothing.
    """
    found: dict[str, tuple[str | None, str]] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        source = carried.parse_file(name)
        for role in (*ROLES, "cls"):
            key = f"{role}_token"
            first = name == "tokenizer_config.json"
            if key in source and (first or source[key] is not None):
                found[role] = _token_content(source[key]), f"{name}: {key}"
    return found


def _extra_special_texts(config: Mapping[str, Any]) -> list[str]:
    """Return the texts of additional special tokens in tokenizer_config.json.

    [] if it lists none.
    """
    found = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    values = found.values() if isinstance(found, Mapping) else found
    if not isinstance(values, Sequence) and not isinstance(found, Mapping):
        return []
    return [text for text in map(_token_content, values) if text is not None]


def special_ids(carried: Carried, id_of: Callable[[str], int | None]) -> dict[str, int]:
    """Return {role: id} of special tokens, from metadata, special texts or config.json.

    The first of these that has a role counts. `id_of` returns the id of a token's text.
    """
    found = carried.token_ids()
    for role, text in special_texts(carried).items():
        i = id_of(text)
        if i is not None:
            found.setdefault(role, i)
    config = carried.model.config or {}
    for source in (config, config.get("text_config")):
        for role in ("bos", "eos", "pad"):
            value = source.get(f"{role}_token_id") if isinstance(source, Mapping) else None
            value = value[0] if isinstance(value, list) and value else value
            if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
                found.setdefault(role, value)
    return found


def configured_stop_ids(carried: Carried) -> frozenset[int]:
    """Return the eos ids of the first file that has some; empty if none does.

    generation_config.json comes before config.json, as in transformers: generate() stops at its
    ids and no others.
    """
    config = carried.model.config or {}
    for source in (carried.parse_file(GENERATION_CONFIG), config, config.get("text_config")):
        found = id_list(source.get("eos_token_id") if isinstance(source, Mapping) else None)
        if found:
            return frozenset(found)
    return frozenset()


def transformers_stop_ids(carried: Carried) -> frozenset[int]:
    """Return the ids at which transformers ends a generation; empty if it never stops.

    Where no file gives one, and config.json has no such key, the default of the model's class.
    """
    stated = configured_stop_ids(carried)
    config = carried.model.config or {}
    text = config.get("text_config")
    configs = [source for source in (config, text) if isinstance(source, Mapping)]
    # The file replaces what config.json has (transformers 5.23, tried), unless made of it.
    said = carried.parse_file(GENERATION_CONFIG)
    if said and not said.get("_from_model_config") and not id_list(said.get("eos_token_id")):
        return frozenset()
    if stated or any("eos_token_id" in source for source in configs):
        return stated
    if GENERATION_CONFIG in carried.files:  # it replaces what the configuration has
        return frozenset()
    from aprfmt.tokenizer.engine_defaults import CLASS_EOS

    types = [source.get("model_type") for source in reversed(configs)]
    names = [name for name in types if isinstance(name, str)]
    return next((CLASS_EOS[name] for name in names if name in CLASS_EOS), frozenset())


def configured_ids(config: Mapping[str, Any], key: str) -> tuple[list[int], str]:
    """Return (ids of a key such as eos_token_id, "config.json: KEY"); text_config comes second."""
    text = config.get("text_config")
    ids, inner = id_list(config.get(key)), id_list(_get_item(text, key))
    nested = "text_config." if inner and not ids else ""
    return ids or inner, f"config.json: {nested}{key}"


def id_list(value: Any) -> list[int]:
    """Return the token ids in a key's value, which may be one id or a list."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if type(i) is int and i >= 0]


def _get_item(value: Any, key: Any) -> Any:
    """Return value[key] if `value` is a mapping that has it, else None."""
    return value.get(key) if isinstance(value, Mapping) and isinstance(key, str) else None


def post_processor_ids(data: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (ids before a text, ids after it) that the post-processor adds, in order.

    `data` is a parsed tokenizer.json. A later processor of a sequence puts its own around what the
    earlier ones made; a second TemplateProcessing does nothing (tokenizers 0.23, tried).
    """
    before: list[int] = []
    after: list[int] = []
    templated = False
    for step in flatten_steps(data.get("post_processor"), "processors"):
        sides: tuple[list[int], list[int]] = ([], [])
        single = step.get("single")
        if isinstance(single, list) and not templated:
            templated = True
            place = 0
            for piece in single:
                if not isinstance(piece, Mapping) or "SpecialToken" not in piece:
                    place = 1
                    continue
                sides[place].extend(_special_token_ids(step, piece))
        for key, side in zip(("cls", "sep"), sides, strict=True):  # Bert and Roberta: [text, id]
            one = _id_of_pair(step.get(key))
            side += [] if one is None else [one]
        before[:0] = sides[0]
        after += sides[1]
    return tuple(before), tuple(after)


Pieces = tuple[str | int, ...]


def post_processor_pieces(data: Mapping[str, Any]) -> tuple[Pieces, Pieces]:
    """Return what the post-processor makes of (one text, a pair of texts), as ids and text names.

    The texts are called "A" and "B": the result is ("A",) and ("A", "B") where nothing is put
    around them. Sources: TemplateProcessing, BertProcessing and RobertaProcessing of the tokenizers
    library.
    """
    for step in flatten_steps(data.get("post_processor"), "processors"):
        if isinstance(step.get("single"), list):
            return _template_pieces(step, "single"), _template_pieces(step, "pair")
        cls, sep = (_id_of_pair(step.get(key)) for key in ("cls", "sep"))
        if cls is not None and sep is not None:
            between = (sep, sep) if step.get("type") == "RobertaProcessing" else (sep,)
            return (cls, "A", sep), (cls, "A", *between, "B", sep)
    return ("A",), ("A", "B")


def segment_numbers(data: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the token types that the post-processor gives to (one text, a pair of texts).

    They are of the parts, in the order of `post_processor_pieces`. Each becomes a row of the table
    of token types, in models that have one. Sources: type_id of TemplateProcessing; BertProcessing
    gives 1 to the second text, RobertaProcessing 0 to both.
    """
    for step in flatten_steps(data.get("post_processor"), "processors"):
        if isinstance(step.get("single"), list):
            return _template_segments(step, "single"), _template_segments(step, "pair")
        if _id_of_pair(step.get("cls")) is not None and _id_of_pair(step.get("sep")) is not None:
            roberta = step.get("type") == "RobertaProcessing"
            return (0, 0, 0), (0,) * 6 if roberta else (0, 0, 0, 1, 1)
    return (0,), (0, 1)  # what the library does without one


def _template_segments(step: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return the token type of each part of a TemplateProcessing; `name` is "single" or "pair"."""
    rows = step.get(name)
    entries = [
        _get_item(_get_item(row, key), "type_id")
        for row in (rows if isinstance(rows, list) else [])
        for key in ("SpecialToken", "Sequence")
        if _get_item(row, key) is not None
    ]
    return tuple(i if type(i) is int else 0 for i in entries)


def _id_of_pair(value: Any) -> int | None:
    """Return the id of [text, id]; None for anything else."""
    pair = value if isinstance(value, list) and len(value) == 2 else (None, None)
    return pair[1] if type(pair[1]) is int else None


def _template_pieces(step: Mapping[str, Any], name: str) -> Pieces:
    """Return what a TemplateProcessing makes: ids of special tokens, and the texts' names.

    `name` is "single" or "pair".
    """
    found: list[str | int] = []
    rows = step.get(name)
    for piece in rows if isinstance(rows, list) else []:
        text = _get_item(_get_item(piece, "Sequence"), "id")
        if isinstance(text, str):
            found.append(text)
        found += _special_token_ids(step, piece)
    return tuple(found)


def _special_token_ids(step: Mapping[str, Any], piece: Any) -> list[int]:
    """Return the ids that an entry of a TemplateProcessing stands for; [] if it is no token."""
    token = _get_item(_get_item(piece, "SpecialToken"), "id")
    ids = _get_item(_get_item(step.get("special_tokens"), token), "ids")
    return [i for i in ids if type(i) is int] if isinstance(ids, list) else []


def post_processor_tokens(data: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return every (token's text, id) in the post-processor, each once, in order."""
    found: dict[tuple[str, int], None] = {}
    for step in flatten_steps(data.get("post_processor"), "processors"):
        entries = step.get("special_tokens")
        for entry in entries.values() if isinstance(entries, Mapping) else ():
            texts, ids = _get_item(entry, "tokens"), _get_item(entry, "ids")
            if isinstance(texts, list) and isinstance(ids, list):
                pairs = zip(texts, ids, strict=False)
                found.update({(t, i): None for t, i in pairs if type(t) is str and type(i) is int})
        for key in ("cls", "sep"):
            value = step.get(key)
            if isinstance(value, list) and len(value) == 2:
                text, i = value
                if type(text) is str and type(i) is int:
                    found[text, i] = None
    return list(found)
