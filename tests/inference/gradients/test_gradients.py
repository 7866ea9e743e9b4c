"""Gradients of a batch by autograd through the own pass, against transformers in float64.

Seen red, each alone: a router's weights cut from the graph; a stacked expert's leaf not the one
that the pass reads; `apply` in place of the way back of a step (qwen3_vl_moe); the labels of a
prompt scored; the mean over rows in place of the mean over tokens; the
lower pass in float64.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from aprfmt.conversion import convert
from aprfmt.errors import UsageError
from aprfmt.inference.batch import read_batch
from aprfmt.inference.gradients.backend import GradientBackend, PlacedPair
from aprfmt.inference.gradients.batch_gradients import BatchGradients, batch_gradients, rounding
from aprfmt.model import open_model
from aprfmt.tensors.view import decode_tensor
from tests.inference.gradient_judge import JudgedGradients, judged_gradients
from tests.models import EVERY, IDS

# Between our float64 and transformers', its norms and rope put to float64.
LOSS, GRADIENT = 1e-12, 1e-9


def computed(judge: JudgedGradients, **how: object) -> BatchGradients:
    """Return our gradients of the judge's batch, in both layouts."""
    with open_model(judge.folder) as model:
        batch = read_batch(judge.batch, int(model.hyper["vocab_size"]))
        found = batch_gradients(model, batch, **how)  # type: ignore[arg-type]
        assert found.parameters
        return found


def apart(mine: np.ndarray, other: np.ndarray) -> float:
    """Return the relative L2 distance; of a gradient that is zero but for rounding, the size."""
    assert mine.shape == other.shape
    size = float(np.linalg.norm(other))
    return float(np.linalg.norm(mine - other)) / (size if size > 1e-13 else 1.0)


def check(mine: BatchGradients, judge: JudgedGradients) -> None:
    """Hold every gradient of the judge against ours."""
    assert abs(mine.loss - judge.loss) < LOSS
    assert len(judge.gradients) > 5
    for name, expected in judge.gradients.items():
        if name in mine.parameters:
            assert apart(mine.parameters[name], expected) < GRADIENT, name
        else:
            assert not expected.any(), name


@pytest.mark.parametrize("name", EVERY)
def test_every_gradient_is_transformers(name: str, tmp_path: Path) -> None:
    judge = judged_gradients(name, tmp_path)
    check(computed(judge), judge)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mamba2", "gemma3n"])
def test_one_layer_at_a_time_gives_the_same(name: str, tmp_path: Path) -> None:
    judge = judged_gradients(name, tmp_path, padded=name == "llama")
    mine = computed(judge, activations="layer", points=None)
    check(mine, judge)
    whole = computed(judge, points=None)
    assert whole.points.keys() == mine.points.keys() and len(mine.points) > 20
    for key, gradient in whole.points.items():
        assert apart(mine.points[key], gradient) < GRADIENT, key


@pytest.mark.parametrize("activations", ["all", "layer"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_padding_token_that_is_read_has_one_of_two_gradients(
    name: str, activations: str, tmp_path: Path
) -> None:
    """transformers' embedding passes none to its row. Seen red: a sound trainer differed."""
    table = "token_embd.weight"
    judge = judged_gradients(name, tmp_path, pad_token_id=IDS[4])
    theirs = judge.gradients["model.embed_tokens.weight"]
    mine = computed(judge, activations=activations)
    own = mine.gradient(table)
    assert apart(own, theirs) > 1e-3
    assert apart(mine.gradient_near(table, theirs), theirs) < GRADIENT
    assert np.array_equal(mine.gradient_near(table, own), own)
    assert [*np.flatnonzero((own != mine.gradient_near(table, theirs)).any(1))] == [IDS[4]]


@pytest.mark.parametrize("name", ["llama", "qwen2_moe", "gpt2", "lfm2", "qwen3_5"])
def test_the_streams_gradients_are_transformers(name: str, tmp_path: Path) -> None:
    judge = judged_gradients(name, tmp_path)
    with open_model(judge.folder) as model:
        layers = int(model.hyper["n_layers"])
    first = "embd_scaled" if name == "gpt2" else "embd"
    keys = [first, *(f"L{i}.out" for i in range(layers - 1)), "final_norm"]
    mine = computed(judge, points=keys)
    assert len(judge.streams) == len(keys) == len(mine.points)
    for key, expected in zip(keys, judge.streams, strict=True):
        assert apart(mine.points[key], expected) < GRADIENT, key


def test_points_of_the_router_are_in_the_graph(tmp_path: Path) -> None:
    judge = judged_gradients("mixtral", tmp_path)
    mine = computed(judge, points=["L1.router", "L1.expert_w", "L1.probs", "L2.ffn_out"])
    assert {"L1.router", "L1.expert_w"} <= mine.points.keys()
    assert all(np.abs(mine.points[key]).max() > 0 for key in mine.points)


def test_a_pair_at_a_router_is_added_once() -> None:
    """Deterministic products of a router are those of `linear`, which adds the pair."""

    class Role:
        key, n_rows, n_columns = "L0.ffn_gate_inp.weight", 3, 4

        def placed_on(self, backend: GradientBackend) -> torch.Tensor:
            return torch.zeros(3, 4, dtype=torch.float64)

        array = placed_on

    x = torch.ones(2, 4, dtype=torch.float64)
    pair = PlacedPair(x[:1], torch.ones(3, 1, dtype=torch.float64), 0.5)
    for deterministic in (False, True):
        backend = GradientBackend("cpu", "float64")
        backend.deterministic, backend.pairs = deterministic, {Role.key: pair}
        with torch.no_grad():
            y = backend.router(x, Role(), None, rounded=False)  # type: ignore[arg-type]
        assert (y == 2.0).all()


def test_a_reduction_by_rows_is_the_mean_of_the_rows(tmp_path: Path) -> None:
    judge = judged_gradients("qwen2", tmp_path, padded=True)
    loaded = dict(np.load(judge.batch))
    losses = []
    for row in (0, 1):
        np.savez(tmp_path / f"{row}.npz", **{key: x[row : row + 1] for key, x in loaded.items()})
        with open_model(judge.folder) as model:
            batch = read_batch(tmp_path / f"{row}.npz", int(model.hyper["vocab_size"]))
            losses.append(batch_gradients(model, batch, trained=["model.norm.weight"]))
            assert losses[-1].parameters
    mine = computed(judge, reduction="rows", trained=["model.norm.weight"])
    assert set(mine.parameters) == {"model.norm.weight"}
    assert abs(mine.loss - (losses[0].loss + losses[1].loss) / 2) < LOSS
    one, other = (each.parameters["model.norm.weight"] for each in losses)
    assert apart(mine.parameters["model.norm.weight"], (one + other) / 2) < GRADIENT


def test_rounding_of_the_trainers_dtype_is_a_ratio(tmp_path: Path) -> None:
    judge = judged_gradients("llama", tmp_path)
    exact = computed(judge)
    for dtype, low, high in (("float32", 1e-9, 1e-4), ("bfloat16", 1e-4, 0.2)):
        ratios = dict(rounding(exact, computed(judge, dtype=dtype)))
        assert set(ratios) == set(exact.keys)
        assert all(low < ratio < high for ratio in ratios.values()), (dtype, ratios)


def test_what_is_wrong_with_a_request_is_said(tmp_path: Path) -> None:
    judge = judged_gradients("llama", tmp_path)
    with pytest.raises(UsageError, match=r"no parameter 'model\.nrom\.weight'"):
        computed(judge, trained=["model.nrom.weight"])
    ids = np.load(judge.batch)["input_ids"]
    np.savez(tmp_path / "none.npz", input_ids=ids, labels=np.full_like(ids, -100))
    with open_model(judge.folder) as model:
        batch = read_batch(tmp_path / "none.npz", int(model.hyper["vocab_size"]))
        with pytest.raises(UsageError, match="no label is scored"):
            batch_gradients(model, batch)


@pytest.mark.parametrize(
    ("name", "step"),
    [("llama", "RowsPermuted"), ("gemma", "Added"), ("mamba", "NegativeExp"), ("mixtral", "")],
)
def test_a_gguf_gives_its_own_layout(name: str, step: str, tmp_path: Path) -> None:
    """Rows in GGUF's order, an added constant left out, a stored -exp(x) divided by."""
    judge = judged_gradients(name, tmp_path)
    convert(judge.folder, tmp_path / "a.gguf")
    source = computed(judge)
    seen: set[str] = set()
    with open_model(tmp_path / "a.gguf") as model, open_model(judge.folder) as folder:
        batch = read_batch(judge.batch, int(model.hyper["vocab_size"]))
        mine = batch_gradients(model, batch)
        for role, view in model.roles.items():
            there = folder.roles[role]
            expected = there.undo_layout([source.parameters[each] for each in there.names])
            found = [mine.parameters[each] for each in view.names]
            steps = [str(each) for each in view.layout]
            seen.update(each.partition("(")[0] for each in steps)
            if any(each.startswith("NegativeExp") for each in steps):
                found = [found[0] * decode_tensor(view.stored[0])]
            if all(each.permutes for each in view.layout):
                found = [view.undo_layout(found)]
            assert apart(found[0].reshape(expected.shape), expected) < 1e-5, role
    assert step in seen or not step


@pytest.mark.parametrize("kept", [1, 3])
@pytest.mark.parametrize("reduction", ["tokens", "rows"])
def test_the_labels_of_a_loss_are_counted(reduction: str, kept: int, tmp_path: Path) -> None:
    """Those that are scored and no others: neither -100 nor the first of a row, which none has."""
    judge = judged_gradients("llama", tmp_path)
    ids = np.load(judge.batch)["input_ids"]
    labels = np.full_like(ids, -100)
    labels[:, : 1 + kept] = ids[:, : 1 + kept]
    np.savez(judge.batch, input_ids=ids, labels=labels)
    found = computed(judge, reduction=reduction, trained=["model.norm.weight"])
    assert found.scored == len(ids) * kept
