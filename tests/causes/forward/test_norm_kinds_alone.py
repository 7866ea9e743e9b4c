"""Norms of the other kind: with the mean of a row taken away, or without."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.causes.forward import norm_changes

X = np.array([[1.0, 2.0, 3.0, 6.0], [4.0, 0.0, 0.0, 0.0]])
W, BIAS, EPS = np.array([1.0, 2.0, 0.5, 1.0]), np.array([0.0, 1.0, 0.0, -1.0]), 0.25


def rms_norm(x: Any, w: Any, *, eps: float) -> Any:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * w


def layer_norm(x: Any, w: Any, bias: Any, *, eps: float) -> Any:
    made = rms_norm(x - x.mean(-1, keepdims=True), w, eps=eps)
    return made if bias is None else made + bias


@pytest.mark.parametrize("points", [(), ("in",), ("mid", "out")])
def test_norms_are_exchanged_for_the_other_kind_where_they_are_chosen(
    points: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, or those behind the chosen points; in the layers of the patch."""
    made: dict[str, Any] = {}

    def with_op(name: str, override: Any, layers: Any) -> Any:
        assert layers == {2}
        made[name] = override
        return patched

    monkeypatch.setattr(norm_changes, "point_before_norm", lambda patched, at: at)
    patched: Any = SimpleNamespace(with_op=with_op)
    layers: Any = {2}
    result: Any = norm_changes.exchange_norm_kind(points)(patched, layers)
    assert result is patched and set(made) == {"rms_norm", "layer_norm"}
    for at in ("in", "mid", "out"):
        chosen = not points or at in points
        found = made["rms_norm"](rms_norm, at, X, W, eps=EPS)
        wanted = layer_norm(X, W, None, eps=EPS) if chosen else rms_norm(X, W, eps=EPS)
        assert np.allclose(found, wanted, rtol=1e-12)
        for bias in (None, BIAS):
            found = made["layer_norm"](layer_norm, at, X, W, bias, eps=EPS)
            own = layer_norm(X, W, bias, eps=EPS)
            other = rms_norm(X, W, eps=EPS) + (0 if bias is None else bias)
            assert np.allclose(found, other if chosen else own, rtol=1e-12)


def test_the_norm_before_an_mlp_is_known_beside_attention_too() -> None:
    """Seen red: a norm after attention, which no table of places has."""

    def place(point: str, *, two: bool, parallel: bool = True, layer: int = 0) -> str:
        block = SimpleNamespace(parallel_norm="two" if two else "one")
        patched: Any = SimpleNamespace(
            spec=SimpleNamespace(block=block),
            hp={"parallel_residual": parallel},
            weights={},
            n_layers=3,
        )
        return norm_changes.point_before_norm(patched, SimpleNamespace(point=point, layer=layer))

    assert place("attn", two=True) == "mid"
    assert place("attn", two=True, parallel=False) == "attn"
    assert place("attn", two=False) == "attn"
    assert [place(point, two=True) for point in ("mid", "out", "v")] == ["mid", "in", "v"]
    assert place("out", two=True, layer=3) == "out"
