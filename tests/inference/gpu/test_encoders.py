"""Encoders on cupy: emulated, where masks that are not causal and biases of scores differ."""

from typing import Any

from aprfmt.inference.backends import BACKENDS
from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.model import open_model
from tests.inference.encoders import ENCODERS, IDS, encoded
from tests.inference.gpu.machine import on
from tests.inference.judge import rel


@on("name", ("mpnet", "modernbert"), ENCODERS)
def test_every_point_and_the_embedding(machine: Any, name: str) -> None:
    judge, kept = encoded(name), KeptValues()
    backend = BACKENDS["cupy"]("cuda", "float32")
    with open_model(judge.folder) as model, Session.open(model, backend) as session:
        trace = session.trace(
            IDS, tuple(session.points), keep=kept.keep, fetch=kept.fetch, stop=False
        )
        fused = session.embedding(IDS)
    for key, expected in judge.found.items():
        assert rel(trace.recorded_values(key), expected) < 5e-6, key
    assert rel(kept.fetch("pooled"), judge.embedding) < 5e-6
    assert rel(fused, judge.embedding) < 5e-6
