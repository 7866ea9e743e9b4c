"""Formulas that are said with a fitted factor.

Seen red: a factor of the scores of YaRN's other key was a bare number.
"""

from typing import Any

import pytest

from aprfmt.arch.rope_hf import yarn_mscale
from aprfmt.causes.forward.factor_formulas import says_with_formula
from aprfmt.causes.forward.mismatch import Change

YARN = {"type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}
HP: dict[str, Any] = {
    "head_dim": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "value_dim": 20,
    "kv_lora_rank": 32, "hidden_size": 72, "n_heads": 6, "n_layers": 18, "rope_scaling": YARN,
}  # fmt: skip
PLAIN = 24**-0.5


def said(name: str, value: float, **hp: Any) -> str:
    """Return the clause on the formula, "" without one."""
    change = Change("x", f"it is {value:g}; the model says 2", (name,), values={name: value})
    found = says_with_formula(HP | hp, change)
    assert found.startswith(f"it is {value:g}") and found.endswith("; the model says 2")
    return found.removeprefix(f"it is {value:g}").removesuffix("; the model says 2")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("attn_scale", PLAIN * yarn_mscale(40.0, 0.707) ** 2, "the square of YaRN's factor 1.2608"),
        ("attn_scale", PLAIN * yarn_mscale(40.0, 0.707), "1 / sqrt(head_dim) times YaRN's factor"),
        ("attn_scale", PLAIN * yarn_mscale(40.0) ** 2, "rope_scaling's mscale_all_dim"),
        ("attn_scale", 16**-0.5, "which is 1 / sqrt(qk_nope_head_dim)"),
        ("attn_scale", 20**-0.5, "which is 1 / sqrt(value_dim)"),
        ("attn_scale", 12**-0.5, "which is 1 / sqrt(hidden_size / heads)"),
        ("embedding_scale", 72**0.5, "which is sqrt(hidden_size)"),
        ("embedding_scale", 72**-0.5, "which is 1 / sqrt(hidden_size)"),
        ("residual_scale", 1 / 6, "which is 1 / sqrt(2 layers)"),
        ("residual_scale", 18**-0.5, "which is 1 / sqrt(layers)"),
        ("logit_scale", 72**-0.5, "which is 1 / sqrt(hidden_size)"),
    ],
)
def test_a_factor_is_said_with_the_formula_that_gives_it(
    name: str, value: float, words: str
) -> None:
    assert words in said(name, value)
    assert said(name, value * (1 + 3e-5)) == said(name, value * (1 - 3e-5)) == ""


@pytest.mark.parametrize("scaling", [None, YARN | {"type": "linear"}, YARN | {"mscale": None}])
def test_a_formula_needs_its_keys(scaling: Any) -> None:
    assert said("attn_scale", PLAIN * yarn_mscale(40.0, 0.707) ** 2, rope_scaling=scaling) == ""
    assert said("norm_eps", 72**-0.5) == ""
    assert said("residual_scale", 1.0, n_layers=1) == ""


def test_several_numbers_have_no_one_formula() -> None:
    values = {"embedding_scale": 72**0.5, "logit_scale": 2.0}
    change = Change("x", "two factors", (), values=values)
    assert says_with_formula(HP, change) == "two factors"
