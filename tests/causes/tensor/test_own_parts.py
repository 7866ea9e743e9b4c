"""The parts that a role's rows consist of, stored in another order, are that and no shift of rows.

Seen red: "row i of B is row i-8 of A; the others come round", of a compressed row that stands
behind the rotated keys, and "B has A's rows in another order", of heads with rope's rows first.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.causes.tensor.own_parts import OwnParts
from aprfmt.compare import diff
from aprfmt.model import open_model
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder

Array = Any
Sizes = dict[str, int]


def by_head(heads: int, first: int, order: str) -> Callable[[Array], Array]:
    """Return an edit of rows of heads: "swap" the two parts of each, or "join" each part."""

    def change(x: Array) -> Array:
        one, two = np.split(x.reshape(heads, -1, x.shape[-1]), [first], axis=1)
        if order == "swap":
            return np.concatenate([two, one], axis=1).reshape(x.shape)
        return np.concatenate([one.reshape(-1, x.shape[-1]), two.reshape(-1, x.shape[-1])])

    return change


def whole(sizes: list[int], order: list[int]) -> Callable[[Array], Array]:
    """Return an edit that puts whole parts of rows in another order."""

    def change(x: Array) -> Array:
        parts = np.split(x, np.cumsum(sizes)[:-1])
        assert len(x) == sum(sizes)
        return np.concatenate([parts[i] for i in order])

    return change


ORDERS: dict[str, tuple[str, str, Callable[[Sizes], Callable[[Array], Array]], str]] = {
    "rope before compressed": (
        "deepseek_v3", "self_attn.kv_a_proj_with_mqa.weight",
        lambda hp: whole([hp["kv_lora_rank"], hp["qk_rope_head_dim"]], [1, 0]),
        "all compressed and then all rope in A, all rope and then all compressed in B",
    ),
    "rope before nope": (
        "deepseek_v3", "self_attn.q_b_proj.weight",
        lambda hp: by_head(hp["n_heads"], hp["qk_nope_head_dim"], "swap"),
        "[nope rope] of each of {n_heads} heads in A, [rope nope] of each",
    ),
    "all nope": (
        "deepseek_v3", "self_attn.q_b_proj.weight",
        lambda hp: by_head(hp["n_heads"], hp["qk_nope_head_dim"], "join"),
        "[nope rope] of each of {n_heads} heads in A, all nope and then all rope in B",
    ),
    "v before k": (
        "deepseek_v3", "self_attn.kv_b_proj.weight",
        lambda hp: by_head(hp["n_heads"], hp["qk_nope_head_dim"], "swap"),
        "[k_nope v] of each of {n_heads} heads in A, [v k_nope] of each",
    ),
    "all k": (
        "deepseek_v3",
        "self_attn.kv_b_proj.weight",
        lambda hp: by_head(hp["n_heads"], hp["qk_nope_head_dim"], "join"),
        "[k_nope v] of each of {n_heads} heads in A, all k_nope and then all v in B",
    ),
    "z before x": (
        "mamba", "mixer.in_proj.weight",
        lambda hp: whole([hp["ssm_size"]] * 2, [1, 0]),
        "all x and then all z in A, all z and then all x in B",
    ),
    "C before B": (
        "mamba", "mixer.x_proj.weight",
        lambda hp: whole([hp["ssm_rank"], hp["ssm_state"], hp["ssm_state"]], [0, 2, 1]),
        "all dt and then all C and then all B in B",
    ),
    "x before z": (
        "mamba2", "mixer.in_proj.weight",
        lambda hp: whole(
            [hp["ssm_size"]] * 2 + [hp["ssm_groups"] * hp["ssm_state"]] * 2 + [hp["ssm_heads"]],
            [1, 0, 2, 3, 4],
        ),
        "all x and then all z and then all B and then all C and then all dt in B",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("turned", [False, True])
def test_parts_in_another_order(name: str, turned: bool) -> None:
    arch, ending, make, says = ORDERS[name]
    source = tiny_folder(arch)
    hyper = open_model(source).hyper
    sizes = {
        key: hyper[key]
        for key in (
            "n_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "ssm_size",
            "ssm_rank", "ssm_state", "ssm_groups", "ssm_heads",
        )
        if key in hyper
    }  # fmt: skip
    change = make(sizes)
    broken = files.copy(
        source, f"own-{name.replace(' ', '-')}", tensors=files.edit_all(ending, change)
    )
    sides = (broken, source) if turned else (source, broken)
    found = diff(*sides)
    (cause,) = found.causes
    assert (cause.cause, cause.level) == ("fused_order", "confirmed")
    if not turned:
        assert says.format(**sizes) in cause.says


def test_a_rounded_copy_shows_it_too(tmp_path: Any) -> None:
    source = tiny_folder("deepseek_v3")
    hyper = open_model(source).hyper
    change = by_head(int(hyper["n_heads"]), int(hyper["qk_nope_head_dim"]), "swap")
    broken = files.copy(
        source, "own-rounded", tensors=files.edit_all("self_attn.q_b_proj.weight", change)
    )
    aprfmt.convert(broken, tmp_path / "b.gguf", encoding="BF16")
    found = diff(source, tmp_path / "b.gguf")
    assert "fused_order" in {one.cause for one in found.causes if one.level == "confirmed"}


def test_orders_are_all_different_and_undo_each_other() -> None:
    parts = OwnParts((("nope", 3), ("rope", 2)), 4)
    for words, p in parts.moves():
        assert sorted(p.tolist()) == list(range(parts.rows)), words
    moves = dict(parts.moves())
    there = moves["[nope rope] of each of 4 heads in A, all nope and then all rope in B"]
    back = moves["all nope and then all rope in A, [nope rope] of each of 4 heads in B"]
    assert there[back].tolist() == list(range(parts.rows))
