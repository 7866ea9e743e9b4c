"""Log-probabilities that servers answer, compared by token with a run and with one another."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.cli.logprobs import logit_bounds
from aprfmt.errors import FormatError
from aprfmt.inference.engines.logprobs import SeveralAnswersError, _choose_answer, read_logprobs
from aprfmt.measure.logprob_tables import LEAST, Logprobs, compare_logprobs, kl_divergence
from aprfmt.measure.tolerances import MAX_FACTOR, Threshold
from aprfmt.model import open_model
from tests.cli.run import aprfmt
from tests.diagnosis.engines import tiny_folder
from tests.inference.engines.test_captures import own
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


@pytest.mark.parametrize("decimals", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("form", FORMS)
def test_rounding_to_some_decimals_is_no_arithmetic(
    form: str, decimals: int, logprobs: Any, tmp_path: Path
) -> None:
    """Printed decimals are no reason to ask for the arithmetic; a fault above them stays one."""
    path = answer(tmp_path, FORMS[form](np.round(logprobs, decimals)))
    given = ("logits", tiny_folder("llama"), "--reference", path, "--json")
    done = aprfmt(*given)
    assert done.code == 0 and not done.json["logprobs"]["undecided"], done.out
    for fault, change in FAULTS.items():
        if form != "chat" or fault != "from position 15 on":
            answer(tmp_path, FORMS[form](np.round(change(logprobs), decimals)))
            assert aprfmt(*given).code == 1, fault


@pytest.mark.parametrize(("decimals", "code"), [(4, 0), (5, 0), (2, 2)])
def test_a_16_bit_head_is_seen_through_decimals(
    decimals: int, code: int, logprobs: Any, tmp_path: Path
) -> None:
    """Four decimals leave its grid to be seen, two do not: then what nobody said is not decided."""
    rows = np.round(engine("bfloat16"), decimals)
    path = answer(tmp_path, vllm(rows))
    done = aprfmt("logits", tiny_folder("llama"), "--reference", path, "--json")
    assert done.code == code, done.out


def test_a_row_alone_and_in_a_batch(logprobs: Any, tmp_path: Path) -> None:
    """Batch invariance: two answers of one sequence, every bit equal or not."""
    alone = answer(tmp_path, vllm(logprobs), "alone.json")
    batch = answer(tmp_path, vllm(logprobs + 1e-4), "batch.json")
    same = aprfmt("logits", tiny_folder("llama"), "--load", alone, "--reference", alone, "--json")
    assert same.code == 0 and same.json["logprobs"]["bits"]
    given = ("--load", batch, "--reference", alone, "--json")
    other = aprfmt("logits", tiny_folder("llama"), *given, "--answer-dtype", "bfloat16")
    assert other.code == 0 and not other.json["logprobs"]["bits"]
    unsaid = aprfmt("logits", tiny_folder("llama"), *given)
    assert unsaid.code == 2 and unsaid.json["logprobs"]["undecided"]
    # A gate asks for equal bits, whatever the arithmetic.
    equal = ("--load", alone, "--reference", alone, "--exact", "--json")
    assert aprfmt("logits", tiny_folder("llama"), *equal).code == 0
    for more in ((), ("--answer-dtype", "bfloat16")):
        gate = aprfmt("logits", tiny_folder("llama"), *given, *more, "--exact")
        assert (gate.code, gate.json["pronounced"]["word"]) == (1, "bits differ")
    alone_run = aprfmt("logits", tiny_folder("llama"), "--ids", "1,2", "--exact")
    assert alone_run.code == 2 and "--exact goes with --reference" in alone_run.err
    assert other.json["logprobs"]["mean_difference"] == pytest.approx(1e-4)


# --- the bound follows from the type: what an engine's arithmetic makes, and what a fault makes ---


def engine(dtype: str, fault: str = "", how: str = "eager") -> Any:
    """Return log-probabilities of transformers, which nobody here wrote, in an arithmetic."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tiny_folder("llama")
    config = AutoConfig.from_pretrained(folder)
    for key, value in CONFIGS.get(fault, {}).items():
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=getattr(torch, dtype),
        attn_implementation="sdpa" if how == "sdpa" else "eager",
    ).eval()
    with torch.no_grad():
        if fault in WEIGHTS:
            WEIGHTS[fault](model.model.layers)
        ids = torch.tensor([list(IDS)])
        if how == "head in float32":
            hidden = model.model(ids).last_hidden_state.float()
            logits = hidden @ model.lm_head.weight.float().T
        elif how == "padded batch":
            padded = torch.cat([torch.zeros(1, 7, dtype=ids.dtype), ids], 1)
            both = torch.cat([padded, torch.full_like(padded, 3)])
            mask = torch.ones_like(both)
            mask[0, :7] = 0
            at = (mask.cumsum(1) - 1).clamp(min=0)
            logits = model(both, attention_mask=mask, position_ids=at).logits[:1, 7:]
        elif how == "token by token":
            cache, rows = None, []
            for token in IDS:
                out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                rows.append(out.logits)
            logits = torch.cat(rows, 1)
        else:
            logits = model(ids).logits
        return torch.log_softmax(logits[0].float(), -1).double().numpy()


CONFIGS: dict[str, dict[str, Any]] = {
    "rope's base": {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}},
    "eps": {"rms_norm_eps": 1e-3},
    "gelu for silu": {"hidden_act": "gelu"},
    "one layer fewer": {"num_hidden_layers": 2},
}


def _scaled(name: str, factor: float) -> Callable[[Any], None]:
    def change(layers: Any) -> None:
        layers[1].get_submodule(name).weight.mul_(factor)

    return change


WEIGHTS: dict[str, Callable[[Any], None]] = {
    "an output of 0.9": _scaled("self_attn.o_proj", 0.9),
    "a norm of ones": lambda layers: layers[1].input_layernorm.weight.fill_(1),
    "a row of zeros": lambda layers: layers[1].mlp.down_proj.weight[3].zero_(),
    "keys of another layer": lambda layers: layers[1].self_attn.k_proj.weight.copy_(
        layers[0].self_attn.k_proj.weight
    ),
    "a gate of 1.2": _scaled("mlp.gate_proj", 1.2),
    "two rows swapped": lambda layers: layers[2].self_attn.v_proj.weight.copy_(
        layers[2].self_attn.v_proj.weight.clone().flip(0)
    ),
}
INNOCENTS = [
    ("float32", "eager", 0), ("float32", "sdpa", 0), ("float32", "padded batch", 0),
    ("float32", "token by token", 0), ("float16", "eager", 0), ("bfloat16", "eager", 0),
    ("bfloat16", "sdpa", 0), ("bfloat16", "padded batch", 0), ("bfloat16", "token by token", 0),
    ("bfloat16", "head in float32", 2),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "how", "code"), INNOCENTS)
def test_what_an_arithmetic_makes_is_within(
    dtype: str, how: str, code: int, tmp_path: Path
) -> None:
    """What nobody said is not decided; with the arithmetic given it is within the bound."""
    path = answer(tmp_path, vllm(engine(dtype, how=how)))
    given = ("logits", tiny_folder("llama"), "--reference", path, "--json")
    done = aprfmt(*given)
    assert done.code == code, done.out
    if code:
        assert aprfmt(*given, "--answer-dtype", dtype).code == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", [*CONFIGS, *WEIGHTS])
def test_what_a_fault_makes_is_beyond(fault: str, dtype: str, tmp_path: Path) -> None:
    path = answer(tmp_path, vllm(engine(dtype, fault)))
    done = aprfmt("logits", tiny_folder("llama"), "--reference", path, "--json")
    assert done.code == 1 and done.json["pronounced"]["word"] == "beyond tolerance", done.out


def test_other_tokens_are_refused(logprobs: Any, tmp_path: Path) -> None:
    said = vllm(logprobs)
    choice = said["choices"][0]
    old = choice["prompt_token_ids"][7]
    choice["prompt_token_ids"][7] = old + 1
    choice["prompt_logprobs"][7][str(old + 1)] = choice["prompt_logprobs"][7].pop(str(old))
    other = answer(tmp_path, said, "other.json")
    right = answer(tmp_path, vllm(logprobs))
    done = aprfmt("logits", tiny_folder("llama"), "--load", other, "--reference", right)
    assert done.code == 2 and "are of other tokens, the first at 7" in done.err


OTHER = [IDS[1], *IDS[:-1]]  # tokens of another prompt


def moved(said: Any) -> Any:
    """Return vLLM's answer to the prompt OTHER: nothing but its tokens is right."""
    choice = {**said["choices"][0], "index": 1}
    listed = [None, *({str(one): {"logprob": -9.0}} for one in OTHER[1:])]
    return {**choice, "prompt_token_ids": OTHER, "prompt_logprobs": listed}


def ended(said: Any) -> Any:
    """Return a chat's choice that ends in another token, with other log-probabilities."""
    content = json.loads(json.dumps(said["choices"][0]["logprobs"]["content"]))
    for entry in content:
        entry["logprob"] = -9.0
    content[-1] |= {"token": "token_id:1", "top_logprobs": []}
    return {"index": 1, "logprobs": {"content": content}}


# What a server answers to several prompts, or several times to one -> the file.
SEVERAL: dict[str, Callable[[Any], str]] = {
    "prompts of a completion": lambda rows: json.dumps(
        {"choices": [moved(vllm(rows)), *vllm(rows)["choices"]]}
    ),
    "answers to a chat": lambda rows: json.dumps(
        {**chat(rows), "choices": [ended(chat(rows)), *chat(rows)["choices"]]}
    ),
    "a list of answers": lambda rows: json.dumps([{"choices": [moved(vllm(rows))]}, sglang(rows)]),
    "lines of a batch": lambda rows: "\n".join(
        json.dumps({"custom_id": str(n), "response": {"status_code": 200, "body": body}})
        for n, body in enumerate([{"choices": [moved(vllm(rows))]}, completion(rows)])
    ),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_one_of_several_answers_is_compared(kind: str, logprobs: Any, tmp_path: Path) -> None:
    """The one to the tokens that are given, or that the other side has; without any, none."""
    path = tmp_path / ("several.jsonl" if kind.startswith("lines") else "several.json")
    path.write_text(SEVERAL[kind](logprobs))
    model, dtype = tiny_folder("llama"), ("--answer-dtype", "float32", "--format", "agent")
    done = aprfmt("logits", model, "--reference", path, *dtype)
    assert done.code == 2 and "2 answers (29 tokens " in done.err, done.err
    assert "name one by its token ids: --ids" in done.err
    done = aprfmt("logits", model, "--reference", path, "--ids", TEXT, *dtype)
    assert done.code == 0 and "within tolerance" in done.out, (done.out, done.err)
    alone = answer(tmp_path, vllm(logprobs))
    for here, there in ((path, alone), (alone, path)):
        done = aprfmt("logits", model, "--load", here, "--reference", there, *dtype)
        assert "every bit equal" in done.out, (done.out, done.err)
    other = ",".join(map(str, [7, *IDS[1:]]))
    done = aprfmt("logits", model, "--reference", path, "--ids", other, *dtype)
    assert done.code == 2 and "none of its answers is of these 29 tokens" in done.err


def test_two_answers_of_the_same_tokens_are_no_guess(logprobs: Any, tmp_path: Path) -> None:
    """Where they hold other values; where they hold the same, they are one."""
    right = vllm(logprobs)["choices"][0]
    again = json.loads(json.dumps(right))
    path = answer(tmp_path, {"choices": [right, again]})
    assert read_logprobs(path, IDS).ids == tuple(IDS)
    next(iter(again["prompt_logprobs"][4].values()))["logprob"] -= 0.5
    path = answer(tmp_path, {"choices": [right, again]})
    with pytest.raises(FormatError, match="2 of its 2 answers are of these 29 tokens"):
        read_logprobs(path, IDS)


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
    "two choices of none": (
        {"choices": [{"prompt_logprobs": []}, {}]},
        "answer 0: .*does not say the prompt's ids",
    ),
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
    "cut": (
        {"prompt_token_ids": [1, 2, 3], "prompt_logprobs": [None, {"2": {"logprob": -1.0}}]},
        "2 entries of prompt_logprobs, and 3 ids of the prompt",
    ),
    "too many": (
        {"prompt_token_ids": [1], "prompt_logprobs": [None, {"2": {"logprob": -1.0}}]},
        "2 entries of prompt_logprobs, and 1 ids",
    ),
    "a hole": (
        {"prompt_token_ids": [1, 2, 3], "prompt_logprobs": [None, None, {"3": {"logprob": -1.0}}]},
        "entry 1 of prompt_logprobs does not have token 2",
    ),
    "another prompt": (
        {"prompt_token_ids": [1, 7], "prompt_logprobs": [None, {"2": {"logprob": -1.0}}]},
        "entry 1 of prompt_logprobs does not have token 7",
    ),
    "sglang, another prompt": (
        {
            "prompt_token_ids": [1, 2, 3],
            "meta_info": {"prompt_tokens": 3, "input_token_logprobs": [[-1.0, 9, None]]},
        },
        "of other tokens than the prompt's ids",
    ),
    "sglang, too many": (
        {
            "prompt_token_ids": [3],
            "meta_info": {
                "prompt_tokens": 3,
                "input_token_logprobs": [[-1.0, 2, None], [-1.0, 3, None]],
            },
        },
        "of other tokens than the prompt's ids",
    ),
    "chat, other ids": (
        {
            "prompt_token_ids": [1],
            "token_ids": [5, 6],
            "choices": [{"logprobs": {"content": [{"token": "a", "logprob": -1.0}]}}],
        },
        "1 entries of logprobs, and 2 token_ids",
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


LIMIT = Threshold(0.01, 0.1, "x")


@pytest.mark.parametrize(
    ("here", "there", "largest"),
    [
        (-1.5, -1.25, 0.25),
        (LEAST, LEAST, 0.0),  # minus infinity, as vLLM writes it
        (-np.inf, LEAST, 0.0),
        (LEAST - 1, LEAST, 0.0),
        (LEAST, -np.inf, 0.0),
        (LEAST + 1, LEAST, np.inf),
        (LEAST, LEAST + 1, np.inf),
        (-1.0, LEAST, np.inf),
        (-np.inf, -1.0, np.inf),
    ],
)
def test_minus_infinity_is_itself_alone(here: float, there: float, largest: float) -> None:
    mine, other = (Logprobs((5, 6), {0: {6: value, 7: -0.5}}) for value in (here, there))
    (row,) = compare_logprobs(mine, other, LIMIT).rows
    assert (row.largest, row.shared) == (largest, 2)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16"), (None, None)])
def test_the_bound_of_one_value_is_that_of_all_times_a_factor(
    dtypes: tuple[str | None, str | None],
) -> None:
    rows = {0: {6: -1.0 / 3, 7: -0.71}}
    sides = Logprobs((5, 6), rows), Logprobs((5, 6), rows)
    with open_model(tiny_folder("llama")) as model:
        found, exact = logit_bounds(model, sides, dtypes)
    assert (exact is None) == (dtypes[0] is not None)
    for one in (found, exact):
        if one is not None:
            assert 0 < one.rel_l2 < 1 and one.max_over_rms == MAX_FACTOR * one.rel_l2
    if exact is not None:
        assert exact.rel_l2 < found.rel_l2


def test_a_mean_of_no_token_is_not_zero(demo_model: Path, tmp_path: Path) -> None:
    """The last position has no token after it. Seen red: mean 0 beside a largest of 4.5."""
    saved = tmp_path / "t.safetensors"
    asked = ("--payload", "--ids", "1,2,3", "--positions", "last", "-o", saved)
    assert aprfmt("trace", demo_model, *asked).code == 0
    args = ("logits", demo_model, "--reference", saved, "--ids", "1,2,3")
    found = aprfmt(*args, "--json").json["logprobs"]
    assert found["mean_difference"] is found["mean_abs_difference"] is None
    assert found["positions"][0]["difference"] is None and "mean 0" not in aprfmt(*args).out


@pytest.mark.parametrize(
    ("entries", "prompt", "says"),
    [
        ((7, 8, 9), None, None),  # all of the prompt
        ((8, 9), (7, 8, 9), None),  # as logprob_start_len leaves it
        ((9,), (7, 8, 9), None),
        ((), (7, 8, 9), None),
        ((8, 9), (7, 5, 9), "of other tokens than the prompt's ids"),  # the first of them
        ((8, 9), (7, 8, 5), "of other tokens than the prompt's ids"),
        ((8, 9), (8, 9, 7), "of other tokens than the prompt's ids"),
        ((8, 9), None, "does not say the prompt's ids"),
        ((), None, "does not say the prompt's ids"),
    ],
)
def test_sglang_may_list_the_end_of_a_prompt_alone(
    entries: tuple[int, ...], prompt: tuple[int, ...] | None, says: str | None, tmp_path: Path
) -> None:
    """Each entry stands at the token before its own, counted from the prompt's beginning."""
    said = {
        "text": "x",
        "meta_info": {
            "prompt_tokens": 3,
            "input_token_logprobs": [[-0.5 - id_, id_, None] for id_ in entries],
            "output_token_logprobs": [[-0.25, 4, None]],
        },
    }
    path = tmp_path / "answer.json"
    path.write_text(
        json.dumps({**said, **({} if prompt is None else {"prompt_token_ids": prompt})})
    )
    if says is not None:
        with pytest.raises(FormatError, match=re.escape(says)):
            read_logprobs(path)
        return
    found = read_logprobs(path)
    assert found.ids == (*(prompt or entries), 4)
    first = 3 - len(entries)
    wanted = {first + at - 1: {id_: -0.5 - id_} for at, id_ in enumerate(entries)}
    wanted.pop(-1, None)  # nothing stands before the first token
    assert found.rows == {**wanted, 2: {4: -0.25}}


def test_answers_are_shown_up_to_four_and_dots_stand_for_more() -> None:
    for count in (2, 4, 5):
        found = [Logprobs((at, 7, 8), {0: {7: -1.0}}) for at in range(count)]
        shown = "; ".join(f"3 tokens {at},7,8,..." for at in range(min(count, 4)))
        for wanted in (None, (99,)):
            with pytest.raises(SeveralAnswersError) as raised:
                _choose_answer(Path("answers.json"), found, (), wanted)
            assert f"({shown}{'; ...' * (count > 4)})" in str(raised.value)
        assert _choose_answer(Path("answers.json"), found, (), (1, 7)) == found[1]
