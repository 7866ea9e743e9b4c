"""Differences of special ids, of BOS and EOS, of the chat template and of how text is generated.

A *side* is the tokenizer of model A or of model B; `other` is that of the other model. A *role* is
what a special token is for, such as bos.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from aprfmt.base.text_escape import shorten
from aprfmt.causes.row import Cause
from aprfmt.causes.tokenizer.file_places import part_place
from aprfmt.causes.tokenizer.vocabulary_lists import TokenizerDifference, value_text
from aprfmt.errors import AprfmtError, ArchError
from aprfmt.tokenizer.generation import (
    ID_KEYS,
    differing_settings,
    generation_settings,
    has_file,
    has_keys_alone,
    same_setting,
)
from aprfmt.tokenizer.hf_json import (
    configured_ids,
    id_list,
    post_processor_pieces,
    token_statements,
)
from aprfmt.tokenizer.keys import (
    END_ROLES,
    END_TEXTS,
    FLAGS,
    GENERATION,
    GENERATION_CONFIG,
    GENERATION_KEYS,
    IDS,
    STATED_ELSEWHERE,
)
from aprfmt.tokenizer.stored_tokenizer import (
    FrameIds,
    StatedTokenizer,
    frame_roles,
    same_frame,
    stale_post_processor_ids,
)
from aprfmt.tokenizer.template_language import UNREAD_MESSAGES, foreign_template, reads_messages

if TYPE_CHECKING:
    from aprfmt.measure.findings import Finding
    from aprfmt.model import Model

# Names of the differences that decide where a generation ends.
ENDS = ("eos_id", "config.eos_token_id", "chat_template", "generation_config")


def keep_training_command(b: "Model", finding: "Finding", pair: str) -> str:
    """Return the command for a tokenizer setting that B, trained further than A, chose for itself.

    It is the `diff` that shows the setting, since A's value would undo the training: a training
    sets anew on purpose where a chat's turn ends. Where B's chat template ends turns with a token
    at which no generation stops, it is the `set` command that makes one stop there. "" for what B
    lost, and where A's end is that of B's template. `pair` are A and B as quoted arguments.
    """
    ((name, values), *_) = (*finding.values.items(), ("", {}))
    if values.get("b") is None:
        return ""
    seen = f"aprfmt diff {pair} --only tokenizer"
    if name not in ENDS:
        return seen
    from aprfmt.tokenizer.turn_ends import find_turn_end, find_unstopped_turn

    try:
        open_turn, end = find_unstopped_turn(b.carried), find_turn_end(b.carried)
    except AprfmtError:
        return seen
    if open_turn is not None:
        from aprfmt.measure.named_causes import set_command

        words = [shlex.quote(one) for one in open_turn.assignments]
        return set_command(b.path, words) if words else seen
    return "" if end is not None and values.get("a") == end != values["b"] else seen


CAUSE_ROWS = (
    Cause(
        "special_ids", "identity", "bug",
        "BOS, EOS, PAD or another special id differs: texts begin otherwise, or generation ends "
        "elsewhere or not at all.",
        "Ids by role, from the lists, tokenizer_config.json and config.json; where a GGUF states "
        "none, the one that llama.cpp takes.",
        trained_command=keep_training_command,
    ),
    Cause(
        "add_bos", "identity", "bug",
        "BOS is put before a text on one side only; where the chat template writes it too, it "
        "stands there twice.",
        "`add_bos_token`, its default, or the post-processor.",
        trained_command=keep_training_command,
    ),
    Cause(
        "add_eos", "identity", "bug",
        "EOS is put after a text on one side only.",
        "`add_eos_token`, or the post-processor.",
        trained_command=keep_training_command,
    ),
    Cause(
        "frame", "identity", "bug",
        "Other ids are put around a text: another token's id, one of them twice, or one that is "
        "neither BOS nor EOS lost.",
        "The ids that the post-processor or the lists put before and after a text, in their "
        "order; two spellings of the same ids are no difference. Also a text that a template puts "
        "twice or drops, and what stands between two texts.",
        trained_command=keep_training_command,
    ),
    Cause(
        "segments", "identity", "bug",
        "The texts of a pair get other token types, so that other rows of the table of token types "
        "are added.",
        "`type_id` in the post-processor of both tokenizer.json, of a model with more than one "
        "token type.",
        trained_command=keep_training_command,
    ),
    Cause(
        "chat_template", "identity", "bug",
        "The chat template differs, is cut, or is missing.",
        "Conversations rendered by both: with and without a system message, several turns, with "
        "and without a prompt to answer.",
        trained_command=keep_training_command,
    ),
    Cause(
        "generation_config", "identity", "bug",
        "generation_config.json states other end ids or other sampling, or nothing states an end: "
        "a generation ends elsewhere, or never.",
        "Values in effect: a default written out is no difference.",
        trained_command=keep_training_command,
    ),
)  # fmt: skip

_READ_OF_GGUF = ("bos", "eos", "pad", "unk")  # roles whose keys transformers reads of a GGUF
# Those that a greedy generation does not read.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")


def special_id_differences(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield one difference for each special id that differs or is missing on one side."""
    dropped = list(dropped_token_differences(a, b))
    yield from dropped
    said = {row.parts[0] for row in dropped}
    for role in IDS:
        if f"role:{role}" in said:
            continue
        x, y = (_effective_id(side, other, role) for side, other in ((a, b), (b, a)))
        unstated = _lacks_stated_id(a, b, role)
        if x == y and not unstated:
            continue
        lost = (x is None or y is None) and not unstated
        if lost and (_is_rowless(a, b, x) or _is_rowless(b, a, y)):
            continue  # both files state it: the rows of the embedding differ
        if x is not None and y is not None and _same_text_moved(a, b, x, y):
            continue
        if lost and not (role in END_ROLES and _ends_elsewhere(a, b, {x, y} - {None}, role)):
            if not (role == "bos" and (a.adds_bos or b.adds_bos)):
                continue
        if lost and role == "eos" and _is_frame_of_encoder(a, b, {x, y} - {None}):
            continue
        if lost and role == "bos" and _is_put_by_both(a, b, {x, y} - {None}):
            continue
        shown = [_role_text(side, role, i) for side, i in ((a, x), (b, y))]
        yield TokenizerDifference(
            f"{role}_id",
            "special_ids",
            (f"role:{role}",),
            (*part_place(b, f"role:{role}"), *part_place(a, f"role:{role}")),
            f"{role} is {shown[0]} in A, {shown[1]} in B{_effect_of_default(b, role, y)}"
            + f"; {unstated}" * bool(unstated),
            x,
            y,
            mend=_mending_assignment(a, b, role, x),
        )


def _is_rowless(side: StatedTokenizer, other: StatedTokenizer, i: int | None) -> bool:
    """Return whether a side's token `i` is the other's, too, which has no embedding row for it."""
    tokens = side.vocabulary.tokens
    return i is not None and i < len(tokens) and other.vocabulary.rowless.get(i) == tokens[i]


def _lacks_stated_id(a: StatedTokenizer, b: StatedTokenizer, role: str) -> str:
    """Return a clause that transformers has no such token on the side that lacks its id; "" else.

    `role` is the token's, such as "bos". Of a GGUF transformers reads the key alone (5.23,
    tried), whatever id llama.cpp uses without it. Of a folder that is compared with a GGUF, the
    files must state that there is no such token, and config.json no id. "" for tokenizers of
    different kinds.
    """
    if role not in _READ_OF_GGUF or a.vocabulary.kind != b.vocabulary.kind:
        return ""
    ids = [side.vocabulary.ids.get(role, _id_without_token(side, role)) for side in (a, b)]
    if (ids[0] is None) == (ids[1] is None):
        return ""
    if a.uses_lists != b.uses_lists:
        folder, own = (b, ids[1]) if a.uses_lists else (a, ids[0])
        stated = token_statements(folder.carried).get(role)
        if own is not None or stated is None or stated[0] is not None:
            return ""
    elif not a.uses_lists or a.carried.model.key_style != b.carried.model.key_style:
        return ""
    return f"transformers has no {role} token in {'A' if ids[0] is None else 'B'}"


def dropped_token_differences(
    a: StatedTokenizer, b: StatedTokenizer
) -> Iterator[TokenizerDifference]:
    """Yield a difference for each special token that the files of one of two folders lack.

    An empty text or null is no token, whatever id config.json has for it, though a generation may
    end as before. Where neither folder names the role, programs use the tokenizer class's
    default, if any. Yields nothing where a side is a GGUF, or a file that embeds no file that
    could name the token.
    """
    if a.uses_lists or b.uses_lists:
        return
    left, right = token_statements(a.carried), token_statements(b.carried)
    if any(
        not found and side.carried.model.folder is None for side, found in ((a, left), (b, right))
    ):
        return
    for role in dict.fromkeys((*left, *right)):
        x, y = (found.get(role, (None, ""))[0] for found in (left, right))
        if (x is None) == (y is None):
            continue
        key = f"tokenizer_config.json: {role}_token"
        places = [found.get(role, (None, key))[1] for found in (right, left)]
        shown = [_statement_text(side, found, role) for side, found in ((a, left), (b, right))]
        value = "null" if x is None and role in left else x
        yield TokenizerDifference(
            f"{role}_id",
            "special_ids",
            (f"role:{role}",),
            tuple(dict.fromkeys(places)),
            f"{role} is {shown[0]} in A, {shown[1]} in B",
            x,
            y,
            mend=(f"{places[0].replace(': ', ':')}={value}",)
            if value is not None and places[0] == key
            else (),
        )


def _statement_text(
    side: StatedTokenizer, found: Mapping[str, tuple[str | None, str]], role: str
) -> str:
    """Return in words what a folder's files state for a special token's role.

    `found` is {role: (text or None, file and key)}.
    """
    if role not in found:
        return "not stated, so that its class decides"
    text, place = found[role]
    if text is not None:
        tokens = side.vocabulary.tokens
        i = next((i for i, token in enumerate(tokens) if token == text), len(tokens))
        return f"{value_text(text)} (no token)" if i == len(tokens) else _token_text(side, i)
    name, _, key = place.partition(": ")
    stored = side.carried.parse_file(name).get(key)
    return f"{'null' if stored is None else value_text(stored)}, which is no token and has no id"


def _ends_elsewhere(
    a: StatedTokenizer, b: StatedTokenizer, ids: AbstractSet[int | None], role: str
) -> bool:
    """Return whether one of these ids ends a generation on one side only.

    False for an end of turn that a GGUF states by a key and its readers also find by its text,
    where the other format has no such key.
    """
    ends = ids & (a.stop_ids ^ b.stop_ids)
    if role != "eos" and a.uses_lists != b.uses_lists:
        tokens = (a if a.uses_lists else b).vocabulary.tokens
        ends = {i for i in ends if i is not None and set(tokens[i : i + 1]).isdisjoint(END_TEXTS)}
    return bool(ends)


def _is_frame_of_encoder(
    a: StatedTokenizer, b: StatedTokenizer, ids: AbstractSet[int | None]
) -> bool:
    """Return whether a side puts these ids after every text and the model generates no text.

    Writers of GGUF name the [SEP] of an encoder eos, which its Hugging Face files do not state.
    Where the other side puts other ids, that is a difference of its own.
    """
    try:
        generates = any(side.carried.model.spec.block.head != "none" for side in (a, b))
    except ArchError:
        return False
    return not generates and ids <= {*a.frame[1], *b.frame[1]}


def _is_put_by_both(a: StatedTokenizer, b: StatedTokenizer, ids: AbstractSet[int | None]) -> bool:
    """Return whether both sides put these ids before a text, and no chat template writes BOS.

    A post-processor puts them whether or not another file names one of them bos.
    """
    written = any("bos_token" in (side.template or "") for side in (a, b))
    return a.frame[0] == b.frame[0] and ids <= set(a.frame[0]) and not written


def _effective_id(side: StatedTokenizer, other: StatedTokenizer, role: str) -> int | None:
    """Return the id that programs use for a special token's role, or None.

    For a GGUF that states none it is llama.cpp's default, if that default has an effect: an end
    always has, BOS where it is put before a text or the chat template writes it. None where the
    other side has no id either.
    """
    i = side.vocabulary.ids.get(role, _id_without_token(side, role))
    stated = role not in side.vocabulary.engine_defaults
    if stated or role not in other.vocabulary.engine_ids:
        return i if stated else side.vocabulary.ids.get(role)
    if role == "bos" and not (side.adds_bos or "bos_token" in (side.template or "")):
        return i
    return side.vocabulary.engine_defaults[role] if role in ("bos", "eos") else i


def _id_without_token(side: StatedTokenizer, role: str) -> int | None:
    """Return the id that a GGUF states for a role although it has no such token; None otherwise."""
    stated = side.carried.token_ids() if side.uses_lists else {}
    i = stated.get(role)
    return i if i is not None and i >= len(side.vocabulary.tokens) else None


def _effect_of_default(side: StatedTokenizer, role: str, i: int | None) -> str:
    """Return a clause on what llama.cpp's default id `i`, used where B has none, does; else ""."""
    if i is None or role not in side.vocabulary.engine_defaults:
        return ""
    return "; a generation ends there" if role == "eos" else "; texts begin with it"


def _mending_assignment(
    a: StatedTokenizer, b: StatedTokenizer, role: str, wanted: int | None
) -> tuple[str, ...]:
    """Return the KEY=VALUE texts for `aprfmt set` that give B A's id, `wanted`; () for none.

    A folder states the token's text, and its id again in config.json where that differs.
    """
    model = b.carried.model
    if wanted is None:
        return ()
    if b.uses_lists:
        return (f"{IDS[role].gguf}={wanted}",) if model.key_style == "gguf" else ()
    token = b.vocabulary.tokens[wanted : wanted + 1]
    if a.uses_lists or model.folder is None or token != a.vocabulary.tokens[wanted : wanted + 1]:
        return ()
    found = [f"tokenizer_config.json:{role}_token={token[0]}"] if token else []
    key = f"{role}_token_id"
    own, theirs = ((side.carried.model.config or {}).get(key) for side in (a, b))
    if found and own is not None and theirs is not None and id_list(own) != id_list(theirs):
        found.append(f"config.json:{key}={json.dumps(own)}")
    return tuple(found)


def _same_text_moved(a: StatedTokenizer, b: StatedTokenizer, x: int, y: int) -> bool:
    """Return whether both sides' role has the same text and only the text's id differs.

    `x` and `y` are the ids in A and B. Folders give roles as texts, so a moved text is reported
    as a difference of the tokens. False with a GGUF on either side.
    """
    ours, theirs = a.vocabulary.tokens, b.vocabulary.tokens
    if a.uses_lists or b.uses_lists or x >= len(ours) or y >= len(theirs) or ours[x] != theirs[y]:
        return False
    return ours[y : y + 1] != [ours[x]] and theirs[x : x + 1] != [ours[x]]


def _role_text(side: StatedTokenizer, role: str, i: int | None) -> str:
    """Return in words the special id `i` of a role on one side, or llama.cpp's default for None."""
    if i is None:
        return "not stated"
    if i == side.vocabulary.engine_defaults.get(role):
        return f"not stated, and llama.cpp takes {_token_text(side, i)}"
    return _token_text(side, i)


def _token_text(side: StatedTokenizer, i: int) -> str:
    """Return an id with its text, or a remark that it has no token."""
    tokens = side.vocabulary.tokens
    return f"{i} ({shorten(tokens[i], 30)})" if i < len(tokens) else f"{i} (no token)"


def config_id_differences(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the ids that only the config.json files state differently, not the other files.

    A difference without effect is marked so: an eos where both sides stop at the same ids and B's
    are among them, or an id that one config.json lacks while another file of its folder states
    it.
    """
    configs = [side.carried.model.config for side in (a, b)]
    if a.uses_lists or b.uses_lists or None in configs:
        return  # a file that was made of a GGUF has no config.json
    for role in ("bos", "eos", "pad"):
        key = f"{role}_token_id"
        (x, place), (y, own_place) = (configured_ids(config or {}, key) for config in configs)
        if x == y:
            continue
        others = [_ids_outside_config(side, role) for side in (a, b)]
        alone = not x or not y
        shown = [_listed_text(ids) for ids in (x, y)]
        says = f"{key} of config.json is {shown[0]} in A, {shown[1]} in B"
        if alone:
            taken = [
                next(iter(o.values()), frozenset(c)) for o, c in zip(others, (x, y), strict=True)
            ]
            still = taken[0] == taken[1]
            # What other files state otherwise, and where a generation ends, is named for itself.
            named = others[0] != others[1] and not still
            if named or (role == "eos" and a.stop_ids != b.stop_ids):
                continue
            files = ", ".join(others[0 if y else 1])
            says += f"{STATED_ELSEWHERE}{files}" if still else "; no other file states it"
        elif a.vocabulary.ids.get(role) != b.vocabulary.ids.get(role):
            continue
        else:
            still = role == "eos" and a.stop_ids == b.stop_ids and {*y} <= b.stop_ids
        yield TokenizerDifference(
            f"config.{key}",
            "special_ids",
            (f"config:{role}",),
            (own_place if y else place,),
            says,
            shown[0] if x else None,
            shown[1] if y else None,
            still=still,
            told=still and alone,
            mend=(f"{place.replace(': ', ':')}={shown[0]}",) if x else (),
        )


def _ids_outside_config(side: StatedTokenizer, role: str) -> dict[str, frozenset[int]]:
    """Return {file: ids} that files other than config.json state for a special token.

    `role` is what the token is for, such as "bos".
    """
    said = id_list(side.carried.parse_file(GENERATION_CONFIG).get(f"{role}_token_id"))
    found = {GENERATION_CONFIG: frozenset(said)} if said else {}
    text, place = token_statements(side.carried).get(role, (None, ""))
    tokens = side.vocabulary.tokens
    i = next((i for i, token in enumerate(tokens) if token == text), None)
    if i is not None:
        found[place.partition(": ")[0]] = frozenset({i})
    return found


def _listed_text(ids: Sequence[int]) -> str:
    """Return ids as JSON, one without brackets; "not stated" for none."""
    return json.dumps(ids[0] if len(ids) == 1 else list(ids)) if ids else "not stated"


def framing_differences(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the differences of the ids put before a text and after it, such as BOS and EOS."""
    rows = (("begins", "add_bos", "bos", 0), ("ends", "add_eos", "eos", 1))
    for part, cause, role, at in rows:
        if same_frame(a, b, at):
            continue
        left, right = (frame_roles(side)[at] for side in (a, b))
        # More than BOS or EOS alone differs.
        if {left, right} != {(role,), ()}:
            yield _frame_difference(a, b, part, at)
            continue
        x, y = bool(left), bool(right)
        says = f"{role} is {'put' if x else 'not put'} {'before' if at == 0 else 'after'} a text "
        says += f"in A, {'put' if y else 'not put'} in B"
        for label, side, puts in (("A", a, x), ("B", b, y)):
            if at == 0 and puts and "bos_token" in (side.template or ""):
                says += f"; {label}'s chat template writes it too, so that it stands there twice"
        ids = [side.vocabulary.ids.get(role) for side in (a, b)]
        parts = (part, "pair", f"role:{role}") if None in ids else (part, "pair")
        key = FLAGS[f"add_{role}_token"].gguf
        says += _defaults_text(a, b, f"add_{role}_token")
        mend = (
            (f"{key}={json.dumps(x)}",)
            if b.uses_lists and b.carried.model.key_style == "gguf"
            else ()
        )
        yield TokenizerDifference(
            cause, cause, parts, (*part_place(b, part), *part_place(a, part)), says, x, y, mend=mend
        )


def processed_text_differences(
    a: StatedTokenizer, b: StatedTokenizer
) -> Iterator[TokenizerDifference]:
    """Yield the differences of post-processors in how they arrange one text or a pair of texts.

    These are a text that comes twice or not at all, and the ids between two texts, which only
    models that judge pairs are given. The ids put around one text are left to
    `framing_differences`.
    """
    rows: list[tuple[str, str, FrameIds, FrameIds]] = []
    if a.text_names != b.text_names:
        rows.append(("text", "a text", a.text_names, b.text_names))
    elif a.pair is not None and b.pair is not None and a.pair != b.pair:
        if a.post_processor_ids == b.post_processor_ids:
            rows.append(("pair", "two texts", a.pair, b.pair))
    for part, what, x, y in rows:
        says = f"{what} {'becomes' if part == 'text' else 'become'} {_pieces_text(a, x)} in A, "
        says += f"{_pieces_text(b, y)} in B"
        place = ("tokenizer.json: post_processor",)
        still = part == "pair" and not (a.judges_pairs or b.judges_pairs)
        yield TokenizerDifference(
            part, "frame", (part,), place, says, _value(x), _value(y), still=still
        )


def segment_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the token types that the parts of a text, or of two, get.

    Nothing where the parts themselves differ, or a side's model has one token type at most.
    """
    if a.segments is None or b.segments is None or a.pair != b.pair:
        return
    for at, what in ((1, "two texts"), (0, "a text")):
        x, y = a.segments[at], b.segments[at]
        if x == y:
            continue
        parts = _pieces_text(b, post_processor_pieces(b.data or {})[at])
        yield TokenizerDifference(
            "segments",
            "segments",
            ("segments",),
            ("tokenizer.json: post_processor",),
            f"the parts of {what} ({parts}) get the token types {_value(x)} in A, {_value(y)} in B",
            _value(x),
            _value(y),
        )
        return


def _pieces_text(side: StatedTokenizer, pieces: Sequence[int | str]) -> str:
    """Return in words what a post-processor puts out: ids with their texts, and names of texts.

    Of more than 8 of these only the first ones and the number of all are said.
    """
    shown = [each if isinstance(each, str) else _token_text(side, each) for each in pieces[:8]]
    more = f", ... ({len(pieces)} in all)" if len(pieces) > 8 else ""
    return ", ".join(shown) + more or "nothing"


def _value(pieces: Sequence[int | str]) -> str:
    """Return what a post-processor makes as a list in text, of at most 200 characters."""
    return shorten(str(list(pieces)), 200)


def _frame_difference(
    a: StatedTokenizer, b: StatedTokenizer, part: str, at: int
) -> TokenizerDifference:
    """Return the difference of the ids put around a text, other than a BOS or EOS on one side only.

    `part` is "begins" or "ends"; `at` is 0 for what comes before a text and 1 for what comes
    after.
    """
    x, y = a.frame[at], b.frame[at]
    where = ("before", "after")[at]
    says = f"the frame {where} a text is {_ids_text(a, x)} in A, {_ids_text(b, y)} in B"
    says += _repeated_id_text(x, y) + "".join(
        _wrong_ids_text(label, side) for label, side in (("A", a), ("B", b))
    )
    for label, side in (("A", a), ("B", b)):
        if _taken_off(side, at):
            says += f"; {_frame_flag(side, at)} is false in {label}"
    places = (*_frame_keys(b, part, at), *_frame_keys(a, part, at))
    parts = (part, "pair")  # what is put around one text is put around two
    return TokenizerDifference(
        "frame",
        "frame",
        parts,
        places,
        says,
        str(list(x)),
        str(list(y)),
        mend=_frame_assignments(b, at, x),
    )


def _frame_flag(side: StatedTokenizer, at: int) -> str:
    """Return the key of the flag that takes off what the kind of a GGUF's vocabulary puts.

    `at` is 0 for before a text and 1 for after; "" where the kind of the vocabulary puts nothing.
    """
    return FLAGS[f"add_{side.framed_roles[at]}_token"].gguf if side.framed_roles else ""


def _taken_off(side: StatedTokenizer, at: int) -> bool:
    """Return whether that flag is false."""
    roles = side.framed_roles
    return roles is not None and side.carried.flag_value(f"add_{roles[at]}_token") is False


def _frame_assignments(side: StatedTokenizer, at: int, wanted: Sequence[int]) -> tuple[str, ...]:
    """Return the KEY=VALUE texts with which a GGUF whose kind frames a text puts `wanted` there.

    () for other tokenizers, and for more than one id.
    """
    if side.framed_roles is None or side.carried.model.key_style != "gguf" or len(wanted) > 1:
        return ()
    if not wanted:
        return (f"{_frame_flag(side, at)}=false",)
    role = side.framed_roles[at]
    moved = side.vocabulary.engine_ids.get(role) != wanted[0]
    return (
        *((f"{IDS[role].gguf}={wanted[0]}",) if moved else ()),
        *((f"{_frame_flag(side, at)}=true",) if _taken_off(side, at) else ()),
    )


def _ids_text(side: StatedTokenizer, ids: Sequence[int]) -> str:
    """Return ids with their texts; "nothing" for none."""
    return ", ".join(_token_text(side, i) for i in ids) or "nothing"


def _repeated_id_text(x: Sequence[int], y: Sequence[int]) -> str:
    """Return a clause that one side repeats an id more often than the other; "" if none does."""
    for label, more, less in (("B", y, x), ("A", x, y)):
        for i in dict.fromkeys(more):
            if more.count(i) > 1 and 0 < less.count(i) < more.count(i):
                return f"; {label} puts {i} {more.count(i)} times"
    return ""


def _wrong_ids_text(label: str, side: StatedTokenizer) -> str:
    """Return a clause that a post-processor puts the id of another token; "" if none does."""
    found = stale_post_processor_ids(side)
    if not found:
        return ""
    text, i, right = found[0]
    own = "has no id" if right is None else f"is {right}"
    return f"; {label}'s post-processor puts {i} for {text!r}, which {own}"


def _frame_keys(side: StatedTokenizer, part: str, at: int) -> tuple[str, ...]:
    """Return (key,): the key of a file that states the ids put before or after a text.

    `part` is "begins" or "ends"; `at` is 0 for before and 1 for after.
    """
    if side.framed_roles is not None:
        role = side.framed_roles[at]
        return (_frame_flag(side, at),) if _taken_off(side, at) else (IDS[role].gguf,)
    processed = not side.uses_lists and bool(side.post_processor_ids[at])
    return ("tokenizer.json: post_processor",) if processed else part_place(side, part)


def _defaults_text(a: StatedTokenizer, b: StatedTokenizer, flag: str) -> str:
    """Return a clause for each GGUF that lacks the key of `flag`; "" where neither does."""
    return "".join(
        f"; {label} has no {FLAGS[flag].gguf}, so that llama.cpp's default holds"
        for label, side in (("A", a), ("B", b))
        if side.uses_lists and side.carried.flag_value(flag) is None
    )


def template_difference(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the chat templates; nothing if they are equal.

    Two spellings of one program are yielded as without effect (`still`).
    """
    x, y = a.template, b.template
    if x == y:
        return
    from aprfmt.tokenizer.template import are_equal_programs

    where = (*part_place(b, "template"), *part_place(a, "template"))
    spelled = x is not None and y is not None and are_equal_programs(x, y)
    if x is None or y is None:
        has, lacks = ("A", "B") if y is None else ("B", "A")
        says = f"{has} has a chat template, {lacks} none"
    else:
        at = next(
            (i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y))
        )
        cut = f": A's, cut to {len(y)} of {len(x)} characters" if x.startswith(y) else ""
        says = (
            f"another chat template{cut}; from character {at} on A has "
            f"{value_text(x[at : at + 40])}, "
            f"B {value_text(y[at : at + 40])}"
        )
        says += "; both are one program, spelled otherwise" * spelled
        says = _foreign_template_text(a, b) or says
    yield TokenizerDifference(
        "chat_template",
        "chat_template",
        ("template",),
        where,
        says,
        None if x is None else f"{len(x)} characters",
        None if y is None else f"{len(y)} characters",
        still=spelled,
    )


def _foreign_template_text(a: StatedTokenizer, b: StatedTokenizer) -> str:
    """Return in words that one side's chat template alone renders no chat; "" for any others.

    It is one of another language than jinja2, or reads no messages.
    """
    found = [_unusable_text(side.template or "") for side in (a, b)]
    if all(found) or not any(found):
        return ""
    return f"A's chat template {found[0]}" if found[0] else f"B's chat template {found[1]}"


def _unusable_text(template: str) -> str:
    """Return a predicate that says why a chat template renders no chat; "" if it may render one."""
    foreign = foreign_template(template)
    if foreign is not None:
        return f"is {foreign.says}, not jinja2: engines refuse it or use another"
    return "" if reads_messages(template) else UNREAD_MESSAGES


def generation_differences(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of two generation_config.json: end ids and sampling settings.

    If a folder has no such file, the ids that end a generation are compared instead. With a GGUF
    on either side only settings are compared: those that GGUF has keys for, or those of embedded
    files on both sides.
    """
    stated = differing_settings(a.carried, b.carried)
    if stated:
        yield _settings_difference(b, stated)
    if stated or has_keys_alone(a.carried) or has_keys_alone(b.carried):
        return
    left, right = (generation_settings(side.carried) for side in (a, b))
    lists = a.uses_lists or b.uses_lists
    if lists:
        left, right = (
            {k: v for k, v in said.items() if k not in ID_KEYS} for said in (left, right)
        )
        if not left or not right:
            return
    if not left or not right:
        yield from _end_differences(a, b)
        return
    # Settings whose values in effect differ, then ids that both state.
    apart = [
        key
        for key, default in GENERATION.items()
        if not same_setting(left.get(key, default), right.get(key, default))
    ]
    apart += [
        key
        for key in ID_KEYS
        if left.get(key) is not None
        and right.get(key) is not None
        and set(id_list(left[key])) != set(id_list(right[key]))
    ]
    apart += [
        key
        for key in ("bos_token_id", "pad_token_id")
        if (left.get(key) is None) != (right.get(key) is None)
    ]
    if not lists and (left.get("eos_token_id") is None) != (right.get("eos_token_id") is None):
        apart += ["eos_token_id"] if a.stop_ids != b.stop_ids else []
    if apart:
        yield _settings_difference(b, [(key, left.get(key), right.get(key)) for key in apart])


def _settings_difference(
    b: StatedTokenizer, apart: Sequence[tuple[str, object, object]]
) -> TokenizerDifference:
    """Return the difference of generation settings.

    `apart` has (name in generation_config.json, value in A, value in B) each; a value is None
    where it is not stated. Token ids come first: they end a generation.
    """
    apart = sorted(apart, key=lambda row: row[0] not in ID_KEYS)
    style = b.carried.model.key_style
    writable = b.carried.model.folder is not None or style == "apr" or has_file(b.carried)
    places = [
        GENERATION_KEYS[name].gguf
        if style == "gguf" and name in GENERATION_KEYS
        else f"{GENERATION_CONFIG}: {name}"
        for name, _, _ in apart
    ]
    mend = tuple(
        f"{place.replace(': ', ':')}={json.dumps(x)}"
        for place, (_, x, _) in zip(places, apart, strict=True)
        if x is not None and (writable or place.startswith("general."))
    )
    return TokenizerDifference(
        "generation_config",
        "generation_config",
        ("generation",),
        tuple(places),
        ", ".join(f"{name} {x} in A, {y} in B" for name, x, y in apart),
        {name: x for name, x, _ in apart if x is not None},
        {name: y for name, _, y in apart if y is not None},
        mend=mend if len(mend) == len(apart) else (),
    )


def _end_differences(a: StatedTokenizer, b: StatedTokenizer) -> Iterator[TokenizerDifference]:
    """Yield the difference of the ids that end a generation, by config.json alone.

    It is for a side that has no generation_config.json. transformers stops at the ids in the
    configuration, never at the tokenizer's own end.
    """
    if a.stop_ids == b.stop_ids:
        return
    x, y = (sorted(side.stop_ids) or None for side in (a, b))
    shown = [
        f"ends at {ids}" if ids else "never ends (no file states eos_token_id)" for ids in (x, y)
    ]
    yield TokenizerDifference(
        "generation_config",
        "generation_config",
        ("generation", "config:eos", "class:eos"),
        ("generation_config.json: eos_token_id", "config.json: eos_token_id"),
        f"a generation {shown[0]} in A, {shown[1]} in B",
        str(x),
        str(y),
        mend=(f"config.json:eos_token_id={x[0] if len(x) == 1 else json.dumps(x)}",) if x else (),
    )
