"""Units moved in all tensors together are one finding of an equal function; moved alone, not.

Seen red: a tensor of the group left out of the check, query heads moved without their key heads,
one order taken for all layers.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.causes.tensor import symmetry
from aprfmt.compare import DiffReport, diff
from aprfmt.formats import FORMATS, writable_formats
from tests.arch.towers import made
from tests.conversion.folders import tensors_of, write_mixed
from tests.models import save_tiny

L1 = "model.layers.1."
HEAD = 16  # head_dim of the models used here
NEURONS = 72
MLP = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("symmetry") / "llama"
    save_tiny("llama", folder)
    return folder


def edited(source: Path, folder: Path, edit: Edit) -> Path:
    """Copy a float32 folder, its arrays changed."""
    rows = tensors_of(source)
    arrays = {
        name: np.frombuffer(raw, "<f4").reshape(shape).copy()
        for name, (_, shape, raw) in rows.items()
    }
    edit(arrays)
    folder.mkdir()
    (folder / "config.json").write_text((source / "config.json").read_text())
    changed = {
        name: ("F32", x.shape, np.ascontiguousarray(x).tobytes()) for name, x in arrays.items()
    }
    write_mixed(folder / "model.safetensors", changed)
    return folder


def order_of(count: int, seed: int = 7) -> Any:
    return np.random.default_rng(seed).permutation(count)


def neurons(layer: str = L1, seed: int = 7, parts: tuple[str, ...] = MLP) -> Edit:
    """Give an MLP's neurons another order, in these tensors."""

    def edit(x: dict[str, Any]) -> None:
        order = order_of(NEURONS, seed)
        for part in parts:
            name = f"{layer}mlp.{part}.weight"
            x[name] = x[name][:, order] if part == "down_proj" else x[name][order]

    return edit


def heads(query: list[int], key: list[int], parts: tuple[str, ...] = ATTENTION) -> Edit:
    """Give heads another order, in these tensors and their biases."""

    def edit(x: dict[str, Any]) -> None:
        for part in parts:
            name = f"{L1}self_attn.{part}.weight"
            order = key if part in ("k_proj", "v_proj") else query
            p = (np.array(order)[:, None] * HEAD + np.arange(HEAD)).reshape(-1)
            x[name] = x[name][:, p] if part == "o_proj" else x[name][p]
            if f"{L1}self_attn.{part}.bias" in x and part != "o_proj":
                x[f"{L1}self_attn.{part}.bias"] = x[f"{L1}self_attn.{part}.bias"][p]

    return edit


def causes(report: DiffReport) -> dict[str, str]:
    """Return the confirmed cause of every tensor that differs."""
    return {row.key: row.cause for row in report.tensors if row.verdict == "DIFFERENT"}


@pytest.mark.parametrize("target", writable_formats())
@pytest.mark.parametrize(
    ("edit", "cause", "count"),
    [
        (neurons(), "permuted_neurons", 3),
        (heads([1, 0, 2, 3], [0, 1]), "permuted_heads", 2),
        (heads([3, 2, 0, 1], [1, 0]), "permuted_heads", 4),
    ],
    ids=["neurons", "inside a group", "groups"],
)
def test_a_group_that_moved_together_is_one_finding(
    edit: Edit, cause: str, count: int, target: str, llama: Path, tmp_path: Path
) -> None:
    there = tmp_path / f"there{FORMATS[target].extensions[0]}"
    aprfmt.convert(edited(llama, tmp_path / "moved", edit), there, to=target)
    report = diff(llama, there)
    found = causes(report)
    assert set(found.values()) == {cause} and len(found) == count, found
    (finding,) = report.findings
    assert finding.confirmed and "the function is equal" in finding.says
    assert len(finding.keys) == count
    assert report.exit_code() == 1  # the files still differ


@pytest.mark.parametrize("part", MLP)
def test_a_tensor_that_stayed_behind_is_a_bug(part: str, llama: Path, tmp_path: Path) -> None:
    parts = tuple(name for name in MLP if name != part)
    found = causes(diff(llama, edited(llama, tmp_path / "moved", neurons(parts=parts))))
    assert set(found.values()) == {"row_offset"} and len(found) == 2


@pytest.mark.parametrize("part", ATTENTION)
def test_a_head_that_stayed_behind_is_a_bug(part: str, llama: Path, tmp_path: Path) -> None:
    parts = tuple(name for name in ATTENTION if name != part)
    edit = heads([3, 2, 0, 1], [1, 0], parts)
    found = causes(diff(llama, edited(llama, tmp_path / "moved", edit)))
    assert len(found) == 3 and not set(found.values()) & {row.cause for row in symmetry.SYMMETRIES}


def test_query_heads_do_not_leave_their_key_head(llama: Path, tmp_path: Path) -> None:
    """Heads 1 and 2 exchanged in q and in the output product read each other's keys."""
    edit = heads([0, 2, 1, 3], [0, 1])
    found = causes(diff(llama, edited(llama, tmp_path / "moved", edit)))
    assert len(found) == 2 and "permuted_heads" not in found.values()


def test_other_values_beside_an_order_are_not_passed_over(llama: Path, tmp_path: Path) -> None:
    def edit(x: dict[str, Any]) -> None:
        neurons()(x)
        x[f"{L1}mlp.down_proj.weight"][5, 7] += 1

    found = causes(diff(llama, edited(llama, tmp_path / "moved", edit)))
    assert "permuted_neurons" not in found.values()


def test_every_layer_has_its_own_order(llama: Path, tmp_path: Path) -> None:
    def edit(x: dict[str, Any]) -> None:
        for layer in range(3):
            neurons(f"model.layers.{layer}.", seed=layer)(x)

    (finding,) = diff(llama, edited(llama, tmp_path / "moved", edit)).findings
    assert finding.cause == "permuted_neurons" and len(finding.keys) == 9


def test_an_order_is_seen_through_a_quantized_copy(llama: Path, tmp_path: Path) -> None:
    """Rows of 64 and 96 are whole blocks; the copy's rounding is not seen as another order."""
    wide = tmp_path / "wide"
    save_tiny("llama", wide, hidden_size=64, intermediate_size=96)

    def edit(x: dict[str, Any]) -> None:
        order = order_of(96)
        for part in MLP:
            name = f"{L1}mlp.{part}.weight"
            x[name] = x[name][:, order] if part == "down_proj" else x[name][order]

    moved = edited(wide, tmp_path / "moved", edit)
    aprfmt.convert(moved, tmp_path / "q.gguf", encoding="Q8_0")
    found = causes(diff(wide, tmp_path / "q.gguf"))
    assert set(found.values()) == {"permuted_neurons"} and len(found) == 3


@pytest.mark.parametrize("arch", ["llama-bias", "qwen3", "olmo2", "gpt_oss"])
def test_biases_norms_and_sinks_move_with_their_heads(arch: str, tmp_path: Path) -> None:
    """Wide q/k-norms and sinks have a part for each head: left behind, it is another function."""
    save_tiny(arch, tmp_path / "a")
    with aprfmt.open(tmp_path / "a") as model:
        size, count = int(model.hyper["head_dim"]), int(model.hyper["n_heads"])
        keys = int(model.hyper["n_kv_heads"])
        roles = {key.removeprefix("L1.") for key in model.roles if key.startswith("L1.attn_")}
    each = count // keys
    query = [(h // each) * each + (h + 1) % each for h in range(count)]  # turned inside groups
    names = {"q_proj": 0, "q_norm": 0, "sinks": 0, "o_proj": 1}

    def moved(x: dict[str, Any], left: str = "") -> None:
        for name in list(x):
            part = next((part for part in names if f"{L1}self_attn.{part}" in name), None)
            whole = x[name].size == size
            if part is None or part == left or (part == "q_norm" and whole):
                continue
            if name.endswith("o_proj.bias"):
                continue
            unit = x[name].shape[names[part]] // count
            p = (np.array(query)[:, None] * unit + np.arange(unit)).reshape(-1)
            x[name] = x[name][:, p] if part == "o_proj" else x[name][p]

    found = causes(diff(tmp_path / "a", edited(tmp_path / "a", tmp_path / "b", moved)))
    assert found and set(found.values()) == {"permuted_heads"}, found
    for left, role in (("q_norm", "attn_q_norm.weight"), ("sinks", "attn_sinks.weight")):
        if role not in roles or (arch == "qwen3" and left == "q_norm"):
            continue
        behind = edited(tmp_path / "a", tmp_path / left, lambda x, left=left: moved(x, left))  # type: ignore[misc]
        assert "permuted_heads" not in causes(diff(tmp_path / "a", behind)).values()


@pytest.mark.parametrize("arch", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_move_with_their_router_except_between_groups(arch: str, tmp_path: Path) -> None:
    save_tiny(arch, tmp_path / "a")
    with aprfmt.open(tmp_path / "a") as model:
        count, groups = int(model.hyper["n_experts"]), int(model.hyper["n_expert_groups"] or 1)
        layer = max(i for i, moe in enumerate(model.hyper["moe_layers"]) if moe)
    order = order_of(count, 3)

    def edit(x: dict[str, Any]) -> None:
        before = dict(x)
        for name, old in before.items():
            if f"layers.{layer}." not in name:
                continue
            for new, source in enumerate(order):
                if f".experts.{new}." in name:
                    x[name] = before[name.replace(f".experts.{new}.", f".experts.{source}.")]
            if ".gate.weight" in name or "e_score_correction_bias" in name:
                x[name] = old[order]

    found = causes(diff(tmp_path / "a", edited(tmp_path / "a", tmp_path / "b", edit)))
    assert found
    said = {cause for key, cause in found.items() if "exps" in key or "gate_inp" in key}
    assert (said == {"permuted_experts"}) == (groups == 1), found


# --- rows inside the heads of q and k ---------------------------------------------------------


def head_rows(orders: dict[str, list[Any]], attention: str) -> Edit:
    """Give the rows inside each head another order: {part: one order a head}."""

    def edit(x: dict[str, Any]) -> None:
        for part, order in orders.items():
            p = np.concatenate([np.array(one) + i * len(one) for i, one in enumerate(order)])
            for kind in ("weight", "bias"):
                name = f"{attention}{part}.{kind}"
                if name in x:
                    x[name] = x[name][p]

    return edit


def head_orders(heads: int, size: int, groups: int = 1) -> dict[str, list[Any]]:
    """Return an order of its own for each key head, and the same for its query heads."""
    own = [order_of(size, seed) for seed in range(heads // groups)]
    return {"q_proj": [own[h // groups] for h in range(heads)], "k_proj": own}


OPT = "model.decoder.layers.1.self_attn."
PLAIN = "model.layers.3.self_attn."  # of smollm3, whose layer 3 has no rope


@pytest.mark.parametrize(
    ("arch", "attention", "orders", "count"),
    [("opt", OPT, head_orders(4, 12), 4), ("smollm3", PLAIN, head_orders(4, 12, groups=2), 2)],
)
def test_rows_in_one_order_in_q_and_k_are_one_function_without_rope(
    arch: str, attention: str, orders: Any, count: int, tmp_path: Path
) -> None:
    """Seen red: `row_offset`, and `rope_pairing` of a model without rope."""
    save_tiny(arch, tmp_path / "a")
    moved = edited(tmp_path / "a", tmp_path / "b", head_rows(orders, attention))
    found = causes(diff(tmp_path / "a", moved))
    assert set(found.values()) == {"permuted_head_rows"} and len(found) == count, found
    told = aprfmt.diagnose(tmp_path / "a", moved)
    assert told.verdict == "same" and [one.certainty for one in told.findings] == ["confirmed"]


@pytest.mark.parametrize(
    ("arch", "attention", "orders"),
    [
        ("opt", OPT, {"q_proj": head_orders(4, 12)["q_proj"]}),
        ("opt", OPT, {**head_orders(4, 12), "k_proj": [order_of(12, 9 + h) for h in range(4)]}),
        ("smollm3", PLAIN, {**head_orders(4, 12, 2), "q_proj": head_orders(4, 12)["q_proj"]}),
        ("smollm3", L1 + "self_attn.", head_orders(4, 12, groups=2)),  # a layer with rope
    ],
    ids=["q alone", "two orders", "of another group", "rotated"],
)
def test_rows_in_two_orders_or_before_rope_are_a_bug(
    arch: str, attention: str, orders: Any, tmp_path: Path
) -> None:
    save_tiny(arch, tmp_path / "a")
    moved = edited(tmp_path / "a", tmp_path / "b", head_rows(orders, attention))
    found = causes(diff(tmp_path / "a", moved))
    assert found and "permuted_head_rows" not in found.values()
    assert aprfmt.diagnose(tmp_path / "a", moved).verdict == "bug"


PAIRED = [[0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11]]  # of split halves of 12 rows
HALVED = [[0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]]


@pytest.mark.parametrize(
    ("arch", "attention", "parts", "order", "wants"),
    [
        ("smollm3", L1 + "self_attn.", "qk", PAIRED, "smollm3 rotates split halves"),
        ("smollm3", L1 + "self_attn.", "qk", HALVED, "reordered once too often"),
        ("opt", OPT, "k", PAIRED, "opt has no rope and wants q and k in one order"),
    ],
)
def test_rows_in_the_order_of_rope_pairs_name_the_order_that_is_wanted(
    arch: str, attention: str, parts: str, order: Any, wants: str, tmp_path: Path
) -> None:
    save_tiny(arch, tmp_path / "a")
    heads = {"q": 4, "k": 2 if arch == "smollm3" else 4}
    orders = {f"{part}_proj": order * heads[part] for part in parts}
    moved = edited(tmp_path / "a", tmp_path / "b", head_rows(orders, attention))
    (finding,) = diff(tmp_path / "a", moved).findings  # a bias is no cause of its own
    assert finding.cause == "rope_pairing" and wants in finding.says


@pytest.mark.parametrize(
    ("tower", "rotates"),
    [("pixtral_vision", True), ("qwen2_5_vl_vision", True), ("gemma3_vision", False)],
)
def test_a_tower_with_a_table_of_places_has_no_rope(
    tower: str, rotates: bool, tmp_path: Path
) -> None:
    """Seen red: no tower rotated."""
    made(tower, tmp_path)
    with aprfmt.open(tmp_path) as model:
        assert set(model.hyper["rope_layers"]) == {rotates}
