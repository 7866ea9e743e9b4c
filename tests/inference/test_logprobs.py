"""Log-probabilities that servers answer, compared by token with a run and with one another."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import FormatError
from aprfmt.inference.engines.logprobs import read_logprobs
from aprfmt.measure.logprob_tables import kl_divergence
from tests.cli.run import aprfmt
from tests.diagnose.engines import tiny_folder
from tests.inference.test_captures import own
from tests.models import IDS

TOP = 4
PROMPT = 20  # tokens before those that the server wrote
TEXT = ",".join(map(str, IDS))


@pytest.fixture(scope="module")
def logprobs() -> Any:
    """Log-probabilities [tokens, vocabulary] of a tiny model."""
    logits = own()["logits"].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def likely(row: Any, token: int) -> list[int]:
    """Return the tokens that a server lists: the best, and the one that was chosen."""
    return list(dict.fromkeys([*np.argsort(-row)[:TOP].tolist(), token]))


def vllm(rows: Any) -> Any:
    """vLLM's prompt_logprobs: of every token of the prompt but the first."""
    listed: list[Any] = [None]
    for at, token in enumerate(IDS[1:]):
        listed.append(
            {
                str(one): {"logprob": rows[at, one], "rank": n + 1, "decoded_token": "x"}
                for n, one in enumerate(likely(rows[at], token))
            }
        )
    return {"choices": [{"prompt_token_ids": list(IDS), "prompt_logprobs": listed}]}


def sglang(rows: Any) -> Any:
    """SGLang's native answer: prompt and output."""
    each = [[None if not at else rows[at - 1, one], one, None] for at, one in enumerate(IDS)]
    top = [None] + [
        [[rows[at, one], one, None] for one in likely(rows[at], IDS[at + 1])]
        for at in range(len(IDS) - 1)
    ]
    return {
        "text": "x",
        "meta_info": {
            "prompt_tokens": PROMPT,
            "input_token_logprobs": each[:PROMPT],
            "output_token_logprobs": each[PROMPT:],
            "input_top_logprobs": top[:PROMPT],
            "output_top_logprobs": top[PROMPT:],
        },
    }


def completion(rows: Any) -> Any:
    """A completion with echo, tokens as `token_id:N`."""
    return {
        "choices": [
            {
                "text": "x",
                "logprobs": {
                    "tokens": [f"token_id:{one}" for one in IDS],
                    "token_logprobs": [None, *(rows[at, one] for at, one in enumerate(IDS[1:]))],
                    "top_logprobs": [
                        None,
                        *(
                            {f"token_id:{one}": rows[at, one] for one in likely(rows[at], token)}
                            for at, token in enumerate(IDS[1:])
                        ),
                    ],
                },
            }
        ]
    }


def chat(rows: Any) -> Any:
    """A chat's output behind a prompt whose ids the answer says."""
    content = [
        {
            "token": f"token_id:{token}",
            "logprob": rows[PROMPT - 1 + n, token],
            "bytes": None,
            "top_logprobs": [
                {"token": f"token_id:{one}", "logprob": rows[PROMPT - 1 + n, one]}
                for one in likely(rows[PROMPT - 1 + n], token)
            ],
        }
        for n, token in enumerate(IDS[PROMPT:])
    ]
    return {"prompt_token_ids": list(IDS[:PROMPT]), "choices": [{"logprobs": {"content": content}}]}


FORMS: dict[str, Callable[[Any], Any]] = {
    "vllm": vllm, "sglang": sglang, "completion": completion, "chat": chat,
}  # fmt: skip


def answer(folder: Path, said: Any, name: str = "answer.json") -> Path:
    """Write an answer."""
    path = folder / name
    path.write_text(json.dumps(said))
    return path


@pytest.mark.parametrize("form", FORMS)
def test_every_form_agrees_with_the_model(form: str, logprobs: Any, tmp_path: Path) -> None:
    path = answer(tmp_path, FORMS[form](logprobs))
    done = aprfmt("logits", tiny_folder("llama"), "--reference", path, "--json")
    assert done.code == 0, done.out + done.err
    found = done.json["logprobs"]
    assert found["compared"] == (len(IDS) - PROMPT if form == "chat" else len(IDS) - 1)
    assert found["max_difference"] < 1e-5 and found["max_kl"] < 1e-5
    last = found["positions"][-1]
    assert last["token"] == IDS[-1] and last["shared"] >= TOP
    assert last["reference"] == pytest.approx(logprobs[-2, IDS[-1]])


# What goes wrong between a trainer and its rollout -> rows of log-probabilities.
FAULTS: dict[str, Callable[[Any], Any]] = {
    "temperature": lambda rows: _renormalised(rows / 0.8),
    "one token late": lambda rows: np.roll(rows, 1, 0),
    "a layer's weights are old": lambda rows: _renormalised(
        rows + np.sin(np.arange(rows.size)).reshape(rows.shape)
    ),
    "from position 15 on": lambda rows: np.concatenate([rows[:15], _renormalised(rows[15:] * 1.3)]),
}


def _renormalised(rows: Any) -> Any:
    return rows - np.log(np.exp(rows).sum(-1, keepdims=True))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("form", ["vllm", "sglang"])
def test_a_rollout_that_differs_is_beyond(
    fault: str, form: str, logprobs: Any, tmp_path: Path
) -> None:
    path = answer(tmp_path, FORMS[form](FAULTS[fault](logprobs)))
    done = aprfmt("logits", tiny_folder("llama"), "--reference", path, "--json")
    assert done.code == 1 and done.json["pronounced"]["word"] == "beyond tolerance"
    found = done.json["logprobs"]
    if fault == "from position 15 on":
        assert found["first"] == 15
    assert found["first"] is None or found["positions"][found["first"]]["largest"] > 0.01


def test_a_row_alone_and_in_a_batch(logprobs: Any, tmp_path: Path) -> None:
    """Batch invariance: two answers of one sequence, every bit equal or not."""
    alone = answer(tmp_path, vllm(logprobs), "alone.json")
    batch = answer(tmp_path, vllm(logprobs + 1e-4), "batch.json")
    same = aprfmt("logits", tiny_folder("llama"), "--load", alone, "--reference", alone, "--json")
    assert same.code == 0 and same.json["logprobs"]["bits"]
    other = aprfmt("logits", tiny_folder("llama"), "--load", batch, "--reference", alone, "--json")
    assert other.code == 0 and not other.json["logprobs"]["bits"]
    assert other.json["logprobs"]["mean_difference"] == pytest.approx(1e-4)


def test_other_tokens_are_refused(logprobs: Any, tmp_path: Path) -> None:
    said = vllm(logprobs)
    said["choices"][0]["prompt_token_ids"][7] += 1
    other = answer(tmp_path, said, "other.json")
    right = answer(tmp_path, vllm(logprobs))
    done = aprfmt("logits", tiny_folder("llama"), "--load", other, "--reference", right)
    assert done.code == 2 and "are of other tokens, the first at 7" in done.err


WITHOUT: dict[str, tuple[Any, str]] = {
    "no prompt": (
        {
            "choices": [
                {
                    "logprobs": {
                        "content": [{"token": "token_id:5", "logprob": -1.0, "top_logprobs": []}]
                    }
                }
            ]
        },
        "prompt's ids",
    ),
    "two choices": ({"choices": [{"prompt_logprobs": []}, {}]}, "2 choices; expected one"),
    "no ids": (
        {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [None]}}]},
        "token 'a' has no id",
    ),
    "nothing": (
        {"prompt_token_ids": [1, 2], "prompt_logprobs": [None, None]},
        "holds no log-probability",
    ),
    "logits": (
        {"prompt_token_ids": [1, 2], "prompt_logprobs": [None, {"2": {"logprob": 3.5}}]},
        "above 0",
    ),
    "a text": (
        {"prompt_token_ids": [1, 2], "prompt_logprobs": [None, {"2": {"logprob": "x"}}]},
        "could not convert",
    ),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_an_answer_that_lacks_something_says_what(case: str, tmp_path: Path) -> None:
    said, why = WITHOUT[case]
    with pytest.raises(FormatError, match=why):
        read_logprobs(answer(tmp_path, said))


def test_a_token_whose_text_is_that_of_two_ids_is_no_guess(tmp_path: Path) -> None:
    said = {
        "choices": [
            {
                "logprobs": {
                    "tokens": ["a", "b"],
                    "token_logprobs": [None, -1.0],
                    "top_logprobs": [None, {"b": -1.0, "c": -2.0}],
                }
            }
        ]
    }
    path = answer(tmp_path, said)
    ids = {"a": [1], "b": [2], "c": [3, 4]}
    found = read_logprobs(path, None, lambda text, raw: ids[text])
    assert found.ids == (1, 2) and found.rows == {0: {2: -1.0}}
    with pytest.raises(FormatError, match="is the text of 2 ids"):
        read_logprobs(path, None, lambda text, raw: [1, 2])


def test_divergence_counts_what_is_left_of_a_row() -> None:
    whole = np.log(np.array([0.5, 0.3, 0.2]))
    assert kl_divergence(whole, whole) == 0
    other = np.log(np.array([0.4, 0.4, 0.2]))
    assert kl_divergence(whole, other) == pytest.approx(
        float(np.sum(np.exp(whole) * (whole - other)))
    )
    assert 0 < kl_divergence(whole[:1], other[:1]) <= kl_divergence(whole, other) + 1e-12
