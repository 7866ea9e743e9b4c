"""What may be said of a factor of gradients: nothing is left over, and all that makes it is named.

transformers made the right gradients. Seen red, each alone: a factor that leaves half of the
difference taken; the bound of agreement for what a factor leaves; each gradient's own factor
said; the first number that fits a factor said alone; a change
that leaves half of the difference taken for its reason.
"""

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from aprfmt.causes import CAUSES
from aprfmt.causes.training.backward_case import BackwardGuess
from aprfmt.causes.training.batch_samples import guess_adapter_scale
from aprfmt.causes.training.gradient_case import GradientCase
from aprfmt.causes.training.gradient_scale import factor_guess, joined_factors
from aprfmt.inference.gradients.changes import BackwardChange
from aprfmt.training.backward_mistakes import _keys_explained_by
from aprfmt.training.judgement import Judgement
from aprfmt.training.reference_gradients import _label_shares
from aprfmt.training.report import StepReport
from aprfmt.training.step import explain_step
from tests.inference.gradient_judge import write_batch
from tests.models import save_tiny

_FOLDER = tempfile.TemporaryDirectory(prefix="aprfmt-factors-")
Tensors = dict[str, torch.Tensor]


@cache
def trained(name: str, kind: str, smoothing: float = 0.0) -> tuple[Path, Path, Tensors]:
    """Return a tiny model's folder, a batch, and transformers' gradients of it in the dtype."""
    folder = Path(_FOLDER.name) / f"{name}-{kind}-{smoothing}"
    model: Any = save_tiny(name, folder / "float32").to(getattr(torch, kind))
    model.save_pretrained(folder / "model")
    ids, mask, labels = (torch.tensor(x) for x in write_batch(folder / "batch.npz", True))
    logits = model(ids, attention_mask=mask).logits[:, :-1].float()
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=smoothing
    )
    loss.backward()  # type: ignore[no-untyped-call]
    return folder / "model", folder / "batch.npz", {k: p.grad for k, p in model.named_parameters()}


def explained(
    folder: Path,
    kind: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    *,
    smoothing: float = 0.0,
    differences: bool = False,
) -> StepReport:
    """Explain changed gradients of the tiny Qwen2, each rounded to the dtype."""
    model, batch, grads = trained("qwen2", kind, smoothing)
    given = {key: change(g.float()).to(g.dtype).contiguous() for key, g in grads.items()}
    save_file(given, folder / "grads.safetensors")
    assert load_file(folder / "grads.safetensors").keys() == grads.keys()
    return explain_step(
        model, grads=[folder / "grads.safetensors"], batch=batch, differences=differences
    )


@pytest.mark.parametrize("share", [0.1, 0.0])
def test_differences_name_no_factor_where_none_fits(share: float, tmp_path: Path) -> None:
    """Smoothed labels, or noise: nearly one factor of the gradients, and a little more."""
    torch.manual_seed(3)
    found = explained(
        tmp_path,
        "float32",
        lambda g: g if share else 0.9 * g * (1 + 5e-3 * torch.randn(g.shape)),
        smoothing=share,
        differences=True,
    )
    assert found.exit_code == 1 and found.causes
    assert not any(cause.cause == "gradient_factor" for cause in found.causes)
    right = explained(tmp_path, "float32", lambda g: 0.9 * g, differences=True)
    (cause,) = right.causes
    assert (cause.cause, cause.level) == ("gradient_factor", "confirmed")
    assert "0.9 times" in cause.says


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.1, 0.14])  # rounding explains as much as 0.07
def test_noise_has_no_factor(seed: int, share: float, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    found = explained(tmp_path, "bfloat16", lambda g: g * (1 + share * torch.randn(g.shape)))
    assert found.causes and {cause.level for cause in found.causes} == {"located"}


@pytest.mark.parametrize("factor", [0.8, 1.3])
def test_neighbouring_factors_are_one(factor: float, tmp_path: Path) -> None:
    found = explained(tmp_path, "bfloat16", lambda g: factor * g)
    cause, *rest = found.causes
    assert (cause.cause, cause.level) == ("gradient_factor", "confirmed")
    # Nothing but rounding is in the gradient of a bias of keys: what fits it differs by machine.
    noise = {role for one in rest for role in one.roles}
    assert all(role.endswith("attn_k.bias") and one.level != "confirmed"
               for one in rest for role in one.roles)  # fmt: skip
    assert len(cause.roles) + len(noise) == len(found.tensors)
    assert float(cause.says.split("gradient is ")[1].split()[0]) == pytest.approx(factor, rel=5e-3)


@pytest.mark.parametrize(("share", "says"), [(0.5, False), (0.7, False), (0.95, True)])
def test_a_change_that_leaves_much_explains_nothing(share: float, says: bool) -> None:
    """All within what bfloat16 leaves: numbers that were fitted take a share of any difference."""
    rng = np.random.default_rng(9)
    right = rng.normal(size=(16, 8))
    given = right * (1 + 0.06 * rng.normal(size=right.shape))
    made = right + share * (given - right)
    computed: Any = SimpleNamespace(
        recompute=lambda change: SimpleNamespace(
            keys=("a",), gradient_near=lambda key, given: made
        ),
        rounding=lambda key: None,
    )
    compared = {"a": SimpleNamespace(found=Judgement("differs"))}
    case: Any = SimpleNamespace(
        missing=frozenset(),
        right=frozenset(),
        wrong=frozenset("a"),
        case=lambda key: GradientCase(key, given, right, coarse=True),
    )
    guess = BackwardGuess("samples_weighted", "", BackwardChange(rows=(1.02, 0.97)))
    step: Any = SimpleNamespace(compared=compared)
    found = _keys_explained_by(step, guess, computed, case)
    assert found == (frozenset("a") if says else frozenset())


@pytest.mark.parametrize(
    ("factor", "counts", "words", "level"),
    [
        (2.0, {"alpha / r": 2.0}, ("alpha / r", "summed, not averaged"), "explained"),
        (2.0, {}, ("summed, not averaged",), "confirmed"),
        (0.5, {"alpha / r": 2.0}, ("1 / (alpha / r)", "divided by 2"), "explained"),
        (24 / 23, {"tokens / labels": 24 / 23}, ("tokens / labels",), "confirmed"),
        (1.02, {"tokens / labels": 24 / 23}, (), "confirmed"),
        (1.02, {"tokens / labels": 1.0201, "other": 1.0199}, (), "confirmed"),
        (1024.0, {}, ("a loss scale",), "confirmed"),
        (65536.0, {}, ("a loss scale",), "confirmed"),
    ],
)
def test_all_that_makes_a_factor_is_named(
    factor: float, counts: dict[str, float], words: tuple[str, ...], level: str
) -> None:
    found = factor_guess(factor, 1e-6, counts)
    assert found.most == level
    said = found.says.partition("right one")[2]
    assert all(word in said for word in words) and bool(said) == bool(words)
    if factor == round(factor):
        assert f"is {factor:.0f} times" in found.says


def test_factors_are_joined_within_what_they_may_be_off() -> None:
    rng = np.random.default_rng(5)
    measured = {f"a{i}": (0.8 + rng.normal(0, 2e-3), 1e-2) for i in range(9)}
    measured |= {f"b{i}": (0.25 + rng.normal(0, 1e-4), 1e-3) for i in range(5)}
    found = joined_factors(measured, {})
    assert sorted(tuple(sorted(keys)) for _, keys in found) == [
        tuple(f"a{i}" for i in range(9)),
        tuple(f"b{i}" for i in range(5)),
    ]
    assert sorted("1/4" in guess.says for guess, _ in found) == [False, True]


@pytest.mark.parametrize(
    ("alpha", "rank"), [(16, 4), (8, 16), (16, 8), (32, 4), (8, 8), (1, 1), (16, 16)]
)
def test_each_other_factor_of_an_adapter_is_tried_once(alpha: int, rank: int) -> None:
    """What peft takes for alpha and r, rank-stabilized or not, and what is left out."""
    stated = alpha / rank
    ways = {alpha / rank**0.5, stated / rank**0.5, float(alpha), stated / rank, stated**2, 1.0}
    case: Any = SimpleNamespace(
        adapter=(stated, rank),
        wrong={"L0.attn_q.weight"},
        open=set(),
        missing=set(),
        right=set(),
        norms={},
    )
    found = list(guess_adapter_scale(case))
    assert {guess.cause for guess in found} <= {"adapter_scale"} <= CAUSES.keys()
    changes = [guess.change.adapter_scale for guess in found if guess.change is not None]
    assert len(changes) == len(found) == len(set(changes))
    np.testing.assert_allclose(
        sorted(each * stated for each in changes), sorted(ways - {stated}), rtol=1e-12
    )
    for guess, change in zip(found, changes, strict=True):
        assert f"factor {change * stated:.4g}: the stated {stated:.4g} " in guess.says
        both = "divided by r, or applied twice" in guess.says
        assert both == (stated == rank != 1 and np.isclose(change, rank)), "both give it"
    case.right = {f"L{i}.attn_q.weight" for i in range(4)}
    assert not list(guess_adapter_scale(case)), "most gradients agree"
    case.right, case.adapter = set(), None
    assert not list(guess_adapter_scale(case))


@pytest.mark.parametrize(
    ("factor", "says"),
    [
        (14 / 22, "14 / 22, labels over all positions but each sample's first"),
        (14 / 19, "14 / 19, labels over all positions but each sample's first, padding left out"),
    ],
)
def test_a_mean_over_more_than_the_labels_is_named_by_its_counts(factor: float, says: str) -> None:
    """Seen red: "0.636 times the right one", of a loss divided by all 22 tokens for 14 labels."""
    found = factor_guess(factor, 1e-5, _label_shares(14, 21, (2, 12)))
    assert found.says.endswith(f"the right one: {says}") and found.most == "confirmed"
    assert not _label_shares(22, 24, (2, 12))
