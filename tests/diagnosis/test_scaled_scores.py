"""Mistakes of YaRN's factors that a factor on attention's scores equals: both are named."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from aprfmt.arch.rope_hf import yarn_mscale
from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import LONG, tiny_folder, trace

Values = Mapping[str, Any]
BEFORE = frozenset({"attn_norm", "q", "k", "v", "scores", "out"})  # without rotated queries
COARSE = frozenset({"attn_norm", "attn_out", "out"})
STREAM = frozenset({"embd", "out"})  # outputs of layers alone
ROTATED = BEFORE | {"q_rope", "k_rope"}


def with_factor(power: float) -> Callable[[Values], Values]:
    """Return other hyperparameters: rope's factor on cos and sin raised to a power."""
    return lambda hp: {
        "rope_scaling": dict(hp["rope_scaling"])
        | {"attention_factor": hp["rope_scaling"]["attention_factor"] ** power}
    }


def without_correction(hp: Values) -> Values:
    """Return other hyperparameters: MLA's scores without YaRN's correction."""
    scaling = hp["rope_scaling"]
    square = yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return {"attn_scale": hp["attn_scale"] / square}


def corrected_twice(hp: Values) -> Values:
    """Return other hyperparameters: MLA's scores with YaRN's correction once more."""
    scaling = hp["rope_scaling"]
    square = yarn_mscale(scaling["factor"], scaling["mscale_all_dim"]) ** 2
    return {"attn_scale": hp["attn_scale"] * square}


def by_formula(power: float) -> Callable[[Values], Values]:
    """Return other hyperparameters: rope's factor is YaRN's formula, times the own to a power."""

    def made(hp: Values) -> Values:
        scaling = hp["rope_scaling"]
        factor = yarn_mscale(scaling["factor"]) * scaling["attention_factor"] ** power
        return {"rope_scaling": dict(scaling) | {"attention_factor": factor}}

    return made


FAULTS = {
    "the formula's for rope's factor": ("llama-yarn-factor", by_formula(0.0)),
    "the formula's beside rope's factor": ("llama-yarn-factor", by_formula(1.0)),
    "rope's factor lost": ("llama-yarn", with_factor(0.0)),
    "rope's factor twice": ("llama-yarn", with_factor(2.0)),
    "MLA's factor lost": ("deepseek_v3-yarn", without_correction),
    "MLA's factor twice": ("deepseek_v3-yarn", corrected_twice),
}


@pytest.mark.parametrize("points", [BEFORE, COARSE, STREAM], ids=["before", "coarse", "stream"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_factor_of_yarn_and_one_of_the_scores_are_both_named(
    fault: str, points: frozenset[str]
) -> None:
    base, hp = FAULTS[fault]
    folder = tiny_folder(base)
    name = f"scores-{fault.replace(' ', '-')}-{len(points)}"
    found = diagnose(str(folder), str(trace(folder, name, ids=LONG, points=points, hp=hp)))
    assert found.lead is not None
    assert {found.cause, *found.lead.also} == {"rope_scaling", "attention_scale"}, found.sentence
    assert found.lead.certainty == "explained"  # what two causes differ by is not decided


@pytest.mark.parametrize("more", [{"norm_eps": 1e-5}, {"rope_theta": 10000.0}], ids="|".join)
def test_both_are_named_beside_another_mistake_of_the_layer(more: dict[str, float]) -> None:
    """Seen red: rope_scaling alone was confirmed beside the other mistake."""
    folder = tiny_folder("deepseek_v3-yarn")
    run = trace(folder, f"scores-beside-{'-'.join(more)}", ids=LONG, points=STREAM,
                hp=lambda hp: {**corrected_twice(hp), **more})  # fmt: skip
    found = diagnose(str(folder), str(run))
    of_scores, other = sorted(found.findings, key=lambda finding: finding.cause in more)
    assert {of_scores.cause, *of_scores.also} == {"rope_scaling", "attention_scale"}
    assert of_scores.certainty == "explained", found.sentence
    assert (other.cause, other.also, other.certainty) == (*more, (), "confirmed")


def test_rotated_queries_tell_ropes_factor_from_one_of_the_scores() -> None:
    folder = tiny_folder("llama-yarn")
    run = trace(folder, "scores-rotated", ids=LONG, points=ROTATED, hp=with_factor(0.0))
    found = diagnose(str(folder), str(run))
    assert found.lead is not None
    assert (found.cause, found.lead.also) == ("rope_scaling", ()), found.sentence
    assert found.lead.certainty == "confirmed"


def test_another_factor_of_the_scores_is_no_factor_of_yarn() -> None:
    folder = tiny_folder("llama-yarn")
    run = trace(folder, "scores-half", ids=LONG, points=BEFORE, hp={"attn_scale": 0.125})
    found = diagnose(str(folder), str(run))
    assert found.lead is not None
    assert (found.cause, found.lead.also) == ("attention_scale", ()), found.sentence
    assert found.lead.certainty == "confirmed"


def test_the_formulas_factor_where_only_a_part_is_rotated_is_rope_s_alone() -> None:
    """Of MLA a few elements of a head turn, so that no factor of the scores has this effect."""
    folder = tiny_folder("deepseek_v3-yarn")  # its factor is a quotient of two formulas
    run = trace(folder, "formula-of-mla", ids=LONG, points=COARSE, hp=by_formula(0.0))
    found = diagnose(str(folder), str(run))
    assert found.lead is not None
    assert (found.cause, found.lead.also) == ("rope_scaling", ()), found.sentence
    assert found.lead.certainty == "confirmed" and "is the formula's" in found.lead.says
