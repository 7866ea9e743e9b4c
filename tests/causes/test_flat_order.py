"""Tensors cut from one flat buffer in another order than it was filled, as ZeRO's.

The buffer is torch's concatenation of the tensors, cut by the names.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aprfmt.compare import diff
from aprfmt.diagnosis import diagnose
from tests.conversion.folders import llama_folder, tensors_of, write_mixed

torch: Any = pytest.importorskip("torch", reason="NOT-RUN: torch is not installed")

Names = Sequence[str]
TYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}


def source(folder: Path, dtype: str = "F32") -> Path:
    """Return a model of two layers whose numbers all differ."""
    llama_folder(folder, dtype, hidden=64, layers=2, ffn=96, heads=4, kv_heads=2)
    rng = np.random.default_rng(5)
    rows = {
        name: (kind, shape, rng.normal(0, 0.05, shape).astype(TYPES[kind]).tobytes())
        for name, (kind, shape, _) in tensors_of(folder).items()
    }
    write_mixed(folder / "model.safetensors", rows)
    return folder


def cut(a: Path, b: Path, order: Callable[[Names], Names], *, late: int = 0) -> Path:
    """Write a copy whose tensors are cut by their names from a buffer filled in an order.

    `late` values stand before the first, as padding that is not taken away.
    """
    b.mkdir()
    (b / "config.json").write_text((a / "config.json").read_text())
    rows = tensors_of(a)
    names = list(rows)
    held = {
        name: torch.from_numpy(np.frombuffer(raw, TYPES[kind]).astype(np.float32))
        for name, (kind, _, raw) in rows.items()
    }
    flat = torch.cat([torch.zeros(late), *(held[name] for name in order(names))])
    made: dict[str, Any] = {}
    at = 0
    for name in names:
        count = held[name].numel()
        part = flat[at : at + count].numpy().astype(np.float32)
        made[name] = ("F32", rows[name][1], part.tobytes())
        at += count
    write_mixed(b / "model.safetensors", made)
    return b


def in_turn(names: Names) -> Names:
    """Every second tensor first, as ZeRO's round robin of two ranks."""
    return [*names[0::2], *names[1::2]]


ORDERS: dict[str, tuple[Callable[[Names], Names], int]] = {
    "in turn": (in_turn, 0),
    "in reverse": (lambda names: names[::-1], 0),
    "by size": (lambda names: sorted(names, key=lambda name: (len(name), name[::-1])), 0),
    "padding kept": (lambda names: names, 40),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ORDERS)
def test_one_order_of_a_buffer_is_the_cause(name: str, dtype: str, tmp_path: Path) -> None:
    """Seen red: seven findings, two names exchanged, "fresh numbers of an initialisation"."""
    order, late = ORDERS[name]
    a = source(tmp_path / "a", dtype)
    found = diagnose(str(a), str(cut(a, tmp_path / "b", order, late=late)))
    bugs = [row for row in found.findings if row.verdict == "bug"]
    assert [row.cause for row in bugs] == ["flat_order"], found.sentence
    assert bugs[0].certainty == ("explained" if late else "confirmed"), bugs[0]
    assert "one flat buffer" in found.sentence
    assert ("each once" in found.sentence) == (not late)


@pytest.mark.parametrize(("name", "told"), [("self_attn.k_proj", True), ("mlp.gate_proj", False)])
def test_nearly_all_values_have_to_be_found(name: str, told: bool, tmp_path: Path) -> None:
    """Of two tensors the values are others: less than a tenth of all, or more."""
    a = source(tmp_path / "a")
    b = cut(a, tmp_path / "b", in_turn)
    rows = tensors_of(b)
    rng = np.random.default_rng(8)
    others = [one for one in rows if name in one]
    for one in others:
        kind, shape, _ = rows[one]
        rows[one] = (kind, shape, rng.normal(0, 0.05, shape).astype(np.float32).tobytes())
    write_mixed(b / "model.safetensors", rows)
    sizes = {one: len(raw) for one, (_, _, raw) in rows.items()}
    assert (sum(sizes[one] for one in others) < 0.1 * sum(sizes.values())) is told
    found = {row.cause for row in diagnose(str(a), str(b)).findings}
    assert ("flat_order" in found) is told, found


@pytest.mark.parametrize("what", ["tensors exchanged", "others", "rows exchanged"])
def test_other_faults_are_no_buffer(what: str, tmp_path: Path) -> None:
    a = source(tmp_path / "a")
    rows = tensors_of(a)
    names = [name for name in rows if "mlp" in name or "q_proj" in name or "o_proj" in name]
    rng = np.random.default_rng(6)
    for name in names:
        kind, shape, raw = rows[name]
        values = np.frombuffer(raw, np.float32).reshape(shape)
        if what == "others":
            rows[name] = (kind, shape, rng.normal(0, 0.05, shape).astype(np.float32).tobytes())
        elif what == "rows exchanged":
            rows[name] = (kind, shape, np.roll(values, 8, 0).tobytes())
        elif "layers.0" in name:
            other = name.replace("layers.0", "layers.1")
            rows[name], rows[other] = rows[other], rows[name]
    b = tmp_path / "b"
    b.mkdir()
    (b / "config.json").write_text((a / "config.json").read_text())
    write_mixed(b / "model.safetensors", rows)
    assert not [row for row in diff(a, b).tensors if row.cause == "flat_order"]


@pytest.mark.parametrize("both", [True, False])
def test_names_are_exchanged_only_where_both_are(both: bool, tmp_path: Path) -> None:
    """Seen red: `swapped_tensors`, confirmed, twice, where one had the values of the other."""
    a = source(tmp_path / "a")
    rows = tensors_of(a)
    first, second = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    kind, shape, _ = rows[first]
    other = np.random.default_rng(7).normal(0, 0.05, shape).astype(np.float32)
    old = rows[first]
    rows[first] = rows[second]
    rows[second] = old if both else (kind, shape, other.tobytes())
    b = tmp_path / "b"
    b.mkdir()
    (b / "config.json").write_text((a / "config.json").read_text())
    write_mixed(b / "model.safetensors", rows)
    found = {row.key: row.explanation for row in diff(a, b).tensors if row.verdict == "DIFFERENT"}
    gate, up = found["L0.ffn_gate.weight"], found["L0.ffn_up.weight"]
    assert gate is not None and gate.certainty == "confirmed"
    assert gate.cause == ("swapped_tensors" if both else "copied_tensor")
    assert up is None or (up.cause == "swapped_tensors") == both
