"""Layers spread over all GPUs of a host: the logits of one GPU; NOT-RUN with fewer than two."""

import numpy as np
import pytest

from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.inference.gpu.on_gpu import cuda, need
from tests.inference.gpu.test_odd_sizes import as_users_run, held
from tests.inference.judge import judged, rel, run
from tests.inference.odd import ODD_IDS, exact, odd, points
from tests.models import EVERY, IDS, MAKERS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", EVERY)
def test_layers_on_all_gpus_give_the_logits_of_one(name: str) -> None:
    need(2)
    assert rel(run(name, cuda(device="cuda:all")), run(name, cuda())) < 2e-6


@pytest.mark.parametrize("arch", MAKERS)
def test_odd_sizes_on_all_gpus(arch: str) -> None:
    """Within float32's bound of the reference at every point, and in steps."""
    need(2)
    exact(arch, "50", "BF16", len(ODD_IDS))  # settles the seed
    found = points(odd(arch, "50"), cuda(device="cuda:all"), ODD_IDS)
    held(found, (arch, "50"), "BF16", len(ODD_IDS))
    as_users_run(cuda(device="cuda:all"), (arch, "50"), "BF16", len(ODD_IDS))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_steps_on_all_gpus(name: str) -> None:
    need(2)
    b = cuda(device="cuda:all")
    with open_model(judged(name).folder) as model, Session.open(model, b) as session:
        whole = session.logits(IDS)
        session.prefill(IDS[:9])
        steps = np.stack([session.step(token) for token in IDS[9:]])
        places = {str(x.device) for x in session.cache._keys}  # type: ignore[union-attr]
    assert rel(steps, whole[9:]) < 5e-6
    assert len(places) > 1 and len(b.facts()["device_names"]) > 1
