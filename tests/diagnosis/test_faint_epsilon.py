"""Another epsilon is found inside the tolerance of float32; what is no epsilon stays rounding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aprfmt.diagnosis import diagnose
from aprfmt.inference.backends.numpy_backend import NumpyBackend
from tests.diagnosis.engines import LONG, tiny_folder, trace

STREAM = frozenset({"embd", "out"})  # outputs of layers alone
NORMS = frozenset({"embd", "attn_norm", "ffn_norm", "out"})


def scaled(factor: Callable[[Any], Any], first: int = 0) -> Callable[[], NumpyBackend]:
    """Return a backend whose RMS norms are multiplied by `factor` of their input.

    `first`: only from this call on.
    """

    class Scaled(NumpyBackend):
        """A numpy backend with other RMS norms."""

        calls = 0

        def rms_norm(self, x: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the norm of `x` times the factor of `x`."""
            Scaled.calls += 1
            y = super().rms_norm(x, *args, **kwargs)
            return y if Scaled.calls <= first else np.asarray(y * factor(x), y.dtype)

    return lambda: Scaled("cpu", "float32")


def said(base: str, **how: Any) -> tuple[str, list[tuple[str, str]]]:
    """Return (verdict, [(cause, sentence)]) of the diagnosis of a wrong run of a tiny model."""
    folder = tiny_folder(base)
    found = diagnose(str(folder), str(trace(folder, f"faint-{base}", ids=LONG, **how)))
    return found.verdict, [(cause.cause, cause.says) for cause in found.causes]


@pytest.mark.parametrize(
    ("base", "points", "eps"),
    [
        ("llama", None, 3.003e-4),
        ("gpt2", NORMS, 3.003e-4),
        ("olmo2", STREAM, 3.01e-4),
        ("llama", STREAM, 3.02e-4),
    ],
)
def test_an_epsilon_inside_the_tolerance_is_named(base: str, points: Any, eps: float) -> None:
    verdict, causes = said(base, points=points, hp={"norm_eps": eps})
    assert verdict == "bug"
    assert [cause for cause, _ in causes] == ["norm_eps"]
    assert f"{eps:g}" in causes[0][1]


def test_two_faults_are_both_named() -> None:
    _, causes = said("llama", hp={"norm_eps": 3.003e-4, "rope_theta": 2e4})
    assert {cause for cause, _ in causes} == {"norm_eps", "rope_theta"}


@pytest.mark.parametrize(
    "factor",
    [
        pytest.param(lambda x: 1 + 3e-6, id="a root a little off"),
        pytest.param(
            lambda x: 1 + 3e-6 * np.random.default_rng(7).standard_normal((len(x), 1)),
            id="roots off by chance",
        ),
        pytest.param(
            lambda x: 1 + 5e-6 * np.random.default_rng(7).standard_normal(x.shape),
            id="values off by chance",
        ),
    ],
)
@pytest.mark.parametrize("points", [None, STREAM])
def test_what_is_no_epsilon_stays_rounding(factor: Callable[[Any], Any], points: Any) -> None:
    verdict, causes = said("llama", points=points, backend=scaled(factor))
    assert verdict == "precision"
    assert [cause for cause, _ in causes] == ["rounding"]
