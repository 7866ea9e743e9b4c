"""Check an architecture: names and layout both ways, hyperparameters, the forward pass."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aprfmt.arch.binding import bind_names, groups_for
from aprfmt.conversion import convert
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.points import POINTS
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.model import Model, open_model

_FLOAT64, _FLOAT32 = 1e-10, 1e-5  # relL2 of logits: the same sums in another order


def check_arch(model: Path | str, folder: Path, ids: Sequence[int] = ()) -> tuple[str, ...]:
    """Check an architecture's tables and forward pass on a small model of it.

    `model` is best a Hugging Face folder with float weights; copies in every format are made in
    `folder`. `ids` are tokens to run (default: a dozen spread over the vocabulary). Returns the
    names of the checks made.
    """
    with open_model(model) as opened:
        name = opened.spec.name
        found = opened.resolution.coverage
        lacking = (*found.missing, *found.accepted)
        assert not lacking, f"{name}: no tensor for {lacking}"
        assert not found.misshapen, f"{name}: shapes {found.misshapen}"
        unbound = opened.resolution.unbound
        assert not unbound, f"{name}: tensors that no binding claims: {unbound}"
        _check_names(opened)
        vocab = int(opened.hyper["vocab_size"])
        tokens = [int(i) for i in ids] or [(7 * k + 3) % vocab for k in range(12)]
        done = ["tensors", "names"]
        logits = _check_forward(opened, tokens)
        done += ["forward", "points", "causal", "steps"]
        for style, target in (("apr", "copy.apr"), ("gguf", "copy.gguf")):
            if style == "gguf" and "gguf" not in opened.spec.bindings:
                continue
            with tempfile.TemporaryDirectory(dir=folder) as place:
                _check_copy(opened, Path(model), Path(place) / target, tokens, logits)
            done.append(style)
    return tuple(done)


def _check_names(model: Model) -> None:
    """Raise AssertionError unless names made for roles in each style lead back to these roles."""
    for style in model.spec.bindings:
        groups = groups_for(model.spec, style, model.roles, model.hyper)
        names = [name for group in groups for name in group.stored]
        assert len(set(names)) == len(names), f"{model.spec.name}: {style} names occur twice"
        bound = bind_names(model.spec, style, names)
        back = {role for group in bound.groups for role in group.roles}
        lost = sorted(set(model.roles) ^ back)
        assert not lost, f"{model.spec.name}: {style} names do not lead back to {lost}"


def _run_logits(model: Model, ids: Sequence[int], dtype: str) -> Any:
    """Return the float64 logits [tokens, vocabulary] that the numpy backend computes in `dtype`."""
    backend = BACKENDS["numpy"]("cpu", dtype)
    with Session.open(model, backend) as session:
        return np.asarray(session.logits(ids), np.float64)


def _check_forward(model: Model, ids: Sequence[int]) -> Any:
    """Check the forward pass and return its float64 logits; AssertionError where it is wrong.

    Compared are float32, a changed last token, token by token, and a traced pass.
    """
    name = model.spec.name
    # Finite logits that are not all equal, and near ones in float32.
    logits = _run_logits(model, ids, "float64")
    assert np.isfinite(logits).all(), f"{name}: logits that are not finite"
    assert logits.std() > 0, f"{name}: all logits are equal"
    assert_near(
        _run_logits(model, ids, "float32"), logits, _FLOAT32, f"{name}: float32 against float64"
    )
    # A later token must not change earlier rows.
    changed = [*ids[:-1], (ids[-1] + 1) % int(model.hyper["vocab_size"])]
    other = _run_logits(model, changed, "float64")
    assert_near(other[:-1], logits[:-1], _FLOAT64, f"{name}: rows before a changed token")
    # Token by token, and traced: the same logits, all points in order.
    backend = BACKENDS["numpy"]("cpu", "float64")
    kept = KeptValues()
    with Session.open(model, backend) as session:
        rows = [session.prefill(ids[:1])[0], *(session.step(token) for token in ids[1:])]
        assert_near(np.stack(rows), logits, _FLOAT64, f"{name}: token by token against one pass")
        points = list(session.points)
        trace = session.trace(ids, points, keep=kept.keep, fetch=kept.fetch, logits_rows="all")
        came = list(trace.records)
        whole = [key for key in points if key in came]
        assert came == whole, f"{name}: points came in another order than the table's"
        for key in came:
            values = trace.recorded_values(key)
            finite = POINTS[key.rpartition(".")[2]].finite
            assert values is not None and not np.isnan(values).any(), f"{name}: {key}"
            assert np.isfinite(values).all() or not finite, f"{name}: {key}"
        assert_near(
            trace.recorded_values("logits"), logits, _FLOAT64, f"{name}: logits of the traced pass"
        )
        unread = session.weights.unused_keys()
        assert not unread, f"{name}: weights that no operation reads: {unread}"
    return logits


def _check_copy(model: Model, source: Path, target: Path, ids: Sequence[int], logits: Any) -> None:
    """Raise AssertionError unless a converted copy has the same tensors, numbers and logits."""
    convert(source, target)
    with open_model(target) as copy:
        for key, tensor in model.roles.items():
            same = np.array_equal(copy.roles[key].numpy(), tensor.numpy())
            assert same, f"{target.name}: {key} has other values"
        for name, value in model.hyper.items():
            found = copy.hyper[name]
            assert found == value, f"{target.name}: {name} is {found!r}; the source has {value!r}"
        assert_near(_run_logits(copy, ids, "float64"), logits, 1e-6, f"{target.name}: logits")


def assert_near(found: Any, expected: Any, limit: float, what: str) -> None:
    """Raise AssertionError where the relative L2 distance is not below `limit`.

    It is the distance of `found` from `expected`. `what` begins the message.
    """
    a, b = (np.asarray(x, np.float64) for x in (found, expected))
    assert a.shape == b.shape, f"{what}: shape {a.shape}; expected {b.shape}"
    distance = float(np.linalg.norm(a - b) / max(float(np.linalg.norm(b)), 1e-300))
    assert distance < limit, f"{what}: relL2 {distance:.3g}; expected below {limit:g}"
