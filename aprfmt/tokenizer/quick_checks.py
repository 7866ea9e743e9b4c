"""Quick checks of a tokenizer for `inspect`, without reading all of it."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from aprfmt.errors import FormatError
from aprfmt.tokenizer.absent_keys import absent_ids
from aprfmt.tokenizer.engine_defaults import GGUF_MODELS, KIND_NAMES, SPELLED_KINDS, kind_of_pieces
from aprfmt.tokenizer.hf_json import post_processor_tokens
from aprfmt.tokenizer.keys import CONTROL, IDS, MODEL, NORMAL, TOKENS, TYPES, USER_DEFINED
from aprfmt.tokenizer.named_roles import find_misnamed
from aprfmt.tokenizer.stored_parts import Carried
from aprfmt.tokenizer.turn_ends import added_ids

_SEEN = 4096  # tokens read: the first are bytes and the commonest pieces
_MARK = re.compile(r"<\|[^|<>\s]{1,40}\|>")


def quick_warnings(carried: Carried) -> Iterator[str]:
    """Yield a sentence per problem of a tokenizer that can be seen without reading all of it.

    Of a GGUF: absent ids, ids of tokens with the names of other roles, wrong token types, a wrong
    kind. Of a tokenizer.json: wrong ids in its post-processor, and added tokens beyond the rows of
    the embedding.
    """
    try:
        if carried.list_length(TOKENS) and carried.model.key_style == "gguf":
            yield from (one.says for one in absent_ids(carried))
            yield from _list_warnings(carried)
        elif carried.origin:
            yield from _file_warnings(carried)
    except FormatError:
        return  # lists that cannot be read: `validate` says which


def _list_warnings(carried: Carried) -> Iterator[str]:
    """Yield a sentence for each contradiction among the lists of a GGUF's tokenizer.

    These are: no control token though the chat template writes one; a special id at a token that
    is named for another role; a kind of tokenizer that the pieces are not of.
    """
    tokens: Any = carried.metadata_value(TOKENS)
    kinds: Any = carried.metadata_value(TYPES)
    template = carried.chat_template() or ""
    mark = _MARK.search(template)
    has_control = kinds is not None and {CONTROL, USER_DEFINED} & set(kinds)
    if mark and not has_control:
        why = "is missing" if kinds is None else "has no control token"
        yield f"{TYPES.gguf} {why}, though the chat template writes {mark[0]!r}"
    stated = {model: kind for kind, model in GGUF_MODELS.items()}.get(
        carried.text_value(MODEL) or ""
    )
    sample = list(tokens[:_SEEN])
    if kinds is not None:
        ids = ((IDS[role].gguf, role, i) for role, i in carried.token_ids().items())
        yield from (one.says for one in find_misnamed(ids, sample, list(kinds[:_SEEN])))
    spelled = kind_of_pieces(sample, [NORMAL] * len(sample) if kinds is None else kinds[:_SEEN])
    if stated in SPELLED_KINDS and spelled and spelled != stated:
        yield (
            f"{MODEL.gguf} says {KIND_NAMES[stated]}, the pieces are those of {KIND_NAMES[spelled]}"
        )


def _file_warnings(carried: Carried) -> Iterator[str]:
    """Yield a sentence for a wrong id in the post-processor, or ids beyond the embedding."""
    added = added_ids(carried)
    for text, i in post_processor_tokens({"post_processor": _post_processor(carried)}):
        right = added.get(text)
        if right is not None and right != i:
            yield f"the post-processor puts {i} for {text!r}, which is {right}"
    rows = carried.vocab_size()
    beyond = [text for text, i in added.items() if rows is not None and i >= rows]
    if beyond and not all(PLACEHOLDER.search(text) for text in beyond):
        more = f" and {len(beyond) - 1} more" if len(beyond) > 1 else ""
        yield f"{beyond[0]!r}{more} have ids after the {rows} rows of the embedding"


# Tokens of images, sound and films, in whose place a tower's output is put: ids of these stand
# after the rows of a text model of the same family.
PLACEHOLDER = re.compile("image|audio|video|vision|img|soft_token", re.IGNORECASE)


def _post_processor(carried: Carried) -> Any:
    """Return the object post_processor of tokenizer.json, without parsing all of it.

    None if it is missing, null, not an object or cannot be parsed.
    """
    text = carried.tokenizer_json() or ""
    found_at = text.find('"post_processor"')
    start = text.find("{", found_at) if found_at >= 0 else -1
    if start < 0 or text[found_at + len('"post_processor"') : start].strip(" :\n\t\r"):
        return None
    try:
        found = json.JSONDecoder().raw_decode(text, start)[0]
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, Mapping) else None
