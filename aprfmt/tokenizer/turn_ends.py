"""Checks that a generation stops where the chat template ends a turn.

The token that the template writes after an answer is the one a chat model ends its answers
with. Where it is none of the ids that end a generation, the answer runs on into turns the model
makes up.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from aprfmt.errors import AprfmtError
from aprfmt.tokenizer.conversations import answer_end
from aprfmt.tokenizer.engine_defaults import default_ids
from aprfmt.tokenizer.hf_json import (
    configured_stop_ids,
    id_list,
    special_texts,
    transformers_stop_ids,
)
from aprfmt.tokenizer.keys import (
    CONTROL,
    END_TEXTS,
    GENERATION_CONFIG,
    MODEL,
    PRE,
    TOKENS,
    TYPES,
    USER_DEFINED,
)
from aprfmt.tokenizer.stored_parts import Carried
from aprfmt.tokenizer.vocabulary import collect_stop_ids

NOWHERE = "neither generation_config.json nor config.json states eos_token_id"


@dataclass(frozen=True)
class UnstoppedTurn:
    """A turn's last token that is no stop id: the token, the stop ids, and where these are set.

    `contradicted`: the tokenizer's own eos is that token, so that two files disagree. `config_ids`
    are the ids of config.json, if they lack it too: readers of that file alone stop at them.
    `ordinary` are those of both that are no token's, or a piece of ordinary text: they go when the
    end is set.
    `embedded`: the files are embedded in a container, where `aprfmt set` does not change them.
    """

    id: int
    text: str
    stops: tuple[int, ...]
    place: str
    contradicted: bool
    config_ids: tuple[int, ...] = ()
    embedded: bool = False
    ordinary: frozenset[int] = frozenset()

    @property
    def says(self) -> str:
        """A sentence that says which token ends turns, and at which ids a generation stops."""
        stops = ", ".join(map(str, self.stops))
        if self.place == NOWHERE:
            takes = f"takes its class's {stops}" if stops else "stops nowhere"
            return (
                f"{self.place}, and transformers {takes}; the chat template ends turns with "
                f"{self.text!r} ({self.id})"
            )
        return (
            f"the chat template ends turns with {self.text!r} ({self.id}), which is not in "
            f"{self.place} [{stops}]"
        )

    @property
    def remedy(self) -> str:
        """Which key to set to which ids, as a clause."""
        if self.place.startswith("tokenizer."):
            return f"set tokenizer.ggml.eot_token_id to {self.id}"
        if self.place == NOWHERE:
            return f"in generation_config.json, set eos_token_id to {self._with_end(self.stops)}"
        file, _, key = self.place.partition(": ")
        if key == "eos_token":
            return f"in {file}, set {key} to {self.text!r}"
        too = f", in config.json to {self._with_end(self.config_ids)}" if self.config_ids else ""
        return f"in {file}, set {key} to {self._with_end(self.stops)}{too}"

    def _with_end(self, ids: Iterable[int]) -> list[int]:
        """Return those of `ids` that may end a text, and the id of the turn's last token."""
        return sorted({*ids, self.id} - self.ordinary)

    @property
    def assignments(self) -> list[str]:
        """Each KEY=VALUE with which `aprfmt set` makes a generation stop at the end of a turn.

        [] where it cannot.
        """
        if self.embedded and not self.place.startswith("tokenizer."):
            return []
        found = [self._assignment]
        if self.config_ids:
            found.append(f"config.json:eos_token_id={self._with_end(self.config_ids)}")
        return found

    @property
    def _assignment(self) -> str:
        """The KEY=VALUE that adds the turn's last token to the stop ids that most readers take."""
        if self.place.startswith("tokenizer."):
            return f"tokenizer.ggml.eot_token_id={self.id}"
        file, _, key = (
            "config.json: eos_token_id" if self.place == NOWHERE else self.place
        ).partition(": ")
        if key == "eos_token":
            return f"{file}:{key}={self.text}"
        return f"{file}:{key}={self._with_end(self.stops)}"


def find_unstopped_turn(carried: Carried, *, quick: bool = False) -> UnstoppedTurn | None:
    """Return the token that ends a turn and the stop ids, if no stop id is that token; else None.

    None if there is no template, or the end of a turn is not a single token. With `quick`, a
    template that names a stop token is taken to be right and is not rendered. Raises FormatError
    for damaged files.
    """
    template, _ = carried.template_and_origin()
    if template is None:
        return None
    special = _read_special_tokens(carried)
    listed = special.listed
    if quick and listed and any(text in template for text in ("eos_token", *END_TEXTS)):
        return None
    tokens, roles = special.tokens, special.roles
    texts = {i: text for text, i in tokens.items()}
    stops, place = _stop_ids_of_readers(carried, tokens, roles, listed)
    if not stops and place != NOWHERE:
        return None
    named = {texts[i] for i in stops if i in texts}
    eos = roles.get("eos") in named and "eos_token" in template
    if quick and (eos or any(text in template for text in named)):
        return None
    end = _rendered_end(carried, special)
    if end is None or tokens[end] in stops:
        return None
    config_ids: list[int] = []
    if place.startswith(GENERATION_CONFIG):
        config_ids = id_list((carried.model.config or {}).get("eos_token_id"))
    return UnstoppedTurn(
        tokens[end],
        end,
        tuple(sorted(stops)),
        place,
        roles.get("eos") == end,
        () if tokens[end] in config_ids else tuple(config_ids),
        carried.model.folder is None,
        frozenset(i for i in (*stops, *config_ids) if i not in texts),
    )


def find_turn_end(carried: Carried) -> int | None:
    """Return the id of the token with which the chat template ends an answer; None without one.

    Raises FormatError for damaged files.
    """
    if carried.template_and_origin()[0] is None:
        return None
    special = _read_special_tokens(carried)
    end = _rendered_end(carried, special)
    return None if end is None else special.tokens[end]


@dataclass(frozen=True)
class _SpecialTokens:
    """Ids by text of the tokens that are split off whole, and texts by role such as eos.

    `listed`: whether they are of the metadata's lists.
    """

    tokens: Mapping[str, int]
    roles: Mapping[str, str]
    listed: bool


def _read_special_tokens(carried: Carried) -> _SpecialTokens:
    """Return the special tokens of a tokenizer, from the lists of a GGUF that has them."""
    listed = carried.model.key_style == "gguf" and bool(carried.list_length(TOKENS))
    tokens = _listed_control_ids(carried) if listed or not carried.origin else added_ids(carried)
    texts = {i: text for text, i in tokens.items()}
    roles = {role: texts[i] for role, i in carried.token_ids().items() if i in texts}
    return _SpecialTokens(tokens, roles if listed else special_texts(carried) or roles, listed)


def _rendered_end(carried: Carried, special: _SpecialTokens) -> str | None:
    """Return the text of the token that ends a rendered answer; None if there is none."""
    template, where = carried.template_and_origin()
    variables = {f"{role}_token": text for role, text in special.roles.items()}
    try:
        return None if template is None else answer_end(template, variables, special.tokens, where)
    except AprfmtError:
        return None  # the check of the template says it


def _stop_ids_of_readers(
    carried: Carried, tokens: Mapping[str, int], roles: Mapping[str, str], listed: bool
) -> tuple[frozenset[int], str]:
    """Return (ids at which the usual programs stop, the file and key that set them).

    `tokens` are ids by text, `roles` texts by role, `listed` whether lists of the metadata count.
    """
    if listed:
        pre, count = carried.text_value(PRE) or "", carried.list_length(TOKENS) or 0
        ids = {**default_ids(carried.text_value(MODEL) or "", pre, count), **carried.token_ids()}
        return collect_stop_ids(ids, tokens.get, frozenset()), "tokenizer.ggml.eos_token_id"
    stated = configured_stop_ids(carried)
    if stated:
        here = id_list(carried.parse_file(GENERATION_CONFIG).get("eos_token_id"))
        return stated, f"{GENERATION_CONFIG if here else 'config.json'}: eos_token_id"
    if carried.model.config is not None:
        return transformers_stop_ids(carried), NOWHERE
    eos = tokens.get(roles.get("eos", ""))
    return frozenset(() if eos is None else (eos,)), "tokenizer_config.json: eos_token"


def added_ids(carried: Carried) -> dict[str, int]:
    """Return {text: id} of the tokens that are split off a text whole.

    They are `added_tokens` of tokenizer.json, which is not parsed as a whole: its vocabulary may
    take a second. Those of tokenizer_config.json's added_tokens_decoder are included.
    """
    text = carried.tokenizer_json() or ""
    at = text.find('"added_tokens"')
    start = text.find("[", at) if at >= 0 else -1
    rows: list[Any] = []
    if start >= 0:
        try:
            rows = list(json.JSONDecoder().raw_decode(text, start)[0])
        except (ValueError, RecursionError):
            rows = []  # the check of the tokenizer says it
    decoder = carried.tokenizer_config.get("added_tokens_decoder")
    if isinstance(decoder, Mapping):
        rows += [
            {**row, "id": int(i)}
            for i, row in decoder.items()
            if isinstance(row, Mapping) and i.isascii() and i.isdecimal() and len(i) < 10
        ]
    found: dict[str, int] = {}
    for row in rows:
        content = row.get("content") if isinstance(row, Mapping) else None
        if isinstance(content, str) and content and type(row.get("id")) is int:
            found.setdefault(content, row["id"])
    return found


def _listed_control_ids(carried: Carried) -> dict[str, int]:
    """Return {text: id} of control and user-defined tokens in the metadata's lists."""
    tokens = carried.list_value(TOKENS, str) or []
    types = carried.list_value(TYPES, int)
    if types is None:
        return {text: i for i, text in enumerate(tokens) if text in END_TEXTS}
    return {
        text: i
        for i, (text, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (CONTROL, USER_DEFINED)
    }
