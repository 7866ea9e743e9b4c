"""Changes of q, k and v, or of gate and up, that were merged into other rows of a fused tensor.

The orders are made here with reshapes and indices. Each merge has a twin with the changes in the
right rows.

Seen red: "otherwise", some 0.5 times the change, 0.85 of it unexplained, in every weight.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import aprfmt as api
from aprfmt.adapters.fused_merges import FusedPart, find_fused_order
from aprfmt.adapters.merge_faults import Merge
from tests.adapters.test_merged_otherwise import write_adapter, write_merged
from tests.adapters.test_parts import PREFIX, base_folder
from tests.cli.run import Done, aprfmt

Values = torch.Tensor
QKV, PAIR = ("q", "k", "v"), ("gate", "up")
PLACES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj",
}  # fmt: skip
THIRDS = "joined as all q, then all k, then all v, and added to rows that stand as "
HALVES = "joined as all gate, then all up, and added to rows that stand as "


def thirds_onto_groups(joined: Values) -> Values:
    """Rows of q, k, v (64, 32, 32) were added to [q q k v] per KV group, which is split again."""
    groups = joined.reshape(2, 64, -1)
    parts = groups[:, :32], groups[:, 32:48], groups[:, 48:]
    return torch.cat([part.reshape(-1, joined.shape[1]) for part in parts])


def groups_onto_thirds(joined: Values) -> Values:
    """The changes were joined per KV group, and added to all q, then all k, then all v."""
    q, k, v = (part.reshape(2, -1, joined.shape[1]) for part in torch.split(joined, [64, 32, 32]))
    return torch.cat([q, k, v], 1).reshape(joined.shape)


def halves_onto_pairs(joined: Values) -> Values:
    """Rows of gate, then up, were added to rows that alternate."""
    return torch.cat([joined[::2], joined[1::2]])


def halves_onto_shards(joined: Values) -> Values:
    """Rows of gate, then up, were added to [gate up] of each of four devices."""
    shards = joined.reshape(4, 2, -1, joined.shape[1])
    return torch.cat([shards[:, at].reshape(-1, joined.shape[1]) for at in (0, 1)])


Change = Callable[[Values], Values]
CASES: Mapping[str, tuple[Change, tuple[str, ...], str]] = {
    "thirds onto groups": (thirds_onto_groups, QKV, f"{THIRDS}[q k v] per KV group"),
    "groups onto thirds": (
        groups_onto_thirds, QKV,
        "joined as [q k v] per KV group, and added to rows that stand as all q, then all k",
    ),
    "gate and up alternate": (halves_onto_pairs, PAIR, f"{HALVES}[gate up] row by row"),
    "gate and up of shards": (
        halves_onto_shards, PAIR, f"{HALVES}[gate up] per part of 4 (tensor parallel)",
    ),
}  # fmt: skip


def merged(
    folder: Path, order: Change, names: tuple[str, ...], trained: tuple[str, ...], kind: str = "F32"
) -> Done:
    """Compare a base and its merge in which an order was applied to the joined changes."""
    base = base_folder(folder / "a")
    rows = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    held: dict[str, Values] = {}
    for layer in range(2):
        changes = []
        for name in names:
            module = f"model.layers.{layer}.{PLACES[name]}"
            count, columns = rows[f"{module}.weight"].shape
            a, b = (
                torch.randn(4, columns, generator=generator),
                torch.randn(count, 4, generator=generator),
            )
            changes.append(torch.zeros(count, columns))
            if name in trained:
                at = f"{PREFIX}{module}.lora_"
                held[f"{at}A.weight"], held[f"{at}B.weight"] = 0.1 * a, 0.1 * b
                changes[-1] = 2 * held[f"{at}B.weight"] @ held[f"{at}A.weight"]
        sizes = [len(change) for change in changes]
        laid = torch.split(order(torch.cat(changes)), sizes)
        for name, change in zip(names, laid, strict=True):
            rows[f"model.layers.{layer}.{PLACES[name]}.weight"] += change
    if kind == "BF16":
        rows = {name: value.to(torch.bfloat16) for name, value in rows.items()}
    modules = [PLACES[name].rpartition(".")[2] for name in trained]
    adapter = write_adapter(folder / "adapter", held, target_modules=modules)
    made = write_merged(folder / "b", base, rows)
    if kind == "Q8_0":
        api.convert(made, made.with_suffix(".gguf"), encoding="Q8_0")
        made = made.with_suffix(".gguf")
    return aprfmt("diff", base, made, "--adapter", adapter)


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("case", CASES)
def test_the_order_of_the_joined_changes_is_said(case: str, kind: str, tmp_path: Path) -> None:
    order, names, says = CASES[case]
    done = merged(tmp_path, order, names, names, kind)
    assert done.code == 1 and f": in other rows ({2 * len(names)} weights)" in done.out, done.out
    assert says in done.out and "otherwise" not in done.out
    assert "--adapter" in done.out.splitlines()[-1]


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
@pytest.mark.parametrize("names", [QKV, PAIR])
def test_a_right_merge_is_once(names: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    done = merged(tmp_path, lambda joined: joined, names, names, kind)
    assert done.code == 0 and f": once ({2 * len(names)} weights)" in done.out, done.out


def test_parts_without_a_change_hold_rows_of_the_others(tmp_path: Path) -> None:
    """The adapter has q and v alone; k holds rows of q's change. Seen red: "otherwise"."""
    done = merged(tmp_path, thirds_onto_groups, QKV, ("q", "v"))
    assert done.code == 1 and ": in other rows (4 weights)" in done.out, done.out
    assert "L0.attn_k.weight, L1.attn_k.weight: the adapter does not change it" in done.out


def test_rows_in_no_known_order_are_otherwise(tmp_path: Path) -> None:
    def shuffled(joined: Values) -> Values:
        return joined[torch.randperm(len(joined), generator=torch.Generator().manual_seed(3))]

    done = merged(tmp_path, shuffled, QKV, QKV)
    assert done.code == 1 and ": otherwise (6 weights)" in done.out, done.out


# --- stacked experts, and what is no evidence ----------------------------------------------------

RNG = np.random.default_rng(5)


def parts(laid: Callable[[Any], Any], *, noise: float = 0.0, experts: int = 3) -> list[FusedPart]:
    """Return gate and up [experts, 8, 20] whose joined changes [experts, 16, 20] were `laid`."""
    base, changes = RNG.normal(size=(2, experts, 16, 20))
    theirs = base + laid(changes) + noise * RNG.normal(size=base.shape)
    return [
        FusedPart(name, Merge(base[:, at], changes[:, at], theirs[:, at], "F32", "F32", False))
        for name, at in (("gate", slice(8)), ("up", slice(8, 16)))
    ]


def alternating(changes: Any) -> Any:
    return np.concatenate([changes[:, ::2], changes[:, 1::2]], 1)


def test_changes_of_experts_are_laid_out_in_each() -> None:
    says = find_fused_order(parts(alternating), 0)
    assert says == (
        "the changes of gate and up were joined in each expert as all gate, then all up, and added "
        "to rows that stand as [gate up] row by row"
    )


@pytest.mark.parametrize(
    ("laid", "noise"),
    [(alternating, 0.05), (lambda changes: changes, 0.0), (lambda changes: 0 * changes, 0.0)],
    ids=["changed in addition", "right rows", "nothing merged"],
)
def test_an_order_that_does_not_give_every_value_is_not_said(
    laid: Callable[[Any], Any], noise: float
) -> None:
    assert find_fused_order(parts(laid, noise=noise), 0) == ""


def test_a_type_too_coarse_for_the_change_tells_no_order() -> None:
    """Both the base and the base with moved changes round to B."""
    held = parts(alternating)
    coarse = [
        FusedPart(
            part.name,
            Merge(one.plain, 1e-9 * one.change, one.plain + 1e-9 * moved, "BF16", "BF16", False),
        )
        for part in held
        for one in (part.merge,)
        for moved in (one.theirs - one.plain,)
    ]
    assert find_fused_order(coarse, 0) == ""
