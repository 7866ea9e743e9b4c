"""Answers of servers with log-probabilities, each form by itself."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aprfmt.errors import FormatError
from aprfmt.inference.engines import logprobs
from aprfmt.measure.logprob_tables import LEAST

WORDS = {"a": [1], "b": [2], "same": [3, 4]}


def token_ids(text: str, raw: bytes | None) -> Sequence[int]:
    return WORDS.get(text, []) if raw is None else [raw[0]]


def parsed(said: Any, prompt: Sequence[int] | None = None) -> tuple[tuple[int, ...], Any]:
    found = logprobs._parse_answer(said, prompt, token_ids)
    return found.ids, found.rows


def refused(said: Any, why: str, prompt: Sequence[int] | None = None) -> None:
    with pytest.raises(ValueError, match=why):
        parsed(said, prompt)


def test_prompts_of_vllm_have_an_entry_for_every_token_but_the_first() -> None:
    def entry(**values: float) -> dict[str, Any]:
        return {key[1:]: {"logprob": value} for key, value in values.items()}

    listed = [None, entry(_8=-0.5), entry(_9=-1.0, _7=-2.0)]
    rows = {0: {8: -0.5}, 1: {9: -1.0, 7: -2.0}}
    said = {"prompt_logprobs": listed, "choices": [{"prompt_token_ids": [5, 8, 9]}]}
    assert parsed(said) == ((5, 8, 9), rows)
    assert parsed(listed, [5, 8, 9]) == ((5, 8, 9), rows)
    alone = [entry(_5=-9.0), entry(_8=-0.5)]
    assert parsed(alone) == ((5, 8), {0: {8: -0.5}})  # none is before the first
    refused(listed, "does not say the prompt's ids; give --ids")
    refused([None, entry(_8=-0.5)], "does not say the prompt's ids")
    refused(listed, "3 entries of prompt_logprobs, and 2 ids of the prompt; was the", [5, 8])
    refused(listed, "entry 1 of prompt_logprobs does not have token 6, which", [5, 6, 9])
    refused([None, None, entry(_9=-1.0)], "entry 1 of prompt_logprobs does not", [5, 8, 9])
    assert parsed([None, None, None], [5, 8, 9]) == ((5, 8, 9), {})
    refused({"choices": []}, "does not say the prompt's ids")
    assert parsed({"choices": []}, [5]) == ((5,), {})


def test_entries_of_sglang_belong_to_the_position_before_their_token() -> None:
    meta = {
        "input_token_logprobs": [[None, 5, ""], [-0.5, 8, ""]],
        "input_top_logprobs": [None, [[-0.5, 8, ""], [-2.0, 7, ""]]],
        "output_token_logprobs": [[-1.0, 9, ""], [-3.0, 4, ""]],
        "output_top_logprobs": [[[-1.5, 6, ""]], None],
        "prompt_tokens": 2,
    }
    rows = {0: {8: -0.5, 7: -2.0}, 1: {9: -1.0, 6: -1.5}, 2: {4: -3.0}}
    assert parsed({"meta_info": meta}) == ((5, 8, 9, 4), rows)
    assert parsed({"choices": [{"meta_info": meta}]}) == ((5, 8, 9, 4), rows)
    late = {**meta, "prompt_tokens": 4}  # of the last two tokens of the prompt
    moved = {at + 2: row for at, row in rows.items()}
    assert parsed({"meta_info": late}, [1, 2, 5, 8]) == ((1, 2, 5, 8, 9, 4), moved)
    known = {"meta_info": late, "prompt_token_ids": [1, 2, 5, 8]}
    assert parsed(known, [0, 0, 0, 0])[0] == (1, 2, 5, 8, 9, 4)
    refused({"meta_info": late}, "give --ids, or ask with logprob_start_len 0")
    for other in ([1, 2, 5, 7], [8], [1, 5, 8, 2]):
        refused({"meta_info": late}, "of other tokens than the prompt's ids", other)
    out = {"output_token_logprobs": [[-1.0, 9, ""]]}
    assert parsed({"meta_info": out}, [5]) == ((5, 9), {0: {9: -1.0}})
    refused({"meta_info": out}, "does not say the prompt's ids")


def chat(*rows: dict[str, Any], **more: Any) -> Any:
    return {"choices": [{"logprobs": {"content": list(rows)}, **more}]}


def test_a_chat_s_tokens_follow_the_rendered_prompt() -> None:
    first: dict[str, Any] = {
        "token": "a",
        "logprob": -1.0,
        "top_logprobs": [
            {"token": "b", "logprob": -2.0},
            {"token": "same", "logprob": -3.0},
            {"token": "token_id:77", "logprob": -4.0},
        ],
    }
    last = {"token": "x", "bytes": [65], "logprob": -0.5}
    rows = {1: {1: -1.0, 2: -2.0, 77: -4.0}, 2: {65: -0.5}}
    assert parsed(chat(first, last), [5, 6]) == ((5, 6, 1, 65), rows)
    given = chat(first, last, token_ids=[1, 9])
    assert parsed(given, [5, 6]) == ((5, 6, 1, 9), {1: rows[1], 2: {9: -0.5}})
    refused(chat(first), "give --ids of the rendered prompt")
    refused(chat(first, token_ids=[1, 9]), "1 entries of logprobs, and 2 token_ids", [5])
    for text, count in (("same", 2), ("unknown", 0)):
        refused(chat({"token": text, "logprob": -1.0}), f"is the text of {count} ids", [5])


def test_a_completion_echoes_its_prompt_or_follows_it() -> None:
    def completion(values: Any, tokens: Any = (), top: Any = None, **more: Any) -> Any:
        held = {"token_logprobs": values, "tokens": list(tokens), "top_logprobs": top}
        return {"choices": [{"logprobs": held, **more}]}

    top = [None, {"b": -1.0, "token_id:9": -4.0, "same": -5.0}]
    echoed = completion([None, -1.0], ["a", "b"], top)
    for prompt in (None, [7, 7]):
        assert parsed(echoed, prompt) == ((1, 2), {0: {2: -1.0, 9: -4.0}})
    after = completion([-0.5, -1.0], ["a", "b"], top)
    rows = {1: {1: -0.5}, 2: {2: -1.0, 9: -4.0}}
    assert parsed(after, [7, 7]) == ((7, 7, 1, 2), rows)
    refused(after, "give --ids, or ask with echo")
    named = completion([-0.5, -1.0], ["same", "?"], token_ids=[11, 12])
    assert parsed(named, [7])[0] == (7, 11, 12)
    refused(completion([-0.5, -1.0], ["a"]), "2 token_logprobs, and 1 tokens", [7])
    refused(completion([-0.5], ["same"], token_ids=[1, 2]), "is the text of 2 ids", [7])
    nothing = completion([float("-inf")], ["a"])
    assert parsed(nothing, [7]) == ((7, 1), {0: {1: LEAST}})
    refused(completion([float("nan")], ["a"]), "position 0: token 1: nan is no number", [7])


def test_of_several_answers_one_is_named_by_the_tokens_it_begins_with(tmp_path: Path) -> None:
    def entry(token: int) -> Any:
        return {str(token): {"logprob": -1.0}}

    def answer(*ids: int) -> Any:
        listed = [None, *(entry(token) for token in ids[1:])]
        return {"prompt_token_ids": list(ids), "prompt_logprobs": listed, "choices": []}

    def read(said: Any, wanted: Any = None, prompt: Any = None, name: str = "x.json") -> Any:
        path = tmp_path / name
        lines = name.endswith("l")
        path.write_text("\n\n".join(map(json.dumps, said)) if lines else json.dumps(said))
        return logprobs.read_logprobs(path, prompt, None, wanted).ids

    several = [answer(1, 2), answer(1, 2, 3), answer(4, 5)]
    for name in ("x.json", "x.jsonl"):
        assert read(several[:1], name=name) == (1, 2)
        assert read(several, [4], name=name) == (4, 5)
        assert read(several, [1, 2], name=name) == (1, 2)
        assert read(several, [4, 5, 3, 9], prompt=[1], name=name) == (4, 5)
    assert read(several, None, [4, 5, 6]) == (4, 5)
    batch = [{"response": {"body": each}} for each in several]
    assert read(batch, [4], name="x.jsonl") == (4, 5)
    assert read([answer(1, 2), answer(1, 2)], [1]) == (1, 2)  # equal ones are one
    for wanted, why in (
        (None, r"3 answers \(2 tokens 1,2,...; 3 tokens 1,2,3,...; 2 tokens 4,5,...\); name"),
        ([1], "2 of its 3 answers are of these 1 tokens"),
        ([9], "none of its answers is of these"),
    ):
        with pytest.raises(logprobs.SeveralAnswersError, match=why):
            read(several, wanted)
    for many, end in ((4, r"4 tokens 1,2,3,3,...\)"), (5, r"4 tokens 1,2,3,3,...; ...\)")):
        alike = [answer(1, 2, 3, 3)] * many
        with pytest.raises(logprobs.SeveralAnswersError, match=end):
            read(alike)
    broken = [answer(1, 2), {"choices": []}, answer(4, 5)]
    with pytest.raises(logprobs.SeveralAnswersError, match=r"; 1 could not be read: .*answer 1: "):
        read(broken)
    for said, why in (
        ({"choices": []}, "does not say the prompt's ids"),
        ([None], "give --ids"),
        ({"prompt_token_ids": [1], "prompt_logprobs": [None]}, "holds no log-probability"),
        ([{"1": {"logprob": 0.0}}, {"2": {"logprob": 0.5}}], "position 0 has a log-proba"),
    ):
        with pytest.raises(FormatError, match=why):
            read(said)
    assert read([{"1": {"logprob": 0.0}}, {"2": {"logprob": 0.001}}]) == (1, 2)
    choices = [{"text": "a"}, {"text": "b"}]
    path = tmp_path / "two.json"
    path.write_text(json.dumps({"choices": choices, "id": 7}))
    assert logprobs._answers_of_file(path) == [{"choices": [one], "id": 7} for one in choices]
