"""One thread: more do not speed up tiny products, and slow them on a busy machine."""

from typing import Any

import numpy as np
import pytest

from aprfmt.inference import moe
from aprfmt.inference.routing import choose_experts
from tests.threads import one_thread as one_thread


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have experts chosen in turn, as an estimate takes them to be."""

    def turned(
        logits: Any, bias: Any, hp: Any, m: Any = None, scale: Any = None, fixed: Any = None
    ) -> Any:
        tokens, experts = logits.shape
        first = np.arange(tokens)[:, None] * int(hp["n_experts_used"])
        turn = -4.0 * ((np.arange(experts)[None, :] - first) % experts) / experts
        return choose_experts(turn.astype(logits.dtype), None, hp, scale=scale)

    monkeypatch.setattr(moe, "choose_experts", turned)
