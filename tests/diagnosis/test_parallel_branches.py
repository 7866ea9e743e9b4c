"""Two branches of one layer: a later point of the other branch says nothing of how one computed.

Seen red: of a Mamba whose inputs have another factor, "taken at another point", because attention
beside it agrees.
"""

import pytest

from aprfmt.diagnosis import diagnose
from tests.diagnosis.engines import tiny_folder, trace

POINTS = frozenset(
    "embd attn_norm q k v attn_out ssm_gate ssm_conv_in ssm_dt ssm_out ffn_norm ffn_out out "
    "logits".split()
)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_attention_beside_a_mamba_excuses_no_factor(factor: float) -> None:
    """A factor of 1, as of a step that is left out, is named; of others the place is."""
    run = trace(
        tiny_folder("falcon_h1"), f"branch {factor}", points=POINTS, hp={"ssm_in_scale": factor}
    )
    found = diagnose(str(tiny_folder("falcon_h1")), str(run))
    assert found.first == "L0.ssm_gate" and found.verdict == "bug"
    assert "capture_point" not in {one.cause for one in found.findings}
    if factor == 1:
        assert found.confidence == "confirmed" and found.complete
        assert [one.cause for one in found.findings] == ["multiplier"]


@pytest.mark.parametrize("point", ["ssm_gate", "ssm_conv_in"])
def test_a_value_recorded_elsewhere_in_a_branch_is_still_found(point: str) -> None:
    run = trace(
        tiny_folder("falcon_h1"), f"elsewhere {point}", points=POINTS,
        rename=lambda arrays: {
            key: 2 * x if key.endswith(f".{point}") else x for key, x in arrays.items()
        },
    )  # fmt: skip
    found = diagnose(str(tiny_folder("falcon_h1")), str(run))
    assert {one.cause for one in found.findings} == {"capture_point"}, found.sentence
    assert found.verdict == "same" or found.exit_code == 2
