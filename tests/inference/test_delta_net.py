"""The gated delta rule by steps and by chunks, and the states that a session keeps.

Seen red, each alone: the state not multiplied by the whole chunk's decay; the row of a change
taken before those above it were subtracted; the key's length not one; a state kept of a pass that
broke off; a session that goes back and keeps the later state; a short convolution that begins with
zeros behind a cache.
"""

from typing import Any

import numpy as np
import pytest
import torch

from aprfmt.errors import UsageError
from aprfmt.inference import recurrence
from aprfmt.inference.context import PassFacts
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.inference.judge import backend, everything_float64, judged, rel
from tests.models import IDS

KEYS, VALUES, KEY_DIM, VALUE_DIM = 2, 6, 5, 3
TOKENS = 2 * recurrence.CHUNK + 23  # whole chunks, and a part of one


def drawn(tokens: int, decay: float = 0.3, *, channels: bool = False) -> tuple[Any, ...]:
    """Return q, k, v, g, beta and a state in float64; `channels`: g by channel, not by head."""
    draw = np.random.default_rng(7)
    q, k = (draw.normal(size=(tokens, KEYS, KEY_DIM)) for _ in range(2))
    v = draw.normal(size=(tokens, VALUES, VALUE_DIM))
    g = -decay * draw.exponential(size=(tokens, VALUES, KEY_DIM))
    g = g if channels else g[..., 0]
    beta = draw.uniform(size=(tokens, VALUES))
    return q, k, v, g, beta, draw.normal(size=(VALUES, KEY_DIM, VALUE_DIM))


def ruled(inputs: tuple[Any, ...], steps: bool = False) -> tuple[Any, Any]:
    """Return reads and state of ours, by steps or by chunks."""
    q, k, v, g, beta, state = inputs
    return recurrence.delta_rule(q, k, v, g, beta, state, steps=steps)


def by_transformers(*inputs: Any) -> tuple[Any, Any]:
    """Return reads and state of transformers' own loop over the tokens, in float64."""
    from transformers.models.kimi_linear import modeling_kimi_linear as by_channel
    from transformers.models.qwen3_next import modeling_qwen3_next as by_head

    q, k, v, g, beta, state = (torch.from_numpy(x)[None] for x in inputs)
    rule = by_head.torch_recurrent_gated_delta_rule
    if g.ndim == 4:
        rule = by_channel.recurrent_kimi_delta_attention
        q, k = (x.repeat_interleave(VALUES // KEYS, dim=2) for x in (q, k))
    with everything_float64(torch.nn.Module()):
        read, after = rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
    return read[0].numpy(), after[0].numpy()


@pytest.mark.parametrize("channels", [False, True], ids=["by head", "by channel"])
@pytest.mark.parametrize("decay", [0.01, 0.3, 60.0], ids=["long", "usual", "forgetful"])
@pytest.mark.parametrize("tokens", [1, 2, recurrence.CHUNK, TOKENS])
def test_steps_chunks_and_torch_are_transformers_loop(
    tokens: int, decay: float, channels: bool
) -> None:
    inputs = drawn(tokens, decay, channels=channels)
    wanted, after = by_transformers(*inputs)
    for steps in (True, False):
        read, state = ruled(inputs, steps=steps)
        assert rel(read, wanted) < 1e-12
        assert rel(state, after) < 1e-12
    b = backend("torch:float64")
    read, state = b.delta(*(torch.from_numpy(x) for x in inputs))
    assert rel(read, wanted) < 1e-12
    assert rel(state, after) < 1e-12
    narrow = tuple(x.astype(np.float32) for x in inputs)
    assert rel(ruled(narrow)[0], wanted) < 5e-6


@pytest.mark.parametrize("channels", [False, True], ids=["by head", "by channel"])
def test_a_sequence_may_be_cut_anywhere(channels: bool) -> None:
    *inputs, state = drawn(TOKENS, channels=channels)
    whole, after = ruled((*inputs, state))
    parts, start = [], 0
    for stop in (1, 5, 64, 65, 140, TOKENS):
        read, state = ruled((*(x[start:stop] for x in inputs), state))
        parts.append(read)
        start = stop
    assert rel(np.concatenate(parts), whole) < 1e-12
    assert rel(state, after) < 1e-12


def test_softplus_is_exact_at_both_ends() -> None:
    a = np.array([[-800.0, -30.0, 0.0, 19.9, 20.1, 800.0]])
    rate, shift = np.zeros(6), np.zeros(6)
    found = recurrence.log_decay(a, rate, shift)[0]
    wanted = -torch.nn.functional.softplus(torch.from_numpy(a[0])).numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    for run_ in ("torch:float64", "torch:float32"):
        theirs = backend(run_).decay(*(torch.from_numpy(x) for x in (a, rate, shift)))
        np.testing.assert_allclose(theirs.numpy()[0], wanted, rtol=1e-6)


def test_convolutions_are_torchs() -> None:
    draw = np.random.default_rng(3)
    x, kernel = draw.normal(size=(9, 4)), draw.normal(size=(4, 3))
    padded = torch.nn.functional.pad(torch.from_numpy(x.T)[None], (2, 0))
    wanted = torch.nn.functional.conv1d(padded, torch.from_numpy(kernel)[:, None], groups=4)
    window = np.concatenate([np.zeros((2, 4)), x])
    for b in (backend("numpy:float64"), backend("torch:float64")):
        found = b.to_numpy(b.convolve(b.array(window), b.array(kernel)))
        assert rel(found, wanted[0].T.numpy()) < 1e-14


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
@pytest.mark.parametrize("run_", ["numpy:float64", "torch:float64"])
def test_a_session_with_a_state_can_go_back(run_: str, name: str) -> None:
    ids = list(IDS)
    with open_model(judged(name).folder) as model:
        with Session.open(model, backend(run_)) as session:
            whole = session.logits(ids)
            session.prefill(ids)
            assert session.cache is not None and session.cache.nbytes > 0
            with pytest.raises(UsageError, match=r"after 29 positions; it cannot be cut to 12"):
                session.cache.truncate(12)
            session.truncate(12)
            assert session.ids == ids[:12]
            assert rel(session.extend(ids[12:20], logits_rows="all"), whole[12:20]) < 1e-12
            session.truncate(20)  # nothing to forget: the state stays
            assert session.cache.length == 20
            assert rel(session.step(ids[20]), whole[20]) < 1e-12
            session.truncate(4)
            session.truncate(2)
            assert rel(session.step(ids[2]), whole[2]) < 1e-12
            assert session.cache.length == 3


class Breaking:
    """A recorder that ends a pass at its last layer."""

    def begin(self, facts: PassFacts) -> None: ...

    def wants(self, point: str, layer: int) -> bool:
        return (point, layer) == ("mid", 2)

    def capture(self, point: str, layer: int, x: Any) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_a_pass_that_breaks_off_leaves_the_state_as_it_was(name: str) -> None:
    ids = list(IDS)
    with open_model(judged(name).folder) as model:
        with Session.open(model, backend("numpy:float64")) as session:
            whole = session.logits(ids)
            session.prefill(ids[:10])
            with pytest.raises(KeyboardInterrupt):
                session.extend(ids[15:20], Breaking())
            assert rel(session.extend(ids[10:], logits_rows="all"), whole[10:]) < 1e-12
