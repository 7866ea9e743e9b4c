"""One model from a folder, from our GGUF and from our APR gives the same logits, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

import aprfmt
from aprfmt.inference.session import Session
from aprfmt.model import open_model
from tests.inference.judge import backend, judged, run
from tests.models import IDS, IN_GGUF, MAKERS

VARIED = ("llama-llama3", "phi3-long", "deepseek_v3-yarn")


@pytest.mark.parametrize(
    ("name", "extension"),
    [(name, "apr") for name in (*MAKERS, *VARIED)]
    + [(name, "gguf") for name in (*IN_GGUF, *VARIED)],
)
def test_every_format_gives_the_folders_logits(name: str, extension: str, tmp_path: Path) -> None:
    b = backend("numpy:float32")
    target = tmp_path / f"model.{extension}"
    aprfmt.convert(judged(name).folder, target)
    with open_model(target) as model, Session.open(model, b) as session:
        found = session.logits(IDS)
    np.testing.assert_array_equal(found, run(name, b))
