"""Every operation of the differentiable backend against its own finite differences.

Seen red: `sigmoid` on detached numbers; the gate of a scan left out of the graph.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.inference.backends.base import Heads
from aprfmt.inference.backends.torch_maths import TORCH
from aprfmt.inference.gradients.backend import GradientBackend
from aprfmt.inference.routing import ROUTERS, choose_experts

B = GradientBackend("cpu", "float64")
MASK = np.tril(np.ones((4, 4), bool))


def heads(**how: Any) -> Heads:
    """Return attention's facts for four tokens."""
    given: dict[str, Any] = {
        "mask": MASK, "scale": 0.4, "softcap": None, "sinks": None, "cast": "float32", **how,
    }  # fmt: skip
    return Heads(**given)


def rope(x: Any, style: Any) -> Any:
    """Rotate four tokens."""
    table = B.rope_table(np.arange(4), np.array([1.0, 0.3]), factor=1.2, cast="table")
    return B.rope(x, table, style=style, cast="table")


def attended(q: Any, k: Any, v: Any, **how: Any) -> Any:
    """Return attention step by step, and fused where it can be."""
    return B.attention(q, k, v, heads(**how))


# Operation, and the shapes of its tensors.
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "rms_norm": (
        lambda x, w: B.rms_norm(x, w, eps=1e-3, offset=1, cast="after_weight"),
        ((3, 5), (5,)),
    ),
    "layer_norm": (lambda x, w, b: B.layer_norm(x, w, b, eps=1e-3), ((3, 5), (5,), (5,))),
    "layer_norm without bias": (lambda x, w: B.layer_norm(x, w, None, eps=1e-3), ((3, 5), (5,))),
    "rope half": (lambda x: rope(x, "half"), ((4, 2, 6),)),
    "rope interleaved": (lambda x: rope(x, "interleaved"), ((4, 2, 6),)),
    "attention": (attended, ((4, 4, 3), (4, 2, 3), (4, 2, 3))),
    "attention capped": (
        lambda q, k, v: attended(q, k, v, softcap=1.5),
        ((4, 4, 3), (4, 2, 3), (4, 2, 3)),
    ),
    "attention with sinks": (
        lambda q, k, v, s: attended(q, k, v, sinks=s),
        ((4, 4, 3), (4, 2, 3), (4, 2, 3), (4,)),
    ),
    "softcap": (lambda x: B.softcap(x, 2.0), ((3, 4),)),
    "silu": (lambda x: B.activate(x, "silu", steps=False), ((3, 4),)),
    "gelu_tanh": (lambda x: B.activate(x, "gelu_tanh", steps=True), ((3, 4),)),
    "gelu": (lambda x: B.activate(x, "gelu", steps=False), ((3, 4),)),
    "relu2": (lambda x: B.activate(x, "relu2", steps=False), ((3, 4),)),
    "sigmoid": (B.sigmoid, ((3, 4),)),
    "swiglu_oai": (lambda g, u: B.swiglu_oai(g, u, 3.0, 1.7), ((3, 4), (3, 4))),
    "xielu": (
        lambda x, p, n: B.xielu(x, p, n, torch.tensor(0.5).double(), torch.tensor(-1e-6).double()),
        ((3, 4), (), ()),
    ),
    "rescaled": (B.rescaled, ((3, 4), (3, 4))),
    "mix_copies": (B.mix_copies, ((3, 4), (3, 4))),
    "convolve": (B.convolve, ((6, 4), (4, 3), (4,))),
    "decay": (B.decay, ((4, 2), (2,), (2,))),
    "delta": (
        lambda q, k, v, g, b: B.delta(q, k, v, -g.abs(), b, None)[0],
        ((5, 2, 3), (5, 2, 3), (5, 4, 2), (5, 4), (5, 4)),
    ),
    "delta by channel": (
        lambda q, k, v, g, b: B.delta(q, k, v, -g.abs(), b, None)[0],
        ((5, 4, 3), (5, 4, 3), (5, 4, 2), (5, 4, 3), (5, 4)),
    ),
    "time_step": (lambda x, b: B.time_step(x, b, 0.01, 50.0), ((4, 2), (2,))),
    "scan by head": (
        lambda x, t, r, b, c, s: B.scan(x, t.abs(), -r.abs(), b, c, s, None)[0],
        ((5, 4, 3), (5, 4), (4,), (5, 2, 3), (5, 2, 3), (4,)),
    ),
    "scan by number": (
        lambda x, t, r, b, c, s: B.scan(x, t.abs(), -r.abs(), b, c, s, None)[0],
        ((5, 4, 1), (5, 4), (4, 3), (5, 1, 3), (5, 1, 3), (4,)),
    ),
    "gated_scan": (
        lambda x, g, w: B.gated_scan(x, g, w, groups=2, eps=1e-3, first=False),
        ((3, 4), (3, 4), (4,)),
    ),
    "gated_norm": (lambda x, w, g: B.gated_norm(x, w, g, "silu", eps=1e-3), ((3, 4), (4,), (3, 4))),
    "gated_norm by a sigmoid": (
        lambda x, w, g: B.gated_norm(x, w, g, "sigmoid", eps=1e-3),
        ((3, 4), (4,), (3, 4)),
    ),
    "add_weighted": (
        lambda t, y, w: B.add_weighted(t, torch.tensor([2, 0]), y, w),
        ((3, 4), (2, 4), (2,)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operations_gradient_is_its_own(name: str) -> None:
    operation, shapes = CASES[name]
    draw = torch.Generator().manual_seed(3)
    given = [
        torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes
    ]
    out = operation(*given)
    assert out.requires_grad and all(
        grad is not None
        for grad in torch.autograd.grad(out.square().sum(), given, allow_unused=True)
    )
    assert torch.autograd.gradcheck(operation, given)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_routers_weights_are_differentiable(router: str) -> None:
    hp = {
        "router": router, "n_experts_used": 2, "n_expert_groups": 2, "n_expert_groups_used": 1,
        "norm_topk": True, "routed_scale": 1.5, "router_jitter": 0.01,
    }  # fmt: skip
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn((3, 6), generator=draw, dtype=torch.float64).requires_grad_()
    scale = torch.rand(6, generator=draw, dtype=torch.float64).requires_grad_()

    def weights(x: Any, s: Any) -> Any:
        return choose_experts(x, None, hp, TORCH, s).weights

    assert torch.autograd.gradcheck(weights, (logits, scale))
