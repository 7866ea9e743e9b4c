"""Engines that misuse the correction for the choice of experts, in every family that has one."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose, forward
from aprfmt.inference import routing
from tests.diagnosis.engines import tiny_folder, trace

MODELS = (
    "ernie4_5_moe-bias", "deepseek_v3", "glm4_moe", "dots1", "exaone_moe", "minimax_m2", "hy_v3"
)  # fmt: skip
Router = Callable[..., routing.Routing]


def weighed_by(source: Callable[[Any, Any], Any], *, sums: bool) -> Callable[[Router], Router]:
    """Return a change of a router: the chosen experts are weighted by source(scores, bias)."""

    def changed(own: Router) -> Router:
        def route(m: Any, logits: Any, bias: Any, hp: Any, **more: Any) -> routing.Routing:
            found = own(m, logits, bias, hp, **more)
            soft = str(hp["router"]).startswith("softmax")
            scores = routing._softmax(m, logits) if soft else 1 / (1 + np.exp(-logits))
            weights = m.pick(source(scores, bias), found.experts)
            weights = weights / m.total(weights) if sums else weights
            return routing.Routing(
                found.experts, weights * np.float32(hp["routed_scale"]), found.margin
            )

        return route

    return changed


def without_correction(own: Router) -> Router:
    """Return a router that chooses experts by their scores alone."""
    return lambda m, logits, bias, hp, **more: own(m, logits, None, hp, **more)


def in_logits(own: Router) -> Router:
    """Return a router that adds the correction to the logits."""
    return lambda m, logits, bias, hp, **more: own(m, logits + bias, None, hp, **more)


MISTAKES: Mapping[str, Callable[[Router], Router]] = {
    "the correction for the choice of experts is in their weights, too": weighed_by(
        lambda scores, bias: scores + bias, sums=True
    ),
    "the correction is in the experts' weights, which are not divided by their sum": weighed_by(
        lambda scores, bias: scores + bias, sums=False
    ),
    "the correction is not added for the choice of experts": without_correction,
    "the correction is added to the router's logits": in_logits,
    "": lambda own: own,
}
POINTS = frozenset("embd attn_norm attn_out ffn_norm router moe_out out logits".split())


@pytest.mark.parametrize("arch", MODELS)
@pytest.mark.parametrize("says", MISTAKES)
def test_a_misused_correction_is_named(
    arch: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen red: a softmax router with a correction was tried as one without."""
    folder = tiny_folder(arch)
    wrong = {name: MISTAKES[says](own) for name, own in routing.ROUTERS.items()}
    monkeypatch.setattr(routing, "ROUTERS", wrong)
    path = trace(folder, f"misused-{len(says)}-{arch}", points=POINTS)
    monkeypatch.undo()
    found = diagnose(str(folder), str(path))
    if not says:
        assert found.verdict in ("same", "precision") and not found.findings
        return
    [finding] = found.findings
    assert (finding.cause, found.confidence) == ("moe_routing", "confirmed")
    assert finding.says == says


@pytest.mark.parametrize(
    ("operations", "after", "named"),
    [
        (("linear", "add_weighted"), ("L1.ffn_norm",), True),
        (("linear", "add_weighted"), ("L1.ffn_norm", "L1.expert_w"), False),
        (("linear", "add"), ("L1.ffn_norm",), False),
    ],
)
def test_operations_that_weigh_experts_are_said_to_read_the_weights(
    operations: tuple[str, ...], after: tuple[str, ...], named: bool
) -> None:
    calls = [SimpleNamespace(op=op) for op in operations]
    view: Any = SimpleNamespace(key="L1.moe_out", calls=calls, after=after)
    said = forward._routing_weights_text(view)
    assert said == "the routing weights of the experts (L1.expert_w), " * named
