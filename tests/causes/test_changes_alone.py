"""Changes that hypotheses make, by themselves: what they say is what they hold and do."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import rank_shares
from aprfmt.causes.forward.residual_stream import parallel_change
from aprfmt.causes.forward.single_steps import use_earlier_layer_cache
from aprfmt.causes.forward.usual_mistakes import usual_mistakes
from aprfmt.inference.replay.patched_model import PatchedModel
from aprfmt.model import open_model
from tests.diagnosis.engines import tiny_folder
from tests.models import IDS

WIDTH, ROWS = 16, 12


def product(order: Sequence[int], wrong_rows: slice | None = None) -> tuple[Any, Any]:
    """Return (mismatch, product) of ranks that have the weight's columns in another order."""
    rng = np.random.default_rng(5)
    x, w = rng.normal(size=(ROWS, WIDTH)), rng.normal(size=(8, WIDTH))
    shares = np.split(w, len(order), 1)
    y = x @ np.concatenate([shares[one] for one in order], 1).T
    if wrong_rows is not None:
        y[wrong_rows] += 0.5
    case = SimpleNamespace(patched=w, view=SimpleNamespace(tolerance=1e-6))
    return case, SimpleNamespace(key="w", x=x, output_without_bias=y)


@pytest.mark.parametrize(
    ("order", "wrong", "found"),
    [
        ((1, 0), None, [1, 0]),
        ((0, 1, 3, 2), None, [0, 1, 3, 2]),  # by halves: the second is no half of another place
        ((3, 0, 1, 2), None, [3, 0, 1, 2]),
        ((2, 3, 0, 1), None, [1, 0]),
        ((0, 1), None, None),  # what every rank has is its own
        ((0, 0), None, [0, 0]),  # one of them twice
        ((1, 0), slice(1, None, 2), None),  # what the even rows show does not hold on the odd ones
    ],
)
def test_shares_of_columns_are_found_among_two_and_four_ranks(
    order: tuple[int, ...],
    wrong: slice | None,
    found: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_shares, "weight_values", lambda patched, key: patched)
    case, made = product(order, wrong)
    changes = list(rank_shares._find_column_share_order(case, made, "attn_output"))
    assert [change.values["order"] for change in changes] == ([] if found is None else [found])


@pytest.mark.parametrize("arch", ["llama", "gpt2", "phi2", "bloom"])
def test_what_is_said_of_norms_and_of_the_stream_is_what_changes(arch: str) -> None:
    """A layer norm that keeps the mean, an RMS norm that takes it away; parallel or in turn."""
    with open_model(tiny_folder(arch)) as model:
        patched = PatchedModel.unpatched(model, IDS, "float32", None)
        mistakes = [mistake.change for mistake in usual_mistakes(patched)]
        layer = patched.spec.block.norm == "layer"
        change = parallel_change(patched)
        changed = change.make(patched, None)
        patched.weights.close()
    kinds = [change for change in mistakes if change.cause == "norm_kind" and "mean" in change.says]
    of_mean = [change for change in kinds if change.values.keys() <= {"mean", "behind"}]
    places = [change for change in of_mean if "behind" in change.values]
    assert places and len(of_mean) > len(places)
    for kind in of_mean:
        assert ("take" in kind.says) == kind.values["mean"] == (not layer), kind
    one, more = (
        {len(c.values["behind"]) for c in places if word in c.says}
        for word in ("the norm ", "the norms ")
    )
    assert one <= {1} and 1 not in more
    parallel = changed.hp["parallel_residual"]
    assert parallel == change.values["parallel_residual"] != patched.hp["parallel_residual"]
    assert ("added together" in change.says) == parallel


@pytest.mark.parametrize(
    ("back", "layers", "reads"),
    [
        (1, None, [0, 0, 1, 2]),  # None: in all layers; nothing stands before the first
        (2, None, [0, 1, 0, 1]),
        (0, None, [0, 0, 0, 0]),  # the first layer's
        (1, {2}, [0, 1, 1, 3]),
        (1, {0, 3}, [0, 1, 2, 2]),
        (1, set(), [0, 1, 2, 3]),
    ],
)
def test_attention_reads_the_cache_of_the_layer_so_many_before(
    back: int, layers: Any, reads: list[int]
) -> None:
    """Keys and values apart, and a layer's own where the other's have another shape."""
    patched: Any = SimpleNamespace(with_keys_and_values=lambda read: read)
    read: Any = use_earlier_layer_cache(back)(patched, layers)
    for what, sign in (("k", 1), ("v", -1)):
        own = [np.full((2, 3), sign * layer) for layer in range(4)]
        found = [read(what, layer, own[layer]) for layer in range(4)]
        assert [int(x[0, 0]) for x in found] == [sign * layer for layer in reads]
    wider = np.zeros((2, 5))
    assert read("k", 4, wider) is wider
