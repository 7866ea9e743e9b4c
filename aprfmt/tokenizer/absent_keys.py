"""GGUF tokenizer keys that are missing, and what llama.cpp does without them."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aprfmt.errors import AprfmtError
from aprfmt.formats import suffix_to_write
from aprfmt.tokenizer.conversations import answer_end
from aprfmt.tokenizer.engine_defaults import DEFAULTS, TAKEN_FOR_CONTROL, default_ids
from aprfmt.tokenizer.keys import (
    CONTROL,
    END_TEXTS,
    IDS,
    MERGES,
    MODEL,
    PRE,
    TOKENS,
    TYPES,
    UNKNOWN,
    USER_DEFINED,
)
from aprfmt.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from aprfmt.tokenizer.stored_parts import Carried


@dataclass(frozen=True, slots=True)
class AbsentKey:
    """A missing key: a sentence on what is used instead and its effect, and the repair."""

    key: str
    says: str
    todo: str
    level: Literal["fail", "warning"] = "fail"


def absent_ids(carried: Carried) -> list[AbsentKey]:
    """Return the missing special ids of a GGUF that llama.cpp replaces by a wrong default.

    A missing EOS always counts. BOS counts where it is put before a text, or the chat template
    writes it. A default that is a control token is no finding. Raises FormatError for lists that
    cannot be read.
    """
    if carried.model.key_style != "gguf" or not carried.list_length(TOKENS):
        return []
    stated = carried.token_ids()
    if {"bos", "eos"} <= stated.keys():
        return []
    model, pre = carried.text_value(MODEL) or "", carried.text_value(PRE) or ""
    tokens: Any = carried.metadata_value(TOKENS)
    defaults = default_ids(model, pre, len(tokens))
    found = []
    for role, effect in (("eos", "a generation ends there"), ("bos", "texts begin with it")):
        i = defaults.get(role)
        if role in stated or i is None or (role == "bos" and not _puts_bos(carried, model, pre)):
            continue
        token = str(tokens[i])
        if _is_control_like(carried, token, i):
            continue
        key = IDS[role].gguf
        wanted = _id_for_key(carried, role)
        found.append(
            AbsentKey(
                key,
                f"{key} is missing: llama.cpp takes {i} ({token!r}), and {effect}",
                set_command(carried, f"{key}={'ID' if wanted is None else wanted}"),
            )
        )
    return found


def set_command(carried: Carried, assignment: str) -> str:
    """Return the shell command that sets a key (KEY=VALUE: `assignment`) in a copy of the file."""
    path = Path(carried.where)
    fixed = shlex.quote(f"{path.stem}-fixed{suffix_to_write(path)}")
    return f"aprfmt set {shlex.quote(str(path))} {shlex.quote(assignment)} -o {fixed}"


def _puts_bos(carried: Carried, model: str, pre: str) -> bool:
    """Return whether BOS is put before a text, or written by the chat template.

    `model` and `pre` are the values of tokenizer.ggml.model and .pre.
    """
    flag = carried.flag_value("add_bos_token")
    row, split = DEFAULTS.get(model), PRE_TOKENIZERS.get(pre)
    default = bool(row and (row.add_bos or row.framed)) or bool(split and split.add_bos)
    return (default if flag is None else flag) or "bos_token" in (carried.chat_template() or "")


def _is_control_like(carried: Carried, token: str, i: int) -> bool:
    """Return whether the token of id `i` is a control token by its type.

    In a vocabulary without types its text decides. Unknown and user-defined tokens count too.
    """
    kinds: Any = carried.metadata_value(TYPES)
    if kinds is None:
        return token in TAKEN_FOR_CONTROL or (token.startswith("<") and token.endswith(">"))
    return kinds[i] in (CONTROL, UNKNOWN, USER_DEFINED)


def _id_for_key(carried: Carried, role: str) -> int | None:
    """Return the id that a missing key of BOS or EOS should have; None if unknown.

    It is what the chat template writes after an answer, or a token of a known text.
    """
    tokens = {str(text): i for i, text in enumerate(carried.list_value(TOKENS, str) or [])}
    if role == "bos":
        return next((tokens[t] for t in BOS_TEXTS if t in tokens), None)
    template, where = carried.template_and_origin()
    if template is not None:
        named = [text for text in tokens if text[:1] in ("<", "[") and text in template]
        try:
            end = answer_end(template, {}, named, where)
        except AprfmtError:
            end = None
        if end is not None and len(end) > 2:
            return tokens[end]
    return next((tokens[t] for t in END_TEXTS if t in tokens), None)


BOS_TEXTS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "<|bos|>", "[BOS]",
             "<|endoftext|>")  # fmt: skip


def absent_types(carried: Carried) -> AbsentKey | None:
    """Return the AbsentKey of the token types if llama.cpp cuts tokens without them; else None.

    None too if the file is no GGUF or has types. A byte-level token of several characters that no
    merge makes is only found if it is split off whole. Raises FormatError for lists that cannot be
    read.
    """
    if carried.model.key_style != "gguf" or carried.metadata_value(TYPES) is not None:
        return None
    tokens = carried.list_value(TOKENS, str) or []
    merges = carried.list_value(MERGES, str)
    if merges is None:
        lost = [t for t in tokens if (t.startswith("<|") and t.endswith("|>")) or t in BOS_TEXTS]
    else:
        made = {"".join(merge.split(" ", 1)) for merge in merges}
        lost = [token for token in tokens if len(token) > 1 and token not in made]
    lost = [token for token in lost if token not in TAKEN_FOR_CONTROL]
    if not lost:
        return None
    says = (
        f"{TYPES.gguf} is missing: llama.cpp takes every token for a normal one, so that "
        f"{len(lost)} are cut into pieces, the first {lost[0]!r}"
    )
    return AbsentKey(TYPES.gguf, says, "convert it again with token types")
