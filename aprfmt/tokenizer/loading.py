"""Builds the Tokenizer of a model from its files or metadata."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aprfmt.errors import AprfmtError, FormatError, UsageError
from aprfmt.tokenizer.base import Engine, Tokenizer
from aprfmt.tokenizer.build import tokenizer_json
from aprfmt.tokenizer.engine_defaults import DEFAULTS, default_ids
from aprfmt.tokenizer.hf_json import (
    config_added_tokens,
    configured_stop_ids,
    post_processor_ids,
    special_ids,
    special_texts,
)
from aprfmt.tokenizer.isolated import engine_of_data, engine_of_text
from aprfmt.tokenizer.keys import HF_JSON, MODEL, PRE, TOKENIZER_JSON, TOKENS
from aprfmt.tokenizer.spm import SpmEngine
from aprfmt.tokenizer.stored_parts import Carried
from aprfmt.tokenizer.template import render
from aprfmt.tokenizer.vocabulary import Vocabulary, collect_stop_ids, vocabulary_from_metadata

if TYPE_CHECKING:
    from aprfmt.model import Model


def load_tokenizer(model: "Model") -> Tokenizer:
    """Return the tokenizer of a model: from its tokenizer.json, else from its vocabulary.

    Raises FormatError if the model has no tokenizer or a damaged one, UnsupportedError for an
    unknown pre-tokenizer or kind.
    """
    carried = model.carried
    text = carried.tokenizer_json()
    if text is not None:
        return _tokenizer_from_text(carried, text)
    vocabulary = vocabulary_from_metadata(carried)
    if vocabulary is None:
        looked = f"{TOKENIZER_JSON}, {HF_JSON}, {carried.key_text(TOKENS).rpartition(': ')[2]}"
        others = ", ".join(carried.unread_files())
        found = f"; found {others}, which transformers can save as {TOKENIZER_JSON}" * bool(others)
        raise FormatError(
            f"{carried.where}: carries no tokenizer; looked for {looked}{found}; "
            "put tokenizer.json next to the weights, or give token ids"
        )
    return _tokenizer_from_vocabulary(carried, vocabulary)


def render_messages(
    model: "Model", messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
) -> str | None:
    """Return the messages rendered by the chat template; needs no working tokenizer.

    With `add_generation_prompt` the text ends where the answer begins. Special tokens are those
    named by tokenizer_config.json, else the metadata's ids. None without a template. Raises
    FormatError and UsageError as `template.render` does.
    """
    carried = model.carried
    template, where = carried.template_and_origin()
    if template is None:
        return None
    texts = special_texts(carried) or _metadata_special_texts(carried)
    return render(
        template,
        messages,
        add_generation_prompt=add_generation_prompt,
        variables={f"{role}_token": text for role, text in texts.items()},
        where=where,
    )


def _metadata_special_texts(carried: Carried) -> dict[str, str]:
    """Return {role: text} of the special ids in the metadata.

    {} where the metadata has no list of tokens.
    """
    tokens = carried.metadata_value(TOKENS)
    if not isinstance(tokens, Sequence) or isinstance(tokens, str):
        return {}
    ids = {role: i for role, i in carried.token_ids().items() if i < len(tokens)}
    return {role: tokens[i] for role, i in ids.items() if isinstance(tokens[i], str)}


def try_load_tokenizer(model: "Model") -> Tokenizer | None:
    """Return the model's tokenizer, None where it has none that can be read."""
    try:
        return model.tokenizer
    except AprfmtError:
        return None


def refuse_other_tokens(model: "Model", other: "Model", ids: Iterable[int]) -> None:
    """Raise UsageError where vocabulary sizes differ, or one of `ids` is another token in `other`.

    Tokens are compared only where both models have a tokenizer.
    """
    sizes = [int(each.hyper["vocab_size"]) for each in (model, other)]
    if sizes[0] != sizes[1]:
        raise UsageError(
            f"{other.path}: {sizes[1]} tokens in the vocabulary, {model.path} has {sizes[0]}; "
            "distributions over different tokens cannot be compared"
        )
    mine, theirs = try_load_tokenizer(model), try_load_tokenizer(other)
    if mine is None or theirs is None:
        return
    for i in sorted(set(ids)):
        if mine.token(i) != theirs.token(i):
            raise UsageError(
                f"{other.path}: token {i} is {theirs.token(i)!r}, in {model.path} "
                f"{mine.token(i)!r}; their ids mean other things"
            )


def metadata_stop_ids(model: "Model") -> frozenset[int]:
    """Return the ids that end a text by metadata and configuration; needs no tokenizer.

    Raises FormatError if a value is not a token id.
    """
    carried = model.carried
    defaults: Mapping[str, int] = {}
    if carried.model.key_style == "gguf" and not carried.origin:
        pre, count = carried.text_value(PRE) or "", carried.list_length(TOKENS) or 0
        defaults = default_ids(carried.text_value(MODEL) or "", pre, count)
    return _stop_ids(carried, {**defaults, **carried.token_ids()}, lambda text: None)


def _stop_ids(
    carried: Carried, ids: Mapping[str, int], control: Callable[[str], int | None]
) -> frozenset[int]:
    """Return the ids at which the usual programs for this format end a generation.

    transformers stops at the configured ids and no others. llama.cpp stops at those of the
    metadata and at known control tokens, to which aprfmt adds what an embedded configuration says.
    `control` returns the id of a control token by its text, or None.
    """
    stated = configured_stop_ids(carried)
    if stated and carried.model.key_style != "gguf":
        return stated
    return collect_stop_ids(ids, control, stated)


def _tokenizer_from_text(carried: Carried, text: str) -> Tokenizer:
    """Return the Tokenizer of a tokenizer.json's text, with the tokens that its config adds."""
    engine = engine_of_text(text, carried.origin)
    engine.add_tokens(config_added_tokens(carried, engine.added_token_flags()))
    ids = {r: i for r, i in special_ids(carried, engine.id_of).items() if engine.token(i)}
    texts = special_texts(carried) or {role: engine.token(i) or "" for role, i in ids.items()}
    return _make_tokenizer(
        carried, engine, carried.origin, ids, texts, _metadata_frame(carried, engine, ids)
    )


def _metadata_frame(
    carried: Carried, engine: Engine, ids: Mapping[str, int]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return (ids before, ids after a text) by the flags of the metadata; or None.

    None where the post-processor adds the same. The flags are those of bos and eos, or of the roles
    that the vocabulary's kind puts around every text.
    """
    row = DEFAULTS.get(carried.text_value(MODEL) or "")
    framed = row.framed if row is not None and carried.model.key_style == "gguf" else None
    roles = framed or ("bos", "eos")
    flags = [carried.flag_value(f"add_{role}_token") for role in roles]
    if flags == [None, None]:
        return None
    added = engine.encode("", True, True)
    text = carried.parse_tokenizer_json() if added else None
    own = post_processor_ids(text or {})
    frame: list[tuple[int, ...]] = []
    for role, flag, found in zip(roles, flags, own, strict=True):
        i = ids.get(role)
        if flag and i is not None and i not in (added if framed is None else found):
            found = (*found, i) if frame else (i, *found)
        elif flag is False:
            found = () if framed is not None else tuple(each for each in found if each != i)
        frame.append(found)
    return None if (frame[0], frame[1]) == own else (frame[0], frame[1])


def _tokenizer_from_vocabulary(carried: Carried, vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of the metadata's lists."""
    engine = engine_of_lists(vocabulary, carried.where)
    used = (
        "scores"
        if isinstance(engine, SpmEngine)
        else f"merges, pre-tokenizer {vocabulary.pre or 'none'}"
    )
    origin = f"{carried.key_text(TOKENS)} ({carried.text_value(MODEL) or vocabulary.kind}, {used})"
    texts = special_texts(carried) or {r: vocabulary.tokens[i] for r, i in vocabulary.ids.items()}
    ids = vocabulary.engine_ids
    frame = tuple(
        (ids[role],) if wanted and role in ids else ()
        for role, wanted in (("bos", vocabulary.add_bos), ("eos", vocabulary.add_eos))
    )
    return _make_tokenizer(
        carried, engine, origin, vocabulary.ids, texts, (frame[0], frame[1]), ends=ids
    )


def engine_of_lists(vocabulary: Vocabulary, where: str) -> Engine:
    """Return the engine that encodes with the vocabulary lists of a file's metadata.

    Raises FormatError for damaged lists, UnsupportedError for an unknown pre-tokenizer or kind.
    """
    if vocabulary.kind == "spm" and vocabulary.merges is None:
        return SpmEngine(vocabulary, where)
    return engine_of_data(tokenizer_json(vocabulary, where), where)


def _make_tokenizer(
    carried: Carried,
    engine: Engine,
    origin: str,
    ids: Mapping[str, int],
    texts: Mapping[str, str],
    frame: tuple[tuple[int, ...], tuple[int, ...]] | None,
    *,
    ends: Mapping[str, int] | None = None,
) -> Tokenizer:
    """Return the Tokenizer around an engine, with special ids, stop ids and chat template.

    `ids` and `texts` are those of special tokens by role. `frame` are the ids before and after a
    text, None to leave that to the engine. `ends` are the ids by role that stop a generation, None
    for `ids`.
    """

    def control_id(text: str) -> int | None:
        """Return the id of the control token with this text; None if there is none."""
        i = engine.id_of(text)
        return i if i is not None and engine.is_control(i) else None

    template, template_origin = carried.template_and_origin()
    return Tokenizer(
        engine,
        origin,
        dict(ids),
        _stop_ids(carried, ids if ends is None else ends, control_id),
        template,
        {f"{role}_token": text for role, text in texts.items()},
        frame,
        template_origin,
    )
