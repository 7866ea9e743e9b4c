"""Quantized copies of quantized copies, and sides that are no whole model.

Seen red: what had gone through Q6_K and lay in Q8_0 was called unrelated; an adapter beside its
base was 66 tensors of an unknown cause.
"""

from pathlib import Path

import pytest

from aprfmt.diagnosis import diagnose
from tests.cli.run import aprfmt
from tests.cli.test_kinds import peft
from tests.diagnosis.faults import DEMO


@pytest.mark.parametrize(("first", "then"), [("Q4_0", "Q8_0"), ("Q6_K", "Q8_0")])
def test_a_copy_of_a_quantized_copy_is_coarse_and_says_both(
    first: str, then: str, tmp_path: Path
) -> None:
    once, twice = tmp_path / "once.gguf", tmp_path / "twice.gguf"
    assert aprfmt("quantize", DEMO, once, "--type", first).code == 0
    assert aprfmt("convert", once, twice, "--encoding", then, "--allow-requantize").code == 0
    found = diagnose(str(DEMO), str(twice))
    assert (found.kind, found.exit_code) == ("precision", 0), found.sentence
    said = [one for one in found.findings if f", then to {then}" in one.says]
    assert said and all(one.certainty == "confirmed" for one in said)
    assert len({place for one in said for place in one.where}) == 29


@pytest.mark.parametrize("order", [1, -1])
def test_an_adapter_is_no_model_to_compare_with(order: int, tmp_path: Path) -> None:
    adapter = peft(tmp_path / "adapter")
    pair = [str(DEMO), str(adapter)][::order]
    found = diagnose(*pair)
    assert (found.kind, found.exit_code, found.findings) == ("not_comparable", 2, ())
    side = "AB"[pair.index(str(adapter))]
    assert f"{side} is a LoRA adapter of rank 4, alpha 16 for org/base" in found.sentence
    assert "aprfmt convert BASE OUT --adapter" in found.sentence
