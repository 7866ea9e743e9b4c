"""State space scans by steps and by chunks, on every backend, against transformers' functions.

Seen red, each alone: the state not multiplied by the whole chunk's decay; a token's own input left
out of what it reads; heads dealt to groups in turn; the skip left out; a step's upper limit left
out; the norm over all groups together; the gate behind a norm that follows it.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aprfmt.inference import state_space_scan
from tests.inference.judge import backend, everything_float64, rel

HEADS, GROUPS, WIDTH, STATE = 6, 3, 5, 7
TOKENS = 2 * state_space_scan.CHUNK + 23  # whole chunks, and a part of one
RUNS = ("numpy:float64", "torch:float64")
scanned: Any = state_space_scan.run_scan  # stars among its arguments


def drawn(tokens: int, *, each: bool, size: float = 1.0) -> tuple[Any, ...]:
    """Return x, step, rate, b, c, skip and a state in float64; `each`: a rate a number (mamba)."""
    draw = np.random.default_rng(7)
    groups, width = (1, 1) if each else (GROUPS, WIDTH)
    x = draw.normal(size=(tokens, HEADS, width))
    step = size * draw.exponential(size=(tokens, HEADS))
    rate = -np.exp(draw.normal(size=(HEADS, STATE) if each else HEADS))
    b, c = (draw.normal(size=(tokens, groups, STATE)) for _ in range(2))
    return x, step, rate, b, c, draw.normal(size=HEADS), draw.normal(size=(HEADS, width, STATE))


def by_transformers(given: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return reads and state of transformers' own step over the tokens, in float64."""
    # What is imported while types are exchanged would keep them.
    from transformers.models.mamba import modeling_mamba as code
    from transformers.models.mamba2 import modeling_mamba2 as heads

    x, step, rate, b, c, skip, state = (torch.from_numpy(y) for y in given)
    reads, held = [], state.clone()[None]
    with everything_float64(torch.nn.Module()):
        if rate.ndim == 2:
            held = held[:, :, 0]
            for t in range(len(x)):
                args = x[None, t, :, 0], step[None, t], rate, b[t], c[t], skip
                reads.append(code.mamba_selective_state_update(held, *args)[0, :, None])
            return torch.stack(reads).numpy(), held[0, :, None].numpy()
        wide = rate[:, None, None].expand(HEADS, WIDTH, STATE)
        for t in range(len(x)):
            each = step[t, :, None].expand(HEADS, WIDTH)[None]
            passed = skip[:, None].expand(HEADS, WIDTH)
            args = x[None, t], each, wide, b[None, t], c[None, t], passed
            reads.append(heads.mamba2_selective_state_update(held, *args)[0])
    return torch.stack(reads).numpy(), held[0].numpy()


@pytest.mark.parametrize("size", [0.001, 1.0, 60.0], ids=["long", "usual", "forgetful"])
@pytest.mark.parametrize("tokens", [1, 2, state_space_scan.CHUNK, TOKENS])
@pytest.mark.parametrize("each", [True, False], ids=["mamba", "mamba2"])
def test_steps_chunks_and_torch_are_transformers_step(each: bool, tokens: int, size: float) -> None:
    inputs = drawn(tokens, each=each, size=size)
    wanted, after = by_transformers(inputs)
    *given, state = inputs
    for steps in (True, False):
        read, last = scanned(*given, state, steps=steps)
        assert rel(read, wanted) < 1e-12
        assert rel(last, after) < 1e-12
    b: Any = backend("torch:float64")
    read, last = b.scan(*(torch.from_numpy(x) for x in inputs))
    assert rel(read, wanted) < 1e-12
    assert rel(last, after) < 1e-12
    narrow = [x.astype(np.float32) for x in inputs]
    assert rel(scanned(*narrow[:-1], narrow[-1], steps=False)[0], wanted) < 5e-6


@pytest.mark.parametrize("each", [True, False], ids=["mamba", "mamba2"])
@pytest.mark.parametrize("run_", RUNS)
def test_a_sequence_may_be_cut_anywhere(run_: str, each: bool) -> None:
    b: Any = backend(run_)
    *given, skip, _ = (b.array(x) for x in drawn(TOKENS, each=each))
    x, step, rate, *ends = given
    whole, after = b.scan(x, step, rate, *ends, skip, None)
    parts, start, state = [], 0, None
    for stop in (1, 5, 64, 65, 140, TOKENS):
        part = slice(start, stop)
        read, state = b.scan(x[part], step[part], rate, *(y[part] for y in ends), skip, state)
        parts.append(b.to_numpy(read))
        start = stop
    assert rel(np.concatenate(parts), b.to_numpy(whole)) < 1e-12
    assert rel(b.to_numpy(state), b.to_numpy(after)) < 1e-12


def test_one_large_step_among_small_ones_costs_no_digits() -> None:
    """Sums of decays are taken over the tokens between: not as differences of long sums."""
    *given, state = drawn(40, each=False, size=0.01)
    given[1][7] = 3e6
    wanted, _ = scanned(*given, state, steps=True)
    for run_ in ("numpy:float32", "torch:float32"):
        b: Any = backend(run_)
        found, _ = b.scan(*(b.array(x) for x in given), b.array(state))
        assert rel(b.to_numpy(found)[9:], wanted[9:]) < 1e-6


@given(st.floats(-80, 80), st.floats(0, 2), st.floats(0.1, 9))
def test_time_steps_are_softplus_within_limits(raw: float, low: float, more: float) -> None:
    x, bias = np.array([[raw, 0.0]]), np.array([0.25, -0.5])
    wanted = torch.nn.functional.softplus(torch.from_numpy(x + bias)).clamp(low, low + more)
    for run_ in RUNS:
        b: Any = backend(run_)
        found = b.to_numpy(b.time_step(b.array(x), b.array(bias), low, low + more))
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-12)


@pytest.mark.parametrize("first", [True, False], ids=["norm first", "gate first"])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("run_", RUNS)
def test_gates_and_norms_are_transformers(run_: str, normed: bool, first: bool) -> None:
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

    draw, b = np.random.default_rng(3), backend(run_)
    x, gate = draw.normal(size=(2, 9, 12))
    norm = FalconH1RMSNormGated(12, eps=0.01, n_groups=3, norm_before_gate=first).double()
    with torch.no_grad(), everything_float64(norm):
        norm.weight.copy_(torch.from_numpy(draw.normal(size=12)))
        y, z = (torch.from_numpy(part)[None] for part in (x, gate))
        wanted = norm(y, z)[0] if normed else (y * torch.nn.functional.silu(z))[0]
    weight = b.array(norm.weight.detach().numpy()) if normed else None
    found = b.gated_scan(b.array(x), b.array(gate), weight, groups=3, eps=0.01, first=first)
    assert rel(b.to_numpy(found), wanted.numpy()) < 1e-14


@pytest.mark.parametrize("run_", ["numpy:float32", "torch:float32", "torch:bfloat16"])
@pytest.mark.parametrize("each", [True, False], ids=["mamba", "mamba2"])
def test_deterministic_scans_have_the_same_bits_in_pieces(run_: str, each: bool) -> None:
    b: Any = backend(run_, deterministic=True)
    *given, skip, _ = (b.array(x) for x in drawn(70, each=each))
    x, step, rate, *ends = given
    rate = b.wide(rate)
    whole, _ = b.scan(x, step, rate, *ends, skip, None)
    parts, state = [], None
    for part in (slice(0, 1), slice(1, 40), slice(40, 70)):
        read, state = b.scan(x[part], step[part], rate, *(y[part] for y in ends), skip, state)
        parts.append(b.to_numpy(read))
    np.testing.assert_array_equal(np.concatenate(parts), b.to_numpy(whole))
