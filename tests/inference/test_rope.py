"""Rotary frequencies against transformers' ROPE_INIT_FUNCTIONS.

Seen red: yarn's bounds truncated where the file says not, llama3's bound for long waves taken for
the short ones', its wavelengths rounded once, dynamic without its exponent, longrope long at the
original length, the linear factor multiplied.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from aprfmt.errors import ArchError
from aprfmt.inference.rope import (
    RopeKind,
    all_frequencies,
    compute_frequencies,
    keys_stay_valid,
    rotation_of_layer,
)

DIM = 24
FACTORS = [1.0 + 0.3 * i for i in range(DIM // 2)]
LONGER = [1.5 + 0.7 * i for i in range(DIM // 2)]

DYNAMIC = {"rope_type": "dynamic", "factor": 3.0}
# id -> (transformers' parameters, our normal form, length of the sequence)
CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "linear": ({"rope_type": "linear", "factor": 3.0}, {"type": "linear", "factor": 3.0}, 40),
    "dynamic-short": (DYNAMIC, {"type": "dynamic", "factor": 3.0}, 40),
    "dynamic-long": (DYNAMIC, {"type": "dynamic", "factor": 3.0}, 200),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 32},
        {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_context_length": 32},
        40,
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0,
         "original_max_position_embeddings": 16},
        {"type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": True,
         "original_context_length": 16, "attention_factor": 0.1 * np.log(4.0) + 1},
        40,
    ),
    "yarn-untruncated": (
        {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
         "original_max_position_embeddings": 4096, "truncate": False, "attention_factor": 1.3},
        {"type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_context_length": 4096, "attention_factor": 1.3},
        40,
    ),
    # The slow bound lies beyond the last element (where theta is small), the fast one before the
    # first (where it is large): both are held to the head.
    "yarn-clipped": (
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 5e3, "beta_slow": 1e-9,
         "original_max_position_embeddings": 16, "attention_factor": 1.0},
        {"type": "yarn", "factor": 4.0, "beta_fast": 5e3, "beta_slow": 1e-9, "truncate": True,
         "original_context_length": 16, "attention_factor": 1.0},
        40,
    ),
    "longrope-short": (
        {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": LONGER, "factor": 2.0,
         "original_max_position_embeddings": 32, "attention_factor": 1.1},
        {"type": "longrope", "short_factor": FACTORS, "long_factor": LONGER,
         "original_context_length": 32, "attention_factor": 1.1},
        32,
    ),
    "longrope-long": (
        {"rope_type": "longrope", "short_factor": FACTORS, "long_factor": LONGER, "factor": 2.0,
         "original_max_position_embeddings": 32, "attention_factor": 1.1},
        {"type": "longrope", "short_factor": FACTORS, "long_factor": LONGER,
         "original_context_length": 32, "attention_factor": 1.1},
        33,
    ),
    "proportional": (
        {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.6},
        {"type": "proportional", "factor": 2.0, "rotated": 2 * int(0.6 * DIM // 2)},
        40,
    ),
}  # fmt: skip


def hyper(scaling: dict[str, Any] | None, **changed: Any) -> dict[str, Any]:
    return {
        "n_layers": 2,
        "rope_layers": (True, True),
        "window_layers": (True, False),
        "rope_theta": 5000.0,
        "rope_theta_local": None,
        "rope_dim": DIM,
        "head_dim": 256,
        "global_head_dim": None,
        "rope_scaling": scaling,
        "rope_scaling_layers": "all",
        "context_length": 64,
    } | changed


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("theta", [5000.0, 10000.0, 1e6])
def test_frequencies_are_those_of_transformers(case: str, theta: float) -> None:
    theirs, ours, length = CASES[case]
    config = LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=64,
        rope_parameters=dict(theirs) | {"rope_theta": theta},
    )
    found, factor = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](
        config, torch.device("cpu"), seq_len=length
    )
    rope = compute_frequencies(hyper(ours, rope_theta=theta), RopeKind(theta, True), length)
    assert rope.inv_freq.dtype == np.float32
    np.testing.assert_allclose(rope.inv_freq, found.numpy(), rtol=3e-7)
    if case != "dynamic-long":  # its powers are of another base
        # One power in some fifty differs in torch's last bit. All else is bit equal.
        plain = compute_frequencies(hyper(None, rope_theta=theta), RopeKind(theta, False), length)
        powers = theta ** (torch.arange(0, DIM, 2, dtype=torch.float) / DIM)
        equal = plain.inv_freq == (1.0 / powers).numpy()
        assert equal.mean() > 0.8
        np.testing.assert_array_equal(rope.inv_freq[equal], found.numpy()[equal])
    assert rope.factor == pytest.approx(factor, rel=1e-15)


def test_plain_frequencies_are_bit_equal_for_common_heads() -> None:
    for theta in (10000.0, 1e6):
        for dim in (16, 64):
            exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
            expected = 1.0 / (theta**exponents)
            rope = compute_frequencies(
                hyper(None, rope_theta=theta, rope_dim=dim), RopeKind(theta, False), 10
            )
            assert np.array_equal(rope.inv_freq, expected.numpy())


def test_factors_divide_each_pair() -> None:
    plain = compute_frequencies(hyper(None), RopeKind(5000.0, False), 10)
    scaled = compute_frequencies(
        hyper({"type": "factors", "factors": FACTORS}), RopeKind(5000.0, True), 10
    )
    np.testing.assert_array_equal(scaled.inv_freq, plain.inv_freq / np.array(FACTORS, np.float32))


def test_windowed_layers_may_have_their_own_base_and_no_scaling() -> None:
    hp = hyper(
        {"type": "linear", "factor": 8.0}, rope_theta_local=300.0, rope_scaling_layers="full"
    )
    assert rotation_of_layer(hp, 0) == RopeKind(300.0, False)
    assert rotation_of_layer(hp, 1) == RopeKind(5000.0, True)
    assert set(all_frequencies(hp, 5)) == {RopeKind(300.0, False), RopeKind(5000.0, True)}
    assert rotation_of_layer(hyper(None, rope_layers=(True, False)), 1) is None
    longer = hyper(None, global_head_dim=DIM + 8)
    assert [rotation_of_layer(longer, layer) for layer in range(2)] == [
        RopeKind(5000.0, False), RopeKind(5000.0, False, DIM + 8),
    ]  # fmt: skip
    pairs = [len(made.inv_freq) for made in all_frequencies(longer, 5).values()]
    assert sorted(pairs) == [DIM // 2, DIM // 2 + 4]


def test_a_longer_sequence_changes_dynamic_frequencies_only() -> None:
    assert keys_stay_valid(hyper(None), 10, 500)
    dynamic = hyper({"type": "dynamic", "factor": 3.0})
    assert keys_stay_valid(dynamic, 10, 64)
    assert not keys_stay_valid(dynamic, 64, 65)


def test_an_odd_number_of_rotated_elements_is_refused() -> None:
    with pytest.raises(ArchError, match="rope_dim is 23; expected an even number"):
        compute_frequencies(hyper(None, rope_dim=23), RopeKind(5000.0, False), 10)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "spiral"}, "rope scaling 'spiral' is not known"),
        ({"type": "linear"}, "'factor' is missing"),
        ({"type": "factors", "factors": [1.0, 2.0]}, "2 factors for 24 rotated elements"),
    ],
)
def test_a_scaling_that_cannot_be_computed_is_refused(
    scaling: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArchError, match=message):
        compute_frequencies(hyper(scaling), RopeKind(5000.0, True), 10)
