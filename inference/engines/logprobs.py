"""Log-probabilities as servers answer them: of the chosen token and some likely ones, by token.

vLLM's `prompt_logprobs`, SGLang's `input_token_logprobs` and the `logprobs` of OpenAI-compatible
servers. They are no trace, whose points are whole rows: `aprfmt logits --reference` compares them.
Sources: vllm/entrypoints/openai (prompt_logprobs, prompt_token_ids, token_ids),
sglang/srt/managers/tokenizer_manager.py (meta_info), and OpenAI's API for completions and chat.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

from aprfmt.base.text_escape import shorten
from aprfmt.errors import FormatError
from aprfmt.formats.bounded_json import load_file, loads
from aprfmt.formats.mapped_file import open_bytes
from aprfmt.inference.trace import Trace
from aprfmt.measure.logprob_tables import LEAST, Logprobs
from aprfmt.model import Model

_HEAD = 64 << 10  # bytes that contain the first token's entry, even after a long prompt
MAX_JSON = 512 << 20
_ABOVE = 1e-3  # what rounding may leave above 0
# Key of the JSON -> whose it is, the first that is there.
WRITERS: Mapping[str, str] = {
    "prompt_logprobs": "vLLM's prompt_logprobs",
    "input_token_logprobs": "SGLang's input_token_logprobs",
    "output_token_logprobs": "SGLang's output_token_logprobs",
    "token_logprobs": "an OpenAI-compatible server's completion",
    "top_logprobs": "an OpenAI-compatible server's chat",
    "logprob": "a server's list of tokens",
}
# Keys of a whole answer, by which it is told from a row.
_ANSWER = frozenset(("choices", "meta_info", "prompt_logprobs", "response"))
_SHOWN = 4  # answers, and tokens of each, in a message
TokenIds = Callable[[str, bytes | None], Sequence[int]]


def logprobs_writer(path: Path) -> str | None:
    """Return in words which server's log-probabilities a JSON file holds; None for other files."""
    if not path.is_file() or path.suffix not in (".json", ".jsonl"):
        return None
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    found = {match.decode() for match in re.findall(rb'"([a-z_]{7,21})"\s{0,8}:', head)}
    return next((says for key, says in WRITERS.items() if key in found), None)


def is_logprobs(path: Path) -> bool:
    """Return whether a path is a server's answer with log-probabilities."""
    return logprobs_writer(path) is not None


def refuse_logprobs(
    path: Path, ids: Sequence[int] | None = None, model: Model | None = None
) -> AbstractContextManager[Trace]:
    """Raise FormatError, which says what a file of log-probabilities holds and how to compare it.

    `ids` and `model` are not used: every opener of a trace takes them.
    """
    raise FormatError(
        f"{path}: holds log-probabilities of single tokens ({logprobs_writer(path)}), no "
        f"rows of logits; "
        f"compare them with `aprfmt logits MODEL --reference {path}`; to find the operation that "
        "differs, save what stands before the softmax, logits [tokens, vocabulary], as logits.npy "
        "next to input_ids.npy, then `aprfmt trace MODEL --map FOLDER -o run.safetensors` and "
        "diagnose that"
    )


class SeveralAnswersError(FormatError):
    """A file holds answers to several prompts, or several to one, and nothing names one."""


def read_logprobs(
    path: Path,
    prompt: Sequence[int] | None = None,
    token_ids: TokenIds | None = None,
    wanted: Sequence[int] | None = None,
) -> Logprobs:
    """Return the log-probabilities of a server's answer; FormatError says what is missing.

    `prompt` are the prompt's ids where the answer does not say them, `token_ids` gives the ids of
    the tokens that have a given text. Of several answers it is the one whose ids begin with
    `wanted` (None: `prompt`), or are the beginning of it; SeveralAnswersError where not exactly one
    does.
    """
    several, writer = _answers_of_file(path), logprobs_writer(path) or ""
    found: list[Logprobs] = []
    failed: list[FormatError] = []
    for number, said in enumerate(several):
        where = f"{path}: answer {number}" if len(several) > 1 else str(path)
        try:
            found.append(_read_answer(said, where, writer, prompt, token_ids or _no_tokenizer))
        except FormatError as error:
            failed.append(error)
    if not found:
        raise failed[0]
    return found[0] if len(several) == 1 else _choose_answer(path, found, failed, wanted or prompt)


def _answers_of_file(path: Path) -> list[Any]:
    """Return the answers of a file, each with one choice; FormatError for what is no JSON.

    A file may hold an answer, a list of them, or one a line (.jsonl), as of a batch.
    """
    if path.suffix == ".jsonl":
        with closing(open_bytes(path)) as file:
            if file.size > MAX_JSON:
                raise FormatError(f"{path}: {file.size} bytes of JSON, the limit is {MAX_JSON}")
            lines = bytes(file.view[:MAX_JSON]).splitlines()
        said = [
            loads(line, f"{path}: line {number}", max_bytes=MAX_JSON)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]
    else:
        said = load_file(path, MAX_JSON)
    listed = isinstance(said, list) and any(_is_answer(one) for one in said)
    found: list[Any] = []
    for each in said if listed else [said]:
        one = each
        for key in ("response", "body"):  # of a batch's line
            inner = one.get(key) if isinstance(one, Mapping) else None
            one = inner if isinstance(inner, Mapping) else one
        choices = one.get("choices") if isinstance(one, Mapping) else None
        if isinstance(choices, list) and len(choices) > 1:
            found += [{**dict(one), "choices": [choice]} for choice in choices]
        else:
            found.append(one)
    return found


def _is_answer(said: Any) -> bool:
    """Return whether a value is a server's whole answer: a mapping with a key of _ANSWER."""
    return isinstance(said, Mapping) and not _ANSWER.isdisjoint(said)


def _read_answer(
    said: Any, where: str, writer: str, prompt: Sequence[int] | None, token_ids: TokenIds
) -> Logprobs:
    """Return the log-probabilities of one answer of a server.

    `writer` is the program that wrote the file, "" if it is not known. Raises FormatError, its
    message beginning with `where`, for anything else.
    """
    try:
        found = _parse_answer(said, prompt, token_ids)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        why = shorten(str(error) or type(error).__name__, 120)
        raise FormatError(f"{where}: {writer or 'an answer'}: {why}") from None
    if not found.rows:
        raise FormatError(
            f"{where}: holds no log-probability of a token; ask the server for "
            "logprobs, and for prompt_logprobs or echo"
        )
    for at, row in found.rows.items():
        if max(row.values()) > _ABOVE:
            raise FormatError(f"{where}: position {at} has a log-probability above 0: logits?")
    return Logprobs(found.ids, found.rows, False, writer)


def _choose_answer(
    path: Path,
    found: Sequence[Logprobs],
    failed: Sequence[FormatError],
    wanted: Sequence[int] | None,
) -> Logprobs:
    """Return the answer to the tokens `wanted`; SeveralAnswersError where none or several are.

    Answers that are equal are one. `failed` are those that could not be read.
    """
    begin = [(len(one.ids), ",".join(map(str, one.ids[:_SHOWN]))) for one in found[:_SHOWN]]
    some = "; ".join(f"{count} tokens {text},..." for count, text in begin)
    some += "; ..." if len(found) > _SHOWN else ""
    more = f"; {len(failed)} could not be read: {failed[0]}" if failed else ""
    if wanted is None:
        raise SeveralAnswersError(
            f"{path}: {len(found)} answers ({some}){more}; name one by its token ids: --ids"
        )
    fits = [one for one in found if _same_beginning(one.ids, wanted)]
    exact = [one for one in fits if list(one.ids) == list(wanted)]
    fits = exact or fits
    if not fits or any(one != fits[0] for one in fits):
        count = f"{len(fits)} of its {len(found)} answers are" if fits else "none of its answers is"
        raise SeveralAnswersError(
            f"{path}: {count} of these {len(wanted)} tokens ({some}){more}; name one by all its "
            "token ids: --ids"
        )
    return fits[0]


def _same_beginning(x: Sequence[int], y: Sequence[int]) -> bool:
    """Return whether two lists of tokens are equal as far as both go."""
    least = min(len(x), len(y))
    return list(x[:least]) == list(y[:least])


def _no_tokenizer(text: str, raw: bytes | None) -> Sequence[int]:
    """Raise ValueError: a token's text has no id without a tokenizer; `raw` is not used."""
    raise ValueError(f"token {text[:40]!r} has no id; name the model, whose tokenizer knows it")


class _Rows:
    """Log-probabilities by position and token, collected while a server's answer is read."""

    def __init__(self) -> None:
        """Start without rows; `rows` maps a position to {token id: log-probability}."""
        self.rows: dict[int, dict[int, float]] = {}

    def add(self, position: int, token: int, value: Any) -> None:
        """Store the log-probability of a token at a position; ignore None and positions below 0.

        Values below LEAST become LEAST. ValueError for NaN.
        """
        if value is None or position < 0:
            return
        number = float(value)
        if number != number:
            raise ValueError(f"position {position}: token {token}: {value!r} is no number")
        self.rows.setdefault(position, {})[int(token)] = max(number, LEAST)


def _parse_answer(said: Any, prompt: Sequence[int] | None, token_ids: TokenIds) -> Logprobs:
    """Return the log-probabilities of a server's answer, of its first choice.

    `prompt` are the prompt's ids if the answer lacks them, `token_ids` gives the ids of the tokens
    that have a given text. Raises ValueError, or an error of a missing key or a wrong type, for a
    damaged answer.
    """
    rows = _Rows()
    if isinstance(said, list):
        said = {"prompt_logprobs": said}
    choice = (said.get("choices") or [{}])[0]
    meta = said.get("meta_info") or choice.get("meta_info") or {}
    both = {**said, **choice}
    if meta:
        return _parse_sglang(meta, both, prompt, rows)
    # vLLM: rows of the prompt, each with some tokens.
    ids = both.get("prompt_token_ids") or (None if prompt is None else list(prompt))
    listed = both.get("prompt_logprobs")
    if listed:
        ids = ids or _ids_of_rows(listed)
        _check_prompt_rows(listed, ids)
        for number, entry in enumerate(listed):
            for token, value in (entry or {}).items():
                rows.add(number - 1, int(token), value["logprob"])
    # OpenAI: the output, as a chat or a completion.
    out = both.get("logprobs")
    if isinstance(out, Mapping) and out.get("content") is not None:
        return _parse_chat(out["content"], ids, both.get("token_ids"), rows, token_ids)
    if isinstance(out, Mapping) and "token_logprobs" in out:
        return _parse_completion(out, ids, both.get("token_ids"), rows, token_ids)
    if ids is None:
        raise ValueError("does not say the prompt's ids; give --ids")
    return Logprobs(tuple(int(i) for i in ids), rows.rows)


def _check_prompt_rows(listed: Sequence[Any], ids: Sequence[int]) -> None:
    """Raise ValueError unless each of the prompt's `ids` but the first has its entry.

    vLLM gives every token of the prompt an entry, in which it is one of the tokens listed.
    """
    if len(listed) != len(ids):
        raise ValueError(
            f"{len(listed)} entries of prompt_logprobs, and {len(ids)} ids of the prompt; was the "
            "answer cut?"
        )
    for number, entry in enumerate(listed[1:] if any(listed) else [], 1):
        if str(int(ids[number])) not in map(str, entry or ()):
            raise ValueError(
                f"entry {number} of prompt_logprobs does not have token {ids[number]}, which "
                "stands there; is it of another prompt?"
            )


def _ids_of_rows(listed: Sequence[Any]) -> list[int]:
    """Return the token id of each row; ValueError where a row lists several, or the first none."""
    if any(entry is not None and len(entry) != 1 for entry in listed) or listed[0] is None:
        raise ValueError("does not say the prompt's ids; give --ids")
    return [int(next(iter(entry))) for entry in listed]


def _parse_sglang(
    meta: Mapping[str, Any], said: Mapping[str, Any], prompt: Sequence[int] | None, rows: _Rows
) -> Logprobs:
    """Return ids and log-probabilities of prompt and output in SGLang's `meta_info`.

    Each entry is [log-probability, id, text]. `said` is the whole answer. Raises ValueError where
    the prompt's ids are not known.
    """
    first = meta.get("input_token_logprobs") or []
    after = meta.get("output_token_logprobs") or []
    ids = [int(one[1]) for one in first]
    start = int(meta.get("prompt_tokens", len(ids)) or len(ids)) - len(ids)
    # Prompt ids that the entries do not say must be known.
    known = said.get("prompt_token_ids") or prompt
    if len(ids) < int(meta.get("prompt_tokens", len(ids)) or 0) or not ids:
        if known is None:
            raise ValueError(
                "does not say the prompt's ids; give --ids, or ask with logprob_start_len 0"
            )
        own, ids = ids, [int(i) for i in known]
        start = len(ids) - len(first)
        if start < 0 or ids[start:] != own:
            raise ValueError("its input_token_logprobs are of other tokens than the prompt's ids")
    # The entry of a token belongs to the position before it.
    for number, one in enumerate(first):
        rows.add(start + number - 1, int(one[1]), one[0])
    for number, top in enumerate(meta.get("input_top_logprobs") or []):
        for one in top or []:
            rows.add(start + number - 1, int(one[1]), one[0])
    for number, one in enumerate(after):
        rows.add(len(ids) + number - 1, int(one[1]), one[0])
    for number, top in enumerate(meta.get("output_top_logprobs") or []):
        for one in top or []:
            rows.add(len(ids) + number - 1, int(one[1]), one[0])
    return Logprobs((*ids, *(int(one[1]) for one in after)), rows.rows)


def _parse_chat(
    content: Sequence[Any],
    ids: Sequence[int] | None,
    out: Sequence[int] | None,
    rows: _Rows,
    token_ids: TokenIds,
) -> Logprobs:
    """Return ids and log-probabilities of a chat's output, after the prompt's `ids`.

    `out` are the output's ids if the answer has them. ValueError if the prompt is not known.
    """
    if ids is None:
        raise ValueError("does not say the prompt's ids; give --ids of the rendered prompt")
    made: list[int] = []
    if out and len(out) != len(content):
        raise ValueError(f"{len(content)} entries of logprobs, and {len(out)} token_ids")
    for number, entry in enumerate(content):
        raw = entry.get("bytes")
        token = int(out[number]) if out else _single_id(entry["token"], raw, token_ids)
        made.append(token)
        at = len(ids) + number - 1
        for row in entry.get("top_logprobs") or []:
            for one in _unique_id(row["token"], row.get("bytes"), token_ids):
                rows.add(at, one, row["logprob"])
        rows.add(at, token, entry["logprob"])
    return Logprobs((*map(int, ids), *made), rows.rows)


def _parse_completion(
    said: Mapping[str, Any],
    ids: Sequence[int] | None,
    out: Sequence[int] | None,
    rows: _Rows,
    token_ids: TokenIds,
) -> Logprobs:
    """Return ids and log-probabilities of a completion, with or without its prompt.

    With echo the answer begins with the prompt, whose first token has no log-probability. `ids`
    are the prompt's ids, `out` those of all listed tokens, each None if not known. Raises
    ValueError where tokens and log-probabilities are not as many, or where the prompt's ids are
    not known.
    """
    # Find the ids of the listed tokens, and those before them.
    values = said["token_logprobs"]
    echoed = bool(values) and values[0] is None
    texts = said.get("tokens") or []
    own = (
        list(out)
        if out and len(out) == len(values)
        else [_single_id(text, None, token_ids) for text in texts]
    )
    if len(own) != len(values):
        raise ValueError(f"{len(values)} token_logprobs, and {len(own)} tokens")
    if not echoed and ids is None:
        raise ValueError("does not say the prompt's ids; give --ids, or ask with echo")
    before = [] if echoed else list(ids or ())
    # The entry of a token belongs to the position before it.
    for number, value in enumerate(values):
        at = len(before) + number - 1
        top = (said.get("top_logprobs") or [])[number : number + 1]
        for text, likely in (top[0] if top and top[0] else {}).items():
            for one in _unique_id(text, None, token_ids):
                rows.add(at, one, likely)
        rows.add(at, own[number], value)
    return Logprobs((*map(int, before), *own), rows.rows)


def _unique_id(text: str, raw: Sequence[int] | None, token_ids: TokenIds) -> Iterator[int]:
    """Yield the id of a token listed by its text; nothing if that is the text of several or none.

    `raw` are the text's bytes if the answer has them.
    """
    found = _ids_of_text(text, raw, token_ids)
    if len(found) == 1:
        yield found[0]


def _single_id(text: str, raw: Sequence[int] | None, token_ids: TokenIds) -> int:
    """Return the id of a token's text; ValueError if it is that of several ids or of none.

    `raw` are the text's bytes if the answer has them.
    """
    found = _ids_of_text(text, raw, token_ids)
    if len(found) != 1:
        raise ValueError(
            f"token {text[:40]!r} is the text of {len(found)} ids; ask the server for "
            "token ids (vLLM: return_tokens_as_token_ids)"
        )
    return found[0]


def _ids_of_text(text: str, raw: Sequence[int] | None, token_ids: TokenIds) -> Sequence[int]:
    """Return all ids whose text this is; for `token_id:N`, [N].

    `raw` are the text's bytes if the answer has them.
    """
    if text.startswith("token_id:"):
        return [int(text.removeprefix("token_id:"))]
    return token_ids(text, None if raw is None else bytes(raw))
