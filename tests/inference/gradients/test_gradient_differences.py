"""Gradients checked without a backward pass, against those of autograd and with seeded faults.

Seen red, each alone: a weight restarted one stage too late; the labels of a prompt scored; a
tolerance of one for the residual; a factor asked of one direction.
"""

import tempfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.errors import UsageError
from aprfmt.inference.batch import read_batch
from aprfmt.inference.gradients.batch_gradients import BatchGradients, batch_gradients
from aprfmt.inference.gradients.differences import (
    BatchLoss,
    GradientCheck,
    check_gradient,
    parts_of,
)
from aprfmt.model import Model, open_model
from tests.inference.gradient_judge import write_batch
from tests.models import EVERY, save_tiny

_FOLDER = tempfile.TemporaryDirectory(prefix="aprfmt-differences-")
Array = np.ndarray


@cache
def made(name: str) -> tuple[Model, BatchGradients, BatchLoss]:
    """Return a tiny model, its gradients by autograd and its loss as a function."""
    folder = Path(_FOLDER.name) / name
    save_tiny(name, folder)
    write_batch(folder / "batch.npz", True)
    model = open_model(folder)
    batch = read_batch(folder / "batch.npz", int(model.hyper["vocab_size"]))
    return model, batch_gradients(model, batch), BatchLoss(model, batch)


def checked(name: str, role: str, change: Callable[[Array], Array]) -> GradientCheck:
    """Check a role's right gradient after a change."""
    model, right, loss = made(name)
    given = change(right.gradient(role).copy())
    return check_gradient(loss, role, given, parts=parts_of(model, role, given.shape))


# A clip, or a top-k whose edge moves: the loss has kinks close to everywhere.
KINKS = ("gemma3n", "gemma3n-own", "mpt-clip", "olmoe-clip")


@pytest.mark.parametrize("name", EVERY)
def test_two_passes_agree(name: str) -> None:
    """Some roles of every model, others of another: those whose names hash lowest."""
    _, right, loss = made(name)
    assert abs(right.loss - loss.loss) < 1e-11
    assert set(right.by_role) <= loss.first.keys()
    chosen = sorted(right.by_role, key=lambda role: zlib.crc32(f"{name} {role}".encode()))[:4]
    for role in chosen:
        found = check_gradient(loss, role, right.gradient(role), directions=1)
        assert found.agrees, (role, found)
        if not found.measured:  # softmax does not see what is added to every key
            assert np.abs(right.gradient(role)).max() < 1e-12, role
            continue
        assert found.apart < (1e-3 if name in KINKS else 1e-5), (role, found)
        twice = check_gradient(loss, role, 2 * right.gradient(role), directions=1)
        assert not twice.agrees, (role, twice)
    made.cache_clear()


FAULTS: dict[str, tuple[str, Callable[[Array], Array], str, float | None]] = {
    "eight times": ("L1.attn_q.weight", lambda g: 8 * g, "factor", 8),
    "half": ("token_embd.weight", lambda g: g / 2, "factor", 0.5),
    "sign": ("L0.ffn_down.weight", lambda g: -g, "sign", -1),
    "zero": ("L2.attn_norm.weight", lambda g: 0 * g, "zero", None),
    "noise": ("L1.ffn_up.weight", lambda g: np.roll(g, 3, 0), "other", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_named(fault: str) -> None:
    role, change, wrong, factor = FAULTS[fault]
    found = checked("llama", role, change)
    assert not found.agrees and found.wrong == wrong
    assert factor is None or found.factor == pytest.approx(factor, rel=1e-4)
    assert "true gradient" in found.says or wrong == "other"


def test_a_square_matrix_that_is_transposed_is_named() -> None:
    found = checked("llama-square", "L0.attn_q.weight", lambda g: 3 * g.T)
    assert found.wrong == "transposed" and found.factor == pytest.approx(3, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "role", "part", "index"),
    [
        ("llama", "L1.attn_k.weight", "kv head 1", None),
        ("llama", "L1.attn_output.weight", "head 2", None),
        ("mixtral", "L1.ffn_up_exps.weight", "expert 3", None),
    ],
)
def test_a_part_that_is_wrong_is_placed(name: str, role: str, part: str, index: None) -> None:
    model, right, _ = made(name)
    mask = parts_of(model, role, right.gradient(role).shape)[part]
    found = checked(name, role, lambda g: np.where(mask, 0.5 * g, g))
    assert found.wrong == "parts" and [p.part for p in found.parts if not p.agrees] == [part]
    assert part in found.says and len(found.parts) > 1


@pytest.mark.parametrize("role", ["token_embd.weight", "output.weight"])
def test_rows_of_padding_are_a_part_of_their_own(role: str) -> None:
    """Seen red: the range of rows that the padding's token is in."""
    model, right, loss = made("llama")
    given = right.gradient(role).copy()
    unused = np.flatnonzero(~np.abs(right.gradient("token_embd.weight")).any(1))[:2]
    given[unused] += np.abs(given).max()
    parts = parts_of(model, role, given.shape, unused.tolist())
    assert sum(mask.sum() for mask in parts.values()) == given.size
    found = check_gradient(loss, role, given, parts=parts)
    assert [one.part for one in found.parts if not one.agrees] == ["the rows of padding"]
    assert "the rows of padding" in found.says
    assert "the rows of padding" not in parts_of(model, "L0.ffn_up.weight", (8, 4), [1])


@pytest.mark.parametrize("seed", range(12))
def test_noise_is_right_nowhere(seed: int) -> None:
    """Seen red: a part right along one direction taken for right."""
    model, right, loss = made("llama")
    role = "token_embd.weight"
    noise = np.random.default_rng(seed).normal(size=right.gradient(role).shape)
    given = noise * np.abs(right.gradient(role)).max() / 8
    parts = parts_of(model, role, given.shape)
    found = check_gradient(loss, role, given, tolerance=5e-2, parts=parts)
    assert found.wrong == "other" and "elsewhere" not in found.says


def test_a_part_without_a_gradient_is_no_right_one() -> None:
    """Rows of tokens that are not in the batch. Seen red: nothing taken for right."""
    _, right, loss = made("llama")
    role = "token_embd.weight"
    used = np.abs(right.gradient(role)).sum(1) > 0
    noise = np.random.default_rng(3).normal(size=right.gradient(role).shape)
    parts = {"used": np.repeat(used[:, None], noise.shape[1], 1)}
    parts["idle"] = ~parts["used"]
    found = check_gradient(loss, role, np.where(parts["used"], noise, 0.0), parts=parts)
    assert [part.seen for part in found.parts] == [True, False] and found.wrong == "other"


def test_a_rounded_gradient_is_no_fault() -> None:
    """bfloat16 is within its own tolerance, and outside that of float64."""
    _, right, loss = made("llama")
    role = "L1.ffn_gate.weight"
    given = right.gradient(role).astype(np.float32)
    rounded = (given.view(np.uint32) & 0xFFFF0000).view(np.float32).astype(np.float64)
    assert check_gradient(loss, role, rounded, tolerance=0.02).agrees
    assert not check_gradient(loss, role, rounded).agrees


def test_what_is_no_gradient_of_the_weight_is_refused() -> None:
    _, right, loss = made("llama")
    role = "L1.ffn_gate.weight"
    with pytest.raises(UsageError, match=r"expected .* as the weight"):
        check_gradient(loss, role, right.gradient(role)[1:])
    wrong = right.gradient(role).copy()
    wrong[0, 0] = np.nan
    with pytest.raises(UsageError, match="1 elements of the gradient are not finite"):
        check_gradient(loss, role, wrong)
    with pytest.raises(UsageError, match=r"no weight 'L1\.ffn_gaet\.weight'"):
        check_gradient(loss, "L1.ffn_gaet.weight", wrong)


def test_other_weights_are_cut_into_eight_runs_that_share_no_row() -> None:
    model, _, _ = made("llama")
    masks = list(parts_of(model, "token_embd.weight", (19, 3)).values())
    assert len(masks) == 8
    assert (np.sum(masks, axis=0) == 1).all()
    assert [int(np.flatnonzero(mask.any(1))[0]) for mask in masks] == sorted(
        int(np.flatnonzero(mask.any(1))[0]) for mask in masks
    )


@pytest.mark.parametrize(
    ("values", "moved"), [((3.0, 4.0, 0.0, 0.0), 5.0), ((0.0,) * 4, 2e-2)], ids=["some", "zeros"]
)
def test_a_weight_is_moved_by_a_share_of_its_norm(values: Any, moved: float) -> None:
    """A weight of zeros by a hundredth for each element; the derivative is the same."""
    asked = []

    def at(role: str, x: Any) -> float:
        asked.append(x - np.array(values))
        return float(2 * x[0] - x[3])

    loss: Any = SimpleNamespace(values=lambda role: np.array(values), loss_with=at, loss=1.0)
    direction = np.array([0.0, 0.0, 0.0, 10.0])
    assert BatchLoss.along(loss, "w", direction, 1e-3) == pytest.approx(-10.0)
    assert np.allclose(asked, [[0, 0, 0, moved * 1e-3], [0, 0, 0, -moved * 1e-3]])
    off = BatchLoss.rounding(loss, "w", direction, 1e-3)
    assert off == pytest.approx(32 * 2.0**-52 / (moved * 1e-4))
    assert BatchLoss.along(loss, "w", np.zeros(4)) == 0.0
