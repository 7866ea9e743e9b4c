"""What a type promises: the demo model's loss on text it was not trained on."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.loss import compare_distributions, cross_entropy
from aprfmt.inference.session import Session

# scheme -> largest mean KL divergence from the float model in nats, about twice what was measured
# (docs/benchmarks.md); a swapped nibble or scale gives more than 1.
PROMISED = {
    "BF16": 1e-9, "Q8_0": 0.0003, "Q6_K": 0.002, "Q5_K_M": 0.006, "Q4_K_M": 0.02, "Q4_0": 0.04,
    "Q3_K_M": 0.07, "Q2_K": 0.27, "IQ4_XS": 0.03, "NF4-double": 0.04,
}  # fmt: skip


@cache
def held_out(folder: Path) -> tuple[list[int], float]:
    """Return the ids of the held-out text and transformers' loss on them."""
    losses = json.loads((folder / "golden.json").read_text())["losses"]
    row = next(row for row in losses if row["name"] == "held_out_text")
    return row["ids"], row["nats_per_token"]


@cache
def logits(path: Path, ids: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[Any]]":
    """Return the logits of every token, numpy in float32."""
    backend = BACKENDS["numpy"]("cpu", "float32")
    with aprfmt.open(path) as model, Session.open(model, backend) as session:
        return np.asarray(session.logits(list(ids)))


def test_the_float_model_has_the_loss_transformers_measured(demo_model: Path) -> None:
    ids, nats = held_out(demo_model)
    found = cross_entropy(logits(demo_model, tuple(ids))[:-1], ids[1:]).mean()
    assert found == pytest.approx(nats, abs=1e-5)


@pytest.mark.parametrize("scheme", PROMISED)
def test_loss(scheme: str, demo_model: Path, tmp_path: Path) -> None:
    ids, nats = held_out(demo_model)
    packed = scheme.startswith("NF4")
    target = tmp_path / ("q" if packed else "q.gguf")
    to = "safetensors" if packed else None
    aprfmt.convert(demo_model, target, to=to, quantize=scheme)
    found = logits(target, tuple(ids))[:-1]
    compared = compare_distributions(logits(demo_model, tuple(ids))[:-1], found, ids[1:])
    assert 0 <= compared.kl + 1e-12 and compared.kl <= PROMISED[scheme]
    assert abs(cross_entropy(found, ids[1:]).mean() - nats) <= 10 * PROMISED[scheme] + 1e-6
