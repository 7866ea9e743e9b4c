"""A model as an engine joins its matrices is the same model, and what is lost there is not guessed.

Seen red: `gate_up_proj` "of no role" and the matrices in it a confirmed loss.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aprfmt.arch import ARCHS
from aprfmt.arch.tensor_rows import FUSED
from tests.cli.run import aprfmt
from tests.diagnosis import files
from tests.diagnosis.engines import tiny_folder

JOINED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
MODELS = ("llama", "llama-bias", "qwen2", "qwen3", "gemma2", "seed_oss", "ministral")


def join(rows: files.Rows, *, turned: str = "", spelled: str = "{}") -> int:
    """Join the matrices and biases of every layer in place; return how many are joined.

    The parts of the module `turned` are joined in the other order. `spelled` is the new names'
    form.
    """
    made = 0
    for module, parts in JOINED.items():
        for name in [name for name in rows if name.rpartition(".")[0].endswith(parts[0])]:
            stem, suffix = name.rpartition(".")[0].removesuffix(parts[0]), name.rpartition(".")[2]
            each = [rows.pop(f"{stem}{part}.{suffix}") for part in parts]
            if module == turned:
                each.reverse()
            shape = (sum(row[1][0] for row in each), *each[0][1][1:])
            rows[spelled.format(f"{stem}{module}.{suffix}")] = (
                each[0][0], shape, b"".join(row[2] for row in each),
            )  # fmt: skip
            made += len(each)
    return made


def folder(arch: str, name: str, **options: Any) -> tuple[Path, int]:
    """Return a tiny model's folder with joined matrices, and how many are in one."""
    counts: list[int] = []
    made = files.copy(
        tiny_folder(arch), name, tensors=lambda rows: counts.append(join(rows, **options))
    )
    return made, counts[0]


@pytest.mark.parametrize("arch", MODELS)
def test_joined_matrices_are_the_same_model(arch: str) -> None:
    other, count = folder(arch, f"fused-{arch}")
    assert count
    for command in ("diff", "diagnose"):
        done = aprfmt(command, tiny_folder(arch), other, "--json")
        assert (done.code, done.json.get("causes", [])) == (0, []), command


@pytest.mark.parametrize("turned", JOINED)
def test_parts_in_the_other_order_are_a_bug(turned: str) -> None:
    """Of as many rows each, so that the shapes fit."""
    other, _ = folder("llama-square", f"fused-turned-{turned}", turned=turned)
    done = aprfmt("diagnose", tiny_folder("llama-square"), other, "--json")
    assert done.code == 1 and done.json["verdict"] == "bug"


def test_what_may_be_in_tensors_of_no_role_is_not_confirmed_to_miss() -> None:
    other, _ = folder("llama", "fused-otherwise", spelled="{}.joined")
    done = aprfmt("diagnose", tiny_folder("llama"), other, "--json")
    (cause,) = [one for one in done.json["causes"] if one["cause"] == "missing_tensors"]
    assert done.code == 1 and cause["level"] == "located"
    assert "their values may be in tensors of no role: model.layers.0." in cause["says"]


@pytest.mark.parametrize("size", [3, 4096])
def test_what_is_too_small_to_hold_them_holds_them_not(size: int) -> None:
    def lose(rows: files.Rows) -> None:
        del rows["model.layers.1.mlp.up_proj.weight"]
        rows["note"] = ("F32", (size,), np.ones(size, np.float32).tobytes())

    other = files.copy(tiny_folder("llama"), f"fused-lost-{size}", tensors=lose)
    done = aprfmt("diagnose", tiny_folder("llama"), other, "--json")
    (cause,) = [one for one in done.json["causes"] if one["cause"] == "missing_tensors"]
    assert cause["level"] == ("confirmed" if size == 3 else "located")


def test_the_architectures_here_read_them() -> None:
    for name in MODELS:
        arch = ARCHS[name.partition("-")[0]]
        assert set(FUSED) <= set(arch.bindings["hf"]), name
