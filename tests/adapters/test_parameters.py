"""Pairs for single parameters (PEFT's target_parameters): stacked experts, held to PEFT's merge."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import aprfmt
from aprfmt.adapters import place_pairs, read_adapter
from aprfmt.adapters.parameters import OTHER_ORDERS, ExpertOrder
from tests.adapters.golden import EXPERT_CASES, write_experts
from tests.cli.run import aprfmt as command
from tests.models import save_tiny


def weights(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "model.safetensors"))


def merge(base: Path, out: Path, adapter: Path, to: str = "safetensors") -> Any:
    done = command("convert", base, out, "--to", to, "--adapter", adapter)
    assert done.code == 0, done.err
    return done


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_merged_as_peft_merges(case: str, tmp_path: Path) -> None:
    base, adapter, expected = write_experts(tmp_path, case)
    merge(base, tmp_path / "out", adapter)
    before, found = weights(base), weights(tmp_path / "out")
    assert {name for name in found if not np.array_equal(found[name], before[name])} == set(
        expected
    )
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=np.abs(values).max() * 2**-21)


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_a_base_in_the_other_container_gets_the_same_weights(case: str, tmp_path: Path) -> None:
    """GGUF has the experts stacked, gate and up apart, and other names."""
    base, adapter, _ = write_experts(tmp_path, case)
    merge(base, tmp_path / "out", adapter)
    aprfmt.convert(base, tmp_path / "base.gguf")
    made = command("convert", tmp_path / "base.gguf", tmp_path / "o.gguf", "--adapter", adapter)
    if case == "biases_too":  # GGUF has them by another name, and apart
        assert made.code == 2 and "gate_up_proj_bias" in made.err, made.err
        return
    assert made.code == 0, made.err
    assert command("diff", tmp_path / "out", tmp_path / "o.gguf").code == 0


@pytest.mark.parametrize("case", EXPERT_CASES)
def test_what_peft_merged_is_once_and_the_base_not_at_all(case: str, tmp_path: Path) -> None:
    base, adapter, expected = write_experts(tmp_path, case)
    shutil.copytree(base, tmp_path / "b")
    save_file({**weights(base), **expected}, tmp_path / "b" / "model.safetensors")
    for copy, word, code in ((tmp_path / "b", "once", 0), (base, "not at all", 1)):
        done = command("diff", base, copy, "--adapter", adapter, "--json")
        assert (done.code, done.json["adapter"]["found"]) == (code, word)


@pytest.mark.parametrize("order", OTHER_ORDERS, ids=lambda one: one.says.replace(" ", "-"))
@pytest.mark.parametrize("case", ["apart", "other_module", "columns_first"])
def test_ranks_read_in_another_order_are_named_and_merged_anew(
    case: str, order: ExpertOrder, tmp_path: Path
) -> None:
    base, adapter, _ = write_experts(tmp_path, case)
    wrong = tmp_path / "wrong"
    shutil.copytree(base, wrong)
    held = weights(base)
    opened, found = read_adapter(adapter)
    with opened, aprfmt.open(base) as model:
        for name, pair in place_pairs(found, model, order).items():
            held[name] = (held[name] + pair.scale * (pair.b @ pair.a)).astype(np.float32)
    save_file(held, wrong / "model.safetensors")
    done = command("diff", base, wrong, "--adapter", adapter, "--json")
    rows = done.json["adapter"]["weights"]
    experts = [row for row in rows if "exps" in row["key"]]
    assert done.code == 1 and experts
    assert {row["found"] for row in experts} == {order.says}
    assert {row["found"] for row in rows if row not in experts} <= {"once"}
    shown = command("diff", base, wrong, "--adapter", adapter).out
    again = shown.rpartition("next: aprfmt ")[2].split("\n")[0].split()
    mended = command(*[str(tmp_path / "new") if word == "OUT" else word for word in again])
    assert mended.code == 0, mended.err
    assert command("diff", base, tmp_path / "new", "--adapter", adapter).code == 0


def test_any_other_change_has_no_order(tmp_path: Path) -> None:
    base, adapter, expected = write_experts(tmp_path, "apart")
    held = {**weights(base), **expected}
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    held[name] = np.roll(held[name], 1, axis=0)
    shutil.copytree(base, tmp_path / "b")
    save_file(held, tmp_path / "b" / "model.safetensors")
    done = command("diff", base, tmp_path / "b", "--adapter", adapter, "--json")
    found = {row["key"]: row for row in done.json["adapter"]["weights"]}
    wrong = found.pop("L0.ffn_down_exps.weight")
    assert done.code == 1 and wrong["found"] == "in some experts"
    assert "expert 1 otherwise" in wrong["says"] and " once" in wrong["says"]
    assert {row["found"] for row in found.values()} == {"once"}


def _config(adapter: Path, **said: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such module": ({"target_parameters": ["mlp.expert.gate_up_proj"]}, "names 0 of its"),
    "one name for two pairs": (
        {"target_parameters": ["mlp.experts.down_proj"]}, "names 1 of its parameters",
    ),
    "another rank": ({"rank_pattern": {"experts.*": 3}}, "its ranks are others"),
    "another base": (
        {"target_parameters": ["mlp.experts.a", "mlp.experts.b"]}, "has no parameter a, b",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_fits_no_parameter_is_refused(case: str, tmp_path: Path) -> None:
    base, adapter, _ = write_experts(tmp_path, "apart")
    said, words = REFUSED[case]
    _config(adapter, **said)
    done = command("convert", base, tmp_path / "o", "--to", "safetensors", "--adapter", adapter)
    assert done.code == 2 and words in done.err, done.err
    assert not (tmp_path / "o").exists()


def test_inspect_says_the_rank_of_one_expert_and_promises_the_merge_alone(tmp_path: Path) -> None:
    base, adapter, _ = write_experts(tmp_path, "apart")
    shown = command("inspect", adapter, "--json").json["summary"]
    assert "of rank 4," in shown["says"]
    assert "--adapter" in shown["next"] and "--base" not in shown["next"]
    done = command("convert", adapter, tmp_path / "a.gguf", "--base", base)
    assert done.code == 2 and "merge it" in done.err


def _stacked_base(folder: Path) -> tuple[Path, Path, dict[str, Any], int]:
    """Return (base with stacked experts, adapter of single experts, merged tensors, gate's rows).

    Ranks differ between the matrices, so that those of gate and up stand apart in one tensor.
    """
    base, adapter = folder / "base", folder / "adapter"
    save_tiny("qwen3_5_moe", base, "float32")
    held, rng, pairs = weights(base), np.random.default_rng(3), {}
    start = "model.layers.0.mlp.experts"
    experts = len([name for name in held if name.startswith(start) and "up_proj" in name])
    if f"{start}.0.up_proj.weight" in held:
        apart = {
            kind: np.stack([held.pop(f"{start}.{e}.{kind}_proj.weight") for e in range(experts)])
            for kind in ("gate", "up", "down")
        }
        held[f"{start}.gate_up_proj"] = np.concatenate([apart["gate"], apart["up"]], 1)
        held[f"{start}.down_proj"] = apart["down"]
        save_file(held, base / "model.safetensors", {"format": "pt"})
    joined, down = held[f"{start}.gate_up_proj"].copy(), held[f"{start}.down_proj"].copy()
    rows = joined.shape[1] // 2
    for kind, rank, target in (
        ("gate", 2, joined[:, :rows]),
        ("up", 3, joined[:, rows:]),
        ("down", 2, down),
    ):
        for at, expert in enumerate(target):
            a, b = (
                rng.standard_normal((rank, expert.shape[1])),
                rng.standard_normal((expert.shape[0], rank)),
            )
            a, b = a.astype(np.float32) / 4, b.astype(np.float32) / 4
            module = f"base_model.model.{start}.{at}.{kind}_proj"
            pairs[f"{module}.lora_A.weight"], pairs[f"{module}.lora_B.weight"] = a, b
            expert += (6 / rank) * (b @ a)
    adapter.mkdir()
    save_file(pairs, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 6,
        "rank_pattern": {"up_proj": 3},
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return base, adapter, {f"{start}.gate_up_proj": joined, f"{start}.down_proj": down}, rows


def test_pairs_of_single_experts_are_merged_into_stacked_ones(tmp_path: Path) -> None:
    base, adapter, expected, rows = _stacked_base(tmp_path)
    merge(base, tmp_path / "out", adapter)
    found = weights(tmp_path / "out")
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=np.abs(values).max() * 2**-20)
    assert command("diff", base, tmp_path / "out", "--adapter", adapter).code == 0
    # The change of up in the slot of gate, as an index that is always 0 puts it.
    name = next(name for name in expected if name.endswith("gate_up_proj"))
    moved = found[name] - weights(base)[name]
    found[name] = weights(base)[name]
    found[name][:, :rows] += moved[:, :rows] + moved[:, rows:]
    save_file(found, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    done = command("diff", base, tmp_path / "out", "--adapter", adapter, "--json")
    said = {row["key"]: row for row in done.json["adapter"]["weights"]}
    assert done.code == 1 and said["L0.ffn_down_exps.weight"]["found"] == "once"
    assert "L0.ffn_up_exps.weight" in said["L0.ffn_gate_exps.weight"]["says"]
    assert said["L0.ffn_up_exps.weight"]["found"] == "not at all"
    # Some experts without a pair: not a change of the others.
    pairs = load_file(adapter / "adapter_model.safetensors")
    few = {name: value for name, value in pairs.items() if ".experts.1." not in name}
    save_file(few, adapter / "adapter_model.safetensors")
    done = command("diff", base, tmp_path / "out", "--adapter", adapter)
    assert done.code == 2 and "experts.0" in done.err, done.err
