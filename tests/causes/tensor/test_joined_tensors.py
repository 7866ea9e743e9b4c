"""Files whose names no reader is known to ask for: renamed tensors, and several joined to one.

Names are those of diffusion models: the original checkpoints' and diffusers'.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from aprfmt.causes.tensor import joined_tensors
from tests.cli.run import aprfmt

Tensors = dict[str, np.ndarray]
RNG = np.random.default_rng(5)
JOINED = ("blocks.0.qkv", ("blocks.0.to_q", "blocks.0.to_k", "blocks.0.to_v"))


def drawn(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def both_files() -> tuple[Tensors, Tensors]:
    """Return the tensors of two files of one model under two sets of names."""
    a: Tensors = {}
    b: Tensors = {}
    for mine, theirs in (("img_in.weight", "x_embedder.weight"), ("out.bias", "proj_out.bias")):
        a[mine] = b[theirs] = drawn(24, 16) if mine.endswith("weight") else drawn(40)
    whole, parts = JOINED
    for end, shape in (("weight", (16, 16)), ("bias", (16,))):
        own = [drawn(*shape), drawn(*shape), drawn(2 * shape[0], *shape[1:])]
        a[f"{whole}.{end}"] = np.concatenate(own)
        b |= {f"{name}.{end}": one for name, one in zip(parts, own, strict=True)}
    return a, b


def compared(folder: Path, a: Tensors, b: Tensors, command: str = "diff") -> Any:
    for side, tensors in (("a", a), ("b", b)):
        save_file(tensors, folder / f"{side}.safetensors")
    return aprfmt(command, folder / "a.safetensors", folder / "b.safetensors", "--json").json


def causes(told: Any) -> Mapping[str, Any]:
    return {one["cause"]: one for one in told["causes"]}


@pytest.mark.parametrize("swapped", [False, True])
def test_other_names_and_joined_tensors_accuse_nobody(swapped: bool, tmp_path: Path) -> None:
    a, b = both_files()
    told = compared(tmp_path, *((b, a) if swapped else (a, b)))
    assert told["exit"] == 1 and not told["equal"]  # readers of one do not find the other's names
    found = causes(told)
    assert set(found) == {"other_names", "joined_tensors"}
    assert {one["level"] for one in found.values()} == {"confirmed"}
    side = "BA" if swapped else "AB"
    assert (
        f"{side[0]} stores as one tensor what {side[1]} stores as several"
        in (found["joined_tensors"]["says"])
    )
    assert len(found["joined_tensors"]["where"]) == 2 * (1 + 3)
    assert len(found["other_names"]["where"]) == 4
    assert not [command for command in told["next"] if " convert " in command]


def with_a_value_moved(a: Tensors, b: Tensors) -> None:
    b["blocks.0.to_k.weight"] = b["blocks.0.to_k.weight"].copy()
    b["blocks.0.to_k.weight"][-1, -1] += 1


def without_a_part(a: Tensors, b: Tensors) -> None:
    del b["blocks.0.to_v.weight"]


def with_rows_left(a: Tensors, b: Tensors) -> None:
    a["blocks.0.qkv.weight"] = np.concatenate([a["blocks.0.qkv.weight"], drawn(1, 16)])


def in_another_order(a: Tensors, b: Tensors) -> None:
    q, k = (b[f"blocks.0.to_{one}.weight"] for one in "qk")
    b["blocks.0.to_q.weight"], b["blocks.0.to_k.weight"] = k, q


@pytest.mark.parametrize("change", [with_a_value_moved, without_a_part, with_rows_left])
def test_tensors_that_are_not_all_rows_are_not_joined(
    change: Callable[[Tensors, Tensors], None], tmp_path: Path
) -> None:
    a, b = both_files()
    change(a, b)
    found = causes(compared(tmp_path, a, b))
    assert set(found["joined_tensors"]["where"]) == {
        f"{name}.bias" for name in (JOINED[0], *JOINED[1])
    }


def test_the_order_of_the_parts_is_that_of_the_rows(tmp_path: Path) -> None:
    a, b = both_files()
    in_another_order(a, b)
    told = compared(tmp_path, a, b)
    row = next(row for row in told["tensors"] if row["key"] == "blocks.0.qkv.weight")
    assert row["explanation"]["where"] == [
        "blocks.0.qkv.weight",
        "blocks.0.to_k.weight",
        "blocks.0.to_q.weight",
        "blocks.0.to_v.weight",
    ]


def test_too_many_parts_are_no_joined_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = both_files()
    monkeypatch.setattr(joined_tensors, "MOST", 2)
    assert "joined_tensors" not in causes(compared(tmp_path, a, b))


def test_a_name_that_readers_ask_for_is_swapped(tmp_path: Path, demo_model: Path) -> None:
    """Of a model that is known, a tensor under another name is a fault."""
    from tests.conversion.folders import tensors_of, write_mixed

    rows = dict(tensors_of(demo_model))
    first, second = (f"model.layers.1.mlp.{one}_proj.weight" for one in ("gate", "up"))
    rows[first], rows[second] = rows[second], rows[first]
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / "config.json").write_text((demo_model / "config.json").read_text())
    write_mixed(folder / "model.safetensors", rows)
    told = aprfmt("diff", demo_model, folder, "--json").json
    assert "swapped_tensors" in causes(told) and "other_names" not in causes(told)
