"""Cases at the edge of what a rule admits: two merged tensors, small groups, rotated experts."""

import re

import pytest
import torch

from aprfmt.diagnosis import Diagnosis, diagnose
from tests.field.hf import State, edited

LAST = 2


def _ask(arch: str, name: str, change: object) -> Diagnosis:
    return diagnose(*(str(side) for side in edited(arch, f"edge-{name}", change)()))  # type: ignore[arg-type]


def _draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_an_adapter_missing_in_the_last_layer_is_a_merge_of_some_targets() -> None:
    def change(state: State) -> None:
        for seed, part in enumerate("qv"):
            key = f"model.layers.{LAST}.self_attn.{part}_proj.weight"
            rows, columns = state[key].shape
            down, up = (
                torch.randn(size, generator=_draws(seed)) for size in ((rows, 3), (3, columns))
            )
            state[key] = state[key] + 0.05 * down @ up

    found = _ask("llama", "two", change)
    assert (found.verdict, found.cause, found.confidence) == ("bug", "partial_merge", "confirmed")
    assert "rank 3" in found.findings[0].says


@pytest.mark.parametrize("count", [2, 3])
def test_a_damaged_column_is_not_a_merged_adapter(count: int) -> None:
    """A difference of one column has rank one, too."""

    def change(state: State) -> None:
        for seed, part in enumerate("qvo"[:count]):
            key = f"model.layers.{LAST}.self_attn.{part}_proj.weight"
            state[key] = state[key].clone()
            state[key][:, 5] = torch.randn(len(state[key]), generator=_draws(seed))

    found = _ask("llama", f"column{count}", change)
    assert found.verdict == "bug"
    assert all(finding.cause != "partial_merge" for finding in found.findings)


def test_experts_that_moved_on_by_one_are_another_order_of_experts() -> None:
    def change(state: State) -> None:
        old = dict(state)
        for key in state:
            if ".layers.1." in key and ".experts." in key:
                state[key] = old[re.sub(r"experts\.(\d+)\.", _next, key)]

    found = _ask("qwen2_moe", "experts", change)
    assert {finding.cause for finding in found.findings} == {"expert_order"}
    assert found.confidence == "confirmed"


def _next(match: re.Match[str]) -> str:
    return f"experts.{(int(match.group(1)) + 1) % 6}."


@pytest.mark.parametrize("arch", ["qwen2", "llama"])
def test_four_bits_in_groups_of_sixteen_are_a_quantization(arch: str) -> None:
    """In so small groups the two ends hold most of the norm, and errors follow the rest."""

    def decoded(w: torch.Tensor) -> torch.Tensor:
        x = w.reshape(-1, 16)
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        step = (high - low) / 15
        zero = (-low / step).round()
        return (((x / step).round() + zero).clamp(0, 15) - zero).mul(step).reshape(w.shape)

    def change(state: State) -> None:
        for key, w in state.items():
            if w.ndim == 2 and ".layers." in key and w.shape[1] % 16 == 0:
                state[key] = decoded(w)

    found = _ask(arch, f"groups-{arch}", change)
    assert found.verdict == "precision", found.findings
    assert {finding.cause for finding in found.findings} == {"quantisation"}
