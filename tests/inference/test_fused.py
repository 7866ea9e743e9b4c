"""Operations that are fused where nothing inside is wanted: the steps, bit for bit, on the CPU.

Seen red: up taken for gate, the residual added twice where `attn_out` is recorded.
"""

import numpy as np
import pytest

from aprfmt.inference.session import Session
from aprfmt.inference.trace import KeptValues
from aprfmt.model import open_model
from tests.inference.judge import backend, judged
from tests.models import IDS

NAMES = ("llama", "gemma2", "cohere", "deepseek_v3")
INSIDE = ("attn_out", "ffn_gate", "ffn_up", "ffn_act", "ffn_out")


@pytest.mark.parametrize("run_", ["numpy:float32", "torch:bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_fused_and_stepped_are_equal(name: str, run_: str) -> None:
    with open_model(judged(name).folder) as model:
        with Session.open(model, backend(run_)) as session:
            plain = session.logits(IDS)
            for points in [*((point,) for point in INSIDE), INSIDE]:
                kept = KeptValues()
                wanted = [k for k, i in session.points.items() if i.point.name in points]
                assert wanted
                trace = session.trace(
                    IDS, [*wanted, "logits"], keep=kept.keep, fetch=kept.fetch, logits_rows="all"
                )
                np.testing.assert_array_equal(trace.recorded_values("logits"), plain)
