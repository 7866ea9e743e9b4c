"""Factors and biases that a run leaves out or takes twice, each proposal by itself."""

from types import SimpleNamespace
from typing import Any

import pytest

from aprfmt.causes.forward import usual_blocks, weights

# --- factors --------------------------------------------------------------------------------------


def test_a_factor_of_the_model_is_left_out_or_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor that is near the model's own is none; learned positions have no embedding's."""
    monkeypatch.setattr(usual_blocks, "usual_embedding_factors", lambda patched: (1.0, 8.0))
    monkeypatch.setattr(usual_blocks, "_bf16_embedding_factor", lambda patched: 7.75)
    monkeypatch.setattr(usual_blocks, "factor_change", lambda *given: given)

    def tried(position: str = "rope", **own: float) -> list[Any]:
        hp = {"embedding_scale": 1.0, "residual_scale": 1.0, "logit_scale": 1.0} | own
        patched: Any = SimpleNamespace(
            hp=hp, spec=SimpleNamespace(block=SimpleNamespace(position=position))
        )
        return [one.change for one in usual_blocks._factor_mistakes(patched)]

    assert tried() == [("embedding_scale", 8.0, 1.0), ("embedding_scale", 7.75, 1.0)]
    assert tried(position="learned") == []
    assert tried(embedding_scale=8.0) == [
        ("embedding_scale", 1.0, 8.0),
        ("embedding_scale", 7.75, 8.0),
        ("embedding_scale", 0.125, 8.0),
    ]
    near = 8.0 * (1 + 1e-7)
    assert ("embedding_scale", 8.0, near) not in tried(embedding_scale=near)
    far = 8.0 * (1 + 2e-6)
    assert ("embedding_scale", 8.0, far) in tried(embedding_scale=far)
    assert tried("learned", residual_scale=0.5, logit_scale=4.0) == [
        ("residual_scale", 1.0, 0.5),
        ("residual_scale", 2.0, 0.5),
        ("logit_scale", 1.0, 4.0),
        ("logit_scale", 0.25, 4.0),
    ]
    assert tried("learned", logit_scale=0.0) == [("logit_scale", 1.0, 0.0)]


def test_a_factor_that_an_answer_took_away_is_no_weights_fault() -> None:
    """By any layer's own settings; of scales alone, and of the model's value."""

    def lost(factor: float, *own: dict[str, Any], stated: Any = None, **taken: Any) -> Any:
        model = {"residual_scale": 0.5, "rope_theta": 10000.0} if stated is None else stated
        patched: Any = SimpleNamespace(
            stated=model or None,
            hp={**model, **taken},
            own={n: ({**model, **one}, None) for n, one in enumerate(own)},
        )
        return weights._lost_factor(patched, factor)

    said = ("residual_scale", 0.5)
    assert lost(0.5, residual_scale=1.0) == said
    assert lost(0.25, residual_scale=2.0) == said
    assert lost(0.5, {"residual_scale": 1.0}) == lost(0.5, {}, {"residual_scale": 1.0}) == said
    assert lost(0.5 * (1 + 9e-5), residual_scale=1.0) == said
    assert lost(0.5 * (1 + 2e-4), residual_scale=1.0) is None
    assert lost(2.0, residual_scale=1.0) is None
    assert lost(1.0) is None, "the model's own factor is there"
    assert lost(0.5, residual_scale=0.0) is None
    assert lost(0.5, rope_theta=20000.0) is None, "no scale"
    assert lost(0.5, stated={}) is None


# --- biases ---------------------------------------------------------------------------------------


def test_biases_are_left_out_by_kind_added_twice_and_by_every_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        usual_blocks, "zero_weights_change", lambda cause, says, keys, patched: (says, keys, 0.0)
    )
    monkeypatch.setattr(
        usual_blocks,
        "scale_weights_change",
        lambda cause, says, keys, patched, times: (says, keys, times),
    )

    def tried(*keys: str) -> list[Any]:
        patched: Any = SimpleNamespace(weights=dict.fromkeys([*keys, "L0.attn_q.weight"]))
        return [one.change for one in usual_blocks._bias_mistakes(patched)]

    assert tried() == []
    q, k, down = "L0.attn_q.bias", "L0.attn_k.bias", "L0.ffn_down.bias"
    assert tried(q, k, down) == [
        ("no bias of q, k and v is added", (q, k), 0.0),
        ("no bias of q is added", (q,), 0.0),
        ("no bias of k is added", (k,), 0.0),
        ("no bias of the MLP is added", (down,), 0.0),
        ("no bias is added", (q, k, down), 0.0),
        ("the bias of attn_q and attn_k is added twice", (q, k), 2.0),
        ("the bias of attn_q is added twice", (q,), 2.0),
        ("the bias of attn_k is added twice", (k,), 2.0),
        ("the bias of ffn_down is added twice", (down,), 2.0),
        ("the biases after sums over devices are added 2 times", (down,), 2.0),
        ("the biases after sums over devices are added 4 times", (down,), 4.0),
        ("the biases after sums over devices are added 8 times", (down,), 8.0),
    ]
    # All of one kind: nothing is said twice.
    assert tried(q) == [
        ("no bias of q, k and v is added", (q,), 0.0),
        ("the bias of attn_q is added twice", (q,), 2.0),
    ]
    last = "output_norm.bias"
    assert tried(last)[0] == ("no bias of a norm is added", (last,), 0.0)
    other = "L0.ssm_dt.bias"
    assert tried(other) == [("no bias is added", (other,), 0.0)]
