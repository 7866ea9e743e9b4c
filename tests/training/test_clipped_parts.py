"""Norms of parts of the gradients, and which of them a clipping was made by.

Seen red, each alone: parts with the same gradients named twice; a part that is all of them; one
part named where two have the norm; a norm below the bound taken for one that clips.
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.training import clipped_parts
from aprfmt.causes.training.clipped_parts import (
    clipping_by_part,
    guess_clipping_by_part,
    part_norms,
)
from aprfmt.causes.training.clipping import clip_factor
from aprfmt.causes.training.optimizers import parse_recipe
from tests.training.faults import CLIP, by_sgd
from tests.training.steps import gradients

# Which parameters, by their stored name, a clipping leaves out.
LEFT_OUT: dict[str, Callable[[str], bool]] = {
    "all but layer 1": lambda name: ".layers.1." in name,
    "all but the norms": lambda name: "norm" in name,
}
DENSE = {
    "token_embd.weight": 3.0,
    "L0.attn_q.weight": 4.0,
    "L0.attn_norm.weight": 1.0,
    "L1.ffn_up_exps.weight": 5.0,
    "output_norm.weight": 2.0,
}


def test_parts_have_the_norm_of_their_gradients() -> None:
    found = part_norms(DENSE)
    assert found["all but the experts"] == pytest.approx(30**0.5)
    assert found["the experts alone"] == 5.0
    assert found["the norms alone"] == pytest.approx(5**0.5)
    assert found["all but the norms"] == pytest.approx(50**0.5)
    assert found["layers from 1 on and what is after them"] == pytest.approx(29**0.5)
    assert found["layers below 1 and what is before them"] == pytest.approx(26**0.5)


def test_a_part_is_named_once_and_is_never_all_gradients() -> None:
    """The norms are norms and biases too, and there is no head: all but the head is no part."""
    found = part_norms(DENSE)
    assert not {"all but norms and biases", "all but embedding and head"} & set(found)
    assert not {"all but the head", "the head alone", "all but the routers"} & set(found)
    assert not part_norms({"token_embd.weight": 1.0})


def test_a_tied_table_may_count_twice() -> None:
    """Seen red: a norm for a table beside a head of its own."""
    norms = {"token_embd.weight": 3.0, "L0.ffn_up.weight": 4.0}
    name = "all, with the tied table counted twice"
    assert part_norms(norms)[name] == pytest.approx(34**0.5)
    assert name not in part_norms(norms | {"output.weight": 1.0})


def test_groups_of_the_optimizer_are_parts() -> None:
    groups = [["token_embd.weight", "L0.attn_q.weight"], ["L1.ffn_up_exps.weight", "no such"]]
    found = part_norms(DENSE, groups)
    assert found["group 0 of the optimizer"] == 5.0
    assert "group 1 of the optimizer" not in found  # the experts alone


@pytest.mark.parametrize(
    ("parts", "factor", "names"),
    [
        ({"a": 4.0, "b": 3.0}, clip_factor(1.0, 4.0), ["a"]),
        ({"a": 4.0, "b": 4.0}, clip_factor(1.0, 4.0), ["a", "b"]),
        ({"a": 4.0, "b": 3.0}, 1.001 * clip_factor(1.0, 4.0), []),
        ({"a": 0.5, "b": 3.0}, 1.0, []),  # its norm is below the bound: nothing is clipped
    ],
)
def test_a_factor_says_by_which_part_was_clipped(
    parts: dict[str, float], factor: float, names: list[str]
) -> None:
    found = clipping_by_part(parts, factor, 5.0, [1.0])
    if not names:
        assert found is None
        return
    assert found is not None and found[1] == (len(names) == 1)
    assert found[0] == (
        f"the gradients were clipped by the norm of {', or of '.join(names)}, 4, to 1, and not by "
        "that of all, 5"
    )


@pytest.mark.parametrize(
    ("parts", "norm", "level"),
    [
        ({"a": 4.0, "b": 3.0}, 4.0, ["confirmed"]),
        ({"a": 4.0, "b": 4.0}, 4.0, ["explained", "explained"]),
        ({"a": 5.0, "b": 3.0}, 5.0, []),  # as by the norm of all
        ({"a": 4.0, "b": 3.0}, 4.5, []),  # by no norm that is known
        ({"a": 0.5, "b": 3.0}, 0.5, []),  # below the bound
    ],
)
def test_a_step_is_clipped_by_a_part_only_where_its_norm_alone_says_so(
    parts: dict[str, float], norm: float, level: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    factor = clip_factor(1.0, norm)
    monkeypatch.setattr(clipped_parts, "measured_factor", lambda case, recipe: (factor, 0.0))
    case: Any = SimpleNamespace(
        others={"norm": 5.0}, signs=False, gradient=object(), coarse=False, part_norms=parts
    )
    recipe = parse_recipe("sgd:lr=0.1,clip=1")
    assert [one.most for one in guess_clipping_by_part(case, recipe)] == level
    absences: list[dict[str, object]] = [{"others": {}}, {"gradient": None}, {"signs": True}]
    for without in absences:
        less: Any = SimpleNamespace(**{**vars(case), **without})
        assert not list(guess_clipping_by_part(less, recipe))


@pytest.mark.parametrize("left", LEFT_OUT)
def test_parameters_that_a_clipping_left_out_are_told_from_those_that_it_had(
    left: str, tmp_path: Path
) -> None:
    """Seen red: "all gradients were clipped", beside others that were not."""
    out = LEFT_OUT[left]
    norm = sum(float(np.square(g).sum()) for n, g in gradients(1).items() if not out(n)) ** 0.5
    made = by_sgd(lambda name: 1.0 if out(name) else clip_factor(CLIP, norm), CLIP)
    found = {one.cause: one for one in made.report(tmp_path).causes}
    missing = found.pop("clip_missing")
    (other,) = found.values()
    assert all(("L1." if left == "all but layer 1" else "norm") in key for key in missing.roles)
    assert "; those of other parameters were clipped" in missing.says
    assert other.cause in ("clip_by_part", "clip_by_tensor") and "all gradients" not in other.says
    every = by_sgd(lambda name: 1.0, CLIP).report(tmp_path / "every")
    assert [one.cause for one in every.causes] == ["clip_missing"]
    assert "of other parameters" not in every.causes[0].says


# What the norm of all gradients counts otherwise than once, by the stored name: how often.
COUNTS: dict[str, Callable[[str], float]] = {
    "all with the norms counted 4 times": lambda name: 4 if "norm" in name else 1,
    "all with the norms counted 2 times": lambda name: 2 if "norm" in name else 1,
    "all with the embedding counted 2 times": lambda name: 2 if "embed" in name else 1,
    "all with 1/2 of the embedding": lambda name: 0.5 if "embed" in name else 1,
    "all counted 2 times (as where 2 ranks of equal gradients add their squares)": lambda name: 2,
    "all counted 4 times (as where 4 ranks of equal gradients add their squares, "
    "or 2 their norms)": lambda name: 4,
    "all counted 9 times (as where 3 ranks of equal gradients add their norms)": lambda name: 9,
    "1/2 of all": lambda name: 0.5,
}


@pytest.mark.parametrize("says", COUNTS)
def test_a_norm_in_which_a_part_counts_several_times_is_named(says: str, tmp_path: Path) -> None:
    """Seen red: "the step is 0.984 times the expected one", of norms counted 4 times."""
    count = COUNTS[says]
    norm = sum(count(n) * float(np.square(g).sum()) for n, g in gradients(1).items()) ** 0.5
    (found,) = by_sgd(lambda name: clip_factor(CLIP, norm), CLIP).report(tmp_path).causes
    assert (found.cause, found.level) == ("clip_by_part", "confirmed")
    assert f"clipped by the norm of {says}, {norm:.4g}, to {CLIP:g}" in found.says


def test_another_norm_that_clips_is_said_beside_the_factor(tmp_path: Path) -> None:
    """No part and no count gives it: the norm that would is said all the same."""
    norm = sum(float(np.square(g).sum()) for g in gradients(1).values()) ** 0.5
    made = by_sgd(lambda name: clip_factor(CLIP, 1.3717 * norm), CLIP)
    (found,) = made.report(tmp_path).causes
    assert (found.cause, found.level) == ("step_factor", "confirmed")
    said = f"as of clipping to {CLIP:g} by a norm of {1.3717 * norm:.4g}; that of all is {norm:.4g}"
    assert said in found.says
    (longer,) = by_sgd(lambda name: 3.5 / norm, CLIP).report(tmp_path / "longer").causes
    (plain,) = by_sgd(lambda name: 0.77).report(tmp_path / "plain").causes
    assert "as of clipping" not in longer.says + plain.says


def test_counted_norms_are_those_of_one_kind_more_or_less_often() -> None:
    """Seen red, each: counts of all but one kind, of a stage, or of a part without a gradient."""
    parts = {"the norms alone": 3.0, "all but the norms": 4.0, "layers below 1": 2.0}
    found = clipped_parts.counted_norms(parts | {"the biases alone": 0.0}, 5.0)
    assert found["all with the norms counted 8 times"] == pytest.approx((25 + 7 * 9) ** 0.5)
    assert found["all with 1/4 of the norms"] == pytest.approx((25 - 0.75 * 9) ** 0.5)
    assert found["1/2 of all"] == pytest.approx(12.5**0.5)
    whole = {name: size for name, size in found.items() if "the norms" not in name}
    assert all(name.startswith(("all counted ", "1/")) for name in whole)
    assert not any("all but" in name for name in found)
    assert whole == clipped_parts.counted_norms({}, 5.0)


def test_few_bits_tell_no_counts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"the norms alone": 3.0}
    factor = clip_factor(1.0, (25 + 9) ** 0.5)
    monkeypatch.setattr(clipped_parts, "measured_factor", lambda case, recipe: (factor, 0.0))
    known: dict[str, Any] = {
        "others": {"norm": 5.0}, "signs": False, "gradient": object(), "coarse": False,
        "part_norms": parts,
    }  # fmt: skip
    recipe = parse_recipe("sgd:lr=0.1,clip=1")
    right: Any = SimpleNamespace(**known)
    (found,) = clipped_parts.guess_counted_parts(right, recipe)
    assert "counted 2 times" in found.says and found.most == "confirmed"
    assert not list(clipped_parts.guess_counted_parts(right, parse_recipe("sgd:lr=0.1")))
    absences: list[dict[str, Any]] = [
        {"coarse": True},
        {"others": {}},
        {"part_norms": {"layers below 1": 3.0}},
    ]
    for less in absences:
        case: Any = SimpleNamespace(**{**known, **less})
        assert not list(clipped_parts.guess_counted_parts(case, recipe))
