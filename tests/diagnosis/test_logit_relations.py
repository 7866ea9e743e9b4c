"""Recorded logits of another temperature, as log-probabilities, or less a number for each row.

The logits are transformers' own.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import Diagnosis, diagnose
from tests.diagnosis.engines import place, tiny_folder
from tests.field import hf

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")

IDS = [3, 17, 5, 40, 8, 21, 33, 2, 11, 29, 14, 7]
BASES = ("llama", "gemma2", "cohere")  # plain, capped, with a factor of its own


@cache
def logits(base: str) -> Any:
    """Return the logits [tokens, vocabulary] of a tiny model."""
    with torch.no_grad():
        return hf.loaded(tiny_folder(base))(torch.tensor([IDS])).logits[0].float()


def judged(base: str, name: str, made: Any) -> Diagnosis:
    """Return the diagnosis of a tiny model and a dump of these logits."""
    path: Path = place(f"logits-{base}-{name.replace(' ', '-')}.npz")
    np.savez(path, input_ids=np.array([IDS]), logits=made[None].numpy())
    return diagnose(str(tiny_folder(base)), str(path))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("temperature", [0.6, 1.25])
@pytest.mark.parametrize("form", ["logits", "log-probabilities"])
def test_a_temperature_is_named_beside_the_models_factor(
    form: str, temperature: float, base: str
) -> None:
    """Seen red: log-probabilities had no cause; logits a factor of the model alone."""
    x = logits(base) / temperature
    made = torch.log_softmax(x, -1) if form == "log-probabilities" else x
    found = judged(base, f"{form}-{temperature}", made)
    assert (found.kind, found.cause) == ("bug", "multiplier"), found.sentence
    assert found.lead is not None and found.lead.certainty == "confirmed", found.sentence
    assert f"a temperature of {temperature:g} divided the logits" in found.sentence
    assert ("logit_scale is" in found.sentence) == (base != "gemma2")


@cache
def cast_logits(base: str, kind: str) -> Any:
    """Return the logits of a tiny model that was cast to a 16-bit type and back to float32.

    The frequencies of its RoPE, which no file holds, stay rounded.
    """
    model = hf.loaded(tiny_folder(base))
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.to(getattr(torch, kind)).float()
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].float()


@pytest.mark.parametrize("base", ["llama", "cohere"])
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_frequencies_of_a_cast_module_are_named_by_logits_alone(kind: str, base: str) -> None:
    """Seen red: "no cause of the table fits", of every operation of the model."""
    found = judged(base, f"cast-{kind}", cast_logits(base, kind))
    assert (found.kind, found.cause) == ("bug", "rope_precision"), found.sentence
    assert f"made in {kind}: frequencies are rounded" in found.sentence


@pytest.mark.parametrize("base", ["llama", "cohere"])
@pytest.mark.parametrize("temperature", [0.7, 1.25])
def test_a_temperature_is_named_beside_another_fault(temperature: float, base: str) -> None:
    """Seen red: the other fault leaves more than the tolerance, and no factor was tried."""
    made = cast_logits(base, "bfloat16") / temperature
    found = judged(base, f"cast-and-{temperature}", made)
    causes = {one.cause: one for one in found.findings if one.verdict == "bug"}
    assert {*causes} == {"multiplier", "rope_precision"}, found.sentence
    assert f"a temperature of {temperature:g} divided the logits" in causes["multiplier"].says
    assert causes["multiplier"].certainty == "confirmed"


SAME: dict[str, Callable[[Any], Any]] = {
    "less one number": lambda x: x - 3.5,
    "less the largest of a row": lambda x: x - x.max(-1, keepdim=True).values,
    "less the mean of a row": lambda x: x - x.mean(-1, keepdim=True),
    "log-probabilities": lambda x: torch.log_softmax(x, -1),
}


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("name", SAME)
def test_what_no_softmax_sees_is_no_fault(name: str, base: str) -> None:
    """Seen red: "any of these operations may be wrong", of every operation of the model."""
    found = judged(base, name, SAME[name](logits(base)))
    assert found.exit_code == 0, found.sentence


@pytest.mark.parametrize("base", ["llama", "cohere"])
def test_a_factor_of_some_rows_is_no_temperature(base: str) -> None:
    x = logits(base)
    made = torch.log_softmax(x * torch.linspace(0.5, 2.0, len(x))[:, None], -1)
    found = judged(base, "rows", made)
    assert found.exit_code == 1 and "temperature" not in found.sentence, found.sentence
