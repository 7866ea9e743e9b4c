"""Merges in float32 and in float64 part in a few values of each tensor: rounding, no damage.

Seen red: "bit_rot" of 14 tensors, exit 1, "damage or an edit".
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aprfmt
from aprfmt.diagnosis import diagnose
from tests.cli.run import aprfmt as command
from tests.diagnosis import files
from tests.diagnosis.faults import DEMO
from tests.models import save_tiny

torch = pytest.importorskip("torch")


def values(row: tuple[str, Any, bytes]) -> Any:
    """Return a stored BF16 matrix as a float32 tensor."""
    kind, shape, raw = row
    assert kind == "BF16"
    bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
    return torch.tensor(bits.view(np.float32).reshape(shape))


def stored(x: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return a float32 tensor rounded to BF16, as it is stored."""
    bits = x.to(torch.bfloat16).view(torch.int16).numpy()
    return "BF16", tuple(x.shape), bits.tobytes()


def merged(wide: Any) -> Callable[[files.Rows], None]:
    """Return an edit that adds a product of rank 4 to every projection, in the dtype `wide`."""

    def edit(rows: files.Rows) -> None:
        for number, name in enumerate(sorted(rows)):
            if "_proj.weight" in name:
                x, rng = values(rows[name]), np.random.default_rng(number)
                b, a = (
                    torch.tensor(0.02 * rng.standard_normal(size), dtype=torch.float32).to(wide)
                    for size in ((x.shape[0], 4), (4, x.shape[1]))
                )
                rows[name] = stored((x.to(wide) + b @ a).to(wide))

    return edit


@pytest.fixture(scope="module")
def pair() -> tuple[Path, Path]:
    """Return the demo model merged in float32, and in float64."""
    return (
        files.copy(DEMO, "merged-32", tensors=merged(torch.float32)),
        files.copy(DEMO, "merged-64", tensors=merged(torch.float64)),
    )


def test_two_arithmetics_of_one_merge_are_precision(pair: tuple[Path, Path]) -> None:
    report = aprfmt.diff(*pair)
    assert report.counts["DIFFERENT"] > 4
    assert {finding.cause for finding in report.findings} == {"rounding"}
    found = diagnose(*map(str, pair))
    assert (found.verdict, found.exit_code) == ("precision", 0), found.sentence


def test_a_flipped_bit_beside_them_is_damage_still(pair: tuple[Path, Path]) -> None:
    """A value that is far from what it was is beyond the rounding of its row."""
    name = "model.layers.1.mlp.down_proj.weight"

    def flip(rows: files.Rows) -> None:
        x = values(rows[name])
        x[3, 5] = 8 * x.abs().max()
        rows[name] = stored(x)

    broken = files.copy(pair[1], "merged-64-broken", tensors=flip)
    found = diagnose(str(pair[0]), str(broken))
    assert (found.verdict, found.exit_code) == ("bug", 1), found.sentence
    assert any("L1.ffn_down" in place for row in found.findings for place in row.where)


def test_a_last_bit_next_to_damage_is_no_part_of_it() -> None:
    """Below one unit of the last place nothing is a bug, and what is far stays damage."""
    near = "model.layers.0.mlp.up_proj.weight"
    far = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(4)]

    def flip(rows: files.Rows) -> None:
        for name in far:
            x = values(rows[name])
            x[3, 5] = 8 * x.abs().max()
            rows[name] = stored(x)
        kind, shape, raw = rows[near]
        bits = np.frombuffer(raw, np.uint16).copy()
        bits[7] ^= 1
        rows[near] = kind, shape, bits.tobytes()

    report = aprfmt.diff(DEMO, files.copy(DEMO, "five-flips", tensors=flip))
    assert report.counts["DIFFERENT"] == 5
    assert {finding.cause for finding in report.findings} == {"bit_rot", "rounding"}


@pytest.mark.parametrize("tensors", [1, 2])
def test_last_bits_of_few_tensors_accuse_no_merge(tensors: int) -> None:
    """PEFT's merge in half precision and ours part so. Seen red: "bit_rot (explained)", a bug."""

    def flip(rows: files.Rows) -> None:
        for layer in range(tensors):
            name = f"model.layers.{layer}.mlp.up_proj.weight"
            kind, shape, raw = rows[name]
            bits = np.frombuffer(raw, np.uint16).copy()
            bits[7] ^= 1
            rows[name] = kind, shape, bits.tobytes()

    report = aprfmt.diff(DEMO, files.copy(DEMO, f"last-bits-{tensors}", tensors=flip))
    assert report.counts["DIFFERENT"] == tensors
    assert [finding.cause for finding in report.findings] == ["rounding"]


def test_a_norm_that_lost_bits_when_one_was_added_is_rounding(tmp_path: Path) -> None:
    """Gemma's GGUF stores w + 1: of 2.7e-6 float32 keeps few bits. Seen red: "bit_rot", exit 1."""
    folder = tmp_path / "gemma"
    save_tiny("gemma2", folder, "bfloat16")

    def shrink(rows: files.Rows) -> None:
        name = "model.layers.1.post_feedforward_layernorm.weight"
        x = values(rows[name])
        x[3] = 2.6673078536987305e-06
        rows[name] = stored(x)

    good = files.copy(folder, "gemma-small", tensors=shrink)
    aprfmt.convert(good, tmp_path / "own.gguf")
    with aprfmt.open(tmp_path / "own.gguf") as model:
        ours = [f"--remove={key}" for key in model.metadata if "aprfmt" in key]
    done = command("set", tmp_path / "own.gguf", *ours, "-o", tmp_path / "b.gguf")
    assert ours and done.code == 0, done.err  # as another writer's, which says nothing of BF16
    found = diagnose(str(good), str(tmp_path / "b.gguf"))
    assert (found.verdict, found.exit_code) == ("precision", 0), found.sentence
    assert [row.cause for row in found.findings] == ["rounding"]
