"""Formulas of a model's own sizes and keys that give a factor which a run had in place of its own.

A number that fits says what the run did. Where a formula gives the same number, to 5 digits, it
says whence the number came: the scores' factor of another width, or of another key of YaRN.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from aprfmt.arch.rope_hf import yarn_mscale
from aprfmt.causes.forward.mismatch import Change

ALIKE = 1e-5  # relative difference of two factors that are one number
WIDTHS = ("qk_nope_head_dim", "qk_rope_head_dim", "value_dim", "kv_lora_rank", "hidden_size")


def says_with_formula(hp: Mapping[str, Any], change: Change) -> str:
    """Return a change's sentence, with the formula that gives its number where there is one.

    `hp` are the model's hyperparameters. It is for changes of one hyperparameter, a factor.
    """
    for name, value in change.values.items():
        if len(change.values) > 1 or not isinstance(value, float) or value == 1:
            continue  # a factor that is left out needs no formula
        for words, number in _formulas(hp, name):
            if math.isclose(number, value, rel_tol=ALIKE):
                head, model, tail = change.says.partition("; the model says")
                return f"{head}, which is {words}{model}{tail}"
    return change.says


def _formulas(hp: Mapping[str, Any], name: str) -> Iterator[tuple[str, float]]:
    """Yield (formula in words, its number) of what engines compute a factor from."""
    if name == "attn_scale":
        yield from _score_formulas(hp)
    if name == "embedding_scale":
        yield "sqrt(hidden_size)", float(hp["hidden_size"]) ** 0.5
        yield "1 / sqrt(hidden_size)", float(hp["hidden_size"]) ** -0.5
    if name == "residual_scale":
        layers = float(hp["n_layers"])
        yield "1 / sqrt(layers)", layers**-0.5
        yield "1 / sqrt(2 layers)", (2 * layers) ** -0.5
        yield "1 / layers", 1 / layers
    if name == "logit_scale":
        yield "1 / sqrt(hidden_size)", float(hp["hidden_size"]) ** -0.5


def _score_formulas(hp: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (formula in words, its number) of factors on attention's scores."""
    scaling, plain = hp["rope_scaling"], float(hp["head_dim"]) ** -0.5
    known = [name for name in WIDTHS if name in hp]  # to ask for one that is not known is an error
    widths = {name: float(hp[name]) for name in known if hp[name]}
    for name, width in widths.items():
        if width != float(hp["head_dim"]):
            yield f"1 / sqrt({name})", width**-0.5
    shared = float(hp["hidden_size"]) / max(1.0, float(hp["n_heads"]))
    if shared != float(hp["head_dim"]):
        yield "1 / sqrt(hidden_size / heads)", shared**-0.5
    if not scaling or scaling.get("type") != "yarn":
        return
    for key in ("mscale", "mscale_all_dim"):
        given = scaling.get(key)
        if given:
            factor = yarn_mscale(float(scaling["factor"]), float(given))
            what = f"YaRN's factor {factor:.6g} of rope_scaling's {key}"
            yield f"1 / sqrt(head_dim) times the square of {what}", plain * factor**2
            yield f"1 / sqrt(head_dim) times {what}", plain * factor
