"""The numbers of docs/notes/requirements.md, computed again by the code that has to get them right.

Seen red: BF16 decoded as F16, an eps that is not passed on, a deviation divided by n - 1 in
`merge_stats`, rows of other tokens compared, a spike called a defect.
"""

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.base.encodings import find_encoding
from aprfmt.cli.trace.output import describe_spikes
from aprfmt.codecs import decode, encode
from aprfmt.errors import AprfmtError, TensorNotFoundError
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.trace import KeptValues, Positions
from aprfmt.measure.traces import compare_traces
from aprfmt.model import open_model
from aprfmt.tensors.stats import Stats, merge_stats
from tests.conftest import not_run

# model.norm.weight and layers.0 q_proj.bias of Qwen2.5-0.5B: as they are, and their BF16 bits
# read as F16 (requirements R02, R03).
NORM = (7.5625, 8.0, 7.21875, 7.3125, 7.46875, 7.375)
NORM_MISREAD = (2.4727, 2.5, 2.4512, 2.4570, 2.4668, 2.4609)
BIAS = (0.0674, -0.0859, 0.1104, -0.0605)
BIAS_MISREAD = (1.3848, -1.4219, 1.4707, -1.3672)  # of the nearest BF16 numbers
CPU = ("numpy", "torch")


def backend(name: str) -> Any:
    try:
        return BACKENDS[name]("cpu", "float32")
    except AprfmtError as error:
        not_run(str(error))


@pytest.mark.parametrize(
    ("values", "misread"), [(NORM, NORM_MISREAD), (BIAS, BIAS_MISREAD)], ids=["norm", "bias"]
)
def test_bf16_values_and_their_bits_under_the_other_label(
    values: tuple[float, ...], misread: tuple[float, ...]
) -> None:
    raw = encode("BF16", np.array(values, np.float32))[""]
    shape = (len(values),)
    np.testing.assert_allclose(decode("BF16", {"": raw}, shape), values, rtol=4e-3)
    assert decode("BF16", {"": raw}, shape)[0] == (7.5625 if values is NORM else 0.0673828125)
    np.testing.assert_allclose(decode("F16", {"": raw}, shape), misread, atol=5e-5)


def test_expected_tensors_and_logits_of_the_published_model() -> None:
    """24 layers of 12, embedding and norm; 151,936 logits; uniform losses in nats."""
    assert 24 * 12 + 2 == 290
    assert math.log(151936) == pytest.approx(11.931, abs=5e-4)
    assert math.log(50257) == pytest.approx(10.825, abs=5e-4)
    assert math.log2(151936) == pytest.approx(17.213, abs=5e-4)  # bits, never a baseline


@pytest.mark.parametrize("name", CPU)
def test_an_eps_ten_times_larger_shows(name: str) -> None:
    """At mean square 4e-4, 1e-6 against 1e-5 is 2.25 % of the radicand, 1.1 % of the result."""
    arithmetic = backend(name)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 896)).astype(np.float32) * np.float32(0.02)
    gamma = (1 + 0.01 * rng.standard_normal(896)).astype(np.float32)

    def norm(eps: float) -> Any:
        found = arithmetic.rms_norm(
            arithmetic.array(x), arithmetic.array(gamma), eps=eps, offset=0, cast="before_weight"
        )
        return arithmetic.to_numpy(found).astype(np.float64)

    wide = x.astype(np.float64)
    expected = gamma * wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-6)
    first = norm(1e-6)
    assert np.abs(first - expected).max() < 1e-5
    assert np.median(first / norm(1e-5)) == pytest.approx(1.011, abs=1e-3)
    assert np.array_equal(norm(1e-6), first)  # no kernel was kept under another eps


def test_two_backends_norm_alike_on_the_stated_fixtures() -> None:
    rng = np.random.default_rng(1)
    for width, deviation, eps in ((896, 0.02, 1e-6), (4096, 0.04, 1e-5)):
        x = rng.standard_normal((4, width)).astype(np.float32) * np.float32(deviation)
        gamma = (1 + 0.01 * rng.standard_normal(width)).astype(np.float32)
        found = []
        for name in CPU:
            b = backend(name)
            found.append(
                b.to_numpy(
                    b.rms_norm(b.array(x), b.array(gamma), eps=eps, offset=0, cast="before_weight")
                )
            )
        assert np.abs(found[0] - found[1]).max() < 1e-5


@pytest.mark.parametrize("name", list(BACKENDS.own))
def test_no_operation_has_a_default_for_a_hyperparameter(name: str) -> None:
    """A backend that assumes an eps, a theta or a scale is wrong for some model."""
    try:
        found: Any = BACKENDS[name]
    except AprfmtError as error:
        not_run(str(error))
    kind: Any = found if isinstance(found, type) else type(backend(name))
    for operation in ("rms_norm", "layer_norm", "rope", "attention"):
        signature = inspect.signature(getattr(kind, operation))
        for word in ("eps", "style", "heads", "offset", "cast"):
            if word in signature.parameters:
                assert signature.parameters[word].default is inspect.Parameter.empty
    assert "eps" in inspect.signature(kind.rms_norm).parameters


def test_bytes_of_a_published_layer() -> None:
    """layer 3 of Qwen2.5-7B: 18944 x 3584 in Q4_K are 38,191,104 bytes."""
    row_bytes = find_encoding("Q4_K").row_bytes((18944, 3584))
    assert row_bytes is not None and row_bytes * 18944 == 38_191_104


def test_joined_statistics_follow_from_the_parts() -> None:
    """The fused q, k, v bias: mean 0.2718, deviation 10.2434 from the three published pairs."""
    parts = ((3584, 0.127345, 3.258061), (512, 1.549082, 29.464621), (512, 0.005926, 0.186556))
    joined = merge_stats(
        Stats(count, mean, std, -1, 1, 1, 1, nan=0, inf=0, zeros=0) for count, mean, std in parts
    )
    assert joined.mean is not None and joined.std is not None and joined.count == 4608
    assert joined.mean == pytest.approx(0.2718, abs=1e-4)
    assert joined.std == pytest.approx(10.2434, abs=1e-3)


def test_rows_of_all_tokens_are_not_compared_with_the_last(demo_model: Path) -> None:
    """25,088 values against 3,584 gave a ratio of 18 once; such points get no number."""
    from aprfmt.inference.session import Session

    ids = [1417, 362, 258, 1168, 1529, 457, 72]
    with open_model(demo_model) as model, Session.open(model, backend("numpy")) as session:
        chosen: tuple[Positions, ...] = ("all", "last")
        traces = []
        for positions in chosen:
            kept = KeptValues()
            traces.append(
                session.trace(
                    ids, ("L0.ffn_norm",), positions=positions, keep=kept.keep, fetch=kept.fetch
                )
            )
        found = compare_traces(traces[0], traces[1])
    assert found.compared == 0 and found.exit_code == 2
    assert "7 positions against 1" in found.points[0].why and found.points[0].rel_l2 is None


def test_a_spike_is_an_observation_and_no_verdict() -> None:
    """ffn_swigl of layers 0 to 4 and 26, 27 as published; layer 3 is 17 times its neighbour."""
    stds = {0: 0.088, 1: 0.061, 2: 0.071, 3: 1.222, 4: 0.390, 26: 1.452, 27: 2.247}
    stds |= dict.fromkeys(range(5, 26), 0.1)
    rows: Any = [
        {"points": ["ffn_mul"], "layer": layer, "stats": {"std": std}}
        for layer, std in sorted(stds.items())
    ]
    said = describe_spikes(rows)
    assert stds[3] / stds[2] == pytest.approx(17.2, abs=0.05)
    assert [line.split()[0] for line in said] == ["L3", "L26", "L27"]
    assert all("ffn_mul" in line and "no verdict" in line for line in said)


def test_a_missing_tensor_is_an_error_not_a_zero(demo_model: Path) -> None:
    with open_model(demo_model) as model, pytest.raises(TensorNotFoundError):
        model["model.layers.0.self_attn.q_proj.bais"]
