"""One thread: more do not speed up tiny products, and slow them on a busy machine."""

from typing import Any

import pytest

from aprfmt.inference import moe
from aprfmt.inference.dry.backend import Routed
from aprfmt.inference.routing import choose_experts
from tests.threads import one_thread as one_thread


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have experts chosen in turn, as an estimate takes them to be."""

    def turned(
        logits: Any, bias: Any, hp: Any, m: Any = None, scale: Any = None, fixed: Any = None
    ) -> Any:
        taken = Routed(logits.shape, 4, None)  # type: ignore[arg-type]
        taken.used = int(hp["n_experts_used"])
        return choose_experts(taken.numbers().astype(logits.dtype), None, hp, scale=scale)

    monkeypatch.setattr(moe, "choose_experts", turned)
