"""Checks of gates by their facts: passes of a copy, answers, hyperparameters, what is closed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.checks.gates import generation, parity, structure
from aprfmt.checks.gates.generation import Generated
from aprfmt.checks.gates.model_under_test import ModelUnderTest

# --- passes of a copy ---------------------------------------------------------------------------


def passes(hashes: dict[str, str], logits: Any) -> Any:
    return SimpleNamespace(hashes=hashes, logits=np.asarray(logits, np.float32))


HASHES = {"embd": "a", "L0.q": "b", "L0.k": "c"}
LOGITS = [[1.0, 2.0], [3.0, np.nan]]


def compared(hashes: dict[str, str], logits: Any) -> list[tuple[str, str, str]]:
    found = parity._check_passes(passes(HASHES, LOGITS), passes(hashes, logits), "gguf")
    return [(one.name, one.outcome, one.found) for one in found]


def test_a_copy_has_equal_bits_at_every_point_and_of_every_logit() -> None:
    equal = ("gguf-logits", "PASS", "equal bits")
    right = ("gguf-points", "PASS", "3 of 3 points equal")
    assert compared(dict(HASHES), LOGITS) == [right, equal]
    for wrong, first in (
        ({"embd": "x", "L0.k": "x"}, "embd"),
        ({"L0.q": "x", "L0.k": "x"}, "L0.q"),
    ):
        words = f"1 of 3 points equal, the first other one {first}"
        assert compared(HASHES | wrong, LOGITS)[0] == ("gguf-points", "FAIL", words)
    lost = {key: HASHES[key] for key in ("embd", "L0.k")}
    words = "2 of 3 points equal, the first other one L0.q"
    assert compared(lost, LOGITS)[0] == ("gguf-points", "FAIL", words)
    assert compared(HASHES | {"more": "d"}, LOGITS)[0][1] == "FAIL"
    other = ("gguf-logits", "FAIL", "other logits")
    for logits in (LOGITS[:1], [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0, 3.0], [3.0, np.nan, 1.0]]):
        assert compared(dict(HASHES), logits) == [right, other]
    assert compared(dict(HASHES), [[1.0, 2.0], [-3.0, np.nan]])[1] == other


# --- answers ------------------------------------------------------------------------------------


def answered(
    monkeypatch: pytest.MonkeyPatch,
    *,
    stop: int | None = 9,
    odd: tuple[str, ...] = (),
    stops: tuple[int, ...] = (9,),
) -> list[tuple[str, str, str]]:
    asked: list[Any] = []

    def signals(text: str, prompt: str, said: Any, decode: Any) -> list[str]:
        asked.append((text, prompt, said, decode([4])))
        return list(odd)

    monkeypatch.setattr(generation, "gibberish_signals", signals)

    def decode(ids: Any, *, skip_special: bool) -> str:
        return f"{ids} {'plain' if skip_special else 'special'}"

    tokenizer: Any = SimpleNamespace(decode=decode, stop_ids=stops)
    ids = (4, 5, 9) if stop is not None else (4, 5, 6)
    answer = Generated("the prompt", (1, 2), ids, "an answer", stop)
    prompt: Any = SimpleNamespace(
        name="p", prompt="the prompt", prompt_ids=(1, 2), expects=False, messages=()
    )
    checks = generation.judge_answer(prompt, answer, tokenizer)
    said = [i for i in ids if i != stop]
    assert asked == [("an answer", "the prompt", said, "[4] special")]
    return [(one.name, one.outcome, one.found) for one in checks]


def test_an_answer_is_shown_with_what_makes_it_unreadable_and_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = answered(monkeypatch)
    assert ("p-readable", "PASS", "'an answer'") in sound
    ended = ("p-end", "PASS", "stop token 9 '[9] special' after 2 tokens")
    assert ended in sound and ("p-tokens", "PASS", "2 ids: 1 2") in sound
    odd = answered(monkeypatch, odd=("loops", "one letter"))
    assert ("p-readable", "FAIL", "loops; one letter") in odd and ended in odd
    why = "no stop token in 3 tokens, the most that were asked for"
    assert answered(monkeypatch, stop=None)[-1][:2] == ("p-end", "NOT_RUN")
    assert answered(monkeypatch, stop=None)[-1][2] == why
    nothing = "the model names no stop token"
    assert answered(monkeypatch, stop=None, stops=())[-1][2] == nothing


# --- hyperparameters ----------------------------------------------------------------------------


class Hyper(dict[str, Any]):
    """Hyperparameters by name; `of` says where each is from."""

    def __init__(self, guessed: tuple[str, ...], **values: Any) -> None:
        usual = {
            "n_heads": 8, "n_kv_heads": 4, "global_kv_heads": None, "norm_eps": 1e-5,
            "context_length": 2048, "head_dim": 64, "rope_theta": 1e4,
        }  # fmt: skip
        super().__init__(usual | values)
        self.guessed = guessed

    def of(self, name: str) -> Any:
        return SimpleNamespace(origin="default" if name in self.guessed else "key", key="")


def plausible(
    *guessed: str, config: Any = None, position: str = "rope", **values: Any
) -> dict[str, tuple[str, str]]:
    block = SimpleNamespace(position=position)
    hyper = Hyper(guessed, **values)
    model: Any = SimpleNamespace(hyper=hyper, spec=SimpleNamespace(block=block), config=config)
    checks = structure._check_hyperparameters(model)
    return {one.name: (one.outcome, one.found) for one in checks}


def test_what_a_pass_needs_is_stated_where_no_configuration_is_beside_it() -> None:
    stated = "hyperparameters-stated"
    assert plausible()[stated][0] == "PASS"
    for name in ("norm_eps", "rope_theta", "n_heads"):
        assert plausible(name)[stated] == ("FAIL", f"1: {name}")
    assert plausible("head_dim", "context_length")[stated][0] == "PASS"
    assert plausible("rope_theta", position="learned")[stated][0] == "PASS"
    assert plausible("norm_eps", position="learned")[stated][0] == "FAIL"
    assert stated not in plausible("norm_eps", config={})


def test_heads_of_queries_are_a_multiple_of_those_of_keys() -> None:
    assert plausible()["heads-divide"] == ("PASS", "8 over 4")
    assert plausible(n_kv_heads=3)["heads-divide"] == ("FAIL", "8 over 3")
    assert plausible(n_kv_heads=0)["heads-divide"][0] == "FAIL"
    assert plausible(n_kv_heads=1)["heads-divide"] == ("PASS", "8 over 1")
    assert plausible(global_kv_heads=2)["heads-divide"] == ("PASS", "8 over 4 and 2")
    assert plausible(global_kv_heads=5)["heads-divide"] == ("FAIL", "8 over 5")
    without = plausible(n_heads=0)
    assert "heads-divide" not in without and "head-dim" not in without
    assert "rope-theta" in plausible() and "rope-theta" not in plausible(position="learned")
    assert plausible()["norm-eps"] == ("PASS", "1e-05 (key)")
    assert plausible(norm_eps="small")["norm-eps"][0] == "FAIL"


def test_metadata_is_judged_by_all_of_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "_check_hyperparameters", lambda model: ["a", "b"])
    monkeypatch.setattr(structure, "_check_conflicts", lambda subject: "c")
    monkeypatch.setattr(structure, "_check_tokenizer", lambda subject: ["d"])
    hyper = {"n_heads": (8, 4), "norm_eps": 1e-5, "vocab_size": 100, "other": 3}
    subject: Any = SimpleNamespace(model=SimpleNamespace(hyper=hyper))
    found = structure.check_metadata(subject)
    assert list(found.checks) == ["a", "b", "c", "d"]  # type: ignore[comparison-overlap]
    assert found.details == {"norm_eps": 1e-5, "n_heads": [8, 4], "vocab_size": 100}


# --- what is closed -----------------------------------------------------------------------------


def test_everything_that_was_opened_of_a_model_is_closed_before_it() -> None:
    closed: list[str] = []
    request: Any = SimpleNamespace(budget=None, accept=())
    model: Any = SimpleNamespace(close=lambda: closed.append("model"))
    with ModelUnderTest.__new__(ModelUnderTest) as subject:
        subject.model, subject.request = model, request
        subject._stack = SimpleNamespace(close=lambda: closed.append("sessions"))  # type: ignore[assignment]
        assert not closed
    assert closed == ["sessions", "model"]
