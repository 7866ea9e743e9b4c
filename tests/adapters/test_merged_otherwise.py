"""Merges that leave out a part of the adapter, and names that have the adapter's own in them.

The merges are made here as PEFT's tuners/lora (DoRA: layer.py and dora.py) make them.

Seen red: "another base than A", "a tensor that it does not change", "no factors of a LoRA".
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.adapters.test_parts import PREFIX, base_folder
from tests.cli.run import Done, aprfmt

Values = torch.Tensor
MODULES = ["q_proj", "v_proj", "down_proj"]


def factors(base: Path, *, dora: bool = False) -> dict[str, Values]:
    """Return an adapter's tensors by PEFT's names, as after training."""
    generator = torch.Generator().manual_seed(2)
    held = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in MODULES:
            continue
        rows, columns = weight.shape
        at = f"{PREFIX}{module}.lora_"
        held[f"{at}A.weight"] = torch.randn((4, columns), generator=generator) * 0.1
        held[f"{at}B.weight"] = torch.randn((rows, 4), generator=generator) * 0.1
        if dora:
            spread = 1 + 0.2 * torch.rand(rows, generator=generator)
            held[f"{at}magnitude_vector"] = weight.norm(dim=1) * spread
    return held


def write_adapter(folder: Path, held: dict[str, Values], **config: Any) -> Path:
    folder.mkdir()
    save_file(held, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": MODULES} | config
    (folder / "adapter_config.json").write_text(json.dumps(said))
    return folder


def write_merged(folder: Path, base: Path, rows: dict[str, Values]) -> Path:
    folder.mkdir()
    save_file(rows, folder / "model.safetensors")
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder


def lengths(values: Values) -> Values:
    found: Values = torch.linalg.vector_norm(values, dim=1, keepdim=True)
    return found


def diff_of_dora(
    folder: Path, merge: Callable[[Values, Values, Values], Values], dtype: torch.dtype
) -> Done:
    """Compare a base and ``merge(weight, B @ A times its scale, magnitudes [rows, 1])`` of it."""
    base = base_folder(folder / "a")
    held = factors(base, dora=True)
    adapter = write_adapter(folder / "adapter", held, use_dora=True)
    rows = load_file(base / "model.safetensors")
    for name, weight in rows.items():
        at = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        if f"{at}A.weight" in held:
            change = 2 * held[f"{at}B.weight"] @ held[f"{at}A.weight"]
            rows[name] = merge(weight, change, held[f"{at}magnitude_vector"][:, None]).to(dtype)
    merged = write_merged(folder / "b", base, rows)
    return aprfmt("diff", base, merged, "--adapter", adapter)


# (base, change, magnitudes) -> what a merge stores, and what is said of it
MADE: dict[str, tuple[Callable[[Values, Values, Values], Values], str]] = {
    "right": (lambda w, d, m: m * (w + d) / lengths(w + d), ""),
    "magnitudes": (lambda w, d, m: w + d, "DoRA's magnitudes are ignored"),
    "factors": (lambda w, d, m: m * w / lengths(w), "B @ A is ignored"),
    "lengths": (lambda w, d, m: m * (w + d), "not divided by their lengths"),
    "lengths-of-the-base": (lambda w, d, m: m * (w + d) / lengths(w), "the lengths of the base's"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MADE)
def test_what_became_of_magnitudes_is_said(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, says = MADE[case]
    done = diff_of_dora(tmp_path, make, dtype)
    assert done.code == int(bool(says)), done.out
    assert says in done.out and "another base" not in done.out


def columns(values: Values) -> Values:
    found: Values = torch.linalg.vector_norm(values, dim=0, keepdim=True)
    return found


# (sum, magnitudes [rows, 1]) -> what a merge stores of a square weight, and what is said of it
AXES: dict[str, tuple[Callable[[Values, Values], Values], str]] = {
    "right": (lambda v, m: m * v / lengths(v), ""),
    "columns": (lambda v, m: m.T * v / columns(v), "scale columns, which are divided by"),
    "columns divided": (lambda v, m: m * v / columns(v), "and columns are divided by"),
    "columns scaled": (lambda v, m: m.T * v / lengths(v), "and rows are divided by"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", AXES)
def test_the_axis_of_magnitudes_is_said(case: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Only a square weight has both; the others are merged rightly. Seen red: "otherwise"."""
    make, says = AXES[case]

    def merge(weight: Values, change: Values, magnitudes: Values) -> Values:
        square = weight.shape[0] == weight.shape[1]
        done = make if square else AXES["right"][0]
        return done(weight + change, magnitudes)

    answer = diff_of_dora(tmp_path, merge, dtype)
    assert answer.code == int(bool(says)), answer.out
    assert says in answer.out
    said = [line for line in answer.out.splitlines() if "DoRA" in line]
    assert all("attn_q" in line for line in said) and len(said) == 2 * bool(says), answer.out


@pytest.mark.parametrize("way", ["B @ A", "A @ B", "transposed", "twice"])
def test_exchanged_factors_are_said_of_a_merge(way: str, tmp_path: Path) -> None:
    """Square factors fit both ways. Seen red: "once and another change"."""
    base = base_folder(tmp_path / "a")
    rows = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    held = {}
    for name, weight in rows.items():
        if "q_proj" in name:
            at = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
            a, b = (torch.randn((64, 64), generator=generator) * 0.05 for _ in range(2))
            held[f"{at}A.weight"], held[f"{at}B.weight"] = a, b
            change = {"B @ A": b @ a, "A @ B": a @ b, "transposed": (b @ a).T, "twice": 2 * b @ a}
            rows[name] = weight + 0.125 * change[way]
    adapter = write_adapter(tmp_path / "adapter", held, r=64, target_modules=["q_proj"])
    merged = write_merged(tmp_path / "b", base, rows)
    answer = aprfmt("diff", base, merged, "--adapter", adapter)
    word = {"B @ A": "once", "A @ B": "with exchanged factors"}.get(way, way)
    assert answer.code == int(way != "B @ A") and f": {word} (2 weights)" in answer.out
    assert ("A is taken for B" in answer.out) == (way == "A @ B")


@pytest.mark.parametrize("tied", [False, True])
def test_whole_tensors_that_a_merge_left_out_are_said(tied: bool, tmp_path: Path) -> None:
    base = base_folder(tmp_path / "a", tied=tied)
    held = factors(base)
    rows = load_file(base / "model.safetensors")
    table = rows["model.embed_tokens.weight"]
    own = {f"{PREFIX}lm_head.weight": table + 0.05 * torch.randn(table.shape)}
    adapter = write_adapter(tmp_path / "adapter", held | own, modules_to_save=["lm_head"])
    for name in rows:
        at = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        if f"{at}A.weight" in held:
            rows[name] = rows[name] + 2 * held[f"{at}B.weight"] @ held[f"{at}A.weight"]
    merged = write_merged(tmp_path / "b", base, rows)
    done = aprfmt("diff", base, merged, "--adapter", adapter)
    assert done.code == 1 and "that it does not change" not in done.out
    assert "but not its own output.weight" in done.out
    holds = "B has none: its head is the embedding" if tied else "B holds the base's"
    assert f"output.weight: the adapter has its own, and {holds}" in done.out
    told = aprfmt("diff", base, merged, "--adapter", adapter, "--json").json["adapter"]
    assert (told["own"], told["others"], told["found"]) == (["output.weight"], [], "once")


@pytest.mark.parametrize("name", ["default", "lora", "my_adapter"])
def test_names_with_the_adapter_s_own_are_read_and_said(name: str, tmp_path: Path) -> None:
    """As in a state_dict of PEFT's model, which trainers save without save_pretrained."""
    base = base_folder(tmp_path / "a")
    held = factors(base)
    head = load_file(base / "model.safetensors")["lm_head.weight"] + 0.1
    plain = held | {f"{PREFIX}lm_head.weight": head}
    saved = write_adapter(tmp_path / "saved", plain, modules_to_save=["lm_head"])
    named = {key.replace(".weight", f".{name}.weight"): value for key, value in held.items()}
    named[f"{PREFIX}lm_head.modules_to_save.{name}.weight"] = head
    adapter = write_adapter(tmp_path / "adapter", named, modules_to_save=["lm_head"])
    shown = aprfmt("inspect", adapter).out
    assert f"its names have the adapter's own, {name!r}, in them" in shown
    assert aprfmt("validate", adapter).code == 1
    assert "the adapter's own" not in aprfmt("inspect", saved).out
    outs = [tmp_path / "one", tmp_path / "other"]
    for each, out in zip((saved, adapter), outs, strict=True):
        done = aprfmt("convert", base, out, "--adapter", each, "--to", "safetensors")
        assert done.code == 0, done.err
    one, other = (load_file(out / "model.safetensors") for out in outs)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert torch.equal(one["lm_head.weight"], head)


OFF: dict[str, Any] = {"layer_replication": None, "use_qalora": False, "peft_version": "1"}
# What is planted beside a rightly merged adapter -> the kind of item that is not compared
PLANTED: dict[str, tuple[Callable[[dict[str, Values], dict[str, Any]], object], str]] = {
    "nothing": (lambda held, config: None, ""),
    "keys that are not set": (lambda held, config: config.update(OFF), ""),
    "key": (lambda held, config: config.update(odd=1), "config key"),
    "layers repeated": (
        lambda held, config: config.update(layer_replication=[[0, 1]]),
        "config key",
    ),
    "tensor": (lambda held, config: held.update({"odd.weight": torch.ones(3)}), "adapter tensor"),
    "tensor of the base's kind": (
        lambda held, config: held.update({f"{PREFIX}model.odd.weight": torch.ones(3)}),
        "adapter tensor",
    ),
    "tensor like a factor": (
        lambda held, config: held.update({f"{PREFIX}model.odd.lora_C.weight": torch.ones(3)}),
        "adapter tensor",
    ),
    "tensor, all other names elsewhere": (
        lambda held, config: _rename(held, {"odd.weight": torch.ones(3)}),
        "adapter tensor",
    ),
}


def _rename(held: dict[str, Values], more: dict[str, Values]) -> None:
    moved = {name.replace("model.model.", "model.net.", 1): one for name, one in held.items()}
    held.clear()
    held.update(moved | more)


@pytest.mark.parametrize("what", [*PLANTED, "file"])
def test_what_no_merge_reads_of_an_adapter_leaves_the_answer_open(
    what: str, tmp_path: Path
) -> None:
    """Seen red: merged, exit 0, with an unknown key or file; an error with an unknown tensor."""
    change, kind = PLANTED.get(what, (lambda held, config: None, "file"))
    base = base_folder(tmp_path / "a")
    rows = load_file(base / "model.safetensors")
    held, config = factors(base), dict[str, Any]()
    for name in rows:
        at = f"{PREFIX}{name.removesuffix('.weight')}.lora_"
        if f"{at}A.weight" in held:
            rows[name] = rows[name] + 2 * held[f"{at}B.weight"] @ held[f"{at}A.weight"]
    merged = write_merged(tmp_path / "b", base, rows)
    change(held, config)
    adapter = write_adapter(tmp_path / "adapter", held, **config)
    if what == "file":
        (adapter / "odd.notes").write_text("x")
    args = ("diff", base, merged, "--adapter", adapter)
    done = aprfmt(*args, "--json")
    assert (done.code, done.json["adapter"]["found"]) == (2 if kind else 0, "once"), done.err
    left = done.json["pronounced"]["not_compared"]
    assert [(row["kind"], row["state"]) for row in left] == [(kind, "unreadable")] * bool(kind)
    if kind:
        assert "odd" in left[0]["name"] or what == "layers repeated"
        assert left[0]["name"] in aprfmt(*args).out
        assert aprfmt(*args, "--accept", f"unread:{left[0]['name']}").code == 0
